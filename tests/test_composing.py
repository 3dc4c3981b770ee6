"""`interp.composition`: how much later heads read what earlier ones write, by their weights."""

import hf_models
import numpy as np
import pandas as pd
import pytest
import torch
from tiny_models import FAMILIES, some_tokens, tiny
from transformer_lens import FactoredMatrix
from transformer_lens.utilities.matrix import composition_scores
from typer.testing import CliRunner

import interp
from interp.cli import app
from interp.errors import AnalysisError, ModelError
from interp.models.loading import save_folder
from interp.models.pruning import prune_heads
from interp.tables import SetScores
from interp.views.pages.composition import composition_findings
from interp.views.pages.scores import read_scores
from interp.views.report import result_page

COLUMNS = ("q_composition", "k_composition", "v_composition")
ABLE = [family for family in FAMILIES if "qk_norm" not in family]


def dense(model, layer, head):
    """W_OV and W_QK of one head in float64, as whole matrices of row vectors."""
    weights = {name: value.double().numpy() for name, value in model.state_dict().items()}
    d, heads = model.config.d_head, model.config.attention.n_heads
    group = heads // model.config.n_key_value_heads
    own, shared = slice(head * d, head * d + d), slice(head // group * d, head // group * d + d)
    at = f"blocks.{layer}.attn"
    q = weights[f"{at}.q_proj.weight"][own].T
    k = weights[f"{at}.k_proj.weight"][shared].T
    v = weights[f"{at}.v_proj.weight"][shared].T
    o = weights[f"{at}.o_proj.weight"][:, own].T
    return v @ o, q @ k.T


def test_a_head_that_reads_only_what_another_writes_scores_the_most_there_can_be():
    """Layer 0 head 0 writes dimensions 0 to 5; the keys of layer 1 head 2 read just these."""
    model = tiny("attention_only")
    one, other = model.blocks[0].attn, model.blocks[1].attn
    with torch.no_grad():
        one.o_proj.weight[:, :6] = torch.eye(24)[:, :6]
        one.v_proj.weight[:6] = torch.eye(24)[6:12]
        other.k_proj.weight[12:18] = torch.eye(24)[:6]
        other.q_proj.weight[12:18] = torch.eye(24)[12:18]
    table = interp.composition(model).table.set_index(["layer_a", "head_a", "layer_b", "head_b"])
    row = table.loc[(0, 0, 1, 2)]
    # Six directions of equal size: |A B| = sqrt 6 of |A| |B| = 6.
    assert row["k_composition"] == pytest.approx(6**-0.5)
    assert row["q_composition"] == pytest.approx(0.0)
    assert table["k_composition"].idxmax() == (0, 0, 1, 2)


@pytest.mark.parametrize("family", ABLE)
def test_scores_are_those_of_whole_matrices_in_float64(family):
    model = tiny(family, n_layers=3)
    table = interp.composition(model).table
    assert len(table) == 3 * 16
    for row in table.itertuples():
        ov, _ = dense(model, row.layer_a, row.head_a)
        ov_later, qk = dense(model, row.layer_b, row.head_b)
        expected = [
            np.linalg.norm(ov @ right) / (np.linalg.norm(ov) * np.linalg.norm(right))
            for right in (qk, qk.T, ov_later)
        ]
        assert [getattr(row, name) for name in COLUMNS] == pytest.approx(expected, rel=1e-9)


def test_scores_are_those_of_transformerlens():
    model = tiny("mha")
    table = interp.composition(model).table.set_index(["head_a", "head_b"])
    first, then = (model.blocks[layer].attn for layer in (0, 1))
    ov = FactoredMatrix(first.W_V.double(), first.W_O.double())
    qk = FactoredMatrix(then.W_Q.double(), then.W_K.double().transpose(1, 2))
    later = FactoredMatrix(then.W_V.double(), then.W_O.double())
    for name, right in zip(COLUMNS, (qk, qk.T, later), strict=True):
        theirs = composition_scores(ov, right).detach()
        for (a, b), value in table[name].items():
            assert value == pytest.approx(float(theirs[a, b]), rel=1e-9)


def test_the_null_is_the_mean_of_random_heads_near_one_over_the_root_of_the_width():
    model = tiny("attention_only", d_model=96, attention={"n_heads": 16, "d_head": 6})
    fresh = type(model)(model.config, seed=3)  # Gaussian weights, as the null has them
    result = interp.composition(fresh)
    for name in COLUMNS:
        (null,) = set(result.table[f"{name}_null"])
        assert null == pytest.approx(96**-0.5, rel=0.05)
        assert result.table[name].mean() == pytest.approx(null, rel=0.05)
    assert interp.composition(fresh).to_json() == result.to_json()
    other = interp.composition(fresh, seed=1)
    assert other.summary["null"] != result.summary["null"]
    assert other.table["k_composition"].equals(result.table["k_composition"])


def test_a_head_of_zeros_has_no_value_and_no_pair_is_made_of_pruned_heads():
    model = tiny(n_layers=3)
    with torch.no_grad():
        model.blocks[0].attn.o_proj.weight[:, :6] = 0.0
    table = interp.composition(model).table
    assert (
        table[list(COLUMNS)].isna().all(axis=1).tolist()
        == ((table["layer_a"] == 0) & (table["head_a"] == 0)).tolist()
    )
    pruned = interp.composition(prune_heads(model, [(0, 0), (1, 2), *((2, h) for h in range(4))]))
    assert pruned.table[["layer_a", "head_a", "layer_b", "head_b"]].values.tolist() == [
        [0, a, 1, b] for a in (1, 2, 3) for b in (0, 1, 3)
    ]
    kept = table.merge(pruned.table, on=["layer_a", "head_a", "layer_b", "head_b"])
    assert np.allclose(kept["q_composition_x"], kept["q_composition_y"])


def test_folding_the_norms_changes_scores_and_is_said():
    model = tiny("llama")
    raw, folded = interp.composition(model), interp.composition(interp.fold_layer_norm(model))
    assert raw.params["norm_gains"] == "left out"
    assert folded.params["norm_gains"] == "in the weights, or 1"
    assert not np.allclose(raw.table["k_composition"], folded.table["k_composition"])
    assert raw.params["positions"] == "left out (rotary)"


def test_models_without_such_a_product_are_refused():
    with pytest.raises(ModelError, match="normalises queries and keys"):
        interp.composition(tiny("qk_norm"))
    with pytest.raises(ModelError, match="needs the native backend"):
        interp.composition(interp.load_model(hf_models.gpt2(), backend="bridge"))
    with pytest.raises(AnalysisError, match="no head with one in an earlier layer"):
        interp.composition(tiny(n_layers=1))


def test_the_page_has_a_matrix_of_each_kind_and_names_the_strongest_pairs(tmp_path):
    result = interp.composition(tiny(n_layers=3))
    _, record = result.save(tmp_path)
    again = read_scores(record)
    assert isinstance(again, SetScores)
    page = result_page(again)
    assert page == result_page(result)
    for kind in "KQV":
        assert f"{kind}-composition above that of random heads" in page
    best = result.table.loc[result.table["k_composition"].idxmax()].astype(int)
    pair = f"L{best['layer_a']}H{best['head_a']} then L{best['layer_b']}H{best['head_b']}"
    assert f"K-composition: the strongest pair is {pair}" in composition_findings(result)[0]
    assert pair in page


def test_a_model_of_too_many_heads_for_a_matrix_has_its_strongest_pairs(monkeypatch):
    monkeypatch.setattr("interp.views.figures.style.MOST_CELLS", 15)
    page = result_page(interp.composition(tiny()))
    assert "4 heads against 4 are too many for a matrix" in page
    assert "The 12 strongest pairs" in page


def test_the_command_gives_the_table_of_the_function_and_folds_where_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_folder(tiny("llama"), tmp_path / "model")
    runner = CliRunner()
    printed = runner.invoke(app, ["composition", "model", "--out", "out", "--fold"])
    assert printed.exit_code == 0, printed.output
    assert "composition of model" in printed.stdout
    assert "16 pairs" in printed.stdout
    folded = interp.composition(interp.fold_layer_norm(interp.load_model("model")))
    written = pd.read_csv("out/composition.csv")
    assert np.allclose(written["k_composition"], folded.table["k_composition"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"composition.{ending}" for ending in ("csv", "html", "json")
    ]


def test_composition_runs_no_model():
    model = tiny()
    model.embed.weight.data.fill_(torch.nan)  # it would show in any pass
    assert interp.composition(model).table[list(COLUMNS)].notna().all(axis=None)
    assert model(some_tokens(1, 3)).isnan().any()
