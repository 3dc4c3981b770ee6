"""The model under examination: its tokens, what its hooks hold, and how far rounding may go."""

import math
from collections.abc import Callable, Collection, Sequence
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from interp.doctor.diagnosis import NotApplicable
from interp.doctor.structure import Structure
from interp.errors import AnalysisError
from interp.models.watch import HookedModel

LENGTH = 40
"""Tokens of a sequence: enough for rotary angles to differ, few enough for a laptop."""
LONGEST = 144
"""A window is tried from both sides where that needs no more tokens than this."""

LAZY = ("attn.hook_attn_scores", "attn.hook_pattern", "attn.hook_result")
"""Built only when hooked: with them another path computes the same numbers."""

# Two norms, q and k, scores, softmax, values, output, the MLP's products, two sums.
_ROUNDINGS_PER_LAYER = 10

Hook = Callable[..., Tensor | None]


class Subject:
    """One model on a sequence of random tokens, and another beside it where rows differ."""

    def __init__(
        self,
        model: HookedModel,
        structure: Structure,
        rows: Int[Tensor, "2 pos"],
        find_original: Callable[[], nn.Module],
        *,
        given: bool,
    ):
        self.model = model
        self.structure = structure
        self.rows = rows
        self.tokens = rows[:1]
        self._find_original = find_original
        self.given = given  # whether the caller gave the original
        self.layers = range(model.cfg.n_layers)
        # Of a layer whose heads are all pruned, hooks hold nothing.
        self.attending = [layer for layer in self.layers if model.cfg.heads(layer)]
        self.dtype: torch.dtype = model.cfg.dtype

    # --- running --------------------------------------------------------------------------

    def run(
        self,
        tokens: Int[Tensor, "batch pos"] | None = None,
        hooks: Sequence[tuple[str, Hook]] = (),
        mask: Int[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch pos d_vocab"]:
        """Logits, with temporary hooks, as the model made them."""
        masked = {} if mask is None else {"attention_mask": mask}
        given = self.tokens if tokens is None else tokens
        logits = self.model.run_with_hooks(given, fwd_hooks=list(hooks), **masked)
        assert isinstance(logits, Tensor)
        return logits.detach().cpu()

    def recorded(
        self, names: Collection[str], mask: Int[Tensor, "batch pos"] | None = None, **given: Tensor
    ) -> dict[str, Tensor]:
        """Copies of what hooks hold in one pass, in float64."""
        kept: dict[str, Tensor] = {}

        def keep(name: str) -> Hook:
            def look(value: Tensor, hook: object) -> None:
                kept[name] = value.detach().cpu().double()

            return look

        self.run(hooks=[(name, keep(name)) for name in names], mask=mask, **given)
        return kept

    @cached_property
    def logits(self) -> Float[Tensor, "batch pos d_vocab"]:
        """Logits of the untouched model."""
        return self.run()

    @cached_property
    def values(self) -> dict[str, Tensor]:
        """What every hook of a head or of the residual stream holds, without the lazy ones."""
        return self.recorded(self.names(_READ))

    @cached_property
    def dense(self) -> list[dict[str, Tensor]]:
        """Pattern and z of each layer while its scores and pattern are watched, by kind.

        One layer at a time: dense layers round otherwise than fused ones, and those after them
        would be given other inputs.
        """
        kinds = ("attn.hook_attn_scores", "attn.hook_pattern", "attn.hook_z")
        return [self._watched(layer, kinds, "attn.hook_pattern") for layer in self.layers]

    @cached_property
    def patterns(self) -> list[Float[Tensor, "batch head query key"]]:
        """The attention pattern of each layer."""
        return [held["attn.hook_pattern"] for held in self.dense]

    @cached_property
    def results(self) -> list[dict[str, Tensor]]:
        """What all heads of each layer write together while each head's share is watched.

        By kind: `sum` over heads, `size` the sum of absolute values, and `hook_attn_out`.
        """
        kept = []
        for layer in self.layers:
            kinds = ("attn.hook_result", "hook_attn_out")
            held = self._watched(layer, kinds, "attn.hook_result")
            result = held["attn.hook_result"]
            sums = {"sum": result.sum(2), "size": result.abs().sum(2)}
            kept.append({**sums, "hook_attn_out": held["hook_attn_out"]})
        return kept

    def _watched(self, layer: int, kinds: Sequence[str], needed: str) -> dict[str, Tensor]:
        needed_name = self.name(layer, needed)
        names = {kind: self.name(layer, kind) for kind in kinds if self.has(layer, kind)}
        held = self.recorded(names.values())
        _fired(held, needed_name)
        return {kind: held[name] for kind, name in names.items() if name in held}

    def value(self, layer: int, kind: str) -> Tensor:
        """What `blocks.<layer>.<kind>` holds; NotApplicable where the model has no such hook."""
        return _fired(self.values, self.name(layer, kind))

    # --- names ----------------------------------------------------------------------------

    def has(self, layer: int, kind: str) -> bool:
        """Whether a layer has the hook."""
        return f"blocks.{layer}.{kind}" in self.model.hook_dict

    def name(self, layer: int, kind: str) -> str:
        """The hook's whole name; NotApplicable where the model has no such hook."""
        if not self.has(layer, kind):
            raise NotApplicable(f"the model has no {kind.removeprefix('attn.')}")
        return f"blocks.{layer}.{kind}"

    def names(self, kinds: Sequence[str], layers: Collection[int] | None = None) -> list[str]:
        """The hooks of these kinds that the model has, layer by layer."""
        chosen = self.layers if layers is None else layers
        return [
            f"blocks.{layer}.{kind}" for layer in chosen for kind in kinds if self.has(layer, kind)
        ]

    # --- what queries may see -------------------------------------------------------------

    def allowed(
        self, layer: int, mask: Int[Tensor, "batch pos"] | None = None
    ) -> Bool[Tensor, "#batch 1 query key"]:
        """Which key each query may attend to, by the model's own description."""
        n_pos = self.tokens.shape[1]
        query, key = torch.arange(n_pos)[:, None], torch.arange(n_pos)[None, :]
        allowed = torch.ones(n_pos, n_pos, dtype=torch.bool)
        if self.structure.causal:
            allowed &= key <= query
        window = self.structure.window(layer)
        if window is not None:
            allowed &= query - key < window
        return allowed[None, None] if mask is None else allowed & mask.bool()[:, None, None, :]

    def padded(self, side: str) -> tuple[Int[Tensor, "2 pos"], Int[Tensor, "2 pos"], slice]:
        """Tokens whose second row is shorter, their mask, and where its real tokens stand.

        Padding holds tokens that would matter if they were seen.
        """
        n_pos = self.rows.shape[1]
        n_pads = min(5, n_pos // 2)
        real = slice(n_pads, n_pos) if side == "left" else slice(0, n_pos - n_pads)
        tokens, mask = self.rows.clone(), torch.ones_like(self.rows)
        mask[1] = 0
        mask[1, real] = 1
        tokens[1] = self.rows[0].flip(0)
        tokens[1, real] = self.rows[1, : n_pos - n_pads]
        return tokens, mask, real

    @cached_property
    def original(self) -> nn.Module:
        """The transformers model that this one was made from; NotApplicable where there is none."""
        return self._find_original()

    # --- how far rounding may go ------------------------------------------------------------

    def rounding(self, terms: int = 1) -> float:
        """The relative error that a sum of so many products may have.

        Inputs, product, sum and result are rounded to the model's dtype, each by half an eps at
        most. Products are added up in float32 at least, and there the errors are a random walk:
        six standard deviations of it. Source: Higham and Mary 2019, "A new approach to
        probabilistic rounding error analysis".
        """
        unit = torch.finfo(self.dtype).eps / 2
        wide = min(unit, torch.finfo(torch.float32).eps / 2)
        return 4 * unit + 6 * math.sqrt(terms) * wide

    def score_rounding(self) -> float:
        """The relative error of an attention weight: the absolute error of its score.

        An exponential turns one into the other, so heads with large scores are less exact. A
        score is rounded by its own size, and its sum by the size of the products, which cancel.
        """
        unit = torch.finfo(self.dtype).eps / 2
        stored = summed = 1.0
        for layer in self.attending:
            q, k = self._heads_or_unturned(layer)
            scale = self._scale_or_usual(layer)
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k).abs() * self.allowed(layer)
            sizes = torch.einsum("bqhd,bkhd->bhqk", q.abs(), k.abs()) * self.allowed(layer)
            stored = max(stored, float(scores.max()) * scale)
            summed = max(summed, float(sizes.max()) * scale)
        within = self.rounding(self.model.cfg.d_head) - 4 * unit
        return 4 * unit * stored + within * summed

    def _heads_or_unturned(self, layer: int) -> tuple[Tensor, Tensor]:
        """Queries and keys whose products are as large as those of the model, if not the same."""
        try:
            q, k = (self.heads(layer, which) for which in "qk")
        except NotApplicable:
            q, k = (self.value(layer, f"attn.hook_{which}") for which in "qk")
        return q, self.per_query_head(layer, k)

    def _scale_or_usual(self, layer: int) -> float:
        try:
            return self.structure.scale(layer)
        except NotApplicable:
            return self.model.cfg.d_head**-0.5

    def pass_rounding(self) -> float:
        """The error of a log-prob after a whole pass, in nats.

        Each layer rounds about ten times, to the model's dtype and within sums, and hands its
        error on: a random walk relative to the logits' own spread. Six standard deviations of it
        hold for the largest of all log-probs.
        """
        unit = torch.finfo(self.dtype).eps / 2
        wide = min(unit, torch.finfo(torch.float32).eps / 2)
        roundings = _ROUNDINGS_PER_LAYER * self.model.cfg.n_layers
        one = unit + math.sqrt(self.model.cfg.d_model) * wide
        return 6 * math.sqrt(roundings) * one * float(self.logits.double().std(-1).max())

    # --- heads --------------------------------------------------------------------------------

    def heads(self, layer: int, which: str) -> Float[Tensor, "batch pos heads d_head"]:
        """Queries or keys as their product sees them: after norm and rotary positions.

        Where the model shows no turned ones, they are turned here, as the config states.
        """
        rope = self.structure.rope(layer)
        if rope is not None and self.has(layer, f"attn.hook_rot_{which}"):
            return self.value(layer, f"attn.hook_rot_{which}")
        plain = self.structure.normed(layer, which, self.value(layer, f"attn.hook_{which}"))
        return plain if rope is None else rope.turned(plain, torch.arange(plain.shape[1]))

    def per_query_head(
        self, layer: int, x: Float[Tensor, "batch pos heads d_head"]
    ) -> Float[Tensor, "batch pos n_heads d_head"]:
        """Key-value heads of a layer, each given to the query heads of its group.

        Groups are of consecutive heads, before any was pruned.
        """
        cfg = self.model.cfg
        if layer not in cfg.pruned_heads:  # some bridges show keys that are repeated already
            group = cfg.n_heads // x.shape[2]
            return x[:, :, [head // group for head in range(cfg.n_heads)]]
        group, left = cfg.n_heads // cfg.n_key_value_heads, cfg.key_value_heads(layer)
        return x[:, :, [left.index(head // group) for head in cfg.heads(layer)]]


_READ = (
    "hook_resid_pre",
    "attn.hook_q",
    "attn.hook_k",
    "attn.hook_v",
    "attn.hook_rot_q",
    "attn.hook_rot_k",
    "attn.hook_z",
    "hook_attn_out",
    "hook_mlp_out",
    "hook_resid_post",
)


def _fired(held: dict[str, Tensor], name: str) -> Tensor:
    if name not in held:
        raise AnalysisError(f"{name} is a hook of the model, but never fires")
    return held[name]


def random_tokens(model: HookedModel, structure: Structure, seed: int) -> Int[Tensor, "2 pos"]:
    """Two sequences of random tokens that have a text, led by BOS where the model expects one.

    Raises: AnalysisError for a context too short to tell anything.
    """
    cfg = model.cfg
    windows = [structure.window(layer) for layer in range(cfg.n_layers)]
    beyond = [window + 8 for window in windows if window is not None and window + 8 <= LONGEST]
    n_pos = min(cfg.n_ctx, max([LENGTH, *beyond]))
    if n_pos < 4:
        raise AnalysisError(f"the doctor needs 4 tokens or more, and n_ctx = {cfg.n_ctx}")
    vocabulary = getattr(model, "vocabulary", None)
    known = cfg.d_vocab if vocabulary is None else min(cfg.d_vocab, len(vocabulary))
    special = set() if vocabulary is None else set(vocabulary.special_ids)
    excluded = sorted(special if cfg.bos_token_id is None else special | {cfg.bos_token_id})
    ids = np.setdiff1d(np.arange(known), excluded)
    tokens = np.random.default_rng([seed, 4]).choice(ids, (2, n_pos))
    if cfg.bos_token_id is not None:
        tokens[:, 0] = cfg.bos_token_id
    return torch.from_numpy(tokens)
