"""PyTorch's fused attention operators that give the row log-sum-exp along with the output.

The public `scaled_dot_product_attention` keeps it to itself. An operator is used on a device and
dtype only after it has reproduced a small case there in float64; where none does, attention is
computed in row tiles (`interp.models.attention`).
"""

import math
from collections.abc import Callable
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

Output = tuple[Tensor, Tensor]
Operator = Callable[[Tensor, Tensor, Tensor, bool, Tensor | None, float], Output]


def flash_for_cpu(
    q: Float[Tensor, "batch n_heads query d_head"],
    k: Float[Tensor, "batch n_key_value_heads key d_head"],
    v: Float[Tensor, "batch n_key_value_heads key d_head"],
    causal: bool,
    bias: Float[Tensor, "batch #n_heads 1 key"] | None,
    scale: float,
) -> Output:
    """PyTorch's flash attention on the CPU. Grouped heads and a bias for each key are its own.

    Unlike the public function it takes a bias and its own causal mask together, so that padding
    costs no n×n mask.
    """
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = operator(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return out, lse


def efficient_on_cuda(
    q: Float[Tensor, "batch n_heads query d_head"],
    k: Float[Tensor, "batch n_key_value_heads key d_head"],
    v: Float[Tensor, "batch n_key_value_heads key d_head"],
    causal: bool,
    bias: Float[Tensor, "batch #n_heads 1 key"] | None,
    scale: float,
) -> Output:
    """PyTorch's memory-efficient attention on CUDA, one member of each group at a time.

    It knows no grouped heads; taking every group-th query head leaves keys and values unrepeated.
    """
    group = q.shape[1] // k.shape[1]
    parts = []
    for member in range(group):
        own = slice(member, None, group)
        own_bias = None
        if bias is not None:
            per_head = bias if bias.shape[1] == 1 else bias[:, own]
            own_bias = per_head.expand(-1, k.shape[1], q.shape[2], -1)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q[:, own], k, v, own_bias, True, 0.0, causal, scale=scale
        )
        parts.append((out, lse[..., : q.shape[2]]))  # it pads its rows to a multiple of 32
    outs, lses = zip(*parts, strict=True)
    return torch.stack(outs, 2).flatten(1, 2), torch.stack(lses, 2).flatten(1, 2)


CANDIDATES: dict[str, tuple[Operator, ...]] = {
    "cpu": (flash_for_cpu,),
    "cuda": (efficient_on_cuda,),
}


@cache
def operator_for(device_type: str, dtype: torch.dtype, *, biased: bool) -> Operator | None:
    """The first operator that computes attention rightly there; None where none does."""
    for candidate in CANDIDATES.get(device_type, ()):
        if _is_right(candidate, device_type, dtype, biased):
            return candidate
    return None


@torch.no_grad()
def _is_right(candidate: Operator, device_type: str, dtype: torch.dtype, biased: bool) -> bool:
    """Whether the operator gives output and log-sum-exp of a grouped case, causal and not."""
    generator = torch.Generator().manual_seed(0)
    n_pos, d_head, group, scale = 37, 16, 3, 0.3
    q, k, v, bias = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in (
            (2, 2 * group, n_pos, d_head),
            (2, 2, n_pos, d_head),
            (2, 2, n_pos, d_head),
            (2, 2 * group, 1, n_pos),
        )
    )
    bias[0, ..., :5] = -math.inf  # with causality, rows without a key
    bound = 1e-5 if torch.finfo(dtype).eps < 1e-6 else 0.05
    for causal in (True, False):
        scores = q.double() @ k.double().repeat_interleave(group, 1).mT * scale
        if biased:
            scores = scores + bias
        if causal:
            scores = scores.masked_fill(
                ~torch.ones(n_pos, n_pos, dtype=torch.bool).tril(), -math.inf
            )
        empty = (scores == -math.inf).all(dim=-1)
        expected = scores.softmax(dim=-1).nan_to_num() @ v.double().repeat_interleave(group, 1)
        try:
            out, lse = candidate(
                q.to(device_type),
                k.to(device_type),
                v.to(device_type),
                causal,
                bias.to(device_type) if biased else None,
                scale,
            )
        except (RuntimeError, AttributeError, NotImplementedError):
            return False
        wrong = torch.stack(
            (
                (out.cpu().double() - expected).abs().max(),
                (lse.cpu().double() - scores.logsumexp(dim=-1)).masked_fill(empty, 0).abs().max(),
            )
        )
        if not bool((wrong < bound).all()):
            return False
    return True
