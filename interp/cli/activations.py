"""Verbs on what is in a model besides attention: its activations, and the weights of its heads."""

from typing import Annotated

import typer

from interp.cli.analysis_command import show_result
from interp.cli.app import app
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


@app.command()
def outliers(
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
    top: Annotated[int, typer.Option(min=1, help="cells listed for each layer")] = 8,
    magnitude: Annotated[
        float, typer.Option(min=0, help="an activation above it may be massive")
    ] = 100.0,
    ratio: Annotated[
        float, typer.Option(min=0, help="that is also so many times the median of its layer")
    ] = 1000.0,
    seed: Seed = 0,
    out: Out = None,
    output: Format = "table",
    backend: Backend = "native",
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """The largest activations of the residual stream, layer by layer, and the massive ones."""
    flags = TokenFlags(
        tokens, text, corpus, length, sequences, block, batch, bos, seed, exclude_bos
    )
    flags.check()
    check_folder(out)
    loaded = load_named_model(model, device, backend, dtype)
    from interp.activations import outliers_in
    from interp.views.terminal.activations import print_outliers

    inputs = flags.inputs(loaded)
    result = outliers_in(loaded, inputs, seed=seed, top=top, magnitude=magnitude, ratio=ratio)
    show_result(result, print_outliers, output, out)


@app.command()
def composition(
    model: Model,
    fold: Annotated[
        bool, typer.Option("--fold", help="fold the norms' gains into the weights first")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="seed of the random heads of the null")] = 0,
    out: Out = None,
    output: Format = "table",
    device: Device = "cpu",
) -> None:
    """How much later heads read what earlier ones write, by their weights alone."""
    check_folder(out)
    loaded = load_named_model(model, device)
    from interp.composing import composition as compose
    from interp.models.folding import fold_layer_norm
    from interp.models.transformer import Transformer
    from interp.views.terminal.activations import print_composition

    assert isinstance(loaded, Transformer)  # the native backend was asked for
    result = compose(fold_layer_norm(loaded) if fold else loaded, seed=seed)
    show_result(result, print_composition, output, out)
