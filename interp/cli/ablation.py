"""Verbs that take heads away: sweeps of ablations, and their first-order approximation."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

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
from interp.errors import ConfigError

if TYPE_CHECKING:
    from interp.ablation.ablate import Kind, Request
    from interp.models.watch import HookedModel

Metric = Annotated[
    str,
    typer.Option(help="loss, second-copy-loss, last-token, kl, accuracy or logit-diff"),
]
Positions = Annotated[
    str | None,
    typer.Option(
        help="the loss at some places only, such as 10:20,-1: counted from 0 among real tokens, "
        "or backwards from -1"
    ),
]
Answer = Annotated[
    str | None, typer.Option(help="token of logit-diff: its id, or text that is one token")
]
Against = Annotated[str | None, typer.Option(help="the token that --answer is held against")]
Heads = Annotated[
    list[str] | None,
    typer.Option(help="such as 0.1,L5H3,7.*; repeatable; every head unless given"),
]


@app.command()
def ablate(
    model: Model,
    method: Annotated[
        str,
        typer.Option(
            help="zero, mean, resample, patch, pattern-preserving (zero, all patterns kept), or "
            "all: zero, mean and resample side by side"
        ),
    ] = "zero",
    metric: Metric = "loss",
    heads: Heads = None,
    pairs: Annotated[bool, typer.Option("--pairs", help="every pair of the heads")] = False,
    all_but_one: Annotated[
        bool, typer.Option("--all-but-one", help="keep one head of its layer")
    ] = False,
    layers: Annotated[bool, typer.Option("--layers", help="whole layers")] = False,
    cumulative: Annotated[
        bool, typer.Option("--cumulative", help="one more of --heads each time, in their order")
    ] = False,
    site: Annotated[
        Literal["z", "k", "v"], typer.Option(help="z: query heads; k or v: key-value heads")
    ] = "z",
    reference: Annotated[
        str | None,
        typer.Option(
            help="what mean and patch take values from: unrepeated (random tokens as long, the "
            "default; of a --corpus its other windows), repeats, a corpus, or a .npy file of ids"
        ),
    ] = None,
    pooled: Annotated[
        bool, typer.Option("--pooled", help="one mean over all places, not one for each")
    ] = False,
    draws: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="permutations that resample is averaged over: 4"),
    ] = None,
    direct: Annotated[
        bool | None,
        typer.Option(
            "--direct/--no-direct",
            help="also the direct effect on the logits, for about half as much work again; by "
            "default of heads and of layers",
        ),
    ] = None,
    positions: Positions = None,
    answer: Answer = None,
    against: Against = None,
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
    plan: Annotated[
        bool,
        typer.Option("--plan", help="say what it would take, from a timed sample; runs nothing"),
    ] = False,
    out: Out = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on with an interrupted sweep in --out")
    ] = False,
    output: Format = "table",
    backend: Backend = "native",
    device: Device = "cpu",
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option(help="of the matrix products; bfloat16 says how far it strays"),
    ] = "float32",
) -> None:
    """What taking each head away does to the model's loss, or to another metric."""
    flags = TokenFlags(
        tokens, text, corpus, length, sequences, block, batch, bos, seed, exclude_bos
    )
    flags.check()
    check_folder(out)
    kind = _kind(pairs=pairs, all_but_one=all_but_one, layers=layers, cumulative=cumulative)
    if direct and kind not in ("heads", "layers"):
        raise ConfigError(f"--direct and --{kind}: the direct effect is of heads or whole layers")
    if draws is not None and method not in ("resample", "all"):
        raise ConfigError(f"--draws belongs to --method resample, and it is {method}")
    if resume and out is None:
        raise ConfigError("--resume goes on with what is noted in --out: name that folder")
    if plan and resume:
        raise ConfigError("--plan runs nothing: there is nothing to --resume")
    if plan and output == "csv":
        raise ConfigError("--plan has no table: --format json has its numbers")
    from interp.ablation.ablate import Request, check_out

    request = Request(
        method=method,
        metric=metric,
        heads=heads,
        kind=kind,
        site=site,
        reference=reference,
        pooled=pooled,
        draws=4 if draws is None else draws,
        direct=direct is not False,
        positions=places(positions),
        answer=token(answer),
        against=token(against),
        bfloat16=dtype == "bfloat16",
        corpus=corpus,
        prepend_bos=bos,
        exclude_bos=exclude_bos,
        seed=seed,
    )
    request.check()
    if not plan:
        check_out(out, resume=resume)
    loaded = load_named_model(model, device, backend)
    if plan:
        _show_plan(loaded, request, flags, output)
    else:
        _sweep(loaded, request, flags, out, resume=resume, output=output)


def _kind(**given: bool) -> "Kind":
    names = [name.replace("_", "-") for name, on in given.items() if on]
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(f'--{name}' for name in names)}: one kind of sweep")
    return cast("Kind", names[0] if names else "heads")


def places(text: str | None) -> list[int | slice] | None:
    """Places from text such as 10:20,-1."""
    if text is None:
        return None
    found: list[int | slice] = []
    for word in text.replace(" ", "").split(","):
        if not word:
            continue
        try:
            ends = [int(end) if end else None for end in word.split(":")]
        except ValueError:
            ends = []
        if len(ends) == 2:
            found.append(slice(*ends))
        elif len(ends) == 1 and ends[0] is not None:
            found.append(ends[0])
        else:
            raise ConfigError(f"--positions {text}: places and ranges such as 10:20,-1")
    if not found:
        raise ConfigError(f"--positions {text}: no place was named")
    return found


def token(word: str | None) -> int | str | None:
    """An id where it is written as one, else text."""
    return int(word) if word is not None and word.isascii() and word.isdecimal() else word


def _show_plan(model: "HookedModel", request: "Request", flags: TokenFlags, output: str) -> None:
    from interp.ablation.plan import plan_sweep

    inputs = flags.inputs(model)
    chosen = request.chosen(model)
    plan = plan_sweep(model, inputs, request.options(model, inputs), request.kind, chosen)
    typer.echo(plan.to_json() if output == "json" else "\n".join(plan.lines()))


def _sweep(
    model: "HookedModel",
    request: "Request",
    flags: TokenFlags,
    out: Path | None,
    *,
    resume: bool,
    output: str,
) -> None:
    from interp.ablation.ablate import finish, run_sweep
    from interp.ablation.sweep import Sweep
    from interp.cli.progress import SweepProgress

    chosen = request.chosen(model)
    inputs = flags.inputs(model)
    options = request.options(model, inputs)
    with resumable(out), SweepProgress() as progress:
        sweep = Sweep(model, inputs, options, out, resume, progress, request.kind)
        result = run_sweep(sweep, request.kind, chosen)
    from interp.views.terminal.ablation import print_ablation

    show_result(result, print_ablation, output, out)
    finish(sweep, result)


@contextmanager
def resumable(out: Path | None) -> Iterator[None]:
    """An interruption that says how the sweep is gone on with, where it is noted in a folder."""
    try:
        yield
    except KeyboardInterrupt:
        if out is None:
            raise
        raise KeyboardInterrupt(f"--resume --out {out} goes on from here") from None


@app.command()
def importance(
    model: Model,
    metric: Metric = "loss",
    normalize: Annotated[
        bool, typer.Option("--normalize", help="divide by the norm of its layer, as Michel et al.")
    ] = False,
    sample: Annotated[
        int, typer.Option(min=2, help="heads that are ablated, to hold the approximation against")
    ] = 32,
    positions: Positions = None,
    answer: Answer = None,
    against: Against = None,
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
    """Every head's importance by one backward pass: an approximation, beside true ablations."""
    flags = TokenFlags(
        tokens, text, corpus, length, sequences, block, batch, bos, seed, exclude_bos
    )
    flags.check()
    check_folder(out)
    chosen_places, right, wrong = places(positions), token(answer), token(against)
    from interp.ablation.importance import check_differentiable, head_importance
    from interp.ablation.metrics import METRICS
    from interp.ablation.naming import check_metric, named_metric

    check_metric(metric, chosen_places, right, wrong)
    if metric in METRICS:
        check_differentiable(METRICS[metric])
    loaded = load_named_model(model, device, backend)
    from interp.views.terminal.ablation import print_ablation

    inputs = flags.inputs(loaded)
    chosen = named_metric(loaded, metric, positions=chosen_places, answer=right, against=wrong)
    result = head_importance(loaded, inputs, chosen, normalize=normalize, sample=sample, seed=seed)
    show_result(result, print_ablation, output, out)
