"""Watching every layer's attention during one forward pass, and keeping only what it is reduced to.

No n×n tensor outlives its layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from interp.errors import ModelError
from interp.models.hub import Source
from interp.models.modes import WholeModel
from interp.models.modes import looking_at as looking_at
from interp.models.transformer import FlatConfig, HookPoint
from interp.models.vocabulary import Vocabulary


@runtime_checkable
class HookedModel(WholeModel, Protocol):
    """What analyses ask of a model: our `Transformer` and a `BridgedModel` alike."""

    vocabulary: Vocabulary | None
    source: Source | None

    @property
    def cfg(self) -> FlatConfig:
        """The model's facts under TransformerLens's names."""
        ...

    @property
    def hook_dict(self) -> Mapping[str, HookPoint]:
        """Every hook by name."""
        ...

    @property
    def blocks(self) -> Any:  # a ModuleList or a list: they share no type
        """The layers by index; each answers `attn.W_O` and `attn.b_O`."""
        ...

    def to_tokens(self, text: object) -> Int[Tensor, "batch pos"]:
        """Token ids on the model's device."""
        ...

    @property
    def run_with_hooks(self) -> Callable[..., object]:
        """A forward pass with temporary hooks: `(tokens, fwd_hooks=, attention_mask=, ...)`."""
        ...

    @property
    def run_with_cache(self) -> Callable[..., tuple[object, Mapping]]:
        """A forward pass, and copies of its activations by hook name."""
        ...


def as_hooked(model: object) -> HookedModel:
    """The model as analyses take it; a raw `TransformerBridge` is wrapped, sharing its weights.

    Raises: ModelError for anything else, saying how to load it.
    """
    if isinstance(model, HookedModel):
        return model
    kind = type(model).__name__
    if isinstance(model, nn.Module):
        from transformer_lens.model_bridge import TransformerBridge

        from interp.models.bridge import BridgedModel

        if isinstance(model, TransformerBridge):
            return BridgedModel(model)
        raise ModelError(
            f"{kind} has no hooks: give interp.load_model(model), or interp.load_model(model, "
            "backend='bridge')"
        )
    raise ModelError(f"a model was expected, got {kind}: interp.load_model(ref) makes one")


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

    with looking_at(model):
        model.run_with_hooks(
            tokens,
            fwd_hooks=[hook_for(layer) for layer in range(model.cfg.n_layers)],
            attention_mask=None if key_mask is None else real,
            return_type=None,
        )
    return reduced


def uniform_attention(
    key_mask: Bool[Tensor, "batch pos"],
    n_heads: int,
    attention_dir: Literal["causal", "bidirectional"] = "causal",
) -> LayerAttention:
    """What heads without any preference do: every allowed key gets the same share."""
    n_pos = key_mask.shape[1]
    reach = torch.ones(n_pos, n_pos, dtype=torch.bool, device=key_mask.device)
    allowed = key_mask[:, None, :] & (reach.tril() if attention_dir == "causal" else reach)
    share = allowed / allowed.sum(dim=-1, keepdim=True).clamp(min=1)
    return LayerAttention(0, share[:, None].expand(-1, n_heads, -1, -1), key_mask)
