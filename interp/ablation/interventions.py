"""Interventions on heads, as values that a hooked forward pass applies.

Heads exist before the output projection: a head is removed at `hook_z`, never by slicing
`attn_out`, which is already a sum over heads.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

Head = tuple[int, int]


@dataclass(frozen=True)
class ZeroHeads:
    """Heads set to zero, all at once; `b_O` stays, since it belongs to no head."""

    heads: tuple[Head, ...]

    def hooks(self) -> list[tuple[str, Callable]]:
        """Forward hooks for `run_with_hooks`."""
        by_layer: dict[int, list[int]] = defaultdict(list)
        for layer, head in self.heads:
            by_layer[layer].append(head)
        return [
            (f"blocks.{layer}.attn.hook_z", _zero(chosen)) for layer, chosen in by_layer.items()
        ]


def _zero(heads: Iterable[int]) -> Callable:
    chosen = list(heads)

    def hook(z: Tensor, hook: object) -> Tensor:
        z = z.clone()
        z[:, :, chosen] = 0.0
        return z

    return hook
