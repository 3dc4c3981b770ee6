"""Entropy: how widely does a head spread its attention?"""

from jaxtyping import Float
from torch import Tensor

from interp.data.repeated import TokenBatch
from interp.models.layer_attention import LayerAttention
from interp.registry import analysis


@analysis("entropy", unit="nats", null="uniform")
def entropy(
    attention: LayerAttention, batch: TokenBatch
) -> dict[str, Float[Tensor, "batch n_heads"]]:
    """The entropy of what a token attends to.

    The mean of `-sum_j p[q,j] ln p[q,j]` over all real queries, in nats. 0 is all attention on one
    key; a head that spreads its attention evenly has ln(i + 1) at query i, and their mean is the
    null. `relative` is the entropy of each query as a share of the logarithm of its number of keys,
    over the queries that have two at least: 0..1, 1 is even attention. NaN for a sequence without
    such a query.

    Longer sequences allow larger entropies: compare `relative`, or equal lengths. Low entropy says
    that attention is focused, not on what: a pure first-token sink has none.

    Source: Shannon's entropy, as used for heads by Clark et al. 2019 ("What Does BERT Look At?",
    section 3.3). `relative` is ours.
    """
    nats = attention.entropy
    several = attention.n_keys >= 2
    most = attention.n_keys.clamp(min=2).to(nats.dtype).log()[:, None]
    return {
        "entropy": attention.mean(nats, attention.key_mask),
        "relative": attention.mean((nats / most).clamp(max=1.0), several),
    }
