"""The mode a model is in while somebody looks at it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import nn


@runtime_checkable
class WholeModel(Protocol):
    """Something of parts that are each in training or in eval mode."""

    def modules(self) -> Iterator[nn.Module]:
        """Every part."""
        ...


@contextmanager
def looking_at(model: WholeModel) -> Iterator[None]:
    """Neither gradients nor dropout; every part of the model gets its own mode back."""
    with without_dropout(model), torch.no_grad():
        yield


@contextmanager
def without_dropout(model: WholeModel) -> Iterator[None]:
    """No dropout; every part of the model gets its own mode back."""
    parts = list(model.modules())
    modes = [part.training for part in parts]
    for part in parts:
        part.training = False
    try:
        yield
    finally:
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode
