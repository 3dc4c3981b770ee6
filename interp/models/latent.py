"""Multi-head latent attention (MLA): keys and values of all heads, made from one latent a token.

Row vectors, x the layer's input: c = norm(x W_DKV); k_h = [c W_UK_h ; rotary(x W_KR)], whose second
part all heads share; v_h = c W_UV_h; the query of a head is [c' W_UQ_h ; rotary(c' W_QR_h)], with
c' = norm(x W_DQ), or x itself. A cache holds c and x W_KR, and makes keys and values of them again.

Source: DeepSeek-AI 2024, "DeepSeek-V2" (arXiv 2405.04434), section 2.1 and appendix C; the norms of
the latents are told there in section 3.1.2.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from interp.config import LatentAttentionConfig, ModelConfig
from interp.models.head_attention import HeadAttention, projection
from interp.models.kv_cache import Past
from interp.models.layers import RMSNorm, Rotation, rotate


class LatentAttention(HeadAttention):
    """MLA: every head has keys and values of its own, made from a latent that is narrow.

    Hooks are those of grouped heads, as wide as what is attended with: `hook_q` and `hook_k` hold
    both parts before rotary positions, `hook_rot_q` and `hook_rot_k` after them, and `hook_v` the
    values. With a cache hooks see the keys and values of all tokens, which are made again.
    """

    def __init__(self, config: ModelConfig, layer: int):
        heads = config.attention
        assert isinstance(heads, LatentAttentionConfig)
        assert heads.d_value is not None  # resolved by its validator
        super().__init__(config, layer, heads.d_value)
        self.d_rope = heads.d_rope
        d_query = config.d_model
        self.q_down_proj: nn.Linear | None = None
        if heads.d_query_latent is not None:
            d_query = heads.d_query_latent
            self.q_down_proj = projection(config.d_model, d_query, bias=False)
            self.q_latent_norm = RMSNorm(d_query, config.eps)
        self.q_proj = projection(d_query, self.n_heads * (self.d_head + self.d_rope), bias=False)
        self.kv_down_proj = projection(config.d_model, heads.d_latent, bias=False)
        self.kv_latent_norm = RMSNorm(heads.d_latent, config.eps)
        self.k_rope_proj = projection(config.d_model, self.d_rope, bias=False)
        self.k_proj = projection(heads.d_latent, self.n_heads * self.d_head, bias=False)
        self.v_proj = projection(heads.d_latent, self.n_heads * self.d_value, bias=False)
        self._add_output(config)

    def forward(
        self,
        x: Float[Tensor, "batch pos d_model"],
        *,
        rotation: Rotation | None = None,
        shortformer: None = None,
        key_mask: Bool[Tensor, "batch pos"] | None = None,
        last: int | None = None,
        past: Past | None = None,
    ) -> Float[Tensor, "batch kept d_model"]:
        """What the layer adds to the residual stream, at the `last` positions where that is given.

        `rotation` turns the rotary parts of queries and, without a `past`, of keys.
        """
        assert rotation is not None  # the config has asked for rotary positions
        source = x
        if self.q_down_proj is not None:
            source = self.q_latent_norm(self.q_down_proj(x))
        q = self.q_proj(source).unflatten(2, (self.n_heads, -1))
        latent, shared = self.kv_latent_norm(self.kv_down_proj(x)), self.k_rope_proj(x)
        key_rotation = rotation
        if past is not None:
            assert past.key_rotation is not None
            latent, shared = past.store.extend((latent, shared))
            key_mask, key_rotation = past.key_mask, past.key_rotation
        k = self.k_proj(latent).unflatten(2, (self.n_heads, -1))
        k = torch.cat((k, shared[:, :, None].expand(-1, -1, self.n_heads, -1)), dim=3)
        v = self.v_proj(latent).unflatten(2, (self.n_heads, -1))
        q, k, v = self.hook_q(q), self.hook_k(k), self.hook_v(v)
        q, k = (
            self.hook_rot_q(self._turned(q, rotation)),
            self.hook_rot_k(self._turned(k, key_rotation)),
        )
        return self._written(x, q, k, v, key_mask, last, observed=past is None)

    def _turned(
        self, x: Float[Tensor, "batch pos n_heads d_key"], rotation: Rotation
    ) -> Float[Tensor, "batch pos n_heads d_key"]:
        return torch.cat((x[..., : self.d_head], rotate(x[..., self.d_head :], rotation)), dim=3)
