"""Scales of input channels, chosen before weights are rounded: SmoothQuant's and AWQ's.

One invariant: before anything is rounded the model with its scales computes what it did without.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from interp.data.repeated import TokenBatch
from interp.errors import AnalysisError
from interp.models.transformer import Transformer
from interp.models.weights import stored_weights
from interp.quantization.calibration import Channels, calibrate
from interp.quantization.projections import readings
from interp.quantization.recipes import Fold
from interp.quantization.rounding import Grid

LEAST = 1e-5
"""The least that a channel's largest value or weight, and a smoothing scale, may be."""

RATIOS = tuple(step / 20 for step in range(20))
"""The powers of a channel's mean activation that AWQ tries."""

Scales = Float[Tensor, " width"]


def smoothed_weights(
    model: Transformer, batches: Sequence[TokenBatch], alpha: float, fold: Fold = "all"
) -> dict[str, Tensor]:
    """The weights that change when outliers of activations are moved into the weights.

    The scale of channel j is max|X_j|^alpha / max|W_j|^(1 - alpha), X over the calibration
    sequences. What is read is divided by it, in the gain and bias of the norm before, and with
    `fold` "all" also in the projection that writes the hidden activations of a gated MLP, or of one
    with relu; the weights that read it are multiplied. The function is the same before rounding.

    Raises: AnalysisError for a model in which there is nothing to fold a scale into.

    Source: Xiao et al. 2023, "SmoothQuant" (arXiv 2211.10438), and its code for the least values;
    there only norms are folded into.
    """
    changed: dict[str, Tensor] = {}
    stored = stored_weights(model)

    def weight(name: str) -> Tensor:
        return changed.get(name, stored[name])

    foldable = [own for own in readings(model.config) if own.norm or (own.writer and fold == "all")]
    if not foldable:
        raise AnalysisError(
            f"smoothquant: {model.model_name} has no norm whose gain could take a scale: there are "
            "none, or queries and keys also read positions (shortformer), which no gain scales"
        )
    for layer, channels in calibrate(model, batches):
        block = f"blocks.{layer}"
        for reading in foldable:
            if reading not in channels:
                continue
            names = [f"{block}.{name}.weight" for name in reading.projections]
            scales = smoothing(channels[reading].largest, [stored[name] for name in names], alpha)
            for name in names:
                changed[name] = (weight(name).float() * scales).to(stored[name].dtype)
            source = f"{block}.{reading.norm or reading.writer}"
            for part in ("w", "b") if reading.norm else ("weight", "bias"):
                name = f"{source}.{part}"
                if name in stored:
                    each = scales if stored[name].ndim == 1 else scales[:, None]
                    changed[name] = (weight(name).float() / each).to(stored[name].dtype)
    return changed


def smoothing(largest: Scales, weights: Sequence[Float[Tensor, "_ width"]], alpha: float) -> Scales:
    """SmoothQuant's scale of each channel, from its largest |x| and the weights that read it."""
    heaviest = torch.stack([own.float().abs().amax(dim=0) for own in weights]).amax(dim=0)
    powers = largest.clamp(min=LEAST) ** alpha, heaviest.clamp(min=LEAST) ** (1 - alpha)
    return (powers[0] / powers[1]).clamp(min=LEAST)


def aware_weights(
    model: Transformer, batches: Sequence[TokenBatch], grid: Grid | None
) -> dict[str, Tensor]:
    """The weights after AWQ's rounding: W s rounded, over s, with the scale that was best.

    For every reading the ratio is searched whose scale leaves the least squared error in what its
    projections compute on the calibration sequences. Scales are undone in the weights themselves,
    which is what folding them into whatever writes the input comes to. Weights are not clipped.
    Without a grid nothing is rounded, and they are the model's own within float32.

    Source: Lin et al. 2023, "AWQ" (arXiv 2306.00978), and the search of its code.
    """
    stored = stored_weights(model)
    changed: dict[str, Tensor] = {}
    for layer, channels in calibrate(model, batches, grams=True):
        for reading, own in channels.items():
            names = [f"blocks.{layer}.{name}.weight" for name in reading.projections]
            weights = [stored[name].float() for name in names]
            ratio = best_ratio(own, weights, grid)
            for name, weight in zip(names, weights, strict=True):
                rounded = _rounded(weight, aware_scales(own.mean, ratio), grid)
                changed[name] = rounded.to(stored[name].dtype)
    return changed


def aware_scales(mean: Scales, ratio: float) -> Scales:
    """AWQ's scale of each channel: its mean |x| to the power of `ratio`, around 1; 1 at ratio 0."""
    scales = (mean**ratio).clamp(min=1e-4)
    return scales / (scales.max() * scales.min()).sqrt()


def best_ratio(
    channels: Channels, weights: Sequence[Float[Tensor, "_ width"]], grid: Grid | None
) -> float:
    """The ratio of least error, the smallest of equals; 0 where nothing is rounded."""
    if grid is None:
        return 0.0
    errors = [
        sum(
            _error(weight, aware_scales(channels.mean, ratio), grid, channels) for weight in weights
        )
        for ratio in RATIOS
    ]
    return RATIOS[min(range(len(RATIOS)), key=errors.__getitem__)]


def _rounded(weight: Float[Tensor, "out width"], scales: Scales, grid: Grid | None) -> Tensor:
    scaled = weight * scales
    return (scaled if grid is None else grid.round(scaled)) / scales


def _error(
    weight: Float[Tensor, "out width"], scales: Scales, grid: Grid, channels: Channels
) -> float:
    """The squared error of the product with every calibration token, summed."""
    assert channels.gram is not None  # `calibrate` was asked for it
    off = _rounded(weight, scales, grid) - weight
    return float((off @ channels.gram * off).sum(dtype=torch.float64))


def rounded_weights(
    model: Transformer, weights: Mapping[str, Tensor], grid: Grid | None
) -> Iterator[tuple[str, Tensor]]:
    """Each projection's weight, from `weights` where it is there, else the model's, on the grid."""
    stored = stored_weights(model)
    for layer in range(model.config.n_layers):
        for reading in readings(model.config):
            for name in reading.projections:
                whole = f"blocks.{layer}.{name}.weight"
                weight = weights.get(whole, stored[whole])
                if weight.numel():
                    yield whole, weight if grid is None else grid.round(weight)
