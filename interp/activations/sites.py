"""Where activations are looked at: the residual stream, and what each block reads and writes.

One invariant: a site's layer is that of the block it stands in or before, counted from 0, and the
last number, n_layers, is of what leaves the last block.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from interp.data.repeated import TokenBatch
from interp.errors import AnalysisError, ModelError
from interp.models.modes import looking_at
from interp.models.transformer import Transformer
from interp.models.watch import HookedModel

RESIDUAL = ("resid_pre", "resid_post")
"""The residual stream: before each block, and after the last."""

KINDS = {
    "resid_pre": "the residual stream before the block",
    "attn_in": "what queries and keys are projected from, behind the norm",
    "k": "keys, before their norm and rotary positions",
    "v": "values",
    "z": "what the heads read, from which the output projection writes",
    "attn_out": "what attention adds to the residual stream",
    "mlp_in": "what the MLP's first projection reads, behind the norm",
    "mlp_post": "the MLP's hidden activations, which its last projection reads",
    "mlp_out": "what the MLP adds to the residual stream",
    "resid_post": "the residual stream after the last block",
    "ln_final": "the output of the final norm, gain and bias applied",
}
"""Every kind of site, in the order of the pass."""

_HOOKS = {
    "resid_pre": ("hook_resid_pre",),
    "attn_in": ("attn.q.hook_in", "attn.hook_in"),
    "k": ("attn.hook_k",),
    "v": ("attn.hook_v",),
    "z": ("attn.hook_z",),
    "attn_out": ("hook_attn_out",),
    "mlp_in": ("mlp.in.hook_in", "mlp.hook_in"),
    "mlp_post": ("mlp.hook_post",),
    "mlp_out": ("hook_mlp_out",),
    "resid_post": ("hook_resid_post",),
}
"""The hooks of a block that hold each kind, of which the first that a model has is taken."""


class Site(NamedTuple):
    """A place where activations are looked at; `hook` is its name in the model."""

    layer: int
    kind: str
    hook: str


Look = Callable[[Float[Tensor, "batch pos width"]], None]


def residual_sites(model: HookedModel) -> list[Site]:
    """The residual stream before each block, then after the last.

    Raises: ModelError for a model that does not show it everywhere.
    """
    n_layers = model.cfg.n_layers
    sites = [_site(model, layer, "resid_pre") for layer in range(n_layers)]
    sites.append(_site(model, n_layers, "resid_post"))
    for site in sites:
        if site.hook not in model.hook_dict:
            raise ModelError(
                f"{model.cfg.model_name} has no {site.hook}: outliers looks at the residual stream "
                "before every block and after the last"
            )
    return sites


def every_site(model: HookedModel, kinds: Collection[str] | None = None) -> list[Site]:
    """The sites of some kinds, all by default, in the order of the pass.

    Of a kind that the model does not have everywhere only the layers that have it are given.

    Raises: AnalysisError for a kind that is none, or that this model has nowhere; ModelError for a
    model that does not show its residual stream everywhere.
    """
    check_kinds(kinds or ())
    first, *before, last = residual_sites(model)
    sites: list[Site] = []
    for stream in (first, *before):
        within = [kind for kind in KINDS if kind not in (*RESIDUAL, "ln_final")]
        block = [_site(model, stream.layer, kind) for kind in within]
        sites += [stream, *(site for site in block if _shown(model, site))]
    sites.append(last)
    if has_final_norm(model):
        sites.append(Site(last.layer, "ln_final", "ln_final.hook_out"))
    chosen = [site for site in sites if kinds is None or site.kind in kinds]
    for kind in kinds or ():
        if not any(site.kind == kind for site in chosen):
            raise AnalysisError(f"{model.cfg.model_name} has no {kind}: {KINDS[kind]}")
    return chosen


def check_kinds(kinds: Collection[str]) -> None:
    """Refuse a kind that no model has.

    Raises: AnalysisError, listing the known ones.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise AnalysisError(f"no site {kind!r}: it should be one of {', '.join(KINDS)}")


def look_at_sites(model: HookedModel, batch: TokenBatch, looks: Mapping[Site, Look]) -> None:
    """One forward pass, in which each look is given the activations of its site.

    They are `[batch, pos, width]`; what belongs to heads is laid out head by head.
    """

    def look(value: Tensor, hook: object = None, *, see: Look) -> None:
        see(value.flatten(2))

    hooks = []
    with looking_at(model), ExitStack() as stack:
        for site, see in looks.items():
            calling = partial(look, see=see)
            module = _module(model, site)
            if module is None:
                hooks.append((site.hook, calling))
            elif site.kind == "ln_final":
                # Our norms have a hook before their gain, and none behind it.
                handle = module.register_forward_hook(
                    lambda norm, given, out, calling=calling: calling(out)
                )
                stack.callback(handle.remove)
            else:
                handle = module.register_forward_pre_hook(
                    lambda projection, given, calling=calling: calling(given[0])
                )
                stack.callback(handle.remove)
        model.run_with_hooks(
            batch.tokens, fwd_hooks=hooks, attention_mask=batch.key_mask, return_type=None
        )


def _site(model: HookedModel, layer: int, kind: str) -> Site:
    block = f"blocks.{min(layer, model.cfg.n_layers - 1)}"
    names = [f"{block}.{hook}" for hook in _HOOKS[kind]]
    known = (name for name in names if name in model.hook_dict)
    return Site(layer, kind, next(known, names[0]))


def _shown(model: HookedModel, site: Site) -> bool:
    if isinstance(model, Transformer):
        # A layer whose heads are all pruned has no keys, and an attention-only one no MLP.
        if site.kind in ("attn_in", "k", "v", "z") and not model.cfg.heads(site.layer):
            return False
        return site.hook in model.hook_dict or _module(model, site) is not None
    return site.hook in model.hook_dict


def _module(model: HookedModel, site: Site) -> nn.Module | None:
    """The module of ours that reads or writes a site which has no hook of its own."""
    if not isinstance(model, Transformer):
        return None
    if site.kind == "ln_final":
        return model.ln_final
    if site.kind not in ("attn_in", "mlp_in"):
        return None
    block: Any = model.blocks[site.layer]  # a ModuleList says only Module
    if site.kind == "attn_in":  # queries of latent attention may be made from a latent
        part = getattr(block.attn, "kv_down_proj", block.attn.q_proj)
    else:
        part = getattr(block.mlp, "in_proj", None)
    return part if isinstance(part, nn.Module) else None


def has_final_norm(model: HookedModel) -> bool:
    """Whether the model norms its residual stream once more before the unembedding."""
    if isinstance(model, Transformer):
        return model.config.normalization_type != "none"
    return model.cfg.attention_dir == "causal" and "ln_final.hook_out" in model.hook_dict
