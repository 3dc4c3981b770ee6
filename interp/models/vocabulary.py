"""What a model needs of a tokenizer, and token ids from whatever a caller holds them in."""

from collections.abc import Sequence
from typing import Literal, Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from interp.errors import ModelError, ShapeError

PaddingSide = Literal["left", "right"]


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

    def encode(
        self, text: str | Sequence[str], *, prepend_bos: bool | None = None
    ) -> list[list[int]]:
        """Ids of each text, led by exactly one BOS where there is one.

        With `prepend_bos=False` nothing is added; with True a vocabulary without a BOS raises
        ModelError.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids."""
        ...

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """What each id stands for; `<id 120>` for an id without text."""
        ...

    def single_token(self, text: str) -> int:
        """The id of a text that is one token; ModelError where it is not."""
        ...


def is_text(given: object) -> TypeGuard[str | Sequence[str]]:
    """Whether this is a text or several, rather than ids."""
    return isinstance(given, str) or (
        isinstance(given, Sequence) and len(given) > 0 and isinstance(given[0], str)
    )


def padded_texts(
    texts: str | Sequence[str],
    vocabulary: Vocabulary | None,
    *,
    prepend_bos: bool | None = None,
    padding_side: PaddingSide | None = None,
) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"]]:
    """Texts of any length as one batch of ids, and a mask that is True on their tokens.

    The mask follows from the lengths alone: the padding is id 0, which may be a token too. It is
    on the side where the tokenizer was set to pad, unless that is given.

    Raises: ModelError without a vocabulary, or as `encode` does; ShapeError for a text without
    tokens.
    """
    if vocabulary is None:
        raise ModelError("this model has no tokenizer: give token ids, not text")
    rows = vocabulary.encode(texts, prepend_bos=prepend_bos)
    lengths = [len(row) for row in rows]
    if not lengths or max(lengths) == 0:
        raise ShapeError("the prompt is empty: at least one token is needed")
    if 0 in lengths:
        raise ShapeError(f"text {lengths.index(0)} of the batch is empty: it has no tokens")
    tokens = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    left = (padding_side or getattr(vocabulary, "padding_side", "right")) == "left"
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        place = slice(-length, None) if left else slice(length)
        tokens[index, place] = torch.tensor(row)
        mask[index, place] = True
    return tokens, mask


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
