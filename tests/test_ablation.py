"""Ablation: what a head's removal takes away, and the paired difference it makes."""

import itertools
import math

import numpy as np
import pytest
import torch
from tiny_models import D_VOCAB, error, padding, some_tokens, tiny

import interp
from interp.ablation.controls import control_heads, head_output_norms
from interp.ablation.interventions import ZeroHeads
from interp.ablation.sweep import (
    Effect,
    ablate,
    ablate_each,
    ablate_together,
    mean_token_loss,
    sequence_metric,
)
from interp.errors import AnalysisError, ModelError, ShapeError
from interp.inputs import token_inputs

# Float32 sums in another order differ by about 1e-6 of activations of order 1.
FLOAT32 = 1e-5
FAMILIES = pytest.mark.parametrize("family", ["mha", "gqa", "mqa", "wide_heads", "llama"])
EVERY = [(layer, head) for layer in range(2) for head in range(4)]


def cached(model, tokens, hooks=(), mask=None):
    """The activations of a hooked pass."""
    with model.hooks(fwd_hooks=list(hooks)):
        return model.run_with_cache(tokens, attention_mask=mask)[1]


# --- what is taken away ---------------------------------------------------------------------


@FAMILIES
def test_zeroing_a_head_takes_exactly_its_own_output_away(family):
    model, tokens = tiny(family), some_tokens(2, 9)
    before = cached(model, tokens)
    for layer, head in EVERY:
        after = cached(model, tokens, ZeroHeads(((layer, head),)).hooks())
        z = before[f"blocks.{layer}.attn.hook_z"][:, :, head]
        taken = z @ model.blocks[layer].attn.W_O[head]
        name = f"blocks.{layer}.hook_attn_out"
        assert error(after[name], before[name] - taken) < FLOAT32
        assert taken.abs().max() > 0.1  # there was something to take


@FAMILIES
def test_a_layer_without_heads_adds_its_output_bias_and_nothing_else(family):
    model, tokens = tiny(family), some_tokens(2, 9)
    hooks = ZeroHeads(tuple((1, head) for head in range(4))).hooks()
    after = cached(model, tokens, hooks)
    b_O = model.blocks[1].attn.b_O
    assert torch.equal(after["blocks.1.hook_attn_out"], b_O.expand(2, 9, -1))
    assert (b_O.abs().max() > 0.1) == (family != "llama")  # llama has no bias: adds nothing


@FAMILIES
def test_siblings_of_an_ablated_head_keep_their_values(family):
    """Heads of one group share a value head, which is not touched."""
    model, tokens = tiny(family), some_tokens(2, 9)
    before = cached(model, tokens)
    after = cached(model, tokens, ZeroHeads(((0, 1),)).hooks())
    for name in ("hook_v", "hook_pattern"):
        assert torch.equal(after[f"blocks.0.attn.{name}"], before[f"blocks.0.attn.{name}"])
    z, z_before = (cache["blocks.0.attn.hook_z"] for cache in (after, before))
    assert torch.equal(z[:, :, [0, 2, 3]], z_before[:, :, [0, 2, 3]])
    assert (z[:, :, 1] == 0).all()


@pytest.mark.parametrize("family", ["gqa", "wide_heads"])
def test_zeroing_a_value_head_zeroes_its_group_of_query_heads(family):
    model, tokens = tiny(family), some_tokens(2, 9)

    def zero(v, hook):
        v = v.clone()
        v[:, :, 1] = 0
        return v

    by_value = model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.attn.hook_v", zero)])
    by_query = model.run_with_hooks(tokens, fwd_hooks=ZeroHeads(((1, 2), (1, 3))).hooks())
    assert error(by_value, by_query) < FLOAT32


def test_the_hook_copies_and_takes_all_heads_of_a_layer_at_once():
    hooks = ZeroHeads(((1, 0), (0, 3), (1, 2))).hooks()
    assert [name for name, _ in hooks] == ["blocks.1.attn.hook_z", "blocks.0.attn.hook_z"]
    z = torch.ones(1, 2, 4, 3)
    zeroed = hooks[0][1](z, hook=None)
    assert (z == 1).all()
    assert zeroed[0, 0, :, 0].tolist() == [0, 1, 0, 1]
    assert ZeroHeads(()).hooks() == []


# --- the sweep ------------------------------------------------------------------------------


def losses_by_hand(model, tokens, mask, heads=()):
    """Mean loss of each sequence with `heads` zeroed, from log-probabilities in float64."""

    def zero_in(layer):
        def hook(z, hook):
            keep = torch.ones(z.shape[2])
            for at, head in heads:
                if at == layer:
                    keep[head] = 0
            return z * keep[:, None]

        return f"blocks.{layer}.attn.hook_z", hook

    hooks = [zero_in(layer) for layer in range(model.cfg.n_layers)]
    logits = model.run_with_hooks(tokens, fwd_hooks=hooks, attention_mask=mask).double()
    means = []
    for b, row in enumerate(tokens):
        real = [p for p in range(len(row)) if mask is None or mask[b, p]]
        log_probs = logits[b].log_softmax(-1)
        lost = [-log_probs[p, row[q]].item() for p, q in itertools.pairwise(real)]
        means.append(np.mean(lost))
    return np.array(means)


@FAMILIES
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_a_sweep_equals_one_hooked_pass_for_each_head(family, side):
    model = tiny(family)
    tokens = some_tokens(18, 9)  # more than one forward pass holds
    mask = padding(side, [9, 7, 4] * 6, 9)
    scores = interp.ablate(model, tokens, attention_mask=mask)
    clean = losses_by_hand(model, tokens, mask)
    table = scores.table
    assert list(zip(table["layer"], table["head"], strict=True)) == EVERY
    for row, head in zip(table.itertuples(), EVERY, strict=True):
        ablated = losses_by_hand(model, tokens, mask, [head])
        difference = ablated - clean
        assert row.ablation == pytest.approx(difference.mean(), abs=FLOAT32)
        assert row.ablation_se == pytest.approx(difference.std(ddof=1) / math.sqrt(18), abs=FLOAT32)
        assert row.loss_clean == pytest.approx(clean.mean(), abs=FLOAT32)
        assert row.loss_ablated == pytest.approx(ablated.mean(), abs=FLOAT32)
        assert (row.ablation_null, row.n) == (0.0, 18)
    assert table["ablation"].abs().min() > 10 * FLOAT32  # every head does something here
    strongest = table.loc[table["ablation"].idxmax()]
    assert scores.summary["largest_effect"] == strongest["ablation"]
    label = f"{strongest['layer']:.0f}.{strongest['head']:.0f}"
    assert scores.summary["largest_effect_head"] == label
    assert (scores.score, scores.unit, scores.analysis) == ("ablation", "nats", "ablation")
    assert scores.params == {"shape": [18, 9], "method": "zero", "metric": "loss"}


def test_what_padding_holds_changes_no_effect():
    model, tokens = tiny("rotary"), some_tokens(2, 9)
    mask = padding("right", (9, 5), 9)
    other = tokens.clone()
    other[1, 5:] = (other[1, 5:] + 1) % D_VOCAB
    tables = [interp.ablate(model, t, attention_mask=mask).table for t in (tokens, other)]
    assert tables[0].equals(tables[1])


def test_heads_taken_together_are_not_the_sum_of_heads_taken_alone():
    model, tokens = tiny("mha"), some_tokens(6, 9)
    inputs = token_inputs(model, tokens)
    heads = [(0, 1), (0, 2), (1, 3)]
    together = ablate_together(model, inputs, heads, mean_token_loss)
    expected = losses_by_hand(model, tokens, None, heads) - losses_by_hand(model, tokens, None)
    assert together.mean == pytest.approx(expected.mean(), abs=FLOAT32)
    alone = ablate_each(model, inputs, heads).table["ablation"].sum()
    assert abs(together.mean - alone) > 0.01


@FAMILIES
def test_all_heads_of_a_layer_at_once_leave_a_finite_loss(family):
    model = tiny(family)
    inputs = token_inputs(model, some_tokens(3, 9))
    for heads in ([(1, head) for head in range(4)], EVERY):
        assert math.isfinite(ablate_together(model, inputs, heads, mean_token_loss).mean)


def test_no_heads_change_nothing():
    model = tiny("mha")
    effect = ablate_together(model, token_inputs(model, some_tokens(3, 9)), [], mean_token_loss)
    assert (effect.mean, effect.standard_error) == (0.0, 0.0)


def test_the_error_is_that_of_paired_differences():
    effect = Effect(np.array([1.0, 5.0, 9.0]), np.array([2.0, 7.0, 12.0]))
    assert effect.mean == 2.0
    # Differences 1, 2, 3: variance 1 over 3 sequences; the spread of the losses does not count.
    assert effect.standard_error == pytest.approx(1 / math.sqrt(3), rel=1e-12)
    assert math.isnan(Effect(np.array([1.0]), np.array([2.0])).standard_error)


def test_a_metric_gives_one_number_for_each_sequence_and_does_not_see_padding():
    model, tokens = tiny("mha"), some_tokens(20, 9)
    mask = padding("left", [9, 4] * 10, 9)
    seen = []

    def count(losses):
        seen.append(losses)
        return (~losses.isnan()).sum(dim=1).float()

    counted = sequence_metric(model, token_inputs(model, tokens, mask), count)
    assert counted.tolist() == [8.0, 3.0] * 10
    assert [len(losses) for losses in seen] == [16, 4]


@pytest.mark.parametrize("training", [False, True])
def test_the_same_sweep_gives_the_same_bytes_and_leaves_everything_as_it_was(training):
    model, tokens = tiny("gqa"), some_tokens(3, 9)
    model.train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    given = tokens.clone()
    first, second = (interp.ablate(model, tokens).to_json() for _ in range(2))
    assert first == second
    assert torch.equal(tokens, given)
    assert model.training is training
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == numpy_state).all()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(point.has_hooks() for point in model.hook_dict.values())


def test_a_model_left_in_training_mode_is_ablated_without_dropout():
    tokens = some_tokens(3, 9)
    with_dropout, without = (tiny("mha", dropout=dropout) for dropout in (0.5, 0.0))
    with_dropout.train()
    tables = [interp.ablate(model, tokens).table for model in (with_dropout, without)]
    assert tables[0].equals(tables[1])


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"method": "mean"}, AnalysisError, "no ablation method 'mean'; known: zero"),
        ({"metric": "accuracy"}, AnalysisError, "no metric 'accuracy'; known: loss"),
        ({"heads": []}, ShapeError, "no head was named"),
        (
            {"heads": [(0, 4)]},
            ShapeError,
            "head '0.4' is out of range: the model has layers 0 to 1 with heads 0 to 3",
        ),
        (
            {"heads": [(0, 1), (2, 0)]},
            ShapeError,
            "head '2.0' is out of range: the model has layers 0 to 1 with heads 0 to 3",
        ),
        (
            {"heads": [(0, -1)]},
            ShapeError,
            "head '0.-1': written like 5.1, L5H1, or 5.* for a whole layer",
        ),
    ],
)
def test_what_cannot_be_ablated_is_refused(given, kind, message):
    with pytest.raises(kind) as caught:
        ablate(tiny("mha"), some_tokens(2, 5), **given)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("tokens", "mask"),
    [([[1]], None), ([[1, 2, 3], [1, 2, 3]], [[1, 1, 1], [0, 0, 1]])],
    ids=["one_token", "one_real_token"],
)
def test_sequences_without_a_next_token_have_no_loss(tokens, mask):
    mask = None if mask is None else torch.tensor(mask)
    with pytest.raises(AnalysisError) as caught:
        ablate(tiny("mha"), tokens, attention_mask=mask)
    message = "the loss of the unablated model is not finite on these tokens"
    assert str(caught.value) == message


def test_a_sequence_longer_than_the_model_is_refused():
    with pytest.raises(ShapeError, match="sequence 17 > n_ctx 16"):
        ablate(tiny("mha"), torch.zeros(1, 17).long())


def test_one_head_that_fails_leaves_no_hook_behind():
    model, tokens = tiny("mha"), some_tokens(2, 5)
    clean = model(tokens)
    with pytest.raises((IndexError, ModelError)):
        ablate_together(model, token_inputs(model, tokens), [(0, 99)], mean_token_loss)
    assert torch.equal(model(tokens), clean)


# --- controls -------------------------------------------------------------------------------


@FAMILIES
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_output_norms_are_the_mean_length_of_what_a_head_adds(family, side):
    model, tokens = tiny(family), some_tokens(18, 9)
    mask = padding(side, [9, 6] * 9, 9)
    real = torch.ones_like(tokens).bool() if mask is None else mask.bool()
    names = [f"blocks.{layer}.attn.hook_result" for layer in range(2)]
    _, cache = model.run_with_cache(tokens, attention_mask=mask, names_filter=names)
    expected = np.array([cache[name][real].norm(dim=-1).mean(dim=0).numpy() for name in names])
    found = head_output_norms(model, token_inputs(model, tokens, mask))
    assert found == pytest.approx(expected, abs=FLOAT32)


def brute_force_controls(heads, norms, excluded):
    taken, controls = set(heads) | set(excluded), []
    for layer, head in heads:
        gaps = {
            (layer, other): abs(norms[layer, other] - norms[layer, head])
            for other in range(norms.shape[1])
            if (layer, other) not in taken
        }
        if gaps:
            controls.append(min(gaps, key=gaps.get))
            taken.add(controls[-1])
    return controls


def test_a_control_is_the_free_head_of_the_same_layer_with_the_nearest_norm():
    norms = np.array([[1.0, 5.0, 1.2, 4.0], [2.0, 2.1, 9.0, 2.3]])
    assert control_heads([(0, 0)], norms) == [(0, 2)]
    assert control_heads([(0, 0)], norms, excluded=[(0, 2)]) == [(0, 3)]
    assert control_heads([(1, 0), (0, 1)], norms) == [(1, 1), (0, 3)]
    # Each is used once, and where a layer has none left there are fewer.
    assert control_heads([(1, 0), (1, 1)], norms) == [(1, 3), (1, 2)]
    assert control_heads([(1, 0), (1, 1), (1, 2)], norms) == [(1, 3)]
    assert control_heads([], norms) == []


@pytest.mark.parametrize("seed", range(20))
def test_controls_equal_a_search(seed):
    rng = np.random.default_rng(seed)
    norms = rng.normal(size=(3, 6))
    cells = [(int(i), int(j)) for i, j in np.ndindex(3, 6)]
    chosen = [cells[i] for i in rng.permutation(18)[: rng.integers(1, 10)]]
    heads, excluded = chosen[::2], chosen[1::2]
    controls = control_heads(heads, norms, excluded)
    assert controls == brute_force_controls(heads, norms, excluded)
    assert not {*controls} & {*heads, *excluded}
    assert len(set(controls)) == len(controls)
