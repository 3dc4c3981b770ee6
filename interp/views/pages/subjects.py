"""What results know of heads, for a page's explorer: models by their results, runs by steps."""

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from interp.comparison.result import Comparison
from interp.patterns import Patterns
from interp.tables import HeadScores, Result, head_label
from interp.views.ablation_words import HEAD_TABLES, column, compared, effect_words, noun
from interp.views.figures import style
from interp.views.figures.runs import Run, head_grid
from interp.views.figures.style import drawable
from interp.views.pages.explorer import Score, Subject, Text
from interp.views.pages.facts import words

PROBABILITY = "attention probability"


def result_subjects(results: Sequence[Result]) -> tuple[Subject, ...]:
    """One subject for each result with a row for each query head of a model.

    Scores come first, then effects, then what was seen on a single text.
    """

    def rank(result: Result) -> int:
        return 2 if isinstance(result, Patterns) else int(result.analysis in HEAD_TABLES)

    return tuple(
        subject
        for result in sorted(results, key=rank)
        if isinstance(result, HeadScores) and noun(result) == "head"
        for subject in _of_result(result)
    )


def comparison_subjects(comparison: Comparison) -> tuple[Subject, ...]:
    """Both models of a comparison."""
    about = f"{comparison.inputs}; seed {comparison.seed}"
    found = []
    for label in comparison.labels:
        table, gone = comparison.heads_of(label), comparison.pruned_of(label)
        shape = _shape(table, gone)
        scores = [
            _score(table, shape, own, words(own), unit, about)
            for own, unit in comparison.units.items()
        ]
        labels = tuple(head_label(*one) for one in gone)
        found.append(Subject(label, *shape, labels, tuple(filter(None, scores)), ()))
    return tuple(found)


def run_subject(run: Run, name: str, columns: Mapping[str, str], about: str) -> Subject:
    """A training run at each step at which its heads were measured.

    `columns` are the scores in its table, attention probabilities, and what they are called.
    """
    table = run.table
    shape = _shape(table, [])
    moments = [own for _, own in table.groupby("step", sort=True)]
    scores = [
        Score(
            called,
            PROBABILITY,
            about,
            tuple(_row(moment, shape, own) for moment in moments),
            None,
            None,
            *(0.0, 1.0),
            diverging=False,
            effect=False,
        )
        for own, called in columns.items()
    ]
    steps = tuple(int(moment["step"].iloc[0]) for moment in moments)
    tokens = tuple(int(moment["tokens"].iloc[0]) for moment in moments if "tokens" in moment)
    return Subject(name, *shape, (), tuple(scores), (), steps, tokens)


def pattern_text(patterns: Patterns, step: int | None = None) -> Text:
    """The patterns of a result, with what they are and what was left out, in words."""
    n_left = len(patterns.params.get("left_out") or ())  # type: ignore[arg-type]
    n_kept = len(patterns.drawn)
    told = f"{patterns.inputs}, {opening(patterns)}; " + (
        f"{n_kept} pattern{'' if n_kept == 1 else 's'} kept, {n_left} left out."
        if n_left
        else "the patterns of all heads were kept."
    )
    return Text(
        patterns.tokens,
        f"{told[:1].upper()}{told[1:]}",
        patterns.bits,
        tuple(head_label(*one) for one in patterns.drawn),
        tuple(patterns.coded),
        step,
        causal=bool(patterns.params.get("causal", True)),
        windows=tuple(patterns.params.get("windows") or ()),  # type: ignore[arg-type]
    )


def opening(patterns: Patterns) -> str:
    """How the text of some patterns begins, in quotes, with its line breaks written out."""
    spelled = any(len(token) > 1 and token[0].isspace() for token in patterns.tokens)
    text = ("" if spelled else " ").join(patterns.tokens)
    text = text.replace("; ", ";")  # which separates facts where this is one of them
    text = text.replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    return f"“{text if len(text) <= OPENING else text[:OPENING] + '…'}”"


OPENING = 40
"""Characters of a text that tell it from others."""


def _of_result(result: HeadScores) -> Iterable[Subject]:
    table, gone = result.table, result.pruned_heads
    if table.empty or result.score not in table:
        return
    shape = _shape(table, gone)
    inputs = result.inputs
    if isinstance(result, Patterns):
        inputs += f"; {opening(result)}"
    about = "; ".join(filter(None, [inputs, _n(table), f"seed {result.seed}"]))
    texts: tuple[Text, ...] = ()
    if isinstance(result, Patterns):
        scores = _pattern_scores(result, shape, about)
        texts = (pattern_text(result),)
    elif result.analysis in HEAD_TABLES:
        scores = _effects(result, shape, about)
    else:
        scores = [_score(table, shape, result.score, words(result.score), result.unit, about)]
    labels = tuple(head_label(*one) for one in gone)
    yield Subject(result.model, *shape, labels, tuple(filter(None, scores)), texts)


def _pattern_scores(patterns: Patterns, shape: tuple[int, int], about: str) -> list[Score | None]:
    """How far each head is from uniform, and its scores, on one text."""
    own = [name for name in patterns.table if f"{name}_null" in patterns.table]
    return [
        _score(
            patterns.table,
            shape,
            name,
            f"{words(name)}, on the text",
            patterns.unit if name == patterns.score else "",
            about,
        )
        for name in (patterns.score, *own)
    ]


def _effects(result: HeadScores, shape: tuple[int, int], about: str) -> list[Score | None]:
    """What ablating each head does, by method, and its direct part where that is known."""
    metric = str(result.params.get("metric", "the metric"))
    lead = {
        "ablation": "Ablation",
        "all-but-one": "Kept alone in its layer",
        "importance": "Importance",
    }[result.analysis]
    found = []
    for score in compared(result):
        method = score if len(compared(result)) > 1 else str(result.params.get("method") or "")
        called = ", ".join(filter(None, [lead, method, metric]))
        told = f"{effect_words(result)}; {about}"
        table, signed = result.table, result.analysis != "importance"  # which is a size
        kind = {"effect": True, "signed": signed}
        found.append(_score(table, shape, score, called, result.unit, told, **kind))
        direct = column(result, score, "direct")
        if direct in table and table[direct].notna().any():
            named = f"{called}, direct part"
            found.append(_score(table, shape, direct, named, result.unit, told, **kind))
    return found


def _score(
    table: pd.DataFrame,
    shape: tuple[int, int],
    name: str,
    called: str,
    unit: str,
    about: str,
    *,
    effect: bool = False,
    signed: bool = False,
) -> Score | None:
    """A column as the explorer has it; None where no head has a value.

    `signed` values are drawn around 0 though none may be below it.
    """
    values = _row(table, shape, name)
    if all(value is None for value in values):
        return None
    diverging = signed or any(value is not None and value < 0 for value in values)
    low, high = style.colour_range(values, diverging)
    if unit == PROBABILITY and not diverging:
        low, high = 0.0, 1.0
    beside = [
        (_row(table, shape, own),) if (own := f"{name}{ending}") in table else None
        for ending in ("_se", "_null")
    ]
    errors, nulls = (
        None if rows is None or all(value is None for value in rows[0]) else rows for rows in beside
    )
    return Score(called, unit, about, (values,), errors, nulls, low, high, diverging, effect)


def _row(table: pd.DataFrame, shape: tuple[int, int], name: str) -> tuple[float | None, ...]:
    n_layers, n_heads = shape
    values: list[float | None] = [None] * (n_layers * n_heads)
    for layer, head, value in zip(table["layer"], table["head"], table[name], strict=True):
        values[int(layer) * n_heads + int(head)] = drawable(value)
    return tuple(values)


def _shape(table: pd.DataFrame, gone: Sequence[tuple[int, int]]) -> tuple[int, int]:
    layers, heads, _ = head_grid(table.drop_duplicates(["layer", "head"]), "layer", gone)
    return len(layers), len(heads)


def _n(table: pd.DataFrame) -> str:
    counts = sorted(set(table["n"].dropna())) if "n" in table else []
    if not counts:
        return ""
    ends = dict.fromkeys(f"{float(count):,.0f}" for count in (counts[0], counts[-1]))
    return f"n = {' to '.join(ends)}"
