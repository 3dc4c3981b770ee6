"""Pages of massive activations with their sinks, and of what changing them does."""

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from interp.activation_tables import OutlierEffects, OutlierSinks
from interp.tables import Result
from interp.views.figures.outliers import (
    CONTROL,
    change_labels,
    effect_bars,
    sink_link,
    sinks_after,
)
from interp.views.pages.activations import spans
from interp.views.pages.facts import facts, quoted
from interp.views.pages.page import Folded, Part, Plot, Words, frame_table, number
from interp.views.quantization_words import clear, rough

TOP = 12


# --- sinks ----------------------------------------------------------------------------------------


def outlier_sink_findings(result: Result) -> list[str]:
    """What the found tokens are and draw, in sentences without their capital."""
    summary = result.summary
    if "found" not in summary:
        return ["outlier sinks: no massive activation is listed"]
    main, found = int(str(summary["main_layer"])), int(str(summary["found"]))
    after, before = (int(str(summary[f"heads_{when}"])) for when in ("after", "before"))
    lines = [f"outlier sinks: {_found(summary)}"]
    if not after:
        return [*lines, "most of them are massive after the last block alone, where no head reads"]
    it = "it is" if found == 1 else "most of them are"
    mass = f"from layer {main} on, where {it} massive, heads give "
    mass += f"{_short(summary['mass_after'])} of their attention to such tokens, a mean over heads"
    if before:
        mass += f", against {_short(summary['mass_before'])} in the layers before"
    above = f"{summary['heads_above_after']} of {after} heads there lie more than 0.3 above an even"
    above += " head"
    if before:
        above += f", and {summary['heads_above_before']} of {before} before"
    lines.append(f"{mass}; {above}")
    table = result.table
    later = table[table["after"].astype(bool)]
    keys, values = (later[f"{name}_norm_ratio"].median() for name in ("key", "value"))
    if pd.notna(keys) and pd.notna(values):
        line = (
            f"in the median head there their keys are {keys:.2g} times as long as other "
            f"tokens', their values {values:.2g} times"
        )
        ranks = [summary.get(f"correlation_{name}_norm") for name in ("key", "value")]
        if all(rank is not None and pd.notna(rank) for rank in ranks):
            line += (
                f"; over heads, the attention has a rank correlation of {_short(ranks[0])} with "
                f"the first ratio and {_short(ranks[1])} with the second"
            )
        lines.append(line)
    return lines


def outlier_sink_parts(result: OutlierSinks) -> tuple[Part, ...]:
    """The link at a glance, the heads that the tokens draw most from, all rows, the facts."""
    table = result.table
    if table.empty or result.score not in table or result.layers.empty:
        return (Words("No heads to show: the table has no rows."), *facts(result))
    told = f"{result.model}, {result.inputs}, seed {result.seed}"
    figure = sink_link(
        table,
        result.layers,
        title="Massive activations and the attention they draw",
        subtitle=told,
        main_layer=int(str(result.summary["main_layer"])),
        subject=result.model,
        pruned=result.pruned_heads,
    )
    rows = strongest_heads(result)
    return (
        Plot(figure),
        frame_table(rows.head(TOP), f"The {min(TOP, len(rows))} strongest heads.", ["head"]),
        Folded(f"All {len(rows)} heads", frame_table(rows, "Strongest first.", ["head"])),
        Folded(f"All {len(result.layers)} layers", frame_table(result.layers, "By layer.")),
        *facts(result),
    )


def strongest_heads(result: OutlierSinks) -> pd.DataFrame:
    """The heads that found tokens draw the most attention from first, labelled."""
    ranked = result.table.sort_values(result.score, ascending=False, kind="stable")
    labels = [f"L{a}H{b}" for a, b in zip(ranked["layer"], ranked["head"], strict=True)]
    return ranked.drop(columns=["layer", "head"]).assign(head=labels).reset_index(drop=True)


# --- effects --------------------------------------------------------------------------------------


def outlier_effect_findings(result: Result) -> list[str]:
    """What the changes cost, and which changed nothing, in sentences without their capital."""
    summary, table = result.summary, result.table
    if "cells" not in summary or table.empty:
        return ["outlier effects: no change is listed"]
    dimensions, layers = (
        [int(n) for n in _list(summary[name])] for name in ("dimensions", "layers")
    )
    known = (
        f"dimension {dimensions[0]}" if len(dimensions) == 1 else f"{len(dimensions)} dimensions"
    )
    lines = [
        f"outlier effects: {_found(summary)}, {int(str(summary['cells'])):,} cells in {known} and "
        f"{spans(layers)}; unchanged, the loss is {number(summary['loss'])} nats a token"
    ]
    really = table[table["changed"] > 0]
    costs = [
        _cost(name, own)
        for name, own in really.groupby("change", sort=False)
        if name != CONTROL and own["loss_change"].notna().any()
    ]
    if costs:
        lines.append(f"the loss changes, in nats a token: {', '.join(costs)}")
    control = really[really["change"] == CONTROL]
    if control["loss_change"].notna().any():
        lines.append(f"as many other cells set to 0, the control: {_cost('', control).strip()}")
    # A control without a cell had no other token; what one draw of several changed is above.
    most = table[table["cells"] > 0].groupby("change", sort=False)["changed"].max()
    if nothing := [str(name) for name, changed in most.items() if not changed and name != CONTROL]:
        lines.append(
            f"no cells changed: {' and '.join(nothing)}, because what was put in stood there "
            "before; this is no evidence that the cells do not matter"
        )
    sinks = [
        f"{int(row['sink_heads'])} after {row['change']}"
        for _, row in really.drop_duplicates("change").iterrows()
        if row["change"] in ("zero", "flip", CONTROL)
    ]
    if sinks:
        lines.append(
            f"{summary['sink_heads']} of {summary['heads']} heads give the first token more than "
            f"0.3 of their attention; {', '.join(sinks)}"
        )
    return [*lines, *rough(result)]


def outlier_effect_parts(result: OutlierEffects) -> tuple[Part, ...]:
    """What each change costs, the sinks after it, all rows, the facts."""
    table = result.table
    if table.empty or result.score not in table or result.heads.empty:
        return (Words("No change to show: the table has no rows."), *facts(result))
    told = f"{result.model}, {result.inputs}, seed {result.seed}"
    bars = effect_bars(
        table,
        title="What changing the massive activations costs",
        subtitle=told,
        unchanged=f"unchanged: {number(result.summary.get('loss'))}",
    )
    maps = sinks_after(
        result.heads, table, title="Attention on the first token after each change", subtitle=told
    )
    rows = quoted(table.drop(columns=["draw", "change", "note"])).assign(
        change=change_labels(table), note=table["note"].fillna("")
    )
    heads = result.heads
    grouped = heads.groupby(["change", "draw", "layer"], sort=False)[["sinks", "outlier_mass"]]
    by_layer = grouped.mean().reset_index()
    return (
        Plot(bars),
        frame_table(rows, "Every change and draw.", ["change"]),
        Plot(maps),
        Folded(
            f"{len(by_layer):,} rows by change and layer",
            frame_table(by_layer, "Means over the heads of each layer.", ["change"]),
        ),
        *facts(result),
    )


def _cost(name: object, own: pd.DataFrame) -> str:
    """`zero +12.95 ± 0.27`, or of several draws `move +4.31 to +8.71 (3 draws)`."""
    values = own["loss_change"]
    if len(own) > 1:
        return f"{name} {_signed(values.min())} to {_signed(values.max())} ({len(own)} draws)"
    value, error = float(values.iloc[0]), float(own["loss_change_se"].iloc[0])
    if not (math.isfinite(error) and error > 0):
        return f"{name} {_signed(value)}"
    decimals = max(1 - math.floor(math.log10(error)), 0)
    told = f"{value:+.{decimals}f} ± {error:.{decimals}f}".replace("-", "−")
    return f"{name} {told}" + ("" if clear(value, error) else " (not clearly different from 0)")


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + f"{value:.3g}".replace("-", "−")


def _short(value: object) -> str:
    return f"{float(str(value)):.2f}".replace("-", "−")


def _found(summary: Mapping[str, object]) -> str:
    """How many tokens hold massive activations, and which most of them are."""
    found, sequences = int(str(summary["found"])), int(str(summary["sequences"]))
    line = f"{found:,} token{'' if found == 1 else 's'} in {sequences:,} "
    line += "sequence" if sequences == 1 else "sequences"
    line += " holds" if found == 1 else " hold"
    line += " massive activations"
    first, *_ = _list(summary.get("tokens")) or [None]
    if isinstance(first, Mapping):
        where = f" at position {first['position']}" if "position" in first else ""
        line += f", {first['tokens']} of them {first['token']!r}{where}"
    return line


def _list(value: object) -> Sequence:
    return value if isinstance(value, list | tuple) else []
