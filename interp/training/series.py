"""A series of checkpoints under the probes and the change-point rule of `phase_change`.

One model is in memory at a time. What was measured is written checkpoint by checkpoint, so that an
interrupted series is taken up where it stopped and ends with the same tables.
"""

import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pandas as pd
import torch

from interp.config import config_tables
from interp.data.stream import open_stream
from interp.errors import ConfigError, ModelError
from interp.models.loading import load_model, torch_device
from interp.models.watch import HookedModel
from interp.tables import head_label, strict_json, versions, write_text
from interp.training.changepoint import MIN_POINTS, RULE, SKIPPED_SHARE
from interp.training.changes import CURVE_NAMES, LeastSizes, find_changes
from interp.training.probes import Measurement, Probe, SequenceProbe
from interp.training.run_folder import RunFolder
from interp.training.series_members import Series, load_series
from interp.training.series_probe import ProbeOptions, probe_for, read_texts

SHAPES = ("n_layers", "n_heads", "d_model", "d_head", "d_vocab", "n_ctx", "bos_token_id")
"""What the models of one series have in common."""

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class SeriesOptions:
    """How each checkpoint is loaded, what it is measured on, and the least changes."""

    backend: Literal["native", "bridge"] = "native"
    device: str = "cpu"
    dtype: Dtype = "float32"
    probe: ProbeOptions = field(default_factory=ProbeOptions)
    least: LeastSizes = field(default_factory=lambda: LeastSizes(induction=0.04, icl_score=0.1))
    log_steps: bool = False
    """Search on log2(step + 1) instead of on the steps."""
    tokens_per_step: int | None = None
    """Tokens that one training step of the series saw, where the caller knows."""


def search_series(
    ref: str | Path,
    out: Path | str,
    *,
    steps: list[int] | None = None,
    options: SeriesOptions = SeriesOptions(),
    resume: bool = False,
    command: str = "",
    say: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Measure every checkpoint that `ref` names, search the curves for a change; what was found.

    `ref` is a training run's folder, which is measured as it measured itself while training; a
    folder of checkpoints' folders, each name ending in its step; or a Hub id with revisions
    `step<N>`. Writes curves.csv, heads.csv, changes.csv and run.json into `out`.

    Raises: ConfigError where the series, the text or `out` is not as it should be; ModelError for a
    checkpoint that cannot be read or has another shape; AnalysisError for blocks that do not fit.
    """
    series = load_series(ref, steps)
    _refuse_options_of_a_run(series, options)
    torch_device(options.device)
    work = _Work(series, options, RunFolder(Path(out)))
    work.open(resume=resume, command=command)
    n = len(series.refs)
    too_few = n - int(SKIPPED_SHARE * n) < MIN_POINTS
    with _threads(series):
        for place, step in enumerate(series.refs, start=1):
            if step not in work.measured:
                began = time.perf_counter()
                measurement = work.measure(step)
                seconds = time.perf_counter() - began
                if too_few and place == 1:
                    say(f"{n} checkpoints: the rule calls no change with fewer than {MIN_POINTS}")
                say(f"step {step} ({place}/{n})  {_line(measurement)}  {seconds:.1f} s")
                if options.backend == "bridge":
                    gc.collect()  # a bridge holds itself in circles; two would be in memory at once
    return work.finish()


class _Work:
    """One series on its way into its folder."""

    def __init__(self, series: Series, options: SeriesOptions, folder: RunFolder):
        self.series = series
        self.options = options
        self.folder = folder
        self.texts = read_texts(options.probe)
        self.lines = folder.path / "measured.jsonl"
        self.measured: dict[int, dict[str, object]] = {}
        self.facts: dict[str, object] = {}
        self.probe: SequenceProbe | None = None

    def open(self, *, resume: bool, command: str) -> None:
        """Take the folder up, or see that a series can begin there and that nothing is lost."""
        path = self.folder.path
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file, not a folder for results")
        asked = _plain(self._asked())
        if path.is_dir() and any(path.iterdir()):
            if not resume:
                raise ConfigError(
                    f"{path} already holds something: --resume continues a series, --out names "
                    "another folder"
                )
            self.facts = self.folder.read_facts()
            if self.facts.get("kind") != "series":
                raise ConfigError(f"{path} holds no series that could be continued")
            before = self.facts.get("asked")
            assert isinstance(before, dict)
            differ = sorted(key for key in {**before, **asked} if before.get(key) != asked.get(key))
            if differ:
                raise ConfigError(
                    f"{path} holds a series measured otherwise: {', '.join(differ)} differ"
                )
            self.measured = _read_lines(self.lines)
            write_text(self.lines, "".join(map(_json_line, self.measured.values())))
        else:
            self.facts = {
                "kind": "series",
                "name": self.series.name,
                "title": f"Phase change in {Path(self.series.name).name}",
                "command": command,
                "versions": versions(),
                "device": self.options.device,
                "dtype": self.options.dtype,
                "asked": asked,
            }

    def _asked(self) -> dict[str, object]:
        """What decides the numbers, beside the checkpoints themselves."""
        options = self.options
        return {
            "series": self.series.name,
            "kind": self.series.kind,
            "backend": options.backend,
            "device": options.device,
            "dtype": options.dtype,
            **({} if self.series.config else options.probe.facts()),
            **({"text": self.texts.facts()} if self.texts else {}),
        }

    def measure(self, step: int) -> Measurement:
        """What the probe says of the checkpoint at a step, written down."""
        ref, options = self.series.refs[step], self.options
        model = load_model(ref, backend=options.backend, device=options.device, dtype=options.dtype)
        self._refuse_another_model(model, str(ref))
        if self.probe is None:
            self.probe, described = self._probe(model)
            self.facts |= {"probe": described}
        if self.texts is not None:
            self.texts.refuse_another_vocabulary(model, str(ref))
        measurement = self.probe.measure(model)
        _refuse_broken(measurement, str(ref))
        if not self.folder.facts.is_file():
            # Not before: a first checkpoint that cannot be measured leaves no folder behind.
            self.folder.path.mkdir(parents=True, exist_ok=True)
            self.folder.write_facts(self.facts)
        line = {"step": step, "metrics": measurement.metrics, "heads": measurement.heads}
        with self.lines.open("a", encoding="utf-8", newline="\n") as file:
            file.write(_json_line(line))
        return measurement

    def _probe(self, model: HookedModel) -> tuple[SequenceProbe, dict[str, object]]:
        config = self.series.config
        if config is None:
            return probe_for(model, self.options.probe, self.texts)
        stream, _ = open_stream(config)
        facts = stream.facts()
        _refuse_another_text(self.series, facts)
        probe = Probe(config.probe, config.model, stream.held_out(config.probe.sequences))
        return probe, {**config_tables(config.probe), "data": facts}

    def _refuse_another_model(self, model: HookedModel, ref: str) -> None:
        shape = {name: getattr(model.cfg, name) for name in SHAPES}
        first = self.facts.setdefault("model", shape)
        assert isinstance(first, dict)
        for name, value in shape.items():
            if value != first[name]:
                raise ModelError(
                    f"{ref} has {name} = {value}, the first checkpoint has {first[name]}: they are "
                    "not of one series"
                )

    def finish(self) -> list[str]:
        """What the tables say, after they are written."""
        # Also what this process measured is taken from the file: one way from number to table.
        self.measured = _read_lines(self.lines)
        curves, heads = self._tables()
        changes = find_changes(curves, self.options.least, log_steps=self.options.log_steps)
        for name, table in {"curves": curves, "heads": heads, "changes": changes}.items():
            write_text(self.folder.path / f"{name}.csv", table.to_csv(index=False))
        steps = list(self.series.refs)
        said = findings(curves, heads, changes)
        self.facts |= {
            "checkpoints": list(self.series.names.values()),
            "min_induction": self.options.least.induction,
            "min_icl": self.options.least.icl_score,
            "log_steps": self.options.log_steps,
            "rule": RULE,
            "findings": said,
            "notes": self._notes(steps),
        }
        self.folder.write_facts(self.facts)
        return said

    def _tables(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        per_step = self.series.tokens_per_step or self.options.tokens_per_step
        curves, heads = [], []
        for step in self.series.refs:
            line = self.measured[step]
            where = {"step": step} | ({"tokens": step * per_step} if per_step else {})
            rows, metrics = line["heads"], line["metrics"]
            assert isinstance(rows, list)
            assert isinstance(metrics, dict)
            best = max(row["induction"] for row in rows)
            curves.append({**where, **metrics, "best_induction": best})
            heads += [{**where, **row} for row in rows]
        return pd.DataFrame(curves), pd.DataFrame(heads)

    def _notes(self, steps: list[int]) -> list[str]:
        gaps = [after - before for before, after in pairwise(steps)]
        spacing = f"every {gaps[0]}" if len(set(gaps)) == 1 else f"{min(gaps)} to {max(gaps)} apart"
        axis = (
            "log2(step + 1), as asked for, and a midpoint is halfway on that axis"
            if self.options.log_steps
            else "steps as given; for steps that grow by powers there is --log-steps"
        )
        notes = [
            f"The rule works on the axis of {axis}.",
            f"These checkpoints are {spacing}: what happens between two of them is not seen.",
            "One series is one seed: there is no interval over seeds.",
        ]
        if self.texts is not None:
            notes.append("Nothing says that the text was held out from the training of this model.")
        return notes


@contextmanager
def _threads(series: Series) -> Iterator[None]:
    """The CPU threads that a run trained with, since another number rounds differently."""
    before = torch.get_num_threads()
    if series.config is not None and series.config.train.threads is not None:
        torch.set_num_threads(series.config.train.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def findings(curves: pd.DataFrame, heads: pd.DataFrame, changes: pd.DataFrame) -> list[str]:
    """What the tables of a series say, in sentences."""
    lines = []
    verdicts = changes.set_index("curve")
    for curve, label in CURVE_NAMES.items():
        if curve not in verdicts.index:
            lines.append(f"{label[0].upper()}{label[1:]} was not measured: it needs text.")
            continue
        row = verdicts.loc[curve]
        if row["found"]:
            lines.append(
                f"A change in {label}: {row['size']:+.3g}, midway at step {row['step']:,.0f}, from "
                f"{row['onset']:,.0f} to {row['end']:,.0f}."
            )
        else:
            lines.append(f"No change in {label} is called: {row['reason']}.")
    if verdicts["found"].sum() == len(CURVE_NAMES):
        apart = verdicts.loc["icl_score", "step"] - verdicts.loc["induction", "step"]
        lines.append(
            f"The change in the in-context-learning score lies {abs(apart):,.0f} steps "
            f"{'before' if apart < 0 else 'after'} that in the induction score, midpoint to "
            "midpoint."
        )
    last = heads[heads["step"] == heads["step"].max()]
    best = last.loc[last["induction"].idxmax()]
    first = curves.iloc[0]
    where = head_label(int(best["layer"]), int(best["head"]))
    lines.append(
        f"The best induction score goes from {first['best_induction']:.3f} at step "
        f"{first['step']:,.0f} to {best['induction']:.3f} at step {best['step']:,.0f}, head "
        f"{where}."
    )
    return lines


def _refuse_options_of_a_run(series: Series, options: SeriesOptions) -> None:
    given = options.probe.given()
    if series.config is not None and (given or options.tokens_per_step is not None):
        words = ", ".join(
            [*given, *(["--tokens-per-step"] * (options.tokens_per_step is not None))]
        )
        raise ConfigError(
            f"{words}: {series.name} is measured as its own config.toml says; give "
            f"{series.name}/checkpoints to measure it otherwise"
        )


def _refuse_another_text(series: Series, facts: Mapping[str, object]) -> None:
    """A path may hold another text by now, and another Python another library."""
    begun = RunFolder(Path(series.name)).read_facts().get("data")
    if isinstance(begun, dict) and begun.get("sha256") != facts.get("sha256"):
        raise ConfigError(f"{series.name}: the corpus is not the text that this run trained on")


def _refuse_broken(measurement: Measurement, ref: str) -> None:
    scores = [row["induction"] for row in measurement.heads]
    losses = [
        measurement.metrics[name]
        for name in ("second_copy_loss", "loss")
        if name in measurement.metrics
    ]
    if not all(map(math.isfinite, [*scores, *losses])):
        raise ModelError(
            f"{ref} gives numbers that are not finite: its weights are broken, or too large for "
            "the dtype; --steps can leave it out"
        )


def _line(measurement: Measurement) -> str:
    metrics = measurement.metrics
    best = max(measurement.heads, key=lambda head: head["induction"])
    words = [f"induction {best['induction']:.3f} at {best['layer']}.{best['head']}"]
    if "loss" in metrics:
        words = [f"loss {metrics['loss']:.3f}", f"icl {metrics['icl_score']:+.3f}", *words]
    return "  ".join([*words, f"second copy {metrics['second_copy_loss']:.3f}"])


def _plain(values: Mapping[str, object]) -> dict[str, object]:
    """The values as they read back from a file."""
    read = json.loads(strict_json(dict(values)))
    assert isinstance(read, dict)
    return read


def _json_line(line: Mapping[str, object]) -> str:
    return strict_json(dict(line), indent=None) + "\n"


def _read_lines(path: Path) -> dict[int, dict[str, object]]:
    """What was measured, by step. A killed writer leaves at most a part of the last line."""
    if not path.is_file():
        return {}
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            read = json.loads(line)
            found[int(read["step"])] = read
        except (ValueError, KeyError, TypeError):
            raise ModelError(f"{path}, line {number}, is damaged: it names no step") from None
    return found
