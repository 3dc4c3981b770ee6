"""The Hugging Face family that computes what a model of ours computes, and its config.json."""

from collections.abc import Sequence

from interp.config import LinearScaling, ModelConfig
from interp.errors import ModelError

_CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def hf_config(config: ModelConfig) -> dict[str, object]:
    """The config.json under which `transformers` computes what a model of this config computes.

    GPT-2, Llama, Mistral, Qwen2 and Qwen3 are tried in turn. Dropout acts in training only, and in
    fewer places there than here.

    Raises: ModelError with every reason, for a model of neither GPT-2's nor Llama's shape.
    """
    reasons = _lacking(config)
    fitting = [family for family, lacking in reasons.items() if not lacking]
    if fitting:
        family = fitting[0]
        own = _gpt2(config) if family == "gpt2" else _llama_type(config, family)
        return {"model_type": family, "architectures": [_CLASSES[family]], **own}
    gpt2 = reasons.pop("gpt2")
    nearest = min(reasons, key=lambda family: len(reasons[family]))
    raise ModelError(
        "no model type that transformers knows has this shape: "
        f"gpt2 has no {', no '.join(gpt2)}; {nearest} has no {', no '.join(reasons[nearest])}"
    )


def _lacking(config: ModelConfig) -> dict[str, list[str]]:
    """What each family would have to have to be this model; nothing where it can be."""
    heads, mlp = config.attention, config.mlp
    positions, norms = config.positional_embedding_type, config.normalization_type
    windows = [config.window(layer) is not None for layer in range(config.n_layers)]
    scales = (None, config.d_head**-0.5)
    any_bias = heads.bias or bool(heads.output_bias)
    uneven_bias = heads.bias != bool(heads.output_bias)
    both = _true(
        [
            (mlp is None, "layers without an MLP"),
            (positions in ("shortformer", "none"), f"positions of the kind {positions!r}"),
            (norms == "none", "layers without norms"),
            (heads.smeared_keys, "smeared keys"),
            (heads.kind == "latent", "latent attention"),
            (heads.sink_logit != "none", "sink logit in the softmax"),
            (heads.gated_output, "gate on what heads read"),
            (config.unembed_bias, "bias in the unembedding"),
        ]
    )
    llama_type = both + _true(
        [
            (positions == "standard", "learned positions"),
            (norms == "LN", "LayerNorm"),
            (mlp is not None and not mlp.gated, "MLP without a gate"),
            (heads.scale not in scales, f"score scale of {heads.scale}"),
            (heads.scale_by_inverse_layer, "score scale that falls with the layer"),
        ]
    )
    mlp_bias = (mlp is not None and mlp.bias, "biases in the MLP")
    qk_norm = (heads.qk_norm, "norm of queries and keys")
    mixed = (any(windows) and not all(windows), "window in some layers only")
    return {
        "gpt2": both
        + _true(
            [
                (positions == "rotary", "rotary positions"),
                (norms == "RMS", "RMSNorm"),
                (config.n_key_value_heads != heads.n_heads, "grouped key-value heads"),
                (
                    heads.n_heads * config.d_head != config.d_model,
                    "d_head other than d_model / n_heads",
                ),
                (not heads.bias or uneven_bias, "attention without biases of q, k, v and output"),
                qk_norm,
                (any(windows), "window"),
                (heads.scale not in (*scales, 1.0), f"score scale of {heads.scale}"),
                (mlp is not None and mlp.gated, "gate in the MLP"),
                (mlp is not None and not mlp.bias, "MLP without biases"),
            ]
        ),
        "llama": llama_type
        + _true(
            [
                (config.d_model % heads.n_heads != 0, "n_heads that do not divide d_model"),
                (uneven_bias, "biases of q, k, v without the output's, or the reverse"),
                qk_norm,
                (any(windows), "window"),
            ]
        ),
        "mistral": llama_type
        + _true([(any_bias, "biases in attention"), qk_norm, mixed, mlp_bias]),
        "qwen2": llama_type
        + _true(
            [
                (not heads.bias, "attention without biases of q, k and v"),
                (bool(heads.output_bias), "bias of attention's output"),
                qk_norm,
                mlp_bias,
            ]
        ),
        "qwen3": llama_type
        + _true(
            [
                (not heads.qk_norm, "attention without a norm of queries and keys"),
                (uneven_bias, "biases of q, k, v without the output's, or the reverse"),
                mlp_bias,
            ]
        ),
    }


def _true(reasons: Sequence[tuple[bool, str]]) -> list[str]:
    return [text for holds, text in reasons if holds]


def _gpt2(config: ModelConfig) -> dict[str, object]:
    heads, mlp = config.attention, config.mlp
    assert mlp is not None
    return {
        "n_layer": config.n_layers,
        "n_head": heads.n_heads,
        "n_embd": config.d_model,
        "n_inner": mlp.d_mlp,
        "n_positions": config.n_ctx,
        "vocab_size": config.d_vocab,
        "activation_function": mlp.act_fn,
        "layer_norm_epsilon": config.eps,
        "scale_attn_weights": heads.scale != 1.0,
        "scale_attn_by_inverse_layer_idx": heads.scale_by_inverse_layer,
        "reorder_and_upcast_attn": False,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "tie_word_embeddings": config.tie_embeddings,
        **_special_tokens(config),
    }


def _llama_type(config: ModelConfig, family: str) -> dict[str, object]:
    heads, mlp = config.attention, config.mlp
    assert mlp is not None
    windows = [config.window(layer) for layer in range(config.n_layers)]
    own: dict[str, object]
    if family == "mistral":
        own = {"sliding_window": heads.window if any(windows) else None}
    elif family == "llama":
        own = {"attention_bias": heads.bias, "mlp_bias": mlp.bias}
    else:
        own = {
            "use_sliding_window": any(windows),
            "sliding_window": heads.window if any(windows) else None,
            "layer_types": ["sliding_attention" if w else "full_attention" for w in windows],
        }
    if family == "qwen3":
        own["attention_bias"] = heads.bias
    return {
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": heads.n_heads,
        "num_key_value_heads": config.n_key_value_heads,
        "head_dim": config.d_head,
        "hidden_size": config.d_model,
        "intermediate_size": mlp.d_mlp,
        "max_position_embeddings": config.n_ctx,
        "vocab_size": config.d_vocab,
        "hidden_act": mlp.act_fn,
        "rms_norm_eps": config.eps,
        "rope_parameters": _rope_parameters(config),
        **own,
        "attention_dropout": config.dropout,
        "tie_word_embeddings": config.tie_embeddings,
        **_special_tokens(config),
    }


def _rope_parameters(config: ModelConfig) -> dict[str, object]:
    scaling = config.rotary_scaling
    base = {"rope_theta": config.rotary_base}
    if scaling is None:
        return {"rope_type": "default", **base}
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", **base, "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        **base,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_n_ctx,
    }


def _special_tokens(config: ModelConfig) -> dict[str, object]:
    # Written out even where there is none: the family's default would be another model's id.
    return {"bos_token_id": config.bos_token_id, "eos_token_id": None, "pad_token_id": None}
