"""Sequences in which a few tokens are asked for again at the end, for heads that retrieve."""

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from interp.data.repeated import (
    TokenBatch,
    block_choices,
    induction_targets,
    led_by,
    random_blocks,
)
from interp.errors import AnalysisError

NEEDLE = 4
"""Tokens of a needle, the cue among them."""

CUE = 2
"""The first tokens of a needle, which the question repeats."""


def planted_needle(
    n_sequences: int,
    block: int,
    d_vocab: int,
    *,
    seed: int,
    bos: int | None = None,
    excluded: Collection[int] = (),
) -> TokenBatch:
    """`[BOS]`, a haystack of `block` distinct random tokens, and two of them again as a question.

    Four tokens in a row at a random depth of the haystack are the needle; the question is its
    first two, the cue. Every depth is equally likely, anew for each sequence. Tokens are uniform
    over the vocabulary without BOS and `excluded`.

    Raises: AnalysisError for a block shorter than 6 or longer than the vocabulary allows.
    """
    if block < NEEDLE + CUE:
        raise AnalysisError(
            f"block = {block}: a haystack of {NEEDLE + CUE} tokens at least is needed, {NEEDLE} of "
            "them the needle"
        )
    haystack = random_blocks(n_sequences, block, d_vocab, seed, bos, excluded, n_blocks=1)
    start = np.random.default_rng([seed, block, 6]).integers(block - NEEDLE + 1, size=n_sequences)
    cue = np.take_along_axis(haystack, start[:, None] + np.arange(CUE), axis=1)
    tokens = led_by(bos, np.concatenate((haystack, cue), axis=1))
    place = torch.arange(tokens.shape[1]) - int(bos is not None)
    first = torch.from_numpy(start)[:, None]
    return TokenBatch(
        tokens,
        induction_targets(tokens),
        block=block,
        bos=bos is not None,
        needle=(place >= first) & (place < first + NEEDLE),
        question=(place >= block).expand(tokens.shape),
    )


def unasked_needle(
    n_sequences: int,
    block: int,
    d_vocab: int,
    *,
    seed: int,
    bos: int | None = None,
    excluded: Collection[int] = (),
) -> TokenBatch:
    """The null of `planted_needle`: the same haystack, and a question of tokens not in it.

    Where the vocabulary has none left, the question's tokens are others of the haystack, but never
    of the needle.

    Raises: AnalysisError as `planted_needle` does.
    """
    asked = planted_needle(n_sequences, block, d_vocab, seed=seed, bos=bos, excluded=excluded)
    assert asked.needle is not None
    assert asked.question is not None
    choices = block_choices(d_vocab, bos, excluded)
    rng = np.random.default_rng([seed, block, 7])
    tokens = asked.tokens.clone()
    for row, needle, question in zip(tokens, asked.needle, asked.question, strict=True):
        row[question] = _other_tokens(row[~question], row[needle], choices, rng)
    return replace(asked, tokens=tokens, original=asked.tokens)


def _other_tokens(
    haystack: Int[Tensor, " pos"],
    needle: Int[Tensor, " needle_pos"],
    choices: Int[np.ndarray, " choice"],
    rng: np.random.Generator,
) -> Int[Tensor, " cue_pos"]:
    outside = rng.permutation(np.setdiff1d(choices, haystack.numpy()))
    inside = rng.permutation(np.setdiff1d(choices, [*needle.tolist(), *outside]))
    return torch.from_numpy(np.concatenate((outside, inside))[:CUE])


def span(start: int, stop: int, like: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
    """True at the positions from `start` up to, not including, `stop`, in every sequence."""
    place = torch.arange(like.shape[1], device=like.device)
    return ((place >= start) & (place < stop)).expand(like.shape)
