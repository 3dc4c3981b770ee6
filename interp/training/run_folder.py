"""The files of a training run: what is written where, and how an interrupted run is cut back.

`metrics.jsonl` and `probes.csv` hold numbers that follow from config and seed alone, so that a
resumed run's files are identical to an uninterrupted one's; everything that differs between two
runs of the same config (times, versions, commands) lives in `run.json` and `timing.jsonl`.
"""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import tomli_w

from interp.config import RunConfig, config_tables, load_config
from interp.errors import ConfigError, ModelError
from interp.models.loading import checkpoint_steps
from interp.tables import strict_json, write_text

HEAD_COLUMNS = ("step", "tokens", "layer", "head", "induction", "previous_token", "sink")


class RunFolder:
    """One run's folder. Every line is complete: a writer killed in the middle leaves a part of
    the last one, which `cut_back` takes away."""

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.toml"
        self.facts = path / "run.json"
        self.metrics = path / "metrics.jsonl"
        self.timing = path / "timing.jsonl"
        self.probes = path / "probes.csv"
        self.tokenizer = path / "tokenizer.json"
        self.checkpoints = path / "checkpoints"

    def open(self, config: RunConfig, *, resume: bool) -> None:
        """Begin or take up a run, having checked that nothing is lost or mixed by it.

        Raises: ConfigError where the folder cannot be written, holds something without `resume`,
        or holds another config's run.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file, not a folder for a run")
        if self.path.is_dir() and any(self.path.iterdir()):
            if not resume:
                raise ConfigError(
                    f"{self.path} already holds something: --resume continues a run, --out names "
                    "another folder"
                )
            if self.config.is_file():
                self._refuse_another_config(config)
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            # A killed writer's unpublished files; other hidden files are the user's.
            for file in self.files():
                for leftover in self.path.glob(f".{file.name}-*"):
                    leftover.unlink()
            if not self.config.is_file():
                write_text(self.config, tomli_w.dumps(config_tables(config)))
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}") from None

    def _refuse_another_config(self, config: RunConfig) -> None:
        saved = config_tables(load_config(self.config))
        wanted = config_tables(config)
        done = max(checkpoint_steps(self.path), default=0)
        if done > config.train.steps:
            raise ConfigError(
                f"{self.path} is already at step {done}, past train.steps = {config.train.steps}"
            )
        changed = sorted(
            f"{table}.{key}"
            for table in ("model", "train", "data", "probe")
            for key in {**_table(saved, table), **_table(wanted, table)}
            # A run may be carried further. Another device or number of threads would round
            # differently, and the run would no longer equal one that was never interrupted.
            if (table, key) not in {("train", "steps"), ("train", "checkpoint_every")}
            and _table(saved, table).get(key) != _table(wanted, table).get(key)
        )
        if changed:
            raise ConfigError(
                f"{self.path} holds a run of another config: {', '.join(changed)} differ"
            )
        if saved != wanted:
            write_text(self.config, tomli_w.dumps(wanted))

    def files(self) -> list[Path]:
        """Everything in the folder that is one file."""
        return [self.config, self.facts, self.metrics, self.timing, self.probes, self.tokenizer]

    def append_metrics(self, values: Mapping[str, int | float]) -> None:
        """Add one line of numbers."""
        _append(self.metrics, strict_json(dict(values), indent=None) + "\n")

    def append_timing(self, values: Mapping[str, int | float]) -> None:
        """Add one line of times, in seconds."""
        _append(self.timing, strict_json(dict(values), indent=None) + "\n")

    def append_heads(self, rows: Sequence[Mapping[str, int | float]]) -> None:
        """Add one row for each head."""
        begun = self.probes.is_file() and self.probes.stat().st_size > 0
        lines = [] if begun else [",".join(HEAD_COLUMNS)]
        lines += [",".join(str(row[column]) for column in HEAD_COLUMNS) for row in rows]
        _append(self.probes, "\n".join(lines) + "\n")

    def write_facts(self, facts: Mapping[str, object]) -> None:
        """Write `run.json`."""
        write_text(self.facts, strict_json(dict(facts)) + "\n")

    def read_facts(self) -> dict[str, object]:
        """`run.json`, or nothing where it was never written."""
        if not self.facts.is_file():
            return {}
        try:
            facts = json.loads(self.facts.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelError(f"{self.facts} is not JSON: {error}") from None
        if not isinstance(facts, dict):
            raise ModelError(f"{self.facts} does not hold the facts of a run")
        return facts

    def cut_back(self, step: int) -> None:
        """Take away every line after `step` (-1: every line) and any part of a line."""

        def step_of_json(line: str) -> int:
            return int(json.loads(line)["step"])

        def step_of_row(line: str) -> int:
            (row,) = csv.reader([line])
            return -1 if row[0] == "step" else int(row[0])

        for path, step_of in (
            (self.metrics, step_of_json),
            (self.timing, step_of_json),
            (self.probes, step_of_row),
        ):
            _keep_lines(path, step_of, step)


def _table(tables: Mapping[str, object], name: str) -> dict[str, object]:
    table = tables.get(name)
    return dict(table) if isinstance(table, Mapping) else {}


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8", newline="\n") as file:
        file.write(text)


def _keep_lines(path: Path, step_of: Callable[[str], int], last: int) -> None:
    if not path.is_file():
        return
    kept = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), 1):
        try:
            # A killed writer leaves at most one part of a line, at the end.
            if not line.endswith("\n") or step_of(line.rstrip("\n")) > last:
                break
        except (ValueError, KeyError, TypeError):
            raise ModelError(f"{path}, line {number}, is damaged: it names no step") from None
        kept.append(line)
    write_text(path, "".join(kept))
