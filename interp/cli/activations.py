"""Verbs on what is in a model besides attention: its activations, and the weights of its heads."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from interp.errors import AnalysisError, ConfigError

if TYPE_CHECKING:
    from interp.inputs import Inputs
    from interp.models.watch import HookedModel
    from interp.tables import Result

    Shown = tuple[Result, Callable[..., None]]
    """A result and what prints it."""


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
    site: Annotated[
        list[str] | None,
        typer.Option(help="look only there: resid_pre, attn_in, mlp_post, ...; repeatable"),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="cells listed for each layer and site")] = 3,
    magnitude: Annotated[
        float, typer.Option(min=0, help="an activation above it may be massive")
    ] = 100.0,
    ratio: Annotated[
        float, typer.Option(min=0, help="that is also so many times the median of its layer")
    ] = 1000.0,
    deviations: Annotated[
        float,
        typer.Option(min=0, help="standard deviations from the mean above which one is counted"),
    ] = 6.0,
    feature_magnitude: Annotated[
        float, typer.Option(min=0, help="|x| that a dimension reaches to be an outlier feature")
    ] = 6.0,
    feature_layers: Annotated[
        float, typer.Option(min=0, max=1, help="in such a share of the layers")
    ] = 0.25,
    feature_positions: Annotated[
        float, typer.Option(min=0, max=1, help="at such a share of their tokens")
    ] = 0.06,
    sinks: Annotated[
        bool, typer.Option("--sinks", help="also the attention that massive activations draw")
    ] = False,
    effects: Annotated[
        bool, typer.Option("--effects", help="also what changing the massive activations does")
    ] = False,
    draws: Annotated[
        int | None, typer.Option(min=1, help="draws of each random change of --effects; 3")
    ] = None,
    seed: Seed = 0,
    out: Out = None,
    output: Format = "table",
    backend: Backend = "native",
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """The largest activations of every layer and site, the massive ones, and outlier features."""
    flags = TokenFlags(
        tokens, text, corpus, length, sequences, block, batch, bos, seed, exclude_bos
    )
    flags.check()
    check_folder(out)
    if (sinks or effects) and output != "table":
        also = " and ".join(
            name for name, asked in (("--sinks", sinks), ("--effects", effects)) if asked
        )
        raise ConfigError(
            f"--format {output} and {also}: it prints one table; --out writes the tables of all"
        )
    if draws is not None and not effects:
        raise ConfigError("--draws is for --effects")
    from interp.activations import outliers_in
    from interp.activations.criteria import Criteria
    from interp.activations.sites import check_kinds

    check_kinds(site or ())
    criteria = Criteria(
        top, magnitude, ratio, deviations, feature_magnitude, feature_layers, feature_positions
    )
    loaded = load_named_model(model, device, backend, dtype)
    from interp.views.terminal.activations import print_outliers

    inputs = flags.inputs(loaded)
    result = outliers_in(loaded, inputs, seed=seed, sites=site or None, criteria=criteria)
    none = result.summary.get("massive") == 0
    if none or not (sinks or effects):
        show_result(result, print_outliers, output, out)
        if sinks or effects:
            typer.echo("no activation is massive: nothing to link to sinks, or to change", err=True)
        return
    shown: list[Shown] = [(result, print_outliers)]
    rule = {"magnitude": magnitude, "ratio": ratio}
    try:
        if sinks:
            shown.append(_sinks(loaded, inputs, seed, rule))
        if effects:
            shown.append(_effects(loaded, inputs, seed, rule, draws or 3))
    except AnalysisError:
        show_result(result, print_outliers, output, out)  # what was found is not lost
        raise
    _show_several(shown, out)


def _sinks(model: "HookedModel", inputs: "Inputs", seed: int, rule: dict[str, float]) -> "Shown":
    from interp.activations.sinks import outlier_sinks_in
    from interp.views.terminal.outliers import print_outlier_sinks

    return outlier_sinks_in(model, inputs, seed=seed, **rule), print_outlier_sinks


def _effects(
    model: "HookedModel", inputs: "Inputs", seed: int, rule: dict[str, float], draws: int
) -> "Shown":
    from interp.activations.effects import outlier_effects_in
    from interp.cli.progress import SweepProgress
    from interp.views.terminal.outliers import print_outlier_effects

    with SweepProgress("changes") as progress:
        changed = outlier_effects_in(
            model, inputs, seed=seed, **rule, draws=draws, progress=progress
        )
    return changed, print_outlier_effects


def _show_several(shown: "Sequence[Shown]", out: Path | None) -> None:
    """Print several results, each by its function; write their files, and one page of them all."""
    written: list[Path] = []
    if out is not None:
        from interp.views.report import report

        results = [result for result, _ in shown]
        written = [path for result in results for path in result.save(out)]
        written.append(report(results, out / "outliers.html"))
    for place, (result, show) in enumerate(shown):
        if place:
            typer.echo()
        show(result)
    if written:
        typer.echo(f"written: {', '.join(map(str, written))}", err=True)


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
