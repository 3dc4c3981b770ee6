"""Measuring many ablations: what is measured, what fails, and what survives a kill."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import hf_models
import numpy as np
import pytest
import torch
from hand_ablation import losses_with
from tiny_models import error, padding, some_tokens, tiny

import interp
from interp.ablation import passes as passes_module
from interp.ablation.interventions import Intervention
from interp.ablation.journal import Journal
from interp.ablation.measuring import Setting, label, measure_sets
from interp.ablation.methods import Zeroing, resample_method
from interp.ablation.metrics import METRICS, LogitsFunction, logit_difference, loss_metric
from interp.ablation.passes import RestartedPasses
from interp.ablation.sweep import JOURNAL
from interp.errors import AnalysisError, ModelError
from interp.inputs import token_inputs
from interp.models.bridging import bridge_model

# Losses of float32 layers err by about 1e-6.
FLOAT32 = 1e-5
EVERY = [(layer, head) for layer in range(2) for head in range(4)]
SINGLES = [(head,) for head in EVERY]


def measured(model, inputs, metric=METRICS["loss"], sets=SINGLES, **given):
    """What zeroing gives."""
    setting = Setting(metric, direct=given.pop("direct", False))
    return measure_sets(model, inputs, [Zeroing()], sets, setting, **given)["zero"]


# --- exactly the hooked values --------------------------------------------------------------


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_every_sequence_has_the_value_of_a_hooked_pass_for_every_set(side):
    model, tokens = tiny("llama"), some_tokens(18, 9)  # more than go through at once
    mask = padding(side, [9, 7, 4] * 6, 9)
    sets = [*SINGLES, ((0, 1), (1, 2)), tuple(EVERY)]
    found = measured(model, token_inputs(model, tokens, mask), sets=sets)
    clean = losses_with(model, tokens, mask)
    assert error(found.clean, clean) < FLOAT32
    assert list(found.ablated) == sets
    assert (found.direct, found.failed) == ({}, {})
    for heads in sets:
        by_hand = losses_with(model, tokens, mask, heads)
        assert error(found.ablated[heads], by_hand) < FLOAT32
        assert error(found.effect(heads), by_hand - clean) < FLOAT32


def test_a_set_named_twice_is_measured_once():
    model = tiny("mha")
    inputs = token_inputs(model, some_tokens(3, 9))
    told = []
    found = measured(
        model,
        inputs,
        sets=[((0, 1),), ((0, 1),), ((1, 0),)],
        progress=lambda done, total: told.append((done, total)),
    )
    assert list(found.ablated) == [((0, 1),), ((1, 0),)]
    assert told == [(1, 2), (2, 2)]
    assert label(((0, 1), (1, 10))) == "0.1+1.10"


def test_what_padding_holds_changes_no_value():
    model, tokens = tiny("rotary"), some_tokens(2, 9)
    mask = padding("right", (9, 5), 9)
    other = tokens.clone()
    other[1, 5:] = (other[1, 5:] + 1) % 19
    one, two = (measured(model, token_inputs(model, ids, mask)) for ids in (tokens, other))
    assert all((one.ablated[heads] == two.ablated[heads]).all() for heads in SINGLES)


def test_progress_counts_every_head_of_every_draw_and_part_up_to_the_last(monkeypatch):
    monkeypatch.setattr(passes_module, "TOKENS_AT_ONCE", 36)
    model, tokens = tiny("mha"), some_tokens(6, 9)
    inputs = token_inputs(model, tokens)
    told = []
    methods = [Zeroing(), resample_method(inputs, 0, 2)]
    measure_sets(
        model,
        inputs,
        methods,
        SINGLES[:3],
        Setting(METRICS["loss"]),
        progress=lambda done, total: told.append((done, total)),
    )
    assert {total for _, total in told} == {2 * 3 * 3}  # parts, sets, and one and two draws
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1] == (18, 18)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_function_that_edits_its_batch_changes_neither_the_tokens_nor_a_value(hooked):
    model, tokens = tiny("mha"), some_tokens(3, 9)
    if hooked:  # whole passes, each of which begins with the tokens
        model.add_hook("blocks.0.hook_resid_pre", lambda value, hook: value, is_permanent=True)
    inputs, before = token_inputs(model, tokens), tokens.clone()

    def last(logits, batch):
        return logits[:, -1, 0]

    def editing(logits, batch):
        batch.tokens.zero_()
        batch.targets.fill_(-1)
        return last(logits, batch)

    expected = measured(model, inputs, LogitsFunction(last))
    found = measured(model, inputs, LogitsFunction(editing))
    assert torch.equal(tokens, before)
    assert torch.equal(inputs.batches[0].tokens, before)
    assert all(np.array_equal(found.effect(one), expected.effect(one)) for one in SINGLES)


# --- what fails -----------------------------------------------------------------------------


def failing(heads, model, how):
    """A metric that fails where exactly these heads are ablated, which it knows by the logits."""
    tokens = some_tokens(3, 9)
    hooks = Intervention(heads).hooks(model)
    with torch.no_grad():
        wanted = model.run_with_hooks(tokens, fwd_hooks=hooks)

    def metric(logits, batch):
        value = logits[:, -1].logsumexp(dim=1)
        if error(logits, wanted) < FLOAT32:
            if how == "raises":
                raise ZeroDivisionError("no answer\nfor this head")
            return value * torch.nan if how == "nan" else value / 0
        return value

    return LogitsFunction(metric, "odd")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raises", "ZeroDivisionError: no answer"),
        ("nan", "the metric is not finite"),
        ("infinite", "the metric is not finite"),
    ],
)
def test_one_failing_head_is_told_and_does_not_spoil_the_others(how, reason):
    model, tokens = tiny("mha"), some_tokens(3, 9)
    metric = failing(((0, 2),), model, how)
    result = interp.ablate(model, tokens, metric=metric, direct=False)
    assert result.summary["failed"] == [{"ablation": "zero 0.2", "reason": reason}]
    table = result.table.set_index(["layer", "head"])
    assert table["ablation"].isna().tolist() == [head == (0, 2) for head in EVERY]
    assert math.isnan(table.loc[(0, 2), "ablation_q"])
    plain = measured(
        model,
        token_inputs(model, tokens),
        LogitsFunction(lambda logits, batch: logits[:, -1].logsumexp(1)),
    )
    for head in EVERY:
        if head != (0, 2):
            assert table.loc[head, "ablation"] == pytest.approx(
                plain.effect((head,)).mean(), abs=FLOAT32
            )
    assert json.loads(result.to_json())["table"][2]["ablation"] is None


def test_strongest_heads_that_fail_together_leave_the_table_of_the_single_ones():
    model, tokens = tiny("mha"), some_tokens(3, 9)
    both = ((0, 1), (1, 3))
    metric = failing(both, model, "raises")
    result = interp.ablate(model, tokens, metric=metric, heads=list(both), direct=False)
    assert result.table["ablation"].notna().all()
    assert "together" not in result.summary


def test_where_every_head_fails_the_first_reason_is_raised():
    def refuse(logits, batch):
        if torch.equal(logits, clean):
            return logits[:, 0, 0]
        raise KeyError("nowhere")

    model, tokens = tiny("mha"), some_tokens(3, 9)
    with torch.no_grad():
        clean = model(tokens)
    with pytest.raises(AnalysisError) as caught:
        interp.ablate(model, tokens, metric=refuse)
    assert str(caught.value) == "every ablation failed: KeyError: 'nowhere'"
    assert not any(point.has_hooks() for point in model.hook_dict.values())


def test_a_metric_that_is_not_finite_without_any_ablation_is_refused():
    def none(logits, batch):
        return logits[:, 0, 0] * torch.nan

    with pytest.raises(AnalysisError) as caught:
        interp.ablate(tiny("mha"), some_tokens(3, 9), metric=none)
    assert str(caught.value) == "the none of the unablated model is not finite on these tokens"


def test_an_encoder_has_no_next_token_loss_and_takes_a_metric_of_ones_own():
    model = bridge_model(hf_models.bert(), name="bert")
    tokens = some_tokens(2, 9, d_vocab=90) + 1
    for given in ({}, {"metric": "kl"}, {"positions": [0]}):
        with pytest.raises(ModelError) as caught:
            interp.ablate(model, tokens, **given)
        assert str(caught.value) == (
            "bert is an encoder, where every token sees the next one: it has no next-token loss; "
            "give a metric of your own"
        )

    def first(logits, batch):
        return logits[:, 0, 5]

    table = interp.ablate(model, tokens, metric=first, heads="0.1, 1.2", direct=False).table
    clean = model.run_with_hooks(tokens)[:, 0, 5]
    for row in table.itertuples():
        hooks = Intervention(((row.layer, row.head),)).hooks(model)
        ablated = model.run_with_hooks(tokens, fwd_hooks=hooks)[:, 0, 5]
        expected = (ablated - clean).mean().item()
        assert row.ablation == pytest.approx(expected, abs=FLOAT32)


# --- the journal ----------------------------------------------------------------------------


def test_values_come_back_from_a_journal_bit_for_bit(tmp_path):
    path = tmp_path / JOURNAL
    values = [
        np.array([0.1 + 0.2, 1e-310, -0.0, math.nan, math.inf, 2 / 3]),
        np.float32([1 / 3, 1e30]).astype(np.float64),
    ]
    facts = {"model": "m", "shape": (2, 3)}
    first = Journal(path, facts)
    first.check_clean("0", np.array([1.0, math.nan]))
    first.add([(("zero", 0, 1, "0.1"), values)])
    again = Journal(path, facts, resume=True)
    assert ("zero", 0, 1, "0.1") in again
    assert len(again) == 1
    for own, wanted in zip(again.get(("zero", 0, 1, "0.1")), values, strict=True):
        assert own.tobytes() == wanted.tobytes()
    again.check_clean("0", np.array([1.0 + 1e-6, math.nan]))  # other threads, other last digits
    with pytest.raises(AnalysisError, match="the unablated model gives other numbers than when"):
        again.check_clean("0", np.array([1.01, math.nan]))
    again.close()
    assert not path.exists()


def test_a_truncated_last_line_is_left_out_and_the_others_are_kept(tmp_path):
    path = tmp_path / JOURNAL
    journal = Journal(path, {"model": "m"})
    for chunk in range(3):
        found = [(("zero", 0, chunk, f"0.{head}"), [np.array([1.5])]) for head in range(2)]
        journal.add(found)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for cut in (len(whole) - 1, len(whole) - len(lines[-1]) + 1, len(whole) - len(lines[-1])):
        path.write_bytes(whole[:cut])
        again = Journal(path, {"model": "m"}, resume=True)
        # Those that were computed together are there together, or not at all.
        assert len(again) == 4
        assert path.read_bytes() == b"".join(lines[:-1])
        again.add([(("zero", 0, 2, f"0.{head}"), [np.array([1.5])]) for head in range(2)])
        assert path.read_bytes() == whole
    path.write_bytes(lines[0][:5])  # killed within the first line
    begun = Journal(path, {"model": "m"}, resume=True)
    begun.add([(("zero", 0, 0, "0.0"), [np.array([1.5])])])
    assert len(Journal(path, {"model": "m"}, resume=True)) == 1


def test_a_file_that_is_no_journal_is_refused(tmp_path):
    path = tmp_path / JOURNAL
    for text in (
        b"not json\n",
        b'{"a": 1}\n',
        b"[1]\n",
        b'{"facts": {}}\n{"key": 3}\n',
        b'{"facts": 3}\n',
        b"\xff\xfe\x00\n",
        b"not json\nnor its last line",
    ):
        path.write_bytes(text)
        with pytest.raises(AnalysisError, match=r"ablation\.journal\.jsonl: not a sweep's journal"):
            Journal(path, {}, resume=True)
        assert path.read_bytes() == text


def killed(model, tokens, out, after, **given):
    """A sweep that ends as if it were killed after some of its ablated passes."""

    class Killed(BaseException):
        pass

    def progress(done, total):
        if done >= after:
            raise Killed

    with pytest.raises(Killed):
        interp.ablate(model, tokens, out=out, progress=progress, **given)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"metric": "kl"}, "metric was loss, now kl"),
        ({"method": "resample"}, "method was zero, now resample; resampled_from was None, now"),
        ({"site": "v"}, "site was z, now v"),
        ({"direct": False}, "direct was True, now False"),
        ({"kind": "layers"}, "kind was heads, now layers"),
        ({"tokens": some_tokens(4, 9, seed=1)}, "tokens_sha256 was "),
        ({"attention_mask": padding("left", [9, 9, 9, 8], 9)}, "tokens_sha256 was "),
        ({"dtype": "bfloat16"}, "dtype was float32, now bfloat16"),
        ({"positions": [1]}, r"positions was None, now \[1\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_the_journal_of_another_sweep_is_refused_and_says_what_differs(tmp_path, change, told):
    model = tiny("gqa")
    first = {"tokens": some_tokens(4, 9)}
    killed(model, first["tokens"], tmp_path, after=1)
    before = (tmp_path / JOURNAL).read_bytes()
    with pytest.raises(AnalysisError, match=rf"is of another sweep: .*{told}"):
        interp.ablate(model, **{**first, **change}, out=tmp_path, resume=True)
    assert (tmp_path / JOURNAL).read_bytes() == before


def test_a_sweep_with_another_reference_set_is_another_sweep(tmp_path):
    """Both are described as 4 given sequences of 9 tokens."""
    model, tokens = tiny("mha"), some_tokens(4, 9)
    for method in ("mean", "patch"):
        out = tmp_path / method
        killed(model, tokens, out, 1, method=method, reference=some_tokens(4, 9, seed=1))
        with pytest.raises(AnalysisError, match="is of another sweep: reference_sha256 was "):
            interp.ablate(
                model,
                tokens,
                out=out,
                resume=True,
                method=method,
                reference=some_tokens(4, 9, seed=2),
            )


def test_a_sweep_of_another_model_of_the_same_name_is_refused(tmp_path):
    tokens = some_tokens(4, 9)
    killed(tiny("mha"), tokens, tmp_path, after=1)
    with pytest.raises(AnalysisError, match="it is not the same model, or not the same machine"):
        interp.ablate(tiny("mha", seed=1), tokens, out=tmp_path, resume=True)


def test_an_unfinished_sweep_is_not_begun_anew_by_accident(tmp_path):
    model, tokens = tiny("mha"), some_tokens(4, 9)
    killed(model, tokens, tmp_path, after=4)
    with pytest.raises(AnalysisError) as caught:
        interp.ablate(model, tokens, out=tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / JOURNAL} is of an unfinished sweep: --resume goes on with it; delete it to "
        "begin anew, or choose another --out"
    )


def test_a_refused_sweep_leaves_no_journal_behind(tmp_path):
    model, tokens = tiny("mha"), some_tokens(4, 9)
    for given in ({"heads": "5.1"}, {"method": "median"}, {"heads": "0.1", "kind": "pairs"}):
        with pytest.raises(interp.InterpError):
            interp.ablate(model, tokens, out=tmp_path, **given)
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_sweep_tries_failing_heads_again_and_keeps_the_others(tmp_path):
    model, tokens = tiny("mha"), some_tokens(3, 9)
    whole = interp.ablate(model, tokens, metric=failing(((0, 2),), model, "x"), out=tmp_path / "a")
    broken = failing(((0, 2),), model, "raises")
    killed(model, tokens, tmp_path / "b", after=6, metric=broken)
    repaired = LogitsFunction(lambda logits, batch: logits[:, -1].logsumexp(dim=1), "odd")
    result = interp.ablate(model, tokens, metric=repaired, out=tmp_path / "b", resume=True)
    assert "failed" not in result.summary
    assert result.table["ablation"].notna().all()
    assert len(result.table) == len(whole.table)


# A sweep in several parts and groups, slow enough to be killed in its middle.
SCRIPT = """
import os, signal, sys
from tiny_models import tiny
import interp
from interp.ablation import passes

passes.TOKENS_AT_ONCE = 96  # two ablations go together

def progress(done, total):
    if done >= int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

interp.ablate(
    tiny("gqa"), blocks=[4, 3], batch=6, method="all", draws=2, seed=7, out=sys.argv[1],
    progress=progress,
)
"""


def test_a_sweep_that_was_killed_goes_on_and_ends_with_the_same_bytes(tmp_path, monkeypatch):
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{here.parent}", "OMP_NUM_THREADS": "1"}
    after = 41
    dead = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "killed"), str(after)], env=env, check=False
    )
    assert dead.returncode == -signal.SIGKILL
    lines = (tmp_path / "killed" / JOURNAL).read_text().splitlines()
    noted = sum(len(json.loads(line).get("found", [])) for line in lines)
    monkeypatch.setattr(passes_module, "TOKENS_AT_ONCE", 96)
    model = tiny("gqa")
    given = {"blocks": [4, 3], "batch": 6, "method": "all", "draws": 2, "seed": 7}
    sums = {"computed": 0}
    plain = RestartedPasses.ablated

    def counted(self, together, **given):
        sums["computed"] += len(together)
        return plain(self, together, **given)

    monkeypatch.setattr(RestartedPasses, "ablated", counted)
    whole = interp.ablate(model, out=tmp_path / "whole", **given)
    every, sums["computed"] = sums["computed"], 0
    resumed = interp.ablate(model, out=tmp_path / "killed", resume=True, **given)
    assert noted >= after
    assert sums["computed"] == every - noted  # nothing that was noted is computed again
    for name in ("ablation.csv", "ablation.json"):
        own, wanted = ((tmp_path / run / name).read_bytes() for run in ("killed", "whole"))
        assert own == wanted
    assert resumed.table.equals(whole.table)
    assert not (tmp_path / "killed" / JOURNAL).exists()


def test_metrics_that_differ_in_their_settings_are_told_apart():
    assert loss_metric([1]).params != loss_metric([2]).params
    assert logit_difference(1, 2).params != logit_difference(1, 3).params
