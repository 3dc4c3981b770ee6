"""Verbs that measure every head: the analyses, all of them at once, ablation, two models."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from interp import registry
from interp.cli.analysis_command import (
    PANEL,
    analysis_command,
    command_help,
    faults_of,
)
from interp.cli.app import app
from interp.cli.options import (
    Backend,
    Batch,
    BatchOfEach,
    Block,
    Bos,
    CommonText,
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
    block_lengths,
    check_folder,
    load_named_model,
)
from interp.errors import AnalysisError

if TYPE_CHECKING:
    from interp.comparison import Comparison
    from interp.data.drawing import Drawing
    from interp.models.watch import HookedModel
    from interp.registry import Analysis
    from interp.tables import HeadScores


@app.command("list")
def list_analyses(source: From = None) -> None:
    """Every analysis with its one-line meaning."""
    meanings = registry.names()
    width = max(map(len, meanings))
    for name, meaning in meanings.items():
        typer.echo(f"{name:<{width}}  {meaning}".rstrip())


@app.command("scores")
def all_scores(
    model: Model,
    only: Annotated[
        list[str] | None, typer.Option(help="such as induction,sinks; every analysis unless given")
    ] = None,
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
    """Every analysis of every head, by as few passes as their tokens allow."""
    flags = TokenFlags(
        tokens, text, corpus, length, sequences, block, batch, bos, seed, exclude_bos
    )
    flags.check()
    check_folder(out)
    names = _named(only)
    refused: dict[str, str] = {}
    with faults_of(source):
        if source is not None:
            for name in names:
                registry.get(name)  # a file that fails is told before a model is read
        loaded = load_named_model(model, device, backend, dtype)
        start = time.perf_counter()
        scores = _score_all(loaded, [registry.get(name) for name in names], flags, refused)
        seconds = time.perf_counter() - start
    if not scores:
        by_reason: dict[str, list[str]] = {}
        for name, reason in refused.items():
            by_reason.setdefault(reason, []).append(name)
        reasons = "; ".join(f"{', '.join(own)}: {reason}" for reason, own in by_reason.items())
        raise AnalysisError(f"nothing could be measured: {reasons}")
    _show_all(scores, output, out)
    for name, reason in refused.items():
        typer.echo(f"left out: {name}: {reason}", err=True)
    number = f"{len(scores)} analys{'is' if len(scores) == 1 else 'es'}"
    typer.echo(f"{number} of {len(scores[0].table)} heads in {seconds:.1f} s", err=True)


def _named(only: list[str] | None) -> list[str]:
    """The analyses asked for, each once.

    Raises: AnalysisError for an unknown one, or none at all.
    """
    known = registry.names()
    if only is None:
        return list(known)
    words = [word for word in ",".join(only).replace(" ", "").split(",") if word]
    if not words:
        raise AnalysisError("--only: no analysis was named")
    for word in words:
        if word not in known:
            registry.get(word)  # says which are near
    return list(dict.fromkeys(words))


def _score_all(
    model: "HookedModel",
    analyses: "list[Analysis]",
    flags: TokenFlags,
    refused: dict[str, str],
) -> "list[HeadScores]":
    """The scores in the order of the analyses, by one pass for each kind of tokens.

    Random tokens are those that each analysis is defined on; given ones are the same for all. An
    analysis that cannot be measured on them is left out, and its reason put into `refused`.
    """
    from interp.data.drawing import REPEATED
    from interp.measure import score_together

    by_drawing: dict[Drawing, list[Analysis]] = {}
    for analysis in analyses:
        drawing = (analysis.drawing or REPEATED) if flags.random else REPEATED
        by_drawing.setdefault(drawing, []).append(analysis)
    found = {}
    for drawing, group in by_drawing.items():
        try:
            inputs = flags.inputs(model, drawing)
        except AnalysisError as error:
            if len(by_drawing) == 1:
                raise
            refused |= {analysis.name: str(error) for analysis in group}
            continue
        for scores in score_together(model, group, inputs, seed=flags.seed, refused=refused):
            found[scores.analysis] = scores
    return [found[analysis.name] for analysis in analyses if analysis.name in found]


def _show_all(scores: "list[HeadScores]", output: str, out: Path | None) -> None:
    if out is not None:
        from interp.views.report import report

        written = [path for one in scores for path in one.save(out)]
        written.append(report(scores, out / "scores.html"))
    if output == "csv":
        joined = scores[0].table[["layer", "head"]].copy()
        for one in scores:
            joined[one.score] = one.table[one.score]
        typer.echo(joined.to_csv(index=False), nl=False)
    elif output == "json":
        typer.echo(f"[{', '.join(one.to_json() for one in scores)}]")
    else:
        from interp.views.terminal.scores import print_all_scores

        print_all_scores(scores)
        if out is not None:
            typer.echo(f"written: {', '.join(map(str, written))}", err=True)


@app.command()
def compare(
    first: Model,
    second: Model,
    tokens: Tokens = None,
    text: CommonText = None,
    corpus: Corpus = None,
    length: Length = None,
    sequences: Sequences = None,
    block: Block = None,
    batch: BatchOfEach = 8,
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
    TokenFlags(tokens, text, corpus, length, sequences, block, bos=bos).check()
    check_folder(out)
    from interp.data.token_file import token_file

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
        corpus=corpus,
        length=length,
        sequences=sequences,
        blocks=block_lengths(block),
        batch=batch,
        seed=seed,
        prepend_bos=bos,
    )
    _show_comparison(comparison, output, out)


for _description in registry.described().values():
    app.command(_description.name, help=command_help(_description), rich_help_panel=PANEL)(
        analysis_command(_description)
    )


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
        from interp.views.terminal.scores import print_comparison

        print_comparison(comparison)
        if out is not None:
            typer.echo(f"written: {', '.join(str(path) for path in [*written, page])}", err=True)
