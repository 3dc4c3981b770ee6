"""What may be asked for: schemes of quantization, bits, and which numbers share a scale."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from interp.errors import AnalysisError
from interp.quantization.rounding import FLOAT_BITS, Grid

SCHEMES = ("round-to-nearest", "llm.int8", "smoothquant", "awq")
CALIBRATED = ("smoothquant", "awq")
"""Schemes that look at activations before they round."""

WEIGHT_SCALES = ("channel", "tensor", "group")
ACTIVATION_SCALES = ("tensor", "token")

Fold = Literal["all", "norms"]

_BITS = re.compile(r"w(\d+)a(\d+)", re.IGNORECASE)
_ROUNDED = range(2, 9)


@dataclass(frozen=True)
class Recipe:
    """One way of rounding a model: its weights, and what its projections read.

    `weight_scales` is `channel` (a scale for each output), `tensor` or `group`. `activation_scales`
    is `token`, or `tensor`, which is one sequence's input of one projection; `vector` is what
    llm.int8 calls tokens without their outlier features; empty where activations stay.
    """

    scheme: str
    weight_bits: int
    activation_bits: int
    weight_scales: str = "channel"
    activation_scales: str = "token"
    group: int = 64
    affine: bool = False
    alpha: float = 0.5
    threshold: float = 6.0
    fold: Fold = "all"

    @property
    def bits(self) -> str:
        """`w8a8`: how bits are written."""
        return f"w{self.weight_bits}a{self.activation_bits}"

    @property
    def weights(self) -> Grid | None:
        """The grid of the weights; None where they stay."""
        if self.weight_bits == FLOAT_BITS:
            return None
        shared: dict[str, Literal["matrix", "row", "group"]] = {
            "channel": "row",
            "tensor": "matrix",
            "group": "group",
        }
        return Grid(self.weight_bits, shared[self.weight_scales], self.affine, self.group)

    @property
    def activations(self) -> Grid | None:
        """The grid of what projections read; None where it stays."""
        if self.activation_bits == FLOAT_BITS:
            return None
        shared: Literal["matrix", "row"] = "matrix" if self.activation_scales == "tensor" else "row"
        return Grid(self.activation_bits, shared, self.affine)


def parse_bits(words: str) -> tuple[int, int]:
    """The bits of weights and activations that `w8a8` names: 2 to 8, or 16, where nothing rounds.

    Raises: AnalysisError for anything else.
    """
    match = _BITS.fullmatch(words.strip())
    bits = (int(match[1]), int(match[2])) if match else ()
    if not bits or any(own not in (*_ROUNDED, FLOAT_BITS) for own in bits):
        raise AnalysisError(
            f"bits {words!r}: written like w8a8 or w4a16, each of 2 to 8 bits, or 16 for none of it"
        )
    return bits


def recipes(
    schemes: Sequence[str] | None = None,
    bits: Sequence[str] = ("w8a8",),
    *,
    weight_scales: str = "channel",
    activation_scales: Sequence[str] = ACTIVATION_SCALES,
    group: int = 64,
    affine: bool = False,
    alpha: float = 0.5,
    threshold: float = 6.0,
    fold: Fold = "all",
) -> list[Recipe]:
    """Every recipe that some settings ask for, each once, scheme by scheme.

    Without `schemes` they are those that go with the bits: weights alone are what awq is for, and
    llm.int8 and smoothquant are for activations. llm.int8 has a scale for each output of its
    weights and each token of its activations, whatever else is asked for.

    Raises: AnalysisError for an unknown scheme or scale, bits that are none or that a scheme does
    not go with, or a number out of its range.
    """
    _check(schemes, bits, weight_scales, activation_scales, group, alpha, threshold, fold)
    found: dict[Recipe, None] = {}
    for scheme in schemes or SCHEMES:
        for words in bits:
            weight_bits, activation_bits = parse_bits(words)
            alone = activation_bits == FLOAT_BITS
            if schemes is None and alone != (scheme == "awq") and scheme != "round-to-nearest":
                continue
            if scheme == "awq" and not alone:
                raise AnalysisError(
                    f"awq with {words}: it is for weights alone, such as w4a16; activations stay"
                )
            int8 = scheme == "llm.int8"
            for scales in _activation_scales(scheme, alone, activation_scales):
                recipe = Recipe(
                    scheme,
                    weight_bits,
                    activation_bits,
                    "channel" if int8 else weight_scales,
                    scales,
                    group,
                    affine and not int8,
                    float(alpha),
                    float(threshold),
                    fold,
                )
                found[recipe] = None
    return list(found)


def _activation_scales(scheme: str, alone: bool, asked: Sequence[str]) -> Iterator[str]:
    if alone:
        yield ""
    elif scheme == "llm.int8":
        yield "vector"
    else:
        yield from asked


def _check(
    schemes: Sequence[str] | None,
    bits: Sequence[str],
    weight_scales: str,
    activation_scales: Sequence[str],
    group: int,
    alpha: float,
    threshold: float,
    fold: str,
) -> None:
    named = (
        ("scheme", schemes or (), SCHEMES),
        ("weight scales", (weight_scales,), WEIGHT_SCALES),
        ("activation scales", activation_scales, ACTIVATION_SCALES),
        ("fold", (fold,), ("all", "norms")),
    )
    for what, given, known in named:
        for one in given:
            if one not in known:
                raise AnalysisError(f"{what} {one!r}: it should be one of {', '.join(known)}")
    lists = {"scheme": schemes, "bits": bits, "activation scales": activation_scales}
    for what, listed in lists.items():
        if listed is not None and not listed:
            raise AnalysisError(f"{what}: none was named")
    if group < 2:
        raise AnalysisError(f"group = {group}: at least 2 numbers share a scale")
    if not 0 <= alpha <= 1:
        raise AnalysisError(f"alpha = {alpha:g}: it goes from 0 to 1")
    if not threshold > 0:
        raise AnalysisError(f"threshold = {threshold:g}: it is above 0")
