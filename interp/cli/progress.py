"""How far a sweep is: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType

from interp.training.progress import bar_on_terminal

QUIET_SECONDS = 5.0
"""Within these a sweep ends by itself: plain lines would tell nothing."""
SHARE = 0.1
"""Of the sweep between two plain lines."""


class SweepProgress:
    """Told how many of something are done; everything goes to standard error."""

    def __init__(self, noun: str = "ablated passes") -> None:
        self._noun = noun
        self._bar = bar_on_terminal()
        self._task = self._bar.add_task("", total=None) if self._bar else None
        self._total = 0
        self._begun = 0.0
        self._first = self._told = 0

    def __enter__(self) -> "SweepProgress":
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

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` are done; another total is another round."""
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=done, total=total)
            return
        now = time.perf_counter()
        if total != self._total:
            self._total, self._begun = total, now
            # A resumed sweep begins in the middle.
            self._first = self._told = done
            return
        seconds = now - self._begun
        if seconds < QUIET_SECONDS or done - self._told < SHARE * total:
            return
        left = seconds / (done - self._first) * (total - done)
        self._told = done
        print(
            f"{done}/{total} {self._noun}, {seconds:.0f} s, about {left:.0f} s left",
            file=sys.stderr,
        )
