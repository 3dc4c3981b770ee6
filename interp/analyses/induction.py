"""Induction: does a head look at what followed the current token last time?"""

import torch
from jaxtyping import Float
from torch import Tensor

from interp.data.repeated import TokenBatch
from interp.models.layer_attention import LayerAttention
from interp.registry import analysis


@analysis(
    "induction",
    unit="attention probability",
    null="unrepeated",
    noun="induction head",
    effect=0.1,
)
def induction(
    attention: LayerAttention, batch: TokenBatch
) -> dict[str, Float[Tensor, "batch n_heads"]]:
    """Attention from a token to the token after its previous copy.

    The mean, over the queries that have an earlier copy, of the attention to the induction target;
    on `[BOS] r_1..r_n r_1..r_n` these are the n queries of the second copy, and query p has the
    target p - n + 1. 0..1: a perfect induction head scores 1, a head that spreads its attention
    evenly about 1/n, a first-token sink 0. First-copy queries do not count, whatever they do.
    `sink` is what the same queries put on the first token: most induction heads park their
    attention there when there is nothing to copy.

    It misleads on blocks of one fixed length, where a head with the fixed offset n - 1 scores 1;
    the null (other tokens, the same offsets) shows that, and several lengths are drawn. Attention
    is not influence: a head that looks there may write nothing. NaN for a sequence without any
    repeat.

    Source: the stripe of Olsson et al. 2022 ("In-context Learning and Induction Heads", prefix
    matching), for two copies, as in TransformerLens's main demo.
    """
    queries = (batch.targets >= 0) & attention.key_mask
    first = torch.where(queries, attention.first, -1)
    return {
        "induction": attention.mean(attention.prob_at(batch.targets), queries),
        "sink": attention.mean(attention.prob_at(first), queries),
    }
