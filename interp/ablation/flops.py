"""Floating-point operations of the passes that a sweep makes, counted from a model's sizes.

Products are counted, two operations for each multiplication and addition; norms, activations and
softmax are not. Attention counts every pair of positions, whether a kernel skips the future or not.
"""

from dataclasses import dataclass
from operator import itemgetter

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.ablation.metrics import AnyMetric, LogitsFunction
from interp.ablation.passes import Chunk, restarts
from interp.ablation.reading import positions_kept
from interp.data.repeated import TokenBatch
from interp.models.place_logits import PlaceLogits
from interp.models.watch import HookedModel


@dataclass(frozen=True)
class ChunkFlops:
    """What passes over one chunk of sequences cost.

    `kept` is the number of last positions that leave the last layer, as `RestartedPasses` has it.
    """

    model: HookedModel
    n_rows: int
    n_pos: int
    kept: int
    read: int
    """Places at which the metric reads logits."""
    each_read: int
    """Operations of the logits that it reads at one place."""
    restarts: bool
    """Whether passes begin in the ablated layer; whole hooked ones make every logit."""

    @property
    def n_tokens(self) -> int:
        """Tokens of the chunk."""
        return self.n_rows * self.n_pos

    def layer(self, layer: int, *, whole: bool = True) -> int:
        """One layer, of all positions or, in the last one, of those that are read."""
        kept = self.n_tokens if whole else self._leaving(layer)
        return self._attended(layer) + self._output(layer, kept) + self._mlp(kept)

    def rest(self, layer: int) -> int:
        """Everything behind a layer's attention: its MLP, the later layers, what is read."""
        later = range(layer + 1, self.model.cfg.n_layers)
        return (
            self._mlp(self._leaving(layer))
            + sum(self.layer(own, whole=False) for own in later)
            + self.reading
        )

    @property
    def reading(self) -> int:
        """The logits that the metric reads."""
        return self.read * self.each_read

    @property
    def clean(self) -> int:
        """The unablated pass and its metric."""
        layers = range(self.model.cfg.n_layers)
        if self.restarts:
            return sum(self.layer(layer, whole=False) for layer in layers) + self.reading
        return self.watched

    @property
    def watched(self) -> int:
        """A pass whose logits nobody reads; a bridged model makes them all the same."""
        layers = range(self.model.cfg.n_layers)
        every_logit = 2 * self.n_tokens * self.model.cfg.d_model * self.model.cfg.d_vocab
        return sum(self.layer(layer) for layer in layers) + (0 if self.restarts else every_logit)

    def start(self, *, frozen: bool, direct: bool) -> int:
        """What comes before the first ablation: the unablated pass, and what is kept of one."""
        kept = frozen or (direct and not self.restarts)
        return self.clean + (self.watched if kept else 0)

    def entering(self, last: int) -> int:
        """The unablated pass up to the last layer in which an ablation begins."""
        return sum(self.layer(layer) for layer in range(last + 1)) if self.restarts else 0

    def ablation(self, first: int, own: int, site: str, *, direct: bool) -> int:
        """One set of heads ablated, which begins in a layer of which it has so many heads."""
        if not self.restarts:
            return (2 if direct else 1) * self.clean
        again = self.reading if direct else 0
        if site != "z":
            attention = self._attended(first) + self._output(first, self._leaving(first))
            return attention + self.rest(first) + again
        cfg = self.model.cfg
        written = 2 * self._leaving(first) * own * cfg.d_head * cfg.d_model
        return written + self.rest(first) + again

    def _leaving(self, layer: int) -> int:
        last = self.restarts and layer == self.model.cfg.n_layers - 1
        return self.n_rows * (self.kept if last else self.n_pos)

    def _attended(self, layer: int) -> int:
        cfg = self.model.cfg
        n_heads, n_shared = len(cfg.heads(layer)), len(cfg.key_value_heads(layer))
        projected = 2 * self.n_tokens * cfg.d_model * (n_heads + 2 * n_shared) * cfg.d_head
        return projected + 4 * self.n_tokens * self.n_pos * n_heads * cfg.d_head

    def _output(self, layer: int, tokens: int) -> int:
        cfg = self.model.cfg
        return 2 * tokens * len(cfg.heads(layer)) * cfg.d_head * cfg.d_model

    def _mlp(self, tokens: int) -> int:
        cfg = self.model.cfg
        if cfg.attn_only or cfg.d_mlp is None:
            return 0
        return 2 * (3 if cfg.gated_mlp else 2) * tokens * cfg.d_model * cfg.d_mlp


def chunk_flops(model: HookedModel, chunk: Chunk, metric: AnyMetric) -> ChunkFlops:
    """The costs of one chunk under a metric."""
    reads = metric.reads(chunk.batch)
    n_rows, n_pos = chunk.batch.tokens.shape
    read = int(reads.sum())
    return ChunkFlops(
        model,
        n_rows,
        n_pos,
        kept=positions_kept(metric, chunk.batch),
        read=read,
        each_read=_each_read(model, chunk.batch, metric) if read else 0,
        restarts=restarts(model),
    )


def _each_read(model: HookedModel, batch: TokenBatch, metric: AnyMetric) -> int:
    """Operations of the logits that a metric asks for at one place, as one sequence tells."""
    cfg = model.cfg
    if isinstance(metric, LogitsFunction):
        return 2 * cfg.d_model * cfg.d_vocab
    row = int(metric.reads(batch).any(dim=1).nonzero()[0, 0])
    one = batch.each(itemgetter(slice(row, row + 1)))
    made: list[int] = []

    def asked(rows: Tensor, columns: Tensor) -> PlaceLogits:
        return _CountedLogits(len(rows), cfg.d_model, cfg.d_vocab, made)

    metric.measure([asked], one, cfg.d_vocab, clean=asked)
    return sum(made) // int(metric.reads(one).sum())


@dataclass(frozen=True)
class _CountedLogits:
    """Logits that are all zero, and how much work they would have been."""

    n: int
    d_model: int
    d_vocab: int
    made: list[int]

    def all(self) -> Float[Tensor, "place d_vocab"]:
        self.made.append(2 * self.n * self.d_model * self.d_vocab)
        return torch.zeros(1, 1).expand(self.n, self.d_vocab)

    def logsumexp(self) -> Float[Tensor, " place"]:
        self.made.append(2 * self.n * self.d_model * self.d_vocab)
        return torch.zeros(self.n)

    def of(self, tokens: Int[Tensor, " place"]) -> Float[Tensor, " place"]:
        self.made.append(2 * self.n * self.d_model)
        return torch.zeros(self.n)
