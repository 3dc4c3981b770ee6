"""Sinks: does a head park its attention on the first token?"""

import torch
from jaxtyping import Float
from torch import Tensor

from interp.data.repeated import TokenBatch
from interp.models.watch import LayerAttention
from interp.registry import analysis

MIN_KEYS = 8
"""Queries with fewer keys are left out: every head puts much on the first token there."""


@analysis("sinks", unit="attention probability", null="uniform")
def sinks(
    attention: LayerAttention, batch: TokenBatch
) -> dict[str, Float[Tensor, "batch n_heads"]]:
    """Attention that goes to the first token.

    The mean mass on the first real token over the queries that have at least 8 keys. 0..1: 1 is a
    pure sink; a head that spreads its attention evenly scores the mean of 1 / (i + 1) over those
    queries, given as the null. NaN for a sequence with fewer than 8 tokens.

    It says where attention goes, not what it does: a sink's value may be zero.

    Source: the attention sink of Xiao et al. 2023 ("Efficient Streaming Language Models"), without
    the short rows that make every head look like one.
    """
    real = attention.key_mask
    n_keys = real.long().cumsum(dim=1)
    counted = real & (n_keys >= MIN_KEYS)
    first = real.long().argmax(dim=1, keepdim=True)
    mass = attention.prob_at(torch.where(counted, first, -1)).sum(dim=-1)
    queries = counted.sum(dim=-1, keepdim=True)
    return {"sinks": mass / queries.where(queries > 0, float("nan"))}
