"""What is measured while a model trains, and of every checkpoint of a series.

The sequences are fixed before the first model and the same for every seed, so that curves differ by
the model alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.config import ModelConfig, ProbeConfig
from interp.data.repeated import TokenBatch, predictable_pairs, repeated_tokens
from interp.evidence import sequence_statistics
from interp.measure import head_values, sequences_at_once
from interp.models.watch import HookedModel, looking_at

HEAD_SEQUENCES = 32
"""Held-out sequences behind the previous-token and sink scores; their patterns cost more than the
losses of as many sequences, and sharpen less."""


@dataclass(frozen=True)
class Measurement:
    """The numbers of one moment of training."""

    metrics: dict[str, float]
    heads: list[dict[str, int | float]]


class SequenceProbe:
    """Fixed sequences, and what they say of any model with their vocabulary.

    `first_copy_loss` and `second_copy_loss` are on repeated random tokens, on which heads are
    scored by `induction`. With held-out sequences, `loss` is their loss; `icl_score` the mean loss
    at the late positions minus that at the early ones (below 0: context helps); `predictable_loss`
    and `other_loss` split their tokens by whether an induction rule predicts them,
    `predictable_share` is the share of those. Heads are scored by `previous_token` and `sink` on
    held-out sequences where there are some, on the repeated tokens otherwise. Losses are in nats,
    scores attention probabilities.
    """

    def __init__(
        self,
        repeated: Sequence[TokenBatch],
        held_out: Int[Tensor, "b pos"] | None = None,
        icl: "IclScore | None" = None,
    ):
        assert (held_out is None) == (icl is None)
        self.repeated = list(repeated)
        self.held_out = held_out
        self.icl = icl
        self.for_heads = self.repeated
        if held_out is not None:
            chosen = held_out[:HEAD_SEQUENCES]
            self.for_heads = [TokenBatch(chosen, torch.full_like(chosen, -1))]
            self.predictable = predictable_pairs(held_out)

    def measure(self, model: HookedModel) -> Measurement:
        """The metrics of the model and the scores of its heads; the model's mode is kept."""
        with looking_at(model):
            metrics = self._held_out_losses(model)
            first, second = zip(
                *(copy_losses(model, batch) for batch in self.repeated), strict=True
            )
            scores = head_values(model, ["induction"], self.repeated)
            scores |= head_values(model, ["previous-token", "sinks"], self.for_heads)
        metrics["first_copy_loss"] = float(np.mean(first))
        metrics["second_copy_loss"] = float(np.mean(second))
        return Measurement(metrics, _head_rows(scores, model))

    def _held_out_losses(self, model: HookedModel) -> dict[str, float]:
        if self.held_out is None or self.icl is None:
            return {}
        losses = token_losses(model, self.held_out)
        return {
            "loss": losses.mean().item(),
            "icl_score": self.icl(losses).mean().item(),
            "predictable_loss": losses[self.predictable].mean().item(),
            "other_loss": losses[~self.predictable].mean().item(),
            "predictable_share": self.predictable.double().mean().item(),
        }


class Probe(SequenceProbe):
    """The probe of a training run: repeated tokens and positions as its config has them."""

    def __init__(self, config: ProbeConfig, model: ModelConfig, held_out: Int[Tensor, "b pos"]):
        super().__init__(
            [
                repeated_tokens(
                    config.repeats, block, model.d_vocab, seed=0, bos=model.bos_token_id
                )
                for block in config.blocks
            ],
            held_out,
            IclScore(config.icl_early, config.icl_late),
        )


@dataclass(frozen=True)
class IclScore:
    """The in-context-learning score of each sequence: late loss minus early loss, in nats.

    Positions are inclusive, and position p is where token p is predicted. Below 0 the context
    helps. Source: Olsson et al. 2022, who take token 500 minus token 50.
    """

    early: tuple[int, int]
    late: tuple[int, int]

    def __call__(self, losses: Float[Tensor, "batch losses"]) -> Float[Tensor, " batch"]:
        return self._mean(losses, self.late) - self._mean(losses, self.early)

    def _mean(
        self, losses: Float[Tensor, "batch losses"], positions: tuple[int, int]
    ) -> Float[Tensor, " batch"]:
        # Token p is predicted from position p - 1, which is the index of its loss.
        return losses[:, positions[0] - 1 : positions[1]].mean(dim=1)


def token_losses(
    model: HookedModel, tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "batch losses"]:
    """The loss of every next token, in nats, on the CPU; element p belongs to token p + 1."""
    device = torch.device(str(model.cfg.device))
    parts = []
    for chunk in tokens.split(sequences_at_once(model, tokens.shape[1])):
        losses = model.run_with_hooks(
            chunk.to(device), fwd_hooks=[], return_type="loss", loss_per_token=True
        )
        assert isinstance(losses, Tensor)
        parts.append(losses.cpu())
    return torch.cat(parts)


def copy_losses(model: HookedModel, batch: TokenBatch) -> tuple[float, float]:
    """Mean loss on the first copy, and on the part of the second that can be predicted.

    The first token of the second copy cannot: nothing says that the block repeats. That leaves
    n - 1 losses a sequence.
    """
    return split_copies(token_losses(model, batch.tokens), batch)


def split_copies(losses: Float[Tensor, "batch losses"], batch: TokenBatch) -> tuple[float, float]:
    """`copy_losses` from per-token losses."""
    assert batch.block is not None
    start = int(batch.bos)
    first = losses[:, max(start - 1, 0) : start + batch.block - 1]
    second = losses[:, start + batch.block : start + 2 * batch.block - 1]
    return first.mean().item(), second.mean().item()


def _head_rows(
    values: Mapping[str, Float[np.ndarray, "layer _ n_heads"]], model: HookedModel
) -> list[dict[str, int | float]]:
    means = {name: sequence_statistics(scores)[0] for name, scores in values.items()}
    return [
        {
            "layer": layer,
            "head": head,
            "induction": float(means["induction"][layer, head]),
            "previous_token": float(means["previous_token"][layer, head]),
            "sink": float(means["sinks"][layer, head]),
        }
        for layer in range(model.cfg.n_layers)
        for head in model.cfg.heads(layer)
    ]
