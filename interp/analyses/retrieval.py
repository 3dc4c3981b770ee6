"""Retrieval: does a head look back from a question to the place that answers it?"""

import re
from typing import Annotated

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.data.drawing import Drawing
from interp.data.planted import CUE, planted_needle, span, unasked_needle
from interp.data.repeated import TokenBatch
from interp.errors import AnalysisError
from interp.models.layer_attention import LayerAttention
from interp.registry import analysis

NEEDLE_IN_HAYSTACK = Drawing(
    planted_needle,
    unasked_needle,
    blocks=(64, 128, 256),
    batch=8,
    length=lambda block: block + CUE,
    words="distinct random tokens with a needle of four, and its first two again",
)


@analysis(
    "retrieval",
    unit="attention probability",
    null="unrepeated",
    noun="retrieval head",
    effect=0.2,
    drawing=NEEDLE_IN_HAYSTACK,
)
def retrieval(
    attention: LayerAttention,
    batch: TokenBatch,
    *,
    needle: Annotated[str, "which given tokens hold the answer, as START:STOP from 0"] = "",
    question: Annotated[str, "which given tokens ask for it, as START:STOP from 0"] = "",
) -> dict[str, Float[Tensor, "batch n_heads"]]:
    """Attention from the tokens of a question to a needle planted earlier in the sequence.

    The mean over the question's tokens q of the sum of A[q, k] over the needle's tokens k. Drawn
    sequences hold a needle of four tokens at a random depth of a haystack in which no token
    repeats, and end with its first two, the cue. 0..1: a head whose question tokens look at nothing
    but the needle scores 1, a first-token sink 0, a head that spreads its attention evenly about
    4/n. `at_answer` is what the last question token puts on the token after its latest copy: on
    drawn sequences the one right after the cue; NaN where that is not in the needle.

    On given tokens `needle` and `question` say which positions are meant, counted from 0 over the
    whole row, BOS and padding included, STOP left out, the same in every row. The null has a
    question of tokens that occur nowhere (and, on given tokens, no repeats at all), in the same
    places.

    It misleads as a measure of meaning: on drawn tokens duplicate-token and induction heads score
    too, since the cue is a repeat; `at_answer` sets those apart that look past the cue. A needle
    near the question favours heads that look nearby, which the null takes account of. Attention is
    not influence.

    Raises: AnalysisError for given tokens without both spans, a span that is not within them, or a
    question that begins before the needle ends.

    Source: after Wu et al. 2024 ("Retrieval Head Mechanistically Explains Long-Context Factuality",
    arXiv 2404.15574). They count how often a head's strongest key is the needle token that the
    model generates at that step; ours is attention mass under a given question, with nothing
    generated, so the numbers differ.
    """
    needles, questions = _marked(batch, needle, question)
    questions = questions & attention.key_mask
    mass = attention.expected(needles[:, :, None].to(torch.float32))[..., 0]
    place = torch.arange(questions.shape[1], device=questions.device)
    last = place == place.where(questions, -1).amax(dim=1, keepdim=True)
    answers = last & (batch.targets >= 0) & needles.gather(1, batch.targets.clamp(min=0))
    at_answer = attention.prob_at(batch.targets.where(answers, -1))
    return {
        "retrieval": attention.mean(mass, questions),
        "at_answer": attention.mean(at_answer, answers),
    }


def _marked(
    batch: TokenBatch, needle: str, question: str
) -> tuple[Bool[Tensor, "batch pos"], Bool[Tensor, "batch pos"]]:
    """Where the needle and the question are."""
    if batch.needle is not None and batch.question is not None:
        if needle or question:
            raise AnalysisError("needle and question are for given tokens: drawn ones have theirs")
        return batch.needle, batch.question
    if not (needle and question):
        raise AnalysisError(
            "retrieval on given tokens needs to be told where to look: needle='START:STOP' and "
            "question='START:STOP' (--needle and --question), positions from 0, STOP left out"
        )
    n_pos = batch.tokens.shape[1]
    start, stop = _positions("needle", needle, n_pos)
    first, last = _positions("question", question, n_pos)
    if first < stop:
        raise AnalysisError(
            f"question = {question!r} begins before needle = {needle!r} ends: it could not look at "
            "all of it"
        )
    return span(start, stop, batch.tokens), span(first, last, batch.tokens)


def _positions(name: str, given: str, n_pos: int) -> tuple[int, int]:
    match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", given)
    if match is None:
        raise AnalysisError(f"{name} = {given!r} should be START:STOP, as in 10:14")
    start, stop = int(match[1]), int(match[2])
    if not start < stop <= n_pos:
        raise AnalysisError(
            f"{name} = {given!r} is not within the sequence: 0 <= START < STOP <= {n_pos}"
        )
    return start, stop
