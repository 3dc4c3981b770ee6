"""What `interp info` says of a model: known sizes, parts that sum to the whole, the cache."""

import re

import hf_models
import pytest
import torch
from tiny_models import FAMILIES, tiny
from torch import nn
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM
from typer.testing import CliRunner

from interp import prune_heads
from interp.arithmetic.lookup import config_shape
from interp.cli import app
from interp.config import ModelConfig
from interp.models.loading import load_model, save_model
from interp.models.transformer import Transformer
from interp.views.terminal.info import cache_bytes, describe, parameters_by_part

SMOLLM2 = {
    "n_layers": 30,
    "d_model": 576,
    "n_ctx": 8192,
    "d_vocab": 49152,
    "attention": {"n_heads": 9, "n_key_value_heads": 3, "bias": False},
    "mlp": {"d_mlp": 1536, "act_fn": "silu", "gated": True, "bias": False},
    "positional_embedding_type": "rotary",
    "rotary_base": 100000.0,
    "normalization_type": "RMS",
    "tie_embeddings": True,
    "bos_token_id": 1,
}
GPT2 = {
    "n_layers": 12,
    "d_model": 768,
    "n_ctx": 1024,
    "d_vocab": 50257,
    "attention": {"n_heads": 12},
    "mlp": {"d_mlp": 3072},
    "tie_embeddings": True,
}


def shapes_only(config):
    with torch.device("meta"):
        return Transformer(ModelConfig.model_validate(config), seed=None)


def test_smollm2_has_its_known_size_and_cache():
    model = shapes_only(SMOLLM2)
    parts = parameters_by_part(model)
    assert sum(parts.values()) == 134_515_008
    assert parts == {
        "embed": 49152 * 576,
        "attention Q": 30 * 576 * 576,
        "attention K": 30 * 576 * 192,
        "attention V": 30 * 576 * 192,
        "attention O": 30 * 576 * 576,
        "MLP": 30 * 3 * 576 * 1536,
        "norms": 61 * 576,
    }
    assert cache_bytes(model) == 46_080
    lines = describe(model)
    assert "parameters 134,515,008" in lines
    assert "KV cache 46,080 bytes a token" in lines
    assert lines[-1] == "  377.5 MB (360.0 MiB) for a context of 8,192 tokens"
    assert "positions rotary: base 100,000" in lines
    assert "norm RMS (eps 1e-05), MLP of 1536 (silu, gated, no biases), tied embeddings" in lines


def test_gpt2_small_has_its_known_size():
    model = shapes_only(GPT2)
    parts = parameters_by_part(model)
    assert sum(parts.values()) == 124_439_808
    assert parts["positions"] == 1024 * 768
    assert parts["attention Q"] == 12 * (768 * 768 + 768)
    assert cache_bytes(model.to(torch.bfloat16)) == 2 * 12 * 768 * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_sum_to_the_whole(family):
    model = tiny(family)
    parts = parameters_by_part(model)
    assert sum(parts.values()) == sum(p.numel() for p in model.parameters())
    assert ("unembed" in parts) is not model.config.tie_embeddings
    assert ("MLP" in parts) is (model.config.mlp is not None)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "olmo2", "gpt_neox", "bert", "qwen3"])
def test_a_bridge_has_the_parameters_of_its_original(name):
    hf = getattr(hf_models, name)()
    parts = parameters_by_part(load_model(hf, backend="bridge"))
    assert sum(parts.values()) == sum(parameter.numel() for parameter in hf.parameters())
    assert "other" not in parts
    if name in ("gpt2", "llama", "qwen3"):
        assert parts == parameters_by_part(load_model(hf))


def test_a_bridge_is_described_as_our_own_model_is():
    hf = hf_models.qwen3()
    assert describe(load_model(hf, backend="bridge")) == describe(load_model(hf))


def test_what_makes_an_attention_its_own_is_said():
    lines = describe(load_model(hf_models.mistral()))
    assert lines[2] == (
        "attention GQA: 6 query heads over 2 key-value heads of width 16 "
        "(n_heads * d_head ≠ d_model)"
    )
    assert lines[3] == "  causal, window 16, no QK norm, no biases"
    lines = describe(load_model(hf_models.gemma2(), backend="bridge"))
    assert "window 16 in layers 0" in lines[3]
    assert "scores are soft-capped at 5" in lines[3]
    lines = describe(load_model(hf_models.llama3_scaled()))
    assert lines[4].startswith("positions rotary: base 500, scaling llama3 (factor 8")
    lines = describe(load_model(hf_models.gpt_neox(), backend="bridge"))
    assert lines[4] == "positions rotary: base 10,000, 2 of 8 dimensions"
    assert describe(tiny("mqa"))[2].startswith("attention MQA: 4 query heads over 1 key")
    scaled = tiny(attention={"scale": 0.5})
    assert describe(scaled)[3] == "  causal, no QK norm, biases of q, k, v, o, scale 0.5"


def test_a_window_caps_the_cache():
    # Two layers keep 16 tokens each of the context of 128, for 2 heads of 16 float32 numbers.
    lines = describe(load_model(hf_models.mistral()))
    assert lines[-2] == "KV cache 512 bytes a token"
    assert lines[-1] == (
        "  0.00819 MB (0.00781 MiB) for a context of 128 tokens, "
        "where windowed layers keep no more than their window"
    )
    # One of Gemma's two layers has the window.
    lines = describe(load_model(hf_models.gemma2(), backend="bridge"))
    assert lines[-1].startswith("  0.0369 MB")


def test_an_encoder_keeps_no_cache():
    lines = describe(load_model(hf_models.bert(), backend="bridge"))
    assert lines[-1] == "KV cache: none, since every token sees every other"
    assert "bidirectional" in lines[3]


class TwentyTokens:
    """A vocabulary one smaller than what `tiny` embeds."""

    bos_token_id = 3
    special_ids = frozenset({3})

    def __len__(self):
        return 18

    def encode(self, text, *, prepend_bos=None):
        raise NotImplementedError

    def decode(self, ids):
        raise NotImplementedError

    def single_token(self, text):
        raise NotImplementedError

    def token_texts(self, ids):
        return [f"<{token}>" for token in ids]


def test_vocabulary_and_bos_are_named():
    model = tiny("mha", bos_token_id=3)
    assert "no tokenizer; BOS 3" in describe(model)
    model.vocabulary = TwentyTokens()
    words = "tokenizer of 18 tokens, 1 rows of the embedding without a token; BOS 3 '<3>'"
    assert words in describe(model)


def test_the_command_names_the_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run" / "checkpoints" / "step-000002"
    folder.mkdir(parents=True)
    save_model(tiny("gqa"), folder)
    hf_models.llama().save_pretrained("pretrained")
    runner = CliRunner()
    lines = runner.invoke(app, ["info", "run"]).stdout.splitlines()
    assert lines[0] == "run: training run, run/checkpoints/step-000002"
    lines = runner.invoke(app, ["info", "./pretrained", "--dtype", "bfloat16"]).stdout.splitlines()
    assert lines[0] == "./pretrained: Hugging Face folder, pretrained"
    assert "dtype bfloat16, device cpu" in lines
    assert "KV cache 256 bytes a token" in lines
    result = runner.invoke(app, ["info", "./pretrained", "--backend", "bridge"])
    assert re.match(r"\./pretrained: Hugging Face folder, bridged, pretrained\n", result.stdout)
    result = runner.invoke(app, ["info", "nowhere"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


LATENT = {"kind": "latent", "n_heads": 4, "d_head": 6, "d_rope": 4, "d_latent": 10, "d_value": 5}


def test_latent_attention_is_named_with_its_widths_and_caches_its_latent():
    model = tiny(
        attention={**LATENT, "d_query_latent": 9}, mlp=None, positional_embedding_type="rotary"
    )
    lines = describe(model)
    assert lines[2:5] == [
        "attention MLA: 4 heads of width 6 + 4 rotary, values of 5, over a latent of 10, queries "
        "from one of 9",
        "  causal, no QK norm, no biases",
        "positions rotary: base 10,000, 4 of 10 dimensions",
    ]
    parts = parameters_by_part(model)
    assert parts["attention Q"] == 2 * (9 * 24 + 4 * 10 * 9)
    assert parts["attention KV"] == 2 * (10 + 4) * 24
    assert parts["attention K"] == 2 * 4 * 6 * 10
    assert parts["attention V"] == 2 * 4 * 5 * 10
    # Two layers hold 10 + 4 float32 numbers of each token, and the context is 16.
    assert lines[-2:] == [
        "KV cache 112 bytes a token",
        "  0.00179 MB (0.00171 MiB) for a context of 16 tokens",
    ]
    cache = model.new_cache()
    model(torch.zeros(1, 16, dtype=torch.long), cache=cache)
    assert cache.nbytes == 16 * cache_bytes(model) == 1792


def test_latent_attention_that_is_bridged_has_the_sizes_of_its_config():
    config = DeepseekV2Config(
        hidden_size=24,
        num_attention_heads=3,
        num_key_value_heads=3,
        q_lora_rank=9,
        kv_lora_rank=10,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
        num_hidden_layers=1,
        first_k_dense_replace=1,
        intermediate_size=32,
        vocab_size=50,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    lines = describe(load_model(DeepseekV2ForCausalLM(config), backend="bridge"))
    assert lines[2].startswith("attention MLA: 3 heads of width 8 + 4 rotary, values of 6, over a")
    assert "KV cache 56 bytes a token" in lines


def test_the_matrices_of_a_layer_are_those_that_it_has():
    (line,) = [line for line in describe(tiny("wide_heads")) if line.startswith("one layer")]
    assert line == ("one layer's attention: 2,880 weights (W_Q 960, W_K 480, W_V 480, W_O 960)")
    attn = tiny("wide_heads").blocks[0].attn
    assert sum(own.weight.numel() for own in attn.modules() if isinstance(own, nn.Linear)) == 2880


@pytest.mark.parametrize("kind", ["zero", "learned"])
def test_a_sink_logit_and_a_gate_are_named_and_counted(kind):
    model = tiny(attention={"sink_logit": kind, "gated_output": True})
    facts = f"{kind} sink logit: rows of a pattern sum to 1 at most, what heads read is gated"
    assert describe(model)[3].endswith(facts)
    parts = parameters_by_part(model)
    assert parts["attention gate"] == 2 * (24 * 4 + 4)
    assert parts.get("attention sink") == (8 if kind == "learned" else None)
    assert parts["norms"] == parameters_by_part(tiny())["norms"]
    assert not any("sink logit" in line or "gated" in line for line in describe(tiny()))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_of_a_whole_context_is_what_one_takes(family):
    model = tiny(family)
    cache = model.new_cache()
    model(torch.zeros(1, model.cfg.n_ctx, dtype=torch.long), cache=cache)
    assert cache.nbytes == config_shape(model.config, family).cache_bytes(16, 1, "float32")
    assert f"{cache.nbytes / 1e6:.3g} MB" in describe(model)[-1]


def test_a_pruned_model_caches_the_heads_that_are_left():
    model = prune_heads(tiny(), [(0, 1), (1, 0), (1, 2)])
    assert cache_bytes(model) == 2 * (3 + 2) * 6 * 4
