"""The attention mathematics and the head module, against known answers and a float64 oracle."""

import math

import numpy as np
import pytest
import reference
import torch
from tiny_models import error, padding, some_tokens, tiny, tiny_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from interp.models.attention import (
    attention_pattern,
    attention_scores,
    fused_attention,
    weighted_values,
)
from interp.models.heads import GroupedAttention
from interp.models.layers import Rotary, rotate
from interp.models.masks import AttentionMask

# One float32 sum of a few dozen products of order 1 errs by about 1e-6; ten times that is a fault.
FLOAT32 = 1e-5
CPU = torch.device("cpu")


def qkv(
    n_heads: int, n_key_value_heads: int, *, n_pos: int = 7, d_head: int = 6, batch: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    heads = (n_heads, n_key_value_heads, n_key_value_heads)
    return tuple(torch.randn(batch, n_pos, h, d_head) for h in heads)


def dense(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, key_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    scores = attention_scores(
        q, k, AttentionMask(key_mask=key_mask).allowed(q.shape[1], k.shape[1], CPU), scale
    )
    pattern = attention_pattern(scores)
    return scores, pattern, weighted_values(pattern, v)


def key_mask_of(side: str) -> Tensor | None:
    mask = padding(side, (7, 4, 1), 7)
    return None if mask is None else mask.bool()


HEADS = pytest.mark.parametrize("n_key_value_heads", [1, 2, 4], ids=["mqa", "gqa", "mha"])
SIDES = pytest.mark.parametrize("side", ["none", "left", "right"])


@HEADS
@SIDES
def test_dense_attention_is_the_float64_oracle_head_by_head(n_key_value_heads, side):
    q, k, v = qkv(4, n_key_value_heads)
    key_mask = key_mask_of(side)
    got = dense(q, k, v, scale=0.3, key_mask=key_mask)
    real = torch.ones(3, 7) if key_mask is None else key_mask
    for b in range(3):
        for h in range(4):
            g = h * n_key_value_heads // 4
            wanted = reference.attention(
                *(x.double().numpy() for x in (q[b, :, h], k[b, :, g], v[b, :, g])),
                [bool(r) for r in real[b]],
                0.3,
            )
            mine = (got[0][b, h], got[1][b, h], got[2][b, :, h])
            for name, actual, expected in zip(
                ("scores", "pattern", "z"), mine, wanted, strict=True
            ):
                assert error(actual, expected) < FLOAT32, (name, b, h)


@HEADS
@SIDES
def test_fused_attention_and_its_gradients_are_those_of_the_dense_path(n_key_value_heads, side):
    key_mask = key_mask_of(side)
    weight = torch.randn(3, 7, 4, 6)
    values, gradients = [], []
    inputs = qkv(4, n_key_value_heads)
    for path in ("dense", "fused"):
        leaves = [x.clone().requires_grad_() for x in inputs]
        if path == "dense":
            z = dense(*leaves, scale=0.3, key_mask=key_mask)[2]
        else:
            z = fused_attention(*leaves, scale=0.3, mask=AttentionMask(key_mask=key_mask))[0]
        (z * weight).sum().backward()
        values.append(z)
        gradients.append([leaf.grad for leaf in leaves])
    assert error(values[1], values[0]) < FLOAT32
    for of_dense, of_fused in zip(*gradients, strict=True):
        assert of_dense.abs().max() > 0.01
        assert error(of_fused, of_dense) < FLOAT32


def test_dense_gradients_are_the_finite_differences_even_with_empty_rows():
    q, k, v = (x.double().requires_grad_() for x in qkv(4, 2, n_pos=4, d_head=2, batch=1))
    key_mask = torch.tensor([[False, True, True, True]])
    assert torch.autograd.gradcheck(
        lambda *leaves: dense(*leaves, scale=0.3, key_mask=key_mask)[1:], (q, k, v)
    )


def test_a_causal_row_of_equal_scores_is_uniform():
    q = torch.zeros(1, 5, 2, 3)
    _, k, v = qkv(2, 1, n_pos=5, d_head=3, batch=1)
    _, pattern, _ = dense(q, k, v, scale=1.0)
    for i in range(5):
        expected = torch.tensor([1 / (i + 1)] * (i + 1) + [0.0] * (4 - i))
        assert torch.equal(pattern[0, 0, i], expected)


def test_scores_far_below_any_mask_constant_still_hide_the_future():
    # -1000 * 200 = -2e5 lies below the constants -1e4 and -1e5 that people mask with.
    q = torch.full((1, 4, 1, 1), -1000.0)
    k = torch.full((1, 4, 1, 1), 200.0)
    v = torch.arange(4.0).reshape(1, 4, 1, 1)
    scores, pattern, z = dense(q, k, v, scale=1.0)
    assert scores[0, 0, 3, 0] == -2e5
    uniform = torch.ones(4, 4).tril() / torch.arange(1.0, 5.0)[:, None]
    assert torch.equal(pattern[0, 0], uniform)
    assert torch.equal(z.flatten(), torch.tensor([0.0, 0.5, 1.0, 1.5]))
    assert torch.equal(
        fused_attention(q, k, v, scale=1.0, mask=AttentionMask())[0].flatten(), z.flatten()
    )


def test_masked_by_cause_by_padding_and_by_both_hold_the_same_score():
    q, k, v = qkv(4, 2, n_pos=5, batch=1)
    key_mask = torch.tensor([[True, True, True, False, False]])
    scores, _, _ = dense(q, k, v, scale=0.3, key_mask=key_mask)
    only_causal, only_padding, both = scores[0, 0, 0, 2], scores[0, 0, 4, 3], scores[0, 0, 3, 4]
    assert only_causal == only_padding == both == -math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_padding_leaves_real_rows_of_the_pattern_as_they_were(dtype):
    q, k, v = (x.to(dtype) for x in qkv(4, 2, n_pos=6, batch=1))
    key_mask = torch.tensor([[True] * 4 + [False] * 2])
    _, padded, _ = dense(q, k, v, scale=0.3, key_mask=key_mask)
    _, alone, _ = dense(q[:, :4], k[:, :4], v[:, :4], scale=0.3)
    assert error(padded[:, :, :4, :4], alone) < 1e-6  # the same sums in the same order
    assert not padded[:, :, :, 4:].any()
    assert padded.isfinite().all()


def test_the_softmax_runs_over_keys_and_not_over_queries():
    q, k, v = qkv(4, 2, n_pos=7, batch=3)
    _, pattern, _ = dense(q, k, v, scale=0.3)
    assert error(pattern.sum(-1), torch.ones(3, 4, 7)) < FLOAT32
    assert (pattern.sum(-2) - 1).abs().max() > 0.1


@pytest.mark.parametrize("path", ["dense", "fused"])
def test_a_query_that_may_attend_to_nothing_reads_zero_with_finite_gradients(path):
    leaves = [x.requires_grad_() for x in qkv(4, 2, n_pos=5, batch=2)]
    key_mask = torch.tensor([[True] * 5, [False, False, False, True, True]])
    if path == "dense":
        _, pattern, z = dense(*leaves, scale=0.3, key_mask=key_mask)
        assert not pattern[1, :, :3].any()
        assert not pattern[1, :, 3:, :3].any()
        assert error(pattern[1, :, 3:].sum(-1), torch.ones(4, 2)) < FLOAT32
    else:
        z = fused_attention(*leaves, scale=0.3, mask=AttentionMask(key_mask=key_mask))[0]
    assert not z[1, :3].any()
    assert z[1, 3:].abs().min() > 0
    z.sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
    assert not leaves[2].grad[1, :3].any()  # nobody reads the value of a pad


def test_dropout_in_training_keeps_empty_rows_at_zero_with_finite_gradients():
    leaves = [x.requires_grad_() for x in qkv(4, 2, n_pos=5, batch=1)]
    key_mask = torch.tensor([[False, False, False, True, True]])
    z = fused_attention(*leaves, scale=0.3, mask=AttentionMask(key_mask=key_mask), dropout=0.5)[0]
    assert not z[0, :3].any()
    z.sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


class SoftmaxInputs(TorchDispatchMode):
    """Notes the number format of every softmax's input."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._softmax.default:
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_bfloat16_pattern_is_the_float32_softmax_rounded_once():
    scores = (4 * torch.randn(2, 3, 9, 9)).bfloat16()
    with SoftmaxInputs() as softmaxes:
        pattern = attention_pattern(scores)
    assert softmaxes.dtypes == {torch.float32}
    assert pattern.dtype == torch.bfloat16
    assert torch.equal(pattern, scores.float().softmax(-1).bfloat16())


def test_key_value_heads_are_repeated_in_blocks_and_not_tiled():
    for n_key_value_heads, expected in ((2, [1, 1, 2, 2]), (1, [1] * 4), (4, [1, 2, 3, 4])):
        heads = {"n_key_value_heads": n_key_value_heads, "d_head": 1}
        model = tiny(attention=heads)
        constant = torch.arange(1.0, n_key_value_heads + 1)[:, None]
        for lazy in ((), ("blocks.0.attn.hook_pattern",)):
            seen = {}
            model.run_with_hooks(
                some_tokens(2, 5),
                fwd_hooks=[
                    ("blocks.0.attn.hook_v", lambda v, hook, c=constant: c.expand_as(v)),
                    ("blocks.0.attn.hook_z", lambda z, hook, s=seen: s.update(z=z)),
                    *((name, lambda pattern, hook: None) for name in lazy),
                ],
            )
            wanted = torch.tensor(expected, dtype=torch.float32)[:, None].expand(2, 5, 4, 1)
            # Rows of a softmax sum to 1 within rounding.
            assert error(seen["z"], wanted) < 1e-6, (n_key_value_heads, lazy)


def test_projections_have_one_width_for_queries_and_one_for_keys_and_values():
    config = tiny_config(d_model=64, attention={"n_key_value_heads": 2, "d_head": 16})
    attn = GroupedAttention(config, 0)
    widths = [p.out_features for p in (attn.q_proj, attn.k_proj, attn.v_proj)]
    assert widths == [64, 32, 32]
    assert attn.o_proj.in_features == 64


@pytest.mark.parametrize("family", ["gqa", "no_attention_bias", "wide_heads"])
def test_weights_in_transformerlens_layout_reproduce_every_head(family):
    model = tiny(family)
    _, cache = model.run_with_cache(some_tokens(2, 5), names_filter=lambda name: True)
    attn, block = model.blocks[1].attn, "blocks.1"
    x = model.blocks[1].ln1(cache[f"{block}.hook_resid_pre"])
    for letter, w, b in (
        ("q", attn.W_Q, attn.b_Q),
        ("k", attn.W_K, attn.b_K),
        ("v", attn.W_V, attn.b_V),
    ):
        for h in range(w.shape[0]):
            actual = cache[f"{block}.attn.hook_{letter}"][:, :, h]
            assert error(actual, x @ w[h] + b[h]) < FLOAT32, (letter, h)
    for h in range(4):
        result = cache[f"{block}.attn.hook_z"][:, :, h] @ attn.W_O[h]
        assert error(cache[f"{block}.attn.hook_result"][:, :, h], result) < FLOAT32
    assert attn.b_O.shape == (24,)
    assert bool(attn.b_O.any()) == (family != "no_attention_bias")


def test_merging_heads_keeps_positions_and_heads_in_order():
    attn = GroupedAttention(tiny_config(d_model=12, attention={"d_head": 3}), 0)
    with torch.no_grad():
        attn.o_proj.weight.copy_(torch.eye(12))
        attn.o_proj.bias.zero_()
    head_numbers = torch.arange(4.0)[:, None].expand(2, 5, 4, 3)
    attn.hook_z.add_hook(lambda z, hook: head_numbers)
    out = attn(torch.randn(2, 5, 12))
    wanted = torch.tensor([0.0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3])
    assert torch.equal(out, wanted.expand(2, 5, 12))


def test_gqa_is_mha_with_copied_key_and_value_weights():
    grouped = tiny(attention={"n_key_value_heads": 2, "smeared_keys": True})
    full = tiny(attention={"n_key_value_heads": 4, "smeared_keys": True})
    state = dict(grouped.state_dict())
    for name in state:
        if ".k_proj." in name or ".v_proj." in name:
            heads = state[name].unflatten(0, (2, 6))
            state[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
        elif name.endswith("smear"):
            state[name] = state[name].repeat_interleave(2)
    full.load_state_dict(state)
    tokens = some_tokens(3, 7)
    for side in ("none", "left"):
        mask = padding(side, (7, 4, 1), 7)
        wanted = full(tokens, attention_mask=mask)
        assert error(grouped(tokens, attention_mask=mask), wanted) < FLOAT32


def test_gqa_with_as_many_key_value_heads_as_heads_is_mha():
    explicit, default = tiny(attention={"n_key_value_heads": 4}), tiny()
    tokens = some_tokens(2, 7)
    assert torch.equal(explicit(tokens), default(tokens))


def test_rotary_pairs_halves_as_hugging_face_does():
    rotary = Rotary(4, 10000.0, None)
    x = torch.tensor([1.0, 0.0, 0.0, 0.0]).reshape(1, 1, 1, 4)
    turned = rotate(x, rotary(torch.tensor([[1]]))).flatten()
    # cos 1 and sin 1 in places 0 and 2; pairing neighbours would put sin 1 into place 1.
    assert error(turned, torch.tensor([math.cos(1), 0.0, math.sin(1), 0.0])) < 1e-7
    second = torch.tensor([0.0, 1.0, 0.0, 0.0]).reshape(1, 1, 1, 4)
    turned = rotate(second, rotary(torch.tensor([[3]]))).flatten()
    slow = 3 * 10000.0**-0.5
    assert error(turned, torch.tensor([0.0, math.cos(slow), 0.0, math.sin(slow)])) < 1e-7


def test_rotary_keeps_norms_and_scores_depend_on_distance_only():
    rotary = Rotary(8, 100.0, None)
    q, k = torch.randn(1, 12, 3, 8), torch.randn(1, 12, 3, 8)
    near = torch.arange(12)[None]
    scores = []
    for positions in (near, near + 7):
        turned_q, turned_k = rotate(q, rotary(positions)), rotate(k, rotary(positions))
        assert error(turned_q.norm(dim=-1), q.norm(dim=-1)) < FLOAT32
        scores.append(torch.einsum("bqhd,bkhd->bhqk", turned_q, turned_k))
    assert error(scores[1], scores[0]) < FLOAT32
    unturned = torch.einsum("bqhd,bkhd->bhqk", q, k)
    assert (scores[0] - unturned).abs().max() > 0.1


def test_rotary_matches_float64_at_the_end_of_a_long_context():
    rotary = Rotary(8, 10000.0, None)
    x = torch.randn(1, 1, 1, 8)
    turned = rotate(x, rotary(torch.tensor([[8191]]))).flatten()
    wanted = reference.rotate(x.flatten().double().numpy(), 8191, 10000.0)
    # With float32 angles the error here is about 5e-4.
    assert error(turned, wanted) < 1e-6


def test_a_smeared_key_mixes_in_the_key_before_it_by_the_trained_share():
    config = tiny_config(attention={"n_key_value_heads": 2, "smeared_keys": True})
    attn = GroupedAttention(config, 0)
    seen = {}
    attn.hook_k.add_hook(lambda k, hook: seen.update(k=k))
    x = torch.randn(1, 5, 24)
    plain = attn.k_proj(x).unflatten(2, (2, 6))
    with torch.no_grad():
        attn.smear.copy_(torch.tensor([0.0, math.log(3)]))  # sigmoid: a half, three quarters
    attn(x)
    for head, share in ((0, 0.5), (1, 0.75)):
        mixed = share * plain[:, 1:, head] + (1 - share) * plain[:, :-1, head]
        assert error(seen["k"][:, 1:, head], mixed) < 1e-6
    assert error(seen["k"][:, 0], plain[:, 0]) < 1e-6
    mask = torch.tensor([[False, False, True, True, True]])
    attn(x, key_mask=mask)
    assert error(seen["k"][:, 2], plain[:, 2]) < 1e-6  # no pad leaks into the first real key


def test_smeared_keys_train_under_autocast_with_padding():
    model = tiny("smeared")
    mask = padding("left", (7, 3), 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(some_tokens(2, 7), attention_mask=mask, return_type="loss")
    loss.backward()
    grad = model.blocks[0].attn.smear.grad
    assert grad.dtype == torch.float32
    assert grad.isfinite().all()
    assert grad.any()


def test_allowed_keys_are_not_later_and_not_padding():
    allowed = AttentionMask(
        key_mask=torch.tensor([[True, True, True], [False, True, True]])
    ).allowed(3, 3, CPU)
    wanted = np.array([[[1, 0, 0], [1, 1, 0], [1, 1, 1]], [[0, 0, 0], [0, 1, 0], [0, 1, 1]]])
    assert np.array_equal(allowed[:, 0].numpy(), wanted.astype(bool))
    assert torch.equal(AttentionMask().allowed(3, 3, CPU)[0, 0], torch.ones(3, 3).tril().bool())
