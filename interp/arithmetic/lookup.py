"""The shape that a name means: a published model, a config file, or any model that loads."""

from pathlib import Path

from pydantic import ValidationError

from interp.arithmetic import AttentionShape, Latent
from interp.arithmetic.known import hf_shape, known_shape, near_names
from interp.config import LatentAttentionConfig, ModelConfig, explain
from interp.errors import ModelError
from interp.models.hub import CONFIG, read_json, resolve


def shape_of(ref: str) -> AttentionShape:
    """The attention of what `ref` names: a model of the table, a config.json or a folder with one,
    a training run, a GGUF file, or a Hub id. No weights are read.

    Raises: ModelError, in one line, for what is none of these.
    """
    known = known_shape(ref)
    if known is not None and not Path(ref).exists():
        return known
    path = Path(ref)
    if path.is_file() and path.suffix == ".json":
        return _of_file(path, ref)
    try:
        source = resolve(ref)
    except ModelError as fault:
        near = near_names(ref)
        hint = f"; of the table: {', '.join(near)}" if near else ""
        raise ModelError(f"{fault}{hint}") from None
    if source.kind == "gguf":
        from interp.models.gguf import read_gguf_config  # it needs numpy and torch

        return config_shape(read_gguf_config(source.path), ref)
    return _of_file(source.path / CONFIG, ref)


def config_shape(config: ModelConfig, name: str) -> AttentionShape:
    """The shape of a model of ours; pruned heads are counted as if they were there."""
    heads = config.attention
    latent, d_value = None, None
    if isinstance(heads, LatentAttentionConfig):
        latent = Latent(heads.d_latent, heads.d_rope, heads.d_query_latent)
        d_value = heads.d_value
    windows = tuple(config.window(layer) for layer in range(config.n_layers))
    return AttentionShape(
        name=name,
        n_layers=config.n_layers,
        n_heads=heads.n_heads,
        n_key_value_heads=config.n_key_value_heads,
        d_head=config.d_head,
        d_model=config.d_model,
        d_value=d_value,
        latent=latent,
        windows=windows if any(windows) else (),
        source="its config",
    )


def _of_file(path: Path, name: str) -> AttentionShape:
    data = read_json(path)
    if data.get("format") != "interp":
        return hf_shape(data, name)
    try:
        return config_shape(ModelConfig.model_validate(data.get("model")), name)
    except ValidationError as error:
        raise ModelError(f"{path}: {explain(error, ModelConfig)}") from None
