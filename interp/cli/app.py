"""The typer app, and how a user's mistake ends: one line on standard error, exit code 2."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from typer.core import TyperGroup

from interp import registry
from interp.cli.analysis_command import add_users_file
from interp.errors import InterpError

if TYPE_CHECKING:
    from typer._click.core import Context

# typer keeps its copy of click to itself.
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]


class _Verbs(TyperGroup):
    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:
        given = bool(args)
        try:
            self._add_users_commands(args)
            return super().parse_args(ctx, args)
        except (InterpError, OSError) as error:
            raise _told(error) from None
        except _UsageError as error:
            if not given:  # typer's way to print the help
                raise
            raise _told(error) from None

    def _add_users_commands(self, args: list[str]) -> None:
        """Make the analyses of the file that --from names commands, before verbs are resolved."""
        analyses = registry.described()
        verbs = self.commands.keys() - analyses.keys()
        # --from is a flag of these alone; the others say themselves that they have none.
        if args and (args[0] not in verbs or args[0] in ("list", "scores")):
            path = _named_file(args[1:])
            if path is not None:
                self.commands.update(add_users_file(path, verbs))

    def invoke(self, ctx: "Context") -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader of a pipe has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except (InterpError, OSError, _UsageError) as error:
            raise _told(error) from None
        except KeyboardInterrupt as stop:
            # A verb that knows better than its name how it goes on says so in the exception.
            told = [str(word) for word in stop.args]
            if ctx.invoked_subcommand in ("train", "run", "phase-change"):
                told = ["--resume continues"]
            typer.echo(f"interp: {'; '.join(['interrupted', *told])}", err=True)
            raise typer.Exit(130) from None


def _named_file(args: list[str]) -> Path | None:
    """What --from names, the last time it is given."""
    named = None
    for place, word in enumerate(args):
        if word == "--":
            break
        if word == "--from" and place + 1 < len(args):
            named = args[place + 1]
        elif word.startswith("--from="):
            named = word.removeprefix("--from=")
    return None if named is None else Path(named)


def _told(error: Exception) -> typer.Exit:
    """Says a mistake in one line on standard error; the exit that follows."""
    if isinstance(error, _UsageError):
        message = error.format_message()
    elif isinstance(error, OSError):
        # Of a file that could not be put in its place, the place is told.
        message = f"{error.filename2 or error.filename or 'file'}: {error.strerror or error}"
    else:
        message = str(error)
    typer.echo(f"interp: {' '.join(message.split())}", err=True)
    return typer.Exit(2)


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Interpretability for multi-head attention: train, score heads, ablate, report.",
)
