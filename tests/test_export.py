"""Models of our own written as folders that `transformers` and TransformerLens load."""

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers
from hf_models import fault, gap, log_probs, tokens
from safetensors.torch import load_file
from tiny_models import perturbed, tiny_config
from torch import nn
from typer.testing import CliRunner

import interp.models.pretrained
from interp.cli import app
from interp.data.pretrained_tokenizer import PretrainedVocabulary
from interp.data.tokenizer import BytePairVocabulary
from interp.models.hf_config import model_config
from interp.models.hf_families import hf_config
from interp.models.loading import load_model
from interp.models.pretrained import hf_weights, native_weights, save_pretrained
from interp.models.transformer import Transformer
from interp.models.weights import model_with_weights, stored_weights

PARITY = 1e-4  # log-probs; measured differences are 3e-6 at most


def loaded(folder: Path) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def booted(folder: Path) -> nn.Module:
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge.boot_transformers(str(folder), device="cpu")


def read_back(folder: Path) -> Transformer:
    hf = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    own = native_weights(hf, tensors.keys(), tensors.__getitem__, str(folder), torch.float32)
    return model_with_weights(model_config(hf, str(folder)), own, folder)


def exported(**changes: object) -> Transformer:
    """A model of our own making, as training makes them."""
    fields = {"n_ctx": 64, "d_vocab": 97, "bos_token_id": 96, **changes}
    return perturbed(tiny_config(**fields), std=0.1)


_GATED = {"d_mlp": 40, "act_fn": "silu", "gated": True, "bias": False}
_LLAMA_TYPE = {
    "mlp": _GATED,
    "positional_embedding_type": "rotary",
    "rotary_base": 500.0,
    "normalization_type": "RMS",
    "eps": 1e-3,
}
_GROUPED = {"n_key_value_heads": 2, "d_head": 8, "bias": False}
OWN = {
    "gpt2": ("gpt2", {}),
    "gpt2_tied_by_layer": (
        "gpt2",
        {"tie_embeddings": True, "attention": {"scale_by_inverse_layer": True}},
    ),
    "gpt2_unscaled": ("gpt2", {"attention": {"scale": 1.0}}),
    "gpt2_relu": ("gpt2", {"mlp": {"d_mlp": 20, "act_fn": "relu"}, "eps": 1e-2}),
    "llama": ("llama", {**_LLAMA_TYPE, "attention": _GROUPED}),
    "llama_biases": (
        "llama",
        {**_LLAMA_TYPE, "attention": {"d_head": 8}, "mlp": {**_GATED, "bias": True}},
    ),
    "llama3_scaled_tied": (
        "llama",
        {
            **_LLAMA_TYPE,
            "attention": _GROUPED,
            "tie_embeddings": True,
            "rotary_scaling": {
                "kind": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_n_ctx": 32,
            },
        },
    ),
    "llama_linear": (
        "llama",
        {**_LLAMA_TYPE, "rotary_scaling": {"kind": "linear", "factor": 3.0}},
    ),
    "mistral": ("mistral", {**_LLAMA_TYPE, "attention": {**_GROUPED, "window": 16}}),
    "qwen2": ("qwen2", {**_LLAMA_TYPE, "attention": {"output_bias": False}}),
    "qwen2_windowed": (
        "qwen2",
        {
            **_LLAMA_TYPE,
            "attention": {
                **_GROUPED,
                "bias": True,
                "output_bias": False,
                "window": 16,
                "windowed_layers": [1],
            },
        },
    ),
    "qwen3": ("qwen3", {**_LLAMA_TYPE, "attention": {**_GROUPED, "qk_norm": True}}),
    "qwen3_windowed": (
        "qwen3",
        {**_LLAMA_TYPE, "attention": {"d_head": 8, "qk_norm": True, "window": 16}},
    ),
}
OWN["llama_linear"][1]["attention"] = {"bias": False}


@pytest.mark.parametrize("name", OWN)
@torch.no_grad()
def test_a_written_folder_gives_equal_log_probs_everywhere(name, tmp_path):
    model_type, fields = OWN[name]
    ours = exported(**fields)
    assert save_pretrained(ours, tmp_path / "out") == tmp_path / "out"
    wanted = log_probs(ours(tokens()))
    theirs, bridge = loaded(tmp_path / "out"), booted(tmp_path / "out")
    assert theirs.config.model_type == model_type
    assert theirs.dtype == torch.float32
    assert gap(log_probs(theirs(tokens()).logits), wanted) < PARITY
    if name != "gpt2_unscaled":  # TransformerLens 4.3 does not read scale_attn_weights
        assert gap(log_probs(bridge(tokens())), wanted) < PARITY

    again = read_back(tmp_path / "out")
    before, after = stored_weights(ours), stored_weights(again)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert torch.equal(again(tokens()), ours(tokens()))
    assert again.config.bos_token_id == 96


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_matrix_is_stored_once_and_is_one_storage_again(tmp_path, tied):
    ours = exported(tie_embeddings=tied)
    save_pretrained(ours, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.weight" in tensors) is not tied
    assert sum(t.numel() for t in tensors.values()) == sum(p.numel() for p in ours.parameters())
    again = read_back(tmp_path / "out")
    assert (again.unembed.weight is again.embed.weight) is tied
    theirs = loaded(tmp_path / "out")
    one = theirs.lm_head.weight.data_ptr() == theirs.transformer.wte.weight.data_ptr()
    assert one is tied


def test_bfloat16_weights_are_written_as_they_are(tmp_path):
    ours = exported().to(torch.bfloat16)
    save_pretrained(ours, tmp_path / "out")
    assert loaded(tmp_path / "out").dtype == torch.bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["transformer.wte.weight"], ours.embed.weight)


def test_a_model_without_a_vocabulary_gets_its_ids_as_tokens(tmp_path):
    save_pretrained(exported(), tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(tokenizer) == 97
    assert tokenizer("3 17 96")["input_ids"] == [3, 17, 96]
    assert tokenizer.decode([3, 17, 96]) == "3 17 96"
    assert tokenizer("no numbers here")["input_ids"] == []  # and not some token
    bridge = booted(tmp_path / "out")
    assert bridge.to_tokens("3 17 96", prepend_bos=False).tolist() == [[3, 17, 96]]


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "qwen3"])
def test_the_vocabulary_of_a_run_becomes_the_tokenizer(name, tmp_path):
    text = "Ünïcode and  spaces,\nlines; attention attends to 12345 attended tokens. 've'll"
    vocabulary = BytePairVocabulary.train([text], 270)
    config = tiny_config(d_vocab=270, n_ctx=96, **OWN[name][1])
    save_pretrained(Transformer(config, vocabulary=vocabulary), tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    (ids,) = vocabulary.encode(text)
    assert tokenizer(text)["input_ids"] == ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.bos_token is None
    assert booted(tmp_path / "out").to_tokens(text, prepend_bos=False).tolist() == [ids]


def test_a_tokenizer_of_transformers_is_written_by_itself(tmp_path):
    save_pretrained(exported(), tmp_path / "numbers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "numbers", bos_token="96")
    ours = exported()
    ours.vocabulary = PretrainedVocabulary(tokenizer)
    save_pretrained(ours, tmp_path / "out")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again("3 17")["input_ids"] == [3, 17]
    assert again.bos_token_id == 96


@pytest.mark.parametrize("given", ["none", "own", "qwen2"])
@torch.no_grad()
def test_a_qwen2_folder_has_no_tokenizer_that_would_be_read_as_another(given, tmp_path):
    ours = exported(**OWN["qwen2"][1], d_vocab=300)
    if given == "own":
        ours.vocabulary = BytePairVocabulary.train(["12345 " * 9], 270)
    if given == "qwen2":
        json_text = json.loads(BytePairVocabulary.train(["12345 " * 9], 270).to_json())
        tokenizer = transformers.Qwen2Tokenizer(
            vocab=json_text["model"]["vocab"],
            merges=[tuple(pair) for pair in json_text["model"]["merges"]],
        )
        ours.vocabulary = PretrainedVocabulary(tokenizer)
    save_pretrained(ours, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").is_file() is (given == "qwen2")
    assert gap(log_probs(booted(tmp_path / "out")(tokens())), log_probs(ours(tokens()))) < PARITY
    if given == "qwen2":
        again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
        assert again("1234 12345")["input_ids"] == tokenizer("1234 12345")["input_ids"]


def test_a_vocabulary_that_cannot_be_written_leaves_nothing(tmp_path):
    class Opaque:
        bos_token_id = None

    ours = exported()
    ours.vocabulary = Opaque()
    message = fault(save_pretrained, ours, tmp_path / "out")
    assert message == "a vocabulary of Opaque cannot be written as a tokenizer.json"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    message = f"{tmp_path} is not empty: a model is written into a folder of its own"
    assert fault(save_pretrained, exported(), tmp_path) == message
    assert fault(save_pretrained, exported(), tmp_path / "note.txt").endswith("of its own")
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


def test_an_empty_folder_and_missing_parents_will_do(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for folder in (tmp_path / "link", tmp_path / "a" / "b"):
        save_pretrained(exported(), folder)
        assert loaded(folder).config.model_type == "gpt2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "empty", "link"]


def test_a_write_that_breaks_off_leaves_nothing(tmp_path, monkeypatch):
    def full(*args: object, **kwargs: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(interp.models.pretrained, "save_file", full)
    message = fault(save_pretrained, exported(), tmp_path / "out")
    assert message == f"{tmp_path / 'out'} cannot be written: no space left on device"
    assert list(tmp_path.iterdir()) == []


NEITHER = {
    "attention_only": ({"mlp": None}, ["no layers without an MLP"]),
    "shortformer": (
        {"positional_embedding_type": "shortformer"},
        ["gpt2 has no positions of the kind 'shortformer';"],
    ),
    "smeared": ({"attention": {"smeared_keys": True}}, ["gpt2 has no smeared keys;"]),
    "unembed_bias": ({"unembed_bias": True}, ["gpt2 has no bias in the unembedding;"]),
    "two_of_them": (
        {"unembed_bias": True, "attention": {"smeared_keys": True}},
        ["gpt2 has no smeared keys, no bias in the unembedding;"],
    ),
    "no_norm": ({"normalization_type": "none"}, ["gpt2 has no layers without norms;"]),
    "gpt2_window": ({"attention": {"window": 3}}, ["gpt2 has no window;", "learned positions"]),
    "gpt2_groups": ({"attention": {"n_key_value_heads": 2}}, ["no grouped key-value heads"]),
    "gpt2_d_head": ({"attention": {"d_head": 8}}, ["no d_head other than d_model / n_heads"]),
    "gpt2_no_bias": ({"attention": {"bias": False}}, ["attention without biases of q, k, v and"]),
    "gpt2_scale": ({"attention": {"scale": 0.7}}, ["gpt2 has no score scale of 0.7;"]),
    "gpt2_mlp": ({"mlp": {"d_mlp": 8, "bias": False}}, ["gpt2 has no MLP without biases;"]),
    "rotary_layernorm": (
        {"positional_embedding_type": "rotary"},
        ["gpt2 has no rotary positions;", "llama has no LayerNorm, no MLP without a gate"],
    ),
    "rotary_scale": (
        {**_LLAMA_TYPE, "attention": {**_GROUPED, "scale": 0.7}},
        ["; llama has no score scale of 0.7"],
    ),
    "uneven_width": (
        {**_LLAMA_TYPE, "d_model": 26, "attention": _GROUPED, "mlp": {**_GATED, "bias": True}},
        ["; llama has no n_heads that do not divide d_model"],
    ),
    "some_windows": (
        {**_LLAMA_TYPE, "attention": {**_GROUPED, "window": 3, "windowed_layers": [1]}},
        ["; llama has no window"],
    ),
    "some_windows_and_mlp_bias": (
        {
            **_LLAMA_TYPE,
            "attention": {**_GROUPED, "bias": True, "window": 3, "windowed_layers": [1]},
            "mlp": {**_GATED, "bias": True},
        },
        ["; llama has no window"],
    ),
    "window_and_mlp_bias": (
        {**_LLAMA_TYPE, "attention": {**_GROUPED, "window": 3}, "mlp": {**_GATED, "bias": True}},
        ["has no window"],
    ),
    "bias_of_the_output_alone": (
        {**_LLAMA_TYPE, "attention": {**_GROUPED, "output_bias": True}},
        ["biases of q, k, v without the output's, or the reverse"],
    ),
    "qwen3_uneven": (
        {**_LLAMA_TYPE, "attention": {"qk_norm": True, "output_bias": False}},
        ["qwen2 has no norm of queries and keys"],
    ),
}


@pytest.mark.parametrize("name", NEITHER)
def test_a_model_of_neither_shape_is_refused_with_every_reason(name, tmp_path):
    fields, parts = NEITHER[name]
    message = fault(save_pretrained, exported(**fields), tmp_path / "out")
    assert message.startswith("no model type that transformers knows has this shape: gpt2 has no ")
    assert all(part in message for part in parts), message
    assert list(tmp_path.iterdir()) == []


def test_a_scale_that_says_the_usual_is_the_usual():
    assert hf_config(tiny_config(attention={"scale": 6**-0.5}))["scale_attn_weights"] is True


def test_a_window_in_no_layer_is_no_window():
    config = tiny_config(**_LLAMA_TYPE, attention={**_GROUPED, "window": 3, "windowed_layers": []})
    assert hf_config(config)["model_type"] == "llama"


def test_parameters_beyond_the_config_are_not_left_behind():
    ours = exported(tie_embeddings=True)
    ours.unembed.weight = nn.Parameter(ours.embed.weight.clone())
    assert fault(hf_weights, ours) == "custom does not fit its config: unknown unembed.weight"


# --- against TransformerLens ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
@torch.no_grad()
def test_log_probs_agree_with_a_raw_and_a_processed_bridge(name, tmp_path):
    ours = exported(**OWN[name][1])
    save_pretrained(ours, tmp_path / "out")
    raw = booted(tmp_path / "out")
    processed = copy.deepcopy(raw)  # processing changes the bridge and the model in it
    processed.enable_compatibility_mode()
    logits = ours(tokens())
    assert gap(log_probs(raw(tokens())), log_probs(logits)) < PARITY
    assert gap(log_probs(processed(tokens())), log_probs(logits)) < PARITY
    # The centred unembedding moves all logits of a position together: the log-probs do not see it.
    assert gap(raw(tokens()).mean(-1), logits.mean(-1)) < PARITY
    shift = processed(tokens()).mean(-1) - logits.mean(-1)
    assert shift.abs().max() > 0.01
    assert gap(processed(tokens()) - shift[..., None], logits) < PARITY

    ours.blocks[1].attn.v_proj.weight[3, 5] += 1e-2
    for bridge in (raw, processed):
        assert gap(log_probs(bridge(tokens())), log_probs(ours(tokens()))) > PARITY


def test_the_command_writes_a_hugging_face_folder_that_reads_back_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_pretrained(exported(), tmp_path / "first")
    result = CliRunner().invoke(app, ["export", "first", "second"])
    assert (result.exit_code, result.stdout) == (0, "second\n"), result.stderr
    first, second = (stored_weights(load_model(name)) for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
