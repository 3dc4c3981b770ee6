"""Ablated passes over a few sequences: the layers that an ablation changes, and no others.

Our model restarts in the layer where heads are taken away: their own contribution is subtracted
from the unablated residual stream, several heads go through the rest as one batch, and logits are
made only where the metric reads them. Nothing is approximated. Any other model, and ours where the
user's own hooks are on it, runs whole hooked passes instead, which give the same numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from interp.ablation.interventions import (
    Hook,
    Intervention,
    frozen_patterns,
    head_places,
    kept_values,
    site_hook,
    token_places,
)
from interp.ablation.metrics import AnyMetric
from interp.ablation.reading import held, positions_kept, unembedded
from interp.data.repeated import TokenBatch
from interp.measure import sequences_at_once
from interp.models.block import Block
from interp.models.transformer import Transformer
from interp.models.watch import HookedModel

TOKENS_AT_ONCE = 1024
"""Tokens that go through the layers together: enough to keep a processor's products busy (more are
no faster on GPT-2 small's shape), few enough for their activations to stay below a plain forward's
logits."""

Effect = tuple[Float[Tensor, " batch"], Float[Tensor, " batch"] | None]
"""The metric with some heads ablated, and with their direct effect alone."""


@dataclass(frozen=True)
class Chunk:
    """Some sequences of one length: rows of the batch with this number, on the model's device.

    `first` is the number of the first of them among all sequences.
    """

    batch: TokenBatch
    rows: slice
    first: int = 0
    number: int = 0

    @property
    def copies(self) -> int:
        """How many ablations of these sequences go through the model together."""
        return max(1, TOKENS_AT_ONCE // self.batch.tokens.numel())


def chunks(
    model: HookedModel, batches: Sequence[TokenBatch], at_once: int | None = None
) -> Iterator[Chunk]:
    """The sequences in parts that go through the model together, of `at_once` tokens at most.

    Without it they are `TOKENS_AT_ONCE`.
    """
    device = torch.device(str(model.cfg.device))
    first = 0
    for number, batch in enumerate(batches):
        n_rows, n_pos = batch.tokens.shape
        size = min(sequences_at_once(model, n_pos), max(1, (at_once or TOKENS_AT_ONCE) // n_pos))
        for start in range(0, n_rows, size):
            rows = slice(start, start + size)
            there = batch.each(itemgetter(rows)).each(lambda part: part.to(device))
            yield Chunk(there, rows, first + start, number)
        first += n_rows


@runtime_checkable
class Passes(Protocol):
    """A chunk's unablated pass, and what ablations make of it."""

    clean: Float[Tensor, " batch"]
    at_once: int

    def ablated(self, together: Sequence[Intervention], *, direct: bool = False) -> list[Effect]:
        """The metric of every sequence under each of some interventions.

        Those that go together start in the same layer. With `direct` the metric is also told where
        only the heads' direct contribution to the logits has changed, and every later layer writes
        what it wrote; each intervention is within one layer then.
        """
        ...


def passes(
    model: HookedModel,
    chunk: Chunk,
    metric: AnyMetric,
    *,
    frozen: bool = False,
    direct: bool = False,
) -> Passes:
    """The cheapest exact passes that this model allows; `frozen` keeps all patterns."""
    if isinstance(model, Transformer) and restarts(model):
        return RestartedPasses(model, chunk, metric, frozen=frozen)
    return HookedPasses(model, chunk, metric, frozen=frozen, direct=direct)


def restarts(model: HookedModel) -> bool:
    """Whether passes may begin in an ablated layer: ours, with no hook of the user's on it."""
    hooked = any(point.has_hooks() for point in model.hook_dict.values())
    return isinstance(model, Transformer) and not hooked


class RestartedPasses:
    """Passes of our model that begin in the first ablated layer."""

    def __init__(
        self, model: Transformer, chunk: Chunk, metric: AnyMetric, *, frozen: bool = False
    ):
        self._model, self._chunk, self._metric = model, chunk, metric
        self._n_layers = model.cfg.n_layers
        self.at_once = chunk.copies
        self._key_mask = chunk.batch.key_mask
        self._kept = positions_kept(metric, chunk.batch)
        # Autocast would make a low-precision copy of every tile, every time.
        self._unembedding = model.unembed.weight.to(compute_dtype(model))
        self._start = 0
        self._resid: Tensor = model(
            chunk.batch.tokens, attention_mask=self._key_mask, stop_at_layer=0
        )
        self._layer: _Layer | None = None
        self._frozen: Mapping[str, Tensor] | None = None
        if frozen:
            layers = range(self._n_layers)
            names = [site_hook(layer, site) for layer in layers for site in ("q", "k")]
            self._frozen = kept_values(model, chunk.batch, names)
        self._final = self._run(self._resid, 0, [], 1)
        (self.clean,) = self._measure([self._final])

    def ablated(self, together: Sequence[Intervention], *, direct: bool = False) -> list[Effect]:
        first = together[0].layers[0]
        assert all(one.layers[0] == first for one in together)
        layer = self._enter(first)
        hooks = self._hooks(together, after=first)
        if all(one.site == "z" for one in together):
            changes = [self._change(one, layer) for one in together]
            middle = torch.cat([layer.mid[:, -self._width(first) :] + change for change in changes])
            block = self._model.blocks[first]
            assert isinstance(block, Block)
            after = block.after_attention(middle)
            finals = self._run(after, first + 1, hooks, len(together))
        else:
            finals, changes = self._rerun(together, first, layer, hooks)
        n_rows = len(self._final)
        totals = self._measure(list(finals.split(n_rows)))
        if not direct:
            return [(total, None) for total in totals]
        only = [self._final + change[:, -self._kept :] for change in changes]
        return list(zip(totals, self._measure(only), strict=True))

    def _width(self, layer: int) -> int:
        """How many last positions leave a layer."""
        return self._kept if layer == self._n_layers - 1 else self._resid.shape[1]

    def _change(self, one: Intervention, layer: "_Layer") -> Float[Tensor, "batch kept d_model"]:
        """What the layer's attention writes more than before."""
        chosen = head_places(self._model, layer.number, one.in_layer(layer.number), "z")
        width = self._width(layer.number)
        places = token_places(layer.z, self._key_mask)
        stand_in = one.by.at(layer.number, layer.z, places)[:, -width:, chosen]
        difference = stand_in - layer.z[:, -width:, chosen]
        # Under autocast the residual stream is wider than the products.
        return torch.einsum("bphd,hdm->bpm", difference, layer.W_O[chosen]).to(layer.mid.dtype)

    def _rerun(
        self, together: Sequence[Intervention], first: int, layer: "_Layer", hooks: list[Hook]
    ) -> tuple[Tensor, list[Tensor]]:
        """The pass from the layer's own start, whose keys or values have changed."""
        written: list[Tensor] = []

        def keep(attn_out: Tensor, hook: object) -> None:
            written.append(attn_out.clone())

        name = f"blocks.{first}.hook_attn_out"
        watched = [*self._edits(together, first), *hooks, (name, keep)]
        copies = len(together)
        finals = self._run(layer.pre.repeat(copies, 1, 1), first, watched, copies)
        before = layer.attn_out[:, -self._width(first) :]
        return finals, [after - before for after in written[0].split(len(before))]

    def _hooks(self, together: Sequence[Intervention], after: int) -> list[Hook]:
        """What happens in the layers after the one in which the pass starts again."""
        layers = {layer for one in together for layer in one.layers if layer > after}
        hooks = [hook for layer in sorted(layers) for hook in self._edits(together, layer)]
        if self._frozen is not None:
            later = range(after + 1, self._n_layers)
            hooks = [*frozen_patterns(self._frozen, later, copies=len(together)), *hooks]
        return hooks

    def _edits(self, together: Sequence[Intervention], layer: int) -> list[Hook]:
        """Each intervention's edit of its own rows, in one layer."""
        key_mask, n_rows = self._key_mask, len(self._resid)

        def edit(values: Tensor, hook: object) -> Tensor:
            parts = []
            for one, own in zip(together, values.split(n_rows), strict=True):
                if layer in one.layers:
                    own = one.replaced(self._model, layer, own, token_places(own, key_mask))
                parts.append(own)
            return torch.cat(parts)

        return [(site_hook(layer, together[0].site), edit)]

    def _run(
        self, resid: Tensor, start: int, hooks: Sequence[Hook], copies: int
    ) -> Float[Tensor, "rows kept d_model"]:
        """The residual stream behind the last layer, at the positions that are read."""
        if start == self._n_layers:
            return resid
        mask = self._key_mask
        with self._model.hooks(fwd_hooks=list(hooks)):
            final = self._model(
                resid,
                start_at_layer=start,
                stop_at_layer=self._n_layers,
                attention_mask=None if mask is None else mask.repeat(copies, 1),
                last=self._kept,
            )
        return final

    def _enter(self, number: int) -> "_Layer":
        """The unablated pass at one layer; layers come in their order."""
        if self._layer is not None and self._layer.number == number:
            return self._layer
        assert number >= self._start, "interventions are sorted by their first layer"
        model, mask = self._model, self._key_mask
        pre = model(
            self._resid, start_at_layer=self._start, stop_at_layer=number, attention_mask=mask
        )
        seen: dict[str, Tensor] = {}

        def keep(value: Tensor, hook: Any) -> None:
            seen[hook.name] = value.clone()

        names = (site_hook(number, "z"), f"blocks.{number}.hook_attn_out")
        with model.hooks(fwd_hooks=[(name, keep) for name in names]):
            post = model(pre, start_at_layer=number, stop_at_layer=number + 1, attention_mask=mask)
        z, attn_out = (seen[name] for name in names)
        block = model.blocks[number]
        assert isinstance(block, Block)
        self._layer = _Layer(number, pre, pre + attn_out, z, attn_out, block.attn.W_O)
        self._start, self._resid = number + 1, post
        return self._layer

    def _measure(self, finals: Sequence[Tensor]) -> list[Float[Tensor, " batch"]]:
        model, n_pos = self._model, self._chunk.batch.tokens.shape[1]
        return self._metric.measure(
            [unembedded(model, final, self._unembedding, n_pos) for final in finals],
            self._chunk.batch,
            model.cfg.d_vocab,
            clean=unembedded(model, self._final, self._unembedding, n_pos),
            first=self._chunk.first,
        )


@dataclass(frozen=True)
class _Layer:
    """The unablated pass at one layer."""

    number: int
    pre: Float[Tensor, "batch pos d_model"]
    mid: Float[Tensor, "batch pos d_model"]
    z: Float[Tensor, "batch pos n_heads d_head"]
    attn_out: Float[Tensor, "batch pos d_model"]
    W_O: Float[Tensor, "n_heads d_head d_model"]


class HookedPasses:
    """Whole passes with hooks, one for each intervention, of any model."""

    def __init__(
        self,
        model: HookedModel,
        chunk: Chunk,
        metric: AnyMetric,
        *,
        frozen: bool = False,
        direct: bool = False,
    ):
        self._model, self._chunk, self._metric = model, chunk, metric
        self.at_once = 1
        self._layers = range(model.cfg.n_layers)
        names: list[str] = []
        if frozen:
            names += [site_hook(layer, site) for layer in self._layers for site in ("q", "k")]
        if direct:
            names += self._written(0)
        batch = chunk.batch
        kept = kept_values(model, batch, names) if names else {}
        self._kept, self._frozen = kept, frozen
        self._clean = self._logits([])
        (self.clean,) = self._measure([self._clean])

    def ablated(self, together: Sequence[Intervention], *, direct: bool = False) -> list[Effect]:
        return [self._one(one, direct) for one in together]

    def _one(self, one: Intervention, direct: bool) -> Effect:
        hooks = one.hooks(self._model, self._chunk.batch.key_mask)
        first = one.layers[0]
        later = range(first + 1, self._layers.stop)
        kept = [*frozen_patterns(self._kept, later)] if self._frozen else []
        (total,) = self._measure([self._logits([*kept, *hooks])])
        if not direct:
            return total, None
        # Every later layer writes what it wrote, and so does this one's MLP.
        written = [(name, _constant(self._kept[name])) for name in self._written(first)]
        (only,) = self._measure([self._logits([*hooks, *written])])
        return total, only

    def _written(self, after: int) -> list[str]:
        """What layers add to the residual stream behind the attention of one of them."""
        names = [f"blocks.{layer}.hook_mlp_out" for layer in range(after, self._layers.stop)]
        names += [f"blocks.{layer}.hook_attn_out" for layer in range(after + 1, self._layers.stop)]
        return [name for name in names if name in self._model.hook_dict]

    def _logits(self, hooks: Sequence[Hook]) -> Float[Tensor, "batch pos d_vocab"]:
        batch = self._chunk.batch
        given: dict[str, Any] = {}
        if batch.key_mask is not None:
            given["attention_mask"] = batch.key_mask
        logits = self._model.run_with_hooks(batch.tokens, fwd_hooks=list(hooks), **given)
        assert isinstance(logits, Tensor)
        return logits

    def _measure(self, variants: Sequence[Tensor]) -> list[Float[Tensor, " batch"]]:
        return self._metric.measure(
            [held(logits) for logits in variants],
            self._chunk.batch,
            self._model.cfg.d_vocab,
            clean=held(self._clean),
            first=self._chunk.first,
        )


def compute_dtype(model: HookedModel) -> torch.dtype:
    """The dtype in which the model's products are computed, autocast or not."""
    device = torch.device(str(model.cfg.device)).type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return model.cfg.dtype


def _constant(value: Tensor) -> Any:
    return lambda own, hook: value.clone()


def starting_together(interventions: Sequence[Intervention], at_once: int) -> Iterator[list[int]]:
    """The numbers of interventions that may go together, by their first layer, lowest first."""
    by_layer: dict[int, list[int]] = {}
    for number, one in enumerate(interventions):
        by_layer.setdefault(one.layers[0], []).append(number)
    for layer in sorted(by_layer):
        numbers = by_layer[layer]
        for start in range(0, len(numbers), at_once):
            yield numbers[start : start + at_once]
