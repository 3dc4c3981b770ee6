"""Two models on the same probes: which heads do what in each, and how far the two differ.

It serves a small model beside a large one, whose shapes and vocabularies differ, and two readings
of one model, whose every head should agree.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from torch import nn

from interp import registry
from interp.comparison.inputs import (
    Labels,
    Pair,
    SharedInputs,
    shared_repeats,
    shared_text,
    shared_tokens,
)
from interp.comparison.result import Comparison
from interp.errors import AnalysisError
from interp.measure import Inputs, head_table, measure, null_values, sequence_statistics
from interp.models.transformer import Transformer
from interp.models.watch import HookedModel, as_hooked

__all__ = ["Comparison", "compare"]

Values = dict[str, np.ndarray]


def compare(
    model_a: HookedModel | nn.Module,
    model_b: HookedModel | nn.Module,
    tokens: object = None,
    *,
    text: Path | str | None = None,
    blocks: Sequence[int] | None = None,
    batch: int = 8,
    seed: int = 0,
    prepend_bos: bool | None = None,
) -> Comparison:
    """Every head analysis on the same sequences of two models, in one table.

    Without `tokens` or `text` the sequences are repeated random tokens: `batch` of each block
    length in `blocks`, by default several that fit both models, of ids that both have; each model
    gets its own BOS in front where it expects one, unless `prepend_bos` says otherwise. `tokens`
    `[batch, pos]` go to both exactly as given; a `text` file goes through each model's own
    tokenizer. Differences and rank correlations are given where the
    models have the same layers and heads: there, but only there, one model's head corresponds to
    the other's.

    Raises: AnalysisError for more than one source of tokens, models that share too few ids,
    blocks that do not fit both, or tokens on which nothing is measurable; ShapeError and
    ModelError, naming the model, for tokens or text that one model cannot read; ModelError for
    what is neither our model nor a bridge.
    """
    if sum(given is not None for given in (tokens, text, blocks)) > 1:
        raise AnalysisError("tokens, text or blocks: one source of tokens at a time")
    models = (as_hooked(model_a), as_hooked(model_b))
    labels = _labels(models)
    if tokens is not None:
        inputs = shared_tokens(models, labels, tokens, prepend_bos)
    elif text is not None:
        inputs = shared_text(models, labels, Path(text), prepend_bos)
    else:
        inputs = shared_repeats(models, labels, blocks, batch, seed, prepend_bos)

    analyses = [registry.get(name) for name in registry.names()]
    scores = [analysis.score for analysis in analyses]
    first, second = (
        measure(model, analyses, side.batches)
        for model, side in zip(models, _sides(inputs), strict=True)
    )
    tables = []
    for model, label, side, values in zip(
        models, labels, _sides(inputs), (first, second), strict=True
    ):
        nulls = null_values(model, analyses, side)
        tables.append(_model_table(label, scores, values, nulls))
    if all(table[scores].isna().all(axis=None) for table in tables):
        raise AnalysisError(f"nothing is measurable on these tokens: {inputs.description}")
    reason = _why_no_differences(models, labels)
    return Comparison(
        table=pd.concat(tables, ignore_index=True),
        differences=(
            pd.DataFrame() if reason else _differences(scores, first, second, inputs.paired)
        ),
        labels=labels,
        units={analysis.score: analysis.unit for analysis in analyses},
        why_no_differences=reason,
        paired=inputs.paired,
        params={**inputs.params, "null": {a.score: a.null for a in analyses}},
        inputs=inputs.description,
        seed=seed,
    )


def _sides(inputs: SharedInputs) -> tuple[Inputs, Inputs]:
    return inputs.first, inputs.second


def _labels(models: Pair) -> Labels:
    """The models' names; where they are one, with what tells the two apart."""
    first, second = (str(model.cfg.model_name) for model in models)
    if first != second:
        return first, second
    kinds = ["native" if isinstance(model, Transformer) else "bridge" for model in models]
    apart = kinds if kinds[0] != kinds[1] else ["A", "B"]
    return f"{first} ({apart[0]})", f"{second} ({apart[1]})"


def _why_no_differences(models: Pair, labels: Labels) -> str:
    shapes = [(model.cfg.n_layers, model.cfg.n_heads) for model in models]
    if shapes[0] == shapes[1]:
        return ""
    words = [
        f"{label} has {n_layers} layers of {n_heads} heads"
        for label, (n_layers, n_heads) in zip(labels, shapes, strict=True)
    ]
    return f"{words[0]}, {words[1]}: no head of one corresponds to a head of the other"


def _model_table(label: str, scores: Sequence[str], values: Values, nulls: Values) -> pd.DataFrame:
    """One row for each head of a model, with all scores beside each other."""
    parts: list[pd.DataFrame] = []
    for score in scores:
        own = head_table(values[score], nulls[score], score).rename(columns={"n": f"{score}_n"})
        parts.append(own.drop(columns=["layer", "head"]) if parts else own)
    table = pd.concat(parts, axis=1)
    table.insert(0, "model", label)
    return table


def _differences(
    scores: Sequence[str], first: Values, second: Values, paired: bool
) -> pd.DataFrame:
    """Second minus first for each head, with the standard error of that difference.

    Within sequences where both models saw the same ones, so that what differs between sequences
    cancels; else between the two means, as of independent samples.
    """
    n_layers, _, n_heads = first[scores[0]].shape
    layer, head = np.meshgrid(np.arange(n_layers), np.arange(n_heads), indexing="ij")
    columns = {"layer": layer.ravel(), "head": head.ravel()}
    for score in scores:
        if paired:
            mean, error, _ = sequence_statistics(second[score] - first[score])
        else:
            (mean_a, error_a, _), (mean_b, error_b, _) = (
                sequence_statistics(values[score]) for values in (first, second)
            )
            mean, error = mean_b - mean_a, np.hypot(error_a, error_b)
        columns[score], columns[f"{score}_se"] = mean.ravel(), error.ravel()
    return pd.DataFrame(columns)
