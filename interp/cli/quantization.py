"""`interp quantize`: what rounding a model's weights and activations costs."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from interp.cli.analysis_command import show_result
from interp.cli.app import app
from interp.cli.options import (
    Batch,
    Block,
    Bos,
    Corpus,
    Device,
    Dtype,
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
from interp.errors import ConfigError

if TYPE_CHECKING:
    from interp.models.transformer import Transformer

ALL = "all"
"""Every scheme that goes with the bits."""


@app.command()
def quantize(
    model: Model,
    scheme: Annotated[
        str,
        typer.Option(
            help="round-to-nearest, llm.int8, smoothquant or awq, several with commas between, or "
            "all that go with the bits"
        ),
    ] = ALL,
    bits: Annotated[
        str,
        typer.Option(
            help="of weights and activations, such as w8a8,w4a16; 16 bits are not rounded"
        ),
    ] = "w8a8",
    weight_scales: Annotated[
        Literal["channel", "tensor", "group"], typer.Option(help="what of the weights has a scale")
    ] = "channel",
    activation_scales: Annotated[
        str, typer.Option(help="what of the activations has a scale: tensor, token or both")
    ] = "tensor,token",
    group_size: Annotated[
        int | None,
        typer.Option(min=2, help="weights of one channel that share a scale, in groups; 64"),
    ] = None,
    affine: Annotated[
        bool, typer.Option("--affine/--symmetric", help="whether scales have a zero point")
    ] = False,
    alpha: Annotated[
        float,
        typer.Option(min=0, max=1, help="how much smoothquant moves from activations to weights"),
    ] = 0.5,
    threshold: Annotated[
        float, typer.Option(min=0, help="an activation of it makes an outlier feature of llm.int8")
    ] = 6.0,
    fold: Annotated[
        Literal["all", "norms"],
        typer.Option(help="smoothquant's scales: into norms alone, or all that can take them"),
    ] = "all",
    magnitude: Annotated[
        float, typer.Option(min=0, help="an activation above it may make its token a sink")
    ] = 100.0,
    ratio: Annotated[
        float, typer.Option(min=0, help="that is also so many times the median of its layer")
    ] = 1000.0,
    tokens: Tokens = None,
    text: Text = None,
    corpus: Corpus = None,
    length: Length = None,
    sequences: Sequences = None,
    block: Block = None,
    batch: Batch = None,
    bos: Bos = None,
    seed: Seed = 0,
    save: Annotated[
        Path | None, typer.Option(help="folder for the model, its weights rounded by one scheme")
    ] = None,
    out: Out = None,
    output: Format = "table",
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """What rounding weights and activations costs, by scheme; changes no model."""
    flags = TokenFlags(tokens, text, corpus, length, sequences, block, batch, bos, seed)
    flags.check()
    check_folder(out)
    schemes = None if scheme.strip() == ALL else _words("--scheme", scheme)
    asked = _words("--bits", bits)
    scales = _words("--activation-scales", activation_scales)
    if group_size is not None and weight_scales != "group":
        raise ConfigError("--group-size is for --weight-scales group")
    if save is not None:
        _check_save(save, out, schemes, asked)
    from interp.quantization.recipes import Recipe, recipes

    chosen = recipes(
        schemes,
        asked,
        weight_scales=weight_scales,
        activation_scales=scales,
        group=Recipe.group if group_size is None else group_size,
        affine=affine,
        alpha=alpha,
        threshold=threshold,
        fold=fold,
    )
    loaded = load_named_model(model, device, dtype=dtype)
    from interp.cli.progress import SweepProgress
    from interp.models.transformer import Transformer
    from interp.quantization import quantize_in, save_quantized
    from interp.views.terminal.quantization import print_quantization

    assert isinstance(loaded, Transformer)  # the native backend makes no other
    inputs = _of_text(flags, loaded).inputs(loaded)
    with SweepProgress("recipes") as progress:
        result = quantize_in(
            loaded, inputs, chosen, magnitude=magnitude, ratio=ratio, seed=seed, progress=progress
        )
    show_result(result, print_quantization, output, out)
    if save is not None:
        typer.echo(f"written: {save_quantized(loaded, inputs, chosen[0], save)}", err=True)


def _of_text(flags: TokenFlags, model: "Transformer") -> TokenFlags:
    """Text for a model that reads it, unless other tokens were asked for: what rounding costs on
    random tokens says little of it."""
    asked = not flags.random or flags.block is not None or flags.batch is not None
    return flags if asked or model.vocabulary is None else replace(flags, corpus="docs")


def _words(flag: str, text: str) -> list[str]:
    words = [word for word in text.replace(" ", "").split(",") if word]
    if not words:
        raise ConfigError(f"{flag}: nothing is named")
    return words


def _check_save(folder: Path, out: Path | None, schemes: list[str] | None, bits: list[str]) -> None:
    """Refuse several ways of rounding for one model, or a folder that holds something."""
    if schemes is None or len(schemes) != 1 or len(bits) != 1:
        raise ConfigError("--save writes one model: name one --scheme and one --bits")
    if schemes == ["llm.int8"]:
        raise ConfigError(
            "--save with llm.int8: which of its weights are rounded depends on each input"
        )
    if out is not None and folder.resolve() in (out.resolve(), *out.resolve().parents):
        raise ConfigError(f"--save {folder} holds --out: a model has a folder of its own")
    from interp.models.new_folder import check_new_folder

    check_new_folder(folder)
