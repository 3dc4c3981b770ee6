"""The projections of a block, by what they read, and a model whose projections round.

Rounded are the projections of attention and of the MLP. Embeddings, unembedding, norms, biases,
the products of attention and its softmax stay as they are.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from interp.config import LatentAttentionConfig, ModelConfig
from interp.models.folding import stream_readers
from interp.models.transformer import Transformer
from interp.models.weights import model_with_weights, stored_weights
from interp.quantization.rounding import Grid

LARGEST_HALF = 65504.0
"""The largest number in float16."""


@dataclass(frozen=True)
class Reading:
    """Projections of one block that read the same: a scale of its channels is one of their inputs.

    `norm` is where such a scale can be undone, in the gain of what the input comes from; `writer`
    is the projection that does it where there is no norm. Both are empty where nothing can.
    """

    projections: tuple[str, ...]
    norm: str = ""
    writer: str = ""


def readings(config: ModelConfig) -> list[Reading]:
    """The readings of a block, in the order of the pass."""
    normed = config.normalization_type != "none"
    ln1, ln2 = ("ln1", "ln2") if normed else ("", "")
    if config.positional_embedding_type == "shortformer":
        # Queries and keys read positions too, which no gain scales.
        values = ("attn.v_proj", "attn.gate") if config.attention.gated_output else ("attn.v_proj",)
        attention = [Reading(("attn.q_proj", "attn.k_proj")), Reading(values)]
    else:
        read = tuple(f"attn.{name}" for name in stream_readers(config))
        attention = [Reading(read, norm=ln1), *_latent_readings(config)]
    attention.append(Reading(("attn.o_proj",)))
    if config.mlp is None:
        return attention
    first = ("mlp.in_proj", "mlp.gate_proj") if config.mlp.gated else ("mlp.in_proj",)
    # A factor passes through the product of a gated MLP, and through relu.
    writes = config.mlp.gated or config.mlp.act_fn == "relu"
    hidden = Reading(("mlp.out_proj",), writer="mlp.in_proj" if writes else "")
    return [*attention, Reading(first, norm=ln2), hidden]


def _latent_readings(config: ModelConfig) -> list[Reading]:
    """What is read behind the norms of latents."""
    heads = config.attention
    if not isinstance(heads, LatentAttentionConfig):
        return []
    found = [Reading(("attn.k_proj", "attn.v_proj"), norm="attn.kv_latent_norm")]
    if heads.d_query_latent is not None:
        found.append(Reading(("attn.q_proj",), norm="attn.q_latent_norm"))
    return found


def block_readings(model: Transformer) -> Iterator[tuple[str, Reading]]:
    """Each block's name with each of its readings; those of a layer without heads left out."""
    for layer in range(model.config.n_layers):
        for reading in readings(model.config):
            block = f"blocks.{layer}"
            if model.get_parameter(f"{block}.{reading.projections[0]}.weight").numel():
                yield block, reading


@dataclass
class ActivationRounding:
    """How the projections of one model round what they read.

    `grid` None rounds nothing. `tokens` are those that are rounded and share scales, all where it
    is None: padding does not, nor does what is to stay. `threshold` keeps the features of llm.int8.
    """

    grid: Grid | None = None
    threshold: float | None = None
    tokens: Bool[Tensor, "batch pos"] | None = None

    @contextmanager
    def over(self, tokens: Bool[Tensor, "batch pos"], grid: Grid | None) -> Iterator[None]:
        """Round these tokens of the batches that go through, on this grid."""
        before = self.tokens, self.grid
        self.tokens, self.grid = tokens, grid
        try:
            yield
        finally:
            self.tokens, self.grid = before


class RoundedLinear(nn.Linear):
    """A projection with rounded weights, which rounds what it reads.

    `weight` is already on its grid. With a threshold the features that are as large as that
    anywhere in a sequence are multiplied apart, in float16, by `exact`, the weights before
    rounding, as llm.int8 has it.
    """

    def __init__(
        self, linear: nn.Linear, rounding: ActivationRounding, exact: Tensor | None = None
    ):
        with torch.device("meta"):  # its own weights are there already
            super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight = linear.weight
        self.bias = linear.bias
        self.rounding = rounding
        self.exact = exact

    def forward(self, x: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch pos out"]:
        """The product of the rounded input and the rounded weights."""
        if self.rounding.grid is None:
            return F.linear(x, self.weight, self.bias)
        if self.rounding.threshold is None:
            return F.linear(self._rounded(x), self.weight, self.bias)
        assert self.exact is not None  # made together with the threshold
        counted = x.abs() if self._kept is None else x.abs().masked_fill(self._kept, 0.0)
        features = (counted >= self.rounding.threshold).any(dim=1, keepdim=True)
        rest = self._rounded(x.masked_fill(features, 0.0))
        apart = x.masked_fill(~features, 0.0)
        halved = _half(apart)
        apart = halved if self._kept is None else torch.where(self._kept, apart, halved)
        return F.linear(rest, self.weight, self.bias) + F.linear(apart, self.exact)

    @property
    def _kept(self) -> Bool[Tensor, "batch pos 1"] | None:
        tokens = self.rounding.tokens
        return None if tokens is None else ~tokens[:, :, None]

    def _rounded(self, x: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch pos width"]:
        grid = self.rounding.grid
        assert grid is not None  # asked before
        if self._kept is None:
            return grid.round(x)
        # Zeros are on every grid, and make no scale larger.
        return torch.where(self._kept, x, grid.round(x.masked_fill(self._kept, 0.0)))


def _half(x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """In float16 and back; what is too large becomes the largest there is."""
    return x.clamp(-LARGEST_HALF, LARGEST_HALF).half().to(x.dtype)


@dataclass(frozen=True)
class RoundedModel:
    """A model whose projections round, and the switch of how."""

    model: Transformer
    rounding: ActivationRounding = field(default_factory=ActivationRounding)


def rounding_model(
    model: Transformer,
    weights: Mapping[str, Tensor],
    *,
    threshold: float | None = None,
) -> RoundedModel:
    """A model with these weights, whose projections round what they read once they are told to.

    Parameters that are not in `weights` are shared with `model`. With a `threshold` features are
    multiplied by the weights of `model`, as llm.int8 has it.
    """
    stored = stored_weights(model)
    every = {**stored, **weights}
    made = model_with_weights(
        model.config,
        every,
        Path(model.model_name),
        vocabulary=model.vocabulary,
        model_name=model.model_name,
    )
    rounding = ActivationRounding(threshold=threshold)
    for block, reading in block_readings(made):
        for name in reading.projections:
            parent, _, own = name.partition(".")
            home = made.get_submodule(f"{block}.{parent}")
            linear = home.get_submodule(own)
            assert isinstance(linear, nn.Linear)
            exact = None if threshold is None else _half(stored[f"{block}.{name}.weight"])
            setattr(home, own, RoundedLinear(linear, rounding, exact))
    return RoundedModel(made, rounding)
