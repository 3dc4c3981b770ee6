"""One self-contained HTML page: what its parts are, and how they are rendered.

One invariant: the file needs nothing outside itself and depends on nothing but its parts, so the
same parts give the same bytes. plotly.js is inlined exactly once, and only where a page has a
figure or an explorer.
"""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import numpy as np
import pandas as pd
import plotly.graph_objects as go
from markupsafe import Markup
from plotly.offline import get_plotlyjs, get_plotlyjs_version

from interp.views.figures import style
from interp.views.pages.explorer import Score, Subject

_LIGHT = {
    "font.color": "#454c57",
    "hoverlabel.bgcolor": "#ffffff",
    "hoverlabel.bordercolor": "#c9ced6",
    "hoverlabel.font.color": "#20242b",
}
_DARK = {
    "font.color": "#b6bec9",
    "hoverlabel.bgcolor": "#22272f",
    "hoverlabel.bordercolor": "#454d59",
    "hoverlabel.font.color": "#e4e8ee",
}


@dataclass(frozen=True)
class Words:
    """A paragraph."""

    kind: ClassVar[str] = "words"
    text: str


@dataclass(frozen=True)
class Points:
    """A list of sentences."""

    kind: ClassVar[str] = "points"
    items: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table of text cells; a cell's second line (after a line break) is set smaller.

    A reader can sort it, unless all of its columns are words, and download it, if `values` has its
    cells in full: numbers to their last digit, an empty text where one is missing.
    """

    kind: ClassVar[str] = "table"
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    # How many columns from the left hold words; the rest are numbers, set to the right.
    words: int = 1
    values: tuple[tuple[str, ...], ...] | None = None


@dataclass(frozen=True)
class Source:
    """A long text shown as it is, folded away under its title."""

    kind: ClassVar[str] = "source"
    title: str
    text: str


@dataclass(frozen=True)
class Folded:
    """A long table folded away under its title."""

    kind: ClassVar[str] = "folded"
    title: str
    table: Table


@dataclass(frozen=True)
class Plot:
    """A figure; its title, subtitle and caption are set as HTML, which wraps."""

    kind: ClassVar[str] = "plot"
    figure: go.Figure


@dataclass(frozen=True)
class Explorer:
    """Every head of some models, to be looked at one by one: its scores and its patterns."""

    kind: ClassVar[str] = "explorer"
    subjects: tuple[Subject, ...]


Part = Words | Points | Table | Source | Folded | Plot | Explorer


@dataclass(frozen=True)
class Section:
    """A heading and its parts; `name` is its anchor."""

    name: str
    heading: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Page:
    """A page: a title, a line about its origin, its findings in words, then sections."""

    title: str
    origin: str = ""
    findings: tuple[str, ...] = ()
    sections: tuple[Section, ...] = field(default=())


def render(page: Page, *, cdn: bool = False, stamp: str = "") -> str:
    """The page as one HTML file that works offline, in light and dark, on a phone.

    With `cdn` plotly.js is fetched from its public address instead of being in the file, which is
    then 5 MB smaller and needs a network. `stamp` is a line at the foot of the page.

    Raises:
        ValueError: the page has two explorers, or an explorer without subjects.
    """
    plots: list[_Drawn] = []
    explorers: list[_Explored] = []
    sections = []
    for section in page.sections:
        parts: list[Part | _Drawn | _Explored] = []
        for part in section.parts:
            if isinstance(part, Plot):
                plots.append(_draw(part.figure, f"fig-{len(plots) + 1}"))
                parts.append(plots[-1])
            elif isinstance(part, Explorer):
                explorers.append(_explore(part))
                parts.append(explorers[-1])
            else:
                parts.append(part)
        sections.append({"name": section.name, "heading": section.heading, "parts": parts})
    if len(explorers) > 1:
        raise ValueError(f"a page has one explorer for all its subjects, not {len(explorers)}")
    return (
        _templates()
        .get_template("report.html.j2")
        .render(
            page=page,
            sections=sections,
            plots=plots,
            explorer=explorers[0] if explorers else None,
            library=_library(cdn) if plots or explorers else "",
            scripts=_SCRIPTS + (_EXPLORER_SCRIPTS if explorers else ()),
            stamp=stamp,
        )
    )


_LARGE = 10_000  # cells of a map

# In the order in which they need each other.
_SCRIPTS = ("page.js", "cursor.js", "tables.js")
_EXPLORER_SCRIPTS = ("explorer.js", "head.js", "pattern.js", "lines.js", "thumbnails.js")


def number(value: object) -> str:
    """A table cell for a plain value: 4 significant digits, thousands separated, "–" if missing."""
    if isinstance(value, str):
        return value
    if value is None or (pd.api.types.is_scalar(value) and pd.isna(value)):
        return "–"
    if isinstance(value, bool) or pd.api.types.is_bool(value):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ("; " if any(isinstance(v, dict) for v in value) else ", ").join(map(number, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {number(item)}" for name, item in value.items())
    if pd.api.types.is_integer(value):
        return f"{value:,}".replace("-", "−")
    if isinstance(value, float | np.floating):
        real = float(value)
        return (f"{real:,.0f}" if abs(real) >= 1000 else f"{real:.4g}").replace("-", "−")
    return str(value)


def frame_table(table: pd.DataFrame, caption: str, words: Sequence[str] = ()) -> Table:
    """A data frame as a page's table, with the columns named in `words` first, as text."""
    first = [column for column in words if column in table]
    columns = [*first, *(column for column in table.columns if column not in first)]
    rows = list(table[columns].astype(object).itertuples(index=False, name=None))
    return Table(
        caption,
        tuple(str(column).replace("_", " ") for column in columns),
        tuple(tuple(number(value) for value in row) for row in rows),
        words=len(first),
        values=tuple(tuple(in_full(value) for value in row) for row in rows),
    )


def in_full(value: object) -> str:
    """A value as a CSV file has it: all digits of a number, nothing where it is missing."""
    if isinstance(value, str | list | tuple | dict):
        return number(value)
    if value is None or (pd.api.types.is_scalar(value) and pd.isna(value)):
        return ""
    if isinstance(value, float | np.floating):
        return repr(float(value))
    return str(value)


@dataclass(frozen=True)
class _Drawn:
    """A plot taken apart for the template: words as text, data and layout as script-safe JSON."""

    kind: ClassVar[str] = "plot"
    name: str
    title: str
    subtitle: str
    caption: str
    notes: tuple[str, ...]
    height: int
    width: int | None
    # Whether it has cells that the arrow keys can walk over, and whether these stand for heads.
    cells: bool
    heads: bool
    data: Markup
    layout: Markup
    light: Markup
    dark: Markup


def _draw(figure: go.Figure, name: str) -> _Drawn:
    whole = figure.to_plotly_json()
    layout = dict(whole["layout"])
    title = layout.pop("title", None) or {}
    meta = layout.pop("meta", None) or {}
    width = layout.pop("width", None)
    height = layout["height"] - style.TITLE_SPACE
    margin = dict(layout["margin"])
    margin["t"] -= style.TITLE_SPACE
    layout |= {"height": height, "margin": margin, "autosize": True}
    light: dict[str, object] = dict(_LIGHT)
    dark: dict[str, object] = dict(_DARK)
    for axis in (key for key in layout if key.startswith("coloraxis")):
        scale = tuple(tuple(stop) for stop in layout[axis]["colorscale"])
        light[f"{axis}.colorscale"] = scale
        dark[f"{axis}.colorscale"] = (
            style.DIVERGING_DARK if scale == style.DIVERGING else style.SEQUENTIAL_DARK
        )
    traces = [_lean(trace) for trace in whole["data"]]
    maps = [trace for trace in traces if trace["type"] == "heatmap"]
    return _Drawn(
        name,
        html.unescape(title.get("text") or ""),
        html.unescape((title.get("subtitle") or {}).get("text") or ""),
        meta.get("caption", ""),
        tuple(meta.get("notes", ())),
        height,
        width,
        bool(maps),
        any("subject" in (trace.get("meta") or {}) for trace in maps),
        _script_json(traces),
        _script_json(layout),
        _script_json(light),
        _script_json(dark),
    )


def _lean(trace: dict[str, Any]) -> dict[str, Any]:
    """The trace; the words of a large map's cells once a row and a column, where they say no more.

    Written out they are most of a page of 35,000 pairs of heads; page.js does that.
    """
    cells = trace.get("customdata")
    if trace["type"] != "heatmap" or cells is None or len(cells) * len(cells[0]) < _LARGE:
        return trace
    if any(not isinstance(cell, list) or len(cell) != 2 for row in cells for cell in row):
        return trace
    rows, columns = [row[0][0] for row in cells], [cell[1] for cell in cells[0]]
    if any(
        cell != [own, other]
        for own, row in zip(rows, cells, strict=True)
        for other, cell in zip(columns, row, strict=True)
    ):
        return trace
    return trace | {"customdata": {"rows": rows, "columns": columns}}


@dataclass(frozen=True)
class _Explored:
    """An explorer taken apart: its facts as JSON, and each packed pattern by its element's name."""

    kind: ClassVar[str] = "explorer"
    facts: Markup
    patterns: tuple[tuple[str, str], ...]


def _explore(explorer: Explorer) -> _Explored:
    if not explorer.subjects:
        raise ValueError("an explorer needs a subject, a model or a run whose heads it shows")
    look = {
        "font": style.FONT,
        "ink": style.INK,
        "grid": style.GRID,
        "accent": ("#0a66a8", "#6db7ee"),
        "sequential": (style.SEQUENTIAL, style.SEQUENTIAL_DARK),
        "diverging": (style.DIVERGING, style.DIVERGING_DARK),
        "light": _LIGHT,
        "dark": _DARK,
    }
    subjects, patterns = [], []
    for place, subject in enumerate(explorer.subjects):
        told = asdict(subject)
        told["scores"] = [_score(score) for score in subject.scores]
        for which, text in enumerate(subject.texts):
            del told["texts"][which]["data"]
            for label, data in zip(text.heads, text.data, strict=True):
                patterns.append((f"pattern-{place}-{which}-{label}", data))
        subjects.append(told)
    return _Explored(_script_json({"subjects": subjects, "look": look}), tuple(patterns))


def _score(score: Score) -> dict[str, object]:
    """A score as the page reads it: to 6 digits, null where it is missing or not finite."""
    grids = ("values", "errors", "nulls")
    told = {name: value for name, value in vars(score).items() if name not in grids}
    for name in grids:
        grid = getattr(score, name)
        told[name] = grid and [[style.drawable(value) for value in row] for row in grid]
    return told


def _script_json(value: object) -> Markup:
    """Strict JSON that may stand in a script element: no NaN, no character that could end it."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


@cache
def _library(cdn: bool) -> Markup:
    """The script element that is plotly.js, or that fetches exactly this version of it."""
    library = get_plotlyjs()
    if not cdn:
        return Markup("<script>{}</script>").format(Markup(library))
    digest = base64.b64encode(hashlib.sha256(library.encode()).digest()).decode()
    return Markup(
        '<script src="https://cdn.plot.ly/plotly-{}.min.js" integrity="sha256-{}" '
        'crossorigin="anonymous"></script>'
    ).format(get_plotlyjs_version(), digest)


@cache
def _templates() -> jinja2.Environment:
    folder = Path(__file__).parent / "templates"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Style sheets and scripts go in as they are: their braces are not Jinja2's.
    environment.globals["file"] = lambda name: Markup((folder / name).read_text(encoding="utf-8"))
    return environment
