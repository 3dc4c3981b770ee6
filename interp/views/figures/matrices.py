"""Plotly figures of head × head quantities and of outliers in the residual stream.

One invariant: positions on every axis are numbers with tick text, and a cell that cannot exist is
told apart from one that was not measured.
"""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from interp.errors import AnalysisError
from interp.views.figures import style
from interp.views.figures.runs import about, require
from interp.views.figures.style import drawable, literal

Head = tuple[int, int]

WRITTEN = 12
"""Heads up to which every one has a tick; above, ticks stand for layers."""

DECADES = 3
"""Powers of ten above which magnitudes are coloured by their logarithm."""


def composition_matrix(
    table: pd.DataFrame,
    column: str,
    *,
    title: str = "",
    subtitle: str = "",
    unit: str = "",
    reading: str = "",
    bounds: tuple[float, float] | None = None,
    diverging: bool = False,
) -> go.Figure:
    """A quantity of two heads, the earlier down and the later across.

    `table` has a row a pair: integers `layer_a` and `head_a`, the earlier head, `layer_b` and
    `head_b`, the later one, and the column. Heads that are in no row have no place. The colours
    span `bounds`, or 0 to the largest value; `diverging` makes them symmetric around 0.

    Raises:
        AnalysisError: the table is empty, lacks a column, has a pair twice, or one whose later head
            is not in a later layer; or it is too large for a figure.
    """
    require(table, "layer_a", "head_a", "layer_b", "head_b", column)
    values = _pairs(table, column)
    rows = sorted({earlier for earlier, _ in values})
    columns = sorted({later for _, later in values})
    style.room_for(len(rows) * len(columns), f"{len(rows)} heads against {len(columns)}")
    grid = [[values.get((a, b)) for b in columns] for a in rows]
    low, high = bounds or style.colour_range((v for row in grid for v in row), diverging)
    called = column.replace("_", " ")
    ends = "orange is above 0, blue below" if diverging else "stronger is more"
    impossible = any(b[0] <= a[0] for a in rows for b in columns)
    cell = max(min(26, 560 // max(len(rows), len(columns))), 3)
    labels_room = 18 + 7 * max(len(_label(head)) for head in (*rows, *columns))
    figure = style.figure(
        title or f"{called[:1].upper()}{called[1:]} of pairs of heads",
        subtitle or about(table, unit),
        f"Down: the earlier head; across: the later one. Colour is "
        f"{f'{called}, {unit}' if unit else called}: {ends}."
        + (
            " Only a head of a later layer can read an earlier one: other cells are blank."
            if impossible
            else ""
        )
        + (f" {reading}" if reading else ""),
        plot_height=max(cell * len(rows), 90),
        margins=(labels_room + 16, 12, labels_room + 20),
        width=max(cell * len(columns), 160) + labels_room + 130,
        notes=_missing_pairs(values, rows, columns),
    )
    figure.add_heatmap(
        z=grid,
        x=list(range(len(columns))),
        y=list(range(len(rows))),
        customdata=[[[_label(a), _label(b)] for b in columns] for a in rows],
        hovertemplate="%{customdata[0]} then %{customdata[1]}<br>"
        f"{literal(called)} %{{z:.4g}}<extra></extra>",
        coloraxis="coloraxis",
        hoverongaps=False,
        **({"xgap": 1, "ygap": 1} if cell >= 8 else {}),
    )
    for axis, heads in (("x", columns), ("y", rows)):
        for edge in _layer_edges(heads):
            other = "y" if axis == "x" else "x"
            place = {f"{axis}0": edge, f"{axis}1": edge, f"{other}0": 0, f"{other}1": 1}
            across = {f"{other}ref": f"{other} domain"}
            figure.add_shape(
                type="line",
                layer="below",
                line={"color": style.GRID, "width": 1},
                **place,
                **across,
            )
    figure.update_layout(
        coloraxis={
            "cmin": low,
            "cmax": high,
            "colorscale": style.DIVERGING if diverging else style.SEQUENTIAL,
            "colorbar": {"thickness": 12, "outlinewidth": 0, "ticklen": 3, "nticks": 5},
        },
        xaxis=_head_axis(columns, "later head") | {"tickangle": -90},
        yaxis=_head_axis(rows, "earlier head") | {"tickangle": 0, "autorange": "reversed"},
    )
    return figure


def outlier_landscape(
    table: pd.DataFrame,
    *,
    title: str = "Outliers in the residual stream",
    subtitle: str = "",
    unit: str = "",
    reading: str = "",
) -> go.Figure:
    """Where large values lie: the largest of each layer and position, and of each dimension.

    `table` has a row a value: integers `layer`, `position` and `dimension`, `magnitude` (its size,
    0 or above), and, if known, `token`, the text at the position. Above, layer × position; below,
    layer × dimension, with only the dimensions that the table holds, in order. Both share one
    colour range, logarithmic where the magnitudes above 0 span more than 1000.

    Raises:
        AnalysisError: the table is empty, lacks a column, has a magnitude below 0, or is too large
            for a figure.
    """
    require(table, "layer", "position", "dimension", "magnitude")
    size = pd.to_numeric(table["magnitude"], errors="coerce").to_numpy(dtype=float)
    if (size < 0).any():
        raise AnalysisError(f"magnitude {np.nanmin(size):g}: a size is 0 or above")
    known = table[np.isfinite(size)]
    known = known.sort_values("magnitude", ascending=False, kind="stable")
    positive = size[np.isfinite(size) & (size > 0)]
    logarithmic = bool(len(positive)) and math.log10(positive.max() / positive.min()) > DECADES
    layers = list(range(int(table["layer"].max()) + 1))
    positions = list(range(int(table["position"].max()) + 1))
    dimensions = sorted(set(table["dimension"].astype(int)))
    cells = len(layers) * (len(positions) + len(dimensions))
    style.room_for(cells, f"{len(layers)} layers of {len(positions)} positions")
    row = max(min(18, 320 // len(layers)), 4)
    room, between = row * len(layers), 74
    total = 2 * room + between
    by_position, by_dimension = (_largest(known, axis) for axis in ("position", "dimension"))
    blank = len(layers) * len(positions) - len(by_position)
    notes = [
        f"Blank, without a value: {blank:,} of {len(layers) * len(positions):,} cells by position."
    ] * bool(blank)
    if without := int((~np.isfinite(size)).sum()):
        notes.append(f"Left out, not finite: {without:,} of {len(table):,} values.")
    if logarithmic and (zeros := int((size == 0).sum())):
        notes.append(
            f"Blank, 0 has no place on a logarithmic scale: {zeros:,} of {len(table):,} values."
        )
    figure = style.figure(
        title,
        subtitle or about(table, unit),
        "Above: the largest value of each layer (down, the first at the top) and position "
        "(across). Below: the largest of each layer and dimension. "
        + ("Colours go by powers of ten, since values span more than 1000. " if logarithmic else "")
        + (f"Colour is the magnitude, {unit}." if unit else "Colour is the magnitude.")
        + (f" {reading}" if reading else ""),
        plot_height=total,
        margins=(52, 12, 48),
        head_room=30,
        width=900,
        notes=notes,
    )
    shown = [float(own) for own in positive] if logarithmic else [0.0, *positive.tolist()]
    low, high = (min(shown), max(shown)) if shown else (0.0, 1.0)
    low, high = (low, high) if high > low else (low, low + 1.0)
    bar: dict[str, object] = {"thickness": 12, "outlinewidth": 0, "ticklen": 3, "nticks": 6}
    if logarithmic:
        low, high = math.log10(low), math.log10(high)
        ticks = list(range(math.ceil(low), math.floor(high) + 1))
        labels = [style.short_count(10.0**tick) for tick in ticks]
        bar |= {"tickmode": "array", "tickvals": ticks, "ticktext": labels}
    tokens = _tokens(table)
    panels = (
        ("position", positions, by_position, "Largest by position"),
        ("dimension", dimensions, by_dimension, "Largest by dimension"),
    )
    for number, (axis, places, largest, heading) in enumerate(panels, start=1):
        end = 1.0 if number == 1 else room / total
        suffix = "" if number == 1 else "2"
        figure.add_annotation(
            style.note(0, end, f"<b>{heading}</b>", yshift=3, font={"size": 12.5})
        )
        figure.add_heatmap(
            z=[[_coloured(largest.get((a, b)), logarithmic) for b in places] for a in layers],
            x=list(range(len(places))),
            y=layers,
            xaxis=f"x{suffix}",
            yaxis=f"y{suffix}",
            customdata=[[_detail(largest.get((a, b)), tokens) for b in places] for a in layers],
            hovertemplate="layer %{y}, position %{customdata[1]}%{customdata[3]}<br>dimension "
            "%{customdata[2]}<br>magnitude %{customdata[0]:.4g}<extra></extra>",
            coloraxis="coloraxis",
            hoverongaps=False,
        )
        figure.layout[f"xaxis{suffix}"] = _place_axis(places, axis, 9) | {"anchor": f"y{suffix}"}
        figure.layout[f"yaxis{suffix}"] = _place_axis(layers, "layer", 16) | {
            "anchor": f"x{suffix}",
            "autorange": "reversed",
            "domain": [end - room / total, end],
        }
    colours = {"cmin": low, "cmax": high, "colorscale": style.SEQUENTIAL, "colorbar": bar}
    figure.update_layout(coloraxis=colours)
    return figure


def _pairs(table: pd.DataFrame, column: str) -> dict[tuple[Head, Head], float | None]:
    names = ["layer_a", "head_a", "layer_b", "head_b"]
    places = table[names].astype(int).itertuples(index=False, name=None)
    values: dict[tuple[Head, Head], float | None] = {}
    for (layer_a, head_a, layer_b, head_b), value in zip(places, table[column], strict=True):
        pair = (layer_a, head_a), (layer_b, head_b)
        name = f"{_label(pair[0])} then {_label(pair[1])}"
        if layer_b <= layer_a:
            raise AnalysisError(f"{name}: the later head (b) must be in a later layer")
        if pair in values:
            raise AnalysisError(f"a matrix needs one row a pair: {name} has several")
        values[pair] = drawable(value)
    return values


def _missing_pairs(
    values: dict[tuple[Head, Head], float | None], rows: list[Head], columns: list[Head]
) -> list[str]:
    possible = [(a, b) for a in rows for b in columns if b[0] > a[0]]
    kinds = {
        "not measured": [pair for pair in possible if pair not in values],
        "without a finite value": [pair for pair, value in values.items() if value is None],
    }
    return [
        f"Blank, {why}: {', '.join(f'{_label(a)}–{_label(b)}' for a, b in pairs[:12])}"
        f"{', …' if len(pairs) > 12 else ''} ({len(pairs)} of {len(possible)} pairs)."
        for why, pairs in kinds.items()
        if pairs
    ]


def _label(head: Head) -> str:
    return f"L{head[0]}H{head[1]}"


def _layer_edges(heads: list[Head]) -> list[float]:
    """Between which places the layer changes."""
    return [place - 0.5 for place in range(1, len(heads)) if heads[place][0] != heads[place - 1][0]]


def _head_axis(heads: list[Head], title: str) -> dict[str, object]:
    """A tick a head, or where there are many one in the middle of each layer."""
    if len(heads) <= WRITTEN:
        places: list[float] = [float(place) for place in range(len(heads))]
        labels = [_label(head) for head in heads]
    else:
        layers = list(dict.fromkeys(layer for layer, _ in heads))
        of = {own: [p for p, head in enumerate(heads) if head[0] == own] for own in layers}
        every = -(-len(layers) // 16)
        places = [(of[own][0] + of[own][-1]) / 2 for own in layers[::every]]
        labels = [f"L{own}" for own in layers[::every]]
    return _axis(title, places, labels)


def _place_axis(numbers: list[int], title: str, at_most: int) -> dict[str, object]:
    every = -(-len(numbers) // at_most)
    places = [float(place) for place in range(0, len(numbers), every)]
    return _axis(title, places, [str(number) for number in numbers[::every]]) | {"tickangle": 0}


def _axis(title: str, places: list[float], labels: Sequence[str]) -> dict[str, object]:
    return {
        "title": {"text": title, "standoff": 6},
        "tickmode": "array",
        "tickvals": places,
        "ticktext": list(labels),
        "ticks": "",
        "showgrid": False,
        "zeroline": False,
    }


Largest = tuple[float, int, int]
"""A magnitude, its position and its dimension."""


def _largest(ordered: pd.DataFrame, axis: str) -> dict[tuple[int, int], Largest]:
    """The largest value of each layer and place, from rows in falling order."""
    found: dict[tuple[int, int], Largest] = {}
    columns = ["layer", axis, "magnitude", "position", "dimension"]
    for layer, place, size, position, dimension in ordered[columns].itertuples(
        index=False, name=None
    ):
        key = (int(layer), int(place))
        found.setdefault(key, (float(size), int(position), int(dimension)))
    return found


def _tokens(table: pd.DataFrame) -> dict[int, str]:
    """The text at each position, where the table has it and it is one."""
    if "token" not in table:
        return {}
    pairs = table[["position", "token"]].dropna().drop_duplicates()
    once = pairs[~pairs["position"].duplicated(keep=False)]
    return {int(p): str(t) for p, t in zip(once["position"], once["token"], strict=True)}


def _coloured(value: Largest | None, logarithmic: bool) -> float | None:
    if value is None:
        return None
    if not logarithmic:
        return drawable(value[0])
    return drawable(math.log10(value[0])) if value[0] > 0 else None


def _detail(value: Largest | None, tokens: dict[int, str]) -> list[object] | None:
    if value is None:
        return None
    size, position, dimension = value
    token = literal(f" “{tokens[position]}”") if position in tokens else ""
    return [drawable(size), position, dimension, token]
