"""What a page's explorer knows of each head: its scores, its patterns, and where they come from.

One invariant: everything is taken from results; a score or a pattern that is not there is missing,
and the page says so.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

Rows = tuple[tuple[float | None, ...], ...]
"""A value for each head, for each step; None where it is missing."""


@dataclass(frozen=True)
class Score:
    """One column of head scores, as the explorer shows it.

    `values[step][layer * n_heads + head]` has one row for each of the subject's steps, or a single
    one; None is missing. `errors` and `nulls` have the same shape, or are None where there are
    none. `effect` says that it is what ablating the head does.
    """

    name: str
    unit: str
    about: str
    values: Rows
    errors: Rows | None
    nulls: Rows | None
    low: float
    high: float
    diverging: bool
    effect: bool


@dataclass(frozen=True)
class Text:
    """The patterns of some heads on one text, packed as `interp.patterns.Patterns.coded` does.

    `heads` are labels such as 5.1, in the order of `data`; `step` is that of the checkpoint. A
    query sees no later keys where attention is `causal`, and of layers with a window in `windows`
    only the latest so many keys, its own included.
    """

    tokens: tuple[str, ...]
    about: str
    bits: int
    heads: tuple[str, ...]
    data: tuple[str, ...]
    step: int | None = None
    causal: bool = True
    windows: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class Subject:
    """A model, or one training run at its `steps`, whose heads can be looked at.

    `gone` are the labels of heads that are pruned; `tokens` are those seen at each step.
    """

    name: str
    n_layers: int
    n_heads: int
    gone: tuple[str, ...]
    scores: tuple[Score, ...]
    texts: tuple[Text, ...]
    steps: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()


def merged(subjects: Iterable[Subject]) -> tuple[Subject, ...]:
    """Each subject once, in the order of appearance, with all that its namesakes know.

    What is there twice, word for word, stays once.
    """
    found: dict[str, Subject] = {}
    for subject in subjects:
        before = found.get(subject.name)
        found[subject.name] = subject if before is None else _together(before, subject)
    return tuple(found.values())


def _together(one: Subject, other: Subject) -> Subject:
    n_layers, n_heads = (max(one.n_layers, other.n_layers), max(one.n_heads, other.n_heads))
    wide = [replace(own, scores=_widened(own, n_layers, n_heads)) for own in (one, other)]
    stepped = one if one.steps else other
    return Subject(
        one.name,
        n_layers,
        n_heads,
        tuple(dict.fromkeys((*one.gone, *other.gone))),
        tuple(dict.fromkeys(score for own in wide for score in own.scores)),
        tuple(dict.fromkeys((*one.texts, *other.texts))),
        stepped.steps,
        stepped.tokens,
    )


def _widened(subject: Subject, n_layers: int, n_heads: int) -> tuple[Score, ...]:
    """The scores with places for all heads of a larger grid; tables may leave the last ones out."""
    if (subject.n_layers, subject.n_heads) == (n_layers, n_heads):
        return subject.scores

    def wide(rows: Rows) -> Rows:
        at = range(n_layers)
        own = [
            (a, b) if a < subject.n_layers and b < subject.n_heads else None
            for a in at
            for b in range(n_heads)
        ]
        return tuple(
            tuple(
                None if place is None else row[place[0] * subject.n_heads + place[1]]
                for place in own
            )
            for row in rows
        )

    return tuple(
        replace(
            score,
            values=wide(score.values),
            errors=None if score.errors is None else wide(score.errors),
            nulls=None if score.nulls is None else wide(score.nulls),
        )
        for score in subject.scores
    )
