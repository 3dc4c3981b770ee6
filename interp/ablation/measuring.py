"""Measuring many ablations on the same sequences: chunk by chunk, noting each as it comes.

One failing ablation is told and does not spoil the others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.ablation.interventions import Head, Intervention, Site
from interp.ablation.journal import Journal, Key
from interp.ablation.methods import Method, freezes_patterns
from interp.ablation.metrics import AnyMetric
from interp.ablation.passes import Chunk, Passes, chunks, passes, starting_together
from interp.errors import AnalysisError
from interp.inputs import Inputs
from interp.models.watch import HookedModel, looking_at
from interp.tables import head_label

Heads = tuple[Head, ...]
Progress = Callable[[int, int], None]
"""Told how many ablated passes of how many are done."""


@dataclass
class Measured:
    """One method's numbers: of every sequence, clean and under each ablation, by its heads."""

    clean: Float[np.ndarray, " sequence"]
    ablated: dict[Heads, Float[np.ndarray, " sequence"]] = field(default_factory=dict)
    direct: dict[Heads, Float[np.ndarray, " sequence"]] = field(default_factory=dict)
    failed: dict[Heads, str] = field(default_factory=dict)

    def effect(self, heads: Heads) -> Float[np.ndarray, " sequence"]:
        """Ablated minus clean, of each sequence; NaN where the ablation failed."""
        return self.ablated[heads] - self.clean

    def direct_effect(self, heads: Heads) -> Float[np.ndarray, " sequence"]:
        """The part of the effect that the heads' own contribution to the logits makes."""
        return self.direct[heads] - self.clean


@dataclass(frozen=True)
class Setting:
    """What a sweep does to heads and what it reads."""

    metric: AnyMetric
    site: Site = "z"
    direct: bool = False
    bfloat16: bool = False

    def precision(self, model: HookedModel) -> AbstractContextManager:
        """Matrix products in bfloat16 where that is asked for; the residual stream stays as it
        is."""
        if not self.bfloat16:
            return nullcontext()
        return torch.autocast(torch.device(str(model.cfg.device)).type, torch.bfloat16)


def label(heads: Heads) -> str:
    """How a set of heads is written."""
    return "+".join(head_label(*head) for head in heads)


def measure_sets(
    model: HookedModel,
    inputs: Inputs,
    methods: Sequence[Method],
    sets: Sequence[Heads],
    setting: Setting,
    *,
    journal: Journal | None = None,
    progress: Progress | None = None,
) -> dict[str, Measured]:
    """The metric of every sequence without and with each set of heads ablated, for each method.

    Where a method draws, its numbers are means over the draws. What the journal holds already is
    not computed again.

    Raises: AnalysisError where the metric is not finite, or reads nowhere, without any ablation, or
    where every ablation fails.
    """
    check_read(setting.metric, inputs)
    book = Journal(None, {}) if journal is None else journal
    unique = list(dict.fromkeys(sets))
    clean: list[np.ndarray] = []
    failed: dict[str, dict[Heads, str]] = {method.name: {} for method in methods}
    parts = list(chunks(model, inputs.batches))
    total = len(parts) * len(unique) * sum(method.draws for method in methods)
    done = sum(
        (method.name, draw, number, label(heads)) in book
        for method in methods
        for draw in range(method.draws)
        for number in range(len(parts))
        for heads in unique
    )
    with looking_at(model), setting.precision(model):
        for number, chunk in enumerate(parts):
            answered: Float[np.ndarray, " batch"] | None = None
            for method in methods:
                for draw in range(method.draws):
                    waiting = {
                        heads: key
                        for heads in unique
                        if (key := (method.name, draw, number, label(heads))) not in book
                        and heads not in failed[method.name]
                    }
                    if not waiting and answered is not None:
                        continue
                    run = _passes(model, chunk, method, setting)
                    if answered is None:
                        answered = run.clean.cpu().numpy()
                        _check_clean(answered, chunk, setting.metric)
                        book.check_clean(str(number), answered)
                        clean.append(answered)
                    for keys, faults in _ablate(model, chunk, run, method, draw, waiting, setting):
                        book.add(keys)
                        failed[method.name] |= faults
                        done += len(keys) + len(faults)
                        if progress is not None:
                            progress(done, total)
    whole = np.concatenate(clean)
    return {
        method.name: _collected(
            book, method, unique, len(parts), whole, failed[method.name], setting
        )
        for method in methods
    }


def check_read(metric: AnyMetric, inputs: Inputs) -> None:
    """Refuse sequences in which a metric reads no place.

    Raises: AnalysisError for such.
    """
    if not any(bool(metric.reads(batch).any()) for batch in inputs.batches):
        raise AnalysisError(
            f"the metric {metric.name} is defined nowhere in these sequences: no place is read"
        )


def _passes(model: HookedModel, chunk: Chunk, method: Method, setting: Setting) -> Passes:
    return passes(
        model,
        chunk,
        setting.metric,
        frozen=freezes_patterns(method),
        direct=setting.direct,
    )


def _ablate(
    model: HookedModel,
    chunk: Chunk,
    run: Passes,
    method: Method,
    draw: int,
    waiting: Mapping[Heads, Key],
    setting: Setting,
) -> Iterator[tuple[list[tuple[Key, list[np.ndarray]]], dict[Heads, str]]]:
    """The numbers of one chunk under each waiting set, as they come, and what failed."""
    if not waiting:
        return
    sets = list(waiting)
    layers = sorted({layer for heads in sets for layer, _ in heads})
    by = method.replacement(model, chunk, draw, setting.site, layers)
    interventions = [Intervention(heads, by, setting.site) for heads in sets]
    read = setting.metric.reads(chunk.batch).any(dim=1)
    for together in starting_together(interventions, run.at_once):
        for group in (together, *([number] for number in together)):
            found: list[tuple[Key, list[np.ndarray]]] = []
            faults: dict[Heads, str] = {}
            try:
                chosen = [interventions[number] for number in group]
                for heads, values in _group(run, chosen, setting.direct, read).items():
                    found.append((waiting[heads], values))
            except Exception as error:  # whatever a user's metric raises
                if len(group) > 1:
                    continue  # each is tried alone
                faults = {sets[group[0]]: _reason(error)}
            yield found, faults
            if group is together:
                break


def _group(
    run: Passes, together: Sequence[Intervention], direct: bool, read: Bool[Tensor, " batch"]
) -> dict[Heads, list[np.ndarray]]:
    found = {}
    for one, effect in zip(together, run.ablated(together, direct=direct), strict=True):
        values = [value for value in effect if value is not None]
        if not all(bool(value[read].isfinite().all()) for value in values):
            raise AnalysisError("the metric is not finite")
        found[one.heads] = [value.cpu().numpy() for value in values]
    return found


def _reason(error: Exception) -> str:
    words = str(error).split("\n")[0]
    return words if isinstance(error, AnalysisError) else f"{type(error).__name__}: {words}"


def _check_clean(values: Float[np.ndarray, " batch"], chunk: Chunk, metric: AnyMetric) -> None:
    read = metric.reads(chunk.batch).any(dim=1).cpu().numpy()
    if not np.isfinite(values[read]).all():
        raise AnalysisError(
            f"the {metric.name} of the unablated model is not finite on these tokens"
        )


def _collected(
    book: Journal,
    method: Method,
    sets: Sequence[Heads],
    n_chunks: int,
    clean: Float[np.ndarray, " sequence"],
    failed: dict[Heads, str],
    setting: Setting,
) -> Measured:
    measured = Measured(clean, failed=failed)
    if sets and len(failed) == len(sets):
        raise AnalysisError(f"every ablation failed: {next(iter(failed.values()))}")
    for heads in sets:
        if heads in failed:
            measured.ablated[heads] = np.full_like(clean, np.nan)
            if setting.direct:
                measured.direct[heads] = np.full_like(clean, np.nan)
            continue
        draws = [
            [book.get((method.name, draw, number, label(heads))) for number in range(n_chunks)]
            for draw in range(method.draws)
        ]
        for place, into in enumerate((measured.ablated, measured.direct)[: len(draws[0][0])]):
            whole = [np.concatenate([values[place] for values in draw]) for draw in draws]
            into[heads] = np.mean(whole, axis=0)
    return measured
