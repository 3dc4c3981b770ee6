"""Exact attention in tiles with the online softmax, forward and backward, written to be read.

This is what fused kernels do, in plain tensor operations: a tile of queries meets the keys tile by
tile, and carries for each query the largest score so far, the sum of exponentials below it, and the
values weighted by them. No more than one tile of scores is ever held. The model runs PyTorch's
operators, which are faster; this one shows that nothing is lost.

Source: Dao et al. 2022, "FlashAttention" (arXiv 2205.14135), algorithms 1 and 4, in the order of
loops of FlashAttention-2: queries outside, each row of the output written once.
"""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import FunctionCtx

from interp.models.masks import AttentionMask
from interp.models.tiles import statistics_dtype

TILE = 64
"""Queries, and keys, in a tile unless it is said otherwise."""


def online_attention(
    q: Float[Tensor, "batch query n_heads d_head"],
    k: Float[Tensor, "batch key n_key_value_heads d_head"],
    v: Float[Tensor, "batch key n_key_value_heads d_v"],
    *,
    scale: float,
    mask: AttentionMask,
    tile: int = TILE,
) -> tuple[Float[Tensor, "batch query n_heads d_v"], Float[Tensor, "batch n_heads query"]]:
    """What each head reads, and the logarithm of each row's sum of exponentials.

    The same numbers as dense attention but for rounding, in float32 at least, with gradients of q,
    k and v; the logarithm carries none. A query that may attend to nothing reads zeros, has minus
    infinity, and gives no gradient. Memory for scores is `tile` x `tile` for each head.
    """
    group = q.shape[2] // k.shape[2]
    per_head = (x.repeat_interleave(group, dim=2) for x in (k, v))
    heads_first = [x.transpose(1, 2) for x in (q, *per_head)]
    z, lse = _OnlineAttention.apply(*heads_first, scale, mask, tile)
    return z.transpose(1, 2).to(q.dtype), lse


class _OnlineAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        mask: AttentionMask,
        tile: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = statistics_dtype(q.dtype)
        rows_of_z, rows_of_lse = [], []
        for rows in _tiles(q.shape[2], tile):
            q_tile = q[:, :, rows].to(dtype) * scale
            top = q_tile.new_full(q_tile.shape[:3], -math.inf)
            total = torch.zeros_like(top)
            read = q_tile.new_zeros(*q_tile.shape[:3], v.shape[3])
            for keys in _tiles(k.shape[2], tile):
                scores = _scores(q_tile, k, rows, keys, mask, q.shape[2])
                new_top = torch.maximum(top, scores.amax(dim=-1))
                # A row without a key so far would subtract infinity from itself.
                finite = new_top.masked_fill(new_top == -math.inf, 0.0)
                parts = (scores - finite[..., None]).exp()
                # What was summed below the old largest score shrinks to the new one.
                shrink = (top - finite).exp()
                total = shrink * total + parts.sum(dim=-1)
                read = shrink[..., None] * read + parts @ v[:, :, keys].to(dtype)
                top = new_top
            rows_of_z.append(read / total.masked_fill(total == 0, 1.0)[..., None])
            rows_of_lse.append(top + total.log())
        z, lse = torch.cat(rows_of_z, dim=2), torch.cat(rows_of_lse, dim=2)
        ctx.save_for_backward(q, k, v, z, lse)
        ctx.scale, ctx.mask, ctx.tile = scale, mask, tile  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(lse)
        return z, lse

    @staticmethod
    def backward(
        ctx: FunctionCtx, from_z: Tensor, from_lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v, z, lse = ctx.saved_tensors  # type: ignore[attr-defined]
        scale, mask, tile = ctx.scale, ctx.mask, ctx.tile  # type: ignore[attr-defined]
        dtype = z.dtype
        from_q, from_k, from_v = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
        # The softmax's own term, which a row shares: sum_j p_ij (dz_i . v_j) = dz_i . z_i.
        shared = (from_z * z).sum(dim=-1, keepdim=True)
        finite = lse.masked_fill(lse == -math.inf, 0.0)[..., None]
        for rows in _tiles(q.shape[2], tile):
            q_tile = q[:, :, rows].to(dtype) * scale
            for keys in _tiles(k.shape[2], tile):
                # Probabilities are made again: keeping them would be the n x n matrix.
                scores = _scores(q_tile, k, rows, keys, mask, q.shape[2])
                p = (scores - finite[:, :, rows]).exp()
                from_v[:, :, keys] += p.mT @ from_z[:, :, rows]
                from_p = from_z[:, :, rows] @ v[:, :, keys].to(dtype).mT
                from_scores = p * (from_p - shared[:, :, rows])
                from_q[:, :, rows] += from_scores @ k[:, :, keys].to(dtype) * scale
                from_k[:, :, keys] += from_scores.mT @ q_tile
        return from_q.to(q.dtype), from_k.to(k.dtype), from_v.to(v.dtype), None, None, None


def _tiles(n: int, size: int) -> Iterator[slice]:
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def _scores(
    q_tile: Float[Tensor, "batch n_heads rows d_head"],
    k: Float[Tensor, "batch n_heads key d_head"],
    rows: slice,
    keys: slice,
    mask: AttentionMask,
    n_query: int,
) -> Float[Tensor, "batch n_heads rows keys"]:
    scores = q_tile @ k[:, :, keys].to(q_tile.dtype).mT
    allowed = mask.allowed(n_query, k.shape[2], scores.device, rows)[..., keys]
    return scores.masked_fill(~allowed, -math.inf)
