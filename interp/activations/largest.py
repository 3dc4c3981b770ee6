"""What is kept of a site's activations while sequences go by, however many they are.

One invariant: the largest by position and dimension, counts and sums; never the activations.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.activations.criteria import Criteria
from interp.activations.features import SITES as FEATURE_SITES
from interp.activations.features import Reached
from interp.activations.moments import Profile, Totals, median, profile
from interp.activations.sites import RESIDUAL, Site
from interp.errors import AnalysisError


class Cell(NamedTuple):
    """The largest activation at one position and dimension, and where it was seen."""

    position: int
    dimension: int
    value: float
    sequence: int
    token: int
    among: Profile

    @property
    def ratio(self) -> float:
        return ratio_of(abs(self.value), self.among.median)

    @property
    def deviation(self) -> float:
        return ratio_of(abs(self.value - self.among.centre), self.among.spread)


class Massive:
    """The massive activations of the residual stream, by dimension, by position and by token."""

    def __init__(self) -> None:
        self.dimensions: dict[int, Group] = {}
        self.positions: dict[int, Group] = {}
        self.tokens: dict[int, Group] = {}

    def add(
        self,
        layer: int,
        sequence: int,
        x: Float[np.ndarray, "pos width"],
        there: Bool[np.ndarray, "pos width"],
        positions: Int[np.ndarray, " pos"],
        tokens: Int[np.ndarray, " pos"],
    ) -> None:
        """Count one sequence of one layer."""
        size = np.where(there, np.abs(x), 0.0)
        for d in np.flatnonzero(there.any(axis=0)):
            largest = x[size[:, d].argmax(), d]
            group = self.dimensions.setdefault(int(d), Group())
            group.add(layer, sequence, int(there[:, d].sum()), float(largest))
        for p in np.flatnonzero(there.any(axis=1)):
            number, largest = int(there[p].sum()), float(x[p, size[p].argmax()])
            position, token = int(positions[p]), int(tokens[p])
            group = self.positions.setdefault(position, Group())
            group.add(layer, sequence, number, largest, token)
            group = self.tokens.setdefault(token, Group())
            group.add(layer, sequence, number, largest, position)


@dataclass
class Group:
    """Massive activations that share something; `others` are the tokens of a position, or the
    positions of a token."""

    number: int = 0
    largest: float = 0.0
    layers: set[int] = field(default_factory=set)
    sequences: set[int] = field(default_factory=set)
    others: set[int] = field(default_factory=set)

    def add(
        self, layer: int, sequence: int, number: int, largest: float, other: int | None = None
    ) -> None:
        self.number += number
        if other is not None:
            self.others.add(other)
        self.layers.add(layer)
        self.sequences.add(sequence)
        if abs(largest) > abs(self.largest):
            self.largest = largest

    def record(self) -> dict[str, object]:
        return {
            "first_layer": min(self.layers),
            "last_layer": max(self.layers),
            "sequences": len(self.sequences),
            "activations": self.number,
            "largest": self.largest,
        }

    @property
    def only(self) -> int | None:
        """The one token or position that all share; None where there are several."""
        return next(iter(self.others)) if len(self.others) == 1 else None


class Largest:
    """What is kept of one site while sequences go by, which does not grow with their number."""

    def __init__(self, site: Site, criteria: Criteria, massive: Massive):
        self.site, self.criteria = site, criteria
        self.massive = massive
        self.number = 0
        self.totals = Totals()
        self.cells: dict[tuple[int, int], Cell] = {}
        feature_magnitude = float(criteria.feature_magnitude)
        self.reached = Reached(feature_magnitude) if site.kind in FEATURE_SITES else None

    def see(
        self,
        x: Float[Tensor, "pos width"],
        positions: Int[Tensor, " pos"],
        tokens: Int[Tensor, " pos"],
        sequence: int,
    ) -> None:
        """The activations of one sequence.

        Raises: AnalysisError for one that is not finite.
        """
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        size = finite_size(x, self.site, positions, sequence)
        values, sizes = x.cpu().numpy(), size.cpu().numpy()
        own = profile(values.ravel(), sizes.ravel(), self.criteria.deviations)
        self.totals.add(own, *values.shape)
        if self.reached is not None:
            self.reached.add(values, sizes)
        if len(self.cells) < self.criteria.top or own.largest >= self._least():
            self._rank(x, size, positions, tokens, sequence, own)
        magnitude, ratio = self.criteria.magnitude, self.criteria.ratio
        if own.largest <= magnitude or own.largest < ratio * own.median:
            return
        there = massive_there(size, own.median, magnitude, ratio)
        self.number += int(there.sum())
        if self.site.kind in RESIDUAL:
            arrays = (tensor.cpu().numpy() for tensor in (there, positions, tokens))
            self.massive.add(self.site.layer, sequence, values, *arrays)

    def _least(self) -> float:
        """The smallest size among the cells that are kept."""
        return min(abs(cell.value) for cell in self.cells.values())

    def _rank(
        self,
        x: Float[Tensor, "pos width"],
        size: Float[Tensor, "pos width"],
        positions: Int[Tensor, " pos"],
        tokens: Int[Tensor, " pos"],
        sequence: int,
        own: Profile,
    ) -> None:
        for place in largest_places(size, self.criteria.top).tolist():
            p, d = divmod(place, x.shape[1])
            cell = Cell(int(positions[p]), d, float(x[p, d]), sequence, int(tokens[p]), own)
            before = self.cells.get((cell.position, d))
            if before is None or abs(cell.value) > abs(before.value):
                self.cells[cell.position, d] = cell
        # A cell that is dropped here and is among the largest after all comes again.
        self.cells = {(c.position, c.dimension): c for c in self.ranked()}

    def ranked(self) -> list[Cell]:
        """The largest cells, largest first, equals in the order of their places."""
        order = sorted(self.cells.values(), key=lambda c: (-abs(c.value), c.position, c.dimension))
        return order[: self.criteria.top]

    def rows(self, text: Callable[[int], str]) -> list[dict[str, object]]:
        """The rows of the table, largest first."""
        return [
            {
                "layer": self.site.layer,
                "site": self.site.kind,
                "sequence": cell.sequence,
                "position": cell.position,
                "token": text(cell.token),
                "dimension": cell.dimension,
                "value": cell.value,
                "magnitude": abs(cell.value),
                "median": cell.among.median,
                "ratio": cell.ratio,
                "deviation": cell.deviation,
                "massive": abs(cell.value) > self.criteria.magnitude
                and abs(cell.value) >= self.criteria.ratio * cell.among.median,
            }
            for cell in self.ranked()
        ]

    def record(self) -> dict[str, object]:
        """The layer and site in one record."""
        most = self.ranked()[0]
        return {
            "layer": self.site.layer,
            "site": self.site.kind,
            "n": self.totals.tokens,
            "median": self.totals.median / self.totals.sequences,
            "largest": most.value,
            "ratio": most.ratio,
            "massive": self.number,
            **self.totals.record(),
        }


def finite_size(
    x: Float[Tensor, "pos width"], site: Site, positions: Int[Tensor, " pos"], sequence: int
) -> Float[Tensor, "pos width"]:
    """|x|. Raises: AnalysisError for what is not finite, naming where it is."""
    size = x.abs()
    if not math.isfinite(float(size.max())):  # which a NaN is where there is one
        p, d = size.isfinite().logical_not().nonzero()[0].tolist()
        raise AnalysisError(
            f"layer {site.layer}, {site.kind}: the activation of sequence {sequence} "
            f"at position {int(positions[p])}, dimension {d} is {float(x[p, d])}"
        )
    return size


def massive_there(
    size: Float[Tensor, "pos width"],
    median: float,
    magnitude: int | float,
    ratio: int | float,
) -> Bool[Tensor, "pos width"]:
    """Which activations, of size |x|, are massive."""
    # In float64, as tables are: on a threshold both have to say the same.
    exact = size.double()
    return (exact > magnitude) & (exact >= ratio * median)


def median_of(values: Float[Tensor, " n"]) -> float:
    """The median, for an even count the mean of the two in the middle, as numpy has it."""
    return median(values.cpu().numpy())


def largest_places(size: Float[Tensor, "pos width"], top: int) -> Int[Tensor, " kept"]:
    """Where the `top` largest are, as flat indices; of equals the first in order."""
    flat = size.flatten()
    least = flat.topk(min(top, len(flat))).values[-1]
    above, equal = ((flat > least).nonzero()[:, 0], (flat == least).nonzero()[:, 0])
    return torch.cat((above, equal[: top - len(above)]))


def ratio_of(size: float, median: float) -> float:
    """A size over a median: infinite over one of 0, and NaN where both are 0."""
    if median > 0:
        return size / median
    return float("inf") if size > 0 else float("nan")
