"""The `interp` command: verbs only, no logic.

Nothing heavy is imported before a verb needs it, and paths, configs and flags are checked before a
model is. A user's mistake is one line on standard error and exit code 2.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer.core import TyperGroup

from interp import registry
from interp.errors import AnalysisError, ConfigError, InterpError

if TYPE_CHECKING:
    from typer._click.core import Context

    from interp.config import RunConfig
    from interp.measure import Inputs
    from interp.models.transformer import Transformer
    from interp.tables import HeadScores


# typer keeps its copy of click to itself.
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]


class _Verbs(TyperGroup):
    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:
        given = bool(args)
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            if not given:  # typer's way to print the help
                raise
            typer.echo(f"interp: {error.format_message()}", err=True)
            raise typer.Exit(2) from None

    def invoke(self, ctx: "Context") -> object:
        try:
            return super().invoke(ctx)
        except InterpError as error:
            message = str(error)
        except _UsageError as error:
            message = error.format_message()
        except BrokenPipeError:  # the reader of a pipe has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except OSError as error:
            message = f"{error.filename or 'file'}: {error.strerror or error}"
        except KeyboardInterrupt:
            hint = "; --resume continues" if ctx.invoked_subcommand in ("train", "run") else ""
            typer.echo(f"interp: interrupted{hint}", err=True)
            raise typer.Exit(130) from None
        typer.echo(f"interp: {message}", err=True)
        raise typer.Exit(2)


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Interpretability for multi-head attention: train, score heads, ablate, report.",
)

Model = Annotated[str, typer.Argument(help="a run's folder, FOLDER@STEP, or a checkpoint's folder")]
Out = Annotated[Path | None, typer.Option(help="folder for the results")]
Seed = Annotated[int, typer.Option(min=0, help="seed of the random tokens")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
Tokens = Annotated[
    Path | None, typer.Option(help="integer array \\[batch, pos] in a .npy file, taken as given")
]
Text = Annotated[Path | None, typer.Option(help="text file, cut into windows of n_ctx tokens")]
Block = Annotated[
    str | None, typer.Option(help="block length(s) of the repeated random tokens, such as 8,16")
]
Batch = Annotated[int, typer.Option(min=1, help="random sequences of each block length")]
Format = Annotated[Literal["table", "csv", "json"], typer.Option("--format", help="what to print")]
Config = Annotated[Path, typer.Argument(help="a TOML file, such as those in configs/")]
Override = Annotated[
    list[str] | None, typer.Option("--set", help="override, such as train.lr=1e-3; repeatable")
]
Resume = Annotated[bool, typer.Option("--resume", help="continue an interrupted run")]


@app.command("list")
def list_analyses() -> None:
    """Every analysis with its one-line meaning."""
    meanings = registry.names()
    width = max(map(len, meanings))
    for name, meaning in meanings.items():
        typer.echo(f"{name:<{width}}  {meaning}")


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


@app.command()
def ablate(
    model: Model,
    method: Annotated[str, typer.Option(help="how a head is taken away")] = "zero",
    metric: Annotated[str, typer.Option(help="what is measured")] = "loss",
    heads: Annotated[
        list[str] | None, typer.Option(help="such as 0.1,1.*; all heads unless given")
    ] = None,
    tokens: Tokens = None,
    text: Text = None,
    block: Block = None,
    batch: Batch = 8,
    seed: Seed = 0,
    out: Out = None,
    output: Format = "table",
    device: Device = "cpu",
) -> None:
    """What taking each head away does to the model's loss."""
    _check_flags(tokens, text, block, out)
    from interp.ablation.sweep import ablate_each, check_method
    from interp.tables import parse_heads

    check_method(method, metric)
    loaded = _model(model, device)

    cfg = loaded.cfg
    every = [f"{layer}.*" for layer in range(cfg.n_layers)]
    chosen = parse_heads(heads or every, cfg.n_layers, cfg.n_heads)
    inputs = _inputs(loaded, tokens, text, block, batch, seed)
    scores = ablate_each(loaded, inputs, chosen, method=method, metric=metric, seed=seed)
    _show(scores, output, out)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="folders that a command wrote")],
) -> None:
    """Write report.html into each folder, from the tables in it."""
    from interp.views.report import write_report

    for folder in folders:
        if not folder.is_dir():
            raise AnalysisError(
                f"{folder}: no such folder; a report is made of a folder of results"
            )
    for folder in folders:
        typer.echo(str(write_report(folder)))


@app.command()
def info(model: Model) -> None:
    """A model's shapes, and its parameters by part."""
    from interp.models.loading import checkpoint_folder
    from interp.views.info import describe

    folder = checkpoint_folder(model)
    for line in describe(_model(model, "cpu"), str(folder)):
        typer.echo(line)


def _analysis_command(name: str, meaning: str) -> None:
    @app.command(name, help=meaning, rich_help_panel="Analyses")
    def command(
        model: Model,
        tokens: Tokens = None,
        text: Text = None,
        block: Block = None,
        batch: Batch = 8,
        seed: Seed = 0,
        out: Out = None,
        output: Format = "table",
        device: Device = "cpu",
    ) -> None:
        _check_flags(tokens, text, block, out)
        loaded = _model(model, device)
        from interp.measure import score_heads

        inputs = _inputs(loaded, tokens, text, block, batch, seed)
        _show(score_heads(loaded, name, inputs, seed=seed), output, out)


for _name, _meaning in registry.names().items():
    _analysis_command(_name, _meaning)


def main() -> None:
    """The entry point of the `interp` command."""
    app()


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


def _check_flags(
    tokens: Path | None, text: Path | None, block: str | None, out: Path | None
) -> None:
    given = [
        flag
        for flag, value in (("--tokens", tokens), ("--text", text), ("--block", block))
        if value
    ]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: one source of tokens at a time")
    for path in (tokens, text):
        if path is not None and not path.is_file():
            raise ConfigError(f"{path}: no such file")
    _blocks(block)
    if out is not None:
        nearest = next(path for path in (out, *out.parents) if path.exists())
        if not nearest.is_dir():
            raise ConfigError(f"{nearest} is a file, not a folder for results")


def _blocks(block: str | None) -> list[int] | None:
    if block is None:
        return None
    from interp.config import BLOCK_RULE

    words = [word for word in block.replace(" ", "").split(",") if word]
    if not words or not all(word.isdecimal() for word in words):
        raise ConfigError(f"--block {block}: one number, or several with commas between")
    for word in words:
        if int(word) < 3:
            raise ConfigError(f"--block {word} {BLOCK_RULE}")
    return list(dict.fromkeys(map(int, words)))


def _model(ref: str, device: str) -> "Transformer":
    from interp.models.loading import load_model

    return load_model(ref, device=device)


def _inputs(
    model: "Transformer",
    tokens: Path | None,
    text: Path | None,
    block: str | None,
    batch: int,
    seed: int,
) -> "Inputs":
    from interp.measure import repeated_inputs, text_inputs, token_inputs

    if text is not None:
        return text_inputs(model, text)
    if tokens is None:
        return repeated_inputs(model, _blocks(block), batch, seed)
    from zipfile import BadZipFile

    import numpy as np

    try:
        with tokens.open("rb") as file:
            array = np.load(file, allow_pickle=False)
    except (ValueError, EOFError, BadZipFile):
        raise AnalysisError(f"{tokens}: not an array of numbers in a .npy file") from None
    return token_inputs(model, array)


def _show(scores: "HeadScores", output: str, out: Path | None) -> None:
    from interp.views.terminal import print_scores

    if out is not None:
        from interp.tables import write_text
        from interp.views.report import head_scores_page

        written = scores.save(out)
        page = written[0].with_suffix(".html")
        write_text(page, head_scores_page(scores))
    if output == "csv":
        typer.echo(scores.table.to_csv(index=False), nl=False)
    elif output == "json":
        typer.echo(scores.to_json())
    else:
        print_scores(scores)
        if out is not None:
            typer.echo(f"written: {', '.join(str(path) for path in [*written, page])}", err=True)


if __name__ == "__main__":
    main()
