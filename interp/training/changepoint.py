"""Where a training curve has its phase change, by one stated rule and no looking by hand.

A change is slow, then fast, then slow. Most curves of a run fall fast and slow down with no change
in them, so a fit with a fast middle is held against every curve which only slows down or only
speeds up, of whatever formula, and against noise which wanders. One invariant: nothing depends on
the units of either axis, nor on the sign of the values if the direction is turned with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from interp.errors import AnalysisError

Array = np.ndarray
Series = Sequence[float | int] | Array

# The constants were set on simulated development curves, then measured on curves of fresh seeds.
SKIPPED_SHARE = 0.05  # of the points, at the start: initial transients move fast either way
MIN_POINTS = 12  # left after those; four coefficients and two breakpoints are fitted
MIN_SIDE_POINTS = 3  # fewer on one side do not show a slow phase
MIN_SPEEDUP = 3.0
MIN_SHARE = 0.3
# Of 100 random walks 15 are found without this clause, 4 at 6; at 7 real changes begin to be lost.
MIN_SIGNAL = 6.0
MIN_MISFIT = 1.5  # without it a decay right after a turn is called three times as often
MAX_CORRELATION = 0.95  # an estimate nearer 1 would rest on one or two swings of the residuals
ROUNDING = 1e-5  # of the range: residuals below it say nothing of the curve

RULE = (
    f"The first {SKIPPED_SHARE:.0%} of the points are left out. A continuous line of three "
    "segments, its breakpoints on logged points, is fitted by least squares over all pairs. It is "
    "a change when (1) the middle segment goes in the direction asked for and is at least "
    f"{MIN_SPEEDUP:g} times as fast as either outer one in that direction; (2) at least "
    f"{MIN_SIDE_POINTS} kept points lie before its onset and {MIN_SIDE_POINTS} after its end; "
    f"(3) it makes up at least {MIN_SHARE:g} of the range of the kept values; (4) its size is at "
    f"least {MIN_SIGNAL:g} times the noise: the standard deviation s of the residuals, widened to "
    "s * sqrt((1 + r) / (1 - r)) for their lag-1 correlation r, taken within 0 and "
    f"{MAX_CORRELATION:g}; (5) its size is at least min_size; (6) the best curve which only slows "
    "down, and the best which only speeds up (the least-squares convex and concave curves, which "
    "take in straight lines, exponentials, sums of them, power laws and logarithms), each leave at "
    f"least {MIN_MISFIT:g} times the squared residuals of the three segments. Onset and end are "
    f"the breakpoints, step is halfway between them. With fewer than {MIN_POINTS} kept points, or "
    "constant values, no change is called."
)


@dataclass(frozen=True)
class Change:
    """What the rule says of one curve, and in `reason` why, with the measured figures.

    `step`, `onset`, `end`, `width` (steps) and `size` (in the values' unit, negative for a fall:
    the fitted value at the end less that at the onset) are None unless a change was found. The
    rest tells of the best three segments, found or not, and is None where none could be fitted.
    `slopes` (value per step, signed): before, during, after. `share`: the size in `direction` over
    the range of the kept values, negative when the middle goes the other way. `signal`: that size
    over the noise. `misfit`: squared residuals of the better convex or concave curve over those of
    the segments; None where an earlier clause failed, an upper bound where this one did.
    """

    found: bool
    reason: str
    step: float | None = None
    onset: float | None = None
    end: float | None = None
    width: float | None = None
    size: float | None = None
    slopes: tuple[float, float, float] | None = None
    share: float | None = None
    signal: float | None = None
    misfit: float | None = None


@dataclass(frozen=True)
class Interval:
    """Mean of one figure over the seeds with a change, with its standard error and its extremes.

    `std_error` is None for a single seed. The extremes of few seeds are not a confidence interval.
    """

    n: int
    mean: float
    std_error: float | None
    low: float
    high: float


@dataclass(frozen=True)
class ChangeSummary:
    """How many of the seeds' curves had a change, and the intervals over those that had."""

    n_found: int
    n_curves: int
    onset: Interval | None
    step: Interval | None
    end: Interval | None
    width: Interval | None
    size: Interval | None


@dataclass(frozen=True)
class _Segments:
    """The best three segments, on axes of unit length with the direction asked for upward."""

    first: int
    last: int
    slopes: Array
    rss: float  # with the share of rounding, so never 0
    share: float
    signal: float


def find_change(
    steps: Series,
    values: Series,
    *,
    direction: Literal["rise", "fall"],
    min_size: float | int = 0.0,
) -> Change:
    """Where the curve goes from slow to fast to slow in `direction`, or why it does not.

    The rule with its constants is `RULE`. `step` lies within one logging interval of the middle of
    a step or a sigmoid (two, if as wide as 0.3 of the run and with noise of 5 per cent); onset and
    end are about a sigmoid's 10 and 90 per cent points. `min_size`, in the values' unit, is the
    least change worth the name.

    Misleads: an onset within the first 5% of the points plus 3 is never seen, nor an end within
    the last 3. A curve which turns (rises, then at once falls for good and slows down) counts as a
    fall whose onset is the turn. Of several changes the largest is told, or none if they are alike.
    Points should be about evenly spaced: pass log(step) for checkpoints spaced by powers.
    Memory grows with the square of the number of points: 2,000 take 200 MB.

    Raises:
        AnalysisError: the steps do not increase or lie 1e-9 of the run apart, the lengths
            differ, a number is not finite, or `direction` or `min_size` is not as stated.

    Source: ours; the form is segmented regression with two breakpoints, and clause (6) is convex
        regression by non-negative least squares (Lawson and Hanson 1974, chapter 23).
    """
    x, y = _checked(steps, values)
    if direction not in ("rise", "fall"):
        raise AnalysisError(f"direction is {direction!r}; it must be 'rise' or 'fall'")
    if not (np.isfinite(min_size) and min_size >= 0):
        raise AnalysisError(f"min_size is {min_size}; it must be a finite number, 0 or more")
    skipped = int(SKIPPED_SHARE * len(x))
    x, y = x[skipped:], y[skipped:]
    if len(x) < MIN_POINTS:
        left = f"only {len(x)} points after the {skipped} left out"
        return Change(False, f"{left}; the rule needs {MIN_POINTS}")
    span, height = x[-1] - x[0], np.ptp(y)
    if height <= 1e-9 * np.abs(y).max():
        return Change(False, f"the values are constant at {y[0]:.4g}")

    sign = 1.0 if direction == "rise" else -1.0
    u, v = (x - x[0]) / span, sign * (y - y.mean()) / height  # unit axes, direction upward
    fit = _best_segments(u, v)
    onset, end = float(x[fit.first]), float(x[fit.last])
    size = float(sign * fit.share * height)
    misfit = None
    failure = _failure(fit, len(u), direction)
    if failure is None and abs(size) < min_size:
        failure = f"its size is under min_size, {min_size:g}"
    if failure is None:
        misfit = min(_bent_rss(u, v, bend, MIN_MISFIT * fit.rss) for bend in (1.0, -1.0)) / fit.rss
        if misfit < MIN_MISFIT:
            failure = "a curve which only slows down or only speeds up leaves no more than "
            failure += f"{misfit:.3g} times its squared residuals, under {MIN_MISFIT:g}"
    before, during, after = (float(slope) for slope in sign * fit.slopes * height / span)
    figures = ((before, during, after), fit.share, fit.signal, misfit)
    way = "rise" if size > 0 else "fall"
    where = f"{way} of {abs(size):.3g} from step {onset:g} to {end:g}"
    if failure is not None:
        reason = f"no change in the {where}: {failure}"
        return Change(False, reason, None, None, None, None, None, *figures)
    outer = max(fit.slopes[0], fit.slopes[2])
    # Beside a flat stretch the ratio has no meaning; 100 is past any doubt.
    speedup = f"{fit.slopes[1] / outer:.2g}" if fit.slopes[1] < 100 * outer else "over 100"
    reason = (
        f"{where}, {speedup} times as fast as beside it, {fit.share:.2g} of the range, "
        f"{fit.signal:.3g} times the noise; curves which only slow down or only speed up leave "
        f"{misfit:.3g} times its squared residuals"
    )
    return Change(True, reason, (onset + end) / 2, onset, end, end - onset, size, *figures)


def summarize_changes(changes: Sequence[Change]) -> ChangeSummary:
    """How many of the curves (one per seed) had a change, with mean and extremes over those.

    The intervals, None when no seed had one, mislead unless `n_found` is told beside them.

    Raises:
        AnalysisError: there are no changes to summarize.
    """
    if not changes:
        raise AnalysisError("no changes to summarize: give one Change per seed")
    found = [change for change in changes if change.found]
    return ChangeSummary(
        n_found=len(found),
        n_curves=len(changes),
        onset=_interval([change.onset for change in found]),
        step=_interval([change.step for change in found]),
        end=_interval([change.end for change in found]),
        width=_interval([change.width for change in found]),
        size=_interval([change.size for change in found]),
    )


def _interval(figures: list[float | None]) -> Interval | None:
    if not figures:
        return None
    numbers, n = np.array(figures, dtype=np.float64), len(figures)
    std_error = float(numbers.std(ddof=1) / np.sqrt(n)) if n > 1 else None
    return Interval(n, float(numbers.mean()), std_error, float(numbers.min()), float(numbers.max()))


def _checked(steps: Series, values: Series) -> tuple[Array, Array]:
    x, y = np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)
    if x.ndim != 1 or y.ndim != 1:
        raise AnalysisError(f"steps {x.shape} and values {y.shape} must have one axis each")
    if len(x) != len(y):
        raise AnalysisError(f"{len(x)} steps but {len(y)} values; give one value per step")
    for name, numbers in (("steps", x), ("values", y)):
        bad = np.flatnonzero(~np.isfinite(numbers))
        if len(bad):
            raise AnalysisError(f"{name}[{bad[0]}] is {numbers[bad[0]]}; {name} must be finite")
    gaps = np.diff(x)
    if (gaps <= 0).any():
        i = int(np.argmax(gaps <= 0))
        raise AnalysisError(f"steps must increase; steps[{i}:{i + 2}] is {x[i]:g}, {x[i + 1]:g}")
    if len(x) > 1 and gaps.min() < 1e-9 * (x[-1] - x[0]):
        spread = f"{gaps.min():g} apart in a run of {x[-1] - x[0]:g}"
        raise AnalysisError(f"the closest steps are {spread}, too near; give log(step) instead")
    return x, y


def _hinges(u: Array) -> Array:
    """One column per inner point: 0 up to it, then rising at slope 1, [point, inner point]."""
    return np.maximum(u[:, None] - u[None, 1:-1], 0.0)


def _without_line(u: Array, columns: Array) -> Array:
    """The columns less their least-squares straight lines in u."""
    line, _ = np.linalg.qr(np.column_stack([np.ones_like(u), u]))
    return columns - line @ (line.T @ columns)


def _best_pair(u: Array, v: Array) -> tuple[int, int]:
    """Indices of the two breakpoints whose continuous three segments fit best."""
    hinges, v = _without_line(u, _hinges(u)), _without_line(u, v)
    gram, overlap = hinges.T @ hinges, hinges.T @ v
    norms = np.diag(gram)
    # Each pair's two-by-two normal equations, solved in closed form: how much the pair explains.
    determinant = np.outer(norms, norms) - gram**2
    explained = (
        np.outer(overlap**2, norms)
        + np.outer(norms, overlap**2)
        - 2 * np.outer(overlap, overlap) * gram
    )
    # Below 1e-12 the two hinges are one, but for rounding.
    solvable = np.triu(determinant > 1e-12 * np.outer(norms, norms), k=1)
    gain = np.where(solvable, explained / np.where(solvable, determinant, 1.0), -1.0)
    first, last = divmod(int(np.argmax(gain)), len(norms))
    return first + 1, last + 1


def _best_segments(u: Array, v: Array) -> _Segments:
    first, last = _best_pair(u, v)
    bends = np.maximum(u[:, None] - u[None, [first, last]], 0.0)
    columns = np.column_stack([np.ones_like(u), u, bends])
    coefficients = np.linalg.lstsq(columns, v, rcond=None)[0]
    fitted = columns @ coefficients
    residuals = v - fitted
    share = float(fitted[last] - fitted[first])
    return _Segments(
        first=first,
        last=last,
        slopes=np.cumsum(coefficients[1:]),
        rss=float(residuals @ residuals + ROUNDING**2 * len(v)),
        share=share,
        signal=share / _noise(residuals),
    )


def _failure(fit: _Segments, n_points: int, direction: str) -> str | None:
    """The first of the clauses 1 to 4 that the segments fail, in words."""
    outer, n_after = max(fit.slopes[0], fit.slopes[2]), n_points - 1 - fit.last
    if fit.slopes[1] <= 0:
        return f"the middle of the best three segments does not {direction}"
    if fit.slopes[1] < MIN_SPEEDUP * outer:
        speedup = fit.slopes[1] / outer
        return f"it is {speedup:.2g} times as fast as beside it, under {MIN_SPEEDUP:g}"
    if min(fit.first, n_after) < MIN_SIDE_POINTS:
        sides = f"{fit.first} points lie before its onset and {n_after} after its end"
        return f"{sides}, under {MIN_SIDE_POINTS}"
    if fit.share < MIN_SHARE:
        return f"it makes up {fit.share:.2g} of the range, under {MIN_SHARE:g}"
    if fit.signal < MIN_SIGNAL:
        return f"it is {fit.signal:.2g} times the noise, under {MIN_SIGNAL:g}"
    return None


def _noise(residuals: Array) -> float:
    """Standard deviation of the residuals, widened as far as neighbours agree.

    A mean over a stretch of a wandering curve is less sure than its points are: for an
    autoregression the factor is sqrt((1 + r) / (1 - r)).
    """
    power = residuals @ residuals
    rounding = ROUNDING**2 * len(residuals)
    correlation = (residuals[1:] @ residuals[:-1]) / max(power, rounding)
    correlation = min(max(float(correlation), 0.0), MAX_CORRELATION)
    variance = max(power, rounding) / (len(residuals) - 6)  # 4 coefficients, 2 breakpoints
    return float(np.sqrt(variance * (1 + correlation) / (1 - correlation)))


def _bent_rss(u: Array, v: Array, bend: float, limit: float) -> float:
    """Squared residuals of the best convex (bend 1) or concave (-1) curve, or a sum <= limit.

    Such a curve is a straight line plus hinges with weights of one sign. Non-negative least
    squares by Lawson and Hanson's active set, which stops once the sum is at most `limit`: a good
    enough fit need not be made the best.
    """
    hinges = bend * _without_line(u, _hinges(u))
    hinges /= np.linalg.norm(hinges, axis=0)
    target = _without_line(u, v)
    weights = np.zeros(hinges.shape[1])
    rss = target @ target
    while rss > limit:
        pull = np.where(weights > 0, -np.inf, hinges.T @ (target - hinges @ weights))
        if pull.max() <= 0:
            break
        trial, used = weights.copy(), weights > 0
        used[np.argmax(pull)] = True
        while True:
            inside = np.flatnonzero(used)
            now, best = trial[inside], np.linalg.lstsq(hinges[:, inside], target, rcond=None)[0]
            if (best > 0).all():
                break
            # Go towards the best weights until the first one reaches 0, and let that one go.
            out = best <= 0
            trial[inside] = now + np.min(now[out] / (now[out] - best[out])) * (best - now)
            used[inside[out & (trial[inside] <= 1e-15)]] = False
            trial[~used] = 0.0
        trial[inside] = best
        left = target - hinges @ trial
        # At the optimum no further hinge lowers the sum, but rounding would go round for ever.
        if left @ left >= rss * (1 - 1e-10):
            break
        weights, rss = trial, left @ left
    return float(rss)
