"""Logits at some places, of which no more is made than is asked for.

A loss needs the log-sum-exp of a row and one logit of it. Tiles of the vocabulary that fit into the
processor's cache give both faster than the whole rows are made, and never hold them.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

VOCABULARY_TILE = 2048
"""Rows of the unembedding in a tile: with 512 places 4 MB of logits."""


@runtime_checkable
class PlaceLogits(Protocol):
    """What can be asked of the logits at some places; float32 at least."""

    def all(self) -> Float[Tensor, "place d_vocab"]:
        """Every logit."""
        ...

    def logsumexp(self) -> Float[Tensor, " place"]:
        """The log-sum-exp of each place's logits."""
        ...

    def of(self, tokens: Int[Tensor, " place"]) -> Float[Tensor, " place"]:
        """The logit of one token at each place."""
        ...


def _wide(logits: Float[Tensor, "*places d_vocab"]) -> Float[Tensor, "*places d_vocab"]:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@dataclass(frozen=True)
class HeldLogits:
    """Logits that were made already."""

    logits: Float[Tensor, "place d_vocab"]

    def all(self) -> Float[Tensor, "place d_vocab"]:
        return _wide(self.logits)

    def logsumexp(self) -> Float[Tensor, " place"]:
        return self.all().logsumexp(dim=1)

    def of(self, tokens: Int[Tensor, " place"]) -> Float[Tensor, " place"]:
        return _wide(self.logits.gather(1, tokens[:, None]))[:, 0]


@dataclass(frozen=True)
class UnembeddedLogits:
    """The logits that an unembedding makes of a normalised residual stream."""

    final: Float[Tensor, "place d_model"]
    weight: Float[Tensor, "d_vocab d_model"]
    bias: Float[Tensor, " d_vocab"] | None

    def all(self) -> Float[Tensor, "place d_vocab"]:
        return _wide(F.linear(self.final, self.weight, self.bias))

    def logsumexp(self) -> Float[Tensor, " place"]:
        tiles = [
            _wide(F.linear(self.final, self.weight[part], self._bias(part))).logsumexp(dim=1)
            for part in (
                slice(start, start + VOCABULARY_TILE)
                for start in range(0, len(self.weight), VOCABULARY_TILE)
            )
        ]
        return torch.stack(tiles, dim=1).logsumexp(dim=1)

    def of(self, tokens: Int[Tensor, " place"]) -> Float[Tensor, " place"]:
        products = _wide(self.final) * _wide(self.weight[tokens])
        logit = products.sum(dim=1)
        return logit if self.bias is None else logit + _wide(self.bias[tokens])

    def _bias(self, part: slice) -> Float[Tensor, " tile"] | None:
        return None if self.bias is None else self.bias[part]
