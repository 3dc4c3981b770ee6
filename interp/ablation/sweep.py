"""What taking a head away changes: the paired difference on the same sequences, head by head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor

from interp.ablation.interventions import Head, ZeroHeads
from interp.errors import AnalysisError
from interp.inputs import Inputs, token_inputs
from interp.measure import sequences_at_once
from interp.models.watch import HookedModel, as_hooked, looking_at
from interp.tables import HeadScores, head_label, parse_heads

Metric = Callable[[Float[Tensor, "batch losses"]], Float[Tensor, " batch"]]
"""From per-token losses `[batch, pos - 1]` (NaN on padding) to one number for each sequence."""


def mean_token_loss(losses: Float[Tensor, "batch losses"]) -> Float[Tensor, " batch"]:
    """The mean loss of each sequence over its real next tokens, in nats."""
    return losses.nanmean(dim=1)


METRICS: dict[str, Metric] = {"loss": mean_token_loss}


@dataclass(frozen=True)
class Effect:
    """A metric with and without some heads, on the same sequences."""

    clean: Float[np.ndarray, " sequence"]
    ablated: Float[np.ndarray, " sequence"]

    @property
    def mean(self) -> float:
        """Mean paired difference, ablated minus clean."""
        return float((self.ablated - self.clean).mean())

    @property
    def standard_error(self) -> float:
        """Standard error of that mean over sequences; NaN for a single one."""
        difference = self.ablated - self.clean
        if len(difference) < 2:
            return float("nan")
        return float(difference.std(ddof=1) / len(difference) ** 0.5)


def sequence_metric(
    model: HookedModel, inputs: Inputs, metric: Metric, heads: Sequence[Head] = ()
) -> Float[np.ndarray, " sequence"]:
    """The metric of every sequence, with `heads` taken away together."""
    hooks = ZeroHeads(tuple(heads)).hooks()
    values = []
    with looking_at(model):
        for batch in inputs.batches:
            size = sequences_at_once(model, batch.tokens.shape[1])
            for start in range(0, len(batch.tokens), size):
                rows = slice(start, start + size)
                mask = None if batch.key_mask is None else batch.key_mask[rows]
                losses = model.run_with_hooks(
                    batch.tokens[rows],
                    fwd_hooks=hooks,
                    return_type="loss",
                    loss_per_token=True,
                    **({} if mask is None else {"attention_mask": mask}),
                )
                assert isinstance(losses, Tensor)
                losses = losses.cpu()
                if mask is not None:
                    real = mask.cpu()[:, 1:] & mask.cpu()[:, :-1]
                    losses = losses.masked_fill(~real, float("nan"))
                values.append(metric(losses).double().numpy())
    return np.concatenate(values)


def ablate_together(
    model: HookedModel,
    inputs: Inputs,
    heads: Sequence[Head],
    metric: Metric,
    clean: Float[np.ndarray, " sequence"] | None = None,
) -> Effect:
    """What taking all of `heads` away at once does; joint effects are not sums of single ones."""
    if clean is None:
        clean = sequence_metric(model, inputs, metric)
    return Effect(clean, sequence_metric(model, inputs, metric, heads))


def check_method(method: str, metric: str) -> None:
    """Refuse a method or metric that is not there.

    Raises: AnalysisError listing the known ones.
    """
    if method != "zero":
        raise AnalysisError(f"no ablation method {method!r}; known: zero")
    if metric not in METRICS:
        raise AnalysisError(f"no metric {metric!r}; known: {', '.join(METRICS)}")


def ablate_each(
    model: HookedModel,
    inputs: Inputs,
    heads: Sequence[Head] | str,
    *,
    method: str = "zero",
    metric: str = "loss",
    seed: int = 0,
) -> HeadScores:
    """A table of what zeroing each head does to the metric, one head at a time.

    `ablation` is the mean paired difference on the same sequences, ablated minus clean, in nats:
    above 0 the head helps. Its null is 0 by construction. Zeroing takes the model off its usual
    activations, so it overstates heads whose mean output others rely on.

    Raises: AnalysisError for an unknown method or metric, or a loss that is not finite; ShapeError
    for a head the model does not have.
    """
    check_method(method, metric)
    named = heads if isinstance(heads, str) else [head_label(*head) for head in heads]
    heads = parse_heads(named, model.cfg.n_layers, model.cfg.n_heads)
    measure = METRICS[metric]
    clean = sequence_metric(model, inputs, measure)
    if not np.isfinite(clean).all():
        raise AnalysisError(f"the {metric} of the unablated model is not finite on these tokens")
    rows = []
    for layer, head in heads:
        effect = ablate_together(model, inputs, [(layer, head)], measure, clean)
        rows.append(
            {
                "layer": layer,
                "head": head,
                "ablation": effect.mean,
                "ablation_se": effect.standard_error,
                "ablation_null": 0.0,
                "n": len(clean),
                f"{metric}_clean": float(clean.mean()),
                f"{metric}_ablated": float(effect.ablated.mean()),
            }
        )
    table = pd.DataFrame(rows)
    strongest = table.loc[table["ablation"].idxmax()]
    return HeadScores(
        table=table,
        score="ablation",
        unit="nats",
        analysis="ablation",
        model=model.cfg.model_name,
        params={**inputs.params, "method": method, "metric": metric},
        inputs=inputs.description,
        seed=seed,
        summary={
            f"{metric}_clean": float(clean.mean()),
            "largest_effect": float(strongest["ablation"]),
            "largest_effect_head": head_label(int(strongest["layer"]), int(strongest["head"])),
        },
    )


def ablate(
    model: object,
    tokens: object,
    *,
    attention_mask: Tensor | None = None,
    method: str = "zero",
    metric: str = "loss",
    heads: Sequence[Head] | str | None = None,
) -> HeadScores:
    """`ablate_each` on given tokens `[batch, pos]`, for all heads unless some are named.

    `model` is ours or bridged, or a raw `TransformerBridge`. Heads are pairs, or text such as
    `"5.1, 7.*"`.

    Raises: as `ablate_each`; ShapeError for tokens that do not fit the model; ModelError for what
    is no such model.
    """
    model = as_hooked(model)
    every = [(i, j) for i in range(model.cfg.n_layers) for j in range(model.cfg.n_heads)]
    return ablate_each(
        model,
        token_inputs(model, tokens, attention_mask),
        every if heads is None else heads,
        method=method,
        metric=metric,
    )
