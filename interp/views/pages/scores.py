"""Pages for head scores: the map of the heads, the strongest heads, the summary, the facts."""

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from interp.activation_tables import Activations, OutlierEffects, OutlierSinks, Quantization
from interp.errors import AnalysisError
from interp.patterns import Patterns
from interp.tables import HeadScores, Result, SetScores
from interp.views.ablation_words import HEAD_TABLES, SET_TABLES
from interp.views.figures.heads import head_heatmap
from interp.views.figures.runs import about
from interp.views.findings import findings
from interp.views.pages.ablation import Tabled, ablation_parts
from interp.views.pages.activations import activation_parts
from interp.views.pages.chapters import Chapter
from interp.views.pages.composition import composition_parts
from interp.views.pages.facts import facts, quoted, telling, words
from interp.views.pages.outlier_links import outlier_effect_parts, outlier_sink_parts
from interp.views.pages.page import Folded, Page, Part, Plot, Section, Words, frame_table
from interp.views.pages.quantization import quantization_parts
from interp.views.pages.subjects import PROBABILITY, result_subjects

TOP = 12


def scores_chapter(results: Sequence[Result], title: str) -> Chapter:
    """Any number of results, each with its figures, strongest rows and facts."""
    models = list(dict.fromkeys(str(scores.model) for scores in results))
    details = telling(results)
    sections = []
    for place, scores in enumerate(results, start=1):
        alone = _HEADINGS.get(scores.analysis, "Heads")
        named = ", ".join(filter(None, [words(scores.analysis), details[place - 1]]))
        heading = named if len(results) > 1 else alone
        if len(models) > 1:
            heading += f", {scores.model}"
        sections.append(Section(f"result-{place}", heading, result_parts(scores)))
    # An ablation's section begins with its findings, and more of them.
    ablation = len(results) == 1 and results[0].analysis in (*HEAD_TABLES, *SET_TABLES)
    told = () if ablation else findings(results)
    page = Page(title, ", ".join(models), told, tuple(sections))
    return Chapter(page, result_subjects(results))


def several_title(results: Sequence[Result]) -> str:
    """What results have in common, as the beginning of a page's title."""
    kinds = {_KINDS.get(scores.analysis, "Head scores") for scores in results}
    if len(kinds) == 1:
        return kinds.pop()
    return "Results" if kinds & {"Activations", "Quantization"} else "Heads"


_KINDS = {
    **dict.fromkeys((*HEAD_TABLES, *SET_TABLES), "Ablations"),
    "attention": "Attention",
    "composition": "Composition",
    **dict.fromkeys(("outliers", "outlier-effects", "outlier-sinks"), "Activations"),
    "quantization": "Quantization",
}


_HEADINGS = {
    "composition": "Pairs",
    "cumulative": "Removal",
    "layers": "Layers",
    "outlier-effects": "Changed activations",
    "outlier-sinks": "Activations and sinks",
    "outliers": "Activations",
    "pairs": "Pairs",
    "prune": "Pruning",
    "quantization": "Quantization",
}


def read_scores(path: Path) -> Result | None:
    """The result in a JSON file, or None if the file holds something else.

    Raises:
        AnalysisError: the file is not JSON, or is an analysis whose scores cannot be read.
    """
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise AnalysisError(f"{path}: not JSON: {fault}") from None
    # Other programs write files of an "analysis", too.
    if not isinstance(saved, dict) or not isinstance(saved.get("analysis"), str):
        return None
    kinds: dict[str, type[Result]] = {
        "attention": Patterns,
        "composition": SetScores,
        "outlier-effects": OutlierEffects,
        "outlier-sinks": OutlierSinks,
        "outliers": Activations,
        "quantization": Quantization,
        **dict.fromkeys(SET_TABLES, SetScores),
    }
    return kinds.get(saved["analysis"], HeadScores).load(path)


def result_parts(scores: Result) -> tuple[Part, ...]:
    """The figures, the strongest rows, all rows and the facts of one result."""
    if isinstance(scores, Activations):
        return activation_parts(scores)
    if isinstance(scores, OutlierSinks):
        return outlier_sink_parts(scores)
    if isinstance(scores, OutlierEffects):
        return outlier_effect_parts(scores)
    if isinstance(scores, Quantization):
        return quantization_parts(scores)
    if scores.analysis == "composition":
        return composition_parts(scores)
    if isinstance(scores, Tabled) and scores.analysis in (*HEAD_TABLES, *SET_TABLES):
        return ablation_parts(scores)
    table, column = scores.table, scores.score
    if table.empty or column not in table:
        return (
            Words(f"No heads to show: the table holds no {column!r} column with rows."),
            *facts(scores),
        )
    values = pd.to_numeric(table[column], errors="coerce")
    diverging = bool((values < 0).any())
    # Both go from 0 to 1 and no further.
    within = (scores.unit == PROBABILITY or isinstance(scores, Patterns)) and not diverging
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
            subject=scores.model,
            pruned=scores.pruned_heads,
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
