"""Verbs about one model as a whole: its shapes, the proof of its hooks, its export."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from interp.cli.app import app
from interp.cli.options import (
    Backend,
    Device,
    Dtype,
    Format,
    Model,
    Out,
    Seed,
    check_folder,
    load_named_model,
)
from interp.errors import ConfigError


@app.command()
def info(
    model: Model, backend: Backend = "native", device: Device = "cpu", dtype: Dtype = "float32"
) -> None:
    """A model's shapes, its parameters by part, and its KV cache."""
    loaded = load_named_model(model, device, backend, dtype)
    from interp.views.terminal.info import describe

    for line in describe(loaded):
        typer.echo(line)


@app.command()
def kv_cache(
    model: Annotated[
        str | None,
        typer.Argument(
            help="a published model (--list), a config.json, or any MODEL of the other verbs"
        ),
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="tokens of each sequence")] = 4096,
    batch: Annotated[int, typer.Option(min=1, help="sequences")] = 1,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16", "float8", "int8", "int4"],
        typer.Option(help="of the cache"),
    ] = "float16",
    every: Annotated[bool, typer.Option("--list", help="every model of the table")] = False,
    output: Format = "table",
) -> None:
    """What a KV cache takes, beside that of MHA, from a model's sizes alone."""
    from interp.arithmetic.known import known_shapes
    from interp.arithmetic.lookup import shape_of
    from interp.tables import strict_json
    from interp.views.terminal.arithmetic import cache_lines, cache_record

    if (model is None) != every:
        raise ConfigError("kv-cache takes a MODEL, or --list for those of the table")
    shapes = list(known_shapes().values()) if model is None else [shape_of(model)]
    records = [cache_record(shape, context, batch, dtype) for shape in shapes]
    if output == "json":
        typer.echo(strict_json(records if every else records[0]))
    elif output == "csv" or every:
        import pandas as pd

        flat = pd.json_normalize(records)
        text = flat.to_csv(index=False) if output == "csv" else flat.to_string(index=False)
        typer.echo(text, nl=output != "csv")
    else:
        for line in cache_lines(shapes[0], context, batch, dtype):
            typer.echo(line)


@app.command()
def doctor(
    model: Model,
    backend: Backend = "native",
    device: Device = "cpu",
    dtype: Dtype = "float32",
    seed: Seed = 0,
    out: Out = None,
    output: Format = "table",
) -> None:
    """Check the identities of a model's hooks; exit code 1 where one fails."""
    check_folder(out)
    loaded = load_named_model(model, device, backend, dtype)
    from interp.doctor import doctor as examine
    from interp.views.terminal.scores import print_diagnosis

    diagnosis = examine(loaded, seed=seed)
    written = [] if out is None else diagnosis.save(out)
    if output == "csv":
        typer.echo(diagnosis.table.to_csv(index=False), nl=False)
    elif output == "json":
        typer.echo(diagnosis.to_json())
    else:
        print_diagnosis(diagnosis)
        if written:
            typer.echo(f"written: {', '.join(map(str, written))}", err=True)
    if not diagnosis.healthy:
        raise typer.Exit(1)


@app.command()
def export(
    model: Model,
    folder: Annotated[Path, typer.Argument(help="new folder for the Hugging Face model")],
) -> None:
    """Write a model of GPT-2 or Llama shape as a Hugging Face folder."""
    loaded = load_named_model(model, "cpu")
    from interp.models.pretrained import save_pretrained, zero_heads_note
    from interp.models.transformer import Transformer

    assert isinstance(loaded, Transformer)  # the native backend
    typer.echo(str(save_pretrained(loaded, folder)))
    if note := zero_heads_note(loaded.config):
        typer.echo(note, err=True)
