"""How heads are taken away: nothing, a mean, another sequence's values, or those of another run.

Each method says what it replaces heads by, for a chunk of sequences at a time, and where that comes
from: the same sweep with another reference set is another result.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.ablation.interventions import (
    Mean,
    Other,
    Replacement,
    Site,
    Zero,
    kept_values,
    run_hooked,
    site_hook,
    token_places,
)
from interp.ablation.metrics import counted_tokens
from interp.ablation.passes import Chunk, chunks
from interp.data.repeated import TokenBatch
from interp.errors import AnalysisError, ShapeError
from interp.inputs import Inputs
from interp.models.watch import HookedModel, looking_at

METHODS = ("zero", "mean", "resample", "patch", "pattern-preserving")
COMPARED = ("zero", "mean", "resample")
"""What `all` shows side by side."""


@runtime_checkable
class Method(Protocol):
    """One way to take heads away; `draws` is how often, where chance has a part in it."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def draws(self) -> int:
        """How many results its numbers are the mean of."""
        ...

    @property
    def facts(self) -> Mapping[str, object]:
        """What its numbers depend on."""
        ...

    def replacement(
        self, model: HookedModel, chunk: Chunk, draw: int, site: Site, layers: Sequence[int]
    ) -> Replacement:
        """What stands in for the heads of some layers, in one chunk."""
        ...


@dataclass(frozen=True)
class Zeroing:
    """Heads replaced by nothing."""

    name: str = "zero"
    draws: int = 1

    @property
    def facts(self) -> Mapping[str, object]:
        return {}

    def replacement(
        self, model: HookedModel, chunk: Chunk, draw: int, site: Site, layers: Sequence[int]
    ) -> Replacement:
        return Zero()


@dataclass(frozen=True)
class MeanReplacing:
    """Heads replaced by their mean over a reference set."""

    mean: Mean
    reference: str
    n_tokens: int
    name: str = "mean"
    draws: int = 1

    @property
    def facts(self) -> Mapping[str, object]:
        return {
            "reference": self.reference,
            "reference_tokens": self.n_tokens,
            "mean": "over all places" if self.mean.pooled else "at each place",
        }

    def replacement(
        self, model: HookedModel, chunk: Chunk, draw: int, site: Site, layers: Sequence[int]
    ) -> Replacement:
        if not self.mean.pooled:
            _check_places(chunk.batch, self.mean.counted, self.reference)
        return self.mean


@dataclass(frozen=True)
class Resampling:
    """Heads replaced by their values in another of the same sequences, drawn at random."""

    orders: Sequence[Sequence[Int[np.ndarray, " sequence"]]]
    """For each draw and batch a permutation of its rows without fixed points."""
    batches: Sequence[TokenBatch]
    seed: int
    name: str = "resample"

    @property
    def draws(self) -> int:
        return len(self.orders)

    @property
    def facts(self) -> Mapping[str, object]:
        return {
            "resampled_from": "the same sequences, by permutations without fixed points",
            "draws": self.draws,
            "resample_seed": self.seed,
        }

    def replacement(
        self, model: HookedModel, chunk: Chunk, draw: int, site: Site, layers: Sequence[int]
    ) -> Replacement:
        order = torch.from_numpy(self.orders[draw][chunk.number][chunk.rows])
        return other_run(
            model, chunk, self.batches[chunk.number].each(itemgetter(order)), site, layers
        )


@dataclass(frozen=True)
class Patching:
    """Heads replaced by their values in another run, sequence for sequence."""

    source: Inputs
    name: str = "patch"
    draws: int = 1

    @property
    def facts(self) -> Mapping[str, object]:
        return {"patched_from": self.source.description}

    def replacement(
        self, model: HookedModel, chunk: Chunk, draw: int, site: Site, layers: Sequence[int]
    ) -> Replacement:
        whole = self.source.batches[chunk.number]
        return other_run(model, chunk, whole.each(itemgetter(chunk.rows)), site, layers)


def other_run(
    model: HookedModel, chunk: Chunk, other: TokenBatch, site: Site, layers: Sequence[int]
) -> Other:
    """The values of other sequences, each at the places of the sequence that it stands in for."""
    device = chunk.batch.tokens.device
    other = other.each(lambda tensor: tensor.to(device))
    names = {layer: site_hook(layer, site) for layer in layers}
    kept = kept_values(model, other, list(names.values()))
    return Other({layer: _aligned(kept[name], other, chunk.batch) for layer, name in names.items()})


def _aligned(
    values: Float[Tensor, "batch pos heads d_head"], other: TokenBatch, own: TokenBatch
) -> Float[Tensor, "batch pos heads d_head"]:
    if other.key_mask is None and own.key_mask is None:
        return values
    real_first = (~other.real).long().argsort(dim=1, stable=True)
    columns = real_first.gather(1, token_places(own.tokens, own.key_mask))
    return values.gather(1, columns[:, :, None, None].expand_as(values))


# --- making them ------------------------------------------------------------------------------


def mean_method(
    model: HookedModel, reference: Inputs, site: Site, *, pooled: bool = False
) -> MeanReplacing:
    """The mean of every head over a reference set, at each place or, `pooled`, over all tokens.

    Padding never counts, nor does what the reference leaves out, such as BOS.
    """
    n_places = 1 if pooled else max(int(batch.real.sum(1).max()) for batch in reference.batches)
    counts = torch.zeros(n_places, dtype=torch.float64)
    layers = range(model.cfg.n_layers)
    sums: dict[int, Tensor] = {}
    with looking_at(model):
        for chunk in chunks(model, reference.batches):
            batch = chunk.batch
            counted = counted_tokens(batch)
            places = token_places(batch.tokens, batch.key_mask)
            index = (torch.zeros_like(places) if pooled else places)[counted]
            counts += torch.bincount(index.cpu(), minlength=n_places)

            def adder(layer: int, index: Tensor = index, counted: Tensor = counted) -> Callable:
                def add(values: Tensor, hook: object) -> None:
                    total = sums.get(layer)
                    if total is None:
                        shape = (n_places, *values.shape[2:])
                        total = torch.zeros(shape, dtype=torch.float64, device=values.device)
                    sums[layer] = total.index_add(0, index, values[counted].double())

                return add

            hooks = [(site_hook(layer, site), adder(layer)) for layer in layers]
            run_hooked(model, batch, hooks)
    means = [
        sums[layer] / counts.clamp(min=1).to(sums[layer].device)[:, None, None] for layer in layers
    ]
    dtype = torch.promote_types(model.cfg.dtype, torch.float32)
    return MeanReplacing(
        Mean([mean.to(dtype) for mean in means], counts > 0, pooled),
        reference.description,
        int(counts.sum()),
    )


def _counted_places(batch: TokenBatch) -> Tensor:
    """The place of each token that counts, from 0 for the first real one of its sequence."""
    return token_places(batch.tokens, batch.key_mask)[counted_tokens(batch)].cpu()


def _check_places(batch: TokenBatch, counted: Tensor, reference: str) -> None:
    """Refuse a mean at each place that some place has none of."""
    places = _counted_places(batch)
    if not len(places):
        return
    needed = int(places.max()) + 1
    if needed > len(counted) or not bool(counted[places].all()):
        raise AnalysisError(
            f"the reference ({reference}) has no token at some of the {needed} places of these "
            "sequences: take a longer one, or its mean over all places (pooled)"
        )


def check_method_for(
    inputs: Inputs, name: str, *, reference: Inputs | None = None, pooled: bool = False
) -> None:
    """Refuse, without a pass, sequences that a method cannot be applied to.

    Raises: AnalysisError or ShapeError as `prepare` and the sweep would.
    """
    for own in COMPARED if name == "all" else (name,):
        if own == "resample":
            resample_method(inputs, seed=0, draws=1)
        elif own == "patch":
            patch_method(inputs, reference)
        elif own == "mean" and not pooled:
            stated = reference or unrepeated(inputs)
            places = torch.cat([_counted_places(batch) for batch in stated.batches])
            counted = torch.bincount(places) > 0
            for batch in inputs.batches:
                _check_places(batch, counted, stated.description)


def resample_method(inputs: Inputs, seed: int, draws: int) -> Resampling:
    """`draws` permutations of the sequences without fixed points, among those of one length.

    Raises: AnalysisError where a sequence has no other of its length, or for no draw at all.
    """
    if draws < 1:
        raise AnalysisError(f"draws = {draws}: at least one permutation is needed")
    rng = np.random.default_rng([seed, 8])
    lengths = [batch.real.sum(dim=1).cpu().numpy() for batch in inputs.batches]
    orders = [[_derangement(rng, own) for own in lengths] for _ in range(draws)]
    return Resampling(orders, inputs.batches, seed)


def _derangement(
    rng: np.random.Generator, lengths: Int[np.ndarray, " sequence"]
) -> Int[np.ndarray, " sequence"]:
    order = np.arange(len(lengths))
    for length in np.unique(lengths):
        own = np.flatnonzero(lengths == length)
        if len(own) < 2:
            raise AnalysisError(
                f"resample needs two sequences of each length, and there is one of {length} tokens"
            )
        mixed = rng.permutation(len(own))
        while (mixed == np.arange(len(own))).any():
            mixed = rng.permutation(len(own))
        order[own] = own[mixed]
    return order


def patch_method(inputs: Inputs, source: Inputs | None) -> Patching:
    """The values of other tokens of the same shape.

    Raises: AnalysisError without a source; ShapeError for one of another shape.
    """
    if source is None:
        raise AnalysisError("patch needs the tokens of another run as its reference")
    for own, other in zip(inputs.batches, source.batches, strict=False):
        if own.tokens.shape != other.tokens.shape or not bool(
            (own.real.sum(dim=1) == other.real.sum(dim=1)).all()
        ):
            raise ShapeError(
                f"patching takes tokens of the same shape, got {list(other.tokens.shape)} for "
                f"{list(own.tokens.shape)}"
            )
    if len(inputs.batches) != len(source.batches):
        raise ShapeError("patching takes as many batches as it replaces")
    return Patching(source)


def check_method(name: str) -> None:
    """Refuse a method that is not there.

    Raises: AnalysisError listing the known ones.
    """
    if name not in (*METHODS, "all"):
        raise AnalysisError(f"no ablation method {name!r}; known: {', '.join(METHODS)}, all")


def prepare(
    model: HookedModel,
    inputs: Inputs,
    name: str,
    *,
    site: Site = "z",
    reference: Inputs | None = None,
    pooled: bool = False,
    seed: int = 0,
    draws: int = 4,
) -> list[Method]:
    """The methods that a name stands for, ready for these inputs; `all` is three of them.

    Without a `reference` the mean is over the inputs' own null: tokens that do not repeat.

    Raises: AnalysisError for an unknown name, or what a method cannot do with these inputs.
    """
    check_method(name)
    made: list[Method] = []
    for own in COMPARED if name == "all" else (name,):
        if own == "mean":
            stated = reference or unrepeated(inputs)
            made.append(mean_method(model, stated, site, pooled=pooled))
        elif own == "resample":
            made.append(resample_method(inputs, seed, draws))
        elif own == "patch":
            made.append(patch_method(inputs, reference))
        else:
            made.append(Zeroing(own))
    return made


def unrepeated(inputs: Inputs) -> Inputs:
    """The default reference set: random tokens of the same lengths that do not repeat."""
    n_sequences = sum(len(batch.tokens) for batch in inputs.unrepeated)
    return Inputs(
        inputs.unrepeated,
        inputs.unrepeated,
        f"{n_sequences} sequences of random tokens that do not repeat, as long",
        {},
    )


def freezes_patterns(method: Method) -> bool:
    """Whether every pattern stays what it was. Source: Olsson et al. 2022."""
    return method.name == "pattern-preserving"
