"""Rounding numbers to a grid and back: what a matrix keeps of its values at so many bits.

One invariant: everything is computed in float32, as integers times a scale, and nothing is packed:
the numbers that come back are those that integer arithmetic with these scales would give.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.errors import AnalysisError

FLOAT_BITS = 16
"""At so many bits nothing is rounded: they stand for the floating point a model is served in."""

SCALE_BITS = 16
"""Bits of a scale, and of a zero point, where they are counted."""

Sharing = Literal["matrix", "row", "group"]


@dataclass(frozen=True)
class Grid:
    """Integers of some bits times a scale.

    Rounding is to the nearest integer, ties to the even one. A symmetric grid has the integers
    from -(2^(bits-1) - 1) to 2^(bits-1) - 1, so that 0 is exact and the scale is max|x| over the
    largest of them. An affine one has 0 to 2^bits - 1 and a whole zero point, and spans the
    smallest and the largest value, and 0, which is exact too. `sharing` says which numbers have a
    scale together: all of a matrix, each row, or `group` neighbours in a row.
    """

    bits: int
    sharing: Sharing
    affine: bool = False
    group: int = 64

    def round(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """The values of the grid nearest to `x`; the last two axes are a matrix.

        Raises: AnalysisError where the group does not divide the width.
        """
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        apart = self._apart(wide)
        axes = (-2, -1) if self.sharing == "matrix" else (-1,)
        rounded = self._affine(apart, axes) if self.affine else self._symmetric(apart, axes)
        return rounded.reshape(x.shape).to(x.dtype)

    def bits_per_number(self, rows: int, width: int) -> float:
        """Bits that one number of a matrix takes, its share of the scales included."""
        scales = {"matrix": 1, "row": rows, "group": rows * (width // self.group)}[self.sharing]
        each = SCALE_BITS * (2 if self.affine else 1)
        return self.bits + scales * each / (rows * width)

    def _apart(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*parts shared"]:
        if self.sharing != "group":
            return x
        if x.shape[-1] % self.group:
            raise AnalysisError(
                f"a group of {self.group} does not divide the {x.shape[-1]} inputs of a projection"
            )
        return x.unflatten(-1, (-1, self.group))

    # torch.fake_quantize_per_channel_affine gives the same bits, and takes 3 to 6 times as long.

    def _symmetric(self, x: Float[Tensor, "*parts"], axes: tuple[int, ...]) -> Tensor:
        last = 2 ** (self.bits - 1) - 1
        scale = x.abs().amax(dim=axes, keepdim=True) / last
        # What is all zeros has no scale, and needs none.
        scale = scale.masked_fill(scale == 0, 1.0)
        return (x / scale).round_().clamp_(-last, last).mul_(scale)

    def _affine(self, x: Float[Tensor, "*parts"], axes: tuple[int, ...]) -> Tensor:
        last = 2**self.bits - 1
        least = x.amin(dim=axes, keepdim=True).clamp(max=0.0)
        scale = (x.amax(dim=axes, keepdim=True).clamp(min=0.0) - least) / last
        scale = scale.masked_fill(scale == 0, 1.0)
        zero = (-least / scale).round_()
        return (x / scale).round_().add_(zero).clamp_(0, last).sub_(zero).mul_(scale)


def distinct_bits(weight: Float[Tensor, "rows width"]) -> int | None:
    """Bits of the grid that a matrix lies on already; None where it lies on none of 8 or fewer.

    Told by counting: among neighbours of a row there are no more different values than a grid of
    so many bits has, where numbers that were not rounded would be twice as many at least. Those
    that are not 0 have to repeat: a matrix of few numbers among zeros was pruned, not rounded.
    Grids whose scales are shared by fewer numbers than that are not seen: 8 bits in blocks of 32,
    say.
    """
    width = weight.shape[1]
    for size in (32, 64, 128, 256, width):
        if width % size or size > width:
            continue
        ordered = weight.reshape(-1, size).sort(dim=1).values
        new = ordered[:, 1:] != ordered[:, :-1]
        bits = max(1, int(new.sum(dim=1).max()).bit_length())
        if bits <= 8 and 2 * 2**bits <= size and _repeat(ordered, new):
            return bits
    return None


def _repeat(ordered: Float[Tensor, "rows size"], new: Bool[Tensor, "rows size-1"]) -> bool:
    """Whether no more than three quarters of the numbers that are not 0 are new in their row."""
    filled = ordered != 0
    different = int(filled[:, 0].sum()) + int((new & filled[:, 1:]).sum())
    return 4 * different <= 3 * int(filled.sum())
