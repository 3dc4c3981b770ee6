"""A model's facts in one flat table, under TransformerLens's names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from interp.config.model import heads_left, key_value_heads_left


@dataclass(frozen=True)
class FlatConfig:
    """The model's facts under TransformerLens's names. Changing one does not change the model."""

    model_name: str
    n_layers: int
    n_heads: int
    n_key_value_heads: int
    d_model: int
    d_head: int
    d_mlp: int | None
    d_vocab: int
    n_ctx: int
    act_fn: str | None
    normalization_type: str | None
    positional_embedding_type: str
    attention_dir: Literal["causal", "bidirectional"]
    window_size: int | None
    attn_only: bool
    gated_mlp: bool
    eps: float
    rotary_base: float
    tie_word_embeddings: bool
    bos_token_id: int | None
    device: str
    dtype: torch.dtype
    sink_logit: str = "none"
    """`zero` or `learned` where a term of every row's softmax belongs to no key."""
    pruned_heads: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """The query heads that each layer lacks; `n_heads` and `n_key_value_heads` count them."""

    @property
    def rows(self) -> str:
        """What a row of a pattern sums to, in words; nothing where it is 1."""
        if self.sink_logit == "none":
            return ""
        return f"sum to 1 at most: a {self.sink_logit} sink logit in every softmax has the rest"

    def heads(self, layer: int) -> tuple[int, ...]:
        """The query heads that a layer has, by their numbers before any was pruned."""
        return heads_left(self.n_heads, self.pruned_heads.get(layer, ()))

    def key_value_heads(self, layer: int) -> tuple[int, ...]:
        """The key-value heads that a layer has, by their numbers before any was pruned."""
        pruned = self.pruned_heads.get(layer, ())
        return key_value_heads_left(self.n_heads, self.n_key_value_heads, pruned)
