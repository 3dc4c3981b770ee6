"""Medians, moments and counts of one site's activations, sequence by sequence.

One invariant: every figure is exact and in float64, whatever the dtype of the values: 300⁴ is more
than float16 holds.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

SAMPLED = 4096
"""Values among which the middle of a larger number of values is guessed."""

GAUSSIAN = 1.4826
"""Standard deviations of a Gaussian in one median absolute deviation: 1 / 0.6745."""


class Profile(NamedTuple):
    """One site in one sequence.

    `median` and `largest` are of |x|, `centre` is the median of x; `spread` is 1.4826 times the
    median of |x - centre|. `beyond_sigma` and `beyond_robust` count what is too many standard
    deviations from the mean, or spreads from the centre.
    """

    median: float
    largest: float
    centre: float
    spread: float
    kurtosis: float
    beyond_sigma: int
    beyond_robust: int


def profile(
    x: Float[np.ndarray, " n"], size: Float[np.ndarray, " n"], deviations: int | float
) -> Profile:
    """The figures of some finite values `x`; `size` is |x|.

    The moments are those of the values as a whole, divided by n. The kurtosis is Pearson's, 3 for a
    Gaussian, and NaN where all values are equal, which none is beyond then.
    """
    n, low, high = len(x), float(x.min()), float(x.max())
    largest = max(high, -low)
    centre = median(x)
    exact = x.astype(np.float64)
    kurtosis, beyond_sigma = math.nan, 0
    if low < high:  # the mean of equal values may be a rounding off them
        # Fourth powers of float64 leave its range; a power of two as the unit rounds nothing.
        unit = math.ldexp(1.0, min(-math.frexp(largest)[1], 1000))
        off = exact * unit
        mean = float(off.mean())
        off -= mean
        squares = off * off
        variance = float(squares.sum()) / n
        kurtosis = float(squares @ squares) / n / variance**2
        bound = deviations * math.sqrt(variance)
        if max(high * unit - mean, mean - low * unit) > bound:
            beyond_sigma = int(np.count_nonzero(np.abs(off, out=off) > bound))
    exact -= centre
    np.abs(exact, out=exact)
    spread = GAUSSIAN * median(exact)
    beyond_robust = int(np.count_nonzero(exact > deviations * spread))
    return Profile(median(size), largest, centre, spread, kurtosis, beyond_sigma, beyond_robust)


def median(values: Float[np.ndarray, " n"]) -> float:
    """The median, for an even count the mean of the two in the middle, as numpy has it."""
    n = len(values)
    below, inside = _middle(values)
    low, high = (n - 1) // 2 - below, n // 2 - below
    parted = np.partition(inside, high)
    first = parted[:high].max() if low < high else parted[high]
    return float(first) / 2 + float(parted[high]) / 2


def _middle(values: Float[np.ndarray, " n"]) -> tuple[int, Float[np.ndarray, " kept"]]:
    """Values around the middle, the middle ones among them, and how many are below these.

    Several times as fast as selecting among all. Source: Floyd and Rivest 1975, "Expected time
    bounds for selection".
    """
    n = len(values)
    if n >= 4 * SAMPLED:
        # An odd stride meets every dimension where their number is a power of two.
        sample = np.sort(values[:: n // SAMPLED | 1])
        middle, margin = len(sample) // 2, 2 * math.isqrt(len(sample))  # four standard errors
        low, high = sample[middle - margin], sample[middle + margin]
        below = int(np.count_nonzero(values < low))
        inside = values[(values >= low) & (values <= high)]
        if below <= (n - 1) // 2 and n // 2 < below + len(inside):
            return below, inside
    return 0, values


@dataclass
class Totals:
    """What is added up of one site over sequences."""

    sequences: int = 0
    tokens: int = 0
    values: int = 0
    median: float = 0.0
    infinity_norm: float = 0.0
    kurtosis: float = 0.0
    uneven: int = 0  # sequences that have a kurtosis
    beyond_sigma: int = 0
    beyond_robust: int = 0

    def add(self, own: Profile, tokens: int, width: int) -> None:
        self.sequences += 1
        self.tokens += tokens
        self.values += tokens * width
        self.median += own.median
        self.infinity_norm += own.largest
        if not math.isnan(own.kurtosis):
            self.kurtosis += own.kurtosis
            self.uneven += 1
        self.beyond_sigma += own.beyond_sigma
        self.beyond_robust += own.beyond_robust

    def record(self) -> dict[str, int | float]:
        """Means over sequences, and counts with their shares of all values."""
        return {
            "infinity_norm": self.infinity_norm / self.sequences,
            "kurtosis": self.kurtosis / self.uneven if self.uneven else math.nan,
            "beyond_sigma": self.beyond_sigma,
            "beyond_sigma_share": self.beyond_sigma / self.values,
            "beyond_robust": self.beyond_robust,
            "beyond_robust_share": self.beyond_robust / self.values,
        }
