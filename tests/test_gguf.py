"""GGUF files: what transformers computes from the same weights, or a line that says why not."""

import sys

import gguf
import gguf_files
import hf_models
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind

from interp.errors import ModelError
from interp.models.gguf import read_gguf
from interp.models.loading import load_model
from interp.models.weights import model_with_weights

# Rows of 32 and its multiples, as quantised types want them; 4 * 32 is not 64.
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 96}
QWEN2_SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
N_POS = 60


def native(path, dtype=torch.float32):
    config, weights = read_gguf(path, dtype)
    return model_with_weights(config, weights, path)


def log_probs(model, tokens):
    with torch.no_grad():
        out = model(tokens)
    return torch.log_softmax(getattr(out, "logits", out).float(), dim=-1)


def some_tokens():
    return torch.randint(101, (2, N_POS), generator=torch.Generator().manual_seed(7))


def largest_difference(path, model):
    tokens = some_tokens()
    return float((log_probs(native(path), tokens) - log_probs(model, tokens)).abs().max())


def fault(path):
    with pytest.raises(ModelError) as caught:
        read_gguf(path, torch.float32)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value).replace(str(path), "FILE")


# --- the order of rows ----------------------------------------------------------------------


def test_neighbouring_pairs_become_halves(tmp_path):
    """Row r of every head holds the number of its pair, plus a half for the second of the pair."""
    model = hf_models.llama(**SIZES, attention_bias=False)
    stored = np.tile(np.repeat(np.arange(16), 2) + np.tile([0.0, 0.5], 16), 4)  # 4 heads of 32
    rows = np.repeat(stored[:, None], 64, axis=1).astype(np.float32)
    path = gguf_files.write_model(tmp_path / "m.gguf", model, extra={"blk.0.attn_q.weight": rows})
    read = native(path).blocks[0].attn.q_proj.weight[:, 0].view(4, 32)
    wanted = torch.cat([torch.arange(16.0), torch.arange(16) + 0.5])
    assert torch.equal(read, wanted.expand(4, -1))


# --- parity ---------------------------------------------------------------------------------


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILIES = {
    "llama": lambda: hf_models.llama(**SIZES),
    "llama, tied": lambda: hf_models.llama(**SIZES, attention_bias=False, tie_word_embeddings=True),
    "llama, every bias": lambda: hf_models.llama(**SIZES, mlp_bias=True),
    "qwen2": lambda: hf_models.qwen2(**QWEN2_SIZES),
    "qwen3": lambda: hf_models.qwen3(**SIZES),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_transformers(tmp_path, family):
    model = FAMILIES[family]()
    path = gguf_files.write_model(tmp_path / "m.gguf", model)
    assert largest_difference(path, model) < 1e-4


def test_linear_scaling_is_honoured(tmp_path):
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
    model = hf_models.llama(**SIZES, rope_parameters=rope)
    changes = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    path = gguf_files.write_model(tmp_path / "m.gguf", model, changes=changes)
    assert largest_difference(path, model) < 1e-4
    old = gguf_files.write_model(
        tmp_path / "old.gguf", model, changes={"llama.rope.scale_linear": 4.0}
    )
    assert largest_difference(old, model) < 1e-4
    none = gguf_files.write_model(
        tmp_path / "none.gguf", model, changes={"llama.rope.scaling.type": "none"}
    )
    assert largest_difference(none, model) > 1e-2  # the test can see the scaling


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_scaling_stored_as_a_tensor_is_honoured(tmp_path, factor):
    rope = {**LLAMA3_ROPE, "factor": factor}
    model = hf_models.llama(**SIZES, rope_parameters=rope)
    plain = 500000.0 ** -(torch.arange(0, 32, 2) / 32)
    divisors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert divisors[0] == 1.0
    assert divisors[-1] == pytest.approx(factor)
    extra = {"rope_freqs.weight": divisors}
    path = gguf_files.write_model(tmp_path / "m.gguf", model, extra=extra)
    assert native(path).config.rotary_scaling.factor == factor
    assert largest_difference(path, model) < 1e-4
    # Within 60 tokens the slow frequencies hardly turn: hold them to transformers' themselves.
    ours = native(path).rotary.frequencies.float()
    assert torch.allclose(ours, model.model.rotary_emb.inv_freq, rtol=1e-5)


def test_transformers_own_reader_agrees(tmp_path):
    model = hf_models.llama(**SIZES, attention_bias=False)
    path = gguf_files.write_model(tmp_path / "m.gguf", model)
    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    assert largest_difference(path, theirs.eval()) < 1e-4


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1, Kind.Q5_0])
def test_stored_types_are_restored(tmp_path, kind):
    """Against a transformers model whose matrices hold the restored numbers."""
    model = hf_models.llama(**SIZES)
    path = gguf_files.write_model(tmp_path / "m.gguf", model, kind)
    before = log_probs(model, some_tokens())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:  # whole rows: their order does not matter here
                restored = gguf.dequantize(gguf.quantize(parameter.numpy(), kind), kind)
                parameter.copy_(torch.from_numpy(restored))
    assert (log_probs(model, some_tokens()) - before).abs().max() > 1e-4  # rounding shows
    assert largest_difference(path, model) < 1e-4


def test_weights_are_the_models_own(tmp_path):
    path = gguf_files.write_model(tmp_path / "m.gguf", hf_models.llama(**SIZES))
    stored = path.read_bytes()
    model = native(path)
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.is_contiguous()
            parameter.zero_()
    assert path.read_bytes() == stored
    assert native(path).W_E.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_weight_has_the_dtype_asked_for(tmp_path, dtype):
    path = gguf_files.write_model(tmp_path / "m.gguf", hf_models.llama(**SIZES), Kind.Q8_0)
    model = native(path, dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert native(path).W_E.to(dtype).equal(model.W_E)


# --- what is loaded -------------------------------------------------------------------------


def test_a_file_without_a_tokenizer_takes_ids_and_says_why_not_text(tmp_path):
    path = gguf_files.write_model(tmp_path / "m.gguf", hf_models.llama(**SIZES))
    model = load_model(path)
    assert (model.vocabulary, model.cfg.model_name) == (None, str(path))
    assert (model.source.kind, model.source.path) == ("gguf", path)
    assert model.to_tokens([[1, 2]]).tolist() == [[1, 2]]
    with pytest.raises(ModelError, match="has no tokenizer: give token ids, not text"):
        model.to_tokens("text")


def test_the_bos_is_the_files(tmp_path):
    model = hf_models.llama(**SIZES)
    changes = {"tokenizer.ggml.bos_token_id": 7}
    assert native(gguf_files.write_model(tmp_path / "a.gguf", model)).cfg.bos_token_id is None
    with_bos = gguf_files.write_model(tmp_path / "b.gguf", model, changes=changes)
    assert native(with_bos).cfg.bos_token_id == 7


# --- what is refused ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    return hf_models.llama(**SIZES)


REFUSED = {
    "experts": (
        {"llama.expert_count": 8},
        "FILE: llama.expert_count = 8 may change the numbers, and is not supported",
    ),
    "window": (
        {"llama.attention.sliding_window": 16},
        "FILE: llama.attention.sliding_window = 16 may change the numbers, and is not supported",
    ),
    "soft-capping": (
        {"llama.attn_logit_softcapping": 50.0},
        "FILE: llama.attn_logit_softcapping = 50.0 may change the numbers, and is not supported",
    ),
    "not causal": (
        {"llama.attention.causal": False},
        "FILE: llama.attention.causal = False may change the numbers, and is not supported",
    ),
    "yarn": (
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0},
        "FILE: rope.scaling.type = 'yarn' is not supported; linear is",
    ),
    "partial rotary": (
        {"llama.rope.dimension_count": 16},
        "FILE: llama.rope.dimension_count = 16, but a head has 32 dimensions",
    ),
    "wide values": (
        {"llama.attention.value_length": 64},
        "FILE: llama.attention.value_length = 64, but a head has 32 dimensions",
    ),
    "no layers": ({"llama.block_count": None}, "FILE: llama.block_count is missing"),
    "sizes by layer": (
        {"llama.feed_forward_length": [96, 64]},
        "FILE: llama.feed_forward_length is not one number",
    ),
    "no share": (
        {"llama.attention.head_count_kv": 3},
        "FILE: attention.n_key_value_heads = 3 does not divide n_heads = 4; one of 1, 2, 4 would",
    ),
    "one of several": (
        {"split.count": 3},
        "FILE is one part of 3: join them with llama-gguf-split",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_metadata_that_would_change_the_numbers_is_refused_by_name(tmp_path, llama, what):
    changes, message = REFUSED[what]
    assert fault(gguf_files.write_model(tmp_path / "m.gguf", llama, changes=changes)) == message


def test_neutral_metadata_is_taken(tmp_path, llama):
    changes = {
        "llama.expert_count": 0,
        "llama.attention.causal": True,
        "llama.rope.scaling.finetuned": True,
    }
    path = gguf_files.write_model(tmp_path / "m.gguf", llama, changes=changes)
    assert largest_difference(path, llama) < 1e-4


def test_an_unknown_architecture_is_refused_by_name(tmp_path):
    path = gguf_files.write(tmp_path / "m.gguf", "gemma2", {}, {"a": np.zeros(1, np.float32)})
    assert fault(path) == (
        "FILE: architecture 'gemma2' is not read; known: llama, qwen2, qwen3; --backend bridge "
        "reads what transformers does"
    )


TENSORS = {
    "left over": (
        {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)},
        "FILE does not fit its metadata: unknown blk.0.attn_sinks.weight",
    ),
    "missing": (
        {"blk.1.attn_k.bias": None, "output_norm.weight": None},
        "FILE does not fit its metadata: missing blk.1.attn_k.bias, output_norm.weight",
    ),
    "misshapen": (
        {"blk.1.ffn_up.weight": np.zeros((96, 32), np.float32)},
        "FILE does not fit its metadata: blk.1.ffn_up.weight is [96, 32], not [96, 64]",
    ),
    "no embedding": ({"token_embd.weight": None}, "FILE holds no token_embd.weight"),
    "other frequencies": (
        {"rope_freqs.weight": np.linspace(1, 8, 16, dtype=np.float32)},
        "FILE: rope_freqs.weight scales the frequencies otherwise than Llama 3.1 does, and is "
        "not supported",
    ),
}


@pytest.mark.parametrize("what", TENSORS)
def test_every_tensor_is_used_exactly_once_or_listed(tmp_path, llama, what):
    extra, message = TENSORS[what]
    assert fault(gguf_files.write_model(tmp_path / "m.gguf", llama, extra=extra)) == message


@pytest.mark.parametrize("kept", [0, 3, 11, 40, 300, 2000, 0.5, -1])
def test_a_file_cut_short_says_so(tmp_path, llama, kept):
    path = gguf_files.write_model(tmp_path / "m.gguf", llama)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if 0 < kept < 1 else kept])
    assert fault(path).startswith("FILE is cut short or is not a GGUF file: ")


def test_what_is_no_gguf_file_says_so(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"safetensors" * 100)
    assert fault(path) == "FILE is cut short or is not a GGUF file: GGUF magic invalid"


def test_a_type_that_gguf_cannot_restore_is_named(tmp_path, llama):
    extra = {"blk.0.ffn_up.weight": np.zeros((96, 64))}
    assert fault(gguf_files.write_model(tmp_path / "m.gguf", llama, extra=extra)) == (
        "FILE: blk.0.ffn_up.weight is stored as F64, which the installed gguf does not restore"
    )


def test_without_the_package_gguf_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    assert fault(path) == "FILE: reading a GGUF file needs the package gguf: pip install gguf"
