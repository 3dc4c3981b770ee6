"""Running registered analyses on a model: sequences in, a table of every head out.

Means are over independent sequences, in float64 and in the order of the sequences; the model, the
tokens and the caller's random state are left as they were.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp import registry
from interp.data.corpus import read_text
from interp.data.repeated import (
    TokenBatch,
    induction_targets,
    repeated_tokens,
    unrepeated_tokens,
)
from interp.errors import AnalysisError, ModelError, ShapeError
from interp.models.vocabulary import is_text, padded_texts, token_array
from interp.models.watch import (
    HookedModel,
    LayerAttention,
    as_hooked,
    uniform_attention,
    watch_attention,
)
from interp.tables import HeadScores, head_label

DEFAULT_BLOCKS = (8, 12, 16, 20, 25, 32, 50)
CHUNK = 16
"""Sequences in a forward pass, where they are small; only memory depends on it."""

PASS_NUMBERS = 2**27
"""Numbers in the logits and one layer's pattern of a forward pass: half a gigabyte in float32, and
softmax and loss hold as much again."""

TEXT_WIDTH = 512
"""Tokens in a window of text at most. One layer's pattern at a context of 8,192 would be a hundred
gigabytes for some models, and the in-context-learning score is published for 512."""


@dataclass(frozen=True)
class Inputs:
    """The sequences an analysis runs on, those of its null, and how to say what they are."""

    batches: Sequence[TokenBatch]
    unrepeated: Sequence[TokenBatch]
    description: str
    params: dict[str, object]


def analyze(
    model: object,
    name: str,
    tokens: object = None,
    *,
    attention_mask: Tensor | None = None,
    seed: int = 0,
    blocks: Sequence[int] | None = None,
    batch: int = 8,
    prepend_bos: bool | None = None,
) -> HeadScores:
    """A table of every head's score, with its standard error, null and n.

    Without `tokens` the inputs are repeated random tokens: `batch` sequences of each block length
    in `blocks`, by default several that fit the model, since a head with one fixed offset would
    score on a single length. `tokens` are ids `[batch, pos]`, taken exactly as given, or text where
    the model has a vocabulary; their induction target follows the latest earlier copy. Random
    tokens and texts are led by BOS where the model expects one, unless `prepend_bos` says
    otherwise.

    Raises: AnalysisError for an unknown name, a block that does not fit, tokens in which the
    measure is not defined, or `prepend_bos` where there is no BOS or there are ids; ShapeError for
    tokens that do not fit the model; ModelError for text without a vocabulary, or a model that has
    no hooks.
    """
    model = as_hooked(model)
    if tokens is not None and blocks is not None:
        raise AnalysisError("tokens or blocks: one source of tokens at a time")
    if tokens is None and attention_mask is not None:
        raise AnalysisError("an attention_mask belongs to tokens, and none were given")
    if tokens is None:
        inputs = repeated_inputs(model, blocks, batch, seed, prepend_bos)
    else:
        inputs = token_inputs(model, tokens, attention_mask, prepend_bos)
    return score_heads(model, name, inputs, seed=seed)


def score_heads(model: HookedModel, name: str, inputs: Inputs, *, seed: int = 0) -> HeadScores:
    """`analyze` on inputs that are already made.

    Raises: AnalysisError for an unknown name, or inputs in which the measure is not defined.
    """
    analysis = registry.get(name)
    values = measure(model, [analysis], inputs.batches)
    null = null_values(model, [analysis], inputs)
    table = head_table(values.pop(analysis.score), null[analysis.score], analysis.score)
    for column, own in values.items():
        table[column] = sequence_statistics(own)[0].ravel()
    if table[analysis.score].isna().all():
        raise AnalysisError(
            f"{name} is not measurable on these tokens: {inputs.description} has no query it "
            "applies to"
        )
    best = table.loc[table[analysis.score].idxmax()]
    return HeadScores(
        table=table,
        score=analysis.score,
        unit=analysis.unit,
        analysis=name,
        model=model.cfg.model_name,
        params={**inputs.params, "null": analysis.null},
        inputs=inputs.description,
        seed=seed,
        summary={
            "best": float(best[analysis.score]),
            "best_head": head_label(int(best["layer"]), int(best["head"])),
            "largest_null": float(table[f"{analysis.score}_null"].max()),
        },
    )


def repeated_inputs(
    model: HookedModel,
    blocks: Sequence[int] | None,
    batch: int,
    seed: int,
    prepend_bos: bool | None = None,
) -> Inputs:
    """Repeated random tokens of several block lengths, and their unrepeated null."""
    bos = leading_bos(model, prepend_bos)
    d_vocab, excluded = random_ids(model)
    room = (model.cfg.n_ctx - (bos is not None)) // 2
    usable = min(room, d_vocab - len(excluded | ({bos} if bos is not None else set())))
    if blocks is None:
        blocks = [block for block in DEFAULT_BLOCKS if block <= usable] or [usable]
    for block in blocks:
        if block > room:
            raise AnalysisError(
                f"block = {block}: twice that is longer than n_ctx = {model.cfg.n_ctx}; at most "
                f"{room}"
            )
    if not blocks:
        raise AnalysisError("blocks: at least one length is needed")
    if batch < 1:
        raise AnalysisError(f"batch = {batch}: at least one sequence is needed")

    def draw(make: object) -> list[TokenBatch]:
        assert callable(make)
        return [
            make(batch, block, d_vocab, seed=seed, bos=bos, excluded=excluded) for block in blocks
        ]

    lengths = ", ".join(map(str, blocks))
    lead = f"[BOS = {bos}] + " if bos is not None else "no BOS, "
    return Inputs(
        draw(repeated_tokens),
        draw(unrepeated_tokens),
        f"{lead}blocks of {lengths} distinct random tokens twice, {batch} sequences of each",
        {"blocks": list(blocks), "batch": batch, "bos": bos},
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
        f"{len(ids)} given sequences of {ids.shape[1]} tokens",
        {"shape": list(ids.shape)},
    )


def text_inputs(
    model: HookedModel, path: Path, width: int = TEXT_WIDTH, prepend_bos: bool | None = None
) -> Inputs:
    """A text file in windows of `width` tokens, fewer where `n_ctx` is; a shorter rest is not used.

    Each window begins as a text of its own: led by BOS where the model expects one.

    Raises: ConfigError for a file that is empty or not text; ModelError for a model without a
    tokenizer; AnalysisError for a text shorter than two tokens, or `prepend_bos=True` without BOS.
    """
    text = read_text(path)
    vocabulary = model.vocabulary
    if vocabulary is None:
        raise ModelError("this model has no tokenizer: give --tokens, not text")
    bos = leading_bos(model, prepend_bos)
    # An encoder's tokenizer puts more around a text than one token in front.
    around = vocabulary.encode("")[0] if prepend_bos is None else [] if bos is None else [bos]
    (ids,) = vocabulary.encode(text, prepend_bos=False)
    if around and ids[:1] == around[:1]:
        ids = ids[1:]  # the text begins with a BOS of its own
    width = min(width, model.cfg.n_ctx, len(around) + len(ids))
    taken = width - len(around)
    if width < 2 or taken < 1:
        raise AnalysisError(f"{path}: a text of {len(ids)} tokens says nothing of attention")
    n_windows = len(ids) // taken
    parts = np.asarray(ids[: n_windows * taken]).reshape(n_windows, taken)
    front, behind = (
        np.broadcast_to(np.asarray(own, dtype=parts.dtype), (n_windows, len(own)))
        for own in (around[:1], around[1:])
    )
    inputs = token_inputs(model, np.concatenate((front, parts, behind), axis=1))
    if len(around) > 1:
        lead = f", each between the ids {around[0]} and {', '.join(map(str, around[1:]))}"
    elif around:
        lead = f", each led by BOS = {bos}"
    else:
        lead = "" if prepend_bos is None else ", no BOS"
    description = f"{n_windows} windows of {width} tokens from {path.name}{lead}"
    params = {**inputs.params, "text": path.name, "bos": bos}
    return replace(inputs, description=description, params=params)


def sequences_at_once(model: HookedModel, n_pos: int) -> int:
    """How many sequences of one length go through the model together, to stay in `PASS_NUMBERS`."""
    each = n_pos * (model.cfg.d_vocab + model.cfg.n_heads * n_pos)
    return max(1, min(CHUNK, PASS_NUMBERS // each))


def measure(
    model: HookedModel, analyses: Collection[registry.Analysis], batches: Sequence[TokenBatch]
) -> dict[str, Float[np.ndarray, "layer sequence n_heads"]]:
    """Every column of the analyses, for each layer, sequence and head, by one pass.

    Raises: AnalysisError for an analysis whose first column is not its own name.
    """
    found: dict[str, list[list[np.ndarray]]] = {}
    device = torch.device(str(model.cfg.device))
    for whole in batches:
        for part in _chunks(whole, sequences_at_once(model, whole.tokens.shape[1])):
            chunk = replace(part, tokens=part.tokens.to(device), targets=part.targets.to(device))

            def reduce(attention: LayerAttention, chunk: TokenBatch = chunk) -> dict[str, Tensor]:
                columns: dict[str, Tensor] = {}
                for analysis in analyses:
                    columns |= _columns(analysis, attention, chunk)
                return columns

            layers = watch_attention(model, chunk.tokens, reduce, chunk.key_mask)
            for column in layers[0]:
                values = [layer[column].double().numpy() for layer in layers]
                found.setdefault(column, []).append(values)
    return {
        name: np.stack([np.concatenate(layer) for layer in zip(*chunks, strict=True)])
        for name, chunks in found.items()
    }


def _columns(
    analysis: registry.Analysis, attention: LayerAttention, batch: TokenBatch
) -> dict[str, Tensor]:
    columns = dict(analysis.measure(attention, batch))
    if next(iter(columns), None) != analysis.score:
        raise AnalysisError(
            f"{analysis.name} returned the columns {list(columns)}; the first has to be "
            f"{analysis.score!r}"
        )
    return columns


def head_table(
    values: Float[np.ndarray, "layer sequence n_heads"],
    null: Float[np.ndarray, "layer null_sequence n_heads"],
    score: str,
) -> pd.DataFrame:
    """One row for each head: mean, standard error over sequences, the null's mean, and n."""
    n_layers, _, n_heads = values.shape
    mean, standard_error, n = sequence_statistics(values)
    layer, head = np.meshgrid(np.arange(n_layers), np.arange(n_heads), indexing="ij")
    return pd.DataFrame(
        {
            "layer": layer.ravel(),
            "head": head.ravel(),
            score: mean.ravel(),
            f"{score}_se": standard_error.ravel(),
            f"{score}_null": sequence_statistics(null)[0].ravel(),
            "n": n.ravel(),
        }
    )


def sequence_statistics(
    values: Float[np.ndarray, "layer sequence n_heads"],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, standard error and number over the sequences in which the measure is defined.

    The standard error is NaN where fewer than two sequences count.
    """
    defined = ~np.isnan(values)
    n = defined.sum(axis=1)
    filled = np.where(defined, values, 0.0)
    mean = filled.sum(axis=1) / np.where(n > 0, n, np.nan)
    deviations = np.where(defined, values - mean[:, None], 0.0)
    variance = (deviations**2).sum(axis=1) / np.where(n > 1, n - 1, np.nan)
    return mean, np.sqrt(variance / np.where(n > 0, n, np.nan)), n


def null_values(
    model: HookedModel, analyses: Collection[registry.Analysis], inputs: Inputs
) -> dict[str, Float[np.ndarray, "layer sequence n_heads"]]:
    """What each analysis's score is where there is nothing to find, by one pass at most."""
    unrepeated = [analysis for analysis in analyses if analysis.null == "unrepeated"]
    values = measure(model, unrepeated, inputs.unrepeated) if unrepeated else {}
    n_heads, direction = model.cfg.n_heads, model.cfg.attention_dir
    for analysis in analyses:
        if analysis.null == "uniform":
            even = [
                _columns(analysis, uniform_attention(real_tokens(batch), n_heads, direction), batch)
                for batch in inputs.batches
            ]
            flat = torch.cat([columns[analysis.score] for columns in even]).double().numpy()
            values[analysis.score] = np.broadcast_to(flat, (model.cfg.n_layers, *flat.shape))
    return values


def real_tokens(batch: TokenBatch) -> Bool[Tensor, "batch pos"]:
    """Where a batch holds real tokens."""
    if batch.key_mask is None:
        return torch.ones_like(batch.tokens, dtype=torch.bool)
    return batch.key_mask


def _chunks(batch: TokenBatch, size: int) -> list[TokenBatch]:
    masks = [None] * len(batch.tokens) if batch.key_mask is None else batch.key_mask.split(size)
    return [
        replace(batch, tokens=tokens, targets=targets, key_mask=mask)
        for tokens, targets, mask in zip(
            batch.tokens.split(size), batch.targets.split(size), masks, strict=False
        )
    ]


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
    tokens = torch.from_numpy(np.stack(rows))
    # A BOS or a separator stays where it was: a model without it at its place is another model.
    fixed = torch.isin(batch.tokens, torch.tensor(kept, dtype=torch.long))
    return replace(batch, tokens=batch.tokens.where(fixed, tokens))


def random_ids(model: HookedModel) -> tuple[int, frozenset[int]]:
    """How many ids have a token, and which of them no random block may hold."""
    if model.vocabulary is None:
        return model.cfg.d_vocab, frozenset()
    # A padded embedding has rows without a token.
    return min(model.cfg.d_vocab, len(model.vocabulary)), model.vocabulary.special_ids
