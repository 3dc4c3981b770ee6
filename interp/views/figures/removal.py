"""Plotly figures of removal: what is lost against how many heads are gone."""

from collections import Counter
from collections.abc import Sequence

import plotly.graph_objects as go

from interp.views.figures import style
from interp.views.figures.ablation import COLOURS, Series, legend, some_rows
from interp.views.figures.style import literal

DASHES = ("solid", "solid", "dash", "dot", "dashdot")


def removal_curves(
    curves: Sequence[tuple[Series, Sequence[float | int]]],
    *,
    axes: tuple[str, str],
    title: str,
    subtitle: str,
    reading: str,
    shares: bool,
) -> go.Figure:
    """What is lost against how much is removed: a line an order, with a band of one error.

    `curves` are values with the number, or with `shares` the share, of heads removed at each.
    Several draws of one order, `random-1` and `random-2`, share a thin grey line without a band and
    one entry of the legend.

    Raises: AnalysisError without points.
    """
    some_rows([place for _, places in curves for place in places])
    height = 340
    entries = _entries([own.name for own, _ in curves])
    names = list(dict.fromkeys(entries))
    alone = [name for name in names if entries.count(name) == 1]
    room = 22 * ((len(names) + 1) // 2) + 6 if len(names) > 1 else 0
    notes = [
        f"{own.name}: no value with {f'{float(at):.0%}' if shares else at} removed."
        for own, places in curves
        for at, value in zip(places, own.drawn(), strict=True)
        if value is None
    ]
    figure = style.figure(
        title,
        subtitle,
        f"{reading} The band is one standard error to either side"
        + ("; draws at random are thin lines without one." if len(names) < len(curves) else "."),
        plot_height=height,
        margins=(62, 20, 50),
        head_room=10 + room,
        notes=notes,
    )
    for place, (entry, (own, places)) in enumerate(zip(entries, curves, strict=True)):
        several = entries.count(entry) > 1
        number = 0 if several else alone.index(entry)
        colour = style.INK if several else COLOURS[number % len(COLOURS)]
        if not several:
            _band(figure, own, places, colour, entry)
        dash = "solid" if several else DASHES[number % len(DASHES)]
        figure.add_scatter(
            x=[float(at) for at in places],
            y=own.drawn(),
            customdata=[[error] for error in own.spread()],
            mode="lines+markers",
            line={"color": colour, "width": 1 if several else 2, "dash": dash},
            marker={"size": 3 if several else 5},
            connectgaps=False,
            name=literal(entry),
            legendgroup=literal(entry),
            showlegend=entry not in entries[:place],
            hovertemplate=f"{literal(own.name)}<br>%{{x{':.0%' if shares else ''}}} removed: "
            "%{y:.4g} ± %{customdata[0]:.2g}<extra></extra>",
        )
    figure.update_layout(
        xaxis={"title": {"text": literal(axes[0])}, "nticks": 6, "rangemode": "tozero"}
        | ({"tickformat": ".0%"} if shares else {})
        | style.grid_lines(),
        yaxis={"title": {"text": literal(axes[1])}, "nticks": 7, "rangemode": "tozero"}
        | style.grid_lines(),
        showlegend=len(names) > 1,
        legend=legend(height, names),
    )
    return figure


def _entries(names: Sequence[str]) -> list[str]:
    """What the legend calls each curve: `random, 3 draws` of `random-1` and two like it."""
    orders = [name.rpartition("-")[0] if name[-1:].isdecimal() else "" for name in names]
    draws = Counter(filter(None, orders))
    return [
        f"{order}, {draws[order]} draws" if draws[order] > 1 else name
        for order, name in zip(orders, names, strict=True)
    ]


def _band(
    figure: go.Figure, own: Series, places: Sequence[float | int], colour: str, entry: str
) -> None:
    """One error to either side, where there is one."""
    known = [
        (float(at), value, error)
        for at, value, error in zip(places, own.drawn(), own.spread(), strict=True)
        if value is not None and error is not None
    ]
    if not known:
        return
    across = [at for at, _, _ in known]
    upper = [value + error for _, value, error in known]
    lower = [value - error for _, value, error in known]
    figure.add_scatter(
        x=[*across, *reversed(across)],
        y=[*upper, *reversed(lower)],
        fill="toself",
        fillcolor=colour,
        opacity=0.18,
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
        showlegend=False,
        legendgroup=literal(entry),
    )
