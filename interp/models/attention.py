"""Attention as pure functions of queries, keys and values: one fused path, one dense path.

Every tensor comes and goes in the hook layout `[batch, pos, head, d]`; key-value heads are never
repeated in memory on the fused path. A mask says which keys may be attended to (True = may), and a
query that may attend to nothing has a zero row, never NaN, forward and backward.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

_flash_for_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def allowed_keys(
    n_pos: int,
    key_mask: Bool[Tensor, "batch pos"] | None,
    device: torch.device,
    window: int | None = None,
) -> Bool[Tensor, "#batch 1 query key"]:
    """Which key each query may attend to: not later than itself, and not padding.

    With a `window`, only the latest `window` places, the query's own included.
    """
    causal = torch.ones(n_pos, n_pos, dtype=torch.bool, device=device).tril()
    if window is not None:
        causal = causal.triu(1 - window)
    return causal[None, None] if key_mask is None else causal & key_mask[:, None, None, :]


def attention_scores(
    q: Float[Tensor, "batch query n_heads d_head"],
    k: Float[Tensor, "batch key n_key_value_heads d_head"],
    allowed: Bool[Tensor, "#batch 1 query key"],
    scale: float,
) -> Float[Tensor, "batch n_heads query key"]:
    """Scaled dot products, minus infinity where a key is not allowed."""
    k = _per_query_head(k, q.shape[2])
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    return scores.masked_fill(~allowed, -math.inf)


def attention_pattern(
    scores: Float[Tensor, "batch n_heads query key"],
) -> Float[Tensor, "batch n_heads query key"]:
    """Softmax over keys, in float32 at least; a row of minus infinities becomes a row of zeros.

    Empty rows are filled before the softmax, not scrubbed after it: scrubbing would leave NaN in
    the backward pass.
    """
    empty = (scores == -math.inf).all(dim=-1, keepdim=True)
    precise = scores.masked_fill(empty, 0.0).to(_statistics_dtype(scores.dtype))
    return precise.softmax(dim=-1).masked_fill(empty, 0.0).to(scores.dtype)


def weighted_values(
    pattern: Float[Tensor, "batch n_heads query key"],
    v: Float[Tensor, "batch key n_key_value_heads d_head"],
) -> Float[Tensor, "batch query n_heads d_head"]:
    """What each head reads: the values, weighted by its pattern."""
    return torch.einsum("bhqk,bkhd->bqhd", pattern, _per_query_head(v, pattern.shape[1]))


def fused_attention(
    q: Float[Tensor, "batch pos n_heads d_head"],
    k: Float[Tensor, "batch pos n_key_value_heads d_head"],
    v: Float[Tensor, "batch pos n_key_value_heads d_head"],
    *,
    scale: float,
    key_mask: Bool[Tensor, "batch pos"] | None = None,
    window: int | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "batch pos n_heads d_head"]:
    """The same as the dense path without its n×n scores, by PyTorch's fused operator.

    A window shorter than the sequence costs one mask of n×n booleans.
    """
    if window is not None and window >= q.shape[1]:
        window = None
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    if key_mask is None and window is None:
        z = F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=grouped
        )
    elif key_mask is not None and window is None and q.device.type == "cpu" and dropout == 0.0:
        # A full mask would make memory quadratic. This operator adds its causal mask itself, so a
        # mask over keys is enough; the public function refuses the two together.
        hidden = torch.zeros(key_mask.shape, dtype=q.dtype).masked_fill(~key_mask, -math.inf)
        z, _ = _flash_for_cpu(q, k, v, 0.0, True, attn_mask=hidden[:, None, None, :], scale=scale)
    else:
        allowed = allowed_keys(q.shape[2], key_mask, q.device, window)
        z = F.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, dropout_p=dropout, scale=scale, enable_gqa=grouped
        )
        # Some kernels answer an empty row with the mean of the values.
        z = z.masked_fill(~allowed.any(dim=-1, keepdim=True), 0.0)
    return z.transpose(1, 2)


def _per_query_head(
    x: Float[Tensor, "batch pos n_key_value_heads d_head"], n_heads: int
) -> Float[Tensor, "batch pos n_heads d_head"]:
    # Head h reads key-value head h // group: 0,0,1,1 and not 0,1,0,1.
    return x.repeat_interleave(n_heads // x.shape[2], dim=2)


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
