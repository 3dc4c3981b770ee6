"""What an ablation takes away, and what it puts there instead."""

import numpy as np
import pytest
import torch
from hand_ablation import losses_with, replacing, sequence_losses, site_values
from tiny_models import D_VOCAB, error, padding, some_tokens, tiny

import interp
from interp.ablation.interventions import Intervention, Mean, Zero, site_heads
from interp.ablation.measuring import Setting, measure_sets
from interp.ablation.methods import mean_method, prepare, resample_method
from interp.ablation.metrics import METRICS
from interp.errors import AnalysisError, ShapeError
from interp.inputs import token_inputs, without_bos

# Float32 sums in another order differ by about 1e-6 of activations of order 1.
FLOAT32 = 1e-5
FAMILIES = pytest.mark.parametrize("family", ["mha", "gqa", "mqa", "wide_heads", "llama"])
SIDES = pytest.mark.parametrize("side", ["none", "left", "right"])
EVERY = [(layer, head) for layer in range(2) for head in range(4)]


def cached(model, tokens, hooks=(), mask=None):
    """The activations of a hooked pass."""
    with torch.no_grad(), model.hooks(fwd_hooks=list(hooks)):
        return model.run_with_cache(tokens, attention_mask=mask)[1]


def effects(model, tokens, mask=None, **given):
    """The column of mean effects of a sweep over every head."""
    result = interp.ablate(model, tokens, attention_mask=mask, direct=False, **given)
    return result.table["ablation"].to_numpy(copy=True)


# --- what is taken away ---------------------------------------------------------------------


@FAMILIES
def test_zeroing_a_head_takes_exactly_its_own_output_away(family):
    model, tokens = tiny(family), some_tokens(2, 9)
    before = cached(model, tokens)
    for layer, head in EVERY:
        after = cached(model, tokens, Intervention(((layer, head),)).hooks(model))
        z = before[f"blocks.{layer}.attn.hook_z"][:, :, head]
        taken = z @ model.blocks[layer].attn.W_O[head]
        name = f"blocks.{layer}.hook_attn_out"
        assert error(after[name], before[name] - taken) < FLOAT32
        assert taken.abs().max() > 0.1  # there was something to take


@FAMILIES
def test_a_layer_without_heads_adds_its_output_bias_and_nothing_else(family):
    model, tokens = tiny(family), some_tokens(2, 9)
    whole = Intervention(tuple((1, head) for head in range(4)))
    after = cached(model, tokens, whole.hooks(model))
    b_O = model.blocks[1].attn.b_O
    assert torch.equal(after["blocks.1.hook_attn_out"], b_O.expand(2, 9, -1))
    assert (b_O.abs().max() > 0.1) == (family != "llama")  # llama has no bias: adds nothing


@FAMILIES
def test_siblings_of_an_ablated_head_keep_their_values(family):
    """Heads of one group share a value head, which is not touched."""
    model, tokens = tiny(family), some_tokens(2, 9)
    before = cached(model, tokens)
    after = cached(model, tokens, Intervention(((0, 1),)).hooks(model))
    for name in ("hook_v", "hook_pattern"):
        assert torch.equal(after[f"blocks.0.attn.{name}"], before[f"blocks.0.attn.{name}"])
    z, z_before = (cache["blocks.0.attn.hook_z"] for cache in (after, before))
    assert torch.equal(z[:, :, [0, 2, 3]], z_before[:, :, [0, 2, 3]])
    assert (z[:, :, 1] == 0).all()


@pytest.mark.parametrize("family", ["gqa", "mqa", "wide_heads", "llama"])
def test_zeroing_a_value_head_zeroes_its_group_of_query_heads(family):
    model, tokens = tiny(family), some_tokens(2, 9)
    n_groups = model.cfg.n_key_value_heads
    size = 4 // n_groups
    for group in range(n_groups):
        value_head = Intervention(((1, group),), Zero(), "v")
        queries = Intervention(tuple((1, size * group + head) for head in range(size)))
        by_value, by_query = (
            model.run_with_hooks(tokens, fwd_hooks=one.hooks(model))
            for one in (value_head, queries)
        )
        assert error(by_value, by_query) < FLOAT32
        assert error(by_value, model(tokens)) > 100 * FLOAT32


@pytest.mark.parametrize("site", ["k", "v"])
def test_a_sweep_over_key_value_heads_has_a_row_for_each_and_no_more(site):
    model, tokens = tiny("gqa"), some_tokens(4, 9)
    table = interp.ablate(model, tokens, site=site).table
    rows = [(layer, head) for layer in range(2) for head in range(2)]
    assert list(zip(table["layer"], table["head"], strict=True)) == rows
    assert site_heads(model, 0, site) == (0, 1)
    clean = losses_with(model, tokens, None)
    for row, head in zip(table.itertuples(), rows, strict=True):
        by_hand = losses_with(model, tokens, None, [head], site=site) - clean
        assert row.ablation == pytest.approx(by_hand.mean(), abs=FLOAT32)
        assert abs(row.ablation) > 10 * FLOAT32


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (
            {"site": "v", "heads": [(0, 2)]},
            ShapeError,
            "KV head '0.2' is out of range: the model has layers 0 to 1 with KV heads 0 to 1",
        ),
        (
            {"site": "k", "heads": "1.5"},
            ShapeError,
            "KV head '1.5' is out of range: the model has layers 0 to 1 with KV heads 0 to 1",
        ),
        (
            {"site": "k", "method": "pattern-preserving"},
            AnalysisError,
            "keys make the pattern: it cannot be kept while they are ablated",
        ),
        ({"heads": []}, ShapeError, "no head was named"),
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
        (
            {"method": "median"},
            AnalysisError,
            "no ablation method 'median'; known: zero, mean, resample, patch, pattern-preserving, "
            "all",
        ),
        (
            {"method": "zero", "reference": "repeats"},
            AnalysisError,
            "zero has no reference: mean and patch do",
        ),
    ],
)
def test_what_cannot_be_ablated_is_refused(given, kind, message):
    with pytest.raises(kind) as caught:
        interp.ablate(tiny("gqa"), some_tokens(2, 5), **given)
    assert str(caught.value) == message


def test_the_hooks_copy_and_take_all_heads_of_a_layer_at_once():
    model = tiny()
    hooks = Intervention(((1, 0), (0, 3), (1, 2))).hooks(model)
    assert [name for name, _ in hooks] == ["blocks.0.attn.hook_z", "blocks.1.attn.hook_z"]
    z = torch.ones(1, 2, 4, 3)
    zeroed = hooks[1][1](z, hook=None)
    assert (z == 1).all()
    assert zeroed[0, 0, :, 0].tolist() == [0, 1, 0, 1]
    assert Intervention(()).hooks(model) == []


# --- the mean -------------------------------------------------------------------------------


def means_by_hand(model, tokens, mask, *, pooled=False, counted=None):
    """Means by place among real tokens, over those that count, in float64."""
    real = torch.ones_like(tokens) if mask is None else mask
    counted = real if counted is None else counted
    values = site_values(model, tokens, mask)
    means = []
    for layer in range(model.cfg.n_layers):
        sums: dict[int, list] = {}
        for row in range(len(tokens)):
            place = 0
            for p in range(tokens.shape[1]):
                if real[row, p]:
                    if counted[row, p]:
                        own = values[layer][row, p].double().numpy()
                        sums.setdefault(0 if pooled else place, []).append(own)
                    place += 1
        means.append({place: np.mean(own, axis=0) for place, own in sums.items()})
    return means


@SIDES
@pytest.mark.parametrize("pooled", [False, True])
def test_the_mean_is_that_of_real_tokens_at_each_place_or_of_all(side, pooled):
    model, tokens = tiny("gqa"), some_tokens(18, 9)  # more than go through the model at once
    mask = padding(side, [9, 6, 3] * 6, 9)
    method = mean_method(model, token_inputs(model, tokens, mask), "z", pooled=pooled)
    expected = means_by_hand(model, tokens, mask, pooled=pooled)
    for layer in range(2):
        found = method.mean.of_layer[layer]
        assert len(found) == (1 if pooled else 9)
        for place, mean in expected[layer].items():
            assert error(found[place], mean) < FLOAT32
    assert method.n_tokens == (18 * 9 if mask is None else int(mask.sum()))
    assert method.mean.counted.all()


def test_neither_the_side_of_the_padding_nor_what_it_holds_changes_a_mean():
    model, tokens = tiny("rotary"), some_tokens(1, 9)[0]
    rows = [tokens[:6].tolist(), tokens[6:].tolist()]
    filled = {
        "right": ([rows[0], rows[1] + [5, 5, 5]], padding("right", (6, 3), 6)),
        "other": ([rows[0], rows[1] + [1, 7, 2]], padding("right", (6, 3), 6)),
        "left": ([rows[0], [5, 5, 5] + rows[1]], padding("left", (6, 3), 6)),
    }
    means = {
        name: mean_method(model, token_inputs(model, ids, mask), "z").mean.of_layer
        for name, (ids, mask) in filled.items()
    }
    for layer in range(2):
        assert torch.equal(means["right"][layer], means["other"][layer])
        assert error(means["left"][layer], means["right"][layer]) < FLOAT32


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pooled", [False, True])
def test_bos_is_left_out_of_a_mean_wherever_it_stands(side, pooled):
    model = tiny("mha", bos_token_id=0)
    tokens = some_tokens(2, 6) % (D_VOCAB - 1) + 1
    mask = padding(side, (6, 3), 6)
    tokens[0, 0] = 0
    tokens[1, 3 if side == "left" else 0] = 0  # not column 0 when padded on the left
    inputs = without_bos(model, token_inputs(model, tokens, mask))
    method = mean_method(model, inputs, "z", pooled=pooled)
    counted = mask * (tokens != 0)
    expected = means_by_hand(model, tokens, mask, pooled=pooled, counted=counted)
    assert method.n_tokens == int(counted.sum()) == 7
    for layer in range(2):
        for place, mean in expected[layer].items():
            assert error(method.mean.of_layer[layer][place], mean) < FLOAT32
    assert method.mean.counted.tolist() == ([True] if pooled else [False, *[True] * 5])


def test_the_mean_over_one_sequence_is_what_its_heads_read():
    model, tokens = tiny("gqa"), some_tokens(1, 9)
    means = mean_method(model, token_inputs(model, tokens), "z").mean.of_layer
    values = site_values(model, tokens)
    assert all(torch.equal(means[layer], values[layer][0]) for layer in range(2))


def test_a_place_that_no_token_of_the_reference_counts_for_keeps_its_own_values():
    by = Mean([torch.full((2, 1, 1), 5.0)], torch.tensor([False, True]))
    own = torch.tensor([1.0, 2.0])[None, :, None, None]
    assert by.at(0, own, torch.tensor([[0, 1]])).flatten().tolist() == [1.0, 5.0]


def test_tokens_left_out_behind_the_last_place_of_the_reference_keep_their_own_values():
    """A BOS at the end of a text does not count, and the reference may be shorter."""
    model = tiny("mha", bos_token_id=0)
    tokens = some_tokens(3, 9) % (D_VOCAB - 1) + 1
    tokens[:, 6:] = 0
    reference = some_tokens(3, 6, seed=4) % (D_VOCAB - 1) + 1
    found = effects(model, tokens, method="mean", reference=reference, exclude_bos=True)
    assert np.isfinite(found).all()


def test_a_sequence_of_which_nothing_counts_changes_no_mean_ablation(monkeypatch):
    """It may go through on its own: then no place of a whole pass needs a mean."""
    model = tiny("mha", bos_token_id=0)
    tokens = some_tokens(3, 9) % (D_VOCAB - 1) + 1
    tokens[:, 0] = 0
    with_bos_alone = torch.cat((tokens, torch.zeros_like(tokens[:1])))
    given = {"method": "mean", "reference": some_tokens(3, 9, seed=4), "exclude_bos": True}
    expected = effects(model, tokens, **given)
    assert error(effects(model, with_bos_alone, **given), expected) < FLOAT32
    monkeypatch.setattr("interp.ablation.passes.TOKENS_AT_ONCE", 9)
    assert error(effects(model, with_bos_alone, **given), expected) < FLOAT32


def test_replacement_vectors_depend_on_the_reference_alone():
    model, reference = tiny("mha"), some_tokens(5, 9, seed=3)
    vectors = []
    for seed in (1, 2):
        inputs = token_inputs(model, some_tokens(4, 9, seed=seed))
        (method,) = prepare(model, inputs, "mean", reference=token_inputs(model, reference))
        vectors.append(method.mean.of_layer)
    assert all(torch.equal(one, other) for one, other in zip(*vectors, strict=True))
    (other,) = prepare(model, inputs, "mean", reference=token_inputs(model, some_tokens(5, 9)))
    assert error(other.mean.of_layer[0], vectors[0][0]) > 0.01


def test_a_result_names_its_reference_set_how_large_it_is_and_how_it_was_averaged():
    model, tokens = tiny("mha"), some_tokens(4, 9)
    mask = padding("left", (9, 4, 7), 9)
    given = interp.ablate(model, tokens, method="mean", reference=some_tokens(3, 9), direct=False)
    assert given.params["reference"] == "3 given sequences of 9 tokens"
    assert (given.params["reference_tokens"], given.params["mean"]) == (27, "at each place")
    pooled = interp.ablate(
        model, some_tokens(3, 9), attention_mask=mask, method="mean", pooled=True, direct=False
    )
    default = "3 sequences of random tokens that do not repeat, as long"
    assert pooled.params["reference"] == default
    assert (pooled.params["reference_tokens"], pooled.params["mean"]) == (20, "over all places")


def test_a_reference_shorter_than_the_sequences_gives_a_pooled_mean_only():
    model, tokens, reference = tiny("mha"), some_tokens(4, 9), some_tokens(3, 5)
    with pytest.raises(AnalysisError) as caught:
        effects(model, tokens, method="mean", reference=reference)
    assert str(caught.value) == (
        "the reference (3 given sequences of 5 tokens) has no token at some "
        "of the 9 places of these sequences: take a longer one, or its mean over all places "
        "(pooled)"
    )
    assert np.isfinite(
        effects(model, tokens, method="mean", reference=reference, pooled=True)
    ).all()


@SIDES
@pytest.mark.parametrize("pooled", [False, True])
def test_a_mean_ablation_is_a_pass_with_the_means_put_in_by_hand(side, pooled):
    model, tokens = tiny("llama"), some_tokens(4, 9)
    mask = padding(side, (9, 4, 7, 9), 9)
    reference = some_tokens(5, 9, seed=6)
    means = means_by_hand(model, reference, None, pooled=pooled)
    real = torch.ones_like(tokens) if mask is None else mask
    values = {layer: torch.zeros(4, 9, 4, 8) for layer in range(2)}
    for row in range(4):
        place = 0
        for p in range(9):
            if real[row, p]:
                for layer in range(2):
                    mean = means[layer][0 if pooled else place]
                    values[layer][row, p] = torch.from_numpy(mean)
                place += 1
    clean = losses_with(model, tokens, mask)
    expected = [(losses_with(model, tokens, mask, [h], values) - clean).mean() for h in EVERY]
    found = effects(model, tokens, mask, method="mean", reference=reference, pooled=pooled)
    assert error(found, np.array(expected)) < FLOAT32


# --- other sequences ------------------------------------------------------------------------


def test_resampling_permutes_sequences_of_one_length_without_fixed_points():
    model, lengths = tiny("mha"), [9, 5, 9, 5, 5, 9, 9]
    inputs = token_inputs(model, some_tokens(7, 9), padding("right", lengths, 9))
    orders = resample_method(inputs, seed=3, draws=50).orders
    assert len(orders) == 50
    for (order,) in orders:
        assert sorted(order) == list(range(7))
        assert (order != np.arange(7)).all()
        assert [lengths[n] for n in order] == lengths
    assert len({tuple(order) for (order,) in orders}) > 10  # drawn anew each time
    again = resample_method(inputs, seed=3, draws=50).orders
    assert all((a == b).all() for (a,), (b,) in zip(orders, again, strict=True))
    other = resample_method(inputs, seed=4, draws=50).orders
    assert any((a != b).any() for (a,), (b,) in zip(orders, other, strict=True))


@SIDES
def test_resampling_is_the_mean_over_draws_of_passes_with_another_sequences_values(side):
    model, tokens = tiny("gqa"), some_tokens(18, 9)  # more than go through the model at once
    mask = padding(side, [9, 6, 4] * 6, 9)
    orders = resample_method(token_inputs(model, tokens, mask), seed=5, draws=2).orders
    values = site_values(model, tokens, mask)
    clean = losses_with(model, tokens, mask)
    expected = np.zeros((8, 18))
    for (order,) in orders:
        others = {layer: own[torch.from_numpy(order)] for layer, own in values.items()}
        for row, head in enumerate(EVERY):
            expected[row] += (losses_with(model, tokens, mask, [head], others) - clean) / 2
    found = effects(model, tokens, mask, method="resample", seed=5, draws=2)
    assert error(found, expected.mean(axis=1)) < FLOAT32


def test_a_donor_padded_on_the_other_side_gives_the_values_of_the_same_places():
    model, tokens = tiny("rotary"), some_tokens(2, 9)
    mask = torch.cat((padding("left", (6,), 9), padding("right", (6,), 9)))
    values = site_values(model, tokens, mask)
    others = {layer: torch.zeros_like(own) for layer, own in values.items()}
    for layer, own in values.items():
        others[layer][0, 3:] = own[1, :6]
        others[layer][1, :6] = own[0, 3:]
    clean = losses_with(model, tokens, mask)
    expected = [(losses_with(model, tokens, mask, [h], others) - clean).mean() for h in EVERY]
    found = effects(model, tokens, mask, method="resample", draws=1)
    assert error(found, np.array(expected)) < FLOAT32
    assert np.abs(expected).min() > 10 * FLOAT32


def test_a_sequence_without_another_of_its_length_cannot_be_resampled():
    model, tokens = tiny("mha"), some_tokens(3, 9)
    with pytest.raises(AnalysisError) as caught:
        effects(model, tokens, padding("right", (9, 9, 6), 9), method="resample")
    assert str(caught.value) == (
        "resample needs two sequences of each length, and there is one of 6 tokens"
    )
    with pytest.raises(AnalysisError, match="draws = 0: at least one permutation is needed"):
        effects(model, tokens, method="resample", draws=0)


def patched(model, inputs, method):
    """The mean effects of a method on every head."""
    sets = [(head,) for head in EVERY]
    measured = measure_sets(model, inputs, [method], sets, Setting(METRICS["loss"]))[method.name]
    return np.array([measured.effect(heads).mean() for heads in sets])


@SIDES
def test_patching_puts_in_the_values_of_the_other_run_sequence_for_sequence(side):
    model, tokens, source = tiny("mqa"), some_tokens(18, 9), some_tokens(18, 9, seed=8)
    mask = padding(side, [9, 6, 4] * 6, 9)
    values = site_values(model, source, mask)
    clean = losses_with(model, tokens, mask)
    expected = [(losses_with(model, tokens, mask, [h], values) - clean).mean() for h in EVERY]
    if mask is None:
        found = effects(model, tokens, method="patch", reference=source)
    else:
        inputs, other = (token_inputs(model, ids, mask) for ids in (tokens, source))
        (method,) = prepare(model, inputs, "patch", reference=other)
        found = patched(model, inputs, method)
    assert error(found, np.array(expected)) < FLOAT32


def test_patching_every_head_of_the_last_layer_of_an_attention_only_model_moves_its_logits():
    """The last layer then writes what it wrote in the other run."""
    model = tiny("attention_only")
    tokens, source = some_tokens(2, 9), some_tokens(2, 9, seed=8)
    values = site_values(model, source)
    last = [(1, head) for head in range(4)]
    own, other = (cached(model, ids) for ids in (tokens, source))
    mixed = own["blocks.1.hook_resid_pre"] + other["blocks.1.hook_attn_out"]
    logits = model.unembed(model.ln_final(mixed)).detach().double().numpy()
    expected = sequence_losses(logits, tokens, None)
    found = interp.ablate(
        model, tokens, kind="layers", method="patch", reference=source, direct=False
    ).table
    clean = losses_with(model, tokens, None)
    assert found["ablation"][1] == pytest.approx((expected - clean).mean(), abs=FLOAT32)
    assert error(losses_with(model, tokens, None, last, values), expected) < FLOAT32


def test_a_run_of_another_shape_cannot_be_patched_in():
    model, tokens = tiny("mha"), some_tokens(3, 9)
    for source in (some_tokens(2, 9), some_tokens(3, 8)):
        with pytest.raises(ShapeError) as caught:
            effects(model, tokens, method="patch", reference=source)
        assert str(caught.value) == (
            f"patching takes tokens of the same shape, got {list(source.shape)} for [3, 9]"
        )


# --- patterns kept --------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["rotary", "smeared", "qk_norm", "windowed"])
@pytest.mark.parametrize("side", ["none", "left"])
def test_preserving_patterns_is_a_pass_with_every_stored_pattern_put_back(family, side):
    model, tokens = tiny(family, n_layers=3), some_tokens(4, 9)
    mask = padding(side, (9, 4, 7, 9), 9)
    clean_cache = cached(model, tokens, mask=mask)
    clean = losses_with(model, tokens, mask)

    def kept(layer):
        pattern = clean_cache[f"blocks.{layer}.attn.hook_pattern"]
        return f"blocks.{layer}.attn.hook_pattern", lambda own, hook: pattern

    every = [(layer, head) for layer in range(3) for head in range(4)]
    expected = []
    for head in every:
        hooks = [*replacing([head]), *(kept(layer) for layer in range(3))]
        with torch.no_grad():
            logits = model.run_with_hooks(tokens, fwd_hooks=hooks, attention_mask=mask)
        ablated = sequence_losses(logits.double().numpy(), tokens, mask)
        expected.append((ablated - clean).mean())
    found = effects(model, tokens, mask, method="pattern-preserving")
    assert error(found, np.array(expected)) < FLOAT32
    plain = effects(model, tokens, mask)
    assert np.abs(found - plain)[:8].max() > 0.01  # later patterns do change otherwise
    assert error(found[8:], plain[8:]) < FLOAT32  # no layer comes after the last one
