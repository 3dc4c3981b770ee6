"""One thread and one seed for every test: results do not depend on the machine or the order."""

import functools
import os
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _prose_is_parsed_once() -> Iterator[None]:
    """The corpus `docs` takes five seconds to parse, and is the same in every test."""
    from interp.data import corpus  # type checks are set up after this file was read

    parse = corpus._library_prose
    # A test may replace the files that are parsed: then it gets the prose of those.
    parsed = functools.cache(lambda sources: tuple(parse()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "_library_prose", lambda: parsed(corpus._library_sources))
        yield


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Where a page of some kind lies, made when it is first asked for."""
    from browsing import PAGES  # what is slow to import is for those who ask
    from test_views import write_experiment

    from interp.views.report import write_report

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
    """Chromium or Chrome, without a window.

    While it runs Playwright has an event loop in this thread, which other tests start themselves.
    """
    from browsing import ARGUMENTS, BROWSER
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=BROWSER, args=list(ARGUMENTS))
        yield started
        started.close()


@pytest.fixture
def visit(browser, files):
    """Opens pages, each in a window of its own, for one test."""
    from browsing import Visit

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
    from browsing import Visit

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
