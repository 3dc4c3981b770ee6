"""The typer app, and how a user's mistake ends: one line on standard error, exit code 2."""

import os
import sys
from typing import TYPE_CHECKING

import typer
from typer.core import TyperGroup

from interp.errors import InterpError

if TYPE_CHECKING:
    from typer._click.core import Context

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
            hint = (
                "; --resume continues"
                if ctx.invoked_subcommand in ("train", "run", "phase-change")
                else ""
            )
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
