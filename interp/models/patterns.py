"""Attention weights, known as an n×n pattern or by the queries and keys that make them.

Where queries and keys are at hand, statistics come without the pattern (`interp.models.attention`);
where a pattern is, because somebody edits it or the model computes it anyway, they are read off it.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.models import attention
from interp.models.masks import AttentionMask
from interp.models.tiles import TILE_NUMBERS, pattern_tiles, statistics_dtype

PRECISE_LSE = 32.0
"""A float32 log-sum-exp up to this size gives probabilities within 2e-6 of themselves."""


LARGE_LSE = 128.0
"""Above it, even the log-sum-exp of centred keys has too few digits left after the point: what is
told by its difference to a score would be off by more than 1e-5."""


@runtime_checkable
class Weights(Protocol):
    """Attention weights, whichever way they are known."""

    @property
    def n_heads(self) -> int:
        """Query heads."""
        ...

    def prob_at(self, keys: Int[Tensor, "batch query"]) -> Float[Tensor, "batch n_heads query"]:
        """Attention of each query to one key of its own."""
        ...

    def expected(
        self, values: Float[Tensor, "batch key *n_heads n_values"]
    ) -> Float[Tensor, "batch n_heads query n_values"]:
        """The mean of each column of `values` under each query's attention."""
        ...

    def entropy(self) -> Float[Tensor, "batch n_heads query"]:
        """The entropy of each query's attention, in nats."""
        ...

    def place_and_mass(
        self, places: Int[Tensor, "batch key"]
    ) -> Float[Tensor, "batch n_heads query 2"]:
        """The mean place of what each query attends to, and the sum of its weights."""
        ...

    def received(self, weights: Float[Tensor, "batch query"]) -> Float[Tensor, "batch n_heads key"]:
        """The attention each key gets, summed over queries with their weights."""
        ...

    def strongest(
        self,
    ) -> tuple[Float[Tensor, "batch n_heads query"], Int[Tensor, "batch n_heads query"]]:
        """The largest weight of each row, and its key."""
        ...

    def rows(self) -> Iterator[tuple[slice, slice, Float[Tensor, "batch n_heads rows keys"]]]:
        """A few rows of the pattern at a time."""
        ...


@dataclass(frozen=True)
class Pattern:
    """Weights known as an n×n pattern, which is read and never changed."""

    pattern: Float[Tensor, "batch n_heads query key"]

    @property
    def n_heads(self) -> int:
        """Query heads."""
        return self.pattern.shape[1]

    def prob_at(self, keys: Int[Tensor, "batch query"]) -> Float[Tensor, "batch n_heads query"]:
        """Attention of each query to one key of its own; 0 where `keys` is -1."""
        index = keys.clamp(min=0)[:, None, :, None].expand(-1, self.n_heads, -1, 1)
        chosen = self.pattern.gather(3, index).squeeze(3)
        return chosen.to(statistics_dtype(chosen.dtype)).masked_fill(keys[:, None] < 0, 0.0)

    def expected(
        self, values: Float[Tensor, "batch key *n_heads n_values"]
    ) -> Float[Tensor, "batch n_heads query n_values"]:
        """The mean of each column of `values` under each query's attention."""
        values = values[:, None] if values.ndim == 3 else values.transpose(1, 2)
        values = values.to(statistics_dtype(self.pattern.dtype))
        return torch.cat([rows @ values for _, _, rows in self.rows()], dim=2)

    def entropy(self) -> Float[Tensor, "batch n_heads query"]:
        """The entropy of each query's attention, in nats; 0 in rows without a key."""
        return _entropy_of(self.rows())

    def place_and_mass(
        self, places: Int[Tensor, "batch key"]
    ) -> Float[Tensor, "batch n_heads query 2"]:
        """The mean place of what each query attends to, and the sum of its weights."""
        return self.expected(_place_columns(places))

    def received(self, weights: Float[Tensor, "batch query"]) -> Float[Tensor, "batch n_heads key"]:
        """The attention each key gets, summed over queries with their weights."""
        parts = [
            torch.einsum("bq,bhqk->bhk", weights[:, place].to(rows.dtype), rows)
            for place, _, rows in self.rows()
        ]
        return torch.stack(parts).sum(dim=0)

    def strongest(
        self,
    ) -> tuple[Float[Tensor, "batch n_heads query"], Int[Tensor, "batch n_heads query"]]:
        """The largest weight of each row and its key, the first of equals; 0 and -1 without."""
        top, place = self.pattern.max(dim=-1)
        return top.to(statistics_dtype(top.dtype)), place.where(top > 0, -1)

    def rows(self) -> Iterator[tuple[slice, slice, Float[Tensor, "batch n_heads rows keys"]]]:
        """A few rows at a time, in float32 at least: their queries, their keys, the weights."""
        n_query, n_key = self.pattern.shape[2:]
        size = max(1, TILE_NUMBERS // (len(self.pattern) * self.n_heads * n_key))
        for start in range(0, n_query, size):
            place = slice(start, min(start + size, n_query))
            rows = self.pattern[:, :, place]
            yield place, slice(0, n_key), rows.to(statistics_dtype(rows.dtype))


@dataclass(frozen=True)
class QueryKeys:
    """Weights known by the queries and keys (after rotary) that a plain softmax makes them of."""

    q: Float[Tensor, "batch query n_heads d_head"]
    k: Float[Tensor, "batch key n_key_value_heads d_head"]
    scale: float
    mask: AttentionMask
    known_lse: Float[Tensor, "batch n_heads query"] | None = field(default=None)
    """The row log-sum-exp, where the pass that computed the attention left it."""

    @property
    def n_heads(self) -> int:
        """Query heads."""
        return self.q.shape[2]

    @cached_property
    def _centred(self) -> Float[Tensor, "batch key n_key_value_heads d_head"]:
        return attention.centred(self.k, self.mask)

    @cached_property
    def _places(self) -> Int[Tensor, "batch key"]:
        real = self.mask.key_mask
        if real is None:
            real = torch.ones(self.k.shape[:2], dtype=torch.bool, device=self.k.device)
        return places_of(real)

    @cached_property
    def _summary(
        self,
    ) -> tuple[
        Float[Tensor, "batch n_heads query"],
        Float[Tensor, "batch n_heads query"],
        Float[Tensor, "batch n_heads query 2"],
    ]:
        """The log-sum-exp and the entropy of each row, its mean place and its mass: one call."""
        columns = _place_columns(self._places)
        return attention.row_summary(
            self.q, self._centred, columns, scale=self.scale, mask=self.mask
        )

    @cached_property
    def _keys_and_lse(self) -> tuple[Tensor, Float[Tensor, "batch n_heads query"]]:
        """Keys, and the row log-sum-exp of the scores that they make."""
        known = self.known_lse
        # Half precision rounds it to fewer digits than its inputs would give; so does a large one.
        if (
            known is not None
            and self.q.dtype == statistics_dtype(self.q.dtype)
            and bool((_size(known) <= PRECISE_LSE).all())
        ):
            return self.k, known
        return self._centred, self._summary[0]

    @cached_property
    def _large(self) -> bool:
        return bool((_size(self._keys_and_lse[1]) > LARGE_LSE).any())

    def prob_at(self, keys: Int[Tensor, "batch query"]) -> Float[Tensor, "batch n_heads query"]:
        """Attention of each query to one key of its own; 0 where `keys` is -1."""
        if self._large:
            parts = [_gathered(row, keys[:, at], reach) for at, reach, row in self.rows()]
            return torch.cat(parts, dim=2)
        k, lse = self._keys_and_lse
        return attention.prob_at(self.q, k, lse, keys, scale=self.scale, mask=self.mask)

    def expected(
        self, values: Float[Tensor, "batch key *n_heads n_values"]
    ) -> Float[Tensor, "batch n_heads query n_values"]:
        """The mean of each column of `values` under each query's attention."""
        return attention.expected(self.q, self._centred, values, scale=self.scale, mask=self.mask)

    def entropy(self) -> Float[Tensor, "batch n_heads query"]:
        """The entropy of each query's attention, in nats; 0 in rows without a key."""
        lse, entropy, _ = self._summary
        return _entropy_of(self.rows()) if bool((_size(lse) > LARGE_LSE).any()) else entropy

    def place_and_mass(
        self, places: Int[Tensor, "batch key"]
    ) -> Float[Tensor, "batch n_heads query 2"]:
        """The mean place of what each query attends to, and the sum of its weights."""
        if torch.equal(places, self._places):
            return self._summary[2]
        return self.expected(_place_columns(places))

    def received(self, weights: Float[Tensor, "batch query"]) -> Float[Tensor, "batch n_heads key"]:
        """The attention each key gets, summed over queries with their weights."""
        if self._large:
            total = weights.new_zeros(
                len(self.q), self.n_heads, self.k.shape[1], dtype=self._centred.dtype
            )
            for at, reach, rows in self.rows():
                share = weights[:, at].to(rows.dtype)
                total[..., reach] += torch.einsum("bq,bhqk->bhk", share, rows)
            return total
        k, lse = self._keys_and_lse
        return attention.received(self.q, k, lse, weights, scale=self.scale, mask=self.mask)

    def strongest(
        self,
    ) -> tuple[Float[Tensor, "batch n_heads query"], Int[Tensor, "batch n_heads query"]]:
        """The largest weight of each row and its key, the first of equals; 0 and -1 without."""
        return attention.strongest(self.q, self._centred, scale=self.scale, mask=self.mask)

    def rows(self) -> Iterator[tuple[slice, slice, Float[Tensor, "batch n_heads rows keys"]]]:
        """A few rows at a time, in float32 at least: their queries, their keys, the weights."""
        return pattern_tiles(self.q, self._centred, scale=self.scale, mask=self.mask)


@dataclass(frozen=True)
class SinkQueryKeys:
    """Weights of queries and keys whose softmax has a further term a head: rows sum to below 1.

    What is told of a row is what it would be without the term, times the share that is left.
    """

    plain: QueryKeys
    sink: Float[Tensor, " n_heads"]

    @property
    def n_heads(self) -> int:
        """Query heads."""
        return self.plain.n_heads

    @cached_property
    def kept(self) -> Float[Tensor, "batch n_heads query"]:
        """The share of each row that its keys have together; the sink has the rest."""
        plain, lse = self.plain, self.plain.known_lse
        # Half precision rounds it to fewer digits than its inputs would give.
        if lse is None or plain.q.dtype != statistics_dtype(plain.q.dtype):
            lse = attention.row_lse(plain.q, plain.k, scale=plain.scale, mask=plain.mask)
        return (lse - self.sink.to(lse.dtype)[:, None]).sigmoid()

    def prob_at(self, keys: Int[Tensor, "batch query"]) -> Float[Tensor, "batch n_heads query"]:
        """Attention of each query to one key of its own; 0 where `keys` is -1."""
        return self.plain.prob_at(keys) * self.kept

    def expected(
        self, values: Float[Tensor, "batch key *n_heads n_values"]
    ) -> Float[Tensor, "batch n_heads query n_values"]:
        """The sum of each column of `values` under each query's attention."""
        return self.plain.expected(values) * self.kept[..., None]

    def entropy(self) -> Float[Tensor, "batch n_heads query"]:
        """-sum p ln p over each query's keys, in nats; the sink is not one of them."""
        spread = self.plain.entropy()
        return (self.kept * spread - torch.special.xlogy(self.kept, self.kept)).clamp(min=0.0)

    def place_and_mass(
        self, places: Int[Tensor, "batch key"]
    ) -> Float[Tensor, "batch n_heads query 2"]:
        """The sum of places under each query's attention, and the sum of its weights."""
        return self.plain.place_and_mass(places) * self.kept[..., None]

    def received(self, weights: Float[Tensor, "batch query"]) -> Float[Tensor, "batch n_heads key"]:
        """The attention each key gets, summed over queries with their weights."""
        shape = len(self.plain.q), self.n_heads, self.plain.k.shape[1]
        total = self.kept.new_zeros(shape)
        for at, reach, rows in self.rows():
            share = weights[:, at].to(rows.dtype)
            total[..., reach] += torch.einsum("bq,bhqk->bhk", share, rows)
        return total

    def strongest(
        self,
    ) -> tuple[Float[Tensor, "batch n_heads query"], Int[Tensor, "batch n_heads query"]]:
        """The largest weight of each row and its key, the first of equals; 0 and -1 without."""
        top, place = self.plain.strongest()
        top = top * self.kept
        return top, place.where(top > 0, -1)

    def rows(self) -> Iterator[tuple[slice, slice, Float[Tensor, "batch n_heads rows keys"]]]:
        """A few rows at a time: their queries, their keys, the weights."""
        for at, reach, rows in self.plain.rows():
            yield at, reach, rows * self.kept[:, :, at, None]


def _size(lse: Float[Tensor, "batch n_heads query"]) -> Float[Tensor, "batch n_heads query"]:
    """Its absolute value; 0 in rows without a key."""
    return lse.masked_fill(lse == -math.inf, 0.0).abs()


def _gathered(
    weights: Float[Tensor, "batch n_heads rows keys"],
    keys: Int[Tensor, "batch rows"],
    reach: slice,
) -> Float[Tensor, "batch n_heads rows"]:
    """The weight of each row on one key of its own; 0 outside of what `weights` are of."""
    within = (keys >= reach.start) & (keys < reach.stop)
    index = (keys - reach.start).where(within, 0)[:, None, :, None]
    chosen = weights.gather(3, index.expand(-1, weights.shape[1], -1, 1))[..., 0]
    return chosen.where(within[:, None], 0.0)


def _entropy_of(
    tiles: Iterable[tuple[slice, slice, Float[Tensor, "batch n_heads rows keys"]]],
) -> Float[Tensor, "batch n_heads query"]:
    return torch.cat([-torch.special.xlogy(rows, rows).sum(dim=-1) for _, _, rows in tiles], dim=2)


def places_of(real: Bool[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
    """How many real tokens lie before each; that of the last one before it on padding."""
    return (real.long().cumsum(dim=1) - 1).clamp(min=0)


def _place_columns(places: Int[Tensor, "batch key"]) -> Float[Tensor, "batch key 2"]:
    return torch.stack((places, torch.ones_like(places)), dim=2).float()
