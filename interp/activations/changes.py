"""Ways to change the massive activations of a batch, and how many cells each really changed.

One invariant: a change acts at every layer in which a cell is massive, on what arrives there. What
an earlier layer's change has left in the cell is not changed again: it acts on what the blocks have
written since.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.activations.mass import counted_tokens
from interp.activations.massive import MassiveCells
from interp.activations.sites import residual_sites
from interp.data.repeated import TokenBatch
from interp.errors import AnalysisError
from interp.models.watch import HookedModel

SAME = 1e-4
"""Relative difference up to which a cell holds what it held: the same token in the same place has
the same vector in every sequence but for rounding, which depends on how sequences are batched."""

Write = Callable[[Tensor, Tensor], None]
"""Edits a stream `[batch, pos, d_model]` in place, at the cells with these numbers in `Places`."""


@dataclass(frozen=True)
class Places:
    """The cells in some sequences of a batch that go through the model together.

    `number` is each cell's among those of the batch. Cells of the same place in several layers
    share a `coordinate`, a number from 0; `token_of` has the token of each coordinate, `row_of`
    and `column_of` where each token is.
    """

    number: Int[Tensor, " cell"]
    layer: Int[Tensor, " cell"]
    row: Int[Tensor, " cell"]
    column: Int[Tensor, " cell"]
    dimension: Int[Tensor, " cell"]
    coordinate: Int[Tensor, " cell"]
    token_of: Int[Tensor, " coordinate"]
    row_of: Int[Tensor, " token"]
    column_of: Int[Tensor, " token"]

    def at(self, cells: Int[Tensor, " chosen"]) -> tuple[Tensor, Tensor, Tensor]:
        """The index of some cells in the stream."""
        return self.row[cells], self.column[cells], self.dimension[cells]


def places_in(cells: MassiveCells, first: int, n_rows: int, device: torch.device) -> Places:
    """The cells in `n_rows` sequences of the batch from `first` on, counted from 0 there."""
    number = ((cells.row >= first) & (cells.row < first + n_rows)).nonzero()[:, 0]
    row, column, dimension = (
        cells.row[number] - first,
        cells.column[number],
        cells.dimension[number],
    )
    three = torch.stack((row, column, dimension))
    unique, coordinate = torch.unique(three, dim=1, return_inverse=True)
    tokens, token_of = torch.unique(unique[:2], dim=1, return_inverse=True)
    every = (number, cells.layer[number], row, column, dimension, coordinate, token_of, *tokens)
    return Places(*(one.to(device) for one in every))


@dataclass
class Tally:
    """How many cells were set, and in how many something else stood before."""

    cells: int = 0
    changed: int = 0


@dataclass(frozen=True)
class Change:
    """One way to change the massive activations of every batch.

    `cells` are those that are changed, the massive ones but in a control, and `rules` make, for
    each batch, what edits them. `note` says what was drawn.
    """

    name: str
    draw: int
    cells: Sequence[MassiveCells]
    rules: Sequence[Callable[[Places], Write]]
    note: str = ""

    def hooks(
        self, model: HookedModel, batch: int, first: int, n_rows: int, tally: Tally
    ) -> list[tuple[str, Callable]]:
        """What changes some sequences of a batch in a pass, told to `tally`; none without cells."""
        places = places_in(self.cells[batch], first, n_rows, torch.device(str(model.cfg.device)))
        write = self.rules[batch](places)

        def edit(x: Tensor, hook: object = None, *, which: Tensor) -> Tensor:
            at = places.at(which)
            edited = x.clone()
            write(edited, which)
            old, new = x[at].double(), edited[at].double()
            tally.cells += len(which)
            tally.changed += int(((new - old).abs() > SAME * old.abs()).sum())
            return edited

        sites = residual_sites(model)
        return [
            (sites[layer].hook, partial(edit, which=(places.layer == layer).nonzero()[:, 0]))
            for layer in places.layer.unique().tolist()
        ]


def every_change(
    model: HookedModel,
    batches: Sequence[TokenBatch],
    found: Sequence[MassiveCells],
    rows: pd.DataFrame,
    medians: Sequence[Float[Tensor, " _"]],
    *,
    draws: int,
    seed: int,
) -> list[Change]:
    """All changes, those that draw `draws` times each.

    `rows` are the cells of all batches, as `cell_rows` has them; `medians` has for each cell the
    median of the stream around it.

    Raises: AnalysisError where every dimension holds massive activations.
    """
    dimensions = sorted({int(d) for d in rows["dimension"]})
    free = np.setdiff1d(np.arange(model.cfg.d_model), dimensions)
    if not len(free):
        raise AnalysisError(
            f"all {model.cfg.d_model} dimensions hold massive activations: there is none to move "
            "them to; higher thresholds find fewer"
        )

    def to_values(name: str, values: Sequence[Tensor], note: str = "") -> Change:
        return Change(name, 0, found, [partial(_set, own) for own in values], note)

    def of_rows(column: np.ndarray) -> list[Tensor]:
        sizes = [len(cells) for cells in found]
        return list(torch.from_numpy(column).float().split(sizes))

    means, others, alone = _shared(rows)
    lone = f"{alone} of {len(rows)} cells have no like in another sequence" if alone else ""
    changes = [
        to_values("zero", [torch.zeros(len(cells)) for cells in found]),
        to_values("mean", of_rows(means), lone),
        to_values("resample", of_rows(others), lone),
        to_values("median", medians),
        Change("flip", 0, found, [_flip] * len(found)),
    ]
    for draw in range(draws):
        rng = np.random.default_rng([seed, draw, 1])
        drawn = rng.choice(free, len(dimensions), replace=len(free) < len(dimensions))
        to = dict(zip(dimensions, (int(d) for d in drawn), strict=True))
        told = ", ".join(f"{a} to {b}" for a, b in list(to.items())[:4])
        if len(to) > 4:
            told += f" and {len(to) - 4} more"
        changes.append(
            Change("move", draw, found, [partial(_move, to)] * len(found), f"dimension {told}")
        )
    for draw in range(draws):
        rng = np.random.default_rng([seed, draw, 2])
        direction = torch.zeros(model.cfg.d_model)
        direction[free] = torch.from_numpy(rng.standard_normal(len(free))).float()
        direction /= direction.norm()
        changes.append(
            Change("random-direction", draw, found, [partial(_redirect, direction)] * len(found))
        )
    for draw in range(draws):
        rng = np.random.default_rng([seed, draw, 3])
        random = [
            _random_cells(batch, cells, free, rng)
            for batch, cells in zip(batches, found, strict=True)
        ]
        short = sum(map(len, found)) - sum(map(len, random))
        changes.append(
            Change(
                "random-cells",
                draw,
                random,
                [partial(_set, torch.zeros(len(cells))) for cells in random],
                f"{short} cells have no other token to be replaced by" if short else "",
            )
        )
    return changes


def _shared(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, int]:
    """For each cell the mean of those like it and the value of another sequence's, and how many
    have no other: the same layer, dimension and token id, in any sequence."""
    like = rows.groupby(["layer", "dimension", "token"], sort=False)
    means = like["value"].transform("mean").to_numpy(dtype=float, copy=True)
    others = rows["value"].to_numpy(dtype=float, copy=True)
    alone = 0
    for _, own in like:
        firsts = own.drop_duplicates("sequence")["value"].to_numpy()
        if len(firsts) == 1:
            alone += len(own)
            continue
        order = {n: place for place, n in enumerate(own["sequence"].unique())}
        following = own["sequence"].map(order).to_numpy() + 1
        others[own.index] = firsts[following % len(firsts)]
    return means, others, alone


def _random_cells(
    batch: TokenBatch, cells: MassiveCells, free: np.ndarray, rng: np.random.Generator
) -> MassiveCells:
    """As many cells in the same layers and sequences, at other tokens and dimensions.

    Where a sequence has fewer, it gets those that there are.
    """
    others = counted_tokens(batch).cpu() & ~cells.tokens(batch.tokens.shape)
    column, dimension = cells.column.clone(), cells.dimension.clone()
    kept = torch.zeros(len(cells), dtype=torch.bool)
    for row in cells.row.unique().tolist():
        own = (cells.row == row).nonzero()[:, 0]
        both = torch.stack((cells.column[own], cells.dimension[own]))
        unique, which = torch.unique(both, dim=1, return_inverse=True)
        columns = others[row].nonzero()[:, 0].numpy()
        possible = len(columns) * len(free)
        drawn = rng.choice(possible, min(unique.shape[1], possible), replace=False)
        there = which < len(drawn)
        kept[own] = there
        own, which = own[there], which[there]
        column[own] = torch.from_numpy(columns[drawn // len(free)])[which]
        dimension[own] = torch.from_numpy(free[drawn % len(free)])[which]
    return MassiveCells(
        cells.layer[kept], cells.row[kept], column[kept], dimension[kept], cells.value[kept]
    )


# --- what is done to the cells of one layer ------------------------------------------------------


def _set(values: Float[Tensor, " cell"], places: Places) -> Write:
    """A value of its own for each cell of the batch."""
    wanted = values.to(places.number.device)[places.number]

    def write(x: Tensor, which: Tensor) -> None:
        x[places.at(which)] = wanted[which].to(x.dtype)

    return write


def _flip(places: Places) -> Write:
    """What was written since the last flip gets the other sign."""
    left = torch.zeros(len(places.token_of), device=places.number.device, dtype=torch.double)

    def write(x: Tensor, which: Tensor) -> None:
        at, own = places.at(which), places.coordinate[which]
        # At first nothing is left, and all of it is new.
        flipped = 2 * left[own] - x[at].double()
        x[at] = flipped.to(x.dtype)
        left[own] = x[at].double()

    return write


def _move(to: dict[int, int], places: Places) -> Write:
    """What arrives in a cell is added to another dimension of the same token."""
    targets = [to[dimension] for dimension in places.dimension.tolist()]
    target = torch.tensor(targets, dtype=torch.long, device=places.number.device)

    def write(x: Tensor, which: Tensor) -> None:
        row, column, dimension = places.at(which)
        moved = x[row, column, dimension]
        x[row, column, dimension] = 0
        x.index_put_((row, column, target[which]), moved, accumulate=True)

    return write


def _redirect(direction: Float[Tensor, " d_model"], places: Places) -> Write:
    """What a token's cells have been given so far is carried along one direction instead, as long
    as it is."""
    device = places.number.device
    along = direction.to(device)
    held = torch.zeros(len(places.token_of), device=device, dtype=torch.double)

    def lengths() -> Tensor:
        squared = torch.zeros(len(places.row_of), device=device, dtype=torch.double)
        return squared.index_add_(0, places.token_of, held**2).sqrt()

    def write(x: Tensor, which: Tensor) -> None:
        at = places.at(which)
        before = lengths()
        held[places.coordinate[which]] += x[at].double()
        x[at] = 0
        longer = (lengths() - before)[:, None] * along
        tokens = (places.row_of, places.column_of)
        x[tokens] = (x[tokens].double() + longer).to(x.dtype)

    return write
