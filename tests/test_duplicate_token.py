"""The duplicate-token score: known patterns, loops over a float64 oracle, and its null."""

import numpy as np
import pytest
import torch
from tiny_models import oracle, padding, some_tokens, tiny, tiny_config

from interp.data.repeated import TokenBatch, induction_targets, repeated_tokens, unrepeated_tokens
from interp.measure import analyze
from interp.models.layer_attention import LayerAttention
from interp.models.patterns import Pattern
from interp.models.transformer import Transformer
from interp.registry import get


def score_of(keys, batch):
    """The score of a head that puts everything on keys[q], the same for every sequence."""
    pattern = torch.nn.functional.one_hot(torch.tensor(keys), len(keys)).float()
    attention = LayerAttention(0, Pattern(pattern.expand(len(batch.tokens), 1, -1, -1)), batch.real)
    measured = get("duplicate-token").measure(attention, batch)
    assert measured["duplicate_token"].shape == (len(batch.tokens), 1)
    return measured["duplicate_token"][0, 0].item(), measured["sink"][0, 0].item()


@pytest.mark.parametrize("bos", [None, 0])
def test_patterns_with_known_scores(bos):
    n, lead = 8, int(bos is not None)
    batch = repeated_tokens(2, n, 40, seed=0, bos=bos)
    places = range(2 * n + lead)
    assert score_of([max(q - n, 0) for q in places], batch)[0] == 1.0
    # Without BOS the first query of the second copy has its own copy at the first token.
    assert score_of([0] * len(places), batch) == ((1 - lead) / n, 1.0)
    assert score_of([max(q - n + 1, 0) for q in places], batch)[0] == 0.0  # induction
    assert score_of(list(places), batch)[0] == 0.0
    assert score_of([max(q - 1, 0) for q in places], batch)[0] == 0.0


def test_the_latest_copy_counts_even_directly_before_and_no_earlier_one():
    tokens = torch.tensor([[7, 7, 3, 7]])
    batch = TokenBatch(tokens, induction_targets(tokens))
    assert score_of([0, 0, 0, 1], batch)[0] == 1.0  # queries 1 and 3 have a copy
    assert score_of([0, 0, 0, 0], batch)[0] == 0.5
    alone = torch.tensor([[1, 2, 3, 4]])
    assert np.isnan(score_of([0, 0, 1, 2], TokenBatch(alone, induction_targets(alone)))[0])


@pytest.mark.parametrize("bos", [None, 0])
def test_a_fixed_offset_scores_as_much_on_the_null(bos):
    n = 8
    null = unrepeated_tokens(2, n, 40, seed=0, bos=bos)
    n_pos = null.tokens.shape[1]
    assert all(len(set(row.tolist())) == n_pos for row in null.tokens)
    assert score_of([max(q - n, 0) for q in range(n_pos)], null)[0] == 1.0
    given = analyze(
        tiny("mha", bos_token_id=None), "duplicate-token", some_tokens(4, 15, d_vocab=5)
    )
    assert given.table["duplicate_token_null"].notna().all()


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("family", ["mha", "gqa", "mqa", "rotary"])
def test_scores_equal_loops_over_the_oracle(family, side):
    model = tiny(family)
    tokens = some_tokens(4, 15, d_vocab=5)
    mask = padding(side, [15, 9, 12, 2], 15)
    seen = oracle(model, tokens, mask)
    table = analyze(model, "duplicate-token", tokens, attention_mask=mask).table
    for layer in range(2):
        pattern = seen[f"blocks.{layer}.attn.hook_pattern"]
        rows = []
        for b, ids in enumerate(tokens.tolist()):
            real = [p for p in range(15) if mask is None or mask[b, p]]
            found = []
            for q in real:
                copies = [k for k in real if k < q and ids[k] == ids[q]]
                if copies:
                    found.append(pattern[b, :, q, copies[-1]])
            if found:
                rows.append(np.mean(found, axis=0))
        own = table[table["layer"] == layer]
        assert own["duplicate_token"].to_numpy() == pytest.approx(np.mean(rows, axis=0), abs=1e-5)
        assert own["n"].tolist() == [len(rows)] * 4


def test_no_head_of_an_untrained_model_is_a_duplicate_token_head():
    model = Transformer(tiny_config(n_ctx=64, d_vocab=120), seed=0)
    assert analyze(model, "duplicate-token").summary["selected"] == 0
