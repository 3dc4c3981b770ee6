"""Interpretability for multi-head attention.

Public names are imported when they are first used: `import interp` does not import torch.
"""

import importlib

_HOMES = {
    "Activations": "interp.activation_tables",
    "AnalysisError": "interp.errors",
    "Comparison": "interp.comparison",
    "ConfigError": "interp.errors",
    "HeadScores": "interp.tables",
    "InterpError": "interp.errors",
    "ModelConfig": "interp.config",
    "ModelError": "interp.errors",
    "Patterns": "interp.patterns",
    "Quantization": "interp.activation_tables",
    "RunConfig": "interp.config",
    "ShapeError": "interp.errors",
    "Transformer": "interp.models.transformer",
    "ablate": "interp.ablation.ablate",
    "analysis": "interp.registry",
    "analyze": "interp.measure",
    "attend": "interp.attending",
    "compare": "interp.comparison",
    "composition": "interp.composing",
    "figure": "interp.views.drawing",
    "fold_layer_norm": "interp.models.folding",
    "importance": "interp.ablation.importance",
    "load_config": "interp.config",
    "load_model": "interp.models.loading",
    "outlier_effects": "interp.activations.effects",
    "outlier_sinks": "interp.activations.sinks",
    "outliers": "interp.activations",
    "prune_heads": "interp.models.pruning",
    "quantize": "interp.quantization",
    "report": "interp.views.report",
    "save_pretrained": "interp.models.pretrained",
    "train": "interp.training.loop",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'interp' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
