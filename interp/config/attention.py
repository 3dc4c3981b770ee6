"""The table `[model.attention]`, by kind of attention: grouped heads, or latent ones."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from interp.config.table import FieldInfo, Table

Index = Annotated[int, Field(ge=0)]
SinkLogit = Literal["none", "zero", "learned"]


class GroupedAttentionConfig(Table):
    """Attention whose query heads share key-value heads: MHA, GQA and MQA by one number.

    `n_key_value_heads` equal to `n_heads` is MHA, 1 is MQA, anything between is GQA. `d_head` is
    independent of `d_model / n_heads`, which is only its default.
    """

    kind: Literal["grouped"] = "grouped"
    n_heads: PositiveInt
    n_key_value_heads: Annotated[PositiveInt | None, Field(validate_default=True)] = None
    d_head: PositiveInt | None = None
    bias: bool = True
    """Biases of queries, keys and values, and of the output unless `output_bias` differs."""
    output_bias: Annotated[bool | None, Field(validate_default=True)] = None
    qk_norm: bool = False
    """RMSNorm of every query and key head, with gains shared by the heads, before rotary."""
    scale: PositiveFloat | None = None
    """What the dot products are multiplied by; 1/sqrt(d_head) where not given."""
    scale_by_inverse_layer: bool = False
    """Divide the scale by the layer's number, counted from 1."""
    window: PositiveInt | None = None
    """How many keys a query may attend to, the latest ones and itself; all where not given."""
    windowed_layers: tuple[Index, ...] | None = None
    """The layers that have the window; every layer where not given."""
    sink_logit: SinkLogit = "none"
    """A term of the softmax's denominator that no key has, one a head: `zero` is a logit of 0,
    which adds 1 ("softmax plus one"), `learned` one trained from 0 on, as in gpt-oss."""
    gated_output: bool = False
    """Multiply what each head reads by a sigmoid of the layer's input, one a head and token."""
    smeared_keys: bool = False
    """Mix each key with the one before it, by one trained share a head (Olsson et al. 2022)."""
    pruned_heads: dict[Index, tuple[Index, ...]] = Field(
        default_factory=dict, exclude_if=lambda pruned: not pruned
    )
    """The query heads that each layer lacks, of `n_heads`: the others keep their numbers. A
    key-value head is gone once every query head that reads it is."""

    @field_validator("pruned_heads")
    @classmethod
    def _heads_of_the_model(
        cls, value: dict[int, tuple[int, ...]], info: FieldInfo
    ) -> dict[int, tuple[int, ...]]:
        n_heads = info.data.get("n_heads")
        for layer, heads in value.items():
            if isinstance(n_heads, int) and max(heads, default=0) >= n_heads:
                raise ValueError(f"{layer} holds head {max(heads)}, beyond n_heads = {n_heads}")
        return {layer: tuple(sorted(set(value[layer]))) for layer in sorted(value) if value[layer]}

    @field_validator("output_bias")
    @classmethod
    def _follows_bias(cls, value: bool | None, info: FieldInfo) -> bool | None:
        return bool(info.data.get("bias")) if value is None else value

    @field_validator("n_key_value_heads")
    @classmethod
    def _divides_heads(cls, value: int | None, info: FieldInfo) -> int | None:
        n_heads = info.data.get("n_heads")
        if not isinstance(n_heads, int):
            return value
        if value is None:
            return n_heads
        if n_heads % value:
            divisors = [str(d) for d in range(1, n_heads + 1) if n_heads % d == 0]
            raise ValueError(
                f"does not divide n_heads = {n_heads}; one of {', '.join(divisors)} would"
            )
        return value


class LatentAttentionConfig(Table):
    """Multi-head latent attention (MLA): keys and values of all heads are made from one latent.

    A head's query and key have `d_head` dimensions made from latents, and `d_rope` that carry
    rotary positions, whose key all heads share; its value has `d_value`. Every head has keys and
    values of its own. There are no biases.

    Source: DeepSeek-AI 2024, "DeepSeek-V2" (arXiv 2405.04434), section 2.1.
    """

    kind: Literal["latent"] = "latent"
    n_heads: PositiveInt
    d_head: PositiveInt | None = None
    d_rope: PositiveInt
    d_latent: PositiveInt
    """Width of what keys and values are made from; it is normed (RMS) on the way."""
    d_query_latent: PositiveInt | None = None
    """The same of queries; made from the residual stream where not given."""
    d_value: Annotated[PositiveInt | None, Field(validate_default=True)] = None
    """`d_head` where not given."""
    scale: PositiveFloat | None = None
    """What the dot products are multiplied by; 1/sqrt(d_head + d_rope) where not given."""
    sink_logit: SinkLogit = "none"
    gated_output: bool = False

    # What grouped heads may have, and these do not.
    bias: ClassVar[bool] = False
    output_bias: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = False
    smeared_keys: ClassVar[bool] = False
    scale_by_inverse_layer: ClassVar[bool] = False
    window: ClassVar[int | None] = None
    windowed_layers: ClassVar[tuple[int, ...] | None] = None
    pruned_heads: ClassVar[dict[int, tuple[int, ...]]] = {}

    @field_validator("d_value")
    @classmethod
    def _as_wide_as_a_head(cls, value: int | None, info: FieldInfo) -> int | None:
        d_head = info.data.get("d_head")
        return d_head if value is None and isinstance(d_head, int) else value

    @property
    def n_key_value_heads(self) -> int:
        """As many as query heads: each has keys and values of its own."""
        return self.n_heads
