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
    models = list(dict.fromkeys(str(scores.model) for scores in results))
    sections = []
    for place, scores in enumerate(results, start=1):
        heading = _words(scores.analysis) if len(results) > 1 else "Heads"
        if len(models) > 1:
            heading += f", {scores.model}"
        sections.append(Section(f"result-{place}", heading, _parts(scores)))
    return Page(title, origin=", ".join(models), sections=tuple(sections))


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
    # An effect has a sign even where all its values happen to share one, and either is strong.
    effect = scores.analysis.startswith("ablat")
    diverging = bool((values < 0).any()) or effect
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
    strength = values.abs() if effect else values
    order = strength.sort_values(ascending=False, kind="stable").index
    ranked = _quoted(table.loc[order])
    ranked = ranked.drop(columns=["layer", "head"]).assign(head=_labels(ranked))
    parts.append(
        frame_table(ranked.head(TOP), f"The {min(TOP, len(ranked))} strongest heads.", ["head"])
    )
    if len(ranked) > TOP:
        whole = frame_table(ranked, "All heads, strongest first.", ["head"])
        parts.append(Folded(f"All {len(ranked)} heads", whole))
    return (*parts, *_facts(scores))


def _facts(scores: HeadScores) -> tuple[Part, ...]:
    figures, records = [], []
    for name, value in scores.summary.items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            records.append(frame_table(_quoted(pd.DataFrame(value)), f"{_words(name)}."))
        elif name == "best_head":
            # As the tables name it: 2.0 reads as a number.
            figures.append((_words(name), "L" + str(value).replace(".", "H")))
        else:
            figures.append((_words(name), number(value)))
    facts = (
        ("analysis", str(scores.analysis)),
        ("model", str(scores.model)),
        ("inputs", _plain(scores.inputs)),
        ("seed", _plain(scores.seed)),
        # In words, which wrap on a phone.
        *((name.replace("_", " "), _plain(value)) for name, value in scores.params.items()),
        *((f"{name} version", _plain(value)) for name, value in scores.versions.items()),
    )
    told = (
        [Table("Summary of the whole model.", ("figure", "value"), tuple(figures), words=2)]
        if figures
        else []
    )
    return (*told, *records, Table("Where this comes from.", ("fact", "value"), facts, words=2))


def _quoted(table: pd.DataFrame) -> pd.DataFrame:
    """The table with its texts in quotes: a token may be a space or a line break."""
    texts = [name for name in table if table[name].map(lambda cell: isinstance(cell, str)).any()]
    return table.assign(
        **{
            name: table[name].map(lambda cell: repr(cell) if isinstance(cell, str) else cell)
            for name in texts
        }
    )


def _labels(table: pd.DataFrame) -> list[str]:
    return [f"L{layer}H{head}" for layer, head in zip(table["layer"], table["head"], strict=True)]


def _words(name: str) -> str:
    return name.replace("_", " ").replace("-", " ").capitalize()


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_plain(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value) or "–"
    return "–" if value is None or value == "" else str(value)
