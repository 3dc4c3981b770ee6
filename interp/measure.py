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
from interp.models.vocabulary import token_array
from interp.models.watch import HookedModel, LayerAttention, uniform_attention, watch_attention
from interp.tables import HeadScores, head_label

DEFAULT_BLOCKS = (8, 12, 16, 20, 25, 32, 50)
CHUNK = 16
"""Sequences a forward pass; only memory depends on it."""


@dataclass(frozen=True)
class Inputs:
    """The sequences an analysis runs on, those of its null, and how to say what they are."""

    batches: Sequence[TokenBatch]
    unrepeated: Sequence[TokenBatch]
    description: str
    params: dict[str, object]


def analyze(
    model: HookedModel,
    name: str,
    tokens: object = None,
    *,
    attention_mask: Tensor | None = None,
    seed: int = 0,
    blocks: Sequence[int] | None = None,
    batch: int = 8,
) -> HeadScores:
    """A table of every head's score, with its standard error, null and n.

    Without `tokens` the inputs are repeated random tokens: `batch` sequences of each block length
    in `blocks`, by default several that fit the model, since a head with one fixed offset would
    score on a single length. With `tokens` `[batch, pos]`, taken exactly as given, the induction
    target follows the latest earlier copy.

    Raises: AnalysisError for an unknown name, a block that does not fit, or tokens in which the
    measure is not defined; ShapeError for tokens that do not fit the model.
    """
    if tokens is not None and blocks is not None:
        raise AnalysisError("tokens or blocks: one source of tokens at a time")
    if tokens is None and attention_mask is not None:
        raise AnalysisError("an attention_mask belongs to tokens, and none were given")
    if tokens is None:
        inputs = repeated_inputs(model, blocks, batch, seed)
    else:
        inputs = token_inputs(model, tokens, attention_mask)
    return score_heads(model, name, inputs, seed=seed)


def score_heads(model: HookedModel, name: str, inputs: Inputs, *, seed: int = 0) -> HeadScores:
    """`analyze` on inputs that are already made.

    Raises: AnalysisError for an unknown name, or inputs in which the measure is not defined.
    """
    analysis = registry.get(name)
    values = measure(model, [analysis], inputs.batches)
    null = _null_values(model, analysis, inputs)
    table = head_table(values.pop(analysis.score), null, analysis.score)
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
    model: HookedModel, blocks: Sequence[int] | None, batch: int, seed: int
) -> Inputs:
    """Repeated random tokens of several block lengths, and their unrepeated null."""
    bos = getattr(model.cfg, "bos_token_id", None)
    d_vocab, excluded = _random_ids(model)
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


def token_inputs(
    model: HookedModel, tokens: object, attention_mask: Tensor | None = None
) -> Inputs:
    """Given sequences; their null keeps the targets, over tokens that do not repeat."""
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


def text_inputs(model: HookedModel, path: Path) -> Inputs:
    """A text file in windows of `n_ctx` tokens; what is left over at the end is not used.

    Raises: ConfigError for a file that is empty or not text; ModelError for a model without a
    tokenizer; AnalysisError for a text shorter than two tokens.
    """
    text = read_text(path)
    vocabulary = getattr(model, "vocabulary", None)
    if vocabulary is None:
        raise ModelError("this model has no tokenizer: give --tokens, not text")
    (ids,) = vocabulary.encode(text)
    width = min(model.cfg.n_ctx, len(ids))
    if width < 2:
        raise AnalysisError(f"{path}: a text of {len(ids)} tokens says nothing of attention")
    n_windows = len(ids) // width
    windows = np.asarray(ids[: n_windows * width]).reshape(n_windows, width)
    inputs = token_inputs(model, windows)
    description = f"{n_windows} windows of {width} tokens from {path.name}"
    return replace(inputs, description=description, params={**inputs.params, "text": path.name})


def measure(
    model: HookedModel, analyses: Collection[registry.Analysis], batches: Sequence[TokenBatch]
) -> dict[str, Float[np.ndarray, "layer sequence n_heads"]]:
    """Every column of the analyses, for each layer, sequence and head, by one pass.

    Raises: AnalysisError for an analysis whose first column is not its own name.
    """
    found: dict[str, list[list[np.ndarray]]] = {}
    device = torch.device(str(model.cfg.device))
    for whole in batches:
        for part in _chunks(whole):
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


def _null_values(
    model: HookedModel, analysis: registry.Analysis, inputs: Inputs
) -> Float[np.ndarray, "layer sequence n_heads"]:
    if analysis.null == "unrepeated":
        return measure(model, [analysis], inputs.unrepeated)[analysis.score]
    n_heads = model.cfg.n_heads
    values = [
        _columns(analysis, uniform_attention(real_tokens(batch), n_heads), batch)[analysis.score]
        for batch in inputs.batches
    ]
    flat = torch.cat(values).double().numpy()
    return np.broadcast_to(flat, (model.cfg.n_layers, *flat.shape))


def real_tokens(batch: TokenBatch) -> Bool[Tensor, "batch pos"]:
    """Where a batch holds real tokens."""
    if batch.key_mask is None:
        return torch.ones_like(batch.tokens, dtype=torch.bool)
    return batch.key_mask


def _chunks(batch: TokenBatch) -> list[TokenBatch]:
    masks = [None] * len(batch.tokens) if batch.key_mask is None else batch.key_mask.split(CHUNK)
    return [
        replace(batch, tokens=tokens, targets=targets, key_mask=mask)
        for tokens, targets, mask in zip(
            batch.tokens.split(CHUNK), batch.targets.split(CHUNK), masks, strict=False
        )
    ]


def _unrepeated_copy(batch: TokenBatch, model: HookedModel) -> TokenBatch:
    """The same targets over tokens that do not repeat, as far as the vocabulary reaches."""
    rng = np.random.default_rng([0, 3])
    n_pos, bos = batch.tokens.shape[1], getattr(model.cfg, "bos_token_id", None)
    d_vocab, excluded = _random_ids(model)
    choices = np.setdiff1d(np.arange(d_vocab), [*excluded, *([] if bos is None else [bos])])
    rounds = -(-n_pos // len(choices))
    rows = [
        np.concatenate([rng.permutation(choices) for _ in range(rounds)])[:n_pos]
        for _ in range(len(batch.tokens))
    ]
    tokens = torch.from_numpy(np.stack(rows))
    # BOS stays where it was: a model without it at its place is another model.
    return replace(batch, tokens=tokens if bos is None else tokens.where(batch.tokens != bos, bos))


def _random_ids(model: HookedModel) -> tuple[int, frozenset[int]]:
    """How many ids have a token, and which of them no random block may hold."""
    vocabulary = getattr(model, "vocabulary", None)
    if vocabulary is None:
        return int(model.cfg.d_vocab), frozenset()
    # A padded embedding has rows without a token.
    return min(int(model.cfg.d_vocab), len(vocabulary)), vocabulary.special_ids
