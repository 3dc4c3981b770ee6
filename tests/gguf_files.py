"""GGUF files of tiny models, written on the spot as llama.cpp's converter would write them."""

from pathlib import Path

import gguf
import numpy as np
from torch import Tensor, nn

F32 = gguf.GGMLQuantizationType.F32

# transformers' names and those of a GGUF file; `{}` is the layer.
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.layers.{}.input_layernorm.weight": "blk.{}.attn_norm.weight",
    "model.layers.{}.self_attn.q_proj.weight": "blk.{}.attn_q.weight",
    "model.layers.{}.self_attn.q_proj.bias": "blk.{}.attn_q.bias",
    "model.layers.{}.self_attn.q_norm.weight": "blk.{}.attn_q_norm.weight",
    "model.layers.{}.self_attn.k_proj.weight": "blk.{}.attn_k.weight",
    "model.layers.{}.self_attn.k_proj.bias": "blk.{}.attn_k.bias",
    "model.layers.{}.self_attn.k_norm.weight": "blk.{}.attn_k_norm.weight",
    "model.layers.{}.self_attn.v_proj.weight": "blk.{}.attn_v.weight",
    "model.layers.{}.self_attn.v_proj.bias": "blk.{}.attn_v.bias",
    "model.layers.{}.self_attn.o_proj.weight": "blk.{}.attn_output.weight",
    "model.layers.{}.self_attn.o_proj.bias": "blk.{}.attn_output.bias",
    "model.layers.{}.post_attention_layernorm.weight": "blk.{}.ffn_norm.weight",
    "model.layers.{}.mlp.gate_proj.weight": "blk.{}.ffn_gate.weight",
    "model.layers.{}.mlp.gate_proj.bias": "blk.{}.ffn_gate.bias",
    "model.layers.{}.mlp.up_proj.weight": "blk.{}.ffn_up.weight",
    "model.layers.{}.mlp.up_proj.bias": "blk.{}.ffn_up.bias",
    "model.layers.{}.mlp.down_proj.weight": "blk.{}.ffn_down.weight",
    "model.layers.{}.mlp.down_proj.bias": "blk.{}.ffn_down.bias",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def neighbours(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """llama.cpp's order of query or key rows, in which a rotary pair stands side by side."""
    halves = rows.reshape(n_heads, 2, -1, *rows.shape[1:])
    return np.swapaxes(halves, 1, 2).reshape(rows.shape)


def tensors_of(model: nn.Module) -> dict[str, np.ndarray]:
    """A transformers model's weights under GGUF's names, in GGUF's order of rows."""
    config = model.config
    names = {
        theirs.format(layer): ours.format(layer)
        for theirs, ours in _NAMES.items()
        for layer in range(config.num_hidden_layers)
    }
    tensors = {names[name]: _numpy(value) for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        del tensors["output.weight"]
    if config.model_type == "llama":
        for name, rows in tensors.items():
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
            for part, n_heads in heads.items():
                if f".{part}." in name:
                    tensors[name] = neighbours(rows, n_heads)
    return tensors


def metadata_of(model: nn.Module) -> dict[str, object]:
    """The numbers a converter writes for a transformers model."""
    config, arch = model.config, model.config.model_type
    d_head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": d_head,
        f"{arch}.attention.value_length": d_head,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        f"{arch}.rope.dimension_count": d_head,
        f"{arch}.vocab_size": config.vocab_size,
    }


def write(
    path: Path,
    arch: str,
    metadata: dict[str, object],
    tensors: dict[str, np.ndarray],
    quantised: gguf.GGMLQuantizationType = F32,
) -> Path:
    """A GGUF file; matrices as `quantised`, vectors in float32, and what is float64 as it is."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, array in tensors.items():
        if array.dtype == np.float64:
            writer.add_tensor(name, array)
            continue
        kind = quantised if array.ndim == 2 else F32
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_model(
    path: Path,
    model: nn.Module,
    quantised: gguf.GGMLQuantizationType = F32,
    changes: dict[str, object] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """A transformers model as a GGUF file; `changes` of metadata replace, add, or with None take
    away, and so do `extra` tensors."""
    metadata = {**metadata_of(model), **(changes or {})}
    tensors = {**tensors_of(model), **(extra or {})}
    tensors = {name: array for name, array in tensors.items() if array is not None}
    given = {key: value for key, value in metadata.items() if value is not None}
    return write(path, model.config.model_type, given, tensors, quantised)


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().numpy()
