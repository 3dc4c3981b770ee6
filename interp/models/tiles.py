"""Attention a few rows at a time, for what no fused operator gives: exact, in linear memory.

Everything here is computed in float32 at least, whatever dtype it is given.
"""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from interp.models.masks import AttentionMask

TILE_NUMBERS = 2**22
"""Scores in a tile of rows: sixteen megabytes in float32, whatever the context."""

MIN_TILE_ROWS = 32
"""Fewer rows at a time would be slow; very many long sequences pay for them in memory."""


def row_tiles(
    q: Float[Tensor, "batch query n_heads d_head"],
    k: Float[Tensor, "batch key n_key_value_heads d_head"],
    *,
    scale: float,
    mask: AttentionMask,
) -> Iterator[tuple[slice, slice, Float[Tensor, "batch n_heads rows keys"]]]:
    """The scores of a few queries at a time: their rows, the keys in reach of any, the scores.

    For whatever no fused call gives. The scores of keys that are not allowed are minus infinity;
    keys outside the second slice are allowed to none of the rows.
    """
    dtype = statistics_dtype(q.dtype)
    n_query, n_key, n_key_value_heads = q.shape[1], k.shape[1], k.shape[2]
    q, k = q.to(dtype).transpose(1, 2), k.to(dtype).transpose(1, 2)
    size = max(MIN_TILE_ROWS, TILE_NUMBERS // (q.shape[0] * q.shape[1] * n_key))
    for start in range(0, n_query, size):
        rows = slice(start, min(start + size, n_query))
        last = rows.stop + n_key - n_query if mask.causal else n_key
        first = 0
        if mask.window is not None:
            first = max(0, rows.start + n_key - n_query + 1 - mask.window)
        keys = slice(first, last)
        # Queries of a group stand below each other, so that keys are multiplied unrepeated.
        tile = _stacked(q[:, :, rows], n_key_value_heads) @ k[:, :, keys].mT * scale
        tile = tile.unflatten(2, (-1, rows.stop - rows.start)).flatten(1, 2)
        allowed = mask.allowed(n_query, n_key, q.device, rows)[..., keys]
        for part in _partly_hidden(mask, rows, keys, n_key - n_query):
            tile[..., part].masked_fill_(~allowed[..., part], -math.inf)
        yield rows, keys, tile


def pattern_tiles(
    q: Float[Tensor, "batch query n_heads d_head"],
    k: Float[Tensor, "batch key n_key_value_heads d_head"],
    *,
    scale: float,
    mask: AttentionMask,
) -> Iterator[tuple[slice, slice, Float[Tensor, "batch n_heads rows keys"]]]:
    """The tiles of `row_tiles` after the softmax; zeros in rows without a key."""
    for rows, keys, scores in row_tiles(q, k, scale=scale, mask=mask):
        parts = exponentials(scores, scores.amax(dim=-1))
        yield rows, keys, parts.div_(parts.sum(dim=-1, keepdim=True).clamp(min=1.0))


def tiled_attention(
    q: Float[Tensor, "batch query n_heads d_head"],
    k: Float[Tensor, "batch key n_key_value_heads d_head"],
    v: Float[Tensor, "batch key n_key_value_heads d_v"],
    *,
    scale: float,
    mask: AttentionMask,
) -> tuple[Float[Tensor, "batch query n_heads d_v"], Float[Tensor, "batch n_heads query"]]:
    """What each head reads, and the logarithm of each row\'s sum of exponentials."""
    n_key_value_heads = k.shape[2]
    read, logs = [], []
    for _, keys, scores in row_tiles(q, k, scale=scale, mask=mask):
        top = scores.amax(dim=-1)
        parts = exponentials(scores, top)
        total = parts.sum(dim=-1)
        z = _stacked(parts, n_key_value_heads) @ v[:, keys].transpose(1, 2)
        z = z.unflatten(2, (-1, parts.shape[2])).flatten(1, 2)
        read.append(z / total.clamp(min=1.0)[..., None])
        logs.append(top + total.log())
    return torch.cat(read, dim=2).transpose(1, 2), torch.cat(logs, dim=2)


def exponentials(
    scores: Float[Tensor, "batch n_heads rows key"], top: Float[Tensor, "batch n_heads rows"]
) -> Float[Tensor, "batch n_heads rows key"]:
    """Exponentials of scores below the largest of each row, in their place.

    Their sum is 1 at least, or 0 in a row without a key. A difference to the log-sum-exp would
    round to as many digits fewer as scores are large.
    """
    return scores.sub_(top.masked_fill(top == -math.inf, 0.0)[..., None]).exp_()


def shares(
    scores: Float[Tensor, "batch n_heads rows key"], lse: Float[Tensor, "batch n_heads rows"]
) -> Float[Tensor, "batch n_heads rows key"]:
    """Probabilities from scores, in their place; zeros in a row without a key."""
    return scores.sub_(lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp_()


def _partly_hidden(mask: AttentionMask, rows: slice, keys: slice, before: int) -> list[slice]:
    """Those places of `keys` where some of the rows may not attend, to spare a pass over the rest.

    `before` is how many keys lie before the first query.
    """
    n_keys = keys.stop - keys.start
    if mask.key_mask is not None or mask.custom is not None:
        return [slice(0, n_keys)]
    seen_from, seen_to = 0, n_keys
    if mask.window is not None:  # the last row's reach is the shortest
        seen_from = max(0, rows.stop + before - mask.window - keys.start)
    if mask.causal:
        seen_to = rows.start + before + 1 - keys.start
    if seen_from >= seen_to:
        return [slice(0, n_keys)]
    return [
        part for part in (slice(0, seen_from), slice(seen_to, n_keys)) if part.start < part.stop
    ]


def _stacked(
    x: Float[Tensor, "batch n_heads rows d"], n_key_value_heads: int
) -> Float[Tensor, "batch n_key_value_heads grouped_rows d"]:
    return x.unflatten(1, (n_key_value_heads, -1)).flatten(2, 3)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float32, or float64 where that is given."""
    return torch.promote_types(dtype, torch.float32)
