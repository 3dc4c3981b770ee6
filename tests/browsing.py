"""A real browser for tests: the pages it opens, and what a reader does in them."""

import csv
import io
import shutil
from functools import cache
from pathlib import Path

import browser_pages as made
import numpy as np
import pytest
from quantization_tables import several_bits
from test_ablation_views import compared
from test_outlier_views import spiked, spiked_tokens
from test_views import made_scores
from tiny_models import perturbed, tiny_config

import interp
from interp.views.pages.chapters import bound
from interp.views.pages.page import render
from interp.views.pages.scores import scores_chapter
from interp.views.report import comparison_page, result_page

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="neither Chromium nor Chrome is installed"
)

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

DESKTOP, PHONE = (1280, 900), (390, 844)

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
    "outliers": lambda: render(bound([scores_chapter(made_outliers(), "Activations")])),
    "quantization": lambda: result_page(several_bits()),
}


@cache
def made_comparison():
    """Two small models on the same tokens."""
    return interp.compare(perturbed(tiny_config(), seed=0), perturbed(tiny_config(), seed=3))


def made_outliers():
    """Massive activations of a small model, their sinks and their changes."""
    measures = (interp.outliers, interp.outlier_sinks, interp.outlier_effects)
    return [measure(spiked(), spiked_tokens()) for measure in measures]


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
