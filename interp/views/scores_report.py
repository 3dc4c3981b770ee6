"""Pages for head scores: the map of the heads, the strongest heads, the summary, the facts."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from interp.errors import AnalysisError
from interp.tables import HeadScores
from interp.views.figures import head_heatmap
from interp.views.page import Folded, Page, Part, Plot, Section, Table, Words, frame_table, number
from interp.views.runs import about

TOP = 12


def scores_page(results: Sequence[HeadScores], title: str) -> Page:
    """One page for any number of head scores, each with its map, strongest heads and facts."""
    sections = []
    for place, scores in enumerate(results, start=1):
        name = f"result-{place}"
        heading = f"{_words(scores.analysis)}, {scores.model}" if len(results) > 1 else "Heads"
        sections.append(Section(name, heading, _parts(scores)))
    models = ", ".join(dict.fromkeys(str(scores.model) for scores in results))
    return Page(title, origin=models, sections=tuple(sections))


def read_scores(path: Path) -> HeadScores | None:
    """The head scores in a JSON file, or None if the file holds something else.

    Raises:
        AnalysisError: the file is not JSON, or is an analysis whose scores cannot be read.
    """
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise AnalysisError(f"{path}: not JSON: {fault}") from None
    return HeadScores.load(path) if isinstance(saved, dict) and "analysis" in saved else None


def _parts(scores: HeadScores) -> tuple[Part, ...]:
    table, column = scores.table, scores.score
    if table.empty or column not in table:
        return (
            Words(f"No heads to show: the table holds no {column!r} column with rows."),
            *_facts(scores),
        )
    values = pd.to_numeric(table[column], errors="coerce")
    # An effect has a sign even where all its values happen to share one.
    diverging = bool((values < 0).any()) or scores.analysis.startswith("ablat")
    within = scores.unit == "attention probability" and not diverging
    origin = (scores.model, about(table, scores.unit), f"seed {scores.seed}")
    subtitle = ", ".join(filter(None, origin))
    parts: list[Part] = []
    if values.notna().any():
        figure = head_heatmap(
            table,
            column,
            title=f"{_words(column)} by head",
            subtitle=subtitle,
            unit=scores.unit,
            bounds=(0.0, 1.0) if within else None,
            diverging=diverging,
        )
        parts.append(Plot(figure))
    else:
        parts.append(Words("No head has a finite value, so there is no map to draw."))
    strength = values.abs() if diverging else values
    order = strength.sort_values(ascending=False, kind="stable").index
    ranked = table.loc[order]
    ranked = ranked.drop(columns=["layer", "head"]).assign(head=_labels(ranked))
    parts.append(
        frame_table(ranked.head(TOP), f"The {min(TOP, len(ranked))} strongest heads.", ["head"])
    )
    if len(ranked) > TOP:
        whole = frame_table(ranked, "All heads, strongest first.", ["head"])
        parts.append(Folded(f"All {len(ranked)} heads", whole))
    return (*parts, *_facts(scores))


def _facts(scores: HeadScores) -> tuple[Part, ...]:
    summary = tuple((_words(name), number(value)) for name, value in scores.summary.items())
    facts = (
        ("analysis", str(scores.analysis)),
        ("model", str(scores.model)),
        ("inputs", _plain(scores.inputs)),
        ("seed", _plain(scores.seed)),
        *((f"params.{name}", _plain(value)) for name, value in scores.params.items()),
        *((f"versions.{name}", _plain(value)) for name, value in scores.versions.items()),
    )
    told = (
        [Table("Summary of the whole model.", ("figure", "value"), summary, words=2)]
        if summary
        else []
    )
    return (*told, Table("Where this comes from.", ("fact", "value"), facts, words=2))


def _labels(table: pd.DataFrame) -> list[str]:
    return [f"L{layer}H{head}" for layer, head in zip(table["layer"], table["head"], strict=True)]


def _words(name: str) -> str:
    return name.replace("_", " ").replace("-", " ").capitalize()


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_plain(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value)
    return "–" if value is None else str(value)
