"""`interp.ablate`: from tokens, or what stands for them, to a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from interp.ablation.interventions import Head, Site
from interp.ablation.journal import check_unfinished
from interp.ablation.measuring import Progress
from interp.ablation.methods import check_method
from interp.ablation.naming import (
    HeadsLike,
    MetricLike,
    Positions,
    check_heads,
    check_metric,
    check_reference,
    named_heads,
    named_metric,
    reference_inputs,
)
from interp.ablation.sweep import JOURNAL, Options, Sweep
from interp.ablation.sweep_tables import (
    ablate_all_but_one,
    ablate_cumulatively,
    ablate_heads,
    ablate_layers,
    ablate_pairs,
)
from interp.errors import AnalysisError
from interp.inputs import Inputs, without_bos
from interp.models.watch import HookedModel, as_hooked
from interp.tables import HeadScores, SetScores
from interp.text_inputs import inputs_from

Kind = Literal["heads", "pairs", "all-but-one", "layers", "cumulative"]
KINDS: tuple[Kind, ...] = ("heads", "pairs", "all-but-one", "layers", "cumulative")


def ablate(
    model: object,
    tokens: object = None,
    *,
    attention_mask: Tensor | None = None,
    method: str = "zero",
    metric: MetricLike = "loss",
    heads: HeadsLike | None = None,
    kind: Kind = "heads",
    site: Site = "z",
    reference: object = None,
    pooled: bool = False,
    draws: int = 4,
    direct: bool = True,
    positions: Positions | None = None,
    answer: object = None,
    against: object = None,
    blocks: Sequence[int] | None = None,
    batch: int | None = None,
    corpus: str | None = None,
    length: int | None = None,
    sequences: int | None = None,
    prepend_bos: bool | None = None,
    exclude_bos: bool = False,
    dtype: Literal["float32", "bfloat16"] = "float32",
    seed: int = 0,
    out: Path | str | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> HeadScores | SetScores:
    """What taking heads away does to a model: a table with paired differences and their errors.

    `model` is ours or bridged, or a raw `TransformerBridge`. `tokens` are ids `[batch, pos]` or
    text; without them repeated random tokens are drawn (`blocks`, `batch`, `seed`), or windows of a
    `corpus` taken, as `interp.analyze` does. Heads are pairs, or text such as `"5.1, 7.*"`; all of
    them unless named.

    `method`: `zero`, `mean` (over `reference`, at each place or `pooled`), `resample` (the values
    of another of the sequences, averaged over `draws` permutations without fixed points), `patch`
    (those of the `reference` tokens, sequence for sequence), `pattern-preserving` (zero, while all
    patterns stay what they were), or `all`: zero, mean and resample side by side. `reference` is
    `"unrepeated"` (random tokens of the same lengths, the default; of a corpus its other windows),
    `"repeats"`, a corpus, a .npy file of ids, or tokens.

    `metric`: `loss`, `second-copy-loss`, `last-token`, `kl`, `accuracy`, `logit-diff` (of the
    tokens `answer` and `against`, after the last token), a `Metric`, or your own function of logits
    `[batch, pos, d_vocab]` and the batch. `positions` takes the loss at some places only, counted
    among the real tokens from 0, or from -1 backwards: the place that predicts.

    `kind`: `heads` one at a time, all `pairs`, `all-but-one` of a layer, whole `layers`, or
    `cumulative` in the order of `heads`. `site` is `z` for query heads, `k` or `v` for key-value
    heads. `direct` also tells the effect of the head's own contribution to the logits, for about
    half as much work again. With `bfloat16` the matrix products are, and the summary says how far
    that strays. With `out`, what is measured is noted there as it comes, and `resume` goes on.

    Raises: AnalysisError for an unknown or impossible option, or a metric that is not finite;
    ShapeError for tokens or heads that do not fit the model; ModelError for what is no such model.
    """
    request = Request(
        method=method,
        metric=metric,
        heads=heads,
        kind=kind,
        site=site,
        reference=reference,
        pooled=pooled,
        draws=draws,
        direct=direct,
        positions=positions,
        answer=answer,
        against=against,
        bfloat16=dtype == "bfloat16",
        corpus=corpus,
        prepend_bos=prepend_bos,
        exclude_bos=exclude_bos,
        seed=seed,
    )
    request.check()
    folder = None if out is None else Path(out)
    check_out(folder, resume=resume)
    model = as_hooked(model)
    inputs = inputs_from(
        model,
        tokens,
        attention_mask=attention_mask,
        blocks=blocks,
        batch=batch,
        corpus=corpus,
        length=length,
        sequences=sequences,
        prepend_bos=prepend_bos,
        exclude_bos=exclude_bos,
        seed=seed,
    )
    chosen = request.chosen(model)
    options = request.options(model, inputs)
    sweep = Sweep(model, inputs, options, folder, resume, progress, kind)
    result = run_sweep(sweep, kind, chosen)
    if folder is not None:
        result.save(folder)
    finish(sweep, result)
    return result


@dataclass(frozen=True)
class Request:
    """What is asked of a sweep in words, before there is a model. `ablate` says what they mean."""

    method: str = "zero"
    metric: MetricLike = "loss"
    heads: HeadsLike | None = None
    kind: Kind = "heads"
    site: Site = "z"
    reference: object = None
    pooled: bool = False
    draws: int = 4
    direct: bool = True
    positions: Positions | None = None
    answer: object = None
    against: object = None
    bfloat16: bool = False
    corpus: str | None = None
    """Where the sequences come from, and whether BOS leads them, as of `inputs_from`."""
    prepend_bos: bool | None = None
    exclude_bos: bool = False
    seed: int = 0

    def check(self) -> None:
        """Refuse what can be told without a model.

        Raises: AnalysisError for an unknown or impossible option; ShapeError for heads that are
        written otherwise; ConfigError for a reference that is not there.
        """
        check_method(self.method)
        Options(method=self.method, site=self.site).check()
        if self.kind not in KINDS:
            raise AnalysisError(f"no kind of sweep {self.kind!r}; known: {', '.join(KINDS)}")
        if self.kind == "layers" and self.heads is not None:
            raise AnalysisError("layers are ablated whole: no heads are named")
        if self.kind == "cumulative" and self.heads is None:
            raise AnalysisError("a cumulative sweep needs heads, in the order of their removal")
        if self.heads is not None:
            check_heads(self.heads, self.site)
        check_metric(self.metric, self.positions, self.answer, self.against)
        if self.draws < 1:
            raise AnalysisError(f"draws = {self.draws}: at least one permutation is needed")
        if self.pooled and self.method not in ("mean", "all"):
            raise AnalysisError(f"{self.method} has no mean to pool: mean has")
        if self.reference is None:
            return
        if not self.has_reference:
            raise AnalysisError(f"{self.method} has no reference: mean and patch do")
        if isinstance(self.reference, str | Path):
            check_reference(self.reference)

    @property
    def has_reference(self) -> bool:
        """Whether the method replaces heads by something of a reference."""
        return self.method in ("mean", "patch", "all")

    def chosen(self, model: HookedModel) -> list[Head] | None:
        """The heads that are named; None for every one.

        Raises: ShapeError for a head that the model does not have.
        """
        return None if self.heads is None else named_heads(model, self.heads, self.site)

    def options(self, model: HookedModel, inputs: Inputs) -> Options:
        """How a sweep of these sequences takes heads away, and what it reads.

        Raises: AnalysisError, ConfigError or ShapeError for what does not fit the model.
        """
        stand_in = None
        if self.has_reference:
            stand_in = reference_inputs(
                model,
                self.reference,
                inputs,
                # A patch stands in sequence for sequence: other windows are not as many.
                corpus=None if self.method == "patch" else self.corpus,
                prepend_bos=self.prepend_bos,
                seed=self.seed,
            )
            if self.exclude_bos:
                stand_in = without_bos(model, stand_in)
        metric = named_metric(
            model,
            self.metric,
            positions=self.positions,
            answer=self.answer,
            against=self.against,
        )
        return Options(
            method=self.method,
            metric=metric,
            site=self.site,
            reference=stand_in,
            pooled=self.pooled,
            draws=self.draws,
            seed=self.seed,
            direct=self.direct,
            bfloat16=self.bfloat16,
        )


def check_out(out: Path | None, *, resume: bool) -> None:
    """Refuse a folder in which a sweep cannot begin, or nothing to go on with.

    Raises: AnalysisError for `resume` without a folder, or another sweep's unfinished work.
    """
    if out is not None:
        check_unfinished(out / JOURNAL, resume=resume)
    elif resume:
        raise AnalysisError("resume goes on with what is noted in --out: name that folder")


def finish(sweep: Sweep, result: HeadScores | SetScores) -> None:
    """The results are written: take the journal away, unless some ablation is to be tried again."""
    if "failed" not in result.summary:
        sweep.close()


def run_sweep(sweep: Sweep, kind: Kind, heads: Sequence[Head] | None) -> HeadScores | SetScores:
    """The table of one kind of sweep.

    Raises: AnalysisError for an unknown kind, or one that these heads do not make.
    """
    if kind == "heads":
        return ablate_heads(sweep, heads)
    if kind == "pairs":
        return ablate_pairs(sweep, heads)
    if kind == "all-but-one":
        return ablate_all_but_one(sweep, heads)
    if kind == "layers":
        if heads is not None:
            raise AnalysisError("layers are ablated whole: no heads are named")
        return ablate_layers(sweep)
    if kind == "cumulative":
        if heads is None:
            raise AnalysisError("a cumulative sweep needs heads, in the order of their removal")
        return ablate_cumulatively(sweep, heads)
    raise AnalysisError(f"no kind of sweep {kind!r}; known: {', '.join(KINDS)}")
