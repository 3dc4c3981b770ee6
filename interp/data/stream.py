"""Where a run's tokens come from, behind one interface: repeated blocks, or windows of text.

A batch follows from seed and step alone, so that the step is the whole data position.
"""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from interp.config import RepeatedDataConfig, RunConfig, TextDataConfig
from interp.data.corpus import Corpus, read_corpus
from interp.data.repeated import RepeatedStream
from interp.data.tokenizer import BytePairVocabulary
from interp.errors import ConfigError


@runtime_checkable
class Stream(Protocol):
    """Training batches by step, and held-out sequences."""

    def batch(self, seed: int, step: int, size: int) -> Int[Tensor, "batch pos"]:
        """The training batch of a step."""
        ...

    def held_out(self, n_sequences: int, *, apart_from: int = 0) -> Int[Tensor, "batch pos"]:
        """Sequences for evaluation, the same for every seed.

        With `apart_from` they share no token with those of `held_out(apart_from)`.
        """
        ...

    def facts(self) -> dict[str, object]:
        """What a run records of its data."""
        ...


class TextStream:
    """Windows of `n_ctx` tokens, beginning anywhere in the training text."""

    def __init__(
        self,
        training: Int[np.ndarray, " training"],
        held_out: Int[np.ndarray, " held_out"],
        n_ctx: int,
        facts: dict[str, object],
    ):
        self._training = training
        self._held_out = held_out
        self._n_ctx = n_ctx
        self._facts = facts

    def batch(self, seed: int, step: int, size: int) -> Int[Tensor, "batch pos"]:
        """The training batch of a step."""
        rng = np.random.default_rng([seed, 1, step])
        return self._windows(self._training, rng.integers(self._last(self._training), size=size))

    def held_out(self, n_sequences: int, *, apart_from: int = 0) -> Int[Tensor, "batch pos"]:
        """Windows spread evenly over the held-out text; fewer where they would overlap.

        With `apart_from` they overlap none of `held_out(apart_from)`, and may be fewer.
        """
        starts = self._spread(n_sequences)
        if apart_from:
            taken = self._spread(apart_from)
            grid = np.arange(0, self._last(self._held_out), self._n_ctx)
            after = np.searchsorted(taken, grid)
            before = taken[np.clip(after - 1, 0, None)]
            beside = np.minimum(
                np.abs(grid - before), np.abs(grid - taken[np.clip(after, None, len(taken) - 1)])
            )
            free = grid[beside >= self._n_ctx]
            chosen = np.linspace(0, len(free) - 1, min(n_sequences, len(free)))
            starts = free[chosen.astype(np.int64)]
        return self._windows(self._held_out, starts)

    def _spread(self, n_sequences: int) -> Int[np.ndarray, " batch"]:
        n_sequences = min(n_sequences, len(self._held_out) // self._n_ctx)
        return np.linspace(0, self._last(self._held_out) - 1, n_sequences).astype(np.int64)

    def facts(self) -> dict[str, object]:
        """What a run records of its data."""
        return self._facts

    def _last(self, tokens: Int[np.ndarray, " tokens"]) -> int:
        return len(tokens) - self._n_ctx + 1

    def _windows(
        self, tokens: Int[np.ndarray, " tokens"], starts: Int[np.ndarray, " batch"]
    ) -> Int[Tensor, "batch pos"]:
        ids = tokens[starts[:, None] + np.arange(self._n_ctx)[None, :]]
        return torch.from_numpy(ids.astype(np.int64))


def open_stream(config: RunConfig) -> tuple[Stream, BytePairVocabulary | None]:
    """The data of a run, and the vocabulary of its text.

    A tokenizer is trained once for each corpus and size, and kept under the user's cache folder.

    Raises: ConfigError for a corpus that cannot be read or is too short.
    """
    n_ctx, d_vocab = config.model.n_ctx, config.model.d_vocab
    if isinstance(config.data, RepeatedDataConfig):
        return RepeatedStream(config.data, n_ctx, d_vocab, config.model.bos_token_id), None
    assert isinstance(config.data, TextDataConfig)
    corpus = read_corpus(config.data.corpus, config.data.held_out_fraction)
    vocabulary, training, held_out = _tokenised(corpus, d_vocab, config.data.held_out_fraction)
    for part, tokens in (("training", training), ("held-out", held_out)):
        if len(tokens) < n_ctx:
            raise ConfigError(
                f"corpus {corpus.name}: {len(tokens)} {part} tokens are fewer than one window of "
                f"n_ctx = {n_ctx}"
            )
    facts = {
        "kind": "text",
        **corpus.facts(),
        "tokens": len(training),
        "held_out_tokens": len(held_out),
        "vocabulary": len(vocabulary),
    }
    return TextStream(training, held_out, n_ctx, facts), vocabulary


def _tokenised(
    corpus: Corpus, d_vocab: int, held_out_fraction: float
) -> tuple[BytePairVocabulary, Int[np.ndarray, " training"], Int[np.ndarray, " held_out"]]:
    key = f"{corpus.sha256} {d_vocab} {held_out_fraction}"
    folder = cache_folder() / "tokens" / hashlib.sha256(key.encode()).hexdigest()[:24]
    if not folder.is_dir():
        vocabulary = BytePairVocabulary.train(corpus.training.values(), d_vocab)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Filled aside and published by one rename: another process may be doing the same.
        scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making-"))
        (scratch / "tokenizer.json").write_text(vocabulary.to_json(), encoding="utf-8")
        for part, texts in (("training", corpus.training), ("held_out", corpus.held_out)):
            ids = vocabulary.encode(list(texts.values()))
            flat = np.fromiter((i for text in ids for i in text), dtype=np.int32)
            np.save(scratch / f"{part}.npy", flat)
        try:
            scratch.rename(folder)
        except OSError:  # somebody else was first, with the same content
            for file in scratch.iterdir():
                file.unlink()
            scratch.rmdir()
    return (
        BytePairVocabulary.load(folder / "tokenizer.json"),
        np.load(folder / "training.npy", mmap_mode="r"),
        np.load(folder / "held_out.npy", mmap_mode="r"),
    )


def cache_folder() -> Path:
    """Where what can be made again is kept: `$XDG_CACHE_HOME/interp` or `~/.cache/interp`."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "interp"
