"""`interp.attend`: every head's pattern on one text, and the scores beside it."""

import math

import hf_models
import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, oracle, padding, perturbed, some_tokens, tiny, tiny_config
from tiny_tokenizers import reader

import interp
from interp.attending import CELLS
from interp.errors import AnalysisError, ModelError, ShapeError
from interp.measure import analyze

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1]


def flat(model):
    """The same model with scores of 0 everywhere, so that every query attends evenly."""
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_Q.zero_()
            if block.attn.b_Q is not None:
                block.attn.b_Q.zero_()
    return model


def test_even_attention_is_a_triangle_of_one_over_n_and_0_from_uniform():
    patterns = interp.attend(flat(tiny()), TOKENS)
    expected = np.tril(np.ones((12, 12))) / np.arange(1, 13)[:, None]
    for layer, head in patterns.drawn:
        assert np.allclose(patterns.pattern(layer, head), expected, atol=1e-7)
    assert np.allclose(patterns.table["from_uniform"], 0.0, atol=1e-6)
    assert len(patterns.drawn) == 8


def test_all_attention_on_one_key_is_1_from_uniform():
    """Positions alone, huge: a one-layer model whose queries all point at position 0."""
    model = tiny(n_layers=1)
    patterns = interp.attend(sharpened(model), TOKENS)
    assert np.allclose(patterns.table["from_uniform"], 1.0, atol=1e-4)


def sharpened(model):
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_Q.mul_(3000.0)
            if block.attn.b_Q is not None:
                block.attn.b_Q.mul_(3000.0)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_patterns_are_those_of_the_oracle_for_every_head(family):
    model = tiny(family)
    patterns = interp.attend(model, TOKENS)
    truth = oracle(model, torch.tensor([TOKENS]))
    for layer, head in patterns.drawn:
        expected = truth[f"blocks.{layer}.attn.hook_pattern"][0, head]
        assert np.abs(patterns.pattern(layer, head) - expected).max() < 2e-6
    assert sorted(patterns.drawn) == [(a, b) for a in range(2) for b in range(4)]


@pytest.mark.parametrize("family", ["mha", "windowed", "rotary"])
def test_from_uniform_is_one_less_the_relative_entropy_of_the_oracle(family):
    model = tiny(family)
    patterns = interp.attend(model, TOKENS)
    truth = oracle(model, torch.tensor([TOKENS]))
    rows = zip(
        patterns.table["layer"], patterns.table["head"], patterns.table["from_uniform"], strict=True
    )
    for layer, head, value in rows:
        pattern = truth[f"blocks.{layer}.attn.hook_pattern"][0, head]
        window = 3 if family == "windowed" else 12
        shares = []
        for query in range(1, 12):
            seen = [p for p in pattern[query] if p > 0]
            entropy = -sum(p * math.log(p) for p in seen)
            shares.append(1 - entropy / math.log(min(query + 1, window)))
        assert value == pytest.approx(np.mean(shares), abs=1e-5)


def test_heads_come_furthest_from_uniform_first():
    patterns = interp.attend(tiny(), TOKENS)
    distance = patterns.table.set_index(["layer", "head"])["from_uniform"]
    values = [distance[one] for one in patterns.drawn]
    assert values == sorted(values, reverse=True)
    assert values[0] > values[-1]


def test_scores_are_those_of_the_analyses_on_the_same_tokens():
    model = tiny()
    table = interp.attend(model, TOKENS).table
    for name in ("induction", "previous-token", "sinks", "duplicate-token"):
        alone = analyze(model, name, [TOKENS])
        assert table[alone.score].tolist() == alone.table[alone.score].tolist()
        null = f"{alone.score}_null"
        assert np.allclose(table[null], alone.table[null])
    assert "retrieval" not in table


def test_what_cannot_be_measured_is_named_with_its_reason():
    refused = interp.attend(tiny(), TOKENS).params["refused"]
    assert "needle" in refused["retrieval"]
    assert "induction" in interp.attend(tiny(), [1, 2, 3, 4, 5]).params["refused"]


def test_tokens_label_their_positions_and_equal_ones_stay_apart():
    patterns = interp.attend(tiny(), TOKENS)
    assert patterns.tokens == tuple(map(str, TOKENS))
    assert patterns.pattern(1, 2).shape == (12, 12)
    assert patterns.params["ids"] == TOKENS


def test_text_is_read_by_the_models_vocabulary():
    model = reader()
    patterns = interp.attend(model, "ab ab")
    ids = model.vocabulary.encode("ab ab")[0]
    assert patterns.params["ids"] == ids
    assert patterns.tokens == tuple(model.vocabulary.token_texts(ids))
    assert patterns.inputs == f"a text of {len(ids)} tokens"


def test_one_token_is_possible():
    patterns = interp.attend(tiny(), [[7]])
    assert patterns.pattern(0, 0).tolist() == [[1.0]]
    assert patterns.table["from_uniform"].isna().all()


def test_of_several_sequences_one_has_to_be_chosen():
    batch = some_tokens(2, 12)
    with pytest.raises(AnalysisError, match=r"2 sequences .* \(--index\) chooses among 0 to 1"):
        interp.attend(tiny(), batch)
    with pytest.raises(AnalysisError, match="index = 2: the 2 sequences are 0 to 1"):
        interp.attend(tiny(), batch, index=2)
    chosen = interp.attend(tiny(), batch, index=1)
    assert chosen.params["ids"] == batch[1].tolist()
    assert chosen.inputs == "given ids of 12 tokens, sequence 1 of 2"


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_left_out(side):
    model, batch = tiny("rotary"), some_tokens(2, 12)
    mask = padding(side, [12, 7], 12)
    padded = interp.attend(model, batch, index=1, attention_mask=mask)
    alone = interp.attend(model, batch[1][mask[1].bool()])
    assert padded.params["ids"] == alone.params["ids"]
    assert np.array_equal(padded.pattern(1, 3), alone.pattern(1, 3))


def test_only_the_heads_asked_for_are_kept_and_the_others_named():
    patterns = interp.attend(tiny(), TOKENS, heads="1.*, L0H2")
    assert sorted(patterns.drawn) == [(0, 2), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert patterns.params["left_out"] == ["0.0", "0.1", "0.3"]
    assert len(patterns.table) == 8
    with pytest.raises(AnalysisError, match=r"no pattern of head 0\.1; there are 5"):
        patterns.pattern(0, 1)
    with pytest.raises(ShapeError, match=r"head '7\.0' is out of range"):
        interp.attend(tiny(), TOKENS, heads="7.0")


def test_more_cells_than_a_page_holds_leave_out_the_heads_nearest_to_uniform(monkeypatch):
    whole = interp.attend(tiny(), TOKENS)
    monkeypatch.setattr("interp.attending.CELLS", 3 * 144 + 143)
    some = interp.attend(tiny(), TOKENS)
    assert some.drawn == whole.drawn[:3]
    assert len(some.params["left_out"]) == 5
    monkeypatch.setattr("interp.attending.CELLS", 143)
    with pytest.raises(AnalysisError, match="12 tokens: the picture of one head would have 144"):
        interp.attend(tiny(), TOKENS)


def test_144_heads_on_512_tokens_are_kept_whole():
    assert CELLS >= 144 * 512**2


def test_pruned_heads_have_neither_row_nor_pattern():
    model = interp.prune_heads(tiny(), [(0, 1), (1, 0)])
    patterns = interp.attend(model, TOKENS)
    assert len(patterns.table) == len(patterns.drawn) == 6
    assert patterns.params["pruned_heads"] == ["0.1", "1.0"]
    assert patterns.params["left_out"] == []
    whole = oracle_of_pruned(model)
    assert np.abs(patterns.pattern(0, 2) - whole).max() < 2e-6
    assert len(interp.attend(model, TOKENS, heads="1.*").drawn) == 3
    with pytest.raises(AnalysisError, match=r"head 0\.1 is pruned"):
        interp.attend(model, TOKENS, heads="0.1")


def oracle_of_pruned(model):
    """Layer 0's patterns do not know of pruned heads: those of the whole model."""
    return oracle(tiny(), torch.tensor([TOKENS]))["blocks.0.attn.hook_pattern"][0, 2]


def test_an_encoder_through_the_bridge_attends_both_ways():
    original = hf_models.bert()
    model = interp.load_model(original, backend="bridge")
    ids = torch.arange(3, 11)
    patterns = interp.attend(model, ids)
    assert patterns.params["causal"] is False
    attentions = original(ids[None], output_attentions=True).attentions
    for layer, head in patterns.drawn:
        expected = attentions[layer][0, head].detach().numpy()
        assert np.abs(patterns.pattern(layer, head) - expected).max() < 1e-6
    assert patterns.pattern(0, 0)[0, 5] > 0


def test_a_pattern_that_is_not_finite_is_left_out():
    model = tiny()
    with torch.no_grad():
        model.blocks[1].attn.W_Q[2] = float("nan")
    patterns = interp.attend(model, TOKENS)
    assert (1, 2) not in patterns.drawn
    assert "1.2" in patterns.params["left_out"]


def test_bad_tokens_are_refused_as_everywhere():
    with pytest.raises(ModelError, match="no tokenizer"):
        interp.attend(tiny(), "text")
    with pytest.raises(ShapeError, match="the tokens are empty"):
        interp.attend(tiny(), [[]])
    with pytest.raises(ShapeError, match="n_ctx"):
        interp.attend(tiny(), [1] * 17)


def test_the_model_and_the_tokens_are_left_as_they_were():
    model, tokens = perturbed(tiny_config()), torch.tensor([TOKENS])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    interp.attend(model, tokens)
    assert model.training
    assert tokens.tolist() == [TOKENS]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
