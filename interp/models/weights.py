"""Tensors in files and in models: each is used exactly once, and every parameter is set once.

Tensors are safetensors; no pickle is read or written.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from interp.config import ModelConfig
from interp.errors import ModelError
from interp.models.transformer import Transformer
from interp.models.vocabulary import Vocabulary


def stored_weights(model: Transformer) -> dict[str, Tensor]:
    """The model's parameters by name, each storage once: a tied unembedding has no name here."""
    return {name: value.detach().contiguous() for name, value in model.named_parameters()}


def set_weights(model: Transformer, weights: Mapping[str, Tensor], source: Path) -> None:
    """Copy weights into the model.

    Raises: ModelError listing tensors that are missing, left over, or of another shape.
    """
    check_weights(model, weights, source)
    with torch.no_grad():
        parameters = dict(model.named_parameters())
        for name, value in weights.items():
            parameters[name].copy_(value)


def model_with_weights(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    source: Path,
    *,
    vocabulary: Vocabulary | None = None,
    model_name: str = "custom",
) -> Transformer:
    """A model that owns these very tensors: nothing is drawn, copied or allocated beside them.

    Raises: ModelError listing tensors that are missing, left over, or of another shape.
    """
    model = empty_model(config, vocabulary=vocabulary, model_name=model_name)
    check_weights(model, weights, source)
    tied = {"unembed.weight": weights["embed.weight"]} if config.tie_embeddings else {}
    model.load_state_dict({**weights, **tied}, assign=True)
    if config.tie_embeddings:
        model.unembed.weight = model.embed.weight
    return model


def empty_model(
    config: ModelConfig, *, vocabulary: Vocabulary | None = None, model_name: str = "custom"
) -> Transformer:
    """A model whose parameters have names and shapes, but no memory and no values."""
    with torch.device("meta"), _NothingDrawn():
        return Transformer(config, seed=None, vocabulary=vocabulary, model_name=model_name)


class _NothingDrawn(TorchFunctionMode):
    """Layers keep the weights they are made with. To draw meta ones, torch loads its compiler."""

    def __torch_function__(
        self,
        func: Callable,
        types: object,
        args: tuple = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = dict(kwargs or {})
        if getattr(func, "__module__", None) == "torch.nn.init":
            return given["tensor"]
        return func(*args, **given)


def check_weights(model: Transformer, weights: Mapping[str, Tensor], source: Path) -> None:
    """Refuse weights that are not exactly the model's parameters.

    Raises: ModelError listing tensors that are missing, left over, or of another shape.
    """
    wanted = stored_weights(model)
    missing, extra = sorted(wanted.keys() - weights), sorted(weights.keys() - wanted)
    shapes = [
        f"{name} is {list(weights[name].shape)}, not {list(wanted[name].shape)}"
        for name in sorted(wanted.keys() & weights.keys())
        if wanted[name].shape != weights[name].shape
    ]
    faults = [
        *([f"missing {', '.join(missing)}"] if missing else []),
        *([f"unknown {', '.join(extra)}"] if extra else []),
        *shapes,
    ]
    if faults:
        raise ModelError(f"{source} does not fit its config: {'; '.join(faults)}")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Raises: ModelError where it is missing or cut short.
    """
    if not path.is_file():
        raise ModelError(f"{path} is missing: the checkpoint is incomplete")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is cut short or is not a safetensors file: {error}") from None
