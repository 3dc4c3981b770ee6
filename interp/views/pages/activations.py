"""Pages of activations that stand out: what is massive and where, each site, outlier features."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from interp.activation_tables import Activations
from interp.tables import Result
from interp.views.figures import style
from interp.views.figures.matrices import outlier_landscape
from interp.views.figures.sites import site_maps
from interp.views.pages.facts import facts, quoted
from interp.views.pages.page import Folded, Part, Plot, Words, frame_table, number


def activation_findings(result: Result) -> list[str]:
    """What a model holds that stands out, in sentences without their capital."""
    summary = result.summary
    lines = []
    if "largest" in summary:
        lines += [_largest(summary), *_massive(result)]
    if isinstance(elsewhere := summary.get("largest_elsewhere"), Mapping):
        lead = (
            "outside the residual stream the largest is" if lines else "the largest activation is"
        )
        lines.append(
            f"{lead} {number(elsewhere['value'])}: {_site(elsewhere)}, position "
            f"{elsewhere['position']} (token {elsewhere['token']!r}), dimension "
            f"{elsewhere['dimension']}"
        )
    if isinstance(result, Activations):
        lines += [*_kurtosis(result), *_features(result)]
    first, *others = lines or ["no activation is listed"]
    return [f"{result.analysis}: {first}", *others]


def _massive(result: Result) -> list[str]:
    """What is massive in the residual stream, and where."""
    summary, params = result.summary, result.params
    rule = (
        f"above {number(params.get('magnitude'))}, and {number(params.get('ratio'))} times the "
        "median at least"
    )
    layers = summary.get("massive_layers")
    if not isinstance(layers, list) or not layers:
        return [f"no activation of the residual stream is massive ({rule})"]
    count = int(str(summary["massive"]))
    told = (
        f"{count:,} activation{' is' if count == 1 else 's are'} massive ({rule}), in "
        f"{spans(layers)}"
    )
    return [told, *_shared(summary)]


def _largest(summary: Mapping[str, object]) -> str:
    ratio = summary.get("largest_ratio")
    times = "" if style.drawable(ratio) is None else f", {number(ratio)} times the median there"
    where = (
        "after the last block"
        if summary.get("largest_site") == "resid_post"
        else f"layer {summary['largest_layer']}"
    )
    return (
        f"the largest activation of the residual stream is {number(summary['largest'])}{times}: "
        f"{where}, position {summary['largest_position']} (token "
        f"{summary['largest_token']!r}), dimension {summary['largest_dimension']}"
    )


def _site(row: Mapping[str, Any]) -> str:
    if row["site"] == "ln_final":
        return "behind the final norm"
    return f"{row['site']} of layer {int(row['layer'])}"


def _kurtosis(result: Activations) -> list[str]:
    """Where a few values stand furthest from all others."""
    sites = result.sites
    if sites.empty or sites["kurtosis"].isna().all():
        return []
    most = sites.loc[sites["kurtosis"].idxmax()]
    where = "the residual stream" if str(most["site"]).startswith("resid_") else ""
    if most["site"] == "resid_post":
        where += " after the last block"
    elif where:
        where += f" of layer {int(most['layer'])}"
    return [
        f"the kurtosis is highest in {where or _site(most.to_dict())}: "
        f"{number(float(most['kurtosis']))}, where a Gaussian has 3"
    ]


def _features(result: Activations) -> list[str]:
    """How many outlier features there are, and the one in most layers."""
    params, table = result.params, result.features
    if not (isinstance(by_site := result.summary.get("features"), Mapping) and by_site):
        return []
    shares = [float(str(params[f"feature_{name}"])) for name in ("positions", "layers")]
    rule = (
        f"|x| of {number(params['feature_magnitude'])} at least, at {shares[0]:.0%} of the tokens "
        f"in {shares[1]:.0%} of the layers"
    )
    if table.empty:
        return [f"no dimension of {', '.join(by_site)} is an outlier feature ({rule})"]
    told = f"{len(table)} outlier feature{'s' if len(table) > 1 else ''} ({rule})"
    most = table.loc[table["layers"].idxmax()]
    every = round(most["layers"] / most["layers_share"])
    lead = "that in most layers is " if len(table) > 1 else ""
    return [
        f"{told}: {lead}dimension {most['dimension']} of {most['site']}, in {most['layers']} of "
        f"{every} layers at {float(most['positions_share']):.0%} of their tokens"
    ]


def _shared(summary: Mapping[str, object]) -> list[str]:
    """Where massive activations are: the fullest dimension, and the fullest position or token."""
    fullest: dict[str, Mapping[str, Any]] = {
        name: records[0]
        for name in ("dimension", "position", "token")
        if isinstance(records := summary.get(f"{name}s"), list) and records
    }
    held = {name: int(first["activations"]) for name, first in fullest.items()}
    # Of one place and its token only the one that says more: which, depends on the model.
    if "position" in held and "token" in held:
        del held["token" if held["token"] <= held["position"] else "position"]
    told = []
    for name, count in held.items():
        first = fullest[name]
        token = f" (token {first['token']!r})" if name == "position" and "token" in first else ""
        share = count / int(str(summary["massive"]))
        told.append(f"{share:.0%} of them at {name} {_called(first[name])}{token}")
    return [", ".join(told)] if told else []


def _called(name: object) -> str:
    return repr(name) if isinstance(name, str) else str(name)


def spans(layers: list[int]) -> str:
    """Layers as runs of neighbours: "layers 3 and 12 to 28"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    told = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    joined = ", ".join(told[:-1]) + (" and " if told[1:] else "") + told[-1]
    return f"layer{'s' if len(layers) > 1 else ''} {joined}"


def activation_parts(result: Activations) -> tuple[Part, ...]:
    """The landscape of the residual stream, the map of all sites, their tables, and the facts."""
    table = result.table
    if table.empty or result.score not in table:
        return (Words("No activation to show: the table has no rows."), *facts(result))
    subtitle = ", ".join(filter(None, [result.model, result.inputs, f"unit: {result.unit}"]))
    stream = table[table["site"].isin(STREAM)]
    parts: list[Part] = []
    if stream["magnitude"].notna().any():
        figure = outlier_landscape(
            stream,
            subtitle=subtitle,
            unit=result.unit,
            reading=f"Only the {result.params.get('top')} largest cells of each layer are here. "
            "Layer L is the stream before block L; the last row is what leaves the last block.",
        )
        parts.append(Plot(figure))
    if not result.sites.empty:
        parts.append(Plot(site_maps(result.sites, subtitle=subtitle, unit=result.unit)))
    rows = quoted(table[["token", *_CELL]]).assign(place=_places(table))
    if len(stream):
        first = rows.loc[stream_rows(result).index]
        caption = "The largest activation of the residual stream, and of the final norm's output."
        parts.append(frame_table(first, caption, ["place", "token"]))
    if not result.sites.empty:
        caption = "Each site in the layer where its infinity norm is largest."
        parts.append(frame_table(strongest_sites(result), caption, ["site"]))
    if not result.features.empty:
        caption = "Outlier features: by site, those of most layers first."
        parts.append(frame_table(result.features, caption, ["site"]))
    if not result.sites.empty:
        whole = frame_table(result.sites, "Every layer and site, in order.", ["site"])
        parts.append(Folded(f"All {len(result.sites)} layers and sites", whole))
    whole = frame_table(rows, "By layer, the largest first.", ["place", "token"])
    parts.append(Folded(f"All {len(rows)} rows", whole))
    return (*parts, *facts(result))


STREAM = ("resid_pre", "resid_post")
"""The sites of the residual stream."""

_CELL = (
    "layer",
    "position",
    "dimension",
    "value",
    "median",
    "ratio",
    "deviation",
    "massive",
    "sequence",
)


def _places(table: pd.DataFrame) -> list[str]:
    """Where in the model each row is, in words."""
    named = {
        "resid_pre": "into block {}",
        "resid_post": "out of block {}",
        "ln_final": "final norm",
    }
    return [
        named.get(str(site), f"{site} of block {{}}").format(layer - (site == "resid_post"))
        for layer, site in zip(table["layer"].astype(int), table["site"], strict=True)
    ]


def stream_rows(result: Activations) -> pd.DataFrame:
    """The largest activation of each layer of the residual stream, then of the final norm."""
    table = result.table
    table = table[table["site"].isin((*STREAM, "ln_final"))]
    return table.groupby(["layer", "site"], sort=False).head(1)


def strongest_sites(result: Activations) -> pd.DataFrame:
    """The row of each site whose infinity norm is largest, of equals the first, in the order of the
    pass."""
    sites = result.sites.reset_index(drop=True)
    order = sites.groupby("site", sort=False)["infinity_norm"].idxmax()
    return sites.loc[list(order)]
