"""Hugging Face configs and ours, both ways: which numbers a config.json asks for.

What would change the numbers and is not built here is refused by name. Other keys are left alone:
what the architecture's own class in `transformers` does not read cannot change its numbers.
"""

from collections.abc import Callable, Mapping

from pydantic import ValidationError

from interp.config import LinearScaling, Llama3Scaling, ModelConfig, explain
from interp.errors import ModelError

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}

# Keys whose presence changes the numbers of some model, with the values that leave them alone.
_NOT_BUILT: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (),
    "alibi": (),
    "attention_chunk_size": (),
    "attention_multiplier": (1.0,),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "is_encoder_decoder": (),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "n_routed_experts": (),
    "no_rope_layers": (),
    "num_experts": (),
    "num_local_experts": (),
    "partial_rotary_factor": (1.0,),
    "pruned_heads": (),
    "qk_layernorm": (),
    "quantization_config": (),
    "residual_multiplier": (1.0,),
    "rope_interleaved": (),
    "sinks": (),
    "use_alibi": (),
    "use_qk_norm": (),
    "use_sinks": (),
}

Read = Callable[..., object]


def model_config(hf: Mapping[str, object], where: str) -> ModelConfig:
    """The model that a Hugging Face config describes; `where` begins the line of a fault.

    Raises: ModelError for a model type that is not read natively, for anything that would change
    the numbers and is not built, and for sizes that are missing or do not fit together.
    """
    kind = hf.get("model_type")
    if kind not in _FIELDS:
        raise ModelError(
            f"{where}: model_type = {kind!r} is not read natively (those are "
            f"{', '.join(_FIELDS)}); backend='bridge' (--backend bridge) reads others"
        )
    for key, harmless in _NOT_BUILT.items():
        value = hf.get(key)
        if value and value not in harmless:
            raise ModelError(
                f"{where}: {key} = {value!r} changes the numbers and is not built into the native "
                f"{kind} model; backend='bridge' (--backend bridge) may know it"
            )

    def read(key: str, *default: object) -> object:
        if key in hf:
            return hf[key]
        if default:
            return default[0]
        raise ModelError(f"{where}: {key} is missing")

    try:
        return ModelConfig.model_validate(_FIELDS[kind](read, where))
    except ValidationError as error:
        raise ModelError(f"{where}: {explain(error, ModelConfig)}") from None


def _gpt2(read: Read, where: str) -> dict[str, object]:
    d_model, d_mlp = read("n_embd"), read("n_inner", None)
    return {
        "n_layers": read("n_layer"),
        "d_model": d_model,
        "n_ctx": read("n_positions"),
        "d_vocab": read("vocab_size"),
        "attention": {
            "n_heads": read("n_head"),
            "scale": None if read("scale_attn_weights", True) else 1.0,
            "scale_by_inverse_layer": read("scale_attn_by_inverse_layer_idx", False),
        },
        "mlp": {
            # reorder_and_upcast_attn computes the same numbers in another order.
            "d_mlp": 4 * d_model if d_mlp is None and isinstance(d_model, int) else d_mlp,
            "act_fn": _activation(read("activation_function", "gelu_new"), where),
        },
        "eps": read("layer_norm_epsilon", 1e-5),
        "tie_embeddings": read("tie_word_embeddings", True),
        "bos_token_id": _bos(read, 50256),
    }


def _llama(read: Read, where: str) -> dict[str, object]:
    bias = read("attention_bias", False)
    return _llama_type(read, where, bias=bias, mlp_bias=read("mlp_bias", False), bos=1)


def _mistral(read: Read, where: str) -> dict[str, object]:
    window = read("sliding_window", 4096) or None
    return _llama_type(read, where, bos=1, n_key_value_heads=8, window=window)


def _qwen2(read: Read, where: str) -> dict[str, object]:
    return _llama_type(
        read, where, bias=True, output_bias=False, n_key_value_heads=32, **_qwen_windows(read)
    )


def _qwen3(read: Read, where: str) -> dict[str, object]:
    return _llama_type(
        read,
        where,
        bias=read("attention_bias", False),
        n_key_value_heads=32,
        d_head=128,
        qk_norm=True,
        **_qwen_windows(read),
    )


_FIELDS = {"gpt2": _gpt2, "llama": _llama, "mistral": _mistral, "qwen2": _qwen2, "qwen3": _qwen3}


def _llama_type(
    read: Read,
    where: str,
    *,
    mlp_bias: object = False,
    bos: int | None = None,
    n_key_value_heads: int | None = None,
    d_head: int | None = None,
    **attention: object,
) -> dict[str, object]:
    """The fields of a Llama-type model; the keywords are what its family leaves unsaid."""
    base, scaling = _rotary(read, where)
    d_model, n_heads = read("hidden_size"), read("num_attention_heads")
    width = read("head_dim", d_head)
    if width is None and isinstance(d_model, int) and isinstance(n_heads, int) and n_heads > 0:
        width = d_model // n_heads
    return {
        "n_layers": read("num_hidden_layers"),
        "d_model": d_model,
        "n_ctx": read("max_position_embeddings"),
        "d_vocab": read("vocab_size"),
        "attention": {
            "bias": False,
            **attention,
            "n_heads": n_heads,
            "n_key_value_heads": read("num_key_value_heads", n_key_value_heads),
            "d_head": width,
        },
        "mlp": {
            "d_mlp": read("intermediate_size"),
            "act_fn": _activation(read("hidden_act", "silu"), where),
            "gated": True,
            "bias": mlp_bias,
        },
        "positional_embedding_type": "rotary",
        "rotary_base": base,
        "rotary_scaling": scaling,
        "normalization_type": "RMS",
        "eps": read("rms_norm_eps", 1e-6),
        "tie_embeddings": read("tie_word_embeddings", False),
        "bos_token_id": _bos(read, bos),
    }


def _qwen_windows(read: Read) -> dict[str, object]:
    window = read("sliding_window", 4096)
    if not read("use_sliding_window", False) or not window:
        return {}
    kinds = read("layer_types", None)
    n_layers = read("num_hidden_layers")
    if isinstance(kinds, list):
        windowed = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
    else:
        first = read("max_window_layers", 28)
        assert isinstance(first, int)
        assert isinstance(n_layers, int)
        windowed = list(range(first, n_layers))
    return {"window": window, "windowed_layers": windowed} if windowed else {}


def _rotary(read: Read, where: str) -> tuple[object, dict[str, object] | None]:
    """Base and scaling; releases before 5 of transformers write `rope_theta` and `rope_scaling`."""
    given = read("rope_parameters", None) or read("rope_scaling", None) or {}
    if not isinstance(given, Mapping) or any(isinstance(v, Mapping) for v in given.values()):
        raise ModelError(f"{where}: rope_parameters = {given!r}: one table for all layers is known")
    base = given.get("rope_theta", read("rope_theta", 10000.0))
    kind = given.get("rope_type", given.get("type", "default"))
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{where}: partial_rotary_factor is not built into the native model")
    if kind == "default":
        return base, None
    wanted = {
        "linear": {"factor": "factor"},
        "llama3": {
            "factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            "original_n_ctx": "original_max_position_embeddings",
        },
    }.get(str(kind))
    if wanted is None:
        raise ModelError(
            f"{where}: rope_type = {kind!r}: of the rotary scalings linear and llama3 are built; "
            "backend='bridge' (--backend bridge) may know it"
        )
    absent = [theirs for theirs in wanted.values() if theirs not in given]
    if absent:
        raise ModelError(f"{where}: rope_parameters of type {kind} lacks {', '.join(absent)}")
    return base, {"kind": kind, **{ours: given[theirs] for ours, theirs in wanted.items()}}


def _activation(name: object, where: str) -> str:
    if name not in _ACTIVATIONS:
        raise ModelError(
            f"{where}: the activation {name!r} is not built; known: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[str(name)]


def _bos(read: Read, default: int | None) -> object:
    bos, d_vocab = read("bos_token_id", default), read("vocab_size")
    # Small models keep their family's default, an id that they do not have.
    within = isinstance(bos, int) and isinstance(d_vocab, int) and 0 <= bos < d_vocab
    return bos if within else None


# --- back again -------------------------------------------------------------------------------


def hf_config(config: ModelConfig) -> dict[str, object]:
    """The config.json of the Hugging Face family that computes what this model computes.

    Raises: ModelError with every reason, for a model of neither GPT-2's nor Llama's shape.
    """
    not_gpt2, not_llama = _not_gpt2(config), _not_llama(config)
    if not not_gpt2:
        return _to_gpt2(config)
    if not not_llama:
        return _to_llama(config)
    raise ModelError(
        f"no Hugging Face family has this shape: GPT-2 has no {', no '.join(not_gpt2)}; "
        f"Llama has no {', no '.join(not_llama)}"
    )


def _shared_faults(config: ModelConfig) -> list[str]:
    positions, heads = config.positional_embedding_type, config.attention
    return [
        *(["attention-only layers"] if config.mlp is None else []),
        *([f"{positions} positions"] if positions in ("shortformer", "none") else []),
        *(["smeared keys"] if heads.smeared_keys else []),
        *(["bias in the unembedding"] if config.unembed_bias else []),
        *(["missing norms"] if config.normalization_type == "none" else []),
    ]


def _not_gpt2(config: ModelConfig) -> list[str]:
    heads, mlp = config.attention, config.mlp
    custom_scale = heads.scale not in (None, 1.0)
    return [
        *_shared_faults(config),
        *(["rotary positions"] if config.positional_embedding_type == "rotary" else []),
        *(["RMSNorm"] if config.normalization_type == "RMS" else []),
        *(["grouped heads"] if config.n_key_value_heads != heads.n_heads else []),
        *(["free d_head"] if heads.n_heads * config.d_head != config.d_model else []),
        *(["missing attention biases"] if not (heads.bias and heads.output_bias) else []),
        *(["QK norm"] if heads.qk_norm else []),
        *(["window"] if heads.window else []),
        *([f"score scale of {heads.scale:g}"] if custom_scale else []),
        *(["gated MLP"] if mlp and mlp.gated else []),
        *(["MLP without biases"] if mlp and not mlp.bias else []),
    ]


def _not_llama(config: ModelConfig) -> list[str]:
    heads, mlp = config.attention, config.mlp
    special = [heads.qk_norm, heads.window is not None, heads.bias and not heads.output_bias]
    faults = [
        *_shared_faults(config),
        *(["learned positions"] if config.positional_embedding_type == "standard" else []),
        *(["LayerNorm"] if config.normalization_type == "LN" else []),
        *(["ungated MLP"] if mlp and not mlp.gated else []),
        *(["output bias without the others"] if heads.output_bias and not heads.bias else []),
        *(["score scale of its own"] if heads.scale or heads.scale_by_inverse_layer else []),
    ]
    if heads.window is not None and heads.windowed_layers is None:  # Mistral
        if heads.qk_norm or heads.bias:
            faults.append("window in every layer beside biases or QK norm")
    elif heads.window is not None and not (heads.qk_norm or special[2]):
        faults.append("window in some layers only, without QK norm or Qwen2's biases")
    if mlp and mlp.bias and any(special):
        faults.append("MLP biases beside a window, QK norm or Qwen2's biases")
    if special[2] and (heads.qk_norm or heads.n_heads * config.d_head != config.d_model):
        faults.append("biases of queries, keys and values alone beside QK norm or a free d_head")
    return faults


def _to_gpt2(config: ModelConfig) -> dict[str, object]:
    heads, mlp = config.attention, config.mlp
    assert mlp is not None
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": config.n_layers,
        "n_head": heads.n_heads,
        "n_embd": config.d_model,
        "n_inner": mlp.d_mlp,
        "n_positions": config.n_ctx,
        "vocab_size": config.d_vocab,
        "activation_function": mlp.act_fn,
        "layer_norm_epsilon": config.eps,
        "scale_attn_weights": heads.scale is None,
        "scale_attn_by_inverse_layer_idx": heads.scale_by_inverse_layer,
        "tie_word_embeddings": config.tie_embeddings,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
        **_special_tokens(config),
    }


def _to_llama(config: ModelConfig) -> dict[str, object]:
    heads, mlp = config.attention, config.mlp
    assert mlp is not None
    own: dict[str, object]
    if heads.qk_norm:
        own = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
        own |= {"attention_bias": heads.bias, **_to_qwen_windows(config)}
    elif heads.bias and not heads.output_bias:
        own = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
        own |= _to_qwen_windows(config)
    elif heads.window is not None:
        own = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
        own |= {"sliding_window": heads.window}
    else:
        own = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        own |= {"attention_bias": heads.bias, "mlp_bias": mlp.bias}
    return {
        **own,
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
        "rope_parameters": _to_rope(config),
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": config.dropout,
        **_special_tokens(config),
    }


def _to_qwen_windows(config: ModelConfig) -> dict[str, object]:
    windows = [config.window(layer) for layer in range(config.n_layers)]
    return {
        "use_sliding_window": config.attention.window is not None,
        "sliding_window": config.attention.window,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in windows],
    }


def _to_rope(config: ModelConfig) -> dict[str, object]:
    scaling = config.rotary_scaling
    rope: dict[str, object] = {"rope_theta": config.rotary_base}
    if scaling is None:
        return {**rope, "rope_type": "default"}
    rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if isinstance(scaling, LinearScaling):
        return rope
    assert isinstance(scaling, Llama3Scaling)
    return rope | {
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_n_ctx,
    }


def _special_tokens(config: ModelConfig) -> dict[str, object]:
    # Written out even where there is none: the family's default would be another model's id.
    return {"bos_token_id": config.bos_token_id, "eos_token_id": None, "pad_token_id": None}
