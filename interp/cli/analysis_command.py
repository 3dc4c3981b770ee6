"""The command of one analysis: its flags are read from the text of its file, which is not run.

It serves the analyses of the package and those in a user's own file alike.
"""

import inspect
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp import registry
from interp.cli.options import (
    Backend,
    Batch,
    Block,
    Bos,
    Corpus,
    Device,
    Dtype,
    ExcludeBos,
    Format,
    From,
    Length,
    Model,
    Out,
    Seed,
    Sequences,
    Text,
    TokenFlags,
    Tokens,
    check_folder,
    load_named_model,
)
from interp.errors import AnalysisError, ConfigError, InterpError
from interp.registry import Description, Parameter

if TYPE_CHECKING:
    from interp.tables import Result

PANEL = "Analyses"


def analysis_command(description: Description, *, users: bool = False) -> Callable[..., None]:
    """The function of an analysis's command, with a flag for each of its parameters.

    `users` says that it stands in a file of the user's, which --from names.

    Raises: AnalysisError for a parameter whose flag every analysis has already.
    """
    parameters = {parameter.name: parameter for parameter in description.parameters}
    template = inspect.signature(_score).parameters.values()
    shared = [parameter for parameter in template if parameter.name not in ("description", "own")]
    if not users:
        shared = [parameter for parameter in shared if parameter.name != "source"]
    # `interp.analyze` has some of these words under other names.
    taken = {parameter.name for parameter in shared} | {
        *("from", "format", "help", "name", "blocks", "prepend_bos", "attention_mask")
    }
    for name in parameters:
        if name in taken:
            raise AnalysisError(
                f"{description.path}: the parameter {name!r} of {description.name} is the name of "
                "something that every analysis has; rename it"
            )

    def command(**given: Any) -> None:
        own = {name: given.pop(name) for name in parameters}
        for name, value in own.items():
            if value != value:
                raise ConfigError(f"{parameters[name].flag} {value}: not a number")
        _score(description, own, **given)

    flags = [_flag(parameter) for parameter in parameters.values()]
    every = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*shared, *flags)
    ]
    # typer reads a command's flags from its signature.
    command.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
    return command


def _flag(parameter: Parameter) -> inspect.Parameter:
    name = (
        f"{parameter.flag}/--no-{parameter.flag[2:]}" if parameter.type is bool else parameter.flag
    )
    option = typer.Option(
        name, help=_literal(parameter.meaning), rich_help_panel="Parameters of this analysis"
    )
    return inspect.Parameter(
        parameter.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=parameter.default,
        annotation=Annotated[parameter.type, option],
    )


def command_help(description: Description) -> str:
    """The line that says what an analysis is."""
    return _literal(description.meaning or f"An analysis in {description.path.name}.")


def _literal(words: str) -> str:
    return words.replace("[", "\\[")  # rich would take it for a style


def _score(
    description: Description,
    own: Mapping[str, object],
    model: Model,
    tokens: Tokens = None,
    text: Text = None,
    corpus: Corpus = None,
    length: Length = None,
    sequences: Sequences = None,
    block: Block = None,
    batch: Batch = None,
    bos: Bos = None,
    exclude_bos: ExcludeBos = False,
    seed: Seed = 0,
    out: Out = None,
    output: Format = "table",
    backend: Backend = "native",
    device: Device = "cpu",
    dtype: Dtype = "float32",
    source: From = None,
) -> None:
    flags = TokenFlags(
        tokens, text, corpus, length, sequences, block, batch, bos, seed, exclude_bos
    )
    flags.check()
    check_folder(out)
    with faults_of(source):
        if source is not None:
            registry.get(description.name)  # a file that fails is told before a model is read
        loaded = load_named_model(model, device, backend, dtype)
        from interp.measure import score_heads

        analysis = registry.get(description.name).with_params(own)
        inputs = flags.inputs(loaded, analysis.drawing)
        scores = score_heads(loaded, analysis, inputs, seed=seed)
    from interp.views.terminal.scores import print_scores

    show_result(scores, print_scores, output, out)


def add_users_file(path: Path, reserved: Collection[str]) -> dict[str, typer.core.TyperCommand]:
    """The commands of a user's own file by name; none may have a name of `reserved`.

    Raises: AnalysisError as `registry.add_file` and `analysis_command` do.
    """
    commands = {}
    for name in registry.add_file(path, reserved):
        description = registry.described()[name]
        alone = typer.Typer(add_completion=False)
        function = analysis_command(description, users=True)
        alone.command(name, help=command_help(description), rich_help_panel=PANEL)(function)
        command = typer.main.get_command(alone)
        assert isinstance(command, typer.core.TyperCommand)  # an app of one command is that one
        commands[name] = command
    return commands


@contextmanager
def faults_of(path: Path | None) -> Iterator[None]:
    """Whatever a user's own file raises, as one line with its place; other faults stay as they are.

    Raises: AnalysisError in place of an exception that passed through the file.
    """
    try:
        yield
    except InterpError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        # Both may go through a link, or hold `..`.
        own = None if path is None else path.resolve()
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == own]
        if not lines:
            raise
        raise AnalysisError(f"{path}:{lines[-1]}: {type(error).__name__}: {error}") from error


def show_result(result: "Result", show: Callable[..., None], output: str, out: Path | None) -> None:
    """Print a table, by `show` unless --format says otherwise, and write it into a folder."""
    written: list[Path] = []
    if out is not None:
        from interp.tables import write_text
        from interp.views.report import result_page

        written = result.save(out)
        page = written[0].with_suffix(".html")
        write_text(page, result_page(result))
        written.append(page)
    if output == "csv":
        typer.echo(result.table.to_csv(index=False), nl=False)
    elif output == "json":
        typer.echo(result.to_json())
    else:
        show(result)
        if written:
            typer.echo(f"written: {', '.join(map(str, written))}", err=True)
