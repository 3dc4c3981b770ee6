"""What a model keeps of the tokens it has seen, so that the next ones need no second pass of them.

A layer's store has parts: keys and values, or the latent that both are made from. One invariant:
`real` and `n_seen` are of all tokens that went through, whatever a layer keeps of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from interp.config import ModelConfig
from interp.errors import ModelError, ShapeError
from interp.models.layers import Rotary, Rotation

ROOM = 256
"""Places that a store grows by: copying all of it for every token would be quadratic."""


class Store:
    """One layer's parts, `[batch, pos, ...]` each, of the places that it keeps.

    It keeps every place; with a `window` the latest so many; with `sinks` too, the first places and
    the latest.
    """

    def __init__(self, *, window: int | None = None, sinks: int = 0):
        self.window = window
        self.sinks = sinks
        self.n_kept = 0
        self._parts: tuple[Tensor, ...] = ()
        self.last_key: Tensor | None = None
        """The latest key before it was mixed with the one before it, where keys are smeared."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """What is kept; nothing before the first tokens."""
        return tuple(part[:, : self.n_kept] for part in self._parts)

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        return sum(part.numel() * part.element_size() for part in self.parts)

    def extend(self, new: Sequence[Shaped[Tensor, "batch new *_"]]) -> tuple[Tensor, ...]:
        """Everything that the new tokens may look at: what was kept, and their own behind it.

        Afterwards what does not fit is forgotten.
        """
        n_new = new[0].shape[1]
        total = self.n_kept + n_new
        self._make_room(new, total)
        for part, own in zip(self._parts, new, strict=True):
            part[:, self.n_kept : total] = own
        self.n_kept = total
        seen = self.parts
        if self.window is not None and total > self.sinks + self.window:
            latest = total - self.window
            # Copies: what is returned has to outlive the moving up.
            self._parts = tuple(torch.cat((p[:, : self.sinks], p[:, latest:]), 1) for p in seen)
            self.n_kept = self.sinks + self.window
        return seen

    def _make_room(self, new: Sequence[Tensor], total: int) -> None:
        if self._parts and self._parts[0].shape[1] >= total:
            return
        room = total if not self._parts else total + ROOM
        grown = tuple(own.new_empty(len(own), room, *own.shape[2:]) for own in new)
        for part, before in zip(grown, self.parts, strict=False):
            part[:, : self.n_kept] = before
        self._parts = grown


@dataclass(frozen=True)
class Past:
    """What one layer is given of the tokens before: its store, and the keys' facts after them.

    `key_mask` is of all keys that the layer will hold; `before_real` says whether the token before
    the new ones was real. `key_rotation` turns all of them where positions are places in the cache.
    """

    store: Store
    key_mask: Bool[Tensor, "batch key"] | None
    before_real: Bool[Tensor, " batch"] | None
    key_rotation: Rotation | None


@dataclass
class KVCache:
    """The stores of all layers, and which of the tokens that went through were real.

    Made by `Transformer.new_cache`, given to `forward` as `cache`, and filled by it. `streaming`
    says that rotary positions are places in the cache, not in the text.
    """

    layers: list[Store]
    streaming: bool = False
    n_seen: int = 0
    real: Bool[Tensor, "batch seen"] | None = field(default=None)
    """None while every token was real."""

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(store.nbytes for store in self.layers)

    def check(self, n_batch: int, n_new: int) -> None:
        """Refuse tokens that do not follow those that were seen.

        Raises: ShapeError for another number of sequences; ModelError for several tokens at once
        where a streaming cache would forget between them.
        """
        parts = self.layers[0].parts
        if parts and len(parts[0]) != n_batch:
            raise ShapeError(f"{n_batch} sequences for a cache of {len(parts[0])}")
        store = self.layers[0]
        if self.streaming and store.window is not None and n_new > 1:
            most = store.sinks + store.window
            if store.n_kept + n_new > most:
                raise ModelError(
                    f"a streaming cache of {most} places takes one token at a time once it is full"
                )

    def add(self, key_mask: Bool[Tensor, "batch new"] | None, shape: tuple[int, int]) -> None:
        """Count new tokens; before the layers see them."""
        batch, n_new = shape
        if self.real is None and key_mask is not None:
            device = key_mask.device
            self.real = torch.ones(batch, self.n_seen, dtype=torch.bool, device=device)
        if self.real is not None:
            new = self.real.new_ones(batch, n_new) if key_mask is None else key_mask
            self.real = torch.cat((self.real, new), dim=1)
        self.n_seen += n_new

    def positions(self, n_new: int, device: torch.device) -> Int[Tensor, "#batch new"]:
        """The position of each new token among the real ones of its sequence, from 0."""
        if self.real is None:
            return torch.arange(self.n_seen - n_new, self.n_seen, device=device)[None]
        return (self.real.long().cumsum(dim=1) - 1).clamp(min=0)[:, -n_new:]

    def key_mask(self, n_key: int, sinks: int) -> Bool[Tensor, "batch key"] | None:
        """Which of a layer's keys are real: the latest, or the first `sinks` and the latest."""
        if self.real is None or bool(self.real.all()):
            return None
        if n_key >= self.n_seen:
            return self.real
        return torch.cat((self.real[:, :sinks], self.real[:, sinks - n_key :]), dim=1)


def empty_cache(
    config: ModelConfig, name: str, *, sinks: int | None = None, window: int | None = None
) -> KVCache:
    """`Transformer.new_cache` of a model of this config, which faults call by its name."""
    if window is None:
        if sinks is not None:
            raise ModelError("sinks belong to a window: new_cache(sinks=4, window=1020)")
        return KVCache([Store(window=config.window(own)) for own in range(config.n_layers)])
    sinks = 4 if sinks is None else sinks
    if sinks < 0 or window < 1 or sinks + window >= config.n_ctx:
        raise ModelError(
            f"sinks = {sinks} and window = {window}: together they and the next token have to "
            f"fit n_ctx = {config.n_ctx}"
        )
    if (
        config.positional_embedding_type != "rotary"
        or config.attention.smeared_keys
        or config.attention.window
    ):
        raise ModelError(
            f"{name} cannot stream: that needs rotary positions, and neither "
            "smeared keys nor windows of its own"
        )
    stores = [Store(window=window, sinks=sinks) for _ in range(config.n_layers)]
    return KVCache(stores, streaming=True)


def grown(
    cache: KVCache,
    config: ModelConfig,
    rotary: Rotary | None,
    key_mask: Bool[Tensor, "batch new"] | None,
    shape: tuple[int, int],
    device: torch.device,
) -> tuple[Int[Tensor, "#batch new"], Rotation | None, list[Past]]:
    """Positions and rotation of new tokens, which are counted, and what each layer is given.

    Raises: ShapeError, ModelError for tokens that do not follow, another model's cache, or padding
    in a streaming one.
    """
    if len(cache.layers) != config.n_layers:
        raise ModelError(f"a cache of {len(cache.layers)} layers for a model of {config.n_layers}")
    n_batch, n_new = shape
    cache.check(n_batch, n_new)
    if cache.streaming and key_mask is not None:
        raise ModelError("a streaming cache takes no padding")
    before = None if cache.real is None else cache.real[:, -1]
    cache.add(key_mask, (n_batch, n_new))
    positions = cache.positions(n_new, device)
    turned = None
    if cache.streaming:
        n_key = cache.layers[0].n_kept + n_new
        places = torch.arange(n_key, device=device)[None]
        assert rotary is not None  # new_cache has asked
        turned, positions = rotary(places), places[:, -n_new:]
    elif config.attention.kind == "latent":
        assert rotary is not None  # the config has asked
        turned = rotary(cache.positions(cache.n_seen, device))
    rotation = None if rotary is None else rotary(positions)
    pasts = [
        Past(store, cache.key_mask(store.n_kept + n_new, store.sinks), before, turned)
        for store in cache.layers
    ]
    return positions, rotation, pasts
