"""Plotly figures of massive activations: with the sinks they go with, and what changing them does.

One invariant: what has no value is left blank, and a change that changed no cell is grey and says
so, because its 0 is no effect.
"""

import math
from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from interp.views.figures import style
from interp.views.figures.runs import blank_notes, head_grid, require
from interp.views.figures.style import drawable, literal

FOUND, OTHER, VALUE = style.COOL[0], style.INK, style.WARM[0]

CONTROL = "random-cells"
"""The change that is drawn as a control."""

_HEADING = 22
_GAP = 26


def sink_link(
    table: pd.DataFrame,
    layers: pd.DataFrame,
    *,
    title: str,
    subtitle: str,
    main_layer: int,
    subject: str = "",
    pruned: Sequence[tuple[int, int]] = (),
) -> go.Figure:
    """Panels over one axis of layers: how large the stream is, the mass of each head, the norms.

    `table` is that of `outlier_sinks`, `layers` its further table; `main_layer` is marked.

    Raises: AnalysisError for an empty table, or one that lacks a column.
    """
    require(layers, "layer", "magnitude", "magnitude_others", "mass", "mass_null")
    numbers, heads, by_layer = head_grid(table, "outlier_sinks", pruned)
    by_head = [list(column) for column in zip(*by_layer, strict=True)]
    panels = (
        (
            130,
            f"Largest |x| of {_in(FOUND, 'found tokens')} and {_in(OTHER, 'others')}",
            "y",
        ),
        (min(max(15 * len(heads), 60), 300), "Attention to found tokens, by head", "y2"),
        (90, f"Its {_in(FOUND, 'mean over heads')}, and {_in(OTHER, 'an even head')}", "y3"),
        (
            110,
            f"Length over others': {_in(FOUND, 'keys')}, {_in(VALUE, 'values')}",
            "y4",
        ),
    )
    total = sum(height + _HEADING for height, _, _ in panels) + _GAP * (len(panels) - 1)
    figure = style.figure(
        title,
        subtitle,
        "All panels share the layers, counted by the blocks before them. Where the uppermost line "
        "rises, found tokens have activations far above the others' (a logarithmic axis); the map "
        "shows how much attention each head gives them, the lowest lines how long their keys and "
        "values are compared with other tokens' (1 is as long). The upright line stands before the "
        "first layer in which most of them are massive. That these go together does not say which "
        "makes which.",
        plot_height=total,
        margins=(52, 12, 46),
        head_room=4,
        notes=blank_notes(table, by_layer, pruned),
    )
    top = 0.0
    for height, heading, axis in panels:
        end = 1 - (top + _HEADING) / total
        figure.layout[f"yaxis{axis[1:]}"] = {
            "domain": [max(end - height / total, 0.0), end],
            "anchor": "x",
            **style.grid_lines(),
            "nticks": 5,
        }
        figure.add_annotation(style.note(0, end, f"<b>{heading}</b>", yshift=2, font={"size": 12}))
        top += _HEADING + height + _GAP
    places = [int(layer) for layer in layers["layer"]]
    for name, axis, colour, called in (
        ("magnitude", "y", FOUND, "found tokens"),
        ("magnitude_others", "y", OTHER, "others"),
        ("mass", "y3", FOUND, "mean over heads"),
        ("mass_null", "y3", OTHER, "an even head"),
        ("key_norm_ratio", "y4", FOUND, "key length, found over others"),
        ("value_norm_ratio", "y4", VALUE, "value length, found over others"),
    ):
        figure.add_scatter(
            x=places,
            y=_above_0(layers[name]) if axis == "y" else [drawable(v) for v in layers[name]],
            yaxis=axis,
            mode="lines+markers",
            line={"color": colour, "width": 2, "dash": "solid"},
            marker={"size": 4},
            name=called,
            connectgaps=False,
            hovertemplate=f"layer %{{x}}<br>{called} %{{y:.4g}}<extra></extra>",
        )
    figure.add_heatmap(
        z=by_head,
        x=numbers,
        y=list(range(len(heads))),
        yaxis="y2",
        meta=style.choosable(subject),
        customdata=[[[layer, head] for layer in numbers] for head in heads],
        hovertemplate="layer %{customdata[0]}, head %{customdata[1]}<br>mass %{z:.4g}"
        "<extra></extra>",
        coloraxis="coloraxis",
        hoverongaps=False,
        xgap=1,
        ygap=1,
    )
    map_domain = figure.layout["yaxis2"].domain
    every = -(-len(heads) // 8)
    powers = _powers(layers)
    figure.layout["yaxis"].update(
        type="log",
        tickmode="array",
        tickvals=[10.0**power for power in powers],
        ticktext=[style.short_count(10.0**power) for power in powers],
    )
    figure.layout["yaxis2"].update(
        autorange="reversed",
        showgrid=False,
        zeroline=False,
        tickmode="array",
        tickvals=list(range(0, len(heads), every)),
        ticktext=[f"H{head}" for head in heads[::every]],
    )
    figure.layout["yaxis3"].update(rangemode="tozero", nticks=4)
    figure.layout["yaxis4"].update(rangemode="tozero", nticks=4)
    line = {"color": style.INK, "width": 1, "dash": "dot"}
    figure.add_shape(
        type="line", xref="paper", x0=0, x1=1, yref="y4", y0=1, y1=1, line=line, layer="below"
    )
    if main_layer < len(numbers):
        edge = main_layer - 0.5
        for _, _, axis in panels:
            ends = {"yref": f"{axis} domain", "y0": 0, "y1": 1}
            figure.add_shape(type="line", xref="x", x0=edge, x1=edge, **ends, line=line)
    ticks = list(range(0, len(numbers), -(-len(numbers) // 12)))
    figure.update_layout(
        xaxis={
            "anchor": "y4",
            "title": {"text": "layer", "standoff": 6},
            "range": [-0.5, len(numbers) - 0.5],
            "tickmode": "array",
            "tickvals": ticks,
            "ticktext": [str(layer) for layer in ticks],
            "tickangle": 0,
            "showgrid": False,
            "zeroline": False,
        },
        coloraxis={
            "cmin": 0.0,
            "cmax": 1.0,
            "colorscale": style.SEQUENTIAL,
            "colorbar": {
                "thickness": 10,
                "outlinewidth": 0,
                "len": map_domain[1] - map_domain[0],
                "y": map_domain[0],
                "yanchor": "bottom",
                "tickmode": "array",
                "tickvals": [0, 0.5, 1],
            },
        },
        showlegend=False,
    )
    return figure


def effect_bars(table: pd.DataFrame, *, title: str, subtitle: str, unchanged: str) -> go.Figure:
    """What each change costs, a bar a change and draw, with how many cells it really changed.

    `table` is that of `outlier_effects`; `unchanged` is the loss of the model as it is, in words.

    Raises: AnalysisError for an empty table, or one that lacks a column.
    """
    require(table, "change", "draw", "cells", "changed", "loss_change", "loss_change_se")
    bar = 24
    total = bar * len(table)
    labels = change_labels(table)
    nothing = [int(changed) == 0 for changed in table["changed"]]
    values = [drawable(value) for value in table["loss_change"]]
    missing = [label for label, value in zip(labels, values, strict=True) if value is None]
    figure = style.figure(
        title,
        subtitle,
        "Each bar is the change in loss (nats a token) of one change of the massive activations, "
        "against the model as it is; whiskers are one standard error. On the right stand the cells "
        "that really changed, of those that were set: where none did, nothing was tested. Orange "
        "is the control, as many cells at other tokens and dimensions set to 0.",
        plot_height=total,
        margins=(124, 92, 46),
        head_room=22,
        notes=[f"Blank, without a finite loss: {', '.join(missing)}."] if missing else [],
    )
    colours = [
        style.INK if none else style.WARM[0] if change == CONTROL else style.COOL[0]
        for none, change in zip(nothing, table["change"], strict=True)
    ]
    figure.add_bar(
        x=values,
        y=list(range(len(table))),
        width=0.7,
        orientation="h",
        marker={"color": colours, "opacity": 0.75},
        error_x={
            "type": "data",
            "array": [drawable(error) or 0 for error in table["loss_change_se"]],
            "color": style.INK,
            "thickness": 1.4,
            "width": 3,
        },
        customdata=[
            [literal(label), literal(note)]
            for label, note in zip(labels, table["note"].fillna(""), strict=True)
        ],
        hovertemplate="%{customdata[0]}: %{x:.4g}<br>%{customdata[1]}<extra></extra>",
    )
    figure.add_annotation(style.note(1, 1, "cells changed", xshift=8, yshift=2, font={"size": 11}))
    for place, (changed, cells) in enumerate(zip(table["changed"], table["cells"], strict=True)):
        told = f"{int(changed):,} of {int(cells):,}" if changed else f"none of {int(cells):,}"
        beside = style.note(1, place, told, yref="y", xshift=8, font={"size": 11})
        figure.add_annotation(beside | {"yanchor": "middle"})
        if not changed:
            grey = style.note(0, place, "no cells changed", xref="x", yref="y", xshift=6)
            figure.add_annotation(grey | {"yanchor": "middle", "font": {"size": 11}})
    figure.update_layout(
        xaxis={
            "title": {"text": f"change in loss, nats ({literal(unchanged)})"},
            "nticks": 6,
            **style.grid_lines(),
            "zerolinecolor": style.INK,
        },
        yaxis={
            "range": [len(table) - 0.5, -0.5],
            "tickmode": "array",
            "tickvals": list(range(len(table))),
            "ticktext": [literal(label) for label in labels],
            "ticks": "",
            "showgrid": False,
            "zeroline": False,
        },
        showlegend=False,
    )
    return figure


def sinks_after(
    heads: pd.DataFrame, table: pd.DataFrame, *, title: str, subtitle: str
) -> go.Figure:
    """The mean sink of each layer's heads, unchanged and after each change: a row a change.

    `heads` and `table` are those of `outlier_effects`.

    Raises: AnalysisError for an empty table, or one that lacks a column.
    """
    require(heads, "change", "draw", "layer", "head", "sinks")
    means = heads.groupby(["change", "draw", "layer"], sort=False)["sinks"].mean()
    labels = ["unchanged", *change_labels(table)]
    keys = list(dict.fromkeys(zip(heads["change"], heads["draw"], strict=True)))
    layers = list(range(int(heads["layer"].max()) + 1))
    rows = [[drawable(means.get((*key, layer))) for layer in layers] for key in keys]
    blank = sum(value is None for row in rows for value in row)
    figure = style.figure(
        title,
        subtitle,
        "Colour is the attention on the first token, a mean over the layer's heads and the queries "
        "with 8 keys at least: the first row is the model as it is. A row that is paler than the "
        "first is a change that weakens the sinks.",
        plot_height=22 * len(rows),
        margins=(124, 12, 46),
        head_room=6,
        notes=[f"Blank, without a value: {blank} cells."] if blank else [],
    )
    figure.add_heatmap(
        z=rows,
        x=layers,
        y=list(range(len(rows))),
        customdata=[[literal(label)] * len(layers) for label in labels],
        hovertemplate="%{customdata}, layer %{x}<br>sinks %{z:.4g}<extra></extra>",
        coloraxis="coloraxis",
        hoverongaps=False,
        xgap=1,
        ygap=1,
    )
    ticks = layers[:: -(-len(layers) // 12)]
    plain = {"tickmode": "array", "ticks": "", "showgrid": False, "zeroline": False}
    figure.update_layout(
        xaxis={
            **plain,
            "title": {"text": "layer", "standoff": 6},
            "tickvals": ticks,
            "ticktext": [str(layer) for layer in ticks],
            "tickangle": 0,
        },
        yaxis={
            **plain,
            "autorange": "reversed",
            "tickvals": list(range(len(rows))),
            "ticktext": [literal(label) for label in labels],
        },
        coloraxis={
            "cmin": 0.0,
            "cmax": 1.0,
            "colorscale": style.SEQUENTIAL,
            "colorbar": {"thickness": 10, "outlinewidth": 0, "nticks": 5},
        },
    )
    return figure


def change_labels(table: pd.DataFrame) -> list[str]:
    """What each row is called: `move 2` is the second draw of a move."""
    several = set(table["change"][table["draw"] > 0])
    return [
        f"{change} {int(draw) + 1}" if change in several else str(change)
        for change, draw in zip(table["change"], table["draw"], strict=True)
    ]


def _in(colour: str, text: str) -> str:
    return f'<span style="color:{colour}">{literal(text)}</span>'


def _powers(layers: pd.DataFrame) -> list[int]:
    """Of ten, those within the magnitudes, seven at most."""
    sizes = [v for name in ("magnitude", "magnitude_others") for v in _above_0(layers[name])]
    known = [value for value in sizes if value is not None] or [1.0]
    low, high = math.ceil(math.log10(min(known))), math.floor(math.log10(max(known)))
    return list(range(low, high + 1, max(1, -(-(high - low) // 6))))


def _above_0(values: pd.Series) -> list[float | None]:
    """What a logarithmic axis can show."""
    known = [drawable(value) for value in values]
    return [value if value is not None and value > 0 else None for value in known]
