"""The tokenizers of pretrained models, as a `Vocabulary`.

What the wrapped tokenizer adds of its own is never left to chance: ids are encoded bare, and
exactly one BOS goes in front where there is one.
"""

import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Literal

from interp.errors import ModelError

_SETTINGS = "tokenizer_config.json"
# Some tokenizers, of bytes, need no more than their settings.
_VOCABULARIES = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)


class PretrainedVocabulary:
    """A tokenizer of `transformers`, kept as `tokenizer`: text to ids and back.

    The text is encoded whole, whatever length the tokenizer was set to cut or pad to, and led by
    BOS where the tokenizer has one, as TransformerLens does and whether or not the tokenizer does
    so itself. No EOS goes behind it. An encoder's tokenizer, which puts a CLS token first, is the
    exception: its models never see a text without CLS and SEP, so those go around it.

    Raises: ModelError for something that is no such tokenizer.
    """

    def __init__(self, tokenizer: object):
        from transformers import PreTrainedTokenizerBase

        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ModelError(
                f"a {type(tokenizer).__name__} is no tokenizer of transformers, such as "
                "AutoTokenizer.from_pretrained returns"
            )
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return max(self._ids_with_text, default=-1) + 1

    @cached_property
    def _ids_with_text(self) -> frozenset[int]:
        return frozenset(self.tokenizer.get_vocab().values())

    @cached_property
    def bos_token_id(self) -> int | None:
        """The tokenizer's BOS; None where it has none."""
        return self._named("bos_token")

    @cached_property
    def eos_token_id(self) -> int | None:
        """The tokenizer's EOS, which ends a text that a model writes; None where it has none."""
        return self._named("eos_token")

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text of their own, and those below `len` that no token has."""
        added = self.tokenizer.added_tokens_decoder.items()
        holes = set(range(len(self))) - self._ids_with_text
        return frozenset(
            {*self.tokenizer.all_special_ids, *(i for i, token in added if token.special), *holes}
        )

    @property
    def padding_side(self) -> Literal["left", "right"]:
        """Where the tokenizer was set to pad."""
        return "left" if self.tokenizer.padding_side == "left" else "right"

    def encode(
        self, text: str | Sequence[str], *, prepend_bos: bool | None = None
    ) -> list[list[int]]:
        """Ids of each text, led by exactly one BOS where there is one, its own or ours.

        With `prepend_bos=False` they are the text's alone. An encoder's go between CLS and SEP
        unless `prepend_bos` is given.

        Raises: ModelError for `prepend_bos=True` where there is no BOS.
        """
        texts = [text] if isinstance(text, str) else list(text)
        bos = self.bos_token_id
        if prepend_bos and bos is None:
            raise ModelError("this tokenizer has no BOS token to put in front of a text")
        rows = self._bare(texts)
        if prepend_bos is None and self._around is not None:
            (before, behind) = self._around
        elif bos is None or prepend_bos is False:
            return rows
        else:
            before, behind = bos, []
        return [[before, *(row[1:] if row[:1] == [before] else row), *behind] for row in rows]

    @cached_property
    def _around(self) -> tuple[int, list[int]] | None:
        """The CLS token, and what the tokenizer puts behind a text; None where it begins otherwise.

        A decoder's tokenizer may name a CLS token that it never uses.
        """
        (own,) = self.tokenizer([""], verbose=False, padding=False, truncation=False)["input_ids"]
        cls = self._named("cls_token")
        return None if cls is None or own[:1] != [cls] else (cls, list(own[1:]))

    def _bare(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        # Said here because a tokenizer.json may hold a truncation and a padding of its own.
        encoded = self.tokenizer(
            texts, add_special_tokens=False, padding=False, truncation=False, verbose=False
        )
        return [list(row) for row in encoded["input_ids"]]

    def _named(self, name: str) -> int | None:
        # Asking for a token that is not set would be an error message on stderr.
        token = self.tokenizer.special_tokens_map.get(name)
        return None if token is None else int(self.tokenizer.convert_tokens_to_ids(token))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, spaces as they were; bytes that are no character become U+FFFD."""
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """What each id adds to a text, " a" with its space; `<id 120>` for an id without text.

        Where a character is split over several tokens, each of them is U+FFFD. Tokenizers that
        join whole words by spaces, such as BERT's, have their pieces shown: "##ing".
        """
        return [self._token_text(int(i)) for i in ids]

    def _token_text(self, i: int) -> str:
        if i not in self._ids_with_text:
            return f"<id {i}>"
        piece = str(self.tokenizer.convert_ids_to_tokens(i))
        if self._letter is None or i in self.special_ids:
            return piece or f"<id {i}>"
        # Some decoders take the space off whatever comes first, so something else does.
        lead = self.decode([self._letter])
        whole = self.decode([self._letter, i])
        text = whole.removeprefix(lead) if whole.startswith(lead) else self.decode([i])
        return text or piece or f"<id {i}>"

    @cached_property
    def _letter(self) -> int | None:
        """An id to put in front of others; None where decoding puts spaces between tokens."""
        (ids,) = self._bare(["a"])
        if len(ids) != 1:
            return None
        text = self.decode(ids)
        piece = self.tokenizer.convert_ids_to_tokens(ids[0])
        # A piece with the mark of a space is a word's beginning, and brings its own.
        joined = piece == text and self.decode(ids * 2) != text * 2
        return None if joined else ids[0]

    def single_token(self, text: str) -> int:
        """The id of a text that is one token.

        Raises: ModelError where it is several or none.
        """
        (ids,) = self._bare([text])
        if len(ids) != 1:
            raise ModelError(f"{text!r} is {len(ids)} tokens, not one")
        return ids[0]


def load_pretrained_vocabulary(
    folder: Path, gguf_file: str | None = None
) -> PretrainedVocabulary | None:
    """The tokenizer of a folder, or of a GGUF file in it; None where there is none.

    Only local files are read, and no code that they bring is run.

    Raises: ModelError for files that hold no tokenizer that `transformers` can read.
    """
    if gguf_file is None and not (_found(folder) or (folder / _SETTINGS).is_file()):
        return None
    from transformers import AutoTokenizer

    where = folder if gguf_file is None else folder / gguf_file
    given = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False, **given
            )
    except Exception as error:  # the libraries below raise whatever they meet, bare Exception too
        if gguf_file is not None and not _gguf_has_tokens(where):
            return None
        fault = _fault(folder, error) if gguf_file is None else _first_line(error)
        raise ModelError(f"{where}: {fault}") from None
    # Where a file is missing, some classes begin with an empty vocabulary.
    if gguf_file is None and type(tokenizer).vocab_files_names and not _found(folder):
        raise ModelError(f"{folder}: {_NO_VOCABULARY}")
    return PretrainedVocabulary(tokenizer)


def _found(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _VOCABULARIES)


_NO_VOCABULARY = f"{_SETTINGS} is there, but none of {', '.join(_VOCABULARIES)}"


def _fault(folder: Path, error: Exception) -> str:
    """One line on what is wrong with a folder's files."""
    for name in (_SETTINGS, *_VOCABULARIES):
        path = folder / name
        if path.suffix == ".json" and path.is_file():
            try:
                json.loads(path.read_bytes())
            except ValueError as fault:
                return f"{name} is cut short or is not JSON: {fault}"
    return _first_line(error) if _found(folder) else _NO_VOCABULARY


def _first_line(error: Exception) -> str:
    reason = str(error).strip().split("\n", 1)[0] or "no reason given"
    return f"transformers cannot read the tokenizer: {type(error).__name__}: {reason}"


def _gguf_has_tokens(path: Path) -> bool:
    from gguf import GGUFReader

    return "tokenizer.ggml.tokens" in GGUFReader(path).fields


@contextmanager
def _quiet() -> Iterator[None]:
    """Neither log lines nor warnings of the libraries: what went wrong is in their exceptions."""
    from transformers.utils import logging as chatter

    before = chatter.get_verbosity()
    chatter.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        chatter.set_verbosity(before)
