"""A map of every layer and site of a model, in two quantities at a glance.

One invariant: the residual stream is one column, whose last row is what leaves the last block, so
that a row is a layer as tables and files number it.
"""

import math

import pandas as pd
import plotly.graph_objects as go

from interp.views.figures import style
from interp.views.figures.runs import about, require
from interp.views.figures.style import drawable, literal

STREAM = "resid"
"""What the column of `resid_pre` and `resid_post` is called."""

_ORDER = (STREAM, "attn_in", "k", "v", "z", "attn_out", "mlp_in", "mlp_post", "mlp_out", "ln_final")

_PANELS = (
    ("infinity_norm", "Infinity norm", (0.0, 0.475)),
    ("kurtosis", "Kurtosis", (0.525, 1.0)),
)
"""Column, heading, and the panel's part of the width."""

_LABELS = 66
"""Pixels under the maps for the sites' names, which stand upright to fit a phone."""


def site_maps(
    table: pd.DataFrame, *, title: str = "Every layer and site", subtitle: str = "", unit: str = ""
) -> go.Figure:
    """Two layer × site maps: the infinity norm, and the kurtosis, each on a logarithmic scale.

    `table` has a row for each integer `layer` and `site`, with `infinity_norm` and `kurtosis`.
    Layers go down, the first at the top; sites across, in the order of the pass. A cell without a
    row is blank, and so is one whose value has no logarithm, which `layout.meta["notes"]` counts.

    Raises: AnalysisError where the table is empty, lacks a column, or is too large for a figure.
    """
    require(table, "layer", "site", "infinity_norm", "kurtosis")
    kinds = [_column(str(site)) for site in table["site"]]
    sites = [own for own in _ORDER if own in kinds]
    layers = list(range(int(table["layer"].max()) + 1))
    style.room_for(2 * len(layers) * len(sites), f"{len(layers)} layers of {len(sites)} sites")
    rows = {
        (int(row["layer"]), kind): row
        for kind, row in zip(kinds, table.to_dict(orient="records"), strict=True)
    }
    row = max(min(20, 460 // len(layers)), 6)
    height = max(row * len(layers), 90)
    figure = style.figure(
        title,
        subtitle or about(table, unit),
        "Layers down, the first at the top; sites across, in the order of the pass. Left: the mean "
        f"over sequences of the largest |x|{f', {unit}' if unit else ''}. Right: the mean of the "
        "kurtosis over sequences, 3 for a Gaussian: a few values far from all others make it "
        "large. Colours go by powers of ten. Layer L is the residual stream before block L "
        "(resid) and the sites inside that block; the last row is what leaves the last block, "
        "before and behind the final norm.",
        plot_height=height,
        margins=(46, 14, _LABELS + 46),
        head_room=30,
        width=900,
        notes=_blanks(table),
    )
    for number, (column, heading, domain) in enumerate(_PANELS, start=1):
        suffix = "" if number == 1 else "2"
        values = {place: _log(own[column]) for place, own in rows.items()}
        figure.add_heatmap(
            z=[[values.get((layer, site)) for site in sites] for layer in layers],
            x=list(range(len(sites))),
            y=layers,
            xaxis=f"x{suffix}",
            yaxis=f"y{suffix}",
            customdata=[[_told(rows.get((layer, site))) for site in sites] for layer in layers],
            hovertemplate="layer %{y}, %{customdata[0]}<br>infinity norm %{customdata[1]:.4g}<br>"
            "kurtosis %{customdata[2]:.4g}<extra></extra>",
            coloraxis=f"coloraxis{suffix}",
            hoverongaps=False,
            xgap=1,
            ygap=1,
        )
        figure.add_annotation(
            style.note(domain[0], 1, f"<b>{heading}</b>", yshift=3, font={"size": 12.5})
        )
        bar = {
            "orientation": "h",
            "thickness": 10,
            "outlinewidth": 0,
            "ticklen": 3,
            "tickangle": 0,
            "x": domain[0],
            "xanchor": "left",
            "xpad": 0,
            "len": domain[1] - domain[0],
            "y": -_LABELS / height,
            "yanchor": "top",
        }
        colours, ticks = _colours([*values.values()])
        figure.layout[f"coloraxis{suffix}"] = colours | {"colorbar": bar | ticks}
        figure.layout[f"xaxis{suffix}"] = _axis([own.replace("_", " ") for own in sites]) | {
            "anchor": f"y{suffix}",
            "domain": list(domain),
            "tickangle": -90,
        }
        every = -(-len(layers) // 16)
        figure.layout[f"yaxis{suffix}"] = _axis([str(own) for own in layers], every) | {
            "anchor": f"x{suffix}",
            "autorange": "reversed",
            "title": {"text": "layer" if number == 1 else "", "standoff": 6},
            "showticklabels": number == 1,
        }
    return figure


def _column(site: str) -> str:
    return STREAM if site.startswith("resid_") else site


def _log(value: object) -> float | None:
    own = drawable(value)
    return drawable(math.log10(own)) if own is not None and own > 0 else None


def _told(row: dict[str, object] | None) -> list[object] | None:
    if row is None:
        return None
    site = literal(str(row["site"]))
    return [site, drawable(row["infinity_norm"]), drawable(row["kurtosis"])]


def _blanks(table: pd.DataFrame) -> list[str]:
    """How many cells are blank though they are in the table, and why."""
    zero = int((table["infinity_norm"] == 0).sum())
    equal = int(table["kurtosis"].isna().sum())
    total = f"of {len(table):,} layers and sites"
    return [
        *([f"Blank, without logarithm: {zero:,} {total} hold zeros alone."] if zero else []),
        *([f"Blank, without kurtosis: {equal:,} {total} hold equal values."] if equal else []),
    ]


def _colours(values: list[float | None]) -> tuple[dict[str, object], dict[str, object]]:
    """The colour axis of some logarithms, and the ticks of its bar."""
    known = [value for value in values if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    ticks = _ticks(low, high)
    labels = [style.short_count(10.0**tick) for tick in ticks]
    axis = {"cmin": low, "cmax": high, "colorscale": style.SEQUENTIAL}
    return axis, {"tickmode": "array", "tickvals": ticks, "ticktext": labels}


def _ticks(low: float, high: float) -> list[float]:
    """Logarithms of round numbers between two: powers of ten, or 1, 2 and 5 times these."""
    whole = range(math.floor(low), math.ceil(high) + 1)
    powers = [float(power) for power in whole if low <= power <= high]
    if len(powers) > 2:
        return powers[:: -(-len(powers) // 4)]
    finer = [power + math.log10(times) for power in whole for times in (1, 2, 5)]
    return [tick for tick in finer if low <= tick <= high] or [low, high]


def _axis(labels: list[str], every: int = 1) -> dict[str, object]:
    return {
        "tickmode": "array",
        "tickvals": list(range(0, len(labels), every)),
        "ticktext": labels[::every],
        "ticks": "",
        "showgrid": False,
        "zeroline": False,
    }
