"""Statistics of attention without the pattern, against known answers and their definitions."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from attention_cases import KINDS, Case, Defined, LargestTensor, case, some_keys
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import error
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from interp.models import attention, operators, tiles
from interp.models.attention import (
    attention_with_lse,
    centred,
    entropy,
    expected,
    prob_at,
    received,
    row_lse,
    row_summary,
    strongest,
)
from interp.models.masks import AttentionMask
from interp.models.tiles import row_tiles

# A float32 sum of a few dozen products of order 1 errs by about 1e-6; ten times that is a fault.
FLOAT32 = 1e-5
EVERY_MASK = pytest.mark.parametrize("kind", KINDS)
EVERY_GROUPING = pytest.mark.parametrize("n_key_value_heads", [1, 2, 4], ids=["mqa", "gqa", "mha"])
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def uniform(n_pos: int, *, batch: int = 1, n_heads: int = 2) -> Case:
    q, k = torch.zeros(batch, n_pos, n_heads, 4), torch.randn(batch, n_pos, 1, 4)
    return Case(q, k, AttentionMask())


def columns(shape: tuple[int, ...], *, seed: int = 2) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def query_weights(given: Case, *, seed: int = 3) -> Tensor:
    """Weights of queries, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(given.q.shape[:2], generator=generator)
    return weights.where(weights > 0.2, 0.0)


def every_statistic(given: Case) -> Iterator[tuple[str, Tensor | np.ndarray, np.ndarray]]:
    """Name, what interp makes of the case, and what the definition makes of it."""
    q, k, how = given.q, given.k, given.how
    defined = Defined.of(given)
    n_key, n_heads = k.shape[1], q.shape[2]
    lse = row_lse(q, k, **how)
    yield "row_lse", lse, defined.lse
    keys = some_keys(given)
    yield "prob_at", prob_at(q, k, lse, keys, **how), defined.prob_at(keys.numpy())
    for n_values in (1, q.shape[3], q.shape[3] + 3):
        values = columns((len(q), n_key, n_values))
        found = expected(q, k, values, **how)
        yield f"expected of {n_values}", found, defined.expected(values.double().numpy())
        values = columns((len(q), n_key, n_heads, n_values))
        found = expected(q, k, values, **how)
        yield f"expected of {n_values} each", found, defined.expected(values.double().numpy())
    yield "entropy", entropy(q, k, **how), defined.entropy()
    weights = query_weights(given)
    got = received(q, k, lse, weights, **how)
    yield "received", got, defined.received(weights.double().numpy())
    top, place = strongest(q, k, **how)
    defined_top, defined_place = defined.strongest()
    yield "strongest", top, defined_top
    yield "place of the strongest", place, defined_place
    values = columns((len(q), n_key, k.shape[2], 3)).to(q.dtype)
    z, logs = attention_with_lse(q, k, values, **how)
    group = n_heads // k.shape[2]
    wanted = defined.expected(values.repeat_interleave(group, 2).double().numpy())
    yield "what is read", z.transpose(1, 2), wanted
    yield "lse of narrow values", logs, defined.lse


# --- known answers --------------------------------------------------------------------------------


def test_a_uniform_causal_row_has_the_entropy_of_the_number_of_its_keys():
    given = uniform(300)
    wanted = torch.tensor([math.log(i + 1) for i in range(300)], dtype=torch.float64)
    assert error(entropy(given.q, given.k, **given.how), wanted.expand(1, 2, -1)) < 1e-6 * 6


def test_a_uniform_head_gives_each_key_the_harmonic_tail():
    given = uniform(40)
    lse = row_lse(given.q, given.k, **given.how)
    got = received(given.q, given.k, lse, torch.ones(1, 40), **given.how)
    wanted = torch.tensor([math.fsum(1 / (i + 1) for i in range(j, 40)) for j in range(40)])
    assert error(got, wanted.expand(1, 2, -1)) < FLOAT32


def test_a_uniform_head_looks_back_half_its_context_on_average():
    given = uniform(40)
    positions = torch.arange(40.0)[None, :, None]
    mean = expected(given.q, given.k, positions, **given.how)[..., 0]
    assert error(mean, (torch.arange(40.0) / 2).expand(1, 2, -1)) < FLOAT32


def test_a_pure_sink_puts_everything_on_its_key_and_has_no_entropy():
    q, k = torch.full((1, 9, 1, 2), 20.0), torch.zeros(1, 9, 1, 2)
    k[:, 0] = 20.0
    how = {"scale": 1.0, "mask": AttentionMask()}
    lse = row_lse(q, k, **how)
    first = torch.zeros(1, 9, dtype=torch.long)
    assert torch.equal(prob_at(q, k, lse, first, **how), torch.ones(1, 1, 9))
    assert not entropy(q, k, **how).any()
    top, place = strongest(q, k, **how)
    assert torch.equal(top, torch.ones(1, 1, 9))
    assert not place.any()


def test_the_first_of_equal_keys_is_the_strongest_across_tiles(monkeypatch):
    for numbers in (tiles.TILE_NUMBERS, 1):
        monkeypatch.setattr(tiles, "TILE_NUMBERS", numbers)
        monkeypatch.setattr(tiles, "MIN_TILE_ROWS", 2)
        given = uniform(11)
        k = torch.zeros_like(given.k)
        k[:, [4, 7]] = 1.0  # a tie from the seventh query on
        top, place = strongest(torch.ones_like(given.q), k, **given.how)
        assert place[0, 0].tolist() == [0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4], numbers
        assert (top > 0).all()


def test_scores_far_below_any_mask_constant_still_hide_the_future():
    # -1000 * 200 = -2e5 lies below the constants -1e4 and -1e5 that people mask with.
    given = Case(
        torch.full((1, 4, 1, 1), -1000.0), torch.full((1, 4, 1, 1), 200.0), AttentionMask(), 1.0
    )
    q, k, how = given.q, given.k, given.how
    rows = torch.arange(1.0, 5.0)
    lse = row_lse(q, centred(k, given.mask), **how)
    for offset in range(-3, 4):
        keys = torch.arange(4)[None] + offset
        keys = keys.where((keys >= 0) & (keys < 4), -1)
        wanted = (1 / rows).where((keys >= 0) & (offset <= 0), 0.0)
        found = prob_at(q, centred(k, given.mask), lse, keys, **how)
        assert error(found, wanted[None]) < FLOAT32
    assert error(entropy(q, k, **how), rows.log()[None, None]) < FLOAT32
    assert error(strongest(q, k, **how)[0], 1 / rows[None, None]) < FLOAT32
    lse = row_lse(q, k, **how)
    assert error(lse, -2e5 + rows.log()[None, None]) < 1e-6  # relative: 0.02 of 2e5


# --- the definitions ------------------------------------------------------------------------------


@EVERY_GROUPING
@EVERY_MASK
def test_every_statistic_is_its_definition_under_every_mask(kind, n_key_value_heads):
    for name, actual, wanted in every_statistic(case(kind, n_key_value_heads)):
        assert error(actual, wanted) < FLOAT32, name


@EVERY_MASK
def test_every_statistic_is_its_definition_in_small_tiles(kind, monkeypatch):
    monkeypatch.setattr(tiles, "TILE_NUMBERS", 1)
    monkeypatch.setattr(tiles, "MIN_TILE_ROWS", 2)
    monkeypatch.setattr(attention, "operator_for", lambda *args, **kwargs: None)
    for name, actual, wanted in every_statistic(case(kind)):
        assert error(actual, wanted) < FLOAT32, name


@pytest.mark.parametrize("kind", ["causal", "right-padded", "window", "bidirectional"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_of_any_dtype_are_those_of_the_rounded_inputs(dtype, kind):
    given = case(kind, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    bound = 1e-12 if dtype == torch.float64 else FLOAT32
    for name, actual, wanted in every_statistic(given):
        if name != "place of the strongest":
            assert actual.dtype == wide, name
        assert error(actual, wanted) < bound, name


@pytest.mark.parametrize("kind", ["causal", "left-padded", "window", "bidirectional"])
@pytest.mark.parametrize(("n_pos", "d_head"), [(1, 6), (1, 1), (2, 1), (9, 1)])
def test_one_place_and_one_dimension_are_no_special_cases(kind, n_pos, d_head):
    for name, actual, wanted in every_statistic(case(kind, n_pos=n_pos, d_head=d_head)):
        assert error(actual, wanted) < FLOAT32, name


@pytest.mark.parametrize("kind", ["causal", "left-padded", "window"])
def test_a_large_vector_common_to_all_keys_costs_no_digits_once_keys_are_centred(kind):
    given = case(kind, n_pos=20)
    # Exact in float32: keys are multiples of 2^-10 up to 4, and 512 leaves them room.
    k = (given.k * 2**10).round() / 2**10
    far = Case(given.q, k + 512.0, given.mask, given.scale)
    wanted = Defined.of(Case(given.q, k, given.mask, given.scale))
    near = centred(far.k, far.mask)
    lse = row_lse(far.q, near, **far.how)
    keys = some_keys(far)
    # Scores of some 2,000 have a float32 spacing of 1e-4: without centring this errs by more.
    assert error(prob_at(far.q, near, lse, keys, **far.how), wanted.prob_at(keys)) < FLOAT32
    assert error(entropy(far.q, far.k, **far.how), wanted.entropy()) < FLOAT32
    plain = row_lse(far.q, far.k, **far.how)
    assert error(prob_at(far.q, far.k, plain, keys, **far.how), wanted.prob_at(keys)) > FLOAT32


def test_centred_keys_have_no_mean_over_real_keys_and_ignore_padding():
    given = case("right-padded")
    k = given.k.clone()
    k[~given.mask.key_mask] = math.nan
    near = centred(k, given.mask)
    real = given.mask.key_mask[:, :, None, None]
    assert error(near.where(real, 0.0).sum(dim=1), torch.zeros(3, 2, 6)) < FLOAT32
    assert torch.equal(k[0], given.k[0])  # nothing was written into what was given


# --- properties -----------------------------------------------------------------------------------

SHAPES = st.tuples(
    st.sampled_from(KINDS),
    st.sampled_from([(1, 1), (2, 1), (3, 3), (6, 2)]),
    st.integers(1, 12),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(0, 10**6),
)


def drawn(shape: tuple) -> Case:
    kind, (n_heads, n_key_value_heads), n_pos, d_head, batch, seed = shape
    return case(
        kind, n_key_value_heads, n_heads=n_heads, n_pos=n_pos, d_head=d_head,
        batch=max(batch, 2) if kind == "all padding" else batch, seed=seed,
    )  # fmt: skip


@given(SHAPES)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_mass_is_kept_and_bounded(shape):
    given = drawn(shape)
    q, k, how = given.q, given.k, given.how
    has_keys = torch.from_numpy(given.allowed().any(axis=3))
    lse = row_lse(q, k, **how)
    assert torch.equal(lse > -math.inf, has_keys)
    mass = expected(q, k, torch.ones(*k.shape[:2], 1), **how)[..., 0]
    assert error(mass, has_keys.float()) < FLOAT32
    weights = query_weights(given)
    got = received(q, k, lse, weights, **how)
    assert (got >= 0).all()
    assert error(got.sum(-1), (weights[:, None] * has_keys).sum(-1)) < FLOAT32
    top, place = strongest(q, k, **how)
    assert torch.equal(place >= 0, has_keys)
    assert torch.equal(top > 0, has_keys)
    assert (top <= 1).all()
    spread = row_summary(q, k, q.new_zeros(len(q), k.shape[1], 0), **how)[1]
    n_keys = torch.from_numpy(given.allowed().sum(axis=3)).clamp(min=1)
    assert (spread >= 0).all()
    assert (spread <= n_keys.log() + FLOAT32).all()
    # -ln(largest weight) is the smallest of the Renyi entropies.
    assert (spread >= -top.where(has_keys, 1.0).log() - FLOAT32).all()


@given(SHAPES)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_the_tiles_are_the_rows_of_the_pattern_and_cover_each_query_once(shape):
    given = drawn(shape)
    defined = Defined.of(given)
    found = np.full(defined.scores.shape, -np.inf)
    seen = np.zeros(given.q.shape[1], dtype=int)
    for rows, keys, scores in row_tiles(given.q, given.k, **given.how):
        found[:, :, rows, keys] = scores.numpy()
        seen[rows] += 1
    assert (seen == 1).all()
    assert error(found, defined.scores) < FLOAT32


@given(SHAPES, st.integers(0, 10**6))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_attention_ignores_a_vector_added_to_all_keys(shape, seed):
    given = drawn(shape)
    common = torch.randn(given.k.shape[3], generator=torch.Generator().manual_seed(seed))
    moved = given.k + common
    for statistic in (entropy, lambda *args, **how: strongest(*args, **how)[0]):
        before, after = (
            statistic(given.q, given.k, **given.how),
            statistic(given.q, moved, **given.how),
        )
        assert error(after, before) < 5 * FLOAT32  # the keys themselves are rounded anew


def test_no_argument_is_changed():
    for kind in ("causal", "window", "left-padded"):
        given = case(kind)
        q, k = given.q.clone(), given.k.clone()
        weights = query_weights(given)
        for _ in every_statistic(given):
            pass
        lse = row_lse(q, k, **given.how)
        kept = lse.clone(), weights.clone()
        received(q, k, lse, weights, **given.how)
        prob_at(q, k, lse, some_keys(given), **given.how)
        assert torch.equal(given.q, q)
        assert torch.equal(given.k, k)
        assert torch.equal(lse, kept[0])
        assert torch.equal(weights, kept[1])


def test_weights_of_another_float_dtype_are_taken():
    given = case()
    lse = row_lse(given.q, given.k, **given.how)
    weights = query_weights(given)
    for kind in ("causal", "window"):
        given = case(kind)
        lse = row_lse(given.q, given.k, **given.how)
        wanted = received(given.q, given.k, lse, weights, **given.how)
        for dtype in (torch.float64, torch.bfloat16):
            found = received(given.q, given.k, lse, weights.to(dtype), **given.how)
            assert found.dtype == torch.float32
            assert error(found, wanted) < (0.01 if dtype == torch.bfloat16 else FLOAT32)


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["causal", "left-padded", "bidirectional"])
def test_nothing_of_the_size_of_a_pattern_is_made(kind):
    n_pos = 1024
    given = case(kind, n_heads=4, n_key_value_heads=2, n_pos=n_pos, d_head=8, batch=1)
    q, k, how = given.q, given.k, given.how
    operators.operator_for("cpu", torch.float32, biased=True)
    operators.operator_for("cpu", torch.float32, biased=False)
    with LargestTensor() as largest:
        lse = row_lse(q, k, **how)
        prob_at(q, k, lse, some_keys(given), **how)
        entropy(q, k, **how)
        expected(q, k, torch.ones(1, n_pos, 2), **how)
        expected(q, k, torch.ones(1, n_pos, 4, 2), **how)
        received(q, k, lse, torch.ones(1, n_pos), **how)
    # Queries, and the columns of heads of their own side by side: linear in the sequence.
    assert largest.numbers <= n_pos * 4 * 8 * 2


@pytest.mark.parametrize("kind", ["causal", "window", "custom shared"])
def test_tiles_stay_within_their_bound(kind, monkeypatch):
    monkeypatch.setattr(tiles, "TILE_NUMBERS", 2**15)
    n_pos, n_heads = 512, 4
    given = case(kind, n_heads=n_heads, n_pos=n_pos, d_head=8, batch=1)
    monkeypatch.setattr(attention, "operator_for", lambda *args, **kwargs: None)
    with LargestTensor() as largest:
        for _ in row_tiles(given.q, given.k, **given.how):
            pass
        if kind != "custom shared":  # which is n×n as it comes
            strongest(given.q, given.k, **given.how)
            attention_with_lse(given.q, given.k, given.k, **given.how)
    own = 0 if given.mask.custom is None else n_pos * n_pos
    assert largest.numbers <= max(tiles.MIN_TILE_ROWS * n_heads * n_pos, 2**15, own)


def test_a_window_bounds_the_keys_of_a_tile():
    given = case("window", n_pos=256, batch=1)
    for rows, keys, _ in row_tiles(given.q, given.k, **given.how):
        assert keys.stop == rows.stop
        assert keys.start == max(0, rows.start - 2)


def test_the_fused_operator_gets_grouped_keys_as_they_are():
    given = case("causal", 1, n_heads=16, n_pos=64, d_head=32, batch=1)
    heads_of_keys = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "flash_attention" in str(func):
                heads_of_keys.append(args[1].shape[1])
            return func(*args, **(kwargs or {}))

    with Calls():
        lse = row_lse(given.q, given.k, **given.how)
        entropy(given.q, given.k, **given.how)
        expected(given.q, given.k, torch.ones(1, 64, 2), **given.how)
        received(given.q, given.k, lse, torch.ones(1, 64), **given.how)
    # One call each, and one for every head of the group where keys and queries change places.
    assert heads_of_keys == [1] * (3 + 16)


def test_tiles_multiply_grouped_keys_as_they_are():
    """Few queries over many keys: keys repeated for every head would be the largest tensor."""
    n_heads, n_query, n_key, d_head = 16, 4, 512, 32
    q, k = torch.randn(1, n_query, n_heads, d_head), torch.randn(1, n_key, 1, d_head)
    how = {"scale": 1.0, "mask": AttentionMask()}
    with LargestTensor() as tiled:
        strongest(q, k, **how)
        attention_with_lse(q, k, k, **how)
    with LargestTensor() as dense:
        allowed = AttentionMask().allowed(n_query, n_key, q.device)
        attention.attention_scores(q, k, allowed, 1.0)
    assert dense.numbers == n_heads * n_key * d_head
    assert tiled.numbers == n_heads * n_query * n_key
