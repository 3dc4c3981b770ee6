"""What is kept of a place's activations while sequences go by, however many they are.

The largest by position and dimension, and which are massive: counts, never the activations.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.errors import AnalysisError


class Site(NamedTuple):
    """A place where the stream is looked at; `hook` is its name in the model."""

    layer: int
    kind: str
    hook: str


class Cell(NamedTuple):
    """The largest activation at one position and dimension, and where it was seen."""

    position: int
    dimension: int
    value: float
    sequence: int
    token: int
    median: float

    @property
    def ratio(self) -> float:
        return _ratio(abs(self.value), self.median)


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
        x: Float[np.ndarray, "pos d_model"],
        there: Bool[np.ndarray, "pos d_model"],
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

    def __init__(self, site: Site, top: int, magnitude: float, ratio: float, massive: Massive):
        self.site = site
        self.top, self.magnitude, self.ratio = top, magnitude, ratio
        self.massive = massive
        self.number = 0
        self.medians: list[float] = []
        self.cells: dict[tuple[int, int], Cell] = {}

    def see(
        self,
        x: Float[Tensor, "pos d_model"],
        positions: Int[Tensor, " pos"],
        tokens: Int[Tensor, " pos"],
        sequence: int,
    ) -> None:
        """The activations of one sequence.

        Raises: AnalysisError for one that is not finite.
        """
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        size = x.abs()
        if not bool(size.isfinite().all()):
            p, d = size.isfinite().logical_not().nonzero()[0].tolist()
            raise AnalysisError(
                f"layer {self.site.layer}, {self.site.kind}: the activation of sequence {sequence} "
                f"at position {int(positions[p])}, dimension {d} is {float(x[p, d])}"
            )
        median = median_of(size.flatten())
        self.medians.append(median)
        for place in largest_places(size, self.top).tolist():
            p, d = divmod(place, x.shape[1])
            cell = Cell(int(positions[p]), d, float(x[p, d]), sequence, int(tokens[p]), median)
            before = self.cells.get((cell.position, d))
            if before is None or abs(cell.value) > abs(before.value):
                self.cells[cell.position, d] = cell
        # A cell that is dropped here and is among the largest after all comes again.
        self.cells = {(c.position, c.dimension): c for c in self.ranked()}
        if not bool((size >= self.magnitude).any()):
            return
        # In float64, as the table is: on a threshold both have to say the same.
        exact = size.double()
        there = (exact > self.magnitude) & (exact >= self.ratio * median)
        if bool(there.any()):
            self.number += int(there.sum())
            if self.site.kind != "ln_final":
                arrays = (t.cpu().numpy() for t in (x, there, positions, tokens))
                self.massive.add(self.site.layer, sequence, *arrays)

    def ranked(self) -> list[Cell]:
        """The largest cells, largest first, equals in the order of their places."""
        order = sorted(self.cells.values(), key=lambda c: (-abs(c.value), c.position, c.dimension))
        return order[: self.top]

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
                "median": cell.median,
                "ratio": cell.ratio,
                "massive": abs(cell.value) > self.magnitude
                and abs(cell.value) >= self.ratio * cell.median,
            }
            for cell in self.ranked()
        ]

    def record(self) -> dict[str, object]:
        """The layer and site in one record."""
        most = self.ranked()[0]
        return {
            "layer": self.site.layer,
            "site": self.site.kind,
            "median": float(np.mean(self.medians)),
            "largest": most.value,
            "ratio": most.ratio,
            "massive": self.number,
        }


def median_of(values: Float[Tensor, " n"]) -> float:
    """The median, for an even count the mean of the two in the middle, as numpy has it."""
    n = len(values)
    low, high = (float(values.kthvalue(k).values) for k in ((n + 1) // 2, n // 2 + 1))
    return low if n % 2 else low / 2 + high / 2


def largest_places(size: Float[Tensor, "pos d_model"], top: int) -> Int[Tensor, " kept"]:
    """Where the `top` largest are, as flat indices; of equals the first in order."""
    flat = size.flatten()
    least = flat.topk(min(top, len(flat))).values[-1]
    above, equal = ((flat > least).nonzero()[:, 0], (flat == least).nonzero()[:, 0])
    return torch.cat((above, equal[: top - len(above)]))


def _ratio(size: float, median: float) -> float:
    if median > 0:
        return size / median
    return float("inf") if size > 0 else float("nan")
