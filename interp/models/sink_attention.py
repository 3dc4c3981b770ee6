"""Fused attention whose softmax has a sink logit: a term of every row that belongs to no key."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from interp.models.attention import WIDTH_STEP, fused_attention
from interp.models.masks import AttentionMask


def sink_attention(
    q: Float[Tensor, "batch query n_heads d_head"],
    k: Float[Tensor, "batch key n_key_value_heads d_head"],
    v: Float[Tensor, "batch key n_key_value_heads d_v"],
    sink: Float[Tensor, " n_heads"],
    *,
    scale: float,
    mask: AttentionMask,
    dropout: float = 0.0,
) -> tuple[Float[Tensor, "batch query n_heads d_v"], Float[Tensor, "batch n_heads query"] | None]:
    """`fused_attention` where each row's softmax has a further term that no key has.

    `sink` is its logit, one a head. The log-sum-exp is of the keys alone, and None where gradients
    are wanted.
    """
    if not torch.is_grad_enabled():
        z, lse = fused_attention(q, k, v, scale=scale, mask=mask, dropout=dropout)
        if lse is not None:
            share = (lse - sink[:, None]).sigmoid().transpose(1, 2)[..., None]
            return (z * share).to(z.dtype), lse
    # A key of its own in front, whose score is the logit: queries hold it in one more dimension, in
    # which no other key has anything. Its query, which no one asked for, keeps the causal mask.
    n_query, n_key, n_heads = q.shape[1], k.shape[1], q.shape[2]
    q, k, v = (F.pad(x, (0, WIDTH_STEP) if x is not v else (0, 0)) for x in (q, k, v))
    logits = (sink / scale).to(q.dtype)[:, None].expand(n_heads, 1)
    q = torch.cat(
        (q[..., :-WIDTH_STEP], logits.expand(*q.shape[:3], 1), q[..., 1 - WIDTH_STEP :]), 3
    )
    first = F.pad(k.new_ones(len(k), 1, k.shape[2], 1), (k.shape[3] - WIDTH_STEP, WIDTH_STEP - 1))
    k = torch.cat((first, k), dim=1)
    v = F.pad(v, (0, 0, 0, 0, 1, 0))
    whole = n_query == n_key and not mask.windowed(n_key) and mask.custom is None and mask.causal
    if whole:
        key_mask = None if mask.key_mask is None else F.pad(mask.key_mask, (1, 0), value=True)
        q = F.pad(q, (0, 0, 0, 0, 1, 0))
        z, _ = fused_attention(
            q, k, v, scale=scale, mask=AttentionMask(key_mask=key_mask), dropout=dropout
        )
        return z[:, 1:], None
    allowed = F.pad(mask.allowed(n_query, n_key, q.device), (1, 0), value=True)
    every = AttentionMask(causal=False, custom=allowed)
    return fused_attention(q, k, v, scale=scale, mask=every, dropout=dropout)[0], None
