"""Quantization, simulated: what rounding weights and activations costs, and what mends it.

One invariant: what is evaluated never calibrates, and every recipe is measured on the same tokens
as the model before rounding, sequence by sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
from torch import Tensor

from interp.activation_tables import Quantization
from interp.activations.massive import MAGNITUDE, RATIO
from interp.data.repeated import TokenBatch
from interp.errors import AnalysisError, ModelError
from interp.inputs import Inputs
from interp.models.loading import save_folder
from interp.models.transformer import Transformer
from interp.quantization.calibration import split
from interp.quantization.measuring import Measured, measure, sink_tokens
from interp.quantization.projections import RoundedModel, block_readings, rounding_model
from interp.quantization.recipes import ACTIVATION_SCALES, CALIBRATED, Fold, Recipe, recipes
from interp.quantization.rounding import FLOAT_BITS, SCALE_BITS, distinct_bits
from interp.quantization.scaling import aware_weights, rounded_weights, smoothed_weights
from interp.tables import head_labels
from interp.text_inputs import inputs_from

ROUNDING = (
    "to the nearest integer, ties to even, of scales in float32; the projections of attention and "
    "of the MLP, and nothing else; activations as they come (dynamic), each sequence by itself"
)


def quantize(
    model: object,
    tokens: object = None,
    *,
    schemes: Sequence[str] | None = None,
    bits: Sequence[str] = ("w8a8",),
    weight_scales: str = "channel",
    activation_scales: Sequence[str] = ACTIVATION_SCALES,
    group: int = 64,
    affine: bool = False,
    alpha: int | float = 0.5,
    threshold: int | float = 6.0,
    fold: Fold = "all",
    magnitude: int | float = MAGNITUDE,
    ratio: int | float = RATIO,
    attention_mask: Tensor | None = None,
    seed: int = 0,
    blocks: Sequence[int] | None = None,
    batch: int | None = None,
    prepend_bos: bool | None = None,
    corpus: str | None = None,
    length: int | None = None,
    sequences: int | None = None,
) -> Quantization:
    """What rounding a model costs: loss, perplexity, errors by layer and bits, for each recipe.

    Nothing is packed: weights and activations are rounded to their grids and computed with in
    floating point, which is what integer arithmetic with these scales comes to. `bits` are words
    such as `w8a8` and `w4a16`, each of 2 to 8 bits, or 16, where nothing is rounded. `schemes`, by
    default those that go with the bits:

    - `round-to-nearest`: weights with a scale for each output (`weight_scales` "channel"), for all
      ("tensor"), or for every `group` inputs; activations with a scale for each token, or one for
      a sequence's input of a projection ("tensor"); both are measured unless `activation_scales`
      says otherwise. `affine` grids have a zero point, symmetric ones do not.
    - `llm.int8`: the features, channels of a projection's input, that reach `threshold` anywhere
      in the sequence are multiplied apart in float16; a scale for each token of the others.
    - `smoothquant`: scales move outliers from activations into weights, by `alpha`; `fold` "norms"
      undoes them in norms alone, as published, "all" also in the MLP's first projection.
    - `awq`: weights alone, with scales searched for the least error of what is computed.

    The table has a row for each recipe, and, where activations are rounded, for sink tokens
    `rounded` as all others or `kept` as they are: `loss` in nats per next token, a mean over
    sequences, `loss_change` against the model before rounding, with standard errors over documents,
    `perplexity`, `bits_per_weight` with scales and zero points of 16 bits each, and `error`: by how
    much of its own length each token's residual stream is off after the last block, a mean over
    tokens without the sink tokens. `layers` has the error after each block.
    Sink tokens are those with massive activations, as `outliers` has it by `magnitude` and `ratio`;
    where there are none, the first of each sequence. Of the documents every fourth is for
    calibration alone, in the order of the inputs; the others are evaluated. Inputs are
    those of `outliers`.

    It misleads where weights were rounded before: `summary["weight_grid_bits"]` tells, and
    `summary["notes"]`. Perplexity of random tokens says little; a corpus says more.

    Raises: ModelError for anything but our own model, or one with hooks on it; AnalysisError for a
    recipe that makes no sense, calibration without a second sequence, a loss that is not finite, or
    as `outliers`.

    Source: Dettmers et al. 2022, "LLM.int8()" (arXiv 2208.07339); Xiao et al. 2023, "SmoothQuant"
    (arXiv 2211.10438); Lin et al. 2023, "AWQ" (arXiv 2306.00978).
    """
    chosen = recipes(
        schemes,
        bits,
        weight_scales=weight_scales,
        activation_scales=activation_scales,
        group=group,
        affine=affine,
        alpha=float(alpha),
        threshold=float(threshold),
        fold=fold,
    )
    native = own_model(model)
    inputs = inputs_from(
        native,
        tokens,
        attention_mask=attention_mask,
        blocks=blocks,
        batch=batch,
        corpus=corpus,
        length=length,
        sequences=sequences,
        prepend_bos=prepend_bos,
        seed=seed,
    )
    return quantize_in(native, inputs, chosen, magnitude=magnitude, ratio=ratio, seed=seed)


def quantize_in(
    model: Transformer,
    inputs: Inputs,
    chosen: Sequence[Recipe],
    *,
    magnitude: int | float = MAGNITUDE,
    ratio: int | float = RATIO,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Quantization:
    """`quantize` on inputs that are already made, by recipes that are; `progress` is told how many
    recipes of how many are measured. Raises: as `quantize`."""
    if next(block_readings(model), None) is None:
        raise AnalysisError("there is no projection to round: no MLP, and every head is pruned")
    evaluated, calibrating = split(inputs)
    check_calibration(chosen, calibrating)
    grid_bits = weight_grid_bits(model)
    sinks, rule = sink_tokens(model, evaluated.batches, float(magnitude), float(ratio))
    measured: list[Measured] = []
    for alike in _by_weights(chosen):
        if progress is not None:
            progress(len({one.recipe for one in measured}), len(chosen))
        rounded = rounded_model(model, alike[0], calibrating)
        measured += measure(model, rounded, alike, evaluated.batches, sinks)
    rows = [{**_named(one.recipe, one.sinks), **_figures(model, one)} for one in measured]
    layers = [
        {**_named(one.recipe, one.sinks), "layer": layer, "error": error}
        for one in measured
        for layer, error in enumerate(one.errors)
    ]
    unrounded = measured[0]
    n_calibrating = sum(len(batch.tokens) for batch in calibrating)
    gone = head_labels(model.cfg.pruned_heads)
    asked = chosen[0]
    return Quantization(
        table=pd.DataFrame(rows),
        layers=pd.DataFrame(layers),
        score="loss_change",
        unit="nats",
        analysis="quantization",
        model=model.cfg.model_name,
        params={
            **inputs.params,
            "group": asked.group,
            "affine": any(recipe.affine for recipe in chosen),
            "alpha": asked.alpha,
            "threshold": asked.threshold,
            "fold": asked.fold,
            "magnitude": float(magnitude),
            "ratio": float(ratio),
            "rounding": ROUNDING,
            "scale_bits": SCALE_BITS,
            **({"pruned_heads": gone} if gone else {}),
        },
        inputs=f"{inputs.description}; {unrounded.n} of them evaluated, {n_calibrating} for "
        "calibration alone",
        seed=seed,
        summary={
            "loss": unrounded.loss_before,
            "perplexity": unrounded.perplexity_before,
            "sink_tokens": sum(int(own.sum()) for own in sinks),
            "sink_rule": rule,
            "calibration_sequences": n_calibrating,
            "weight_grid_bits": grid_bits,
            "notes": _notes(grid_bits, chosen),
        },
    )


def own_model(model: object) -> Transformer:
    """The model, which has to be ours. Raises: ModelError for any other, or for hooks on it."""
    if not isinstance(model, Transformer):
        raise ModelError(
            f"quantization needs the native backend: the weights of a {type(model).__name__} stay "
            "in another library"
        )
    hooked = [name for name, point in model.hook_dict.items() if point.has_hooks()]
    if hooked:
        raise ModelError(
            f"{hooked[0]} has a hook, which the rounded model would lack: reset_hooks() takes "
            "hooks off"
        )
    return model


def rounded_model(
    model: Transformer, recipe: Recipe, calibrating: Sequence[TokenBatch]
) -> RoundedModel:
    """The model with the weights of a recipe; what its projections read is rounded when asked.

    Raises: AnalysisError for a recipe that the model, or the lack of calibration, does not allow.
    """
    check_calibration([recipe], calibrating)
    changed: dict[str, Tensor] = {}
    if recipe.scheme == "smoothquant":
        changed = smoothed_weights(model, calibrating, recipe.alpha, recipe.fold)
    if recipe.scheme == "awq":
        changed = aware_weights(model, calibrating, recipe.weights)
    else:
        changed |= dict(rounded_weights(model, changed, recipe.weights))
    return rounding_model(
        model, changed, threshold=recipe.threshold if recipe.scheme == "llm.int8" else None
    )


def save_quantized(model: Transformer, inputs: Inputs, recipe: Recipe, folder: Path | str) -> Path:
    """Write the model with the weights of a recipe into a new folder that `load_model` reads.

    Weights are on their grid, in floating point; activations are not rounded when it runs.

    Raises: AnalysisError for llm.int8, whose weights depend on what they are multiplied by;
    ModelError for a folder that holds something.
    """
    if recipe.scheme == "llm.int8":
        raise AnalysisError(
            "llm.int8 cannot be saved: which of its weights are rounded depends on each input"
        )
    return save_folder(rounded_model(model, recipe, split(inputs)[1]).model, folder)


def check_calibration(chosen: Sequence[Recipe], calibrating: Sequence[TokenBatch]) -> None:
    """Refuse recipes that look at activations where no sequence is left to calibrate on.

    Raises: AnalysisError.
    """
    wanting = [recipe.scheme for recipe in chosen if recipe.scheme in CALIBRATED]
    if wanting and not calibrating:
        raise AnalysisError(
            f"{wanting[0]} calibrates on sequences that are not evaluated, and none is left: every "
            "fourth document is one, or the last of two or three, unless it is evaluated too"
        )


def weight_grid_bits(model: Transformer) -> int | None:
    """Bits of the grid that the weights of all blocks lie on already; None where one does not."""
    most = None
    for block, reading in block_readings(model):
        for name in reading.projections:
            bits = distinct_bits(model.get_parameter(f"{block}.{name}.weight").detach())
            if bits is None:
                return None
            most = max(bits, most or bits)
    return most


def _notes(bits: int | None, chosen: Sequence[Recipe]) -> list[str]:
    if bits is None:
        return []
    notes = [
        f"the weights of this model's blocks lie on a {bits}-bit grid already: what is compared "
        "with is a model that was rounded before"
    ]
    low = sorted({recipe.weight_bits for recipe in chosen if recipe.weight_bits <= bits})
    if low:
        named = " and ".join(f"{own}-bit" for own in low)
        notes.append(f"results of {named} weights mean nothing on this model")
    return notes


def _by_weights(chosen: Sequence[Recipe]) -> list[list[Recipe]]:
    """Recipes that share their rounded weights, together."""
    alike: dict[Recipe, list[Recipe]] = {}
    for recipe in chosen:
        weights = replace(recipe, activation_bits=FLOAT_BITS, activation_scales="")
        alike.setdefault(weights, []).append(recipe)
    return list(alike.values())


def _named(recipe: Recipe, sinks: str) -> dict[str, object]:
    return {
        "scheme": recipe.scheme,
        "bits": recipe.bits,
        "weight_scales": recipe.weight_scales if recipe.weights else "",
        "activation_scales": recipe.activation_scales,
        "sinks": sinks,
    }


def _figures(model: Transformer, one: Measured) -> dict[str, object]:
    return {
        "bits_per_weight": _bits_per_weight(model, one.recipe),
        "loss": one.loss,
        "loss_se": one.loss_se,
        "loss_change": one.change,
        "loss_change_se": one.change_se,
        "perplexity": one.perplexity,
        "error": one.errors[-1],
        "n": one.n,
    }


def _bits_per_weight(model: Transformer, recipe: Recipe) -> float:
    """Bits of a weight of the blocks' projections, scales included."""
    grid = recipe.weights
    if grid is None:
        return float(recipe.weight_bits)
    shapes = [
        model.get_parameter(f"{block}.{name}.weight").shape
        for block, reading in block_readings(model)
        for name in reading.projections
    ]
    total = sum(rows * width * grid.bits_per_number(rows, width) for rows, width in shapes)
    return total / sum(rows * width for rows, width in shapes)
