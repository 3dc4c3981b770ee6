"""Plotly figures of quantization: what each way of rounding costs, and where the error grows.

One invariant: what has no value is left blank and named in `layout.meta["notes"]`, never drawn as
0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

from interp.errors import AnalysisError
from interp.views.figures import style
from interp.views.figures.runs import require
from interp.views.figures.style import drawable, literal
from interp.views.quantization_words import Variant, clear, variants

MOST_PANELS = 8
"""Panels of errors by layer that one figure has."""

_NAMES = {
    "rounded": "sinks rounded",
    "kept": "sinks kept",
    "": "weights alone",
}
_COLOURS = {"rounded": style.COOL[0], "kept": style.WARM[0], "": style.COOL[2]}
_MARKERS = {"rounded": "circle", "kept": "diamond-open", "": "square"}
_DASHES = {"token": "dash", "vector": "dot"}

_WIDE = 30.0
"""Values further apart than this are drawn by powers of ten."""


def rounding_costs(
    table: pd.DataFrame, *, title: str, subtitle: str, unit: str, reading: str
) -> go.Figure:
    """The change in loss of each way of rounding: a row for each, under its scheme.

    Rounded and kept sinks are two markers of one row. Where costs lie far apart the axis goes by
    powers of ten, and is linear around 0, so that no cost and a gain have their place.

    Raises: AnalysisError without a value.
    """
    require(table, "scheme", "loss_change")
    rows = variants(table)
    known = [row for row in rows if row.change is not None]
    if not known:
        raise AnalysisError("nothing to draw: no way of rounding has a finite loss")
    row_height, heading = 26, 28
    places: dict[tuple[str, str, str, str], float] = {}
    headings: dict[str, float] = {}
    spans: list[tuple[float, float]] = []
    total = 0.0
    for group in dict.fromkeys(row.group for row in rows):
        headings[group] = total + heading - 6
        total += heading
        for place in dict.fromkeys(row.place for row in rows if row.group == group):
            places[place] = total + row_height / 2
            total += row_height
        spans.append((headings[group] + 6, total))
    labels = {row.place: row.label for row in rows}
    left = 16 + 7 * max(map(len, labels.values()))
    kinds = [kind for kind in _NAMES if any(row.sinks == kind for row in rows)]
    scale = _scale(known)
    room = _legend_room(len(kinds), 1)
    figure = style.figure(
        title,
        subtitle,
        " ".join(filter(None, [reading, _told(scale, unit)])),
        plot_height=round(total),
        margins=(left, 20, 46),
        head_room=8 + room,
        notes=_without_value([row for row in rows if row.change is None]),
    )
    for kind in kinds:
        _add_markers(figure, [row for row in known if row.sinks == kind], kind, places, scale)
    for group, at in headings.items():
        figure.add_annotation(
            # From the left edge: over the plot alone a phone would cut it.
            style.note(0, at, f"<b>{literal(group)}</b>", yref="y", xshift=8 - left)
        )
    # The axis's own line of zero would strike the headings through.
    zero = {"color": style.INK, "width": 1}
    for top, bottom in spans:
        figure.add_shape(type="line", x0=0, x1=0, y0=top, y1=bottom, line=zero, layer="below")
    ends = [scale.at(end) for row in known for end in _ends(row)]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    spare = 0.04 * (high - low) or 1.0
    figure.update_layout(
        xaxis={
            "title": {"text": literal(f"change in loss, {unit} a token")},
            "range": [low - spare, high + spare],
            **scale.ticks(low - spare, high + spare),
            **style.grid_lines(),
        },
        yaxis={
            "range": [total, 0],
            "tickmode": "array",
            "tickvals": list(places.values()),
            "ticktext": [literal(labels[place]) for place in places],
            "ticks": "",
            "showgrid": False,
            "zeroline": False,
        },
        showlegend=len(kinds) > 1,
        legend=_legend(round(total), [_NAMES[kind] for kind in kinds]),
    )
    return figure


def errors_by_layer(layers: pd.DataFrame, *, title: str, subtitle: str, reading: str) -> go.Figure:
    """The error of the residual stream after each block: a panel for each scheme and its bits.

    All panels have one axis of errors, by powers of ten where they span more than 30 times.

    Raises: AnalysisError without a value.
    """
    require(layers, "scheme", "layer", "error")
    every = _lines(layers)
    lines = [(row, own) for row, own in every if _known(own)]
    panels = list(dict.fromkeys(_panel(row) for row, _ in lines))
    drawn = panels[:MOST_PANELS]
    lines = [(row, own) for row, own in lines if _panel(row) in drawn]
    values = [value for _, own in lines for value in _known(own)]
    if not values:
        raise AnalysisError("nothing to draw: no layer has a finite error")
    positive = [value for value in values if value > 0]
    powers = bool(positive) and max(positive) > _WIDE * min(positive)
    entries = list(dict.fromkeys(_entry(row) for row, _ in lines))
    notes = _unseen(every, powers)
    if left := panels[MOST_PANELS:]:
        notes.append(f"Not drawn: {'; '.join(left)}. The table of errors by layer has them.")
    panel_height, heading = 118, 34
    total = len(drawn) * (panel_height + heading)
    room = _legend_room(len(entries), 2)
    figure = style.figure(
        title,
        subtitle,
        f"{reading} All panels share both axes"
        + ("; errors go by powers of ten." if powers else "."),
        plot_height=total,
        margins=(56, 20, 48),
        head_room=room,
        notes=notes,
    )
    for number, panel in enumerate(drawn):
        top = 1 - (number * (panel_height + heading) + heading) / total
        axis = "y" if number == 0 else f"y{number + 1}"
        figure.add_annotation(style.note(0, top, f"<b>{literal(panel)}</b>", xshift=-48, yshift=4))
        figure.layout[f"yaxis{number + 1}"] = {
            "domain": [max(0.0, top - panel_height / total), top],
            "anchor": "x",
            **_error_axis(positive if powers else values, powers),
        }
        for row, own in lines:
            if _panel(row) == panel:
                _add_line(figure, row, own, axis, powers, entries)
    figure.update_layout(
        xaxis={
            "title": {"text": "layer: after block"},
            "nticks": 8,
            "anchor": "y" if len(drawn) == 1 else f"y{len(drawn)}",
            **style.grid_lines(),
            "zeroline": False,
        },
        showlegend=len(entries) > 1,
        legend=_legend(total, entries),
    )
    # A line stands for its kind in all panels; each kind is in the legend once.
    shown: set[str] = set()
    for trace in figure.data:
        trace.showlegend = trace.legendgroup not in shown
        shown.add(trace.legendgroup)
    return figure


@dataclass(frozen=True)
class _Scale:
    """Where a value is drawn: linear within `knee` of 0, by powers of ten beyond; or all linear."""

    knee: float | None

    def at(self, value: float) -> float:
        if self.knee is None:
            return value
        size = abs(value) / self.knee
        return math.copysign(size if size <= 1 else 1 + math.log10(size), value)

    def ticks(self, low: float, high: float) -> dict[str, object]:
        """The axis's ticks, of which as few as a phone has room for are written."""
        if self.knee is None:
            return {"nticks": 6}
        ends = round(max(-low, high))
        steps = (1, 3) if ends <= 3 else (1,)
        sizes = [self.knee * step * 10.0**power for power in range(ends + 1) for step in steps]
        values = [*(-size for size in reversed(sizes)), 0.0, *sizes]
        within = [value for value in values if low <= self.at(value) <= high]
        return {
            "tickmode": "array",
            "tickvals": [drawable(self.at(value)) for value in within],
            "ticktext": [f"{value:g}".replace("-", "−") for value in within],
            "tickangle": 0,
        }


def _scale(rows: Sequence[Variant]) -> _Scale:
    """By powers of ten where clear costs lie far apart; an unclear one may be as small as it is."""
    sizes = [abs(row.change) for row in rows if row.change and clear(row.change, row.change_se)]
    if not sizes or max(sizes) <= _WIDE * min(sizes):
        return _Scale(None)
    least = max(min(sizes), max(sizes) / 1e4)
    return _Scale(10.0 ** math.floor(math.log10(least)))


def _told(scale: _Scale, unit: str) -> str:
    whiskers = "Whiskers are one standard error to either side."
    if scale.knee is None:
        return whiskers
    return (
        f"{whiskers} The axis is linear within {scale.knee:g} {unit} of 0, and goes by powers of "
        "ten beyond."
    )


def _ends(row: Variant) -> tuple[float, float]:
    assert row.change is not None  # only such rows are drawn
    spread = row.change_se or 0.0
    return row.change - spread, row.change + spread


def _add_markers(
    figure: go.Figure,
    rows: Sequence[Variant],
    kind: str,
    places: dict[tuple[str, str, str, str], float],
    scale: _Scale,
) -> None:
    """The rows of one kind; rounded and kept stand a little above and below the middle."""
    shift = {"rounded": -4.0, "kept": 4.0, "": 0.0}[kind]
    known = [(row, row.change) for row in rows if row.change is not None]
    at = [scale.at(change) for _, change in known]
    figure.add_scatter(
        x=[drawable(value) for value in at],
        y=[places[row.place] + shift for row, _ in known],
        mode="markers",
        marker={"symbol": _MARKERS[kind], "size": 9, "color": _COLOURS[kind]},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [
                drawable(scale.at(_ends(row)[1]) - middle)
                for (row, _), middle in zip(known, at, strict=True)
            ],
            "arrayminus": [
                drawable(middle - scale.at(_ends(row)[0]))
                for (row, _), middle in zip(known, at, strict=True)
            ],
            "color": _COLOURS[kind],
            "thickness": 1.5,
            "width": 3,
        },
        name=literal(_NAMES[kind]),
        customdata=[
            [literal(row.group), literal(row.label), change, row.change_se] for row, change in known
        ],
        hovertemplate=f"%{{customdata[0]}}<br>%{{customdata[1]}}, {literal(_NAMES[kind])}<br>"
        "%{customdata[2]:+.4g} ± %{customdata[3]:.2g}<extra></extra>",
    )


def _without_value(rows: Sequence[Variant]) -> list[str]:
    if not rows:
        return []
    names = [f"{row.method} {row.label}, {_NAMES.get(row.sinks, row.sinks)}" for row in rows]
    return [f"Not drawn, without a value: {'; '.join(names)}."]


def _lines(layers: pd.DataFrame) -> list[tuple[Variant, pd.DataFrame]]:
    """The rows of each way of rounding, by layer."""
    found: dict[Variant, list[int]] = {}
    for number, row in enumerate(variants(layers)):
        found.setdefault(row, []).append(number)
    return [(row, layers.iloc[own].sort_values("layer")) for row, own in found.items()]


def _known(own: pd.DataFrame) -> list[float]:
    return [value for value in map(drawable, own["error"]) if value is not None]


def _panel(row: Variant) -> str:
    return f"{row.method}, {row.bits.upper()}, weights {row.weights}"


def _entry(row: Variant) -> str:
    """What the legend calls a line."""
    if not row.scales:
        return _NAMES[""]
    return f"{row.scales}, kept" if row.kept else row.scales


def _add_line(
    figure: go.Figure,
    row: Variant,
    own: pd.DataFrame,
    axis: str,
    powers: bool,
    entries: Sequence[str],
) -> None:
    entry = _entry(row)
    errors = [drawable(value) for value in own["error"]]
    figure.add_scatter(
        x=[int(layer) for layer in own["layer"]],
        y=[None if powers and value is not None and value <= 0 else value for value in errors],
        yaxis=axis,
        mode="lines" if len(own) > 1 else "markers",
        line={
            "color": _COLOURS.get(row.sinks, style.INK),
            # Where keeping sinks changes nothing both lines are seen, one inside the other.
            "width": 1.5 if row.kept else 3.5,
            "dash": _DASHES.get(row.activation_scales, "solid"),
        },
        connectgaps=False,
        name=literal(entry),
        legendgroup=literal(entry),
        legendrank=entries.index(entry) + 1,
        hovertemplate=f"{literal(entry)}<br>after block %{{x}}: %{{y:.3g}}<extra></extra>",
    )


def _unseen(lines: Sequence[tuple[Variant, pd.DataFrame]], powers: bool) -> list[str]:
    """What the panels cannot show."""
    values = [drawable(value) for _, own in lines for value in own["error"]]
    notes = []
    if lacking := sum(value is None for value in values):
        notes.append(f"Blank, without a value: {lacking:,} of {len(values):,} errors.")
    if powers and (zeros := sum(value is not None and value <= 0 for value in values)):
        notes.append(
            f"Blank, 0 has no place on a logarithmic scale: {zeros:,} of {len(values):,} errors."
        )
    return notes


def _error_axis(values: Sequence[float], powers: bool) -> dict[str, object]:
    if not powers:
        return {"range": [0, 1.08 * max(values) or 1.0], "nticks": 4, **style.grid_lines()}
    low, high = math.log10(min(values)) - 0.1, math.log10(max(values)) + 0.1
    ticks = [10.0**power for power in range(math.ceil(low), math.floor(high) + 1)]
    return {
        "type": "log",
        "range": [low, high],
        "tickmode": "array",
        "tickvals": ticks,
        "ticktext": [f"{tick:g}" for tick in ticks],
        **style.grid_lines(),
    }


def _legend_room(entries: int, in_a_row: int) -> int:
    """Pixels above the plot for a legend with so many entries in a row on a phone."""
    return 0 if entries < 2 else 20 * math.ceil(entries / in_a_row) + 6


def _legend(height: int, names: Sequence[str]) -> dict[str, object]:
    """A legend above the plot, as narrow as its names allow."""
    return {
        "orientation": "h",
        "font": {"size": 11},
        "entrywidth": 5.6 * max(map(len, names)),
        "x": 0,
        "xanchor": "left",
        "y": 1 + 4 / height,
        "yanchor": "bottom",
    }
