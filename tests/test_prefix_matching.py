"""The prefix-matching score: known patterns, loops over a float64 oracle, its tokens and null."""

import numpy as np
import pytest
import torch
from tiny_models import oracle, padding, some_tokens, tiny, tiny_config

from interp.data.copies import copied_tokens, random_block, uncopied_tokens
from interp.data.repeated import TokenBatch, induction_targets
from interp.errors import AnalysisError
from interp.inputs import random_inputs
from interp.measure import analyze
from interp.models.layer_attention import LayerAttention, uniform_attention
from interp.models.patterns import Pattern
from interp.models.transformer import Transformer
from interp.registry import get


def score(pattern, batch):
    """The score of one pattern `[query, key]`, the same for every sequence."""
    pattern = torch.as_tensor(pattern, dtype=torch.float32)
    attention = LayerAttention(0, Pattern(pattern.expand(len(batch.tokens), 1, -1, -1)), batch.real)
    return get("prefix-matching").measure(attention, batch)["prefix_matching"][0, 0].item()


def one_key(keys):
    return torch.nn.functional.one_hot(torch.tensor(keys), len(keys))


def given(*ids):
    tokens = torch.tensor([ids])
    return TokenBatch(tokens, induction_targets(tokens))


@pytest.mark.parametrize("bos", [None, 0])
def test_a_head_that_looks_at_targets_only_scores_1_whichever_it_prefers(bos):
    n, lead = 5, int(bos is not None)
    batch = copied_tokens(2, n, 40, seed=0, bos=bos)
    places = range(4 * n + lead)
    assert score(one_key([max(q - n + 1, 0) for q in places]), batch) == 1.0
    oldest = [lead + (q - lead) % n + 1 if q >= n + lead else 0 for q in places]
    assert score(one_key(oldest), batch) == 1.0
    shared = np.zeros((len(places), len(places)))
    for q in places:
        keys = [q - c * n + 1 for c in range(1, (q - lead) // n + 1)] if q >= n + lead else [q]
        shared[q, keys] = 1 / len(keys)
    assert score(shared, batch) == pytest.approx(1.0, abs=1e-6)


def test_other_patterns_score_nothing():
    n = 5
    batch = copied_tokens(2, n, 40, seed=0, bos=0)
    places = range(4 * n + 1)
    assert score(one_key([0 for _ in places]), batch) == 0.0
    assert score(one_key(list(places)), batch) == 0.0
    assert score(one_key([max(q - 1, 0) for q in places]), batch) == 0.0
    assert score(one_key([max(q - n, 0) for q in places]), batch) == 0.0


def test_an_even_head_scores_the_share_of_targets_among_its_keys():
    n = 25
    batch = copied_tokens(1, n, 40, seed=0, bos=0)
    found = get("prefix-matching").measure(uniform_attention(batch.real), batch)
    # Query q sees q + 1 keys, of which as many are targets as there are earlier copies.
    expected = np.mean([(q - 1) // n / (q + 1) for q in range(n + 1, 4 * n + 1)])
    assert found["prefix_matching"][0, 0].item() == pytest.approx(expected, abs=1e-6)
    assert expected == pytest.approx(0.03, abs=0.005)


def test_targets_neither_wrap_around_nor_are_the_query_itself():
    # Queries 2 and 3 have the targets 1 and 2.
    assert score(one_key([0, 0, 1, 2]), given(5, 6, 5, 6)) == 1.0
    assert score(one_key([0, 1, 0, 0]), given(5, 6, 5, 6)) == 0.0
    # The last token is no predecessor of the first: with a wrap-around, key 0 would be a target.
    assert np.isnan(score(one_key([0, 0, 0]), given(5, 5, 6)))
    assert score(one_key([0, 1, 0, 0]), given(6, 5, 6, 6)) == 0.0
    # The third of three equal tokens has the copies 0 and 1; what follows the latter is itself.
    assert score(one_key([0, 0, 1]), given(5, 5, 5)) == 1.0
    assert score(one_key([0, 0, 2]), given(5, 5, 5)) == 0.0


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("family", ["mha", "gqa", "mqa", "rotary"])
def test_scores_equal_loops_over_the_oracle(family, side, monkeypatch):
    # Tiles of a few rows, so that there are several.
    monkeypatch.setattr("interp.models.tiles.TILE_NUMBERS", 1)
    monkeypatch.setattr("interp.models.tiles.MIN_TILE_ROWS", 4)
    model = tiny(family)
    tokens = some_tokens(4, 15, d_vocab=4)
    mask = padding(side, [15, 9, 12, 2], 15)
    seen = oracle(model, tokens, mask)
    table = analyze(model, "prefix-matching", tokens, attention_mask=mask).table
    for layer in range(2):
        pattern = seen[f"blocks.{layer}.attn.hook_pattern"]
        rows = []
        for b, ids in enumerate(tokens.tolist()):
            real = [p for p in range(15) if mask is None or mask[b, p]]
            found = []
            for q in real:
                targets = [k + 1 for k in real if k + 1 < q and ids[k] == ids[q]]
                if targets:
                    found.append(sum(pattern[b, :, q, k] for k in targets))
            if found:
                rows.append(np.mean(found, axis=0))
        own = table[table["layer"] == layer]
        assert own["prefix_matching"].to_numpy() == pytest.approx(np.mean(rows, axis=0), abs=1e-5)
        assert own["n"].tolist() == [len(rows)] * 4


def test_default_tokens_are_those_of_the_paper():
    model = tiny("mha", n_ctx=128, d_vocab=300, bos_token_id=0)
    inputs = random_inputs(model, drawing=get("prefix-matching").drawing)
    (batch,) = inputs.batches
    assert batch.tokens.shape == (10, 101)
    assert (batch.tokens[:, 0] == 0).all()
    copies = batch.tokens[:, 1:].unflatten(1, (4, 25))
    assert (copies == copies[:, :1]).all()
    assert all(len(set(row.tolist())) == 25 and 0 not in row for row in copies[:, 0])
    assert torch.equal(batch.targets[:, 26:], torch.arange(2, 77).expand(10, -1))
    assert (batch.targets[:, :26] == -1).all()
    assert inputs.description == (
        "[BOS = 0] + blocks of 25 distinct random tokens four times, 10 sequences of each"
    )


def test_the_null_has_no_repeats_and_the_same_targets():
    n = 5
    null = uncopied_tokens(2, n, 40, seed=0, bos=0)
    assert all(len(set(row.tolist())) == 4 * n + 1 for row in null.tokens)
    assert torch.equal(null.targets, copied_tokens(2, n, 40, seed=0, bos=0).targets)
    # A head with a fixed offset scores there as much as on repeats.
    assert score(one_key([max(q - n + 1, 0) for q in range(4 * n + 1)]), null) == 1.0
    crowded = uncopied_tokens(2, n, 8, seed=0)  # four different blocks need 20 tokens
    assert crowded.tokens.shape == (2, 20)
    assert int(crowded.tokens.max()) < 8


def test_the_null_of_given_tokens_looks_in_the_same_places():
    scores = analyze(
        tiny("mha", bos_token_id=None), "prefix-matching", some_tokens(4, 15, d_vocab=4)
    )
    assert (scores.table["prefix_matching_null"] > 0).all()


def test_blocks_too_short_or_too_long_are_refused():
    with pytest.raises(AnalysisError, match="block = 2"):
        copied_tokens(2, 2, 40, seed=0)
    with pytest.raises(AnalysisError, match="needs that many distinct tokens"):
        random_block(2, 41, 40, seed=0)


def test_no_head_of_an_untrained_model_matches_prefixes():
    model = Transformer(tiny_config(n_ctx=128, d_vocab=120), seed=0)
    assert analyze(model, "prefix-matching").summary["selected"] == 0
