"""What a model, a training run and its probes are, as read from nested TOML.

Every table is a frozen pydantic model that refuses unknown keys: a config that loads can run.
Nothing here imports torch, so that paths, configs and flags are checked before a model is.
"""

from interp.config.attention import GroupedAttentionConfig, LatentAttentionConfig
from interp.config.faults import explain
from interp.config.model import (
    Activation,
    LinearScaling,
    Llama3Scaling,
    MLPConfig,
    ModelConfig,
)
from interp.config.reading import config_tables, load_config, parse_config
from interp.config.run import (
    BLOCK_RULE,
    ProbeConfig,
    RepeatedDataConfig,
    RunConfig,
    TextDataConfig,
    TrainConfig,
)

__all__ = [
    "BLOCK_RULE",
    "Activation",
    "GroupedAttentionConfig",
    "LatentAttentionConfig",
    "LinearScaling",
    "Llama3Scaling",
    "MLPConfig",
    "ModelConfig",
    "ProbeConfig",
    "RepeatedDataConfig",
    "RunConfig",
    "TextDataConfig",
    "TrainConfig",
    "config_tables",
    "explain",
    "load_config",
    "parse_config",
]
