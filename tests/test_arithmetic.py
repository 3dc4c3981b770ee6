"""The arithmetic of attention: published numbers, and models that are really there."""

import json

import pytest
from tiny_models import FAMILIES, tiny
from torch import nn
from typer.testing import CliRunner

import interp
from interp.arithmetic import GB, GIB, AttentionShape, bytes_of
from interp.arithmetic.known import hf_shape, known_shape, known_shapes
from interp.arithmetic.lookup import config_shape, shape_of
from interp.cli import app
from interp.errors import AnalysisError, ModelError
from interp.models.loading import save_folder

RUNNER = CliRunner()


def shape(n_heads, d_head, d_model, **given):
    return AttentionShape("x", 1, n_heads, given.pop("kv", n_heads), d_head, d_model, **given)


def test_one_head_of_512_and_eight_of_64_have_as_many_weights():
    assert sum(shape(1, 512, 512).weights().values()) == 1_048_576
    assert sum(shape(8, 64, 512).weights().values()) == 1_048_576


def test_llama_2_70b_caches_an_eighth_of_what_mha_would():
    own = known_shape("llama-2-70b")
    assert own.bytes_per_token("float16") == 327_680
    assert own.n_layers * own.mha_layer_elements() * bytes_of("float16") == 2_621_440
    whole, mha = (own.cache_bytes(32_768, 1, "float16", mha=one) for one in (False, True))
    assert (round(whole / GB, 2), whole / GIB) == (10.74, 10.0)
    assert (round(mha / GB, 1), mha / GIB) == (85.9, 80.0)
    assert own.cache_bytes(4096, 1, "float16") / GIB == 1.25
    assert own.cache_bytes(4096, 3, "float16") == 3 * own.cache_bytes(4096, 1, "float16")


def test_deepseek_v2_caches_576_numbers_a_token_and_layer():
    own = known_shape("DeepSeek-V2")
    assert own.layer_elements() == 576
    assert own.mha_layer_elements() == 32_768
    assert own.mha_layer_elements() / own.layer_elements() == pytest.approx(56.9, abs=0.02)
    assert own.n_layers * own.layer_elements() == 34_560  # the paper's table 9: 34.6K
    lite = known_shape("deepseek-v2-lite")
    assert (27 * lite.mha_layer_elements(), 27 * lite.layer_elements()) == (110_592, 15_552)
    v3 = known_shape("deepseek-v3")
    assert v3.bytes_per_token("bfloat16") == 70_272


def test_the_table_marks_the_models_whose_heads_are_not_as_wide_as_the_stream():
    every = known_shapes()
    assert len(every) >= 80
    assert all(own.source for own in every.values())
    odd = {name for name, own in every.items() if own.width != own.d_model}
    assert {"gpt3-xl", "gpt3-13b", "qwen3-0.6b", "gemma-7b", "t5-11b", "palm-540b"} <= odd
    assert {"gpt2", "llama-2-70b", "falcon-7b", "qwen3-8b", "deepseek-v2-lite"} & odd == set()
    assert every["falcon-7b"].kind == "MQA"
    assert every["gpt3-175b"].width == 12_288


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_of_a_shape_are_those_of_the_model(family):
    model = tiny(family)
    counted = sum(
        own.weight.numel() for own in model.blocks[0].attn.modules() if isinstance(own, nn.Linear)
    )
    assert sum(config_shape(model.config, family).weights().values()) == counted


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, (12, 12, 12, 64, 768)),
        (
            {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 64, "head_dim": 16,
             "num_key_value_heads": 2},
            (2, 8, 2, 16, 64),
        ),
        (
            {"num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544,
             "num_kv_heads": 71, "multi_query": True},
            (32, 71, 1, 64, 4544),
        ),
        (
            {"text_config": {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}},
            (2, 4, 4, 8, 32),
        ),
    ],
)  # fmt: skip
def test_a_hugging_face_config_of_any_architecture_is_read(config, expected):
    own = hf_shape(config, "x")
    found = (own.n_layers, own.n_heads, own.n_key_value_heads, own.d_head, own.d_model)
    assert found == expected


def test_layers_with_a_window_keep_no_more_than_it():
    config = {
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "hidden_size": 16,
        "sliding_window": 10,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    own = hf_shape(config, "x")
    assert own.windows == (10, None, 10, None)
    assert own.cache_bytes(100, 1, "float16") == (2 * 10 + 2 * 100) * 2 * 16 * 2
    assert hf_shape({**config, "use_sliding_window": False}, "x").windows == ()


def test_a_latent_config_is_read():
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 32,
        "kv_lora_rank": 12,
        "q_lora_rank": None,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
    }
    own = hf_shape(config, "x")
    assert (own.kind, own.layer_elements(), own.mha_layer_elements()) == ("MLA", 16, 4 * 14)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "says nothing of layers and heads and d_model"),
        ({"n_layer": 0, "n_head": 2, "n_embd": 4}, "n_layer = 0 should be a whole number"),
        ({"n_layer": True, "n_head": 2, "n_embd": 4}, "n_layer = True"),
    ],
)
def test_a_config_without_sizes_is_refused_in_one_line(config, words):
    with pytest.raises(ModelError) as caught:
        hf_shape(config, "x")
    assert words in str(caught.value)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(AnalysisError, match="dtype 'float12'"):
        bytes_of("float12")


# --- the verb -------------------------------------------------------------------------------------


def test_kv_cache_prints_both_units_beside_mha():
    result = RUNNER.invoke(app, ["kv-cache", "llama-2-70b", "--context", "32768"])
    assert result.exit_code == 0, result.output
    for words in (
        "327,680 bytes a token",
        "10.74 GB (10.00 GiB)",
        "with MHA: 2,621,440 bytes a token, 85.90 GB (80.00 GiB), 8 times as much",
    ):
        assert words in result.stdout


def test_kv_cache_reads_a_config_file_a_folder_of_ours_and_the_table(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"n_layer": 12, "n_head": 12, "n_embd": 768}))
    assert shape_of(str(path)).d_head == 64
    folder = save_folder(tiny("gqa"), tmp_path / "model")
    own = shape_of(str(folder))
    assert (own.n_layers, own.n_heads, own.n_key_value_heads) == (2, 4, 2)
    result = RUNNER.invoke(app, ["kv-cache", "--list", "--format", "csv"])
    assert result.stdout.count("\n") == 1 + len(known_shapes())
    printed = RUNNER.invoke(app, ["kv-cache", "gpt2", "--format", "json"]).stdout
    assert json.loads(printed)["bytes_per_token"] == 36_864


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["kv-cache"], "takes a MODEL, or --list"),
        (["kv-cache", "gpt2", "--list"], "takes a MODEL, or --list"),
        (["kv-cache", "./nothing"], "./nothing"),
    ],
)
def test_mistakes_are_one_line(words, told):
    result = RUNNER.invoke(app, words)
    assert result.exit_code == 2, result.output
    assert told in result.stderr
    assert result.stderr.count("\n") == 1


def test_smollm2_is_read_without_its_weights():
    own = shape_of("smollm2-135m")
    assert (own.n_layers, own.n_heads, own.n_key_value_heads, own.d_head) == (30, 9, 3, 64)
    assert own == config_shape(interp.load_model("smollm2-135m").config, "smollm2-135m")
