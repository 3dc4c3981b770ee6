"""The attention of a layer as an analysis sees it: from queries and keys, or from a pattern."""

import math

import numpy as np
import pytest
import torch
from attention_cases import KINDS, Case, Defined, LargestTensor, case, some_keys
from tiny_models import error

from interp.errors import AnalysisError
from interp.models import attention
from interp.models.layer_attention import LayerAttention, uniform_attention
from interp.models.masks import AttentionMask
from interp.models.patterns import Pattern, QueryKeys, Weights

# A float32 sum of a few dozen products of order 1 errs by about 1e-6; ten times that is a fault.
FLOAT32 = 1e-5
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def query_keys(given: Case, known_lse: torch.Tensor | None = None) -> QueryKeys:
    return QueryKeys(given.q, given.k, given.scale, given.mask, known_lse)


def methods(weights: Weights, given: Case) -> dict[str, torch.Tensor]:
    """What every method gives; tiles are put together again."""
    batch, n_query, n_heads, _ = given.q.shape
    n_key = given.k.shape[1]
    whole = torch.zeros(batch, n_heads, n_query, n_key)
    for rows, keys, part in weights.rows():
        whole[:, :, rows, keys] = part.float()
    generator = torch.Generator().manual_seed(5)
    top, place = weights.strongest()
    return {
        "prob_at": weights.prob_at(some_keys(given)),
        "expected": weights.expected(torch.randn(batch, n_key, 2, generator=generator)),
        "each": weights.expected(torch.randn(batch, n_key, n_heads, 2, generator=generator)),
        "entropy": weights.entropy(),
        "received": weights.received(torch.rand(batch, n_query, generator=generator)),
        "strongest": top,
        "place": place,
        "rows": whole,
    }


def defined_methods(given: Case) -> dict[str, np.ndarray]:
    defined = Defined.of(given)
    batch, n_query, n_heads, _ = given.q.shape
    n_key = given.k.shape[1]
    generator = torch.Generator().manual_seed(5)
    top, place = defined.strongest()
    return {
        "prob_at": defined.prob_at(some_keys(given).numpy()),
        "expected": defined.expected(
            torch.randn(batch, n_key, 2, generator=generator).double().numpy()
        ),
        "each": defined.expected(
            torch.randn(batch, n_key, n_heads, 2, generator=generator).double().numpy()
        ),
        "entropy": defined.entropy(),
        "received": defined.received(
            torch.rand(batch, n_query, generator=generator).double().numpy()
        ),
        "strongest": top,
        "place": place,
        "rows": defined.pattern,
    }


def largest_error(found: dict[str, torch.Tensor], wanted: dict[str, np.ndarray]) -> float:
    """Of any method's numbers; NaN where one of them is."""
    assert found
    return float(np.max([float(error(value, wanted[name])) for name, value in found.items()]))


# --- weights, whichever way they are known --------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_queries_and_keys_and_the_pattern_they_make_tell_the_same(kind):
    given = case(kind)
    wanted = defined_methods(given)
    lse = attention.row_lse(given.q, given.k, **given.how)
    assert largest_error(methods(query_keys(given), given), wanted) < FLOAT32
    assert largest_error(methods(query_keys(given, lse), given), wanted) < FLOAT32
    pattern = torch.from_numpy(Defined.of(given).pattern).float()
    assert largest_error(methods(Pattern(pattern), given), wanted) < FLOAT32


@HALF
def test_half_precision_is_read_as_exactly_as_it_is_stored(dtype):
    given = case("left-padded", dtype=dtype)
    # As a pass in half precision leaves it: rounded to a few digits.
    rounded = attention.row_lse(given.q, given.k, **given.how).to(dtype).float()
    assert (
        largest_error(methods(query_keys(given, rounded), given), defined_methods(given)) < FLOAT32
    )
    stored = torch.from_numpy(Defined.of(given).pattern).to(dtype)
    found = methods(Pattern(stored), given)
    assert torch.equal(found["rows"], stored.float())
    assert all(value.dtype in (torch.float32, torch.long) for value in found.values())
    assert error(found["received"], methods(Pattern(stored.float()), given)["received"]) == 0


@pytest.mark.parametrize("kind", ["causal", "left-padded", "window", "bidirectional"])
def test_a_large_vector_common_to_all_keys_costs_no_digits(kind):
    given = case(kind, n_pos=20)
    k = (given.k * 2**10).round() / 2**10  # 512 leaves all of these digits room
    wanted = defined_methods(Case(given.q, k, given.mask, given.scale))
    far = Case(given.q, k + 512.0, given.mask, given.scale)
    lse = attention.row_lse(far.q, far.k, **far.how)
    for known in (None, lse):
        assert largest_error(methods(query_keys(far, known), given), wanted) < FLOAT32


def test_a_known_log_sum_exp_is_used_where_it_is_precise_and_only_there():
    given = case()
    keys = some_keys(given)
    lse = attention.row_lse(given.q, given.k, **given.how)
    wanted = query_keys(given).prob_at(keys)
    # One that is off by ln 2 halves every weight.
    halved = query_keys(given, lse + math.log(2)).prob_at(keys)
    assert error(halved, wanted / 2) < FLOAT32
    assert error(query_keys(given, lse + 100).prob_at(keys), wanted) < FLOAT32


def test_entropy_and_log_sum_exp_are_one_call_and_a_known_one_saves_it(monkeypatch):
    calls = []
    given = case()
    lse = attention.row_lse(given.q, given.k, **given.how)
    once = attention.attention_with_lse

    def counted(*args, **kwargs):
        calls.append(args)
        return once(*args, **kwargs)

    monkeypatch.setattr(attention, "attention_with_lse", counted)
    for known, wanted in ((None, 1), (lse, 0)):
        weights = query_keys(given, known)
        calls.clear()
        for _ in range(2):
            weights.prob_at(some_keys(given))
            weights.received(torch.ones(3, 7))
        assert len(calls) == wanted
        weights.entropy()
        weights.entropy()
        assert len(calls) == 1


def test_no_method_changes_a_cached_pattern_and_any_order_gives_the_same():
    given = case("left-padded")
    cached = torch.from_numpy(Defined.of(given).pattern).float()
    before = cached.clone()
    weights = Pattern(cached)
    seen = methods(weights, given)
    again = methods(weights, given)
    backwards = {
        "strongest": weights.strongest()[0],
        "received": weights.received(torch.ones(3, 7)),
        "entropy": weights.entropy(),
        "prob_at": weights.prob_at(some_keys(given)),
    }
    assert torch.equal(cached, before)
    for name, value in seen.items():
        assert torch.equal(again[name], value), name
    for name in ("strongest", "entropy", "prob_at"):
        assert torch.equal(backwards[name], seen[name]), name
    layer = LayerAttention(0, weights, given.mask.key_mask)
    assert layer.entropy is layer.entropy
    assert layer.distance is layer.distance
    assert layer.strongest is layer.strongest
    assert torch.equal(cached, before)


def test_tiles_of_a_pattern_are_copies_only_where_its_digits_need_them(monkeypatch):
    monkeypatch.setattr("interp.models.patterns.TILE_NUMBERS", 1)
    given = case()
    pattern = torch.from_numpy(Defined.of(given).pattern)
    rows = list(Pattern(pattern).rows())
    assert [place for place, _, _ in rows] == [slice(i, i + 1) for i in range(7)]
    assert torch.equal(torch.cat([part for _, _, part in rows], dim=2), pattern)
    assert largest_error(methods(Pattern(pattern), given), defined_methods(given)) < FLOAT32


def test_the_strongest_key_of_a_pattern_is_the_first_of_equals():
    pattern = torch.tensor([[[[0.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.2, 0.4, 0.4]]]])
    top, place = Pattern(pattern).strongest()
    assert place.tolist() == [[[-1, 0, 1]]]
    assert torch.equal(top, torch.tensor([[[0.0, 0.5, 0.4]]]))


def test_heads_differ_and_keep_their_axis():
    given = case(n_heads=4)
    for name, value in methods(query_keys(given), given).items():
        assert value.shape[:2] == (3, 4), name
        if name != "place":
            assert (value[:, 0] - value[:, 1]).abs().max() > 1e-3, name


# --- the layer ------------------------------------------------------------------------------------


def left_padded() -> torch.Tensor:
    return torch.tensor([[True] * 5, [False, False, True, True, True], [False] * 5])


def test_places_count_real_tokens_and_keys_are_those_within_reach():
    layer = LayerAttention(3, Pattern(torch.zeros(3, 2, 5, 5)), left_padded())
    assert layer.layer == 3
    assert layer.n_heads == 2
    assert layer.places.tolist() == [[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2], [-1] * 5]
    assert layer.first[:2].tolist() == [[0], [2]]
    assert layer.n_keys.tolist() == [[1, 2, 3, 4, 5], [0, 0, 1, 2, 3], [0] * 5]
    windowed = LayerAttention(0, Pattern(torch.zeros(3, 2, 5, 5)), left_padded(), window=2)
    assert windowed.n_keys.tolist() == [[1, 2, 2, 2, 2], [0, 0, 1, 2, 2], [0] * 5]
    both_ways = LayerAttention(0, Pattern(torch.zeros(3, 2, 5, 5)), left_padded(), causal=False)
    assert both_ways.n_keys.tolist() == [[5] * 5, [0, 0, 3, 3, 3], [0] * 5]


def test_right_padding_has_no_keys_of_its_own():
    mask = torch.tensor([[True, True, False]])
    layer = LayerAttention(0, Pattern(torch.zeros(1, 1, 3, 3)), mask)
    assert layer.places.tolist() == [[0, 1, -1]]
    assert layer.n_keys.tolist() == [[1, 2, 0]]


def test_a_mean_over_no_query_is_not_a_number_and_what_is_not_chosen_does_not_count():
    layer = LayerAttention(0, Pattern(torch.zeros(2, 1, 3, 3)), torch.ones(2, 3, dtype=torch.bool))
    values = torch.tensor([[[1.0, 2.0, math.nan]], [[1.0, 2.0, 3.0]]])
    chosen = torch.tensor([[True, True, False], [False, False, False]])
    mean = layer.mean(values, chosen)
    assert mean[0, 0] == 1.5
    assert mean[1, 0].isnan()


@pytest.mark.parametrize("kind", ["causal", "left-padded", "right-padded", "window"])
@pytest.mark.parametrize("causal", [True, False])
def test_distance_is_counted_in_real_tokens(kind, causal):
    plain = case(kind)
    given = Case(
        plain.q, plain.k, AttentionMask(causal, plain.mask.key_mask, plain.mask.window), plain.scale
    )
    real = given.mask.key_mask
    real = torch.ones(3, 7, dtype=torch.bool) if real is None else real
    pattern = Defined.of(given).pattern
    for weights in (query_keys(given), Pattern(torch.from_numpy(pattern).float())):
        distance = LayerAttention(0, weights, real, causal=causal).distance
        for b in range(3):
            place = {int(j): n for n, j in enumerate(torch.nonzero(real[b]))}
            for h, i in np.ndindex(4, 7):
                if i in place:
                    wanted = sum(pattern[b, h, i, j] * abs(place[i] - place[j]) for j in place)
                    assert abs(float(distance[b, h, i]) - wanted) < FLOAT32, (b, h, i)


def test_a_head_whose_pattern_is_zero_looks_at_no_distance():
    real = torch.ones(1, 6, dtype=torch.bool)
    pattern = torch.stack((torch.zeros(6, 6), torch.eye(6)))[None]
    assert not LayerAttention(0, Pattern(pattern), real).distance.any()


def test_a_previous_token_head_far_into_a_context_keeps_its_distance_of_one():
    n_pos = 8192
    q, k = torch.zeros(1, n_pos, 1, 4), torch.zeros(1, n_pos, 1, 4)
    how = AttentionMask(window=2)
    real = torch.ones(1, n_pos, dtype=torch.bool)
    distance = LayerAttention(0, QueryKeys(q, k, 1.0, how), real, window=2).distance
    assert error(distance[:, :, 1:], torch.full((1, 1, n_pos - 1), 0.5)) < 1e-3


@pytest.mark.parametrize("n_key_value_heads", [1, 2, 4])
def test_norms_of_values_and_outputs_are_those_of_what_is_written(n_key_value_heads):
    v = torch.randn(2, 5, n_key_value_heads, 3)
    z, W_O = torch.randn(2, 5, 4, 3), torch.randn(4, 3, 8)
    real = torch.ones(2, 5, dtype=torch.bool)
    layer = LayerAttention(0, Pattern(torch.zeros(2, 4, 5, 5)), real, v=v, z=z, W_O=W_O)
    assert layer.has_values
    for b, i, h in np.ndindex(2, 5, 4):
        value, read = v[b, i, h * n_key_value_heads // 4].double(), z[b, i, h].double()
        for found, x in ((layer.value_norms(), value), (layer.output_norms(), read)):
            assert abs(float(found[b, i, h]) - float((x @ W_O[h].double()).norm())) < FLOAT32


def test_without_values_norms_are_refused():
    layer = uniform_attention(torch.ones(1, 3, dtype=torch.bool))
    assert not layer.has_values
    for norms in (layer.value_norms, layer.output_norms):
        with pytest.raises(AnalysisError) as caught:
            norms()
        assert str(caught.value) == "only attention weights are known here, and no values"


# --- the uniform head -----------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_a_uniform_head_gives_every_key_in_reach_the_same(causal, window):
    real = left_padded()
    layer = uniform_attention(real, causal=causal, window=window)
    assert layer.n_heads == 1
    allowed = AttentionMask(causal, real, window).allowed(5, 5, torch.device("cpu"))[:, 0]
    n_keys = allowed.sum(dim=-1)
    share = (1 / n_keys.clamp(min=1)).where(n_keys > 0, 0.0)
    for j in range(5):
        found = layer.prob_at(torch.full((3, 5), j))[:, 0]
        assert error(found, share.where(allowed[:, :, j], 0.0)) < FLOAT32
    assert error(layer.entropy[:, 0], n_keys.clamp(min=1).log()) < FLOAT32
    received = layer.received(real.float())[:, 0]
    wanted = (share * real)[:, :, None].where(allowed, 0.0).sum(dim=1)
    assert error(received, wanted) < FLOAT32


def test_a_uniform_head_of_a_long_context_needs_no_square():
    n_pos = 4096
    layer = uniform_attention(torch.ones(1, n_pos, dtype=torch.bool))
    with LargestTensor() as largest:
        layer.prob_at(torch.zeros(1, n_pos, dtype=torch.long))
        _ = layer.entropy, layer.distance
        layer.received(torch.ones(1, n_pos))
    assert largest.numbers <= 16 * n_pos
