"""The tables of a model: `[model]`, `[model.attention]`, `[model.mlp]`."""

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from interp.config.attention import GroupedAttentionConfig, LatentAttentionConfig
from interp.config.table import Table

PositionalEmbedding = Literal["standard", "shortformer", "rotary", "none"]
Normalization = Literal["LN", "RMS", "none"]
Activation = Literal["relu", "gelu", "gelu_new", "silu"]


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
    attention: Annotated[
        GroupedAttentionConfig | LatentAttentionConfig, Field(discriminator="kind")
    ]
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
        if isinstance(attention, GroupedAttentionConfig | LatentAttentionConfig):
            attention = attention.model_dump()
        if not isinstance(attention, dict):
            return data
        data = {**data, "attention": {"kind": "grouped", **attention}}
        if attention.get("d_head") is not None:
            return data
        d_model, n_heads = data.get("d_model"), attention.get("n_heads")
        if not (isinstance(d_model, int) and isinstance(n_heads, int) and n_heads > 0):
            return data
        if d_model % n_heads:
            raise ValueError(
                f"attention.n_heads = {n_heads} does not divide d_model = {d_model}, "
                "so attention.d_head has to be given"
            )
        return {**data, "attention": {**data["attention"], "d_head": d_model // n_heads}}

    @model_validator(mode="after")
    def _sizes_agree(self) -> "ModelConfig":
        if self.attention.d_head is None:  # 64.0 and "64" become numbers only after the quotient
            raise ValueError("d_model and attention.n_heads should be written as whole numbers")
        if self.bos_token_id is not None and self.bos_token_id >= self.d_vocab:
            raise ValueError(
                f"bos_token_id = {self.bos_token_id} is outside d_vocab = {self.d_vocab}"
            )
        latent = isinstance(self.attention, LatentAttentionConfig)
        if latent and self.positional_embedding_type != "rotary":
            raise ValueError(
                "attention.kind = 'latent' has rotary keys: positional_embedding_type should be "
                f"'rotary', not {self.positional_embedding_type!r}"
            )
        if self.positional_embedding_type == "rotary" and self.d_rotary % 2:
            name = "d_rope" if latent else "d_head"
            raise ValueError(f"attention.{name} = {self.d_rotary} is odd; rotary turns pairs")
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
    def d_rotary(self) -> int:
        """How many dimensions of a query and a key rotary positions turn, where there are any."""
        if isinstance(self.attention, LatentAttentionConfig):
            return self.attention.d_rope
        return self.d_head

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
        width = self.d_head
        if isinstance(self.attention, LatentAttentionConfig):
            width += self.attention.d_rope
        scale = width**-0.5 if self.attention.scale is None else self.attention.scale
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
