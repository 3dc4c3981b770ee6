"""Watching every layer's attention during one forward pass, and keeping what it is reduced to."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from interp.errors import ModelError
from interp.models.direct_path import unembedding_of
from interp.models.hub import Source
from interp.models.layer_attention import LayerAttention
from interp.models.modes import WholeModel
from interp.models.modes import looking_at as looking_at
from interp.models.patterns import Pattern
from interp.models.transformer import FlatConfig, HookPoint, Transformer
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
        """The layers by index; each answers `attn.heads`, `attn.key_value_heads`, `attn.W_O`,
        `attn.b_O` and `attn.window`."""
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


def watch_attention(
    model: HookedModel,
    tokens: Int[Tensor, "batch pos"],
    reduce: Callable[[LayerAttention], Mapping[Any, Tensor]],
    key_mask: Bool[Tensor, "batch pos"] | None = None,
) -> list[dict[Any, Tensor]]:
    """What `reduce` makes of each layer's attention, by layer, in one forward pass.

    Our model computes no pattern for it: queries and keys are looked at, with the log-sum-exp that
    its attention leaves. Where hooks of the user's edit scores or pattern, that pattern counts. A
    bridged model computes every pattern anyway, and those are looked at. Nothing outlives its layer
    but what was reduced, on the CPU. Of a layer whose heads are all pruned that is nothing. The
    model is left as it was.
    """
    return watch_pass(model, tokens, reduce, key_mask)[0]


def watch_pass(
    model: HookedModel,
    tokens: Int[Tensor, "batch pos"],
    reduce: Callable[[LayerAttention], Mapping[Any, Tensor]],
    key_mask: Bool[Tensor, "batch pos"] | None = None,
    *,
    fwd_hooks: Sequence[tuple[str, Callable]] = (),
    losses: bool = False,
) -> tuple[list[dict[Any, Tensor]], Float[Tensor, "batch pos-1"] | None]:
    """As `watch_attention`, in a pass with temporary hooks of its own, and its next-token losses.

    `fwd_hooks` are those of `run_with_hooks`: what they change is what is watched. Losses are in
    nats, element p that of token p + 1, 0 on padding; None unless they are asked for.

    Raises: ModelError for losses of an encoder, or a hook that the model does not have.
    """
    reduced: dict[int, dict[Any, Tensor]] = {}
    device = torch.device(str(model.cfg.device))
    tokens = tokens.to(device)
    key_mask = None if key_mask is None else key_mask.to(device)

    unembedding = unembedding_of(model)

    def look(attention: LayerAttention) -> None:
        attention.unembedding = unembedding
        measured = reduce(attention)
        reduced[attention.layer] = {name: value.cpu() for name, value in measured.items()}

    with looking_at(model), ExitStack() as stack:
        if isinstance(model, Transformer):
            stack.enter_context(_observed(model, look))
            watching = []
        else:
            watching = _pattern_hooks(model, tokens, look, key_mask)
        found = model.run_with_hooks(
            tokens,
            fwd_hooks=[*fwd_hooks, *watching],
            attention_mask=key_mask,
            **({"return_type": "loss", "loss_per_token": True} if losses else _NOTHING),
        )
    layers = [reduced[n] if model.cfg.heads(n) else {} for n in range(model.cfg.n_layers)]
    return layers, found if isinstance(found, Tensor) else None


_NOTHING: dict[str, object] = {"return_type": None}
"""A pass for its hooks alone."""


def layer_window(model: HookedModel, layer: int) -> int | None:
    """How many of the latest keys a query of this layer sees; None for all."""
    return model.blocks[layer].attn.window


@contextmanager
def _observed(model: Transformer, look: Callable[[LayerAttention], None]) -> Iterator[None]:
    blocks: Any = model.blocks  # a ModuleList says only Module
    layers = [block.attn for block in blocks]
    before = [attn.observer for attn in layers]
    try:
        for attn in layers:
            attn.observer = look
        yield
    finally:
        for attn, observer in zip(layers, before, strict=True):
            attn.observer = observer


def _pattern_hooks(
    model: HookedModel,
    tokens: Int[Tensor, "batch pos"],
    look: Callable[[LayerAttention], None],
    key_mask: Bool[Tensor, "batch pos"] | None,
) -> list[tuple[str, Callable]]:
    """Hooks that show each layer's pattern, with its values where the model has them."""
    real = torch.ones_like(tokens, dtype=torch.bool) if key_mask is None else key_mask
    causal = model.cfg.attention_dir == "causal"

    def hooks_for(layer: int) -> list[tuple[str, Callable]]:
        names = {kind: f"blocks.{layer}.attn.hook_{kind}" for kind in ("pattern", "v", "z")}
        if not {names["v"], names["z"]} <= set(model.hook_dict):
            del names["v"], names["z"]
        held: dict[str, Tensor] = {}

        def hook_for(kind: str) -> Callable:
            def hold(value: Tensor, hook: object) -> None:
                held[kind] = value
                if len(held) == len(names):  # in which order they come depends on the model
                    attn = model.blocks[layer].attn if "z" in held else None
                    look(
                        LayerAttention(
                            layer,
                            Pattern(held["pattern"]),
                            real,
                            causal=causal,
                            window=layer_window(model, layer),
                            v=held.get("v"),
                            z=held.get("z"),
                            W_O=None if attn is None else attn.W_O,
                        )
                    )
                    held.clear()

            return hold

        return [(name, hook_for(kind)) for kind, name in names.items()]

    return [pair for layer in range(model.cfg.n_layers) for pair in hooks_for(layer)]
