"""Weights of GPT-2 and Llama type: the same numbers as `transformers`, and every tensor used."""

import copy

import hf_models
import pytest
import torch
from hf_models import MODELS, T, fault, gap, log_probs, native, tokens
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from interp.models.layers import HeadNorm, RMSNorm
from interp.models.pretrained import hf_weights, native_weights
from interp.models.weights import stored_weights

# The bar for log-probs; measured differences are 3e-6 at most, float32 rounding of two layers.
PARITY = 1e-4

every_model = pytest.mark.parametrize("name", MODELS)


# --- parity -----------------------------------------------------------------------------------


@every_model
@torch.no_grad()
def test_log_probs_hidden_states_and_patterns_are_those_of_transformers(name):
    theirs = MODELS[name]()
    ours = native(theirs)
    wanted = theirs(tokens(), output_hidden_states=True, output_attentions=True)
    logits, cache = ours.run_with_cache(tokens())
    assert gap(log_probs(logits), log_probs(wanted.logits)) < PARITY
    n_layers = ours.cfg.n_layers
    for layer in range(n_layers):
        resid_pre = cache[f"blocks.{layer}.hook_resid_pre"]
        assert gap(resid_pre, wanted.hidden_states[layer]) < PARITY
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"]
        assert gap(pattern, wanted.attentions[layer]) < 1e-5
        # Heads differ, and attend far from evenly: equal patterns would say little otherwise.
        assert gap(pattern[:, 0], pattern[:, 1]) > 1e-3
    # The last hidden state of transformers is already normalised.
    last = cache[f"blocks.{n_layers - 1}.hook_resid_post"]
    assert gap(ours.ln_final(last), wanted.hidden_states[n_layers]) < PARITY
    assert gap(last, wanted.hidden_states[n_layers]) > 0.1


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("by_layer", [True, False])
@pytest.mark.parametrize("upcast", [True, False])
@torch.no_grad()
def test_each_scaling_flag_of_gpt2_acts_as_in_transformers(scaled, by_layer, upcast):
    theirs = hf_models.gpt2(
        scale_attn_weights=scaled,
        scale_attn_by_inverse_layer_idx=by_layer,
        reorder_and_upcast_attn=upcast,
    )
    ours = native(theirs)
    wanted = log_probs(theirs(tokens()).logits)
    assert gap(log_probs(ours(tokens())), wanted) < PARITY
    scale = (8**-0.5 if scaled else 1.0) / (2 if by_layer else 1)
    assert ours.blocks[1].attn.scale == pytest.approx(scale)
    if not scaled or by_layer:  # the flag is no bystander
        assert gap(log_probs(hf_models.gpt2()(tokens()).logits), wanted) > 0.01


@torch.no_grad()
def test_the_square_output_projection_is_not_left_transposed():
    theirs = hf_models.gpt2()
    ours = native(theirs)
    outputs = []
    theirs.transformer.h[0].attn.register_forward_hook(lambda m, a, out: outputs.append(out[0]))
    theirs(tokens())
    _, cache = ours.run_with_cache(tokens(), names_filter="blocks.0.hook_attn_out")
    assert gap(cache["blocks.0.hook_attn_out"], outputs[0]) < PARITY


def test_fused_queries_keys_and_values_lie_in_blocks_and_heads_in_order():
    theirs = hf_models.gpt2()
    with torch.no_grad():  # every output channel holds its own number
        theirs.transformer.h[1].attn.c_attn.weight.copy_(torch.arange(96.0).expand(32, 96))
        theirs.transformer.h[1].attn.c_attn.bias.copy_(torch.arange(96.0))
    attn = native(theirs).blocks[1].attn
    for first, weight, bias in (
        (0, attn.W_Q, attn.b_Q),
        (32, attn.W_K, attn.b_K),
        (64, attn.W_V, attn.b_V),
    ):
        for head in range(4):
            channels = torch.arange(8.0) + first + 8 * head
            assert torch.equal(bias[head], channels)
            assert torch.equal(weight[head], channels.expand(32, 8))


@torch.no_grad()
def test_a_window_counts_the_query_itself_as_transformers_does():
    theirs = hf_models.mistral(sliding_window=3)
    ours = native(theirs)
    short = tokens(n_pos=6)
    wanted = theirs(short, output_attentions=True).attentions
    _, cache = ours.run_with_cache(short)
    for layer in range(2):
        seen = cache[f"blocks.{layer}.attn.hook_pattern"] != 0
        assert (seen.sum(-1) == torch.tensor([1, 2, 3, 3, 3, 3])).all()
        assert torch.equal(seen, wanted[layer] != 0)


@torch.no_grad()
def test_a_head_size_of_its_own_reaches_heads_rotary_and_scale():
    ours = native(hf_models.llama())  # 6 heads of 16 over a stream of 48
    _, cache = ours.run_with_cache(tokens())
    assert cache["blocks.0.attn.hook_z"].shape == (2, T, 6, 16)
    assert cache["blocks.0.attn.hook_k"].shape == (2, T, 2, 16)
    assert len(ours.rotary.frequencies) == 8
    assert ours.blocks[0].attn.scale == 0.25


# --- half precision ---------------------------------------------------------------------------


def units_apart(a: Tensor, b: Tensor) -> int:
    """How many representable numbers two half-precision tensors are apart at most."""
    ordered = [x.view(torch.int16).int() for x in (a, b)]
    ordered = [torch.where(x < 0, -(x & 0x7FFF), x) for x in ordered]
    return int((ordered[0] - ordered[1]).abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [RMSNorm, HeadNorm])
@torch.no_grad()
def test_the_norm_in_half_precision_is_that_of_transformers(kind, dtype):
    theirs, ours = LlamaRMSNorm(64, eps=1e-3).to(dtype), kind(64, 1e-3).to(dtype)
    gain = 1 + 0.1 * torch.randn(64)
    theirs.weight.copy_(gain)
    ours.w.copy_(gain)
    x = (3 * torch.randn(2, 40, 4, 64)).to(dtype)
    if kind is RMSNorm:
        x = x.flatten(1, 2)
    assert ours(x).dtype == dtype
    assert units_apart(ours(x), theirs(x)) <= 1


@torch.no_grad()
def test_the_norm_of_numbers_whose_squares_do_not_fit_is_their_sign_times_the_gain():
    norm = RMSNorm(64, 1e-5).to(torch.float16)
    norm.w.copy_(torch.linspace(0.5, 2.0, 64))
    assert torch.equal(norm(torch.full((1, 3, 64), 300.0).half()), norm.w.expand(1, 3, 64))


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "qwen2", "qwen3", "llama3_scaled"])
@torch.no_grad()
def test_bfloat16_is_kept_and_close_to_float32(name):
    theirs = MODELS[name]()
    full, half = native(theirs), native(theirs, dtype=torch.bfloat16)
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}
    logits, cache = half.run_with_cache(tokens())
    assert {value.dtype for value in cache.values()} <= {torch.bfloat16, torch.float32}
    assert cache["blocks.1.hook_resid_post"].dtype == torch.bfloat16
    p, q = log_probs(full(tokens())), log_probs(logits)
    divergence = (p.exp() * (p - q)).sum(-1)
    assert 0 < divergence.max() < 1e-3  # nats; 2e-4 at most, measured


# --- weights ----------------------------------------------------------------------------------


@every_model
def test_weights_stay_as_stored_and_come_back_bit_for_bit(name):
    theirs = MODELS[name]()
    stored = theirs.state_dict()
    if theirs.config.tie_word_embeddings:
        del stored["lm_head.weight"]
    ours = native(theirs)
    back = hf_weights(ours)
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[key], stored[key]) for key in stored)
    n_stored = sum(value.numel() for value in stored.values())
    assert sum(value.numel() for value in stored_weights(ours).values()) == n_stored


def test_weights_are_fresh_contiguous_copies_in_the_wanted_dtype():
    theirs = hf_models.gpt2()
    before = copy.deepcopy(theirs.state_dict())
    ours = native(theirs, dtype=torch.bfloat16)
    for weight in ours.parameters():
        assert weight.dtype == torch.bfloat16
        assert weight.is_contiguous()
    same = native(theirs)
    with torch.no_grad():
        for weight in same.parameters():
            weight.zero_()
    after = theirs.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)
    storages = [weight.untyped_storage() for weight in same.parameters()]
    assert all(
        s.nbytes() == 4 * w.numel() for s, w in zip(storages, same.parameters(), strict=True)
    )


def buffers(kind: str) -> dict[str, Tensor]:
    if kind == "gpt2":
        causal = torch.ones(64, 64).tril()[None, None]
        names = ("bias", causal), ("masked_bias", torch.tensor(-1e4))
        return {f"transformer.h.{i}.attn.{name}": value for i in (0, 1) for name, value in names}
    inverse = torch.ones(8)
    return {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": inverse for i in (0, 1)}


@pytest.mark.parametrize(("kind", "prefix"), [("gpt2", "transformer."), ("llama", "model.")])
@torch.no_grad()
def test_buffers_and_the_prefix_may_be_there_or_not(kind, prefix):
    theirs = MODELS[kind]()
    plain = theirs.state_dict()
    wanted = native(theirs)(tokens())
    with_buffers = {**plain, **buffers(kind)}
    bare = {name.removeprefix(prefix): value for name, value in plain.items()}
    bare_with_buffers = {name.removeprefix(prefix): v for name, v in with_buffers.items()}
    for weights in (with_buffers, bare, bare_with_buffers):
        assert torch.equal(native(theirs, weights=weights)(tokens()), wanted)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_buffer_of_a_layer_that_is_not_there_is_no_harmless_one(kind):
    theirs = MODELS[kind]()
    (name, *_) = buffers(kind)
    name = name.replace(".0.", ".7.")
    message = fault(native, theirs, weights={**theirs.state_dict(), name: torch.ones(1)})
    assert message == f"here does not fit its config: unknown {name}"


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama_tied"])
def test_a_tied_head_may_be_left_out_or_repeat_the_embedding_but_not_differ(name):
    theirs = MODELS[name]()
    full = {key: value.clone() for key, value in theirs.state_dict().items()}
    without = {key: value for key, value in full.items() if key != "lm_head.weight"}
    wanted = log_probs(theirs(tokens()).logits)
    for weights in (full, without):
        ours = native(theirs, weights=weights)
        assert ours.unembed.weight is ours.embed.weight
        assert torch.equal(ours.W_U, ours.W_E.T)
        assert gap(log_probs(ours(tokens())), wanted) < PARITY
    full["lm_head.weight"][3, 5] = torch.nextafter(full["lm_head.weight"][3, 5], torch.tensor(9.0))
    embedding = "transformer.wte.weight" if name == "gpt2" else "model.embed_tokens.weight"
    assert fault(native, theirs, weights=full) == (
        "here: its config says tied (tie_word_embeddings = true), but lm_head.weight differs from "
        f"{embedding}"
    )


@pytest.mark.parametrize("name", ["gpt2_untied", "llama"])
def test_an_untied_model_without_a_head_is_refused(name):
    theirs = MODELS[name]()
    weights = {k: value for k, value in theirs.state_dict().items() if k != "lm_head.weight"}
    assert fault(native, theirs, weights=weights) == (
        "here does not fit its config: missing lm_head.weight; its config says untied "
        "(tie_word_embeddings = false)"
    )


def test_missing_and_unknown_tensors_are_listed_together():
    theirs = hf_models.qwen2()
    weights = theirs.state_dict()
    weights["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)
    weights["sinks"] = torch.ones(6)
    weights["model.lm_head.weight"] = weights["lm_head.weight"]
    del weights["model.layers.1.self_attn.k_proj.bias"], weights["model.norm.weight"]
    assert fault(native, theirs, weights=weights) == (
        "here does not fit its config: missing model.layers.1.self_attn.k_proj.bias, "
        "model.norm.weight; unknown model.layers.0.self_attn.q_norm.weight, model.lm_head.weight, "
        "sinks"
    )


def test_the_head_has_no_prefix():
    theirs = hf_models.llama()
    weights = theirs.state_dict()
    weights["model.lm_head.weight"] = weights.pop("lm_head.weight")
    assert "missing lm_head.weight; unknown model.lm_head.weight" in fault(
        native, theirs, weights=weights
    )


def test_biases_that_the_config_does_not_have_are_not_dropped():
    theirs = hf_models.llama()
    hf = {**theirs.config.to_dict(), "attention_bias": False}
    given = theirs.state_dict()
    message = fault(native_weights, hf, given.keys(), given.get, "here", torch.float32)
    assert message.startswith(
        "here does not fit its config: unknown model.layers.0.self_attn.k_proj.bias, "
    )
    assert message.count(".bias") == 8


def test_a_name_twice_with_and_without_the_prefix_is_refused():
    theirs = hf_models.llama()
    weights = theirs.state_dict()
    weights["norm.weight"] = weights["model.norm.weight"]
    assert fault(native, theirs, weights=weights).endswith("unknown norm.weight")


def test_misshapen_tensors_are_listed_with_the_shape_that_would_fit():
    theirs = hf_models.gpt2()
    weights = theirs.state_dict()
    weights["transformer.wpe.weight"] = torch.zeros(63, 32)
    weights["transformer.h.0.attn.c_attn.weight"] = torch.zeros(96, 32)
    weights["transformer.h.1.mlp.c_fc.bias"] = torch.zeros(())
    assert fault(native, theirs, weights=weights) == (
        "here does not fit its config: transformer.wpe.weight is [63, 32], not [64, 32]; "
        "transformer.h.0.attn.c_attn.weight is [96, 32], not [32, 96]; "
        "transformer.h.1.mlp.c_fc.bias is [], not [128]"
    )


def test_a_long_list_names_its_first_and_says_how_many_more():
    theirs = hf_models.llama()
    message = fault(native, theirs, weights={})
    assert message.startswith("here does not fit its config: missing model.embed_tokens.weight, ")
    assert message.count("model.") == 20
    assert message.endswith(" and 9 more")  # of 29


def test_integers_are_no_weights():
    theirs = hf_models.llama()
    weights = theirs.state_dict()
    weights["model.norm.weight"] = torch.ones(48, dtype=torch.int8)
    assert fault(native, theirs, weights=weights) == (
        "here: model.norm.weight is stored as torch.int8, which is no weight as it is"
    )
