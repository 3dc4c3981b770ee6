"""Control heads: what an ablation does where nothing special was taken away.

A control sits in the same layer and writes about as much, so that a difference in effect is not a
difference in depth or size.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from interp.ablation.interventions import Head
from interp.inputs import Inputs
from interp.measure import sequences_at_once
from interp.models.block import Block
from interp.models.transformer import Transformer
from interp.models.watch import looking_at


def head_output_norms(model: Transformer, inputs: Inputs) -> Float[np.ndarray, "n_layers n_heads"]:
    """Mean length of what each head adds to the residual stream, over sequences and real tokens."""
    totals = np.zeros((model.cfg.n_layers, model.cfg.n_heads))
    positions = 0

    def hook_for(layer: int, real: Tensor) -> tuple[str, object]:
        block = model.blocks[layer]
        assert isinstance(block, Block)
        W_O = block.attn.W_O

        def look(z: Tensor, hook: object) -> None:
            norms = torch.einsum("bphd,hdm->bphm", z, W_O).norm(dim=-1) * real[:, :, None]
            totals[layer] += norms.double().sum(dim=(0, 1)).cpu().numpy()

        return f"blocks.{layer}.attn.hook_z", look

    with looking_at(model):
        for batch in inputs.batches:
            size = sequences_at_once(model, batch.tokens.shape[1])
            masks = batch.real.to(model.cfg.device).split(size)
            for tokens, real in zip(batch.tokens.split(size), masks, strict=True):
                hooks = [hook_for(layer, real) for layer in range(model.cfg.n_layers)]
                model.run_with_hooks(tokens, attention_mask=real, fwd_hooks=hooks, return_type=None)
                positions += int(real.sum())
    return totals / positions


def control_heads(
    heads: Sequence[Head],
    norms: Float[np.ndarray, "n_layers n_heads"],
    excluded: Sequence[Head] = (),
) -> list[Head]:
    """For each head the one of its layer with the nearest output norm, each used once.

    Heads in `heads` or `excluded` are never controls; where a layer has none left, fewer come
    back than went in.
    """
    taken = {*heads, *excluded}
    controls = []
    for layer, head in heads:
        free = [(layer, other) for other in range(norms.shape[1]) if (layer, other) not in taken]
        if free:
            nearest = min(free, key=lambda other: abs(norms[other] - norms[layer, head]))
            taken.add(nearest)
            controls.append(nearest)
    return controls
