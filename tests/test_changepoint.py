"""The change rule: curves whose change is known, families which have none, and what it refuses."""

import dataclasses
import inspect
import itertools
from collections.abc import Callable

import numpy as np
import pytest

from interp.errors import AnalysisError
from interp.training.changepoint import (
    RULE,
    Change,
    _bent_rss,
    find_change,
    summarize_changes,
)

Curve = Callable[[np.ndarray, np.random.Generator], np.ndarray]
SEED = 20_240  # none of the curves the constants were set on


def sigmoid(t: np.ndarray, middle: float, width: float) -> np.ndarray:
    """From 0 to 1; `width` is from 10 to 90 per cent."""
    return 1 / (1 + np.exp(-np.clip((t - middle) * 2 * np.log(9) / width, -500, 500)))


def run_of(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Steps of a run of 40 to 150 evenly logged points, and the same from 0 to 1."""
    n = int(rng.integers(40, 151))
    steps = (np.arange(n) + rng.integers(0, 2)) * float(rng.choice([10, 25, 50]))
    return steps, np.linspace(0, 1, n)


def unit(values: np.ndarray) -> np.ndarray:
    return values / np.ptp(values)


def count_found(curve: Curve, n_curves: int, noises: tuple[float, ...] = (0.0,)) -> int:
    """How many of the curves have a change in either direction, over noise in parts of height."""
    found = 0
    for i in range(n_curves):
        rng = np.random.default_rng([SEED, i])
        steps, t = run_of(rng)
        noise = noises[i % len(noises)]
        values = unit(curve(t, rng)) + noise * rng.standard_normal(len(t))
        rises, falls = (find_change(steps, values, direction=d) for d in ("rise", "fall"))
        found += rises.found or falls.found
    return found


def autoregression(n: int, phi: float, rng: np.random.Generator) -> np.ndarray:
    values = np.zeros(n + 100)  # the first 100 forget the start
    for i, shock in enumerate(rng.standard_normal(n + 99), start=1):
        values[i] = phi * values[i - 1] + shock
    return values[100:]


# Known answers


@pytest.mark.parametrize("direction", ["rise", "fall"])
@pytest.mark.parametrize("every", [50, 25, 10])
@pytest.mark.parametrize("start", [0, 1])
def test_a_step_at_400_is_found_within_one_logging_interval(every, direction, start):
    steps = np.arange(start * every, 1001, every)
    sign = 1.0 if direction == "rise" else -1.0
    change = find_change(steps, sign * (steps >= 400), direction=direction)
    assert change.found, change.reason
    assert (change.onset, change.end) == (400 - every, 400)  # last point at 0, first point at 1
    assert (change.step, change.width) == (400 - every / 2, every)
    assert change.size == pytest.approx(sign, abs=1e-9)
    assert change.slopes == pytest.approx((0, sign / every, 0), abs=1e-9)
    assert change.share == pytest.approx(1, abs=1e-9)
    other = find_change(
        steps, sign * (steps >= 400), direction="fall" if direction == "rise" else "rise"
    )
    assert not other.found
    assert "does not" in other.reason


def test_three_straight_segments_come_back_as_they_are():
    steps = np.arange(0, 2001, 20.0)
    values = np.interp(steps, [0, 600, 900, 2000], [5.0, 4.94, 2.44, 2.33])
    change = find_change(steps, values, direction="fall")
    assert (change.onset, change.step, change.end) == (600, 750, 900)
    assert change.size == pytest.approx(-2.5)
    assert change.slopes == pytest.approx((-1e-4, -2.5 / 300, -1e-4))
    assert change.share == pytest.approx(2.5 / (values[5] - 2.33))  # 5 of 101 points left out
    assert change.reason.startswith("fall of 2.5 from step 600 to 900, 83 times as fast")


@pytest.mark.parametrize("width", [0.005, 0.02, 0.05, 0.1, 0.2, 0.3])
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("direction", ["rise", "fall"])
def test_a_sigmoid_is_found_at_its_middle(width, noise, direction):
    steps = np.arange(0, 5001, 50.0)
    for middle in (0.4, 0.47, 0.6):
        rng = np.random.default_rng([SEED, int(1000 * middle)])
        height = -3.1 if direction == "fall" else 0.7
        shape = sigmoid(steps / 5000, middle, width) + noise * rng.standard_normal(len(steps))
        change = find_change(steps, 0.02 + height * shape, direction=direction)
        assert change.found, change.reason
        # Noise leaves the corners of a wide slope unsure, and its middle with them.
        assert abs(change.step - 5000 * middle) <= (150 if noise and width > 0.1 else 50)
        assert np.sign(change.size) == np.sign(height)


def test_signal_is_the_size_over_the_noise():
    steps = np.arange(105)
    values = (steps >= 50) + 0.05 * (-1.0) ** steps
    change = find_change(steps, values, direction="rise")
    # 100 points are kept, 6 numbers are fitted; neighbours disagree, so nothing is widened.
    noise = 0.05 * np.sqrt(100 / 94)
    # The fit takes up about 0.1% of so regular a noise; 100 instead of 94 would be off by 3%.
    assert change.signal == pytest.approx(change.size / noise, rel=0.005)


def test_onset_and_end_are_about_the_10_and_90_per_cent_points():
    steps = np.arange(0, 5001, 50.0)
    change = find_change(steps, sigmoid(steps / 5000, 0.5, 0.2), direction="rise")
    assert abs(change.onset - 2000) <= 50
    assert abs(change.end - 3000) <= 50
    assert change.width == change.end - change.onset


def test_uneven_steps():
    for i in range(20):
        rng = np.random.default_rng([SEED, i])
        steps = np.cumsum(rng.uniform(10, 40, 100))
        middle = rng.uniform(0.3, 0.7) * steps[-1]
        values = sigmoid(steps / steps[-1], middle / steps[-1], 0.1)
        change = find_change(steps, values, direction="rise")
        assert change.found, change.reason
        assert abs(change.step - middle) <= 40  # the longest interval
    doubling = 2.0 ** np.arange(21)
    assert find_change(doubling, doubling >= 256, direction="rise").end == 256


def test_curves_shaped_like_real_runs():
    steps = np.arange(0, 4901, 100.0)
    rng = np.random.default_rng(SEED)
    induction = np.interp(
        steps, [0, 1000, 1600, 2200, 2800, 4900], [0.004, 0.005, 0.02, 0.09, 0.16, 0.2]
    )
    change = find_change(
        steps, induction + 0.004 * rng.standard_normal(50), direction="rise", min_size=0.1
    )
    assert change.found, change.reason
    assert abs(change.step - 2200) <= 100
    # The score rises while single-token statistics are learned, then falls, then creeps.
    score = np.interp(
        steps,
        [0, 400, 1000, 1600, 2200, 2800, 4900],
        [0.0, 0.13, 0.17, 0.14, 0.0, -0.09, -0.13],
    )
    change = find_change(steps, score + 0.01 * rng.standard_normal(50), direction="fall")
    assert change.found, change.reason
    assert abs(change.step - 2100) <= 150  # halfway from 0.17 to -0.13


@pytest.mark.parametrize("transient", [-0.6, -0.3, 0.3, 0.6])
@pytest.mark.parametrize("share_of_run", [0.01, 0.03, 0.05])
def test_an_early_transient_neither_hides_a_change_nor_is_one(transient, share_of_run):
    steps = np.arange(0, 5001, 50.0)
    t = steps / 5000
    early = transient * np.minimum(t / share_of_run, 1)
    for middle in (0.35, 0.6):
        change = find_change(steps, early + sigmoid(t, middle, 0.1), direction="rise")
        assert change.found, change.reason
        assert abs(change.step - 5000 * middle) <= 50
    for direction in ("rise", "fall"):
        assert not find_change(steps, early, direction=direction).found
        assert not find_change(steps, early + 0.3 * t, direction=direction).found
        assert not find_change(steps, early - np.exp(-t / 0.3), direction=direction).found


# Families without a change

NOISES = (0.0, 0.01, 0.03, 0.05, 0.1, 0.2)


def spread(rng: np.random.Generator, low: float, high: float) -> float:
    """Even in the logarithm."""
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def two_exponentials(t: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    weight = rng.uniform(0.1, 0.9)
    slow, fast = np.exp(-t * spread(rng, 0.3, 30)), np.exp(-t * spread(rng, 1, 200))
    return weight * fast + (1 - weight) * slow


SMOOTH: dict[str, Curve] = {
    "line": lambda t, rng: t,
    "exponential decay": lambda t, rng: np.exp(-t * spread(rng, 0.3, 200)),
    "saturating rise": lambda t, rng: 1 - np.exp(-t * spread(rng, 0.3, 200)),
    "power law": lambda t, rng: (t + spread(rng, 0.001, 0.5)) ** -rng.uniform(0.3, 2),
    "logarithm": lambda t, rng: np.log(t + spread(rng, 0.001, 1)),
    "two exponentials": two_exponentials,
    "ever faster": lambda t, rng: np.exp(t * rng.uniform(1, 8)),
}


@pytest.mark.parametrize("family", SMOOTH)
def test_no_change_in_curves_of_one_bend(family):
    assert count_found(SMOOTH[family], 60, NOISES) == 0


@pytest.mark.parametrize(
    ("name", "curve", "most"),
    [
        ("white", lambda t, rng: rng.standard_normal(len(t)), 2),
        ("phi 0.5", lambda t, rng: autoregression(len(t), 0.5, rng), 2),
        ("phi 0.8", lambda t, rng: autoregression(len(t), 0.8, rng), 2),
        # Both directions are asked, so about twice the 2 in 100 of one; nothing but more seeds
        # tells a walk's one long move from a change.
        ("walk", lambda t, rng: np.cumsum(rng.standard_normal(len(t))), 10),
    ],
)
def test_noise_is_seldom_a_change(name, curve, most):
    assert count_found(curve, 100) <= most


def test_drift_of_a_control_is_no_change():
    def drift(t: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        rate = rng.uniform(0.5, 6)
        fall = np.exp(-t * rate) if rng.random() < 0.5 else -(t**1.5)
        return unit(fall) + 0.05 * rng.standard_normal(len(t))

    assert count_found(drift, 60) == 0


def test_min_size_keeps_a_small_change_out():
    steps = np.arange(0, 1001, 10.0)
    values = 0.02 + 0.02 * sigmoid(steps / 1000, 0.5, 0.1)
    assert find_change(steps, values, direction="rise").found
    change = find_change(steps, values, direction="rise", min_size=0.05)
    assert not change.found
    assert change.reason.endswith("its size is under min_size, 0.05")


# Each clause says what it measured


def refusal(values: np.ndarray, direction: str = "rise") -> str:
    change = find_change(np.arange(len(values)), values, direction=direction)
    assert not change.found
    assert (change.step, change.onset, change.end, change.width, change.size) == (None,) * 5
    return change.reason


def test_each_clause_refuses_in_its_own_words():
    n = np.arange(100.0)
    rng = np.random.default_rng(SEED)

    def bent(at: list[float], to: list[float]) -> np.ndarray:
        return np.interp(n, at, to)

    assert "middle of the best three segments does not fall" in refusal(
        bent([40, 50], [0, 1]), "fall"
    )
    assert "2 times as fast as beside it, under 3" in refusal(
        bent([0, 40, 60, 99], [0, 40, 80, 119])
    )
    assert "1 points lie before its onset" in refusal(bent([6, 20], [0, 1]))
    assert "and 2 after its end, under 3" in refusal(bent([80, 97], [0, 1]))
    small = bent([0, 40, 41, 99], [0, -40, -39, -98])
    assert "of the range, under 0.3" in refusal(small)
    wandering = (n >= 50) + 0.5 * np.sin(n / 3)
    assert "times the noise, under 6" in refusal(wandering)
    # A fall right from the turn at point 8 which only slows down; the noise hides the turn's shape.
    decay = np.where(n < 8, n / 8, np.exp(-(n - 8) / 25)) + 0.08 * rng.standard_normal(100)
    assert "only slows down or only speeds up leaves no more than" in refusal(decay, "fall")
    assert refusal(np.full(100, 0.3)) == "the values are constant at 0.3"


@pytest.mark.parametrize("bend", [1.0, -1.0])
def test_best_bent_curve_agrees_with_trying_every_set_of_bends(bend):
    for seed in range(20):
        rng = np.random.default_rng([SEED, seed])
        u = np.sort(rng.uniform(0, 1, 9))
        v = rng.standard_normal(9) + bend * rng.uniform(0, 20) * u**2
        sums = []
        for n_bends in range(8):
            for places in itertools.combinations(range(1, 8), n_bends):
                bends = [bend * np.maximum(u - u[place], 0) for place in places]
                columns = np.column_stack([np.ones(9), u, *bends])
                weights = np.linalg.lstsq(columns, v, rcond=None)[0]
                if (weights[2:] >= 0).all():
                    sums.append(((v - columns @ weights) ** 2).sum())
        # The solver stops at a gain of 1e-10 of the sum.
        assert _bent_rss(u, v, bend, limit=0.0) == pytest.approx(min(sums), rel=1e-7)


def test_too_few_points_is_an_answer():
    steps = np.arange(11)
    change = find_change(steps, steps >= 6, direction="rise")
    assert change == Change(False, "only 11 points after the 0 left out; the rule needs 12")
    assert not find_change([], [], direction="rise").found
    steps = np.arange(12)
    assert find_change(steps, steps >= 6, direction="rise").found


def test_the_rule_is_told_with_its_constants():
    for constant in (
        "5% of the points",
        "at least 3 times",
        "at least 0.3",
        "least 6 times",
        "1.5",
    ):
        assert constant in RULE


# Properties


def example(name: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(SEED)
    steps = np.arange(0, 3001, 30.0)
    t = steps / 3000
    curves = {
        "sigmoid": sigmoid(t, 0.4, 0.15) + 0.03 * rng.standard_normal(len(t)),
        "symmetric": sigmoid(t, 0.525, 0.2),  # about the middle of the kept points
        "step": (t > 0.6).astype(float),
        "decay": -np.exp(-5 * t) + 0.03 * rng.standard_normal(len(t)),
        "white": rng.standard_normal(len(t)),
    }
    return steps, curves[name]


NAMES = ["sigmoid", "symmetric", "step", "decay", "white"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("scale", "shift"), [(3.7, 0.0), (1e-6, -2.0), (1e7, 1e8), (1.0, -41.3)])
def test_units_of_the_values_do_not_matter(name, scale, shift):
    steps, values = example(name)
    one = find_change(steps, values, direction="rise")
    other = find_change(steps, shift + scale * values, direction="rise")
    assert (one.found, one.step, one.onset, one.end) == (
        other.found,
        other.step,
        other.onset,
        other.end,
    )
    # Rounding of a shift 1e6 times the values' scale leaves about 1e-9 of them.
    assert other.share == pytest.approx(one.share, rel=1e-6)
    if one.found:
        assert other.size == pytest.approx(scale * one.size, rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("scale", "shift"), [(1e-4, 0.0), (512.0 * 7, 1e6), (1.0, -500.0)])
def test_units_of_the_steps_do_not_matter(name, scale, shift):
    steps, values = example(name)
    one = find_change(steps, values, direction="rise")
    other = find_change(shift + scale * steps, values, direction="rise")
    assert one.found == other.found
    assert other.slopes == pytest.approx([slope / scale for slope in one.slopes], rel=1e-6)
    if one.found:
        assert other.step == pytest.approx(shift + scale * one.step)
        assert other.width == pytest.approx(scale * one.width)


@pytest.mark.parametrize("name", NAMES)
def test_a_curve_upside_down_is_its_mirror(name):
    steps, values = example(name)
    up, down = (find_change(steps, s * values, direction=d) for s, d in ((1, "rise"), (-1, "fall")))
    assert (up.found, up.step, up.width) == (down.found, down.step, down.width)
    assert (up.share, up.signal, up.misfit) == (down.share, down.signal, down.misfit)
    assert up.slopes == tuple(-slope for slope in down.slopes)


def test_same_curve_same_answer_and_arguments_untouched():
    steps, values = example("sigmoid")
    before = values.copy()
    one = find_change(steps, values, direction="rise")
    assert one == find_change(list(steps), list(values), direction="rise")
    assert (values == before).all()
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.step = 0.0


# Over seeds


def test_summary_over_seeds():
    steps = np.arange(0, 1001, 50)
    changes = [find_change(steps, steps >= at, direction="rise") for at in (400, 500, 450)]
    changes.append(find_change(steps, 0.0 * steps, direction="rise"))
    summary = summarize_changes(changes)
    assert (summary.n_found, summary.n_curves) == (3, 4)
    assert (summary.step.mean, summary.step.low, summary.step.high) == (425, 375, 475)
    assert summary.step.n == 3
    assert summary.step.std_error == pytest.approx(50 / np.sqrt(3))
    assert (summary.onset.mean, summary.end.mean, summary.width.mean) == (400, 450, 50)
    assert summary.size.mean == pytest.approx(1)
    assert summarize_changes(changes[:1]).step.std_error is None
    nothing = summarize_changes(changes[3:])
    assert (nothing.n_found, nothing.n_curves, nothing.step, nothing.size) == (0, 1, None, None)


def test_summary_of_nothing_is_refused():
    with pytest.raises(AnalysisError, match=r"^no changes to summarize: give one Change per seed$"):
        summarize_changes([])


# Refusals


@pytest.mark.parametrize(
    ("steps", "values", "message"),
    [
        ([0, 1, 2], [0, 1], r"^3 steps but 2 values; give one value per step$"),
        ([0, 1, 1], [0, 1, 2], r"^steps must increase; steps\[1:3\] is 1, 1$"),
        ([0, 2, 1], [0, 1, 2], r"^steps must increase; steps\[1:3\] is 2, 1$"),
        ([0, 1, 2], [0, np.nan, 2], r"^values\[1\] is nan; values must be finite$"),
        ([0, 1, np.inf], [0, 1, 2], r"^steps\[2\] is inf; steps must be finite$"),
        (
            np.zeros((1, 2)),
            np.zeros((1, 2)),
            r"^steps \(1, 2\) and values \(1, 2\) must have one axis each$",
        ),
        ([0, 1, 1e10], [0, 1, 2], r"^the closest steps are 1 apart in a run of 1e\+10, too near"),
    ],
)
def test_bad_curves_are_refused(steps, values, message):
    with pytest.raises(AnalysisError, match=message):
        find_change(steps, values, direction="rise")


def test_bad_options_are_refused():
    steps = np.arange(20)
    # Unwrapped, as users have it: the tests' own type checks would speak first.
    with pytest.raises(AnalysisError, match=r"^direction is 'up'; it must be 'rise' or 'fall'$"):
        inspect.unwrap(find_change)(steps, steps, direction="up")
    for size in (-1.0, float("nan")):
        with pytest.raises(AnalysisError, match=f"^min_size is {size}; it must be a finite number"):
            find_change(steps, steps, direction="rise", min_size=size)
