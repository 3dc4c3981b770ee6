"""Interventions on heads, as values that a hooked forward pass applies.

Heads exist before the output projection: a head is taken away at `hook_z`, never by slicing
`attn_out`, which is already a sum over heads. Key and value heads are taken away at `hook_k` and
`hook_v`; where query heads share them, one of them stands for a group.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from interp.data.repeated import TokenBatch
from interp.models.watch import HookedModel

Head = tuple[int, int]
Site = Literal["z", "k", "v"]
Hook = tuple[str, Callable]


@runtime_checkable
class Replacement(Protocol):
    """What stands in for a head's own values."""

    def at(
        self,
        layer: int,
        own: Float[Tensor, "batch pos heads d_head"],
        places: Int[Tensor, "batch pos"],
    ) -> Float[Tensor, "batch pos heads d_head"]:
        """The values of every head of a layer; `places` number each sequence's real tokens."""
        ...


@dataclass(frozen=True)
class Zero:
    """Nothing at all. It takes a model off its usual activations."""

    def at(
        self,
        layer: int,
        own: Float[Tensor, "batch pos heads d_head"],
        places: Int[Tensor, "batch pos"],
    ) -> Float[Tensor, "batch pos heads d_head"]:
        return torch.zeros_like(own)


@dataclass(frozen=True)
class Mean:
    """The mean over a reference set, at the same place of a sequence or over all of them.

    `of_layer` has the means `[place, head, d_head]`, one place where they are pooled. A place that
    no token of the reference set counts for keeps its own value: `counted` says which those are.
    """

    of_layer: Sequence[Float[Tensor, "place heads d_head"]]
    counted: Bool[Tensor, " place"]
    pooled: bool = False

    def at(
        self,
        layer: int,
        own: Float[Tensor, "batch pos heads d_head"],
        places: Int[Tensor, "batch pos"],
    ) -> Float[Tensor, "batch pos heads d_head"]:
        means = self.of_layer[layer].to(own)
        if self.pooled:
            return means[0].expand_as(own)
        # A token that does not count may stand behind the last place of the reference.
        within = places < len(means)
        places = places.clamp(max=len(means) - 1)
        known = self.counted.to(own.device)[places] & within
        return torch.where(known[:, :, None, None], means[places], own)


@dataclass(frozen=True)
class Other:
    """The values of another run of the same sizes, by layer: resampling and patching."""

    of_layer: Mapping[int, Float[Tensor, "batch pos heads d_head"]]

    def at(
        self,
        layer: int,
        own: Float[Tensor, "batch pos heads d_head"],
        places: Int[Tensor, "batch pos"],
    ) -> Float[Tensor, "batch pos heads d_head"]:
        return self.of_layer[layer].to(own)


@dataclass(frozen=True)
class Intervention:
    """Heads of any layers whose values are replaced, all at once.

    `site` is `z` for query heads, `k` or `v` for key-value heads. `b_O` stays, since it belongs to
    no head.
    """

    heads: tuple[Head, ...]
    by: Replacement = field(default_factory=Zero)
    site: Site = "z"

    @property
    def layers(self) -> list[int]:
        """The layers it acts in, lowest first."""
        return sorted({layer for layer, _ in self.heads})

    def in_layer(self, layer: int) -> list[int]:
        """The heads it replaces in one layer."""
        return [head for own, head in self.heads if own == layer]

    def replaced(
        self,
        model: HookedModel,
        layer: int,
        own: Float[Tensor, "batch pos heads d_head"],
        places: Int[Tensor, "batch pos"],
    ) -> Float[Tensor, "batch pos heads d_head"]:
        """A layer's values after it."""
        chosen = head_places(model, layer, self.in_layer(layer), self.site)
        changed = own.clone()
        changed[:, :, chosen] = self.by.at(layer, own, places)[:, :, chosen]
        return changed

    def hooks(
        self, model: HookedModel, key_mask: Bool[Tensor, "batch pos"] | None = None
    ) -> list[Hook]:
        """Forward hooks for `run_with_hooks`; `key_mask` is True on real tokens."""

        def hook_for(layer: int) -> Callable:
            def edit(own: Tensor, hook: object) -> Tensor:
                return self.replaced(model, layer, own, token_places(own, key_mask))

            return edit

        return [(site_hook(layer, self.site), hook_for(layer)) for layer in self.layers]


def site_hook(layer: int, site: str) -> str:
    """The hook at which a layer's heads have values of this kind."""
    return f"blocks.{layer}.attn.hook_{site}"


def site_heads(model: HookedModel, layer: int, site: Site) -> tuple[int, ...]:
    """The heads that a layer has at a site; pruned ones are not there."""
    attn = model.blocks[layer].attn
    return attn.heads if site == "z" else attn.key_value_heads


def head_places(model: HookedModel, layer: int, heads: Sequence[int], site: Site) -> list[int]:
    """Where heads stand along the axis of a layer's hook, which leaves pruned ones out."""
    present = site_heads(model, layer, site)
    return [present.index(head) for head in heads]


def token_places(
    values: Shaped[Tensor, "batch pos *rest"], key_mask: Bool[Tensor, "batch pos"] | None
) -> Int[Tensor, "batch pos"]:
    """The number of each real token in its sequence, from 0, on whichever side it is padded."""
    if key_mask is None:
        n_rows, n_pos = values.shape[:2]
        return torch.arange(n_pos, device=values.device).expand(n_rows, n_pos)
    return (key_mask.to(values.device).long().cumsum(dim=1) - 1).clamp(min=0)


def frozen_patterns(
    kept: Mapping[str, Tensor], layers: Sequence[int], copies: int = 1
) -> list[Hook]:
    """Hooks that keep every pattern of some layers as it was in another run.

    `kept` are that run's queries and keys by hook name: they fix the pattern, and no n×n tensor is
    made. Source: Olsson et al. 2022, pattern-preserving ablation.
    """

    def hook_for(value: Tensor) -> Callable:
        def keep(own: Tensor, hook: object) -> Tensor:
            return value.repeat(copies, *[1] * (value.ndim - 1))

        return keep

    names = [site_hook(layer, site) for layer in layers for site in ("q", "k")]
    return [(name, hook_for(kept[name])) for name in names]


def kept_values(model: HookedModel, batch: TokenBatch, names: Sequence[str]) -> dict[str, Tensor]:
    """Some activations of an unablated run, by hook name."""
    kept: dict[str, Tensor] = {}

    def keeper(name: str) -> Callable:
        def keep(value: Tensor, hook: object) -> None:
            kept[name] = value.clone()

        return keep

    run_hooked(model, batch, [(name, keeper(name)) for name in names])
    return kept


def run_hooked(model: HookedModel, batch: TokenBatch, hooks: Sequence[Hook]) -> None:
    """A pass whose logits nobody reads."""
    masked = {} if batch.key_mask is None else {"attention_mask": batch.key_mask}
    model.run_with_hooks(batch.tokens, fwd_hooks=list(hooks), return_type=None, **masked)
