"""What a results table holds: its runs, its heads as a grid, the changes found in it.

One invariant: a head, a run or a column that is not there is reported or left blank, never filled
in.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from interp.errors import AnalysisError
from interp.views.figures.style import drawable


@dataclass(frozen=True)
class Run:
    """One training run's rows in a table of several; `key` is its model and seed, as text."""

    key: tuple[str, str]
    table: pd.DataFrame

    @property
    def name(self) -> str:
        """What the run is called in legends: "two-layer, seed 0"; empty if nothing names it."""
        return run_name(self.key)


def run_name(key: tuple[str, str]) -> str:
    """A run's model and seed in words: "two-layer, seed 0"; empty if neither is known."""
    model, seed = key
    return ", ".join(filter(None, [model, f"seed {seed}" if seed else ""]))


def runs(table: pd.DataFrame) -> list[Run]:
    """The training runs of a table, by its `model` and `seed` columns, in order of appearance."""
    keys = list(zip(texts(table, "model"), texts(table, "seed"), strict=True))
    places: dict[tuple[str, str], list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return [Run(key, table.iloc[rows]) for key, rows in places.items()]


def texts(table: pd.DataFrame, column: str) -> list[str]:
    """The column as text, row by row; the empty string where it, or the column, is missing."""
    if column not in table:
        return [""] * len(table)
    return ["" if pd.isna(value) else str(value) for value in table[column]]


def require(table: pd.DataFrame, *columns: str) -> None:
    """Refuse a table that is empty or lacks one of the columns."""
    lacking = [column for column in columns if column not in table]
    if lacking:
        raise AnalysisError(f"no column {lacking[0]!r} in the table; known: {list(table.columns)}")
    if table.empty:
        raise AnalysisError(
            f"nothing to draw: the table with columns {list(table.columns)} is empty"
        )


def head_grid(
    table: pd.DataFrame, column: str, gone: Iterable[tuple[int, int]] = ()
) -> tuple[list[int], list[int], list[list[float | None]]]:
    """The layers, the heads and the column's values as rows of layers; None for a head without one.

    The grid goes from layer 0 and head 0 to the last of the table and of `gone`, the heads that the
    model has no longer: a layer without any row is one of blanks.

    Raises:
        AnalysisError: the table is empty, lacks the column, or has several rows for one head.
    """
    require(table, "layer", "head", column)
    values: dict[tuple[int, int], float | None] = {}
    for layer, head, value in zip(table["layer"], table["head"], table[column], strict=True):
        if (key := (int(layer), int(head))) in values:
            raise AnalysisError(
                f"a head map needs one row a head: L{key[0]}H{key[1]} has several; select one first"
            )
        values[key] = drawable(value)
    places = [*values, *gone]
    layers = list(range(max(layer for layer, _ in places) + 1))
    heads = list(range(max(head for _, head in places) + 1))
    return layers, heads, [[values.get((layer, head)) for head in heads] for layer in layers]


def is_found(value: object) -> bool:
    """What a cell of a `found` column says, however the file spelled it."""
    return str(value).lower() in ("true", "1", "1.0")


def found_changes(changes: pd.DataFrame | None) -> list[tuple[tuple[str, str], dict[str, object]]]:
    """The rows of a table of changes in which one was found, each with its run's key."""
    if changes is None or changes.empty:
        return []
    require(changes, "curve", "found", "onset", "step", "end")
    rows = changes.to_dict("records")
    keys = zip(texts(changes, "model"), texts(changes, "seed"), strict=True)
    return [
        (key, row)
        for key, row in zip(keys, rows, strict=True)
        if is_found(row["found"])
        and all(drawable(row[place]) is not None for place in ("onset", "step", "end"))
    ]


def blank_notes(
    table: pd.DataFrame,
    values: Sequence[Sequence[float | None]],
    pruned: Iterable[tuple[int, int]],
    *,
    letter: str = "H",
    name: str = "",
) -> list[str]:
    """Which cells of a map are blank, and why: pruned, without a row, or without a finite value.

    `values` are those of `head_grid`. With the letter KV the heads are key-value heads: `pruned`
    are then query heads, and which KV heads went with them the table does not say. `name` is the
    map's, where a figure has several.
    """
    count = sum(map(len, values))
    lead = f"{name}: blank" if name else "Blank"
    blank = [(a, b) for a, row in enumerate(values) for b, v in enumerate(row) if v is None]
    if len(blank) == count:
        return [f"{f'{name}: no' if name else 'No'} head has a finite value: the map is blank."]
    measured = set(zip(table["layer"].astype(int), table["head"].astype(int), strict=True))
    gone = set(pruned) - measured
    absent = "not measured"
    if letter == "KV" and gone:
        gone, absent = set(), "not measured, or pruned with all of their query heads"
    kinds = {
        "pruned, the model has no such head": [h for h in blank if h in gone],
        absent: [h for h in blank if h not in gone | measured],
        "without a finite value": [h for h in blank if h in measured],
    }
    return [
        f"{lead}, {why}: {', '.join(f'L{a}{letter}{b}' for a, b in heads[:24])}"
        f"{', …' if len(heads) > 24 else ''} ({len(heads)} of {count} heads)."
        for why, heads in kinds.items()
        if heads
    ]


def about(table: pd.DataFrame, unit: str) -> str:
    """A figure's default subtitle: models, seeds, unit and n, as far as they are known."""
    words = list(dict.fromkeys(filter(None, texts(table, "model"))))
    seeds = list(dict.fromkeys(filter(None, texts(table, "seed"))))
    words += [f"seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}"] if seeds else []
    words += [f"unit: {unit}"] if unit else []
    counts = sorted(set(table["n"].dropna())) if "n" in table else []
    if counts:
        words.append(f"n = {_span(float(counts[0]), float(counts[-1]))}")
    return ", ".join(words)


def _span(low: float, high: float) -> str:
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
