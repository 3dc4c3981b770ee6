"""Bridged models: what transformers computes, under the names our own model has."""

import copy
import socket

import hf_models
import jaxtyping
import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import interp
from interp import registry
from interp.errors import AnalysisError, ModelError, ShapeError
from interp.models.bridge import BridgedModel
from interp.models.bridging import bridge_model
from interp.models.layer_attention import uniform_attention
from interp.models.loading import load_model
from interp.models.watch import HookedModel, as_hooked, looking_at

# Products in another order: GPT-2's joint projection is cut into three.
ROUNDING = 1e-5

NATIVE = ["gpt2", "llama", "mistral", "qwen2", "qwen3"]
DECODERS = [*NATIVE, "llama3_scaled", "gemma2", "olmo2", "gpt_neox", "opt", "bloom"]
FAMILIES = [*DECODERS, "bert", "roberta"]

POST_NORM = ["gemma2", "olmo2"]
ENCODERS = ["bert", "roberta"]
# Their attention is left to transformers, which hands out weights and no scores.
DELEGATED = ["opt", "bert", "roberta"]


def opt(**changes):
    """OPT: learned positions that follow from the mask, attention left to transformers."""
    fields = {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "ffn_dim": 64,
        "vocab_size": 97,
        "max_position_embeddings": 64,
        **changes,
    }
    return hf_models._built(transformers.OPTForCausalLM, transformers.OPTConfig(**fields), 0)


def roberta(**changes):
    """RoBERTa: an encoder whose positions start behind the padding id's."""
    fields = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "vocab_size": 97,
        "max_position_embeddings": 66,
        "pad_token_id": 1,
        **changes,
    }
    return hf_models._built(
        transformers.RobertaForMaskedLM, transformers.RobertaConfig(**fields), 0
    )


def mixtral():
    """Mixtral: a mixture of experts."""
    config = transformers.MixtralConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=97,
        intermediate_size=64,
        num_local_experts=4,
    )
    return hf_models._built(transformers.MixtralForCausalLM, config, 0)


def bloom():
    """Bloom: positions are added to the scores, and the residual inside its attention module."""
    config = transformers.BloomConfig(hidden_size=32, n_head=4, n_layer=2, vocab_size=97)
    return hf_models._built(transformers.BloomForCausalLM, config, 0)


def deepseek():
    """DeepSeek-V2: latent attention."""
    config = transformers.DeepseekV2Config(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_hidden_layers=2,
        vocab_size=97,
        intermediate_size=64,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        moe_intermediate_size=16,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
    )
    return hf_models._built(transformers.DeepseekV2ForCausalLM, config, 0)


def made(family, **changes):
    """A tiny Hugging Face model of a family."""
    return (globals().get(family) or getattr(hf_models, family))(**changes)


def tokens_for(hf, batch=2, n_pos=9, seed=0):
    """Random ids, none of which is special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, hf.config.vocab_size - 2, (batch, n_pos), generator=generator)


_BRIDGED = {}


def bridged(family):
    """The family's model and its bridge, made once."""
    if family not in _BRIDGED:
        hf = made(family)
        _BRIDGED[family] = hf, bridge_model(hf, name=family)
    return _BRIDGED[family]


@torch.no_grad()
def theirs(hf, tokens, **given):
    """What transformers computes."""
    return hf(input_ids=tokens, **given)


def fault(action, kind=ModelError):
    with pytest.raises(kind) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def hooked_points(model):
    """How many hooks sit on each point that has any."""
    points = {str(point.name): point for point in model.bridge.hook_dict.values()}
    return {name: len(p.fwd_hooks) for name, p in points.items() if p.has_hooks()}


def left_padded(tokens, n_pads=3, pad=5):
    """The second row shifted right behind tokens that would matter if they were seen."""
    shifted, mask = tokens.clone(), torch.ones_like(tokens)
    shifted[1, n_pads:] = tokens[1, :-n_pads]
    shifted[1, :n_pads], mask[1, :n_pads] = pad, 0
    return shifted, mask


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


# --- the given model --------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "bert"])
def test_the_given_model_is_left_as_it_was_bit_for_bit(family):
    hf = made(family)
    fused = "eager" if family == "gemma2" else "sdpa"  # soft-capping has no fused operator
    hf.set_attn_implementation(fused)
    hf.train()
    tokens = tokens_for(hf)
    hf.eval()
    before = hf(tokens).logits
    hf.train()
    weights = {name: value.clone() for name, value in hf.state_dict().items()}
    kinds = [type(module) for module in hf.modules()]
    config = hf.config.to_dict()

    model = bridge_model(hf, name=family)
    assert not any(part.training for part in model.modules())
    model.run_with_cache(tokens)
    model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.hook_z", lambda z, hook: z * 0)])

    assert hf.config.to_dict() == config
    assert hf.config._attn_implementation == fused
    assert [type(module) for module in hf.modules()] == kinds
    assert hf.state_dict().keys() == weights.keys()
    assert all(torch.equal(hf.state_dict()[name], value) for name, value in weights.items())
    assert all(module.training for module in hf.modules())
    hf.eval()
    assert torch.equal(hf(tokens).logits, before)
    shared = {p.data_ptr() for p in hf.parameters()}
    assert not shared & {p.data_ptr() for p in model.bridge.original_model.parameters()}


@pytest.mark.parametrize("family", [*FAMILIES, "mixtral", "deepseek"])
def test_logits_are_those_of_transformers(family):
    hf, model = bridged(family)
    tokens = tokens_for(hf)
    assert isinstance(model, HookedModel)
    torch.testing.assert_close(model(tokens), theirs(hf, tokens).logits, rtol=0, atol=ROUNDING)


def test_neither_a_tokenizer_nor_the_network_is_needed(monkeypatch):
    def refuse(*args):
        raise AssertionError("the network was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    hf = made("gpt2")
    model = bridge_model(hf, name="mine")
    # 96 is BOS: neither added nor taken away.
    for ids in ([[7, 8, 9]], [[96, 7, 8]], [[96, 96, 7]], [7, 8, 9]):
        tokens = torch.tensor(ids)
        expected = theirs(hf, tokens if tokens.ndim == 2 else tokens[None]).logits
        torch.testing.assert_close(model(tokens), expected, rtol=0, atol=ROUNDING)
    assert model.vocabulary is None
    assert fault(lambda: model("text")) == ("this model has no tokenizer: give token ids, not text")


def test_bfloat16_is_computed_and_stated_as_such():
    hf = made("llama").to(torch.bfloat16)
    tokens = tokens_for(hf)
    model = bridge_model(hf, name="llama")
    assert model.cfg.dtype == torch.bfloat16
    logits, cache = model.run_with_cache(tokens)
    assert logits.dtype == torch.bfloat16
    assert torch.equal(logits, theirs(hf, tokens).logits)
    scores = cache["blocks.0.attn.hook_attn_scores"]
    assert scores.dtype == torch.bfloat16
    assert torch.isneginf(scores).sum() == 2 * 6 * 9 * 8 / 2
    table = interp.analyze(model, "previous-token", tokens).table
    pattern = theirs(hf, tokens, output_attentions=True).attentions[1][:, 3].double()
    wanted = pattern.diagonal(offset=-1, dim1=1, dim2=2).mean()
    row = table[(table["layer"] == 1) & (table["head"] == 3)]
    assert float(row["previous_token"].iloc[0]) == pytest.approx(float(wanted), rel=1e-6)


def test_a_named_dtype_leaves_rotary_frequencies_exact():
    hf = made("llama")
    model = bridge_model(hf, name="llama", dtype=torch.bfloat16)
    assert model.cfg.dtype == torch.bfloat16
    assert hf.dtype == torch.float32
    own = dict(model.bridge.original_model.named_buffers())
    for name, value in hf.named_buffers():
        (found,) = (v for k, v in own.items() if k.replace("_original_component.", "") == name)
        assert torch.equal(found, value)
    reloaded = copy.deepcopy(hf).to(torch.bfloat16)
    for name, value in hf.named_buffers():
        reloaded.get_submodule(name.rpartition(".")[0]).register_buffer(
            name.rpartition(".")[2], value.clone(), persistent=False
        )
    tokens = tokens_for(hf)
    assert torch.equal(model(tokens), theirs(reloaded, tokens).logits)


def test_a_model_stays_itself_when_it_is_moved():
    hf, _ = bridged("gpt2")
    model = bridge_model(hf, name="gpt2")
    tokens = tokens_for(hf)
    before = model(tokens)
    assert model.to("cpu") is model
    assert model.cfg.device == "cpu"
    assert torch.equal(model(tokens), before)


# --- facts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", NATIVE)
def test_the_facts_are_those_of_our_own_model(family):
    hf, model = bridged(family)
    ours = load_model(hf).cfg
    for name in vars(ours):
        if name not in ("model_name", "rotary_base"):
            assert getattr(model.cfg, name) == getattr(ours, name), name
    if model.cfg.positional_embedding_type == "rotary":
        assert model.cfg.rotary_base == ours.rotary_base == 500.0
    assert model.cfg.model_name == model.model_name == family


def test_the_facts_of_other_families():
    assert bridged("bert")[1].cfg.attention_dir == "bidirectional"
    assert bridged("roberta")[1].cfg.attention_dir == "bidirectional"
    assert bridged("roberta")[1].cfg.n_ctx == 64  # two rows of the table are not positions
    assert bridged("gemma2")[1].cfg.window_size == 16
    assert bridged("gemma2")[1].cfg.tie_word_embeddings
    assert bridged("gpt_neox")[1].cfg.rotary_base == 10000.0
    assert bridge_model(made("opt", bos_token_id=500), name="o").cfg.bos_token_id is None
    assert bridge_model(made("qwen2", sliding_window=8), name="q").cfg.window_size is None
    above = made("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=2)
    assert above.config.sliding_window == 8
    assert bridge_model(above, name="q").cfg.window_size is None  # no layer is windowed
    windowed = made("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=1)
    assert bridge_model(windowed, name="q").cfg.window_size == 8


# --- hooks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", NATIVE)
def test_every_hook_holds_what_our_own_model_has_there(family):
    hf, model = bridged(family)
    native = load_model(hf)
    tokens = tokens_for(hf, n_pos=20)  # longer than Mistral's window of 16
    names = list(native.hook_dict)
    logits, expected = native.run_with_cache(tokens, names_filter=names)
    missing = [name for name in names if name not in model.hook_dict]
    assert missing == []
    found_logits, found = model.run_with_cache(tokens, names_filter=names)
    torch.testing.assert_close(found_logits, logits, rtol=0, atol=1e-4)
    for name in names:
        assert found[name].shape == expected[name].shape, name
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_patterns_and_residuals_are_those_of_transformers(family):
    hf, model = bridged(family)
    tokens = tokens_for(hf, n_pos=20)
    out = theirs(hf, tokens, output_attentions=True, output_hidden_states=True)
    _, cache = model.run_with_cache(tokens)
    for layer in range(2):
        block = f"blocks.{layer}"
        for name, wanted in (
            ("attn.hook_pattern", out.attentions[layer]),
            ("hook_resid_pre", out.hidden_states[layer]),
        ):
            found = cache[f"{block}.{name}"]
            torch.testing.assert_close(found, wanted, rtol=0, atol=ROUNDING)
        n_key_value_heads = model.cfg.n_key_value_heads
        for name, heads in (("q", 4), ("z", 4), ("k", n_key_value_heads), ("v", n_key_value_heads)):
            heads = model.cfg.n_heads if heads == 4 else heads
            assert cache[f"{block}.attn.hook_{name}"].shape == (2, 20, heads, model.cfg.d_head)
    assert torch.equal(cache["blocks.0.hook_resid_post"], cache["blocks.1.hook_resid_pre"])


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_add_up_through_the_output_weights(family):
    hf, model = bridged(family)
    _, cache = model.run_with_cache(tokens_for(hf))
    for layer in range(2):
        attn = model.blocks[layer].attn
        cfg = model.cfg
        assert attn.W_O.shape == (cfg.n_heads, cfg.d_head, cfg.d_model)
        assert attn.b_O.shape == (cfg.d_model,)
        z, pattern, v = (cache[f"blocks.{layer}.attn.hook_{n}"] for n in ("z", "pattern", "v"))
        v = v.repeat_interleave(cfg.n_heads // cfg.n_key_value_heads, dim=2)
        mixed = torch.einsum("bhqk,bkhd->bqhd", pattern, v)
        torch.testing.assert_close(z, mixed, rtol=0, atol=ROUNDING)
        summed = torch.einsum("bphd,hdm->bpm", z, attn.W_O) + attn.b_O
        # Before any norm of its own, an attention's output is what the heads and b_O sum to.
        output = "attn.hook_out" if family in POST_NORM else "hook_attn_out"
        torch.testing.assert_close(cache[f"blocks.{layer}.{output}"], summed, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gpt_neox"])
def test_the_residual_stream_adds_up(family):
    hf, model = bridged(family)
    _, cache = model.run_with_cache(tokens_for(hf))
    for layer in range(2):
        pre, attn_out, mid, mlp_out, post = (
            cache[f"blocks.{layer}.hook_{name}"]
            for name in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
        )
        torch.testing.assert_close(pre + attn_out, mid, rtol=0, atol=ROUNDING)
        if family in ENCODERS:  # its norms stand in the stream
            layer_of = next(m for m in hf.modules() if hasattr(m, "encoder")).encoder.layer[layer]
            normed = layer_of.attention.output.LayerNorm(mid)
            total = layer_of.output.LayerNorm(normed + mlp_out)
        else:
            total = mid + mlp_out
        torch.testing.assert_close(total, post, rtol=0, atol=ROUNDING)


def test_parallel_blocks_add_both_outputs_to_the_same_residual():
    hf, model = bridged("gpt_neox")
    _, cache = model.run_with_cache(tokens_for(hf))
    pre, attn_out, mlp_out, post = (
        cache[f"blocks.1.hook_{name}"]
        for name in ("resid_pre", "attn_out", "mlp_out", "resid_post")
    )
    torch.testing.assert_close(pre + attn_out + mlp_out, post, rtol=0, atol=ROUNDING)
    assert "blocks.1.hook_resid_mid" not in model.hook_dict


def test_results_are_built_for_the_call_that_asks_and_sum_to_the_output():
    for family in ("gpt2", "llama", "gemma2"):
        hf, model = bridged(family)
        tokens = tokens_for(hf)
        wanted = ["blocks.1.attn.hook_result", "blocks.1.attn.hook_out", "blocks.1.attn.o.hook_out"]
        logits, cache = model.run_with_cache(tokens, names_filter=wanted)
        torch.testing.assert_close(logits, model(tokens), rtol=0, atol=ROUNDING)
        result, out, projected = (cache[name] for name in wanted)
        assert result.shape == (2, 9, model.cfg.n_heads, model.cfg.d_model)
        summed = result.sum(dim=2) + model.blocks[1].attn.b_O
        torch.testing.assert_close(summed, out, rtol=0, atol=ROUNDING)
        assert torch.equal(projected, out)
        assert not model.bridge.cfg.use_attn_result
        assert not any(block.attn.config.use_attn_result for block in model.bridge.blocks)
        assert not any(name.endswith("hook_result") for name in model.run_with_cache(tokens)[1])
        silent = [("blocks.0.attn.hook_result", lambda r, hook: r * 0)]
        zeroed = [("blocks.0.attn.hook_z", lambda z, hook: z * 0)]
        torch.testing.assert_close(
            model.run_with_hooks(tokens, fwd_hooks=silent),
            model.run_with_hooks(tokens, fwd_hooks=zeroed),
            rtol=0,
            atol=ROUNDING,
        )


@pytest.mark.parametrize("family", [*FAMILIES, "mixtral", "deepseek"])
def test_every_name_that_is_offered_fires_once(family):
    hf, model = bridged(family)
    seen = []
    names = list(model.hook_dict)
    hooks = [(name, lambda value, hook: seen.append(hook.name)) for name in names]
    model.run_with_hooks(tokens_for(hf), fwd_hooks=hooks)
    # The rotary table may be asked for once for each kind of layer.
    fired = {name: seen.count(name) for name in names}
    wrong = {n: k for n, k in fired.items() if k != 1 and not n.startswith("rotary_emb")}
    assert wrong == {}
    assert not {f"blocks.0.attn.hook_{n}" for n in ("z", "pattern")} - set(names)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hook_that_gives_back_what_it_got_changes_no_bit(family):
    hf, model = bridged(family)
    tokens, mask = left_padded(tokens_for(hf))
    names = [name for name in model.hook_dict if not name.endswith("hook_result")]
    kept = {}

    def keep(value, hook):
        kept[hook.name] = value
        return value

    hooks = [(name, keep) for name in names]
    for given in ({}, {"attention_mask": mask}):
        clean = model(tokens, **given)
        assert torch.equal(model.run_with_hooks(tokens, fwd_hooks=hooks, **given), clean)
    assert kept.keys() == set(names)


def test_familiar_and_canonical_names_mean_one_point_and_hooks_hear_the_one_they_asked_for():
    hf, model = bridged("llama")
    tokens = tokens_for(hf)
    heard = []
    pairs = {
        "blocks.0.attn.hook_z": "blocks.0.attn.o.hook_in",
        "blocks.0.hook_resid_pre": "blocks.0.hook_in",
        "blocks.0.attn.hook_k": "blocks.0.attn.k.hook_out",
        "blocks.0.mlp.hook_post": "blocks.0.mlp.out.hook_in",
        "hook_embed": "embed.hook_out",
    }
    _, cache = model.run_with_cache(tokens)
    for familiar, canonical in pairs.items():
        assert model.hook_dict[familiar] is model.hook_dict[canonical]
        assert torch.equal(cache[familiar], cache[canonical])
        for name in (familiar, canonical):
            model.run_with_hooks(
                tokens, fwd_hooks=[(name, lambda value, hook: heard.append(hook.name))]
            )
    assert heard == [name for pair in pairs.items() for name in pair]
    heard.clear()
    model.run_with_hooks(
        tokens,
        fwd_hooks=[
            (lambda name: name.startswith("blocks.0.attn"), lambda v, hook: heard.append(hook.name))
        ],
    )
    assert heard.count("blocks.0.attn.hook_z") + heard.count("blocks.0.attn.o.hook_in") == 1


def test_scores_are_minus_infinity_where_attention_is_not_allowed():
    hf, model = bridged("mistral")
    native = load_model(hf)
    tokens, mask = left_padded(tokens_for(hf, n_pos=24))
    name = "blocks.1.attn.hook_attn_scores"
    real = mask.bool()
    for given in ({}, {"attention_mask": mask}):
        _, found = model.run_with_cache(tokens, names_filter=name, **given)
        _, expected = native.run_with_cache(tokens, names_filter=name, **given)
        assert torch.equal(torch.isneginf(found[name]), torch.isneginf(expected[name]))
        for row in range(2):
            keep = real[row] if given else slice(None)
            torch.testing.assert_close(
                found[name][row][:, keep], expected[name][row][:, keep], rtol=1e-4, atol=1e-4
            )


def test_edited_scores_act_even_in_place_and_even_minus_infinity():
    hf, model = bridged("gpt2")
    tokens, mask = left_padded(tokens_for(hf))
    name = "blocks.0.attn.hook_attn_scores"

    def only_the_diagonal(scores, hook):
        away = ~torch.eye(scores.shape[-1], dtype=torch.bool)
        return scores.masked_fill(away, -torch.inf)

    def in_place(scores, hook):
        scores[:] = only_the_diagonal(scores, hook)

    _, cache = model.run_with_cache(tokens)
    v = cache["blocks.0.attn.hook_v"]
    for edit in (only_the_diagonal, in_place):
        for given in ({}, {"attention_mask": mask}):
            z = []
            hooks = [
                (name, edit),
                ("blocks.0.attn.hook_z", lambda value, hook, z=z: z.append(value)),
            ]
            logits = model.run_with_hooks(tokens, fwd_hooks=hooks, **given)
            assert torch.isfinite(logits).all()
            assert torch.equal(z[0][0], v[0])


# --- masks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_is_computed_as_if_it_were_alone(family, side):
    hf, model = bridged(family)
    tokens = tokens_for(hf)
    padded, mask = left_padded(tokens)
    real = slice(3, None)
    if side == "right":
        padded, mask, real = padded.clone(), mask.flip(1), slice(None, -3)
        padded[1] = torch.cat((tokens[1, :-3], padded[1, :3]))
    both = model(padded, attention_mask=mask)
    alone = theirs(hf, tokens[1:, :-3]).logits
    torch.testing.assert_close(both[1:, real], alone, rtol=0, atol=ROUNDING)
    torch.testing.assert_close(both[:1], theirs(hf, tokens[:1]).logits, rtol=0, atol=ROUNDING)
    # The padding's own ids do not matter, even where one of them is the model's padding id.
    other = torch.where(mask.bool(), padded, 1)
    again = model(other, attention_mask=mask)
    torch.testing.assert_close(again[1:, real], alone, rtol=0, atol=ROUNDING)


def test_a_mask_of_ones_changes_no_bit_and_other_masks_are_checked():
    hf, model = bridged("gpt2")
    tokens = tokens_for(hf)
    ones = torch.ones_like(tokens)
    assert torch.equal(model(tokens, attention_mask=ones), model(tokens))
    assert fault(lambda: model(tokens, attention_mask=ones[:, :4]), ShapeError) == (
        "attention_mask [2, 4] for tokens [2, 9]"
    )
    assert "not scores to add" in fault(
        lambda: model(tokens, attention_mask=ones * -1e9), ShapeError
    )


@pytest.mark.parametrize("family", ["gpt2", "mistral", "bert"])
def test_a_query_that_may_attend_to_nothing_has_a_row_of_zeros(family):
    hf, model = bridged(family)
    tokens, mask = left_padded(tokens_for(hf))
    _, cache = model.run_with_cache(tokens, attention_mask=mask)
    for layer in range(2):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"]
        sums = pattern.sum(dim=-1)
        assert (pattern[1, :, :, :3] == 0).all()
        if family == "bert":  # padding sees the real tokens
            torch.testing.assert_close(sums, torch.ones_like(sums))
            continue
        assert (sums[1, :, :3] == 0).all()
        torch.testing.assert_close(sums[1, :, 3:], torch.ones_like(sums[1, :, 3:]))
        expected = load_model(hf).run_with_cache(tokens, attention_mask=mask)
        wanted = expected[1][f"blocks.{layer}.attn.hook_pattern"]
        torch.testing.assert_close(pattern, wanted, rtol=0, atol=ROUNDING)


def test_inputs_that_do_not_fit_are_refused():
    _, model = bridged("gpt2")
    assert fault(lambda: model(torch.zeros(1, 65, dtype=torch.long)), ShapeError) == (
        "sequence 65 > n_ctx 64"
    )
    assert fault(lambda: model([[3, 97]]), ShapeError) == (
        "token id 97 is outside the vocabulary of 97"
    )
    assert fault(lambda: model([[0.5]]), ShapeError) == (
        "token ids should be integers, got float64"
    )


def test_an_unknown_return_type_is_refused_where_types_are_not_checked(monkeypatch):
    _, model = bridged("gpt2")
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    assert fault(lambda: model([[1]], return_type="logit")) == (
        "return_type = 'logit': one of 'logits', 'loss', 'both', None"
    )


# --- losses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_losses_are_in_nats_and_zero_on_padding(family):
    hf, model = bridged(family)
    tokens, mask = left_padded(tokens_for(hf))
    logits, losses = model(tokens, attention_mask=mask, return_type="both", loss_per_token=True)
    assert torch.equal(logits, model(tokens, attention_mask=mask))
    assert losses.shape == (2, 8)
    picked = -logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(losses[0], picked[0], rtol=0, atol=ROUNDING)
    torch.testing.assert_close(losses[1, 3:], picked[1, 3:], rtol=0, atol=ROUNDING)
    assert (losses[1, :3] == 0).all()
    mean = model(tokens, attention_mask=mask, return_type="loss")
    torch.testing.assert_close(mean, losses.sum() / (8 + 5))
    whole = theirs(hf, tokens, labels=tokens).loss
    torch.testing.assert_close(model(tokens, return_type="loss"), whole, rtol=1e-5, atol=0)


def test_without_a_result_the_hooks_still_see_everything():
    hf, model = bridged("gpt2")
    tokens = tokens_for(hf)
    seen = {}

    def keep(value, hook):
        seen[hook.name] = value.clone()

    names = ["blocks.1.hook_resid_post", "ln_final.hook_normalized"]
    hooks = [(name, keep) for name in names]
    assert model.run_with_hooks(tokens, fwd_hooks=hooks, return_type=None) is None
    _, cache = model.run_with_cache(tokens)
    assert all(torch.equal(seen[name], cache[name]) for name in names)
    hooks = [(name, keep) for name in ("unembed.hook_out", "hook_unembed", "unembed.hook_in")]
    assert model.run_with_hooks(tokens, fwd_hooks=hooks, return_type=None) is None
    assert torch.equal(seen["unembed.hook_out"], model(tokens))
    assert torch.equal(seen["hook_unembed"], model(tokens))


# --- encoders ---------------------------------------------------------------------------------


def test_an_encoder_has_no_next_token_loss():
    hf, model = bridged("bert")
    for return_type in ("loss", "both"):
        assert fault(lambda kind=return_type: model(tokens_for(hf), return_type=kind)) == (
            "bert is an encoder, where every token sees the next one: it has no next-token loss"
        )
    with pytest.raises(ModelError, match="no next-token loss"):
        interp.ablate(model, tokens_for(hf))


@pytest.mark.parametrize("family", DELEGATED)
def test_attention_left_to_transformers_is_shown_and_not_edited(family):
    hf, model = bridged(family)
    tokens, mask = left_padded(tokens_for(hf))
    name = "blocks.1.attn.hook_pattern"

    def in_place(pattern, hook):
        pattern *= 0

    before = hooked_points(model)
    for given in ({}, {"attention_mask": mask}):
        for edit in (lambda pattern, hook: pattern * 0, in_place):
            message = fault(
                lambda edit=edit, given=given: model.run_with_hooks(
                    tokens, fwd_hooks=[(name, edit)], **given
                )
            )
            assert message == (
                f"{name} cannot be edited: this architecture leaves attention to transformers, "
                "which has used the weights already; edit attn.hook_z"
            )
    assert hooked_points(model) == before
    missing = [("blocks.0.attn.hook_attn_scores", lambda value, hook: None)]
    assert fault(lambda: model.run_with_hooks(tokens, fwd_hooks=missing)) == (
        "no hook 'blocks.0.attn.hook_attn_scores': this architecture leaves attention to "
        "transformers, which shows weights and no scores"
    )
    assert "hook_z @ blocks[L].attn.W_O" in fault(
        lambda: model.run_with_cache(tokens, names_filter=["blocks.0.attn.hook_result"])
    )


def test_an_encoder_is_analysed_over_keys_on_both_sides():
    hf, model = bridged("bert")
    tokens = tokens_for(hf, n_pos=20)
    attentions = theirs(hf, tokens, output_attentions=True).attentions
    table = interp.analyze(model, "previous-token", tokens).table
    wanted = [a.diagonal(offset=-1, dim1=2, dim2=3).mean(dim=(0, 2)) for a in attentions]
    np.testing.assert_allclose(table["previous_token"], torch.cat(wanted), rtol=1e-5)
    even = uniform_attention(torch.ones(1, 20, dtype=torch.bool), causal=False)
    assert torch.equal(next(even.rows())[2], torch.full((1, 1, 20, 20), 1 / 20))
    half = next(uniform_attention(torch.tensor([[True] * 5 + [False] * 5]), causal=False).rows())[2]
    assert torch.equal(half[0, 0, 7], torch.tensor([0.2] * 5 + [0.0] * 5))


# --- nothing is left behind -------------------------------------------------------------------


def test_hooks_that_raise_or_nest_leave_nothing_behind():
    hf, model = bridged("llama")
    tokens = tokens_for(hf)
    clean = model(tokens)
    own = []
    point = model.hook_dict["blocks.0.hook_resid_mid"]
    handle = point.add_hook(lambda value, hook: own.append(1))

    def breaks(value, hook):
        raise RuntimeError("broken hook")

    inner_seen = []

    def nests(value, hook):
        if inner_seen:  # the hook is still there while it runs the model again
            return
        inner_seen.append(None)
        inner_seen.append(
            model.run_with_hooks(
                tokens, fwd_hooks=[("blocks.1.attn.hook_result", lambda r, hook: r * 0)]
            )
        )

    with pytest.raises(RuntimeError, match="broken hook"):
        model.run_with_hooks(
            tokens, fwd_hooks=[("blocks.0.attn.hook_result", lambda r, hook: None),
                               ("blocks.1.hook_resid_pre", breaks)]
        )  # fmt: skip
    assert not model.bridge.cfg.use_attn_result
    assert torch.equal(model(tokens), clean)
    with pytest.raises(ModelError, match=r"no hook 'blocks\.0\.nonsense'"):
        model.run_with_hooks(
            tokens, fwd_hooks=[("blocks.0.hook_resid_pre", breaks), ("blocks.0.nonsense", breaks)]
        )
    outer = model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_resid_post", nests)])
    assert torch.equal(outer, clean)
    zeroed = [("blocks.1.attn.hook_z", lambda z, hook: z * 0)]
    torch.testing.assert_close(
        inner_seen[1], model.run_with_hooks(tokens, fwd_hooks=zeroed), rtol=0, atol=ROUNDING
    )
    assert hooked_points(model) == {"blocks.0.ln2.hook_in": 1}
    assert len(own) == 5  # the user's own hook fired in every whole pass
    handle.hook.remove()
    point.fwd_hooks.clear()


def test_looking_gives_every_part_its_own_mode_back():
    hf = made("gpt2")
    model = bridge_model(hf, name="gpt2")
    tokens = tokens_for(hf)
    clean = model(tokens)
    assert not any(part.training for part in model.modules())
    original = model.bridge.original_model
    original.train()
    model.bridge.blocks[0].mlp.eval()
    modes = [part.training for part in model.modules()]
    assert any(modes)
    assert not all(modes)
    assert not torch.equal(model(tokens), clean)  # dropout
    with looking_at(model):
        assert not any(part.training for part in model.modules())
        assert torch.equal(model(tokens), clean)
    assert [part.training for part in model.modules()] == modes
    interp.analyze(model, "sinks", tokens)
    assert [part.training for part in model.modules()] == modes


def test_a_cache_holds_copies_and_slices_positions():
    hf, model = bridged("qwen3")
    tokens = tokens_for(hf, batch=1)
    name = "blocks.0.hook_resid_pre"

    def spoil(value, hook):
        value *= 0

    _, clean = model.run_with_cache(tokens)
    model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_resid_mid", spoil)])
    assert clean[name].abs().sum() > 0
    _, sliced = model.run_with_cache(tokens, pos_slice=(2, 5))
    for name_, dim in (
        ("blocks.1.hook_resid_post", 1),
        ("blocks.1.attn.hook_z", 1),
        ("blocks.1.attn.hook_pattern", 2),
        ("blocks.1.attn.hook_q_normed", 2),  # [batch, head, pos, d_head]
    ):
        assert torch.equal(sliced[name_], clean[name_].narrow(dim, 2, 3)), name_
    _, single = model.run_with_cache(tokens, remove_batch_dim=True, names_filter=name)
    assert torch.equal(single[name], clean[name][0])
    assert list(single) == [name]
    assert (
        fault(lambda: model.run_with_cache(tokens.repeat(2, 1), remove_batch_dim=True), ShapeError)
        == "remove_batch_dim on a batch of 2"
    )
    assert torch.equal(clean["z", 1], clean["blocks.1.attn.hook_z"])


# --- names that are not hooks -----------------------------------------------------------------


def test_unknown_names_are_refused_with_near_ones():
    hf, model = bridged("gpt2")
    tokens = tokens_for(hf)

    def look(value, hook):
        return None

    message = fault(
        lambda: model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.hook_zz", look)])
    )
    assert message.startswith(
        "no hook 'blocks.0.attn.hook_zz'; did you mean blocks.0.attn.hook_z or"
    )
    assert "no hook 'blocks.2.attn.hook_z'; did you mean" in fault(
        lambda: model.run_with_cache(tokens, names_filter="blocks.2.attn.hook_z")
    )
    assert fault(
        lambda: model.run_with_hooks(tokens, fwd_hooks=[(lambda name: False, look)])
    ).startswith("no hook matches the predicate; the model has")
    assert (
        fault(lambda: model.run_with_cache(tokens, names_filter=[])) == "no hook names were given"
    )


def test_names_that_would_lie_are_withheld_with_the_reason():
    for family, name, reason in (
        ("gpt_neox", "blocks.0.attn.hook_rot_q", "it never fires in this architecture"),
        ("llama", "hook_pos_embed", "it never fires in this architecture"),
        ("gpt2", "blocks.0.hook_q_input", "it never fires in this architecture"),
        (
            "mixtral",
            "blocks.0.mlp.hook_pre",
            "a mixture of experts has no one of it; the name stands for mlp.hook_in",
        ),
        (
            "bloom",
            "blocks.0.attn.hook_result",
            "building it would leave no hook on the output of attention; hook_z @ "
            "blocks[L].attn.W_O is what it would hold",
        ),
        (
            "deepseek",
            "blocks.0.attn.hook_q",
            "its shape is [1, 4, 3, 16] where [1, 3, 4, d_head] was expected",
        ),
    ):
        hf, model = bridged(family)
        assert name not in model.hook_dict
        assert name in model.bridge.hook_dict
        message = fault(
            lambda m=model, n=name, h=hf: m.run_with_cache(tokens_for(h), names_filter=n)
        )
        assert message == f"no hook {name!r}: {reason}"


# --- analyses ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", NATIVE)
@pytest.mark.parametrize("analysis", registry.names())
def test_tables_are_those_of_our_own_model(family, analysis):
    hf, model = bridged(family)
    native = load_model(hf)
    found = interp.analyze(model, analysis, seed=3, blocks=[6, 12], batch=2)
    expected = interp.analyze(native, analysis, seed=3, blocks=[6, 12], batch=2)
    assert list(found.table.columns) == list(expected.table.columns)
    for column in found.table:
        mine, theirs = found.table[column], expected.table[column]
        if not pd.api.types.is_numeric_dtype(mine):
            assert mine.tolist() == theirs.tolist(), column
        else:
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=ROUNDING, err_msg=column)
    assert found.params == expected.params
    assert found.model == family


@pytest.mark.parametrize("family", ["gpt2", "llama", "olmo2", "opt"])
def test_ablation_is_what_transformers_computes_without_the_columns_of_the_head(family):
    hf, model = bridged(family)
    tokens = tokens_for(hf, batch=3)
    table = interp.ablate(model, tokens, heads="1.2").table
    d_head = model.cfg.d_head
    without = copy.deepcopy(hf)
    rows = slice(2 * d_head, 3 * d_head)
    (_, weight), *_ = [
        (name, weight)
        for name, weight in without.named_parameters()
        if name.endswith(("h.1.attn.c_proj.weight", "layers.1.self_attn.o_proj.weight",
                          "layers.1.self_attn.out_proj.weight"))
    ]  # fmt: skip
    if family == "gpt2":
        weight[rows] = 0
    else:
        weight[:, rows] = 0
    clean, ablated = (
        torch.stack([theirs(m, row[None], labels=row[None]).loss for row in tokens])
        for m in (hf, without)
    )
    assert abs(float((ablated - clean).mean())) > 1e-3
    assert float(table["ablation"].iloc[0]) == pytest.approx(
        float((ablated - clean).mean()), abs=ROUNDING
    )


def test_a_model_without_attention_in_a_layer_says_so():
    _, model = bridged("gpt2")
    del model.bridge.blocks[0]._modules["attn"]
    _BRIDGED.pop("gpt2")
    assert fault(lambda: model.blocks[0].attn) == "layer 0 has no attention"


# --- raw models -------------------------------------------------------------------------------


def test_a_raw_bridge_is_wrapped_and_shares_its_weights():
    hf, model = bridged("llama")
    wrapped = as_hooked(model.bridge)
    assert isinstance(wrapped, BridgedModel)
    assert wrapped.bridge is model.bridge
    assert torch.equal(wrapped(tokens_for(hf)), model(tokens_for(hf)))
    assert as_hooked(model) is model
    native = load_model(hf)
    assert as_hooked(native) is native


def test_other_things_are_told_how_to_become_a_model():
    hf = made("gpt2")
    assert fault(lambda: as_hooked(hf)) == (
        "GPT2LMHeadModel has no hooks: give interp.load_model(model), or "
        "interp.load_model(model, backend='bridge')"
    )
    assert fault(lambda: as_hooked("gpt2")) == (
        "a model was expected, got str: interp.load_model(ref) makes one"
    )


def test_what_cannot_be_bridged_is_refused_in_one_line():
    small = {"d_model": 16, "d_kv": 4, "num_heads": 4, "d_ff": 16, "num_layers": 1}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=40, **small))
    assert fault(lambda: bridge_model(t5, name="t5")).startswith("t5 is an encoder-decoder")
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=40, state_size=4)
    )
    assert fault(lambda: bridge_model(mamba, name="m")) == "m has no attention heads to look at"
    config = made("llama").config
    headless = transformers.LlamaForSequenceClassification(config)
    assert fault(lambda: bridge_model(headless, name="x")).startswith(
        "TransformerLens has no adapter for LlamaForSequenceClassification; it knows"
    )
    assert fault(lambda: bridge_model(torch.nn.Linear(2, 2), name="x")) == (
        "Linear is no model of transformers: it has no config"
    )


# --- text -------------------------------------------------------------------------------------


def tokenizer_of(words):
    """A tokenizer of transformers that knows some words."""
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>"
    )


def test_a_bridge_that_computes_something_else_is_refused():
    # TransformerLens 4.3 does not read scale_attn_weights; log-probs would be off by a third.
    given = hf_models.gpt2(scale_attn_weights=False)
    with pytest.raises(ModelError, match=r"does not compute what transformers does: .* differ by"):
        bridge_model(given, name="unscaled")


def test_a_raw_bridge_can_be_ablated():
    wrapped = bridge_model(hf_models.gpt2(), name="tiny")
    tokens = hf_models.tokens(n_pos=9)
    raw = interp.ablate(wrapped.bridge, tokens, heads="0.1")
    assert raw.table.equals(interp.ablate(wrapped, tokens, heads="0.1").table)


def test_text_goes_through_the_tokenizer_and_is_led_by_one_bos():
    hf, _ = bridged("llama")
    tokenizer = tokenizer_of(["a", "b", "c"])
    model = bridge_model(hf, tokenizer, name="llama")
    assert model.to_tokens("a b c").tolist() == [[1, 2, 3, 4]]
    assert model.to_tokens("a b", prepend_bos=False).tolist() == [[2, 3]]
    assert torch.equal(model("a b c"), model([[1, 2, 3, 4]]))
    assert model.to_str_tokens("a b") == ["<s>", "a", "b"]
    assert model.to_single_token("c") == 4
    both = model(["a b c", "c"])
    torch.testing.assert_close(both[1, :2], model("c")[0], rtol=0, atol=ROUNDING)
    assert fault(lambda: model.to_tokens(["a b c", "c"]), ShapeError).startswith(
        "the texts have 2 to 4 tokens"
    )
    many = tokenizer_of([f"w{i}" for i in range(200)])
    assert fault(lambda: bridge_model(hf, many, name="llama")) == (
        "the tokenizer of llama has 202 tokens, more than d_vocab = 101"
    )
    with pytest.raises(AnalysisError, match=r"longer than n_ctx = 128"):
        interp.analyze(model, "induction", blocks=[64])
