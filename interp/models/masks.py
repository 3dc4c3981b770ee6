"""Which keys each query may attend to, as a rule and as tensors of any part of it."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class AttentionMask:
    """Which keys each query may attend to; True means may.

    Not keys later than itself where attention is `causal`; with a `window`, only the latest
    `window` places, its own included; never padding, which `key_mask` marks with False; nothing
    that a `custom` mask forbids. Where there are fewer queries than keys, the queries are the
    latest ones.
    """

    causal: bool = True
    key_mask: Bool[Tensor, "batch key"] | None = None
    window: int | None = None
    custom: Bool[Tensor, "#batch #n_heads query key"] | None = None

    def allowed(
        self, n_query: int, n_key: int, device: torch.device, rows: slice = slice(None)
    ) -> Bool[Tensor, "#batch #n_heads rows key"]:
        """The rule as a tensor, for the queries in `rows`."""
        first, last, _ = rows.indices(n_query)
        place = torch.arange(first, last, device=device)[:, None] + (n_key - n_query)
        mask = self._in_reach(place, torch.arange(n_key, device=device)[None])[None, None]
        if self.key_mask is not None:
            mask = mask & self.key_mask[:, None, None, :]
        if self.custom is not None:
            mask = mask & self.custom[:, :, rows]
        return mask

    def allows(
        self, keys: Int[Tensor, "batch query"], n_key: int
    ) -> Bool[Tensor, "batch #n_heads query"]:
        """Whether each query may attend to one key of its own; -1 stands for none."""
        n_query = keys.shape[1]
        place = torch.arange(n_query, device=keys.device) + (n_key - n_query)
        index = keys.clamp(min=0)
        mask = (keys >= 0) & self._in_reach(place[None], keys)
        if self.key_mask is not None:
            mask = mask & self.key_mask.gather(1, index)
        mask = mask[:, None]
        if self.custom is not None:
            custom = self.custom.expand(len(keys), -1, -1, -1)
            chosen = index[:, None, :, None].expand(-1, custom.shape[1], -1, 1)
            mask = mask & custom.gather(3, chosen)[..., 0]
        return mask

    def n_allowed(
        self, n_query: int, n_key: int, device: torch.device
    ) -> Int[Tensor, "#batch query"]:
        """How many keys each query may attend to; a custom mask does not count.

        Linear in memory, unlike counting the rows of `allowed`.
        """
        if self.key_mask is None:
            real = torch.ones(1, n_key, dtype=torch.long, device=device)
        else:
            real = self.key_mask.long()
        before = torch.nn.functional.pad(real.cumsum(dim=1), (1, 0))
        place = torch.arange(n_query, device=device) + (n_key - n_query)
        last = place + 1 if self.causal else torch.full_like(place, n_key)
        first = torch.zeros_like(place) if self.window is None else (place + 1 - self.window)
        return before[:, last] - before[:, first.clamp(min=0)]

    def windowed(self, n_key: int) -> bool:
        """Whether the window hides anything in a sequence of `n_key`."""
        return self.window is not None and self.window < n_key

    def _in_reach(
        self, place: Int[Tensor, "*places"], key: Int[Tensor, "*keys"]
    ) -> Bool[Tensor, "*both"]:
        shape = torch.broadcast_shapes(place.shape, key.shape)
        reach = torch.ones(shape, dtype=torch.bool, device=key.device)
        if self.causal:
            reach = reach & (key <= place)
        return reach if self.window is None else reach & (key > place - self.window)
