"""The direct path from what a head writes to the logits: final norm's gain, then unembedding.

The final norm divides by a scale that depends on the whole residual stream. It is left out, so
logits of the direct path are known up to one positive factor for each query.
"""

from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Float, Int
from torch import Tensor

from interp.models.tiles import statistics_dtype


@dataclass(frozen=True)
class Unembedding:
    """The unembedding behind the final norm's gain; `centred` where the norm takes off a mean."""

    weight: Float[Tensor, "d_vocab d_model"]
    gain: Float[Tensor, " d_model"]
    centred: bool

    @property
    def d_vocab(self) -> int:
        """Rows of the unembedding, which may be more than there are tokens."""
        return len(self.weight)

    @cached_property
    def _mean(self) -> Float[Tensor, " d_model"]:
        return self.weight.mean(dim=0, dtype=statistics_dtype(self.weight.dtype))

    def directions(self, tokens: Int[Tensor, "*places"]) -> Float[Tensor, "*places d_model"]:
        """What raises each token's logit above the mean of the vocabulary.

        The product of a vector of the residual stream with a direction is the logit that the
        vector alone gives to the token, less the mean of the logits that it gives to all, times
        the final norm's scale. Biases are not part of it.
        """
        raised = (self.weight[tokens].to(self._mean.dtype) - self._mean) * self.gain
        return raised - raised.mean(dim=-1, keepdim=True) if self.centred else raised
