"""Distance: how far does a head look?"""

import torch
from jaxtyping import Float
from torch import Tensor

from interp.data.repeated import TokenBatch
from interp.models.layer_attention import LayerAttention
from interp.registry import analysis


@analysis("distance", unit="tokens", null="uniform")
def distance(
    attention: LayerAttention, batch: TokenBatch
) -> dict[str, Float[Tensor, "batch n_heads"]]:
    """How many tokens lie between a token and what it attends to.

    The mean of `sum_j p[q,j] |q - j|` over all real queries, in real tokens: padding is not
    counted. 0 is a head that looks at the token itself, 1 a previous-token head (a little less:
    the first token has only itself); a causal head that spreads its attention evenly has i / 2 at
    query i, and their mean is the null. `relative` is each query's distance over that of even
    attention to the same keys, averaged over the queries that have two keys at least: 0 is the
    token itself, 1 even attention, 2 a causal head that only looks at the first token. NaN for a
    sequence without such a query.

    It misleads where a head has two targets: half on itself and half on the first token looks like
    the middle. A first-token sink makes any head look long-sighted.

    Source: the attention distance of Vig and Belinkov 2019 ("Analyzing the Structure of Attention
    in a Transformer Language Model"). `relative` is ours.
    """
    tokens = attention.distance
    several = attention.n_keys >= 2
    return {
        "distance": attention.mean(tokens, attention.key_mask),
        "relative": attention.mean(tokens / _even_distance(attention)[:, None], several),
    }


def _even_distance(attention: LayerAttention) -> Float[Tensor, "batch query"]:
    """The mean distance of the keys that each query may attend to; 1 where it is alone."""
    n_keys = attention.n_keys
    after = torch.zeros_like(n_keys)
    if not attention.causal:
        after = attention.key_mask.sum(dim=1, keepdim=True) - 1 - attention.places
    before = n_keys - 1 - after
    # 1 + 2 + .. + m = m (m + 1) / 2 on either side.
    total = (before * (before + 1) + after * (after + 1)) / 2
    return (total / n_keys.clamp(min=1)).where(n_keys >= 2, 1.0)
