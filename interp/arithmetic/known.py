"""Shapes by name: the table of published models, and any Hugging Face config."""

import difflib
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from interp.arithmetic import AttentionShape, Latent
from interp.errors import ModelError

SOURCES = {
    "T": "TransformerLens's model_properties_table.jsonl",
    "G": "Brown et al. 2020, table 2.1",
    "V": "Vaswani et al. 2017, table 3",
    "D": "deepseek-ai/DeepSeek-V3, inference/configs, and DeepSeek-V2's paper, section 2.1",
    "M": "google/gemma_pytorch, config.py",
    "T5": "google-research's T5 gin files",
    "P": "Chowdhery et al. 2022 (PaLM), section 2",
    "C": "the model's config.json on the Hugging Face hub",
}


@cache
def known_shapes() -> dict[str, AttentionShape]:
    """The published models by name, with their sources."""
    table = tomllib.loads(Path(__file__).with_name("known.toml").read_text(encoding="utf-8"))
    return {name: _shape(name, row) for name, row in table["models"].items()}


def known_shape(name: str) -> AttentionShape | None:
    """The published model of a name, however it is capitalised; None where there is none."""
    return known_shapes().get(name.strip().lower().replace("_", "-"))


def near_names(name: str) -> list[str]:
    """Names of published models that look like this one."""
    return difflib.get_close_matches(name.lower(), known_shapes(), n=3, cutoff=0.5)


def _shape(name: str, row: Mapping[str, Any]) -> AttentionShape:
    latent = row.get("latent")
    return AttentionShape(
        name=name,
        n_layers=row["layers"],
        n_heads=row["heads"],
        n_key_value_heads=row.get("kv_heads", row["heads"]),
        d_head=row["d_head"],
        d_model=row["d_model"],
        latent=None if latent is None else Latent(**latent),
        source=SOURCES[row["source"]],
        note=row.get("note", ""),
    )


_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "d_model": ("hidden_size", "n_embd", "d_model", "dim"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "d_head": ("head_dim", "d_kv", "attention_head_dim"),
}
"""What the configs of different architectures call the same."""


def hf_shape(config: Mapping[str, Any], name: str) -> AttentionShape:
    """The shape that a Hugging Face config.json describes, of whatever architecture.

    Raises: ModelError for one that names no layers, heads or width.
    """
    for part in ("text_config", "llm_config", "language_config", "decoder"):
        if isinstance(config.get(part), Mapping):  # the language model of one that sees or hears
            config = config[part]
    layers, heads, d_model = (_size(config, own, name) for own in ("layers", "heads", "d_model"))
    if not (layers and heads and d_model):
        lacking = [
            own
            for own, size in (("layers", layers), ("heads", heads), ("d_model", d_model))
            if not size
        ]
        tried = "; ".join(", ".join(_KEYS[own]) for own in lacking)
        raise ModelError(f"{name}: its config says nothing of {' and '.join(lacking)} ({tried})")
    d_head = _size(config, "d_head", name) or d_model // heads
    kv_heads = _size(config, "kv_heads", name) or heads
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        kv_heads = 1  # it overrides the number, which some Falcon configs have beside it
    latent, d_value = None, None
    if config.get("kv_lora_rank"):
        latent = Latent(
            config["kv_lora_rank"], config.get("qk_rope_head_dim", 0), config.get("q_lora_rank")
        )
        d_head = config.get("qk_nope_head_dim") or d_head
        d_value = config.get("v_head_dim")
    windows = _windows(config, layers)
    return AttentionShape(
        name=name,
        n_layers=layers,
        n_heads=heads,
        n_key_value_heads=kv_heads,
        d_head=d_head,
        d_model=d_model,
        d_value=d_value,
        latent=latent,
        windows=windows,
        source="its config.json",
    )


def _size(config: Mapping[str, Any], what: str, name: str) -> int | None:
    for key in _KEYS[what]:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{name}: {key} = {value!r} should be a whole number of at least 1")
        return value
    return None


def _windows(config: Mapping[str, Any], n_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    # Qwen's configs name a window that is not used unless they say so.
    used = config.get("use_sliding_window", not str(config.get("model_type")).startswith("qwen"))
    if not isinstance(window, int) or window < 1 or not used:
        return ()
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == n_layers:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return (window,) * n_layers
