"""Models as transformers loads them: quietly, whole or not at all, and bridged without a copy."""

import copy
import logging

import gguf_files
import hf_models
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_tokenizers import wrapped

from interp.errors import ModelError
from interp.models.bridging import load_bridge
from interp.models.hub import Source
from interp.models.original import original_model


def tokens_for(hf):
    """Random ids, none of which is special."""
    return torch.randint(3, hf.config.vocab_size - 2, (2, 9))


@torch.no_grad()
def logits_of(model, tokens):
    out = model(tokens)
    return out if isinstance(out, torch.Tensor) else out.logits


def fault(source):
    with pytest.raises(ModelError) as caught:
        original_model(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def saved(folder, family="llama", **changes):
    hf = getattr(hf_models, family)(**changes)
    hf.save_pretrained(folder)
    return hf, Source("huggingface", folder, f"the {family}")


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_a_folder_is_loaded_quietly_as_transformers_computes_it(family, tmp_path, capfd, caplog):
    hf, source = saved(tmp_path, family)
    tokens = tokens_for(hf)
    capfd.readouterr()
    with caplog.at_level(logging.WARNING):
        original = original_model(source)
    assert capfd.readouterr() == ("", "")
    assert type(original) is type(hf)
    assert original.config._attn_implementation == "eager"
    assert not original.training
    assert torch.equal(logits_of(original, tokens), logits_of(hf, tokens))
    half = original_model(source, torch.bfloat16)
    assert half.dtype == torch.bfloat16


def test_a_bridge_is_loaded_without_a_second_copy_and_knows_its_source(tmp_path, monkeypatch):
    hf, source = saved(tmp_path, vocab_size=300)
    tokenizer = wrapped("does_not")
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(copy, "deepcopy", _only_configs(copy.deepcopy))
    model = load_bridge(source)
    monkeypatch.undo()
    assert model.source == source
    assert model.cfg.model_name == "the llama"
    assert model.to_tokens("the").tolist() == [[tokenizer.bos_token_id, *tokenizer.encode("the")]]
    tokens = tokens_for(hf)
    assert torch.equal(logits_of(model, tokens), logits_of(hf, tokens))
    assert load_bridge(source, dtype=torch.bfloat16).cfg.dtype == torch.bfloat16


def _only_configs(deepcopy):
    """TransformerLens copies its block template; a whole model must not be copied."""

    def checked(value, *rest):
        assert not isinstance(value, transformers.PreTrainedModel)
        return deepcopy(value, *rest)

    return checked


def test_a_gguf_file_is_loaded_by_transformers(tmp_path):
    hf = hf_models.llama(attention_bias=False, head_dim=8)
    path = tmp_path / "small.gguf"
    gguf_files.write_model(path, hf)
    model = load_bridge(Source("gguf", path, "small"))
    tokens = tokens_for(hf)
    torch.testing.assert_close(logits_of(model, tokens), logits_of(hf, tokens), rtol=0, atol=1e-5)


def test_checkpoints_that_lack_or_hold_too_much_are_refused(tmp_path):
    _, source = saved(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)

    def loaded(**changes):
        tensors = {**whole, **changes}
        save_file({k: v for k, v in tensors.items() if v is not None}, path, {"format": "pt"})
        return fault(source)

    key = "model.layers.1.self_attn.o_proj.weight"
    assert loaded(**{key: None}) == f"{tmp_path} lacks {key}"
    extra = {"model.layers.1.extra.weight": torch.zeros(2)}
    assert loaded(**extra) == (
        f"{tmp_path} holds, beside the weights of a LlamaForCausalLM, model.layers.1.extra.weight"
    )
    assert loaded(**{key: torch.zeros(3, 3)}).startswith("the llama: transformers cannot load it: ")
    path.write_bytes(b"\0" * 64)
    assert fault(source).startswith("the llama: transformers cannot load it: ")
    path.unlink()
    assert "no file named model.safetensors" in fault(source)


def test_heads_that_bert_was_trained_with_are_left_out(tmp_path):
    hf, source = saved(tmp_path, "bert")
    path = tmp_path / "model.safetensors"
    more = {
        "bert.pooler.dense.weight": torch.ones(32, 32),
        "cls.seq_relationship.bias": torch.ones(2),
    }
    save_file({**load_file(path), **more}, path, {"format": "pt"})
    tokens = tokens_for(hf)
    assert torch.equal(logits_of(original_model(source), tokens), logits_of(hf, tokens))


def test_a_run_of_ours_has_no_original(tmp_path):
    source = Source("run", tmp_path, "reports/x")
    assert fault(source) == (
        "reports/x is a run of this toolkit, which transformers does not know; use the native "
        "backend"
    )
