"""Head scores, comparisons and diagnoses as tables on a terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from interp.comparison.result import Comparison
from interp.doctor import Diagnosis
from interp.tables import HeadScores
from interp.views.compare_report import findings, strongest_rows

ROWS = 20


def print_scores(scores: HeadScores) -> None:
    """Print the strongest heads first, with what was measured and on what."""
    console = Console(highlight=False)
    shown = scores.top(ROWS)
    table = Table(title=f"{scores.analysis} of {scores.model}", title_justify="left")
    for column in shown.columns:
        table.add_column(column, justify="right", overflow="fold")
    for row in shown.itertuples(index=False):
        table.add_row(*(f"{v:.4f}" if isinstance(v, float) else str(v) for v in row))
    console.print(table)
    if len(scores.table) > len(shown):
        console.print(f"the {len(shown)} strongest of {len(scores.table)} heads")
    console.print(f"{scores.unit}; {scores.inputs}; seed {scores.seed}")


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
