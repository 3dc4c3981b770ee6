"""Hugging Face weights of GPT-2 and Llama type and ours, both ways, by tables of names.

Weights stay as stored: nothing is folded, centred or rescaled. Every tensor of a file is used
exactly once and every parameter is set exactly once; whatever does not fit is listed and refused.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor

from interp.config import ModelConfig
from interp.data.pretrained_tokenizer import PretrainedVocabulary
from interp.data.tokenizer import BytePairVocabulary
from interp.errors import ModelError
from interp.models.hf_config import model_config
from interp.models.hf_families import hf_config
from interp.models.new_folder import new_folder
from interp.models.pruning import unpruned, with_heads_of
from interp.models.transformer import Transformer
from interp.models.weights import check_weights, stored_weights

How = Literal["as is", "transposed", "fused"]


@dataclass(frozen=True)
class Row:
    """One line of a table: their name, ours, and what lies between; L stands for the layer.

    `transposed` is a matrix in GPT-2's layout [in, out]. `fused` is in it too, and holds queries,
    keys and values one after the other, each as wide as its heads: `*` stands for q, k and v.
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

# Buffers that older files hold: causal masks, and the frequencies that the config states.
_NOT_WEIGHTS = {
    "gpt2": ("h.L.attn.bias", "h.L.attn.masked_bias"),
    "llama": ("rotary_emb.inv_freq", "layers.L.self_attn.rotary_emb.inv_freq"),
}


def native_weights(
    hf: Mapping[str, object],
    names: Collection[str],
    read: Callable[[str], Tensor],
    where: str,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Fresh copies of a file's tensors under our names, read one at a time.

    `hf` is the config, `names` are the file's tensors and `read` gives one of them; `where` begins
    the line of a fault. A head that repeats tied embeddings has to equal them bit for bit.

    Raises: ModelError listing the tensors that are missing, left over, or of another shape.
    """
    config = model_config(hf, where)
    shapes = parameter_shapes(config)
    rows = _rows(config, shapes)
    found = _found(config, rows, names, where)

    weights: dict[str, Tensor] = {}
    misshapen = []
    for plain, row in rows.items():
        tensor, ours = read(found[plain]), _ours(row)
        expected = _their_shape([shapes[name] for name in ours], row.how)
        if list(tensor.shape) != expected:
            misshapen.append(f"{found[plain]} is {list(tensor.shape)}, not {expected}")
            continue
        if not tensor.is_floating_point():
            raise ModelError(
                f"{where}: {found[plain]} is stored as {tensor.dtype}, which is no weight as it is"
            )
        if row.how != "as is" and tensor.ndim == 2:
            tensor = tensor.T
        parts = tensor.split([shapes[name][0] for name in ours])
        for name, part in zip(ours, parts, strict=True):
            weights[name] = torch.empty(shapes[name], dtype=dtype).copy_(part)
    if misshapen:
        raise ModelError(f"{where} does not fit its config: {_some(misshapen, '; ')}")
    if config.tie_embeddings and _HEAD in found:
        embedding = next(plain for plain, row in rows.items() if row.ours == "embed.weight")
        head, embedded = read(found[_HEAD]), read(found[embedding])
        if head.dtype != embedded.dtype or not torch.equal(head, embedded):
            raise ModelError(
                f"{where}: its config says tied (tie_word_embeddings = true), but {_HEAD} differs "
                f"from {found[embedding]}"
            )
    return weights


def hf_weights(model: Transformer) -> dict[str, Tensor]:
    """The model's weights under Hugging Face's names and in its layout; each storage once.

    Pruned heads are zeros: a family of transformers has as many heads in every layer.

    Raises: ModelError for a model whose parameters are not those of its config.
    """
    weights, empty = stored_weights(model), _without_weights(model.config)
    check_weights(empty, weights, Path(model.model_name))
    weights = with_heads_of(weights, model.config, unpruned(model.config))
    prefix = _PREFIXES[_table_name(model.config)]
    theirs = {}
    for row in _rows(model.config, weights).values():
        tensor = torch.cat([weights[name] for name in _ours(row)])
        if row.how != "as is" and tensor.ndim == 2:
            tensor = tensor.T
        theirs[_prefixed(row.theirs, prefix)] = tensor.contiguous()
    return theirs


def parameter_shapes(config: ModelConfig) -> dict[str, list[int]]:
    """The shape of every parameter that a model of this config has."""
    return {name: list(w.shape) for name, w in stored_weights(_without_weights(config)).items()}


def _without_weights(config: ModelConfig) -> Transformer:
    with torch.device("meta"):
        return Transformer(config, seed=None)


def _found(
    config: ModelConfig, rows: Mapping[str, Row], names: Collection[str], where: str
) -> dict[str, str]:
    """The file's name of each tensor, by its name in the table; all of them, and no other."""
    table = _table_name(config)
    prefix = _PREFIXES[table]
    ignored = {name for written in _NOT_WEIGHTS[table] for name in _for_each_layer(written, config)}
    wanted = {*rows, _HEAD}  # a tied model's file may hold its head once more
    found: dict[str, str] = {}
    unknown = []
    for name in sorted(names):
        plain = name.removeprefix(prefix)
        if plain in ignored:
            continue
        if plain not in wanted or plain in found or (plain == _HEAD and name != plain):
            unknown.append(name)
        else:
            found[plain] = name
    missing = [_prefixed(plain, prefix) for plain in rows if plain not in found]
    faults = [
        *([f"missing {_some(missing)}"] if missing else []),
        *([f"unknown {_some(unknown)}"] if unknown else []),
    ]
    if missing == [_HEAD]:
        faults.append("its config says untied (tie_word_embeddings = false)")
    if faults:
        raise ModelError(f"{where} does not fit its config: {'; '.join(faults)}")
    return found


def _table_name(config: ModelConfig) -> str:
    return "llama" if config.positional_embedding_type == "rotary" else "gpt2"


def _rows(config: ModelConfig, shapes: Mapping[str, object]) -> dict[str, Row]:
    """The rows that apply to the model, written out for each layer, by their name."""
    table = LLAMA if _table_name(config) == "llama" else GPT2
    written = [
        Row(theirs, ours, row.how)
        for row in table
        for theirs, ours in zip(
            _for_each_layer(row.theirs, config), _for_each_layer(row.ours, config), strict=True
        )
    ]
    return {row.theirs: row for row in written if _ours(row)[0] in shapes}


def _for_each_layer(name: str, config: ModelConfig) -> list[str]:
    if ".L." not in name:
        return [name]
    return [name.replace(".L.", f".{layer}.") for layer in range(config.n_layers)]


def _ours(row: Row) -> list[str]:
    return [row.ours.replace("*", part) for part in "qkv"] if row.how == "fused" else [row.ours]


def _their_shape(ours: list[list[int]], how: How) -> list[int]:
    whole = [sum(shape[0] for shape in ours), *ours[0][1:]]
    return whole if how == "as is" else whole[::-1]


def _prefixed(plain: str, prefix: str) -> str:
    return plain if plain == _HEAD else prefix + plain


def _some(names: list[str], between: str = ", ") -> str:
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return between.join(names[:20]) + more


# --- a folder that transformers reads ---------------------------------------------------------


def save_pretrained(model: Transformer, folder: Path | str) -> Path:
    """Write a folder that `transformers` and TransformerLens load to the same log-probs.

    The weights are written as they are, a tied unembedding once. The model's vocabulary becomes the
    tokenizer; without one the tokens are the ids as decimal numbers, so that "3 17" is [3, 17]. The
    tokenizer has no BOS that the vocabulary does not have: TransformerLens makes one up, outside
    the embedding, unless it is given ids or `prepend_bos=False`. It also ignores GPT-2's
    `scale_attn_weights` (seen in 4.3), so that a model with a scale of 1 is right in `transformers`
    only. A qwen2 folder gets a tokenizer only where it is Qwen2's own, since `transformers` would
    read any other as if it were. Pruned heads are written as zeros: the logits are the same, but
    nothing is smaller; `zero_heads_note` says so. The folder appears whole or not at all.

    Raises: ModelError for a model that no family of transformers has the shape of, and for a folder
    that holds something.
    """
    config = hf_config(model.config)
    config["dtype"] = str(model.embed.weight.dtype).removeprefix("torch.")
    with new_folder(folder) as scratch:
        # Releases of transformers before 5 insist on this entry.
        save_file(hf_weights(model), scratch / "model.safetensors", metadata={"format": "pt"})
        _write_json(scratch / "config.json", config)
        _write_tokenizer(model, config["model_type"], scratch)
    return Path(folder)


def zero_heads_note(config: ModelConfig) -> str | None:
    """What to say of the export of a model with pruned heads, in one line; None without any."""
    n_pruned = sum(map(len, config.attention.pruned_heads.values()))
    if not n_pruned:
        return None
    return (
        f"pruned heads are written as zeros ({n_pruned} of them), since transformers has as many "
        "heads in every layer: the same logits, but no smaller model"
    )


def _write_tokenizer(model: Transformer, model_type: object, folder: Path) -> None:
    vocabulary = model.vocabulary
    own = vocabulary.tokenizer if isinstance(vocabulary, PretrainedVocabulary) else None
    if model_type == "qwen2" and not type(own).__name__.startswith("Qwen2Tokenizer"):
        return  # AutoTokenizer cuts text as Qwen2 does in such a folder, whatever lies in it
    if own is not None:
        own.save_pretrained(folder)
        return
    if isinstance(vocabulary, BytePairVocabulary):
        text = vocabulary.to_json()
    elif vocabulary is None:
        text = _numbers_as_tokens(model.config.d_vocab)
    else:
        raise ModelError(
            f"a vocabulary of {type(vocabulary).__name__} cannot be written as a tokenizer.json"
        )
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.config.n_ctx,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _numbers_as_tokens(d_vocab: int) -> str:
    """A tokenizer.json whose tokens are the ids as decimal numbers; all else is dropped."""
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(d_vocab)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\D+"), "removed")
    return str(tokenizer.to_str(pretty=True))


def _write_json(path: Path, data: Mapping[str, object]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
