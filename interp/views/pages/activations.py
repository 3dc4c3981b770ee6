"""Pages of the largest activations: what is massive and where, the landscape, the rows by layer."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from interp.tables import Activations, Result
from interp.views.figures import style
from interp.views.figures.matrices import outlier_landscape
from interp.views.pages.facts import facts, quoted
from interp.views.pages.page import Folded, Part, Plot, Words, frame_table, number


def activation_findings(result: Result) -> list[str]:
    """What the residual stream holds, in sentences without their capital."""
    summary = result.summary
    if "largest" not in summary:
        return [f"{result.analysis}: no activation is listed"]
    lines = [f"outliers: {_largest(summary)}"]
    params = result.params
    rule = (
        f"above {number(params.get('magnitude'))}, and {number(params.get('ratio'))} times the "
        "median at least"
    )
    layers = summary.get("massive_layers")
    if not isinstance(layers, list) or not layers:
        return [*lines, f"no activation of the residual stream is massive ({rule})"]
    count = int(str(summary["massive"]))
    lines.append(
        f"{count:,} activation{' is' if count == 1 else 's are'} massive ({rule}), in "
        f"{spans(layers)}"
    )
    lines += _shared(summary)
    return lines


def _largest(summary: Mapping[str, object]) -> str:
    ratio = summary.get("largest_ratio")
    times = "" if style.drawable(ratio) is None else f", {number(ratio)} times the median there"
    return (
        f"the largest activation of the residual stream is {number(summary['largest'])}{times}: "
        f"{_where(summary)}, position {summary['largest_position']} (token "
        f"{summary['largest_token']!r}), dimension {summary['largest_dimension']}"
    )


def _where(summary: Mapping[str, object]) -> str:
    """The layer of the largest, or where it stands when no layer follows."""
    layers = summary.get("layers")
    last = max((row["layer"] for row in layers), default=None) if isinstance(layers, list) else None
    layer = summary["largest_layer"]
    return "after the last block" if layer == last else f"layer {layer}"


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
    """The landscape of the residual stream, the largest of each layer, all rows, and the facts."""
    table = result.table
    if table.empty or result.score not in table:
        return (Words("No activation to show: the table has no rows."), *facts(result))
    stream = table[table["site"] != "ln_final"]
    parts: list[Part] = []
    if stream["magnitude"].notna().any():
        figure = outlier_landscape(
            stream,
            subtitle=", ".join(filter(None, [result.model, result.inputs, f"unit: {result.unit}"])),
            unit=result.unit,
            reading=f"Only the {result.params.get('top')} largest cells of each layer are here. "
            "Layer L is the stream before block L; the last row is what leaves the last block.",
        )
        parts.append(Plot(figure))
    order = ["layer", "position", "dimension", "value", "median", "ratio", "massive", "sequence"]
    rows = quoted(table[["token", *order]]).assign(place=_places(table))
    first = rows.loc[layer_rows(result).index]
    parts.append(frame_table(first, "The largest activation of each layer.", ["place", "token"]))
    whole = frame_table(rows, "By layer, the largest first.", ["place", "token"])
    parts.append(Folded(f"All {len(rows)} rows", whole))
    return (*parts, *facts(result))


def _places(table: pd.DataFrame) -> list[str]:
    """Where in the model each row is, in words."""
    named = {"resid_pre": "into block {}", "resid_post": "out of block {}"}
    return [
        named.get(str(site), "final norm").format(layer - (site == "resid_post"))
        for layer, site in zip(table["layer"].astype(int), table["site"], strict=True)
    ]


def layer_rows(result: Activations) -> pd.DataFrame:
    """The largest activation of each layer and site, in order."""
    return result.table.groupby(["layer", "site"], sort=False).head(1)
