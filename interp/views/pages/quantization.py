"""Pages of quantization: what rounding costs, where errors grow, every row, the facts."""

from dataclasses import replace

import pandas as pd

from interp.activation_tables import Quantization
from interp.views.figures.quantization import errors_by_layer, rounding_costs
from interp.views.figures.runs import about
from interp.views.pages.facts import facts
from interp.views.pages.page import Folded, Part, Plot, Words, frame_table
from interp.views.quantization_words import CAUTION, variants

FOLDED = 2000
"""Errors by layer that a page lists in full; a file has all of them."""


def quantization_parts(result: Quantization) -> tuple[Part, ...]:
    """What each way of rounding costs, the errors by layer, all rows, and the facts."""
    table, layers = result.table, result.layers
    told = facts(_for_facts(result))
    if table.empty or result.score not in table:
        return (Words("Nothing to show: no way of rounding is listed."), *told)
    origin = (result.model, about(table, result.unit), f"seed {result.seed}")
    subtitle = ", ".join(filter(None, origin))
    parts: list[Part] = []
    if pd.to_numeric(table[result.score], errors="coerce").notna().any():
        costs = rounding_costs(
            table,
            title="What rounding costs",
            subtitle=subtitle,
            unit=result.unit,
            reading=_reading(result),
        )
        parts.append(Plot(costs))
    else:
        parts.append(Words("No way of rounding has a finite loss, so there is no figure to draw."))
    if "error" in layers and pd.to_numeric(layers["error"], errors="coerce").notna().any():
        errors = errors_by_layer(
            layers,
            title="Error of the residual stream by layer",
            subtitle=result.model,
            reading="How far the stream after each block is from that of the model before "
            "rounding, relative to its length: a mean over tokens, sink tokens left out. Kept: the "
            "activations of sink tokens are not rounded.",
        )
        parts.append(Plot(errors))
    parts.append(Words(CAUTION))
    weights = list(dict.fromkeys(row.weights for row in variants(table)))
    alike = f"; weights {weights[0]}" if len(weights) == 1 else ""
    rows = _named(table, bool(alike))
    parts.append(frame_table(rows[_in_order(rows)], f"Every way of rounding{alike}.", list(_WORDS)))
    if "error" in layers and 0 < len(layers) <= FOLDED:
        every = frame_table(_named(layers, bool(alike)), f"Errors by layer{alike}.", list(_WORDS))
        parts.append(Folded(f"All {len(layers):,} errors by layer", every))
    elif len(layers) > FOLDED:
        parts.append(Words(f"All {len(layers):,} errors by layer are in the table's own file."))
    return (*parts, *told)


_WORDS = ("scheme", "bits", "weights", "activations", "sinks")


def _named(table: pd.DataFrame, weights_alike: bool) -> pd.DataFrame:
    """The rows with their ways of rounding in words."""
    rows = variants(table)
    words = {
        "scheme": [row.method for row in rows],
        "bits": [row.bits.upper() for row in rows],
        "weights": [row.weights for row in rows],
        "activations": [row.scales or "not rounded" for row in rows],
        "sinks": [row.sinks or "–" for row in rows],
    }
    if weights_alike:
        del words["weights"]
    own = {"weight_scales", "activation_scales", *words}
    return table.drop(columns=[name for name in table if name in own]).assign(**words)


def _in_order(rows: pd.DataFrame) -> list[str]:
    """The columns, those first that a reader looks for first."""
    first = ("loss_change", "loss_change_se", "perplexity", "error", "bits_per_weight")
    return [*(name for name in first if name in rows), *(n for n in rows if n not in first)]


def _reading(result: Quantization) -> str:
    """How to read the costs, with what the parameters say of the schemes."""
    params = result.params
    rows = variants(result.table)
    told = ["One row for each way of rounding; 0 is the model before it."]
    if any(row.scales for row in rows):
        told.append("Per tensor, per token: which activations share a scale.")
    if any(row.weight_scales == "group" for row in rows) and params.get("group"):
        told.append(f"A group is {params['group']} weights of one channel.")
    if any(row.sinks == "kept" for row in rows):
        told.append("Sinks kept: the activations of sink tokens are not rounded.")
    if any(row.scheme == "llm.int8" for row in rows) and params.get("threshold"):
        told.append(
            f"LLM.int8 keeps dimensions with an activation of {params['threshold']:g} or more."
        )
    if any(row.scheme == "smoothquant" for row in rows) and params.get("alpha") is not None:
        told.append(f"SmoothQuant: α = {params['alpha']:g}.")
    return " ".join(told)


def _for_facts(result: Quantization) -> Quantization:
    """The result without its notes, which are among the findings."""
    left = {name: value for name, value in result.summary.items() if name != "notes"}
    return replace(result, summary=left)
