"""Which random sequences an analysis is defined on, and which have nothing for it to find."""

from collections.abc import Callable
from dataclasses import dataclass

from interp.data.repeated import TokenBatch, repeated_tokens, unrepeated_tokens

Draw = Callable[..., TokenBatch]
"""`(n_sequences, block, d_vocab, *, seed, bos, excluded) -> TokenBatch`."""


@dataclass(frozen=True)
class Drawing:
    """How an analysis's random tokens are drawn, and those of its null.

    `blocks` are the default sizes, of which those that fit a model are used, with `batch` sequences
    of each; `length` says how long a sequence of a block becomes, without BOS; `words` describe a
    block in the results. Sequences are led by BOS as the model expects, or, without `bos`, only
    where it is asked for.
    """

    tokens: Draw
    null: Draw
    blocks: tuple[int, ...]
    batch: int
    length: Callable[[int], int]
    words: str
    bos: bool = True


REPEATED = Drawing(
    repeated_tokens,
    unrepeated_tokens,
    blocks=(8, 12, 16, 20, 25, 32, 50),
    batch=8,
    length=lambda block: 2 * block,
    words="distinct random tokens twice",
)
"""Several lengths: a head with one fixed offset would score on a single one."""
