"""Importance of every head from one backward pass: a first-order approximation of ablation.

A gate on each head's values is 1; the derivative of the metric with respect to it says what closing
it a little would do. What closing it altogether does is another question: the approximation never
comes without its rank correlation to true ablations of some of the heads.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from scipy import stats
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from interp.ablation.interventions import Head, Hook, site_heads, site_hook
from interp.ablation.metrics import AnyMetric, LogitsAt
from interp.ablation.naming import MetricLike, Positions, named_metric
from interp.ablation.paired import paired
from interp.ablation.passes import Chunk, chunks, compute_dtype, restarts
from interp.ablation.reading import held, positions_kept, unembedded
from interp.ablation.sweep import Options, Sweep
from interp.errors import AnalysisError
from interp.inputs import Inputs
from interp.measure import sequence_documents
from interp.models.modes import without_dropout
from interp.models.transformer import Transformer
from interp.models.watch import HookedModel, as_hooked
from interp.tables import HeadScores, head_label
from interp.text_inputs import inputs_from

TOKENS = 256
"""Tokens of one backward pass: few, since the logits of a slice are made again for it."""


def importance(
    model: object,
    tokens: object = None,
    *,
    attention_mask: Tensor | None = None,
    metric: MetricLike = "loss",
    normalize: bool = False,
    sample: int = 32,
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
    seed: int = 0,
) -> HeadScores:
    """How much a metric depends on each head, by one forward and one backward pass.

    `model`, `tokens` and what stands for them are as `interp.ablate` takes them; of its metrics
    `loss`, `second-copy-loss`, `last-token` and `logit-diff` have a gradient, and so may a `Metric`
    or function of your own. The table is that of `head_importance`.

    Raises: AnalysisError for an unknown or impossible option, or a metric without a gradient;
    ShapeError for tokens that do not fit the model; ModelError for what is no such model.
    """
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
    named = named_metric(model, metric, positions=positions, answer=answer, against=against)
    return head_importance(model, inputs, named, normalize=normalize, sample=sample, seed=seed)


def head_importance(
    model: HookedModel,
    inputs: Inputs,
    metric: AnyMetric,
    *,
    normalize: bool = False,
    sample: int = 32,
    seed: int = 0,
) -> HeadScores:
    """A table of every head's importance, and how far it agrees with true ablation.

    With a gate ξ_h = 1 on the head's values and the metric L_x of one sequence (a mean over its
    tokens), `importance` is the mean over sequences of |∂L_x/∂ξ_h|, in the metric's unit, 0 or
    more: the absolute value is inside the mean, so that a head that helps here and harms there is
    important. `attribution` keeps the sign: minus the mean derivative, the first-order estimate of
    what zeroing the head does to the metric (of a loss, above 0 the head helps); its size alone is
    `attribution_size`. With `normalize` the score is `importance_normalized`: importance over the
    l2 norm of those of its layer, 0 to 1, which makes layers alike and hides which ones matter.

    It misleads where the metric is far from linear between the head and nothing: a head that
    saturates what it writes has a small derivative and a large effect. In deep models the first
    layers' derivatives may be large and of either sign from one sequence to the next, which
    `importance` adds up and `attribution` does not (SmolLM2-135M on repeated tokens: head 0.8 comes
    first, and zeroing it does nothing that can be told from 0). So the summary has Spearman
    correlations with true zeroing on the same sequences, of `sample` heads evenly spread over all
    of them and no others: `rank_correlation` of importance with the size of the effect,
    `rank_correlation_signed` of attribution with the effect; NaN where one of the two is constant.

    One pass holds 256 tokens, and of our model one layer's activations, which are computed anew on
    the way back; a bridged model, or one with hooks of the user's, holds those of all layers.

    Raises: AnalysisError for a metric without a gradient, or not finite, or a sample below 2.
    Source: Michel et al. 2019, "Are Sixteen Heads Really Better than One?", section 4.1; they
    normalise by layer.
    """
    if sample < 2:
        raise AnalysisError(f"sample = {sample}: a rank correlation needs two heads at least")
    check_differentiable(metric)
    sweep = Sweep(model, inputs, Options(metric=metric, seed=seed), kind="importance")
    heads = sweep.heads
    if not heads:
        raise AnalysisError(f"{model.cfg.model_name} has no head left: all of them are pruned")
    places = np.linspace(0, len(heads) - 1, min(sample, len(heads))).round().astype(int)
    chosen = [(heads[place],) for place in places]
    ablated = sweep.measure(chosen)["zero"]
    documents = sequence_documents(inputs.batches)
    gradients = head_gradients(model, inputs, metric)
    size, signed = paired(np.abs(gradients), documents), paired(-gradients, documents)
    table = pd.DataFrame(
        {
            "layer": [layer for layer, _ in heads],
            "head": [head for _, head in heads],
            "importance": size.mean,
            "importance_se": size.standard_error,
            "importance_null": 0.0,
            "n": size.n,
            "attribution": signed.mean,
            "attribution_se": signed.standard_error,
            "attribution_size": np.abs(signed.mean),
        }
    )
    score, unit = "importance", metric.unit
    if normalize:
        score, unit = "importance_normalized", "share of the layer's norm"
        norms = table.groupby("layer")["importance"].transform(lambda own: np.linalg.norm(own))
        # A layer that changes nothing has no share to give.
        norms = norms.where(norms > 0, 1.0)
        table[score] = table["importance"] / norms
        table[f"{score}_se"] = table["importance_se"] / norms
        table[f"{score}_null"] = 0.0
    effects = paired(np.stack([ablated.effect(one) for one in chosen]), documents)
    summary: dict[str, object] = {
        f"{metric.name.replace('-', '_')}_clean": float(np.nanmean(ablated.clean)),
        "rank_correlation": rank_correlation(size.mean[places], np.abs(effects.mean)),
        "rank_correlation_signed": rank_correlation(signed.mean[places], effects.mean),
        "sample_heads": len(chosen),
        "sample": [
            {
                "head": head_label(*head),
                "importance": size.mean[place],
                "attribution": signed.mean[place],
                "ablation": effects.mean[row],
                "ablation_se": effects.standard_error[row],
            }
            for row, (place, (head,)) in enumerate(zip(places, chosen, strict=True))
        ],
    }
    return HeadScores(
        table=table,
        score=score,
        unit=unit,
        analysis="importance",
        model=model.cfg.model_name,
        params={**sweep.params, "normalize": normalize, "sample": sample},
        inputs=inputs.description,
        seed=seed,
        summary=summary,
    )


def check_differentiable(metric: AnyMetric) -> None:
    """Refuse a metric whose gradient says nothing.

    Raises: AnalysisError naming some that have one.
    """
    if not metric.differentiable:
        raise AnalysisError(
            f"importance follows a gradient, and {metric.name} has none at the unablated model; "
            "loss, second-copy-loss, last-token and logit-diff have one"
        )


def rank_correlation(one: Float[np.ndarray, " head"], other: Float[np.ndarray, " head"]) -> float:
    """Spearman's correlation of two orders of the same heads, -1 to 1.

    Heads of which a number is missing are left out; NaN where one of the two is constant.
    """
    known = ~(np.isnan(one) | np.isnan(other))
    one, other = one[known], other[known]
    if len(one) < 2 or np.ptp(one) == 0 or np.ptp(other) == 0:
        return float("nan")
    return float(stats.spearmanr(one, other).statistic)


# --- gradients --------------------------------------------------------------------------------


def head_gradients(
    model: HookedModel,
    inputs: Inputs,
    metric: AnyMetric,
    removed: Collection[Head] = (),
) -> Float[np.ndarray, "head sequence"]:
    """The derivative of each sequence's metric with respect to a gate on each head's values.

    Rows are the heads that the model has, layer by layer. Those in `removed` are zeroed, and the
    derivatives taken there. NaN in sequences in which the metric reads nothing. No gradient of any
    weight is made, and the model is left as it was.

    Raises: AnalysisError for a metric without a gradient, one that is not finite, or within
    `torch.inference_mode`.
    """
    check_differentiable(metric)
    if torch.is_inference_mode_enabled():
        raise AnalysisError("importance follows a gradient, and torch.inference_mode has none")
    found = []
    with without_dropout(model), torch.enable_grad():
        for chunk in chunks(model, inputs.batches, TOKENS):
            gates = _gates(model, chunk, removed)
            read = metric.reads(chunk.batch).any(dim=1)
            rows = torch.full((len(read), sum(gate.shape[1] for gate in gates)), torch.nan)
            if bool(read.any()):
                rows = rows.double()
                rows[read.cpu()] = _backward(model, chunk, metric, gates, read)
            found.append(rows.double().numpy())
    return np.concatenate(found).T


def _gates(model: HookedModel, chunk: Chunk, removed: Collection[Head]) -> list[Tensor]:
    """For each layer a gate for every sequence and head, open unless the head is removed."""
    dtype = torch.promote_types(model.cfg.dtype, torch.float32)
    gates = []
    for layer in range(model.cfg.n_layers):
        open_ = [float((layer, head) not in removed) for head in site_heads(model, layer, "z")]
        gate = torch.tensor(open_, dtype=dtype, device=chunk.batch.tokens.device)
        gates.append(gate.repeat(len(chunk.batch.tokens), 1).requires_grad_())
    return gates


def _backward(
    model: HookedModel,
    chunk: Chunk,
    metric: AnyMetric,
    gates: Sequence[Tensor],
    read: Bool[Tensor, " batch"],
) -> Float[Tensor, "read_sequence heads"]:
    if isinstance(model, Transformer) and restarts(model):
        at, clean = _unembedded_by_layers(model, chunk, metric, gates)
    else:
        at, clean = _held(model, chunk, gates)
    (values,) = metric.measure(
        [at], chunk.batch, model.cfg.d_vocab, clean=clean, first=chunk.first, wrap=_made_again
    )
    # Sequences do not see each other: the gradient of the sum has each one's own in its own gate.
    total = values[read].sum()
    if not total.requires_grad:
        raise AnalysisError(f"the metric {metric.name} has no gradient")
    parts = torch.autograd.grad(total, gates, allow_unused=True, materialize_grads=True)
    gradients = torch.cat([part[read] for part in parts], dim=1).double().cpu()
    if not bool(gradients.isfinite().all()):
        raise AnalysisError(f"the gradient of {metric.name} is not finite on these tokens")
    return gradients


def _made_again(function: Callable[[], Tensor]) -> Tensor:
    """The function's value; what it made on the way is made again in the backward pass."""
    value = checkpoint(function, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(value, Tensor)
    return value


def _gated(layer: int, gate: Float[Tensor, "batch heads"]) -> Hook:
    def scale(z: Tensor, hook: object) -> Tensor:
        return z * gate[:, None, :, None].to(z.dtype)

    return site_hook(layer, "z"), scale


def _unembedded_by_layers(
    model: Transformer, chunk: Chunk, metric: AnyMetric, gates: Sequence[Tensor]
) -> tuple[LogitsAt, LogitsAt]:
    """Logits behind gated layers, and the same without a graph; only each layer's input is kept."""
    batch, n_layers = chunk.batch, model.cfg.n_layers
    kept = positions_kept(metric, batch)

    def through(resid: Tensor, gate: Tensor, layer: int) -> Tensor:
        with model.hooks(fwd_hooks=[_gated(layer, gate)]):
            return model(
                resid,
                start_at_layer=layer,
                stop_at_layer=layer + 1,
                attention_mask=batch.key_mask,
                last=kept if layer == n_layers - 1 else None,
            )

    with torch.no_grad():
        resid = model(batch.tokens, attention_mask=batch.key_mask, stop_at_layer=0)
    for layer, gate in enumerate(gates):
        resid = checkpoint(
            through, resid, gate, layer, use_reentrant=False, preserve_rng_state=False
        )
    weight = model.unembed.weight.detach().to(compute_dtype(model))
    n_pos = batch.tokens.shape[1]
    return (
        unembedded(model, resid, weight, n_pos),
        unembedded(model, resid.detach(), weight, n_pos),
    )


def _held(model: HookedModel, chunk: Chunk, gates: Sequence[Tensor]) -> tuple[LogitsAt, LogitsAt]:
    """Logits of a whole gated pass, and the same without a graph."""
    batch = chunk.batch
    masked = {} if batch.key_mask is None else {"attention_mask": batch.key_mask}
    hooks = [_gated(layer, gate) for layer, gate in enumerate(gates) if gate.shape[1]]
    logits = model.run_with_hooks(batch.tokens, fwd_hooks=hooks, **masked)
    assert isinstance(logits, Tensor)
    return held(logits), held(logits.detach())
