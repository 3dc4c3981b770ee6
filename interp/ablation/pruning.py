"""Which heads to prune: orders of removal, and what removing them in that order costs.

An order is made on one half of the documents and its curve measured on the other: heads that look
useless by chance would look useless again on the sequences that chose them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int

from interp.ablation.importance import head_gradients
from interp.ablation.interventions import Head
from interp.ablation.measuring import Measured, Progress
from interp.ablation.metrics import METRICS, AnyMetric, Metric, Reading
from interp.ablation.paired import paired
from interp.ablation.sweep import Options, Sweep
from interp.data.repeated import TokenBatch
from interp.errors import AnalysisError, ModelError
from interp.inputs import Inputs
from interp.measure import sequence_documents
from interp.models.block import Block
from interp.models.heads import GroupedAttention
from interp.models.transformer import Transformer
from interp.models.watch import HookedModel
from interp.tables import SetScores, head_label

ORDERS = ("oracle", "importance", "importance-again", "random", "magnitude")
STEP = 0.1
"""The share of heads that leave together. Source: Michel et al. 2019, section 4.2."""
ERRORS = 2.0
"""Standard errors by which a metric has to be worse to count as worse."""


def prune_curves(
    model: HookedModel,
    inputs: Inputs,
    *,
    orders: Sequence[str] = ORDERS,
    metric: AnyMetric = METRICS["loss"],
    step: float = STEP,
    tolerance: float = 0.1,
    draws: int = 3,
    seed: int = 0,
    progress: Progress | None = None,
) -> SetScores:
    """What taking more and more heads away does to a metric, for each order of removal.

    A row is an order after so many heads (`removed`, a `share` of all that the model has): the
    metric under its own name, and `prune`, its paired difference to the unablated model on the same
    sequences. Heads are zeroed, which gives the logits of the model pruned of them. Orders are made
    on one half of the documents, all rows measured on the other. `random` stands for `draws` orders
    of their own, random-1 and so on, which show how much luck there is in one.

    `prunable_share` of an order, in the summary beside `removal_orders`, is the largest share up to
    which the metric is nowhere worse than without any removal by more than `tolerance` (in its
    unit) and two standard errors of the paired difference both. It is known to a `step` of the
    heads, and is no promise beyond these sequences: every order is tried, and the best of several
    looks better than it is.

    `progress` is told anew for each stage: the ranking, then the curves.

    Raises: AnalysisError for an unknown order, step or metric without a known direction, an
    importance of one without a gradient, or sequences of one document, which cannot be halved;
    ModelError for the magnitude of a bridged model's heads.
    """
    names = order_names(orders, draws)
    whole = Sweep(model, inputs, Options(metric=metric, seed=seed), kind="prune")
    n_heads = len(whole.heads)
    if not n_heads:
        raise AnalysisError(f"{model.cfg.model_name} has no head left: all of them are pruned")
    counts = removal_counts(n_heads, step)
    worse = harm_sign(metric)
    ranking, telling = halves(inputs, metric)
    found = {
        name: removal_order(
            model,
            ranking.inputs,
            name,
            metric=ranking.metric,
            step=step,
            seed=seed,
            progress=progress,
        )
        for name in names
    }
    points = [
        (name, count, tuple(sorted(order[:count])))
        for name, order in found.items()
        for count in counts
    ]
    sweep = Sweep(
        model,
        telling.inputs,
        Options(metric=telling.metric, seed=seed),
        progress=progress,
        kind="prune",
    )
    sets = [heads for _, count, heads in points if count]
    measured = sweep.measure(sets)["zero"]
    table = _curves(measured, points, telling.inputs, metric, n_heads)
    clean = float(np.nanmean(measured.clean))
    summary: dict[str, object] = {
        f"{metric.name.replace('-', '_')}_clean": clean,
        "tolerance": tolerance,
        "prunable_rule": (
            f"the largest share up to which the {metric.name} is nowhere worse than unablated by "
            f"more than {tolerance:g}{' ' * bool(metric.unit)}{metric.unit} and {ERRORS:g} paired "
            "standard errors both"
        ),
        "prunable_share": {
            name: _prunable_share(table[table["order"] == name], worse, tolerance) for name in found
        },
        "removal_orders": {
            name: " ".join(head_label(*head) for head in order) for name, order in found.items()
        },
    }
    if measured.failed:
        summary["failed"] = [
            {"ablation": f"{len(heads)} heads", "reason": reason}
            for heads, reason in measured.failed.items()
        ]
    n_ranked, n_told = (
        sum(len(batch.tokens) for batch in half.inputs.batches) for half in (ranking, telling)
    )
    return SetScores(
        table=table,
        score="prune",
        unit=metric.unit,
        analysis="prune",
        model=model.cfg.model_name,
        params={
            **whole.params,
            "orders": list(found),
            "step": step,
            "ranked_on": n_ranked,
            "evaluated_on": n_told,
        },
        inputs=(
            f"{inputs.description}; heads ranked on {n_ranked} of the sequences, curves measured "
            f"on the other {n_told}"
        ),
        seed=seed,
        summary=summary,
    )


def removal_order(
    model: HookedModel,
    inputs: Inputs,
    name: str,
    *,
    metric: AnyMetric = METRICS["loss"],
    step: float = STEP,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Head]:
    """Every head that the model has, the first to be removed first.

    `oracle`: by what zeroing the head alone does to the metric, least harmful first, helpful even
    before harmless. `importance`: by its importance, the mean of |∂L/∂ξ_h|, ranked once, not
    normalised by layer. `importance-again`: the same, ranked anew after each `step` of the heads is
    gone, with these zeroed. `random`, or `random-2` for the second draw: no knowledge at all.
    `magnitude`: by the Frobenius norm of W_V^h W_O^h, which maps what the head attends to onto what
    it writes; it looks at weights alone, not at norms before it, inputs or use. Heads that are
    equal keep their place in the model.

    Raises: AnalysisError for an unknown order or what the metric does not allow; ModelError for the
    magnitude of a bridged model's heads.
    """
    (name,) = order_names([name], 1)
    sweep = Sweep(model, inputs, Options(metric=metric, seed=seed), progress=progress, kind="prune")
    heads = sweep.heads
    if name == "oracle":
        measured = sweep.measure([(head,) for head in heads])["zero"]
        harms = np.stack([measured.effect((head,)) for head in heads])
        # One that failed leaves last.
        worst = np.nan_to_num(harm_sign(metric) * paired(harms).mean, nan=np.inf)
        return _least_first(heads, worst)
    if name == "importance":
        return _least_first(heads, _importances(model, inputs, metric, ()))
    if name == "importance-again":
        return _ranked_again(model, inputs, metric, heads, step)
    if name == "magnitude":
        return _least_first(heads, head_magnitudes(model))
    draw = int(name.removeprefix("random-"))
    order = np.random.default_rng([seed, 9, draw]).permutation(len(heads))
    return [heads[place] for place in order]


def order_names(orders: Sequence[str], draws: int) -> list[str]:
    """The names of single orders: `random` becomes as many as are drawn.

    Raises: AnalysisError for an unknown one, listing the known, or for none.
    """
    if draws < 1:
        raise AnalysisError(f"draws = {draws}: at least one random order is needed")
    names: dict[str, None] = {}
    for order in orders:
        check_order(order)
        drawn = [f"random-{draw + 1}" for draw in range(draws)]
        names.update(dict.fromkeys(drawn if order == "random" else [order]))
    if not names:
        raise AnalysisError(f"no order was named; known: {', '.join(ORDERS)}")
    return list(names)


def check_order(name: str) -> None:
    """Refuse an order that is not there.

    Raises: AnalysisError listing the known ones.
    """
    kind, _, draw = name.partition("-")
    if name not in ORDERS and not (kind == "random" and draw.isdecimal() and int(draw) > 0):
        raise AnalysisError(f"no order {name!r}; known: {', '.join(ORDERS)}")


def removal_counts(n_heads: int, step: float) -> list[int]:
    """How many heads are gone at each point of a curve, from none to all.

    Raises: AnalysisError for a step that is no share.
    """
    if not 0 < step <= 1:
        raise AnalysisError(f"step = {step:g}: a share of the heads above 0, 1 at most")
    shares = np.append(np.arange(0, 1, step), 1.0)
    return np.unique((shares * n_heads).round().astype(int)).tolist()


def harm_sign(metric: AnyMetric) -> int:
    """1 where more of the metric is worse, -1 where it is better.

    Raises: AnalysisError where the unit does not tell.
    """
    signs = {"nats": 1, "logits": -1, "share": -1}
    if metric.unit not in signs:
        raise AnalysisError(
            f"{metric.name}: pruning has to know whether more is worse; a function's unit tells: "
            "nats (a loss), logits or share (more is better)"
        )
    return signs[metric.unit]


def head_magnitudes(model: HookedModel) -> Float[np.ndarray, " head"]:
    """The Frobenius norm of W_V^h W_O^h of each head that the model has, layer by layer.

    ||A B||² = tr(AᵀA · BBᵀ), of two matrices d_head wide: the d_model × d_model product is not
    made. Under GQA heads that share values differ by W_O alone.

    Raises: ModelError for a bridged model.
    """
    if not isinstance(model, Transformer):
        raise ModelError(
            f"magnitude needs the native backend: {type(model).__name__} has no W_V of each head; "
            "the orders oracle, importance, importance-again and random run on any model"
        )
    if model.config.attention.kind == "latent":
        raise ModelError(
            f"magnitude: the heads of {model.model_name} read a normed latent, and W_V W_O of a "
            "head is no matrix; the orders oracle, importance, importance-again and random do"
        )
    group = model.cfg.n_heads // model.cfg.n_key_value_heads
    found = []
    for block in model.blocks:
        assert isinstance(block, Block)
        attn = block.attn
        assert isinstance(attn, GroupedAttention)  # latent attention was refused
        read = [attn.key_value_heads.index(head // group) for head in attn.heads]
        W_V, W_O = (weight.detach().double() for weight in (attn.W_V[read], attn.W_O))
        inner = torch.einsum("hmd,hme->hde", W_V, W_V), torch.einsum("hdm,hem->hde", W_O, W_O)
        # Rounding may leave less than nothing of a head of zeros.
        found.append((inner[0] * inner[1]).sum(dim=(1, 2)).clamp(min=0).sqrt().cpu().numpy())
    return np.concatenate(found)


@dataclass(frozen=True)
class Half:
    """One half of the sequences, and the metric that knows them by their new numbers."""

    inputs: Inputs
    metric: AnyMetric


def halves(inputs: Inputs, metric: AnyMetric) -> tuple[Half, Half]:
    """Two halves of the sequences, every second document in the first, none in both.

    Raises: AnalysisError where there is one document only.
    """
    documents = sequence_documents(inputs.batches)
    unique = np.unique(documents)
    if len(unique) < 2:
        raise AnalysisError(
            "heads are ranked on one half of the documents and evaluated on the other: two "
            "documents, or sequences, are needed at least"
        )
    first = np.isin(documents, unique[::2])
    return _half(inputs, metric, first), _half(inputs, metric, ~first)


# --- parts ------------------------------------------------------------------------------------


def _half(inputs: Inputs, metric: AnyMetric, chosen: Bool[np.ndarray, " sequence"]) -> Half:
    batches: list[TokenBatch] = []
    start = 0
    for batch in inputs.batches:
        own = np.flatnonzero(chosen[start : start + len(batch.tokens)])
        start += len(batch.tokens)
        if len(own):
            batches.append(batch.each(itemgetter(own)))
    return Half(replace(inputs, batches=batches), _of_sequences(metric, np.flatnonzero(chosen)))


def _of_sequences(metric: AnyMetric, numbers: Int[np.ndarray, " chosen"]) -> AnyMetric:
    """The metric, for sequences that had these numbers among those it was made for."""
    if not isinstance(metric, Metric):
        return metric
    before = torch.from_numpy(numbers)

    def value(reading: Reading) -> Float[torch.Tensor, " place"]:
        there = before.to(reading.sequences.device)[reading.sequences]
        return metric.value(replace(reading, sequences=there))

    known = None if metric.n_sequences is None else len(numbers)
    return replace(metric, value=value, n_sequences=known)


def _least_first(heads: Sequence[Head], values: Float[np.ndarray, " head"]) -> list[Head]:
    return [heads[place] for place in np.argsort(values, kind="stable")]


def _importances(
    model: HookedModel, inputs: Inputs, metric: AnyMetric, removed: Sequence[Head]
) -> Float[np.ndarray, " head"]:
    return paired(np.abs(head_gradients(model, inputs, metric, removed))).mean


def _ranked_again(
    model: HookedModel, inputs: Inputs, metric: AnyMetric, heads: Sequence[Head], step: float
) -> list[Head]:
    gone: list[Head] = []
    for count in removal_counts(len(heads), step)[1:]:
        order = _least_first(heads, _importances(model, inputs, metric, gone))
        left = [head for head in order if head not in gone]
        gone += left[: count - len(gone)]
    return gone


def _curves(
    measured: Measured,
    points: Sequence[tuple[str, int, tuple[Head, ...]]],
    inputs: Inputs,
    metric: AnyMetric,
    n_heads: int,
) -> pd.DataFrame:
    documents = sequence_documents(inputs.batches)
    values = [measured.ablated[heads] if count else measured.clean for _, count, heads in points]
    levels = paired(np.stack(values), documents)
    changes = paired(np.stack(values) - measured.clean, documents)
    # Where nothing is removed there is nothing to test.
    tested = np.array([count > 0 for _, count, _ in points])
    tests = paired((np.stack(values) - measured.clean)[tested], documents)
    p, q = np.full((2, len(points)), np.nan)
    p[tested], q[tested] = tests.p, tests.q
    name = metric.name.replace("-", "_")
    return pd.DataFrame(
        {
            "order": [order for order, _, _ in points],
            "removed": [count for _, count, _ in points],
            "share": [count / n_heads for _, count, _ in points],
            name: levels.mean,
            f"{name}_se": levels.standard_error,
            "prune": changes.mean,
            "prune_se": changes.standard_error,
            "prune_null": 0.0,
            "n": changes.n,
            "prune_p": p,
            "prune_q": q,
        }
    )


def _prunable_share(curve: pd.DataFrame, worse: int, tolerance: int | float) -> float:
    """The share of the last point before the first that is worse by tolerance and chance."""
    harm = worse * curve["prune"]
    fine = (harm <= tolerance) | (harm <= ERRORS * curve["prune_se"])
    until = fine.astype(int).cumprod().astype(bool)
    return float(curve.loc[until, "share"].max())
