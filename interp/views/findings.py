"""What results show, in sentences: for the top of a page."""

import re
from collections.abc import Callable, Sequence

import pandas as pd

from interp.patterns import Patterns
from interp.tables import Result
from interp.views.ablation_words import (
    HEAD_TABLES,
    SET_TABLES,
    effect_words,
    failures,
    noun,
    page_name,
    row_labels,
    strongest,
)
from interp.views.ablation_words import findings as ablation_findings
from interp.views.pages.activations import activation_findings
from interp.views.pages.composition import composition_findings
from interp.views.pages.facts import telling, words
from interp.views.pages.outlier_links import outlier_effect_findings, outlier_sink_findings
from interp.views.pages.page import number
from interp.views.quantization_words import quantization_findings


def sentence(line: str) -> str:
    """A line as a page's own sentence: a capital, a full stop, a minus sign."""
    line = re.sub(r"(?<![\w-])-(?=\d)", "−", line)
    capital = line if re.match(r"[A-Z]\w*[A-Z]", line) else line[:1].upper() + line[1:]
    return capital if capital.endswith((".", "?", "!")) else capital + "."


def findings(results: Sequence[Result]) -> tuple[str, ...]:
    """A sentence or two on each result; with several models each names its own."""
    several = len({result.model for result in results}) > 1
    lines = []
    for result, detail in zip(results, telling(results), strict=True):
        lead = f"{result.model}, " if several else ""
        name = words(result.analysis).lower()
        for line in _OWN.get(result.analysis, _scores)(result):
            told = line.removeprefix(f"{name}: ")
            lines.append(f"{lead}{name}, {detail}: {told}" if detail else lead + line)
    return tuple(sentence(line) for line in lines)


def _scores(result: Result) -> list[str]:
    table, score = result.table, result.score
    name = words(score).lower()
    what = noun(result)
    values = pd.to_numeric(table[score], errors="coerce") if score in table else pd.Series()
    if not values.notna().any():
        return [f"{name}: no {what} has a value"]
    best = table.loc[values.idxmax()]
    line = f"{name}: the highest is {_label(best)} at {_value(best, score)}"
    if isinstance(result, Patterns):
        line = (
            f"attention: the head furthest from even is {_label(best)}, {_value(best, score)} on "
            "a scale from 0, even, to 1, all on one key"
        )
    if (null := f"{score}_null") in table and pd.notna(best[null]):
        line += f", against a null of {number(float(best[null]))}"
    if "selected" in table:
        count = int(table["selected"].astype(bool).sum())
        called = str(result.params.get("called") or "head")
        line += f"; {count} of {len(table)} heads {'is' if count == 1 else 'are'} selected as "
        line += called if count == 1 else f"{called}s"
    lines = [line]
    if isinstance(result, Patterns) and (left := result.params.get("left_out")):
        assert isinstance(left, list)
        lines.append(
            f"patterns kept: {len(result.drawn)} of {len(table)}, the furthest from even attention "
            f"first; left out: {len(left)}"
        )
    return lines


def _ablation(result: Result) -> list[str]:
    """What the whole table shows, and its strongest row."""
    name = page_name(result)
    told = [*ablation_findings(result, name), *failures(result, name)]
    if result.analysis in ("ablation", "importance") and result.score in result.table:
        top = strongest(result, 1)
        if len(top):
            ((_, row),) = top.iterrows()
            (label,) = row_labels(result, top, name)
            told.insert(
                0,
                f"the {noun(result)} with the largest {effect_words(result)} is {label}, "
                f"{_value(row, result.score)}",
            )
    return [f"{words(result.analysis).lower()}: {line}" for line in told[:3]]


_OWN: dict[str, Callable[[Result], list[str]]] = {
    **dict.fromkeys((*HEAD_TABLES, *SET_TABLES), _ablation),
    "composition": composition_findings,
    "outlier-effects": outlier_effect_findings,
    "outlier-sinks": outlier_sink_findings,
    "outliers": activation_findings,
    "quantization": quantization_findings,
}


def _label(row: pd.Series) -> str:
    return f"L{int(row['layer'])}H{int(row['head'])}"


def _value(row: pd.Series, score: str) -> str:
    error = row.get(f"{score}_se")
    spread = f" ± {float(error):.2g}" if error is not None and pd.notna(error) else ""
    return f"{number(float(row[score]))}{spread}"
