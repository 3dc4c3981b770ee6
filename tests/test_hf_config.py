"""Hugging Face configs: what they say, what they leave out, and what is refused by name."""

import json
import math

import pytest
import torch
import transformers
from hf_models import MODELS, fault, gap, tokens
from transformers.activations import ACT2FN

from interp.config import Llama3Scaling
from interp.models.hf_config import _ACTIVATIONS, model_config
from interp.models.hf_families import hf_config
from interp.models.layers import Rotary, _activate
from interp.models.transformer import Transformer

GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 32,
    "vocab_size": 97,
    "n_positions": 64,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "intermediate_size": 80,
    "vocab_size": 101,
    "max_position_embeddings": 128,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 2}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "qwen2", "qwen3"])
def test_what_a_config_leaves_out_is_what_transformers_fills_in(kind):
    if kind == "gpt2":
        given, config_class = GPT2, transformers.GPT2Config
    else:
        given = {**LLAMA, "model_type": kind, "num_attention_heads": 32, "hidden_size": 64}
        config_class = transformers.CONFIG_MAPPING[kind]
    filled = config_class(**{key: v for key, v in given.items() if key != "model_type"}).to_dict()
    assert model_config(given, "here") == model_config(filled, "here")


def test_a_bare_gpt2_config_has_the_published_defaults():
    config = model_config(GPT2, "here")
    assert (config.mlp.d_mlp, config.mlp.act_fn, config.mlp.bias) == (128, "gelu_new", True)
    assert (config.eps, config.tie_embeddings, config.d_head) == (1e-5, True, 8)
    assert (config.attention.scale, config.attention.scale_by_inverse_layer) == (None, False)


def test_a_bare_llama_config_has_the_published_defaults():
    config = model_config(LLAMA, "here")
    assert (config.n_key_value_heads, config.d_head, config.eps) == (6, 8, 1e-6)
    assert (config.rotary_base, config.rotary_scaling, config.tie_embeddings) == (1e4, None, False)
    assert (config.attention.bias, config.attention.output_bias, config.mlp.bias) == (False,) * 3


def test_a_head_size_of_null_is_the_quotient_and_any_other_is_taken():
    assert model_config({**LLAMA, "head_dim": None}, "here").d_head == 8
    # Some releases of transformers refuse to build this one.
    uneven = model_config({**LLAMA, "hidden_size": 50, "head_dim": 8}, "here")
    assert (uneven.d_model, uneven.attention.n_heads, uneven.d_head) == (50, 6, 8)
    assert Transformer(uneven)(tokens(n_pos=5)).shape == (2, 5, 101)


SPELLINGS = {
    "old": {"rope_theta": 500000.0},
    "new": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_both_spellings_of_the_rotary_base_are_read(spelling):
    config = model_config({**LLAMA, **SPELLINGS[spelling], "head_dim": 4}, "here")
    _, sine = Rotary(config.d_head, config.rotary_base, None)(torch.tensor([[1]]))
    assert sine[0, 0].tolist() == pytest.approx([math.sin(1), 0.0014142], abs=1e-7)


LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALINGS = {
    "old": {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "older": {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
    "new": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
}


@pytest.mark.parametrize("spelling", SCALINGS)
def test_llama_3_divides_only_its_slow_frequencies(spelling):
    config = model_config({**LLAMA, **SCALINGS[spelling], "head_dim": 64}, "here")
    frequencies = Rotary(64, config.rotary_base, config.rotary_scaling).frequencies
    assert frequencies[0] == 1.0
    assert float(frequencies[-1]) == pytest.approx(9.4183e-08, rel=1e-4)
    unscaled = Rotary(64, config.rotary_base, None).frequencies
    assert float(unscaled[-1]) == pytest.approx(3.0139e-06, rel=1e-4)


def test_the_original_context_of_llama_3_is_the_whole_where_it_is_not_said():
    table = {key: value for key, value in LLAMA3.items() if not key.startswith("original")}
    hf = {**LLAMA, "rope_scaling": {"rope_type": "llama3", **table}}
    assert model_config(hf, "here").rotary_scaling == Llama3Scaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_n_ctx=128
    )
    beside = model_config({**hf, "original_max_position_embeddings": 64}, "here")
    assert beside.rotary_scaling.original_n_ctx == 64


@pytest.mark.parametrize(("given", "read"), [(None, None), (0, None), (1, 1), (4096, 4096)])
def test_no_window_of_mistral_means_every_earlier_key(given, read):
    hf = {**LLAMA, "model_type": "mistral", "num_key_value_heads": 2, "sliding_window": given}
    assert model_config(hf, "here").attention.window == read
    assert model_config(hf, "here").attention.windowed_layers is None


@pytest.mark.parametrize(
    ("changes", "windowed"),
    [
        ({}, None),
        ({"sliding_window": 8}, None),
        ({"use_sliding_window": True, "sliding_window": None}, None),
        ({"use_sliding_window": True, "sliding_window": 8}, None),  # from layer 28 on
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, (0, 1)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (1,)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 1,
                "layer_types": [SLIDING, FULL],
            },
            (0,),
        ),
        ({"layer_types": [FULL, FULL]}, None),
    ],
)
def test_the_layers_of_qwen_that_have_a_window(changes, windowed):
    attention = model_config({**QWEN2, **changes}, "here").attention
    assert attention.windowed_layers == windowed
    assert attention.window == (None if windowed is None else 8)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (5, 5),
        (0, 0),
        (100, 100),
        (101, None),
        (128000, None),
        (-1, None),
        (None, None),
        ([1], None),
    ],
)
def test_bos_is_one_token_of_the_vocabulary_or_none(given, read):
    assert model_config({**LLAMA, "bos_token_id": given}, "here").bos_token_id == read


def test_what_bos_is_where_the_config_does_not_say():
    assert model_config(LLAMA, "here").bos_token_id == 1
    assert model_config(QWEN2, "here").bos_token_id is None
    assert model_config(GPT2, "here").bos_token_id is None  # 50256 is not one of 97 tokens


def test_keys_that_change_no_number_are_let_pass():
    harmless = {
        "architectures": ["LlamaForCausalLM"],
        "_name_or_path": "somewhere/else",
        "transformers_version": "4.31.0",
        "torch_dtype": "bfloat16",
        "pretraining_tp": 1,
        "use_cache": True,
        "initializer_range": 0.02,
        "attention_dropout": 0.1,
        "eos_token_id": [2, 3],
        "rope_scaling": None,
        "quantization_config": None,
        "num_experts": 0,
        "partial_rotary_factor": 1.0,
        "is_causal": True,
        "pruned_heads": {},
        "final_logit_softcapping": None,
        "layer_types": [FULL, FULL],
        "auto_map": {"AutoTokenizer": "tokenization_x.X"},
        "somebodys_note": "trained on a Tuesday",
    }
    assert model_config({**LLAMA, **harmless}, "here") == model_config(LLAMA, "here")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("sinks", True),
        ("num_experts", 8),
        ("num_local_experts", 8),
        ("add_cross_attention", True),
        ("is_encoder_decoder", True),
        ("is_causal", False),
        ("alibi", True),
        ("partial_rotary_factor", 0.5),
        ("logit_scale", 0.0625),
        ("residual_multiplier", 0.22),
        ("embedding_multiplier", 12.0),
        ("attention_multiplier", 0.5),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("pruned_heads", {"0": [1]}),
        ("per_layer_config", {"0": {"num_attention_heads": 3}}),
    ],
)
@pytest.mark.parametrize("base", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_what_would_change_the_numbers_is_refused_by_name(base, key, value):
    message = fault(model_config, {**base, key: value}, "some/folder")
    assert message.startswith(f"some/folder: {key} = ")
    assert message.endswith(
        f"changes the numbers and is not built into the native {base['model_type']} model; "
        "backend='bridge' (--backend bridge) may know it"
    )


LLAMA_FAULTS = {
    "yarn": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope_parameters: rope_type = 'yarn' changes the numbers and is not built (linear and "
        "llama3 are); backend='bridge' (--backend bridge) may know it",
    ),
    "dynamic": (
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        "rope_parameters: rope_type = 'dynamic' changes the numbers and is not built",
    ),
    "longrope": (
        {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}},
        "rope_parameters: rope_type = 'longrope' changes the numbers and is not built",
    ),
    "partial": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "rope_parameters: partial_rotary_factor is not built into the native model",
    ),
    "per kind": (
        {"rope_parameters": {FULL: {"rope_type": "default"}}},
        "rope_parameters = {'full_attention': {'rope_type': 'default'}}: one table for all",
    ),
    "no factor": (
        {"rope_scaling": {"rope_type": "linear"}},
        "rope_parameters: factor is missing",
    ),
    "no low factor": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "rope_parameters: low_freq_factor is missing",
    ),
    "factor below 1": (
        {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},
        "rotary_scaling.factor = 0.5: input should be greater than or equal to 1",
    ),
    "activation": ({"hidden_act": "relu2"}, "hidden_act = 'relu2' is not built; known: gelu, "),
    "layer kinds": (
        {"layer_types": [SLIDING, FULL]},
        "layer_types = ['sliding_attention', 'full_attention']: this model type has "
        "full_attention in every layer",
    ),
    "own code": ({"auto_map": {"AutoModelForCausalLM": "x.X"}}, "auto_map names model code of"),
    "missing": ({"hidden_size": ...}, "hidden_size is missing"),
    "null": ({"hidden_size": None}, "hidden_size = None should be a whole number of at least 1"),
    "true": ({"vocab_size": True}, "vocab_size = True should be a whole number of at least 1"),
    "text": ({"num_hidden_layers": "2"}, "num_hidden_layers = '2' should be a whole number"),
    "fraction": ({"intermediate_size": 80.5}, "intermediate_size = 80.5 should be a whole"),
    "no flag": ({"attention_bias": "false"}, "attention_bias = 'false' should be true or false"),
    "eps": ({"rms_norm_eps": 0}, "rms_norm_eps = 0 should be a number above 0"),
    "groups": (
        {"num_key_value_heads": 4},
        "attention.n_key_value_heads = 4 does not divide n_heads = 6; one of 1, 2, 3, 6 would",
    ),
}


@pytest.mark.parametrize("case", LLAMA_FAULTS)
def test_a_faulty_llama_config_says_what_is_wrong(case):
    changes, message = LLAMA_FAULTS[case]
    hf = {key: value for key, value in {**LLAMA, **changes}.items() if value is not ...}
    assert fault(model_config, hf, "some/folder").startswith(f"some/folder: {message}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": [SLIDING]}, "should say full_attention or sliding_attention for each of"),
        ({"layer_types": ["linear_attention", FULL]}, "should say full_attention or sliding"),
        ({"layer_types": "full"}, "layer_types = 'full' should be a list of names"),
        ({"layer_types": [SLIDING, FULL]}, "asks for sliding_attention, but no window is in use"),
        (
            {"use_sliding_window": True, "max_window_layers": "all"},
            "max_window_layers = 'all' should be a whole number of at least 0",
        ),
        ({"use_sliding_window": True, "sliding_window": -1}, "sliding_window = -1 should be a"),
    ],
)
def test_a_faulty_window_of_qwen_says_what_is_wrong(changes, message):
    assert message in fault(model_config, {**QWEN2, **changes}, "here")


def test_heads_of_gpt2_have_to_divide_its_width():
    message = fault(model_config, {**GPT2, "n_head": 5}, "here")
    assert message == "here: n_head = 5 does not divide n_embd = 32"


@pytest.mark.parametrize("kind", ["bert", "gpt_neox", "gemma2", "olmo2", None, ["llama"]])
def test_another_model_type_says_which_are_read_and_points_to_the_bridge(kind):
    assert fault(model_config, {**LLAMA, "model_type": kind}, "here") == (
        f"here: model_type = {kind!r} is not read natively (gpt2, llama, mistral, qwen2, qwen3 "
        "are); backend='bridge' (--backend bridge) reads others"
    )


# --- activations ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(ACT2FN) & {*_ACTIVATIONS}))
def test_activations_are_those_that_transformers_has_under_their_names(name):
    x = torch.linspace(-5, 5, 101)
    ours = _ACTIVATIONS[name]
    assert gap(_activate(ours, x), ACT2FN[name](x)) < 2e-6


def test_every_activation_that_is_read_was_compared():
    assert set(ACT2FN) >= {*_ACTIVATIONS}


# --- and back -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_config_written_back_describes_the_same_model(name):
    theirs = MODELS[name]()
    config = model_config(theirs.config.to_dict(), "here")
    written = hf_config(config)
    if name != "mistral_unwindowed":  # which is a Llama
        assert written["model_type"] == theirs.config.model_type
    assert model_config(json.loads(json.dumps(written)), "there") == config
