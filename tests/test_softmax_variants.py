"""Softmax with a further term a head: every path and statistic against loops in float64."""

import math

import pytest
import torch
from attention_cases import KINDS, Case, LargestTensor, case
from softmax_cases import (
    FLOAT32,
    densely,
    read,
    some_sink,
    values_for,
    written_out,
)
from tiny_models import error

from interp.models.attention import (
    attention_pattern,
    fused_attention,
)
from interp.models.masks import AttentionMask
from interp.models.patterns import Pattern, QueryKeys, SinkQueryKeys
from interp.models.sink_attention import sink_attention

# --- known answers --------------------------------------------------------------------------------


@pytest.mark.parametrize("graded", [False, True])
def test_equal_scores_and_a_logit_of_zero_share_evenly(graded):
    q = torch.zeros(1, 3, 1, 8)
    v = torch.tensor([6.0, 12.0, 24.0]).reshape(1, 3, 1, 1)
    with torch.set_grad_enabled(graded):
        z, _ = sink_attention(q, q, v, torch.zeros(1), scale=1.0, mask=AttentionMask())
    # One of 2, 2 of 3 and 3 of 4 shares are those of keys.
    assert error(z.flatten(), torch.tensor([3.0, 6.0, 10.5])) < 1e-6


def test_a_logit_of_ln_3_beside_one_key_of_score_zero_takes_three_quarters():
    scores = torch.zeros(1, 2, 1, 1)
    pattern = attention_pattern(scores, torch.tensor([math.log(3.0), -math.inf]))
    assert error(pattern.flatten(), torch.tensor([0.25, 1.0])) < 1e-7


# --- the functions --------------------------------------------------------------------------------


@pytest.mark.parametrize("n_key_value_heads", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_both_paths_are_the_loops_under_every_mask(kind, n_key_value_heads):
    own, sink = case(kind, n_key_value_heads), some_sink()
    v = values_for(own)
    wanted = written_out(own, sink)
    pattern, z = densely(own, v, sink)
    assert error(pattern, wanted) < FLOAT32
    assert error(z, read(wanted, v)) < FLOAT32
    for graded in (False, True):
        with torch.set_grad_enabled(graded):
            fused, _ = sink_attention(own.q, own.k, v, sink, **own.how)
        assert error(fused, read(wanted, v)) < FLOAT32, graded


@pytest.mark.parametrize("d_v", [3, 6, 11])
@pytest.mark.parametrize("padded", [False, True])
def test_one_query_and_values_of_any_width_are_the_loops(padded, d_v):
    own, sink = case("left-padded" if padded else "causal"), some_sink()
    own = Case(own.q[:, -1:], own.k, own.mask)
    v = values_for(own, d_v=d_v)
    wanted = read(written_out(own, sink), v)
    for graded in (False, True):
        with torch.set_grad_enabled(graded):
            fused, _ = sink_attention(own.q, own.k, v, sink, **own.how)
        assert error(fused, wanted) < FLOAT32, graded


@pytest.mark.parametrize("n_key_value_heads", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_the_fused_path_are_those_of_the_dense_one(kind, n_key_value_heads):
    own = case(kind, n_key_value_heads, dtype=torch.float64)
    leaves = [own.q, own.k, values_for(own), some_sink().double()]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    q, k, v, sink = leaves
    dense = densely(Case(q, k, own.mask, own.scale), v, sink)[1]
    fused, _ = sink_attention(q, k, v, sink, **own.how)
    assert error(fused, dense) < 1e-12
    back = torch.randn(dense.shape, generator=torch.Generator().manual_seed(8)).double()
    wanted = torch.autograd.grad((dense * back).sum(), leaves)
    made = torch.autograd.grad((fused * back).sum(), leaves)
    assert float(wanted[3].abs().min()) > 1e-3  # the logits matter
    for mine, theirs in zip(made, wanted, strict=True):
        assert error(mine, theirs) < 1e-12


@pytest.mark.parametrize("graded", [False, True])
def test_logits_and_scores_of_any_size_stay_finite(graded):
    own = case("left-padded", n_heads=4)
    own = Case(300 * own.q, own.k, own.mask)
    sink = torch.tensor([-1e4, 1e4, 0.0, -math.inf])
    v = values_for(own)
    with torch.set_grad_enabled(graded):
        fused, _ = sink_attention(own.q, own.k, v, sink[:3].repeat(2)[:4], **own.how)
        plain, _ = fused_attention(own.q, own.k, v, **own.how)
    assert bool(fused.isfinite().all())
    assert error(fused[:, :, [0, 3]], plain[:, :, [0, 3]]) < FLOAT32  # -1e4 takes nothing
    assert float(fused[:, :, 1].abs().max()) == 0.0  # 1e4 takes all
    # Scores reach thousands, of which float32 rounds a ten-thousandth; rows are nearly one key.
    assert error(densely(own, v, sink[:3].repeat(2)[:4])[1], fused) < 1e-3


def test_huge_logits_leave_finite_gradients():
    own = case("left-padded")
    for size in (-1e4, 1e4):
        leaves = [x.clone().requires_grad_() for x in (own.q, own.k, torch.full((4,), size))]
        z, _ = sink_attention(*leaves[:2], values_for(own), leaves[2], **own.how)
        for gradient in torch.autograd.grad(z.sum(), leaves):
            assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("graded", [False, True])
def test_a_query_without_keys_reads_zero(graded):
    own, sink = case("all padding"), some_sink()
    v = values_for(own)
    with torch.set_grad_enabled(graded):
        z, _ = sink_attention(own.q, own.k, v, sink, **own.how)
    assert float(z[1].abs().max()) == 0.0
    assert float(densely(own, v, sink)[0][1].abs().max()) == 0.0


@pytest.mark.parametrize("graded", [False, True])
def test_nothing_of_the_size_of_a_pattern_is_made(graded):
    n_pos = 1024
    own = case("left-padded", n_pos=n_pos, batch=1, n_heads=4)
    v = values_for(own)
    with LargestTensor() as largest, torch.set_grad_enabled(graded):
        sink_attention(own.q, own.k, v, some_sink(), **own.how)
    assert 4 * n_pos < largest.numbers < n_pos**2 // 8


# --- statistics without the pattern ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["causal", "left-padded", "all padding", "window"])
@torch.no_grad()
def test_statistics_are_those_of_the_pattern_that_is_written_out(kind, dtype):
    own, sink = case(kind, dtype=dtype), some_sink()
    _, lse = fused_attention(own.q, own.k, values_for(own), **own.how)
    known = SinkQueryKeys(QueryKeys(own.q, own.k, own.scale, own.mask, lse), sink)
    wanted = Pattern(torch.from_numpy(written_out(own, sink)))
    keys = torch.randint(7, (3, 7), generator=torch.Generator().manual_seed(2))
    allowed = own.mask.allows(keys, 7)
    weights = torch.rand(3, 7)
    columns = torch.randn(3, 7, 2)
    places = torch.arange(7).expand(3, 7)
    pairs = {
        "prob_at": (known.prob_at(keys), wanted.prob_at(keys).where(allowed, 0.0)),
        "expected": (known.expected(columns), wanted.expected(columns.double())),
        "entropy": (known.entropy(), wanted.entropy()),
        "place": (known.place_and_mass(places), wanted.place_and_mass(places)),
        "received": (known.received(weights), wanted.received(weights.double())),
        "strongest": (known.strongest()[0], wanted.strongest()[0]),
        "kept": (known.kept, wanted.pattern.sum(dim=-1)),
    }
    for name, (mine, theirs) in pairs.items():
        assert error(mine, theirs) < FLOAT32, name
    assert torch.equal(known.strongest()[1], wanted.strongest()[1])


@torch.no_grad()
def test_half_precision_costs_the_share_of_long_rows_no_digits():
    own, sink = case(n_pos=512, d_head=64, batch=1, dtype=torch.bfloat16), some_sink()
    own = Case(own.q, own.k, own.mask, scale=0.125)
    _, lse = fused_attention(own.q, own.k, own.k, **own.how)
    known = SinkQueryKeys(QueryKeys(own.q, own.k, own.scale, own.mask, lse), sink)
    precise = Case(own.q.double(), own.k.double(), own.mask, own.scale)
    pattern, _ = densely(precise, precise.k, sink.double())
    # The operator's own log-sum-exp is off by 5e-5 here, which shares would be too.
    assert error(known.kept, pattern.sum(dim=-1)) < 2e-6


def test_a_sink_that_takes_all_leaves_no_strongest_key():
    own = case()
    known = SinkQueryKeys(QueryKeys(own.q, own.k, own.scale, own.mask), torch.full((4,), 1e4))
    top, place = known.strongest()
    assert (float(top.max()), int(place.max())) == (0.0, -1)
    assert float(known.entropy().abs().max()) == 0.0
