"""What every kind of attention has in common: from queries, keys and values to the output.

Scores and pattern are tensors only in a call in which somebody hooked one of them; otherwise the
fused operator runs. An observer sees each call's attention without either. No loop over heads.
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
from interp.models.layers import bias_of, hook_point
from interp.models.masks import AttentionMask
from interp.models.patterns import Pattern, QueryKeys, SinkQueryKeys, Weights
from interp.models.sink_attention import sink_attention


class HeadAttention(nn.Module):
    """Heads that read values where their queries meet keys, and write into the residual stream.

    `heads` and `key_value_heads` are the numbers of those that are there, counted before any was
    pruned; weights, hooks and counts hold these alone. A layer without heads adds `b_O`, and its
    hooks hold tensors without elements.

    Raw PyTorch forward hooks on a hook point are not seen; use the model's `hooks`,
    `run_with_hooks`, `run_with_cache` or `add_hook`.
    """

    def __init__(self, config: ModelConfig, layer: int, d_value: int):
        super().__init__()
        self.heads = config.heads(layer)
        self.key_value_heads = config.key_value_heads(layer)
        self.n_heads = len(self.heads)
        self.n_key_value_heads = len(self.key_value_heads)
        self.d_head = config.d_head
        self.d_value = d_value
        self.layer = layer
        self.scale = config.attention_scale(layer)
        self.window = config.window(layer)
        self.dropout = config.dropout
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

    def _add_output(self, config: ModelConfig) -> None:
        """Make what comes behind the values; in this order, since a seed draws weights in order."""
        self.o_proj = projection(
            self.n_heads * self.d_value, config.d_model, bias=bool(config.attention.output_bias)
        )
        self.softmax = config.attention.sink_logit
        learned = self.softmax == "learned"
        self.sink_logit = nn.Parameter(torch.zeros(self.n_heads)) if learned else None
        self.gate = (
            projection(config.d_model, self.n_heads, bias=True)
            if config.attention.gated_output
            else None
        )

    def _written(
        self,
        x: Float[Tensor, "batch pos d_model"],
        q: Float[Tensor, "batch pos n_heads d_key"],
        k: Float[Tensor, "batch key n_key_value_heads d_key"],
        v: Float[Tensor, "batch key n_key_value_heads d_value"],
        key_mask: Bool[Tensor, "batch key"] | None,
        last: int | None,
        *,
        observed: bool,
    ) -> Float[Tensor, "batch kept d_model"]:
        """What the heads add to the residual stream; `x` is what the layer was given."""
        if self.n_heads:
            mask = AttentionMask(key_mask=key_mask, window=self.window)
            z, weights = self._attend(q, k, v, mask)
            if self.gate is not None:
                z = z * self.gate(x).sigmoid()[..., None]
            z = self.hook_z(z)
            if self.observer is not None and observed:
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
        q: Float[Tensor, "batch query n_heads d_key"],
        k: Float[Tensor, "batch key n_key_value_heads d_key"],
        v: Float[Tensor, "batch key n_key_value_heads d_value"],
        mask: AttentionMask,
    ) -> tuple[Float[Tensor, "batch query n_heads d_value"], Weights]:
        # Functional attention applies whatever probability it is given, in eval too.
        dropout = self.dropout if self.training else 0.0
        sink: Tensor | None = self.sink_logit
        if self.softmax == "zero":
            sink = q.new_zeros(self.n_heads)
        if not (self.hook_attn_scores.has_hooks() or self.hook_pattern.has_hooks()):
            if sink is None:
                z, lse = fused_attention(q, k, v, scale=self.scale, mask=mask, dropout=dropout)
                return z, QueryKeys(q, k, self.scale, mask, lse)
            z, lse = sink_attention(q, k, v, sink, scale=self.scale, mask=mask, dropout=dropout)
            return z, SinkQueryKeys(QueryKeys(q, k, self.scale, mask, lse), sink)
        allowed = mask.allowed(q.shape[1], k.shape[1], q.device)
        scores = self.hook_attn_scores(attention_scores(q, k, allowed, self.scale))
        # Hooks may have edited it: no statistic of queries and keys tells what it is.
        pattern = self.hook_pattern(attention_pattern(scores, sink))
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
        weights: Weights,
        v: Float[Tensor, "batch pos n_key_value_heads d_value"],
        z: Float[Tensor, "batch pos n_heads d_value"],
        key_mask: Bool[Tensor, "batch pos"] | None,
    ) -> LayerAttention:
        """This call's attention as an observer sees it."""
        if key_mask is None:
            key_mask = torch.ones(z.shape[:2], dtype=torch.bool, device=z.device)
        return LayerAttention(
            self.layer, weights, key_mask, window=self.window, v=v, z=z, W_O=self.W_O
        )

    @property
    def W_O(self) -> Float[Tensor, "n_heads d_value d_model"]:
        """Output weights of each head, in TransformerLens's layout."""
        return rearrange(self.o_proj.weight, "m (h d) -> h d m", d=self.d_value)

    @property
    def b_O(self) -> Float[Tensor, " d_model"]:
        """Output bias, which belongs to no head; zeros where there is none."""
        return bias_of(self.o_proj)


def projection(n_in: int, n_out: int, *, bias: bool) -> nn.Linear:
    """A projection, which may be from or to nothing."""
    return (nn.Linear if n_in and n_out else _EmptyLinear)(n_in, n_out, bias=bias)


class _EmptyLinear(nn.Linear):
    """A projection from or to nothing: torch would warn that it has no weights to draw."""

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)
