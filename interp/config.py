"""What a model, a training run and its probes are, as read from nested TOML.

Every table is a frozen pydantic model that refuses unknown keys: a config that loads can run. This
module never imports torch, so that paths, configs and flags are checked before a model is.
"""

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Protocol, runtime_checkable

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from interp.errors import ConfigError

PositionalEmbedding = Literal["standard", "shortformer", "rotary", "none"]
Normalization = Literal["LN", "RMS", "none"]
Activation = Literal["relu", "gelu", "gelu_new", "silu"]
Dtype = Literal["float32", "bfloat16"]
_Rate = Annotated[float, Field(ge=0, lt=1)]


@runtime_checkable
class _FieldInfo(Protocol):
    """The part of pydantic's `ValidationInfo` used here; that class refuses `isinstance`."""

    @property
    def data(self) -> dict[str, object]: ...


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, data: object) -> object:
        # pydantic reads true as 1.
        for name, value in data.items() if isinstance(data, dict) else ():
            field = cls.model_fields.get(name)
            if field is not None and isinstance(value, bool) and not _takes_bool(field.annotation):
                raise ValueError(f"{name} = {str(value).lower()} is not what belongs here")
        return data


def _takes_bool(annotation: object) -> bool:
    return annotation is bool or bool in getattr(annotation, "__args__", ())


class GroupedAttentionConfig(_Table):
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
    windowed_layers: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """The layers that have the window; every layer where not given."""
    smeared_keys: bool = False
    """Mix each key with the one before it, by one trained share a head (Olsson et al. 2022)."""

    @field_validator("output_bias")
    @classmethod
    def _follows_bias(cls, value: bool | None, info: _FieldInfo) -> bool | None:
        return bool(info.data.get("bias")) if value is None else value

    @field_validator("n_key_value_heads")
    @classmethod
    def _divides_heads(cls, value: int | None, info: _FieldInfo) -> int | None:
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


class LinearScaling(_Table):
    """Rotary positions divided by `factor`. Source: Chen et al. 2023, position interpolation."""

    kind: Literal["linear"] = "linear"
    factor: Annotated[float, Field(ge=1)]


class Llama3Scaling(_Table):
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


class MLPConfig(_Table):
    """The MLP of a block. Leave the whole table out for an attention-only model."""

    d_mlp: PositiveInt
    act_fn: Activation = "gelu_new"
    gated: bool = False
    bias: bool = True


class ModelConfig(_Table):
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

    def window(self, layer: int) -> int | None:
        """How many keys a query of this layer may attend to, itself included; None for all."""
        windowed = self.attention.windowed_layers
        return self.attention.window if windowed is None or layer in windowed else None

    def attention_scale(self, layer: int) -> float:
        """What the dot products of this layer's queries and keys are multiplied by."""
        scale = self.d_head**-0.5 if self.attention.scale is None else self.attention.scale
        return scale / (layer + 1) if self.attention.scale_by_inverse_layer else scale


class TrainConfig(_Table):
    """How a run trains. AdamW with a linear warm-up to `lr`, which then stays."""

    steps: PositiveInt
    batch_size: PositiveInt
    lr: PositiveFloat
    betas: tuple[_Rate, _Rate] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    clip_norm: PositiveFloat = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    device: str = "cpu"
    dtype: Dtype = "float32"
    """`bfloat16` runs the forward pass under autocast; weights and the optimizer stay float32."""
    threads: PositiveInt | None = None
    """CPU threads; torch's own choice where not given. Another number rounds differently."""
    checkpoint_every: PositiveInt = 500


class RepeatedDataConfig(_Table):
    """Sequences in which a random block repeats until the context is full."""

    kind: Literal["repeated"] = "repeated"
    span: tuple[PositiveInt, PositiveInt]
    """Shortest and longest block; each sequence draws its own length."""
    frequencies: Literal["uniform", "zipf"] = "zipf"
    distinct: bool = False
    """Whether a block holds each token at most once."""

    @field_validator("span")
    @classmethod
    def _ordered(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not 3 <= value[0] <= value[1]:
            raise ValueError("should be [shortest, longest] with 3 <= shortest <= longest")
        return value


class TextDataConfig(_Table):
    """Text cut into windows of `n_ctx` tokens by a byte-level BPE trained on it."""

    kind: Literal["text"] = "text"
    corpus: str
    """`stdlib`, `docs`, or the path of a text file or of a folder of them."""
    held_out_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1


class ProbeConfig(_Table):
    """What is measured while training, on one axis of steps and tokens."""

    every: PositiveInt = 50
    sequences: PositiveInt = 64
    """Held-out sequences behind the loss and the in-context-learning score."""
    icl_early: tuple[int, int]
    """First and last position of the early losses; position p is where token p is predicted."""
    icl_late: tuple[int, int]
    blocks: Annotated[tuple[int, ...], Field(min_length=1)] = (8, 12, 16, 20)
    """Block lengths of the repeated random tokens that score the heads."""
    repeats: PositiveInt = 8
    """Sequences for each block length."""

    @field_validator("blocks")
    @classmethod
    def _long_enough(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if min(value) < 3:
            raise ValueError(BLOCK_RULE)
        return value


BLOCK_RULE = (
    "should be at least 3: with 1 the induction target is the query itself, "
    "with 2 it is the previous token"
)


class RunConfig(_Table):
    """A whole config file."""

    model: ModelConfig
    train: TrainConfig
    data: Annotated[RepeatedDataConfig | TextDataConfig, Field(discriminator="kind")]
    probe: ProbeConfig
    experiment: dict[str, JsonValue] | None = None
    """What `interp run` reads: `file`, relative to the config, and that file's own settings."""

    @model_validator(mode="after")
    def _fits_together(self) -> "RunConfig":
        n_ctx, d_vocab = self.model.n_ctx, self.model.d_vocab
        for name, (first, last) in (
            ("icl_early", self.probe.icl_early),
            ("icl_late", self.probe.icl_late),
        ):
            if not 1 <= first <= last < n_ctx:
                raise ValueError(
                    f"probe.{name} = [{first}, {last}] should lie within 1 and n_ctx - 1 = "
                    f"{n_ctx - 1}"
                )
        bos = self.model.bos_token_id is not None
        longest = max(self.probe.blocks)
        if 2 * longest + bos > n_ctx:
            raise ValueError(
                f"probe.blocks holds {longest}: twice that is longer than n_ctx = {n_ctx}"
            )
        if longest > d_vocab - bos:
            raise ValueError(
                f"probe.blocks holds {longest}: a vocabulary of {d_vocab} has too few "
                "distinct tokens"
            )
        if isinstance(self.data, RepeatedDataConfig):
            if self.data.distinct and self.data.span[1] > d_vocab - bos:
                raise ValueError(
                    f"data.span reaches {self.data.span[1]}, more distinct tokens than a "
                    f"vocabulary of {d_vocab} has"
                )
            if self.data.span[1] + bos >= n_ctx:
                raise ValueError(
                    f"data.span reaches {self.data.span[1]}: nothing repeats within n_ctx = {n_ctx}"
                )
        elif d_vocab < 256:
            raise ValueError(
                f"model.d_vocab = {d_vocab} is below 256: a byte-level tokenizer needs a token "
                "for every byte"
            )
        return self


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """The run config in a TOML file, with `key.subkey=value` overrides applied.

    Raises: ConfigError, one line naming file, dotted key, value and rule.
    """
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {_one_line(error)}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {_one_line(error)}") from None
    for override in overrides:
        _apply_override(data, override)
    return parse_config(data, str(path))


def parse_config(data: dict[str, object], where: str) -> RunConfig:
    """The run config in nested tables; `where` begins the line of a fault."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, RunConfig)}") from None


def config_tables(config: BaseModel) -> dict[str, object]:
    """The nested tables of a config as plain values, without the keys that are not set.

    TOML has no null, so a missing key is how "not given" is written.
    """
    return config.model_dump(mode="json", exclude_none=True)


def _apply_override(data: dict[str, object], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigError(f"--set {override}: expected key.subkey=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # an unquoted word is a string
    table = data
    for part in parts[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override}: {part} is a value, not a table")
        table = inner
    table[parts[-1]] = value


def explain(error: ValidationError, root: type[BaseModel]) -> str:
    """The faults of a pydantic error in one line, each with its dotted key, value and rule."""
    return "; ".join(_explain_one(fault, root) for fault in error.errors())


def _explain_one(fault: object, root: type[BaseModel]) -> str:
    assert isinstance(fault, dict)
    # A discriminated union puts its tag into the location: data.text.corpus is written data.corpus.
    loc = list(fault["loc"])
    for union in ("data", "rotary_scaling"):
        if union in loc:
            del loc[loc.index(union) + 1 : loc.index(union) + 2]
    key = ".".join(str(part) for part in loc)
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        known = _known_keys(root, fault["loc"][:-1])
        near = difflib.get_close_matches(str(loc[-1]), known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        return f"unknown key {key}; {hint}known: {', '.join(known)}"
    if fault["type"] == "union_tag_invalid":
        context = fault["ctx"]
        return f"{key}.kind = {context['tag']!r}: one of {context['expected_tags']}"
    if fault["type"] == "missing":
        return f"{key} is missing"
    value = fault["input"]
    if isinstance(value, dict | BaseModel):  # a rule about a whole table names its own keys
        return f"{key}.{message}" if key else message
    if fault["type"] == "value_error":
        return f"{key} = {value!r} {message}"
    return f"{key} = {value!r}: {message[0].lower()}{message[1:]}"


def _known_keys(root: type[BaseModel], loc: Sequence[str | int]) -> list[str]:
    table: type[BaseModel] = root
    for part in loc:
        if part in _UNION_TAGS:
            table = _UNION_TAGS[str(part)]
        elif part in table.model_fields:
            inner = _table_type(table.model_fields[str(part)].annotation)
            table = inner or table
    return sorted(table.model_fields)


_UNION_TAGS: dict[str, type[BaseModel]] = {
    "repeated": RepeatedDataConfig,
    "text": TextDataConfig,
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
}


def _table_type(annotation: object) -> type[BaseModel] | None:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
