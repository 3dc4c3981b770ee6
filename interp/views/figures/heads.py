"""Plotly figures of head tables, ablations and training curves.

One invariant: positions on every axis are numbers with tick text, so equal labels never merge and
"1.10" stays a label. Each function takes a table and returns an ordinary figure; how to read it is
in `layout.meta["caption"]`, what is missing from it in `layout.meta["notes"]`.
"""

from collections.abc import Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go

from interp.views.figures import style
from interp.views.figures.runs import about, blank_notes, head_grid, require, runs, texts
from interp.views.figures.style import drawable, literal

WIDEST = 16
"""Heads up to which every one has a cell of 64 pixels, with its number in it."""


def head_heatmap(
    table: pd.DataFrame,
    column: str,
    *,
    title: str = "",
    subtitle: str = "",
    unit: str = "",
    bounds: tuple[float, float] | None = None,
    diverging: bool = False,
    noun: str = "head",
    quantity: str = "",
    reading: str = "",
    subject: str = "",
    pruned: Sequence[tuple[int, int]] = (),
) -> go.Figure:
    """A layer × head map of one column, layer 0 at the top.

    The colours span `bounds`, or 0 to the largest value; `diverging` makes them symmetric around 0,
    for effects. `noun` is what the columns are called, heads or KV heads; `quantity` what the
    column is called in the caption, to which `reading` is added. `pruned` are query heads that the
    model has no longer. These, heads without a row and heads without a finite value stay blank and
    are named in `layout.meta["notes"]`, each with its reason. `subject` is the model: in a page
    that can show its heads, a click on a cell chooses one.

    Raises:
        AnalysisError: the table is empty, lacks the column, or has several rows for one head.
    """
    key_value = noun == "KV head"
    gone = () if key_value else pruned
    layers, heads, values = head_grid(table, column, gone)
    low, high = bounds or style.colour_range((v for row in values for v in row), diverging)
    words = f"{quantity or column}, {unit}" if unit else quantity or column
    ends = "orange is above 0, blue below" if diverging else "stronger is more"
    figure = style.figure(
        title or f"{column} by head",
        subtitle or about(table, unit),
        f"One cell a {noun}, the first layer at the top; colour is {words}: {ends}."
        + (f" {reading}" if reading else ""),
        plot_height=min(max(26 * len(layers), 60), 720),
        margins=(52, 12, 46),
        width=200 + 64 * min(max(len(heads), 4), WIDEST),
        notes=blank_notes(table, values, pruned, letter="KV" if key_value else "H"),
    )
    error = f"{column}_se"
    hover = f"layer %{{customdata[0]}}, {noun} %{{customdata[1]}}<br>{literal(column)} %{{z:.4g}}"
    if error in table:
        hover += " ± %{customdata[2]:.2g}"
    errors = head_grid(table, error, gone)[2] if error in table else values
    figure.add_heatmap(
        z=values,
        x=list(range(len(heads))),
        y=list(range(len(layers))),
        meta=style.choosable(subject),
        customdata=[
            [[layer, head, e] for head, e in zip(heads, row, strict=True)]
            for layer, row in zip(layers, errors, strict=True)
        ],
        hovertemplate=hover + "<extra></extra>",
        texttemplate=f"%{{z:{style.cell_digits(low, high)}}}" if len(heads) <= WIDEST else None,
        coloraxis="coloraxis",
        hoverongaps=False,
        xgap=1.5,
        ygap=1.5,
    )
    figure.update_layout(
        coloraxis=_colours(low, high, diverging, _colour_bar(len(layers), low, high)),
        xaxis=_index_axis(heads, noun),
        yaxis=_index_axis(layers, "layer") | {"autorange": "reversed"},
    )
    return figure


def heads_at_steps(
    heads: pd.DataFrame,
    column: str,
    steps: Sequence[int] | Mapping[tuple[str, str], Sequence[int]],
    *,
    labels: Sequence[str] = (),
    title: str = "",
    subtitle: str = "",
    subject: str = "",
    bounds: tuple[float, float] | None = None,
) -> go.Figure:
    """Small layer × head maps of one column: a row a run, a column a step, one shared range.

    `steps` are the same for all runs, or given for each by its (model, seed) as in `runs`; each is
    moved to the nearest logged step. `labels` name the columns ("before", "midpoint"). `subject`
    is what a page that can show heads calls the run, where the table does not name it.

    Raises:
        AnalysisError: the table is empty or lacks the column.
    """
    require(heads, column, "step")
    rows = []
    for run in runs(heads):
        wanted = steps.get(run.key, ()) if isinstance(steps, Mapping) else steps
        logged = sorted(set(run.table["step"]))
        near = [_nearest(logged, step) for step in wanted]
        rows.append(
            (run, [(s, head_grid(run.table[run.table["step"] == s], column)) for s in near])
        )
    shown = [v for _, cells in rows for _, (_, _, grid) in cells for line in grid for v in line]
    low, high = bounds or style.colour_range(shown, diverging=False)
    notes = [
        note
        for run, cells in rows
        for step, (_, _, grid) in cells
        for note in blank_notes(
            run.table[run.table["step"] == step],
            grid,
            (),
            name=", ".join(filter(None, [run.name, f"step {step:,}"])),
        )
    ]
    # Pixels: the run's name, the step's label, the cells, the tick labels, the gap to the next row.
    cell, name_height, step_height, tick_height, gap = 26, 20, 34 if labels else 20, 20, 14
    sizes = [max([len(grid[0]) for _, grid in cells], default=1) * cell for _, cells in rows]
    named = [name_height if run.name else 0 for run, _ in rows]
    total = sum(sizes) + sum(named) + len(rows) * (step_height + tick_height + gap)
    figure = style.figure(
        title or f"{column} by head while training",
        subtitle or about(heads, ""),
        "Each small map is one moment of one run (layers down, heads across); colour is "
        f"{column.replace('_', ' ')}: stronger is more, on one range, so that all maps can be "
        "compared.",
        plot_height=total,
        margins=(32, 8, 62),
        head_room=4,
        notes=notes,
    )
    top, axis = 0, 0
    for (run, cells), size, name_space in zip(rows, sizes, named, strict=True):
        if name_space:
            figure.add_annotation(
                style.note(
                    0, 1 - (top + name_space) / total, f"<b>{literal(run.name)}</b>", xshift=-28
                )
            )
        above = top + name_space + step_height
        for place, (step, grid) in enumerate(cells):
            axis += 1
            start, end = (
                place / len(cells) + (0.012 if place else 0),
                (place + 1) / len(cells) - 0.012,
            )
            lead = f"{literal(labels[place])}<br>" if place < len(labels) else ""
            figure.add_annotation(
                style.note(start, 1 - above / total, f"{lead}step {step:,}", font={"size": 11})
            )
            _small_map(figure, axis, grid, column, step, run.name or subject)
            figure.layout[f"xaxis{axis}"].update(domain=[start, end])
            figure.layout[f"yaxis{axis}"].update(
                domain=[1 - (above + size) / total, 1 - above / total], showticklabels=place == 0
            )
        top = above + size + tick_height + gap
    bar = {
        "orientation": "h",
        "thickness": 10,
        "lenmode": "pixels",
        "len": 220,
        "outlinewidth": 0,
        "nticks": 5,
        "tickangle": 0,
    }
    place_bar = {
        "x": 0,
        "xanchor": "left",
        "y": -14 / total,
        "yanchor": "top",
        "title": {"text": literal(column.replace("_", " ")), "side": "top"},
    }
    figure.update_layout(coloraxis=_colours(low, high, False, bar | place_bar))
    return figure


def ablation_bars(
    table: pd.DataFrame,
    column: str = "effect",
    *,
    title: str = "",
    subtitle: str = "",
    unit: str = "nats",
) -> go.Figure:
    """Bars of an ablation's effect and its standard error (`<column>_se`), by `group` and `seed`.

    Raises:
        AnalysisError: the table is empty or lacks the column.
    """
    require(table, column, "group")
    groups = list(dict.fromkeys(table["group"].astype(str)))
    seeds = list(dict.fromkeys(texts(table, "seed")))
    bar, head, gap = 20, 24, 12
    block = head + bar * len(seeds) + gap
    total = block * len(groups)
    called = column.replace("_", " ")
    figure = style.figure(
        title or f"{called} of ablating groups of heads",
        subtitle or about(table, unit),
        f"Each bar is the {called} ({unit}) of ablating a group of heads in one run; whiskers are "
        "one standard error. A bar about as short as its whisker shows no effect.",
        plot_height=total,
        margins=(16, 16, 46),
        head_room=24 if len(seeds) > 1 else 8,
    )
    for place, group in enumerate(groups):
        figure.add_annotation(
            style.note(
                0, place * block + head - 2, f"<b>{literal(group)}</b>", yref="y", font={"size": 12}
            )
        )
    for number, seed in enumerate(seeds):
        mine = table[[s == seed for s in texts(table, "seed")]]
        errors = [drawable(e) for e in mine[f"{column}_se"]] if f"{column}_se" in mine else None
        details = [[literal(row.get("heads", "")), row.get("n", "")] for _, row in mine.iterrows()]
        figure.add_bar(
            x=[drawable(v) for v in mine[column]],
            y=[
                groups.index(g) * block + head + bar * (number + 0.5)
                for g in mine["group"].astype(str)
            ],
            width=bar - 4,
            orientation="h",
            name=f"seed {literal(seed)}" if seed else "",
            marker={"color": style.COOL[number % len(style.COOL)], "opacity": 0.7},
            error_x={
                "type": "data",
                "array": errors,
                "color": style.INK,
                "thickness": 1.8,
                "width": 3,
            }
            if errors
            else None,
            customdata=details,
            hovertemplate="%{x:.4g}<br>heads %{customdata[0]}<br>n = %{customdata[1]}"
            "<extra></extra>",
        )
    figure.update_layout(
        xaxis={"title": {"text": literal(f"{called}, {unit}")}, "zerolinecolor": style.INK}
        | style.grid_lines(),
        yaxis={"range": [total, 0], "visible": False},
        showlegend=len(seeds) > 1,
        legend={"orientation": "h", "x": 0, "y": 1 + 4 / total, "yanchor": "bottom"},
        barmode="overlay",
    )
    return figure


def _nearest(logged: list[int], wanted: int) -> int:
    return min(logged, key=lambda step: abs(step - wanted))


def _small_map(
    figure: go.Figure,
    axis: int,
    grid: tuple[list[int], list[int], list[list[float | None]]],
    column: str,
    step: int,
    run: str,
) -> None:
    layers, heads, values = grid
    every = -(-len(heads) // 4)  # a phone leaves room for four labels under a map
    figure.add_heatmap(
        z=values,
        x=list(range(len(heads))),
        y=list(range(len(layers))),
        xaxis=f"x{axis}",
        yaxis=f"y{axis}",
        meta=style.choosable(run, step),
        customdata=[[[layer, head] for head in heads] for layer in layers],
        hovertemplate=f"{literal(run)} step {step:,}<br>layer %{{customdata[0]}}, "
        f"head %{{customdata[1]}}<br>{literal(column)} %{{z:.4g}}<extra></extra>",
        coloraxis="coloraxis",
        hoverongaps=False,
        xgap=1,
        ygap=1,
    )
    shared = {"showgrid": False, "zeroline": False, "tickmode": "array", "ticks": ""}
    shared |= {"tickfont": {"size": 10}}
    figure.layout[f"xaxis{axis}"] = shared | {
        "anchor": f"y{axis}",
        "tickvals": list(range(0, len(heads), every)),
        "ticktext": [f"H{head}" for head in heads[::every]],
        "tickangle": 0,
    }
    figure.layout[f"yaxis{axis}"] = shared | {
        "anchor": f"x{axis}",
        "autorange": "reversed",
        "tickvals": list(range(len(layers))),
        "ticktext": [f"L{layer}" for layer in layers],
    }


def _index_axis(numbers: list[int], title: str) -> dict[str, object]:
    every = -(-len(numbers) // 16)
    return {
        "title": {"text": title, "standoff": 6},
        "tickmode": "array",
        "tickvals": list(range(0, len(numbers), every)),
        "ticktext": [str(number) for number in numbers[::every]],
        "tickangle": 0,
        "ticks": "",
        "showgrid": False,
        "zeroline": False,
    }


def _colours(low: float, high: float, diverging: bool, bar: dict[str, object]) -> dict[str, object]:
    scale = style.DIVERGING if diverging else style.SEQUENTIAL
    return {"cmin": low, "cmax": high, "colorscale": scale, "colorbar": bar}


def _colour_bar(n_layers: int, low: float, high: float) -> dict[str, object]:
    bar: dict[str, object] = {"thickness": 12, "outlinewidth": 0, "ticklen": 3}
    if n_layers > 3:
        return bar | {"nticks": 5}
    # The bar is as high as the map, which leaves room for its ends and 0.
    ticks = sorted({low, 0.0, high})
    labels = [f"{tick:.2g}".replace("-", "−") for tick in ticks]
    return bar | {"tickmode": "array", "tickvals": ticks, "ticktext": labels}
