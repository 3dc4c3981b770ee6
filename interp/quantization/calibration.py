"""Calibration: sequences that are never evaluated, and what the projections read on them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from interp.activations.massive import parts
from interp.data.repeated import TokenBatch
from interp.inputs import Inputs
from interp.measure import sequence_documents
from interp.models.modes import looking_at
from interp.models.transformer import Transformer
from interp.quantization.projections import Reading, readings

EVERY = 4
"""Every so many documents, or sequences where there are none, one is for calibration."""


def split(inputs: Inputs) -> tuple[Inputs, list[TokenBatch]]:
    """What is evaluated, and the sequences for calibration, of which there may be none.

    Every fourth document calibrates, and the last one where there are two or three; sequences
    that belong to no document are each one. A sequence that is also evaluated does not calibrate.
    """
    documents = sequence_documents(inputs.batches)
    kinds = np.unique(documents)
    chosen = kinds[EVERY - 1 :: EVERY]
    if not len(chosen) and len(kinds) > 1:
        chosen = kinds[-1:]
    calibrates = torch.from_numpy(np.isin(documents, chosen))
    of_batch = calibrates.split([len(batch.tokens) for batch in inputs.batches])
    pairs = list(zip(inputs.batches, of_batch, strict=True))
    evaluated = [_rows(batch, ~own) for batch, own in pairs if not own.all()]
    known = {tokens for batch in evaluated for tokens in _real_tokens(batch)}
    calibrating = []
    for batch, own in pairs:
        new = torch.tensor([tokens not in known for tokens in _real_tokens(batch)]).bool()
        if (own & new).any():
            calibrating.append(_rows(batch, own & new))
    return replace(inputs, batches=evaluated), calibrating


def _real_tokens(batch: TokenBatch) -> list[tuple[int, ...]]:
    """Each sequence without its padding, which another batch may have elsewhere."""
    pairs = zip(batch.tokens, batch.real, strict=True)
    return [tuple(row[real].tolist()) for row, real in pairs]


def _rows(batch: TokenBatch, chosen: Bool[Tensor, " batch"]) -> TokenBatch:
    return batch.each(lambda own: own[chosen.to(own.device)])


@dataclass
class Channels:
    """What the projections of one reading read, channel by channel, over all real tokens.

    `largest` and `mean` are of |x|; `gram` is the sum of x xᵀ over tokens, by which the squared
    error of any rounded weight on these very tokens is exact.
    """

    largest: Float[Tensor, " width"]
    mean: Float[Tensor, " width"]
    gram: Float[Tensor, "width width"] | None


def calibrate(
    model: Transformer, batches: Sequence[TokenBatch], *, grams: bool = False
) -> Iterator[tuple[int, Mapping[Reading, Channels]]]:
    """Each layer in turn, and what its readings read on these sequences.

    The residual stream of all sequences is carried from layer to layer, and of their inputs no more
    is held than of one pass.
    """
    device = model.embed.weight.device
    together = [
        part.each(lambda own: own.to(device))
        for batch in batches
        for _, part in parts(model, batch)
    ]
    with looking_at(model):
        streams = [_entering(model, part) for part in together]
    for layer in range(model.config.n_layers):
        seen: dict[Reading, _Running] = {}
        # Not around the yield: whoever reads a layer would have no gradients meanwhile.
        with looking_at(model):
            for place, part in enumerate(together):
                streams[place] = _through(model, layer, streams[place], part, seen, grams)
        yield layer, {reading: running.channels() for reading, running in seen.items()}


def _entering(model: Transformer, part: TokenBatch) -> Tensor:
    entering = model(part.tokens, attention_mask=part.key_mask, return_type=None, stop_at_layer=0)
    assert isinstance(entering, Tensor)
    return entering


def _through(
    model: Transformer,
    layer: int,
    stream: Float[Tensor, "batch pos d_model"],
    part: TokenBatch,
    seen: dict[Reading, "_Running"],
    grams: bool,
) -> Tensor:
    """The stream behind one layer, whose readings are added to what was seen."""
    handles = []
    real = part.real
    for reading in readings(model.config):
        projection = model.get_submodule(f"blocks.{layer}.{reading.projections[0]}")
        assert isinstance(projection, nn.Linear)
        if not projection.weight.numel():
            continue
        running = seen.setdefault(reading, _Running(projection.in_features, grams, stream))

        def look(module: nn.Module, given: tuple[Tensor, ...], own: _Running = running) -> None:
            own.see(given[0][real])

        handles.append(projection.register_forward_pre_hook(look))
    try:
        behind = model(
            stream,
            attention_mask=part.key_mask,
            return_type=None,
            start_at_layer=layer,
            stop_at_layer=layer + 1 if layer + 1 < model.config.n_layers else None,
        )
    finally:
        for handle in handles:
            handle.remove()
    return stream if behind is None else behind


class _Running:
    """`Channels` while batches go by."""

    def __init__(self, width: int, grams: bool, like: Tensor):
        self.number = 0
        self.largest = torch.zeros(width, device=like.device)
        self.sum = torch.zeros(width, dtype=torch.float64, device=like.device)
        self.gram = torch.zeros(width, width, device=like.device) if grams else None

    def see(self, x: Float[Tensor, "token width"]) -> None:
        x = x.float()
        size = x.abs()
        self.number += len(x)
        self.largest = torch.maximum(self.largest, size.amax(dim=0))
        self.sum += size.sum(dim=0, dtype=torch.float64)
        if self.gram is not None:
            self.gram.addmm_(x.T, x)

    def channels(self) -> Channels:
        mean = (self.sum / self.number).float()
        return Channels(self.largest, mean, self.gram)
