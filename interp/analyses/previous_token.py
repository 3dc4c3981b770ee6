"""Previous token: does a head look one token back?"""

import torch
from jaxtyping import Float
from torch import Tensor

from interp.data.repeated import TokenBatch
from interp.models.layer_attention import LayerAttention
from interp.registry import analysis


@analysis(
    "previous-token",
    unit="attention probability",
    null="uniform",
    noun="previous-token head",
    effect=0.3,
)
def previous_token(
    attention: LayerAttention, batch: TokenBatch
) -> dict[str, Float[Tensor, "batch n_heads"]]:
    """Attention from a token to the token before it.

    The mean of `pattern[i, i - 1]` over the queries that have a real token before them. 0..1: 1 is
    a perfect previous-token head; a head that spreads its attention evenly scores the mean of
    1 / (i + 1), which is large on short sequences and is given as the null.

    It misleads where neighbours are alike: on a text of one repeated token no head can tell them
    apart.

    Source: Olsson et al. 2022, "In-context Learning and Induction Heads", previous-token score.
    """
    real = attention.key_mask
    index = torch.arange(real.shape[1], device=real.device)
    queries = real & torch.cat((torch.zeros_like(real[:, :1]), real[:, :-1]), dim=1)
    keys = torch.where(queries, index - 1, -1)
    return {"previous_token": attention.mean(attention.prob_at(keys), queries)}
