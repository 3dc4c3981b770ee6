"""Which hooks of a TransformerBridge tell the truth, found by watching one short pass.

TransformerLens registers the same names for every architecture, but not every one of them fires,
and some hold something else than their name says. A name is offered only where it keeps its word;
the others are withheld, each with its reason.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from interp.errors import ModelError
from interp.models.transformer import HookPoint

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge
else:
    TransformerBridge = nn.Module

N_POS = 3
"""Tokens of the pass: unlike the batch of one, and enough to tell positions from heads."""

Hook = Callable[..., Tensor | None]


@dataclass(frozen=True)
class BridgedHooks:
    """The hooks of one bridged model by name; several names may mean one point."""

    points: Mapping[str, HookPoint]
    withheld: Mapping[str, str]
    read_only: frozenset[str]
    """Hooks of values that transformers has already used: they can be watched, not edited."""
    summed: Mapping[int, HookPoint]
    """Where a projection's output appears while heads' results are built, by its point's id:
    heads are summed past the projection then, and its own point does not fire."""


@dataclass
class _Pass:
    """What fired in one pass: when, how often, with what."""

    place: dict[int, int] = field(default_factory=dict)
    times: Counter[int] = field(default_factory=Counter)
    value: dict[int, Tensor] = field(default_factory=dict)

    def before(self, first: object, then: object) -> bool:
        """Whether both points fired, and in this order."""
        if id(first) not in self.place or id(then) not in self.place:
            return False
        return self.place[id(first)] < self.place[id(then)]

    def equal(self, one: object, other: object) -> bool:
        """Whether both points fired with the same numbers."""
        if id(one) not in self.value or id(other) not in self.value:
            return False
        return torch.equal(self.value[id(one)], self.value[id(other)])


def honest_hooks(bridge: TransformerBridge, run: Callable[[], object]) -> BridgedHooks:
    """The hooks of `bridge` that keep their word; `run` makes one pass over 1 x N_POS tokens.

    Raises: ModelError where no layer has attention.
    """
    every = dict(bridge.hook_dict)
    watched = _watch(every, run)
    points: dict[str, HookPoint] = {}
    withheld: dict[str, str] = {}
    for name, point in every.items():
        fault = _fault(point, watched)
        # An expert that no token was sent to is still an expert.
        if fault is None or ".experts." in name:
            points[name] = point
        else:
            withheld[name] = fault
    read_only: set[str] = set()
    summed: dict[int, HookPoint] = {}
    for layer in range(bridge.cfg.n_layers):
        block = f"blocks.{layer}"
        _check_layer(bridge, block, every, watched, points, withheld, read_only)
        if f"{block}.attn.hook_result" in points:
            summed[id(every[f"{block}.attn.o.hook_out"])] = every[f"{block}.attn.hook_out"]
    if not any(name.endswith("attn.hook_pattern") for name in points):
        raise ModelError(f"{bridge.cfg.model_name} has no attention heads to look at")
    return BridgedHooks(points, withheld, frozenset(read_only), summed)


def _watch(points: Mapping[str, HookPoint], run: Callable[[], object]) -> _Pass:
    watched = _Pass()
    handles = []

    def look(value: object, hook: HookPoint) -> None:
        watched.place.setdefault(id(hook), len(watched.place))
        watched.times[id(hook)] += 1
        if isinstance(value, Tensor):
            watched.value[id(hook)] = value.detach().clone()

    try:
        for point in {id(point): point for point in points.values()}.values():
            handles.append((point, point.add_hook(look)))
        run()
    finally:
        for point, handle in handles:
            detach(point, handle)
    return watched


def detach(point: HookPoint, handle: object) -> None:
    """Take one hook away, and no other."""
    handle.hook.remove()  # type: ignore[attr-defined]
    point.fwd_hooks[:] = [other for other in point.fwd_hooks if other is not handle]


def _fault(point: HookPoint, watched: _Pass) -> str | None:
    times = watched.times[id(point)]
    if times == 0:
        return "it never fires in this architecture"
    if times > 1 and str(point.name).startswith("blocks."):
        return f"it fires {times} times in one pass, and names one of several activations"
    if id(point) not in watched.value:
        return "it holds no tensor"
    return None


def _check_layer(
    bridge: TransformerBridge,
    block: str,
    every: Mapping[str, HookPoint],
    watched: _Pass,
    points: dict[str, HookPoint],
    withheld: dict[str, str],
    read_only: set[str],
) -> None:
    """Correct the names of one layer in `points`, `withheld` and `read_only`."""

    def at(name: str) -> HookPoint | None:
        return every.get(f"{block}.{name}")

    def offer(name: str, point: HookPoint | None) -> None:
        assert point is not None
        withheld.pop(f"{block}.{name}", None)
        points[f"{block}.{name}"] = point

    def withhold(name: str, reason: str) -> None:
        if points.pop(f"{block}.{name}", None) is not None:
            withheld[f"{block}.{name}"] = reason

    z, pattern = at("attn.o.hook_in"), at("attn.hook_pattern")
    if watched.before(z, pattern):
        withhold(
            "attn.hook_attn_scores",
            "this architecture leaves attention to transformers, which shows weights and no scores",
        )
        read_only.add(f"{block}.attn.hook_pattern")

    n_heads = bridge.cfg.n_heads
    n_key_value_heads = bridge.cfg.n_key_value_heads or n_heads
    heads = {"q": n_heads, "k": n_key_value_heads, "v": n_key_value_heads, "z": n_heads}
    heads |= {"rot_q": n_heads, "rot_k": n_key_value_heads}
    layouts: dict[str, tuple[int | None, ...]] = {
        f"attn.hook_{name}": (1, N_POS, n, None) for name, n in heads.items()
    }
    square = (1, n_heads, N_POS, N_POS)
    layouts |= dict.fromkeys(("attn.hook_attn_scores", "attn.hook_pattern"), square)
    for name, layout in layouts.items():
        value = watched.value.get(id(at(name)))
        if value is not None and not _fits(value.shape, layout):
            withhold(name, f"its shape is {list(value.shape)} where {_words(layout)} was expected")

    # Hugging Face's older encoders hold the norm after attention inside their attention module.
    projected, norm, module = at("attn.o.hook_out"), at("ln1.hook_in"), at("attn.hook_out")
    norm_inside = watched.before(projected, norm) and watched.before(norm, module)
    if norm_inside:
        offer("hook_attn_out", projected)
    if watched.before(at("mlp.in.hook_in"), at("hook_resid_mid")):
        withhold("hook_resid_mid", "it fires after the MLP")
        if norm_inside:
            offer("hook_resid_mid", norm)

    for name, whole in (("mlp.hook_pre", "mlp.hook_in"), ("mlp.hook_post", "mlp.hook_out")):
        if at(name) is not None and at(name) is at(whole):
            withhold(name, f"a mixture of experts has no one of it; the name stands for {whole}")

    attention = dict(bridge.blocks[int(block.removeprefix("blocks."))].named_children()).get("attn")
    result = f"{block}.attn.hook_result"
    if f"{block}.attn.hook_z" not in points or result not in every:
        return
    if not getattr(attention, "supports_attn_result", False):
        withheld[result] = "this architecture leaves attention to transformers"
    elif not watched.equal(projected, module):
        withheld[result] = "building it would leave no hook on the output of attention"
    else:
        offer("attn.hook_result", at("attn.hook_result"))
    if result in withheld:
        withheld[result] += "; hook_z @ blocks[L].attn.W_O is what it would hold"


def _fits(shape: Sequence[int], layout: tuple[int | None, ...]) -> bool:
    return len(shape) == len(layout) and all(
        wanted in (None, size) for size, wanted in zip(shape, layout, strict=True)
    )


def _words(layout: tuple[int | None, ...]) -> str:
    return f"[{', '.join('d_head' if size is None else str(size) for size in layout)}]"


# --- what a hook sees ---------------------------------------------------------------------------


def shown(
    name: str, look: Hook, *, read_only: bool, masked: float, key_mask: Tensor | None
) -> Hook:
    """`look` as our own model would call it.

    Scores are -inf where attention is not allowed, and where transformers puts `masked`; rows of
    queries that may attend to nothing are zero. Edits of what is `read_only` are refused.
    """
    if name.endswith("attn.hook_attn_scores"):
        return _shown_scores(look, masked)
    if name.endswith("attn.hook_pattern") and (read_only or key_mask is not None):
        return _shown_pattern(name, look, read_only, key_mask)
    return look


def _shown_scores(look: Hook, masked: float) -> Hook:
    def call(scores: Tensor, hook: object) -> Tensor | None:
        seen = scores.masked_fill(scores <= masked / 2, -torch.inf)
        edited = _edited(look, seen, hook)
        return None if edited is None else edited.masked_fill(torch.isneginf(edited), masked)

    return call


def _shown_pattern(name: str, look: Hook, read_only: bool, key_mask: Tensor | None) -> Hook:
    def call(pattern: Tensor, hook: object) -> Tensor | None:
        seen = pattern.clone() if read_only else pattern
        if key_mask is not None:
            empty = _sees_nothing(pattern, key_mask)
            seen = pattern.masked_fill(empty, 0.0)
        edited = _edited(look, seen, hook)
        if edited is None:
            return None
        if key_mask is not None:
            edited = torch.where(empty, pattern, edited)
        if read_only and not torch.equal(edited, pattern):
            raise ModelError(
                f"{name} cannot be edited: this architecture leaves attention to transformers, "
                "which has used the weights already; edit attn.hook_z"
            )
        return edited

    return call


def _edited(look: Hook, seen: Tensor, hook: object) -> Tensor | None:
    """What the hook returns, or what it wrote into the copy it was shown."""
    version = seen._version
    returned = look(seen, hook=hook)
    if returned is None and seen._version != version:
        return seen
    return returned


def _sees_nothing(
    pattern: Float[Tensor, "batch n_heads query key"], key_mask: Bool[Tensor, "batch key"]
) -> Bool[Tensor, "batch n_heads query 1"]:
    """Rows whose every key is masked: transformers spreads them evenly, over padding too."""
    return (pattern * ~key_mask[:, None, None, :]).sum(dim=-1, keepdim=True) > 0
