"""What rounding costs, as a table on a terminal."""

import math
from collections.abc import Sequence

from rich.console import Console

from interp.activation_tables import Quantization
from interp.views.ablation_words import with_error
from interp.views.pages.page import number
from interp.views.quantization_words import Variant, quantization_findings, variants
from interp.views.terminal.scores import print_columns


def print_quantization(result: Quantization) -> None:
    """Print every way of rounding with its cost, then what the table shows."""
    console = Console(highlight=False, markup=False)  # a model's name may hold brackets
    rows = variants(result.table)
    kept = {row.place: place for place, row in enumerate(rows) if row.kept}
    first = [place for place, row in enumerate(rows) if not row.kept or not _rounded(row, rows)]
    table = result.table.iloc[first]
    cells = {
        "loss change": [_change(rows[place]) for place in first],
        "with sinks kept": [
            _change(rows[kept[rows[place].place]]) if rows[place].place in kept else ""
            for place in first
        ],
        **{
            name.replace("_", " "): [number(value) for value in table[name]]
            for name in ("perplexity", "error", "bits_per_weight")
        },
    }
    weights = list(dict.fromkeys(row.weights for row in rows))
    labels = [
        f"{rows[place].method} {rows[place].label}"
        + (f", weights {rows[place].weights}" if len(weights) > 1 else "")
        for place in first
    ]
    print_columns(console, f"quantization of {result.model}", labels, cells, "scheme")
    console.print(
        f"loss change in {result.unit} a token, ± one standard error of the paired difference; "
        "error: of the residual stream after the last block, relative to its length, sinks rounded"
    )
    if len(weights) == 1:
        console.print(f"weights {weights[0]}")
    for line in quantization_findings(result):
        console.print(line)
    console.print(f"{result.inputs}; seed {result.seed}")


def _rounded(row: Variant, rows: Sequence[Variant]) -> bool:
    """Whether the same way of rounding is there with sinks rounded."""
    return any(own.place == row.place and not own.kept for own in rows)


def _change(row: Variant) -> str:
    missing = math.nan
    change = missing if row.change is None else row.change
    return with_error(change, missing if row.change_se is None else row.change_se)
