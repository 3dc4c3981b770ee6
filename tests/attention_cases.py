"""Attention under every kind of mask, its statistics by definition, and what it allocates.

The definitions are float64 numpy, one query and key at a time, and share no code with interp.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from interp.models.masks import AttentionMask

Array = np.ndarray


@dataclass(frozen=True)
class Case:
    """Queries and keys of one call, and the rule of who may attend to whom."""

    q: Tensor
    k: Tensor
    mask: AttentionMask
    scale: float = 0.7

    @property
    def how(self) -> dict:
        """The keyword arguments that every statistic takes."""
        return {"scale": self.scale, "mask": self.mask}

    def may(self, b: int, h: int, i: int, j: int) -> bool:
        """Whether a query may attend to a key, as the docstring of the mask tells it."""
        mask, place = self.mask, i + self.k.shape[1] - self.q.shape[1]
        if mask.causal and j > place:
            return False
        if mask.window is not None and place - j >= mask.window:
            return False
        if mask.key_mask is not None and not bool(mask.key_mask[b, j]):
            return False
        custom = mask.custom
        if custom is None:
            return True
        return bool(custom[b if len(custom) > 1 else 0, h if custom.shape[1] > 1 else 0, i, j])

    def allowed(self) -> Array:
        """`may` of every query and key."""
        batch, n_query, n_heads, _ = self.q.shape
        n_key = self.k.shape[1]
        allowed = np.zeros((batch, n_heads, n_query, n_key), dtype=bool)
        for b, h, i, j in np.ndindex(allowed.shape):
            allowed[b, h, i, j] = self.may(b, h, i, j)
        return allowed


KINDS = (
    "causal",
    "left-padded",
    "right-padded",
    "all padding",
    "window",
    "window and left-padded",
    "wide window",
    "bidirectional",
    "bidirectional and padded",
    "custom shared",
    "custom by batch",
    "custom by head",
    "custom and padded",
    "custom bidirectional",
    "latest queries",
    "latest queries and window",
    "latest queries and padded",
    "bidirectional latest queries",
)


def case(
    kind: str = "causal",
    n_key_value_heads: int = 2,
    *,
    n_heads: int = 4,
    n_pos: int = 7,
    d_head: int = 6,
    batch: int = 3,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """A random case; queries are twice as long as usual, so that rows are far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    n_query = max(1, n_pos // 2) if "latest" in kind else n_pos
    q = 2 * torch.randn(batch, n_query, n_heads, d_head, generator=generator)
    k = torch.randn(batch, n_pos, n_key_value_heads, d_head, generator=generator)
    key_mask = window = custom = None
    if "padd" in kind:
        key_mask = torch.zeros(batch, n_pos, dtype=torch.bool)
        for b in range(batch):
            real = max(1, n_pos - 3 * b)
            key_mask[b, slice(0, real) if "right" in kind else slice(n_pos - real, n_pos)] = True
        if kind == "all padding":
            key_mask[1] = False
    if "window" in kind:
        window = n_pos + 5 if "wide" in kind else min(3, n_pos)
    if "custom" in kind:
        shape = {"custom by batch": (batch, 1), "custom by head": (1, n_heads)}.get(kind, (1, 1))
        custom = torch.rand(*shape, n_query, n_pos, generator=generator) < 0.6
        custom[..., n_query // 2, :] = False
    causal = "bidirectional" not in kind
    return Case(q.to(dtype), k.to(dtype), AttentionMask(causal, key_mask, window, custom))


@dataclass(frozen=True)
class Defined:
    """The statistics of a case, each from its definition."""

    scores: Array
    lse: Array
    pattern: Array

    @classmethod
    def of(cls, case: Case) -> "Defined":
        """Scores, row log-sum-exp and pattern of the inputs as they were rounded."""
        q, k = case.q.double().numpy(), case.k.double().numpy()
        allowed = case.allowed()
        group = q.shape[2] // k.shape[2]
        scores = np.full(allowed.shape, -np.inf)
        lse = np.full(allowed.shape[:3], -np.inf)
        pattern = np.zeros(allowed.shape)
        for b, h, i in np.ndindex(lse.shape):
            keys = np.flatnonzero(allowed[b, h, i])
            for j in keys:
                scores[b, h, i, j] = case.scale * math.fsum(q[b, i, h] * k[b, j, h // group])
            if len(keys):
                top = scores[b, h, i].max()
                total = math.fsum(math.exp(scores[b, h, i, j] - top) for j in keys)
                lse[b, h, i] = top + math.log(total)
            for j in keys:
                pattern[b, h, i, j] = math.exp(scores[b, h, i, j] - lse[b, h, i])
        return cls(scores, lse, pattern)

    def prob_at(self, keys: Array) -> Array:
        """One weight of each row; 0 where the key is -1."""
        found = np.zeros(self.lse.shape)
        for b, h, i in np.ndindex(found.shape):
            if keys[b, i] >= 0:
                found[b, h, i] = self.pattern[b, h, i, keys[b, i]]
        return found

    def expected(self, values: Array) -> Array:
        """The mean of each column under each row; columns are shared, or by head."""
        found = np.zeros((*self.lse.shape, values.shape[-1]))
        for b, h, i in np.ndindex(self.lse.shape):
            for j in range(self.pattern.shape[3]):
                own = values[b, j] if values.ndim == 3 else values[b, j, h]
                found[b, h, i] += self.pattern[b, h, i, j] * own
        return found

    def entropy(self) -> Array:
        """Minus the sum of p ln p of each row, in nats."""
        found = np.zeros(self.lse.shape)
        for b, h, i in np.ndindex(found.shape):
            found[b, h, i] = -math.fsum(p * math.log(p) for p in self.pattern[b, h, i] if p > 0)
        return found

    def received(self, weights: Array) -> Array:
        """What each key gets from all queries, each with its weight."""
        batch, n_heads, n_query, n_key = self.pattern.shape
        found = np.zeros((batch, n_heads, n_key))
        for b, h, j in np.ndindex(found.shape):
            for i in range(n_query):
                found[b, h, j] += weights[b, i] * self.pattern[b, h, i, j]
        return found

    def strongest(self) -> tuple[Array, Array]:
        """The largest weight of each row and its key; 0 and -1 in a row without a key."""
        top, place = np.zeros(self.lse.shape), np.full(self.lse.shape, -1)
        for b, h, i in np.ndindex(top.shape):
            for j, p in enumerate(self.pattern[b, h, i]):
                if p > top[b, h, i]:
                    top[b, h, i], place[b, h, i] = p, j
        return top, place


def some_keys(case: Case, *, seed: int = 1) -> Tensor:
    """A key for each query, allowed or not; the first query of each sequence has none."""
    generator = torch.Generator().manual_seed(seed)
    batch, n_query = case.q.shape[:2]
    keys = torch.randint(case.k.shape[1], (batch, n_query), generator=generator)
    keys[:, 0] = -1
    return keys


class LargestTensor(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                # A view takes no memory, however large it looks.
                self.numbers = max(self.numbers, tensor.untyped_storage().size() // tensor.itemsize)
        return result
