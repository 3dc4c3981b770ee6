"""GGUF files: their metadata as a config, and their tensors under our names.

Quantised tensors are restored one at a time, so that no second copy of the weights exists. Metadata
and tensors that this module does not know are refused, since they may change the numbers.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from einops import rearrange
from pydantic import ValidationError
from torch import Tensor

from interp.config import LinearScaling, Llama3Scaling, ModelConfig, explain
from interp.errors import ModelError
from interp.models.layers import Rotary
from interp.models.pretrained import parameter_shapes

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

# What each tensor of a file is called here; `{}` is the layer.
_NAMES = {
    "token_embd.weight": "embed.weight",
    "blk.{}.attn_norm.weight": "blocks.{}.ln1.w",
    "blk.{}.attn_q.weight": "blocks.{}.attn.q_proj.weight",
    "blk.{}.attn_q.bias": "blocks.{}.attn.q_proj.bias",
    "blk.{}.attn_q_norm.weight": "blocks.{}.attn.q_norm.w",
    "blk.{}.attn_k.weight": "blocks.{}.attn.k_proj.weight",
    "blk.{}.attn_k.bias": "blocks.{}.attn.k_proj.bias",
    "blk.{}.attn_k_norm.weight": "blocks.{}.attn.k_norm.w",
    "blk.{}.attn_v.weight": "blocks.{}.attn.v_proj.weight",
    "blk.{}.attn_v.bias": "blocks.{}.attn.v_proj.bias",
    "blk.{}.attn_output.weight": "blocks.{}.attn.o_proj.weight",
    "blk.{}.attn_output.bias": "blocks.{}.attn.o_proj.bias",
    "blk.{}.ffn_norm.weight": "blocks.{}.ln2.w",
    "blk.{}.ffn_gate.weight": "blocks.{}.mlp.gate_proj.weight",
    "blk.{}.ffn_gate.bias": "blocks.{}.mlp.gate_proj.bias",
    "blk.{}.ffn_up.weight": "blocks.{}.mlp.in_proj.weight",
    "blk.{}.ffn_up.bias": "blocks.{}.mlp.in_proj.bias",
    "blk.{}.ffn_down.weight": "blocks.{}.mlp.out_proj.weight",
    "blk.{}.ffn_down.bias": "blocks.{}.mlp.out_proj.bias",
    "output_norm.weight": "ln_final.w",
    "output.weight": "unembed.weight",
}
_ROPE_FREQS = "rope_freqs.weight"

# llama.cpp turns neighbours where the architecture is `llama`, and halves where it is `qwen`.
_NEIGHBOUR_PAIRS = {"llama": True, "qwen2": False, "qwen3": False}

# Metadata of the architecture, after its name and a dot, that `_config` reads ...
_READ = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.type",
}
# ... that changes nothing ...
_HARMLESS = {"vocab_size", "rope.scaling.finetuned", "rope.scaling.original_context_length"}
# ... and that changes nothing while it has this value.
_NEUTRAL: dict[str, int] = {
    "attention.causal": 1,
    "attention.sliding_window": 0,
    "expert_count": 0,
    "expert_used_count": 0,
}


def read_gguf(path: Path, dtype: torch.dtype) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The config and the weights, under our names, of a GGUF file.

    Raises: ModelError, in one line, where the file is cut short or no GGUF file, for an
    architecture, metadata or tensors that are not known, and where `gguf` is not installed.
    """
    reader = _reader(path)
    metadata = _metadata(reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(metadata, tensors, path)
    known = _checked_names(config, tensors, path)
    neighbours = _NEIGHBOUR_PAIRS[str(metadata["general.architecture"])]
    weights = {}
    for name, ours in known.items():
        value = torch.from_numpy(_restored(tensors[name], path))
        if neighbours and re.fullmatch(r"blk\.\d+\.attn_[qk]\.(weight|bias)", name):
            value = _halves(value, config.d_head)
        weights[ours] = value.to(dtype).contiguous()
    return config, weights


def read_gguf_config(path: Path) -> ModelConfig:
    """The config alone. Raises: as `read_gguf`."""
    reader = _reader(path)
    return _config(_metadata(reader), {tensor.name: tensor for tensor in reader.tensors}, path)


def _checked_names(
    config: ModelConfig, tensors: Mapping[str, "ReaderTensor"], path: Path
) -> dict[str, str]:
    """Our name of each tensor, having checked that file and model name the same, shape for shape.

    Raises: ModelError listing tensors that are missing, left over, or of another shape.
    """
    shapes = parameter_shapes(config)
    known = {
        theirs.format(layer): ours.format(layer)
        for theirs, ours in _NAMES.items()
        for layer in range(config.n_layers)
        if ours.format(layer) in shapes
    }
    missing = sorted(known.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - known.keys() - {_ROPE_FREQS})
    faults = [
        *([f"missing {', '.join(missing)}"] if missing else []),
        *([f"unknown {', '.join(unknown)}"] if unknown else []),
    ]
    for name, ours in known.items():
        if name in tensors:
            given = tensors[name].shape[::-1].tolist()  # stored with the fastest axis first
            if given != shapes[ours]:
                faults.append(f"{name} is {given}, not {shapes[ours]}")
    if faults:
        raise ModelError(f"{path} does not fit its metadata: {'; '.join(faults)}")
    return known


def _reader(path: Path) -> "GGUFReader":
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ModelError(
            f"{path}: reading a GGUF file needs the package gguf: pip install gguf"
        ) from None
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"{path} is cut short or is not a GGUF file: {reason}") from None


def _metadata(reader: "GGUFReader") -> dict[str, object]:
    # The vocabulary's long lists are the tokenizer's business, and slow to unpack.
    return {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("tokenizer.") or name.endswith("_id")
    }


def _config(
    metadata: Mapping[str, object], tensors: Mapping[str, "ReaderTensor"], path: Path
) -> ModelConfig:
    architecture = metadata.get("general.architecture")
    if architecture not in _NEIGHBOUR_PAIRS:
        raise ModelError(
            f"{path}: architecture {architecture!r} is not read; known: "
            f"{', '.join(_NEIGHBOUR_PAIRS)}; --backend bridge reads what transformers does"
        )
    if metadata.get("split.count", 1) != 1:
        raise ModelError(
            f"{path} is one part of {metadata['split.count']}: join them with llama-gguf-split"
        )
    own = {
        name.removeprefix(f"{architecture}."): value
        for name, value in metadata.items()
        if name.startswith(f"{architecture}.")
    }
    for name, value in own.items():
        if name not in _READ | _HARMLESS and not (name in _NEUTRAL and value == _NEUTRAL[name]):
            raise ModelError(
                f"{path}: {architecture}.{name} = {value!r} may change the numbers, and is not "
                "supported"
            )

    def number(name: str) -> int | float:
        value = own.get(name)
        if not isinstance(value, int | float):
            given = "missing" if value is None else "not one number"
            raise ModelError(f"{path}: {architecture}.{name} is {given}")
        return value

    if "token_embd.weight" not in tensors:
        raise ModelError(f"{path} holds no token_embd.weight")
    n_heads, d_model = number("attention.head_count"), number("embedding_length")
    d_head = number("attention.key_length") if "attention.key_length" in own else d_model / n_heads
    for name in ("attention.value_length", "rope.dimension_count"):
        if own.get(name, d_head) != d_head:
            raise ModelError(
                f"{path}: {architecture}.{name} = {own[name]}, but a head has {d_head:g} dimensions"
            )
    base = number("rope.freq_base") if "rope.freq_base" in own else 10000.0
    try:
        return ModelConfig.model_validate(
            {
                "n_layers": number("block_count"),
                "d_model": d_model,
                "n_ctx": number("context_length"),
                "d_vocab": int(tensors["token_embd.weight"].shape[-1]),
                "attention": {
                    "n_heads": n_heads,
                    "n_key_value_heads": own.get("attention.head_count_kv", n_heads),
                    "d_head": d_head,
                    "bias": "blk.0.attn_q.bias" in tensors,
                    "output_bias": "blk.0.attn_output.bias" in tensors,
                    "qk_norm": "blk.0.attn_q_norm.weight" in tensors,
                },
                "mlp": {
                    "d_mlp": number("feed_forward_length"),
                    "act_fn": "silu",
                    "gated": True,
                    "bias": "blk.0.ffn_up.bias" in tensors,
                },
                "positional_embedding_type": "rotary",
                "rotary_base": base,
                "rotary_scaling": _scaling(own, tensors.get(_ROPE_FREQS), int(d_head), base, path),
                "normalization_type": "RMS",
                "eps": number("attention.layer_norm_rms_epsilon"),
                "tie_embeddings": "output.weight" not in tensors,
                "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            }
        )
    except ValidationError as error:
        raise ModelError(f"{path}: {explain(error, ModelConfig)}") from None


def _scaling(
    own: Mapping[str, object],
    divisors: "ReaderTensor | None",
    d_head: int,
    base: int | float,
    path: Path,
) -> LinearScaling | Llama3Scaling | None:
    """How the file scales rotary frequencies: by a number, or by a tensor of divisors."""
    kind = own.get("rope.scaling.type", "linear" if "rope.scale_linear" in own else "none")
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear", 1.0))
    if kind not in ("none", "linear") or not isinstance(factor, int | float):
        raise ModelError(f"{path}: rope.scaling.type = {kind!r} is not supported; linear is")
    if divisors is None:
        return LinearScaling(factor=factor) if kind == "linear" and factor != 1 else None
    if kind == "linear" and factor != 1:
        raise ModelError(f"{path}: both rope.scaling and {_ROPE_FREQS} scale the frequencies")
    given = torch.from_numpy(_restored(divisors, path)).double()
    # Llama 3.1 and 3.2 differ in the factor alone, which the slowest frequency shows.
    scaling = Llama3Scaling(
        factor=max(1.0, round(float(given.max()), 4)),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_n_ctx=8192,
    )
    scaled = Rotary(d_head, base, None).frequencies / Rotary(d_head, base, scaling).frequencies
    if given.shape != scaled.shape or not torch.allclose(given, scaled, rtol=1e-4):
        raise ModelError(
            f"{path}: {_ROPE_FREQS} scales the frequencies otherwise than Llama 3.1 does, and is "
            "not supported"
        )
    return scaling


def _restored(tensor: "ReaderTensor", path: Path) -> np.ndarray:
    """A tensor's numbers in float32, in memory of their own."""
    from gguf import dequantize

    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise ModelError(
            f"{path}: {tensor.name} is stored as {tensor.tensor_type.name}, which the installed "
            "gguf does not restore"
        ) from None
    # What was stored in float32 is still a view of the file.
    return values if values.flags.owndata and values.flags.writeable else values.copy()


def _halves(rows: Tensor, d_head: int) -> Tensor:
    """Query or key rows whose head pairs neighbours, as ones whose head pairs its two halves."""
    return rearrange(rows, "(head pair two) ... -> (head two pair) ...", pair=d_head // 2, two=2)
