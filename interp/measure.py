"""Running registered analyses on a model: sequences in, a table of every head out.

Means are over independent sequences, in float64 and in the order of the sequences; the model, the
tokens and the caller's random state are left as they were. Arrays have a place for every head that
the model ever had: a pruned one is missing there, and has no row in a table.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp import registry
from interp.data.drawing import REPEATED
from interp.data.repeated import TokenBatch
from interp.errors import AnalysisError
from interp.evidence import head_table, select_heads, sequence_statistics
from interp.inputs import Inputs
from interp.models.layer_attention import LayerAttention, uniform_attention
from interp.models.watch import HookedModel, as_hooked, layer_window, watch_attention
from interp.registry import Analysis
from interp.tables import HeadScores, head_label, head_labels
from interp.text_inputs import inputs_from

Columns = dict[str, Float[np.ndarray, "layer sequence n_heads *own"]]
"""What an analysis returned for each layer, sequence and head, by column.

A pruned head has NaN, -1 in columns of integers, and False in those of truths."""

CHUNK = 16
"""Sequences in a forward pass, where they are small; only memory depends on it."""

PASS_NUMBERS = 2**27
"""Numbers in the logits and one layer's pattern of a forward pass: half a gigabyte in float32, and
softmax and loss hold as much again."""


def analyze(
    model: object,
    name: str,
    tokens: object = None,
    *,
    attention_mask: Tensor | None = None,
    seed: int = 0,
    blocks: Sequence[int] | None = None,
    batch: int | None = None,
    prepend_bos: bool | None = None,
    corpus: str | None = None,
    length: int | None = None,
    sequences: int | None = None,
    exclude_bos: bool = False,
    **parameters: object,
) -> HeadScores:
    """A table of every head's score, with its standard error, null and n.

    Without `tokens` the inputs are the random tokens that the analysis is defined on: `batch`
    sequences of each block length in `blocks`, by default several that fit the model, since a head
    with one fixed offset would score on a single length. `tokens` are ids `[batch, pos]`, taken
    exactly as given, or text where the model has a vocabulary; their induction target follows the
    latest earlier copy. Random tokens and texts are led by BOS where the model expects one, unless
    `prepend_bos` says otherwise. `corpus` takes windows of text instead, as `corpus_inputs` does:
    `sequences` of `length` tokens. With `exclude_bos` the BOS tokens, wherever they are, count
    neither as queries nor as keys, though heads attend to them. `parameters` are the analysis's
    own, such as `effect=0.2`.

    Raises: AnalysisError for an unknown name or parameter, a block that does not fit, tokens in
    which the measure is not defined, or `prepend_bos` where there is no BOS or there are ids;
    ShapeError for tokens that do not fit the model; ModelError for text without a vocabulary, or a
    model that has no hooks.
    """
    analysis = registry.get(name).with_params(parameters)
    model = as_hooked(model)
    inputs = inputs_from(
        model,
        tokens,
        attention_mask=attention_mask,
        blocks=blocks,
        batch=batch,
        corpus=corpus,
        length=length,
        sequences=sequences,
        prepend_bos=prepend_bos,
        exclude_bos=exclude_bos,
        seed=seed,
        drawing=analysis.drawing or REPEATED,
    )
    return score_heads(model, analysis, inputs, seed=seed)


def score_heads(
    model: HookedModel, analysis: Analysis, inputs: Inputs, *, seed: int = 0
) -> HeadScores:
    """`analyze` on inputs that are already made.

    Raises: AnalysisError for inputs in which the measure is not defined.
    """
    (scores,) = score_together(model, [analysis], inputs, seed=seed)
    return scores


def score_together(
    model: HookedModel,
    analyses: Sequence[Analysis],
    inputs: Inputs,
    *,
    seed: int = 0,
    refused: dict[str, str] | None = None,
) -> list[HeadScores]:
    """The scores of several analyses on the same inputs, by one pass over them.

    With `refused` an analysis that is not defined on these inputs is left out, and its reason is
    put there under its name.

    Raises: AnalysisError for inputs in which one of them is not defined, without `refused`.
    """
    values = measure(model, analyses, inputs.batches, refused)
    able = [analysis for analysis in analyses if analysis.name not in (refused or {})]
    nulls = null_values(model, able, inputs, values)
    scores = []
    for analysis in able:
        columns, null = values[analysis.name], nulls[analysis.name]
        try:
            scores.append(_scores(model, analysis, inputs, columns, null, seed))
        except AnalysisError as error:
            if refused is None:
                raise
            refused[analysis.name] = str(error)
    return scores


def _scores(
    model: HookedModel,
    analysis: Analysis,
    inputs: Inputs,
    columns: Columns,
    null: Float[np.ndarray, "layer null_sequence n_heads"],
    seed: int,
) -> HeadScores:
    documents = sequence_documents(inputs.batches)
    score = analysis.score
    table = head_table(columns[score], null, score, documents)
    if table[score].isna().all():
        raise AnalysisError(
            f"{analysis.name} is not measurable on these tokens: {inputs.description} has no query "
            "it applies to"
        )
    best = table.loc[table[score].idxmax()]
    summary: dict[str, object] = {
        "best": float(best[score]),
        "best_head": head_label(int(best["layer"]), int(best["head"])),
        "largest_null": float(table[f"{score}_null"].max()),
    }
    if analysis.noun is not None:
        effect = float(str(analysis.params["effect"]))
        select_heads(table, columns[score], null, documents, score, effect)
        summary["selected"] = int(table["selected"].sum())
    for column, own in columns.items():
        if column not in (score, f"{score}_null") and own.ndim == 3:
            table[column] = sequence_statistics(own, documents)[0].ravel()
    if analysis.finish is not None:
        found = registry.Found(columns, analysis.params, token_text(model))
        made, figures = analysis.finish(found)
        for column, grid in made.items():
            table[column] = [value for row in grid for value in row]
        summary |= figures
    labels = head_labels(model.cfg.pruned_heads)
    return HeadScores(
        table=without_pruned(model, table),
        score=score,
        unit=analysis.unit,
        analysis=analysis.name,
        model=model.cfg.model_name,
        params={
            **inputs.params,
            **analysis.params,
            **_called(analysis),
            "null": analysis.null,
            **({"rows": rows} if (rows := getattr(model.cfg, "rows", "")) else {}),
            **({"pruned_heads": labels} if labels else {}),
        },
        inputs=inputs.description,
        seed=seed,
        summary=summary,
    )


def without_pruned(model: HookedModel, table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a table of heads that are those of heads the model has."""
    pruned = model.cfg.pruned_heads
    there = [
        head not in pruned.get(layer, ())
        for layer, head in zip(table["layer"], table["head"], strict=True)
    ]
    return table[there].reset_index(drop=True)


def _called(analysis: Analysis) -> dict[str, object]:
    return {} if analysis.noun is None else {"called": analysis.noun}


def token_text(model: HookedModel) -> Callable[[int], str]:
    """How an id is shown: its text where the model has a tokenizer, else the number."""

    def text(token: int) -> str:
        if model.vocabulary is None:
            return str(token)
        return model.vocabulary.token_texts([token])[0]

    return text


def sequences_at_once(model: HookedModel, n_pos: int) -> int:
    """How many sequences of one length go through the model together, to stay in `PASS_NUMBERS`."""
    each = n_pos * (model.cfg.d_vocab + model.cfg.n_heads * n_pos)
    return max(1, min(CHUNK, PASS_NUMBERS // each))


def measure(
    model: HookedModel,
    analyses: Collection[Analysis],
    batches: Sequence[TokenBatch],
    refused: dict[str, str] | None = None,
) -> dict[str, Columns]:
    """What each analysis returns for each layer, sequence and head, by one pass.

    With `refused` an analysis that raises AnalysisError is left out, and its reason put there.

    Raises: AnalysisError as an analysis does, where its first column is not its own name, or for a
    model whose heads are all pruned.
    """
    if not any(model.cfg.heads(layer) for layer in range(model.cfg.n_layers)):
        raise AnalysisError(f"{model.cfg.model_name} has no head left: all of them are pruned")
    left_out = {} if refused is None else refused
    found: dict[tuple[str, str], list[list[np.ndarray]]] = {}
    device = torch.device(str(model.cfg.device))
    for whole in batches:
        for chunk in _chunks(whole, sequences_at_once(model, whole.tokens.shape[1])):
            there = chunk.each(lambda tensor: tensor.to(device))

            def reduce(
                attention: LayerAttention, batch: TokenBatch = there
            ) -> Mapping[Any, Tensor]:
                reduced: dict[Any, Tensor] = {}
                for analysis in analyses:
                    if analysis.name in left_out:
                        continue
                    try:
                        columns = _columns(analysis, attention, batch)
                    except AnalysisError as error:
                        if refused is None:
                            raise
                        refused[analysis.name] = str(error)
                    else:
                        reduced |= {(analysis.name, name): own for name, own in columns.items()}
                return reduced

            layers = watch_attention(model, there.tokens, reduce, there.key_mask)
            for key in next(layer for layer in layers if layer):
                if key[0] not in left_out:
                    known = [_numbers(layer[key]) if layer else None for layer in layers]
                    found.setdefault(key, []).append(_every_head(model, known))
    columns: dict[str, Columns] = {analysis.name: {} for analysis in analyses}
    for (name, column), chunks in found.items():
        if name in left_out:
            continue
        columns[name][column] = np.stack(
            [np.concatenate(layer) for layer in zip(*chunks, strict=True)]
        )
    return columns


def head_values(
    model: HookedModel, names: Collection[str], batches: Sequence[TokenBatch]
) -> dict[str, Float[np.ndarray, "layer sequence n_heads"]]:
    """The scores alone of the named analyses, by column, by one pass."""
    analyses = [registry.get(name) for name in names]
    found = measure(model, analyses, batches)
    return {analysis.score: found[analysis.name][analysis.score] for analysis in analyses}


def _every_head(model: HookedModel, layers: Sequence[np.ndarray | None]) -> list[np.ndarray]:
    """Arrays `[sequence, n_heads, ...]` of the heads that each layer has, with places for all."""
    cfg = model.cfg
    some = next(values for values in layers if values is not None)
    missing = {"f": np.nan, "b": False}.get(some.dtype.kind, -1)
    whole = []
    for layer, values in enumerate(layers):
        if values is None or layer in cfg.pruned_heads:
            every = np.full((len(some), cfg.n_heads, *some.shape[2:]), missing, some.dtype)
            if values is not None:
                every[:, list(cfg.heads(layer))] = values
            values = every
        whole.append(values)
    return whole


def _numbers(value: Tensor) -> np.ndarray:
    # What has further axes is for `finish`, and may be large.
    return value.numpy() if value.ndim > 2 else value.double().numpy()


def _columns(analysis: Analysis, attention: LayerAttention, batch: TokenBatch) -> dict[str, Tensor]:
    if batch.counted is not None:
        attention.key_mask = batch.counted
    columns = dict(analysis.measure(attention, batch, **analysis.arguments))
    if next(iter(columns), None) != analysis.score:
        raise AnalysisError(
            f"{analysis.name} returned the columns {list(columns)}; the first has to be "
            f"{analysis.score!r}"
        )
    table = {"layer", "head", "n", "selected"}
    table |= {f"{analysis.score}_se", f"{analysis.score}_held_out"}
    if taken := sorted(table & columns.keys()):
        raise AnalysisError(
            f"{analysis.name} returned the columns {taken}, which every table has: rename them"
        )
    for column, value in columns.items():
        expected = (len(batch.tokens), attention.n_heads)
        if not isinstance(value, Tensor) or value.shape[:2] != expected:
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise AnalysisError(
                f"{analysis.name} returned {shape} for {column!r}; it should be [batch, n_heads] = "
                f"{list(expected)}"
            )
    return columns


def sequence_documents(batches: Sequence[TokenBatch]) -> Int[np.ndarray, " sequence"]:
    """The document of each sequence; a sequence without one is a document of its own."""
    n_sequences = sum(len(batch.tokens) for batch in batches)
    own = np.arange(n_sequences)
    if all(batch.documents is None for batch in batches):
        return own
    return np.concatenate(
        [batch.documents.cpu().numpy() for batch in batches if batch.documents is not None]
    )


def null_values(
    model: HookedModel,
    analyses: Collection[Analysis],
    inputs: Inputs,
    values: Mapping[str, Columns],
) -> dict[str, Float[np.ndarray, "layer sequence n_heads"]]:
    """What each analysis's score is where there is nothing to find, by one pass at most.

    `values` are what the analyses found: some tell their own null.
    """
    unrepeated = [analysis for analysis in analyses if analysis.null == "unrepeated"]
    found = measure(model, unrepeated, inputs.unrepeated) if unrepeated else {}
    nulls = {analysis.name: found[analysis.name][analysis.score] for analysis in unrepeated}
    uniform = [analysis for analysis in analyses if analysis.null == "uniform"]
    nulls |= _uniform_values(model, uniform, inputs.batches)
    for analysis in analyses:
        if analysis.null == "own":
            own = f"{analysis.score}_null"
            if own not in values[analysis.name]:
                raise AnalysisError(f"{analysis.name} returned no column {own!r}, its null")
            nulls[analysis.name] = values[analysis.name][own]
    return nulls


def _uniform_values(
    model: HookedModel, analyses: Collection[Analysis], batches: Sequence[TokenBatch]
) -> dict[str, Float[np.ndarray, "layer sequence n_heads"]]:
    """The scores of heads that attend evenly to whatever their layer's mask allows."""
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    windows = [layer_window(model, layer) for layer in range(n_layers)]
    causal = model.cfg.attention_dir == "causal"
    nulls = {}
    for analysis in analyses:
        by_window = {}
        for window in dict.fromkeys(windows):
            parts = [
                _columns(
                    analysis, uniform_attention(batch.real, causal=causal, window=window), batch
                )[analysis.score]
                for batch in batches
            ]
            by_window[window] = torch.cat(parts).double().numpy()
        layers = np.stack([by_window[window] for window in windows])
        null = np.broadcast_to(layers, (*layers.shape[:2], n_heads))
        if model.cfg.pruned_heads:
            null = null.copy()
            for layer, heads in model.cfg.pruned_heads.items():
                null[layer][:, list(heads)] = np.nan
        nulls[analysis.name] = null
    return nulls


def _chunks(batch: TokenBatch, size: int) -> list[TokenBatch]:
    starts = range(0, len(batch.tokens), size)
    parts = [slice(start, start + size) for start in starts]
    return [batch.each(itemgetter(part)) for part in parts]
