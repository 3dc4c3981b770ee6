"""The rows of ablations on a page: the strongest with their errors, and all of them folded away."""

from collections.abc import Mapping

import pandas as pd

from interp.tables import HeadScores, SetScores
from interp.views.ablation_words import (
    Name,
    column,
    compared,
    effect_words,
    noun,
    orders,
    renamed,
    row_labels,
    strongest,
)
from interp.views.pages.facts import words
from interp.views.pages.page import Folded, Part, Source, Table, frame_table, in_full, number

TOP = 12

Rows = tuple[tuple[str, ...], ...]


def row_tables(result: HeadScores | SetScores, name: Name) -> list[Part]:
    """The strongest rows with their errors, and all rows folded away."""
    whole = _whole(result, name)
    label = whole.columns[0]
    shares = result.analysis == "prune"
    if shares or result.analysis == "cumulative":
        every = Folded(f"All {len(whole)} rows", frame_table(whole, "All rows.", [label, "order"]))
        return [_shares(result), every, *_orders(result, name)] if shares else [every]
    by = column(result, result.score, "interaction") if result.analysis == "pairs" else None
    rows = result.table if result.analysis == "layers" else strongest(result, TOP, by)
    kinds = {"pairs": "pairs", "layers": "layers"}
    what = kinds.get(result.analysis, f"{noun(result)}s")
    some = "All" if len(rows) == len(result.table) else f"The {len(rows)} strongest of"
    caption = f"{some} {len(result.table)} {what}; below each number its standard error"
    caption += "." if result.analysis == "importance" else " and false-discovery rate."
    columns, cells, values = _cells(result, rows, name)
    shown = Table(caption, columns, cells, values=values)
    folded = frame_table(whole, "Every column, the strongest first.", [label])
    return [shown, Folded(f"All {len(whole)} {what}, every column", folded)]


def _cells(
    result: HeadScores | SetScores, rows: pd.DataFrame, name: Name
) -> tuple[tuple[str, ...], Rows, Rows]:
    own, score = compared(result), result.score
    headings = {one: effect_words(result) if len(own) == 1 else one for one in own}
    if result.analysis == "importance":
        headings = {c: "" for c in ("importance", "importance_normalized", "attribution")}
    elif result.analysis == "pairs":
        extra = [column(result, score, c) for c in ("interaction", "sum_of_singles")]
        headings = {extra[0]: "", **headings, extra[1]: ""}
    else:
        # Of one method only: of all three the table would be wider than a page.
        extra = [column(result, score, c) for c in ("direct", "self_repair")]
        headings |= {"disagree": "ranks disagree", extra[0]: "", extra[1]: ""}
    shown = {c: heading for c, heading in headings.items() if c in rows}
    labels = row_labels(result, rows, name)
    cells = zip(labels, *(_column(rows, c) for c in shown), strict=True)
    values = zip(labels, *(map(in_full, rows[c]) for c in shown), strict=True)
    return (
        (_row_noun(result), *(heading or c.replace("_", " ") for c, heading in shown.items())),
        tuple(cells),
        tuple(values),
    )


def _column(rows: pd.DataFrame, name: str) -> list[str]:
    """The numbers of a column, below each its standard error and false-discovery rate."""
    below = {f"{name}_se": "±", f"{name}_q": "q"}
    lines = []
    for _, row in rows.iterrows():
        told = [
            f"{word} {float(row[c]):.2g}"
            for c, word in below.items()
            if c in rows and not pd.isna(row[c])
        ]
        lines.append(number(row[name]) + ("\n" + ", ".join(told) if told else ""))
    return lines


def _shares(result: HeadScores | SetScores) -> Table:
    """The change of the metric at each share removed, a column for each order."""
    kinds = orders(result.table)
    shares = sorted({float(share) for share in result.table["share"]})
    columns, whole = [], []
    for _, own in kinds:
        places = own["share"].astype(float)
        told = dict(zip(places, _column(own, result.score), strict=True))
        columns.append([told.get(share, "–") for share in shares])
        values = dict(zip(places, map(in_full, own[result.score]), strict=True))
        whole.append([values.get(share, "") for share in shares])
    rows = zip(shares, *columns, strict=True)
    return Table(
        f"{words(effect_words(result))} by the share of {noun(result)}s removed; below each number "
        "its standard error and false-discovery rate.",
        ("removed", *(order for order, _ in kinds)),
        tuple((f"{share:.0%}", *told) for share, *told in rows),
        values=tuple(zip(map(in_full, shares), *whole, strict=True)),
    )


def _orders(result: HeadScores | SetScores, name: Name) -> list[Part]:
    """How much each order lets go, and the order itself, folded away."""
    shares, removed = (result.summary.get(key) for key in ("prunable_share", "removal_orders"))
    if not isinstance(shares, Mapping) or not isinstance(removed, Mapping):
        return []
    rows = [
        (str(order), f"{float(share):.0%}", number(round(share * len(str(removed[order]).split()))))
        for order, share in shares.items()
    ]
    text = "\n\n".join(f"{order}: {renamed(str(own), name)}" for order, own in removed.items())
    told = Table("What each order lets go.", ("order", "share", f"{noun(result)}s"), tuple(rows))
    return [told, Source("The order of removal", text)]


def _whole(result: HeadScores | SetScores, name: Name) -> pd.DataFrame:
    """Every row with every column but those that say the same of all rows."""
    table = result.table
    if result.analysis not in ("layers", "cumulative", "prune"):
        by = column(result, result.score, "interaction") if result.analysis == "pairs" else None
        size = pd.to_numeric(table[by or result.score], errors="coerce").abs()
        table = table.loc[size.sort_values(ascending=False, kind="stable").index]
    same = [c for c in table if str(c).endswith(("_null", "_clean"))]
    indices = {"pairs": ["layer_a", "head_a", "layer_b", "head_b"], "layers": ["layer"]}
    gone = indices.get(result.analysis, ["layer", "head"])
    labels = row_labels(result, table, name)
    if result.analysis in ("cumulative", "prune"):
        gone = ["removed"]
    table = table.drop(columns=[*same, *gone], errors="ignore")
    table.insert(0, _row_noun(result), labels, allow_duplicates=True)
    return table


def _row_noun(result: HeadScores | SetScores) -> str:
    rows = {"pairs": "pair", "layers": "heads of", "cumulative": "removed", "prune": "removed"}
    kept = f"{noun(result)} kept"
    return kept if result.analysis == "all-but-one" else rows.get(result.analysis, noun(result))
