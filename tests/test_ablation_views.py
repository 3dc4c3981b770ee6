"""Ablations, importance and pruning as they are drawn and printed, from small tables made up."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from pages import NASTY, Elements, figures_of, strict, without_library
from plotly.offline import get_plotlyjs

from interp.errors import AnalysisError
from interp.tables import HeadScores, SetScores
from interp.views.figures.ablation import Series, against, effect_bars, pair_matrix
from interp.views.figures.removal import removal_curves
from interp.views.report import report, result_page, write_report
from interp.views.terminal.ablation import print_ablation

ZERO = {"method": "zero", "metric": "loss", "site": "z", "dtype": "float32"}
MEAN = {
    "reference": "16 sequences of random tokens that do not repeat, as long",
    "reference_tokens": 1616,
    "mean": "at each place",
}
RESAMPLE = {
    "resampled_from": "the same sequences, by permutations without fixed points",
    "draws": 4,
    "resample_seed": 0,
}


def result(kind, score, analysis, table, **more):
    """A result of a model that is called tiny, over 4 sequences."""
    given = {
        "unit": "nats",
        "model": "tiny",
        "params": ZERO,
        "inputs": "4 sequences",
        "seed": 7,
        "summary": {"loss_clean": 2.5},
        "versions": {"interp": "1"},
    }
    return kind(table=pd.DataFrame(table), score=score, analysis=analysis, **(given | more))


def column(name, values, rate=0.5):
    """An effect with its standard error, a tenth of it, and its false-discovery rate."""
    values = np.asarray(values, dtype=float)
    return {
        name: values,
        f"{name}_se": np.abs(values) / 10,
        f"{name}_null": 0.0,
        "n": 4,
        f"{name}_p": rate / 2,
        f"{name}_q": rate,
    }


def grid(n_layers, n_heads):
    """Every head of every layer."""
    places = [(layer, head) for layer in range(n_layers) for head in range(n_heads)]
    return {"layer": [a for a, _ in places], "head": [b for _, b in places]}


def heads(values=(0.5, -2.0, 0.25, 1.0), **more):
    """A sweep over 2 layers of heads; direct is half the total."""
    half = np.asarray(values, dtype=float) / 2
    table = {
        **grid(2, len(values) // 2),
        **column("ablation", values, rate=0.01),
        "direct": half,
        "direct_se": 0.125,
        "self_repair": -half,
        "self_repair_se": 0.0625,
        "loss_clean": 2.5,
        "loss_ablated": 2.5 + 2 * half,
    }
    summary = {
        "loss_clean": 2.5,
        "largest_effect": -2.0,
        "largest_effect_head": "0.1",
        "together_heads": "0.1 1.1",
        "together": 3.0,
        "together_se": 0.2,
        "sum_of_singles": -1.0,
        "together_less_sum": 4.0,
        "together_less_sum_se": 0.3,
    }
    return result(HeadScores, "ablation", "ablation", table, **({"summary": summary} | more))


def compared():
    """Zero, mean and resample of 4 heads; they disagree on the rank of one."""
    table = grid(2, 2)
    for number, name in enumerate(("zero", "mean", "resample")):
        table |= column(name, np.array([0.5, -2.0, 0.25, 1.0]) + number)
        table |= {f"{name}_direct": 0.125, f"{name}_direct_se": 0.5}
        table |= {f"{name}_self_repair": 0.25, f"{name}_self_repair_se": 0.5}
        table |= {f"{name}_rank": [1, 2, 3, 4]}
    table |= {"disagree": [False, True, False, False]}
    params = ZERO | MEAN | RESAMPLE | {"method": "all"}
    return result(HeadScores, "zero", "ablation", table, params=params)


def kept():
    records = [
        {"layer": 0, "kept": 1, "held_out": 0.125, "held_out_se": 0.0625, "held_out_p": 0.04},
        {"layer": 1, "kept": 0, "held_out": 1.5, "held_out_se": None, "held_out_p": None},
    ]
    table = {**grid(2, 2), **column("all_but_one", [0.5, 0.125, 1.5, 3.0])}
    summary = {"loss_clean": 2.5, "kept_heads": records}
    return result(HeadScores, "all_but_one", "all-but-one", table, summary=summary)


def importance(**more):
    table = {
        **grid(2, 2),
        **column("importance", [0.5, 2.0, 0.25, 1.0]),
        **column("attribution", [0.5, -2.0, 0.25, 1.0]),
    }
    sample = [
        {"head": "0.1", "importance": 2.0, "attribution": -2.0, "ablation": -3.0},
        {"head": "1.1", "importance": 1.0, "attribution": 1.0, "ablation": 1.5},
    ]
    summary = {
        "rank_correlation": 0.75,
        "rank_correlation_signed": 0.5,
        "sample_heads": 2,
        "sample": sample,
    }
    table.pop("importance_q")
    return result(HeadScores, "importance", "importance", table, **({"summary": summary} | more))


def pairs():
    """Three pairs of three heads, one of them not measured."""
    table = {
        "layer_a": [0, 0, 0],
        "head_a": [0, 0, 1],
        "layer_b": [0, 1, 1],
        "head_b": [1, 2, 2],
        **column("ablation", [1.0, 2.0, np.nan]),
        "sum_of_singles": [0.5, 3.0, np.nan],
        "interaction": [0.5, -1.0, np.nan],
        "interaction_se": [0.0625, 0.125, np.nan],
        "interaction_q": [0.2, 0.01, np.nan],
    }
    return result(SetScores, "ablation", "pairs", table)


def layers():
    table = {"layer": [0, 1], **column("ablation", [0.5, 2.0])}
    return result(SetScores, "ablation", "layers", table)


def cumulative():
    table = {
        "removed": [1, 2, 3],
        "layer": [0, 1, 1],
        "head": [2, 0, 1],
        **column("ablation", [0.5, np.nan, 2.0]),
    }
    return result(SetScores, "ablation", "cumulative", table)


def prune():
    orders = ("oracle", "importance", "importance-again", "random", "magnitude")
    table = {
        "order": [order for order in orders for _ in range(3)],
        "removed": [0, 2, 4] * len(orders),
        "share": [0.0, 0.5, 1.0] * len(orders),
        **column("prune", [n / 4 + place for n in range(len(orders)) for place in (0, 1, 2)]),
    }
    summary = {
        "loss_clean": 2.5,
        "prunable_rule": "the largest share of all",
        "prunable_share": {"oracle": 0.5, "random": 0.0},
        "removal_orders": {"oracle": "0.1 1.0 0.0 1.1", "random": "1.0 0.1 0.0 1.1"},
    }
    return result(SetScores, "prune", "prune", table, summary=summary)


EVERY = {
    "heads": heads,
    "compared": compared,
    "kept": kept,
    "importance": importance,
    "pairs": pairs,
    "layers": layers,
    "cumulative": cumulative,
    "prune": prune,
}
every_kind = pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)


@pytest.fixture
def printed(capsys, monkeypatch):
    """What a terminal of some columns shows of a result."""

    def show(shown, columns=400):
        monkeypatch.setenv("COLUMNS", str(columns))
        print_ablation(shown)
        return capsys.readouterr().out

    return show


def rows(text):
    """The cells of the printed tables' rows."""
    lines = [line for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def traces(page):
    """The traces of each figure, by its number."""
    return [data for _, data, _ in figures_of(page)]


# On a terminal


def test_the_strongest_heads_come_first_with_errors_rates_direct_effect_and_self_repair(printed):
    text = printed(heads())
    assert rows(text) == [
        ["0.1", "-2.0000 ± 0.2000", "0.01", "-1.0000 ± 0.1250", "+1.0000 ± 0.0625"],
        ["1.1", "+1.0000 ± 0.1000", "0.01", "+0.5000 ± 0.1250", "-0.5000 ± 0.0625"],
        ["0.0", "+0.5000 ± 0.0500", "0.01", "+0.2500 ± 0.1250", "-0.2500 ± 0.0625"],
        ["1.0", "+0.2500 ± 0.0250", "0.01", "+0.1250 ± 0.1250", "-0.1250 ± 0.0625"],
    ]
    assert "loss of the unablated model: 2.5 nats" in text
    assert "heads with an effect at a false-discovery rate of 0.05: 4 of 4\n" in text
    together = "together 0.1 1.1: +3 ± 0.2, where their single effects add up to -1; "
    assert together + "together less sum +4 ± 0.3" in text
    assert "nats, ± one standard error over n = 4; 4 sequences; seed 7" in text


def test_a_terminal_shows_twelve_rows_and_says_of_how_many(printed):
    text = printed(heads(np.arange(20) + 1.0))
    assert [row[0] for row in rows(text)[:2]] == ["1.9", "1.8"]
    assert len(rows(text)) == 12
    assert "12 of 20 rows, strongest" in text


def test_three_methods_stand_side_by_side_with_a_mark_where_they_disagree(printed):
    text = printed(compared())
    assert rows(text)[0][:5] == [
        "0.1",
        "-2.0000 ± 0.2000",
        "-1.0000 ± 0.1000",
        "+0.0000 ± 0.0000",
        "yes",
    ]
    assert [row[4] for row in rows(text)] == ["yes", "", "", ""]
    assert "disagree on the rank of 1 of 4 heads" in text


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"method": "zero"}, "zero: each head's output z replaced by 0\n"),
        (
            {"method": "mean", **MEAN},
            "mean: each head's output z replaced by its mean at each place over 16 sequences of "
            "random tokens that do not repeat, as long (1,616 tokens)\n",
        ),
        (
            {"method": "mean", **MEAN, "mean": "over all places", "site": "v"},
            "mean: each KV head's values replaced by its mean over all places of 16 sequences",
        ),
        (
            {"method": "resample", **RESAMPLE, "draws": 1, "site": "k"},
            "resample: each KV head's keys taken from the same sequences, by permutations without "
            "fixed points, averaged over 1 draw\n",
        ),
        (
            {"method": "patch", "patched_from": "4 sequences of ids"},
            "patch: each head's output z taken from 4 sequences of ids\n",
        ),
        (
            {"method": "pattern-preserving"},
            "replaced by 0, all attention patterns kept as they were\n",
        ),
    ],
)
def test_the_method_is_told_with_its_reference_set(printed, params, expected):
    assert expected in printed(heads(params=ZERO | params))


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("second-copy-loss", "an effect above 0: the model is worse off without"),
        ("logit-diff", "an effect below 0: the model is worse off without"),
        ("kl", "kl: of the next-token distribution, from that of the unablated model"),
    ],
)
def test_what_a_sign_means_depends_on_the_metric(printed, metric, expected):
    assert expected in printed(heads(params=ZERO | {"metric": metric}))


def test_of_a_users_own_metric_no_sign_is_called_better(printed):
    text = printed(heads(params=ZERO | {"metric": "mine"}, unit=""))
    assert "better" not in text
    assert "\n± one standard error over n = 4" in text


@pytest.mark.parametrize("site", ["k", "v"])
def test_key_value_heads_are_called_kv_heads(printed, site):
    text = printed(heads(params=ZERO | {"site": site}))
    assert "┃ KV head ┃" in text
    assert "KV heads with an effect" in text


def test_each_failed_head_has_a_line_with_its_reason(printed):
    failed = [{"ablation": "zero 0.1", "reason": "ValueError: [b] no"}]
    text = printed(heads((0.5, np.nan, 0.25, 1.0), summary={"failed": failed}))
    assert [row[0] for row in rows(text)] == ["1.1", "0.0", "1.0"]
    assert text.count("0.1: ValueError: [b] no") == 1
    assert "failed: 0.1: ValueError" in text


def test_pairs_are_ordered_by_their_interaction(printed):
    told = rows(printed(pairs()))
    assert told == [
        ["0.0+1.2", "-1.0000 ± 0.1250", "0.01", "+2.0000 ± 0.2000", "+3.0000"],
        ["0.0+0.1", "+0.5000 ± 0.0625", "0.2", "+1.0000 ± 0.1000", "+0.5000"],
    ]


def test_layers_stand_in_their_own_order(printed):
    assert [row[:2] for row in rows(printed(layers()))] == [
        ["0", "+0.5000 ± 0.0500"],
        ["1", "+2.0000 ± 0.2000"],
    ]


def test_each_layers_best_head_is_told_with_its_held_out_estimate(printed):
    text = printed(kept())
    assert "  layer 0: 0.1 +0.1250 ± 0.0625, p = 0.04\n" in text
    assert "  layer 1: 1.0 +1.5000\n" in text
    alone = replace(kept(), summary={"loss_clean": 2.5, "kept_heads": []})
    assert "no best head to keep" in printed(alone)


def test_a_removal_says_which_head_left_last(printed):
    assert [row[:3] for row in rows(printed(cumulative()))] == [
        ["1", "0.2", "+0.5000 ± 0.0500"],
        ["2", "1.0", ""],
        ["3", "1.1", "+2.0000 ± 0.2000"],
    ]


def test_pruning_has_a_column_for_each_order_and_a_row_for_each_share(printed):
    text = printed(prune())
    assert rows(text)[1] == [
        "2",
        "50%",
        *(f"{1 + n / 4:+.4f} ± {0.1 + n / 40:.4f}" for n in range(5)),
    ]
    assert "can be removed: oracle 50%, random 0%; that is the largest share of all\n" in text


def test_a_step_of_pruning_that_failed_is_named_by_its_number_of_heads(printed):
    failed = [{"ablation": "2 heads", "reason": "no"}]
    made = prune()
    assert "failed: 2 heads: no\n" in printed(
        replace(made, summary=made.summary | {"failed": failed})
    )


def test_importance_never_stands_without_its_rank_correlation(printed):
    assert "the size of the true effect is 0.75, of the attribution to the effect 0.50" in (
        printed(importance())
    )
    assert "is not known here" in printed(importance(summary={}))
    assert rows(printed(importance()))[0] == ["0.1", "2.0000 ± 0.2000", "-2.0000 ± 0.2000"]


@every_kind
def test_eighty_columns_hold_every_number_whole(printed, make):
    narrow, wide = printed(make(), columns=80), printed(make())
    assert max(map(len, narrow.splitlines())) <= 80
    whole = {cell for row in rows(wide) for cell in row}
    assert {cell for row in rows(narrow) for cell in row} == whole


@every_kind
def test_a_single_row_or_one_without_any_value_is_printed_and_drawn(printed, make):
    made = make()
    alone = replace(made, table=made.table.head(1))
    assert len(rows(printed(alone))) == 1
    assert figures_of(result_page(alone))
    without = [c for c in made.table if made.table[c].dtype == float and c != "share"]
    nothing = replace(made, table=made.table.assign(**dict.fromkeys(without, np.nan)))
    assert "nan" not in printed(nothing)
    assert "No head has a finite value" in Elements(result_page(nothing)).text
    assert figures_of(result_page(nothing)) == []


# On a page


@every_kind
def test_a_page_holds_one_plotly_the_same_bytes_and_what_each_figure_is_of(make):
    page = result_page(make())
    assert page.count(get_plotlyjs()) == 1
    assert page == result_page(make())
    shown = Elements(without_library(page))
    assert len(figures_of(page)) >= 1
    subtitles = shown.text.count("tiny, unit: nats, n = 4, seed 7")
    assert subtitles == len(figures_of(page))
    # Every figure says how it is read.
    captions = without_library(page).split("<figcaption>")[1:]
    assert len(captions) == len(figures_of(page))
    assert all(len(caption.split("</figcaption>")[0].split()) >= 8 for caption in captions)


@every_kind
def test_no_text_of_a_result_becomes_markup(make):
    made = make()
    failed = [{"ablation": "zero 0.1", "reason": NASTY}]
    nasty = replace(
        made,
        model=NASTY,
        inputs=NASTY,
        unit=NASTY,
        params=made.params | {"metric": NASTY, "reference": NASTY},
        summary=made.summary | {"failed": failed},
    )
    page = result_page(nasty)
    elements = Elements(without_library(page))
    # plotly.js, the page's own, and the facts of its explorer where it has one.
    assert elements.tags.count("script") == 2 + page.count('id="explorer-data"')
    assert "alert(1)" in elements.text
    # What a click looks up is the name as it is; it is never drawn.
    drawn = [
        {name: own for name, own in trace.items() if name != "meta"}
        for figure in traces(page)
        for trace in figure
    ]
    assert drawn
    assert "<script>alert" not in str(drawn)


@every_kind
def test_a_saved_result_has_the_page_of_the_result_itself(tmp_path, make):
    made = make()
    made.save(tmp_path)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert traces(page) == traces(result_page(made))


def test_several_results_are_one_page(tmp_path):
    page = report([heads(), pairs(), prune()], tmp_path / "all.html").read_text(encoding="utf-8")
    assert page.count(get_plotlyjs()) == 1
    text = Elements(without_library(page)).text
    for heading in ("Ablation", "Pairs", "Prune"):
        assert heading in text


def test_a_sweep_is_a_map_bars_and_direct_against_total():
    [heatmap, bars, scatter] = traces(result_page(heads()))
    assert heatmap[0]["z"] == [[0.5, -2.0], [0.25, 1.0]]
    assert bars[0]["x"] == [-2.0, 1.0, 0.5, 0.25]
    assert bars[0]["error_x"]["array"] == [0.2, 0.1, 0.05, 0.025]
    assert scatter[0]["x"] == [0.5, -2.0, 0.25, 1.0]
    assert scatter[0]["y"] == [0.25, -1.0, 0.125, 0.5]
    assert [label for [label] in scatter[0]["customdata"]] == ["L0H0", "L0H1", "L1H0", "L1H1"]


def test_a_head_without_a_value_is_blank_and_named_with_why():
    failed = [{"ablation": "zero 0.1", "reason": "the metric is not finite"}]
    made = heads((0.5, np.nan, 0.25, 1.0), summary={"failed": failed})
    page = result_page(made)
    [heatmap, bars, scatter] = traces(page)
    assert heatmap[0]["z"] == [[0.5, None], [0.25, 1.0]]
    assert 0.0 not in bars[0]["x"]
    assert len(scatter[0]["x"]) == 3
    text = Elements(without_library(page)).text
    assert "Failed: L0H1: the metric is not finite." in text
    assert "Blank, without a finite value: L0H1 (1 of 4 heads)." in text
    assert "Not drawn, without a value: L0H1 (1 of 4)." in text


def test_a_few_heads_of_a_large_model_are_bars_without_an_empty_map():
    made = heads()
    few = replace(made, table=made.table.assign(layer=[17, 18, 29, 23], head=[3, 6, 8, 2]))
    [bars, _] = traces(result_page(few))
    assert bars[0]["type"] == "bar"


def test_three_methods_are_three_bars_for_each_head():
    [_, bars, _] = traces(result_page(compared()))
    assert [trace["name"] for trace in bars] == ["Zero", "Mean", "Resample"]
    assert [trace["x"][0] for trace in bars] == [-2.0, -1.0, 0.0]
    assert len({y for trace in bars for y in trace["y"]}) == 12


def test_the_page_of_kv_heads_says_so_on_axis_cells_and_labels():
    page = result_page(heads(params=ZERO | {"site": "v"}))
    [(_, data, layout), (_, _, bars), _] = figures_of(page)
    assert layout["xaxis"]["title"]["text"] == "KV head"
    assert "KV head %{customdata[1]}" in data[0]["hovertemplate"]
    assert bars["yaxis"]["ticktext"][0] == "L0KV1"
    assert "L0H1" not in Elements(without_library(page)).text


def test_a_pair_stands_on_both_sides_and_is_blank_where_it_was_not_measured():
    [(_, [trace], layout), _] = figures_of(result_page(pairs()))
    assert layout["yaxis"]["ticktext"] == ["L0H0", "L0H1", "L1H2"]
    assert trace["z"] == [[None, 0.5, -1.0], [0.5, None, None], [-1.0, None, None]]
    assert layout["coloraxis"]["cmin"] == -1.0
    assert layout["coloraxis"]["cmax"] == 1.0
    assert "Blank: 1 of 3 pairs have no value." in Elements(result_page(pairs())).text


def test_a_curve_has_a_gap_where_a_step_failed_and_a_band_of_one_error():
    [(_, [band, line], layout)] = figures_of(result_page(cumulative()))
    # A rise that is cut off at its foot looks larger than it is.
    assert layout["yaxis"]["rangemode"] == "tozero"
    assert line["x"] == [1.0, 2.0, 3.0]
    assert line["y"] == [0.5, None, 2.0]
    assert line["connectgaps"] is False
    assert band["x"] == [1.0, 3.0, 3.0, 1.0]
    assert band["y"] == pytest.approx([0.55, 2.2, 1.8, 0.45])
    assert "no value with 2 removed" in Elements(result_page(cumulative())).text


def test_pruning_draws_each_order_over_the_share_that_is_removed():
    [(_, data, layout)] = figures_of(result_page(prune()))
    lines = {trace["name"]: trace for trace in data if trace["mode"] == "lines+markers"}
    assert list(lines) == ["oracle", "importance", "importance-again", "random", "magnitude"]
    assert lines["random"]["x"] == [0.0, 0.5, 1.0]
    assert lines["random"]["y"] == [0.75, 1.75, 2.75]
    assert layout["xaxis"]["tickformat"] == ".0%"
    assert len({trace["line"]["color"] for trace in lines.values()}) == 5
    text = Elements(without_library(result_page(prune()))).text
    assert "oracle 50% 2 random 0% 0" in text
    assert "oracle: L0H1 L1H0 L0H0 L1H1 random: L1H0 L0H1 L0H0 L1H1" in text


def test_the_best_head_to_keep_is_drawn_with_its_held_out_estimate():
    [_, _, best] = traces(result_page(kept()))
    assert best[0]["x"] == [0.125, 1.5]
    assert best[0]["error_x"]["array"] == [0.0625, None]
    assert best[0]["customdata"] == [["L0H1"], ["L1H0"]]


def test_importance_is_drawn_against_the_true_ablation_of_the_sample():
    [heatmap, _, size, signed] = traces(result_page(importance()))
    assert heatmap[0]["z"] == [[0.5, 2.0], [0.25, 1.0]]
    assert (size[0]["x"], size[0]["y"]) == ([3.0, 1.5], [2.0, 1.0])
    assert (signed[0]["x"], signed[0]["y"]) == ([-3.0, 1.5], [-2.0, 1.0])


def test_a_normalised_score_lends_its_unit_to_no_other_number():
    made = importance()
    table = made.table.assign(importance_normalized=made.table["importance"] / 2)
    summary = made.summary | {"loss_clean": 2.5}
    own = replace(
        made,
        table=table,
        score="importance_normalized",
        unit="share of the norm",
        summary=summary,
    )
    [_, (_, _, bars), (_, _, size), _] = figures_of(result_page(own))
    assert bars["xaxis"]["title"]["text"] == "importance, share of the norm"
    assert size["yaxis"]["title"]["text"] == "importance, nats"
    text = Elements(without_library(result_page(own))).text
    assert "Loss of the unablated model: 2.5 nats." in text
    assert "tiny, unit: nats, n = 4, seed 7 Importance against" not in text


def test_heads_that_are_pruned_are_blank_and_said_to_be_pruned():
    """Layers 1 and 3, the last, are wholly pruned; L0H1 too, and L2H1 was not measured."""
    table = {"layer": [0, 2], "head": [0, 0], **column("ablation", [0.5, -1.0])}
    gone = ["0.1", "1.0", "1.1", "3.0", "3.1"]
    made = result(HeadScores, "ablation", "ablation", table, params=ZERO | {"pruned_heads": gone})
    page = result_page(made)
    [(_, [heatmap], layout), *_] = figures_of(page)
    assert heatmap["z"] == [[0.5, None], [None, None], [-1.0, None], [None, None]]
    assert layout["yaxis"]["ticktext"] == ["0", "1", "2", "3"]
    text = Elements(without_library(page)).text
    named = "L0H1, L1H0, L1H1, L3H0, L3H1 (5 of 8 heads)"
    assert f"Blank, pruned, the model has no such head: {named}." in text
    assert "Blank, not measured: L2H1 (1 of 8 heads)." in text


def test_a_kv_head_without_a_value_is_named_as_one():
    page = result_page(heads((0.5, np.nan, 0.25, 1.0), params=ZERO | {"site": "v"}))
    text = Elements(without_library(page)).text
    assert "Blank, without a finite value: L0KV1 (1 of 4 heads)." in text
    assert "L0H1" not in text


def test_draws_at_random_share_a_line_without_a_band_and_one_name():
    made = prune()
    draws = made.table["order"].replace(
        {"importance": "random-1", "random": "random-2", "magnitude": "random-3"}
    )
    [(_, data, _)] = figures_of(result_page(replace(made, table=made.table.assign(order=draws))))
    lines = [trace for trace in data if trace["mode"] == "lines+markers"]
    shown = [trace["name"] for trace in lines if trace["showlegend"]]
    assert shown == ["oracle", "random, 3 draws", "importance-again"]
    assert len(lines) == 5
    assert len({trace["line"]["color"] for trace in lines}) == 3
    assert len([trace for trace in data if trace["mode"] == "lines"]) == 2
    hovers = [t["hovertemplate"].split("<br>")[0] for t in lines if "draws" in t["name"]]
    assert hovers == ["random-1", "random-2", "random-3"]


@pytest.mark.parametrize(
    ("metric", "made_up"),
    [("loss", "above the dotted line later layers"), ("accuracy", "below the dotted line later")],
)
def test_the_side_of_self_repair_is_that_of_the_metric(metric, made_up):
    page = result_page(heads(params=ZERO | {"metric": metric}))
    assert f"a point lies {made_up}" in Elements(without_library(page)).text


@pytest.mark.parametrize("make", [heads, layers, pairs, kept, cumulative, prune])
def test_each_caption_says_how_heads_are_taken_away(make):
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", result_page(make()), re.DOTALL)
    assert captions
    for caption in captions:
        assert "Zero: each head&#39;s output z replaced by 0." in caption


def test_results_of_one_kind_are_told_apart_in_their_headings(tmp_path):
    again = replace(importance(), params=ZERO | {"normalize": True})
    made = [heads(), compared(), importance(), again]
    page = report(made, tmp_path / "all.html").read_text(encoding="utf-8")
    named = re.findall(r'<a href="#result-\d">(.*?)</a>', page)
    ranked = ["Importance", "Importance, normalized"]
    assert named == ["Ablation, zero", "Ablation, three methods", *ranked]
    assert "<h1>Ablations of tiny</h1>" in page


def test_heads_of_the_sample_stand_without_quotes():
    text = Elements(without_library(result_page(importance()))).text
    assert "L0H1 2 −2 −3" in text
    assert "'L0H1'" not in text


# Figures


WORDS = {"title": "t", "subtitle": "s", "reading": "r."}


def test_labels_that_read_as_one_number_stay_apart():
    figure = strict(effect_bars(["1.1", "1.10"], [Series("a", [1.0, 2.0])], axis="x", **WORDS))
    [trace], axis = figure["data"], figure["layout"]["yaxis"]
    assert len(set(trace["y"])) == 2
    assert axis["ticktext"] == ["1.1", "1.10"]


def test_the_diagonal_is_where_both_effects_are_equal():
    made = against(
        ["a", "b"],
        Series("total", [1.0, -3.0]),
        Series("direct", [2.0, 0.0]),
        axes=("x", "y"),
        diagonal=True,
        **WORDS,
    )
    [line] = strict(made)["layout"]["shapes"]
    assert (line["x0"], line["x1"]) == (line["y0"], line["y1"])
    assert line["x0"] < -3.0 < 2.0 < line["x1"]
    assert strict(made)["layout"]["xaxis"]["range"] == strict(made)["layout"]["yaxis"]["range"]


def test_points_that_coincide_have_one_name():
    same = Series("total", [1.0] * 5)
    made = against(list("abcde"), same, same, axes=("x", "y"), diagonal=False, **WORDS)
    assert len(strict(made)["layout"]["annotations"]) == 1


def test_no_name_or_label_is_markup_to_plotly():
    own = Series(NASTY, [1.0, 2.0])
    labels = [NASTY, "b"]
    for figure in (
        effect_bars(labels, [own, own], axis=NASTY, **WORDS),
        against(labels, own, own, axes=(NASTY, NASTY), diagonal=True, **WORDS),
        pair_matrix(labels, {(0, 1): 1.0}, column=NASTY, **WORDS),
        removal_curves([(own, [0, 1]), (own, [0, 1])], axes=("x", "y"), shares=False, **WORDS),
    ):
        for part in ("<b>", "$x$", "%{z}"):
            assert part not in str(strict(figure)).replace(" %{z:", "")


def test_a_figure_of_nothing_is_refused():
    nothing = Series("a", [])
    for draw in (
        lambda: effect_bars([], [nothing], axis="x", **WORDS),
        lambda: against([], nothing, nothing, axes=("x", "y"), diagonal=True, **WORDS),
        lambda: pair_matrix([], {}, column="interaction", **WORDS),
        lambda: removal_curves([(nothing, [])], axes=("x", "y"), shares=False, **WORDS),
    ):
        with pytest.raises(AnalysisError, match="nothing to draw"):
            draw()
