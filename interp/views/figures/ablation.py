"""Plotly figures of ablations: bars, one quantity against another, pairs.

One invariant: what has no value is left blank and named in `layout.meta["notes"]`, never drawn as
0. Positions on every axis are numbers with tick text, as in `interp.views.figures.heads`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from interp.errors import AnalysisError
from interp.views.figures import style
from interp.views.figures.style import drawable, literal

Value = float | int | None
COLOURS = (style.COOL[0], style.WARM[0], *style.COOL[2:], *style.WARM[1:], style.COOL[1])
WRITTEN = 12
"""Heads up to which the numbers of a pair matrix are written into its cells."""

LABELS = 6
"""Points of a scatter plot that are named; the others are on hover."""


@dataclass(frozen=True)
class Series:
    """Values by row, with their standard errors; `name` is what a legend calls them."""

    name: str
    values: Sequence[Value]
    errors: Sequence[Value] = ()

    def drawn(self) -> list[float | None]:
        return [drawable(value) for value in self.values]

    def spread(self) -> list[float | None]:
        """The standard errors, None where there are none."""
        known = [drawable(error) for error in self.errors]
        return known or [None] * len(self.values)


def effect_bars(
    labels: Sequence[str],
    series: Sequence[Series],
    *,
    axis: str,
    title: str,
    subtitle: str,
    reading: str,
) -> go.Figure:
    """Bars of effects with one standard error to either side: a row for each label, top first.

    Raises: AnalysisError without rows.
    """
    some_rows(labels)
    bar, gap = 18, 8
    block = bar * len(series) + gap
    total = block * len(labels)
    room = 26 if len(series) > 1 else 0
    figure = style.figure(
        title,
        subtitle,
        f"{reading} Whiskers are one standard error to either side.",
        plot_height=total,
        margins=(16 + 7 * max(map(len, labels)), 16, 46),
        head_room=8 + room,
        notes=[note for own in series for note in _unknown(labels, own, len(series) > 1)],
    )
    for number, own in enumerate(series):
        figure.add_bar(
            x=own.drawn(),
            y=[row * block + gap / 2 + bar * (number + 0.5) for row in range(len(labels))],
            width=bar - 3,
            orientation="h",
            name=literal(own.name),
            marker={"color": COLOURS[number % len(COLOURS)], "opacity": 0.75},
            error_x=_whiskers(own),
            customdata=[[literal(label)] for label in labels],
            hovertemplate=f"%{{customdata[0]}}<br>{literal(own.name)} %{{x:.4g}}<extra></extra>",
        )
    figure.update_layout(
        xaxis={
            "title": {"text": literal(axis)},
            "nticks": 6,
            **style.grid_lines(),
            "zerolinecolor": style.INK,
        },
        yaxis={
            "range": [total, 0],
            "tickmode": "array",
            "tickvals": [(row + 0.5) * block for row in range(len(labels))],
            "ticktext": [literal(label) for label in labels],
            "ticks": "",
            "showgrid": False,
            "zeroline": False,
        },
        showlegend=len(series) > 1,
        legend=legend(total, [own.name for own in series]),
        barmode="overlay",
    )
    return figure


def against(
    labels: Sequence[str],
    across: Series,
    up: Series,
    *,
    axes: tuple[str, str],
    title: str,
    subtitle: str,
    reading: str,
    diagonal: bool,
) -> go.Figure:
    """One quantity of each head against another; the furthest points are named.

    With `diagonal` both axes have one range and a line where the two are equal.

    Raises: AnalysisError without rows.
    """
    some_rows(labels)
    points = [
        (x, y, x_error, y_error, label)
        for x, y, x_error, y_error, label in zip(
            across.drawn(), up.drawn(), across.spread(), up.spread(), labels, strict=True
        )
        if x is not None and y is not None
    ]
    without = [
        label
        for x, y, label in zip(across.drawn(), up.drawn(), labels, strict=True)
        if x is None or y is None
    ]
    figure = style.figure(
        title,
        subtitle,
        reading,
        plot_height=380,
        margins=(62, 16, 50),
        head_room=14,
        width=640,
        notes=_without_value(without, len(labels)),
    )
    errors = {"color": style.INK, "thickness": 0.8, "width": 0}
    figure.add_scatter(
        x=[point[0] for point in points],
        y=[point[1] for point in points],
        error_x={"type": "data", "array": [point[2] for point in points], **errors},
        error_y={"type": "data", "array": [point[3] for point in points], **errors},
        mode="markers",
        marker={"color": style.COOL[0], "size": 7, "opacity": 0.75},
        customdata=[[literal(point[4])] for point in points],
        hovertemplate=f"%{{customdata[0]}}<br>{literal(across.name)} %{{x:.4g}}<br>"
        f"{literal(up.name)} %{{y:.4g}}<extra></extra>",
    )
    x_range = _reach([(point[0], point[2]) for point in points])
    y_range = _reach([(point[1], point[3]) for point in points])
    if diagonal:
        x_range = y_range = [min(x_range[0], y_range[0]), max(x_range[1], y_range[1])]
        figure.add_shape(
            type="line",
            x0=x_range[0],
            y0=x_range[0],
            x1=x_range[1],
            y1=x_range[1],
            line={"color": style.INK, "width": 1, "dash": "dot"},
            layer="below",
        )
    for x, y, label in _named([(p[0], p[1], p[4]) for p in points], x_range, y_range):
        right = x > x_range[0] + 0.75 * (x_range[1] - x_range[0])  # no room beside it
        figure.add_annotation(
            x=x,
            y=y,
            text=literal(label),
            showarrow=False,
            xanchor="right" if right else "left",
            yanchor="bottom",
            xshift=-5 if right else 5,
            yshift=2,
            font={"size": 11},
        )
    figure.update_layout(
        xaxis={"title": {"text": literal(axes[0])}, "range": x_range, "nticks": 6}
        | style.grid_lines(),
        yaxis={"title": {"text": literal(axes[1])}, "range": y_range, "nticks": 7}
        | style.grid_lines(),
        showlegend=False,
    )
    return figure


def pair_matrix(
    labels: Sequence[str],
    values: Mapping[tuple[int, int], Value],
    *,
    column: str,
    title: str,
    subtitle: str,
    reading: str,
) -> go.Figure:
    """A head × head map of a quantity of pairs, by the places of the two in `labels`.

    Each pair is drawn on both sides of the diagonal; pairs without a value stay blank.

    Raises: AnalysisError without heads.
    """
    some_rows(labels)
    size = len(labels)
    grid: list[list[float | None]] = [[None] * size for _ in range(size)]
    for (a, b), value in values.items():
        grid[a][b] = grid[b][a] = drawable(value)
    blank = sum(grid[a][b] is None for a in range(size) for b in range(a))
    low, high = style.colour_range((v for row in grid for v in row), diverging=True)
    height = min(max(28 * size, 90), 520)
    figure = style.figure(
        title,
        subtitle,
        reading,
        plot_height=height,
        margins=(16 + 7 * max(map(len, labels)), 12, 24 + 7 * max(map(len, labels))),
        width=200 + (64 * max(size, 4) if size <= WRITTEN else height),
        notes=[f"Blank: {blank} of {size * (size - 1) // 2} pairs have no value."] if blank else [],
    )
    figure.add_heatmap(
        z=grid,
        x=list(range(size)),
        y=list(range(size)),
        customdata=[[[literal(a), literal(b)] for b in labels] for a in labels],
        hovertemplate="%{customdata[0]} and %{customdata[1]}<br>"
        f"{literal(column)} %{{z:.4g}}<extra></extra>",
        texttemplate=f"%{{z:{style.cell_digits(low, high)}}}" if size <= WRITTEN else None,
        coloraxis="coloraxis",
        hoverongaps=False,
        xgap=1.5,
        ygap=1.5,
    )
    every = -(-size // 14)  # what a phone has room for
    names = {
        "tickmode": "array",
        "tickvals": list(range(0, size, every)),
        "ticktext": [literal(label) for label in labels[::every]],
        "ticks": "",
        "showgrid": False,
        "zeroline": False,
    }
    figure.update_layout(
        coloraxis={
            "cmin": low,
            "cmax": high,
            "colorscale": style.DIVERGING,
            "colorbar": {"thickness": 12, "outlinewidth": 0, "ticklen": 3, "nticks": 5},
        },
        xaxis=names | {"tickangle": -90},
        yaxis=names | {"autorange": "reversed", "tickangle": 0},
    )
    return figure


def some_rows(rows: Sequence[object]) -> None:
    """Refuse to draw nothing."""
    if not rows:
        raise AnalysisError("nothing to draw: there is no row")


def _whiskers(own: Series) -> dict[str, object] | None:
    if not own.errors:
        return None
    look = {"color": style.INK, "thickness": 1.5, "width": 3}
    return {"type": "data", "array": own.spread(), **look}


def legend(height: int, names: Sequence[str]) -> dict[str, object]:
    """A legend above a plot of so many pixels, in as many columns as there is room for."""
    return {
        "orientation": "h",
        "font": {"size": 11},
        "entrywidth": 8 * max(map(len, names)),
        "x": 0,
        "xanchor": "left",
        "y": 1 + 4 / height,
        "yanchor": "bottom",
    }


def _reach(points: Sequence[tuple[float, float | None]]) -> list[float]:
    """The ends of an axis with all points, their errors, 0, and some room."""
    low = min([0.0, *(value - (error or 0.0) for value, error in points)])
    high = max([0.0, *(value + (error or 0.0) for value, error in points)])
    room = 0.06 * (high - low) or 1.0
    return [low - room, high + room]


def _named(
    points: Sequence[tuple[float, float, str]], x_range: Sequence[float], y_range: Sequence[float]
) -> list[tuple[float, float, str]]:
    """The points furthest from the middle of the crowd, 0, whose names do not overlap."""
    wide, high = x_range[1] - x_range[0], y_range[1] - y_range[0]
    ordered = sorted(points, key=lambda point: -math.hypot(point[0] / wide, point[1] / high))
    chosen: list[tuple[float, float, str]] = []
    for x, y, label in ordered[: 2 * LABELS]:
        apart = all(
            abs(x - other_x) / wide > 0.17 or abs(y - other_y) / high > 0.05
            for other_x, other_y, _ in chosen
        )
        if apart and math.hypot(x / wide, y / high) > 0.05 and len(chosen) < LABELS:
            chosen.append((x, y, label))
    return chosen


def _unknown(labels: Sequence[str], own: Series, several: bool) -> list[str]:
    without = [label for label, v in zip(labels, own.drawn(), strict=True) if v is None]
    lead = f"{own.name}: " if several else ""
    return [lead + note for note in _without_value(without, len(labels))]


def _without_value(without: Sequence[str], count: int) -> list[str]:
    if not without:
        return []
    named = ", ".join(without[:24]) + (", …" if len(without) > 24 else "")
    return [f"Not drawn, without a value: {named} ({len(without)} of {count})."]
