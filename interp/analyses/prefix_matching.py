"""Prefix matching: how much a head looks at what followed any earlier copy of the token."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.data.copies import COPIES, copied_tokens, uncopied_tokens
from interp.data.drawing import Drawing
from interp.data.repeated import TokenBatch
from interp.models.layer_attention import LayerAttention
from interp.registry import analysis

FOUR_COPIES = Drawing(
    copied_tokens,
    uncopied_tokens,
    blocks=(25,),
    batch=10,
    length=lambda block: COPIES * block,
    words="distinct random tokens four times",
)
"""The published sequences: 25 tokens and BOS, so 101 positions, in ten examples."""


@analysis(
    "prefix-matching",
    unit="attention probability",
    null="unrepeated",
    noun="prefix-matching head",
    effect=0.1,
    drawing=FOUR_COPIES,
)
def prefix_matching(
    attention: LayerAttention, batch: TokenBatch
) -> dict[str, Float[Tensor, "batch n_heads"]]:
    """Attention from a token to what followed its earlier copies, all of them together.

    The sum of A[q, k] over the induction targets k of the query q, meaned over the queries that
    have a target: key k is one where the token before it is the query's own and k comes before q.
    On `[BOS]` and four copies of a block these are the queries of copies 2 to 4, with 1 to 3 keys.
    0..1: a head that looks at targets only scores 1, whichever of them it prefers, a first-token
    sink 0, and one that spreads its attention evenly the share of targets among its keys, about
    0.03 on the drawn sequences.

    It differs from `induction` in that each earlier copy counts, not only the latest. We sum over
    the copies of a query. The paper speaks of the average of all such entries, which here could not
    exceed 1/2; the scores that it prints reach 0.94. The paper leaves out the most and the least
    common tokens; here every token but BOS and special ones is drawn, since no frequencies are
    known. It misleads on one block length, where a head with a fixed offset of 24 scores 1: the
    null (other tokens, the same keys) shows that, as does `--block` with several lengths. A copy
    directly before the query has the query as its successor, and is not counted. NaN for a sequence
    without any target.

    Source: Olsson et al. 2022 ("In-context Learning and Induction Heads", arXiv 2209.11895), head
    activation evaluators, prefix matching.
    """
    same = batch.repeating
    sums, queries = [], []
    for rows, keys, weights in attention.rows():
        target = _targets(same, attention.key_mask, rows, keys)
        sums.append(torch.einsum("bhrk,brk->bhr", weights, target.to(weights.dtype)))
        queries.append(target.any(dim=-1))
    return {"prefix_matching": attention.mean(torch.cat(sums, dim=2), torch.cat(queries, dim=1))}


def _targets(
    tokens: Tensor, real: Bool[Tensor, "batch pos"], rows: slice, keys: slice
) -> Bool[Tensor, "batch rows keys"]:
    """Whether each key follows an earlier copy of the token of each query, and is not the query."""
    place = torch.arange(tokens.shape[1], device=tokens.device)
    # Key 0 follows nothing: looking at place -1 would wrap around to the last token.
    before = (place[keys] - 1).clamp(min=0)
    follows = (place[keys] > 0) & real[:, keys] & real[:, before]
    same = tokens[:, rows, None] == tokens[:, None, before]
    earlier = place[rows, None] > place[None, keys]
    return same & earlier & follows[:, None] & real[:, rows, None]
