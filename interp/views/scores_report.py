"""Pages for head scores: the map of the heads, the strongest heads, the summary, the facts."""

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from interp.errors import AnalysisError
from interp.tables import HeadScores, SetScores
from interp.views.ablation_report import ablation_parts
from interp.views.ablation_words import HEAD_TABLES, SET_TABLES
from interp.views.facts import facts, quoted, words
from interp.views.figures import head_heatmap
from interp.views.page import Folded, Page, Part, Plot, Section, Words, frame_table
from interp.views.runs import about, pruned_heads

TOP = 12


def scores_page(results: Sequence[HeadScores | SetScores], title: str) -> Page:
    """One page for any number of results, each with its figures, strongest rows and facts."""
    models = list(dict.fromkeys(str(scores.model) for scores in results))
    named = _headings(results)
    sections = []
    for place, scores in enumerate(results, start=1):
        alone = _HEADINGS.get(scores.analysis, "Heads")
        heading = named[place - 1] if len(results) > 1 else alone
        if len(models) > 1:
            heading += f", {scores.model}"
        sections.append(Section(f"result-{place}", heading, _parts(scores)))
    return Page(title, origin=", ".join(models), sections=tuple(sections))


def several_title(results: Sequence[HeadScores | SetScores]) -> str:
    """What results have in common, as the beginning of a page's title."""
    kinds = {scores.analysis in (*HEAD_TABLES, *SET_TABLES) for scores in results}
    return "Head scores" if kinds == {False} else "Ablations" if kinds == {True} else "Heads"


def _headings(results: Sequence[HeadScores | SetScores]) -> list[str]:
    """Each analysis by its name, and where a name comes again by what tells the two apart."""
    plain = [words(scores.analysis) for scores in results]
    facts = [scores.params | {"seed": scores.seed} for scores in results]
    headings = []
    for name, own in zip(plain, facts, strict=True):
        others = [other for other, again in zip(facts, plain, strict=True) if again == name]
        telling = [key for key in _TELLING if len({str(one.get(key)) for one in others}) > 1]
        details = [_TELLING[key].get(str(own.get(key)), str(own.get(key, ""))) for key in telling]
        headings.append(", ".join([name, *filter(None, details)]))
    return headings


_TELLING: dict[str, dict[str, str]] = {
    "method": {"all": "three methods"},
    "metric": {},
    "site": {"z": "heads", "k": "keys", "v": "values"},
    "normalize": {"True": "normalized", "False": ""},
}

_HEADINGS = {"pairs": "Pairs", "layers": "Layers", "cumulative": "Removal", "prune": "Pruning"}


def read_scores(path: Path) -> HeadScores | SetScores | None:
    """The result in a JSON file, or None if the file holds something else.

    Raises:
        AnalysisError: the file is not JSON, or is an analysis whose scores cannot be read.
    """
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise AnalysisError(f"{path}: not JSON: {fault}") from None
    if not isinstance(saved, dict) or "analysis" not in saved:
        return None
    return (SetScores if saved["analysis"] in SET_TABLES else HeadScores).load(path)


def _parts(scores: HeadScores | SetScores) -> tuple[Part, ...]:
    if scores.analysis in (*HEAD_TABLES, *SET_TABLES):
        return ablation_parts(scores)
    table, column = scores.table, scores.score
    if table.empty or column not in table:
        return (
            Words(f"No heads to show: the table holds no {column!r} column with rows."),
            *facts(scores),
        )
    values = pd.to_numeric(table[column], errors="coerce")
    diverging = bool((values < 0).any())
    within = scores.unit == "attention probability" and not diverging
    origin = (scores.model, about(table, scores.unit), f"seed {scores.seed}")
    subtitle = ", ".join(filter(None, origin))
    parts: list[Part] = []
    if values.notna().any():
        figure = head_heatmap(
            table,
            column,
            title=f"{words(column)} by head",
            subtitle=subtitle,
            unit=scores.unit,
            bounds=(0.0, 1.0) if within else None,
            diverging=diverging,
            quantity=column.replace("_", " "),
            pruned=pruned_heads(scores.params),
        )
        parts.append(Plot(figure))
    else:
        parts.append(Words("No head has a finite value, so there is no map to draw."))
    order = values.sort_values(ascending=False, kind="stable").index
    ranked = quoted(table.loc[order])
    ranked = ranked.drop(columns=["layer", "head"]).assign(head=_labels(ranked))
    parts.append(
        frame_table(ranked.head(TOP), f"The {min(TOP, len(ranked))} strongest heads.", ["head"])
    )
    if len(ranked) > TOP:
        whole = frame_table(ranked, "All heads, strongest first.", ["head"])
        parts.append(Folded(f"All {len(ranked)} heads", whole))
    return (*parts, *facts(scores))


def _labels(table: pd.DataFrame) -> list[str]:
    return [f"L{layer}H{head}" for layer, head in zip(table["layer"], table["head"], strict=True)]
