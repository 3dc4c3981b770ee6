"""One self-contained HTML page: what its parts are, and how they are rendered.

One invariant: the file needs nothing outside itself and depends on nothing but its parts, so the
same parts give the same bytes. plotly.js is inlined exactly once, and only where a page has a
figure.
"""

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import ClassVar

import jinja2
import numpy as np
import pandas as pd
import plotly.graph_objects as go
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from interp.views import style

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
    """A table of text cells; a cell's second line (after a line break) is set smaller."""

    kind: ClassVar[str] = "table"
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    # How many columns from the left hold words; the rest are numbers, set to the right.
    words: int = 1


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


Part = Words | Points | Table | Source | Folded | Plot


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


def render(page: Page) -> str:
    """The page as one HTML file that works offline, in light and dark, on a phone."""
    plots: list[_Drawn] = []
    sections = []
    for section in page.sections:
        parts: list[Part | _Drawn] = []
        for part in section.parts:
            if isinstance(part, Plot):
                plots.append(_draw(part.figure, f"fig-{len(plots) + 1}"))
                parts.append(plots[-1])
            else:
                parts.append(part)
        sections.append({"name": section.name, "heading": section.heading, "parts": parts})
    library = Markup(_library()) if plots else ""
    template = _templates().get_template("report.html.j2")
    return template.render(page=page, sections=sections, plots=plots, library=library)


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
    rows = table[columns].astype(object).itertuples(index=False, name=None)
    return Table(
        caption,
        tuple(str(column).replace("_", " ") for column in columns),
        tuple(tuple(number(value) for value in row) for row in rows),
        words=len(first),
    )


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
    if "coloraxis" in layout:
        scale = tuple(tuple(stop) for stop in layout["coloraxis"]["colorscale"])
        light["coloraxis.colorscale"] = scale
        dark["coloraxis.colorscale"] = (
            style.DIVERGING_DARK if scale == style.DIVERGING else style.SEQUENTIAL_DARK
        )
    return _Drawn(
        name,
        html.unescape(title.get("text") or ""),
        html.unescape((title.get("subtitle") or {}).get("text") or ""),
        meta.get("caption", ""),
        tuple(meta.get("notes", ())),
        height,
        width,
        _script_json(whole["data"]),
        _script_json(layout),
        _script_json(light),
        _script_json(dark),
    )


def _script_json(value: object) -> Markup:
    """Strict JSON that may stand in a script element: no NaN, no character that could end it."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


@cache
def _library() -> str:
    return get_plotlyjs()


@cache
def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
