"""`interp.outliers`: the largest activations of the residual stream, and which are massive."""

import json
import math

import hf_models
import numpy as np
import pandas as pd
import pytest
import torch
from tiny_models import FAMILIES, error, oracle, padding, some_tokens, tiny
from tiny_tokenizers import reader
from typer.testing import CliRunner

import interp
from interp.activation_tables import Activations
from interp.activations.largest import largest_places, median_of
from interp.cli import app
from interp.errors import AnalysisError, ModelError, ShapeError
from interp.models.loading import save_folder
from interp.models.pruning import prune_heads
from interp.views.pages.activations import activation_findings, spans
from interp.views.pages.scores import read_scores
from interp.views.report import result_page

TOKENS = some_tokens(3, 10)


def planted(layer=1, dimension=7, size=1000.0, n_layers=3):
    """A model in which one block adds a large value to one dimension, at every position."""
    model = tiny(n_layers=n_layers)
    with torch.no_grad():
        model.blocks[layer].mlp.out_proj.bias[dimension] += size
    return model


def spike(value, *, token=11, dimension=6, **changes):
    """An attention-only model without norms or heads that matter: a token's embedding stays."""
    model = tiny("attention_only", normalization_type="none", n_layers=3, **changes)
    with torch.no_grad():
        model.embed.weight[token, dimension] = value
        for block in model.blocks:
            block.attn.o_proj.weight.zero_()
    return model


STREAM = ("resid_pre", "resid_post", "ln_final")


def stream(result):
    """The rows of the residual stream and of the final norm."""
    return result.table[result.table["site"].isin(STREAM)]


def first_rows(result):
    """The largest activation of each layer of these."""
    return stream(result).groupby(["layer", "site"], sort=False).first().reset_index()


# --- known answers ----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [5000.0, -5000.0])
def test_a_planted_value_is_found_at_its_sequence_position_and_dimension_with_its_sign(value):
    tokens = some_tokens(3, 5, d_vocab=10)
    tokens[2, 3] = 11
    result = interp.outliers(spike(value), tokens, top=4)
    first = first_rows(result)
    assert first["layer"].tolist() == [0, 1, 2, 3]
    assert first["site"].tolist() == ["resid_pre"] * 3 + ["resid_post"]
    for name, expected in (("sequence", 2), ("position", 3), ("dimension", 6)):
        assert set(first[name]) == {expected}, name
    assert set(first["token"]) == {"11"}
    assert first["value"].tolist() == pytest.approx([value] * 4, abs=10)
    assert first["massive"].all()
    assert result.summary["massive"] == 4
    assert result.summary["massive_layers"] == [0, 1, 2, 3]
    assert stream(result)["massive"].sum() == 4


def test_what_block_1_writes_is_in_layers_2_and_3_and_in_no_earlier_one(tmp_path):
    """Layer L is the stream before block L: blocks.1.hook_resid_post is that of layer 2."""
    result = interp.outliers(planted(), TOKENS, top=2, ratio=10)
    first = first_rows(result)
    massive = dict(
        zip(zip(first["layer"], first["site"], strict=True), first["massive"], strict=True)
    )
    assert massive == {
        (0, "resid_pre"): False,
        (1, "resid_pre"): False,
        (2, "resid_pre"): True,
        (3, "resid_post"): True,
        (3, "ln_final"): False,
    }
    assert result.summary["massive_layers"] == [2, 3]
    assert result.summary["dimensions"][0]["dimension"] == 7
    assert result.summary["dimensions"][0]["first_layer"] == 2
    csv, record, sites, _ = result.save(tmp_path)
    assert pd.read_csv(sites)[["layer", "site"]].equals(result.sites[["layer", "site"]])
    assert pd.read_csv(csv)["layer"].tolist() == result.table["layer"].tolist()
    rows = json.loads(record.read_text())["table"]
    assert [row["layer"] for row in rows] == result.table["layer"].tolist()
    assert "layer L is the residual stream before block L" in str(result.params["numbering"])


def test_the_final_norm_is_a_site_of_its_own_and_equals_the_last_hidden_state_of_transformers():
    hf = hf_models.llama()
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        states = hf(ids, output_hidden_states=True).hidden_states
    result = interp.outliers(hf_models.native(hf), ids, top=1)
    n_layers = len(states) - 1
    for row in stream(result).itertuples():
        if row.site == "resid_post":
            assert row.magnitude != pytest.approx(float(states[-1].abs().max()), rel=1e-3)
            continue
        assert row.layer < n_layers or row.site == "ln_final"
        assert row.magnitude == pytest.approx(float(states[row.layer].abs().max()), rel=1e-5)


@pytest.mark.parametrize(
    ("values", "median"), [([1.0, 2.0, 3.0, 4.0], 2.5), ([3.0, 1.0, 2.0], 2.0), ([7.0], 7.0)]
)
def test_the_median_of_an_even_count_is_the_mean_of_the_two_in_the_middle(values, median):
    assert median_of(torch.tensor(values)) == median


def test_of_equal_activations_the_first_ones_are_listed():
    size = torch.tensor([[1.0, 5.0, 2.0], [5.0, 5.0, 9.0]])
    assert largest_places(size, 3).tolist() == [5, 1, 3]
    assert sorted(largest_places(size, 100).tolist()) == [0, 1, 2, 3, 4, 5]


def test_a_stream_of_equal_values_has_a_ratio_of_1_and_nothing_massive():
    result = interp.outliers(constant(3.0), TOKENS, top=2)
    rows = stream(result)
    assert set(rows["ratio"]) == {1.0}
    assert rows["deviation"].isna().all()
    assert rows[["position", "dimension"]].values.tolist()[:2] == [[0, 0], [0, 1]]
    assert result.summary["massive"] == 0
    assert "dimensions" not in result.summary


def test_a_stream_of_zeros_has_no_ratio_and_a_spike_in_it_an_infinite_one(tmp_path):
    nothing = interp.outliers(constant(0.0), TOKENS, top=1)
    assert stream(nothing)["ratio"].isna().all()
    assert not nothing.table["massive"].any()
    model = constant(0.0)
    with torch.no_grad():
        model.embed.weight[:, 3] = 200.0
    result = interp.outliers(model, TOKENS, top=1)
    assert (stream(result)[["ratio", "deviation"]] == math.inf).all(axis=None)
    assert stream(result)["massive"].all()
    _, record, *_ = result.save(tmp_path)
    assert stream(Activations.load(record))["ratio"].isna().all()
    assert "times the median at least" in activation_findings(result)[1]


def test_the_magnitude_has_to_exceed_its_threshold_and_the_ratio_to_reach_it():
    model = constant(3.0)  # every ratio is 1
    cells = 3 * TOKENS.numel() * 24
    for magnitude, ratio, number in ((2.9, 1.0, cells), (3.0, 1.0, 0), (2.9, 1.001, 0)):
        result = interp.outliers(model, TOKENS, magnitude=magnitude, ratio=ratio, top=1)
        assert result.summary["massive"] == number
        assert stream(result)["massive"].all() == (number > 0)


def test_what_the_final_norm_puts_out_is_not_counted_with_the_stream():
    model = planted()
    before = interp.outliers(model, TOKENS, ratio=10)
    with torch.no_grad():
        model.ln_final.w[5] *= 1e4
    after = interp.outliers(model, TOKENS, ratio=10)
    assert before.sites["massive"].iloc[-1] == 0
    assert after.sites["massive"].iloc[-1] > 0
    before, after = before.summary, after.summary
    same = ("massive", "massive_layers", "dimensions", "positions", "largest")
    assert {name: after[name] for name in same} == {name: before[name] for name in same}


def constant(value):
    """A model without norms whose stream holds one value everywhere."""
    model = tiny("attention_only", normalization_type="none", positional_embedding_type="none")
    with torch.no_grad():
        model.embed.weight.fill_(value)
        for block in model.blocks:
            block.attn.o_proj.weight.zero_()
            block.attn.o_proj.bias.zero_()
    return model


# --- an independent oracle --------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_is_that_of_the_oracle(family):
    model = tiny(family)
    seen = oracle(model, TOKENS)
    result = interp.outliers(model, TOKENS, top=5)
    for (layer, site), rows in stream(result).groupby(["layer", "site"], sort=False):
        if site == "ln_final":
            continue
        last = layer == model.cfg.n_layers
        name = f"blocks.{layer - 1}.hook_resid_post" if last else f"blocks.{layer}.hook_resid_pre"
        values = seen[name]
        largest = np.abs(values).max(axis=0)
        assert rows["magnitude"].tolist() == pytest.approx(
            sorted(largest.ravel(), reverse=True)[:5], rel=1e-4
        )
        for row in rows.itertuples():
            assert values[row.sequence, row.position, row.dimension] == pytest.approx(
                row.value, rel=1e-4
            )
            assert row.median == pytest.approx(np.median(np.abs(values[row.sequence])), rel=1e-4)
            assert row.ratio == pytest.approx(row.magnitude / row.median)
            centre = np.median(values[row.sequence])
            spread = 1.4826 * np.median(np.abs(values[row.sequence] - centre))
            assert row.deviation == pytest.approx(abs(row.value - centre) / spread, rel=1e-3)
            assert row.token == str(int(TOKENS[row.sequence, row.position]))


def test_counts_of_massive_activations_are_those_of_the_whole_stream():
    model, seen = planted(), oracle(planted(), TOKENS)
    result = interp.outliers(model, TOKENS, magnitude=5.0, ratio=4.0, top=1)
    names = [*(f"blocks.{layer}.hook_resid_pre" for layer in range(3)), "blocks.2.hook_resid_post"]
    there = []
    for name in names:
        size = np.abs(seen[name])
        medians = np.median(size, axis=(1, 2), keepdims=True)
        there.append((size > 5.0) & (size >= 4.0 * medians))
    there = np.stack(there)  # layer sequence position dimension
    assert 50 < there.sum() == result.summary["massive"]
    records = result.sites[result.sites["site"].isin(["resid_pre", "resid_post"])]
    assert records["massive"].tolist() == there.sum(axis=(1, 2, 3)).tolist()
    by_dimension = {r["dimension"]: r["activations"] for r in result.summary["dimensions"]}
    assert by_dimension[7] == there[..., 7].sum()
    by_position = {r["position"]: r["activations"] for r in result.summary["positions"]}
    assert by_position == {p: n for p, n in enumerate(there.sum(axis=(0, 1, 3))) if n}
    by_token = {int(r["token"]): r["activations"] for r in result.summary["tokens"]}
    counts = {t: there[:, (t == TOKENS).numpy()].sum() for t in TOKENS.unique().tolist()}
    most = sorted((n for n in counts.values() if n), reverse=True)[:20]
    assert sorted(by_token.values(), reverse=True) == most
    assert all(counts[token] == number for token, number in by_token.items())


@pytest.mark.parametrize("magnitude", [0.1, 0.3, 100.1])
def test_on_the_threshold_the_table_and_the_counts_say_the_same(magnitude):
    """As float32 some of these thresholds are larger than as float64."""
    model, kept = tiny(), float(np.float32(magnitude))

    def plant(value, hook):
        value = torch.zeros_like(value)
        value[0, 3, 5] = kept
        return value

    with model.hooks(fwd_hooks=[("blocks.1.hook_resid_post", plant)]):
        result = interp.outliers(model, TOKENS[:1], magnitude=magnitude, ratio=0, top=1)
    last = result.table[result.table["site"] == "resid_post"].iloc[0]
    record = result.sites[result.sites["site"] == "resid_post"].iloc[0]
    assert last["massive"] == (kept > magnitude)
    assert record["massive"] == int(kept > magnitude)


def test_one_position_of_many_tokens_and_one_token_at_many_positions_are_told_apart():
    tokens = torch.tensor([[1, 5, 6, 7], [2, 6, 5, 7], [3, 7, 6, 5]])
    at_first = massive_where(torch.tensor([1, 0, 0, 0]).expand(3, 4), tokens)
    told = activation_findings(at_first)[2]
    assert told == "100% of them at dimension 5, 100% of them at position 0"
    assert at_first.summary["massive_positions"] == 1
    assert at_first.summary["massive_tokens"] == 3
    assert "token" not in at_first.summary["positions"][0]
    at_token = massive_where(tokens == 5, tokens)
    told = activation_findings(at_token)[2]
    assert told == "100% of them at dimension 5, 100% of them at token '5'"
    assert at_token.summary["massive_positions"] == 3
    one = torch.zeros(3, 4)
    one[0, 2] = 1
    one = massive_where(one, tokens)
    told = activation_findings(one)[2]
    assert told == "100% of them at dimension 5, 100% of them at position 2 (token '6')"


def massive_where(there, tokens):
    """Outliers of a stream that holds 500 in dimension 5 there, and 0.1 elsewhere."""
    model = tiny()

    def plant(value, hook):
        value = torch.full_like(value, 0.1)
        value[..., 5] += 500.0 * there
        return value

    with model.hooks(fwd_hooks=[("blocks.1.hook_resid_post", plant)]):
        return interp.outliers(model, tokens)


# --- properties -------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_looked_at_and_changes_no_row(side):
    model = spike(5000.0, token=0)  # what padding is made of
    tokens = 1 + some_tokens(3, 9, d_vocab=9)
    lengths = [4, 9, 6]
    mask = padding(side, lengths, 9)
    padded = torch.where(mask.bool(), tokens, 0)
    got = interp.outliers(model, padded, attention_mask=mask, top=3)
    assert stream(got)["magnitude"].max() < 100
    # More rows of each alone: which of two equal cells is listed may differ.
    alone = [interp.outliers(model, tokens[b][mask[b].bool()][None], top=30) for b in range(3)]
    rows = pd.concat([one.table.assign(sequence=b) for b, one in enumerate(alone)])
    for row in got.table.itertuples():
        same = rows[
            (rows["layer"] == row.layer)
            & (rows["site"] == row.site)
            & (rows["sequence"] == row.sequence)
            & (rows["position"] == row.position)
            & (rows["dimension"] == row.dimension)
        ]
        assert len(same) == 1
        assert same["value"].iloc[0] == pytest.approx(row.value, rel=1e-4)
        assert same["median"].iloc[0] == pytest.approx(row.median, rel=1e-4)


def test_sequences_one_by_one_or_together_give_the_same_table(monkeypatch):
    model = planted()
    whole = interp.outliers(model, TOKENS)
    monkeypatch.setattr("interp.activations.massive.sequences_at_once", lambda model, n_pos: 1)
    parts = interp.outliers(model, TOKENS)
    values = (torch.tensor(one.table["value"].tolist()) for one in (whole, parts))
    assert error(*values) < 1e-5
    places = ["layer", "sequence", "position", "dimension"]
    assert whole.table[places].equals(parts.table[places])


def test_bos_is_left_out_where_that_is_asked_for():
    model = spike(5000.0, token=0, bos_token_id=0)
    tokens = 1 + some_tokens(2, 6, d_vocab=9)
    tokens[:, 0] = 0
    with_bos = interp.outliers(model, tokens, top=1)
    without = interp.outliers(model, tokens, exclude_bos=True, top=1)
    assert stream(with_bos)["position"].iloc[0] == 0
    assert stream(with_bos)["magnitude"].iloc[0] > 4990
    assert without.table["position"].min() >= 1
    assert stream(without)["magnitude"].max() < 100


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_native_and_bridge_give_the_same_rows(name):
    hf = hf_models.MODELS[name]() if name in hf_models.MODELS else getattr(hf_models, name)()
    ids = torch.arange(12).reshape(2, 6)
    ours = interp.outliers(hf_models.native(hf), ids).table
    theirs = interp.outliers(interp.load_model(hf, backend="bridge"), ids).table
    assert ours[["layer", "site", "position", "dimension"]].equals(
        theirs[["layer", "site", "position", "dimension"]]
    )
    values = (torch.tensor(one["value"].tolist()) for one in (ours, theirs))
    assert error(*values) < 1e-5


def test_an_encoder_has_no_row_for_a_final_norm():
    model = interp.load_model(hf_models.bert(), backend="bridge")
    result = interp.outliers(model, torch.arange(12).reshape(2, 6), top=1)
    assert "resid_post" in set(result.table["site"])
    assert "ln_final" not in set(result.table["site"])


def test_a_pruned_model_is_looked_at_and_says_what_is_gone():
    model = prune_heads(tiny(), [(0, 1), (1, 0), (1, 1), (1, 2), (1, 3)])
    result = interp.outliers(model, TOKENS, top=1)
    assert result.params["pruned_heads"] == ["0.1", "1.0", "1.1", "1.2", "1.3"]
    assert len(stream(result)) == 4
    assert set(result.table.loc[result.table["layer"] == 1, "site"]) == {
        *("resid_pre", "attn_out", "mlp_in", "mlp_post", "mlp_out")
    }


def test_the_model_and_its_hooks_are_left_as_they_were():
    model = planted().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    interp.outliers(model, TOKENS)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(point.fwd_hooks for point in model.hook_dict.values())
    assert not model.ln_final._forward_hooks


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "said"),
    [("embed", "layer 0, resid_pre"), ("mlp", "layer 1, mlp_out"), ("norm", "layer 3, ln_final")],
)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_activation_that_is_not_finite_is_named_in_one_line(at, said, bad):
    model = tiny(n_layers=3)
    weights = {
        "embed": model.embed.weight,
        "mlp": model.blocks[1].mlp.out_proj.bias,
        "norm": model.ln_final.b,
    }
    with torch.no_grad():
        weights[at].view(-1)[5] = bad
    tokens = TOKENS.clone()
    tokens[0, 0] = 0
    with pytest.raises(AnalysisError) as caught:
        interp.outliers(model, tokens)
    assert said in str(caught.value)
    assert f"dimension 5 is {bad}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not any(point.fwd_hooks for point in model.hook_dict.values())
    assert not model.ln_final._forward_hooks


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"top": 0}, "top = 0: at least one"),
        ({"ratio": -1.0}, "ratio = -1: a threshold is 0 or above"),
        ({"magnitude": math.nan}, "magnitude = nan"),
        ({"deviations": -6}, "deviations = -6: a threshold is 0 or above"),
        ({"feature_layers": 1.01}, "feature_layers = 1.01: a share of all is 1 at most"),
        ({"feature_positions": 6.0}, "feature_positions = 6: a share of all is 1 at most"),
        ({"sites": ["mlp"]}, "no site 'mlp': it should be one of resid_pre"),
        ({"length": 4}, "length and sequences belong to a corpus"),
    ],
)
def test_settings_that_mean_nothing_are_refused(given, said):
    with pytest.raises(AnalysisError, match=said.replace("(", r"\(")):
        interp.outliers(tiny(), None if "length" in given else TOKENS, **given)


def test_no_tokens_and_models_without_a_stream_are_refused():
    with pytest.raises(ShapeError, match="the tokens are empty"):
        interp.outliers(tiny(), np.zeros((1, 0), dtype=np.int64))
    with pytest.raises(AnalysisError, match="there is no token to look at"):
        interp.outliers(tiny(), TOKENS, attention_mask=torch.zeros_like(TOKENS))
    with pytest.raises(ModelError, match="a model was expected"):
        interp.outliers("gpt2", TOKENS)
    bridged = interp.load_model(hf_models.gpt2(), backend="bridge")
    hooks = dict(bridged.hook_dict)
    del hooks["blocks.1.hook_resid_pre"]
    bridged._hooks = bridged._hooks.__class__(hooks, {}, frozenset(), {})
    with pytest.raises(ModelError, match=r"has no blocks\.1\.hook_resid_pre: outliers looks at"):
        interp.outliers(bridged, TOKENS)


# --- files, pages, the command ----------------------------------------------------------------


def test_a_file_gives_the_result_back_and_the_page_says_what_is_massive(tmp_path):
    model = reader()
    with torch.no_grad():
        model.blocks[0].mlp.out_proj.bias[4] += 9000.0
    result = interp.outliers(model, "a  b", ratio=100.0)
    _, record, *_ = result.save(tmp_path)
    again = read_scores(record)
    assert isinstance(again, Activations)
    assert again.table.drop(columns="ratio").equals(result.table.drop(columns="ratio"))
    assert again.sites.equals(result.sites)
    assert again.summary == json.loads(result.to_json())["summary"]
    page = result_page(again)
    assert page == result_page(result)
    for told in ("dimension 4", "massive", "Outliers of"):
        assert told in page
    assert "the stream before block L" in page


def test_layers_are_told_as_runs_of_neighbours():
    assert spans([3, 12, 13, 14, 20]) == "layers 3, 12 to 14 and 20"
    assert spans([5]) == "layer 5"
    assert spans([0, 1]) == "layers 0 to 1"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a tiny model and tokens, to run commands in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_folder(planted(), tmp_path / "model")
    np.save("tokens.npy", TOKENS.numpy())
    return tmp_path


def run(*words):
    """What a command gives, whether it works or not."""
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_command_prints_writes_and_joins_a_report(here):
    printed = run("outliers", "model", "--tokens", "tokens.npy", "--out", "found", "--top", "2")
    assert printed.exit_code == 0, printed.output
    assert "outliers of model" in printed.stdout
    assert "no activation of the residual stream is massive" in printed.stdout
    sites = pd.read_csv("found/outliers_sites.csv")
    assert len(sites) == 3 * 9 + 1 + 1
    assert len(pd.read_csv("found/outliers.csv")) == 2 * len(sites)
    assert pd.read_csv("found/outliers_features.csv").columns[0] == "site"
    assert (here / "found" / "outliers.html").is_file()
    assert run("induction", "model", "--block", "5", "--out", "found").exit_code == 0
    assert run("report", "found").exit_code == 0
    report = (here / "found" / "report.html").read_text("utf-8")
    assert "Outliers" in report
    assert "Induction" in report


def test_the_command_lists_what_the_function_lists(here):
    given = {
        **{"magnitude": 5.0, "ratio": 4.0, "deviations": 2.0, "top": 2, "feature_magnitude": 2.0},
        **{"feature_layers": 0.7, "feature_positions": 0.3},
    }
    words = [word for name, value in given.items() for word in (_flag(name), value)]
    words += ["--block", "5", "--batch", "2", "--site", "mlp_in", "--site", "k"]
    listed = json.loads(run("outliers", "model", *words, "--format", "json").stdout)
    result = interp.outliers(
        interp.load_model("model"), blocks=[5], batch=2, sites=["mlp_in", "k"], **given
    )
    assert listed == json.loads(result.to_json())
    assert listed["params"]["sites"] == ["k", "mlp_in"]


def _flag(name):
    return f"--{name.replace('_', '-')}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ratio", "nan"), "Invalid value for '--ratio'"),
        (("--top", "0"), "Invalid value for '--top'"),
        (("--feature-layers", "1.5"), "Invalid value for '--feature-layers'"),
        (("--site", "mlp"), "no site 'mlp': it should be one of resid_pre, attn_in"),
        (("--draws", "2"), "--draws is for --effects"),
        (("--sinks", "--format", "json"), "--format json and --sinks: it prints one table"),
        (("--sinks", "--effects", "--format", "csv"), "--format csv and --sinks and --effects"),
        (("--tokens", "tokens.npy", "--block", "5"), "one source of tokens at a time"),
    ],
)
def test_the_command_refuses_in_one_line(here, words, said):
    result = run("outliers", "model", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
