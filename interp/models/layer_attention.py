"""The attention of one layer on one batch, as an analysis sees it.

What a head does is told in a number for each query or key. Where the queries and keys are at hand
these come without the n×n pattern (`interp.models.attention`); where a pattern is at hand, because
somebody edits it or because the model computes it anyway, they are read off it.
"""

from collections.abc import Iterator
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.errors import AnalysisError
from interp.models.masks import AttentionMask
from interp.models.patterns import QueryKeys, Weights, places_of
from interp.models.tiles import statistics_dtype
from interp.models.unembedding import Unembedding


class LayerAttention:
    """The attention of one layer on one batch.

    `layer` counts from 0; `key_mask` is True on tokens that count: real ones, without BOS where
    that is left out of the means, though heads attend to it; `causal` says whether queries see
    later keys. `v`, `z` and `W_O` are the layer's values, what its heads read, and each head's
    output weights; they are None where only weights are known, as in a null. Queries are those of
    real tokens: what padding attends to counts nowhere. `unembedding` is the direct path from what
    heads write to the logits, set by who watches a model that has one.
    """

    def __init__(
        self,
        layer: int,
        weights: Weights,
        key_mask: Bool[Tensor, "batch pos"],
        *,
        causal: bool = True,
        window: int | None = None,
        v: Float[Tensor, "batch pos n_key_value_heads d_head"] | None = None,
        z: Float[Tensor, "batch pos n_heads d_head"] | None = None,
        W_O: Float[Tensor, "n_heads d_head d_model"] | None = None,
    ):
        self.layer = layer
        self.key_mask = key_mask
        self.causal = causal
        self.window = window
        self.v = v
        self.z = z
        self.W_O = W_O
        self.unembedding: Unembedding | None = None
        self._weights = weights

    @property
    def n_heads(self) -> int:
        """Query heads."""
        return self._weights.n_heads

    # --- queries --------------------------------------------------------------------------------

    @cached_property
    def places(self) -> Int[Tensor, "batch pos"]:
        """The place of each real token among those of its sequence, from 0; -1 on padding."""
        return places_of(self.key_mask).where(self.key_mask, -1)

    @cached_property
    def first(self) -> Int[Tensor, "batch 1"]:
        """Where each sequence's first real token is."""
        return self.key_mask.long().argmax(dim=1, keepdim=True)

    @cached_property
    def n_keys(self) -> Int[Tensor, "batch query"]:
        """How many keys each query may attend to; 0 on padding."""
        mask = AttentionMask(self.causal, self.key_mask, self.window)
        n_pos = self.key_mask.shape[1]
        return mask.n_allowed(n_pos, n_pos, self.key_mask.device).where(self.key_mask, 0)

    def mean(
        self,
        values: Float[Tensor, "batch n_heads query"],
        queries: Bool[Tensor, "batch query"],
    ) -> Float[Tensor, "batch n_heads"]:
        """The mean over the chosen queries; NaN for a sequence without any."""
        chosen = queries[:, None].to(values.dtype)
        number = chosen.sum(dim=-1)
        total = values.where(queries[:, None], 0.0).sum(dim=-1)
        return total / number.where(number > 0, float("nan"))

    # --- weights --------------------------------------------------------------------------------

    def prob_at(self, keys: Int[Tensor, "batch query"]) -> Float[Tensor, "batch n_heads query"]:
        """Attention of each query to one key of its own; 0 where `keys` is -1."""
        return self._weights.prob_at(keys)

    def expected(
        self, values: Float[Tensor, "batch key *n_heads n_values"]
    ) -> Float[Tensor, "batch n_heads query n_values"]:
        """The mean of each column of `values` under each query's attention.

        Columns are shared by all heads, `[batch, key, n_values]`, or each head's own, `[batch, key,
        n_heads, n_values]`. An indicator of some keys gives the mass on them.
        """
        return self._weights.expected(values)

    @cached_property
    def entropy(self) -> Float[Tensor, "batch n_heads query"]:
        """The entropy of each query's attention in nats, 0 to ln(number of keys)."""
        return self._weights.entropy()

    @cached_property
    def distance(self) -> Float[Tensor, "batch n_heads query"]:
        """The mean distance from each query to what it attends to, in real tokens."""
        place = places_of(self.key_mask)
        if self.causal:  # every key lies behind: the mean of differences is one of means
            # The mass is 1 but in an edited pattern, and rounds as the place does.
            at, mass = self._weights.place_and_mass(place).unbind(dim=3)
            return (place[:, None] * mass - at).clamp(min=0.0)
        parts = []
        for rows, keys, weights in self.rows():
            apart = (place[:, rows, None] - place[:, None, keys]).abs().to(weights.dtype)
            parts.append((weights * apart[:, None]).sum(dim=-1))
        return torch.cat(parts, dim=2)

    def received(self, weights: Float[Tensor, "batch query"]) -> Float[Tensor, "batch n_heads key"]:
        """The attention each key gets, summed over queries with their `weights` (0 or more)."""
        return self._weights.received(weights)

    @cached_property
    def strongest(
        self,
    ) -> tuple[Float[Tensor, "batch n_heads query"], Int[Tensor, "batch n_heads query"]]:
        """The largest weight of each query, and the key it is on, the first of equals."""
        return self._weights.strongest()

    def rows(self) -> Iterator[tuple[slice, slice, Float[Tensor, "batch n_heads rows keys"]]]:
        """The pattern, a few rows at a time: which queries, which keys, and the weights.

        For what no other method gives; slower than they are, and as lean. Keys outside the second
        slice get nothing from these queries.
        """
        return self._weights.rows()

    # --- what the heads write -------------------------------------------------------------------

    @property
    def has_values(self) -> bool:
        """Whether values, outputs and output weights are known, and not weights alone."""
        return self.v is not None and self.z is not None and self.W_O is not None

    def value_norms(self) -> Float[Tensor, "batch key n_heads"]:
        """The length of what each head would write if it read one key alone: ‖v_j W_O‖.

        Raises: AnalysisError where only weights are known.
        """
        v, _, W_O = self._written()
        v = v.unflatten(2, (v.shape[2], 1)).expand(-1, -1, -1, len(W_O) // v.shape[2], -1)
        return _lengths(v.flatten(2, 3), W_O)

    def output_norms(self) -> Float[Tensor, "batch pos n_heads"]:
        """The length of what each head adds to the residual stream: ‖z W_O‖.

        Raises: AnalysisError where only weights are known.
        """
        _, z, W_O = self._written()
        return _lengths(z, W_O)

    def _written(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.v is None or self.z is None or self.W_O is None:
            raise AnalysisError("only attention weights are known here, and no values")
        return self.v, self.z, self.W_O


def _lengths(
    read: Float[Tensor, "batch pos n_heads d_head"], W_O: Float[Tensor, "n_heads d_head d_model"]
) -> Float[Tensor, "batch pos n_heads"]:
    """‖x W_O‖ without a vector as wide as the model for every head."""
    dtype = statistics_dtype(read.dtype)
    gram = torch.einsum("hdm,hem->hde", W_O.double(), W_O.double()).to(dtype)
    read = read.to(dtype)
    squared = (torch.einsum("bphd,hde->bphe", read, gram) * read).sum(dim=-1)
    return squared.clamp(min=0.0).sqrt()


def uniform_attention(
    key_mask: Bool[Tensor, "batch pos"],
    *,
    causal: bool = True,
    window: int | None = None,
) -> LayerAttention:
    """What a head without any preference does: every allowed key gets the same share."""
    nothing = torch.zeros(*key_mask.shape, 1, 1, device=key_mask.device)
    mask = AttentionMask(causal, key_mask, window)
    weights = QueryKeys(nothing, nothing, 1.0, mask)
    return LayerAttention(0, weights, key_mask, causal=causal, window=window)
