"""What the words of a user stand for: heads, a metric, a reference set."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from interp.ablation.interventions import Head, Site, site_heads
from interp.ablation.methods import unrepeated
from interp.ablation.metrics import (
    METRICS,
    AnyMetric,
    LogitsFunction,
    Metric,
    logit_difference,
    loss_metric,
)
from interp.data.corpus import check_corpus
from interp.data.repeated import TokenBatch
from interp.data.token_file import token_file
from interp.errors import AnalysisError, ConfigError, ModelError, ShapeError
from interp.inputs import Inputs, random_inputs, token_inputs
from interp.models.watch import HookedModel
from interp.tables import head_label, head_words, parse_heads
from interp.text_inputs import corpus_inputs

Positions = Sequence[int | slice]
MetricLike = str | AnyMetric | Callable[[Tensor, TokenBatch], Tensor]
HeadsLike = Sequence[Head] | Sequence[str] | str

REPEATS = 32
"""Sequences of each block length in the reference set `repeats`."""


def check_heads(heads: HeadsLike, site: Site = "z") -> None:
    """Refuse heads that are written otherwise than 5.1, L5H1 or 5.*, whatever the model.

    Raises: ShapeError for such a word, or none at all.
    """
    head_words(_written(heads), _noun(site))


def named_heads(model: HookedModel, heads: HeadsLike, site: Site = "z") -> list[Head]:
    """Heads from pairs or text, each once, in their order; of a whole layer those that are left.

    Raises: ShapeError for a head that the model does not have at this site.
    """
    words, noun, cfg = _written(heads), _noun(site), model.cfg
    count = cfg.n_heads if site == "z" else cfg.n_key_value_heads
    chosen = parse_heads(words, cfg.n_layers, count, noun)
    present = {layer: site_heads(model, layer, site) for layer in range(cfg.n_layers)}
    for layer, head in head_words(words, noun):
        if head is not None and head not in present[layer]:
            raise ShapeError(f"{noun} {head_label(layer, head)} is pruned from this model")
    left = [(layer, head) for layer, head in chosen if head in present[layer]]
    if not left:
        raise ShapeError(f"no {noun} is left of those that were named")
    return left


def _written(heads: HeadsLike) -> list[str]:
    if isinstance(heads, str):
        return [heads]
    return [head if isinstance(head, str) else head_label(*head) for head in heads]


def _noun(site: Site) -> str:
    return "head" if site == "z" else "KV head"


def check_metric(
    metric: MetricLike, positions: object = None, answer: object = None, against: object = None
) -> None:
    """Refuse a metric that is not there, or settings that belong to another one.

    Raises: AnalysisError listing the known ones.
    """
    if (answer is None) != (against is None) or (answer is not None and metric != "logit-diff"):
        raise AnalysisError("answer and against go together, and belong to logit-diff")
    if positions is not None and metric != "loss":
        raise AnalysisError("positions belong to the metric loss")
    if metric == "logit-diff" and answer is None:
        raise AnalysisError("logit-diff needs the tokens of an answer and of one against it")
    if isinstance(metric, str) and metric not in METRICS and metric != "logit-diff":
        raise AnalysisError(f"no metric {metric!r}; known: {', '.join([*METRICS, 'logit-diff'])}")


def named_metric(
    model: HookedModel,
    metric: MetricLike,
    *,
    positions: Positions | None = None,
    answer: object = None,
    against: object = None,
) -> AnyMetric:
    """The metric that a name, a function or a metric stands for.

    Raises: AnalysisError for an unknown name, or settings that belong to another metric.
    """
    check_metric(metric, positions, answer, against)
    if isinstance(metric, Metric | LogitsFunction):
        return metric
    if not isinstance(metric, str):
        return LogitsFunction(metric, getattr(metric, "__name__", "function"))
    if metric == "logit-diff":
        return logit_difference(_token_ids(model, answer), _token_ids(model, against))
    return METRICS[metric] if positions is None else loss_metric(positions)


def _token_ids(model: HookedModel, given: object) -> Tensor:
    """One id, or one for each sequence, from ids or text that is one token each."""
    if isinstance(given, str):
        return torch.tensor(_token_id(model, given))
    if isinstance(given, Sequence) and given and all(isinstance(one, str) for one in given):
        return torch.tensor([_token_id(model, str(one)) for one in given])
    try:
        ids = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:  # text among numbers, or beyond 64 bits
        raise AnalysisError(f"answers are token ids, or text: {error}") from None
    if ids.dtype.is_floating_point or ids.ndim > 1:
        raise AnalysisError("answers are token ids, or text: one, or one for each sequence")
    if int(ids.min()) < 0 or int(ids.max()) >= model.cfg.d_vocab:
        raise AnalysisError(f"answers should be within 0 and d_vocab - 1 = {model.cfg.d_vocab - 1}")
    return ids


def _token_id(model: HookedModel, text: str) -> int:
    if model.vocabulary is None:
        raise ModelError(f"{model.cfg.model_name} has no tokenizer: give token ids, not text")
    return model.vocabulary.single_token(text)


def check_reference(reference: str | Path) -> None:
    """Refuse a reference that is not there.

    Raises: ConfigError for an unknown name or a missing file; AnalysisError for a broken one.
    """
    if reference in ("unrepeated", "repeats"):
        return
    path = Path(reference)
    if path.suffix != ".npy":
        check_corpus(str(reference))
    elif not path.is_file():
        raise ConfigError(f"{path}: no such file")
    else:
        token_file(path)


def reference_inputs(
    model: HookedModel,
    reference: object,
    inputs: Inputs,
    *,
    corpus: str | None = None,
    prepend_bos: bool | None = None,
    seed: int = 0,
) -> Inputs:
    """The reference set that a name, a file or tokens stand for.

    Raises: ConfigError or AnalysisError for one that is not there.
    """
    n_sequences, width = inputs.batches[0].tokens.shape
    if reference is None and corpus is not None:
        try:
            return corpus_inputs(model, corpus, width, prepend_bos, skip=n_sequences, seed=seed)
        except AnalysisError:  # no window is left
            return unrepeated(inputs)
    if reference is None:
        return unrepeated(inputs)
    if not isinstance(reference, str | Path):
        return token_inputs(model, reference)
    if reference == "unrepeated":
        return unrepeated(inputs)
    if reference == "repeats":
        blocks = inputs.params.get("blocks")
        return random_inputs(
            model, blocks if isinstance(blocks, list) else None, REPEATS, seed + 1, prepend_bos
        )
    check_reference(reference)
    if Path(reference).suffix == ".npy":
        return token_inputs(model, token_file(Path(reference)))
    return corpus_inputs(model, str(reference), width, prepend_bos, seed=seed)
