"""Head scores, comparisons and diagnoses as tables on a terminal."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from interp.comparison.result import Comparison
from interp.doctor import Diagnosis
from interp.patterns import Patterns
from interp.tables import HeadScores, head_label
from interp.views.findings import findings as score_findings
from interp.views.pages.comparison import findings, strongest_rows

ROWS = 20


def print_scores(scores: HeadScores) -> None:
    """Print the strongest heads first, with what was measured, how, and on what."""
    console = Console(highlight=False, markup=False)  # a model's name may hold brackets
    shown = scores.top(ROWS)
    columns, same = _columns(scores)
    cells = {
        _heading(column, scores.score): [_cell(value) for value in shown[column]]
        for column in columns
    }
    print_columns(console, f"{scores.analysis} of {scores.model}", _labels(shown), cells)
    if len(scores.table) > len(shown):
        console.print(f"the {len(shown)} strongest of {len(scores.table)} heads")
    if same:
        told = ", ".join(
            f"{_heading(column, scores.score)} {_said(v)}" for column, v in same.items()
        )
        console.print(f"the same for every head: {told}")
    if "selected" in scores.summary:
        console.print(_selection(scores))
    for name, value in scores.summary.items():
        if name not in ("best", "best_head", "selected", "largest_null"):
            console.print(f"{name.replace('_', ' ')}: {_plain(value)}")
    console.print(f"{scores.unit}; {scores.inputs}; seed {scores.seed}")
    own = ((name, value) for name, value in scores.params.items() if name not in SAID)
    settings = ", ".join(f"{name} = {_plain(value)}" for name, value in own if value != "")
    if settings:
        console.print(settings)


SAID = ("blocks", "batch", "bos", "shape", "called")
"""Parameters that the description of the inputs, or the sentence on selection, says already."""


def _columns(scores: HeadScores) -> tuple[list[str], dict[str, object]]:
    """The columns that differ between heads, and the values of the others.

    A table on a terminal has no room for a column of one value.
    """
    every = [column for column in scores.table if column not in ("layer", "head")]
    told = {scores.score, f"{scores.score}_se", "selected"}
    same = {
        column: scores.table[column].iloc[0]
        for column in every
        if column not in told and scores.table[column].nunique(dropna=False) == 1
    }
    return [column for column in every if column not in same], same


def _heading(column: str, score: str) -> str:
    return column.removeprefix(f"{score}_").replace("_", " ")


def _cell(value: object) -> str:
    if isinstance(value, bool | np.bool_):
        return "yes" if value else ""
    if isinstance(value, float):
        return "" if np.isnan(value) else f"{value:.4f}"
    return str(value)


def _said(value: object) -> str:
    """A cell inside a sentence, where nothing at all would not be seen."""
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    return _cell(value) or "none"


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "; ".join(map(_plain, value)) or "none"
    if isinstance(value, dict):
        # A token may be a space; its line breaks are written out already.
        parts = ((n, f"'{v}'" if isinstance(v, str) else _plain(v)) for n, v in value.items())
        return ", ".join(f"{name} {inner}" for name, inner in parts)
    return str(value)


def _selection(scores: HeadScores) -> str:
    if scores.table[f"{scores.score}_held_out"].isna().all():
        return (
            f"no head can be selected as {scores.params['called']}: a choice on one half and an "
            "estimate on the other need two independent sequences at least"
        )
    number = int(str(scores.summary["selected"]))
    noun = f"{scores.params['called']}{'' if number == 1 else 's'}"
    largest = float(str(scores.summary["largest_null"]))
    return (
        f"{number} of {len(scores.table)} heads {'is' if number == 1 else 'are'} selected as "
        f"{noun}: on one half of the independent sequences {scores.params['effect']} or more "
        f"above their own null, and above the largest null of any head, {largest:.4f}; held out "
        "is the estimate on the other half"
    )


def print_all_scores(results: Sequence[HeadScores]) -> None:
    """Print the scores of each analysis's strongest heads side by side, then each in one line.

    The analyses stand beside each other as far as the terminal is wide, and below each other then;
    a star marks the three strongest heads of each.
    """
    console = Console(highlight=False, markup=False)
    strongest = {scores.analysis: _labels(scores.top(STRONGEST)) for scores in results}
    heads = {label for labels in strongest.values() for label in labels}
    first = results[0].table
    rows = [place for place, label in enumerate(_labels(first)) if label in heads]
    cells = {
        scores.analysis: [
            f"{_cell(float(scores.table[scores.score].iloc[place]))}"
            f"{'*' if label in strongest[scores.analysis] else ' '}"
            for place, label in zip(rows, _labels(first.iloc[rows]), strict=True)
        ]
        for scores in results
    }
    labels = _labels(first.iloc[rows])
    print_columns(console, f"heads of {results[0].model}", labels, cells)
    console.print(f"* among the {STRONGEST} strongest of an analysis")
    for scores in results:
        summary, best = scores.summary, scores.top(1).iloc[0]
        error = float(best[f"{scores.score}_se"])
        spread = "" if np.isnan(error) else f" ± {error:.4f}"
        line = (
            f"{scores.analysis}: strongest {summary['best_head']} with "
            f"{float(best[scores.score]):.4f}{spread}, largest null "
            f"{float(str(summary['largest_null'])):.4f} ({scores.unit})"
        )
        if "selected" in summary:
            halved = not scores.table[f"{scores.score}_held_out"].isna().all()
            line += (
                f"; {summary['selected']} of {len(scores.table)} heads selected, by an effect of "
                f"{_plain(scores.params['effect'])}"
                if halved
                else "; one sequence or document has no halves, and selects no head"
            )
        console.print(line)
    for described in dict.fromkeys(scores.inputs for scores in results):
        names = ", ".join(scores.analysis for scores in results if scores.inputs == described)
        console.print(f"{names}: {described}; seed {results[0].seed}")


def print_patterns(patterns: Patterns) -> None:
    """Print the heads furthest from even attention first, with their scores on the text."""
    console = Console(highlight=False, markup=False)
    shown = patterns.top(ROWS)
    scores = [name for name in shown if f"{name}_null" in shown]
    cells = {
        column.replace("_", " "): [_cell(value) for value in shown[column]]
        for column in (patterns.score, *scores)
    }
    console.print(
        f"tokens: {' '.join(map(repr, patterns.tokens[:TOKENS]))}"
        + (f" … {len(patterns.tokens)} in all" if len(patterns.tokens) > TOKENS else "")
    )
    print_columns(console, f"attention of {patterns.model}", _labels(shown), cells)
    if patterns.table[patterns.score].isna().all():
        console.print(
            "no head has two keys to attend to, so none is further from even than another"
        )
    elif len(shown) < len(patterns.table):
        console.print(
            f"the {len(shown)} of {len(patterns.table)} heads furthest from even attention"
        )
    else:
        console.print("every head, the furthest from even attention first")
    for line in score_findings([patterns])[1:]:
        console.print(line)
    refused = patterns.params.get("refused")
    if isinstance(refused, dict):
        console.print(f"not measured on this text: {', '.join(refused)}")
    console.print(f"one sequence, so no standard errors; {patterns.inputs}; seed {patterns.seed}")


TOKENS = 40
"""Tokens of a text that are printed."""

STRONGEST = 3
"""Heads of each analysis in the table of all of them."""


def _labels(table: pd.DataFrame) -> list[str]:
    return [head_label(int(row.layer), int(row.head)) for row in table.itertuples()]


def print_columns(
    console: Console,
    title: str,
    labels: Sequence[str],
    columns: Mapping[str, Sequence[str]],
    heading: str = "head",
) -> None:
    """Columns by heading, one row for each label, in as many tables as the terminal needs.

    A number folded over two lines is two numbers to the eye.
    """
    rest = dict(columns)
    while rest:
        room = console.width - max(map(len, [heading, *labels])) - len("┃  ┃ ")
        table = Table(title=Text(title), title_justify="left")
        table.add_column(heading, justify="right", no_wrap=True)
        part: dict[str, int] = {}
        for name, cells in rest.items():
            width = max(map(len, [*name.split(), *cells]))
            if part and width + len(" ┃ ") > room:
                break
            room -= width + len(" ┃ ")
            part[name] = width
        for name, width in part.items():
            # A heading of several words takes what room is left, and is folded without.
            whole = max(width, min(len(name), width + room))
            room -= whole - width
            table.add_column(name, justify="right", width=whole, overflow="fold")
        chosen = [rest.pop(name) for name in part]
        for label, *cells in zip(labels, *chosen, strict=True):
            table.add_row(label, *map(Text, cells))
        console.print(table)


def print_comparison(comparison: Comparison) -> None:
    """Print the strongest heads of each kind in both models, and what the comparison shows."""
    console = Console(highlight=False, markup=False)  # a model's name may hold brackets
    table = Table(title="strongest heads: score ± one standard error", title_justify="left")
    for column in ("score", *comparison.labels):
        table.add_column(Text(column), overflow="fold")
    for row in strongest_rows(comparison, 3):
        table.add_row(*(Text(cell.split("\n")[0]) for cell in row))
    console.print(table)
    for line in findings(comparison):
        console.print(line)
    console.print(f"{comparison.inputs}; seed {comparison.seed}")


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print every identity with its error, its bound and the verdict."""
    console = Console(highlight=False)
    table = Table(title=f"doctor of {diagnosis.model}", title_justify="left")
    table.add_column("check", overflow="fold")
    table.add_column("measured", justify="right")
    table.add_column("bound", justify="right")
    table.add_column("verdict", overflow="fold")
    for finding in diagnosis.findings:
        # The reason stands under the verdict: a column of its own would be too narrow to read.
        verdict = finding.verdict + (f", {finding.reason}" if finding.reason else "")
        numbers = (_short(finding.measured), _short(finding.bound))
        table.add_row(finding.check, *numbers, Text(verdict))
    console.print(table)
    failed = sum(finding.verdict == "FAIL" for finding in diagnosis.findings)
    console.print(f"{failed} of {len(diagnosis.findings)} lines fail" if failed else "healthy")
    console.print(f"{diagnosis.inputs}; {diagnosis.dtype}")


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:.2g}"
