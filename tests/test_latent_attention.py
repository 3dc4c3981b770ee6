"""Latent attention (MLA) against DeepSeek's own, and against its equations written out."""

import pytest
import torch
from tiny_models import error, perturbed, some_tokens, tiny_config
from torch import nn
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3

import interp
from interp.arithmetic.lookup import config_shape
from interp.config import ModelConfig
from interp.doctor import doctor
from interp.errors import ConfigError, ModelError
from interp.models.layers import Rotary

SIZES = {"n_heads": 3, "d_head": 8, "d_rope": 4, "d_latent": 10, "d_value": 6}


def config_of(**attention):
    return tiny_config(
        d_model=24,
        attention={"kind": "latent", **SIZES, **attention},
        positional_embedding_type="rotary",
        normalization_type="RMS",
        eps=1e-6,
    )


def theirs(version, d_query_latent):
    """One attention layer of DeepSeek, with random weights, and the angles that it is given."""
    shared = {
        "hidden_size": 24,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": d_query_latent,
        "kv_lora_rank": 10,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attn_implementation": "eager",
    }
    if version == 2:
        config = DeepseekV2Config(**shared)
        layer = modeling_deepseek_v2.DeepseekV2Attention(config, 0)
        rotary = modeling_deepseek_v2.DeepseekV2RotaryEmbedding(config)
    else:
        config = DeepseekV3Config(**shared, rope_interleave=True)
        layer = modeling_deepseek_v3.DeepseekV3Attention(config, 0)
        rotary = modeling_deepseek_v3.DeepseekV3RotaryEmbedding(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return layer.eval(), rotary


def halves(weight, d_rope):
    """Rows of rotary dimensions that pair neighbours, as rows that pair halves."""
    order = [*range(0, d_rope, 2), *range(1, d_rope, 2)]
    return weight.unflatten(0, (-1, d_rope))[:, order].flatten(0, 1)


def with_weights_of(layer, d_query_latent):
    """Our layer with the weights of theirs."""
    ours = perturbed(config_of(d_query_latent=d_query_latent)).blocks[0].attn
    last = layer.q_proj if d_query_latent is None else layer.q_b_proj
    by_head = last.weight.unflatten(0, (3, 12))
    rope = halves(by_head[:, 8:].flatten(0, 1), 4).unflatten(0, (3, 4))
    kv_b = layer.kv_b_proj.weight.unflatten(0, (3, 14))
    kv_a = layer.kv_a_proj_with_mqa.weight
    values = {
        "q_proj.weight": torch.cat((by_head[:, :8], rope), dim=1).flatten(0, 1),
        "kv_down_proj.weight": kv_a[:10],
        "k_rope_proj.weight": halves(kv_a[10:], 4),
        "kv_latent_norm.w": layer.kv_a_layernorm.weight,
        "k_proj.weight": kv_b[:, :8].flatten(0, 1),
        "v_proj.weight": kv_b[:, 8:].flatten(0, 1),
        "o_proj.weight": layer.o_proj.weight,
    }
    if d_query_latent is not None:
        values |= {
            "q_down_proj.weight": layer.q_a_proj.weight,
            "q_latent_norm.w": layer.q_a_layernorm.weight,
        }
    assert set(values) == set(dict(ours.named_parameters()))
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(values[name])
    return ours


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("d_query_latent", [None, 9])
@torch.no_grad()
def test_a_layer_with_deepseeks_weights_computes_what_deepseeks_does(version, d_query_latent):
    layer, rotary = theirs(version, d_query_latent)
    ours = with_weights_of(layer, d_query_latent)
    x = torch.randn(2, 11, 24, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(11)[None]
    mask = torch.full((11, 11), -torch.inf).triu(1)[None, None]
    expected, _ = layer(x, attention_mask=mask, position_embeddings=rotary(x, positions))
    made = ours(x, rotation=Rotary(4, 10000.0, None)(positions))
    assert error(made, expected) < 1e-4
    assert float(expected.abs().max()) > 0.1


@torch.no_grad()
def test_the_hooks_hold_what_the_equations_say():
    model, tokens = perturbed(config_of(d_query_latent=9)), some_tokens(2, 7)
    attn = model.blocks[1].attn
    _, cache = model.run_with_cache(tokens)
    x = cache["blocks.1.ln1.hook_normalized"] * model.blocks[1].ln1.w

    def normed(y, norm):
        return y / (y.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.w

    latent = normed(x @ attn.kv_down_proj.weight.T, attn.kv_latent_norm)
    shared = x @ attn.k_rope_proj.weight.T
    k = cache["blocks.1.attn.hook_k"]
    for head in range(3):
        own = latent @ attn.k_proj.weight[8 * head : 8 * head + 8].T
        assert error(k[:, :, head, :8], own) < 1e-5
        assert error(k[:, :, head, 8:], shared) < 1e-5  # one for all heads
    v = (latent @ attn.v_proj.weight.T).unflatten(2, (3, 6))
    assert error(cache["blocks.1.attn.hook_v"], v) < 1e-5
    assert cache["blocks.1.attn.hook_q"].shape == (2, 7, 3, 12)
    assert cache["blocks.1.attn.hook_z"].shape == (2, 7, 3, 6)
    q, k = cache["blocks.1.attn.hook_rot_q"], cache["blocks.1.attn.hook_rot_k"]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 12**-0.5
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    pattern = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    assert error(cache["pattern", 1], pattern) < 1e-5
    z = torch.einsum("bhqk,bkhd->bqhd", pattern, v)
    assert error(cache["blocks.1.attn.hook_z"], z) < 1e-5


def test_the_cache_is_the_latent_and_one_rotary_key():
    model, tokens = perturbed(config_of()), some_tokens(2, 7)
    cache = model.new_cache()
    with torch.no_grad():
        model(tokens, cache=cache)
    assert [part.shape for part in cache.layers[0].parts] == [(2, 7, 10), (2, 7, 4)]
    shape = config_shape(model.config, "tiny")
    assert shape.layer_elements() == 14
    assert shape.mha_layer_elements() == 3 * (8 + 6)
    assert cache.nbytes == 2 * 2 * 7 * 14 * 4


@pytest.mark.parametrize("d_query_latent", [None, 9])
def test_the_doctor_finds_it_healthy(d_query_latent):
    diagnosis = doctor(perturbed(config_of(d_query_latent=d_query_latent)))
    assert diagnosis.healthy, diagnosis.table.to_string()


def test_gradients_reach_every_weight():
    model = perturbed(config_of(d_query_latent=9, sink_logit="learned", gated_output=True))
    model(some_tokens(2, 7), return_type="loss").backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name


def test_scores_ablations_and_outliers_run_on_it():
    model, tokens = perturbed(config_of()), some_tokens(2, 12)
    assert len(interp.analyze(model, "sinks", tokens).table) == 6
    assert len(interp.ablate(model, tokens, method="zero", metric="loss").table) == 6
    assert set(interp.outliers(model, tokens).sites["site"]) >= {"attn_in", "k", "v", "z"}
    fold = interp.fold_layer_norm(model)
    assert error(fold(tokens).log_softmax(-1), model(tokens).log_softmax(-1)) < 1e-4


def test_what_is_not_defined_on_it_is_refused_in_one_line(tmp_path):
    model = perturbed(config_of())
    for call in (
        lambda: interp.composition(model),
        lambda: interp.prune_heads(model, [(0, 1)]),
        lambda: interp.save_pretrained(model, tmp_path / "out"),
    ):
        with pytest.raises(ModelError) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"positional_embedding_type": "standard"}, "attention.kind = 'latent' has rotary keys"),
        ({"attention": {"kind": "latent", **SIZES, "d_rope": 3}}, "d_rope = 3 is odd"),
        ({"attention": {"kind": "latent", **SIZES, "window": 3}}, "unknown key"),
        ({"attention": {"kind": "linear", "n_heads": 2}}, "attention.kind = 'linear'"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes, words):
    from interp.config import parse_config

    tables = {
        "model": {
            "n_layers": 1,
            "d_model": 24,
            "n_ctx": 16,
            "d_vocab": 300,
            "attention": {"kind": "latent", **SIZES},
            "positional_embedding_type": "rotary",
            **changes,
        },
        "train": {"steps": 1, "batch_size": 1, "lr": 1e-3},
        "data": {"kind": "repeated", "span": [2, 4]},
        "probe": {"icl_early": [1, 2], "icl_late": [3, 4], "blocks": [4]},
    }
    with pytest.raises(ConfigError) as caught:
        parse_config(tables, "x.toml")
    assert words in str(caught.value)


def test_weights_are_counted_as_the_shape_says():
    config = ModelConfig(
        n_layers=1,
        d_model=32,
        n_ctx=8,
        d_vocab=10,
        attention={"kind": "latent", **SIZES, "d_query_latent": 9},
        positional_embedding_type="rotary",
    )
    attn = interp.Transformer(config).blocks[0].attn
    matrices = sum(own.weight.numel() for own in attn.modules() if isinstance(own, nn.Linear))
    weights = config_shape(config, "x").weights()
    # Values are narrower than keys here: W_UK has 8 columns a head, W_UV and W_O have 6.
    assert matrices == sum(weights.values())
