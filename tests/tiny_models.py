"""Tiny models in which every parameter matters.

A fresh model has zero biases and unit gains, and small weights make attention near uniform: a test
on one would not see a dropped bias or a wrong scale. Noise on every parameter makes them visible.
"""

from collections.abc import Sequence

import numpy as np
import torch
from reference import Description, forward
from torch import Tensor

from interp.config import ModelConfig
from interp.models.transformer import Transformer

D_VOCAB = 19
N_CTX = 16

# Each family differs from the base in what its name says; together they cover every field.
FAMILIES: dict[str, dict] = {
    "mha": {},
    "gqa": {"attention": {"n_key_value_heads": 2}},
    "mqa": {"attention": {"n_key_value_heads": 1}},
    "wide_heads": {"attention": {"n_key_value_heads": 2, "d_head": 10}},
    "no_attention_bias": {"attention": {"bias": False}},
    "smeared": {"attention": {"n_key_value_heads": 2, "smeared_keys": True}},
    "shortformer": {
        "attention": {"n_key_value_heads": 2, "smeared_keys": True},
        "positional_embedding_type": "shortformer",
    },
    "rotary": {"positional_embedding_type": "rotary", "rotary_base": 50.0},
    "rotary_smeared": {
        "attention": {"n_key_value_heads": 2, "smeared_keys": True},
        "positional_embedding_type": "rotary",
    },
    "no_positions": {"positional_embedding_type": "none"},
    "llama": {
        "attention": {"n_key_value_heads": 2, "d_head": 8, "bias": False},
        "mlp": {"d_mlp": 20, "act_fn": "silu", "gated": True, "bias": False},
        "positional_embedding_type": "rotary",
        "normalization_type": "RMS",
        "eps": 1e-2,
    },
    "windowed": {"attention": {"n_key_value_heads": 2, "window": 3}},
    "rotary_linear": {
        "attention": {"window": 2, "windowed_layers": [1]},
        "positional_embedding_type": "rotary",
        "rotary_base": 50.0,
        "rotary_scaling": {"kind": "linear", "factor": 3.0},
    },
    # Its three frequencies are kept, mixed and divided.
    "rotary_llama3": {
        "positional_embedding_type": "rotary",
        "rotary_base": 50.0,
        "rotary_scaling": {
            "kind": "llama3",
            "factor": 4.0,
            "low_freq_factor": 0.5,
            "high_freq_factor": 2.0,
            "original_n_ctx": 16,
        },
    },
    "qk_norm": {
        "attention": {"n_key_value_heads": 2, "qk_norm": True, "bias": False},
        "positional_embedding_type": "rotary",
        "normalization_type": "RMS",
        "eps": 1e-2,
    },
    "qk_norm_no_positions": {
        "attention": {"qk_norm": True, "smeared_keys": True, "output_bias": False},
        "positional_embedding_type": "none",
    },
    "scaled": {"attention": {"scale": 0.7, "scale_by_inverse_layer": True}},
    "output_bias_alone": {
        "attention": {"bias": False, "output_bias": True, "scale_by_inverse_layer": True},
    },
    "gated_with_bias": {"mlp": {"d_mlp": 20, "act_fn": "gelu", "gated": True}},
    "relu_tied": {"mlp": {"d_mlp": 20, "act_fn": "relu", "bias": False}, "tie_embeddings": True},
    "no_norm": {"normalization_type": "none", "unembed_bias": True},
    "rms_attention_only": {"mlp": None, "normalization_type": "RMS", "unembed_bias": True},
    "attention_only": {"mlp": None, "eps": 1e-1},
}


def tiny_config(**changes: object) -> ModelConfig:
    """Two layers of four heads of six; `attention` is merged, any other change replaces."""
    attention = {"n_heads": 4, **(changes.pop("attention", None) or {})}
    fields = {
        "n_layers": 2,
        "d_model": 24,
        "n_ctx": N_CTX,
        "d_vocab": D_VOCAB,
        "mlp": {"d_mlp": 20},
        **changes,
    }
    return ModelConfig(attention=attention, **fields)


def perturbed(
    config: ModelConfig, *, seed: int = 0, std: float = 0.3, **given: object
) -> Transformer:
    """A model with noise on every parameter, in eval mode."""
    model = Transformer(config, seed=seed, **given)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(std * torch.randn(parameter.shape, generator=generator))
    return model


def tiny(family: str = "mha", *, seed: int = 0, **changes: object) -> Transformer:
    """A perturbed model of one of the families."""
    merged = {**FAMILIES[family], **changes}
    if "attention" in changes:
        merged["attention"] = {**FAMILIES[family].get("attention", {}), **changes["attention"]}
    return perturbed(tiny_config(**merged), seed=seed)


def some_tokens(batch: int, n_pos: int, *, seed: int = 0, d_vocab: int = D_VOCAB) -> Tensor:
    """Random ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(d_vocab, (batch, n_pos), generator=generator)


def padding(side: str, lengths: Sequence[int], n_pos: int) -> Tensor | None:
    """An attention mask with so many real tokens a row, padded on the left or right, or None."""
    if side == "none":
        return None
    mask = torch.zeros(len(lengths), n_pos, dtype=torch.long)
    for row, length in enumerate(lengths):
        if side == "left":
            mask[row, n_pos - length :] = 1
        else:
            mask[row, :length] = 1
    return mask


def oracle(model: Transformer, tokens: Tensor, mask: Tensor | None = None) -> dict[str, np.ndarray]:
    """The float64 oracle's activations of a model."""
    weights = {name: value.double().numpy() for name, value in model.state_dict().items()}
    return forward(
        Description.of(model.config),
        weights,
        tokens.numpy(),
        None if mask is None else mask.numpy(),
    )


def error(actual: Tensor | np.ndarray, expected: Tensor | np.ndarray) -> float:
    """The largest difference, relative to the largest expected number where that exceeds 1.

    Infinities have to stand in the same places.
    """
    a = torch.as_tensor(actual).detach().double()
    e = torch.as_tensor(expected).detach().double()
    assert a.shape == e.shape, f"{list(a.shape)} is not {list(e.shape)}"
    assert torch.equal(a.isinf(), e.isinf()), "infinities in other places"
    finite = ~e.isinf()
    if not finite.any():
        return 0.0
    a, e = a[finite], e[finite]
    return float((a - e).abs().max() / max(1.0, float(e.abs().max())))
