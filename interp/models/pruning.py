"""Models from whose weights heads have been taken out.

One invariant: a head keeps the number that it had before any was pruned, in configs, tables and
arguments alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from interp.config import ModelConfig
from interp.errors import ModelError, ShapeError
from interp.models.transformer import Transformer
from interp.models.weights import empty_model, model_with_weights, stored_weights


def prune_heads(model: object, heads: Sequence[tuple[int, int]]) -> Transformer:
    """A new model without these heads, whose logits are the given one's with their z set to zero.

    `heads` are pairs of layer and head, by the numbers before any head was pruned; naming one that
    is gone changes nothing. The query, key, value and output weights of a head leave with it, keys
    and values only where no other query head reads them: under GQA a group has to go whole for its
    cache to shrink. Where a layer's key-value heads are read by different numbers of query heads,
    keys and values are repeated for attention, which costs time and not cache. The output bias
    belongs to no head and stays. The new model shares no memory with the given one, and has its
    vocabulary, name, device, dtype and mode, but none of its hooks.

    Raises: ModelError for anything but our own model; ShapeError for a head it never had.
    """
    if not isinstance(model, Transformer):
        raise ModelError(
            f"pruning needs the native backend: the weights of a {type(model).__name__} stay in "
            "another library"
        )
    config = model.config
    if config.attention.kind == "latent" or config.attention.sink_logit != "none":
        raise ModelError(
            f"{model.model_name} cannot be pruned: its heads share a latent, or have logits of "
            "their own, which are not taken apart"
        )
    n_layers, n_heads = config.n_layers, config.attention.n_heads
    for layer, head in heads:
        if not (0 <= layer < n_layers and 0 <= head < n_heads):
            raise ShapeError(
                f"head {layer}.{head} is out of range: the model has layers 0 to {n_layers - 1} "
                f"with heads 0 to {n_heads - 1}"
            )
    pruned = {
        layer: set(config.attention.pruned_heads.get(layer, ()))
        | {head for at, head in heads if at == layer}
        for layer in range(n_layers)
    }
    left = _with_pruned(
        config, {layer: tuple(sorted(gone)) for layer, gone in pruned.items() if gone}
    )
    weights = with_heads_of(stored_weights(model), config, left)
    new = model_with_weights(
        left,
        {name: weight.clone() for name, weight in weights.items()},
        Path(model.model_name),
        vocabulary=model.vocabulary,
        model_name=model.model_name,
    )
    return new.train(model.training)


def unpruned(config: ModelConfig) -> ModelConfig:
    """The config with every head that it ever had."""
    return _with_pruned(config, {})


def with_heads_of(
    weights: Mapping[str, Tensor], given: ModelConfig, wanted: ModelConfig
) -> dict[str, Tensor]:
    """The weights of a model with other heads: those it lacks are left out, new ones are zero.

    A head of zeros adds nothing to the residual stream. Layers whose heads stay share their
    tensors with what was given.
    """
    made = dict(weights)
    for layer in range(given.n_layers):
        heads = given.heads(layer), wanted.heads(layer)
        if heads[0] == heads[1]:
            continue
        shared = given.key_value_heads(layer), wanted.key_value_heads(layer)
        attention = f"blocks.{layer}.attn"
        for name, (old, new), dim, width in (
            ("q_proj.weight", heads, 0, given.d_head),
            ("q_proj.bias", heads, 0, given.d_head),
            ("k_proj.weight", shared, 0, given.d_head),
            ("k_proj.bias", shared, 0, given.d_head),
            ("v_proj.weight", shared, 0, given.d_head),
            ("v_proj.bias", shared, 0, given.d_head),
            ("smear", shared, 0, 1),
            ("o_proj.weight", heads, 1, given.d_head),
        ):
            if f"{attention}.{name}" in weights:
                tensor = weights[f"{attention}.{name}"]
                made[f"{attention}.{name}"] = _regrouped(tensor, old, new, dim, width)
    return made


@dataclass(frozen=True)
class ModelSize:
    """What a model takes: its parameters, and the numbers a KV cache keeps of every token."""

    parameters: int
    cache_numbers: int


def model_size(config: ModelConfig) -> ModelSize:
    """The size of a model of this config; `unpruned(config)` tells what it was with all heads."""
    weights = stored_weights(empty_model(config)).values()
    kept = sum(len(config.key_value_heads(layer)) for layer in range(config.n_layers))
    return ModelSize(sum(weight.numel() for weight in weights), 2 * config.d_head * kept)


def _with_pruned(config: ModelConfig, pruned: dict[int, tuple[int, ...]]) -> ModelConfig:
    attention = config.attention.model_copy(update={"pruned_heads": pruned})
    return config.model_copy(update={"attention": attention})


def _regrouped(
    tensor: Tensor, old: tuple[int, ...], new: tuple[int, ...], dim: int, width: int
) -> Tensor:
    """`width` rows (or columns) of each old head, put where the new ones have them."""
    shape = list(tensor.shape)
    shape[dim] = len(new) * width
    made = tensor.new_zeros(shape)
    kept = [head for head in new if head in old]
    places = torch.tensor([new.index(head) for head in kept], device=tensor.device).long()
    rows = torch.tensor([old.index(head) for head in kept], device=tensor.device).long()
    source = tensor.unflatten(dim, (len(old), width)).index_select(dim, rows)
    made.unflatten(dim, (len(new), width)).index_copy_(dim, places, source)
    return made
