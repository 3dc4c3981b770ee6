"""Finding the direct path from heads to logits in our model and in bridged ones."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from interp.models.tiles import statistics_dtype
from interp.models.transformer import Transformer
from interp.models.unembedding import Unembedding


def unembedding_of(model: object) -> Unembedding | None:
    """The direct path of a model's heads to its logits; None where they have no such path.

    An encoder has a layer of its own before the logits, and where a norm follows attention, what a
    head writes is rescaled before it is added to the residual stream.
    """
    if isinstance(model, Transformer):
        weight = model.unembed.weight
        gain = getattr(model.ln_final, "w", weight.new_ones(weight.shape[1]))
        centred = model.cfg.normalization_type == "LN"
    else:
        parts = _bridged_parts(model)
        if parts is None:
            return None
        weight, norm = parts
        gain, centred = _norm_gain(norm, weight)
    return Unembedding(weight.detach(), gain.detach().to(statistics_dtype(gain.dtype)), centred)


def _bridged_parts(model: object) -> tuple[Float[Tensor, "d_vocab d_model"], nn.Module] | None:
    bridge = getattr(model, "bridge", None)
    if bridge is None:
        return None
    parts = dict(bridge.named_children())
    if "mlm_head" in parts or not {"ln_final", "unembed"} <= set(parts):
        return None
    if any("ln1_post" in dict(block.named_children()) for block in bridge.blocks):
        return None
    # A probe of the original modules passes none of the bridge's hooks.
    return parts["unembed"].original_component.weight, parts["ln_final"].original_component


def _norm_gain(
    norm: nn.Module, weight: Float[Tensor, "d_vocab d_model"]
) -> tuple[Float[Tensor, " d_model"], bool]:
    """The gain of a norm, up to a factor, and whether it takes off a mean, by what it answers.

    Some families store the gain less 1.
    """
    size = weight.shape[1]
    with torch.no_grad():
        bias = norm(weight.new_zeros(1, 1, size))[0, 0]
        centred = bool((norm(weight.new_ones(1, 1, size))[0, 0] - bias == 0).all())
        probe = weight.new_ones(size)  # whose mean is 0, and no entry
        probe[1::2] = -1
        if size % 2:
            probe[1] = -2
        return (norm(probe[None, None])[0, 0] - bias) / probe, centred
