"""The online softmax in tiles is dense attention, forward and backward, whatever the tile."""

import math

import pytest
import torch

from interp.models.masks import AttentionMask
from interp.models.online import online_attention


def inputs(n_query, n_key, *, n_heads=4, n_key_value_heads=2, d_head=8, d_v=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (n_query, n_heads, d_head),
        (n_key, n_key_value_heads, d_head),
        (n_key, n_key_value_heads, d_v),
    )
    return [
        torch.randn(2, *shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


def dense(q, k, v, scale, allowed):
    """Attention written out, in float64; rows without a key are zeros."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    scores = scores.masked_fill(~allowed, -math.inf)
    empty = (~allowed).all(dim=-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), scores.logsumexp(dim=-1)


def test_two_keys_in_two_tiles_are_weighed_against_each_other():
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = torch.tensor([0.0, math.log(3.0)], dtype=torch.float64).view(1, 2, 1, 1)
    v = torch.tensor([4.0, 8.0], dtype=torch.float64).view(1, 2, 1, 1)
    z, lse = online_attention(q, k, v, scale=1.0, mask=AttentionMask(), tile=1)
    assert float(z) == pytest.approx(7.0, abs=1e-15)  # a quarter of 4 and three of 8
    assert float(lse) == pytest.approx(math.log(4.0), abs=1e-15)


@pytest.mark.parametrize("tile", [1, 2, 3, 5, 8, 16, 64])
@pytest.mark.parametrize("n", [1, 2, 7, 16, 33])
def test_any_tile_and_length_is_dense_attention_to_1e_12_with_its_gradients(tile, n):
    q, k, v = inputs(n, n, seed=n)
    mask = AttentionMask()
    z, lse = online_attention(q, k, v, scale=0.3, mask=mask, tile=tile)
    expected, expected_lse = dense(q, k, v, 0.3, mask.allowed(n, n, q.device))
    assert (z - expected).abs().max() < 1e-12
    assert (lse - expected_lse).abs().max() < 1e-12
    from_z = torch.randn(z.shape, generator=torch.Generator().manual_seed(9), dtype=z.dtype)
    own = torch.autograd.grad((z * from_z).sum(), (q, k, v))
    other = torch.autograd.grad((expected * from_z).sum(), (q, k, v))
    for mine, theirs in zip(own, other, strict=True):
        assert (mine - theirs).abs().max() < 1e-12


@pytest.mark.parametrize(
    "case",
    ["window", "padded left", "padded right", "bidirectional", "chunk", "mqa", "wide values"],
)
@pytest.mark.parametrize("tile", [3, 64])
def test_masks_groups_and_widths_are_those_of_dense_attention(case, tile):
    n_query = 4 if case == "chunk" else 11
    q, k, v = inputs(
        n_query,
        11,
        n_key_value_heads=1 if case == "mqa" else 2,
        d_v=13 if case == "wide values" else 8,
    )
    key_mask = torch.ones(2, 11, dtype=torch.bool)
    if case.startswith("padded"):
        key_mask[0, slice(0, 5) if case == "padded left" else slice(8, 11)] = False
    mask = AttentionMask(
        causal=case != "bidirectional",
        key_mask=key_mask,
        window=3 if case == "window" else None,
    )
    z, lse = online_attention(q, k, v, scale=0.5, mask=mask, tile=tile)
    allowed = mask.allowed(n_query, 11, q.device)
    expected, expected_lse = dense(q, k, v, 0.5, allowed)
    empty = (~allowed).all(dim=-1).expand(2, 4, -1)
    assert (z - expected).abs().max() < 1e-12
    assert (lse == -math.inf).equal(empty)
    assert (lse - expected_lse)[~empty].abs().max() < 1e-12
    own = torch.autograd.grad(z.pow(2).sum(), (q, k, v))
    other = torch.autograd.grad(expected.pow(2).sum(), (q, k, v))
    for mine, theirs in zip(own, other, strict=True):
        assert (mine - theirs).abs().max() < 1e-12


def test_huge_scores_do_not_overflow():
    q, k, v = (x.detach() for x in inputs(9, 9))
    z, lse = online_attention(
        1e4 * q.float(), 1e4 * k.float(), v.float(), scale=1.0, mask=AttentionMask(), tile=2
    )
    assert bool(z.isfinite().all())
    assert bool(lse.isfinite().all())
    assert float(lse.abs().max()) > 1e8
    expected, _ = dense(1e4 * q, 1e4 * k, v, 1.0, AttentionMask().allowed(9, 9, q.device))
    assert (z.double() - expected).abs().max() < 1e-4  # rows are one key each, but for rounding


def test_gradients_of_a_small_case_pass_gradcheck():
    q, k, v = inputs(5, 5, n_heads=2, n_key_value_heads=1, d_head=3, d_v=2)

    def read(q, k, v):
        return online_attention(q, k, v, scale=0.7, mask=AttentionMask(window=3), tile=2)[0]

    assert torch.autograd.gradcheck(read, (q, k, v))


def test_half_precision_comes_and_goes_in_its_dtype_with_statistics_in_float32():
    q, k, v = (x.detach().to(torch.bfloat16) for x in inputs(9, 9))
    z, lse = online_attention(q, k, v, scale=0.3, mask=AttentionMask(), tile=4)
    assert z.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    expected, _ = dense(
        *(x.double() for x in (q, k, v)), 0.3, AttentionMask().allowed(9, 9, q.device)
    )
    assert (z.double() - expected).abs().max() < 0.02
