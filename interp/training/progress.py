"""Progress of a training run: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from interp.training.probes import Measurement


def summary_line(metrics: dict[str, float], heads: list[dict[str, int | float]]) -> str:
    """Loss, in-context-learning score and the best head, in one line."""
    best = max(heads, key=lambda head: head["induction"])
    return (
        f"loss {metrics['loss']:.3f}  icl {metrics['icl_score']:+.3f}  "
        f"induction {best['induction']:.3f} at {best['layer']}.{best['head']}"
    )


def bar_on_terminal() -> Progress | None:
    """A bar with the time left on standard error; None where that is no terminal."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        return None
    return Progress(
        MofNCompleteColumn(),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=console,
    )


class TrainingProgress:
    """Watches a run; everything goes to standard error."""

    def __init__(self, steps: int):
        self._steps = steps
        self._began = time.perf_counter()
        self._started_at: int | None = None
        self._bar = bar_on_terminal()
        if self._bar:
            self._task = self._bar.add_task("", total=steps)

    def __enter__(self) -> "TrainingProgress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def watch(self, step: int, measured: Measurement | None) -> None:
        """Show a step, and what was measured there."""
        if self._started_at is None:
            self._started_at = step
        line = summary_line(measured.metrics, measured.heads) if measured else None
        if self._bar:
            self._bar.update(self._task, completed=step)
            if line:
                self._bar.update(self._task, description=line)
        elif line:
            done = step - self._started_at
            pace = 1000 * (time.perf_counter() - self._began) / done if done else 0.0
            print(f"step {step}/{self._steps}  {line}  {pace:.0f} ms/step", file=sys.stderr)
