"""The committed examples are what their tables make today, and README leads to them."""

import re
from pathlib import Path

import pytest
from pages import Elements, without_library

from interp.views.pages.page import render
from interp.views.report import report_page

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "reports" / "examples"


def without_patterns(page):
    """The page without packed patterns: how small deflate makes them depends on its version."""
    return re.sub(r'(<script type="text/plain"[^>]*>)[^<]*', r"\1", page)


@pytest.mark.parametrize("name", ["phase_change", "smollm2", "compare", "text_model"])
def test_a_committed_example_is_the_page_of_its_tables(name):
    """`make example-pages` writes it again where pages have changed."""
    committed = (EXAMPLES / name / "report.html").read_text(encoding="utf-8")
    made = render(report_page(EXAMPLES / name))
    same = without_patterns(made) == without_patterns(committed)
    assert same, "not the page that its tables make: make example-pages"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("phase_change", ["Induction heads form", "two-layer, seed 0", "in-context-learning"]),
        ("smollm2", ["Induction", "Sinks", "Outliers", "Ablation", "dimension 507", "L18H6"]),
        ("smollm2", ["Outlier sinks", "Outlier effects", "no cells changed", "4-bit grid already"]),
        ("text_model", ["round-to-nearest", "AWQ", "W4A16"]),
        ("compare", ["two-layer-seed-0 and smollm2-135m", "Previous token"]),
    ],
)
def test_an_example_says_what_it_is_an_example_of(name, words):
    page = (EXAMPLES / name / "report.html").read_text(encoding="utf-8")
    text = Elements(without_library(page)).text
    assert [word for word in words if word not in text] == []


def test_what_readme_shows_is_there():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"\]\(((?:reports|docs)/[^)]+)\)", readme)
    assert len([path for path in shown if path.endswith("report.html")]) == 4
    assert len([path for path in shown if path.endswith("picture.png")]) == 3
    assert [path for path in shown if not (ROOT / path).is_file()] == []
