"""The retrieval score: known patterns, loops over a float64 oracle, its tokens, null and spans."""

import numpy as np
import pytest
import torch
from tiny_models import oracle, padding, some_tokens, tiny, tiny_config

from interp.data.planted import planted_needle, unasked_needle
from interp.errors import AnalysisError
from interp.measure import analyze
from interp.models.layer_attention import LayerAttention, uniform_attention
from interp.models.patterns import Pattern
from interp.models.transformer import Transformer
from interp.registry import get


def measured(pattern, batch):
    """Score and `at_answer` of a head with patterns `[sequence, query, key]`, by sequence."""
    attention = LayerAttention(0, Pattern(pattern[:, None].float()), batch.real)
    found = get("retrieval").measure(attention, batch)
    return found["retrieval"][:, 0].tolist(), found["at_answer"][:, 0].tolist()


def looking_at(batch, key):
    """Patterns in which every query looks at one key, `key` places after the needle's start."""
    start = batch.needle.long().argmax(dim=1)
    n_pos = batch.tokens.shape[1]
    one = torch.nn.functional.one_hot(start + key, n_pos)
    return one[:, None].expand(-1, n_pos, -1)


@pytest.mark.parametrize("bos", [None, 0])
def test_a_needle_is_planted_at_any_depth_and_asked_for_at_the_end(bos):
    lead = int(bos is not None)
    batch = planted_needle(200, 12, 60, seed=0, bos=bos)
    assert batch.tokens.shape == (200, 14 + lead)
    starts = []
    for ids, needle, question, targets in zip(
        batch.tokens.tolist(), batch.needle, batch.question, batch.targets, strict=True
    ):
        places = needle.nonzero()[:, 0].tolist()
        assert places == list(range(places[0], places[0] + 4))
        assert question.nonzero()[:, 0].tolist() == [12 + lead, 13 + lead]
        assert len(set(ids[:-2])) == 12 + lead
        assert ids[-2:] == [ids[places[0]], ids[places[1]]]
        assert targets[-2:].tolist() == places[1:3]
        starts.append(places[0] - lead)
    assert set(starts) == set(range(9))


@pytest.mark.parametrize("bos", [None, 0])
def test_the_null_asks_for_tokens_that_occur_nowhere(bos):
    asked = planted_needle(20, 12, 60, seed=0, bos=bos)
    null = unasked_needle(20, 12, 60, seed=0, bos=bos)
    assert torch.equal(null.tokens[:, :-2], asked.tokens[:, :-2])
    assert all(len(set(row.tolist())) == len(row) for row in null.tokens)
    for name in ("needle", "question", "targets"):
        assert torch.equal(getattr(null, name), getattr(asked, name))
    crowded = unasked_needle(20, 12, 13, seed=0, bos=bos)
    for row, needle in zip(crowded.tokens, crowded.needle, strict=True):
        assert not set(row[-2:].tolist()) & set(row[needle].tolist())
        assert row[-1] != row[-2]


def test_patterns_with_known_scores():
    batch = planted_needle(8, 12, 60, seed=0, bos=0)
    assert measured(looking_at(batch, 0), batch) == ([1.0] * 8, [0.0] * 8)
    assert measured(looking_at(batch, 2), batch) == ([1.0] * 8, [1.0] * 8)
    assert measured(looking_at(batch, 3), batch) == ([1.0] * 8, [0.0] * 8)
    assert measured(looking_at(batch, -1), batch) == ([0.0] * 8, [0.0] * 8)
    sink = torch.nn.functional.one_hot(torch.zeros(8, 15, dtype=torch.long), 15)
    assert measured(sink, batch) == ([0.0] * 8, [0.0] * 8)
    even = get("retrieval").measure(uniform_attention(batch.real), batch)
    assert even["retrieval"][:, 0].tolist() == pytest.approx([(4 / 14 + 4 / 15) / 2] * 8, abs=1e-6)
    assert even["at_answer"][:, 0].tolist() == pytest.approx([1 / 15] * 8, abs=1e-6)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("family", ["mha", "gqa", "mqa", "rotary"])
def test_scores_equal_loops_over_the_oracle(family, side):
    model = tiny(family)
    tokens = some_tokens(4, 15, d_vocab=8, seed=2)
    mask = padding(side, [15, 12, 14, 9], 15)  # the last row has no question on the right
    seen = oracle(model, tokens, mask)
    table = analyze(
        model, "retrieval", tokens, attention_mask=mask, needle="2:8", question="10:15"
    ).table
    for layer in range(2):
        pattern = seen[f"blocks.{layer}.attn.hook_pattern"]
        masses, answers = [], []
        for b, ids in enumerate(tokens.tolist()):
            real = [p for p in range(15) if mask is None or mask[b, p]]
            asking = [q for q in range(10, 15) if q in real]
            if not asking:
                continue
            masses.append(np.mean([pattern[b, :, q, 2:8].sum(-1) for q in asking], axis=0))
            q = asking[-1]
            copies = [k for k in real if k < q and ids[k] == ids[q]]
            if copies and copies[-1] + 1 in range(2, 8):
                answers.append(pattern[b, :, q, copies[-1] + 1])
        own = table[table["layer"] == layer]
        assert own["n"].tolist() == [len(masses)] * 4
        assert len(masses) == (3 if side == "right" else 4)
        assert own["retrieval"].to_numpy() == pytest.approx(np.mean(masses, axis=0), abs=1e-5)
        assert answers
        assert own["at_answer"].to_numpy() == pytest.approx(np.mean(answers, axis=0), abs=1e-5)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ({}, "needs to be told where to look"),
        ({"needle": "2:4"}, "needs to be told where to look"),
        ({"needle": "2-4", "question": "5:6"}, "needle = '2-4' should be START:STOP, as in 10:14"),
        ({"needle": "4:4", "question": "5:6"}, "needle = '4:4' is not within the sequence"),
        ({"needle": "2:4", "question": "5:16"}, "question = '5:16' is not within the sequence: 0"),
        ({"needle": "2:4", "question": "3:6"}, "question = '3:6' begins before needle = '2:4' end"),
    ],
)
def test_spans_of_given_tokens_that_say_nothing_are_refused(spans, message):
    with pytest.raises(AnalysisError, match=message):
        analyze(tiny("mha"), "retrieval", some_tokens(2, 15), **spans)


def test_drawn_tokens_have_their_needle_and_take_no_other():
    with pytest.raises(AnalysisError, match="for given tokens"):
        analyze(tiny("mha", d_vocab=40), "retrieval", needle="2:4", question="5:6")
    with pytest.raises(AnalysisError, match="block = 5: a haystack of 6 tokens"):
        analyze(tiny("mha", d_vocab=40), "retrieval", blocks=[5])


def test_drawn_tokens_fill_a_context_that_is_too_short_for_the_default():
    scores = analyze(tiny("mha", d_vocab=40), "retrieval")
    assert scores.params["blocks"] == [14]
    assert scores.table["retrieval"].between(0, 1).all()


def test_no_head_of_an_untrained_model_retrieves():
    model = Transformer(tiny_config(n_ctx=80, d_vocab=120), seed=0)
    scores = analyze(model, "retrieval")
    assert scores.params["blocks"] == [64]
    assert scores.summary["selected"] == 0
