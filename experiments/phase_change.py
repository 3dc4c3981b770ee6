"""Watch induction heads form: two-layer models, a one-layer control, and what ablation does.

Trains both models for every seed, finds the change in the best induction score and, separately, in
the in-context-learning score by one rule, ablates the heads of the trained two-layer models beside
controls, and writes tables and one report.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
)

from interp.ablation.controls import control_heads, head_output_norms
from interp.ablation.interventions import Head
from interp.ablation.measuring import Measured, Setting, measure_sets
from interp.ablation.methods import Zeroing
from interp.ablation.metrics import METRICS, loss_function
from interp.ablation.paired import paired
from interp.config import RunConfig, config_tables, explain
from interp.data.stream import open_stream
from interp.errors import ConfigError
from interp.inputs import token_inputs
from interp.models.loading import load_model, torch_device
from interp.tables import head_label, strict_json, versions, write_text
from interp.training.changepoint import RULE, Change, summarize_changes
from interp.training.changes import CURVE_NAMES, CURVES, LeastSizes, find_changes
from interp.training.head_results import save_head_results
from interp.training.parallel import train_all
from interp.training.probes import IclScore
from interp.training.run_folder import RunFolder
from interp.views.pages.run_tables import HEADS
from interp.views.report import write_report

TWO_LAYER, CONTROL = "two-layer", "one-layer"


class Settings(BaseModel):
    """The [experiment] table of a phase-change config."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: str
    title: str
    notes: list[str] = []
    seeds: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
    workers: PositiveInt = 2
    """Runs trained side by side."""
    min_induction: PositiveFloat
    """Least change in the induction score that is worth the name."""
    min_icl: PositiveFloat
    """The same for the in-context-learning score, in nats."""
    ablation_sequences: PositiveInt = 256

    @field_validator("seeds")
    @classmethod
    def _different(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("holds a seed twice")
        return seeds


def run(
    config: RunConfig,
    out: Path,
    *,
    resume: bool,
    command: str,
    say: Callable[[str], None],
) -> Path:
    """Everything, into `out`; returns the path of the report."""
    try:
        settings = Settings.model_validate(config.experiment)
    except ValidationError as error:
        raise ConfigError(f"[experiment] {explain(error, Settings)}") from None
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not resume:
        raise ConfigError(
            f"{out} already holds something: --resume continues, --out names another folder"
        )
    if config.model.n_layers != 2:
        raise ConfigError(
            f"model.n_layers = {config.model.n_layers}: this experiment sets a two-layer model "
            "beside a one-layer control"
        )
    # What would fail in every run is better said once, before any begins.
    torch_device(config.train.device)
    open_stream(config)
    (out / "runs").mkdir(parents=True, exist_ok=True)
    jobs = {
        out / "runs" / f"{model}-seed-{seed}": _with_seed(config, model, seed)
        for model in (TWO_LAYER, CONTROL)
        for seed in settings.seeds
    }
    say(f"training {len(jobs)} models, {settings.workers} at a time")
    train_all(jobs, workers=settings.workers, command=command, say=say)

    curves, heads = _collect(jobs, config)
    changes = find_changes(
        curves, LeastSizes(induction=settings.min_induction, icl_score=settings.min_icl)
    )
    ablation = pd.concat(
        [
            ablate_groups(out / "runs" / f"{TWO_LAYER}-seed-{seed}", config, settings, heads, seed)
            for seed in settings.seeds
        ],
        ignore_index=True,
    )
    _save_heads(out, jobs, settings)
    across = across_changes(curves, changes, settings)
    tables = {
        "curves": curves,
        "heads": heads,
        "changes": changes,
        "distance": distances(changes, settings),
        "across": across,
        "ablation": ablation,
    }
    for name, table in tables.items():
        write_text(out / f"{name}.csv", table.to_csv(index=False))
    facts = {
        "kind": "phase-change",
        "name": out.name,
        "title": settings.title,
        "findings": findings(curves, changes, tables["distance"], across, ablation, settings),
        "rule": RULE,
        "notes": settings.notes,
        "command": command,
        "versions": versions(),
        "seeds": settings.seeds,
        "config": config_tables(config),
        "runs": {folder.name: RunFolder(folder).read_facts() for folder in jobs},
    }
    write_text(out / "run.json", strict_json(facts) + "\n")
    return write_report(out)


def _save_heads(out: Path, jobs: Mapping[Path, RunConfig], settings: Settings) -> None:
    """What the report's explorer shows of single heads: of the first seed of either model."""
    for folder, job in jobs.items():
        if job.train.seed == settings.seeds[0]:
            stream, _ = open_stream(job)
            held_out = stream.held_out(settings.ablation_sequences, apart_from=job.probe.sequences)
            save_head_results(
                folder,
                out / HEADS / folder.name,
                held_out,
                block=max(job.probe.blocks),
                seed=job.train.seed,
            )


def _with_seed(config: RunConfig, model: str, seed: int) -> RunConfig:
    shape = config.model if model == TWO_LAYER else config.model.model_copy(update={"n_layers": 1})
    return config.model_copy(
        update={
            "model": shape,
            "train": config.train.model_copy(update={"seed": seed}),
            "experiment": None,
        }
    )


def _collect(jobs: dict[Path, RunConfig], config: RunConfig) -> tuple[pd.DataFrame, pd.DataFrame]:
    curves, heads = [], []
    for folder, job in jobs.items():
        model = TWO_LAYER if job.model.n_layers == config.model.n_layers else CONTROL
        where = {"model": model, "seed": job.train.seed}
        files = RunFolder(folder)
        scores = pd.read_csv(files.probes)
        best = scores.groupby("step")["induction"].max().rename("best_induction")
        lines = files.metrics.read_text(encoding="utf-8").splitlines()
        metrics = pd.DataFrame([json.loads(line) for line in lines]).merge(best, on="step")
        curves.append(metrics.assign(**where))
        heads.append(scores.assign(**where))

    def leading(table: pd.DataFrame) -> pd.DataFrame:
        return table[["model", "seed", *table.columns.drop(["model", "seed"])]]

    return (
        leading(pd.concat(curves, ignore_index=True)),
        leading(pd.concat(heads, ignore_index=True)),
    )


def distances(changes: pd.DataFrame, settings: Settings) -> pd.DataFrame:
    """How far the change in the in-context score lies after that in induction, seed by seed."""
    found = changes[(changes["model"] == TWO_LAYER) & changes["found"]]
    table = found.set_index(["seed", "curve"])
    rows = []
    for seed in settings.seeds:
        if (seed, "induction") in table.index and (seed, "icl_score") in table.index:
            induction, icl = table.loc[(seed, "induction")], table.loc[(seed, "icl_score")]
            rows.append(
                {"seed": seed}
                | {
                    f"{place}_distance": float(icl[place]) - float(induction[place])
                    for place in ("onset", "step", "onset_tokens", "step_tokens")
                }
            )
    columns = ["seed", "onset_distance", "step_distance"]
    return pd.DataFrame(rows, columns=None if rows else columns)


def across_changes(curves: pd.DataFrame, changes: pd.DataFrame, settings: Settings) -> pd.DataFrame:
    """What the losses do between onset and end of the induction change, seed by seed."""
    rows = []
    for seed in settings.seeds:
        run = _of(curves, TWO_LAYER, seed).set_index("step")
        change = _of(changes, TWO_LAYER, seed).set_index("curve")
        row: dict[str, float] = {"seed": seed}
        for curve in CURVES:
            row[f"{curve}_size"] = change.loc[curve, "size"]
        if change.loc["induction", "found"]:
            onset, end = (
                run.loc[_nearest(run.index, change.loc["induction", place])]
                for place in ("onset", "end")
            )
            row["icl_score_drop"] = onset["icl_score"] - end["icl_score"]
            for split in ("predictable", "other"):
                row[f"{split}_drop"] = onset[f"{split}_loss"] - end[f"{split}_loss"]
        rows.append(row)
    return pd.DataFrame(rows)


def _of(table: pd.DataFrame, model: str, seed: int) -> pd.DataFrame:
    return table[(table["model"] == model) & (table["seed"] == seed)]


def _nearest(steps: pd.Index, wanted: float) -> int:
    return int(steps[np.abs(steps - wanted).argmin()])


def ablate_groups(
    folder: Path, config: RunConfig, settings: Settings, heads: pd.DataFrame, seed: int
) -> pd.DataFrame:
    """What taking each group of heads away does to the trained model, beside its controls.

    Groups are chosen by the last probe's scores; effects are measured on other sequences.
    """
    model = load_model(folder)
    stream, _ = open_stream(config)
    inputs = token_inputs(
        model,
        stream.held_out(settings.ablation_sequences, apart_from=config.probe.sequences),
    )
    norms = head_output_norms(model, inputs)
    last = _of(heads, TWO_LAYER, seed)
    groups = head_groups(last[last["step"] == last["step"].max()], norms)
    icl = IclScore(config.probe.icl_early, config.probe.icl_late)
    sets = [tuple(chosen) for _, chosen in groups]
    found = {
        metric.name: measure_sets(model, inputs, [Zeroing()], sets, Setting(metric))["zero"]
        for metric in (loss_function(icl, "icl_score"), METRICS["loss"])
    }
    return pd.DataFrame([_ablation_row(group, chosen, found, seed) for group, chosen in groups])


def _ablation_row(
    group: str, chosen: Sequence[Head], found: Mapping[str, Measured], seed: int
) -> dict[str, object]:
    heads = tuple(chosen)
    score, loss = found["icl_score"], found["loss"]
    effects = paired(np.stack([score.effect(heads), loss.effect(heads)]))
    return {
        "seed": seed,
        "group": group,
        "heads": " ".join(head_label(*head) for head in chosen),
        "n_heads": len(chosen),
        "icl_score": float(score.clean.mean()),
        "icl_score_ablated": float(score.ablated[heads].mean()),
        "effect": float(effects.mean[0]),
        "effect_se": float(effects.standard_error[0]),
        "loss": float(loss.clean.mean()),
        "loss_ablated": float(loss.ablated[heads].mean()),
        "loss_effect": float(effects.mean[1]),
        "loss_effect_se": float(effects.standard_error[1]),
        "n": len(score.clean),
    }


def head_groups(last: pd.DataFrame, norms: np.ndarray) -> list[tuple[str, list[Head]]]:
    """The heads to take away together, each group followed by its controls.

    Induction heads are those of the strongest one's layer with at least half its score;
    previous-token heads likewise, among the layers below. At most half a layer's heads are
    taken; those left over that are strong too are no controls, so there may be fewer of these.
    """
    induction = _strong(last, "induction")
    below = last[last["layer"] < induction[0][0]]
    previous = _strong(below, "previous_token") if len(below) else []
    most = max(1, norms.shape[1] // 2)
    groups = []
    for name, strong in (("induction heads", induction), ("previous-token heads", previous)):
        if strong:
            chosen = strong[:most]
            groups.append((name, chosen))
            # A head that is itself strong is no control, even where fewer controls remain.
            controls = control_heads(chosen, norms, excluded=strong)
            if controls:
                groups.append((f"controls of the {name}", controls))
    return groups


def _strong(scores: pd.DataFrame, column: str) -> list[Head]:
    """Heads of the best one's layer with at least half its score, the best first."""
    ordered = scores.sort_values(column, ascending=False)
    best = ordered.iloc[0]
    same_layer = ordered[ordered["layer"] == best["layer"]]
    strong = same_layer[same_layer[column] >= 0.5 * best[column]]
    return [(int(row.layer), int(row.head)) for row in strong.itertuples()]


def findings(
    curves: pd.DataFrame,
    changes: pd.DataFrame,
    apart: pd.DataFrame,
    across: pd.DataFrame,
    ablation: pd.DataFrame,
    settings: Settings,
) -> list[str]:
    """What the tables say, in sentences."""
    lines = []
    for model in (TWO_LAYER, CONTROL):
        for curve, label in CURVE_NAMES.items():
            verdicts = changes[(changes["model"] == model) & (changes["curve"] == curve)]
            lines.append(_change_sentence(model, label, verdicts))
        final = [
            _of(curves, model, seed).sort_values("step").iloc[[0, -1]] for seed in settings.seeds
        ]
        induction = ", ".join(f"{ends['best_induction'].iloc[-1]:.3f}" for ends in final)
        icl = ", ".join(
            f"{ends['icl_score'].iloc[0]:+.2f} to {ends['icl_score'].iloc[-1]:+.2f}"
            for ends in final
        )
        lines.append(
            f"The {model} model ends with best induction scores {induction}; its in-context-"
            f"learning score goes from {icl} nats (seeds {_list(settings.seeds)})."
        )
    if len(apart):
        steps = _list([f"{distance:+.0f}" for distance in apart["step_distance"]])
        lines.append(
            "The change in the in-context-learning score lies this many steps from that in the "
            f"induction score, midpoint to midpoint: {steps} (seeds {_list(apart['seed'])})."
        )
    if "predictable_drop" in across:
        drops = ", ".join(
            f"{row.predictable_drop:.2f} against {row.other_drop:.2f}"
            for row in across.dropna(subset=["predictable_drop"]).itertuples()
        )
        lines.append(
            "Across the induction change the loss of tokens that an induction rule predicts falls "
            f"by more than that of the others: {drops} nats."
            if (across["predictable_drop"] > across["other_drop"]).all()
            else f"Across the induction change the losses of predictable and other tokens fall by "
            f"{drops} nats."
        )
    for group, rows in ablation.groupby("group", sort=False):
        effects = ", ".join(f"{row.effect:+.2f} ± {row.effect_se:.2f}" for row in rows.itertuples())
        lines.append(
            f"Zeroing the {group} together changes the two-layer model's in-context-learning "
            f"score by {effects} nats."
        )
    return lines


def _change_sentence(model: str, label: str, verdicts: pd.DataFrame) -> str:
    found = verdicts[verdicts["found"]]
    if found.empty:
        return f"The {model} model has no change in {label} in any of {len(verdicts)} seeds."
    summary = summarize_changes(
        [
            Change(row.found, row.reason, row.step, row.onset, row.end, row.width, row.size)
            for row in verdicts.itertuples()
        ]
    )
    assert summary.step is not None
    assert summary.width is not None
    return (
        f"The {model} model has a change in {label} in {summary.n_found} of {summary.n_curves} "
        f"seeds, midway at step {summary.step.mean:.0f} (from {summary.step.low:.0f} to "
        f"{summary.step.high:.0f} over seeds), {summary.width.mean:.0f} steps wide."
    )


def _list(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
