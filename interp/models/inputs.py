"""What a model is given, checked: token ids exactly as they came, and masks over them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from interp.errors import ModelError, ShapeError
from interp.models.vocabulary import PaddingSide, Vocabulary, is_text, padded_texts, token_array

if TYPE_CHECKING:
    from interp.models.transformer import FlatConfig


class ReadsTokens:
    """Ids and text for a model that has a `cfg` and perhaps a `vocabulary`."""

    if TYPE_CHECKING:
        vocabulary: Vocabulary | None

        @property
        def cfg(self) -> FlatConfig: ...

    def to_tokens(
        self, text: object, *, prepend_bos: bool | None = None
    ) -> Int[Tensor, "batch pos"]:
        """Token ids `[batch, pos]` on the model's device, from ids or text.

        Ids are taken exactly as given. Text is encoded by the model's vocabulary, which puts
        exactly one BOS in front where it has one, and none with `prepend_bos=False`. Texts of
        different lengths need `tokenize`, which returns the mask of their padding too.

        Raises: ModelError for text without a vocabulary, or `prepend_bos=True` without a BOS;
        ShapeError for ids that do not fit.
        """
        if is_text(text):
            tokens, mask = self.tokenize(text, prepend_bos=prepend_bos)
            if not bool(mask.all()):
                lengths = mask.sum(dim=1)
                raise ShapeError(
                    f"the texts have {lengths.min()} to {lengths.max()} tokens: tokenize(texts) "
                    "pads them, and returns the attention_mask"
                )
            return tokens
        cfg = self.cfg
        return checked_tokens(text, d_vocab=cfg.d_vocab, device=torch.device(cfg.device))

    def tokenize(
        self,
        texts: str | Sequence[str],
        *,
        prepend_bos: bool | None = None,
        padding_side: PaddingSide | None = None,
    ) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"]]:
        """Texts of any length as ids, and the `attention_mask` that is True on their tokens.

        The mask follows from the lengths, so that a BOS or a separator whose id pads elsewhere is
        seen. `padding_side` is the tokenizer's own unless given.

        Raises: as `to_tokens`; ShapeError for a text without tokens.
        """
        tokens, mask = padded_texts(
            texts, self.vocabulary, prepend_bos=prepend_bos, padding_side=padding_side
        )
        return self.to_tokens(tokens), mask.to(self.cfg.device)

    def to_str_tokens(self, text: object, *, prepend_bos: bool | None = None) -> list[str]:
        """What each token of one text, or each id of one sequence, stands for.

        Raises: as `to_tokens`; ShapeError for several sequences.
        """
        ids = self.to_tokens(text, prepend_bos=prepend_bos)
        if len(ids) != 1:
            raise ShapeError(f"to_str_tokens takes one sequence, got {len(ids)}")
        return self._known_vocabulary().token_texts(ids[0].tolist())

    def to_single_token(self, text: str) -> int:
        """The id of a text that is one token.

        Raises: ModelError where the text is not one token.
        """
        return self._known_vocabulary().single_token(text)

    def _known_vocabulary(self) -> Vocabulary:
        if self.vocabulary is None:
            raise ModelError("this model has no tokenizer: give token ids, not text")
        return self.vocabulary


def checked_tokens(
    tokens: object, *, d_vocab: int, device: torch.device
) -> Int[Tensor, "batch pos"]:
    """Token ids `[batch, pos]` on the device.

    Raises: ShapeError for ids that do not fit.
    """
    ids = token_array(tokens).to(device)
    if ids.numel() == 0:
        raise ShapeError("the prompt is empty: at least one token is needed")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= d_vocab:
        raise ShapeError(
            f"token id {low if low < 0 else high} is outside the vocabulary of {d_vocab}"
        )
    return ids


def checked_key_mask(
    attention_mask: object, shape: Sequence[int], device: torch.device
) -> Bool[Tensor, "batch pos"] | None:
    """Where tokens are real; None where all are, so that an all-ones mask changes no bit.

    Raises: ShapeError for another shape, or numbers that are not 0 and 1.
    """
    if attention_mask is None:
        return None
    given = torch.as_tensor(attention_mask, device=device)
    if given.ndim == 1:
        given = given[None]
    if given.shape != tuple(shape):
        raise ShapeError(f"attention_mask {list(given.shape)} for tokens {list(shape)}")
    key_mask = given.bool()
    if not bool((given == key_mask).all()):
        raise ShapeError(
            "attention_mask should hold 1 on real tokens and 0 on padding, not scores to add"
        )
    return None if bool(key_mask.all()) else key_mask
