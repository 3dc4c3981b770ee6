"""Confidence: how sure is a head of one key, and is that key always at the same distance?"""

from typing import Annotated

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from interp.data.repeated import TokenBatch
from interp.errors import AnalysisError
from interp.models.layer_attention import LayerAttention
from interp.registry import Found, analysis

MOST_OFFSETS = 1024
"""Counts of every offset are kept for each sequence and head until all have been seen."""


def _positional_heads(found: Found) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """Each head's most frequent offset, its share, and which heads are positional."""
    counts = found.columns["offset_counts"].sum(axis=1, dtype=np.int64)  # layer n_heads offset
    n_queries = counts.sum(axis=-1)
    near = counts[..., :-1]
    # Of equally frequent offsets, the one that is farthest back.
    best = near.argmax(axis=-1)
    share = near.max(axis=-1) / np.where(n_queries > 0, n_queries, np.nan)
    positional = share >= float(str(found.params["positional_share"]))
    made = {
        "offset": best - near.shape[-1] // 2,
        "offset_share": share,
        "positional": positional,
    }
    return made, {"positional": int(positional.sum())}


@analysis("confidence", unit="attention probability", null="uniform", finish=_positional_heads)
def confidence(
    attention: LayerAttention,
    batch: TokenBatch,
    *,
    positional_share: Annotated[
        float, "a head is positional if its largest weight is at one offset this often"
    ] = 0.9,
    largest_offset: Annotated[int, "offsets looked at, in tokens to either side"] = 16,
) -> dict[str, Shaped[Tensor, "batch n_heads *own"]]:
    """The largest weight a token gives to any one key.

    Its mean over the real queries that have two keys at least: with one, as at the first token of a
    causal model, every head gives 1. 0..1: 1 is a head that always looks at one key; a head that
    spreads its attention evenly has 1 / (i + 1) at query i, and their mean is the null. NaN for a
    sequence without such a query.

    Over the same queries of all sequences, `offset` is where the largest weight is most often, key
    minus query in real tokens: -1 is the previous token. `offset_share` is how often, 0..1, and
    `positional` says whether that is `positional_share` at least. Offsets beyond `largest_offset`
    count as queries, but are no head's `offset`.

    A first-token sink is as confident as a head that finds something. An offset is told from a
    token's content only where neighbours differ; and of equal weights the first key counts.

    The published mean leaves out the end-of-sequence symbol that closes every sentence of a
    translation model. Where attention is not causal, the last real token is left out as that
    symbol; sequences of causal models have none, and all their tokens count.

    Raises: AnalysisError for `positional_share` outside 0..1 or `largest_offset` outside 1..1024.

    Source: confidence and positional heads of Voita et al. 2019 ("Analyzing Multi-Head
    Self-Attention", sections 4 and 5.1), and their share of 0.9.
    """
    if not 0 < positional_share <= 1:
        raise AnalysisError(f"positional_share = {positional_share} should be above 0, at most 1")
    if not 1 <= largest_offset <= MOST_OFFSETS:
        raise AnalysisError(f"largest_offset = {largest_offset} should be 1 to {MOST_OFFSETS}")
    weights, keys = attention.strongest
    queries = attention.n_keys >= 2
    if not attention.causal:
        last = attention.places.max(dim=1, keepdim=True).values
        queries = queries & (attention.places < last)
    place = attention.places[:, None].expand_as(keys)
    offsets = place.gather(2, keys.clamp(min=0)) - place
    chosen = queries[:, None] & (keys >= 0)
    return {
        "confidence": attention.mean(weights, queries),
        "offset_counts": _counts(offsets, chosen, largest_offset),
    }


def _counts(
    offsets: Int[Tensor, "batch n_heads query"],
    chosen: Shaped[Tensor, "batch n_heads query"],
    largest: int,
) -> Int[Tensor, "batch n_heads offset"]:
    """How often each offset from `-largest` to `largest` is chosen, and last, any other."""
    n_offsets = 2 * largest + 1
    near = offsets.abs() <= largest
    place = torch.where(near, offsets + largest, n_offsets)
    counts = torch.zeros(*offsets.shape[:2], n_offsets + 1, dtype=torch.int64, device=place.device)
    return counts.scatter_add_(2, place, chosen.to(torch.int64))
