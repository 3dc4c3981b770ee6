"""Every head's attention on one text, as a result: a table of heads, and the patterns themselves.

One invariant: a pattern is the model's own, row by row and key by key; a file holds it rounded, as
it says, and a head whose pattern was left out is named.
"""

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float

from interp.errors import AnalysisError
from interp.tables import HeadScores, head_label, head_words, strict_json

FINE_CELLS = 2**20
"""Up to so many weights in all that queries see, a file holds 16 bits of each."""

COARSE_CELLS = 22 * 2**20
"""Up to so many it holds 8, above 6. A weight of 8 bits takes 5.3 at most, deflated, since those of
a query sum to 1, and one of 6 bits 3.3: a page of 144 heads on 512 tokens stays below 25 MB."""

_LEVELS = {16: 65535, 8: 255, 6: 63}


@dataclass(frozen=True, eq=False)
class Patterns(HeadScores):
    """What every head attends to on one text.

    `table` has a row a head: `from_uniform`, then the scores of all analyses that the text allows,
    each with its null. `tokens` label the positions, equal ones included. `weights` are the
    patterns `[query, key]` of the heads that were kept, the furthest from uniform first;
    `params["left_out"]` names the others.
    """

    tokens: tuple[str, ...] = ()
    weights: Mapping[tuple[int, int], Float[np.ndarray, "query key"]] = field(default_factory=dict)

    _kind: ClassVar[str] = "a file of attention patterns"

    def __post_init__(self) -> None:
        for (layer, head), pattern in self.weights.items():
            if pattern.shape != (len(self.tokens),) * 2:
                raise AnalysisError(
                    f"L{layer}H{head}: a pattern of {' x '.join(map(str, pattern.shape))} for "
                    f"{len(self.tokens)} tokens; it should be [query, key] of one sequence"
                )

    @property
    def drawn(self) -> list[tuple[int, int]]:
        """The heads whose pattern is here, the furthest from uniform first."""
        return list(self.weights)

    def pattern(self, layer: int, head: int) -> Float[np.ndarray, "query key"]:
        """One head's weights: row q is what token q attends to, and sums to 1.

        Raises: AnalysisError for a head whose pattern was left out, or that there is not.
        """
        if (layer, head) not in self.weights:
            drawn = ", ".join(head_label(*one) for one in self.drawn[:8])
            raise AnalysisError(
                f"no pattern of head {head_label(layer, head)}; there are {len(self.weights)}: "
                f"{drawn or 'none'}{', …' if len(self.weights) > 8 else ''}"
            )
        return self.weights[layer, head]

    @property
    def bits(self) -> int:
        """How many bits of each weight a file holds: 16, a weight times 65535, rounded; or 8 or 6,
        its square root times 255 or 63, which is finer for small weights, and off by 0.004 or 0.016
        at most."""
        n = len(self.tokens)
        seen = len(self.weights) * (n * (n + 1) // 2 if self.params.get("causal") else n * n)
        return 16 if seen <= FINE_CELLS else 8 if seen <= COARSE_CELLS else 6

    @cached_property
    def coded(self) -> list[str]:
        """The patterns of `drawn` as a file and a page hold them: rounded to `bits`, row by row,
        little-endian, deflated, in base64."""
        return [_packed(pattern, self.bits) for pattern in self.weights.values()]

    def to_json(self) -> str:
        """Everything as strict JSON, the patterns rounded to `bits`."""
        plain = {one.name: getattr(self, one.name) for one in fields(self)}
        del plain["weights"]
        patterns = {
            "heads": [head_label(*one) for one in self.drawn],
            "bits": self.bits,
            "data": self.coded,
        }
        table = self.table.to_dict(orient="records")
        return strict_json({**plain, "table": table, "patterns": patterns})

    @classmethod
    def _given(cls, record: dict[str, Any]) -> dict[str, Any]:
        packed = record.pop("patterns")
        tokens = record["tokens"]
        if not isinstance(packed, dict) or not isinstance(tokens, list):
            raise TypeError("tokens and patterns are missing")
        shape = (len(tokens),) * 2
        weights = {}
        for label, data in zip(packed["heads"], packed["data"], strict=True):
            ((layer, head),) = head_words(label)
            if head is None:
                raise ValueError(f"{label} is not one head")
            weights[layer, head] = _unpacked(data, packed["bits"], shape)
        return {**record, "tokens": tuple(map(str, tokens)), "weights": weights}


def _packed(pattern: Float[np.ndarray, "query key"], bits: int) -> str:
    weights = np.clip(pattern.astype(np.float64), 0.0, 1.0)
    codes = np.rint((weights if bits == 16 else np.sqrt(weights)) * _LEVELS[bits])
    packed = codes.astype("<u2" if bits == 16 else np.uint8).tobytes()
    return base64.b64encode(zlib.compress(packed, 6)).decode("ascii")


def _unpacked(data: str, bits: int, shape: tuple[int, int]) -> Float[np.ndarray, "query key"]:
    if bits not in _LEVELS:
        raise ValueError(f"patterns of {bits} bits: {', '.join(map(str, _LEVELS))} are known")
    try:
        raw = zlib.decompress(base64.b64decode(data, validate=True))
    except zlib.error as fault:
        raise ValueError(f"a pattern cannot be unpacked: {fault}") from None
    codes = np.frombuffer(raw, dtype="<u2" if bits == 16 else np.uint8).reshape(shape)
    roots = codes.astype(np.float64) / _LEVELS[bits]
    return (roots if bits == 16 else roots**2).astype(np.float32)
