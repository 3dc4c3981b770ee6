"""Text from a model, token by token, with a KV cache or without."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.errors import ModelError, ShapeError
from interp.models.inputs import checked_key_mask
from interp.models.kv_cache import KVCache
from interp.models.modes import looking_at
from interp.models.vocabulary import is_text

if TYPE_CHECKING:
    from interp.models.transformer import Transformer


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    At `temperature` 0 it is the most probable one, the first of equals. Above, logits are divided
    by it, and tokens are drawn: of the `top_k` most probable, and of the fewest whose probabilities
    reach `top_p`, where these are given; both cut before probabilities are made to sum to 1 again.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ModelError(f"temperature = {self.temperature:g}: it is 0 or above")
        if self.top_k is not None and self.top_k < 1:
            raise ModelError(f"top_k = {self.top_k}: at least one token is kept")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ModelError(f"top_p = {self.top_p:g}: it is above 0, and 1 at most")

    def choose(
        self, logits: Float[Tensor, "batch d_vocab"], generator: torch.Generator
    ) -> Int[Tensor, " batch"]:
        """The next token of each sequence. Raises: ModelError for logits that are not numbers."""
        if bool(logits.isnan().any()):
            raise ModelError("a logit is NaN: there is no next token")
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        wide = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < wide.shape[1]:
            least = wide.topk(self.top_k).values[:, -1:]
            wide = wide.masked_fill(wide < least, -torch.inf)
        probabilities = wide.softmax(dim=-1)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
            # The one that reaches top_p stays, those behind it go.
            behind = ordered.cumsum(dim=-1) - ordered >= self.top_p
            probabilities = probabilities.masked_fill(behind.gather(1, order.argsort(dim=-1)), 0.0)
        drawn = torch.multinomial(probabilities.cpu(), 1, generator=generator)[:, 0]
        return drawn.to(logits.device)


def generate(
    model: "Transformer",
    tokens: object,
    max_new_tokens: int,
    *,
    attention_mask: object = None,
    temperature: int | float = 0.0,
    top_k: int | None = None,
    top_p: int | float | None = None,
    seed: int = 0,
    stop_tokens: Collection[int] = (),
    use_cache: bool = True,
    cache: KVCache | None = None,
) -> Int[Tensor, "batch longer"]:
    """The tokens, and up to `max_new_tokens` more of each sequence behind them.

    `tokens` are ids `[batch, pos]` or `[pos]`, or text where the model has a vocabulary; sequences
    of different lengths are padded on the left, with an `attention_mask`. Greedy at `temperature`
    0; above, tokens are drawn as `Sampling` says, from `seed`, without touching the caller's random
    state. A sequence that reaches one of `stop_tokens` keeps it and is filled with it, and all stop
    once each has. Without `use_cache` every token takes a whole pass, and gives the same. A `cache`
    of the model's `new_cache`, which may stream, is filled. Hooks are called for every pass, and
    see the new tokens.

    Raises: ShapeError for padding on the right, stop tokens outside the vocabulary, or more tokens
    than `n_ctx` takes, unless the cache streams; ModelError for settings out of their range, a
    cache that is not to be used, or text without a vocabulary.
    """
    sampling = Sampling(float(temperature), top_k, None if top_p is None else float(top_p))
    if max_new_tokens < 1:
        raise ModelError(f"max_new_tokens = {max_new_tokens}: at least one is needed")
    if cache is not None and not use_cache:
        raise ModelError("a cache was given, and use_cache = False")
    if is_text(tokens):
        tokens, lengths = model.tokenize(tokens, padding_side="left")
        attention_mask = lengths if attention_mask is None else attention_mask
    ids = model.to_tokens(tokens)
    mask = checked_key_mask(attention_mask, ids.shape, ids.device)
    if mask is not None and not bool(mask[:, -1].all()):
        raise ShapeError("padding belongs on the left: what follows it would follow nothing")
    streaming = cache is not None and cache.streaming
    n_ctx = model.config.n_ctx
    n_before = ids.shape[1] + (0 if cache is None else cache.n_seen)
    # The last token is drawn, and never read.
    if not streaming and n_before + max_new_tokens - 1 > n_ctx:
        raise ShapeError(f"{n_before} tokens and {max_new_tokens} more do not fit n_ctx = {n_ctx}")
    for stop in stop_tokens:
        if not 0 <= stop < model.config.d_vocab:
            raise ShapeError(
                f"stop token {stop} is outside the vocabulary of {model.config.d_vocab}"
            )
    if use_cache and cache is None:
        cache = model.new_cache()
    generator = torch.Generator().manual_seed(seed)
    stops = torch.tensor(sorted(stop_tokens), dtype=torch.long, device=ids.device)
    stopped = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    new = ids
    with looking_at(model):
        for _ in range(max_new_tokens):
            logits = _last_logits(model, ids, new, mask, cache)
            drawn = sampling.choose(logits, generator)
            drawn = torch.where(stopped, ids[:, -1], drawn)
            ids = torch.cat((ids, drawn[:, None]), dim=1)
            if mask is not None:
                mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
            stopped = stopped | torch.isin(drawn, stops)
            if len(stops) and bool(stopped.all()):
                break
            new = drawn[:, None]
    return ids


def _last_logits(
    model: "Transformer",
    ids: Int[Tensor, "batch pos"],
    new: Int[Tensor, "batch new"],
    mask: Bool[Tensor, "batch pos"] | None,
    cache: KVCache | None,
) -> Float[Tensor, "batch d_vocab"]:
    if cache is None:
        return model(ids, attention_mask=mask, last=1)[:, -1]
    if cache.streaming:  # what it forgets depends on where each token stands
        for place in range(new.shape[1]):
            logits = model(new[:, place : place + 1], last=1, cache=cache)
        return logits[:, -1]
    own = None if mask is None else mask[:, -new.shape[1] :]
    return model(new, attention_mask=own, last=1, cache=cache)[:, -1]
