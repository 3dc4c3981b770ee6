"""What a model needs of a tokenizer, and token ids from whatever a caller holds them in."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from interp.errors import ShapeError


@runtime_checkable
class Vocabulary(Protocol):
    """Text to ids and back."""

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a sequence; None where the vocabulary has none."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text of their own; no random sequence holds them."""
        ...

    def __len__(self) -> int:
        """How many ids have a token; an embedding may have more rows."""
        ...

    def encode(self, text: str | Sequence[str]) -> list[list[int]]:
        """Ids of each text, led by BOS where there is one."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids."""
        ...

    def single_token(self, text: str) -> int:
        """The id of a text that is one token; ModelError where it is not."""
        ...


def token_array(tokens: object) -> Int[Tensor, "batch pos"]:
    """Integer ids as a `[batch, pos]` tensor; one sequence becomes a batch of one.

    Raises: ShapeError for rows of unequal length, other shapes, or numbers that are not integers.
    """
    if not isinstance(tokens, Tensor):
        try:
            array = np.asarray(tokens)
        except ValueError:
            raise ShapeError(
                "the sequences differ in length: pad them and give an attention_mask"
            ) from None
        if array.size and not np.issubdtype(array.dtype, np.integer):
            raise ShapeError(f"token ids should be integers, got {array.dtype}")
        tokens = torch.from_numpy(array.astype(np.int64))
    if tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise ShapeError(f"token ids should be integers, got {tokens.dtype}")
    if tokens.ndim == 1:
        tokens = tokens[None]
    if tokens.ndim != 2:
        raise ShapeError(f"token ids should be [batch, pos], got {list(tokens.shape)}")
    return tokens.long()
