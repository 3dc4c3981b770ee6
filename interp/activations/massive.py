"""Massive activations of the residual stream, cell by cell: which they are and what they hold.

What `outliers` counts; here they are at hand, for whoever links them to heads or changes them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.activations.criteria import MAGNITUDE as MAGNITUDE
from interp.activations.criteria import RATIO as RATIO
from interp.activations.largest import finite_size, massive_there, median_of, ratio_of
from interp.activations.sites import Site, look_at_sites, residual_sites
from interp.data.repeated import TokenBatch
from interp.errors import AnalysisError
from interp.measure import sequences_at_once
from interp.models.watch import HookedModel


@dataclass(frozen=True)
class MassiveCells:
    """The massive activations of one batch, in the order of layer, sequence, column, dimension.

    `layer` L is the residual stream before block L, or, for n_layers, after the last; `row` and
    `column` are the sequence and the place in the batch's tensors, padding counted.
    """

    layer: Int[Tensor, " cell"]
    row: Int[Tensor, " cell"]
    column: Int[Tensor, " cell"]
    dimension: Int[Tensor, " cell"]
    value: Float[Tensor, " cell"]

    def __len__(self) -> int:
        return len(self.layer)

    def tokens(self, shape: Sequence[int]) -> Bool[Tensor, "batch pos"]:
        """Which tokens of the batch have a massive activation, in whatever layer."""
        found = torch.zeros(*shape, dtype=torch.bool)
        found[self.row, self.column] = True
        return found


def massive_cells(
    model: HookedModel,
    batch: TokenBatch,
    magnitude: int | float = MAGNITUDE,
    ratio: int | float = RATIO,
) -> MassiveCells:
    """The massive activations at the tokens of a batch that count, by one pass, on the CPU.

    As `outliers` has it: |x| above `magnitude`, and at least `ratio` times the median |x| of the
    same layer and sequence.

    Raises: AnalysisError for an activation that is not finite.
    """
    none = torch.zeros(0, dtype=torch.long)
    found: list[list[Tensor]] = [[none, none, none, none, torch.zeros(0)]]
    for first, part in parts(model, batch):
        there = part.each(lambda tensor: tensor.to(torch.device(str(model.cfg.device))))
        counted = _counted(there)

        def look(
            value: Tensor, *, site: Site, counted: Tensor = counted, first: int = first
        ) -> None:
            for row, wanted in enumerate(counted):
                if wanted.any():
                    places = wanted.nonzero()[:, 0]
                    x = value[row, places].to(torch.promote_types(value.dtype, torch.float32))
                    size = finite_size(x, site, places, first + row)
                    at = massive_there(size, median_of(size.flatten()), magnitude, ratio)
                    place, dimension = at.nonzero(as_tuple=True)
                    layer = torch.full_like(place, site.layer)
                    sequence = torch.full_like(place, first + row)
                    own = [layer, sequence, places[place], dimension, x[place, dimension].float()]
                    found.append([tensor.cpu() for tensor in own])

        look_at_sites(model, there, {s: partial(look, site=s) for s in residual_sites(model)})
    columns = [torch.cat(own) for own in zip(*found, strict=True)]
    order = np.lexsort([own.numpy() for own in columns[3::-1]])
    return MassiveCells(*(own[torch.from_numpy(order)] for own in columns))


def parts(model: HookedModel, batch: TokenBatch) -> Iterator[tuple[int, TokenBatch]]:
    """A batch in as many sequences as go through the model together; the number of the first."""
    size = sequences_at_once(model, batch.tokens.shape[1])
    for first in range(0, len(batch.tokens), size):
        yield first, batch.each(itemgetter(slice(first, first + size)))


def find_massive(
    model: HookedModel, batches: Sequence[TokenBatch], magnitude: float, ratio: float
) -> list[MassiveCells]:
    """The massive activations of each batch, one at least in all.

    Raises: AnalysisError where there is none, naming the largest activation, or as `massive_cells`.
    """
    found = [massive_cells(model, batch, magnitude, ratio) for batch in batches]
    if any(len(cells) for cells in found):
        return found
    if not any(bool(_counted(batch).any()) for batch in batches):
        raise AnalysisError("there is no token to look at")
    site, value, times = _largest(model, batches)
    raise AnalysisError(
        f"no activation of the residual stream is massive: the largest is {value:.4g}, {times:.4g} "
        f"times the median of layer {site.layer}, and massive means above {magnitude:g} and "
        f"{ratio:g} times the median; lower thresholds find more"
    )


def _largest(model: HookedModel, batches: Sequence[TokenBatch]) -> tuple[Site, float, float]:
    """The site, the signed value and the ratio of the largest activation of the residual stream."""
    largest: list[tuple[Site, float, float]] = []

    def look(value: Tensor, *, site: Site, counted: Tensor) -> None:
        for row, wanted in enumerate(counted):
            if wanted.any():
                x = value[row, wanted].to(torch.promote_types(value.dtype, torch.float32)).flatten()
                most = float(x[x.abs().argmax()])
                times = ratio_of(abs(most), median_of(x.abs()))
                if not largest or abs(most) > abs(largest[0][1]):
                    largest[:] = [(site, most, times)]

    for batch in batches:
        for _, part in parts(model, batch):
            there = part.each(lambda tensor: tensor.to(torch.device(str(model.cfg.device))))
            seeing = partial(look, counted=_counted(there))
            look_at_sites(
                model, there, {site: partial(seeing, site=site) for site in residual_sites(model)}
            )
    return largest[0]


def _counted(batch: TokenBatch) -> Bool[Tensor, "batch pos"]:
    return batch.real if batch.counted is None else batch.counted
