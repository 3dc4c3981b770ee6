"""Two models on the same probes: which heads do what in each, and how far the two differ.

It serves a small model beside a large one, whose shapes and vocabularies differ, and two readings
of one model, whose every head should agree.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from torch import nn

from interp import registry
from interp.comparison.inputs import (
    Labels,
    Pair,
    SharedInputs,
    shared_corpus,
    shared_repeats,
    shared_text,
    shared_tokens,
)
from interp.comparison.result import Comparison
from interp.errors import AnalysisError
from interp.evidence import head_table, select_heads, sequence_statistics
from interp.inputs import Inputs
from interp.measure import measure, null_values, sequence_documents, without_pruned
from interp.models.transformer import Transformer
from interp.models.watch import HookedModel, as_hooked
from interp.tables import head_labels

__all__ = ["Comparison", "compare"]

Values = dict[str, np.ndarray]


def compare(
    model_a: HookedModel | nn.Module,
    model_b: HookedModel | nn.Module,
    tokens: object = None,
    *,
    text: Path | str | None = None,
    corpus: str | None = None,
    length: int | None = None,
    sequences: int | None = None,
    blocks: Sequence[int] | None = None,
    batch: int = 8,
    seed: int = 0,
    prepend_bos: bool | None = None,
) -> Comparison:
    """Every analysis that names a kind of head, on the same sequences of two models, in one table.

    Without `tokens`, `text` or `corpus` the sequences are repeated random tokens: `batch` of each
    block length in `blocks`, by default several that fit both models, of ids that both have; each
    model gets its own BOS in front where it expects one, unless `prepend_bos` says otherwise.
    `tokens` `[batch, pos]` go to both exactly as given. A `text` file, or the held-out documents of
    a `corpus`, go through each model's own tokenizer, in at most `sequences` windows of `length`
    tokens: by default 512, or what fits both models, all windows of a text and 32 of a corpus. Of a
    corpus both models get the documents that are long enough for both, sequence i of both from the
    same one, and standard errors are clustered by document.

    Heads are selected in each model as `measure.select_heads` does: on one half of its sequences.
    Differences are taken within sequences where both models have the same tokens. They and rank
    correlations are given where the models have the same layers and heads: there, but only there,
    one model's head corresponds to the other's. A head that is pruned in one of them is left out.

    Raises: AnalysisError for more than one source of tokens, `length` or `sequences` without text,
    models that share too few ids, blocks that do not fit both, documents too short for one of them,
    or tokens on which nothing is measurable; ConfigError for a text or corpus that is not there;
    ShapeError, ModelError and AnalysisError, naming the model, for tokens, text or a length that
    one model cannot take; ModelError for what is neither our model nor a bridge.
    """
    if sum(given is not None for given in (tokens, text, corpus, blocks)) > 1:
        raise AnalysisError("tokens, text, corpus or blocks: one source of tokens at a time")
    if text is None and corpus is None and not (length is None and sequences is None):
        raise AnalysisError("length and sequences belong to text or a corpus, and none was given")
    models = (as_hooked(model_a), as_hooked(model_b))
    labels = _labels(models)
    if tokens is not None:
        inputs = shared_tokens(models, labels, tokens, prepend_bos)
    elif text is not None:
        inputs = shared_text(models, labels, Path(text), length, sequences, prepend_bos)
    elif corpus is not None:
        inputs = shared_corpus(models, labels, corpus, length, sequences, seed, prepend_bos)
    else:
        inputs = shared_repeats(models, labels, blocks, batch, seed, prepend_bos)

    analyses = [
        analysis
        for analysis in map(registry.get, registry.names())
        # The others name no kind of head, or are defined on tokens of their own.
        if analysis.noun is not None and analysis.drawing is None
    ]
    scores = [analysis.score for analysis in analyses]
    first, second = (
        measure(model, analyses, side.batches)
        for model, side in zip(models, _sides(inputs), strict=True)
    )
    tables = []
    for model, label, side, found in zip(
        models, labels, _sides(inputs), (first, second), strict=True
    ):
        nulls = null_values(model, analyses, side, found)
        table = _model_table(label, analyses, side, found, nulls)
        tables.append(without_pruned(model, table))
    if all(table[scores].isna().all(axis=None) for table in tables):
        raise AnalysisError(f"nothing is measurable on these tokens: {inputs.description}")
    reason = _why_no_differences(models, labels)
    differences = pd.DataFrame()
    if not reason:
        differences = _differences(_scores(analyses, first), _scores(analyses, second), inputs)
        for model in models:
            differences = without_pruned(model, differences)
    gone = {
        label: head_labels(model.cfg.pruned_heads)
        for label, model in zip(labels, models, strict=True)
    }
    return Comparison(
        table=pd.concat(tables, ignore_index=True),
        differences=differences,
        labels=labels,
        units={analysis.score: analysis.unit for analysis in analyses},
        why_no_differences=reason,
        paired=inputs.paired,
        params={
            **inputs.params,
            "null": {a.score: a.null for a in analyses},
            "effect": {a.score: _effect(a) for a in analyses},
            **({"pruned_heads": gone} if any(gone.values()) else {}),
        },
        inputs=inputs.description,
        seed=seed,
    )


def _scores(
    analyses: Sequence[registry.Analysis], found: Mapping[str, Mapping[str, np.ndarray]]
) -> Values:
    return {analysis.score: found[analysis.name][analysis.score] for analysis in analyses}


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
        there = [
            {(layer, head) for layer in range(m.cfg.n_layers) for head in m.cfg.heads(layer)}
            for m in models
        ]
        return "" if there[0] & there[1] else "no head is left in both of the pruned models"
    words = [
        f"{label} has {n_layers} layers of {n_heads} heads"
        for label, (n_layers, n_heads) in zip(labels, shapes, strict=True)
    ]
    return f"{words[0]}, {words[1]}: no head of one corresponds to a head of the other"


def _effect(analysis: registry.Analysis) -> float:
    """What a selected head scores above its own null, at least."""
    return float(str(analysis.params["effect"]))


def _model_table(
    label: str,
    analyses: Sequence[registry.Analysis],
    inputs: Inputs,
    found: Mapping[str, Mapping[str, np.ndarray]],
    nulls: Mapping[str, np.ndarray],
) -> pd.DataFrame:
    """One row for each head of a model, with all scores beside each other."""
    documents = sequence_documents(inputs.batches)
    parts: list[pd.DataFrame] = []
    for analysis in analyses:
        score = analysis.score
        values = found[analysis.name][score]
        null = nulls[analysis.name]
        own = head_table(values, null, score, documents)
        select_heads(own, values, null, documents, score, _effect(analysis))
        own = own.rename(columns={name: f"{score}_{name}" for name in ("n", "selected")})
        parts.append(own.drop(columns=["layer", "head"]) if parts else own)
    table = pd.concat(parts, axis=1)
    table.insert(0, "model", label)
    return table


def _differences(first: Values, second: Values, inputs: SharedInputs) -> pd.DataFrame:
    """Second minus first for each head, with the standard error of that difference.

    Within sequences where both models saw the same ones, so that what differs between sequences
    cancels; else between the two means, as of independent samples.
    """
    documents = [sequence_documents(side.batches) for side in _sides(inputs)]
    n_layers, _, n_heads = next(iter(first.values())).shape
    layer, head = np.meshgrid(np.arange(n_layers), np.arange(n_heads), indexing="ij")
    columns = {"layer": layer.ravel(), "head": head.ravel()}
    for score in first:
        if inputs.paired:
            mean, error, _ = sequence_statistics(second[score] - first[score], documents[0])
        else:
            (mean_a, error_a, _), (mean_b, error_b, _) = (
                sequence_statistics(values[score], own)
                for values, own in zip((first, second), documents, strict=True)
            )
            mean, error = mean_b - mean_a, np.hypot(error_a, error_b)
        columns[score], columns[f"{score}_se"] = mean.ravel(), error.ravel()
    return pd.DataFrame(columns)
