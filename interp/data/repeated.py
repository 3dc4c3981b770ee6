"""Sequences in which a block of random tokens repeats, and where an induction head should look.

Every sequence follows from its seed alone; the caller's random state is neither used nor changed.
"""

from collections.abc import Collection
from dataclasses import dataclass

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
    """

    tokens: Int[Tensor, "batch pos"]
    targets: Int[Tensor, "batch pos"]
    key_mask: Bool[Tensor, "batch pos"] | None = None
    block: int | None = None
    bos: bool = False


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
    first = _blocks(n_sequences, block, d_vocab, seed, bos, excluded, n_blocks=1)
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
    both = _blocks(n_sequences, block, d_vocab, seed, bos, excluded, n_blocks=2)
    return _batch(both, block, bos)


def _blocks(
    n_sequences: int,
    block: int,
    d_vocab: int,
    seed: int,
    bos: int | None,
    excluded: Collection[int],
    *,
    n_blocks: int,
) -> Int[np.ndarray, "batch pos"]:
    if block < 3:
        raise AnalysisError(f"block = {block} {BLOCK_RULE}")
    choices = np.setdiff1d(np.arange(d_vocab), [*excluded, *([] if bos is None else [bos])])
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


def _batch(ids: Int[np.ndarray, "batch pos"], block: int, bos: int | None) -> TokenBatch:
    lead = int(bos is not None)
    if bos is not None:
        # A BOS goes in front; writing it over r_1 would leave the first pair unrepeated.
        ids = np.concatenate((np.full((len(ids), 1), bos), ids), axis=1)
    targets = np.full(ids.shape, -1)
    queries = np.arange(block + lead, 2 * block + lead)
    targets[:, queries] = queries - block + 1
    return TokenBatch(
        torch.from_numpy(ids.astype(np.int64)),
        torch.from_numpy(targets.astype(np.int64)),
        block=block,
        bos=bos is not None,
    )


TARGET_ROWS = 64


def induction_targets(
    tokens: Int[Tensor, "batch pos"], key_mask: Bool[Tensor, "batch pos"] | None = None
) -> Int[Tensor, "batch pos"]:
    """For each query of any sequence, the key after the latest earlier copy of its token; else -1.

    A copy directly before the query has the query itself as its successor; such queries have no
    target.
    """
    # A row at a time over many sequences would be slow, all of them at once n_pos² times as large.
    if len(tokens) > TARGET_ROWS:
        masks = [None] * len(tokens) if key_mask is None else key_mask.split(TARGET_ROWS)
        parts = zip(tokens.split(TARGET_ROWS), masks, strict=False)
        return torch.cat([induction_targets(rows, mask) for rows, mask in parts])
    n_pos = tokens.shape[1]
    index = torch.arange(n_pos, device=tokens.device)
    same = tokens[:, :, None] == tokens[:, None, :]
    earlier = same & (index[None, :] < index[:, None])
    if key_mask is not None:
        earlier &= key_mask[:, None, :] & key_mask[:, :, None]
    latest = torch.where(earlier, index, -1).amax(dim=-1)
    targets = torch.where(latest >= 0, latest + 1, -1)
    return torch.where(targets == index, -1, targets)


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
