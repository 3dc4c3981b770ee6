"""The schemes of quantization by themselves: recipes, llm.int8, SmoothQuant, AWQ and 16 bits."""

import re

import numpy as np
import pytest
import torch
from pruning_cases import SETS
from test_rounding import by_loops
from tiny_models import FAMILIES, error, some_tokens, tiny
from torch import nn

from interp.errors import AnalysisError
from interp.inputs import token_inputs
from interp.models.pruning import prune_heads
from interp.models.weights import stored_weights
from interp.quantization import measuring, rounded_model
from interp.quantization.calibration import calibrate, split
from interp.quantization.projections import ActivationRounding, RoundedLinear, rounding_model
from interp.quantization.recipes import Recipe, parse_bits, recipes
from interp.quantization.rounding import Grid
from interp.quantization.scaling import (
    RATIOS,
    aware_scales,
    aware_weights,
    best_ratio,
    smoothed_weights,
    smoothing,
)

TOKENS = some_tokens(8, 10)


def batches_of(model, tokens=TOKENS):
    return token_inputs(model, tokens).batches


def log_probs(model, tokens=TOKENS):
    with torch.no_grad():
        return model(tokens).log_softmax(dim=-1)


def what_is_read(model, tokens=TOKENS):
    """What every projection of the blocks reads, by its name, from one plain pass."""
    seen, handles = {}, []
    for name, module in model.named_modules():
        if name.startswith("blocks.") and isinstance(module, nn.Linear):

            def look(module, given, name=name):
                seen[name] = given[0].detach().flatten(0, 1)

            handles.append(module.register_forward_pre_hook(look))
    log_probs(model, tokens)
    for handle in handles:
        handle.remove()
    return seen


# --- recipes --------------------------------------------------------------------------------------


def kinds(found):
    return [(own.scheme, own.bits, own.activation_scales) for own in found]


def test_schemes_are_those_that_go_with_the_bits():
    assert kinds(recipes()) == [
        ("round-to-nearest", "w8a8", "tensor"),
        ("round-to-nearest", "w8a8", "token"),
        ("llm.int8", "w8a8", "vector"),
        ("smoothquant", "w8a8", "tensor"),
        ("smoothquant", "w8a8", "token"),
    ]
    assert kinds(recipes(bits=["w4a16"])) == [
        ("round-to-nearest", "w4a16", ""),
        ("awq", "w4a16", ""),
    ]
    both = kinds(recipes(bits=["W6A6", " w3a16 "], activation_scales=["token"]))
    assert ("smoothquant", "w6a6", "token") in both
    assert ("awq", "w3a16", "") in both
    assert len(both) == 5


def test_a_recipe_that_is_asked_for_twice_is_there_once():
    assert len(recipes(["awq", "awq"], ["w4a16", "w4a16"])) == 1


def test_llm_int8_has_scales_of_its_own_and_no_zero_point():
    (int8,) = recipes(["llm.int8"], weight_scales="group", affine=True, activation_scales=["token"])
    assert (int8.weight_scales, int8.activation_scales, int8.affine) == ("channel", "vector", False)
    assert (int8.weights, int8.activations) == (Grid(8, "row"), Grid(8, "row"))


def test_the_grids_of_a_recipe_are_those_of_its_words():
    tensor = Recipe("round-to-nearest", 8, 6, "tensor", "tensor", affine=True)
    assert tensor.weights == Grid(8, "matrix", affine=True)
    assert tensor.activations == Grid(6, "matrix", affine=True)
    group = Recipe("awq", 4, 16, "group", "", group=32)
    assert group.weights == Grid(4, "group", group=32)
    assert group.activations is None
    assert Recipe("smoothquant", 16, 8).weights is None
    assert parse_bits("w4a16") == (4, 16)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"bits": ["w8"]}, "bits 'w8': written like w8a8 or w4a16, each of 2 to 8 bits, or 16"),
        ({"bits": ["w1a8"]}, "bits 'w1a8'"),
        ({"bits": ["w8a9"]}, "bits 'w8a9'"),
        ({"bits": ["w08a8x"]}, "bits 'w08a8x'"),
        ({"bits": []}, "bits: none was named"),
        ({"schemes": []}, "scheme: none was named"),
        ({"activation_scales": []}, "activation scales: none was named"),
        ({"schemes": ["gptq"]}, "scheme 'gptq': it should be one of round-to-nearest, llm.int8"),
        ({"weight_scales": "row"}, "weight scales 'row': it should be one of channel, tensor"),
        ({"activation_scales": ["row"]}, "activation scales 'row': it should be one of tensor"),
        ({"schemes": ["awq"], "bits": ["w4a8"]}, "awq with w4a8: it is for weights alone"),
        ({"group": 1}, "group = 1: at least 2 numbers share a scale"),
        ({"alpha": 1.5}, "alpha = 1.5: it goes from 0 to 1"),
        ({"alpha": float("nan")}, "alpha = nan"),
        ({"threshold": 0.0}, "threshold = 0: it is above 0"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(given, words):
    with pytest.raises(AnalysisError, match=f"^{re.escape(words)}") as refused:
        recipes(**given)
    assert "\n" not in str(refused.value)


# --- llm.int8 -------------------------------------------------------------------------------------


def int8_linear(threshold=6.0, width=8, out=5, tokens=None, seed=0):
    """A projection in float64 as llm.int8 has it, and its weights before rounding."""
    generator = torch.Generator().manual_seed(seed)
    plain = nn.Linear(width, out).double()
    with torch.no_grad():
        plain.weight.copy_(torch.randn(out, width, generator=generator))
        plain.bias.copy_(torch.randn(out, generator=generator))
    exact = plain.weight.detach().clone()
    plain.weight = nn.Parameter(Grid(8, "row").round(exact))
    rounding = ActivationRounding(Grid(8, "row"), threshold, tokens)
    half = exact.clamp(-65504, 65504).half().double()
    return RoundedLinear(plain, rounding, half), exact


def int8_by_loops(x, weight, bias, threshold=6.0):
    """One sequence: features in float16, the other channels in integers of 8 bits."""
    n_pos, width = x.shape
    rounded = by_loops(weight, 8, "row", False, width)
    features = [max(abs(float(x[t, j])) for t in range(n_pos)) >= threshold for j in range(width)]
    made = torch.zeros(n_pos, len(weight), dtype=torch.float64)
    for t in range(n_pos):
        rest = [0.0 if features[j] else float(x[t, j]) for j in range(width)]
        scale = max(map(abs, rest)) / 127
        for o in range(len(weight)):
            total = float(bias[o])
            for j in range(width):
                if features[j]:
                    clipped = min(max(float(x[t, j]), -65504.0), 65504.0)
                    total += float(np.float16(clipped)) * float(np.float16(float(weight[o, j])))
                elif scale:
                    total += round(rest[j] / scale) * scale * float(rounded[o, j])
            made[t, o] = total
    return made


def int8_input(seed=0, batch=2):
    x = torch.randn(batch, 6, 8, generator=torch.Generator().manual_seed(seed)).double()
    x[0, 4, 2] = -30.0
    x[0, 1, 7] = 9.3
    return x.clone()


@pytest.mark.parametrize("seed", range(3))
def test_llm_int8_is_what_loops_in_float64_make_of_it(seed):
    linear, weight = int8_linear(seed=seed)
    x = int8_input(seed)
    with torch.no_grad():
        made = linear(x)
    for b in range(2):
        expected = int8_by_loops(x[b], weight, linear.bias.detach())
        assert (made[b] - expected).abs().max() < 1e-12


@pytest.mark.parametrize(("value", "feature"), [(6.0, True), (-6.0, True), (5.999, False)])
def test_a_channel_that_reaches_the_threshold_exactly_is_a_feature(value, feature):
    linear, weight = int8_linear()
    x = torch.zeros(1, 2, 8, dtype=torch.float64)
    x[0, 0, 3], x[0, 1, 3] = value, 0.25
    with torch.no_grad():
        made = linear(x) - linear.bias
    exact = weight[:, 3].half().double() * 0.25
    rounded = linear.weight[:, 3] * 0.25
    assert torch.allclose(made[0, 1], exact if feature else rounded, rtol=1e-12)
    assert not torch.allclose(exact, rounded, rtol=1e-4)


def test_what_float16_does_not_hold_becomes_its_largest_number():
    linear, weight = int8_linear()
    x = int8_input()
    x[0, 2, 5] = 300.0**4
    with torch.no_grad():
        made = linear(x)
    assert made.isfinite().all()
    assert (made[0] - int8_by_loops(x[0], weight, linear.bias.detach())).abs().max() < 1e-9


def test_the_features_of_one_sequence_are_none_of_another():
    linear, _ = int8_linear()
    x = int8_input()
    with torch.no_grad():
        assert torch.equal(linear(x)[1], linear(x[1:])[0])
        with_other = linear(torch.cat([x[1:], 100 * x[1:]]))
        assert torch.equal(with_other[0], linear(x[1:])[0])


def test_tokens_that_are_not_rounded_make_no_features():
    x = int8_input()
    rounded = torch.ones(2, 6, dtype=torch.bool)
    rounded[0, 4] = False
    linear, weight = int8_linear(tokens=rounded)
    with torch.no_grad():
        made = linear(x)
    others = [0, 1, 2, 3, 5]
    expected = int8_by_loops(x[0, others], weight, linear.bias.detach())
    assert (made[0, others] - expected).abs().max() < 1e-12
    without, _ = int8_linear()
    with torch.no_grad():
        assert not torch.allclose(without(x)[0, others], expected, rtol=1e-4)


def test_tokens_that_are_not_rounded_are_not_cut_to_float16_in_a_feature_either():
    x = int8_input()
    x[0, :, 5] = 300.0**4
    rounded = torch.ones(2, 6, dtype=torch.bool)
    rounded[0, 4] = False
    linear, weight = int8_linear(tokens=rounded)
    with torch.no_grad():
        made = linear(x)[0, 4] - linear.bias
    half = weight[:, 5].half().double()
    assert torch.allclose(made, half * 300.0**4, rtol=1e-6)


@pytest.mark.parametrize("sharing", ["matrix", "row"])
def test_tokens_that_are_not_rounded_stay_and_make_no_scale_larger(sharing):
    x = int8_input().float()
    rounded = torch.ones(2, 6, dtype=torch.bool)
    rounded[0, 4] = False
    plain = nn.Linear(8, 8, bias=False)
    plain.weight = nn.Parameter(torch.eye(8))
    made = RoundedLinear(plain, ActivationRounding(Grid(8, sharing), None, rounded))(x)
    assert torch.equal(made[0, 4], x[0, 4])
    others = [0, 1, 2, 3, 5]
    expected = by_loops(x[0, others], 8, sharing, False, 8).float()
    assert torch.allclose(made[0, others], expected, atol=1e-6)


# --- smoothquant ----------------------------------------------------------------------------------

SMOOTHED = [family for family in FAMILIES if family != "no_norm"]


@pytest.mark.parametrize("fold", ["all", "norms"])
@pytest.mark.parametrize("family", SMOOTHED)
def test_before_rounding_a_smoothed_model_computes_what_it_did(family, fold):
    model = tiny(family)
    changed = smoothed_weights(model, batches_of(model), 0.5, fold)
    assert any(
        not torch.allclose(own, stored_weights(model)[name]) for name, own in changed.items()
    )
    smoothed = rounding_model(model, changed).model
    assert (log_probs(smoothed) - log_probs(model)).abs().max() < 1e-4
    if model.config.tie_embeddings:
        assert smoothed.unembed.weight.data_ptr() == smoothed.embed.weight.data_ptr()


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("family", ["mha", "llama", "relu_tied", "gated_with_bias"])
def test_so_it_does_for_every_alpha(family, alpha):
    model = tiny(family, seed=1)
    smoothed = rounding_model(model, smoothed_weights(model, batches_of(model), alpha)).model
    assert (log_probs(smoothed) - log_probs(model)).abs().max() < 1e-4


@pytest.mark.parametrize("heads", SETS.values(), ids=SETS)
def test_a_pruned_model_is_smoothed_to_the_same_function(heads):
    model = prune_heads(tiny("llama"), heads)
    smoothed = rounding_model(model, smoothed_weights(model, batches_of(model), 0.5)).model
    assert (log_probs(smoothed) - log_probs(model)).abs().max() < 1e-4


def test_smoothing_scales_by_hand():
    largest = torch.tensor([4.0, 1.0, 0.0])
    weights = [torch.tensor([[1.0, -1.0, 0.25], [0.5, 0.0, 0.0]]), torch.tensor([[0.0, 4.0, 0.0]])]
    by_alpha = {
        alpha: smoothing(largest, weights, alpha).tolist() for alpha in (0.0, 0.25, 0.5, 1.0)
    }
    assert by_alpha[0.5] == pytest.approx([2.0, 0.5, (1e-5 / 0.25) ** 0.5])
    assert by_alpha[0.0] == pytest.approx([1.0, 0.25, 4.0])
    assert by_alpha[1.0] == pytest.approx([4.0, 1.0, 1e-5])
    assert by_alpha[0.25] == pytest.approx([4**0.25, 4**-0.75, 1e-5**0.25 / 0.25**0.75])


def test_what_changes_is_the_norm_and_what_reads_it_and_the_hidden_activations_where_it_may_be():
    """gelu of s x is not s gelu(x); relu and the linear branch of a gated MLP let a factor out."""
    attention = {"ln1.w", "attn.q_proj.weight", "attn.k_proj.weight", "attn.v_proj.weight"}
    first = {"ln2.w", "mlp.in_proj.weight"}
    expected = {
        ("mha", "all"): attention | first | {"ln1.b", "ln2.b"},
        ("relu_tied", "all"): attention | first | {"ln1.b", "ln2.b", "mlp.out_proj.weight"},
        ("relu_tied", "norms"): attention | first | {"ln1.b", "ln2.b"},
        ("llama", "all"): attention | first | {"mlp.gate_proj.weight", "mlp.out_proj.weight"},
        ("llama", "norms"): attention | first | {"mlp.gate_proj.weight"},
        ("shortformer", "all"): first | {"ln2.b"},
    }
    for (family, fold), names in expected.items():
        model = tiny(family)
        changed = smoothed_weights(model, batches_of(model), 0.5, fold)
        in_block = {name.removeprefix("blocks.1.") for name in changed if "blocks.1." in name}
        assert in_block == names, (family, fold)


def test_gains_and_hidden_rows_are_divided_by_scales_from_a_plain_pass():
    model = tiny("gated_with_bias")
    changed = smoothed_weights(model, batches_of(model), 0.3)
    stored, read = stored_weights(model), what_is_read(model)
    for layer in range(2):
        block = f"blocks.{layer}"

        def scales(*names, block=block):
            weights = torch.cat([stored[f"{block}.{name}.weight"] for name in names])
            largest = read[f"{block}.{names[0]}"].abs().amax(0)
            return largest**0.3 / weights.abs().amax(0) ** 0.7

        attention = scales("attn.q_proj", "attn.k_proj", "attn.v_proj")
        assert torch.allclose(changed[f"{block}.ln1.w"], stored[f"{block}.ln1.w"] / attention)
        assert torch.allclose(changed[f"{block}.ln1.b"], stored[f"{block}.ln1.b"] / attention)
        first, hidden = scales("mlp.in_proj", "mlp.gate_proj"), scales("mlp.out_proj")
        inward = stored[f"{block}.mlp.in_proj.weight"] * first / hidden[:, None]
        assert torch.allclose(changed[f"{block}.mlp.in_proj.weight"], inward)
        bias = stored[f"{block}.mlp.in_proj.bias"] / hidden
        assert torch.allclose(changed[f"{block}.mlp.in_proj.bias"], bias)
        gate = stored[f"{block}.mlp.gate_proj.weight"] * first
        assert torch.allclose(changed[f"{block}.mlp.gate_proj.weight"], gate)


def test_with_alpha_1_no_channel_exceeds_1_on_the_calibration_sequences():
    model = tiny("llama")
    smoothed = rounding_model(model, smoothed_weights(model, batches_of(model), 1.0)).model
    for name, x in what_is_read(smoothed).items():
        if not name.endswith("o_proj"):
            assert torch.allclose(x.abs().amax(0), torch.ones(x.shape[1]), atol=1e-4), name


@pytest.mark.parametrize(
    ("family", "fold", "changes"),
    [
        ("no_norm", "all", {}),
        ("shortformer", "all", {"mlp": None}),
        ("llama", "norms", {"normalization_type": "none"}),
    ],
)
def test_where_nothing_takes_a_scale_smoothing_is_refused_in_one_line(family, fold, changes):
    model = tiny(family, **changes)
    with pytest.raises(AnalysisError, match=r"^smoothquant: custom has no norm whose gain") as no:
        smoothed_weights(model, batches_of(model), 0.5, fold)
    assert "\n" not in str(no.value)


def test_a_model_without_norms_takes_scales_in_its_gated_mlp():
    model = tiny("llama", normalization_type="none")
    changed = smoothed_weights(model, batches_of(model), 0.5)
    assert {name.partition(".mlp.")[2] for name in changed} == {"in_proj.weight", "out_proj.weight"}
    smoothed = rounding_model(model, changed).model
    # Without norms log-probs go into the thousands.
    assert error(log_probs(smoothed), log_probs(model)) < 1e-4


# --- awq ------------------------------------------------------------------------------------------

AWQ = Grid(3, "group", affine=True, group=4)


def test_awq_scales_at_ratio_0_are_exactly_1():
    mean = torch.tensor([0.0, 1e-8, 0.3, 2500.0])
    assert aware_scales(mean, 0.0).tolist() == [1.0] * 4
    assert RATIOS[0] == 0.0
    assert (len(RATIOS), RATIOS[-1]) == (20, 0.95)


def test_awq_scales_by_hand():
    # The square roots 1, 2 and 4, over the root of the largest times the smallest.
    assert aware_scales(torch.tensor([1.0, 4.0, 16.0]), 0.5).tolist() == [0.5, 1.0, 2.0]


def awq_errors(x, weights, ratio):
    """By how much the products differ on these inputs, with loops that round."""
    scales = x.abs().double().mean(0) ** ratio
    scales = scales / (scales.max() * scales.min()).sqrt()
    total = 0.0
    for weight in weights:
        made = by_loops(weight.double() * scales, 3, "group", True, 4) / scales
        total += float((x.double() @ (made - weight.double()).T).pow(2).sum())
    return total


def test_the_searched_ratio_has_the_least_error_of_a_plain_forward_over_the_calibration():
    model = tiny("llama", seed=2)
    read, found = what_is_read(model), []
    for layer, channels in calibrate(model, batches_of(model), grams=True):
        for reading, own in channels.items():
            names = [f"blocks.{layer}.{name}" for name in reading.projections]
            weights = [model.get_parameter(f"{name}.weight").detach() for name in names]
            errors = [awq_errors(read[names[0]], weights, ratio) for ratio in RATIOS]
            ratio = best_ratio(own, weights, AWQ)
            found.append(ratio)
            # Float32 may take another one of two that are equal to rounding.
            assert errors[RATIOS.index(ratio)] <= min(errors) * (1 + 1e-4)
    assert len(found) == 8
    assert len(set(found)) > 1


def test_awq_weights_are_rounded_under_their_scales_which_are_taken_off_again():
    model = tiny("mqa", seed=3)
    changed = aware_weights(model, batches_of(model), AWQ)
    read = what_is_read(model)
    for layer, channels in calibrate(model, batches_of(model), grams=True):
        for reading, own in channels.items():
            names = [f"blocks.{layer}.{name}" for name in reading.projections]
            weights = [model.get_parameter(f"{name}.weight").detach() for name in names]
            ratio = best_ratio(own, weights, AWQ)
            scales = read[names[0]].abs().mean(0) ** ratio
            scales = scales / (scales.max() * scales.min()).sqrt()
            for name, weight in zip(names, weights, strict=True):
                expected = by_loops(weight * scales, 3, "group", True, 4) / scales
                made = changed[f"{name}.weight"]
                # A value on the edge of two integers may go either way in float32.
                assert ((made - expected).abs() > 1e-5).float().mean() < 0.01
    assert changed.keys() == {
        f"{name}.weight" for name in read if model.get_parameter(f"{name}.weight").numel()
    }


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("grid", [Grid(3, "row"), Grid(4, "group", group=4), Grid(2, "matrix")])
def test_awq_never_errs_more_on_its_calibration_than_rounding_to_nearest(grid, seed):
    model = tiny("gqa", seed=seed)
    aware, read = aware_weights(model, batches_of(model), grid), what_is_read(model)
    better = 0
    for name, x in read.items():
        weight = model.get_parameter(f"{name}.weight").detach()
        off = {
            "nearest": float((x @ (grid.round(weight) - weight).T).double().pow(2).sum()),
            "awq": float((x @ (aware[f"{name}.weight"] - weight).T).double().pow(2).sum()),
        }
        together = any(own in name for own in ("q_proj", "k_proj", "v_proj"))
        # The three of attention share their scales: one alone may lose what the others win.
        if not together:
            assert off["awq"] <= off["nearest"] * (1 + 1e-4), name
            better += off["awq"] < 0.99 * off["nearest"]
    assert better


def test_awq_of_16_bits_is_the_model_itself():
    model = tiny("llama")
    for name, weight in aware_weights(model, batches_of(model), None).items():
        assert torch.equal(weight, stored_weights(model)[name]), name


# --- 16 bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["round-to-nearest", "llm.int8", "smoothquant", "awq"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_scheme_of_16_bits_is_the_model_before_rounding(family, scheme):
    model = tiny(family)
    if scheme == "smoothquant" and family == "no_norm":
        pytest.skip("nothing takes a scale")
    evaluated, calibrating = split(token_inputs(model, TOKENS))
    (recipe,) = recipes([scheme], ["w16a16"])
    made = rounded_model(model, recipe, calibrating)
    assert (log_probs(made.model) - log_probs(model)).abs().max() < 1e-4
    nothing = [torch.zeros_like(batch.tokens).bool() for batch in evaluated.batches]
    (one,) = measuring.measure(model, made, [recipe], evaluated.batches, nothing)
    assert one.sinks == ""
    assert abs(one.change) < 1e-4
    assert max(one.errors) < 1e-4


def test_where_every_channel_is_a_feature_only_float16_rounds():
    model, off = tiny("llama"), {}
    for threshold in (1e-6, 1e6):
        (recipe,) = recipes(["llm.int8"], threshold=threshold)
        made = rounded_model(model, recipe, [])
        with made.rounding.over(torch.ones(8, 10, dtype=torch.bool), recipe.activations):
            off[threshold] = float((log_probs(made.model) - log_probs(model)).abs().mean())
    assert 0 < off[1e-6] < off[1e6] / 5
