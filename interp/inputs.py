"""The sequences that heads are measured on: random tokens, given tokens, or text.

One invariant: whatever a model's tokens are led by, and wherever they come from, is said in the
description, which every result carries.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from interp.data.drawing import REPEATED, Draw, Drawing
from interp.data.repeated import TokenBatch, induction_targets
from interp.errors import AnalysisError, ShapeError
from interp.models.vocabulary import is_text, padded_texts, token_array
from interp.models.watch import HookedModel


@dataclass(frozen=True)
class Inputs:
    """The sequences an analysis runs on, those of its null, and how to say what they are."""

    batches: Sequence[TokenBatch]
    unrepeated: Sequence[TokenBatch]
    description: str
    params: dict[str, object]


def random_inputs(
    model: HookedModel,
    blocks: Sequence[int] | None = None,
    batch: int | None = None,
    seed: int = 0,
    prepend_bos: bool | None = None,
    drawing: Drawing = REPEATED,
) -> Inputs:
    """Random tokens as `drawing` has them, repeated ones by default, and those of its null.

    Raises: AnalysisError for blocks that do not fit the model, or no sequence at all.
    """
    if not drawing.bos and prepend_bos is None:
        prepend_bos = False
    bos = leading_bos(model, prepend_bos)
    d_vocab, excluded = random_ids(model)
    room = model.cfg.n_ctx - (bos is not None)
    largest = max((n for n in range(room + 1) if drawing.length(n) <= room), default=0)
    usable = min(largest, d_vocab - len(excluded | ({bos} if bos is not None else set())))
    if blocks is None:
        blocks = [block for block in drawing.blocks if block <= usable] or [usable]
    for block in blocks:
        if block > largest:
            raise AnalysisError(
                f"block = {block}: {drawing.length(block)} tokens are longer than n_ctx = "
                f"{model.cfg.n_ctx}; at most {largest}"
            )
    if not blocks:
        raise AnalysisError("blocks: at least one length is needed")
    batch = drawing.batch if batch is None else batch
    if batch < 1:
        raise AnalysisError(f"batch = {batch}: at least one sequence is needed")

    def drawn(draw: Draw) -> list[TokenBatch]:
        return [
            draw(batch, block, d_vocab, seed=seed, bos=bos, excluded=excluded) for block in blocks
        ]

    lengths = ", ".join(map(str, blocks))
    lead = f"[BOS = {bos}] + " if bos is not None else "no BOS, "
    return Inputs(
        drawn(drawing.tokens),
        drawn(drawing.null),
        f"{lead}blocks of {lengths} {drawing.words}, {batch} sequences of each",
        {"blocks": list(blocks), "batch": batch, "bos": bos},
    )


def without_bos(model: HookedModel, inputs: Inputs) -> Inputs:
    """The same sequences, of which BOS tokens count neither as queries nor as keys.

    Heads attend to them as before. They are known by their id, wherever padding puts them; text
    that holds the id inside loses it there, too.

    Raises: AnalysisError for a model that names no BOS.
    """
    named = {model.cfg.bos_token_id, None if model.vocabulary is None else leading_bos(model)}
    ids = torch.tensor([bos for bos in named if bos is not None], dtype=torch.long)
    if not len(ids):
        raise AnalysisError(f"{model.cfg.model_name} has no BOS token to leave out")

    def counting(batches: Sequence[TokenBatch]) -> list[TokenBatch]:
        return [
            replace(batch, counted=batch.real & ~torch.isin(batch.tokens, ids)) for batch in batches
        ]

    present = any(bool(torch.isin(batch.tokens, ids).any()) for batch in inputs.batches)
    return Inputs(
        counting(inputs.batches),
        counting(inputs.unrepeated),
        f"{inputs.description}; "
        + (
            "BOS left out of every mean" if present else "there is no BOS to leave out of the means"
        ),
        {**inputs.params, "exclude_bos": True},
    )


def leading_bos(model: HookedModel, prepend_bos: bool | None = None) -> int | None:
    """The id in front of random tokens and windows of text; None for none.

    As the model expects it unless `prepend_bos` says otherwise: its tokenizer knows, or without
    one its config, which may name an id that the tokenizer never puts in front.

    Raises: AnalysisError for `prepend_bos=True` where neither has a BOS.
    """
    if prepend_bos is False:
        return None
    named = model.cfg.bos_token_id
    if model.vocabulary is None:
        bos = named
    else:
        bos = model.vocabulary.bos_token_id
        if prepend_bos and bos is None:
            bos = named
    if prepend_bos and bos is None:
        raise AnalysisError(
            f"{model.cfg.model_name} has no BOS token to put in front: its tokens come without "
            "unless prepend_bos or --bos asks for one"
        )
    return bos


def token_inputs(
    model: HookedModel,
    tokens: object,
    attention_mask: Tensor | None = None,
    prepend_bos: bool | None = None,
) -> Inputs:
    """Given sequences; their null keeps the targets, over tokens that do not repeat."""
    if is_text(tokens):
        tokens, lengths = padded_texts(tokens, model.vocabulary, prepend_bos=prepend_bos)
        if attention_mask is None and not bool(lengths.all()):
            attention_mask = lengths
    elif prepend_bos is not None:
        raise AnalysisError(
            "ids are taken exactly as given, with the BOS they have: prepend_bos and --bos are for "
            "random tokens and text"
        )
    ids = token_array(tokens)
    if ids.numel() == 0:
        raise ShapeError("the tokens are empty")
    if int(ids.min()) < 0 or int(ids.max()) >= model.cfg.d_vocab:
        raise ShapeError(f"token ids should be within 0 and d_vocab - 1 = {model.cfg.d_vocab - 1}")
    if ids.shape[1] > model.cfg.n_ctx:
        raise ShapeError(f"sequence {ids.shape[1]} > n_ctx {model.cfg.n_ctx}")
    if attention_mask is not None and attention_mask.shape != ids.shape:
        raise ShapeError(
            f"attention_mask {list(attention_mask.shape)} for tokens {list(ids.shape)}"
        )
    key_mask = None if attention_mask is None else attention_mask.bool()
    given = TokenBatch(ids, induction_targets(ids, key_mask), key_mask)
    return Inputs(
        [given],
        [_unrepeated_copy(given, model)],
        f"{len(ids)} given sequence{'' if len(ids) == 1 else 's'} of {ids.shape[1]} "
        f"token{'' if ids.shape[1] == 1 else 's'}",
        {"shape": list(ids.shape)},
    )


def _unrepeated_copy(batch: TokenBatch, model: HookedModel) -> TokenBatch:
    """The same targets over tokens that do not repeat, as far as the vocabulary reaches."""
    rng = np.random.default_rng([0, 3])
    n_pos, bos = batch.tokens.shape[1], model.cfg.bos_token_id
    d_vocab, excluded = random_ids(model)
    kept = [*excluded, *([] if bos is None else [bos])]
    choices = np.setdiff1d(np.arange(d_vocab), kept)
    rounds = -(-n_pos // len(choices))
    rows = [
        np.concatenate([rng.permutation(choices) for _ in range(rounds)])[:n_pos]
        for _ in range(len(batch.tokens))
    ]
    # By its place among real tokens, so that padding on either side gives the same.
    places = (batch.real.long().cumsum(dim=1) - 1).clamp(min=0)
    tokens = torch.from_numpy(np.stack(rows)).gather(1, places)
    # A BOS or a separator stays where it was: a model without it at its place is another model.
    fixed = torch.isin(batch.tokens, torch.tensor(kept, dtype=torch.long))
    tokens = batch.tokens.where(fixed, tokens)
    return replace(batch, tokens=tokens, original=batch.repeating)


def random_ids(model: HookedModel) -> tuple[int, frozenset[int]]:
    """How many ids have a token, and which of them no random block may hold."""
    # Where no BOS leads, none stands inside either.
    named = model.cfg.bos_token_id
    bos = frozenset() if named is None else frozenset({named})
    if model.vocabulary is None:
        return model.cfg.d_vocab, bos
    # A padded embedding has rows without a token.
    return min(model.cfg.d_vocab, len(model.vocabulary)), model.vocabulary.special_ids | bos
