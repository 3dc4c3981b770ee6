"""Pages in a real browser: they load alone, draw, fit their window, and hide nothing.

The browser is the machine's Chromium or Chrome; without one these tests are skipped. Screenshots
are left in build/screenshots.
"""

import json
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from browsing import DESKTOP, PHONE, Visit, needs_browser
from pages import NASTY

pytestmark = needs_browser

SCREENSHOTS = Path(__file__).parent.parent / "build" / "screenshots"

# The kinds of pages, each with the number of its figures outside the explorer.
KINDS = {
    "explorer": 2,
    "one-head": 0,
    "table": 0,
    "twelve-maps": 12,
    "scores": 1,
    "ablation": 3,
    "comparison": 8,
    "outliers": 5,
    "quantization": 2,
    "experiment": None,
}
LOOKS = [("explorer", size, scheme) for size in (DESKTOP, PHONE) for scheme in ("light", "dark")]
LOOKS += [(kind, PHONE, "light") for kind in KINDS if kind != "explorer"]


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
