"""The tables of a phase-change page: the changes found, their spread over seeds, the ablations."""

import math

import pandas as pd

from interp.views.figures.runs import is_found, run_name, runs, texts
from interp.views.figures.style import drawable, short_count
from interp.views.pages.page import Part, Table, Words, frame_table, in_full, number

Found = list[tuple[tuple[str, str], dict[str, object]]]

_CURVES = {"induction": "induction score", "icl_score": "in-context-learning score"}
_PLACES = ("onset", "step", "end", "width")


def change_table(found: Found) -> Table:
    """Each change found: onset, midpoint, end and width, in steps and below that in tokens."""
    ordered = sorted(found, key=lambda item: str(item[1]["curve"]) != "induction")
    rows = [
        (
            _curve(row),
            _run(key),
            *(_both(row.get(place), row.get(f"{place}_tokens")) for place in _PLACES),
            number(drawable(row.get("size"))),
        )
        for key, row in ordered
    ]
    values = [
        (_curve(row), _run(key), *(in_full(row.get(column)) for column in (*_PLACES, "size")))
        for key, row in ordered
    ]
    return Table(
        "The changes found: training steps, with tokens below.",
        ("curve", "run", "onset", "midpoint", "end", "width", "size"),
        tuple(rows),
        words=2,
        values=tuple(values),
    )


def seed_table(changes: pd.DataFrame) -> Part:
    """The spread of the midpoints over seeds, for each model and curve with a change found."""
    rows = []
    for (model, curve), group in changes.groupby(
        [pd.Series(texts(changes, "model"), index=changes.index), "curve"], sort=False
    ):
        found = group[[is_found(value) for value in group["found"]]]
        if found.empty:
            continue
        rows.append(
            (
                _CURVES.get(str(curve), str(curve)),
                str(model) or "–",
                f"{len(found)} of {len(group)}",
                *(_spread(found, place) for place in ("onset", "step", "width")),
            )
        )
    if all(row[2].startswith("1 of") for row in rows):
        return Words("One seed shows the change, so there is no interval over seeds.")
    return Table(
        "Over seeds: mean ± standard error, with the range below, in steps.",
        ("curve", "model", "found", "onset", "midpoint", "width"),
        tuple(rows),
        words=2,
    )


def distance_table(found: Found) -> list[Part]:
    """How far each run's in-context-learning change lies from its induction change."""
    by_run: dict[tuple[str, str], dict[str, dict[str, object]]] = {}
    for key, row in found:
        by_run.setdefault(key, {})[str(row["curve"])] = row
    both = {key: pair for key, pair in by_run.items() if {"induction", "icl_score"} <= pair.keys()}
    pairs = [(_run(key), pair["induction"], pair["icl_score"]) for key, pair in both.items()]
    places = ("onset", "step")
    rows = [(run, *(_apart(one, two, place) for place in places)) for run, one, two in pairs]
    if not rows:
        return [Words("No run shows both changes, so there is no distance between them.")]
    return [
        Table(
            "Distance between the two changes: in-context-learning score minus induction score "
            "(positive: the former is later), in steps, with tokens below.",
            ("run", "between onsets", "between midpoints"),
            tuple(rows),
            values=tuple(
                (run, *(in_full(_gap(one, two, place)) for place in places))
                for run, one, two in pairs
            ),
        )
    ]


def unfound(changes: pd.DataFrame) -> tuple[str, ...]:
    """A line for each run and curve in which the rule found no change, with its reason."""
    said = []
    for run in runs(changes):
        for row in run.table.to_dict("records"):
            if not is_found(row["found"]):
                reason = row.get("reason")
                why = f": {reason}" if isinstance(reason, str) and reason else ""
                said.append(", ".join(filter(None, [run.name, _curve(row)])) + why)
    return tuple(said)


def ablation_table(ablation: pd.DataFrame) -> Table:
    """The table of ablated groups, with each effect and its standard error in one cell."""
    table = ablation.copy()
    for column in [c for c in table.columns if f"{c}_se" in table]:
        table[column] = [
            number(drawable(value)) + (f" ± {number(drawable(error))}" if pd.notna(error) else "")
            for value, error in zip(table[column], table[f"{column}_se"], strict=True)
        ]
        table = table.drop(columns=f"{column}_se")
    if "seed" in table:
        table["seed"] = texts(table, "seed")
    return frame_table(
        table, "Ablated groups; an effect is ± one standard error.", ("group", "seed", "heads")
    )


def _curve(row: dict[str, object]) -> str:
    return _CURVES.get(str(row["curve"]), str(row["curve"]))


def _run(key: tuple[str, str]) -> str:
    return run_name(key) or "this run"


def _both(steps: object, tokens: object) -> str:
    step, token = drawable(steps), drawable(tokens)
    if step is None:
        return "–"
    return f"{step:,.0f}" + (f"\n{short_count(token)} tokens" if token is not None else "")


def _spread(found: pd.DataFrame, place: str) -> str:
    values = [v for v in map(drawable, found[place]) if v is not None] if place in found else []
    if not values:
        return "–"
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return f"{mean:,.0f}\none seed"
    variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    error = math.sqrt(variance / len(values))
    return f"{mean:,.0f} ± {error:,.0f}\n{min(values):,.0f} to {max(values):,.0f}"


def _apart(first: dict[str, object], second: dict[str, object], place: str) -> str:
    steps, tokens = _gap(first, second, place), _gap(first, second, f"{place}_tokens")
    if steps is None:
        return "–"
    cell = f"{steps:+,.0f}"
    if tokens is not None:
        cell += f"\n{'+' if tokens >= 0 else ''}{short_count(tokens)} tokens"
    return cell.replace("-", "−")


def _gap(first: dict[str, object], second: dict[str, object], place: str) -> float | None:
    start, end = (drawable(row.get(place)) for row in (first, second))
    return None if start is None or end is None else end - start
