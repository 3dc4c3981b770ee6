"""Training curves in stacked panels on one x axis, with the changes found in them."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from interp.errors import AnalysisError
from interp.views.figures import style
from interp.views.figures.runs import Run, found_changes, require, runs
from interp.views.figures.style import drawable, literal


@dataclass(frozen=True)
class Line:
    """One metric of a curve panel: its column, its name in the panel's title, its looks."""

    column: str
    name: str = ""
    dash: str = "solid"
    opacity: float = 1.0


@dataclass(frozen=True)
class Panel:
    """One band of stacked curves. `change` names the curve whose change points are marked in it."""

    title: str
    lines: tuple[Line, ...]
    change: str = "induction"


PANELS = (
    Panel(
        "Loss, nats per token",
        (Line("loss", "held out"), Line("train_loss", "training batch", opacity=0.35)),
    ),
    Panel("In-context-learning score, nats", (Line("icl_score"),), change="icl_score"),
    Panel(
        "Loss on repeated tokens, nats",
        (
            Line("second_copy_loss", "second copy"),
            Line("first_copy_loss", "first copy", dash="dot"),
        ),
    ),
    Panel(
        "Held-out loss by kind of token, nats",
        (
            Line("predictable_loss", "induction-predictable"),
            Line("other_loss", "other tokens", dash="dot"),
        ),
    ),
    Panel("Highest induction score of a head", (Line("best_induction"),)),
    Panel("Highest previous-token score of a head", (Line("best_previous_token"),)),
    Panel("Highest first-token (sink) mass of a head", (Line("best_sink"),)),
)

# More points than pixels only make the page heavy; the last point is always kept.
POINTS_PER_LINE = 500

SEEDS_FOR_A_BAND = 3
BAND = "One line a seed; grey from the lowest to the highest seed of a model. "

CHANGE_MARKS = (
    "Shaded: from the onset to the end of a run's change, dashed at its midpoint (of the "
    "in-context-learning score in its own panel, of the induction score elsewhere). "
)


def training_curves(
    curves: pd.DataFrame,
    changes: pd.DataFrame | None = None,
    *,
    title: str = "Training curves",
    subtitle: str = "",
) -> go.Figure:
    """The logged metrics over training steps in stacked panels on one x axis, one colour a run.

    Panels without data are left out. `changes` (columns model, seed, curve, found, onset, step,
    end) shades each run's change from onset to end and dashes its midpoint: in the
    in-context-learning panel the change of that score, elsewhere that of the induction score.
    Models with a change found get cool colours, others warm ones. Of a model with three seeds or
    more a grey band goes from the lowest to the highest seed, behind the seeds' own lines.

    Raises:
        AnalysisError: the table is empty or holds none of the known metrics.
    """
    require(curves, "step", "step")
    panels = [
        (p, [n for n in p.lines if n.column in curves and curves[n.column].notna().any()])
        for p in PANELS
    ]
    panels = [(panel, lines) for panel, lines in panels if lines]
    if not panels:
        known = ", ".join(line.column for panel in PANELS for line in panel.lines)
        raise AnalysisError(
            f"training_curves: no metric to draw in columns {list(curves.columns)}; known: {known}"
        )
    found = found_changes(changes)
    parts = runs(curves)
    colours = _run_colours(parts, {key[0] for key, _ in found})
    room, title_room = 132, 44
    total = len(panels) * (room + title_room)
    # A phone has room for two names in a row of the legend.
    legend = (len(parts) + 1) // 2 * 19 + 8 if len(parts) > 1 else 0
    every = max(-(-len(run.table) // POINTS_PER_LINE) for run in parts)
    together = [own for own in _by_model(parts) if len(own) >= SEEDS_FOR_A_BAND]
    figure = style.figure(
        title,
        subtitle or ", ".join(run.name for run in parts if run.name),
        "All panels share the step axis. "
        + (CHANGE_MARKS if found else "")
        + (BAND if together else "")
        + (f"One logged step in {every} is drawn. " if every > 1 else "")
        + "Hover for exact values.",
        plot_height=total,
        margins=(44, 24, 56),
        head_room=legend,
    )
    for place, (panel, lines) in enumerate(panels):
        top, bottom = (
            1 - (place * (room + title_room) + title_room) / total,
            1 - (place + 1) * (room + title_room) / total,
        )
        axis = "y" if place == 0 else f"y{place + 1}"
        figure.add_annotation(
            style.note(0, top, _panel_title(panel, lines), yshift=4, font={"size": 12.5})
        )
        figure.layout[f"yaxis{place + 1}"] = {
            "domain": [bottom, top],
            "anchor": "x",
            "nticks": 5,
        } | style.grid_lines()
        for own in together:
            for line in lines:
                _draw_band(figure, own, line, axis)
        for run, colour in zip(parts, colours, strict=True):
            for line in lines:
                _draw_line(figure, run, line, axis, colour, legend=place == 0 and line is lines[0])
        for key, change in found:
            if change["curve"] == panel.change:
                colour = next(
                    (c for run, c in zip(parts, colours, strict=True) if run.key == key), style.INK
                )
                _mark_change(figure, change, axis, colour)
    last = "y" if len(panels) == 1 else f"y{len(panels)}"
    figure.update_layout(
        xaxis=_step_axis(curves) | {"anchor": last} | style.grid_lines(),
        hovermode="x unified",
        showlegend=len(parts) > 1,
        legend={
            "orientation": "h",
            "font": {"size": 11},
            "entrywidth": 6 * max(len(run.name) for run in parts),
            "x": 0,
            "xanchor": "left",
            "y": 1 + 4 / total,
            "yanchor": "bottom",
        },
    )
    return figure


def _panel_title(panel: Panel, lines: list[Line]) -> str:
    title = f"<b>{panel.title}</b>"
    if len(lines) < 2:
        return title
    marks = {"solid": "━━", "dot": "···"}
    names = [f"{'faint:' if line.opacity < 1 else marks[line.dash]} {line.name}" for line in lines]
    return f"{title}<br><span style='font-size:11px'>{'   '.join(names)}</span>"


def _draw_line(
    figure: go.Figure, run: Run, line: Line, axis: str, colour: str, *, legend: bool
) -> None:
    table = run.table[run.table[line.column].notna()] if line.column in run.table else run.table[:0]
    if table.empty:
        return
    every = -(-len(table) // POINTS_PER_LINE)
    table = table.iloc[(len(table) - 1) % every :: every]
    tokens = [drawable(t) for t in table["tokens"]] if "tokens" in table else None
    name = literal(", ".join(filter(None, [run.name, line.name])) or line.column)
    figure.add_scatter(
        x=[drawable(step) for step in table["step"]],
        y=[drawable(value) for value in table[line.column]],
        customdata=tokens,
        mode="lines" if len(table) > 1 else "markers",
        line={"color": colour, "width": 2 if line.opacity == 1 else 1.2, "dash": line.dash},
        opacity=line.opacity,
        name=literal(run.name),
        legendgroup=literal(run.name),
        showlegend=legend,
        yaxis=axis,
        hovertemplate=f"%{{y:.4g}}{' at %{customdata:.3s} tokens' if tokens else ''}"
        f"<extra>{name}</extra>",
    )


def _by_model(parts: list[Run]) -> list[list[Run]]:
    """The runs of each model, in order of appearance."""
    models = dict.fromkeys(run.key[0] for run in parts)
    return [[run for run in parts if run.key[0] == model] for model in models]


def _draw_band(figure: go.Figure, seeds: list[Run], line: Line, axis: str) -> None:
    """From the lowest to the highest seed, at each step that all of them logged."""
    if line.opacity < 1 or any(line.column not in run.table for run in seeds):
        return
    known = [run.table[np.isfinite(run.table[line.column].astype(float))] for run in seeds]
    whole = pd.concat(
        # A step may have a row for each of several metrics.
        [own.set_index("step")[line.column].groupby(level=0).last() for own in known],
        axis="columns",
        join="inner",
    )
    whole = whole.sort_index()
    if len(whole) < 2:
        return
    every = -(-len(whole) // POINTS_PER_LINE)
    whole = whole.iloc[(len(whole) - 1) % every :: every]
    steps = [drawable(step) for step in whole.index]
    low, high = ([drawable(v) for v in whole.agg(end, axis="columns")] for end in ("min", "max"))
    figure.add_scatter(
        x=[*steps, *reversed(steps)],
        y=[*high, *reversed(low)],
        fill="toself",
        fillcolor=style.INK,
        opacity=0.2,
        mode="lines",
        line={"width": 0},
        yaxis=axis,
        name=literal(f"{seeds[0].key[0]}, all seeds"),
        legendgroup=literal(f"{seeds[0].key[0]}, all seeds"),
        hoverinfo="skip",
        showlegend=False,
    )


def _mark_change(figure: go.Figure, change: dict[str, object], axis: str, colour: str) -> None:
    onset, middle, end = (drawable(change[name]) for name in ("onset", "step", "end"))
    place = {"xref": "x", "yref": f"{axis} domain", "y0": 0, "y1": 1, "layer": "below"}
    figure.add_shape(
        type="rect", x0=onset, x1=end, fillcolor=colour, opacity=0.13, line_width=0, **place
    )
    figure.add_shape(
        type="line",
        x0=middle,
        x1=middle,
        line={"color": colour, "width": 1.2, "dash": "dash"},
        **place,
    )


def _run_colours(parts: list[Run], changed: set[str]) -> list[str]:
    """Cool colours for runs of models with a change (or of the first model), warm for others."""
    studied = changed or {parts[0].key[0]}
    cool = [run.key for run in parts if run.key[0] in studied]
    warm = [run.key for run in parts if run.key[0] not in studied]
    return [
        style.COOL[cool.index(run.key) % len(style.COOL)]
        if run.key in cool
        else style.WARM[warm.index(run.key) % len(style.WARM)]
        for run in parts
    ]


def _step_axis(curves: pd.DataFrame) -> dict[str, object]:
    """Steps, and below each tick the tokens seen, where all rows have the same tokens a step."""
    steps = curves["step"].astype(float)
    low, high = float(steps.min()), float(steps.max())
    ticks = style.nice_ticks(low, high)
    labels = [f"{tick:,.0f}" for tick in ticks]
    title = "training step"
    if "tokens" in curves:
        later = curves[steps > 0]
        rates = later["tokens"].astype(float) / later["step"]
        if len(rates.dropna()) and rates.max() - rates.min() <= 1e-6 * rates.max():
            rate = float(rates.max())
            labels = [
                f"{label}<br>{style.short_count(tick * rate)}"
                for label, tick in zip(labels, ticks, strict=True)
            ]
            title = "training step, and tokens seen"
    return {
        "title": {"text": title, "standoff": 6},
        "tickmode": "array",
        "tickvals": ticks,
        "ticktext": labels,
        "tickangle": 0,
        # plotly leaves out a tick that sits on the very end of its axis.
        "range": [low - 0.005 * (high - low), high + 0.005 * (high - low)] if high > low else None,
        "unifiedhovertitle": {"text": "step %{x:,.0f}"},
        "hoverformat": ",.0f",
    }
