"""Reading a page in a real browser: tables, keyboard, paper, a page without scripts.

The browser is the machine's Chromium or Chrome; without one these tests are skipped.
"""

import csv
import io
import re
from pathlib import Path

import browser_pages as made
import numpy as np
import pytest
from browsing import DESKTOP, made_comparison, needs_browser
from plotly.offline import get_plotlyjs
from test_ablation_views import compared

pytestmark = needs_browser


# Tables


def test_a_column_sorts_by_its_full_numbers_with_missing_ones_last(visit):
    one = visit("explorer")
    table = one.page.locator("table.data").first
    head = table.locator("th", has_text="induction")
    first = table.locator("tbody th")
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert first.first.inner_text() == "L0H0"
    assert first.last.inner_text() == "L0H1"
    head.locator("button").press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert first.first.inner_text() == "L5H3"
    assert first.last.inner_text() == "L0H1"
    table.locator("th", has_text="head").locator("button").click()
    assert head.get_attribute("aria-sort") is None
    assert first.nth(1).inner_text() == "L0H1"


def test_a_table_of_facts_can_be_neither_sorted_nor_downloaded(explorer):
    one = explorer
    facts = one.page.locator(".facts")
    assert facts.count() == 1
    assert facts.locator("button").count() == 0
    assert one.page.locator(".facts + .tools").count() == 0


def test_a_downloaded_table_has_its_numbers_in_full(explorer):
    one = explorer
    with one.page.expect_download() as download:
        one.page.locator("button", has_text="Download CSV").first.click()
    assert download.value.suggested_filename == "all-heads-strongest-first.csv"
    rows = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text("utf-8"))))
    table = made.score_table()
    assert list(rows[0]) == ["head", "token", "induction", "n"]
    assert [row["head"] for row in rows] == list(table["head"])
    assert [row["token"] for row in rows] == list(table["token"])
    assert [row["n"] for row in rows] == [str(n) for n in table["n"]]
    given = [float(row["induction"]) if row["induction"] else None for row in rows]
    assert given == [None if np.isnan(v) else v for v in table["induction"]]


def test_a_long_table_can_be_filtered_and_one_written_by_hand_sorted(kept):
    one = kept("table")
    one.page.fill(".tools input", "l3h")
    assert one.page.locator("table").first.locator("tbody tr:visible").count() == 4
    assert "4 of 40 rows" in one.text(".tools")
    # A table written by hand sorts by its cells' first numbers; it has no others to download.
    by_hand = one.page.locator("table").nth(1)
    by_hand.locator("th", has_text="step").locator("button").click()
    assert by_hand.locator("tbody th").all_inner_texts() == ["a", "b", "d", "c"]
    assert one.page.locator("button", has_text="Download CSV").count() == 1


def test_a_downloaded_table_of_an_ablation_is_the_table_of_its_file(kept):
    one = kept("ablation")
    one.page.locator("summary", has_text="every column").click()
    rows = one.saved(one.page.locator("button[aria-label^='Download CSV: Every column']"))
    given = compared().table
    given["head"] = [f"L{a}H{b}" for a, b in zip(given["layer"], given["head"], strict=True)]
    for row in rows:
        (own,) = given[given["head"] == row["head"]].to_dict("records")
        assert row == {column: str(own[column]) for column in row}
    assert len(rows) == len(given)
    # The strongest, whose cells have their error below, give the same numbers.
    strongest = one.saved(one.page.locator("button[aria-label^='Download CSV: All 4 heads']"))
    by_head = dict(zip(given["head"], given["mean"], strict=True))
    assert {row["head"]: float(row["mean"]) for row in strongest} == by_head


def test_a_downloaded_table_of_a_comparison_has_its_quantiles_in_full(kept):
    one = kept("comparison")
    rows = one.saved(one.page.locator("button[aria-label^='Download CSV: How many heads']"))
    expected = made_comparison().distributions
    assert [float(row["median"]) for row in rows] == list(expected["median"])
    one.page.locator("summary", has_text="All 8 differences").click()
    differences = one.saved(one.page.locator("button[aria-label^='Download CSV: custom (B)']"))
    assert len(differences) == len(made_comparison().differences)


def test_a_column_of_words_among_numbers_sorts_as_words(kept):
    one = kept("ablation")
    table = one.page.locator("table.data").first
    table.locator("th", has_text="ranks disagree").locator("button").click()
    column = table.locator("tbody td:nth-child(5)")
    assert column.all_inner_texts() == ["no", "no", "no", "yes"]


def test_a_long_fact_is_folded(kept):
    one = kept("table")
    fold = one.page.locator(".facts details")
    assert one.text(".facts summary").startswith("0, 1, 2, 3")
    closed = fold.bounding_box()["height"]
    fold.locator("summary").click()
    assert fold.bounding_box()["height"] > closed + 40
    assert one.text(".facts details").endswith("509, 510, 511")


def test_a_figure_can_be_saved_as_a_picture(explorer):
    one = explorer
    with one.page.expect_download() as download:
        one.page.locator("figure button", has_text="Save as PNG").first.click()
    assert download.value.suggested_filename == "induction-of-smollm2-tiny.png"
    assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")


# The keyboard


def test_tab_reaches_every_part_in_the_order_of_the_page(visit):
    one = visit("explorer")
    one.page.select_option("#ex-subject", label="two-layer, seed 0")
    one.wait_for_pattern(made.pattern(57, len(made.TOKENS)))
    one.page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    for selector in (
        ".skip",
        "nav a",
        "#ex-subject",
        "#ex-score",
        "#ex-head",
        "#ex-previous",
        "#ex-next",
        "#ex-step",
        "#explorer-map",
        "#ex-top button",
        "#ex-matrix",
        "#ex-as-lines",
        "#explorer-pattern",
        "#ex-thumbs button",
        "#fig-1",
        ".sort",
        "#fig-2",
    ):
        presses = one.tab_to(selector)
        assert presses is not None, f"{selector} is not reached"


def test_the_keyboard_alone_chooses_a_head_and_reads_its_pattern(visit):
    one = visit("explorer")
    press = one.page.keyboard.press
    one.tab_to("#explorer-map")
    assert one.page.locator("#explorer-map .cursor").is_visible()
    # From the chosen head L5H1: up twice, left once.
    for key in ("ArrowUp", "ArrowUp", "ArrowLeft"):
        press(key)
    one.page.wait_for_function("document.getElementById('said').textContent.startsWith('layer 3')")
    assert one.text("#said") == "layer 3, head 0, induction 0.1200"
    press("Enter")
    one.wait_for_head("L3H0")
    one.wait_for_pattern(made.pattern(12, len(made.TOKENS)))
    one.tab_to("#explorer-pattern")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"):
        press(key)
    one.page.wait_for_function("document.getElementById('said').textContent.startsWith('query 3')")
    weight = made.pattern(12, len(made.TOKENS))[3, 1]
    assert one.text("#said") == f'query 3 " and", key 1 "the", weight {weight:.3f}'
    press("End")
    one.page.wait_for_function("document.getElementById('said').textContent.includes('cannot')")
    assert one.text("#said") == 'query 3 " and" cannot see key 9 "the"'
    one.page.keyboard.press("Shift+Tab")
    assert one.page.evaluate("document.activeElement.id") == "ex-as-lines"
    press("Enter")
    one.tab_to("#ex-queries .token")
    press("ArrowDown")
    press("ArrowDown")
    assert one.text("#ex-lines-said").startswith('Query 2 " cat":')
    one.tab_to("#ex-thumbs button")
    press("ArrowRight")
    press("Enter")
    one.wait_for_head("L0H0")
    one.tab_to(".sort")
    press("Enter")
    assert one.page.locator("th[aria-sort]").count() == 1
    assert re.match("Sorted by head, ascending", one.text("#said"))


def test_a_blank_cell_is_said_to_have_no_value(visit):
    one = visit("explorer")
    one.page.locator("#fig-1").focus()
    one.tab_to("#explorer-map")
    for key in ("ArrowUp", "Home"):
        one.page.keyboard.press(key)
    one.page.wait_for_function("document.getElementById('said').textContent.includes('layer 4')")
    assert one.text("#said") == "layer 4, head 0, no value"


def test_the_focus_stays_where_a_button_was_pressed(visit):
    one = visit("explorer")
    press = one.page.keyboard.press
    one.page.locator("#ex-top button").nth(2).focus()
    press("Enter")
    assert one.has_focus("#ex-top [aria-pressed='true']")
    assert one.page.evaluate("document.activeElement.textContent").split()[0] in one.text(
        "#ex-name"
    )
    one.page.fill("#ex-head", "3")
    one.page.locator("#ex-head").press("Enter")
    one.page.locator("#ex-layer button").nth(1).focus()
    press("Enter")
    one.wait_for_head("L3H1")
    assert one.has_focus("#ex-layer button")
    one.page.select_option("#ex-subject", label="long")
    one.wait_for_head("L5H1")
    one.page.click("#ex-as-lines")
    one.page.wait_for_selector("#ex-queries .token")
    one.page.locator("#ex-later").focus()
    for _ in range(3):
        press("Enter")
    assert one.page.locator("#ex-later").is_disabled()
    assert one.has_focus("#ex-earlier")


def test_pointing_is_not_said_and_going_to_a_token_is(explorer):
    one = explorer
    one.page.click("#ex-as-lines")
    one.page.wait_for_selector("#ex-queries .token")
    one.page.evaluate("say('')")
    one.page.locator("#ex-queries .token").nth(8).hover()
    assert one.text("#ex-lines-said").startswith("Query 8")
    assert one.text("#said") == ""
    one.page.locator("#ex-queries .token").nth(5).focus()
    assert one.text("#said").startswith('Query 5 "\\n": ')
    # The slider says its own value: what stands beside it is not said again.
    assert one.page.locator("#ex-step-told").get_attribute("aria-live") == "off"


# Large maps, paper, no scripts


def test_a_large_matrix_has_its_words_once_and_says_them_of_every_cell(visit, files):
    one = visit("pairs")
    one.tab_to("#fig-1")
    for key in ("ArrowDown", "ArrowRight"):
        one.page.keyboard.press(key)
    one.page.wait_for_function("document.getElementById('said').textContent.includes('then')")
    assert one.text("#said").startswith("L0H1 then L1H1, k composition ")
    for key in ("Home", *["ArrowDown"] * 10):
        one.page.keyboard.press(key)
    assert one.text("#said") == "row 11, column 0, no value"
    page = files("pairs").read_text(encoding="utf-8")
    assert page.count("L3H4") == 2
    # With words in every cell it would be 30 bytes a cell.
    assert len(page) - len(get_plotlyjs()) < 60_000 + 10 * 100 * 100


def test_paper_is_light_whatever_the_screen_is(visit):
    one = visit("explorer", scheme="dark")
    colour = "() => [byId('explorer-map'), byId('fig-1')].map((p) => p.layout.font.color)"
    dark = one.page.evaluate(colour)
    one.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    light = one.page.evaluate(colour)
    assert light == ["#454c57"] * 2 != dark
    one.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert one.page.evaluate(colour) == dark
    assert one.complaints == []


def test_without_scripts_the_words_and_the_tables_are_there(browser, files):
    page = browser.new_page(java_script_enabled=False)
    page.goto(files("explorer").as_uri())
    assert page.locator("li", has_text="One head does induction: L5H1.").is_visible()
    assert page.locator("table.data").first.is_visible()
    told = page.locator("noscript p")
    assert told.count() == 2
    assert all(one.is_visible() for one in told.all())
    assert not page.locator("#ex-score").is_visible()
    assert not page.locator(".plot").first.is_visible()
    page.close()


@pytest.mark.parametrize("kind", ["explorer", "comparison"])
def test_a_page_at_400_percent_is_no_wider_than_its_window(kept, kind):
    page = kept(kind).page
    page.set_viewport_size({"width": 320, "height": 256})
    page.wait_for_timeout(400)  # figures follow the window after a moment
    width = page.evaluate("document.documentElement.scrollWidth")
    page.set_viewport_size(dict(zip(("width", "height"), DESKTOP, strict=True)))
    assert width <= 320
