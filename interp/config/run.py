"""The tables of a training run: `[train]`, `[data]`, `[probe]`, around those of its model."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue, PositiveFloat, PositiveInt, field_validator, model_validator

from interp.config.model import ModelConfig
from interp.config.table import Table

Dtype = Literal["float32", "bfloat16"]
_Rate = Annotated[float, Field(ge=0, lt=1)]


class TrainConfig(Table):
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


class RepeatedDataConfig(Table):
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


class TextDataConfig(Table):
    """Text cut into windows of `n_ctx` tokens by a byte-level BPE trained on it."""

    kind: Literal["text"] = "text"
    corpus: str
    """`stdlib`, `docs`, or the path of a text file or of a folder of them."""
    held_out_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1


class ProbeConfig(Table):
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


class RunConfig(Table):
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
