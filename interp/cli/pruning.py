"""`interp prune`: which heads a model can do without, and the model without them."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interp.cli.ablation import Heads, Metric
from interp.cli.analysis_command import show_result
from interp.cli.app import app
from interp.cli.options import (
    Backend,
    Batch,
    Block,
    Bos,
    Corpus,
    Device,
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
from interp.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from interp.ablation.interventions import Head
    from interp.inputs import Inputs
    from interp.models.transformer import Transformer

MODEL = "model"
"""The folder of the pruned model inside --out."""


@app.command()
def prune(
    model: Model,
    heads: Heads = None,
    order: Annotated[
        str | None,
        typer.Option(
            help="remove the first of this order: oracle, importance, importance-again, random or "
            "magnitude"
        ),
    ] = None,
    share: Annotated[
        float | None, typer.Option(help="how much of the heads --order removes, such as 0.3")
    ] = None,
    step: Annotated[
        float | None, typer.Option(help="share of the heads between points of the curves: 0.1")
    ] = None,
    metric: Metric = "loss",
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
) -> None:
    """What heads can be removed: curves; with --heads or --order and --share, the smaller model."""
    flags = TokenFlags(
        tokens, text, corpus, length, sequences, block, batch, bos, seed, exclude_bos
    )
    flags.check()
    check_folder(out)
    if backend == "bridge":
        raise ModelError(
            "pruning needs the native backend: the weights of a bridged model stay in another "
            "library"
        )
    writes = heads is not None or order is not None or share is not None
    if writes:
        _check_removal(heads, order, share, step, metric, out, output)
    from interp.ablation.naming import check_heads, check_metric

    if heads is not None:
        check_heads(heads)
    if metric == "logit-diff":
        raise ConfigError(
            "--metric logit-diff needs the answers of each sequence: use interp.ablate"
        )
    check_metric(metric)
    if order is not None:
        from interp.ablation.pruning import check_order

        check_order(order)
    loaded = load_named_model(model, device)
    from interp.models.transformer import Transformer

    assert isinstance(loaded, Transformer)  # the native backend makes no other
    inputs = flags.inputs(loaded)
    if not writes:
        _curves(loaded, inputs, metric, 0.1 if step is None else step, seed, output, out)
        return
    assert out is not None
    from interp.ablation.naming import named_heads
    from interp.ablation.removal import remove_heads
    from interp.models.loading import save_folder

    if heads is not None:
        chosen = named_heads(loaded, heads)
    else:
        assert order is not None
        assert share is not None
        chosen, inputs = _first_of(loaded, inputs, order, share, metric, seed)
    removal = remove_heads(loaded, inputs, chosen)
    folder = save_folder(removal.model, out / MODEL)
    if output == "json":
        typer.echo(removal.to_json())
        return
    typer.echo("\n".join(removal.lines()))
    if order is not None:
        typer.echo(f"heads ranked by {order} on one half of the sequences, losses of the other")
    typer.echo(f"written: {folder}", err=True)


def _check_removal(
    heads: list[str] | None,
    order: str | None,
    share: float | None,
    step: float | None,
    metric: str,
    out: Path | None,
    output: str,
) -> None:
    """Refuse a removal that cannot be."""
    if heads is not None and (order is not None or share is not None):
        raise ConfigError("--heads names what is removed: --order and --share do so otherwise")
    if heads is None and (order is None or share is None):
        raise ConfigError("--order and --share go together, such as --order importance --share 0.3")
    if share is not None and not 0 < share < 1:
        raise ConfigError(f"--share {share:g}: more than 0 and less than 1")
    if step is not None:
        raise ConfigError("--step is of the curves, which are drawn without --heads and --order")
    if heads is not None and metric != "loss":
        raise ConfigError("--metric ranks heads, and --heads names them")
    if output == "csv":
        raise ConfigError("a pruned model has no table: --format json has its numbers")
    if out is None:
        raise ConfigError("the pruned model is written into --out: name a folder")
    from interp.models.new_folder import check_new_folder

    check_new_folder(out / MODEL)


def _first_of(
    model: "Transformer", inputs: "Inputs", order: str, share: float, metric: str, seed: int
) -> "tuple[list[Head], Inputs]":
    """The heads that an order lets go first, as many as make up a share of all.

    They are ranked on one half of the sequences; the other half comes back with them.
    """
    from interp.ablation.metrics import METRICS
    from interp.ablation.pruning import halves, removal_order

    ranked, told = halves(inputs, METRICS[metric])
    ordered = removal_order(model, ranked.inputs, order, metric=METRICS[metric], seed=seed)
    number = round(share * len(ordered))
    if not number:
        raise ConfigError(f"--share {share:g} of {len(ordered)} heads is less than one head")
    # The line of losses should not claim the sequences that ranked the heads.
    half = f"one half of {told.inputs.description}"
    return ordered[:number], replace(told.inputs, description=half)


def _curves(
    model: "Transformer",
    inputs: "Inputs",
    metric: str,
    step: float,
    seed: int,
    output: str,
    out: Path | None,
) -> None:
    from interp.ablation.metrics import METRICS
    from interp.ablation.pruning import prune_curves
    from interp.cli.progress import SweepProgress
    from interp.views.terminal.ablation import print_ablation

    with SweepProgress() as progress:
        curves = prune_curves(
            model, inputs, metric=METRICS[metric], step=step, seed=seed, progress=progress
        )
    show_result(curves, print_ablation, output, out)
