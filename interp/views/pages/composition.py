"""Pages of composition: a matrix of pairs of heads for each kind, and the strongest pairs."""

import pandas as pd

from interp.tables import Result
from interp.views.figures import style
from interp.views.figures.matrices import composition_matrix
from interp.views.pages.facts import facts
from interp.views.pages.page import Folded, Part, Plot, Words, frame_table, number

KINDS = {"k": "K-composition", "q": "Q-composition", "v": "V-composition"}

_MEANING = {
    "k": "what the earlier head writes decides where the later one looks",
    "q": "what the earlier head writes decides what the later one looks for",
    "v": "what the earlier head writes is moved on by the later one",
}

TOP = 12

FOLDED = 2000
"""Pairs that a page lists in full; a file has all of them."""

DRAWN = 270_000
"""Cells of all matrices of a page: 2 MB. Where the three have more, the score's alone is drawn."""


def composition_findings(result: Result) -> list[str]:
    """The strongest pair of each kind, and how many lie above chance, without their capital."""
    lines = []
    for kind, called in KINDS.items():
        if f"largest_{kind}" not in result.summary:
            lines.append(f"{called}: no pair has a value")
            continue
        value, pair, share = (
            result.summary[name]
            for name in (f"largest_{kind}", f"largest_{kind}_pair", f"{kind}_above_null")
        )
        heads = " then ".join("L" + head.replace(".", "H") for head in str(pair).split(" then "))
        lines.append(
            f"{called}: the strongest pair is {heads} at {number(value)}, where random heads have "
            f"{number(result.summary.get('null'))}; {float(str(share)):.0%} of "
            f"{number(result.summary.get('pairs'))} pairs are above that"
        )
    return lines


def composition_parts(result: Result) -> tuple[Part, ...]:
    """A matrix of each kind above its null, the strongest pairs, and the facts."""
    table = result.table
    if table.empty or result.score not in table:
        return (Words("No pair to show: the table has no rows."), *facts(result))
    earlier, later = (len(table[[f"layer_{e}", f"head_{e}"]].drop_duplicates()) for e in "ab")
    parts: list[Part] = []
    if earlier * later > style.MOST_CELLS:
        parts.append(Words(f"{earlier} heads against {later} are too many for a matrix."))
    for kind, called in KINDS.items():
        column = f"{kind}_composition"
        above = f"{kind}_composition_above_random"
        drawn = table.assign(**{above: table[column] - table[f"{column}_null"]})
        if earlier * later > style.MOST_CELLS or not drawn[above].notna().any():
            continue
        if column != result.score and len(KINDS) * earlier * later > DRAWN:
            parts.append(Words(f"{called} has no matrix here, which would make the page slow."))
            continue
        figure = composition_matrix(
            drawn,
            above,
            title=f"{called} above that of random heads",
            subtitle=f"{result.model}, weights alone, n = {len(table):,} pairs",
            unit=result.unit,
            reading=f"{called}: {_MEANING[kind]}.",
            diverging=True,
        )
        parts.append(Plot(figure))
    ranked = strongest_pairs(result)
    parts.append(
        frame_table(ranked.head(TOP), f"The {min(TOP, len(ranked))} strongest pairs.", ["pair"])
    )
    if TOP < len(ranked) <= FOLDED:
        whole = frame_table(ranked, "All pairs, strongest first.", ["pair"])
        parts.append(Folded(f"All {len(ranked)} pairs", whole))
    elif len(ranked) > FOLDED:
        parts.append(Words(f"All {len(ranked):,} pairs are in the table's own file."))
    return (*parts, *facts(result))


def strongest_pairs(result: Result) -> pd.DataFrame:
    """Pairs with the most composition of any kind first, labelled, without their places."""
    columns = [f"{kind}_composition" for kind in KINDS]
    order = result.table[columns].max(axis=1).sort_values(ascending=False, kind="stable").index
    table = result.table.loc[order]
    places = table[["layer_a", "head_a", "layer_b", "head_b"]].itertuples(index=False, name=None)
    labels = [f"L{a}H{b} then L{c}H{d}" for a, b, c, d in places]
    return table[columns].assign(pair=labels).reset_index(drop=True)
