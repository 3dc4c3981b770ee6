"""The explorer in a real browser: maps, scores, patterns, steps.

The browser is the machine's Chromium or Chrome; without one these tests are skipped.
"""

import browser_pages as made
import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from browsing import needs_browser

pytestmark = needs_browser


# The explorer


def test_the_strongest_head_is_shown_first_and_a_click_on_the_map_shows_another(explorer):
    one = explorer
    assert one.text("#ex-name") == "L5H1 smollm2-tiny"
    one.click_cell("explorer-map", 3, 0)
    one.wait_for_head("L3H0")
    expected = made.pattern(12, len(made.TOKENS))
    one.wait_for_pattern(expected)
    rows = one.page.locator("#ex-scores tbody tr").all_inner_texts()
    told = [" ".join(row.split()) for row in rows]
    assert told[0].startswith("induction attention probability 0.12 ± 0.01 0.02 11 of 21")
    assert told[1].startswith("From uniform, on the text 0.5 ± 0.01 – 13 of 24")
    assert told[2] == "What ablating it does"
    assert told[3].startswith("loss nats 0.08 ± 0.01 – 17 of 24")
    assert one.complaints == []


def test_the_matrix_is_the_pattern_with_query_0_at_the_top(explorer):
    one = explorer
    expected = made.pattern(21, len(made.TOKENS))
    one.wait_for_pattern(expected)
    z = one.matrix()
    # 16-bit codes: half a step of 1/65535.
    assert np.nanmax(np.abs(z - expected)) <= 0.5 / 65535 + 1e-12
    assert z[3][1] == pytest.approx(expected[3, 1], abs=1e-5)
    axes = one.page.evaluate(
        "['xaxis', 'yaxis'].map(a => document.getElementById('explorer-pattern').layout[a])"
    )
    assert [axis["title"]["text"] for axis in axes] == ["key", "query"]
    assert axes[1]["range"][0] > axes[1]["range"][1]
    assert axes[0]["range"][0] < axes[0]["range"][1]


def test_tokens_that_repeat_keep_their_own_rows_columns_and_labels(explorer):
    one = explorer
    one.wait_for_pattern(made.pattern(21, len(made.TOKENS)))
    axis = one.page.evaluate("document.getElementById('explorer-pattern').layout.yaxis")
    assert axis["tickvals"] == list(range(10))
    assert [axis["ticktext"][i] for i in (1, 4, 5, 6, 9)] == ["the", "·the", "↵", "the", "the"]
    trace = one.page.evaluate("document.getElementById('explorer-pattern').data[0]")
    assert trace["text"][6][0] == '6 "the"'
    assert trace["customdata"][0][9] == '9 "the"'


def test_8_bit_patterns_are_unpacked_and_their_rounding_is_told(explorer):
    one = explorer
    one.page.select_option("#ex-subject", label="long")
    one.wait_for_pattern(made.pattern(21, 300))
    expected = made.pattern(21, 300)
    assert np.nanmax(np.abs(one.matrix() - expected)) <= 0.004
    assert "rounded by at most 0.004, finer where small" in one.text("#ex-pattern-about")


def test_a_head_is_found_by_its_name(explorer):
    one = explorer
    for wanted, shown in (("2.1", "L2H1"), ("L1H1", "L1H1"), (" l5h3 ", "L5H3")):
        one.page.fill("#ex-head", wanted)
        one.page.keyboard.press("Enter")
        assert one.text("#ex-name").startswith(f"{shown} ")
    assert one.page.evaluate("location.hash") == "#head=5.3&subject=smollm2-tiny"
    one.page.fill("#ex-head", "5")
    one.page.keyboard.press("Enter")
    assert one.text("#ex-layer") == "L5H0 L5H1 L5H2 L5H3"
    for unknown, answer in (
        ("6.0", "There is no head 6.0 here, only layers 0 to 5 and heads 0 to 3."),
        ("9", "There is no layer 9 here, only layers 0 to 5 and heads 0 to 3."),
        ("x", "Write a head as 5.1 or L5H1, or a layer as 5; here are layers 0 to 5"),
    ):
        one.page.fill("#ex-head", unknown)
        one.page.click("#ex-find button")
        assert one.text("#ex-answer").startswith(answer)
        assert one.text("#ex-name").startswith("L5H3 ")
    one.page.click("#ex-next")
    assert one.text("#ex-name").startswith("L0H0 ")
    one.page.click("#ex-previous")
    assert one.text("#ex-name").startswith("L5H3 ")


def test_missing_pruned_and_left_out_heads_are_told(explorer):
    one = explorer
    assert "Blank: pruned: L4H0; not measured: L0H2, L2H3." in one.text("#ex-map-about")
    assert one.z("explorer-map")[4][0] is None
    one.click_cell("explorer-map", 2, 3)
    # A blank cell has nothing to click; the search finds it.
    one.page.fill("#ex-head", "2.3")
    one.page.keyboard.press("Enter")
    assert "not measured" in one.page.locator("#ex-scores tr").nth(1).inner_text()
    assert one.text("#ex-pattern-about").startswith(
        "The pattern of L2H3 is not embedded. Embedded are L5H1, L0H0, L1H1,"
    )
    assert not one.page.locator("#explorer-pattern").is_visible()
    one.page.fill("#ex-head", "4.0")
    one.page.keyboard.press("Enter")
    assert one.text("#ex-answer") == "L4H0, pruned"
    assert "not embedded: the head is pruned" in one.text("#ex-pattern-about")


def test_a_model_without_a_single_value_is_told(explorer):
    one = explorer
    one.page.select_option("#ex-subject", label="one-head")
    assert one.text("#ex-name") == "L0H0 one-head"
    assert "not measured" in one.text("#ex-scores")
    assert "Nothing in this report ablates single heads." in one.text("#ex-scores")
    assert "Blank: not measured: L0H0." in one.text("#ex-map-about")
    assert one.text("#ex-pattern-about") == "No pattern is embedded in this report."
    one.page.click("#ex-next")
    assert one.complaints == []


def test_scores_that_were_measured_together_share_a_line(kept):
    one = kept("comparison")
    one.page.locator("summary", has_text="How these were measured").click()
    lines = one.page.locator("#ex-methods li").all_inner_texts()
    assert len(lines) == 1
    assert lines[0].startswith("Duplicate token; Induction; Previous token; Sinks: Blocks of 8")


def test_the_score_chosen_colours_the_map_and_orders_the_heads(explorer):
    one = explorer
    assert one.text("#ex-top-title") == "Furthest above the null"
    one.page.select_option("#ex-score", label="loss")
    one.page.wait_for_function(
        "document.getElementById('explorer-map').layout.coloraxis.cmin === -1.5"
    )
    assert one.z("explorer-map")[2][1] == -1.5
    assert one.text("#ex-top-title") == "Largest effects"
    first = one.page.locator("#ex-top button").first
    assert first.inner_text() == "L2H1 −1.5"
    first.click()
    assert one.text("#ex-name").startswith("L2H1 ")
    assert one.page.locator("#ex-top button").first.get_attribute("aria-pressed") == "true"
    one.page.select_option("#ex-score", label="From uniform, on the text")
    assert one.text("#ex-top-title") == "Highest"


def test_the_slider_moves_the_map_the_scores_and_the_pattern(explorer):
    one = explorer
    one.page.select_option("#ex-subject", label="two-layer, seed 0")
    one.wait_for_head("L1H3")
    size = len(made.TOKENS)
    one.wait_for_pattern(made.pattern(57, size))
    assert one.text("#ex-step-told") == "step 400 of 400, 1.64M tokens seen"
    assert one.z("explorer-map")[1][3] == pytest.approx(0.28)
    one.page.locator("#ex-step").focus()
    one.page.keyboard.press("ArrowLeft")
    one.wait_for_pattern(made.pattern(77, size))
    assert one.text("#ex-step-told") == "step 200 of 400, 819k tokens seen"
    assert one.z("explorer-map")[1][3] == pytest.approx(0.14)
    assert one.text("#ex-pattern-about").startswith("Pattern at step 100.")
    curve = one.page.evaluate("document.getElementById('explorer-curve').data[1].y")
    assert curve == pytest.approx([0, 0.07, 0.14, 0.28])
    shape = one.page.evaluate("document.getElementById('explorer-curve').layout.shapes[0].x0")
    assert shape == 200
    one.page.keyboard.press("Home")
    assert "first embedded pattern is that of step 100, later" in one.text("#ex-pattern-about")
    # A score that was measured once has no curve, and stays as it is at every step.
    one.page.select_option("#ex-score", label="sink")
    assert not one.page.locator("#ex-curve-box").is_visible()
    assert one.complaints == []


def test_the_address_chooses_a_head_and_follows_it(visit):
    one = visit("explorer", anchor="#head=0.3&subject=two-layer%2C%20seed%200")
    assert one.text("#ex-name") == "L0H3 two-layer, seed 0"
    one.page.evaluate("location.hash = '#head=1.2&subject=smollm2-tiny'")
    one.wait_for_head("L1H2")
    assert one.text("#ex-name") == "L1H2 smollm2-tiny"
    one.page.evaluate("location.hash = '#head=77.0'")
    one.page.evaluate("location.hash = '#facts'")
    assert one.text("#ex-name").startswith("L1H2 ")
    assert one.complaints == []


def test_a_click_on_another_map_leads_to_the_head_and_back(explorer):
    one = explorer
    one.click_cell("fig-1", 2, 1)
    one.wait_for_head("L2H1")
    assert one.text("#ex-name") == "L2H1 smollm2-tiny"
    assert one.page.evaluate("document.activeElement.id") == "ex-name"
    one.page.click("#ex-back a")
    assert one.page.evaluate("document.activeElement.id") == "fig-1"
    # The second small map is of step 400, the first of step 100.
    one.click_cell("fig-2", 1, 2, trace=0)
    one.page.wait_for_function("document.getElementById('ex-step').value === '1'")
    assert one.text("#ex-name") == "L1H2 two-layer, seed 0"
    assert one.text("#ex-back") == "Back to Training"


def test_the_lines_are_the_weights_and_a_token_shows_its_own(explorer):
    one = explorer
    weights = made.pattern(21, len(made.TOKENS))
    one.page.click("#ex-as-lines")
    drawn = one.page.locator("#ex-drawing line")
    one.page.wait_for_function("document.querySelectorAll('#ex-drawing line').length")
    assert drawn.count() == (np.round(weights * 65535) / 65535 >= 0.02).sum()
    assert "below 0.02 are not drawn" in one.text("#ex-lines-said")
    one.page.locator("#ex-queries .token").nth(8).hover()
    order = [key for key in np.argsort(-weights[8]) if weights[8, key] >= 0.02]
    assert drawn.count() == len(order)
    assert one.text("#ex-lines-said").startswith(
        f'Query 8 " ": {weights[8, order[0]]:.3f} to {order[0]} '
    )
    opacity = [float(line.get_attribute("stroke-opacity")) for line in drawn.all()]
    assert opacity == pytest.approx([weights[8, key] for key in sorted(order)], abs=6e-4)
    one.page.locator("#ex-keys .token").nth(1).hover()
    assert drawn.count() == (weights[:, 1] >= 0.02).sum()


def test_axe_finds_no_serious_fault_in_the_lines(explorer):
    explorer.page.click("#ex-as-lines")
    explorer.page.locator("#ex-queries .token").nth(3).hover()
    faults = Axe().run(explorer.page).response["violations"]
    assert [f["id"] for f in faults if f["impact"] in ("serious", "critical")] == []


def test_lines_of_a_long_text_are_a_window_that_moves(explorer):
    one = explorer
    one.page.select_option("#ex-subject", label="long")
    one.wait_for_pattern(made.pattern(21, 300))
    one.page.click("#ex-as-lines")
    one.page.wait_for_selector("#ex-queries .token")
    assert one.page.locator("#ex-queries .token").count() == 120
    assert one.text("#ex-window-told") == "Tokens 0 to 119 of 300"
    one.page.click("#ex-later")
    assert one.text("#ex-window-told") == "Tokens 60 to 179 of 300"
    for _ in range(2):
        one.page.click("#ex-later")
    assert one.text("#ex-window-told") == "Tokens 180 to 299 of 300"
    assert one.page.locator("#ex-later").is_disabled()


def test_thumbnails_are_drawn_when_seen_and_keep_thin_stripes(explorer):
    one = explorer
    one.page.select_option("#ex-subject", label="long")
    one.wait_for_pattern(made.pattern(21, 300))
    one.page.locator("#ex-thumbs").scroll_into_view_if_needed()
    one.page.wait_for_selector("#ex-thumbs [data-drawn]", state="attached")
    assert one.text("#ex-thumbs") == "L5H1 0.13"
    size = one.page.evaluate("[c => [c.width, c.height]][0](document.querySelector('canvas'))")
    assert size == [64, 64]
    weights = np.zeros((300, 300))
    weights[200, 7] = 1
    pool = "w => [...pooled(w, 300, (query) => [0, query + 1]).cells]"
    pooled = np.array(one.page.evaluate(pool, weights.ravel().tolist())).reshape(64, 64)
    assert pooled[200 * 64 // 300, 7 * 64 // 300] == 1
    # Of the cells above the diagonal no query sees a key.
    assert pooled.sum() == 1 - np.triu(np.ones((64, 64)), 1).sum()


def test_what_a_query_cannot_see_is_blank_and_what_it_hardly_sees_is_not(explorer):
    one = explorer
    one.wait_for_pattern(made.pattern(21, len(made.TOKENS)))
    later = np.triu(np.ones((10, 10), dtype=bool), 1)
    assert np.array_equal(np.isnan(one.matrix()), later)
    assert "a column a key (blank: one it cannot see)" in one.text("#ex-pattern-said")
    one.page.wait_for_selector("#ex-thumbs [data-head='5.1'][data-drawn]", state="attached")
    seen = one.page.evaluate(
        """() => {
          const {data} = document.querySelector("#ex-thumbs canvas").getContext("2d")
            .getImageData(0, 0, 10, 10);
          return [...Array(100).keys()].map((cell) => data[4 * cell + 3]);
        }"""
    )
    assert np.array_equal(np.array(seen).reshape(10, 10) == 0, later)


def test_an_encoder_sees_every_key_and_a_window_the_latest(visit):
    one = visit("sight")
    one.wait_for_pattern(made.pattern(21, len(made.TOKENS)))
    assert not np.isnan(one.matrix()).any()
    assert "blank" not in one.text("#ex-pattern-said")
    one.page.select_option("#ex-subject", label="windowed")
    one.page.wait_for_function("byId('explorer-pattern').data[0].z[9][0] === null")
    expected = np.tril(np.triu(made.pattern(21, len(made.TOKENS)), -2))
    apart = np.subtract.outer(np.arange(10), np.arange(10))
    blank = (apart < 0) | (apart > 2)
    # A weight that cannot be is a finding, and is not hidden.
    blank[2, 7], expected[2, 7] = False, 0.25
    z = one.matrix()
    assert np.array_equal(np.isnan(z), blank)
    assert np.allclose(z[~blank], expected[~blank], atol=1e-5)
    assert one.complaints == []


def test_a_browser_that_cannot_unpack_patterns_says_so(visit):
    one = visit("explorer", first="delete globalThis.DecompressionStream")
    assert one.text("#ex-pattern-about").startswith("This browser is too old to unpack")
    assert not one.page.locator("#ex-thumbs-box").is_visible()
    assert "0.9" in one.text("#ex-scores")
    one.page.click("#ex-next")
    assert one.complaints == []
