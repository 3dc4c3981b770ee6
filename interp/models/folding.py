"""Gains and biases of the norms, moved into the projections that read them.

Nothing folds by itself: a loaded model keeps its weights as they are stored. Every activation after
a projection stays what it was, so that patterns, values and the residual stream are the same.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from interp.config import LatentAttentionConfig, ModelConfig
from interp.errors import ModelError
from interp.models.transformer import Transformer
from interp.models.weights import model_with_weights, stored_weights


def fold_layer_norm(model: Transformer) -> Transformer:
    """A new model with the same log-probs whose norms have gains of 1 and biases of 0.

    A projection W x + c of x = n * w + b, where n is the normalised residual, becomes
    (W * w) n + (W b + c), so that its weights show what it reads from the residual stream. After a
    LayerNorm every such projection has a bias, and a tied unembedding becomes one of its own.
    The queries' and keys' own norms stay; weights are not centred. A model without norms is copied.
    In bfloat16 the new weights are rounded once more. The given model is left as it is.

    Raises: ModelError for shortformer positions, which queries and keys read after the gain.
    """
    config = model.config
    folded = {name: value.clone() for name, value in stored_weights(model).items()}
    if config.normalization_type != "none":
        if config.positional_embedding_type == "shortformer":
            raise ModelError(
                "the norms of a model with positional_embedding_type = 'shortformer' cannot be "
                "folded: queries and keys read positions that the gain does not scale; 'standard', "
                "'rotary' and 'none' can"
            )
        if config.attention.kind == "latent" and config.normalization_type == "LN":
            raise ModelError(
                "a LayerNorm's bias cannot be folded into latent attention, which has no biases"
            )
        folded.setdefault("unembed.weight", folded["embed.weight"])
        for norm, readers in _readers(config):
            for reader in readers:
                _fold(folded, norm, reader)
            folded[f"{norm}.w"] = torch.ones_like(folded[f"{norm}.w"])
            if config.normalization_type == "LN":
                folded[f"{norm}.b"] = torch.zeros_like(folded[f"{norm}.b"])
        config = _folded_config(config)
        for layer in range(config.n_layers):
            if config.mlp is not None and config.mlp.bias:  # one setting for all of its biases
                nothing = torch.zeros_like(folded[f"blocks.{layer}.ln2.w"])
                folded.setdefault(f"blocks.{layer}.mlp.out_proj.bias", nothing)
    return model_with_weights(
        config,
        folded,
        Path(model.model_name),
        vocabulary=model.vocabulary,
        model_name=model.model_name,
    )


def _readers(config: ModelConfig) -> Iterator[tuple[str, list[str]]]:
    """Every norm with the projections that read it, by the names of their parameters."""
    for layer in range(config.n_layers):
        block = f"blocks.{layer}"
        yield f"{block}.ln1", [f"{block}.attn.{part}" for part in stream_readers(config)]
        if config.mlp is not None:
            parts = ("in", "gate") if config.mlp.gated else ("in",)
            yield f"{block}.ln2", [f"{block}.mlp.{part}_proj" for part in parts]
    yield "ln_final", ["unembed"]


def stream_readers(config: ModelConfig) -> list[str]:
    """The projections of attention that read the residual stream behind its norm."""
    heads = config.attention
    readers = ["q_proj", "k_proj", "v_proj"]
    if isinstance(heads, LatentAttentionConfig):
        first = "q_proj" if heads.d_query_latent is None else "q_down_proj"
        readers = [first, "kv_down_proj", "k_rope_proj"]
    return [*readers, "gate"] if heads.gated_output else readers


def _fold(weights: dict[str, Tensor], norm: str, reader: str) -> None:
    matrix = weights[f"{reader}.weight"]
    stored = matrix.dtype
    precise = torch.promote_types(stored, torch.float32)
    matrix = matrix.to(precise)
    weights[f"{reader}.weight"] = (matrix * weights[f"{norm}.w"].to(precise)).to(stored)
    if f"{norm}.b" in weights:
        bias = matrix @ weights[f"{norm}.b"].to(precise)
        if f"{reader}.bias" in weights:
            bias = bias + weights[f"{reader}.bias"].to(precise)
        weights[f"{reader}.bias"] = bias.to(stored)


def _folded_config(config: ModelConfig) -> ModelConfig:
    changes: dict[str, object] = {"tie_embeddings": False}
    if config.normalization_type == "LN":
        changes["unembed_bias"] = True
        if config.attention.kind == "grouped":
            changes["attention"] = config.attention.model_copy(update={"bias": True})
        if config.mlp is not None:
            changes["mlp"] = config.mlp.model_copy(update={"bias": True})
    return config.model_copy(update=changes)
