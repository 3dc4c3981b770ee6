"""The look all figures share: colours, text that plotly shows as written, and a quiet base layout.

One invariant: every text from outside goes through `literal` before plotly sees it, and every
number through `drawable`, so that a token can never become markup and a figure's JSON never holds
NaN.
"""

import math
from collections.abc import Iterable

import plotly.graph_objects as go

from interp.errors import AnalysisError

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"

# Mid-grey reads on white and on near-black, for figures shown outside a report.
INK = "#6f7680"
GRID = "rgba(128,128,128,0.20)"

# After Okabe and Ito's colour-blind-safe hues: cool for the model under study, warm for controls.
COOL = ("#1A7DC0", "#45A5E0", "#009E73", "#7B6FD6", "#4F8A99")
WARM = ("#D55E00", "#E69F00", "#C26A8D", "#A9713B")

# Each scale has a light and a dark form: "nothing here" lies near the page's background in both.
SEQUENTIAL = (
    (0.0, "#eef3f8"),
    (0.25, "#b9d3ea"),
    (0.5, "#6aa5d6"),
    (0.75, "#2470b3"),
    (1.0, "#08306b"),
)
SEQUENTIAL_DARK = (
    (0.0, "#232a33"),
    (0.25, "#1f4a73"),
    (0.5, "#2f7fbd"),
    (0.75, "#7dbbe8"),
    (1.0, "#e6f3fd"),
)
DIVERGING = (
    (0.0, "#0b5394"),
    (0.25, "#74add6"),
    (0.5, "#f4f4f2"),
    (0.75, "#ef9a6c"),
    (1.0, "#b1400f"),
)
DIVERGING_DARK = (
    (0.0, "#8ccbf7"),
    (0.25, "#2b6a9b"),
    (0.5, "#2a2d32"),
    (0.75, "#a85a2c"),
    (1.0, "#ffb68a"),
)

# Pixels above the plot for a figure's own title; a page sets it in HTML and takes them back.
TITLE_SPACE = 62

MOST_CELLS = 2**19
"""Cells in all maps of one figure: about 10 MB of JSON, and some seconds to draw."""

# plotly reads a little HTML, %{...} templates and, where MathJax is loaded, $...$; entities pass
# all three.
_LITERAL = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;", "%": "&#37;", "\n": " "}
)


def literal(text: object) -> str:
    """The text as plotly will show it as written: no tags, no templates, no formulas."""
    return str(text).translate(_LITERAL)


def drawable(value: object) -> float | None:
    """The number to 6 significant digits, or None where it is missing or not finite (a gap)."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return float(f"{number:.6g}") if math.isfinite(number) else None


def short_count(count: int | float) -> str:
    """A large count in at most four characters and a letter: 1638400 is "1.64M"."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.3g}"


def cell_digits(low: float, high: float) -> str:
    """The d3 format of numbers written into the cells of a map with this range of colours."""
    reach = max(abs(low), abs(high))
    if 0.1 <= reach < 10:
        return ".2f"
    if not 1e-4 <= reach < 1e5:
        return ".1e"
    return f".{max(1 - math.floor(math.log10(reach)), 1 if reach < 100 else 0)}f"


def nice_ticks(low: float, high: float, at_most: int = 6) -> list[float]:
    """At most `at_most` round values from low to high, 1, 2 or 5 times a power of ten apart."""
    if not high > low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / at_most))
    step = next(power * m for m in (1, 2, 5, 10, 20) if (high - low) / (power * m) <= at_most - 1)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def colour_range(values: Iterable[float | None], diverging: bool) -> tuple[float, float]:
    """The ends of a colour axis: finite, never equal, symmetric around 0 if diverging.

    A sequential range starts at 0 unless a value lies below it, so pale always means little.
    """
    finite = [v for v in values if v is not None]
    if diverging:
        reach = max((abs(v) for v in finite), default=0.0) or 1.0
        return -reach, reach
    low, high = min([0.0, *finite]), max([0.0, *finite])
    return (low, high) if high > low else (low, low + 1.0)


def choosable(subject: str, step: int | None = None) -> dict[str, object] | None:
    """The `meta` of a map of heads that a click can choose from, and of which training step."""
    if not subject:
        return None
    return {"subject": subject} | ({} if step is None else {"step": int(step)})


def room_for(cells: int, what: str) -> None:
    """Refuse a map of more cells than a page can carry.

    Raises: AnalysisError with `what` was asked for, and the number of cells that fit.
    """
    if cells > MOST_CELLS:
        raise AnalysisError(f"{what}: {cells:,} cells, and a figure holds at most {MOST_CELLS:,}")


def figure(
    title: str,
    subtitle: str,
    caption: str,
    *,
    plot_height: int,
    margins: tuple[int, int, int] = (52, 12, 48),
    head_room: int = 12,
    width: int | None = None,
    notes: Iterable[str] = (),
) -> go.Figure:
    """An empty figure with the shared look; the caption and the notes travel in `layout.meta`.

    `margins` are left, right and bottom, in pixels; `head_room` is what the plot needs above it.
    """
    left, right, bottom = margins
    top = TITLE_SPACE + head_room
    layout = {
        # plotly's default template takes 7 kB a figure and paints backgrounds.
        "template": go.layout.Template(),
        "title": {
            "text": literal(title),
            "subtitle": {"text": literal(subtitle), "font": {"size": 12}},
            "font": {"size": 16},
            "x": 0,
            "xref": "paper",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "pad": {"t": 14},
        },
        "font": {"family": FONT, "size": 12, "color": INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": left, "r": right, "t": top, "b": bottom},
        "height": round(top + plot_height + bottom),
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": GRID, "activecolor": INK},
        "hoverlabel": {"namelength": -1, "font": {"family": FONT, "size": 12}},
        "meta": {"caption": caption, "notes": list(notes)},
    }
    if width:
        layout["width"] = width
    return go.Figure(layout=layout)


def note(x: int | float, y: int | float, text: str, **more: object) -> dict[str, object]:
    """A left-aligned line of text at fractions of the plot; `text` is already literal."""
    place = {
        "x": x,
        "y": y,
        "xref": "paper",
        "yref": "paper",
        "xanchor": "left",
        "yanchor": "bottom",
    }
    return {"text": text, "showarrow": False, "align": "left", **place, **more}


def grid_lines() -> dict[str, object]:
    """The axis settings for lines that stay faint on white and on near-black."""
    return {"gridcolor": GRID, "zeroline": True, "zerolinecolor": GRID}
