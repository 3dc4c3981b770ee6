"""Heads taken out of a model's weights, and what shows that it is the masked model's equal."""

import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from interp.ablation.interventions import Head, Intervention
from interp.ablation.measuring import Setting, measure_sets
from interp.ablation.methods import Zeroing
from interp.ablation.metrics import METRICS
from interp.ablation.passes import chunks
from interp.errors import AnalysisError
from interp.inputs import Inputs
from interp.models.pruning import model_size, prune_heads
from interp.models.transformer import Transformer
from interp.models.watch import looking_at
from interp.tables import strict_json

SEQUENCES = 4
"""Sequences on which the logits of both models are compared and their passes timed."""
TOLERANCE = 1e-4
"""Of the largest logit: what float32 sums in another order differ by through a deep model (1.4e-5
was seen on SmolLM2's thirty layers, 1e-14 in float64). A wrong head is off by far more."""
TURNS = 5
SECONDS = 0.5
"""Passes are timed for so long at least: single short ones are all noise."""


@dataclass(frozen=True, eq=False)
class Removal:
    """A pruned model beside the one that it was made of.

    Pairs are of the model before and after. `largest_difference` is that of the logits to those of
    the model whose heads are masked, relative to the largest logit, both computed in float32 at
    least. `time_ratio` is the time of a pass after over that before, measured in turns here.
    """

    model: Transformer
    heads: dict[int, tuple[int, ...]]
    """The query heads that were removed, by layer."""
    key_value_heads: dict[int, tuple[int, ...]]
    """The key-value heads that left with them, by layer."""
    parameters: tuple[int, int]
    cache_bytes: tuple[int, int]
    """Of a KV cache, for each token."""
    largest_difference: float
    loss: tuple[float, float]
    loss_masked: float
    inputs: str
    seconds: tuple[float, float]

    @property
    def time_ratio(self) -> float:
        """Time of a pass after over that before."""
        return self.seconds[1] / self.seconds[0]

    def to_json(self) -> str:
        """Everything but the model as strict JSON."""
        facts = {name: value for name, value in vars(self).items() if name != "model"}
        return strict_json({**facts, "time_ratio": self.time_ratio})

    def lines(self) -> list[str]:
        """The removal in words."""
        n_heads = sum(map(len, self.heads.values()))
        n_shared = sum(map(len, self.key_value_heads.values()))
        return [
            f"{n_heads} head{'' if n_heads == 1 else 's'} removed",
            *(f"  layer {layer}: {_listed(own)}" for layer, own in self.heads.items()),
            f"{n_shared} KV head{'' if n_shared == 1 else 's'} left with them"
            + (": one leaves only with every query head that reads it" if not n_shared else ""),
            *(f"  layer {layer}: {_listed(own)}" for layer, own in self.key_value_heads.items()),
            f"parameters {self.parameters[0]:,} -> {self.parameters[1]:,}",
            f"KV cache {self.cache_bytes[0]:,} -> {self.cache_bytes[1]:,} bytes for each token",
            f"largest difference of logits to the masked model: {self.largest_difference:.1e} of "
            "the largest",
            f"loss {self.loss[0]:.4f} -> {self.loss[1]:.4f} nats (masked {self.loss_masked:.4f}); "
            f"{self.inputs}",
            f"time of a pass {self.time_ratio:.2f} times that before, measured here in turns",
        ]


def remove_heads(model: Transformer, inputs: Inputs, heads: Sequence[Head]) -> Removal:
    """A model without these heads, held against the one that has them masked.

    Raises: AnalysisError where the two disagree by more than rounding; ModelError and ShapeError as
    `prune_heads` does.
    """
    pruned = prune_heads(model, heads)
    before, after = model.config, pruned.config
    layers = range(before.n_layers)
    gone = {n: tuple(h for h in before.heads(n) if h not in after.heads(n)) for n in layers}
    shared = {
        n: tuple(h for h in before.key_value_heads(n) if h not in after.key_value_heads(n))
        for n in layers
    }
    removed = tuple((layer, head) for layer, own in gone.items() for head in own)
    if not removed:
        raise AnalysisError("these heads are pruned already")
    setting, zero = Setting(METRICS["loss"]), Zeroing()
    masked = measure_sets(model, inputs, [zero], [removed], setting)[zero.name]
    alone = measure_sets(pruned, inputs, [zero], [], setting)[zero.name]
    difference, seconds = _compared(model, pruned, inputs, removed)
    # NaN is no agreement.
    if not difference <= TOLERANCE:
        raise AnalysisError(
            f"the pruned model's logits differ from the masked one's by {difference:.1e} of the "
            f"largest, more than {TOLERANCE:g}: it is not written"
        )
    sizes = model_size(before), model_size(after)
    width = model.cfg.dtype.itemsize
    return Removal(
        pruned,
        {layer: own for layer, own in gone.items() if own},
        {layer: own for layer, own in shared.items() if own},
        parameters=(sizes[0].parameters, sizes[1].parameters),
        cache_bytes=(sizes[0].cache_numbers * width, sizes[1].cache_numbers * width),
        largest_difference=difference,
        loss=(float(np.nanmean(masked.clean)), float(np.nanmean(alone.clean))),
        loss_masked=float(np.nanmean(masked.ablated[removed])),
        inputs=inputs.description,
        seconds=seconds,
    )


def _compared(
    model: Transformer, pruned: Transformer, inputs: Inputs, heads: tuple[Head, ...]
) -> tuple[float, tuple[float, float]]:
    """The largest relative difference of logits, and the median seconds of a pass of each."""
    batch = next(chunks(model, inputs.batches)).batch.each(itemgetter(slice(SEQUENCES)))
    mask = batch.key_mask
    hooks = Intervention(heads).hooks(model, mask)
    given = {} if mask is None else {"attention_mask": mask}
    with looking_at(model), looking_at(pruned):
        whole, left = _in_float32(model), _in_float32(pruned)
        wanted = whole.run_with_hooks(batch.tokens, fwd_hooks=hooks, **given)
        found = left(batch.tokens, attention_mask=mask)
        assert isinstance(wanted, Tensor)
        assert isinstance(found, Tensor)
        difference = (wanted - found)[batch.real].abs().max() / wanted[batch.real].abs().max()
        seconds: tuple[list[float], list[float]] = ([], [])
        while len(seconds[0]) < TURNS or sum(seconds[0]) < SECONDS:
            for own, times in zip((model, pruned), seconds, strict=True):
                start = time.perf_counter()
                own(batch.tokens, attention_mask=mask)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
    medians = float(np.median(seconds[0])), float(np.median(seconds[1]))
    return float(difference), medians


def _in_float32(model: Transformer) -> Transformer:
    """The model in float32 at least: sums of half precision differ by more than `TOLERANCE`."""
    return model if model.cfg.dtype.itemsize >= 4 else deepcopy(model).float()


def _listed(heads: Sequence[int]) -> str:
    return ", ".join(map(str, heads))
