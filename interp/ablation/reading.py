"""Where the logits that a metric reads come from: unembedded as they are asked for, or held.

Nothing is made at positions that no metric reads, nor kept once it was read.
"""

from jaxtyping import Float, Int
from torch import Tensor

from interp.ablation.metrics import AnyMetric, LogitsAt
from interp.data.repeated import TokenBatch
from interp.models.place_logits import HeldLogits, PlaceLogits, UnembeddedLogits
from interp.models.transformer import Transformer


def positions_kept(metric: AnyMetric, batch: TokenBatch) -> int:
    """How many last positions have to leave the last layer, one at least.

    A causal model's logits at a place need no later one, and the last layer no earlier query.
    """
    read = metric.reads(batch).any(dim=0).nonzero()[:, 0]
    return batch.tokens.shape[1] - int(read[0]) if len(read) else 1


def unembedded(
    model: Transformer,
    final: Float[Tensor, "batch kept d_model"],
    weight: Float[Tensor, "d_vocab d_model"],
    n_pos: int,
) -> LogitsAt:
    """The logits of a residual stream behind the last layer, at the last of `n_pos` positions.

    `weight` is the unembedding's, in the dtype of the product.
    """
    skipped = n_pos - final.shape[1]

    def at(rows: Int[Tensor, " place"], columns: Int[Tensor, " place"]) -> PlaceLogits:
        there = model.ln_final(final[rows, columns - skipped][None])[0]
        return UnembeddedLogits(there.to(weight.dtype), weight, model.unembed.bias)

    return at


def held(logits: Float[Tensor, "batch pos d_vocab"]) -> LogitsAt:
    """Logits of every position, which were made already."""
    return lambda rows, columns: HeldLogits(logits[rows, columns])
