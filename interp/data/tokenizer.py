"""A byte-level BPE vocabulary, trained and stored by the `tokenizers` library."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from interp.errors import ModelError


class BytePairVocabulary:
    """Text to ids and back, without loss: every byte has a token."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    @classmethod
    def train(cls, texts: Iterable[str], size: int) -> "BytePairVocabulary":
        """A vocabulary of `size` tokens, the 256 bytes among them."""
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, path: Path) -> "BytePairVocabulary":
        """The vocabulary stored at `path`.

        Raises: ModelError where the file is missing or is not a tokenizer.
        """
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{path}: not a tokenizer file: {error}") from None

    def to_json(self) -> str:
        """What a `tokenizer.json` holds."""
        return str(self._tokenizer.to_str(pretty=True))

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    @property
    def bos_token_id(self) -> int | None:
        """None: windows are cut anywhere in a text, so no token begins them."""
        return None

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text of their own."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    def encode(
        self, text: str | Sequence[str], *, prepend_bos: bool | None = None
    ) -> list[list[int]]:
        """Ids of each text; there is no BOS to lead them.

        Raises: ModelError for `prepend_bos=True`.
        """
        if prepend_bos:
            raise ModelError("this tokenizer has no BOS token to put in front of a text")
        texts = [text] if isinstance(text, str) else list(text)
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; bytes that are no whole character become U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each id by itself; `<id 999>` for one without text."""
        return [self._tokenizer.decode([i], skip_special_tokens=False) or f"<id {i}>" for i in ids]

    def single_token(self, text: str) -> int:
        """The id of a text that is one token.

        Raises: ModelError where it is several or none.
        """
        (ids,) = self.encode(text)
        if len(ids) != 1:
            raise ModelError(f"{text!r} is {len(ids)} tokens, not one")
        return ids[0]
