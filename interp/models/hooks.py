"""What hooks are called and how a cache keeps what they hold: the same for our model and bridged.

A name that is no hook is never passed over in silence.
"""

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from interp.errors import ModelError, ShapeError

HookName = str | Callable[[str], bool]
NamesFilter = str | Sequence[str] | Callable[[str], bool] | None


@runtime_checkable
class PositionSlice(Protocol):
    """Which positions a cache keeps; TransformerLens's `Slice`."""

    def apply(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """The chosen part of one dimension."""
        ...


def matching_hooks(
    wanted: NamesFilter, known: Collection[str], withheld: Mapping[str, str] | None = None
) -> list[str]:
    """The hooks that a name, some names or a predicate choose; `withheld` says why some are not.

    Raises: ModelError for a name that is no hook, with near ones; or where nothing is chosen.
    """
    if callable(wanted):
        names = [name for name in known if wanted(name)]
        if not names:
            raise ModelError(
                f"no hook matches the predicate; the model has {len(known)}, "
                f"such as {', '.join(list(known)[:3])}"
            )
        return names
    names = [wanted] if isinstance(wanted, str) else list(wanted or ())
    if not names:
        raise ModelError("no hook names were given")
    for name in names:
        if name in known:
            continue
        if withheld and name in withheld:
            raise ModelError(f"no hook {name!r}: {withheld[name]}")
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else "see model.hook_dict"
        raise ModelError(f"no hook {name!r}; {hint}")
    return names


def kept_copy(
    value: Tensor,
    *,
    pos_dim: int,
    keep: PositionSlice,
    device: str | torch.device | None,
    remove_batch_dim: bool,
) -> Tensor:
    """A copy of an activation as a cache stores it.

    Raises: ShapeError for `remove_batch_dim` on a batch of several.
    """
    copy = keep.apply(value.detach(), dim=pos_dim).clone()
    if device is not None:
        copy = copy.to(device)
    if remove_batch_dim:
        if copy.shape[0] != 1:
            raise ShapeError(f"remove_batch_dim on a batch of {copy.shape[0]}")
        copy = copy[0]
    return copy
