"""What a run's folder holds: its facts, its tables, and the results of single heads in it.

One invariant: what is not there is empty, and what cannot be read is refused by its name.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from interp.errors import AnalysisError
from interp.patterns import Patterns
from interp.tables import HeadScores

HEAD_SCORES = {
    "induction": "Induction score",
    "previous_token": "Previous-token score",
    "sink": "First-token (sink) mass",
}
"""The scores that probes log, and what a page calls them."""

HEADS = "heads"
"""The folder in an experiment's of what was measured of single heads, by run."""

_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Folder:
    """What was read from a run's folder; a table that is not there is empty."""

    path: Path
    name: str
    facts: dict[str, object]
    curves: pd.DataFrame
    heads: pd.DataFrame
    changes: pd.DataFrame
    ablation: pd.DataFrame
    distance: pd.DataFrame
    config: str
    notes: tuple[str, ...]


def read_folder(
    folder: Path, facts: dict[str, object], curves: pd.DataFrame, heads_file: str, notes: list[str]
) -> Folder:
    """The tables of a run's folder beside its `curves`.

    Raises: AnalysisError for a table that cannot be read.
    """
    heads = read_csv(folder / heads_file)
    config = folder / "config.toml"
    return Folder(
        path=folder,
        name=text_of(facts, "name") or folder.resolve().name,
        facts=facts,
        curves=_with_best_heads(curves, heads),
        heads=heads,
        changes=read_csv(folder / "changes.csv"),
        ablation=read_csv(folder / "ablation.csv"),
        distance=read_csv(folder / "distance.csv"),
        config=config.read_text(encoding="utf-8") if config.is_file() else "",
        notes=tuple(notes),
    )


def _with_best_heads(curves: pd.DataFrame, heads: pd.DataFrame) -> pd.DataFrame:
    """The curves with rows for the highest head at each step, where they do not have it already."""
    keys = [key for key in ("model", "seed", "step", "tokens") if key in heads]
    missing = [
        c
        for c in HEAD_SCORES
        if c in heads and not (f"best_{c}" in curves and curves[f"best_{c}"].notna().any())
    ]
    if heads.empty or not missing or "step" not in keys:
        return curves
    best = heads.groupby(keys, sort=False, dropna=False)[missing].max().reset_index()
    best = best.rename(columns={column: f"best_{column}" for column in missing})
    return best if curves.empty else pd.concat([curves, best], ignore_index=True)


def text_of(facts: Mapping[str, object], key: str) -> str:
    """A fact as text; empty where it is missing."""
    value = facts.get(key)
    return "" if value is None else str(value)


def texts_of(facts: Mapping[str, object], key: str) -> tuple[str, ...]:
    """A fact that is a list, or a single one, as texts."""
    value = facts.get(key) or ()
    return (
        tuple(str(item) for item in value)
        if isinstance(value, list)
        else (str(value),) * bool(value)
    )


def read_csv(path: Path) -> pd.DataFrame:
    """The table in a CSV file; empty if there is none. Names stay text: "1.10" is not 1.1."""
    if not path.is_file() or not path.read_text(encoding="utf-8").strip():
        return pd.DataFrame()
    text = dict.fromkeys(("model", "group", "heads", "curve", "reason"), str)
    try:
        header = pd.read_csv(path, nrows=0).columns
        return pd.read_csv(path, dtype={k: v for k, v in text.items() if k in header})
    except ValueError as fault:
        raise AnalysisError(
            f"{path}: not a readable table: {str(fault).splitlines()[0]}"
        ) from fault


def read_json_lines(path: Path, notes: list[str]) -> pd.DataFrame:
    """The rows of a file of JSON lines; a last line cut off by a stop is left out and noted."""
    if not path.is_file():
        return pd.DataFrame()
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = []
    for place, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as fault:
            if place < len(lines):
                raise AnalysisError(f"{path}, line {place}: not JSON: {fault.msg}") from fault
            notes.append(f"The last line of {path.name} is cut off and was left out.")
    return pd.DataFrame(rows)


def head_results(
    folder: Path, key: tuple[str, str]
) -> tuple[dict[int, Patterns], HeadScores | None]:
    """Patterns of a run's heads by step, and what ablating each head of its last checkpoint does.

    They lie in `heads/MODEL-seed-N/`, of a folder that is itself the run in `heads/`: in
    `step-000500/attention.json` and in `ablation.json`.

    Raises: AnalysisError for a file that cannot be read.
    """
    model, seed = key
    own = folder / HEADS / "-".join(filter(None, [model, f"seed-{seed}" if seed else ""]))
    steps = {
        int(match[1]): path
        for path in own.glob("step-*/attention.json")
        if (match := _STEP.fullmatch(path.parent.name))
    }
    ablation = own / "ablation.json"
    return (
        {step: Patterns.load(steps[step]) for step in sorted(steps)},
        HeadScores.load(ablation) if ablation.is_file() else None,
    )
