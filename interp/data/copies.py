"""Blocks of random tokens that come once or four times, as Olsson et al.'s scores have them."""

from collections.abc import Collection
from dataclasses import replace

import numpy as np
from jaxtyping import Int

from interp.data.repeated import TokenBatch, induction_targets, led_by, random_blocks

COPIES = 4


def random_block(
    n_sequences: int,
    block: int,
    d_vocab: int,
    *,
    seed: int,
    bos: int | None = None,
    excluded: Collection[int] = (),
) -> TokenBatch:
    """`[BOS]` and `block` distinct random tokens once; no query has an induction target.

    Raises: AnalysisError for a block shorter than 3 or longer than the vocabulary allows.
    """
    ids = random_blocks(n_sequences, block, d_vocab, seed, bos, excluded, n_blocks=1)
    return _batch(ids, block, bos)


def copied_tokens(
    n_sequences: int,
    block: int,
    d_vocab: int,
    *,
    seed: int,
    bos: int | None = None,
    excluded: Collection[int] = (),
) -> TokenBatch:
    """`[BOS]` and four times the same n = `block` distinct random tokens, anew for each sequence.

    Tokens are uniform over the vocabulary without BOS and `excluded`.

    Raises: AnalysisError for a block shorter than 3 or longer than the vocabulary allows.
    """
    first = random_blocks(n_sequences, block, d_vocab, seed, bos, excluded, n_blocks=1)
    return _batch(np.tile(first, (1, COPIES)), block, bos)


def uncopied_tokens(
    n_sequences: int,
    block: int,
    d_vocab: int,
    *,
    seed: int,
    bos: int | None = None,
    excluded: Collection[int] = (),
) -> TokenBatch:
    """The null of `copied_tokens`: nothing repeats, and what would have repeated is remembered.

    Where the vocabulary is too small for four blocks of different tokens, they are drawn
    independently.

    Raises: AnalysisError as `copied_tokens` does.
    """
    ids = random_blocks(n_sequences, block, d_vocab, seed, bos, excluded, n_blocks=COPIES)
    copied = _batch(np.tile(ids[:, :block], (1, COPIES)), block, bos)
    return replace(copied, tokens=led_by(bos, ids), original=copied.tokens)


def _batch(ids: Int[np.ndarray, "batch pos"], block: int, bos: int | None) -> TokenBatch:
    tokens = led_by(bos, ids)
    return TokenBatch(tokens, induction_targets(tokens), block=block, bos=bos is not None)
