"""Attention heads that share key-value heads: MHA, GQA and MQA."""

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from interp.config import GroupedAttentionConfig, ModelConfig
from interp.models.head_attention import HeadAttention, projection
from interp.models.kv_cache import Past
from interp.models.layers import HeadNorm, Rotation, bias_of, rotate


class GroupedAttention(HeadAttention):
    """MHA, GQA and MQA: `n_heads` query heads over `n_key_value_heads` key and value heads."""

    def __init__(self, config: ModelConfig, layer: int):
        heads = config.attention
        assert isinstance(heads, GroupedAttentionConfig)
        super().__init__(config, layer, config.d_head)
        self._uneven = _uneven_groups(
            self.heads, self.key_value_heads, heads.n_heads // config.n_key_value_heads
        )
        kv_width = self.n_key_value_heads * self.d_head
        self.q_proj = projection(config.d_model, self.n_heads * self.d_head, bias=heads.bias)
        self.k_proj = projection(config.d_model, kv_width, bias=heads.bias)
        self.v_proj = projection(config.d_model, kv_width, bias=heads.bias)
        self._add_output(config)
        if heads.qk_norm:
            self.q_norm = HeadNorm(self.d_head, config.eps)
            self.k_norm = HeadNorm(self.d_head, config.eps)
        self.qk_norm = heads.qk_norm
        # Zero is an even mix of a key and the one before it.
        self.smear = (
            nn.Parameter(torch.zeros(self.n_key_value_heads)) if heads.smeared_keys else None
        )

    def forward(
        self,
        x: Float[Tensor, "batch pos d_model"],
        *,
        rotation: Rotation | None = None,
        shortformer: Float[Tensor, "#batch pos d_model"] | None = None,
        key_mask: Bool[Tensor, "batch pos"] | None = None,
        last: int | None = None,
        past: Past | None = None,
    ) -> Float[Tensor, "batch kept d_model"]:
        """What the layer adds to the residual stream, at the `last` positions where that is given.

        `rotation` turns queries and keys, after their norm where they have one. `shortformer` is
        added to the inputs of queries and keys, never to those of values. With a `past` the tokens
        follow those that it holds; hooks see the new tokens' queries, keys and values alone.
        """
        placed = x if shortformer is None else x + shortformer
        q = self.q_proj(placed).unflatten(2, (self.n_heads, self.d_head))
        k = self.k_proj(placed).unflatten(2, (self.n_key_value_heads, self.d_head))
        v = self.v_proj(x).unflatten(2, (self.n_key_value_heads, self.d_head))
        if self.smear is not None:
            k = self._smeared(k, key_mask, past)
        q, k, v = self.hook_q(q), self.hook_k(k), self.hook_v(v)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if past is not None and past.key_rotation is not None:
            assert rotation is not None  # only rotary positions can be places in a cache
            k, v = past.store.extend((k, v))
            q = self.hook_rot_q(rotate(q, rotation))
            k = self.hook_rot_k(rotate(k, past.key_rotation))
        else:
            if rotation is not None:
                q, k = self.hook_rot_q(rotate(q, rotation)), self.hook_rot_k(rotate(k, rotation))
            if past is not None:
                k, v = past.store.extend((k, v))
        if self._uneven is not None:
            k, v = k[:, :, self._uneven], v[:, :, self._uneven]
        if past is not None:
            key_mask = past.key_mask
        return self._written(x, q, k, v, key_mask, last, observed=past is None)

    def _smeared(
        self,
        k: Float[Tensor, "batch pos heads d_head"],
        key_mask: Bool[Tensor, "batch pos"] | None,
        past: Past | None,
    ) -> Float[Tensor, "batch pos heads d_head"]:
        assert self.smear is not None  # the caller has asked
        if past is None:
            return _smear_keys(k, self.smear, key_mask)
        before, past.store.last_key = past.store.last_key, k[:, -1:]
        if before is None:
            return _smear_keys(k, self.smear, key_mask)
        real = key_mask
        if real is not None or past.before_real is not None:
            own = k.new_ones(k.shape[:2], dtype=torch.bool) if real is None else real
            first = own[:, :1] if past.before_real is None else past.before_real[:, None]
            real = torch.cat((first, own), dim=1)
        return _smear_keys(torch.cat((before, k), dim=1), self.smear, real)[:, 1:]

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


def _uneven_groups(
    heads: tuple[int, ...], key_value_heads: tuple[int, ...], group: int
) -> list[int] | None:
    """The place of each query head's key-value head; None where all are read by as many."""
    read = [key_value_heads.index(head // group) for head in heads]
    return None if len({read.count(place) for place in read}) <= 1 else read


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
