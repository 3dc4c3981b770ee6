"""Figures for two models beside each other: maps of heads on one colour range, curves, a scatter.

One invariant: what stands in one figure has one unit and one range, so that equal colours and equal
heights mean equal numbers in both models.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

from interp.views.figures import style
from interp.views.figures.runs import blank_notes, head_grid, require
from interp.views.figures.style import drawable, literal

COLOURS = (style.COOL[0], style.WARM[0])
"""The first and the second model, in every figure."""

# Pixels. A phone leaves about 330 for all maps of a row together.
_PHONE = 330
_GAP = 0.09  # between maps, as a share of the width
_LABEL = 20
_TICKS = 20
_LEGEND = 46


WIDEST = 1240
"""Pixels of a row of maps at most."""


@dataclass(frozen=True)
class HeadMap:
    """One map of a row: its name, a table with a row a head, and the column it shows.

    `subject` is what a page that can show heads calls the model, empty where the map is of none.
    `pruned` are the heads that the model has no longer.
    """

    name: str
    table: pd.DataFrame
    column: str
    subject: str = ""
    pruned: Sequence[tuple[int, int]] = ()


def head_maps(
    maps: Sequence[HeadMap],
    *,
    title: str,
    subtitle: str,
    caption: str,
    bar: str,
    bounds: tuple[float, float] | None = None,
    diverging: bool = False,
) -> go.Figure:
    """Layer × head maps side by side on one colour range, each as wide as it has heads.

    `bar` names the colour bar. Cells of pruned heads and those without a finite value stay blank
    and are named in `layout.meta["notes"]`.

    Raises:
        AnalysisError: a table is empty or lacks its column.
    """
    grids = [head_grid(one.table, one.column, one.pruned) for one in maps]
    shown = [value for _, _, grid in grids for row in grid for value in row]
    low, high = bounds or style.colour_range(shown, diverging)
    most_layers = max(len(layers) for layers, _, _ in grids)
    cell = max(min(26, 560 // most_layers), 8)
    total = _LABEL + cell * most_layers + _TICKS
    widths = _widths([len(heads) for _, heads, _ in grids])
    figure = style.figure(
        title,
        subtitle,
        caption,
        plot_height=total,
        margins=(32, 8, _LEGEND + 16),
        head_room=4,
        width=min(120 + 56 * max(sum(len(heads) for _, heads, _ in grids), 8), WIDEST),
        notes=[
            note
            for one, (_, _, grid) in zip(maps, grids, strict=True)
            for note in blank_notes(one.table, grid, one.pruned, name=one.name)
        ],
    )
    labelled = cell >= 14 and sum(len(heads) for _, heads, _ in grids) <= 16
    for place, (one, grid, (start, end)) in enumerate(zip(maps, grids, widths, strict=True)):
        axis = place + 1
        # A name may reach into the gap beside its map; 7 pixels a letter.
        name = _shortened(one.name, int((end - start + _GAP) * _PHONE / 7))
        figure.add_annotation(
            style.note(
                start, 1 - _LABEL / total, f"<b>{literal(name)}</b>", font={"size": 12}, yshift=2
            )
        )
        digits = style.cell_digits(low, high) if labelled and not diverging else ""
        _map(figure, axis, one, grid, digits)
        figure.layout[f"xaxis{axis}"].update(domain=[start, end])
        figure.layout[f"yaxis{axis}"].update(
            domain=[1 - (_LABEL + cell * len(grid[0])) / total, 1 - _LABEL / total]
        )
    figure.update_layout(
        coloraxis={
            "cmin": low,
            "cmax": high,
            "colorscale": style.DIVERGING if diverging else style.SEQUENTIAL,
            "colorbar": {
                "orientation": "h",
                "thickness": 10,
                "lenmode": "pixels",
                "len": 240,
                "outlinewidth": 0,
                "nticks": 5,
                "tickangle": 0,
                "exponentformat": "e",
                "x": 0,
                "xanchor": "left",
                "y": -8 / total,
                "yanchor": "top",
                "title": {"text": literal(bar), "side": "top"},
            },
        }
    )
    return figure


def _widths(n_heads: Sequence[int]) -> list[tuple[float, float]]:
    """Where each map starts and ends, as shares of the width; few heads make no sliver."""
    room = 1 - _GAP * (len(n_heads) - 1)
    least = 0.5 * room / len(n_heads)
    shares = [max(count / sum(n_heads) * room, least) for count in n_heads]
    places, start = [], 0.0
    for share in shares:
        width = share / sum(shares) * room
        places.append((start, min(start + width, 1.0)))
        start += width + _GAP
    return places


def _map(
    figure: go.Figure,
    axis: int,
    one: HeadMap,
    grid: tuple[list[int], list[int], list[list[float | None]]],
    digits: str,
) -> None:
    layers, heads, values = grid
    hover = f"{literal(one.name)}, layer %{{customdata[0]}}, head %{{customdata[1]}}<br>"
    hover += f"{literal(_words(one.column))} %{{z:.4g}}"
    details: list[list[list[float | None]]] = [
        [[layer, head] for head in heads] for layer in layers
    ]
    for end, words in (
        ("_se", " ± %{customdata[2]:.2g}"),
        ("_null", "<br>null %{customdata[3]:.3g}"),
    ):
        if f"{one.column}{end}" not in one.table:
            break
        hover += words
        _, _, extra = head_grid(one.table, one.column + end, one.pruned)
        for cells, row in zip(details, extra, strict=True):
            for cell, value in zip(cells, row, strict=True):
                cell.append(value)
    figure.add_heatmap(
        z=values,
        x=list(range(len(heads))),
        y=list(range(len(layers))),
        xaxis=f"x{axis}",
        yaxis=f"y{axis}",
        meta=style.choosable(one.subject),
        customdata=details,
        hovertemplate=hover + "<extra></extra>",
        texttemplate=f"%{{z:{digits}}}" if digits else None,
        coloraxis="coloraxis",
        hoverongaps=False,
        xgap=1,
        ygap=1,
    )
    shared = {"showgrid": False, "zeroline": False, "tickmode": "array", "ticks": ""}
    shared |= {"tickfont": {"size": 10}, "tickangle": 0}
    every_head, every_layer = -(-len(heads) // 5), -(-len(layers) // 16)
    figure.layout[f"xaxis{axis}"] = shared | {
        "anchor": f"y{axis}",
        "tickvals": list(range(0, len(heads), every_head)),
        "ticktext": [f"H{head}" for head in heads[::every_head]],
    }
    figure.layout[f"yaxis{axis}"] = shared | {
        "anchor": f"x{axis}",
        "autorange": "reversed",
        "tickvals": list(range(0, len(layers), every_layer)),
        "ticktext": [f"L{layer}" for layer in layers[::every_layer]],
    }


def sorted_heads(
    table: pd.DataFrame, names: dict[str, str], units: dict[str, str], *, subtitle: str
) -> go.Figure:
    """The heads of each model from the strongest to the weakest, one panel a score.

    `table` has the columns of a comparison; `names` says what each of its models is called here.
    A dashed line is the largest head of that model's null.

    Raises:
        AnalysisError: the table is empty or lacks a score.
    """
    require(table, "model", *units)
    room, title_room = 150, 34
    total = len(units) * (room + title_room)
    figure = style.figure(
        "Heads from the strongest to the weakest",
        subtitle,
        "Each point is a head, placed by the share of its model's heads that score higher, so that "
        "models of any size compare. Dashed: the largest head of that model's null; heads below "
        "it look like chance.",
        plot_height=total,
        margins=(44, 16, 52),
        head_room=26,
    )
    for place, (score, unit) in enumerate(units.items()):
        axis = "y" if place == 0 else f"y{place + 1}"
        top = 1 - (place * (room + title_room) + title_room) / total
        figure.layout[f"yaxis{place + 1}"] = {
            "domain": [1 - (place + 1) * (room + title_room) / total, top],
            "anchor": "x",
            "nticks": 5,
            "rangemode": "tozero",
        } | style.grid_lines()
        title = f"<b>{literal(_words(score))}</b>, {literal(unit)}"
        figure.add_annotation(style.note(0, top, title, yshift=4, font={"size": 12.5}))
        for (model, name), colour in zip(names.items(), COLOURS, strict=True):
            mine = table[table["model"] == model]
            heads = mine.dropna(subset=[score]).sort_values(score, ascending=False, kind="stable")
            figure.add_scatter(
                x=[drawable(100 * (rank + 0.5) / len(heads)) for rank in range(len(heads))],
                y=[drawable(value) for value in heads[score]],
                customdata=[
                    f"L{layer}H{head}"
                    for layer, head in zip(heads["layer"], heads["head"], strict=True)
                ],
                mode="lines+markers",
                line={"color": colour, "width": 1.2},
                marker={"size": 5 if len(heads) <= 40 else 3, "color": colour},
                name=literal(name),
                legendgroup=literal(model),
                showlegend=place == 0,
                yaxis=axis,
                hovertemplate=f"%{{customdata}} %{{y:.4g}}<extra>{literal(name)}</extra>",
            )
            null = drawable(mine[f"{score}_null"].max())
            if null is not None:
                figure.add_shape(
                    type="line",
                    x0=0,
                    x1=1,
                    xref="x domain",
                    y0=null,
                    y1=null,
                    yref=axis,
                    line={"color": colour, "width": 1.2, "dash": "dash"},
                )
    figure.update_layout(
        xaxis={
            "title": {"text": "heads that score higher, %", "standoff": 6},
            "range": [-2, 102],
            "anchor": "y" if len(units) == 1 else f"y{len(units)}",
        }
        | style.grid_lines(),
        hovermode="closest",
        legend={
            "orientation": "h",
            "font": {"size": 11},
            "x": 0,
            "xanchor": "left",
            "y": 1 + 2 / total,
            "yanchor": "bottom",
        },
    )
    return figure


def head_scatter(
    first: pd.DataFrame,
    second: pd.DataFrame,
    scores: Sequence[str],
    names: tuple[str, str],
    *,
    unit: str,
    subtitle: str,
) -> go.Figure:
    """Each head of two models of one shape as a point: its score in the first and in the second.

    Raises:
        AnalysisError: a table is empty or lacks a score.
    """
    for table in (first, second):
        require(table, "layer", "head", *scores)
    values = [drawable(v) for table in (first, second) for score in scores for v in table[score]]
    low, high = style.colour_range(values, diverging=False)
    edge = 0.03 * (high - low)
    figure = style.figure(
        "The same head in both models",
        subtitle,
        "Each point is a head; on the dotted diagonal it scores the same in both models.",
        plot_height=380,
        margins=(52, 12, 52),
        head_room=26,
        width=520,
    )
    figure.add_shape(
        type="line",
        x0=low,
        y0=low,
        x1=high,
        y1=high,
        line={"color": style.INK, "width": 1, "dash": "dot"},
        layer="below",
    )
    colours = (style.COOL[0], style.WARM[0], style.COOL[2], *style.COOL[3:], *style.WARM[1:])
    symbols = ("circle", "diamond", "square", "cross", "x", "triangle-up")
    for place, score in enumerate(scores):
        figure.add_scatter(
            x=[drawable(value) for value in first[score]],
            y=[drawable(value) for value in second[score]],
            customdata=[
                f"L{layer}H{head}"
                for layer, head in zip(first["layer"], first["head"], strict=True)
            ],
            mode="markers",
            marker={
                "size": 7,
                "opacity": 0.65,
                "color": colours[place % len(colours)],
                "symbol": symbols[place % len(symbols)],
            },
            name=literal(_words(score)),
            hovertemplate="%{customdata}<br>%{x:.4g} and %{y:.4g}"
            f"<extra>{literal(_words(score))}</extra>",
        )
    axis = {"range": [low - edge, high + edge], "nticks": 6} | style.grid_lines()
    lefts, rights = (_shortened(name, 34) for name in names)
    figure.update_layout(
        xaxis=axis | {"title": {"text": literal(f"{lefts}, {unit}"), "standoff": 6}},
        yaxis=axis | {"title": {"text": literal(rights), "standoff": 6}},
        legend={
            "orientation": "h",
            "font": {"size": 11},
            "x": 0,
            "xanchor": "left",
            "y": 1.005,
            "yanchor": "bottom",
        },
    )
    return figure


def _shortened(text: str, room: int) -> str:
    return text if len(text) <= room else text[: max(room - 1, 1)] + "…"


def _words(name: str) -> str:
    return name.replace("_", " ").capitalize()
