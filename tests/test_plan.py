"""The plan of a sweep: operations against PyTorch's own counter, and the sets it will measure."""

import json

import numpy as np
import pytest
import torch
from hf_models import bert, gpt2
from tiny_models import padding, some_tokens, tiny
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from interp.ablation import plan as planning
from interp.ablation.ablate import KINDS, run_sweep
from interp.ablation.measuring import measure_sets
from interp.ablation.metrics import METRICS, LogitsFunction, logit_difference, loss_metric
from interp.ablation.plan import plan_sweep, sweep_flops, sweep_rounds
from interp.ablation.sweep import Options, Sweep
from interp.errors import AnalysisError, ModelError, ShapeError
from interp.inputs import random_inputs, token_inputs
from interp.models.loading import load_model
from interp.models.pruning import prune_heads

MODELS = ("mha", "gqa", "mqa", "llama", "attention_only", "smeared", "gated_with_bias", "no_norm")
EVERY_METRIC = {
    **METRICS,
    "logit-diff": logit_difference(1, 2),
    "first-places": loss_metric([0, 1]),
    "function": LogitsFunction(lambda logits, batch: logits.mean(dim=(1, 2))),
}
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attention_flops(query, key, value, *rest, out_shape=None, **more):
    """Every pair of positions; key-value heads count for each query head that reads them."""
    return sdpa_flop_count(query, (*query[:2], *key[2:]), (*query[:2], *value[2:]))


def counted(call):
    """The operations that PyTorch counts, products only."""
    with FlopCounterMode(display=False, custom_mapping={ATTENTION: attention_flops}) as counter:
        call()
    return counter.get_total_flops()


@pytest.fixture(autouse=True)
def _quick_rate(monkeypatch):
    """The machine's rate by products of 256 in place of 1024: no test reads it closely."""
    monkeypatch.setattr(planning, "SIDE", 256)


# --- operations -------------------------------------------------------------------------------


def test_the_operations_of_one_head_are_those_counted_by_hand():
    model, metric = tiny("mha"), METRICS["loss"]
    inputs = token_inputs(model, some_tokens(3, 12))
    # 36 tokens of width 24, four heads of six, an MLP of 20, 19 ids, 11 places a row are read.
    attention = 2 * 36 * 24 * 3 * 24 + 4 * 36 * 12 * 24 + 2 * 36 * 24 * 24
    layer = attention + 2 * 2 * 36 * 24 * 20
    unembedded = 2 * 33 * 24 * (19 + 1)  # the log-sum-exp of all, and one of them again
    clean = 2 * layer + unembedded
    ablated = 2 * 36 * 6 * 24 + 2 * 2 * 36 * 24 * 20 + layer + unembedded
    expected = clean + layer + ablated  # the pass comes to layer 0 once more for its z
    assert sweep_flops(model, inputs, metric, [((0, 1),)]) == expected


@pytest.mark.parametrize("family", MODELS)
def test_the_operations_are_those_that_pytorch_counts(family):
    model = tiny(family)
    inputs = random_inputs(model, [6], 3)
    sets = [((0, 1),), ((0, 2),), ((1, 0),), ((0, 0), (1, 3))]
    for name, metric in EVERY_METRIC.items():
        options = Options(metric=metric)
        own = counted(lambda options=options: Sweep(model, inputs, options).measure(sets))
        # The logit of one token is no product for PyTorch.
        assert sweep_flops(model, inputs, metric, sets) == pytest.approx(own, rel=0.02), name


@pytest.mark.parametrize(
    "words",
    [
        {"direct": True},
        {"direct": False},
        {"site": "k"},
        {"site": "v"},
        {"method": "resample", "draws": 3},
        {"method": "pattern-preserving"},
        {"method": "all", "draws": 2},
        {"method": "mean"},
        {"metric": "last-token"},
        {"metric": "kl"},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["heads", "pairs", "layers"])
def test_a_plan_counts_what_the_sweep_will_do(words, kind):
    model = tiny("gqa")
    inputs = token_inputs(model, some_tokens(4, 12))
    reference = token_inputs(model, some_tokens(2, 12, seed=1))
    named = words.get("method") in ("mean", "all")
    chosen = {**words, "metric": METRICS[words.get("metric", "loss")]}
    options = Options(**chosen, reference=reference if named else None)
    plan = plan_sweep(model, inputs, options, kind)
    own = counted(lambda: run_sweep(Sweep(model, inputs, options, kind=kind), kind, None))
    # Which heads are the strongest, and are ablated together, is not known before.
    assert plan.flops == pytest.approx(own, rel=0.05)


def test_padding_pruned_heads_and_several_lengths_are_counted():
    model = prune_heads(tiny("gqa"), [(0, 1), (1, 0), (1, 1)])
    mask = padding("left", [12, 7, 9], 12)
    padded = token_inputs(model, some_tokens(3, 12), attention_mask=mask)
    drawn = random_inputs(model, [3, 6], 2)
    for inputs in (padded, drawn):
        options = Options()
        plan = plan_sweep(model, inputs, options)
        sweep = Sweep(model, inputs, options)
        assert plan.sets == 5
        own = counted(lambda sweep=sweep: run_sweep(sweep, "heads", None))
        assert plan.flops == pytest.approx(own, rel=0.05)
    assert plan.sequences == 4
    assert plan.parts == 2
    assert plan.tokens == 2 * 6 + 2 * 12


def test_whole_hooked_passes_are_counted_where_there_is_no_restart():
    model = tiny("llama")
    inputs = token_inputs(model, some_tokens(2, 10))
    restarted = plan_sweep(model, inputs, Options(direct=False)).flops
    model.add_hook("blocks.0.hook_resid_pre", lambda value, hook: value)
    hooked = plan_sweep(model, inputs, Options(direct=False))
    with torch.no_grad():
        one = counted(lambda: model(inputs.batches[0].tokens))
    # Each round begins with the unablated pass.
    assert hooked.flops == pytest.approx((hooked.passes + 2) * one, rel=1e-6)
    assert hooked.flops > restarted


def test_a_bridged_model_has_a_plan():
    model = load_model(gpt2(), backend="bridge")
    inputs = token_inputs(model, some_tokens(2, 10))
    plan = plan_sweep(model, inputs, Options())
    n_heads = model.cfg.n_layers * model.cfg.n_heads
    assert plan.passes == n_heads + 1
    assert plan.flops > plan_sweep(load_model(gpt2()), inputs, Options()).flops
    assert plan.seconds > 0


# --- sets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["z", "v"])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_sets_of_a_plan_are_those_that_are_measured(monkeypatch, kind, named, site):
    model = tiny("gqa")
    inputs = token_inputs(model, some_tokens(4, 12))
    heads = [(1, 1), (0, 0), (0, 1)] if named or kind == "cumulative" else None
    if kind == "layers":
        heads = None
    seen = []

    def measured(model, inputs, methods, sets, setting, **more):
        seen.append((list(dict.fromkeys(sets)), setting.direct, len(methods) == 1))
        return measure_sets(model, inputs, methods, sets, setting, **more)

    monkeypatch.setattr("interp.ablation.sweep.measure_sets", measured)
    options = Options(method="all", site=site, bfloat16=True)
    run_sweep(Sweep(model, inputs, options, kind=kind), kind, heads)
    rounds = sweep_rounds(model, options, kind, heads)
    assert [one.direct for one in rounds] == [direct for _, direct, _ in seen]
    assert [one.first_method_alone for one in rounds] == [alone for _, _, alone in seen]
    assert len(rounds) == len(seen)
    for place, (one, (sets, _, _)) in enumerate(zip(rounds, seen, strict=True)):
        if place == 2:  # the strongest together; each alone is known by then
            assert len(one.sets) == 1
            assert len(one.sets[0]) == len(sets[-1]) == len(sets) - 1
        else:
            assert [sorted(own) for own in one.sets] == [sorted(own) for own in sets]


def test_what_cannot_be_swept_cannot_be_planned():
    model = tiny()
    inputs = token_inputs(model, some_tokens(2, 8))
    with pytest.raises(AnalysisError, match="is defined nowhere in these sequences"):
        plan_sweep(model, inputs, Options(metric=loss_metric([9])))
    with pytest.raises(AnalysisError, match="there is nothing to take away"):
        plan_sweep(model, inputs, Options(), "pairs", [(0, 0)])
    short = token_inputs(model, some_tokens(2, 4))
    with pytest.raises(AnalysisError, match="has no token at some of the 8 places"):
        plan_sweep(model, inputs, Options(method="mean", reference=short))
    assert plan_sweep(model, inputs, Options(method="mean", reference=short, pooled=True)).sets == 8
    with pytest.raises(ShapeError, match="patching takes tokens of the same shape"):
        plan_sweep(model, inputs, Options(method="patch", reference=short))
    alone = token_inputs(model, some_tokens(1, 8))
    with pytest.raises(AnalysisError, match="resample needs two sequences of each length"):
        plan_sweep(model, alone, Options(method="all"))
    encoder = load_model(bert(), backend="bridge")
    with pytest.raises(ModelError, match="is an encoder, where every token sees the next one"):
        plan_sweep(encoder, token_inputs(encoder, some_tokens(2, 8)), Options())


# --- what is said of them -----------------------------------------------------------------------


def test_a_plan_tells_everything_in_words_and_in_json():
    model = tiny()
    inputs = token_inputs(model, some_tokens(4, 12))
    plan = plan_sweep(model, inputs, Options(method="all"))
    lines = plan.lines()
    assert lines[0] == "8 heads, one at a time; method: zero, mean, resample in 4 draws"
    assert lines[1] == "4 sequences, 48 tokens in all, in 1 part: 54 ablated passes"
    assert plan.passes == (8 + 1) * 6  # five of them together come last
    for line, start in zip(
        lines[2:],
        ("operations: ", "floor: ", "estimated time: ", "estimated peak memory: "),
        strict=True,
    ):
        assert line.startswith(start)
    saved = json.loads(plan.to_json())
    assert saved["flops"] == plan.flops
    assert saved["floor_seconds"] == pytest.approx(plan.flops / plan.flops_per_second)
    assert plan.floor_seconds < plan.seconds


def test_one_of_a_thing_is_told_as_one():
    model = tiny(n_layers=1)
    inputs = token_inputs(model, some_tokens(1, 8))
    lines = plan_sweep(model, inputs, Options(), "layers").lines()
    assert lines[0] == "1 layer; method: zero"
    assert lines[1] == "1 sequence, 8 tokens in all, in 1 part: 1 ablated pass"
    lines = plan_sweep(model, inputs, Options(site="v"), "heads", [(0, 1)]).lines()
    assert lines[0] == "1 KV head, one at a time; method: zero"


def test_the_time_is_each_operation_at_the_rate_of_its_layer(monkeypatch):
    model = tiny("mha", n_layers=3)
    inputs = token_inputs(model, some_tokens(4, 12))
    clock = {"now": 0.0}

    def a_second(call):
        clock["now"] += 1
        return call(), 1.0

    monkeypatch.setattr(planning, "_timed", a_second)
    sets = sweep_rounds(model, Options(direct=False), "heads", None)[0].sets
    plan = plan_sweep(model, inputs, Options(direct=False), "heads", None)
    # Four heads of a layer go together within a second, whichever layer it is.
    assert len(sets) == 12
    assert 3 < plan.seconds < 3 + 4


def test_memory_grows_with_what_is_held():
    model = tiny("mha")
    small, large = (token_inputs(model, some_tokens(4, n)) for n in (4, 12))
    weights = sum(own.numel() * 4 for own in model.parameters())
    plain = plan_sweep(model, large, Options())
    assert plain.memory["weights"] == weights
    frozen = plan_sweep(model, large, Options(method="pattern-preserving"))
    resampled = plan_sweep(model, large, Options(method="resample"))
    z = 4 * 12 * 2 * 4 * 6 * 4  # rows, places, layers, heads, d_head, bytes
    assert resampled.memory["activations"] - plain.memory["activations"] == z
    assert frozen.memory["activations"] - plain.memory["activations"] == 2 * z
    function = Options(metric=EVERY_METRIC["function"])
    logits = [plan_sweep(model, own, function).memory["logits"] for own in (small, large)]
    assert logits[1] == 3 * logits[0] == 3 * 4 * 12 * 19 * 4


def test_a_plan_leaves_the_random_state_and_the_model_as_they_were():
    model = tiny().train()
    state, hooks = torch.get_rng_state(), sum(p.has_hooks() for p in model.hook_dict.values())
    inputs = token_inputs(model, some_tokens(4, 12))
    plan = plan_sweep(model, inputs, Options(method="all"))
    assert np.isfinite(plan.seconds)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert sum(point.has_hooks() for point in model.hook_dict.values()) == hooks == 0
