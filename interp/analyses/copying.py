"""Copying: does a head raise the logits of the tokens that it attends to?"""

import math
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.data.copies import random_block
from interp.data.drawing import Drawing
from interp.data.repeated import TokenBatch, latest_copies
from interp.errors import AnalysisError
from interp.models.layer_attention import LayerAttention
from interp.registry import analysis

ONE_BLOCK = Drawing(
    random_block,
    random_block,
    blocks=(25,),
    batch=10,
    length=lambda block: block,
    words="distinct random tokens once",
    bos=False,
)
"""The published sequences: 25 tokens without a start token, in ten examples."""


@analysis(
    "copying",
    unit="raised-logit share, rescaled",
    null="own",
    drawing=ONE_BLOCK,
)
def copying(
    attention: LayerAttention,
    batch: TokenBatch,
    *,
    queries: Annotated[int, "of a longer sequence so many, evenly spread, are looked at"] = 256,
) -> dict[str, Float[Tensor, "batch n_heads"]]:
    """How far a head raises the logits of what it attends to above those of the other tokens.

    The head's own output z W_O at a query goes straight through the unembedding: the gain of the
    final norm is applied, its scale, which cancels, and all biases are not. Of these logits the
    mean over the vocabulary is taken off and negative rest becomes 0. The ratio is

        sum_k A[q, k] raised[q, token_k] / sum_t raised[q, t],   t the tokens of the sequence,

    and the score 2 * ratio - 1, meaned over queries, of which long sequences have only some looked
    at: each costs a logit for every token. -1..1: 1 where all that is raised in the
    sample is the token attended to, -1 where attended tokens are never raised. A query that raises
    no token of its sample counts as -1; one whose head writes nothing is left out. The null is the
    same ratio for tokens that the model did not see in these places: each token of the vocabulary
    stands for another one, drawn once. `one_key` is the same score for what the head would write if
    it read one key alone, v W_O, meaned over keys, and `one_key_null` its null: they do not depend
    on where the head looks.

    The paper puts the ratio between 0 and 1/2 before it rescales it to the same -1..1. By the
    definition above it reaches 1, and no reading that we know has the bound 1/2, so that our
    numbers are not comparable with printed ones.

    It misleads for heads that spread their attention: one that copies m tokens alike at once has
    the ratio 1/m and scores 2/m - 1, near the null; `one_key` shows what it would copy. In one
    block nothing repeats, so that induction heads have nothing to look at and mostly park on the
    first token. Only the direct path counts: a head whose output later layers turn into copying
    scores low. A head that raises every frequent token scores as its null does.

    Raises: AnalysisError for an encoder, or a model with norms after its attention, whose heads
    have no direct path.

    Source: Olsson et al. 2022 ("In-context Learning and Induction Heads", arXiv 2209.11895), head
    activation evaluators, copying.
    """
    unembedding, v, z, W_O = attention.unembedding, attention.v, attention.z, attention.W_O
    if unembedding is None or v is None or z is None or W_O is None:
        raise AnalysisError(
            "copying reads logits off what a head writes: in this model no direct path leads from "
            "its heads to the logits (an encoder, or norms after attention)"
        )
    counted = (latest_copies(batch.tokens, batch.key_mask) < 0) & attention.key_mask
    v = v.repeat_interleave(attention.n_heads // v.shape[2], dim=2)
    others = _other_tokens(unembedding.d_vocab)[batch.tokens.cpu()].to(z.device)
    if queries < 1:
        raise AnalysisError(f"queries = {queries}: at least one is needed")
    n_pos = batch.tokens.shape[1]
    chosen = torch.linspace(0, n_pos - 1, min(n_pos, queries), device=z.device).long()
    real = attention.key_mask[:, chosen]
    columns = {}
    for end, tokens in (("", batch.tokens), ("_null", others)):
        directions = unembedding.directions(tokens)
        read = torch.einsum("hdm,bkm->bhdk", W_O.to(directions.dtype), directions)
        written, alone = _ratios(attention, read, v, z, counted, chosen)
        columns[f"copying{end}"] = _rescaled(written, real)
        columns[f"one_key{end}"] = _rescaled(alone, real)
    return columns


def _ratios(
    attention: LayerAttention,
    read: Float[Tensor, "batch n_heads d_head key"],
    v: Float[Tensor, "batch key n_heads d_head"],
    z: Float[Tensor, "batch query n_heads d_head"],
    counted: Bool[Tensor, "batch key"],
    chosen: Int[Tensor, " chosen"],
) -> tuple[Float[Tensor, "batch n_heads chosen"], Float[Tensor, "batch n_heads chosen"]]:
    """The ratio of what chosen queries write, and of what as keys they would; NaN for nothing.

    `read` turns what a head read into logits of the tokens, of which those `counted` differ.
    """
    written: list[Tensor] = []
    alone: list[Tensor] = []
    for rows, keys, weights in attention.rows():
        own = chosen[(chosen >= rows.start) & (chosen < rows.stop)]
        for x, parts in ((z, written), (v, alone)):
            logits = torch.einsum("bqhd,bhdk->bhqk", x[:, own].to(read.dtype), read)
            nothing = (logits == 0).all(dim=-1)
            raised = logits.relu_()
            total = (raised * counted[:, None, None]).sum(dim=-1)
            if x is z:
                looked_at = (weights[:, :, own - rows.start] * raised[..., keys]).sum(dim=-1)
            else:
                looked_at = raised[..., own].diagonal(dim1=2, dim2=3)
            parts.append((looked_at / total.where(total > 0, 1.0)).masked_fill(nothing, math.nan))
    return torch.cat(written, dim=2), torch.cat(alone, dim=2)


def _rescaled(
    ratio: Float[Tensor, "batch n_heads pos"], real: Bool[Tensor, "batch pos"]
) -> Float[Tensor, "batch n_heads"]:
    """The mean over real tokens where it is defined, moved from 0..1 to -1..1."""
    return 2 * ratio.masked_fill(~real[:, None], math.nan).nanmean(dim=-1) - 1


def _other_tokens(d_vocab: int) -> Int[Tensor, " d_vocab"]:
    """For each token another one: its successor in a random order of the vocabulary."""
    order = torch.from_numpy(np.random.default_rng([0, 8]).permutation(d_vocab))
    other = torch.empty_like(order)
    other[order] = order.roll(-1)
    return other
