"""The tables of sweeps: their columns, their statistics, and what a sweep leaves alone."""

import dataclasses
import gc
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import hf_models
import numpy as np
import pandas as pd
import pytest
import torch
from hand_ablation import losses_with
from scipy import stats
from tiny_models import error, padding, some_tokens, tiny
from torch.utils._python_dispatch import TorchDispatchMode

import interp
from interp.ablation import passes as passes_module
from interp.ablation.paired import false_discovery, paired
from interp.ablation.ranks import disagreement
from interp.ablation.sweep import Options, Sweep
from interp.ablation.sweep_tables import ablate_heads
from interp.errors import AnalysisError
from interp.inputs import token_inputs
from interp.tables import HeadScores, SetScores

# Losses of float32 layers err by about 1e-6.
FLOAT32 = 1e-5
EVERY = [(layer, head) for layer in range(2) for head in range(4)]


def numbers(table, *columns):
    """Some columns as a float array of its own."""
    return table[list(columns)].to_numpy(float, copy=True)


def differences(model, tokens, mask=None, sets=None):
    """Ablated minus clean loss of each set and sequence, by hand."""
    clean = losses_with(model, tokens, mask)
    sets = [[head] for head in EVERY] if sets is None else sets
    return np.stack([losses_with(model, tokens, mask, heads) - clean for heads in sets])


# --- statistics -----------------------------------------------------------------------------


def test_benjamini_and_hochberg_on_a_case_by_hand():
    # Sorted 0.01, 0.02, 0.03, 0.5 of four: 4/1 * 0.01, 4/2 * 0.02, 4/3 * 0.03 are 0.04 each.
    q = false_discovery(np.array([0.03, 0.5, 0.01, math.nan, 0.02]))
    assert q == pytest.approx([0.04, 0.5, 0.04, math.nan, 0.04], nan_ok=True)
    assert np.isnan(false_discovery(np.array([math.nan, math.nan]))).all()


def by_definition(p):
    """Each p's least p_(j) m / j over its own rank and those above."""
    order, m = np.argsort(p), len(p)
    q = np.empty(m)
    for place, row in enumerate(order):
        q[row] = min(1.0, *(p[order[j]] * m / (j + 1) for j in range(place, m)))
    return q


def test_paired_differences_give_a_t_test_and_its_false_discovery_rate():
    rng = np.random.default_rng(0)
    own = rng.normal(size=(6, 9)) + np.linspace(0, 2, 6)[:, None]
    found = paired(own)
    p = stats.ttest_1samp(own, 0, axis=1).pvalue
    np.testing.assert_allclose(found.mean, own.mean(axis=1), rtol=1e-12)
    np.testing.assert_allclose(found.standard_error, own.std(axis=1, ddof=1) / 3, rtol=1e-12)
    np.testing.assert_allclose(found.p, p, rtol=1e-9)
    np.testing.assert_allclose(found.q, by_definition(p), rtol=1e-9)
    assert (found.n == 9).all()


def test_sequences_that_do_not_count_and_rows_that_failed_are_left_out():
    own = np.array([[1.0, 2.0, 3.0, math.nan], [math.nan] * 4, [0.0] * 4])
    found = paired(own)
    assert found.n.tolist() == [3, 0, 4]
    assert found.mean == pytest.approx([2.0, math.nan, 0.0], nan_ok=True)
    # Differences 1, 2, 3: variance 1 over 3 sequences.
    assert found.standard_error == pytest.approx([1 / math.sqrt(3), math.nan, 0.0], nan_ok=True)
    expected = stats.ttest_1samp([1.0, 2.0, 3.0], 0).pvalue
    assert found.p == pytest.approx([expected, math.nan, 1.0], nan_ok=True)
    one = paired(np.array([[1.5]]))
    assert (one.mean[0], one.n[0]) == (1.5, 1)
    assert np.isnan([one.standard_error[0], one.p[0], one.q[0]]).all()


def test_sequences_of_one_document_count_as_one():
    """Each document twice over says no more than once."""
    rng = np.random.default_rng(1)
    own = rng.normal(size=(3, 5)) + 1
    once = paired(own)
    twice = paired(np.repeat(own, 2, axis=1), np.repeat(np.arange(5), 2))
    np.testing.assert_allclose(twice.mean, once.mean, rtol=1e-12)
    np.testing.assert_allclose(twice.standard_error, once.standard_error, rtol=1e-12)
    np.testing.assert_allclose(twice.p, once.p, rtol=1e-9)
    assert (twice.n == 10).all()


# --- one head at a time ---------------------------------------------------------------------


@pytest.mark.parametrize("side", ["none", "left"])
def test_a_row_has_the_paired_difference_its_error_and_its_rate_over_the_sweep(side):
    model, tokens = tiny("gqa"), some_tokens(18, 9)  # more than go through at once
    mask = padding(side, [9, 7, 4] * 6, 9)
    scores = interp.ablate(model, tokens, attention_mask=mask)
    table, own = scores.table, differences(model, tokens, mask)
    assert isinstance(scores, HeadScores)
    assert list(zip(table["layer"], table["head"], strict=True)) == EVERY
    assert list(table) == [
        "layer",
        "head",
        "ablation",
        "ablation_se",
        "ablation_null",
        "n",
        "ablation_p",
        "ablation_q",
        "direct",
        "direct_se",
        "self_repair",
        "self_repair_se",
        "loss_clean",
        "loss_ablated",
    ]
    assert error(numbers(table, "ablation")[:, 0], own.mean(axis=1)) < FLOAT32
    se = own.std(axis=1, ddof=1) / math.sqrt(18)
    assert error(numbers(table, "ablation_se")[:, 0], se) < FLOAT32
    p = stats.ttest_1samp(own, 0, axis=1).pvalue
    np.testing.assert_allclose(table["ablation_p"], p, rtol=1e-2)
    np.testing.assert_allclose(table["ablation_q"], by_definition(p), rtol=1e-2)
    clean = losses_with(model, tokens, mask).mean()
    assert table["loss_clean"].sub(clean).abs().max() < FLOAT32
    assert error(numbers(table, "loss_ablated")[:, 0], clean + own.mean(axis=1)) < FLOAT32
    assert table["ablation_null"].eq(0).all()
    assert table["n"].eq(18).all()
    repaired = numbers(table, "direct")[:, 0] - numbers(table, "ablation")[:, 0]
    assert error(numbers(table, "self_repair")[:, 0], repaired) < FLOAT32
    strongest = table.loc[table["ablation"].abs().idxmax()]
    assert scores.summary["largest_effect"] == strongest["ablation"]
    label = f"{strongest['layer']:.0f}.{strongest['head']:.0f}"
    assert scores.summary["largest_effect_head"] == label
    assert (scores.score, scores.unit, scores.analysis) == ("ablation", "nats", "ablation")
    assert scores.params == {
        "shape": [18, 9],
        "method": "zero",
        "metric": "loss",
        "site": "z",
        "dtype": "float32",
    }


@pytest.mark.parametrize("family", ["gpt2", "llama", "mqa", "checkpoint"])
def test_every_kind_of_model_gives_a_row_for_each_head_with_the_baseline(family, tmp_path):
    if family == "mqa":
        model = tiny("mqa")
    elif family == "checkpoint":
        from interp.models.loading import save_folder

        save_folder(tiny("smeared"), tmp_path / "model")
        model = interp.load_model(tmp_path / "model")
    else:
        model = hf_models.native(hf_models.MODELS[family]())
    tokens = some_tokens(3, 8)
    result = interp.ablate(model, tokens, direct=False)
    cfg = model.cfg
    every = [(layer, head) for layer in range(cfg.n_layers) for head in range(cfg.n_heads)]
    assert list(zip(result.table["layer"], result.table["head"], strict=True)) == every
    own = differences(model, tokens, sets=[[head] for head in every])
    assert error(numbers(result.table, "ablation")[:, 0], own.mean(axis=1)) < FLOAT32
    clean = losses_with(model, tokens, None).mean()
    assert result.table["loss_clean"].sub(clean).abs().max() < FLOAT32


def test_sequences_of_one_document_widen_the_errors_of_a_sweep():
    model, tokens = tiny("mha"), some_tokens(6, 9)
    inputs = token_inputs(model, tokens)
    documents = torch.tensor([0, 0, 0, 1, 1, 2])
    batches = [dataclasses.replace(batch, documents=documents) for batch in inputs.batches]
    clustered = dataclasses.replace(inputs, batches=batches)
    table = ablate_heads(Sweep(model, clustered, Options(direct=False))).table
    own = differences(model, tokens)
    for row, values in zip(table.itertuples(), own, strict=True):
        apart = values - values.mean()
        sums = [apart[:3].sum(), apart[3:5].sum(), apart[5:].sum()]
        se = math.sqrt(sum(s**2 for s in sums) * 3 / 2) / 6
        assert row.ablation_se == pytest.approx(se, abs=FLOAT32)
        # The t test has one degree of freedom less than there are documents.
        p = 2 * stats.t.sf(abs(row.ablation / row.ablation_se), 2)
        assert row.ablation_p == pytest.approx(p, rel=1e-9)


def test_heads_are_taken_in_the_order_in_which_they_are_named():
    model, tokens = tiny("mha"), some_tokens(3, 9)
    tables = [
        interp.ablate(model, tokens, heads=heads, direct=False).table
        for heads in ("1.2, 0.3", [(1, 2), (0, 3)], ["L1H2", "0.3"])
    ]
    assert list(zip(tables[0]["layer"], tables[0]["head"], strict=True)) == [(1, 2), (0, 3)]
    assert tables[1].equals(tables[0])
    assert tables[2].equals(tables[0])
    own = differences(model, tokens, sets=[[(1, 2)], [(0, 3)]])
    assert error(numbers(tables[0], "ablation")[:, 0], own.mean(axis=1)) < FLOAT32


def test_the_joint_effect_stands_beside_the_sum_of_its_parts():
    model, tokens = tiny("mha"), some_tokens(6, 9)
    heads = [(0, 1), (1, 3), (0, 2)]
    summary = interp.ablate(model, tokens, heads=heads).summary
    joint = differences(model, tokens, sets=[heads])[0]
    singles = differences(model, tokens, sets=[[head] for head in heads]).sum(axis=0)
    assert summary["together_heads"] == "0.1 0.2 1.3"
    assert summary["together"] == pytest.approx(joint.mean(), abs=FLOAT32)
    se = joint.std(ddof=1) / math.sqrt(6)
    assert summary["together_se"] == pytest.approx(se, abs=FLOAT32)
    assert summary["sum_of_singles"] == pytest.approx(singles.mean(), abs=FLOAT32)
    apart = joint - singles
    assert summary["together_less_sum"] == pytest.approx(apart.mean(), abs=FLOAT32)
    se = apart.std(ddof=1) / math.sqrt(6)
    assert summary["together_less_sum_se"] == pytest.approx(se, abs=FLOAT32)
    assert abs(apart.mean()) > 0.01
    whole = interp.ablate(model, tokens)
    strongest = whole.table.reindex(
        whole.table["ablation"].abs().sort_values(ascending=False).index
    ).head(5)
    five = sorted(zip(strongest["layer"], strongest["head"], strict=True))
    assert whole.summary["together_heads"] == " ".join(f"{a}.{b}" for a, b in five)
    joint = differences(model, tokens, sets=[five])[0]
    assert whole.summary["together"] == pytest.approx(joint.mean(), abs=FLOAT32)
    assert "together" not in interp.ablate(model, tokens, heads="0.1").summary


# --- methods side by side -------------------------------------------------------------------


def test_heads_whose_order_two_methods_swap_beyond_noise_disagree():
    noise = 0.1 * np.random.default_rng(0).normal(size=(4, 8))
    documents = np.arange(8)
    zero = noise + np.array([3.0, 2.0, 0.0, -1.0])[:, None]
    mean = noise[::-1] + np.array([2.0, 3.0, 0.0, -1.0])[:, None]
    columns = disagreement({"zero": zero, "mean": mean}, documents)
    assert columns["zero_rank"].tolist() == [1, 2, 3, 4]
    assert columns["mean_rank"].tolist() == [2, 1, 3, 4]
    assert columns["disagree"].tolist() == [True, True, False, False]


def test_heads_whose_order_swaps_within_noise_do_not_disagree():
    noise = np.random.default_rng(0).normal(size=(2, 3, 8))
    noise -= noise.mean(axis=2, keepdims=True)
    documents = np.arange(8)
    zero = noise[0] + np.array([0.01, 0.0, 9.0])[:, None]
    mean = noise[1] + np.array([0.0, 0.01, 9.0])[:, None]
    columns = disagreement({"zero": zero, "mean": mean}, documents)
    assert columns["zero_rank"].tolist() == [2, 3, 1]
    assert columns["mean_rank"].tolist() == [3, 2, 1]
    assert not columns["disagree"].any()


@pytest.mark.parametrize("sure", ["zero", "mean"])
def test_an_order_that_one_method_alone_is_sure_of_is_no_disagreement(sure):
    noise = np.random.default_rng(0).normal(size=(2, 2, 8))
    noise -= noise.mean(axis=2, keepdims=True)
    own = {
        "zero": noise[0] + np.array([0.01, 0.0])[:, None],
        "mean": noise[1] + np.array([0.0, 0.01])[:, None],
    }
    own[sure] = 100 * own[sure] - 99.9 * noise[0 if sure == "zero" else 1]
    columns = disagreement(own, np.arange(8))
    assert columns["zero_rank"].tolist() == [1, 2]
    assert columns["mean_rank"].tolist() == [2, 1]
    assert not columns["disagree"].any()


def test_a_head_that_failed_has_no_rank_and_disagrees_with_none():
    noise = 0.1 * np.random.default_rng(0).normal(size=(3, 8))
    own = noise + np.array([1.0, 3.0, 2.0])[:, None]
    own[0] = math.nan
    columns = disagreement({"zero": own, "mean": own}, np.arange(8))
    assert columns["zero_rank"][1:].tolist() == [1, 2]
    assert math.isnan(columns["zero_rank"][0])
    assert not columns["disagree"].any()


def test_all_methods_stand_side_by_side_as_each_gives_alone():
    model, tokens = tiny("gqa"), some_tokens(6, 9)
    given = {"seed": 3, "draws": 2}
    both = interp.ablate(model, tokens, method="all", **given)
    assert both.score == "zero"
    for method in ("zero", "mean", "resample"):
        alone = interp.ablate(model, tokens, method=method, **given).table
        for suffix in ("", "_se", "_p", "_q"):
            own, wanted = both.table[f"{method}{suffix}"], alone[f"ablation{suffix}"]
            np.testing.assert_allclose(own, wanted, atol=FLOAT32)
        for column in ("direct", "self_repair", "self_repair_se"):
            np.testing.assert_allclose(
                both.table[f"{method}_{column}"], alone[column], atol=FLOAT32
            )
        rank = stats.rankdata(-alone["ablation"], method="min")
        assert both.table[f"{method}_rank"].tolist() == rank.tolist()
    assert both.table["disagree"].dtype == bool
    assert both.params["reference"] == "6 sequences of random tokens that do not repeat, as long"
    assert both.params["draws"] == 2
    assert "loss_ablated" not in both.table


# --- sets of heads --------------------------------------------------------------------------


def test_pairs_have_their_joint_effect_and_what_it_is_more_than_the_sum():
    model, tokens = tiny("mha"), some_tokens(6, 9)
    heads = [(0, 1), (1, 3), (0, 2)]
    result = interp.ablate(model, tokens, kind="pairs", heads=heads)
    assert isinstance(result, SetScores)
    table = result.table
    named = [tuple(map(tuple, np.reshape(row, (2, 2)))) for row in table.iloc[:, :4].to_numpy()]
    assert list(table)[:4] == ["layer_a", "head_a", "layer_b", "head_b"]
    assert named == list(itertools.combinations(heads, 2))
    for row, (a, b) in zip(table.itertuples(), named, strict=True):
        joint, one, other = differences(model, tokens, sets=[[a, b], [a], [b]])
        assert row.ablation == pytest.approx(joint.mean(), abs=FLOAT32)
        assert row.sum_of_singles == pytest.approx((one + other).mean(), abs=FLOAT32)
        apart = joint - one - other
        assert row.interaction == pytest.approx(apart.mean(), abs=FLOAT32)
        se = apart.std(ddof=1) / math.sqrt(6)
        assert row.interaction_se == pytest.approx(se, abs=FLOAT32)
    assert table["interaction"].abs().max() > 0.01
    everything = interp.ablate(tiny("mqa"), tokens, kind="pairs").table
    assert len(everything) == 8 * 7 // 2


def test_all_but_one_keeps_a_single_head_of_its_layer():
    model, tokens = tiny("gqa"), some_tokens(6, 9)
    result = interp.ablate(model, tokens, kind="all-but-one")
    table = result.table
    assert list(zip(table["layer"], table["head"], strict=True)) == EVERY
    others = [[(layer, own) for own in range(4) if own != head] for layer, head in EVERY]
    own = differences(model, tokens, sets=others)
    assert error(numbers(table, "all_but_one")[:, 0], own.mean(axis=1)) < FLOAT32
    assert result.score == "all_but_one"
    # The best head is chosen on every second sequence and told of the others.
    for kept in result.summary["kept_heads"]:
        rows = own[4 * kept["layer"] : 4 * kept["layer"] + 4]
        best = int(rows[:, ::2].mean(axis=1).argmin())
        assert kept["kept"] == best
        assert kept["held_out"] == pytest.approx(rows[best, 1::2].mean(), abs=FLOAT32)
    assert [kept["layer"] for kept in result.summary["kept_heads"]] == [0, 1]


def test_layers_with_one_head_have_nothing_to_keep_alone():
    model = tiny("mqa")
    with pytest.raises(AnalysisError) as caught:
        interp.ablate(model, some_tokens(2, 9), kind="all-but-one", site="v")
    assert str(caught.value) == "no layer has two heads: there is nothing to take away"


def test_a_layer_taken_whole_leaves_a_finite_loss():
    model, tokens = tiny("gqa"), some_tokens(6, 9)
    table = interp.ablate(model, tokens, kind="layers").table
    layers = [[(layer, head) for head in range(4)] for layer in range(2)]
    own = differences(model, tokens, sets=layers)
    assert table["layer"].tolist() == [0, 1]
    assert error(numbers(table, "ablation")[:, 0], own.mean(axis=1)) < FLOAT32
    assert np.isfinite(numbers(table, "ablation", "direct", "self_repair")).all()
    named = interp.ablate(model, tokens, heads="1.*", direct=False)
    assert len(named.table) == 4
    assert named.summary["together"] == pytest.approx(own[1].mean(), abs=FLOAT32)


def test_heads_taken_one_after_the_other_stay_away():
    model, tokens = tiny("gqa"), some_tokens(6, 9)
    order = [(1, 3), (0, 1), (1, 0), (0, 2)]
    table = interp.ablate(model, tokens, kind="cumulative", heads=order).table
    own = differences(model, tokens, sets=[order[: n + 1] for n in range(4)])
    assert table["removed"].tolist() == [1, 2, 3, 4]
    assert list(zip(table["layer"], table["head"], strict=True)) == order
    assert error(numbers(table, "ablation")[:, 0], own.mean(axis=1)) < FLOAT32


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "pairs", "heads": "0.1"}, "pairs need two heads"),
        ({"kind": "layers", "heads": "0.*"}, "layers are ablated whole: no heads are named"),
        (
            {"kind": "cumulative"},
            "a cumulative sweep needs heads, in the order of their removal",
        ),
    ],
)
def test_sweeps_that_these_heads_do_not_make_are_refused(given, message):
    with pytest.raises(AnalysisError) as caught:
        interp.ablate(tiny("mha"), some_tokens(2, 9), **given)
    assert str(caught.value) == message


# --- number formats -------------------------------------------------------------------------


def test_bfloat16_says_how_far_it_strays_from_float32():
    model, tokens = tiny("gqa"), some_tokens(6, 9)
    exact = interp.ablate(model, tokens)
    rounded = interp.ablate(model, tokens, dtype="bfloat16")
    assert rounded.params["dtype"] == "bfloat16"
    apart = (rounded.table["ablation"] - exact.table["ablation"]).abs()
    # Eight heads: all of them are the sample.
    assert rounded.summary["bfloat16_sample"] == " ".join(f"{a}.{b}" for a, b in EVERY)
    told = rounded.summary["bfloat16_largest_difference"]
    assert told == pytest.approx(apart.max(), abs=FLOAT32)
    assert 1e-4 < told < 0.2  # rounding to 8 bits is seen, and no more than that
    clean = rounded.summary["loss_clean"] - exact.summary["loss_clean"]
    assert rounded.summary["bfloat16_clean_difference"] == pytest.approx(clean, abs=FLOAT32)
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_head_that_fails_in_bfloat16_is_no_part_of_the_sample():
    model, tokens = tiny("gqa"), some_tokens(6, 9)
    with torch.no_grad():
        hooks = [
            ("blocks.0.attn.hook_z", lambda z, hook: z * torch.tensor([1, 1, 0, 1.0])[:, None])
        ]
        wanted = model.run_with_hooks(tokens, fwd_hooks=hooks)

    def odd(logits, batch):
        if (logits - wanted).abs().max() < 0.2:  # bfloat16 strays by less, other heads by more
            raise ValueError("no answer")
        return logits[:, -1].logsumexp(dim=1)

    result = interp.ablate(model, tokens, metric=odd, dtype="bfloat16", direct=False)
    assert [failed["ablation"] for failed in result.summary["failed"]] == ["zero 0.2"]
    sample = "0.0 0.1 0.3 1.0 1.1 1.2 1.3"
    assert result.summary["bfloat16_sample"] == sample
    assert math.isfinite(result.summary["bfloat16_largest_difference"])


# --- what is reproducible, and what is left alone -------------------------------------------

SCRIPT = """
import random, sys
import numpy as np, torch
from tiny_models import some_tokens, tiny
import interp

def states():  # of Python's too, which the type checker of the tests draws from
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]

model, tokens = tiny("gqa"), some_tokens(6, 9)
before = states()
interp.ablate(model, tokens, method="all", draws=2, seed=7, out=sys.argv[1])
assert states() == before
"""


def test_the_same_sweep_in_two_fresh_processes_gives_the_same_bytes(tmp_path):
    here = Path(__file__).parent
    running = []
    for seed in ("1", "2"):
        env = {
            **os.environ,
            "PYTHONPATH": f"{here}{os.pathsep}{here.parent}",
            "PYTHONHASHSEED": seed,
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / seed)]
        running.append(subprocess.Popen(command, env=env))
    assert [process.wait() for process in running] == [0, 0]
    for name in ("ablation.csv", "ablation.json"):
        one, other = ((tmp_path / seed / name).read_bytes() for seed in ("1", "2"))
        assert one == other
        assert len(one) > 500
    assert sorted(path.name for path in (tmp_path / "1").iterdir()) == [
        "ablation.csv",
        "ablation.json",
    ]


@pytest.mark.parametrize("training", [False, True])
def test_a_sweep_leaves_the_model_its_tokens_and_all_random_states_as_they_were(training):
    model, tokens = tiny("gqa", dropout=0.5), some_tokens(4, 9)
    model.train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    given, hooks = tokens.clone(), []
    model.add_hook("blocks.0.hook_resid_pre", lambda value, hook: hooks.append(1))
    results = [interp.ablate(model, tokens, method="all", draws=1) for _ in range(2)]
    assert results[0].to_json() == results[1].to_json()
    assert torch.equal(tokens, given)
    assert all(part.training is training for part in model.modules())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    hooked = [name for name, point in model.hook_dict.items() if point.has_hooks()]
    assert hooked == ["blocks.0.hook_resid_pre"]
    assert hooks


def test_a_model_left_in_training_mode_is_ablated_without_dropout():
    tokens = some_tokens(3, 9)
    with_dropout, without = (tiny("mha", dropout=dropout) for dropout in (0.5, 0.0))
    with_dropout.train()
    tables = [interp.ablate(model, tokens).table for model in (with_dropout, without)]
    assert tables[0].equals(tables[1])


def test_a_table_read_with_pandas_has_whole_numbers_for_heads(tmp_path):
    model = tiny("mha", d_model=24, attention={"n_heads": 12, "d_head": 2})
    scores = interp.ablate(model, some_tokens(3, 9), out=tmp_path)
    table = pd.read_csv(tmp_path / "ablation.csv")
    assert table["layer"].dtype == table["head"].dtype == np.int64
    every = [(layer, head) for layer in range(2) for head in range(12)]
    assert list(zip(table["layer"], table["head"], strict=True)) == every
    assert len(table.drop_duplicates(["layer", "head"])) == 24
    assert error(numbers(table, "ablation"), numbers(scores.table, "ablation")) == 0.0
    assert HeadScores.load(tmp_path / "ablation.json").table.equals(scores.table)
    assert json.loads((tmp_path / "ablation.json").read_text())["params"]["method"] == "zero"


def test_results_of_sets_are_saved_and_load_again(tmp_path):
    model, tokens = tiny("mha"), some_tokens(3, 9)
    for kind, heads in (("pairs", "0.1 1.2"), ("layers", None), ("cumulative", "1.2 0.1")):
        scores = interp.ablate(model, tokens, kind=kind, heads=heads, out=tmp_path / kind)
        again = SetScores.load(tmp_path / kind / f"{kind}.json")
        assert again.table.equals(scores.table)


# --- what it costs --------------------------------------------------------------------------


def spied(monkeypatch, model):
    """The names of hooks that are put on a model, as they come."""
    names = []
    plain = type(model).add_hook

    def add_hook(self, name, *args, **given):
        names.append(name)
        return plain(self, name, *args, **given)

    monkeypatch.setattr(type(model), "add_hook", add_hook)
    return names


def test_a_sweep_looks_at_no_more_than_it_needs_and_keeps_no_gradient(monkeypatch):
    model, tokens = tiny("gqa"), some_tokens(4, 9)
    names, grads = spied(monkeypatch, model), []

    def metric(logits, batch):
        grads.append(logits.requires_grad or torch.is_grad_enabled())
        return logits[:, -1, 0]

    interp.ablate(model, tokens, metric=metric)
    needed = {
        f"blocks.{layer}.{name}" for layer in (0, 1) for name in ("attn.hook_z", "hook_attn_out")
    }
    assert set(names) == needed
    assert not any(grads)
    names.clear()
    interp.ablate(model, tokens, method="pattern-preserving", direct=False)
    kept = {f"blocks.{layer}.attn.hook_{site}" for layer in (0, 1) for site in ("q", "k")}
    assert set(names) == needed | kept


def live_bytes():
    """The bytes of all tensors that are alive and not frozen, each storage once."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Watched(TorchDispatchMode):
    """How many bytes are alive at most, looked at as each matrix product begins."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.mm, torch.ops.aten.bmm):
            self.most = max(self.most, live_bytes())
        return func(*args, **(kwargs or {}))


def test_eight_heads_need_no_more_memory_than_two(monkeypatch):
    model, tokens = tiny("mha", n_layers=3), some_tokens(4, 16)
    monkeypatch.setattr(passes_module, "TOKENS_AT_ONCE", 64)  # one ablation at a time
    most = []
    for heads in ("0.0 1.1", "0.0 0.2 1.1 1.3 2.0 2.1 2.2 2.3"):
        gc.collect()
        gc.freeze()  # what is there already is not looked at
        with Watched() as watched:
            interp.ablate(model, tokens, heads=heads)
        gc.unfreeze()
        most.append(watched.most)
    assert most[0] > 4 * 16 * 24 * 4  # a residual stream at least was seen
    assert most[1] <= 1.1 * most[0]
