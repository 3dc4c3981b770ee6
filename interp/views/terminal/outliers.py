"""Massive activations with their sinks, and what changing them does, as tables on a terminal."""

from rich.console import Console

from interp.activation_tables import OutlierEffects, OutlierSinks
from interp.views.ablation_words import with_error
from interp.views.figures.outliers import change_labels
from interp.views.pages.outlier_links import outlier_effect_findings, outlier_sink_findings
from interp.views.pages.page import number
from interp.views.terminal.scores import print_columns

_LAYER_COLUMNS = {
    "magnitude": "|x|",
    "magnitude_others": "others' |x|",
    "mass": "mass",
    "mass_null": "even",
    "heads_above": "heads above",
    "key_norm_ratio": "key norm ratio",
    "value_norm_ratio": "value norm ratio",
}


def print_outlier_sinks(result: OutlierSinks) -> None:
    """Print what found tokens are and draw in each layer, then what the heads show."""
    console = Console(highlight=False, markup=False)  # a token may hold brackets
    layers = result.layers
    cells = {
        called: [number(value) for value in layers[name]] for name, called in _LAYER_COLUMNS.items()
    }
    labels = [str(layer) for layer in layers["layer"]]
    print_columns(
        console, f"massive activations and sinks of {result.model}", labels, cells, "layer"
    )
    console.print(
        "|x|: the largest before the block, of tokens with massive activations and of the others; "
        "mass: the attention they draw, a mean over heads; even: that of a head that spreads it "
        "evenly; heads above: with 0.3 more than that; norm ratios: their keys and values over the "
        "others'"
    )
    for line in outlier_sink_findings(result):
        console.print(line)
    console.print(f"{result.inputs}; seed {result.seed}")


def print_outlier_effects(result: OutlierEffects) -> None:
    """Print what each change costs and how many cells it changed, then what that shows."""
    console = Console(highlight=False, markup=False)
    table = result.table
    pairs = zip(table["changed"], table["cells"], strict=True)
    changes = zip(table["loss_change"], table["loss_change_se"], strict=True)
    cells = {
        "cells changed": [f"{int(changed)} of {int(whole)}" for changed, whole in pairs],
        "loss": [number(value) for value in table["loss"]],
        "loss change": [with_error(value, error).replace("-", "−") for value, error in changes],
        "sink heads": [number(value) for value in table["sink_heads"]],
    }
    title = f"changed outliers of {result.model}"
    print_columns(console, title, change_labels(table), cells, "change")
    console.print(
        "loss and its change in nats a token, ± one standard error of the paired difference; sink "
        "heads: with more than 0.3 of their attention on the first token"
    )
    for line in outlier_effect_findings(result):
        console.print(line)
    console.print(f"{result.inputs}; seed {result.seed}")
