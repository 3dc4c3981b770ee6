"""Head scores as a table on a terminal."""

from rich.console import Console
from rich.table import Table

from interp.tables import HeadScores

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
