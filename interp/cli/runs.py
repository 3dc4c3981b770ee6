"""Verbs that run something over steps."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interp.cli.app import app
from interp.cli.options import (
    Backend,
    BatchOfEach,
    Block,
    Config,
    Device,
    Dtype,
    Out,
    Override,
    Resume,
    Seed,
    block_lengths,
)
from interp.errors import ConfigError

if TYPE_CHECKING:
    from interp.config import RunConfig


@app.command()
def train(
    config: Config,
    overrides: Override = None,
    out: Out = None,
    resume: Resume = False,
    seed: Annotated[int | None, typer.Option(min=0, help="the same as --set train.seed=")] = None,
    device: Annotated[str | None, typer.Option(help="the same as --set train.device=")] = None,
) -> None:
    """Train a model and measure its heads on the way, into reports/<config name> unless --out."""
    from interp.training.progress import TrainingProgress

    settings = _load(config, [*(overrides or ()), *_sets("train", seed=seed, device=device)])
    folder = out or Path("reports") / config.stem
    from interp.training.loop import train as run_training
    from interp.views.report import write_report

    with TrainingProgress(settings.train.steps) as progress:
        run_training(settings, folder, resume=resume, command=_command(), watch=progress.watch)
    typer.echo(str(write_report(folder)))


@app.command()
def run(
    config: Annotated[
        Path | None, typer.Argument(help="a TOML file with an \\[experiment]")
    ] = None,
    overrides: Override = None,
    out: Out = None,
    resume: Resume = False,
    listed: Annotated[bool, typer.Option("--list", help="list the experiments here")] = False,
) -> None:
    """Run the experiment a config names, into reports/<config name> unless --out."""
    if listed or config is None:
        for path in sorted(Path("configs").glob("*.toml")):
            first = path.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ")
            typer.echo(f"{path}  {first}")
        return
    settings = _load(config, overrides or [])
    experiment = _experiment(settings, config)
    folder = out or Path("reports") / config.stem
    report_path = experiment(
        settings,
        folder,
        resume=resume,
        command=_command(),
        say=lambda line: typer.echo(line, err=True),
    )
    typer.echo(str(report_path))


@app.command("phase-change")
def phase_change(
    series: Annotated[
        str,
        typer.Argument(
            help="a training run's folder, a folder of checkpoints' folders whose names end in "
            "their steps, or a Hub id with revisions step<N>"
        ),
    ],
    steps: Annotated[
        str | None, typer.Option(help="only these, such as 0,1,2,4,512; all unless given")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="text file for the in-context-learning score")
    ] = None,
    corpus: Annotated[
        str | None,
        typer.Option(help="docs, stdlib or a path: its held-out files, instead of --text"),
    ] = None,
    block: Block = None,
    batch: BatchOfEach = 8,
    sequences: Annotated[int, typer.Option(min=1, help="windows of text")] = 64,
    icl_early: Annotated[
        str | None, typer.Option(help="first,last early position of that score: 40,60 of 512")
    ] = None,
    icl_late: Annotated[
        str | None, typer.Option(help="first,last late position: 490,510 of 512")
    ] = None,
    min_induction: Annotated[
        float, typer.Option(min=0, help="least change in the best induction score")
    ] = 0.04,
    min_icl: Annotated[
        float, typer.Option(min=0, help="least change in the in-context-learning score, in nats")
    ] = 0.1,
    log_steps: Annotated[
        bool, typer.Option("--log-steps", help="search on log2(step + 1), not on the steps")
    ] = False,
    tokens_per_step: Annotated[
        int | None, typer.Option(min=1, help="for an axis of tokens; 2097152 for Pythia")
    ] = None,
    backend: Backend = "native",
    device: Device = "cpu",
    dtype: Dtype = "float32",
    seed: Seed = 0,
    out: Out = None,
    resume: Resume = False,
) -> None:
    """Look for the phase change in a series of checkpoints, into reports/series-NAME."""
    wanted = _numbers("--steps", steps)
    blocks = block_lengths(block)
    early, late = _positions("--icl-early", icl_early), _positions("--icl-late", icl_late)
    from interp.training.changes import LeastSizes
    from interp.training.series import SeriesOptions, search_series
    from interp.training.series_probe import ProbeOptions
    from interp.views.report import write_report

    options = SeriesOptions(
        backend=backend,
        device=device,
        dtype=dtype,
        probe=ProbeOptions(
            text=text,
            corpus=corpus,
            blocks=None if blocks is None else tuple(blocks),
            batch=batch,
            sequences=sequences,
            seed=seed,
            icl_early=early,
            icl_late=late,
        ),
        least=LeastSizes(induction=min_induction, icl_score=min_icl),
        log_steps=log_steps,
        tokens_per_step=tokens_per_step,
    )
    folder = out or Path("reports") / f"series-{Path(series).resolve().name}"
    findings = search_series(
        series,
        folder,
        steps=wanted,
        options=options,
        resume=resume,
        command=_command(),
        say=lambda line: typer.echo(line, err=True),
    )
    for line in findings:
        typer.echo(line)
    typer.echo(str(write_report(folder)))


def _load(config: Path, overrides: list[str]) -> "RunConfig":
    from interp.config import load_config

    return load_config(config, overrides)


def _sets(table: str, **values: object) -> list[str]:
    return [f"{table}.{key}={value}" for key, value in values.items() if value is not None]


def _command() -> str:
    return " ".join(["interp", *sys.argv[1:]])


def _experiment(settings: "RunConfig", config: Path) -> Callable[..., Path]:
    """The `run` function of the file that a config names, relative to the config."""
    import importlib.util

    named = (settings.experiment or {}).get("file")
    if not isinstance(named, str):
        raise ConfigError(
            f"{config}: no [experiment] with a file; `interp train {config}` trains its model"
        )
    path = (config.parent / named).resolve()
    if not path.is_file():
        raise ConfigError(f"{config}: experiment.file = {named!r}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{config}: experiment.file = {named!r}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "run"):
        raise ConfigError(f"{config}: {named} has no function `run`")
    return module.run


def _numbers(flag: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    words = [word for word in text.replace(" ", "").split(",") if word]
    if not words or not all(word.isdecimal() for word in words):
        raise ConfigError(f"{flag} {text}: whole numbers with commas between")
    return [int(word) for word in words]


def _positions(flag: str, text: str | None) -> tuple[int, int] | None:
    numbers = _numbers(flag, text)
    if numbers is None:
        return None
    if len(numbers) != 2:
        raise ConfigError(f"{flag} {text}: the first and the last position, such as 40,60")
    return numbers[0], numbers[1]
