"""`interp.outliers` at every site: its figures, its outlier features, its map."""

import math
from contextlib import ExitStack, contextmanager

import hf_models
import numpy as np
import pandas as pd
import pytest
import torch
from pages import strict
from tiny_models import FAMILIES, padding, some_tokens, tiny
from tiny_tokenizers import reader
from typer.testing import CliRunner

import interp
from interp.activation_tables import Activations
from interp.activations.moments import median, profile
from interp.activations.sites import every_site
from interp.cli import app
from interp.errors import AnalysisError
from interp.models.loading import save_folder
from interp.views.figures.sites import site_maps
from interp.views.pages.activations import activation_findings
from interp.views.report import result_page

TOKENS = some_tokens(3, 10)

KINDS = ("attn_in", "k", "v", "z", "attn_out", "mlp_in", "mlp_post", "mlp_out")
STREAM = ("resid_pre", "resid_post", "ln_final")


@contextmanager
def edited(model, kind, layer, edit):
    """The model with what stands at a site replaced by `edit` of it, `[batch, pos, width]`."""

    def replaced(value):
        return edit(value.flatten(2).clone()).reshape(value.shape)

    with ExitStack() as stack:
        module = None
        if hasattr(model, "config"):  # ours has no hook at these
            block = model.blocks[min(layer, model.cfg.n_layers - 1)]
            module = {
                "attn_in": block.attn.q_proj,
                "mlp_in": getattr(block.mlp, "in_proj", None),
                "ln_final": model.ln_final,
            }.get(kind)
        if module is None:
            [site] = [s for s in every_site(model, [kind]) if s.layer == layer]
            point = model.hook_dict[site.hook]
            handle = point.register_forward_hook(lambda own, given, out: replaced(out))
        elif kind == "ln_final":
            handle = module.register_forward_hook(lambda own, given, out: replaced(out))
        else:
            handle = module.register_forward_pre_hook(lambda own, given: (replaced(given[0]),))
        stack.callback(handle.remove)
        yield model


def planted(value, row=1, position=3, dimension=5):
    """An edit that puts a value at one place."""

    def edit(x):
        x[row, position, dimension] = value
        return x

    return edit


def row_of(result, kind, layer, table="sites"):
    rows = getattr(result, table)
    return rows[(rows["site"] == kind) & (rows["layer"] == layer)].iloc[0]


# --- known answers ----------------------------------------------------------------------------

MODELS = {
    "native": lambda: tiny(n_layers=3),
    "native_llama": lambda: tiny("llama", n_layers=3),
    "bridged_gpt2": lambda: interp.load_model(hf_models.gpt2(), backend="bridge"),
    "bridged_llama": lambda: interp.load_model(hf_models.llama(), backend="bridge"),
    "bridged_bert": lambda: interp.load_model(hf_models.bert(), backend="bridge"),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", [*KINDS, *STREAM])
def test_what_is_planted_at_a_site_is_found_there_and_nowhere_before(name, kind):
    model = MODELS[name]()
    last = model.cfg.n_layers
    layer = last if kind in ("resid_post", "ln_final") else 1
    if name == "bridged_bert" and kind == "ln_final":
        with pytest.raises(AnalysisError, match="has no ln_final: the output of the final norm"):
            every_site(model, [kind])
        return
    plain = interp.outliers(model, TOKENS, top=1)
    with edited(model, kind, layer, planted(-7000.0)):
        result = interp.outliers(model, TOKENS, top=1)
    found = row_of(result, kind, layer, "table")
    assert found[["sequence", "position", "dimension", "value"]].tolist() == [1, 3, 5, -7000.0]
    assert found["token"] == str(int(TOKENS[1, 3])) or name.startswith("bridged")
    assert found["magnitude"] == 7000.0
    assert found["massive"]
    assert row_of(result, kind, layer)["massive"] == 1
    assert row_of(result, kind, layer)["largest"] == -7000.0
    for site in every_site(model):
        if site.layer < layer and site.kind != "resid_post":
            before, after = (row_of(one, site.kind, site.layer) for one in (plain, result))
            assert after.equals(before), site


def test_constant_values_have_no_kurtosis_and_none_is_beyond():
    """The mean of many 0.1 is a rounding off 0.1, which is no deviation."""
    model = tiny()
    with edited(model, "mlp_out", 1, lambda x: torch.full_like(x, 0.1)):
        result = interp.outliers(model, TOKENS, top=1)
    row = row_of(result, "mlp_out", 1)
    assert math.isnan(row["kurtosis"])
    assert row[["beyond_sigma", "beyond_robust"]].tolist() == [0, 0]
    assert row["ratio"] == 1.0
    assert "1 of 20 layers and sites hold equal values" in str(site_maps(result.sites).layout.meta)


def test_a_sequence_of_equal_values_is_left_out_of_the_mean_kurtosis():
    model = tiny()

    def edit(x):
        x[0] = 2.0
        x[1:] = torch.tensor([1.0, -1.0]).repeat(5 * 24 // 2 * 2).reshape(10, 24)
        return x

    with edited(model, "attn_out", 0, edit):
        row = row_of(interp.outliers(model, TOKENS, top=1), "attn_out", 0)
    assert row["kurtosis"] == pytest.approx(1.0, rel=1e-12)
    assert row["infinity_norm"] == pytest.approx(4 / 3)
    assert row["median"] == pytest.approx(4 / 3)


def test_float16_values_of_300_have_the_kurtosis_of_their_float64():
    """300⁴ is 8.1e9, and float16 ends at 65,504; so does the square of 300."""
    model = tiny(attention={"bias": False}).half()

    def edit(x):
        x.zero_()
        x[:, 2, 7] = 300.0
        return x

    with edited(model, "mlp_out", 1, edit):
        row = row_of(interp.outliers(model, TOKENS, top=1), "mlp_out", 1)
    share = 1 / (10 * 24)
    expected = (1 - 3 * share * (1 - share)) / (share * (1 - share))
    assert row["kurtosis"] == pytest.approx(expected, rel=1e-12)
    assert row["infinity_norm"] == 300.0
    assert row["beyond_sigma"] == 3
    assert row["beyond_robust"] == 3
    assert row["ratio"] == math.inf


@pytest.mark.parametrize("size", [1e-90, 1e90, 1e160])
def test_float64_values_whose_fourth_power_leaves_its_range_have_their_kurtosis(size):
    model = tiny(attention={"bias": False}).double()

    def edit(x):
        x.zero_()
        x[:, 2, 7] = size
        x[:, 3, 1] = -size
        return x

    with edited(model, "attn_in", 1, edit):
        row = row_of(interp.outliers(model, TOKENS, top=1, sites=["attn_in"]), "attn_in", 1)
    assert row["kurtosis"] == pytest.approx(10 * 24 / 2, rel=1e-12)
    assert row["infinity_norm"] == size
    assert row["beyond_sigma"] == 6


def test_one_peak_hides_the_next_from_the_mean_but_not_from_the_median():
    x = np.arange(1000.0) / 1000
    x[7], x[8] = 1e6, 100.0
    own = profile(x, np.abs(x), 6.0)
    assert own.beyond_sigma == 1
    assert own.beyond_robust == 2
    assert own.centre == pytest.approx(np.median(x))


def test_more_than_six_deviations_are_beyond_and_six_are_not():
    """±1 but for two values: the mean is 0, and the deviation is known."""
    x = np.array([1.0, -1.0] * 500 + [8.0, -8.0])
    deviation = math.sqrt((1000 + 128) / 1002)
    for bound, count in ((8 / deviation * 0.999, 2), (8 / deviation * 1.001, 0)):
        assert profile(x, np.abs(x), bound).beyond_sigma == count
    # The median of |x - 0| is 1: five spreads are 7.413.
    assert profile(x, np.abs(x), 5.0).beyond_robust == 2
    assert profile(x, np.abs(x), 5.4).beyond_robust == 0


def test_where_most_values_are_equal_every_other_one_is_beyond_the_median():
    x = np.array([0.0] * 6 + [1.0, 2.0, 3.0])
    own = profile(x, x, 6.0)
    assert own.spread == 0.0
    assert own.beyond_robust == 3
    assert own.beyond_sigma == 0


@pytest.mark.parametrize("kind", ["attn_in", "z", "mlp_in"])
@pytest.mark.parametrize(
    ("positions", "layers", "value", "found"),
    [
        (3, (2, 5), 7.0, True),
        (2, (2, 5), 7.0, False),
        (3, (5,), 7.0, False),
        (3, (2, 5), 6.0, True),
        (3, (2, 5), 5.999, False),
        (3, (2, 5), -6.0, True),
    ],
)
def test_a_feature_reaches_6_at_6_percent_of_positions_in_25_percent_of_layers(
    kind, positions, layers, value, found
):
    """8 layers, 50 positions: 3 positions are 6 %, 2 layers 25 %; boundaries belong to it."""
    model = tiny(n_layers=8, n_ctx=50)

    def edit(x):
        x[:] = 0.5
        x[0, :positions, 3] = value
        return x

    with ExitStack() as stack:
        for layer in range(8):
            own = edit if layer in layers else lambda x: torch.full_like(x, 0.5)
            stack.enter_context(edited(model, kind, layer, own))
        result = interp.outliers(model, some_tokens(1, 50), sites=[kind])
    assert result.summary["features"] == {kind: int(found)}
    if found:
        [row] = result.features.to_dict(orient="records")
        assert row == {
            **{"site": kind, "dimension": 3, "layers": 2, "layers_share": 0.25},
            **{"positions_share": 0.06, "first_layer": 2, "last_layer": 5},
            **{"largest": value, "one_signed": 1.0},
        }
        assert f"dimension 3 of {kind}, in 2 of 8 layers" in activation_findings(result)[-1]
    else:
        assert "no dimension of" in activation_findings(result)[-1]


# --- an independent oracle --------------------------------------------------------------------


def oracle_sites(model, tokens, looked):
    """Every site's values in float64, `[batch, pos, width]`, by (layer, kind).

    From the model's own cache; what has no hook is the norm's output times its gain, plus its bias.
    """
    _, cache = model.run_with_cache(tokens, attention_mask=looked.long())
    hooks = {
        **{"resid_pre": "hook_resid_pre", "k": "attn.hook_k", "v": "attn.hook_v"},
        **{"z": "attn.hook_z", "attn_out": "hook_attn_out"},
        **{"mlp_post": "mlp.hook_post", "mlp_out": "hook_mlp_out"},
    }
    n_layers = model.cfg.n_layers

    def array(name):
        value = cache[name].double().numpy()
        return value.reshape(*value.shape[:2], -1)

    def normed(name, module):
        gain = module.w.detach().double().numpy()
        bias = getattr(module, "b", None)
        return array(f"{name}.hook_normalized") * gain + (
            0.0 if bias is None else bias.detach().double().numpy()
        )

    found = {}
    for layer, block in enumerate(model.blocks):
        for kind, hook in hooks.items():
            found[layer, kind] = array(f"blocks.{layer}.{hook}")
        found[layer, "attn_in"] = normed(f"blocks.{layer}.ln1", block.ln1)
        found[layer, "mlp_in"] = normed(f"blocks.{layer}.ln2", block.ln2)
    found[n_layers, "resid_post"] = array(f"blocks.{n_layers - 1}.hook_resid_post")
    found[n_layers, "ln_final"] = normed("ln_final", model.ln_final)
    return found


def told_of(values, looked, deviations, magnitude, ratio):
    """The columns of `sites` by plain loops over the sequences."""
    columns = {name: [] for name in ("median", "norm", "kurtosis", "sigma", "robust", "massive")}
    signed, ratios, count = [], [], 0
    for row, real in zip(values, looked, strict=True):
        x = row[real].ravel()
        count += len(x)
        off, size = x - x.mean(), np.abs(x)
        spread = 1.4826 * np.median(np.abs(x - np.median(x)))
        columns["median"].append(np.median(size))
        columns["norm"].append(size.max())
        columns["kurtosis"].append((off**4).mean() / (off**2).mean() ** 2)
        columns["sigma"].append((np.abs(off) > deviations * x.std()).sum())
        columns["robust"].append((np.abs(x - np.median(x)) > deviations * spread).sum())
        columns["massive"].append(((size > magnitude) & (size >= ratio * np.median(size))).sum())
        signed.append(x[size.argmax()])
        ratios.append(size.max() / np.median(size))
    most = int(np.argmax(np.abs(signed)))
    sigma, robust = sum(columns["sigma"]), sum(columns["robust"])
    return {
        "n": int(looked.sum()),
        "median": np.mean(columns["median"]),
        "largest": signed[most],
        "ratio": ratios[most],
        "massive": sum(columns["massive"]),
        "infinity_norm": np.mean(columns["norm"]),
        "kurtosis": np.mean(columns["kurtosis"]),
        "beyond_sigma": sigma,
        "beyond_sigma_share": sigma / count,
        "beyond_robust": robust,
        "beyond_robust_share": robust / count,
    }


@pytest.mark.parametrize("family", ["mha", "llama", "qk_norm", "shortformer", "gated_with_bias"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_every_column_of_the_sites_is_that_of_the_oracle(family, side):
    model = tiny(family, d_vocab=40)
    # A token that comes twice may have the largest value in two sequences.
    tokens = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:30].reshape(3, 10)
    looked = torch.ones(3, 10, dtype=torch.bool)
    mask = padding(side, [4, 10, 7], 10)
    looked = looked if mask is None else mask.bool()
    result = interp.outliers(
        model, tokens, attention_mask=mask, deviations=2.0, magnitude=2.0, ratio=3.0
    )
    values = oracle_sites(model, tokens, looked)
    if family == "shortformer":  # its queries and keys read more than the norm
        values = {place: own for place, own in values.items() if place[1] != "attn_in"}
    rows = result.sites.set_index(["layer", "site"])
    assert len(result.sites) == 2 * 9 + 2
    assert sum(rows["beyond_sigma"]) > 20
    for place, own in values.items():
        expected = told_of(own, looked.numpy(), 2.0, 2.0, 3.0)
        assert list(rows.columns) == list(expected)
        for name, value in expected.items():
            # The model computes in float32.
            assert rows.loc[place, name] == pytest.approx(value, rel=2e-4), (place, name)


def test_every_feature_is_that_of_the_oracle():
    model = tiny(n_layers=4, attention={"n_key_value_heads": 2})
    looked = padding("left", [4, 10, 7], 10)
    given = {"feature_magnitude": 1.5, "feature_layers": 0.5, "feature_positions": 0.25}
    result = interp.outliers(model, TOKENS, attention_mask=looked, **given)
    values = oracle_sites(model, TOKENS, looked.bool())
    expected = {}
    for kind in ("attn_in", "z", "mlp_in"):
        for dimension in range(24):
            shares, large = {}, {}
            for layer in range(4):
                x = values[layer, kind][looked.bool().numpy()][:, dimension]
                shares[layer] = (np.abs(x) >= 1.5).sum() / 21
                large[layer] = x[np.abs(x) >= 1.5]
            there = [layer for layer in range(4) if shares[layer] >= 0.25]
            if len(there) >= 2:
                every = np.concatenate([large[layer] for layer in there])
                expected[kind, dimension] = {
                    "layers": len(there),
                    "layers_share": len(there) / 4,
                    "positions_share": np.mean([shares[layer] for layer in there]),
                    "first_layer": there[0],
                    "last_layer": there[-1],
                    "largest": every[np.abs(every).argmax()],
                    "one_signed": max((every > 0).mean(), (every < 0).mean()),
                }
    rows = result.features.set_index(["site", "dimension"])
    assert set(rows.index) == set(expected)
    assert 5 < len(rows) < 60
    for place, own in expected.items():
        for name, value in own.items():
            assert rows.loc[place, name] == pytest.approx(value, rel=1e-4), (place, name)
    assert result.summary["features"] == rows.groupby("site").size().to_dict()
    for _, of_site in result.features.groupby("site"):
        assert of_site["layers"].is_monotonic_decreasing


@pytest.mark.parametrize("n", [1, 2, 5, 16_383, 16_384, 40_001, 100_000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_median_is_that_of_numpy_whatever_the_values(n, dtype):
    """Above 16,383 values it is selected around a guess, which these orders mislead."""
    draw = np.random.default_rng(0)
    stride = n // 4096 | 1
    misled = np.where(np.arange(n) % stride == 0, 100.0, draw.normal(size=n))
    cases = {
        "normal": draw.normal(size=n),
        "heavy": draw.standard_cauchy(n),
        "rising": np.arange(n),
        "equal": np.full(n, 0.3),
        "two values": np.arange(n) % 2,
        "mostly zero": np.maximum(draw.normal(size=n) - 1, 0),
        "misled": misled,
    }
    for name, values in cases.items():
        values = values.astype(dtype)
        before = values.copy()
        assert median(values) == np.median(values.astype(np.float64)), name
        assert np.array_equal(values, before)


# --- properties -------------------------------------------------------------------------------


def test_sequences_one_by_one_or_together_give_the_same_figures(monkeypatch):
    model = tiny()
    given = {"feature_magnitude": 1.5, "deviations": 2.0}
    whole = interp.outliers(model, TOKENS, **given)
    monkeypatch.setattr("interp.activations.massive.sequences_at_once", lambda model, n_pos: 1)
    parts = interp.outliers(model, TOKENS, **given)
    assert len(whole.features) > 5
    for name in ("sites", "features", "table"):
        pd.testing.assert_frame_equal(getattr(whole, name), getattr(parts, name), rtol=1e-4)


def test_bos_is_in_no_figure_where_it_is_left_out():
    model = tiny(bos_token_id=0)
    tokens = 1 + some_tokens(3, 9, d_vocab=18)
    tokens[:, 0] = 0

    def edit(x):
        x[:, 0] = 50.0
        return x

    with edited(model, "mlp_in", 1, edit):
        whole = interp.outliers(model, tokens)
        without = interp.outliers(model, tokens, exclude_bos=True)
    assert row_of(whole, "mlp_in", 1)["infinity_norm"] == 50.0
    assert row_of(without, "mlp_in", 1)["infinity_norm"] < 10.0
    assert without.sites["n"].unique().tolist() == [3 * 8]
    assert whole.sites["n"].unique().tolist() == [3 * 9]


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama_mlp_bias", "qwen3"])
def test_native_and_bridge_give_the_same_figures(name):
    hf = hf_models.MODELS[name]()
    ids = hf_models.tokens(n_pos=12)
    given = {"feature_magnitude": 1.5, "deviations": 3.0}
    ours = interp.outliers(hf_models.native(hf), ids, **given)
    theirs = interp.outliers(interp.load_model(hf, backend="bridge"), ids, **given)
    assert len(ours.features) > 3
    for table in ("sites", "features"):
        pd.testing.assert_frame_equal(
            getattr(ours, table), getattr(theirs, table), rtol=1e-4, atol=1e-5
        )


def test_some_sites_have_the_rows_they_have_among_all():
    model = tiny()
    whole = interp.outliers(model, TOKENS)
    some = interp.outliers(model, TOKENS, sites=["mlp_post", "k"])
    for name in ("table", "sites"):
        rows = getattr(whole, name)
        rows = rows[rows["site"].isin(["mlp_post", "k"])].reset_index(drop=True)
        pd.testing.assert_frame_equal(getattr(some, name), rows)
    assert some.params["sites"] == ["k", "mlp_post"]
    assert some.summary["features"] == {}
    assert "massive" not in some.summary
    assert activation_findings(some)[0].startswith("outliers: the largest activation is ")
    assert "residual stream" not in " ".join(activation_findings(some))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_every_site_that_it_computes(family):
    result = interp.outliers(tiny(family), TOKENS, top=1)
    missing = {"mlp_in", "mlp_post", "mlp_out"} if FAMILIES[family].get("mlp", 1) is None else set()
    if FAMILIES[family].get("normalization_type") == "none":
        missing.add("ln_final")
    assert set(result.sites["site"]) == {*KINDS, *STREAM} - missing


def test_a_model_keeps_no_hook_of_any_site():
    model = tiny()
    interp.outliers(model, TOKENS)
    hooked = [
        module for module in model.modules() if module._forward_hooks or module._forward_pre_hooks
    ]
    assert hooked == []


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_value_that_is_not_finite_is_named_with_its_site_in_one_line(kind, bad):
    model = tiny()
    with edited(model, kind, 1, planted(bad)), pytest.raises(AnalysisError) as caught:
        interp.outliers(model, TOKENS)
    assert str(caught.value) == (
        f"layer 1, {kind}: the activation of sequence 1 at position 3, dimension 5 is {bad}"
    )


def test_sites_that_a_model_has_not_are_refused():
    with pytest.raises(AnalysisError, match="has no mlp_in: what the MLP's first projection reads"):
        interp.outliers(tiny("attention_only"), TOKENS, sites=["mlp_in"])


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a tiny model, to run commands in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_folder(tiny(), tmp_path / "model")
    return tmp_path


@pytest.mark.parametrize("flag", ["--corpus", "--text"])
def test_an_empty_file_or_folder_is_refused_in_one_line(here, flag):
    save_folder(reader(), here / "reader")
    (here / "empty.txt").write_text("")
    (here / "empty").mkdir()
    for name in ("empty.txt", "empty"):
        told = CliRunner().invoke(app, ["outliers", "reader", flag, name])
        assert (told.exit_code, told.stdout) == (2, "")
        assert told.stderr.count("\n") == 1
        assert name in told.stderr


# --- the map and the page ---------------------------------------------------------------------


def test_a_layer_is_the_same_in_the_table_the_file_and_the_figure(tmp_path):
    """What is planted behind block 1 is first in the stream of layer 2."""
    model = tiny(n_layers=3)
    with torch.no_grad():
        model.blocks[1].mlp.out_proj.bias[7] += 1000.0
    result = interp.outliers(model, TOKENS)
    csv = pd.read_csv(result.save(tmp_path)[2]).set_index(["layer", "site"])
    figure = strict(site_maps(result.sites))
    trace, layout = figure["data"][0], figure["layout"]
    names = layout["xaxis"]["ticktext"]
    assert names[0] == "resid"
    assert names[-1] == "ln final"
    assert layout["yaxis"]["ticktext"] == ["0", "1", "2", "3"]
    assert layout["yaxis"]["autorange"] == "reversed"
    stream = [10 ** trace["z"][layer][0] for layer in range(4)]
    for layer, site in enumerate(["resid_pre"] * 3 + ["resid_post"]):
        norm = row_of(result, site, layer)["infinity_norm"]
        assert (norm > 900) == (layer >= 2)
        assert csv.loc[(layer, site), "infinity_norm"] == pytest.approx(norm, rel=1e-12)
        assert stream[layer] == pytest.approx(norm, rel=1e-4)
        assert trace["customdata"][layer][0] == [site, pytest.approx(norm, rel=1e-5), ANY]
    assert 10 ** trace["z"][1][names.index("mlp out")] > 900
    assert trace["z"][2][names.index("ln final")] is None
    assert trace["z"][3][names.index("ln final")] is not None
    assert trace["z"][3][names.index("mlp out")] is None


ANY = pytest.approx(0, abs=math.inf)


def test_the_map_holds_both_quantities_of_every_row_in_their_cells():
    table = interp.outliers(tiny(), TOKENS, top=1).sites
    figure = site_maps(table)
    for trace, column in zip(figure.data, ("infinity_norm", "kurtosis"), strict=True):
        values = [value for row in trace.z for value in row if value is not None]
        assert sorted(10 ** np.array(values)) == pytest.approx(sorted(table[column]), rel=1e-4)
    assert figure.layout.meta["notes"] == []
    zero = table.assign(infinity_norm=0.0, kurtosis=math.nan)
    notes = site_maps(zero).layout.meta["notes"]
    assert [note.split(":")[0] for note in notes] == [
        "Blank, without logarithm",
        "Blank, without kurtosis",
    ]


def test_a_map_needs_its_columns():
    with pytest.raises(AnalysisError, match="kurtosis"):
        site_maps(pd.DataFrame({"layer": [0], "site": ["k"], "infinity_norm": [1.0]}))


def test_the_page_of_a_file_shows_the_sites_and_the_features(tmp_path):
    model = tiny()
    result = interp.outliers(model, TOKENS, feature_magnitude=1.5)
    _, record, *_ = result.save(tmp_path)
    page = result_page(Activations.load(record))
    assert page == result_page(result)
    for told in (
        "Every layer and site",
        "Each site in the layer where its infinity norm is largest.",
        "Outlier features: by site",
        "All 20 layers and sites",
        "The kurtosis is highest in",
    ):
        assert told in page


def test_a_file_without_features_is_read_back(tmp_path):
    result = interp.outliers(tiny(), TOKENS, feature_magnitude=1000)
    _, record, *_ = result.save(tmp_path)
    again = Activations.load(record)
    assert again.features.empty
    assert result_page(again) == result_page(result)


def test_the_command_prints_each_site_and_the_features(here):
    told = CliRunner().invoke(app, ["outliers", "model", "--block", "5", "--site", "mlp_post"])
    assert told.exit_code == 0, told.output
    assert "sites of model" in told.stdout
    assert "mlp_post" in told.stdout
    assert "the largest activation before each block" not in told.stdout


def test_the_command_adds_sinks_and_effects_and_puts_all_on_one_page(here):
    model = tiny(n_layers=3)
    with torch.no_grad():
        model.embed.weight[4, 6] = 5000.0
    save_folder(model, here / "spiked")
    tokens = 5 + some_tokens(3, 9, d_vocab=14)
    tokens[:, 0] = 4
    np.save("tokens.npy", tokens.numpy())
    words = ["outliers", "spiked", "--tokens", "tokens.npy", "--out", "found", "--draws", "1"]
    told = CliRunner().invoke(app, [*words, "--sinks", "--effects"])
    assert told.exit_code == 0, told.output
    titles = ("outliers of spiked", "massive activations and sinks of", "changed outliers of")
    places = [told.stdout.find(title) for title in titles]
    assert -1 not in places
    assert places == sorted(places)
    for name in ("outliers", "outlier_sinks", "outlier_effects"):
        for end in (".csv", ".json"):
            assert (here / "found" / f"{name}{end}").is_file()
    assert [path.name for path in (here / "found").glob("*.html")] == ["outliers.html"]
    page = (here / "found" / "outliers.html").read_text("utf-8")
    for heading in ("Every layer and site", "Outlier sinks", "Outlier effects"):
        assert heading in page
    assert told.stderr.startswith("written: found/outliers.csv, ")
    assert told.stderr.endswith("found/outliers.html\n")
