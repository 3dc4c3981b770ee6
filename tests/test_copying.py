"""The copying score: heads with known answers, loops over a float64 oracle, the direct path."""

import hf_models
import numpy as np
import pytest
import torch
from tiny_models import oracle, padding, perturbed, some_tokens, tiny, tiny_config

from interp.data.repeated import TokenBatch, induction_targets
from interp.errors import AnalysisError
from interp.inputs import random_inputs
from interp.measure import analyze
from interp.models.bridging import bridge_model
from interp.models.direct_path import _norm_gain, unembedding_of
from interp.models.layer_attention import LayerAttention, uniform_attention
from interp.models.patterns import Pattern
from interp.models.unembedding import Unembedding
from interp.registry import get

D_VOCAB = 40


def one_key(keys):
    return torch.nn.functional.one_hot(torch.tensor(keys), len(keys)).float()


def scored(pattern, tokens, W_O):
    """The columns of one head whose values are its tokens, one-hot, in a model as wide."""
    batch = TokenBatch(tokens, induction_targets(tokens))
    v = torch.nn.functional.one_hot(tokens, D_VOCAB).float()[:, :, None]
    z = torch.einsum("qk,bkhd->bqhd", pattern, v)
    attention = LayerAttention(
        0, Pattern(pattern.expand(len(tokens), 1, -1, -1)), batch.real, v=v, z=z, W_O=W_O[None]
    )
    attention.unembedding = Unembedding(torch.eye(D_VOCAB), torch.ones(D_VOCAB), centred=False)
    found = get("copying").measure(attention, batch)
    return {column: value[0, 0].item() for column, value in found.items()}


TOKENS = torch.arange(3, 11)[None]
IDENTITY = torch.eye(D_VOCAB)


@pytest.mark.parametrize("keys", [[0] * 8, list(range(8)), [max(q - 1, 0) for q in range(8)]])
def test_a_head_that_writes_what_it_looks_at_scores_1_and_its_opposite_minus_1(keys):
    copied = scored(one_key(keys), TOKENS, IDENTITY)
    assert copied["copying"] == copied["one_key"] == 1.0
    # No other token is raised: the null is the lowest score, and so is that of the opposite.
    assert copied["copying_null"] == copied["one_key_null"] == -1.0
    lowered = scored(one_key(keys), TOKENS, -IDENTITY)
    assert lowered["copying"] == lowered["one_key"] == -1.0


def test_a_head_that_raises_the_next_token_in_the_sample_does_not_copy():
    assert scored(one_key([0] * 8), TOKENS, IDENTITY.roll(1, dims=1))["copying"] == -1.0


def test_a_head_that_raises_two_tokens_alike_scores_between():
    assert scored(one_key([0] * 8), TOKENS, IDENTITY + IDENTITY.roll(1, dims=1))["copying"] == 0.0


def test_a_head_that_copies_many_tokens_at_once_shows_it_in_one_key_only():
    spread = torch.ones(8, 8).tril() / torch.arange(1, 9)[:, None]
    found = scored(spread, TOKENS, IDENTITY)
    expected = np.mean([2 / (q + 1) - 1 for q in range(8)])
    assert found["copying"] == pytest.approx(expected, abs=1e-6)
    assert found["one_key"] == 1.0


def test_a_token_that_stands_twice_counts_once():
    found = scored(one_key([0] * 4), torch.tensor([[3, 4, 3, 5]]), IDENTITY)
    assert found["copying"] == found["one_key"] == 1.0


def test_the_scale_of_what_is_written_does_not_matter_and_a_silent_head_has_no_score():
    keys = one_key([0, 1, 1, 2, 4, 0, 3, 7])
    W_O = torch.randn(D_VOCAB, D_VOCAB, generator=torch.Generator().manual_seed(0))
    assert scored(keys, TOKENS, 100 * W_O) == pytest.approx(scored(keys, TOKENS, W_O), abs=1e-6)
    assert np.isnan(scored(keys, TOKENS, 0 * W_O)["copying"])


def test_random_weights_score_as_their_null():
    keys = one_key(list(range(8)))
    gaps = []
    for seed in range(40):
        W_O = torch.randn(D_VOCAB, D_VOCAB, generator=torch.Generator().manual_seed(seed))
        found = scored(keys, TOKENS, W_O)
        gaps.append(found["copying"] - found["copying_null"])
    assert abs(np.mean(gaps)) < 3 * np.std(gaps) / np.sqrt(len(gaps))


def expected_scores(result, pattern, ids, real, directions):
    """The score of each head of a sequence, by loops, from the directions of all tokens."""
    n_heads = result.shape[1]
    ratios = [[] for _ in range(n_heads)]
    for q in real:
        for h in range(n_heads):
            logits = directions @ result[q, h]
            raised = np.maximum(logits - logits.mean(), 0)
            total = sum(raised[t] for t in {ids[k] for k in real})
            looked_at = sum(pattern[h, q, k] * raised[ids[k]] for k in real)
            ratios[h].append(looked_at / total if total > 0 else 0.0)
    return [2 * np.mean(own) - 1 for own in ratios]


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("family", ["mha", "gqa", "mqa", "rotary", "llama", "no_norm"])
def test_scores_equal_loops_over_the_oracle(family, side, monkeypatch):
    monkeypatch.setattr("interp.models.tiles.TILE_NUMBERS", 1)
    monkeypatch.setattr("interp.models.tiles.MIN_TILE_ROWS", 4)
    model = tiny(family)
    tokens = some_tokens(3, 12, d_vocab=9)
    mask = padding(side, [12, 7, 9], 12)
    seen = oracle(model, tokens, mask)
    table = analyze(model, "copying", tokens, attention_mask=mask).table
    weights = {name: value.double().numpy() for name, value in model.state_dict().items()}
    directions = weights["unembed.weight"] * weights.get("ln_final.w", 1.0)
    if "ln_final.b" in weights:  # LayerNorm takes off the mean over the model's width first
        directions = directions - directions.mean(axis=1, keepdims=True)
    for layer in range(2):
        result = seen[f"blocks.{layer}.attn.hook_result"]
        pattern = seen[f"blocks.{layer}.attn.hook_pattern"]
        rows = [
            expected_scores(
                result[b],
                pattern[b],
                ids,
                [p for p in range(12) if mask is None or mask[b, p]],
                directions,
            )
            for b, ids in enumerate(tokens.tolist())
        ]
        own = table[table["layer"] == layer]
        assert own["copying"].to_numpy() == pytest.approx(np.mean(rows, axis=0), abs=1e-5)
        # What a head reads from one key alone, where each query looks at nothing but itself.
        v = seen[f"blocks.{layer}.attn.hook_v"]
        W_O = model.blocks[layer].attn.W_O.detach().double().numpy()
        group = len(W_O) // v.shape[2]
        alone = [
            expected_scores(
                np.stack([v[b][:, h // group] @ W_O[h] for h in range(len(W_O))], axis=1),
                np.broadcast_to(np.eye(12), pattern[b].shape),
                ids,
                [p for p in range(12) if mask is None or mask[b, p]],
                directions,
            )
            for b, ids in enumerate(tokens.tolist())
        ]
        assert own["one_key"].to_numpy() == pytest.approx(np.mean(alone, axis=0), abs=1e-5)


@pytest.mark.parametrize("family", ["mha", "llama", "no_norm"])
def test_a_direction_gives_the_logit_above_the_mean_up_to_the_scale_of_the_norm(family):
    model = tiny(family)
    resid = torch.randn(1, 5, model.cfg.d_model)
    with torch.no_grad():
        logits = model.unembed(model.ln_final(resid))
        at_zero = model.unembed(model.ln_final(torch.zeros_like(resid)))
        above = (logits - at_zero) - (logits - at_zero).mean(dim=-1, keepdim=True)
        direct = resid @ unembedding_of(model).directions(torch.arange(model.cfg.d_vocab)).T
    factor = above.norm(dim=-1, keepdim=True) / direct.norm(dim=-1, keepdim=True)
    assert (direct * factor - above).abs().max() < 1e-5


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_bridged_model_scores_as_our_own_does(family):
    theirs = getattr(hf_models, family)()
    own, bridged = hf_models.native(theirs), bridge_model(theirs, name=family)
    tokens = hf_models.tokens(n_pos=20)
    expected = analyze(own, "copying", tokens).table
    found = analyze(bridged, "copying", tokens).table
    for column in ("copying", "copying_null", "one_key"):
        assert found[column].to_numpy() == pytest.approx(expected[column].to_numpy(), abs=1e-5)


@pytest.mark.parametrize("kind", ["LN", "RMS"])
@pytest.mark.parametrize("size", [8, 9])
def test_the_gain_of_a_norm_is_found_by_what_it_answers(kind, size):
    norm = torch.nn.LayerNorm(size) if kind == "LN" else torch.nn.RMSNorm(size)
    wanted = torch.linspace(-1, 2, size)
    with torch.no_grad():
        norm.weight.copy_(wanted)
        if kind == "LN":
            norm.bias.normal_()
    gain, centred = _norm_gain(norm, torch.zeros(3, size))
    assert centred == (kind == "LN")
    assert (gain / gain[-1] * 2 - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("family", ["gemma2", "olmo2", "bert"])
def test_a_model_without_a_direct_path_is_refused(family):
    bridged = bridge_model(getattr(hf_models, family)(), name=family)
    assert unembedding_of(bridged) is None
    with pytest.raises(AnalysisError, match="no direct path leads from its heads to the logits"):
        analyze(bridged, "copying", hf_models.tokens(n_pos=8))


def test_weights_alone_are_not_enough():
    batch = TokenBatch(TOKENS, induction_targets(TOKENS))
    with pytest.raises(AnalysisError, match="copying reads logits off what a head writes"):
        get("copying").measure(uniform_attention(batch.real), batch)


@pytest.mark.parametrize(("asked", "width"), [(None, 25), (True, 26)])
def test_default_tokens_are_those_of_the_paper_without_bos_unless_it_is_asked_for(asked, width):
    model = tiny("mha", n_ctx=64, d_vocab=300, bos_token_id=0)
    inputs = random_inputs(model, prepend_bos=asked, drawing=get("copying").drawing)
    (batch,) = inputs.batches
    assert batch.tokens.shape == (10, width)
    assert all(len(set(row.tolist())) == width for row in batch.tokens)
    assert bool((batch.tokens == 0).any()) == bool(asked)


def test_of_a_long_sequence_only_some_queries_are_looked_at():
    """All of 24 queries, and every third or so: the same sequence, nearly the same score."""
    model = perturbed(tiny_config(n_ctx=32, d_vocab=200))
    tokens = torch.arange(24)[None] + 3
    whole = analyze(model, "copying", tokens)
    assert whole.params["queries"] == 256
    table = analyze(model, "copying", tokens, queries=24).table
    assert table["copying"].tolist() == whole.table["copying"].tolist()
    ends = analyze(model, "copying", tokens, queries=2).table["copying"]
    assert not np.allclose(ends, whole.table["copying"])
    first = analyze(model, "copying", tokens, queries=1).table["copying"]
    last = analyze(model, "copying", tokens, queries=2).table["copying"] * 2 - first
    assert np.isfinite(last).all()
