"""Sequences for two models at once: the same ids wherever the two can read the same ids.

One invariant: whatever differs between the two sides (a BOS, a tokenizer) is in the description.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from interp.config import BLOCK_RULE
from interp.data.corpus import check_corpus, read_text
from interp.data.drawing import REPEATED
from interp.data.repeated import TokenBatch, repeated_tokens, unrepeated_tokens
from interp.errors import AnalysisError, InterpError
from interp.inputs import Inputs, leading_bos, random_ids, token_inputs
from interp.models.watch import HookedModel
from interp.text_inputs import TEXT_WIDTH, corpus_windows, text_inputs, windows_inputs

Pair = tuple[HookedModel, HookedModel]
Labels = tuple[str, str]
Made = TypeVar("Made")


@dataclass(frozen=True)
class SharedInputs:
    """What each of the two models is shown; `paired`: sequence by sequence the same tokens."""

    first: Inputs
    second: Inputs
    paired: bool
    description: str
    params: dict[str, object]


def shared_repeats(
    models: Pair,
    labels: Labels,
    blocks: Sequence[int] | None,
    batch: int,
    seed: int,
    prepend_bos: bool | None,
) -> SharedInputs:
    """Repeated random tokens of several block lengths that fit both, of ids that both have.

    Each model's own BOS, where it expects one or `prepend_bos` asks for it, leads the same ids.

    Raises: AnalysisError for models that share too few ids, or blocks that do not fit both.
    """
    bos = [leading_bos(model, prepend_bos) for model in models]
    known = [random_ids(model) for model in models]
    d_vocab = min(size for size, _ in known)
    excluded = {id_ for _, special in known for id_ in special} | {b for b in bos if b is not None}
    n_ids = d_vocab - sum(id_ < d_vocab for id_ in excluded)
    if n_ids < 3:
        raise AnalysisError(
            f"{labels[0]} and {labels[1]} share {n_ids} ids (below {d_vocab}, without the special "
            "ids of both); repeated blocks need at least 3"
        )
    room = [(m.cfg.n_ctx - (b is not None)) // 2 for m, b in zip(models, bos, strict=True)]
    usable = min(*room, n_ids)
    if usable < 3:
        tight = labels[room.index(min(room))]
        raise AnalysisError(
            f"{tight} has room for {min(room)} tokens twice; repeated blocks need at least 3"
        )
    if blocks is None:
        blocks = [block for block in REPEATED.blocks if block <= usable] or [usable]
    _check_blocks(blocks, models, labels, room, n_ids)
    if batch < 1:
        raise AnalysisError(f"batch = {batch}: at least one sequence is needed")

    lengths = ", ".join(map(str, blocks))
    drawn = (
        f"blocks of {lengths} distinct random tokens twice, {batch} sequences of each, of {n_ids} "
        f"ids below {d_vocab} that both models have"
    )
    sides = []
    for own in bos:
        # With both BOS ids left out, the same seed draws the same ids for both.
        repeated, unrepeated = (
            [make(batch, n, d_vocab, seed=seed, bos=own, excluded=excluded) for n in blocks]
            for make in (repeated_tokens, unrepeated_tokens)
        )
        sides.append(Inputs(repeated, unrepeated, f"{_lead(own)}, {drawn}", {"bos": own}))
    leads = "; ".join(f"{label}: {_lead(own)}" for label, own in zip(labels, bos, strict=True))
    params = {"blocks": list(blocks), "batch": batch, "ids": n_ids, "ids_below": d_vocab}
    return SharedInputs(sides[0], sides[1], True, f"{drawn}. {leads}", params)


def shared_tokens(
    models: Pair, labels: Labels, tokens: object, prepend_bos: bool | None
) -> SharedInputs:
    """Given ids, exactly as they are, for both models; texts go through each model's tokenizer.

    Raises: ShapeError, naming the model, for ids or lengths that one of them cannot read;
    AnalysisError for `prepend_bos` with ids.
    """
    sides = _each(models, labels, lambda model: token_inputs(model, tokens, None, prepend_bos))
    return _shared(labels, sides, {})


def shared_text(
    models: Pair,
    labels: Labels,
    path: Path,
    length: int | None,
    sequences: int | None,
    prepend_bos: bool | None,
) -> SharedInputs:
    """A text file in windows of one width, through each model's own tokenizer.

    Raises: AnalysisError or ModelError, naming the model, for a `length` that does not fit one of
    them or a model without a tokenizer; ConfigError and AnalysisError as `text_inputs` does.
    """
    read_text(path)  # a file that cannot be read is neither model's fault
    width = _width(models, length)

    def windows(width: int) -> tuple[Inputs, Inputs]:
        return _each(
            models,
            labels,
            lambda model: text_inputs(model, path, width, prepend_bos, sequences=sequences),
        )

    sides = windows(width)
    fit = min(side.batches[0].tokens.shape[1] for side in sides)
    if fit < width:  # a text shorter than a window is one, as wide as its tokenizer makes it
        sides = windows(fit)
    return _shared(labels, sides, {"text": path.name, "length": fit})


def shared_corpus(
    models: Pair,
    labels: Labels,
    name: str,
    length: int | None,
    sequences: int | None,
    seed: int,
    prepend_bos: bool | None,
) -> SharedInputs:
    """Windows of one width of a corpus's held-out documents, through each model's own tokenizer.

    The documents are those that are long enough in both models' tokens; sequence i of both is from
    the same document, and as far into it in windows.

    Raises: ConfigError for an unknown corpus; AnalysisError for documents that are all too short in
    one of the models' tokens; and as `shared_text` does.
    """
    check_corpus(name)  # a corpus that is not there is neither model's fault
    width = _width(models, length)
    first, second = _each(
        models, labels, lambda model: corpus_windows(model, name, width, prepend_bos)
    )
    counts = np.minimum(first.counts, second.counts)
    if not counts.any():
        raise AnalysisError(
            f"{name}: none of the {len(counts)} held-out documents has {width} tokens, BOS and "
            f"all, for both {labels[0]} and {labels[1]}"
        )
    sides = [
        windows_inputs(model, own, counts, sequences=sequences, seed=seed)
        for model, own in zip(models, (first, second), strict=True)
    ]
    told = ("corpus", "documents", "documents_left_out", "sha256", "length")
    return _shared(labels, sides, {key: sides[0].params[key] for key in told})


def _width(models: Pair, length: int | None) -> int:
    if length is not None:
        return length
    return min(TEXT_WIDTH, *(model.cfg.n_ctx for model in models))


def _each(models: Pair, labels: Labels, make: Callable[[HookedModel], Made]) -> tuple[Made, Made]:
    """What is made for either model; a fault names the model."""
    made = []
    for model, label in zip(models, labels, strict=True):
        try:
            made.append(make(model))
        except InterpError as error:
            raise type(error)(f"{label}: {error}") from None
    first, second = made
    return first, second


def _shared(labels: Labels, sides: Sequence[Inputs], params: dict[str, object]) -> SharedInputs:
    first, second = sides
    if _same(first.batches, second.batches):
        return SharedInputs(first, second, True, first.description, {**first.params, **params})
    words = "; ".join(
        f"{label}: {side.description}" for label, side in zip(labels, sides, strict=True)
    )
    words += "; each by its own tokenizer, so that the tokens are not the same"
    return SharedInputs(first, second, False, words, params)


def _check_blocks(
    blocks: Sequence[int], models: Pair, labels: Labels, room: Sequence[int], n_ids: int
) -> None:
    if not blocks:
        raise AnalysisError("blocks: at least one length is needed")
    for block in blocks:
        if block < 3:
            raise AnalysisError(f"block = {block} {BLOCK_RULE}")
        for model, label, own in zip(models, labels, room, strict=True):
            if block > own:
                raise AnalysisError(
                    f"block = {block}: twice that is longer than n_ctx = {model.cfg.n_ctx} of "
                    f"{label}; at most {min(*room, n_ids)} fits both models"
                )
        if block > n_ids:
            raise AnalysisError(
                f"block = {block} needs that many distinct tokens; {labels[0]} and {labels[1]} "
                f"share {n_ids} ids"
            )


def _lead(bos: int | None) -> str:
    return "no BOS" if bos is None else f"BOS {bos} in front"


def _same(first: Sequence[TokenBatch], second: Sequence[TokenBatch]) -> bool:
    """Whether both are the same tokens; padding differs only where tokens do."""
    return all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, second, strict=True))
