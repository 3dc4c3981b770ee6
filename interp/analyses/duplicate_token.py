"""Duplicate token: does a head look at the previous copy of the current token?"""

import torch
from jaxtyping import Float
from torch import Tensor

from interp.data.repeated import TokenBatch, latest_copies
from interp.models.layer_attention import LayerAttention
from interp.registry import analysis


@analysis(
    "duplicate-token",
    unit="attention probability",
    null="unrepeated",
    noun="duplicate-token head",
    effect=0.1,
)
def duplicate_token(
    attention: LayerAttention, batch: TokenBatch
) -> dict[str, Float[Tensor, "batch n_heads"]]:
    """Attention from a token to its own previous copy.

    The mean of A[q, c(q)] over the queries q whose token stood earlier in the sequence, where c(q)
    is the latest earlier copy; on `[BOS] r_1..r_n r_1..r_n` these are the n queries of the second
    copy, and query p looks for the key p - n. 0..1: a head that looks only there scores 1, one that
    spreads its attention evenly about 1/n, and induction heads, whose key is the next one, 0.
    `sink` is what the same queries put on the first token.

    A copy directly before the query counts as any other. Earlier copies than the latest do not, so
    that a head that shares its attention among all copies of a frequent word scores low. It
    misleads on blocks of one fixed length, where a head with the fixed offset n scores 1; the null
    (other tokens, the same keys) shows that, and several lengths are drawn. NaN for a sequence
    without any repeat.

    Source: the duplicate token heads of Wang et al. 2022 ("Interpretability in the Wild",
    arXiv 2211.00593), here on random tokens.
    """
    copies = latest_copies(batch.repeating, batch.key_mask)
    queries = (copies >= 0) & attention.key_mask
    first = torch.where(queries, attention.first, -1)
    return {
        "duplicate_token": attention.mean(attention.prob_at(copies), queries),
        "sink": attention.mean(attention.prob_at(first), queries),
    }
