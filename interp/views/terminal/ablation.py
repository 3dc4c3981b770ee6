"""Ablations, importance and pruning as tables on a terminal."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from rich.console import Console

from interp.tables import HeadScores, SetScores, head_label
from interp.views.ablation_words import (
    column,
    compared,
    failures,
    findings,
    meanings,
    methods_in_words,
    metric_unit,
    noun,
    orders,
    row_labels,
    strongest,
    title,
    with_error,
)
from interp.views.terminal.scores import print_columns

ROWS = 12
STEPS = 24
"""Steps of a removal, or layers, that a terminal has room for."""

Cells = Mapping[str, Sequence[str]]


def print_ablation(result: HeadScores | SetScores) -> None:
    """Print what taking heads away did: the strongest rows with their errors, then the whole.

    Heads that failed have a line each.
    """
    console = Console(highlight=False, markup=False)  # a model's name may hold brackets
    heading, labels, cells = _rows(result)
    if labels:
        print_columns(console, title(result), labels, cells, heading)
    else:
        console.print(f"{title(result)}: no row has a value")
    total = len(result.table)
    if result.analysis != "prune" and labels and len(labels) < total:
        which = "spread evenly, the last with them" if result.analysis in _ORDERED else "strongest"
        console.print(f"{len(labels)} of {total} rows, {which}")
    for line in (*findings(result, head_label), *_kept(result), *failures(result, head_label)):
        console.print(line)
    for line in (*methods_in_words(result), *meanings(result)):
        console.print(line)
    counts = sorted(set(result.table["n"])) if "n" in result.table else []
    unit = ", ".join(filter(None, [metric_unit(result), "± one standard error"]))
    told = f" over n = {' to '.join(str(int(n)) for n in counts[:: len(counts) - 1 or 1])}"
    console.print(f"{unit}{told if counts else ''}; {result.inputs}; seed {result.seed}")


_ORDERED = ("layers", "cumulative")


def _rows(result: HeadScores | SetScores) -> tuple[str, list[str], Cells]:
    """The heading of the labels, the labels, and the cells by heading."""
    if result.analysis == "prune":
        return _curve_rows(result)
    if result.analysis == "pairs":
        by = column(result, result.score, "interaction")
        table = strongest(result, ROWS, by)
        return "pair", row_labels(result, table, head_label), _pair_cells(result, table)
    if result.analysis in _ORDERED:
        places = np.linspace(0, len(result.table) - 1, min(STEPS, len(result.table)))
        table = result.table.iloc[np.unique(places.round().astype(int))]
        cells: dict[str, Sequence[str]] = {}
        if result.analysis == "cumulative":
            last = zip(table["layer"], table["head"], strict=True)
            cells[f"{noun(result)} removed last"] = [head_label(int(a), int(b)) for a, b in last]
        first = "removed" if result.analysis == "cumulative" else "layer"
        labels = [str(int(number)) for number in table[first]]
        return first, labels, cells | dict(_effect_cells(result, table))
    table = strongest(result, ROWS)
    labels = row_labels(result, table, head_label)
    if result.analysis == "importance":
        return noun(result), labels, _importance_cells(result, table)
    heading = f"{noun(result)} kept" if result.analysis == "all-but-one" else noun(result)
    return heading, labels, _effect_cells(result, table)


def _effect_cells(result: HeadScores | SetScores, table: pd.DataFrame) -> Cells:
    """Effects of every method first, then whether they disagree, then what belongs to each."""
    several = len(compared(result)) > 1
    cells: dict[str, Sequence[str]] = {}
    for own in compared(result):
        heading = own if several else str(result.params.get("method", "effect"))
        cells[heading] = _errors(table, own)
    if "disagree" in table:
        cells["ranks disagree"] = ["yes" if told else "" for told in table["disagree"]]
    for own in compared(result):
        lead = f"{own} " if several else ""
        if f"{own}_q" in table:
            cells[f"{lead}q"] = _rates(table[f"{own}_q"])
    # Of the first method only: a terminal has no room for nine columns of effects.
    lead = f"{result.score} " if several else ""
    for name, heading in (("direct", "direct"), ("self_repair", "self-repair")):
        if column(result, result.score, name) in table:
            cells[lead + heading] = _errors(table, column(result, result.score, name))
    return cells


def _pair_cells(result: HeadScores | SetScores, table: pd.DataFrame) -> Cells:
    several = len(compared(result)) > 1
    cells: dict[str, Sequence[str]] = {}
    for own in compared(result):
        lead = f"{own} " if several else ""
        sums, apart, rate = (
            column(result, own, name) for name in ("sum_of_singles", "interaction", "interaction_q")
        )
        cells[f"{lead}interaction"] = _errors(table, apart)
        cells[f"{lead}q"] = _rates(table[rate])
        cells[f"{lead}joint effect"] = _errors(table, own)
        cells[f"{lead}sum of singles"] = [with_error(value, np.nan) for value in table[sums]]
    return cells


def _importance_cells(result: HeadScores | SetScores, table: pd.DataFrame) -> Cells:
    sizes = _errors(table, "importance")
    cells: dict[str, Sequence[str]] = {"importance": [cell.lstrip("+") for cell in sizes]}
    if "importance_normalized" in table:
        values = table["importance_normalized"]
        cells["share of its layer's norm"] = [_plain(value) for value in values]
    if "attribution" in table:
        cells["attribution"] = _errors(table, "attribution")
    return cells


def _curve_rows(result: HeadScores | SetScores) -> tuple[str, list[str], Cells]:
    """A row for each number of heads removed, a column for each order."""
    table = result.table
    counts = sorted(set(table["removed"].astype(int)))
    shares = dict(zip(table["removed"].astype(int), table["share"], strict=True))
    cells: dict[str, Sequence[str]] = {
        "share removed": [f"{float(shares[number]):.0%}" for number in counts]
    }
    for order, own in orders(table):
        by_count = dict(zip(own["removed"].astype(int), _errors(own, result.score), strict=True))
        cells[order] = [by_count.get(number, "") for number in counts]
    return "removed", [str(number) for number in counts], cells


def _kept(result: HeadScores | SetScores) -> list[str]:
    """Each layer's best head to keep, with its estimate on the half that did not choose it."""
    if result.analysis != "all-but-one":
        return []
    kept = result.summary.get("kept_heads")
    if not isinstance(kept, list) or not kept:
        return [
            "no best head to keep: a choice on one half and an estimate on the other need two "
            "independent sequences at least"
        ]
    lines = ["the best head to keep, chosen on one half of the sequences, told of the other:"]
    for record in kept:
        told = with_error(_number(record["held_out"]), _number(record["held_out_se"]))
        p = _number(record["held_out_p"])
        lines.append(
            f"  layer {record['layer']}: {head_label(record['layer'], record['kept'])} {told}"
            + ("" if np.isnan(p) else f", p = {p:.2g}")
        )
    return lines


def _errors(table: pd.DataFrame, name: str) -> list[str]:
    errors = table[f"{name}_se"] if f"{name}_se" in table else [np.nan] * len(table)
    return [with_error(value, error) for value, error in zip(table[name], errors, strict=True)]


def _rates(values: pd.Series) -> list[str]:
    return ["" if np.isnan(value) else f"{value:.2g}" for value in values.astype(float)]


def _plain(value: int | float) -> str:
    return "" if np.isnan(value) else f"{value:.4f}"


def _number(value: object) -> float:
    """A figure of a summary; one that is missing is null in a file."""
    return float("nan") if value is None else float(str(value))
