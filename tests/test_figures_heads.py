"""Maps of heads: what a click on them names, what is blank and why; curves of several seeds."""

import math

import numpy as np
import pandas as pd
import pytest
from pages import strict
from tiny_models import perturbed, tiny_config

from interp import compare, prune_heads
from interp.tables import HeadScores
from interp.views.drawing import figure
from interp.views.figures.ablation import Series, effect_bars, pair_matrix
from interp.views.figures.comparison import HeadMap, head_maps
from interp.views.figures.curves import training_curves
from interp.views.figures.heads import ablation_bars, head_heatmap, heads_at_steps
from interp.views.pages.comparison import compare_page
from interp.views.pages.page import Plot


def heads(n_layers=2, n_heads=3, **columns):
    cells = [(layer, head) for layer in range(n_layers) for head in range(n_heads)]
    table = pd.DataFrame(cells, columns=["layer", "head"])
    return table.assign(**({"score": np.arange(len(cells)) / 10} | columns))


def side_by_side(*maps, **more):
    words = {"title": "t", "subtitle": "s", "caption": "c", "bar": "b"}
    return head_maps(list(maps), **(words | more))


# Numbers in cells


@pytest.mark.parametrize(
    ("values", "written"),
    [
        ([0.1, 0.72, 0.0], ".2f"),
        ([-0.0041, 0.001, 0.0], ".4f"),
        ([0.05, 0.0, 0.01], ".3f"),
        ([37.0, 1.0, 2.0], ".1f"),
        ([12345.0, 1.0, 2.0], ".0f"),
        ([3e-9, 0.0, 1e-9], ".1e"),
        ([1e7, 0.0, 1.0], ".1e"),
    ],
)
def test_numbers_in_cells_have_two_digits_at_least_of_the_largest(values, written):
    table = heads(n_layers=1, score=values)
    one = head_heatmap(table, "score").data[0].texttemplate
    beside = side_by_side(HeadMap("a", table, "score")).data[0].texttemplate
    pairs = dict(zip([(0, 1), (0, 2), (1, 2)], values, strict=True))
    words = {"column": "c", "title": "t", "subtitle": "s", "reading": "r"}
    both = pair_matrix("abc", pairs, **words).data[0].texttemplate
    assert one == beside == both == f"%{{z:{written}}}"


def test_models_of_very_many_heads_do_not_make_figures_wider_than_a_screen():
    large = heads(n_layers=40, n_heads=64)
    for drawn in (head_heatmap(large, "score"), side_by_side(*[HeadMap("a", large, "score")] * 2)):
        assert drawn.layout.width < 1280
        assert drawn.data[0].texttemplate is None
        assert drawn.data[0].z[39][63] == pytest.approx(large["score"].iloc[-1])


def test_there_are_bars_for_any_number_of_methods():
    series = [Series(f"method {number}", [float(number)]) for number in range(12)]
    words = {"axis": "a", "title": "t", "subtitle": "s", "reading": "r"}
    assert len(effect_bars(["L0H0"], series, **words).data) == 12


# Clicks


def test_a_click_on_any_map_of_query_heads_names_the_model_and_the_head():
    own = head_heatmap(heads(), "score", subject="tiny")
    beside = side_by_side(HeadMap("a", heads(), "score", "tiny"))
    steps = pd.concat([heads(step=step, model="tiny") for step in (0, 10)])
    small = heads_at_steps(steps, "score", [0, 10])
    for drawn in (own, beside, small):
        for trace in strict(drawn)["data"]:
            assert trace["meta"]["subject"] == "tiny"
            for layer, row in enumerate(trace["customdata"]):
                assert [cell[:2] for cell in row] == [[layer, head] for head in range(3)]


def test_small_maps_name_the_step_that_they_show_and_the_run():
    steps = pd.concat([heads(step=step, model="m", seed=1) for step in (0, 10, 20)])
    drawn = strict(heads_at_steps(steps, "score", [0, 12], subject="ignored"))
    assert [trace["meta"] for trace in drawn["data"]] == [
        {"subject": "m, seed 1", "step": 0},
        {"subject": "m, seed 1", "step": 10},
    ]
    nameless = heads_at_steps(heads(step=5), "score", [5], subject="run")
    assert nameless.data[0].meta == {"subject": "run", "step": 5}


def test_without_a_model_a_map_names_none():
    assert "meta" not in strict(head_heatmap(heads(), "score"))["data"][0]
    assert "meta" not in strict(side_by_side(HeadMap("a", heads(), "score")))["data"][0]
    assert "meta" not in strict(heads_at_steps(heads(step=5), "score", [5]))["data"][0]


def ablated(site):
    return HeadScores(
        table=heads(effect=[0.1, -0.2, 0.3, 0.4, 0.5, math.nan], effect_se=0.1, n=4),
        score="effect",
        unit="nats",
        analysis="ablation",
        model="tiny",
        params={"method": "zero", "metric": "loss", "site": site, "pruned_heads": ["2.0", "2.1"]},
        inputs="4 sequences",
        seed=7,
        summary={"loss_clean": 2.5},
        versions={},
    )


def test_kv_heads_are_not_chosen_by_a_click():
    """The explorer knows query heads."""
    assert figure(ablated("z")).data[0].meta == {"subject": "tiny"}
    assert figure(ablated("v")).data[0].meta is None
    assert figure(ablated("v"), column="effect").data[0].meta is None


# Blank cells


def test_kv_heads_that_may_be_gone_with_their_query_heads_are_not_called_unmeasured():
    result = ablated("v")
    kv = figure(result)
    assert len(kv.data[0].z) == 2  # query heads of layer 2 are no KV heads of it
    assert kv.layout.meta["notes"] == ["Blank, without a finite value: L1KV2 (1 of 6 heads)."]
    missing = head_heatmap(
        result.table.drop(index=[1]), "effect", noun="KV head", pruned=[(0, 2), (0, 3)]
    )
    assert missing.layout.meta["notes"] == [
        "Blank, not measured, or pruned with all of their query heads: L0KV1 (1 of 6 heads).",
        "Blank, without a finite value: L1KV2 (1 of 6 heads).",
    ]
    whole = head_heatmap(result.table.drop(index=[1]), "effect", noun="KV head")
    assert whole.layout.meta["notes"][0] == "Blank, not measured: L0KV1 (1 of 6 heads)."


def test_maps_side_by_side_name_the_blanks_of_each_and_keep_a_wholly_pruned_last_layer():
    gone = [(2, 0), (2, 1), (2, 2)]
    drawn = side_by_side(
        HeadMap("whole", heads(score=[0.1, math.nan, 0.3, 0.4, 0.5, 0.6]), "score"),
        HeadMap("pruned", heads(), "score", pruned=gone),
    )
    assert [len(trace.z) for trace in drawn.data] == [2, 3]
    assert list(drawn.data[1].z[2]) == [None] * 3
    assert drawn.layout.meta["notes"] == [
        "whole: blank, without a finite value: L0H1 (1 of 6 heads).",
        "pruned: blank, pruned, the model has no such head: L2H0, L2H1, L2H2 (3 of 9 heads).",
    ]


def test_a_comparison_with_a_pruned_model_shows_which_heads_are_gone():
    whole = perturbed(tiny_config())
    gone = [(0, 1), *((1, head) for head in range(4))]
    found = compare(whole, prune_heads(whole, gone), batch=2)
    assert found.pruned_of(found.labels[0]) == []
    assert found.pruned_of(found.labels[1]) == gone
    plots = [
        part.figure
        for section in compare_page(found).sections
        for part in section.parts
        if isinstance(part, Plot)
    ]
    first = plots[0]
    assert [len(trace.z) for trace in first.data] == [2, 2]
    assert [trace.meta["subject"] for trace in first.data] == list(found.labels)
    named = "L0H1, L1H0, L1H1, L1H2, L1H3 (5 of 8 heads)."
    assert first.layout.meta["notes"] == [
        f"{found.labels[1]}: blank, pruned, the model has no such head: {named}"
    ]
    differences = next(p for p in plots if str(p.layout.title.text).startswith("Difference"))
    assert all(len(trace.z) == 2 for trace in differences.data)
    assert all(named in note for note in differences.layout.meta["notes"])
    assert differences.data[0].meta is None


def test_a_small_map_names_its_blank_cells_with_run_and_step():
    steps = pd.concat([heads(step=step, model="m", seed=0) for step in (0, 10)])
    steps.loc[(steps["step"] == 10) & (steps["layer"] == 1) & (steps["head"] == 2), "score"] = (
        np.inf
    )
    drawn = heads_at_steps(steps, "score", [0, 10])
    assert strict(drawn)["data"][1]["z"][1][2] is None
    assert drawn.layout.meta["notes"] == [
        "m, seed 0, step 10: blank, without a finite value: L1H2 (1 of 6 heads)."
    ]


def test_a_map_without_any_value_is_said_to_be_blank():
    drawn = side_by_side(HeadMap("a", heads(score=math.nan), "score"))
    assert drawn.layout.meta["notes"] == ["a: no head has a finite value: the map is blank."]
    assert drawn.layout.coloraxis.cmin < drawn.layout.coloraxis.cmax


# Where a figure comes from


def test_a_table_with_models_and_seeds_lends_them_to_its_figure():
    table = pd.DataFrame(
        {"model": "m", "seed": [0, 1], "group": "g", "effect": [1.0, 2.0], "n": 64}
    )
    assert ablation_bars(table).layout.title.subtitle.text == "m, seeds 0, 1, unit: nats, n = 64"
    drawn = heads_at_steps(heads(step=5, model="m", seed=3, n=8), "score", [5])
    assert drawn.layout.title.subtitle.text == "m, seed 3, n = 8"


# Seeds


def curves(seeds, steps=(0, 10, 20, 30), model="m"):
    return pd.concat(
        [
            pd.DataFrame({"model": model, "seed": seed, "step": steps}).assign(
                loss=lambda own, seed=seed: 3 - own["step"] / 10 + seed, train_loss=2.0
            )
            for seed in seeds
        ]
    )


def bands(drawn):
    return [trace for trace in strict(drawn)["data"] if trace.get("fill") == "toself"]


def test_three_seeds_have_a_band_from_the_lowest_to_the_highest_behind_their_lines():
    drawn = training_curves(curves([0, 1, 2]))
    [band] = bands(drawn)
    assert band["x"] == [0, 10, 20, 30, 30, 20, 10, 0]
    assert band["y"] == [5, 4, 3, 2, 0, 1, 2, 3]
    kinds = [trace.fill for trace in drawn.data]
    assert kinds.index("toself") == 0
    assert kinds.count(None) == 6  # three lines of either loss, none of them hidden
    assert band["showlegend"] is False
    assert "grey from the lowest to the highest seed" in drawn.layout.meta["caption"]


def test_two_seeds_have_no_band_and_each_model_its_own():
    assert bands(training_curves(curves([0, 1]))) == []
    assert "grey" not in training_curves(curves([0, 1])).layout.meta["caption"]
    both = pd.concat([curves([0, 1, 2], model="a"), curves([0, 1], model="b")])
    assert len(bands(training_curves(both))) == 1


@pytest.mark.parametrize("fault", [math.nan, math.inf])
def test_a_step_that_a_seed_lacks_is_not_in_the_band(fault):
    table = curves([0, 1, 2]).reset_index(drop=True)
    table.loc[(table["seed"] == 1) & (table["step"] == 10), "loss"] = fault
    table = table[(table["seed"] != 2) | (table["step"] != 30)]
    [band] = bands(training_curves(table))
    assert band["x"] == [0, 20, 20, 0]
    assert band["y"] == [5, 3, 1, 3]
