"""What a sweep measures: one number for each sequence, from the logits at the places that count.

Logits are the dearest part of a pass, so they are made only where a metric reads them, a slice at
a time. A place is a query: what is read there predicts the next token.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.data.repeated import TokenBatch
from interp.errors import AnalysisError
from interp.models.place_logits import PlaceLogits

PLACES = 512
"""Places that are read together."""
SLICE_NUMBERS = 2**22
"""Logits in a slice of whole rows: 16 MB in float32, of which a metric may need a few."""

LogitsAt = Callable[[Int[Tensor, " place"], Int[Tensor, " place"]], PlaceLogits]
"""The logits at some rows and columns of a batch."""


@dataclass(frozen=True)
class Reading:
    """Logits at some places of a batch, and what is known of them."""

    logits: PlaceLogits
    clean: PlaceLogits
    """The same of the unablated model."""
    next_tokens: Int[Tensor, " place"]
    """The token that follows; 0 at the end of a sequence, where none does."""
    sequences: Int[Tensor, " place"]
    """Which of all sequences each place belongs to."""


def mean_of_places(values: Float[Tensor, "batch pos"]) -> Float[Tensor, " batch"]:
    """The mean of each sequence over its places, NaN where it has none."""
    return values.nanmean(dim=1)


@dataclass(frozen=True)
class Metric:
    """One number for each sequence.

    `reads` says at which places logits are read, `value` makes a number of those at each, and
    `reduce` one of each sequence's, `[batch, pos]` with NaN at places that are not read.
    """

    name: str
    unit: str
    reads: Callable[[TokenBatch], Bool[Tensor, "batch pos"]]
    value: Callable[[Reading], Float[Tensor, " place"]]
    reduce: Callable[[Float[Tensor, "batch pos"]], Float[Tensor, " batch"]] = mean_of_places
    whole_rows: bool = False
    """Whether `value` asks for every logit of a place."""
    params: Mapping[str, object] = field(default_factory=dict)
    differentiable: bool = True
    n_sequences: int | None = None
    """How many sequences it has answers for; None where any number will do."""

    def measure(
        self,
        variants: Sequence[LogitsAt],
        batch: TokenBatch,
        d_vocab: int,
        *,
        clean: LogitsAt,
        first: int = 0,
        wrap: Callable[[Callable[[], Tensor]], Tensor] = operator.call,
    ) -> list[Float[Tensor, " batch"]]:
        """The metric of each sequence, for each of several variants of a pass, in float64.

        `first` is the number of the batch's first sequence. `wrap` calls the function of each
        slice: a backward pass that keeps no logits wraps it otherwise.
        """
        rows, columns = self.reads(batch).nonzero(as_tuple=True)
        next_tokens = torch.cat((batch.tokens[:, 1:], torch.zeros_like(batch.tokens[:, :1])), dim=1)
        size = max(1, min(PLACES, SLICE_NUMBERS // d_vocab)) if self.whole_rows else PLACES
        parts: list[list[Tensor]] = [[] for _ in variants]
        for start in range(0, len(rows), size):
            there = rows[start : start + size], columns[start : start + size]
            unablated = clean(*there)

            def read(
                variant: LogitsAt,
                there: tuple[Tensor, Tensor] = there,
                unablated: PlaceLogits = unablated,
            ) -> Tensor:
                row, column = there
                ahead = next_tokens[row, column]
                return self.value(Reading(variant(row, column), unablated, ahead, row + first))

            for variant, found in zip(variants, parts, strict=True):
                found.append(wrap(partial(read, variant)))
        measured = []
        for found in parts:
            grid = torch.full(batch.tokens.shape, torch.nan, dtype=torch.float64)
            grid = grid.to(batch.tokens.device)
            if found:
                grid = grid.index_put((rows, columns), torch.cat(found).to(torch.float64))
            measured.append(self.reduce(grid))
        return measured


@dataclass(frozen=True)
class LogitsFunction:
    """A user's own function of all logits `[batch, pos, d_vocab]` and the batch, to `[batch]`."""

    function: Callable[[Tensor, TokenBatch], Tensor]
    name: str = "function"
    unit: str = ""
    params: Mapping[str, object] = field(default_factory=dict)
    differentiable: bool = True

    def reads(self, batch: TokenBatch) -> Bool[Tensor, "batch pos"]:
        """Every place."""
        return torch.ones_like(batch.tokens, dtype=torch.bool)

    def measure(
        self,
        variants: Sequence[LogitsAt],
        batch: TokenBatch,
        d_vocab: int,
        *,
        clean: LogitsAt,
        first: int = 0,
        wrap: Callable[[Callable[[], Tensor]], Tensor] = operator.call,
    ) -> list[Float[Tensor, " batch"]]:
        """What the function says of each variant, in float64.

        Raises: AnalysisError where it does not return one number for each sequence.
        """
        rows, columns = self.reads(batch).nonzero(as_tuple=True)

        def call(variant: LogitsAt) -> Tensor:
            logits = variant(rows, columns).all().unflatten(0, batch.tokens.shape)
            # It may edit what it is given, and the tokens are the caller's.
            value = self.function(logits, batch.each(torch.clone))
            if not isinstance(value, Tensor) or value.shape != (len(batch.tokens),):
                given = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise AnalysisError(
                    f"the metric {self.name} returned {given}; one number for each of the "
                    f"{len(batch.tokens)} sequences is needed"
                )
            return value.to(torch.float64)

        return [wrap(partial(call, variant)) for variant in variants]


AnyMetric = Metric | LogitsFunction


# --- where a metric reads ---------------------------------------------------------------------


def counted_tokens(batch: TokenBatch) -> Bool[Tensor, "batch pos"]:
    """The tokens that count: real ones, less those that were left out."""
    return batch.real if batch.counted is None else batch.counted


def next_token_places(batch: TokenBatch) -> Bool[Tensor, "batch pos"]:
    """Where a token that counts is followed by one that does."""
    counted = counted_tokens(batch)
    following = torch.cat((counted[:, 1:], torch.zeros_like(counted[:, :1])), dim=1)
    return counted & following


def second_copy_places(batch: TokenBatch) -> Bool[Tensor, "batch pos"]:
    """Where the token after the latest earlier copy of this one does come next."""
    ahead = torch.cat((batch.tokens[:, 1:], batch.tokens[:, :1]), dim=1)
    copied = batch.tokens.gather(1, batch.targets.clamp(min=0))
    return next_token_places(batch) & (batch.targets >= 0) & (copied == ahead)


def last_places(batch: TokenBatch) -> Bool[Tensor, "batch pos"]:
    """The last token of each sequence."""
    real = batch.real
    order = torch.arange(real.shape[1], device=real.device)
    last = torch.where(real, order, -1).amax(dim=1, keepdim=True)
    return (order == last) & real


def last_next_token_places(batch: TokenBatch) -> Bool[Tensor, "batch pos"]:
    """Where the last token of each sequence is predicted."""
    last = last_places(batch)
    before = torch.cat((last[:, 1:], torch.zeros_like(last[:, :1])), dim=1)
    return before & next_token_places(batch)


def chosen_places(
    positions: Sequence[int | slice],
) -> Callable[[TokenBatch], Bool[Tensor, "batch pos"]]:
    """Next tokens predicted at some places, counted from 0 among each sequence's real tokens, or
    from -1 backwards from the last place at which one is predicted."""

    def reads(batch: TokenBatch) -> Bool[Tensor, "batch pos"]:
        real = batch.real
        following = torch.cat((real[:, 1:], torch.zeros_like(real[:, :1])), dim=1)
        within = real & following
        chosen = torch.zeros_like(within)
        for row, own in enumerate(within):
            columns = own.nonzero()[:, 0]
            for position in positions:
                if isinstance(position, slice) or -len(columns) <= position < len(columns):
                    chosen[row, columns[position]] = True
        return chosen & next_token_places(batch)

    return reads


# --- what it makes of them --------------------------------------------------------------------


def token_losses(reading: Reading) -> Float[Tensor, " place"]:
    """Minus the log-probability of each next token, in nats."""
    return reading.logits.logsumexp() - reading.logits.of(reading.next_tokens)


def token_hits(reading: Reading) -> Float[Tensor, " place"]:
    """1 where the next token has the largest logit, else 0."""
    logits = reading.logits.all()
    return (logits.argmax(dim=1) == reading.next_tokens).to(logits.dtype)


def divergence(reading: Reading) -> Float[Tensor, " place"]:
    """KL divergence of the next-token distribution from that of the unablated model, in nats."""
    clean = reading.clean.all().detach().log_softmax(dim=1)
    apart = clean - reading.logits.all().log_softmax(dim=1)
    # In place: each of these holds every logit of the slice.
    return apart.mul_(clean.exp_()).sum(dim=1)


def loss_metric(positions: Sequence[int | slice] | None = None) -> Metric:
    """The mean next-token loss of each sequence, in nats; at some `positions` only where given."""
    if positions is None:
        return Metric("loss", "nats", next_token_places, token_losses)
    told = [_slice_text(p) if isinstance(p, slice) else p for p in positions]
    return Metric(
        "loss", "nats", chosen_places(positions), token_losses, params={"positions": told}
    )


def _slice_text(part: slice) -> str:
    bounds = [part.start, part.stop] if part.step is None else [part.start, part.stop, part.step]
    return ":".join("" if bound is None else str(bound) for bound in bounds)


def loss_function(
    function: Callable[[Float[Tensor, "batch losses"]], Float[Tensor, " batch"]], name: str = "loss"
) -> Metric:
    """A function of per-token losses `[batch, pos - 1]`, NaN where a next token does not count."""
    return Metric(
        name,
        "nats",
        next_token_places,
        token_losses,
        reduce=lambda losses: function(losses[:, :-1]),
    )


def logit_difference(
    answers: Int[Tensor, "*sequence"] | int, others: Int[Tensor, "*other_sequence"] | int
) -> Metric:
    """The logit of an answer less that of another, after the last token of each sequence.

    Either is one token, or one for each sequence.
    """
    right, wrong = torch.as_tensor(answers), torch.as_tensor(others)

    def value(reading: Reading) -> Float[Tensor, " place"]:
        def logit(ids: Tensor) -> Tensor:
            there = reading.sequences.to(ids.device)
            own = ids.expand(len(there)) if ids.ndim == 0 else ids[there]
            return reading.logits.of(own.to(reading.sequences.device))

        return logit(right) - logit(wrong)

    params: dict[str, object] = {"answer": right.tolist(), "against": wrong.tolist()}
    numbers = {len(ids) for ids in (right, wrong) if ids.ndim}
    if len(numbers) > 1:
        raise AnalysisError(f"{len(right)} answers were given, and {len(wrong)} against them")
    return Metric(
        "logit-diff",
        "logits",
        last_places,
        value,
        params=params,
        n_sequences=next(iter(numbers), None),
    )


METRICS: dict[str, Metric] = {
    "loss": loss_metric(),
    "second-copy-loss": Metric("second-copy-loss", "nats", second_copy_places, token_losses),
    "last-token": Metric("last-token", "nats", last_next_token_places, token_losses),
    # It is least, and flat, at the unablated model: its gradient there is 0.
    "kl": Metric(
        "kl", "nats", next_token_places, divergence, whole_rows=True, differentiable=False
    ),
    "accuracy": Metric(
        "accuracy", "share", next_token_places, token_hits, whole_rows=True, differentiable=False
    ),
}
"""The metrics that need nothing but a name; `logit-diff` needs its two answers."""
