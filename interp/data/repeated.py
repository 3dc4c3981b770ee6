"""Sequences in which a block of random tokens repeats, and where an induction head should look.

Every sequence follows from its seed alone; the caller's random state is neither used nor changed.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from interp.config import BLOCK_RULE, RepeatedDataConfig
from interp.errors import AnalysisError


@dataclass(frozen=True)
class TokenBatch:
    """Sequences of one length, with each query's induction target.

    `targets[b, q]` is the key that an induction head at query q attends to: the token after the
    previous copy of the current one; -1 where there is none. `key_mask` is True on real tokens;
    None where there is no padding. `block` and `bos` say how repeated tokens were made.
    `documents` numbers the text that each sequence was taken from: those of one text are not
    independent; None where all are. `question` marks tokens that ask for those in `needle`.
    `counted` leaves some real tokens out of what is measured. `original` is there in a null only:
    the tokens that these ones stand for, so that what would repeat is looked for in the same
    places.
    """

    tokens: Int[Tensor, "batch pos"]
    targets: Int[Tensor, "batch pos"]
    key_mask: Bool[Tensor, "batch pos"] | None = None
    block: int | None = None
    bos: bool = False
    documents: Int[Tensor, " batch"] | None = None
    needle: Bool[Tensor, "batch pos"] | None = None
    question: Bool[Tensor, "batch pos"] | None = None
    counted: Bool[Tensor, "batch pos"] | None = None
    original: Int[Tensor, "batch pos"] | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> "TokenBatch":
        """The batch with every tensor changed alike: some of its rows, another device."""
        tensors: dict[str, Any] = {
            field.name: change(value)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **tensors)

    @property
    def repeating(self) -> Int[Tensor, "batch pos"]:
        """The tokens whose repeats count: in a null those that it stands for, else the tokens."""
        return self.tokens if self.original is None else self.original

    @property
    def real(self) -> Bool[Tensor, "batch pos"]:
        """Where there are real tokens."""
        if self.key_mask is None:
            return torch.ones_like(self.tokens, dtype=torch.bool)
        return self.key_mask


def repeated_tokens(
    n_sequences: int,
    block: int,
    d_vocab: int,
    *,
    seed: int,
    bos: int | None = None,
    excluded: Collection[int] = (),
) -> TokenBatch:
    """`[BOS] r_1..r_n r_1..r_n` with n = `block` distinct random tokens, anew for each sequence.

    Tokens are uniform over the vocabulary without BOS and `excluded`. Query p of the second copy
    has the target p - n + 1. Without `bos` there is no leading token.

    Raises: AnalysisError for a block shorter than 3 or longer than the vocabulary allows.
    """
    first = random_blocks(n_sequences, block, d_vocab, seed, bos, excluded, n_blocks=1)
    return _batch(np.concatenate((first, first), axis=1), block, bos)


def unrepeated_tokens(
    n_sequences: int,
    block: int,
    d_vocab: int,
    *,
    seed: int,
    bos: int | None = None,
    excluded: Collection[int] = (),
) -> TokenBatch:
    """The null of `repeated_tokens`: nothing repeats, the targets stay where they were.

    A head that scores here attends by offset, not by content. Where the vocabulary is too small
    for two blocks of different tokens, the second is drawn independently of the first.

    Raises: AnalysisError as `repeated_tokens` does.
    """
    both = random_blocks(n_sequences, block, d_vocab, seed, bos, excluded, n_blocks=2)
    repeating = np.concatenate((both[:, :block], both[:, :block]), axis=1)
    return replace(_batch(both, block, bos), original=led_by(bos, repeating))


def random_blocks(
    n_sequences: int,
    block: int,
    d_vocab: int,
    seed: int,
    bos: int | None,
    excluded: Collection[int],
    *,
    n_blocks: int,
) -> Int[np.ndarray, "batch pos"]:
    """Blocks of distinct tokens side by side, all different as far as the vocabulary reaches.

    Raises: AnalysisError for a block shorter than 3 or longer than the vocabulary allows.
    """
    if block < 3:
        raise AnalysisError(f"block = {block} {BLOCK_RULE}")
    choices = block_choices(d_vocab, bos, excluded)
    if block > len(choices):
        raise AnalysisError(
            f"block = {block} needs that many distinct tokens; the vocabulary offers {len(choices)}"
        )
    rng = np.random.default_rng([seed, block, n_blocks])
    # Whole permutations, cut off: distinct tokens, every one equally likely at every place.
    if n_blocks * block <= len(choices):
        order = rng.permuted(np.tile(choices, (n_sequences, 1)), axis=1)
        return order[:, : n_blocks * block]
    return np.concatenate(
        [
            rng.permuted(np.tile(choices, (n_sequences, 1)), axis=1)[:, :block]
            for _ in range(n_blocks)
        ],
        axis=1,
    )


def block_choices(
    d_vocab: int, bos: int | None, excluded: Collection[int]
) -> Int[np.ndarray, " choice"]:
    """The ids that a random block may hold."""
    return np.setdiff1d(np.arange(d_vocab), [*excluded, *([] if bos is None else [bos])])


def led_by(bos: int | None, ids: Int[np.ndarray, "batch pos"]) -> Int[Tensor, "batch led_pos"]:
    """The sequences behind a BOS, or as they are without one."""
    if bos is not None:
        # A BOS goes in front; writing it over r_1 would leave the first pair unrepeated.
        ids = np.concatenate((np.full((len(ids), 1), bos), ids), axis=1)
    return torch.from_numpy(ids.astype(np.int64))


def _batch(ids: Int[np.ndarray, "batch pos"], block: int, bos: int | None) -> TokenBatch:
    lead = int(bos is not None)
    tokens = led_by(bos, ids)
    targets = torch.full_like(tokens, -1)
    queries = torch.arange(block + lead, 2 * block + lead)
    targets[:, queries] = queries - block + 1
    return TokenBatch(tokens, targets, block=block, bos=bos is not None)


def induction_targets(
    tokens: Int[Tensor, "batch pos"], key_mask: Bool[Tensor, "batch pos"] | None = None
) -> Int[Tensor, "batch pos"]:
    """For each query of any sequence, the key after the latest earlier copy of its token; else -1.

    A copy directly before the query has the query itself as its successor; such queries have no
    target.
    """
    latest = latest_copies(tokens, key_mask)
    targets = torch.where(latest >= 0, latest + 1, -1)
    index = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.where(targets == index, -1, targets)


def latest_copies(
    tokens: Int[Tensor, "batch pos"], key_mask: Bool[Tensor, "batch pos"] | None = None
) -> Int[Tensor, "batch pos"]:
    """Where each token of a sequence stood last before; -1 for its first time, and on padding."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    if key_mask is not None:
        # Every padded place is a token of its own.
        tokens = torch.where(key_mask, tokens, -1 - index)
    # Equal tokens stand side by side when sorted, in their order: no table of all pairs.
    order = tokens.argsort(dim=1, stable=True)
    sorted_tokens = tokens.gather(1, order)
    before = torch.where(sorted_tokens[:, 1:] == sorted_tokens[:, :-1], order[:, :-1], -1)
    latest = torch.full_like(tokens, -1)
    return latest.scatter_(1, order[:, 1:], before)


def predictable_pairs(tokens: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos-1"]:
    """Whether an induction rule predicts token p + 1: the pair (p, p + 1) occurred before.

    Element p belongs to the prediction of token p + 1, as in the per-token loss.
    """
    pairs = tokens[:, :-1] * (tokens.max() + 1) + tokens[:, 1:]
    same = pairs[:, :, None] == pairs[:, None, :]
    return same.tril(diagonal=-1).any(dim=-1)


class RepeatedStream:
    """Endless training batches of repeated blocks, each following from seed and step alone."""

    def __init__(self, config: RepeatedDataConfig, n_ctx: int, d_vocab: int, bos: int | None):
        self.config = config
        self.n_ctx = n_ctx
        self.bos = bos
        self.choices = np.setdiff1d(np.arange(d_vocab), [] if bos is None else [bos])
        rank = np.arange(1, len(self.choices) + 1)
        weight = 1 / rank if config.frequencies == "zipf" else np.ones(len(rank))
        self.log_frequency = np.log(weight / weight.sum())

    def batch(self, seed: int, step: int, size: int) -> Int[Tensor, "batch pos"]:
        """The training batch of a step."""
        return self._draw(np.random.default_rng([seed, 1, step]), size)

    def held_out(self, n_sequences: int, *, apart_from: int = 0) -> Int[Tensor, "batch pos"]:
        """Sequences for evaluation, the same for every seed, from a generator of their own.

        With `apart_from` they are drawn independently of `held_out(apart_from)`.
        """
        generator = np.random.default_rng([0, 5] if apart_from else [0, 2])
        return self._draw(generator, n_sequences)

    def facts(self) -> dict[str, object]:
        """What a run records of its data."""
        return {"kind": "repeated", "tokens_in_blocks": len(self.choices), "bos": self.bos}

    def _draw(self, rng: np.random.Generator, size: int) -> Int[Tensor, "batch pos"]:
        shortest, longest = self.config.span
        spans = rng.integers(shortest, longest + 1, size)
        # The largest perturbed log-frequencies are a weighted draw without replacement.
        if self.config.distinct:
            noise = rng.gumbel(size=(size, len(self.choices)))
            picks = np.argsort(-(self.log_frequency + noise), axis=1)[:, :longest]
        else:
            picks = rng.choice(
                len(self.choices), size=(size, longest), p=np.exp(self.log_frequency)
            )
        lead = int(self.bos is not None)
        place = np.arange(self.n_ctx - lead)[None, :] % spans[:, None]
        ids = self.choices[np.take_along_axis(picks, place, axis=1)]
        if self.bos is not None:
            ids = np.concatenate((np.full((size, 1), self.bos), ids), axis=1)
        return torch.from_numpy(ids.astype(np.int64))
