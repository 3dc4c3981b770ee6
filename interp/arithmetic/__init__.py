"""The arithmetic of attention: parameters by matrix, and what a KV cache takes, of any shape.

Nothing is loaded or run: numbers follow from a model's sizes alone. Bytes are given as GB (10^9)
and as GiB (2^30), which differ by 7 percent and are often mixed up.
"""

from dataclasses import dataclass

from interp.errors import AnalysisError

BYTES = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "float8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
}
"""Bytes of a number of each dtype; scales of integer caches are not counted."""

GB, GIB = 10**9, 2**30


@dataclass(frozen=True)
class Latent:
    """The widths of latent attention (MLA): of the latent that keys and values are made from, of
    the rotary key that all heads share, and of the latent of queries, where they have one."""

    kv: int
    rope: int
    query: int | None = None


@dataclass(frozen=True)
class AttentionShape:
    """The sizes of a model's attention.

    `d_head` is the width of a query and key head, with a `latent` of its part without rotary
    positions; `d_value` that of a value, as wide where it is None. `windows` are how many keys each
    layer keeps, None for all of them; an empty tuple where every layer keeps all. `source` and
    `note` say where the sizes are from, and what they leave out.
    """

    name: str
    n_layers: int
    n_heads: int
    n_key_value_heads: int
    d_head: int
    d_model: int
    d_value: int | None = None
    latent: Latent | None = None
    windows: tuple[int | None, ...] = ()
    source: str = ""
    note: str = ""

    @property
    def kind(self) -> str:
        """MHA, GQA, MQA or MLA."""
        if self.latent is not None:
            return "MLA"
        return {self.n_heads: "MHA", 1: "MQA"}.get(self.n_key_value_heads, "GQA")

    @property
    def value_width(self) -> int:
        """Width of the values of one head."""
        return self.d_head if self.d_value is None else self.d_value

    @property
    def width(self) -> int:
        """h * d_head: the width of all heads together, which need not be d_model."""
        return self.n_heads * self.d_head

    def weights(self) -> dict[str, int]:
        """The numbers in each matrix of one layer's attention, biases and norms not counted."""
        d, h = self.d_model, self.n_heads
        if self.latent is None:
            shared = self.n_key_value_heads * d
            return {
                "W_Q": self.width * d,
                "W_K": shared * self.d_head,
                "W_V": shared * self.value_width,
                "W_O": h * self.value_width * d,
            }
        kv, rope, query = self.latent.kv, self.latent.rope, self.latent.query
        # What queries are made from: their latent, or without one the residual stream.
        source = d if query is None else query
        return {
            **({} if query is None else {"W_DQ": query * d}),
            "W_UQ": self.width * source,
            "W_QR": h * rope * source,
            "W_DKV": kv * d,
            "W_KR": rope * d,
            "W_UK": self.width * kv,
            "W_UV": h * self.value_width * kv,
            "W_O": h * self.value_width * d,
        }

    def layer_elements(self) -> int:
        """Numbers that one layer caches of one token: keys and values, or the latent and the
        shared rotary key."""
        if self.latent is not None:
            return self.latent.kv + self.latent.rope
        return self.n_key_value_heads * (self.d_head + self.value_width)

    def mha_layer_elements(self) -> int:
        """The same if every query head had keys and values of its own."""
        return self.n_heads * (self.d_head + self.value_width)

    def bytes_per_token(self, dtype: str) -> float:
        """Bytes that the next token adds, in all layers, before any window is full."""
        return self.n_layers * self.layer_elements() * bytes_of(dtype)

    def cache_bytes(self, context: int, batch: int, dtype: str, *, mha: bool = False) -> float:
        """Bytes of the cache of `batch` sequences of `context` tokens, or of the same with MHA.

        A layer with a window keeps no more than its window.
        """
        each = self.mha_layer_elements() if mha else self.layer_elements()
        kept = [context if own is None else min(own, context) for own in self.windows]
        tokens = sum(kept) if kept else self.n_layers * context
        return batch * tokens * each * bytes_of(dtype)


def bytes_of(dtype: str) -> float:
    """Bytes of one number. Raises: AnalysisError for an unknown dtype."""
    if dtype not in BYTES:
        raise AnalysisError(f"dtype {dtype!r}: it should be one of {', '.join(BYTES)}")
    return BYTES[dtype]
