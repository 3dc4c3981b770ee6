"""The tables of a model: `[model]`, `[model.attention]`, `[model.mlp]`."""

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from interp.config.table import FieldInfo, Table

PositionalEmbedding = Literal["standard", "shortformer", "rotary", "none"]
Normalization = Literal["LN", "RMS", "none"]
Activation = Literal["relu", "gelu", "gelu_new", "silu"]
Index = Annotated[int, Field(ge=0)]


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


class LinearScaling(Table):
    """Rotary positions divided by `factor`. Source: Chen et al. 2023, position interpolation."""

    kind: Literal["linear"] = "linear"
    factor: Annotated[float, Field(ge=1)]


class Llama3Scaling(Table):
    """Rotary frequencies divided by `factor` where they turn slowly, as Llama 3.1 does.

    Frequencies that turn fewer than `low_freq_factor` times in `original_n_ctx` tokens are divided,
    those that turn more than `high_freq_factor` times are kept, and those between are mixed.
    Source: the model code released with Llama 3.1.
    """

    kind: Literal["llama3"] = "llama3"
    factor: Annotated[float, Field(ge=1)]
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_n_ctx: PositiveInt

    @model_validator(mode="after")
    def _ordered(self) -> "Llama3Scaling":
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor = {self.low_freq_factor:g} should be below high_freq_factor = "
                f"{self.high_freq_factor:g}"
            )
        return self


class MLPConfig(Table):
    """The MLP of a block. Leave the whole table out for an attention-only model."""

    d_mlp: PositiveInt
    act_fn: Activation = "gelu_new"
    gated: bool = False
    bias: bool = True


class ModelConfig(Table):
    """A decoder-only transformer; every size is explicit."""

    n_layers: PositiveInt
    d_model: PositiveInt
    n_ctx: PositiveInt
    d_vocab: PositiveInt
    attention: GroupedAttentionConfig
    mlp: MLPConfig | None = None
    positional_embedding_type: PositionalEmbedding = "standard"
    """`standard` adds learned positions to the residual stream; `shortformer` adds them to the
    inputs of queries and keys only; `rotary` turns queries and keys, pairing halves."""
    rotary_base: PositiveFloat = 10000.0
    rotary_scaling: Annotated[LinearScaling | Llama3Scaling, Field(discriminator="kind")] | None = (
        None
    )
    normalization_type: Normalization = "LN"
    eps: PositiveFloat = 1e-5
    tie_embeddings: bool = False
    unembed_bias: bool = False
    bos_token_id: Annotated[int, Field(ge=0)] | None = None
    """The token that begins every sequence, where there is one; no random block holds it."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    init_std: PositiveFloat | None = None
    """Standard deviation of every weight matrix at the start; 1/sqrt(d_model) where not given.
    GPT-2's 0.02 delays or blocks induction heads at widths near 64, and hastens them near 128 on
    text."""

    @model_validator(mode="before")
    @classmethod
    def _resolve_head_size(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        attention = data.get("attention")
        if isinstance(attention, GroupedAttentionConfig):
            attention = attention.model_dump()
        if not isinstance(attention, dict) or attention.get("d_head") is not None:
            return data
        d_model, n_heads = data.get("d_model"), attention.get("n_heads")
        if not (isinstance(d_model, int) and isinstance(n_heads, int) and n_heads > 0):
            return data
        if d_model % n_heads:
            raise ValueError(
                f"attention.n_heads = {n_heads} does not divide d_model = {d_model}, "
                "so attention.d_head has to be given"
            )
        return {**data, "attention": {**attention, "d_head": d_model // n_heads}}

    @model_validator(mode="after")
    def _sizes_agree(self) -> "ModelConfig":
        if self.attention.d_head is None:  # 64.0 and "64" become numbers only after the quotient
            raise ValueError("d_model and attention.n_heads should be written as whole numbers")
        if self.bos_token_id is not None and self.bos_token_id >= self.d_vocab:
            raise ValueError(
                f"bos_token_id = {self.bos_token_id} is outside d_vocab = {self.d_vocab}"
            )
        if self.positional_embedding_type == "rotary" and self.d_head % 2:
            raise ValueError(f"attention.d_head = {self.d_head} is odd; rotary turns pairs")
        if self.rotary_scaling is not None and self.positional_embedding_type != "rotary":
            raise ValueError(
                "rotary_scaling belongs to positional_embedding_type = 'rotary', not "
                f"{self.positional_embedding_type!r}"
            )
        windowed = self.attention.windowed_layers
        if windowed is not None and self.attention.window is None:
            raise ValueError("attention.windowed_layers needs attention.window")
        if windowed and max(windowed) >= self.n_layers:
            raise ValueError(
                f"attention.windowed_layers holds {max(windowed)}, beyond n_layers = "
                f"{self.n_layers}"
            )
        pruned = self.attention.pruned_heads
        if max(pruned, default=0) >= self.n_layers:
            raise ValueError(
                f"attention.pruned_heads holds layer {max(pruned)}, beyond n_layers = "
                f"{self.n_layers}"
            )
        return self

    @property
    def d_head(self) -> int:
        """Width of one head."""
        assert self.attention.d_head is not None  # resolved before validation
        return self.attention.d_head

    @property
    def n_key_value_heads(self) -> int:
        """Number of key and value heads."""
        assert self.attention.n_key_value_heads is not None  # resolved by its validator
        return self.attention.n_key_value_heads

    def heads(self, layer: int) -> tuple[int, ...]:
        """The query heads that a layer has, by their numbers before any was pruned."""
        return heads_left(self.attention.n_heads, self.attention.pruned_heads.get(layer, ()))

    def key_value_heads(self, layer: int) -> tuple[int, ...]:
        """The key-value heads that a layer has, by their numbers before any was pruned."""
        return key_value_heads_left(
            self.attention.n_heads,
            self.n_key_value_heads,
            self.attention.pruned_heads.get(layer, ()),
        )

    def window(self, layer: int) -> int | None:
        """How many keys a query of this layer may attend to, itself included; None for all."""
        windowed = self.attention.windowed_layers
        return self.attention.window if windowed is None or layer in windowed else None

    def attention_scale(self, layer: int) -> float:
        """What the dot products of this layer's queries and keys are multiplied by."""
        scale = self.d_head**-0.5 if self.attention.scale is None else self.attention.scale
        return scale / (layer + 1) if self.attention.scale_by_inverse_layer else scale


def heads_left(n_heads: int, pruned: Collection[int]) -> tuple[int, ...]:
    """The query heads that are not pruned, in order."""
    return tuple(head for head in range(n_heads) if head not in pruned)


def key_value_heads_left(
    n_heads: int, n_key_value_heads: int, pruned: Collection[int]
) -> tuple[int, ...]:
    """The key-value heads that some query head still reads, in order."""
    if not pruned:
        return tuple(range(n_key_value_heads))
    group = n_heads // n_key_value_heads
    return tuple(sorted({head // group for head in heads_left(n_heads, pruned)}))
