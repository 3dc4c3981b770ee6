"""What a Hugging Face config.json asks for, as a config of ours.

What would change the numbers and is not built here is refused by name. A key that nobody has heard
of is let pass: the architecture's class in `transformers` does not read it, so it cannot change
what that class computes, and parts it might stand for would show up as tensors without a place.
"""

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from interp.config import ModelConfig, explain
from interp.errors import ModelError

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_new",
    "gelu_accurate": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_python_tanh": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}

_NOTHING: tuple[object, ...] = (None, False, 0, "", [], {})

# Keys that change the numbers of the models that have them, and the values that leave them alone.
_NOT_BUILT: dict[str, tuple[object, ...]] = {
    # scores and masks
    "alibi": _NOTHING,
    "attention_chunk_size": _NOTHING,
    "attention_multiplier": _NOTHING,
    "attn_logit_softcapping": _NOTHING,
    "is_causal": (None, True),
    "query_pre_attn_scalar": _NOTHING,
    "sinks": _NOTHING,
    "use_alibi": _NOTHING,
    "use_bidirectional_attention": _NOTHING,
    "use_sinks": _NOTHING,
    # queries, keys and their positions
    "clip_qkv": _NOTHING,
    "no_rope_layers": _NOTHING,
    "partial_rotary_factor": (*_NOTHING, 1.0),
    "qk_layernorm": _NOTHING,
    "qk_norm": _NOTHING,
    "rope_interleaved": _NOTHING,
    "rotary_pct": (*_NOTHING, 1.0),
    "use_qk_norm": _NOTHING,
    # factors on the way through the model
    "embedding_multiplier": (*_NOTHING, 1.0),
    "final_logit_softcapping": _NOTHING,
    "logit_scale": (*_NOTHING, 1.0),
    "logits_scaling": (*_NOTHING, 1.0),
    "residual_multiplier": (*_NOTHING, 1.0),
    "scale_depth": _NOTHING,
    "scale_emb": (*_NOTHING, 1.0),
    # other blocks
    "add_cross_attention": _NOTHING,
    "is_encoder_decoder": _NOTHING,
    "n_routed_experts": _NOTHING,
    "num_experts": _NOTHING,
    "num_local_experts": _NOTHING,
    "parallel_attn": _NOTHING,
    "per_layer_config": _NOTHING,
    "pruned_heads": _NOTHING,
    "use_parallel_residual": _NOTHING,
    # weights that are not numbers to multiply with
    "compression_config": _NOTHING,
    "quantization_config": _NOTHING,
}

_BRIDGE = "backend='bridge' (--backend bridge)"


def model_config(hf: Mapping[str, object], where: str) -> ModelConfig:
    """The model that a Hugging Face config describes; `where` begins the line of a fault.

    Raises: ModelError for a model type that is not read natively, for anything that would change
    the numbers and is not built, and for sizes that are missing or do not fit together.
    """
    keys = _Keys(hf, where)
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise keys.fault(
            f"model_type = {kind!r} is not read natively ({', '.join(_FAMILIES)} are); "
            f"{_BRIDGE} reads others"
        )
    for key, harmless in _NOT_BUILT.items():
        value = hf.get(key)
        if value not in harmless:
            raise keys.fault(
                f"{key} = {reprlib.repr(value)} changes the numbers and is not built into the "
                f"native {kind} model; {_BRIDGE} may know it"
            )
    own = hf.get("auto_map")
    if isinstance(own, Mapping) and any(str(name).startswith("AutoModel") for name in own):
        raise keys.fault(
            f"auto_map names model code of its own, which need not be what {kind} is elsewhere, "
            "and is not run"
        )
    try:
        return ModelConfig.model_validate(_FAMILIES[kind](keys))
    except ValidationError as error:
        raise keys.fault(explain(error, ModelConfig)) from None


@dataclass(frozen=True)
class _Keys:
    """The keys of a config, each read as the kind of value that belongs there."""

    hf: Mapping[str, object]
    where: str

    def fault(self, text: str) -> ModelError:
        return ModelError(f"{self.where}: {text}")

    def given(self, key: str, default: object) -> object:
        """The value, or the default of the architecture; without one the key has to be there."""
        if key not in self.hf and default is None:
            raise self.fault(f"{key} is missing")
        return self.hf.get(key, default)

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.given(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.fault(
                f"{key} = {reprlib.repr(value)} should be a whole number of at least {least}"
            )
        return value

    def size_or_none(self, key: str, default: int | None = None) -> int | None:
        return None if self.hf.get(key, default) is None else self.size(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.given(key, default)
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 < value < math.inf
        ):
            raise self.fault(f"{key} = {reprlib.repr(value)} should be a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.hf.get(key, default)
        if not isinstance(value, bool):
            raise self.fault(f"{key} = {reprlib.repr(value)} should be true or false")
        return value

    def activation(self, key: str, default: str) -> str:
        name = self.hf.get(key, default)
        if not isinstance(name, str) or name not in _ACTIVATIONS:
            raise self.fault(
                f"{key} = {reprlib.repr(name)} is not built; known: {', '.join(_ACTIVATIONS)}"
            )
        return _ACTIVATIONS[name]

    def bos(self, default: int | None) -> int | None:
        """The token that begins a sequence, where the config names exactly one that exists.

        Small models often keep the default of their family, an id that they do not have.
        """
        value = self.hf.get("bos_token_id", default)
        if isinstance(value, int) and 0 <= value < self.size("vocab_size"):
            return value
        return None


def _gpt2(keys: _Keys) -> dict[str, object]:
    d_model, n_heads = keys.size("n_embd"), keys.size("n_head")
    if d_model % n_heads:
        raise keys.fault(f"n_head = {n_heads} does not divide n_embd = {d_model}")
    return {
        "n_layers": keys.size("n_layer"),
        "d_model": d_model,
        "n_ctx": keys.size("n_positions"),
        "d_vocab": keys.size("vocab_size"),
        "attention": {
            "n_heads": n_heads,
            "scale": None if keys.flag("scale_attn_weights", True) else 1.0,
            # reorder_and_upcast_attn, the third flag, computes the same in another order.
            "scale_by_inverse_layer": keys.flag("scale_attn_by_inverse_layer_idx", False),
        },
        "mlp": {
            "d_mlp": keys.size_or_none("n_inner") or 4 * d_model,
            "act_fn": keys.activation("activation_function", "gelu_new"),
        },
        "eps": keys.number("layer_norm_epsilon", 1e-5),
        "tie_embeddings": keys.flag("tie_word_embeddings", True),
        "bos_token_id": keys.bos(50256),
    }


def _llama(keys: _Keys) -> dict[str, object]:
    _refuse_layer_types(keys, "full_attention")
    bias, mlp_bias = keys.flag("attention_bias", False), keys.flag("mlp_bias", False)
    return _llama_type(keys, {"bias": bias}, mlp_bias=mlp_bias, bos=1)


def _mistral(keys: _Keys) -> dict[str, object]:
    window = _window(keys)
    _refuse_layer_types(keys, "full_attention" if window is None else "sliding_attention")
    return _llama_type(keys, {"bias": False, "window": window}, n_key_value_heads=8, bos=1)


def _qwen2(keys: _Keys) -> dict[str, object]:
    attention = {"bias": True, "output_bias": False, **_qwen_windows(keys)}
    return _llama_type(keys, attention, n_key_value_heads=32)


def _qwen3(keys: _Keys) -> dict[str, object]:
    bias = keys.flag("attention_bias", False)
    attention = {"bias": bias, "qk_norm": True, **_qwen_windows(keys)}
    return _llama_type(keys, attention, n_key_value_heads=32, d_head=128)


_FAMILIES: dict[str, Callable[[_Keys], dict[str, object]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}


def _llama_type(
    keys: _Keys,
    attention: Mapping[str, object],
    *,
    n_key_value_heads: int | None = None,
    d_head: int | None = None,
    mlp_bias: bool = False,
    bos: int | None = None,
) -> dict[str, object]:
    """The fields of a Llama-type model; the keywords are what its family leaves unsaid."""
    base, scaling = _rotary(keys)
    d_model, n_heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    return {
        "n_layers": keys.size("num_hidden_layers"),
        "d_model": d_model,
        "n_ctx": keys.size("max_position_embeddings"),
        "d_vocab": keys.size("vocab_size"),
        "attention": {
            **attention,
            "n_heads": n_heads,
            "n_key_value_heads": keys.size_or_none("num_key_value_heads", n_key_value_heads),
            "d_head": keys.size_or_none("head_dim", d_head) or d_model // n_heads,
        },
        "mlp": {
            "d_mlp": keys.size("intermediate_size"),
            "act_fn": keys.activation("hidden_act", "silu"),
            "gated": True,
            "bias": mlp_bias,
        },
        "positional_embedding_type": "rotary",
        "rotary_base": base,
        "rotary_scaling": scaling,
        "normalization_type": "RMS",
        "eps": keys.number("rms_norm_eps", 1e-6),
        "tie_embeddings": keys.flag("tie_word_embeddings", False),
        "bos_token_id": keys.bos(bos),
    }


def _window(keys: _Keys) -> int | None:
    none = keys.hf.get("sliding_window", 4096) in (None, 0)
    return None if none else keys.size("sliding_window", 4096)


def _qwen_windows(keys: _Keys) -> dict[str, object]:
    window = _window(keys) if keys.flag("use_sliding_window", False) else None
    n_layers = keys.size("num_hidden_layers")
    kinds = _layer_types(keys)
    if kinds is None:
        first = keys.size("max_window_layers", 28, least=0)
        windowed = [] if window is None else list(range(first, n_layers))
    else:
        windowed = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
        others = set(kinds) - {"sliding_attention", "full_attention"}
        if others or len(kinds) != n_layers:
            raise keys.fault(
                f"layer_types = {reprlib.repr(kinds)} should say full_attention or "
                f"sliding_attention for each of the {n_layers} layers"
            )
        if windowed and window is None:
            raise keys.fault("layer_types asks for sliding_attention, but no window is in use")
    return {"window": window, "windowed_layers": windowed} if windowed else {}


def _refuse_layer_types(keys: _Keys, kind: str) -> None:
    """Refuse layers of different kinds where the family's own class would not see them."""
    kinds = _layer_types(keys)
    if kinds is not None and set(kinds) != {kind}:
        raise keys.fault(
            f"layer_types = {reprlib.repr(kinds)}: this model type has {kind} in every layer"
        )


def _layer_types(keys: _Keys) -> Sequence[str] | None:
    kinds = keys.hf.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise keys.fault(f"layer_types = {reprlib.repr(kinds)} should be a list of names")
    return kinds


def _rotary(keys: _Keys) -> tuple[float, dict[str, object] | None]:
    """Base and scaling; releases of transformers before 5 write `rope_theta` and `rope_scaling`."""
    table = keys.hf.get("rope_scaling") or keys.hf.get("rope_parameters") or {}
    if not isinstance(table, Mapping) or any(isinstance(v, Mapping) for v in table.values()):
        raise keys.fault(
            f"rope_parameters = {reprlib.repr(table)}: one table for all layers is understood"
        )
    rope = _Keys(table, f"{keys.where}: rope_parameters")
    base = rope.number("rope_theta", keys.number("rope_theta", 10000.0))
    kind = table.get("rope_type", table.get("type", "default"))
    if table.get("partial_rotary_factor") not in _NOT_BUILT["partial_rotary_factor"]:
        raise rope.fault("partial_rotary_factor is not built into the native model")
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, {"kind": "linear", "factor": rope.number("factor")}
    if kind == "llama3":
        # Phi-3's way of writing it beside the table wins in transformers too.
        original = keys.size_or_none("original_max_position_embeddings") or rope.size(
            "original_max_position_embeddings", keys.size("max_position_embeddings")
        )
        return base, {
            "kind": "llama3",
            "factor": rope.number("factor"),
            "low_freq_factor": rope.number("low_freq_factor"),
            "high_freq_factor": rope.number("high_freq_factor"),
            "original_n_ctx": original,
        }
    raise rope.fault(
        f"rope_type = {reprlib.repr(kind)} changes the numbers and is not built (linear and llama3 "
        f"are); {_BRIDGE} may know it"
    )
