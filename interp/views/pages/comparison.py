"""The page of a comparison: what the heads of two models do, and how far the two differ."""

from collections.abc import Iterator, Sequence

import pandas as pd

from interp.comparison.result import Comparison
from interp.views.figures.comparison import HeadMap, head_maps, head_scatter, sorted_heads
from interp.views.figures.style import drawable
from interp.views.pages.chapters import Chapter
from interp.views.pages.page import (
    Folded,
    Page,
    Part,
    Plot,
    Points,
    Section,
    Table,
    Words,
    frame_table,
    in_full,
    number,
)
from interp.views.pages.subjects import comparison_subjects

SHOWN = 5
"""Strongest heads of each kind in the table."""

_MAPS_IN_A_ROW = 2


def compare_chapter(comparison: Comparison) -> Chapter:
    """A comparison and the heads of both models."""
    return Chapter(compare_page(comparison), comparison_subjects(comparison))


def compare_page(comparison: Comparison) -> Page:
    """The page of a comparison: findings, maps, distributions, differences, tables, facts."""
    names = short_names(comparison.labels)
    first, second = names.values()
    sections = [
        Section("heads", "Heads", tuple(_heads(comparison, names))),
        Section("distributions", "Distributions", tuple(_distributions(comparison, names))),
    ]
    if not comparison.differences.empty:
        parts = tuple(_differences(comparison, names))
        sections.append(Section("differences", "Differences", parts))
    sections.append(Section("strongest", "Strongest heads", tuple(_strongest(comparison, names))))
    sections.append(Section("caveats", "Caveats", (Points(_caveats(comparison)),)))
    sections.append(Section("facts", "Where this comes from", (_facts(comparison),)))
    return Page(
        f"{first} and {second}",
        origin=f"{comparison.inputs}; seed {comparison.seed}",
        findings=tuple(findings(comparison)),
        sections=tuple(sections),
    )


def short_names(labels: tuple[str, str]) -> dict[str, str]:
    """Each label, and its last part where it is a path and that tells the two apart."""
    ends = [label.rstrip("/").rpartition("/")[2] for label in labels]
    return dict(zip(labels, ends if ends[0] != ends[1] else labels, strict=True))


def findings(comparison: Comparison) -> list[str]:
    """What the comparison shows, in sentences."""
    names = short_names(comparison.labels)
    lines = []
    for score in comparison.scores:
        best = comparison.strongest(1)
        best = best[best["score"] == score].set_index("model")
        spread = comparison.distributions
        spread = spread[spread["score"] == score].set_index("model")
        said = [
            f"{name} {_head(best.loc[label])} at {_short(best.loc[label, 'value'])}"
            for label, name in names.items()
            if label in best.index
        ]
        selected = [
            f"{spread.loc[label, 'selected']} of {spread.loc[label, 'heads']} in {name}"
            for label, name in names.items()
            if label in best.index
        ]
        if not said:
            lines.append(f"{_words(score)}: not measurable on these tokens.")
            continue
        lines.append(
            f"{_words(score)}: the strongest heads are {' and '.join(said)}; selected are "
            f"{' and '.join(selected)}."
        )
    return [*lines, *_difference_findings(comparison, names)]


def strongest_rows(comparison: Comparison, k: int) -> list[tuple[str, str, str]]:
    """For each score and rank, a cell for either model: head, score ± error; the null below."""
    strongest = comparison.strongest(k)
    rows = []
    for score in comparison.scores:
        mine = strongest[strongest["score"] == score]
        for rank in sorted(set(mine["rank"])):
            here = mine[mine["rank"] == rank].set_index("model")
            first, second = (
                _cell(here.loc[label]) if label in here.index else "–"
                for label in comparison.labels
            )
            rows.append((f"{_words(score)} {rank}", first, second))
    return rows


def _difference_findings(comparison: Comparison, names: dict[str, str]) -> Iterator[str]:
    if comparison.differences.empty:
        yield (f"Differences and rank correlations are not given: {comparison.why_no_differences}.")
        return
    first, second = names.values()
    if _exactly_equal(comparison):
        yield "Every head scores exactly the same in both."
        return
    largest = []
    for score in comparison.scores:
        row = comparison.largest_difference(score)
        if row is not None:
            value = f"{_short(row[score])} ± {_short(row[f'{score}_se'])}"
            largest.append(f"{_words(score).lower()} {value} at {_head(row)}")
    yield f"Largest differences ({second} minus {first}): {', '.join(largest)}."
    ranks = ", ".join(
        f"{_words(score).lower()} {_three_digits(value)}"
        for score, value in comparison.rank_correlations.items()
    )
    yield f"Rank correlations over heads: {ranks}."


def _exactly_equal(comparison: Comparison) -> bool:
    return all((comparison.differences[score].dropna() == 0).all() for score in comparison.scores)


def _heads(comparison: Comparison, names: dict[str, str]) -> Iterator[Part]:
    for score, unit in comparison.units.items():
        if comparison.table[score].isna().all():
            continue
        yield Plot(
            head_maps(
                [
                    HeadMap(
                        name,
                        comparison.heads_of(label),
                        score,
                        subject=label,
                        pruned=comparison.pruned_of(label),
                    )
                    for label, name in names.items()
                ],
                title=f"{_words(score)} by head",
                subtitle=_origin(comparison, names, [score]),
                caption="One cell a head, the first layer at the top: stronger is more. Both maps "
                "have one colour range, so that equal colours are equal scores.",
                bar=unit,
                bounds=(0.0, 1.0) if unit == "attention probability" else None,
            )
        )


def _origin(comparison: Comparison, names: dict[str, str], scores: Sequence[str]) -> str:
    return f"{' and '.join(names.values())}, {_sample(comparison, scores)}"


def _sample(comparison: Comparison, scores: Sequence[str]) -> str:
    """On how many sequences some scores were taken, and with which seed."""
    counts = {
        f"{count:,.0f}" for score in scores for count in comparison.table[f"{score}_n"].dropna()
    }
    told = f"n = {' and '.join(sorted(counts))}, " if counts else ""
    return f"{told}seed {comparison.seed}"


def _distributions(comparison: Comparison, names: dict[str, str]) -> Iterator[Part]:
    yield Plot(
        sorted_heads(
            comparison.table,
            names,
            comparison.units,
            subtitle=_origin(comparison, names, comparison.scores),
        )
    )
    columns = ("largest_null", "q25", "median", "q75", "q95", "max")
    rows, values = [], []
    for row in comparison.distributions.to_dict("records"):
        told = (_words(row["score"]), names[row["model"]], f"{row['selected']} of {row['heads']}")
        rows.append((*told, *(_short(row[column]) for column in columns)))
        values.append((*told, *(in_full(row[column]) for column in columns)))
    yield Table(
        "How many heads are selected, the largest null of any head, and quantiles over heads.",
        ("score", "model", "selected", *(column.replace("_", " ") for column in columns)),
        tuple(rows),
        words=2,
        values=tuple(values),
    )


def _differences(comparison: Comparison, names: dict[str, str]) -> Iterator[Part]:
    first, second = names.values()
    if _exactly_equal(comparison):
        yield Words("Every head scores exactly the same in both: there is no difference to draw.")
        return
    gone = [own for label in comparison.labels for own in comparison.pruned_of(label)]
    measured = {
        score: unit
        for score, unit in comparison.units.items()
        if comparison.differences[score].notna().any()
    }
    for unit in dict.fromkeys(measured.values()):
        scores = [score for score, own in measured.items() if own == unit]
        for start in range(0, len(scores), _MAPS_IN_A_ROW):
            row = scores[start : start + _MAPS_IN_A_ROW]
            yield Plot(
                head_maps(
                    [
                        HeadMap(_words(score), comparison.differences, score, pruned=gone)
                        for score in row
                    ],
                    title=f"Difference by head: {', '.join(map(_words, row)).lower()}",
                    subtitle=f"{second} minus {first}, {_sample(comparison, row)}",
                    caption="One cell a head; orange is more in the second model, blue is less, on "
                    "one colour range for all maps.",
                    bar=f"difference in {unit}",
                    diverging=True,
                )
            )
        yield Plot(
            head_scatter(
                *comparison.heads_of_both(),
                scores,
                (first, second),
                unit=unit,
                subtitle=f"across: {first}; up: {second}; {_sample(comparison, scores)}",
            )
        )
    rows, values = [], []
    for score, correlation in comparison.rank_correlations.items():
        largest = comparison.largest_difference(score)
        if largest is not None:
            rows.append(
                (
                    _words(score),
                    _head(largest),
                    number(drawable(largest[score])),
                    number(drawable(largest[f"{score}_se"])),
                    _three_digits(correlation),
                )
            )
            told = (largest[score], largest[f"{score}_se"], correlation)
            values.append((_words(score), _head(largest), *map(in_full, told)))
    yield Table(
        f"The largest difference of each score ({second} minus {first}), with its standard error "
        f"({'within sequences' if comparison.paired else 'as of independent samples'}).",
        ("score", "head", "difference", "standard error", "rank correlation"),
        tuple(rows),
        words=2,
        values=tuple(values),
    )
    whole = _with_head(comparison.differences)
    yield Folded(
        f"All {len(whole)} differences", frame_table(whole, f"{second} minus {first}.", ["head"])
    )


def _strongest(comparison: Comparison, names: dict[str, str]) -> Iterator[Part]:
    yield Table(
        "The strongest heads of each kind: score ± one standard error; below, the head's null and "
        "whether the head is selected.",
        ("score", *names.values()),
        tuple(strongest_rows(comparison, SHOWN)),
        words=3,
    )
    for label, name in names.items():
        whole = _with_head(comparison.heads_of(label).drop(columns="model"))
        yield Folded(
            f"All {len(whole)} heads of {name}",
            frame_table(whole, f"Every head of {name}.", ["head"]),
        )


def _cell(row: pd.Series) -> str:
    error = f" ± {row['se']:.2g}" if pd.notna(row["se"]) else ""
    value, null = _short(row["value"]), _short(row["null"])
    return f"{_head(row)}  {value}{error}\nnull {null}{', selected' if row['selected'] else ''}"


def _caveats(comparison: Comparison) -> tuple[str, ...]:
    said = []
    if "ids" in comparison.params:
        said.append(
            "Both models see the same ids, and unless they share a tokenizer an id is other text "
            "in each: random tokens show what heads do with repeats and places, not with language."
        )
    if "documents" in comparison.params:
        said.append(
            "Windows of one document are not independent: standard errors are clustered by "
            "document, and heads are selected on half of the documents."
        )
    if not comparison.paired:
        said.append(
            "Each model reads the text through its own tokenizer, so the two see other tokens in "
            "other windows, and no difference is taken within a sequence."
        )
    said.append(
        "A head is selected where, on one half of the independent sequences, it scores above the "
        f"largest null of any head, and above its own null by {_effects(comparison)} at least; its "
        "held-out score is its mean over the other half. Of a single sequence nothing is selected."
    )
    said.append(
        "A score says where a head looks, not what it writes; a selected head is more than chance, "
        "which need not be much."
    )
    if not comparison.differences.empty:
        said.append(
            "Heads are paired by layer and number. That means something for two readings or two "
            "checkpoints of one model; models trained apart number their heads as chance has it."
        )
    return tuple(said)


def _effects(comparison: Comparison) -> str:
    effects = comparison.params["effect"]
    assert isinstance(effects, dict)
    if len(set(effects.values())) == 1:
        return _plain(next(iter(effects.values())))
    return ", ".join(f"{_plain(own)} ({_words(score).lower()})" for score, own in effects.items())


def _facts(comparison: Comparison) -> Table:
    first, second = comparison.labels
    facts = [
        ("first model", first),
        ("second model", second),
        ("inputs", comparison.inputs),
        ("same sequences", "yes" if comparison.paired else "no"),
        ("seed", str(comparison.seed)),
        # In words, which wrap on a phone.
        *((name.replace("_", " "), _plain(value)) for name, value in comparison.params.items()),
        *((f"{name} version", value) for name, value in comparison.versions.items()),
    ]
    return Table("Inputs, settings and versions.", ("fact", "value"), tuple(facts), words=2)


def _with_head(table: pd.DataFrame) -> pd.DataFrame:
    heads = [f"L{layer}H{head}" for layer, head in zip(table["layer"], table["head"], strict=True)]
    return table.drop(columns=["layer", "head"]).assign(head=heads)


def _head(row: pd.Series) -> str:
    return f"L{int(row['layer'])}H{int(row['head'])}"


def _short(value: float) -> str:
    return "–" if pd.isna(value) else f"{value:.3g}".replace("-", "−")


def _three_digits(value: float) -> str:
    return "–" if pd.isna(value) else f"{value:.3f}".replace("-", "−")


def _words(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_plain(item)}" for name, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_plain(item) for item in value)
    return "–" if value is None else str(value)
