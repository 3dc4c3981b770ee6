"""Pages in a real browser: they load alone, draw, answer to pointer and keyboard, and hide nothing.

The browser is the machine's Chromium or Chrome; without one these tests are skipped. Screenshots
are left in build/screenshots.
"""

import csv
import io
import json
import re
import shutil
from functools import cache
from pathlib import Path

import browser_pages as made
import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from pages import NASTY
from playwright.sync_api import sync_playwright
from plotly.offline import get_plotlyjs
from test_ablation_views import compared
from test_views import made_scores, write_experiment
from tiny_models import perturbed, tiny_config

import interp
from interp.views.pages.page import render
from interp.views.report import comparison_page, result_page, write_report

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="neither Chromium nor Chrome is installed")

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SCREENSHOTS = Path(__file__).parent.parent / "build" / "screenshots"
DESKTOP, PHONE = (1280, 900), (390, 844)

# The kinds of pages, each with the number of its figures outside the explorer.
KINDS = {
    "explorer": 2,
    "one-head": 0,
    "table": 0,
    "twelve-maps": 12,
    "scores": 1,
    "ablation": 3,
    "comparison": 8,
    "experiment": None,
}
LOOKS = [("explorer", size, scheme) for size in (DESKTOP, PHONE) for scheme in ("light", "dark")]
LOOKS += [(kind, PHONE, "light") for kind in KINDS if kind != "explorer"]


PAGES = {
    "explorer": lambda: render(made.rich_page(), stamp="interp 0.1.0"),
    "one-head": lambda: render(made.one_head_page()),
    "table": lambda: render(made.long_table_page()),
    "twelve-maps": lambda: render(made.twelve_maps_page()),
    "scores": lambda: result_page(made_scores()),
    "ablation": lambda: result_page(compared()),
    "comparison": lambda: comparison_page(made_comparison()),
    "pairs": lambda: render(made.pairs_page()),
    "sight": lambda: render(made.sight_page()),
}


@cache
def made_comparison():
    """Two small models on the same tokens."""
    return interp.compare(perturbed(tiny_config(), seed=0), perturbed(tiny_config(), seed=3))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    made_so_far = {}

    def path_of(kind):
        if kind not in made_so_far:
            path = folder / f"{kind}.html"
            if kind == "experiment":
                path = write_report(write_experiment(folder / kind))
            else:
                path.write_text(PAGES[kind](), encoding="utf-8")
            made_so_far[kind] = path
        return made_so_far[kind]

    return path_of


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=BROWSER, args=list(ARGUMENTS))
        yield started
        started.close()


class Visit:
    """A page opened in a window of its own, with what it asked for and complained of."""

    def __init__(self, browser, path, size=DESKTOP, scheme="light", anchor="", first=""):
        width, height = size
        self.page = browser.new_page(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            reduced_motion="reduce",
        )
        self.page.add_init_script(first)
        self.requests, self.complaints, self.dialogs = [], [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", self._dismiss)
        self.page.goto(f"{path.as_uri()}{anchor}")
        self.page.wait_for_function(
            "document.documentElement.dataset.figures === 'drawn'"
            "&& (!document.getElementById('explorer-data')"
            "    || document.documentElement.dataset.explorer === 'ready')"
        )

    def _hear(self, message):
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _dismiss(self, dialog):
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def text(self, selector):
        return " ".join(self.page.locator(selector).inner_text().split())

    def z(self, name):
        return self.page.evaluate(f"document.getElementById('{name}').data[0].z")

    def matrix(self):
        """The pattern on view; blank cells are NaN."""
        return np.array(self.z("explorer-pattern"), dtype=float)

    def saved(self, button):
        """The rows of the CSV file that a button gives."""
        with self.page.expect_download() as download:
            button.click()
        text = Path(download.value.path()).read_text("utf-8")
        return list(csv.DictReader(io.StringIO(text)))

    def has_focus(self, selector):
        return self.page.evaluate("s => document.activeElement?.matches(s) ?? false", selector)

    def click_cell(self, name, row, column, trace=0):
        """Clicks the middle of a cell of a map, where plotly says that it drew it."""
        self.page.locator(f"#{name}").scroll_into_view_if_needed()
        x, y = self.page.evaluate(
            """([name, row, column, trace]) => {
              const plot = document.getElementById(name), box = plot.getBoundingClientRect();
              const axis = (id) => plot._fullLayout[id.replace(/^([xy])/, "$1axis")];
              const {xaxis = "x", yaxis = "y"} = plot.data[trace], x = axis(xaxis), y = axis(yaxis);
              return [box.x + x._offset + x.d2p(column), box.y + y._offset + y.d2p(row)];
            }""",
            [name, row, column, trace],
        )
        # plotly takes a press for a click on the point that it last saw the pointer over.
        self.page.mouse.move(x - 1, y)
        self.page.mouse.move(x, y)
        self.page.wait_for_timeout(80)
        self.page.mouse.click(x, y)

    def wait_for_head(self, name):
        self.page.wait_for_function(
            f"document.getElementById('ex-name').textContent.startsWith('{name} ')"
        )

    def wait_for_pattern(self, expected):
        """Waits until the matrix shown is this one; unpacking takes a moment."""
        # 8 bits round by 0.004 at most; ten rows tell any two of these patterns apart.
        self.page.wait_for_function(
            "([rows, size]) => {"
            "const z = document.getElementById('explorer-pattern').data?.[0].z;"
            "return z?.length === size"
            "  && rows.every((row, q) => row.every((w, k) => Math.abs(z[q][k] - w) < 0.004)); }",
            arg=[expected[:10].tolist(), len(expected)],
        )

    def tab_to(self, selector, at_most=80):
        """Presses Tab until an element has the focus; how many presses it took."""
        for presses in range(1, at_most + 1):
            self.page.keyboard.press("Tab")
            if self.has_focus(selector):
                return presses
        return None


@pytest.fixture
def visit(browser, files):
    opened = []

    def go(kind, **more):
        opened.append(Visit(browser, files(kind), **more))
        return opened[-1]

    yield go
    for one in opened:
        one.page.close()


@pytest.fixture(scope="module")
def kept(browser, files):
    """Pages that are opened once for all tests: loading takes most of a test's time."""
    opened = {}

    def go(kind):
        if kind not in opened:
            opened[kind] = Visit(browser, files(kind))
        return opened[kind]

    yield go
    for one in opened.values():
        one.page.close()


@pytest.fixture
def explorer(kept):
    """The page with the explorer, set back to how it was opened."""
    shared = kept("explorer")
    shared.complaints.clear()
    shared.page.evaluate(
        """async () => {
          scrollTo(0, 0);
          document.activeElement.blur();
          byId("ex-back").hidden = true;
          await choose({subject: 0, score: 0, head: 21});
          byId("ex-score").value = 0;
          await showView(false);
        }"""
    )
    return shared


@pytest.fixture(scope="module")
def looks(browser, files):
    """Each page in each look, visited once: what it asked for, how wide it is, its faults."""
    seen = {}

    def look(kind, size, scheme):
        if (kind, size, scheme) not in seen:
            one = Visit(browser, files(kind), size, scheme)
            SCREENSHOTS.mkdir(parents=True, exist_ok=True)
            picture = SCREENSHOTS / f"{kind}-{size[0]}-{scheme}.png"
            one.page.screenshot(path=picture, full_page=True)
            seen[kind, size, scheme] = {
                "visit": one,
                "width": one.page.evaluate("document.documentElement.scrollWidth"),
                "paper": one.page.evaluate("getComputedStyle(document.body).backgroundColor"),
                "figures": one.page.evaluate(
                    "[...document.querySelectorAll('[id^=fig-].plot')].map(p =>"
                    "[p.id, p.querySelectorAll('.main-svg').length, p.data.length])"
                ),
                "axe": Axe().run(one.page).response["violations"],
                "picture": picture,
            }
            one.page.close()
        return seen[kind, size, scheme]

    return look


# Every page


@pytest.mark.parametrize(("kind", "size", "scheme"), LOOKS)
def test_a_page_asks_for_nothing_and_complains_of_nothing(looks, kind, size, scheme):
    one = looks(kind, size, scheme)["visit"]
    assert [url for url in one.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert one.complaints == []
    assert one.dialogs == []


@pytest.mark.parametrize(("kind", "size", "scheme"), LOOKS)
def test_no_page_is_wider_than_its_window(looks, kind, size, scheme):
    assert looks(kind, size, scheme)["width"] <= size[0]


@pytest.mark.parametrize(("kind", "size", "scheme"), LOOKS)
def test_axe_finds_no_serious_fault(looks, kind, size, scheme):
    grave = [
        (fault["id"], fault["impact"], [node["html"][:160] for node in fault["nodes"][:3]])
        for fault in looks(kind, size, scheme)["axe"]
        if fault["impact"] in ("serious", "critical")
    ]
    assert grave == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_figure_is_drawn(looks, kind):
    figures = looks(kind, PHONE, "light")["figures"]
    assert KINDS[kind] in (None, len(figures))
    assert len({name for name, _, _ in figures}) == len(figures)
    assert all(drawn and traces for _, drawn, traces in figures)
    assert kind != "experiment" or len(figures) >= 5


def test_twelve_figures_share_one_library(files):
    assert files("twelve-maps").read_text(encoding="utf-8").count("* plotly.js v") == 1


def test_the_pages_follow_the_scheme_of_the_reader(looks, visit):
    light = looks("explorer", DESKTOP, "light")["paper"]
    assert light == "rgb(255, 255, 255)"
    assert looks("explorer", DESKTOP, "dark")["paper"] != light
    one = visit("explorer", scheme="dark")
    scale = "document.getElementById('explorer-map').layout.coloraxis.colorscale[0][1]"
    dark_scale = one.page.evaluate(scale)
    one.page.emulate_media(color_scheme="light")
    one.page.wait_for_function(f"{scale} !== {json.dumps(dark_scale)}")
    assert one.page.evaluate("getComputedStyle(document.body).backgroundColor") == light


def test_markup_stays_text(visit, files):
    one = visit("explorer")
    assert one.page.locator("li", has_text=NASTY).count() >= 2
    scripts = files("explorer").read_text(encoding="utf-8")
    # The library, the page's own, the explorer's facts, and each packed pattern.
    assert one.page.locator("script").count() == 3 + scripts.count('id="pattern-')
    assert one.page.locator("b", has_text="script").count() == 0
    one.page.click("#ex-as-lines")
    token = one.page.locator("#ex-queries .token").nth(7)
    assert token.get_attribute("aria-label") == f"query 7 {json.dumps(NASTY)}"
    assert one.dialogs == []


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
