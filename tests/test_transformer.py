"""The whole model against a float64 oracle, and the properties no architecture may lose."""

import copy
import math

import jaxtyping
import numpy as np
import pytest
import reference
import torch
from tiny_models import (
    D_VOCAB,
    FAMILIES,
    N_CTX,
    error,
    oracle,
    padding,
    perturbed,
    some_tokens,
    tiny,
    tiny_config,
)
from torch import nn

from interp.errors import ModelError, ShapeError
from interp.models.losses import mean_loss, next_token_losses
from interp.models.transformer import Transformer

# Two layers of float32 sums err by about 1e-6 of the largest number (3e-6 at most, measured).
FLOAT32 = 1e-5

family = pytest.mark.parametrize("family", FAMILIES)
SIDES = pytest.mark.parametrize("side", ["none", "left", "right"])
LENGTHS = (7, 4, 1)


def batch(side: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    return some_tokens(3, 7), padding(side, LENGTHS, 7)


# --- the oracle -----------------------------------------------------------------------------


@family
@SIDES
def test_every_activation_and_the_logits_are_the_float64_oracle(family, side):
    model = tiny(family)
    tokens, mask = batch(side)
    wanted = oracle(model, tokens, mask)
    logits, cache = model.run_with_cache(
        tokens, attention_mask=mask, names_filter=lambda name: True
    )
    assert {*cache, "logits"} == set(wanted)
    errors = {name: error(cache[name], wanted[name]) for name in cache}
    errors["logits"] = error(logits, wanted["logits"])
    assert max(errors.values()) < FLOAT32, {n: e for n, e in errors.items() if e >= FLOAT32}


@family
@SIDES
def test_the_fused_path_gives_the_logits_and_gradients_of_the_dense_path(family, side):
    model = tiny(family)
    tokens, mask = batch(side)
    results = []
    for names in ([], [n for n in model.hook_dict if n.endswith("hook_pattern")]):
        model.zero_grad()
        with model.hooks(fwd_hooks=[(name, lambda pattern, hook: None) for name in names]):
            logits, loss = model(tokens, attention_mask=mask, return_type="both")
        loss.backward()
        results.append((logits, {n: p.grad.clone() for n, p in model.named_parameters()}))
    (fused, fused_grads), (dense, dense_grads) = results
    assert error(fused, dense) < FLOAT32
    # All together: the gradient of a key bias is 0 in exact numbers, and rounding in floats.
    flat = (
        torch.cat([g.flatten() for g in grads.values()]) for grads in (fused_grads, dense_grads)
    )
    assert error(*flat) < FLOAT32


@pytest.mark.parametrize("parameter", ["attn.smear", "ln2.b", "mlp.gate_proj.bias", "attn.q_proj"])
def test_the_noise_on_parameters_is_large_enough_to_see_one_left_out(parameter):
    model = tiny("gated_with_bias", attention={"smeared_keys": True})
    tokens, _ = batch("none")
    wanted = oracle(model, tokens)["logits"]
    with torch.no_grad():
        for name, value in model.named_parameters():
            if parameter in name:
                value.zero_()
    # A thousand times the tolerance above.
    assert error(model(tokens), wanted) > 1e-2


def test_logits_are_the_unembedded_final_norm_of_the_last_residual():
    model = tiny("gqa", unembed_bias=True)
    logits, cache = model.run_with_cache(some_tokens(2, 7))
    for layer in range(2):
        block = f"blocks.{layer}"
        parts = (f"{block}.hook_resid_pre", f"{block}.hook_attn_out", f"{block}.hook_mlp_out")
        total = sum(cache[name] for name in parts)
        assert error(cache[f"{block}.hook_resid_post"], total) < FLOAT32
    resid = cache["blocks.1.hook_resid_post"]
    assert torch.equal(model.unembed(model.ln_final(resid)), logits)
    assert error(model.ln_final(resid) @ model.W_U + model.b_U, logits) < FLOAT32


def test_tied_embeddings_share_storage_and_untied_do_not():
    tied, untied = tiny(tie_embeddings=True), tiny()
    assert tied.unembed.weight is tied.embed.weight
    assert torch.equal(tied.W_U, tied.W_E.T)
    assert not torch.equal(untied.W_U, untied.W_E.T)


def test_weights_follow_the_seed_and_leave_the_callers_random_state_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, again, other = (Transformer(tiny_config(), seed=s) for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.embed.weight, again.embed.weight)
    assert not torch.equal(first.embed.weight, other.embed.weight)


# --- properties -----------------------------------------------------------------------------


@family
@pytest.mark.parametrize("path", ["fused", "dense"])
def test_changing_a_token_changes_nothing_before_it_and_something_at_it(family, path):
    model = tiny(family)
    tokens = some_tokens(1, 8)
    name = "blocks.0.attn.hook_pattern"
    hooks = [] if path == "fused" else [(name, lambda pattern, hook: None)]
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        clean = model(tokens)
        for t in range(8):
            changed = tokens.clone()
            changed[0, t] = (changed[0, t] + 1) % D_VOCAB
            logits = model(changed)
            assert torch.equal(logits[:, :t], clean[:, :t]), t
            assert not torch.equal(logits[:, t], clean[:, t]), t


@family
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_alone_equals_itself_in_a_padded_batch(family, side):
    model = tiny(family)
    tokens, mask = batch(side)
    with torch.no_grad():
        together = model(tokens, attention_mask=mask)
        for row, length in enumerate(LENGTHS):
            real = mask[row].bool()
            alone = model(tokens[row, real][None])
            assert alone.shape[1] == length
            assert error(together[row, real][None], alone) < FLOAT32, row


def test_a_row_alone_equals_itself_in_a_batch_without_padding():
    model = tiny("gqa")
    tokens = some_tokens(3, 7)
    with torch.no_grad():
        together = model(tokens)
        for row in range(3):
            assert error(together[row : row + 1], model(tokens[row : row + 1])) < FLOAT32


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_ids_under_padding_change_no_real_logit(side):
    model = tiny("shortformer")
    tokens, mask = batch(side)
    other = torch.where(mask.bool(), tokens, (tokens + 1) % D_VOCAB)
    assert not torch.equal(tokens, other)
    real = mask.bool()
    clean = model(tokens, attention_mask=mask)[real]
    assert torch.equal(model(other, attention_mask=mask)[real], clean)


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_a_mask_of_ones_is_no_mask_bit_for_bit(dtype):
    model = tiny("gqa")
    tokens = some_tokens(2, 7)
    assert torch.equal(model(tokens, attention_mask=torch.ones(2, 7, dtype=dtype)), model(tokens))


def test_one_hole_in_the_mask_removes_exactly_that_key():
    model = tiny("gqa", positional_embedding_type="none")
    tokens = some_tokens(1, 6)
    mask = torch.tensor([[1, 1, 0, 1, 1, 1]])
    name = "blocks.0.attn.hook_pattern"
    _, cache = model.run_with_cache(tokens, attention_mask=mask, names_filter=name)
    _, clean = model.run_with_cache(tokens, names_filter=name)
    hidden = cache[name][0]
    assert not hidden[:, :, 2].any()
    kept = [0, 1, 3, 4, 5]
    renormalised = clean[name][0][:, :, kept]
    renormalised = renormalised / renormalised.sum(-1, keepdim=True)
    assert error(hidden[:, :, kept], renormalised) < FLOAT32
    assert (hidden[:, 3:, 3] > 0).all()


@pytest.mark.parametrize("family", ["mha", "gqa", "mqa", "rotary_smeared", "llama"])
def test_permuting_the_heads_weights_permutes_their_outputs_and_no_logit(family):
    model = tiny(family)
    attn = model.blocks[0].attn
    groups, size, d = attn.n_key_value_heads, attn.n_heads // attn.n_key_value_heads, attn.d_head
    # Whole groups move, and heads within a group: the last group comes first, its heads reversed.
    of_groups = list(range(groups))[::-1]
    of_heads = [g * size + i for g in of_groups for i in range(size)[::-1]]
    permuted = copy.deepcopy(model)
    moved = permuted.blocks[0].attn
    with torch.no_grad():
        for projection, order in (("q", of_heads), ("k", of_groups), ("v", of_groups)):
            for new, old in zip(
                getattr(moved, f"{projection}_proj").parameters(),
                getattr(attn, f"{projection}_proj").parameters(),
                strict=True,
            ):
                new.copy_(old.unflatten(0, (-1, d))[order].flatten(0, 1))
        moved.o_proj.weight.copy_(
            attn.o_proj.weight.unflatten(1, (-1, d))[:, of_heads].flatten(1, 2)
        )
        if attn.smear is not None:
            moved.smear.copy_(attn.smear[of_groups])
    names = [f"blocks.0.attn.hook_{name}" for name in ("pattern", "z", "result")]
    tokens = some_tokens(2, 7)
    logits, cache = model.run_with_cache(tokens, names_filter=names)
    other_logits, other = permuted.run_with_cache(tokens, names_filter=names)
    assert error(other_logits, logits) < FLOAT32
    assert error(other[names[0]], cache[names[0]][:, of_heads]) < FLOAT32
    for name in names[1:]:
        assert error(other[name], cache[name][:, :, of_heads]) < FLOAT32
        assert error(other[name], cache[name]) > 0.1


def test_every_head_has_its_own_pattern_and_no_two_are_alike():
    model = tiny("gqa")
    name = "blocks.0.attn.hook_pattern"
    _, cache = model.run_with_cache(some_tokens(3, 7), names_filter=name)
    pattern = cache[name]
    assert pattern.shape == (3, 4, 7, 7)
    assert error(pattern.sum(-1), torch.ones(3, 4, 7)) < FLOAT32
    assert (pattern.sum(-2) - 1).abs().max() > 0.1  # a distribution over keys, not over queries
    for a in range(4):
        for b in range(a):
            assert (pattern[:, a] - pattern[:, b]).abs().max() > 1e-3, (a, b)


@pytest.mark.parametrize(
    "sizes",
    [
        {"n_layers": 1, "d_model": 1, "attention": {"n_heads": 1, "d_head": 1}},
        {"attention": {"n_heads": 1}},
        {"attention": {"n_heads": 4, "n_key_value_heads": 1, "d_head": 1}},
        {"n_layers": 1, "attention": {"d_head": 2}, "positional_embedding_type": "rotary"},
    ],
    ids=["one_of_everything", "one_head", "d_head_1", "rotary_pair"],
)
@pytest.mark.parametrize("n_pos", [1, 2, N_CTX])
def test_the_smallest_sizes_and_a_full_context_match_the_oracle(sizes, n_pos):
    model = perturbed(tiny_config(**sizes))
    for tokens in (some_tokens(1, n_pos), some_tokens(2, n_pos)):
        assert error(model(tokens), oracle(model, tokens)["logits"]) < FLOAT32


def test_dropout_acts_in_training_and_never_in_eval():
    dropped = tiny("gqa", dropout=0.5)
    plain = tiny("gqa")
    plain.load_state_dict(dropped.state_dict())
    tokens = some_tokens(2, 7)
    mask = padding("left", (7, 3), 7)
    name = "blocks.0.attn.hook_pattern"
    for given in (None, mask):
        first, cache = dropped.run_with_cache(tokens, attention_mask=given, names_filter=name)
        again, _ = dropped.run_with_cache(tokens, attention_mask=given, names_filter=name)
        wanted, _ = plain.run_with_cache(tokens, attention_mask=given, names_filter=name)
        assert torch.equal(first, again)
        assert torch.equal(first, wanted)
        assert torch.equal(
            dropped(tokens, attention_mask=given), plain(tokens, attention_mask=given)
        )
        sums = cache[name].sum(-1)[0]
        assert error(sums, torch.ones(4, 7)) < FLOAT32
    dropped.train()
    assert not torch.equal(dropped(tokens), dropped(tokens))


@pytest.mark.parametrize("place", ["embed", "attn", "attn_dense", "attn_out", "mlp"])
def test_dropout_in_training_acts_in_every_place_it_should(place):
    model = tiny("mha", n_layers=1, dropout=0.9)
    model.train()
    seen = []
    name = {
        "embed": "blocks.0.hook_resid_pre",
        "attn": "blocks.0.attn.hook_z",
        "attn_dense": "blocks.0.attn.hook_z",
        "attn_out": "blocks.0.hook_attn_out",
        "mlp": "blocks.0.hook_mlp_out",
    }[place]
    lazy = [("blocks.0.attn.hook_pattern", lambda p, hook: None)] if place == "attn_dense" else []
    model.run_with_hooks(
        some_tokens(2, 7), fwd_hooks=[*lazy, (name, lambda x, hook: seen.append(x.detach()))]
    )
    # A query reads exactly 0 where all of its keys are dropped: 0.9 of first queries, and so on.
    assert (seen[0] == 0).float().mean() > 0.5


# --- padding, gradients, losses -------------------------------------------------------------


@pytest.mark.parametrize("family", ["mha", "gqa", "shortformer", "rotary_smeared", "llama"])
@pytest.mark.parametrize("path", ["fused", "dense"])
def test_left_padding_is_finite_forward_and_backward_in_training(family, path):
    model = tiny(family, dropout=0.1)
    model.train()
    tokens = some_tokens(2, 5)
    mask = padding("left", (5, 2), 5)
    hooks = []
    if path == "dense":
        hooks = [(lambda name: name.endswith("hook_pattern"), lambda pattern, hook: None)]
    with model.hooks(fwd_hooks=hooks):
        model(tokens, attention_mask=mask, return_type="loss").backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any() or name.endswith("k_proj.bias"), name


@family
def test_no_cached_tensor_is_nan_under_left_padding_and_pad_queries_have_zero_rows(family):
    model = tiny(family)
    mask = padding("left", (5, 2), 5)
    _, cache = model.run_with_cache(
        some_tokens(2, 5), attention_mask=mask, names_filter=lambda name: True
    )
    assert not [name for name in cache if cache[name].isnan().any()]
    for layer in range(2):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"]
        assert not pattern[1, :, :3].any()
        assert not pattern[1, :, 3:, :3].any()
        assert error(pattern[1, :, 3:].sum(-1), torch.ones(4, 2)) < FLOAT32
        assert not cache[f"blocks.{layer}.attn.hook_z"][1, :3].any()


@SIDES
def test_losses_are_the_oracles_and_leave_padding_out(side):
    model = tiny("gqa")
    tokens, mask = batch(side)
    logits, per_token = model(tokens, attention_mask=mask, return_type="both", loss_per_token=True)
    given = None if mask is None else mask.numpy()
    wanted = reference.next_token_losses(logits.detach().numpy(), tokens.numpy(), given)
    assert per_token.shape == (3, 6)
    assert error(per_token, wanted) < FLOAT32
    mean = model(tokens, attention_mask=mask, return_type="loss")
    assert abs(float(mean.detach()) - reference.mean_loss(wanted, given)) < FLOAT32
    if mask is not None:
        counted = mask[:, :-1].bool() & mask[:, 1:].bool()
        assert not per_token[~counted].any()
        # A mean over every cell would be smaller.
        assert float(mean.detach()) > 1.2 * float(per_token.detach().mean())


def test_targets_are_shifted_once():
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    assert next_token_losses(torch.zeros(1, 5, D_VOCAB), tokens).shape == (1, 4)
    uniform = next_token_losses(torch.zeros(1, 5, D_VOCAB), tokens)
    assert error(uniform, torch.full((1, 4), math.log(D_VOCAB))) < 1e-6
    for shift, low, high in ((1, 0.0, 1e-4), (2, 10.0, 100.0)):
        logits = torch.zeros(1, 5, D_VOCAB)
        for p in range(5 - shift):
            logits[0, p, tokens[0, p + shift]] = 20.0
        losses = next_token_losses(logits, tokens)
        # Position 3 has no token after next.
        assert low <= float(losses[0, :3].mean()) <= high


def test_losses_of_half_precision_logits_are_computed_in_float32():
    logits = torch.randn(1, 5, D_VOCAB).bfloat16()
    tokens = some_tokens(1, 5)
    losses = next_token_losses(logits, tokens)
    assert losses.dtype == torch.float32
    assert error(losses, reference.next_token_losses(logits.float().numpy(), tokens.numpy())) < 1e-6


def test_a_mean_over_no_token_is_nan_and_not_zero():
    model = tiny()
    assert model(some_tokens(1, 1), return_type="loss").isnan()
    losses = torch.zeros(1, 2)
    assert mean_loss(losses, torch.tensor([[True, False, False]])).isnan()


def test_return_type_none_gives_nothing_and_both_gives_logits_and_loss():
    model, tokens = tiny(), some_tokens(2, 5)
    assert model(tokens, return_type=None) is None
    logits, loss = model(tokens, return_type="both")
    assert torch.equal(logits, model(tokens))
    assert torch.equal(loss, model(tokens, return_type="loss"))


# --- partial passes -------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mha", "shortformer", "rotary_smeared", "rms_attention_only"])
@SIDES
def test_stopping_at_a_layer_and_starting_there_is_a_full_pass(family, side):
    model = tiny(family, n_layers=3)
    tokens, mask = batch(side)
    with torch.no_grad():
        full, cache = model.run_with_cache(
            tokens, attention_mask=mask, names_filter=lambda name: name.endswith("hook_resid_pre")
        )
        full = model(tokens, attention_mask=mask)
        for layer in range(4):
            resid = model(tokens, attention_mask=mask, stop_at_layer=layer)
            if layer < 3:
                assert torch.equal(resid, cache[f"blocks.{layer}.hook_resid_pre"])
            rest = model(resid, attention_mask=mask, start_at_layer=layer)
            assert torch.equal(rest, full), layer
        last = model(tokens, attention_mask=mask, stop_at_layer=-1)
        assert torch.equal(last, cache["blocks.2.hook_resid_pre"])
        assert torch.equal(model(last, attention_mask=mask, start_at_layer=-1), full)
        between = model(
            cache["blocks.1.hook_resid_pre"],
            attention_mask=mask,
            start_at_layer=1,
            stop_at_layer=2,
        )
        assert torch.equal(between, cache["blocks.2.hook_resid_pre"])


@pytest.mark.parametrize(
    "family", ["mha", "shortformer", "rotary_smeared", "windowed", "qk_norm", "attention_only"]
)
@SIDES
def test_the_last_positions_alone_are_those_of_the_whole_pass(family, side):
    model = tiny(family, n_layers=3)
    tokens, mask = batch(side)
    with torch.no_grad():
        full = model(tokens, attention_mask=mask)
        final = model(tokens, attention_mask=mask, stop_at_layer=3)
        between = model(tokens, attention_mask=mask, stop_at_layer=2)
        for last in (1, 3, 7):
            end = slice(7 - last, None)
            logits = model(tokens, attention_mask=mask, last=last)
            assert error(logits, full[:, end]) < FLOAT32
            resid = model(tokens, attention_mask=mask, stop_at_layer=3, last=last)
            assert error(resid, final[:, end]) < FLOAT32
            resid = model(tokens, attention_mask=mask, stop_at_layer=2, last=last)
            assert error(resid, between[:, end]) < FLOAT32
            rest = model(between, attention_mask=mask, start_at_layer=2, last=last)
            assert error(rest, full[:, end]) < FLOAT32
            # No layer is left: the residual is cut all the same.
            none = model(final, attention_mask=mask, start_at_layer=3, last=last)
            assert error(none, full[:, end]) < FLOAT32


def test_hooks_of_the_last_layer_see_the_last_positions_and_earlier_ones_all_of_them():
    model, tokens = tiny("gqa", n_layers=3), some_tokens(2, 7)
    with torch.no_grad():
        _, whole = model.run_with_cache(tokens)
        _, cut = model.run_with_cache(tokens, last=2)
    names = ("hook_resid_post", "attn.hook_z", "attn.hook_k", "hook_attn_out")
    lengths = {
        name: [cut[f"blocks.{layer}.{name}"].shape[1] for layer in range(3)] for name in names
    }
    assert lengths == {
        "hook_resid_post": [7, 7, 2],
        "attn.hook_z": [7, 7, 7],
        "attn.hook_k": [7, 7, 7],  # the last queries attend to every key
        "hook_attn_out": [7, 7, 2],
    }
    for name in names:
        own = cut[f"blocks.2.{name}"]
        assert error(own, whole[f"blocks.2.{name}"][:, -own.shape[1] :]) < FLOAT32


def test_impossible_last_positions_are_refused():
    model, tokens = tiny(), some_tokens(2, 5)
    for last in (0, -1, 6):
        with pytest.raises(ShapeError, match=f"^last = {last}, but there are 5 positions$"):
            model(tokens, last=last)
    for return_type in ("loss", "both"):
        with pytest.raises(
            ModelError, match=r"^a loss is of all positions: last belongs to logits"
        ):
            model(tokens, last=2, return_type=return_type)


def test_hooks_that_edit_in_place_leave_the_callers_residual_alone():
    model = tiny()
    resid = torch.randn(1, 5, 24)
    before = resid.clone()
    with torch.no_grad():
        model.run_with_hooks(
            resid,
            start_at_layer=1,
            fwd_hooks=[("blocks.1.hook_resid_pre", lambda x, hook: x.zero_())],
        )
    assert torch.equal(resid, before)


# --- number formats -------------------------------------------------------------------------


@family
def test_a_bfloat16_model_runs_and_its_patterns_are_distributions(family):
    exact = tiny(family)
    model = copy.deepcopy(exact).bfloat16()
    tokens = some_tokens(2, 7)
    mask = padding("left", (7, 3), 7)
    for given in (None, mask):
        logits, cache = model.run_with_cache(tokens, attention_mask=given)
        assert logits.dtype == torch.bfloat16
        assert model.cfg.dtype == torch.bfloat16
        for layer in range(2):
            pattern = cache[f"blocks.{layer}.attn.hook_pattern"]
            assert pattern.dtype == torch.bfloat16
            # Each of up to 7 weights is rounded once, by at most 2**-9 of itself.
            assert error(pattern[0].float().sum(-1), torch.ones(4, 7)) < 2**-8
        # bfloat16 keeps 8 bits: two layers of them, against float32.
        assert error(logits.float(), exact(tokens, attention_mask=given)) < 0.1
        assert error(model(tokens, attention_mask=given).float(), logits.float()) < 0.1
    assert next(iter(model.parameters())).dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["gqa", "llama", "rotary_smeared"])
def test_autocast_trains_with_float32_weights_on_padded_batches(family):
    model = tiny(family)
    tokens, mask = batch("left")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(tokens, attention_mask=mask, return_type="loss")
    loss.backward()
    assert loss.dtype == torch.float32
    exact = model(tokens, attention_mask=mask, return_type="loss")
    assert abs(float(loss.detach() - exact.detach())) < 0.1
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("kind", ["LN", "RMS"])
def test_norms_of_a_bfloat16_stream_take_their_statistics_in_float32(kind):
    x = (100 + torch.randn(1, 1, 24)).bfloat16()  # a mean that bfloat16 cannot subtract exactly
    model = perturbed(tiny_config(normalization_type=kind))
    runs = []
    for norm, stream in (
        (model.ln_final, x.float()),
        (copy.deepcopy(model).bfloat16().ln_final, x),
    ):
        seen = []
        norm.hook_scale.add_hook(lambda scale, hook, seen=seen: seen.append(scale))
        runs.append((norm(stream), seen[0]))
    (exact, exact_scale), (rounded, scale) = runs
    assert torch.equal(scale, exact_scale)  # float32 too
    assert rounded.dtype == torch.bfloat16
    # One rounding each of gain, bias and result.
    assert error(rounded.float(), exact) < 2**-6


# --- input ----------------------------------------------------------------------------------


def test_ids_come_as_lists_arrays_or_tensors_of_one_or_two_axes():
    model = tiny()
    tokens = some_tokens(1, 5)
    wanted = model(tokens)
    for form in (
        tokens[0],
        tokens.tolist(),
        tokens[0].tolist(),
        tokens.numpy(),
        tokens.int(),
        tokens.to(torch.uint8),
    ):
        assert torch.equal(model(form), wanted)


@pytest.mark.parametrize("family", ["mha", "rotary", "no_positions"])
def test_a_sequence_longer_than_the_context_is_refused_before_it_runs(family):
    model = tiny(family)
    assert model(some_tokens(1, N_CTX)).shape == (1, N_CTX, D_VOCAB)
    with pytest.raises(ShapeError, match=f"^sequence {N_CTX + 1} > n_ctx {N_CTX}$"):
        model(some_tokens(1, N_CTX + 1))
    with pytest.raises(ShapeError, match=f"^sequence {N_CTX + 1} > n_ctx {N_CTX}$"):
        model(torch.zeros(1, N_CTX + 1, 24), start_at_layer=0)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ([], ShapeError, r"the prompt is empty: at least one token is needed"),
        (torch.zeros(2, 0, dtype=torch.long), ShapeError, r"the prompt is empty"),
        ([[0, D_VOCAB]], ShapeError, r"token id 19 is outside the vocabulary of 19"),
        ([[0, -1]], ShapeError, r"token id -1 is outside the vocabulary of 19"),
        ([[0.5, 1.0]], ShapeError, r"token ids should be integers, got float64"),
        (torch.zeros(1, 3), ShapeError, r"token ids should be integers, got torch\.float32"),
        (torch.zeros(1, 3, dtype=torch.bool), ShapeError, r"integers, got torch\.bool"),
        (
            torch.zeros(1, 2, 3, dtype=torch.long),
            ShapeError,
            r"should be \[batch, pos\], got \[1, 2, 3\]",
        ),
        (
            [[1, 2], [3]],
            ShapeError,
            r"the sequences differ in length: pad them and give an attention_mask",
        ),
        ("text", ModelError, r"this model has no tokenizer: give token ids, not text"),
        (["text"], ModelError, r"this model has no tokenizer: give token ids, not text"),
    ],
)
def test_input_that_is_no_batch_of_ids_is_refused_in_one_line(given, kind, message):
    with pytest.raises(kind, match=message) as caught:
        tiny()(given)
    assert "\n" not in str(caught.value)


def test_impossible_requests_say_what_was_given_and_what_would_be_right():
    model, tokens = tiny(), some_tokens(2, 5)
    with pytest.raises(ShapeError, match=r"attention_mask \[2, 4\] for tokens \[2, 5\]"):
        model(tokens, attention_mask=torch.ones(2, 4))
    with pytest.raises(ShapeError, match="stop_at_layer = 3, but the model has 2 layers"):
        model(tokens, stop_at_layer=3)
    with pytest.raises(ShapeError, match="start_at_layer = -3, but the model has 2 layers"):
        model(torch.zeros(1, 5, 24), start_at_layer=-3)
    with pytest.raises(ShapeError, match=r"residual \[batch, pos, 24\], got \(2, 5\)"):
        model(tokens, start_at_layer=1)
    with pytest.raises(ShapeError, match=r"residual \[batch, pos, 24\], got list"):
        model(tokens.tolist(), start_at_layer=1)
    with pytest.raises(ModelError, match="a loss needs token ids"):
        model(torch.zeros(1, 5, 24), start_at_layer=1, return_type="loss")
    with pytest.raises(AttributeError, match="Transformer has no 'set_use_attn_result'"):
        model.set_use_attn_result(True)
    with pytest.raises(AttributeError, match="Transformer has no 'W_pos'"):
        _ = tiny("rotary").W_pos


def test_an_unknown_return_type_is_refused_where_types_are_not_checked(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(
        ModelError, match=r"return_type = 'logit': one of 'logits', 'loss', 'both', None"
    ):
        tiny()(some_tokens(1, 3), return_type="logit")


def test_the_flat_config_carries_transformerlens_names():
    cfg = tiny("llama").cfg
    assert (cfg.n_layers, cfg.n_heads, cfg.n_key_value_heads) == (2, 4, 2)
    assert (cfg.d_model, cfg.d_head, cfg.d_mlp, cfg.d_vocab, cfg.n_ctx) == (24, 8, 20, 19, N_CTX)
    assert (cfg.act_fn, cfg.gated_mlp, cfg.attn_only) == ("silu", True, False)
    assert (cfg.normalization_type, cfg.eps) == ("RMS", 1e-2)
    assert (cfg.positional_embedding_type, cfg.rotary_base) == ("rotary", 10000.0)
    assert (cfg.device, cfg.dtype) == ("cpu", torch.float32)
    only = tiny("attention_only", normalization_type="none").cfg
    assert (only.attn_only, only.act_fn, only.d_mlp) == (True, None, None)
    assert only.normalization_type is None


def test_mlp_weights_in_transformerlens_layout_reproduce_the_mlp():
    model = tiny("gated_with_bias")
    mlp, block = model.blocks[0].mlp, "blocks.0"
    _, cache = model.run_with_cache(some_tokens(2, 5))
    x = model.blocks[0].ln2(cache[f"{block}.hook_resid_mid"])
    pre = x @ mlp.W_gate + mlp.gate_proj.bias
    assert error(cache[f"{block}.mlp.hook_pre"], pre) < FLOAT32
    post = nn.functional.gelu(pre) * (x @ mlp.W_in + mlp.b_in)
    assert error(cache[f"{block}.mlp.hook_post"], post) < FLOAT32
    assert error(cache[f"{block}.hook_mlp_out"], post @ mlp.W_out + mlp.b_out) < FLOAT32
    plain = tiny("relu_tied").blocks[0].mlp
    assert plain.W_gate is None
    assert np.array_equal(plain.b_in.numpy(), np.zeros(20))
