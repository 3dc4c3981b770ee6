"""Verbs that measure every head: the analyses, ablation, and comparing two models."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from interp import registry
from interp.cli.app import app
from interp.cli.options import (
    Backend,
    Batch,
    Block,
    Bos,
    CommonText,
    Device,
    Dtype,
    Format,
    Model,
    Out,
    Seed,
    Text,
    Tokens,
    block_lengths,
    check_flags,
    load_named_model,
    make_inputs,
    token_file,
)

if TYPE_CHECKING:
    from interp.comparison import Comparison
    from interp.tables import HeadScores


@app.command("list")
def list_analyses() -> None:
    """Every analysis with its one-line meaning."""
    meanings = registry.names()
    width = max(map(len, meanings))
    for name, meaning in meanings.items():
        typer.echo(f"{name:<{width}}  {meaning}")


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
    bos: Bos = None,
    seed: Seed = 0,
    out: Out = None,
    output: Format = "table",
    backend: Backend = "native",
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """What taking each head away does to the model's loss."""
    check_flags(tokens, text, block, out, bos)
    from interp.ablation.sweep import ablate_each, check_method
    from interp.tables import parse_heads

    check_method(method, metric)
    loaded = load_named_model(model, device, backend, dtype)

    cfg = loaded.cfg
    every = [f"{layer}.*" for layer in range(cfg.n_layers)]
    chosen = parse_heads(heads or every, cfg.n_layers, cfg.n_heads)
    inputs = make_inputs(loaded, tokens, text, block, batch, seed, bos)
    scores = ablate_each(loaded, inputs, chosen, method=method, metric=metric, seed=seed)
    _show(scores, output, out)


@app.command()
def compare(
    first: Model,
    second: Model,
    tokens: Tokens = None,
    text: CommonText = None,
    block: Block = None,
    batch: Batch = 8,
    bos: Bos = None,
    seed: Seed = 0,
    out: Out = None,
    output: Format = "table",
    backend: Backend = "native",
    backend_b: Annotated[
        Literal["native", "bridge"] | None,
        typer.Option(help="of the second model, where it is not --backend"),
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """Every head analysis on the same tokens of two models, side by side."""
    check_flags(tokens, text, block, out, bos)
    given = None if tokens is None else token_file(tokens)
    models = (
        load_named_model(first, device, backend, dtype),
        load_named_model(second, device, backend_b or backend, dtype),
    )
    from interp.comparison import compare as compare_models

    comparison = compare_models(
        *models,
        given,
        text=text,
        blocks=block_lengths(block),
        batch=batch,
        seed=seed,
        prepend_bos=bos,
    )
    _show_comparison(comparison, output, out)


def _analysis_command(name: str, meaning: str) -> None:
    @app.command(name, help=meaning, rich_help_panel="Analyses")
    def command(
        model: Model,
        tokens: Tokens = None,
        text: Text = None,
        block: Block = None,
        batch: Batch = 8,
        bos: Bos = None,
        seed: Seed = 0,
        out: Out = None,
        output: Format = "table",
        backend: Backend = "native",
        device: Device = "cpu",
        dtype: Dtype = "float32",
    ) -> None:
        check_flags(tokens, text, block, out, bos)
        loaded = load_named_model(model, device, backend, dtype)
        from interp.measure import score_heads

        inputs = make_inputs(loaded, tokens, text, block, batch, seed, bos)
        _show(score_heads(loaded, name, inputs, seed=seed), output, out)


for _name, _meaning in registry.names().items():
    _analysis_command(_name, _meaning)


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


def _show_comparison(comparison: "Comparison", output: str, out: Path | None) -> None:
    if out is not None:
        from interp.tables import write_text
        from interp.views.report import comparison_page

        written = comparison.save(out)
        page = out / "compare.html"
        write_text(page, comparison_page(comparison))
    if output == "csv":
        typer.echo(comparison.table.to_csv(index=False), nl=False)
    elif output == "json":
        typer.echo(comparison.to_json())
    else:
        from interp.views.terminal import print_comparison

        print_comparison(comparison)
        if out is not None:
            typer.echo(f"written: {', '.join(str(path) for path in [*written, page])}", err=True)
