"""Attention heads as a module: projections, positions, hooks, and the choice of path.

Scores and pattern are tensors only in a call in which somebody hooked one of them; otherwise the
fused operator runs. An observer sees each call's attention without either. The heads share one
projection each for Q, K, V and O: no loop over heads.
"""

from collections.abc import Callable

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from interp.config import ModelConfig
from interp.models.attention import (
    attention_pattern,
    attention_scores,
    fused_attention,
    weighted_values,
)
from interp.models.layer_attention import LayerAttention
from interp.models.layers import HeadNorm, Rotation, bias_of, hook_point, rotate
from interp.models.masks import AttentionMask
from interp.models.patterns import Pattern, QueryKeys


class GroupedAttention(nn.Module):
    """MHA, GQA and MQA: `n_heads` query heads over `n_key_value_heads` key and value heads.

    `heads` and `key_value_heads` are the numbers of those that are there, counted before any was
    pruned; weights, hooks and counts hold these alone. A layer without heads adds `b_O`, and its
    hooks hold tensors without elements.

    Raw PyTorch forward hooks on a hook point are not seen; use the model's `hooks`,
    `run_with_hooks`, `run_with_cache` or `add_hook`.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        heads = config.attention
        self.heads = config.heads(layer)
        self.key_value_heads = config.key_value_heads(layer)
        self.n_heads = len(self.heads)
        self.n_key_value_heads = len(self.key_value_heads)
        self._uneven = _uneven_groups(
            self.heads, self.key_value_heads, heads.n_heads // config.n_key_value_heads
        )
        self.d_head = config.d_head
        self.layer = layer
        self.scale = config.attention_scale(layer)
        self.window = config.window(layer)
        self.dropout = config.dropout
        kv_width = self.n_key_value_heads * self.d_head
        self.q_proj = _projection(config.d_model, self.n_heads * self.d_head, bias=heads.bias)
        self.k_proj = _projection(config.d_model, kv_width, bias=heads.bias)
        self.v_proj = _projection(config.d_model, kv_width, bias=heads.bias)
        self.o_proj = _projection(
            self.n_heads * self.d_head, config.d_model, bias=bool(heads.output_bias)
        )
        if heads.qk_norm:
            self.q_norm = HeadNorm(self.d_head, config.eps)
            self.k_norm = HeadNorm(self.d_head, config.eps)
        self.qk_norm = heads.qk_norm
        # Zero is an even mix of a key and the one before it.
        self.smear = (
            nn.Parameter(torch.zeros(self.n_key_value_heads)) if heads.smeared_keys else None
        )
        self.observer: Callable[[LayerAttention], None] | None = None
        self.hook_q = hook_point()
        self.hook_k = hook_point()
        self.hook_v = hook_point()
        if config.positional_embedding_type == "rotary":
            self.hook_rot_q = hook_point()
            self.hook_rot_k = hook_point()
        self.hook_attn_scores = hook_point()
        self.hook_pattern = hook_point()
        self.hook_z = hook_point()
        self.hook_result = hook_point()

    def forward(
        self,
        x: Float[Tensor, "batch pos d_model"],
        *,
        rotation: Rotation | None = None,
        shortformer: Float[Tensor, "#batch pos d_model"] | None = None,
        key_mask: Bool[Tensor, "batch pos"] | None = None,
        last: int | None = None,
    ) -> Float[Tensor, "batch kept d_model"]:
        """What the layer adds to the residual stream, at the `last` positions where that is given.

        `rotation` turns queries and keys, after their norm where they have one. `shortformer` is
        added to the inputs of queries and keys, never to those of values.
        """
        placed = x if shortformer is None else x + shortformer
        q = self.q_proj(placed).unflatten(2, (self.n_heads, self.d_head))
        k = self.k_proj(placed).unflatten(2, (self.n_key_value_heads, self.d_head))
        v = self.v_proj(x).unflatten(2, (self.n_key_value_heads, self.d_head))
        if self.smear is not None:
            k = _smear_keys(k, self.smear, key_mask)
        q, k, v = self.hook_q(q), self.hook_k(k), self.hook_v(v)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = self.hook_rot_q(rotate(q, rotation)), self.hook_rot_k(rotate(k, rotation))
        if self._uneven is not None:
            k, v = k[:, :, self._uneven], v[:, :, self._uneven]
        if self.n_heads:
            mask = AttentionMask(key_mask=key_mask, window=self.window)
            z, weights = self._attend(q, k, v, mask)
            z = self.hook_z(z)
            if self.observer is not None:
                self.observer(self._seen(weights, v, z, key_mask))
        else:
            z = self.hook_z(self._nothing_attended(q))
        if last is not None:
            z = z[:, -last:]
        if self.hook_result.has_hooks():
            result = torch.einsum("bphd,hdm->bphm", z, self.W_O)
            return self.hook_result(result).sum(dim=2) + self.b_O
        return self.o_proj(z.flatten(2))

    def _attend(
        self,
        q: Float[Tensor, "batch pos n_heads d_head"],
        k: Float[Tensor, "batch pos n_key_value_heads d_head"],
        v: Float[Tensor, "batch pos n_key_value_heads d_head"],
        mask: AttentionMask,
    ) -> tuple[Float[Tensor, "batch pos n_heads d_head"], QueryKeys | Pattern]:
        # Functional attention applies whatever probability it is given, in eval too.
        dropout = self.dropout if self.training else 0.0
        if not (self.hook_attn_scores.has_hooks() or self.hook_pattern.has_hooks()):
            z, lse = fused_attention(q, k, v, scale=self.scale, mask=mask, dropout=dropout)
            return z, QueryKeys(q, k, self.scale, mask, lse)
        allowed = mask.allowed(q.shape[1], k.shape[1], q.device)
        scores = self.hook_attn_scores(attention_scores(q, k, allowed, self.scale))
        # Hooks may have edited it: no statistic of queries and keys tells what it is.
        pattern = self.hook_pattern(attention_pattern(scores))
        z = weighted_values(nn.functional.dropout(pattern, dropout), v)
        return z, Pattern(pattern)

    def _nothing_attended(
        self, q: Float[Tensor, "batch pos 0 d_head"]
    ) -> Float[Tensor, "batch pos 0 d_head"]:
        """The z of no head, which is as empty as the queries; hooks get what they expect of it."""
        if self.hook_attn_scores.has_hooks() or self.hook_pattern.has_hooks():
            square = q.new_zeros(len(q), 0, q.shape[1], q.shape[1])
            self.hook_pattern(self.hook_attn_scores(square))
        return q

    def _seen(
        self,
        weights: QueryKeys | Pattern,
        v: Float[Tensor, "batch pos n_key_value_heads d_head"],
        z: Float[Tensor, "batch pos n_heads d_head"],
        key_mask: Bool[Tensor, "batch pos"] | None,
    ) -> LayerAttention:
        """This call's attention as an observer sees it."""
        if key_mask is None:
            key_mask = torch.ones(z.shape[:2], dtype=torch.bool, device=z.device)
        return LayerAttention(
            self.layer, weights, key_mask, window=self.window, v=v, z=z, W_O=self.W_O
        )

    @property
    def W_Q(self) -> Float[Tensor, "n_heads d_model d_head"]:
        """Query weights, in TransformerLens's layout."""
        return rearrange(self.q_proj.weight, "(h d) m -> h m d", d=self.d_head)

    @property
    def W_K(self) -> Float[Tensor, "n_key_value_heads d_model d_head"]:
        """Key weights, in TransformerLens's layout; not repeated for grouped heads."""
        return rearrange(self.k_proj.weight, "(h d) m -> h m d", d=self.d_head)

    @property
    def W_V(self) -> Float[Tensor, "n_key_value_heads d_model d_head"]:
        """Value weights, in TransformerLens's layout; not repeated for grouped heads."""
        return rearrange(self.v_proj.weight, "(h d) m -> h m d", d=self.d_head)

    @property
    def W_O(self) -> Float[Tensor, "n_heads d_head d_model"]:
        """Output weights of each head, in TransformerLens's layout."""
        return rearrange(self.o_proj.weight, "m (h d) -> h d m", d=self.d_head)

    @property
    def b_Q(self) -> Float[Tensor, "n_heads d_head"]:
        """Query bias; zeros where there is none."""
        return rearrange(bias_of(self.q_proj), "(h d) -> h d", d=self.d_head)

    @property
    def b_K(self) -> Float[Tensor, "n_key_value_heads d_head"]:
        """Key bias; zeros where there is none."""
        return rearrange(bias_of(self.k_proj), "(h d) -> h d", d=self.d_head)

    @property
    def b_V(self) -> Float[Tensor, "n_key_value_heads d_head"]:
        """Value bias; zeros where there is none. `hook_v` already holds it."""
        return rearrange(bias_of(self.v_proj), "(h d) -> h d", d=self.d_head)

    @property
    def b_O(self) -> Float[Tensor, " d_model"]:
        """Output bias, which belongs to no head; zeros where there is none."""
        return bias_of(self.o_proj)


def _uneven_groups(
    heads: tuple[int, ...], key_value_heads: tuple[int, ...], group: int
) -> list[int] | None:
    """The place of each query head's key-value head; None where all are read by as many."""
    read = [key_value_heads.index(head // group) for head in heads]
    return None if len({read.count(place) for place in read}) <= 1 else read


def _projection(n_in: int, n_out: int, *, bias: bool) -> nn.Linear:
    return (nn.Linear if n_in and n_out else _EmptyLinear)(n_in, n_out, bias=bias)


class _EmptyLinear(nn.Linear):
    """A projection from or to nothing: torch would warn that it has no weights to draw."""

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def _smear_keys(
    k: Float[Tensor, "batch pos heads d_head"],
    logit: Float[Tensor, " heads"],
    key_mask: Bool[Tensor, "batch pos"] | None,
) -> Float[Tensor, "batch pos heads d_head"]:
    """Each key mixed with the one before it; the first real token keeps its own.

    Source: Olsson et al. 2022, "In-context Learning and Induction Heads", smeared keys.
    """
    before = torch.cat((k[:, :1], k[:, :-1]), dim=1)
    if key_mask is not None:
        has_before = torch.cat((key_mask[:, :1], key_mask[:, :-1]), dim=1)
        before = torch.where(has_before[:, :, None, None], before, k)
    share = logit.sigmoid()[:, None].to(k.dtype)  # under autocast the logit stays float32
    return share * k + (1 - share) * before
