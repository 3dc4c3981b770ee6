"""The loss and the residual stream of rounded models, beside those of the model before rounding."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.activations.massive import massive_cells, parts
from interp.data.repeated import TokenBatch
from interp.errors import AnalysisError
from interp.evidence import sequence_statistics
from interp.measure import sequence_documents
from interp.models.modes import looking_at
from interp.models.transformer import Transformer
from interp.quantization.projections import RoundedModel
from interp.quantization.recipes import Recipe

Losses = Float[np.ndarray, " sequence"]


@dataclass(frozen=True)
class Measured:
    """One recipe on all sequences; `sinks` says what was done with the sink tokens.

    `errors` are of the residual stream after each block, relative to its length.
    """

    recipe: Recipe
    sinks: str
    before: Losses
    after: Losses
    documents: np.ndarray | None
    errors: list[float]

    @property
    def n(self) -> int:
        """Sequences that have a next token."""
        return int((~np.isnan(self.after)).sum())

    @property
    def loss_before(self) -> float:
        """Of the model before rounding, in nats."""
        return self._mean(self.before)[0]

    @property
    def perplexity_before(self) -> float:
        """Of the model before rounding."""
        return _exponential(self.loss_before)

    @property
    def loss(self) -> float:
        """In nats per next token, a mean over sequences."""
        return self._mean(self.after)[0]

    @property
    def loss_se(self) -> float:
        """Over documents."""
        return self._mean(self.after)[1]

    @property
    def change(self) -> float:
        """Of the loss, against the model before rounding."""
        return self._mean(self.after - self.before)[0]

    @property
    def change_se(self) -> float:
        """Over documents, of the differences within each."""
        return self._mean(self.after - self.before)[1]

    @property
    def perplexity(self) -> float:
        """e to the loss."""
        return _exponential(self.loss)

    def _mean(self, values: Losses) -> tuple[float, float]:
        mean, error, _ = sequence_statistics(values[None, :, None], self.documents)
        return float(mean[0, 0]), float(error[0, 0])


def sink_tokens(
    model: Transformer, batches: Sequence[TokenBatch], magnitude: float, ratio: float
) -> tuple[list[Bool[Tensor, "_ _"]], str]:
    """The tokens of each batch that are kept where sinks are, and the rule in words.

    They are those with massive activations; where no batch has one, the first of each sequence.
    """
    found = [massive_cells(model, batch, magnitude, ratio) for batch in batches]
    massive = [
        cells.tokens(batch.tokens.shape) for cells, batch in zip(found, batches, strict=True)
    ]
    if any(bool(own.any()) for own in massive):
        return massive, (
            f"tokens with massive activations: above {magnitude:g}, and {ratio:g} times the median "
            "of their layer at least"
        )
    first = [batch.real & (batch.real.long().cumsum(dim=1) == 1) for batch in batches]
    return first, "the first token of each sequence, since no activation is massive"


def measure(
    model: Transformer,
    rounded: RoundedModel,
    alike: Sequence[Recipe],
    batches: Sequence[TokenBatch],
    sinks: Sequence[Bool[Tensor, "_ _"]],
) -> list[Measured]:
    """Several recipes with the same weights, each with its sink tokens rounded and kept.

    Raises: AnalysisError where no sequence has a next token to predict, or for a loss that is not
    finite.
    """
    variants = [
        (recipe, kept)
        for recipe in alike
        for kept in (["rounded", "kept"] if recipe.activations else [""])
    ]
    before: list[np.ndarray] = []
    after: list[list[np.ndarray]] = [[] for _ in variants]
    errors = np.zeros((len(variants), model.config.n_layers))
    n_tokens = 0
    device = model.embed.weight.device
    for batch, own_sinks in zip(batches, sinks, strict=True):
        for first, small in parts(model, batch):
            part = small.each(lambda own: own.to(device))
            plain = part.real & ~own_sinks[first : first + len(part.tokens)].to(device)
            losses, streams = _pass(model, part, "the model before rounding")
            before.append(losses)
            n_tokens += int(plain.sum())
            for place, (recipe, kept) in enumerate(variants):
                tokens = plain if kept == "kept" else part.real
                with rounded.rounding.over(tokens, recipe.activations):
                    losses, own = _pass(rounded.model, part, f"{recipe.scheme} {recipe.bits}")
                after[place].append(losses)
                for layer, (x, y) in enumerate(zip(streams, own, strict=True)):
                    errors[place, layer] += _off(x[plain], y[plain])
    clean = np.concatenate(before)
    if np.isnan(clean).all():
        raise AnalysisError("these sequences have no next token to predict: two tokens are needed")
    documents = sequence_documents(batches)
    # Where every token is a sink token there is no other whose error could be told.
    means = errors / (n_tokens or np.nan)
    return [
        Measured(recipe, kept, clean, np.concatenate(own), documents, list(off))
        for (recipe, kept), own, off in zip(variants, after, means, strict=True)
    ]


def _exponential(loss: float) -> float:
    with np.errstate(over="ignore"):  # above 709 it is infinite
        return float(np.exp(loss))


def _pass(model: Transformer, batch: TokenBatch, whose: str) -> tuple[np.ndarray, list[Tensor]]:
    """Each sequence's mean loss, NaN where it has none, and the stream after each block."""
    streams: list[Tensor] = []

    def keep(value: Tensor, hook: object = None) -> None:
        streams.append(value)

    names = [f"blocks.{layer}.hook_resid_post" for layer in range(model.config.n_layers)]
    with looking_at(model):
        losses = model.run_with_hooks(
            batch.tokens,
            fwd_hooks=[(name, keep) for name in names],
            attention_mask=batch.key_mask,
            return_type="loss",
            loss_per_token=True,
        )
    counted = batch.real[:, 1:] & batch.real[:, :-1]
    sums = losses.where(counted, 0.0).sum(dim=1, dtype=torch.float64)
    number = counted.sum(dim=1)
    means = sums / number.where(number > 0, 1)
    if not means.isfinite().all():
        raise AnalysisError(f"the loss of {whose} is not finite on these tokens")
    return means.where(number > 0, torch.nan).cpu().numpy(), streams


def _off(x: Float[Tensor, "token d_model"], y: Float[Tensor, "token d_model"]) -> float:
    """‖y - x‖ / ‖x‖ of each token, summed."""
    wide = x.double()
    return float(((y.double() - wide).norm(dim=1) / wide.norm(dim=1).clamp(min=1e-30)).sum())
