"""Small tables of quantization, made up."""

import math

import numpy as np
import pandas as pd

from interp.activation_tables import Quantization

FLOAT = 3.118
NOTE = (
    "the block weights lie on a 4-bit grid already: results of 4-bit weights say nothing about "
    "this model"
)


def row(scheme, bits, weights, activations, sinks, change, error=0.01, **more):
    """A way of rounding whose loss changes by so much."""
    return {
        "scheme": scheme,
        "bits": bits,
        "weight_scales": weights,
        "activation_scales": activations,
        "sinks": sinks,
        "bits_per_weight": 8.028,
        "loss": FLOAT + change,
        "loss_se": 0.1,
        "loss_change": change,
        "loss_change_se": error,
        "perplexity": math.exp(FLOAT + change),
        "error": 0.1 + change / 10,
        "n": 8,
    } | more


def result(rows, n_layers=4, **more):
    """A result of a model called tiny; errors grow with layers, but for a peak."""
    table = pd.DataFrame(rows)
    kinds = ["scheme", "bits", "weight_scales", "activation_scales", "sinks"]
    layers = [
        {**{kind: one[kind] for kind in kinds}, "layer": layer, "error": one["error"] * growth}
        for one in rows
        for layer, growth in enumerate(
            np.linspace(0.1, 1, n_layers) ** 2 + 0.3 * np.eye(n_layers)[1]
        )
    ]
    given = {
        "score": "loss_change",
        "unit": "nats",
        "analysis": "quantization",
        "model": "tiny",
        "params": {"alpha": 0.5, "threshold": 6.0, "group": 64, "rounding": "half to even"},
        "inputs": "8 windows of 256 tokens",
        "seed": 7,
        "summary": {
            "loss": FLOAT,
            "perplexity": math.exp(FLOAT),
            "sink_tokens": 8,
            "sink_rule": "tokens with a massive activation",
            "calibration_sequences": 2,
            "weight_grid_bits": None,
            "notes": [],
        },
        "versions": {"interp": "1"},
    }
    return Quantization(table=table, layers=pd.DataFrame(layers), **(given | more))


def both(scheme, bits, weights, activations, rounded, kept, error):
    """A row with sinks rounded, and one with sinks kept."""
    return [
        row(scheme, bits, weights, activations, "rounded", rounded, error),
        row(scheme, bits, weights, activations, "kept", kept, error),
    ]


def w8a8():
    return [
        *both("round-to-nearest", "w8a8", "channel", "tensor", 0.715, 0.199, 0.02),
        *both("round-to-nearest", "w8a8", "channel", "token", 0.040, 0.039, 0.004),
        *both("llm.int8", "w8a8", "channel", "vector", 0.020, 0.019, 0.003),
        *both("smoothquant", "w8a8", "channel", "tensor", 0.187, 0.180, 0.02),
        *both("smoothquant", "w8a8", "channel", "token", -0.001, -0.002, 0.002),
    ]


def w4a16():
    return [
        row("round-to-nearest", "w4a16", "group", "", "", 0.30, 0.02),
        row("awq", "w4a16", "group", "", "", 0.15, 0.01),
    ]


def smollm(**more):
    """Numbers like those of SmolLM2-135M."""
    summary = result(w8a8()).summary | {"weight_grid_bits": 4, "notes": [NOTE]}
    given = {"model": "smollm2-135m", "summary": summary, "n_layers": 30}
    return result(w8a8(), **(given | more))


def several_bits():
    """Three kinds of bits, one of them for weights alone, one row without a value."""
    broken = row("smoothquant", "w4a4", "channel", "tensor", "rounded", math.nan, math.nan)
    rows = [
        *w8a8(),
        *both("round-to-nearest", "w4a4", "channel", "tensor", 7.4, 5.2, 0.2),
        *both("round-to-nearest", "w4a4", "channel", "token", 2.1, 2.05, 0.1),
        broken | {"error": math.nan, "perplexity": math.nan, "loss": math.nan},
        *w4a16(),
    ]
    return result(rows, n_layers=12)
