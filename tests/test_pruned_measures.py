"""Analyses, doctor, comparison and info on models with pruned heads: what is there is measured."""

import numpy as np
import pytest
import transformers
from pruning_cases import LAYER_0, LAYER_1, SETS, TOKENS, masked
from tiny_models import some_tokens, tiny
from typer.testing import CliRunner

import interp
from interp import registry
from interp.cli import app
from interp.comparison import compare
from interp.data.repeated import repeated_tokens
from interp.doctor import doctor
from interp.errors import AnalysisError
from interp.models.loading import save_folder
from interp.models.pretrained import save_pretrained
from interp.models.pruning import prune_heads
from interp.tables import HeadScores
from interp.training.probes import IclScore, SequenceProbe
from interp.views.terminal.info import cache_bytes, describe, parameters_by_part

OWN_BLOCKS = {"copying": [9], "retrieval": [9], "prefix-matching": [4]}


@pytest.mark.parametrize("family", ["mha", "gqa", "rotary_smeared"])
@pytest.mark.parametrize("name", registry.names())
def test_heads_of_the_first_layer_score_as_in_the_whole_model(name, family):
    # Nothing comes before them, so that their patterns are the same.
    model = tiny(family)
    heads = [(0, 1), (1, 0), (1, 1), (1, 3)]
    pruned = prune_heads(model, heads)
    blocks = OWN_BLOCKS.get(name, [3, 5])
    whole, left = (interp.analyze(m, name, blocks=blocks, batch=4) for m in (model, pruned))
    table = left.table
    assert list(zip(table["layer"], table["head"], strict=True)) == [(0, 0), (0, 2), (0, 3), (1, 2)]
    assert list(table.columns) == list(whole.table.columns)
    first = whole.table[(whole.table["layer"] == 0) & (whole.table["head"] != 1)]
    # Against its layer's median head and the largest null of all heads these are judged.
    relative = ["dormant", "selected"]
    for column in table.columns.drop(relative, errors="ignore"):
        expected, found = first[column].to_numpy(), table[column].to_numpy()[:3]
        if expected.dtype.kind == "f":
            np.testing.assert_allclose(found, expected, atol=1e-5)
        else:
            assert found.tolist() == expected.tolist()
    assert left.params["pruned_heads"] == ["0.1", "1.0", "1.1", "1.3"]
    assert "pruned_heads" not in whole.params


@pytest.mark.parametrize("name", registry.names())
def test_analyses_pass_over_layers_without_heads(name):
    pruned = prune_heads(tiny("gqa"), [*LAYER_1, (0, 3)])
    scores = interp.analyze(pruned, name, blocks=OWN_BLOCKS.get(name, [3, 5]), batch=4)
    assert scores.table["head"].tolist() == [0, 1, 2]
    assert scores.table[scores.score].notna().all()


def test_a_matrix_of_scores_has_no_number_for_a_pruned_head(tmp_path):
    scores = interp.analyze(prune_heads(tiny("gqa"), [(0, 3), (1, 0)]), "entropy", TOKENS)
    json_file = scores.save(tmp_path)[1]
    for one in (scores, HeadScores.load(json_file)):
        missing = np.isnan(one.matrix()).tolist()
        assert missing == [[False, False, False, True], [True, False, False, False]]


def test_summaries_are_of_the_heads_that_are_there():
    model = tiny("mha")
    tokens = some_tokens(4, 16)
    heads = [(0, 1), (1, 0), (1, 2)]
    whole, left = (
        interp.analyze(m, "sinks", tokens, epsilon=0.05, min_keys=2)
        for m in (masked(model, heads), prune_heads(model, heads))
    )
    labels = zip(whole.table["layer"], whole.table["head"], strict=True)
    there = whole.table[[label not in heads for label in labels]]
    assert left.summary["gu_metric_percent"] == pytest.approx(100 * there["gu_sink"].mean())
    assert left.summary["gu_length"] == whole.summary["gu_length"]
    assert left.summary["heads_raw"] == (there["sinks"] > 0.05).sum()
    confident = interp.analyze(prune_heads(model, heads), "confidence", tokens)
    assert confident.summary["positional"] == confident.table["positional"].sum()


def test_the_largest_null_is_that_of_a_head_that_is_there():
    # A window of two keys, in the layer that is pruned, makes an even head confident.
    pruned = prune_heads(tiny("rotary_linear"), LAYER_1)
    scores = interp.analyze(pruned, "confidence", TOKENS)
    nulls = scores.table["confidence_null"]
    assert nulls.max() < 0.3
    assert scores.summary["largest_null"] == nulls.max()


def test_a_model_without_any_head_has_no_scores():
    bare = prune_heads(tiny("mha"), [*LAYER_0, *LAYER_1])
    with pytest.raises(AnalysisError, match="custom has no head left: all of them are pruned"):
        interp.analyze(bare, "induction")


def test_training_probes_have_a_row_for_each_head_that_is_there():
    pruned = prune_heads(tiny("mha"), [(0, 1), (1, 3)])
    probe = SequenceProbe(
        [repeated_tokens(3, 5, 19, seed=0)], some_tokens(4, 12), IclScore((1, 3), (8, 11))
    )
    rows = probe.measure(pruned).heads
    assert [(row["layer"], row["head"]) for row in rows] == [
        (layer, head) for layer in range(2) for head in pruned.blocks[layer].attn.heads
    ]
    assert all(np.isfinite(list(row.values())).all() for row in rows)


@pytest.mark.parametrize("heads", SETS.values(), ids=SETS)
@pytest.mark.parametrize("family", ["mha", "gqa", "mqa", "llama", "smeared", "qk_norm"])
def test_the_doctor_finds_pruned_models_healthy(family, heads):
    diagnosis = doctor(prune_heads(tiny(family), heads))
    assert [f for f in diagnosis.findings if f.verdict == "FAIL"] == []
    assert sum(f.verdict == "pass" for f in diagnosis.findings) >= 9


def test_the_doctor_holds_a_pruned_model_to_its_export(tmp_path):
    pruned = prune_heads(tiny("llama"), SETS["a group and a half"])
    save_pretrained(pruned, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    found = {f.check: f.verdict for f in doctor(pruned, original=theirs).findings}
    assert found["weights = the source's"] == "pass"
    assert found["log-probs = the original's"] == "pass"


def test_the_doctor_sees_keys_given_to_the_wrong_heads():
    pruned = prune_heads(tiny("gqa"), [(0, 1)])
    assert pruned.blocks[0].attn._uneven == [0, 1, 1]
    pruned.blocks[0].attn._uneven = [0, 0, 1]
    failed = {f.check for f in doctor(pruned).findings if f.verdict == "FAIL"}
    assert {"pattern @ v = z", "gathered = dense attention"} <= failed


def test_a_pruned_model_is_compared_with_the_whole_one_head_by_head():
    model = tiny("mha")
    pruned = prune_heads(model, [(0, 0), (1, 2)])
    compared = compare(model, pruned, batch=4)
    assert len(compared.heads_of("custom (A)")) == 8
    left = [(0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 3)]
    for table in (compared.heads_of("custom (B)"), compared.differences):
        assert list(zip(table["layer"], table["head"], strict=True)) == left
    first = compared.differences[compared.differences["layer"] == 0]
    assert first["induction"].abs().max() < 1e-6  # their inputs and weights are the same
    same, theirs = compared.heads_of_both()
    assert same["head"].tolist() == theirs["head"].tolist()
    ranks = [own["induction"].rank() for own in (same, theirs)]
    assert compared.rank_correlations["induction"] == pytest.approx(np.corrcoef(*ranks)[0, 1])


def test_models_without_a_head_in_common_have_no_differences():
    model = tiny("mha")
    first, second = prune_heads(model, LAYER_0), prune_heads(model, LAYER_1)
    compared = compare(first, second, batch=4)
    assert compared.differences.empty
    assert compared.why_no_differences == "no head is left in both of the pruned models"


def test_info_counts_what_is_left():
    pruned = prune_heads(tiny("gqa"), [(0, 1), (1, 0), (1, 1)])
    lines = describe(pruned)
    assert (
        "  pruned: 3 of 8 query heads and 1 of 4 key-value heads; a layer has 2 to 3 query heads "
        "left"
    ) in lines
    # Three KV heads of six, keys and values, four bytes each.
    assert cache_bytes(pruned) == 3 * 6 * 2 * 4
    assert "KV cache 144 bytes a token" in lines
    assert parameters_by_part(pruned)["attention Q"] == 5 * 6 * (24 + 1)
    windowed = prune_heads(tiny("rotary_linear"), [(0, 0)])
    kept = 3 * 16 + 4 * 2  # the window of layer 1 is 2
    assert any(f"{kept * 6 * 2 * 4 / 1e6:.3g} MB" in line for line in describe(windowed))
    assert not any("pruned" in line for line in describe(tiny("gqa")))


def test_commands_take_a_saved_pruned_model(tmp_path):
    folder = str(save_folder(prune_heads(tiny("gqa"), [*LAYER_1, (0, 1)]), tmp_path / "model"))
    for command in (["doctor"], ["info"], ["induction", "--block", "5", "--format", "csv"]):
        ran = CliRunner().invoke(app, [command[0], folder, *command[1:]])
        assert ran.exit_code == 0, ran.output
    assert [line.split(",")[:2] for line in ran.stdout.splitlines()[1:]] == [
        ["0", "0"],
        ["0", "2"],
        ["0", "3"],
    ]
