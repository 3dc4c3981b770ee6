"""Tiny Hugging Face models in which every parameter matters, made on the spot.

A fresh model has zero biases, unit gains and weights so small that attention is near uniform: noise
on every parameter makes a dropped bias, a swapped norm or a wrong scale visible.
"""

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from interp.errors import ModelError
from interp.models.hf_config import model_config
from interp.models.pretrained import native_weights
from interp.models.transformer import Transformer
from interp.models.weights import model_with_weights


def perturbed(model: nn.Module, *, seed: int = 0, std: float = 0.1) -> nn.Module:
    """The model in eval mode, with noise added to each of its parameters once."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(std * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def _built(model_class: type, config: object, seed: int) -> nn.Module:
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    return perturbed(model_class(config), seed=seed + 1)


def gpt2(*, seed: int = 0, **changes: object) -> nn.Module:
    """GPT-2: learned positions, LayerNorm, fused transposed projections, tied embeddings."""
    fields = {
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 32,
        "vocab_size": 97,
        "n_positions": 64,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "bos_token_id": 96,
        "eos_token_id": 96,
        **changes,
    }
    return _built(transformers.GPT2LMHeadModel, transformers.GPT2Config(**fields), seed)


# Every default guess is wrong on purpose: 6 * 16 is not 48, odd eps and theta, biases on.
_LLAMA = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 80,
    "vocab_size": 101,
    "rms_norm_eps": 1e-3,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(*, seed: int = 0, **changes: object) -> nn.Module:
    """Llama with biases in attention."""
    fields = {**_LLAMA, "attention_bias": True, **changes}
    return _built(transformers.LlamaForCausalLM, transformers.LlamaConfig(**fields), seed)


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama3_scaled(*, seed: int = 0, **changes: object) -> nn.Module:
    """Llama 3.1's frequency scaling, over a first context so short that it acts at once."""
    return llama(seed=seed, **{"rope_parameters": dict(LLAMA3_ROPE), **changes})


def mistral(*, seed: int = 0, **changes: object) -> nn.Module:
    """Mistral: a sliding window, no biases."""
    fields = {**_LLAMA, "sliding_window": 16, **changes}
    return _built(transformers.MistralForCausalLM, transformers.MistralConfig(**fields), seed)


def qwen2(*, seed: int = 0, **changes: object) -> nn.Module:
    """Qwen2: biases of queries, keys and values only, and no head width of its own."""
    fields = {key: value for key, value in _LLAMA.items() if key != "head_dim"}
    fields |= {"bos_token_id": None, **changes}
    return _built(transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**fields), seed)


def qwen3(*, seed: int = 0, **changes: object) -> nn.Module:
    """Qwen3: a norm on every query and key head."""
    fields = {**_LLAMA, "bos_token_id": None, **changes}
    return _built(transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**fields), seed)


def gemma2(*, seed: int = 0, **changes: object) -> nn.Module:
    """Gemma-2: soft-capped scores and logits, and norms after attention and MLP."""
    fields = {
        **_LLAMA,
        "tie_word_embeddings": True,
        "sliding_window": 16,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
        "pad_token_id": 0,
        **changes,
    }
    return _built(transformers.Gemma2ForCausalLM, transformers.Gemma2Config(**fields), seed)


def olmo2(*, seed: int = 0, **changes: object) -> nn.Module:
    """OLMo-2: the only norms of a block come after attention and MLP."""
    fields = {key: value for key, value in _LLAMA.items() if key != "head_dim"}
    fields |= {"pad_token_id": 0, **changes}
    return _built(transformers.Olmo2ForCausalLM, transformers.Olmo2Config(**fields), seed)


def gpt_neox(*, seed: int = 0, **changes: object) -> nn.Module:
    """GPT-NeoX, as Pythia is: parallel blocks, fused projections by head, partial rotary."""
    fields = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "vocab_size": 97,
        "max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
        "use_parallel_residual": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **changes,
    }
    return _built(transformers.GPTNeoXForCausalLM, transformers.GPTNeoXConfig(**fields), seed)


def bert(*, seed: int = 0, **changes: object) -> nn.Module:
    """BERT: an encoder, every token sees every token."""
    fields = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "vocab_size": 97,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        **changes,
    }
    return _built(transformers.BertForMaskedLM, transformers.BertConfig(**fields), seed)


# The families at their hardest, and the branches of each config that change the arithmetic.
MODELS = {
    "gpt2": gpt2,
    "gpt2_untied": lambda: gpt2(tie_word_embeddings=False, n_inner=40, layer_norm_epsilon=1e-3),
    "gpt2_gelu": lambda: gpt2(activation_function="gelu"),
    "llama": llama,
    "llama_tied": lambda: llama(tie_word_embeddings=True, attention_bias=False),
    "llama_mlp_bias": lambda: llama(mlp_bias=True, head_dim=None),
    "llama_linear": lambda: llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
    ),
    "llama3_scaled": llama3_scaled,
    "mistral": mistral,
    "mistral_unwindowed": lambda: mistral(sliding_window=None),
    "qwen2": qwen2,
    "qwen2_windowed": lambda: qwen2(use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": qwen3,
    "qwen3_windowed_bias": lambda: qwen3(
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
}

T = 60  # five tokens would not see a wrong rotary base


def tokens(d_vocab: int = 97, n_pos: int = T) -> Tensor:
    """Random ids, two sequences."""
    return torch.randint(d_vocab, (2, n_pos), generator=torch.Generator().manual_seed(3))


def native(
    theirs: nn.Module, *, weights: dict | None = None, dtype: torch.dtype = torch.float32
) -> Transformer:
    """The model read from a model of transformers, or from its config and the given tensors."""
    hf = theirs.config.to_dict()
    given = theirs.state_dict() if weights is None else weights
    own = native_weights(hf, given.keys(), given.__getitem__, "here", dtype)
    return model_with_weights(model_config(hf, "here"), own, Path("here"))


def log_probs(logits: Tensor) -> Tensor:
    """Log-probabilities in float64."""
    return logits.double().log_softmax(-1)


def gap(actual: Tensor, expected: Tensor) -> float:
    """The largest difference."""
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max())


def fault(call: object, *args: object, **kwargs: object) -> str:
    """The one line of a call that is refused."""
    with pytest.raises(ModelError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)
