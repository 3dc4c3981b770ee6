"""Ablations written by hand: whole passes with plain hooks, and metrics by loops in float64.

They share no code with interp's ablation, so that where the two agree both are right.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import reference
import torch
from torch import Tensor

Head = tuple[int, int]


def replacing(
    heads: Sequence[Head], values: Mapping[int, Tensor] | None = None, site: str = "z"
) -> list[tuple[str, Callable]]:
    """Hooks that put other values in the places of some heads, by layer; zeros without any."""

    def hook_for(layer: int) -> Callable:
        def hook(own: Tensor, hook: object) -> Tensor:
            rows = []
            for head in range(own.shape[2]):
                if (layer, head) not in heads:
                    rows.append(own[:, :, head])
                elif values is None:
                    rows.append(torch.zeros_like(own[:, :, head]))
                else:
                    rows.append(values[layer][:, :, head])
            return torch.stack(rows, dim=2)

        return hook

    layers = sorted({layer for layer, _ in heads})
    return [(f"blocks.{layer}.attn.hook_{site}", hook_for(layer)) for layer in layers]


def logits_with(
    model: object, tokens: Tensor, mask: Tensor | None, hooks: Sequence[tuple[str, Callable]] = ()
) -> np.ndarray:
    """The logits of a hooked pass, in float64."""
    given = {} if mask is None else {"attention_mask": mask}
    with torch.no_grad():
        logits = model.run_with_hooks(tokens, fwd_hooks=list(hooks), **given)
    return logits.double().numpy()


def sequence_losses(logits: np.ndarray, tokens: Tensor, mask: Tensor | None) -> np.ndarray:
    """The mean next-token loss of each sequence, NaN where it has no next token."""
    losses = reference.next_token_losses(logits, tokens.numpy(), mask)
    means = []
    for row, own in enumerate(losses):
        counted = [
            own[p]
            for p in range(len(own))
            if mask is None or (bool(mask[row, p]) and bool(mask[row, p + 1]))
        ]
        means.append(sum(counted) / len(counted) if counted else np.nan)
    return np.array(means)


def losses_with(
    model: object,
    tokens: Tensor,
    mask: Tensor | None,
    heads: Sequence[Head] = (),
    values: Mapping[int, Tensor] | None = None,
    site: str = "z",
) -> np.ndarray:
    """The mean loss of each sequence with some heads replaced."""
    logits = logits_with(model, tokens, mask, replacing(heads, values, site))
    return sequence_losses(logits, tokens, mask)


def site_values(
    model: object, tokens: Tensor, mask: Tensor | None = None, site: str = "z"
) -> dict[int, Tensor]:
    """What every layer's heads read, or their keys or values, of an unablated pass."""
    names = [f"blocks.{layer}.attn.hook_{site}" for layer in range(model.cfg.n_layers)]
    given = {} if mask is None else {"attention_mask": mask}
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens, names_filter=names, **given)
    return {layer: cache[name] for layer, name in enumerate(names)}
