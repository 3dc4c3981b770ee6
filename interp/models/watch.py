"""Watching every layer's attention during one forward pass, and keeping only what it is reduced to.

No n×n tensor outlives its layer.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from interp.models.transformer import FlatConfig


@runtime_checkable
class HookedModel(Protocol):
    """What an analysis asks of a model: ours and TransformerLens's bridge alike."""

    @property
    def cfg(self) -> FlatConfig:
        """The model's facts under TransformerLens's names."""
        ...

    def run_with_hooks(self, *args: object, **kwargs: object) -> object:
        """A forward pass with temporary hooks."""
        ...


@contextmanager
def looking_at(model: HookedModel) -> Iterator[None]:
    """Neither gradients nor dropout; every part of the model gets its own mode back."""
    parts = list(model.modules()) if isinstance(model, nn.Module) else []
    modes = [part.training for part in parts]
    for part in parts:
        part.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode


@dataclass(frozen=True)
class LayerAttention:
    """The attention of one layer on one batch, as an analysis sees it."""

    layer: int
    pattern: Float[Tensor, "batch n_heads query key"]
    key_mask: Bool[Tensor, "batch key"]

    def prob_at(self, keys: Int[Tensor, "batch query"]) -> Float[Tensor, "batch n_heads query"]:
        """Attention of each query to one key of its own; 0 where `keys` is -1."""
        index = keys.clamp(min=0)[:, None, :, None].expand(-1, self.pattern.shape[1], -1, 1)
        probability = self.pattern.gather(3, index).squeeze(3).float()
        return probability.masked_fill(keys[:, None, :] < 0, 0.0)


def watch_attention(
    model: HookedModel,
    tokens: Int[Tensor, "batch pos"],
    reduce: Callable[[LayerAttention], Mapping[str, Tensor]],
    key_mask: Bool[Tensor, "batch pos"] | None = None,
) -> list[dict[str, Tensor]]:
    """What `reduce` makes of each layer's attention, by layer; the model is left as it was."""
    reduced: list[dict[str, Tensor]] = []
    device = torch.device(str(model.cfg.device))
    tokens = tokens.to(device)
    real = torch.ones_like(tokens, dtype=torch.bool) if key_mask is None else key_mask.to(device)

    def hook_for(layer: int) -> tuple[str, Callable]:
        def look(pattern: Tensor, hook: object) -> None:
            measured = reduce(LayerAttention(layer, pattern.detach(), real))
            reduced.append({name: value.cpu() for name, value in measured.items()})

        return f"blocks.{layer}.attn.hook_pattern", look

    masked = {} if key_mask is None else {"attention_mask": real}
    with looking_at(model):
        model.run_with_hooks(
            tokens,
            fwd_hooks=[hook_for(layer) for layer in range(model.cfg.n_layers)],
            return_type=None,
            **masked,
        )
    return reduced


def uniform_attention(key_mask: Bool[Tensor, "batch pos"], n_heads: int) -> LayerAttention:
    """What heads without any preference do: every allowed key gets the same share."""
    n_pos = key_mask.shape[1]
    allowed = key_mask[:, None, :] & torch.ones(n_pos, n_pos, dtype=torch.bool).tril()
    share = allowed / allowed.sum(dim=-1, keepdim=True).clamp(min=1)
    return LayerAttention(0, share[:, None].expand(-1, n_heads, -1, -1), key_mask)
