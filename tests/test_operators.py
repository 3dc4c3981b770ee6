"""Fused operators are used where they are right, and tiles where they are not."""

import math

import pytest
import torch
from attention_cases import KINDS, Defined, LargestTensor, case, some_keys
from tiny_models import error

from interp.models import operators
from interp.models.attention import (
    attention_with_lse,
    entropy,
    expected,
    prob_at,
    received,
    row_lse,
)
from interp.models.operators import flash_for_cpu, operator_for

# A float32 sum of a few dozen products of order 1 errs by about 1e-6; ten times that is a fault.
FLOAT32 = 1e-5


@pytest.fixture
def candidates(monkeypatch):
    """Sets the operators of the CPU for one test."""

    def give(*given):
        monkeypatch.setitem(operators.CANDIDATES, "cpu", given)
        operator_for.cache_clear()

    yield give
    monkeypatch.undo()
    operator_for.cache_clear()


def no_scale(q, k, v, causal, bias, scale):
    return flash_for_cpu(q, k, v, causal, bias, 1.0)


def half_of_the_lse(q, k, v, causal, bias, scale):
    out, lse = flash_for_cpu(q, k, v, causal, bias, scale)
    return out, lse / 2


def never_causal(q, k, v, causal, bias, scale):
    return flash_for_cpu(q, k, v, False, bias, scale)


def always_causal(q, k, v, causal, bias, scale):
    return flash_for_cpu(q, k, v, True, bias, scale)


def tiled_heads(q, k, v, causal, bias, scale):
    # Head h reads key-value head h % n, and not h // group.
    group = q.shape[1] // k.shape[1]
    return flash_for_cpu(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), causal, bias, scale)


def nan_everywhere(q, k, v, causal, bias, scale):
    out, lse = flash_for_cpu(q, k, v, causal, bias, scale)
    return out * math.nan, lse


def absent(q, k, v, causal, bias, scale):
    return torch.ops.aten._no_such_operator(q, k, v)


def refusing(q, k, v, causal, bias, scale):
    raise RuntimeError("no kernel for this")


def without_bias(q, k, v, causal, bias, scale):
    return flash_for_cpu(q, k, v, causal, None, scale)


WRONG = (
    no_scale,
    half_of_the_lse,
    never_causal,
    always_causal,
    tiled_heads,
    nan_everywhere,
    absent,
    refusing,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_the_operator_of_the_cpu_passes_its_own_test(dtype, biased):
    assert operator_for("cpu", dtype, biased=biased) is flash_for_cpu


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_operator_is_refused(candidates, wrong):
    candidates(wrong)
    for biased in (True, False):
        assert operator_for("cpu", torch.float32, biased=biased) is None


def test_the_first_right_operator_is_taken(candidates):
    candidates(no_scale, flash_for_cpu, absent)
    assert operator_for("cpu", torch.float32, biased=True) is flash_for_cpu


def test_an_operator_without_bias_serves_only_what_needs_none(candidates):
    candidates(without_bias)
    assert operator_for("cpu", torch.float32, biased=True) is None
    assert operator_for("cpu", torch.float32, biased=False) is without_bias


def test_a_device_without_candidates_has_no_operator():
    assert operator_for("a new chip", torch.float32, biased=False) is None


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_operator_tiles_give_the_same_numbers(candidates, kind):
    given = case(kind)
    values = torch.randn(*given.k.shape[:2], 3)

    def statistics():
        lse = row_lse(given.q, given.k, **given.how)
        yield lse
        yield attention_with_lse(given.q, given.k, given.k, **given.how)[0]
        yield prob_at(given.q, given.k, lse, some_keys(given), **given.how)
        yield expected(given.q, given.k, values, **given.how)
        yield entropy(given.q, given.k, **given.how)
        yield received(given.q, given.k, lse, torch.ones(given.q.shape[:2]), **given.how)

    fused = list(statistics())
    candidates(no_scale)
    for mine, wanted in zip(statistics(), fused, strict=True):
        assert error(mine, wanted) < FLOAT32


def test_plain_attention_is_one_call_and_what_no_operator_serves_is_none(candidates):
    calls = []

    def counted(*args):
        calls.append(args)
        return flash_for_cpu(*args)

    candidates(counted)
    operator_for("cpu", torch.float32, biased=False)
    operator_for("cpu", torch.float32, biased=True)
    for kind, wanted in (
        ("causal", 1),
        ("left-padded", 1),
        ("bidirectional", 1),
        ("wide window", 1),
        ("bidirectional latest queries", 1),
        ("window", 0),
        ("custom by head", 0),
        ("latest queries", 0),
    ):
        given = case(kind)
        calls.clear()
        found = row_lse(given.q, given.k, **given.how)
        assert len(calls) == wanted, kind
        assert error(found, Defined.of(given).lse) < FLOAT32


@pytest.mark.parametrize("n_key_value_heads", [1, 2, 4])
def test_taking_members_of_groups_apart_leaves_heads_in_order(monkeypatch, n_key_value_heads):
    """The CUDA path, with an operator of equal heads in the place of CUDA's."""

    def efficient(q, k, v, bias, compute_lse, dropout, causal, *, scale):
        assert q.shape[1] == k.shape[1]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, dropout, causal, attn_mask=bias, scale=scale
        )
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32))
        return out, padded, torch.zeros(()), torch.zeros(())

    monkeypatch.setattr(
        torch.ops.aten, "_scaled_dot_product_efficient_attention", efficient, raising=False
    )
    for kind in ("causal", "left-padded", "bidirectional and padded"):
        given = case(kind, n_key_value_heads)
        q, k = given.q.transpose(1, 2), given.k.transpose(1, 2)
        bias = None
        if given.mask.key_mask is not None:
            bias = torch.zeros(given.mask.key_mask.shape)
            bias = bias.masked_fill(~given.mask.key_mask, -math.inf)[:, None, None]
        call = (q, k, k, given.mask.causal, bias, given.scale)
        for mine, wanted in zip(
            operators.efficient_on_cuda(*call), flash_for_cpu(*call), strict=True
        ):
            assert error(mine, wanted) < FLOAT32


def test_testing_an_operator_moves_no_random_state_and_is_done_once(candidates):
    candidates(flash_for_cpu)
    before = torch.random.get_rng_state()
    operator_for("cpu", torch.float32, biased=True)
    assert torch.equal(torch.random.get_rng_state(), before)
    with LargestTensor() as largest:
        operator_for("cpu", torch.float32, biased=True)
    assert largest.numbers == 0
