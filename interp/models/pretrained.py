"""Hugging Face weights of GPT-2 and Llama type and ours, both ways, by tables of names.

Weights stay as stored: nothing is folded, centred or rescaled. Every tensor of a file is used
exactly once and every parameter is set exactly once; whatever does not fit is listed and refused.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from interp.config import ModelConfig
from interp.errors import ModelError
from interp.models.hf_config import model_config
from interp.models.transformer import Transformer
from interp.models.weights import stored_weights

How = Literal["as is", "transposed", "fused"]


@dataclass(frozen=True)
class Row:
    """One line of a table: their name, ours, and what lies between; L stands for the layer.

    `transposed` is GPT-2's layout [in, out]. `fused` is transposed too, and holds queries, keys and
    values one after the other, each as wide as its heads: `*` stands for q, k and v.
    """

    theirs: str
    ours: str
    how: How = "as is"


GPT2 = (
    Row("wte.weight", "embed.weight"),
    Row("wpe.weight", "pos_embed.weight"),
    Row("h.L.ln_1.weight", "blocks.L.ln1.w"),
    Row("h.L.ln_1.bias", "blocks.L.ln1.b"),
    Row("h.L.attn.c_attn.weight", "blocks.L.attn.*_proj.weight", "fused"),
    Row("h.L.attn.c_attn.bias", "blocks.L.attn.*_proj.bias", "fused"),
    Row("h.L.attn.c_proj.weight", "blocks.L.attn.o_proj.weight", "transposed"),
    Row("h.L.attn.c_proj.bias", "blocks.L.attn.o_proj.bias"),
    Row("h.L.ln_2.weight", "blocks.L.ln2.w"),
    Row("h.L.ln_2.bias", "blocks.L.ln2.b"),
    Row("h.L.mlp.c_fc.weight", "blocks.L.mlp.in_proj.weight", "transposed"),
    Row("h.L.mlp.c_fc.bias", "blocks.L.mlp.in_proj.bias"),
    Row("h.L.mlp.c_proj.weight", "blocks.L.mlp.out_proj.weight", "transposed"),
    Row("h.L.mlp.c_proj.bias", "blocks.L.mlp.out_proj.bias"),
    Row("ln_f.weight", "ln_final.w"),
    Row("ln_f.bias", "ln_final.b"),
    Row("lm_head.weight", "unembed.weight"),
)

# Also Mistral, Qwen2 and Qwen3: a row that a model has no parameter for does not apply to it.
LLAMA = (
    Row("embed_tokens.weight", "embed.weight"),
    Row("layers.L.input_layernorm.weight", "blocks.L.ln1.w"),
    Row("layers.L.self_attn.q_proj.weight", "blocks.L.attn.q_proj.weight"),
    Row("layers.L.self_attn.q_proj.bias", "blocks.L.attn.q_proj.bias"),
    Row("layers.L.self_attn.k_proj.weight", "blocks.L.attn.k_proj.weight"),
    Row("layers.L.self_attn.k_proj.bias", "blocks.L.attn.k_proj.bias"),
    Row("layers.L.self_attn.v_proj.weight", "blocks.L.attn.v_proj.weight"),
    Row("layers.L.self_attn.v_proj.bias", "blocks.L.attn.v_proj.bias"),
    Row("layers.L.self_attn.q_norm.weight", "blocks.L.attn.q_norm.w"),
    Row("layers.L.self_attn.k_norm.weight", "blocks.L.attn.k_norm.w"),
    Row("layers.L.self_attn.o_proj.weight", "blocks.L.attn.o_proj.weight"),
    Row("layers.L.self_attn.o_proj.bias", "blocks.L.attn.o_proj.bias"),
    Row("layers.L.post_attention_layernorm.weight", "blocks.L.ln2.w"),
    Row("layers.L.mlp.gate_proj.weight", "blocks.L.mlp.gate_proj.weight"),
    Row("layers.L.mlp.gate_proj.bias", "blocks.L.mlp.gate_proj.bias"),
    Row("layers.L.mlp.up_proj.weight", "blocks.L.mlp.in_proj.weight"),
    Row("layers.L.mlp.up_proj.bias", "blocks.L.mlp.in_proj.bias"),
    Row("layers.L.mlp.down_proj.weight", "blocks.L.mlp.out_proj.weight"),
    Row("layers.L.mlp.down_proj.bias", "blocks.L.mlp.out_proj.bias"),
    Row("norm.weight", "ln_final.w"),
    Row("lm_head.weight", "unembed.weight"),
)

# Files of a bare model leave the prefix out, and none has it on the head.
_PREFIXES = {"gpt2": "transformer.", "llama": "model."}
_HEAD = "lm_head.weight"

# Buffers of older files: causal masks, and the frequencies that the config states.
_NOT_WEIGHTS = re.compile(
    r"h\.\d+\.attn\.(bias|masked_bias)|layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
)


def native_weights(
    hf: Mapping[str, object],
    names: Collection[str],
    read: Callable[[str], Tensor],
    where: str,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Fresh copies of a file's tensors under our names, read one at a time.

    `hf` is the config, `names` are the file's tensors and `read` gives one of them; `where` begins
    the line of a fault. A head that repeats tied embeddings has to equal them.

    Raises: ModelError listing the tensors that are missing, left over, or of another shape.
    """
    config = model_config(hf, where)
    shapes = parameter_shapes(config)
    rows = _rows(config, shapes)
    prefix = _PREFIXES[_table_name(config)]
    found: dict[str, str] = {}
    extra = []
    for name in sorted(names):
        plain = name.removeprefix(prefix)
        if _NOT_WEIGHTS.fullmatch(plain):
            continue
        tied_head = plain == _HEAD and config.tie_embeddings
        if plain in found or not (plain in rows or tied_head):
            extra.append(name)
        else:
            found[plain] = name
    missing = [_prefixed(row.theirs, prefix) for plain, row in rows.items() if plain not in found]
    if missing or extra:
        raise ModelError(f"{where} does not fit its config: {_lists(missing, extra)}")

    weights: dict[str, Tensor] = {}
    for plain, row in rows.items():
        tensor = read(found[plain])
        ours = _ours(row)
        expected = _their_shape([shapes[name] for name in ours], row.how)
        if list(tensor.shape) != expected:
            raise ModelError(
                f"{where} does not fit its config: {found[plain]} is {list(tensor.shape)}, "
                f"not {expected}"
            )
        if row.how != "as is" and tensor.ndim == 2:
            tensor = tensor.T
        parts = tensor.split([shapes[name][0] for name in ours])
        for name, part in zip(ours, parts, strict=True):
            weights[name] = torch.empty(shapes[name], dtype=dtype).copy_(part)
    if config.tie_embeddings and _HEAD in found:
        head = read(found[_HEAD]).to(dtype)
        if not torch.equal(head, weights["embed.weight"]):
            raise ModelError(
                f"{where}: the config ties the embeddings, but {_HEAD} is not the embedding: "
                "tie_word_embeddings should be false"
            )
    return weights


def hf_weights(model: Transformer) -> dict[str, Tensor]:
    """The model's weights under Hugging Face's names and in its layout; each storage once."""
    weights = stored_weights(model)
    config = model.config
    prefix = _PREFIXES[_table_name(config)]
    theirs = {}
    for row in _rows(config, {name: list(value.shape) for name, value in weights.items()}).values():
        tensor = torch.cat([weights[name] for name in _ours(row)])
        if row.how != "as is" and tensor.ndim == 2:
            tensor = tensor.T
        theirs[_prefixed(row.theirs, prefix)] = tensor.contiguous()
    return theirs


def parameter_shapes(config: ModelConfig) -> dict[str, list[int]]:
    """The shape of every parameter that a model of this config has."""
    with torch.device("meta"):
        model = Transformer(config, seed=None)
    return {name: list(value.shape) for name, value in stored_weights(model).items()}


def _table_name(config: ModelConfig) -> str:
    return "llama" if config.positional_embedding_type == "rotary" else "gpt2"


def _rows(config: ModelConfig, shapes: Mapping[str, object]) -> dict[str, Row]:
    """The rows that apply to the model, written out for each layer, by their name."""
    table = LLAMA if _table_name(config) == "llama" else GPT2
    written = [
        Row(*(re.sub(r"\bL\b", str(layer), name) for name in (row.theirs, row.ours)), row.how)
        for row in table
        for layer in (range(config.n_layers) if ".L." in row.theirs else range(1))
    ]
    return {row.theirs: row for row in written if _ours(row)[0] in shapes}


def _ours(row: Row) -> list[str]:
    return [row.ours.replace("*", part) for part in "qkv"] if row.how == "fused" else [row.ours]


def _their_shape(ours: list[list[int]], how: How) -> list[int]:
    whole = [sum(shape[0] for shape in ours), *ours[0][1:]]
    return whole if how == "as is" else whole[::-1]


def _prefixed(plain: str, prefix: str) -> str:
    return plain if plain == _HEAD else prefix + plain


def _lists(missing: list[str], extra: list[str]) -> str:
    said = []
    for label, names in (("missing", missing), ("unknown", extra)):
        if names:
            more = f" and {len(names) - 20} more" if len(names) > 20 else ""
            said.append(f"{label} {', '.join(names[:20])}{more}")
    return "; ".join(said)
