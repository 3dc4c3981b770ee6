"""Which curves of a run are searched for a phase change, and the rule's verdicts as a table.

Experiments and series of checkpoints share it, so that both are judged alike.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd

from interp.training.changepoint import Change, find_change

Direction = Literal["rise", "fall"]

CURVES: dict[str, tuple[str, Direction]] = {
    "induction": ("best_induction", "rise"),
    "icl_score": ("icl_score", "fall"),
}
"""Each curve searched: its column in a table of curves, and which way a change goes."""

CURVE_NAMES = {
    "induction": "the best induction score",
    "icl_score": "the in-context-learning score",
}


@dataclass(frozen=True)
class LeastSizes:
    """The least change of each curve that is worth the name."""

    induction: int | float
    """An attention probability."""
    icl_score: int | float
    """In nats."""

    def of(self, curve: str) -> int | float:
        """The least size of one of `CURVES`."""
        return {"induction": self.induction, "icl_score": self.icl_score}[curve]


def find_changes(
    curves: pd.DataFrame, least: LeastSizes, *, log_steps: bool = False
) -> pd.DataFrame:
    """The rule's verdict on every curve of every run, in steps and, where known, in tokens.

    A run is a model and a seed, as far as the table has these columns; a curve that is not in the
    table has no row.

    Raises: AnalysisError for a curve with a missing value.
    """
    keys = [key for key in ("model", "seed") if key in curves]
    parts = curves.groupby(keys, sort=False) if keys else [((), curves)]
    rows = []
    for values, run in parts:
        per_step = None
        if "tokens" in run:
            per_step = float((run["tokens"] / run["step"].where(run["step"] > 0)).median())
        for curve, (column, direction) in CURVES.items():
            if column in run:
                steps = run["step"].to_numpy()
                change = find_change(
                    np.log2(steps + 1) if log_steps else steps,
                    run[column].to_numpy(),
                    direction=direction,
                    min_size=least.of(curve),
                )
                if log_steps:
                    change = _in_steps(change)
                row = dict(zip(keys, values, strict=True))
                rows.append({**row, "curve": curve, **_change_row(change, per_step)})
    return pd.DataFrame(rows)


def _in_steps(change: Change) -> Change:
    """A change that was found on log2(step + 1), with its places as steps."""

    def step(place: float | None) -> float | None:
        return None if place is None else round(2**place - 1, 6)  # logarithms are not exact

    onset, end = step(change.onset), step(change.end)
    return replace(
        change,
        reason=f"with log2(step + 1) for the step, {change.reason}",
        step=step(change.step),
        onset=onset,
        end=end,
        width=None if onset is None or end is None else end - onset,
        slopes=None,  # per doubling, not per step
    )


def _change_row(change: Change, tokens_per_step: float | None) -> dict[str, object]:
    places = ("onset", "step", "end", "width")
    in_steps = {place: getattr(change, place) for place in places}
    in_tokens = {
        f"{place}_tokens": None if value is None else value * tokens_per_step
        for place, value in in_steps.items()
        if tokens_per_step is not None
    }
    return {
        "found": change.found,
        **in_steps,
        "size": change.size,
        **in_tokens,
        "reason": change.reason,
    }
