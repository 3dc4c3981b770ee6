"""What a notebook shows of a result, in a real browser: the figure, or words where none can come.

The browser is the machine's Chromium or Chrome; without one these tests are skipped.
"""

import shutil

import pytest
from playwright.sync_api import sync_playwright
from plotly.offline import get_plotlyjs
from test_figures_of_results import NASTY, patterns, scores

from interp.views.drawing import notebook_bundle, notebook_html

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="neither Chromium nor Chrome is installed")

DRAWN = "document.querySelectorAll('.main-svg').length"
WHY = "The figure itself needs plotly.js, and could not be drawn here."


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture
def notebook(browser):
    """Shows HTML outputs one below the other; `answer` is what the library's address gives."""
    opened = []

    def show(outputs, answer=None, before=""):
        page = browser.new_page(viewport={"width": 1100, "height": 1500})
        opened.append(page)
        page.asked, page.faults = [], []
        page.on("pageerror", lambda fault: page.faults.append(str(fault)))

        def route(wanted):
            if wanted.request.url.startswith("https://notebook.test"):
                body = "<!doctype html><meta charset='utf-8'><body>" + before + "".join(outputs)
                return wanted.fulfill(body=body, content_type="text/html")
            page.asked.append(wanted.request.url)
            if answer is None:
                return wanted.abort()
            status, body = answer
            return wanted.fulfill(
                status=status,
                body=body,
                content_type="text/javascript",
                headers={"access-control-allow-origin": "*"},
            )

        page.route("**/*", route)
        page.goto("https://notebook.test/")
        return page

    yield show
    for page in opened:
        page.close()


def outputs():
    """Three, of which two are the same."""
    made = [notebook_bundle(own())["text/html"] for own in (scores, patterns, scores)]
    return [str(own) for own in made]


def drawn(page, number):
    page.wait_for_function(
        f"document.querySelectorAll('.plot-container').length === {number}", timeout=20_000
    )
    return page


def test_the_library_is_fetched_once_for_all_outputs_and_every_one_is_drawn(notebook):
    page = drawn(notebook(outputs(), (200, get_plotlyjs())), 3)
    assert len(page.asked) == 1
    assert page.asked[0].startswith("https://cdn.plot.ly/plotly-")
    assert page.locator(".interp-words").count() == 0
    assert page.faults == []


@pytest.mark.parametrize(
    "answer", [None, (404, "<html>gone</html>"), (200, "window.Plotly = {newPlot() {}}")]
)
def test_without_the_library_or_with_another_file_outputs_stay_words_and_say_why(notebook, answer):
    page = notebook(outputs(), answer)
    page.wait_for_function("document.querySelectorAll('.interp-why').length === 3", timeout=20_000)
    assert page.evaluate(DRAWN) == 0
    assert page.locator(".interp-words").count() == 3
    assert page.locator(".interp-why").all_inner_texts() == [WHY] * 3
    assert page.faults == []


def test_an_output_that_comes_later_tries_again(notebook):
    page = notebook(outputs()[:1])
    page.wait_for_selector(".interp-why")
    page.unroute("**/*")
    page.route("**/*", lambda wanted: wanted.abort())
    later = notebook_html(scores())
    script = later.split("<script>")[1].split("</script>")[0]
    page.add_script_tag(content=script)
    drawn(page, 1)
    assert page.locator(".interp-words").count() == 0


@pytest.mark.parametrize("before", ["", "<script>window.Plotly = {version: '0'}</script>"])
def test_an_output_that_carries_the_library_asks_for_nothing(notebook, before):
    page = drawn(notebook([notebook_html(scores()), notebook_html(patterns())], before=before), 2)
    assert page.asked == []
    assert page.faults == []


def test_a_figure_that_does_not_draw_stays_words(notebook):
    broken = "<script>window.Plotly = {newPlot() { throw new Error('no'); }}</script>"
    page = notebook(outputs()[:1], before=broken)
    page.wait_for_selector(".interp-why")
    assert "Sink by head" in page.locator(".interp-words").inner_text()
    assert page.faults == []


def test_names_with_markup_are_text_in_a_notebook(notebook):
    page = drawn(notebook([notebook_html(scores(model=NASTY))]), 1)
    assert NASTY in page.locator(".gtitle, .gtitle-subtitle").last.text_content()
    assert page.faults == []
