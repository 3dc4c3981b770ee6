"""The attention that some tokens of each sequence draw from every head.

One invariant: a query counts only where it sees enough keys, as in the analysis `sinks`, because
in short rows every head looks like a sink.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp import registry
from interp.data.repeated import TokenBatch
from interp.models.layer_attention import LayerAttention
from interp.models.masks import AttentionMask
from interp.models.watch import HookedModel, watch_pass

STRONG = 0.3
"""Mass from which on a head is counted as one with a sink. Source: Gu et al. 2024, section 3."""

Masses = dict[str, Float[np.ndarray, "layer sequence n_heads"]]
"""By name; NaN for a pruned head, and for a sequence without a query that counts.

- `on_found`: the mass on the chosen tokens, a mean over the queries that see one, are none
  themselves and have enough keys; `uniform`: the same of a head that spreads evenly;
- `first_token`: the mass on the first token over the same queries;
- `sinks`: that mass over the queries of the analysis `sinks`.
"""


def counted_tokens(batch: TokenBatch) -> Bool[Tensor, "batch pos"]:
    """The tokens that count: real ones, less those that were left out."""
    return batch.real if batch.counted is None else batch.counted


def masses(
    model: HookedModel,
    batch: TokenBatch,
    found: Bool[Tensor, "batch pos"],
    *,
    fwd_hooks: Sequence[tuple[str, Callable]] = (),
    losses: bool = False,
) -> tuple[Masses, Float[Tensor, "batch pos-1"] | None]:
    """What tokens draw, by one pass with temporary hooks, and the losses if they are asked for.

    The batch and `found` are on the model's device.
    """
    enough = least_keys()

    def reduce(attention: LayerAttention) -> Mapping[Any, Tensor]:
        attention.key_mask = counted_tokens(batch)
        return _reduced(attention, found, enough)

    layers, lost = watch_pass(
        model, batch.tokens, reduce, batch.key_mask, fwd_hooks=fwd_hooks, losses=losses
    )
    names = next(list(own) for own in layers if own)
    shape = (len(layers), len(batch.tokens), model.cfg.n_heads)
    whole = {name: np.full(shape, np.nan) for name in names}
    for layer, own in enumerate(layers):
        for name, values in own.items():
            whole[name][layer][:, list(model.cfg.heads(layer))] = values.double().numpy()
    return whole, lost


def least_keys() -> int:
    """How many keys a query needs to count, as in `sinks`."""
    return int(str(registry.get("sinks").params["min_keys"]))


def _reduced(
    attention: LayerAttention, found: Bool[Tensor, "batch pos"], enough: int
) -> dict[str, Tensor]:
    real = attention.key_mask
    first = torch.arange(real.shape[1], device=real.device) == attention.first
    onto = torch.stack((found & real, first & real), dim=-1)
    on_found, on_first = attention.expected(onto.float()).unbind(dim=-1)
    counted = real & (attention.n_keys >= enough)
    n_found = _n_seen(attention, found)
    others = counted & ~found & (n_found > 0)
    share = (n_found / attention.n_keys.clamp(min=1))[:, None].expand_as(on_found)
    return {
        "on_found": attention.mean(on_found, others),
        "uniform": attention.mean(share.to(on_found.dtype), others),
        "first_token": attention.mean(on_first, others),
        "sinks": attention.mean(on_first, counted & (_n_seen(attention, first) > 0)),
    }


def _n_seen(
    attention: LayerAttention, keys: Bool[Tensor, "batch key"]
) -> Int[Tensor, "batch query"]:
    """How many of these keys each query may attend to."""
    n_pos = keys.shape[1]
    mask = AttentionMask(attention.causal, keys & attention.key_mask, attention.window)
    return mask.n_allowed(n_pos, n_pos, keys.device)
