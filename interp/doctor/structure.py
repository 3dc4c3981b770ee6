"""What a model says of itself, read from its config and modules and never from its hooks.

The identities hold the hooks to this.
"""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn

from interp.doctor.rope import Rope


@runtime_checkable
class Structure(Protocol):
    """The facts about a model that its hooks have to agree with."""

    causal: bool
    experts: bool
    """Whether tokens are sorted by expert, so that one changes how the products of others round."""

    def window(self, layer: int) -> int | None:
        """How many keys a query may attend to, itself included; None for all."""
        ...

    def scale(self, layer: int) -> float:
        """What the products of queries and keys are multiplied by; NotApplicable where unstated."""
        ...

    def softmax_term(self, layer: int) -> str | None:
        """What stands in the softmax beside the scaled products, in words; None for nothing."""
        ...

    def sink(self, layer: int) -> Float[Tensor, " n_heads"] | None:
        """The sink logit of each head that the model says it has, in float64; None without."""
        ...

    def gated(self, layer: int) -> bool:
        """Whether something multiplies what heads read before `hook_z`."""
        ...

    def missing_mass(self, layer: int) -> str | None:
        """Why the weights of a row may sum to less than 1; None where they may not."""
        ...

    def rope(self, layer: int) -> Rope | None:
        """Rotary positions; None without, NotApplicable where they cannot be checked."""
        ...

    def normed(
        self, layer: int, which: str, x: Float[Tensor, "batch pos heads d_head"]
    ) -> Float[Tensor, "batch pos heads d_head"]:
        """Queries (`which` = "q") or keys ("k") after their own norm; `x` where there is none."""
        ...

    def head_norm(self, layer: int) -> bool:
        """Whether queries and keys have a norm of their own."""
        ...

    def biases(self, layer: int) -> list[str]:
        """The projections that have a bias, of q, k, v, o and mlp."""
        ...

    def norms(self, layer: int) -> Mapping[str, nn.Module]:
        """The norms of a block that may stand between a branch and the stream, by name."""
        ...

    def unembedded(
        self, resid: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_vocab"]:
        """Logits of a residual stream; NotApplicable where a head of another kind reads it."""
        ...

    def output(
        self, layer: int
    ) -> tuple[Float[Tensor, "n_heads d_head d_model"], Float[Tensor, " d_model"]]:
        """The output weights of a layer's heads, and the bias that belongs to none of them.

        As they reach the residual stream, where a model scales what it adds to it.
        """
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Every parameter by name."""
        ...

    def weights_of(self, original: nn.Module) -> Mapping[str, Tensor]:
        """The parameters of the transformers model that this one should equal, by our names."""
        ...
