"""Attention as pure functions of queries, keys and values.

Every tensor comes and goes in the hook layout `[batch, pos, head, d]`; key-value heads are never
repeated in memory but on the dense path. A query that may attend to nothing has a zero row, never
NaN, forward and backward.

The output is computed densely, where somebody looks at the pattern, or by PyTorch's fused
operator. Statistics of the pattern are computed without it: a probability is
`exp(scale * q_i . k_j - lse_i)`. They are exact for plain softmax, need memory linear in the
sequence, and are computed in float32 at least, whatever dtype they are given.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.models.masks import AttentionMask
from interp.models.operators import Operator, flash_for_cpu, operator_for
from interp.models.tiles import exponentials, row_tiles, shares, statistics_dtype, tiled_attention

WIDTH_STEP = 8
"""Operators are fast, and some work at all, where heads are a multiple of this wide."""


# --- dense ----------------------------------------------------------------------------------------


def attention_scores(
    q: Float[Tensor, "batch query n_heads d_head"],
    k: Float[Tensor, "batch key n_key_value_heads d_head"],
    allowed: Bool[Tensor, "#batch #n_heads query key"],
    scale: float,
) -> Float[Tensor, "batch n_heads query key"]:
    """Scaled dot products, minus infinity where a key is not allowed."""
    k = _per_query_head(k, q.shape[2])
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    return scores.masked_fill(~allowed, -math.inf)


def attention_pattern(
    scores: Float[Tensor, "batch n_heads query key"],
    sink: Float[Tensor, " n_heads"] | None = None,
) -> Float[Tensor, "batch n_heads query key"]:
    """Softmax over keys, in float32 at least; a row of minus infinities becomes a row of zeros.

    A `sink` logit takes its share of every row, which then sums to less than 1. Empty rows are
    filled before the softmax, not scrubbed after it: scrubbing would leave NaN in the backward
    pass.
    """
    empty = (scores == -math.inf).all(dim=-1, keepdim=True)
    precise = scores.masked_fill(empty, 0.0).to(statistics_dtype(scores.dtype))
    if sink is None:
        pattern = precise.softmax(dim=-1)
    else:
        column = sink.to(precise.dtype)[:, None, None].expand(*precise.shape[:3], 1)
        pattern = torch.cat((precise, column), dim=-1).softmax(dim=-1)[..., :-1]
    return pattern.masked_fill(empty, 0.0).to(scores.dtype)


def weighted_values(
    pattern: Float[Tensor, "batch n_heads query key"],
    v: Float[Tensor, "batch key n_key_value_heads d_head"],
) -> Float[Tensor, "batch query n_heads d_head"]:
    """What each head reads: the values, weighted by its pattern."""
    return torch.einsum("bhqk,bkhd->bqhd", pattern, _per_query_head(v, pattern.shape[1]))


# --- fused ----------------------------------------------------------------------------------------


def fused_attention(
    q: Float[Tensor, "batch query n_heads d_head"],
    k: Float[Tensor, "batch key n_key_value_heads d_head"],
    v: Float[Tensor, "batch key n_key_value_heads d_v"],
    *,
    scale: float,
    mask: AttentionMask,
    dropout: float = 0.0,
) -> tuple[Float[Tensor, "batch query n_heads d_v"], Float[Tensor, "batch n_heads query"] | None]:
    """What each head reads without n×n scores, and the row log-sum-exp where it comes for nothing.

    That is on the CPU, without dropout and with no window shorter than the keys, for as many
    queries as keys or a single one; elsewhere it is None. It carries no gradient, and is minus
    infinity in rows without a key. A shorter window costs one mask of booleans, query by key, and
    so do several queries that are fewer than the keys.
    """
    d_v = v.shape[3]
    # The operators want one width, and zeros change neither a score nor what is read.
    if d_v < q.shape[3]:
        v = F.pad(v, (0, q.shape[3] - d_v))
    elif d_v > q.shape[3]:
        q, k = (F.pad(x, (0, d_v - x.shape[3])) for x in (q, k))
    n_query, n_key = q.shape[1], k.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    plain = mask.causal and mask.custom is None and not mask.windowed(n_key)
    # The latest query may attend to all keys: no causal mask is needed for it alone.
    plain &= n_query in (1, n_key)
    causal = n_query == n_key
    same = q.dtype == k.dtype == v.dtype
    lse = None
    # Under autocast the dtypes may differ, which only the public function mends.
    if plain and q.device.type == "cpu" and dropout == 0.0 and same:
        # The operator that the public function would call. That refuses padding beside its causal
        # mask, and a full mask in their place would make memory quadratic.
        z, lse = flash_for_cpu(q, k, v, causal, _key_bias(mask, q.dtype), scale)
        z, lse = _with_nan_rows(z, lse.detach(), q, k, mask)
        lse = _without_empty_rows(lse, mask)
    elif plain and mask.key_mask is None:
        z = F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    else:
        allowed = mask.allowed(n_query, n_key, q.device)
        z = F.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, dropout_p=dropout, scale=scale, enable_gqa=grouped
        )
        # Some kernels answer an empty row with the mean of the values.
        z = z.masked_fill(~allowed.any(dim=-1, keepdim=True), 0.0)
    return z.transpose(1, 2)[..., :d_v], lse


def attention_with_lse(
    q: Float[Tensor, "batch query n_heads d_head"],
    k: Float[Tensor, "batch key n_key_value_heads d_head"],
    v: Float[Tensor, "batch key n_key_value_heads d_v"],
    *,
    scale: float,
    mask: AttentionMask,
) -> tuple[Float[Tensor, "batch query n_heads d_v"], Float[Tensor, "batch n_heads query"]]:
    """What each head reads, and the logarithm of each row's sum of exponentials.

    A row without a key gives zeros and minus infinity. One fused call where an operator serves the
    case; row tiles for a window, a custom mask, fewer queries than keys under a causal mask, values
    wider or narrower than keys, or a device without such an operator.
    """
    q, k, v = (x.to(statistics_dtype(x.dtype)) for x in (q, k, v))
    operator = _operator(q, k, mask) if v.shape[3] == k.shape[3] else None
    if operator is None:
        return tiled_attention(q, k, v, scale=scale, mask=mask)
    bias = _key_bias(mask, q.dtype)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    z, lse = operator(q, k, v, mask.causal, bias, scale)
    z, lse = _with_nan_rows(z, lse, q, k, mask)
    return z.transpose(1, 2), _without_empty_rows(lse, mask)


def _operator(
    q: Float[Tensor, "batch query n_heads d_head"],
    k: Float[Tensor, "batch key n_key_value_heads d_head"],
    mask: AttentionMask,
    *,
    biased: bool = False,
) -> Operator | None:
    """The operator that computes this case without a tile; None where none does."""
    n_query, n_key = q.shape[1], k.shape[1]
    if mask.custom is not None or mask.windowed(n_key) or (mask.causal and n_query != n_key):
        return None
    return operator_for(q.device.type, q.dtype, biased=biased or mask.key_mask is not None)


# --- statistics of the pattern, without the pattern -----------------------------------------------


def centred(
    k: Float[Tensor, "batch key n_key_value_heads d_head"], mask: AttentionMask
) -> Float[Tensor, "batch key n_key_value_heads d_head"]:
    """Keys without their mean, in float32 at least.

    A vector common to all keys changes no probability, but makes scores and log-sum-exp as large
    as itself, and their difference rounds to as many digits fewer.
    """
    k = k.to(statistics_dtype(k.dtype))
    if mask.key_mask is None:
        return k - k.mean(dim=1, keepdim=True)
    real = mask.key_mask[:, :, None, None]
    total = k.where(real, 0.0).sum(dim=1, keepdim=True)
    return k - total / real.sum(dim=1, keepdim=True).clamp(min=1)


def row_lse(
    q: Float[Tensor, "batch query n_heads d_head"],
    k: Float[Tensor, "batch key n_key_value_heads d_head"],
    *,
    scale: float,
    mask: AttentionMask,
) -> Float[Tensor, "batch n_heads query"]:
    """The logarithm of each row's sum of exponentials; minus infinity in a row without a key."""
    return attention_with_lse(q, k, k, scale=scale, mask=mask)[1]


def prob_at(
    q: Float[Tensor, "batch query n_heads d_head"],
    k: Float[Tensor, "batch key n_key_value_heads d_head"],
    lse: Float[Tensor, "batch n_heads query"],
    keys: Int[Tensor, "batch query"],
    *,
    scale: float,
    mask: AttentionMask,
) -> Float[Tensor, "batch n_heads query"]:
    """Attention of each query to one key of its own; 0 where `keys` is -1 or is not allowed."""
    n_key_value_heads = k.shape[2]
    dtype = statistics_dtype(q.dtype)
    index = keys.clamp(min=0)[:, :, None, None].expand(-1, -1, *k.shape[2:])
    chosen = k.gather(1, index).to(dtype)
    grouped = q.to(dtype).unflatten(2, (n_key_value_heads, -1))
    scores = (grouped * chosen[:, :, :, None]).sum(dim=-1).flatten(2).transpose(1, 2) * scale
    allowed = mask.allows(keys, k.shape[1])
    return (scores - lse).exp().clamp(max=1.0).where(allowed, 0.0)


def expected(
    q: Float[Tensor, "batch query n_heads d_head"],
    k: Float[Tensor, "batch key n_key_value_heads d_head"],
    values: Float[Tensor, "batch key *n_heads n_values"],
    *,
    scale: float,
    mask: AttentionMask,
) -> Float[Tensor, "batch n_heads query n_values"]:
    """The mean of each column of `values` under each query's attention; 0 in rows without a key.

    An indicator of some keys gives the mass on them, their positions the mean position. The columns
    are `[batch, key, n_values]`, or `[batch, key, n_heads, n_values]` where heads have their own.
    As many as a head is wide share one fused call.
    """
    d_head, n_heads, n_key_value_heads = q.shape[3], q.shape[2], k.shape[2]
    group = n_heads // n_key_value_heads
    values = values.to(statistics_dtype(q.dtype))
    own = values.ndim == 4
    if own:
        # The heads of a group read the same keys: their columns stand side by side in one call.
        columns = values.unflatten(2, (n_key_value_heads, group)).flatten(3)
    else:
        columns = values[:, :, None].expand(-1, -1, n_key_value_heads, -1)
    means = []
    for part in columns.split(d_head, dim=3):
        padded = F.pad(part, (0, d_head - part.shape[3]))
        mean, _ = attention_with_lse(q, k, padded, scale=scale, mask=mask)
        means.append(mean[..., : part.shape[3]])
    mean = torch.cat(means, dim=-1)
    if own:
        apart = mean.unflatten(2, (n_key_value_heads, group)).unflatten(4, (group, -1))
        mean = apart.diagonal(dim1=3, dim2=4).movedim(-1, 3).flatten(2, 3)
    return mean.transpose(1, 2)


def entropy(
    q: Float[Tensor, "batch query n_heads d_head"],
    k: Float[Tensor, "batch key n_key_value_heads d_head"],
    *,
    scale: float,
    mask: AttentionMask,
) -> Float[Tensor, "batch n_heads query"]:
    """The entropy of each query's attention in nats; 0 in rows without a key."""
    none = q.new_zeros(len(q), k.shape[1], 0)
    return row_summary(q, centred(k, mask), none, scale=scale, mask=mask)[1]


def row_summary(
    q: Float[Tensor, "batch query n_heads d_head"],
    k: Float[Tensor, "batch key n_key_value_heads d_head"],
    columns: Float[Tensor, "batch key n_columns"],
    *,
    scale: float,
    mask: AttentionMask,
) -> tuple[
    Float[Tensor, "batch n_heads query"],
    Float[Tensor, "batch n_heads query"],
    Float[Tensor, "batch n_heads query n_columns"],
]:
    """The log-sum-exp and the entropy of each row, and its mean of each column, by one fused call.

    Its values are the keys, which should be centred, and the columns beside them: the entropy is
    `lse_i - scale * q_i . (mean of k under p_i)`. Queries and keys get zeros to be as wide, which
    change no score.
    """
    d_head, n_columns = k.shape[3], columns.shape[2]
    more = -(-n_columns // WIDTH_STEP) * WIDTH_STEP
    beside = F.pad(columns.to(k.dtype), (0, more - n_columns))[:, :, None]
    values = torch.cat((k, beside.expand(-1, -1, k.shape[2], -1)), dim=3)
    wide_q, wide_k = F.pad(q, (0, more)), F.pad(k, (0, more))
    means, lse = attention_with_lse(wide_q, wide_k, values, scale=scale, mask=mask)
    mean_key, mean_columns, _ = means.split((d_head, n_columns, more - n_columns), dim=3)
    mean_score = (q * mean_key).sum(dim=-1).transpose(1, 2) * scale
    # In rows without a key minus infinity becomes 0.
    return lse, (lse - mean_score).clamp(min=0.0), mean_columns.transpose(1, 2)


def received(
    q: Float[Tensor, "batch query n_heads d_head"],
    k: Float[Tensor, "batch key n_key_value_heads d_head"],
    lse: Float[Tensor, "batch n_heads query"],
    weights: Float[Tensor, "batch query"],
    *,
    scale: float,
    mask: AttentionMask,
) -> Float[Tensor, "batch n_heads key"]:
    """The attention that each key gets, summed over queries with their `weights` (0 or more).

    `sum_i w_i exp(scale * q_i . k_j - lse_i)` is the row sum of exponentials of attention from keys
    to queries, with `log w_i - lse_i` added to the scores: one fused call again, with both
    sequences reversed so that "not earlier" becomes "not later".
    """
    n_key_value_heads, n_key = k.shape[2], k.shape[1]
    dtype = statistics_dtype(q.dtype)
    q, k, weights = q.to(dtype), k.to(dtype), weights.to(dtype)
    counted = (weights > 0)[:, None] & (lse != -math.inf)
    operator = _operator(q, k, mask, biased=True)
    if operator is None:
        total = q.new_zeros(len(q), q.shape[2], n_key)
        for rows, keys, scores in row_tiles(q, k, scale=scale, mask=mask):
            share = weights[:, None, rows].where(counted[:, :, rows], 0.0)
            total[:, :, keys] += torch.einsum(
                "bhq,bhqk->bhk", share, shares(scores, lse[:, :, rows])
            )
        return total
    order = torch.arange(n_key - 1, -1, -1, device=q.device) if mask.causal else slice(None)
    bias = (weights.log()[:, None] - lse).where(counted, -math.inf)[:, :, order]
    group = q.shape[2] // n_key_value_heads
    logs = []
    for member in range(group):
        own = slice(member, None, group)
        from_keys = k[:, order].transpose(1, 2)
        to_queries = q[:, order, own].transpose(1, 2)
        _, log = operator(from_keys, to_queries, to_queries, mask.causal, bias[:, own, None], scale)
        logs.append(log)
    total = torch.stack(logs, dim=2).flatten(1, 2).exp()
    # The operator calls an empty row's sum 1.
    total = total.where(_any_seeing(counted[:, :, order], mask.causal), 0.0)
    undefined = (counted & lse.isnan())[:, :, order]
    total = total.masked_fill(_any_seeing(undefined, mask.causal), math.nan)[:, :, order]
    return total if mask.key_mask is None else total * mask.key_mask[:, None]


def _any_seeing(
    queries: Bool[Tensor, "batch n_heads query"], causal: bool
) -> Bool[Tensor, "batch n_heads #key"]:
    """Whether any of these queries, in reversed order, may attend to each key, in the same."""
    return queries.cummax(dim=2).values if causal else queries.any(dim=2, keepdim=True)


def strongest(
    q: Float[Tensor, "batch query n_heads d_head"],
    k: Float[Tensor, "batch key n_key_value_heads d_head"],
    *,
    scale: float,
    mask: AttentionMask,
) -> tuple[Float[Tensor, "batch n_heads query"], Int[Tensor, "batch n_heads query"]]:
    """The largest weight of each row and its key, the first of equals; 0 and -1 without a key."""
    weights, places = [], []
    for _, keys, scores in row_tiles(q, k, scale=scale, mask=mask):
        top, place = scores.max(dim=-1)
        total = exponentials(scores, top).sum(dim=-1)
        weights.append(total.reciprocal().masked_fill(top == -math.inf, 0.0))
        places.append((place + keys.start).where(top > -math.inf, -1))
    return torch.cat(weights, dim=2), torch.cat(places, dim=2)


def _per_query_head(
    x: Float[Tensor, "batch pos n_key_value_heads d_head"], n_heads: int
) -> Float[Tensor, "batch pos n_heads d_head"]:
    # Head h reads key-value head h // group: 0,0,1,1 and not 0,1,0,1.
    return x.repeat_interleave(n_heads // x.shape[2], dim=2)


def _key_bias(mask: AttentionMask, dtype: torch.dtype) -> Float[Tensor, "batch 1 1 key"] | None:
    if mask.key_mask is None:
        return None
    hidden = torch.zeros(mask.key_mask.shape, dtype=dtype, device=mask.key_mask.device)
    return hidden.masked_fill(~mask.key_mask, -math.inf)[:, None, None]


def _with_nan_rows(
    z: Float[Tensor, "batch n_heads query d_v"],
    lse: Float[Tensor, "batch n_heads query"],
    q: Float[Tensor, "batch n_heads query d_head"],
    k: Float[Tensor, "batch n_key_value_heads key d_head"],
    mask: AttentionMask,
) -> tuple[Float[Tensor, "batch n_heads query d_v"], Float[Tensor, "batch n_heads query"]]:
    """Output and log-sum-exp with NaN in rows that have a score of NaN, as they are densely.

    The CPU's operator takes a row of nothing but NaN for an empty one, and answers 0.
    """
    suspect = lse.isnan() | (lse == 0)
    if q.shape[2] != k.shape[2] or not bool(suspect.any()):
        return z, lse
    # A row of nothing but NaN has one at its own place, which every query may attend to.
    own = (q.detach().unflatten(1, (k.shape[1], -1)) * k.detach()[:, :, None]).sum(dim=-1)
    undefined = own.flatten(1, 2).isnan()
    if mask.key_mask is not None:
        undefined = undefined & mask.key_mask[:, None]
    return z.masked_fill(undefined[..., None], math.nan), lse.masked_fill(undefined, math.nan)


def _without_empty_rows(
    lse: Float[Tensor, "batch n_heads query"], mask: AttentionMask
) -> Float[Tensor, "batch n_heads query"]:
    """The operators answer 0 where a query has no key; it should be minus infinity."""
    if mask.key_mask is None:
        return lse
    n_query = lse.shape[2]
    empty = mask.n_allowed(n_query, mask.key_mask.shape[1], lse.device) == 0
    return lse.masked_fill(empty[:, None], -math.inf)
