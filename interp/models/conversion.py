"""Models with other numbers of key-value heads: MHA to GQA and MQA, and back."""

from pathlib import Path

import torch
from torch import Tensor

from interp.errors import ModelError
from interp.models.transformer import Transformer
from interp.models.weights import model_with_weights, stored_weights

POOLINGS = ("mean", "first", "random")


def with_key_value_heads(
    model: Transformer, n_key_value_heads: int, *, pooling: str = "mean", seed: int = 0
) -> Transformer:
    """A new model whose query heads share `n_key_value_heads` key and value heads.

    With more of them than there are, each is copied to the query heads that read it, and the model
    computes what it did, exactly. With fewer, those of neighbouring heads become one: their `mean`,
    which Ainslie et al. found best, the `first` of them, or a `random` draw as large as the model's
    own; the result is another function, to be trained further. Queries and outputs stay, and the
    given model is left as it is.

    Raises: ModelError for a number that neither divides nor is a multiple of what is there, or that
    does not divide the query heads; for latent attention, a model with pruned heads, or another
    `pooling`.

    Source: Ainslie et al. 2023, "GQA" (arXiv 2305.13245), section 2.1.
    """
    config = model.config
    if config.attention.kind == "latent":
        raise ModelError(f"{model.model_name} has latent attention: its heads share one latent")
    heads, now = config.attention.n_heads, config.n_key_value_heads
    if config.attention.pruned_heads:
        raise ModelError(f"{model.model_name} has pruned heads: what is left cannot be regrouped")
    if pooling not in POOLINGS:
        raise ModelError(f"pooling {pooling!r}: it should be one of {', '.join(POOLINGS)}")
    fits = n_key_value_heads >= 1 and heads % n_key_value_heads == 0
    if not fits or (now % n_key_value_heads and n_key_value_heads % now):
        possible = [
            n for n in range(1, heads + 1) if heads % n == 0 and (n % now == 0 or now % n == 0)
        ]
        raise ModelError(
            f"n_key_value_heads = {n_key_value_heads} for {heads} query heads over {now}: "
            f"one of {', '.join(map(str, possible))}"
        )
    generator = torch.Generator().manual_seed(seed)
    weights = {name: value.clone() for name, value in stored_weights(model).items()}
    for layer in range(config.n_layers):
        attention = f"blocks.{layer}.attn"
        for name in (
            f"{attention}.{part}_proj.{kind}" for part in "kv" for kind in ("weight", "bias")
        ):
            if name in weights:
                by_head = weights[name].unflatten(0, (now, config.d_head))
                regrouped = _regrouped(by_head, n_key_value_heads, pooling, generator)
                weights[name] = regrouped.flatten(0, 1)
        if f"{attention}.smear" in weights:
            smear = weights[f"{attention}.smear"]
            weights[f"{attention}.smear"] = _regrouped(smear, n_key_value_heads, pooling, generator)
    changed = config.attention.model_copy(update={"n_key_value_heads": n_key_value_heads})
    return model_with_weights(
        config.model_copy(update={"attention": changed}),
        weights,
        Path(model.model_name),
        vocabulary=model.vocabulary,
        model_name=model.model_name,
    )


def _regrouped(by_head: Tensor, wanted: int, pooling: str, generator: torch.Generator) -> Tensor:
    now = len(by_head)
    if wanted >= now:
        return by_head.repeat_interleave(wanted // now, dim=0)
    groups = by_head.unflatten(0, (wanted, now // wanted))
    if pooling == "mean":
        return groups.mean(dim=1)
    if pooling == "first":
        return groups[:, 0].clone()
    drawn = torch.randn(groups[:, 0].shape, generator=generator, dtype=torch.float32)
    spread = by_head.float().std(correction=0).cpu()
    return (drawn * spread).to(by_head)
