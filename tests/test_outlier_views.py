"""What pages, figures and terminals show of massive activations, their sinks and their changes."""

import dataclasses
import json
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from tiny_models import some_tokens, tiny

import interp
from interp.activation_tables import OutlierEffects, OutlierSinks
from interp.errors import AnalysisError
from interp.models.pruning import prune_heads
from interp.views.figures import style
from interp.views.figures.outliers import change_labels, effect_bars, sink_link, sinks_after
from interp.views.findings import findings
from interp.views.pages.outlier_links import outlier_effect_findings, outlier_sink_findings
from interp.views.pages.scores import read_scores
from interp.views.report import report, result_page
from interp.views.terminal.outliers import print_outlier_effects, print_outlier_sinks

SPIKE = 11


def spiked():
    model = tiny("gqa", n_layers=3)
    with torch.no_grad():
        model.embed.weight[SPIKE, 6] = 5000.0
    return model


def spiked_tokens():
    tokens = some_tokens(3, 14, d_vocab=10)
    tokens[:, 0] = SPIKE
    return tokens


@pytest.fixture(scope="module")
def sinks():
    return interp.outlier_sinks(spiked(), spiked_tokens())


@pytest.fixture(scope="module")
def effects():
    return interp.outlier_effects(spiked(), spiked_tokens(), draws=2)


def link_of(result, **given):
    return sink_link(
        result.table,
        result.layers,
        **{"title": "t", "subtitle": "s", "main_layer": 1, "subject": "m", **given},
    )


def trace(figure, name):
    (found,) = [own for own in figure.data if own.name == name]
    return found


# --- the link -------------------------------------------------------------------------------------


def test_every_head_is_in_the_column_of_its_layer_and_in_its_own_row(sinks):
    figure = link_of(sinks)
    (map_of_heads,) = [own for own in figure.data if own.type == "heatmap"]
    assert np.shape(map_of_heads.z) == (4, 3)
    for row in sinks.table.itertuples():
        assert map_of_heads.z[row.head][row.layer] == pytest.approx(row.outlier_sinks, rel=1e-5)
        assert list(map_of_heads.customdata[row.head][row.layer]) == [row.layer, row.head]
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (0, 1)


def test_all_panels_share_the_axis_of_layers_and_hold_the_tables_numbers(sinks):
    figure = link_of(sinks)
    assert {own.xaxis for own in figure.data} <= {None, "x"}
    assert figure.layout.xaxis.anchor == "y4"
    for name, column in (
        ("found tokens", "magnitude"),
        ("others", "magnitude_others"),
        ("mean over heads", "mass"),
        ("key length, found over others", "key_norm_ratio"),
    ):
        assert list(trace(figure, name).y) == pytest.approx(list(sinks.layers[column]), rel=1e-5)
    assert figure.layout.yaxis.type == "log"
    domains = [figure.layout[f"yaxis{n}"].domain for n in ("", 2, 3, 4)]
    assert domains[3][0] == pytest.approx(0, abs=1e-9)
    for above, below in pairwise(domains):
        assert below[1] < above[0]


def test_the_main_layer_is_marked_in_every_panel_and_none_where_nobody_reads_it(sinks):
    edges = [shape for shape in link_of(sinks).layout.shapes if shape.x0 == 0.5]
    assert len(edges) == 4
    after = link_of(sinks, main_layer=3).layout.shapes
    assert not [shape for shape in after if shape.x0 == 2.5]


def test_pruned_heads_are_blank_and_named():
    model = prune_heads(spiked(), [(1, 0), (1, 1), (1, 2), (1, 3)])
    figure = link_of(
        interp.outlier_sinks(model, spiked_tokens()), pruned=[(1, n) for n in range(4)]
    )
    (map_of_heads,) = [own for own in figure.data if own.type == "heatmap"]
    assert [row[1] for row in map_of_heads.z] == [None] * 4
    assert "pruned" in " ".join(figure.layout.meta["notes"])
    assert trace(figure, "mean over heads").y[1] is None


def test_what_a_logarithm_or_a_ratio_has_no_value_for_is_a_gap(sinks):
    layers = sinks.layers.assign(magnitude_others=[0.0, 1.0, 2.0], key_norm_ratio=np.inf)
    figure = sink_link(sinks.table, layers, title="", subtitle="", main_layer=0)
    assert list(trace(figure, "others").y) == [None, 1.0, 2.0]
    assert list(trace(figure, "key length, found over others").y) == [None] * 3
    json.dumps(figure.to_plotly_json()["layout"], default=list, allow_nan=False)
    with pytest.raises(AnalysisError, match="is empty"):
        sink_link(sinks.table, layers[:0], title="", subtitle="", main_layer=0)


# --- the changes ----------------------------------------------------------------------------------


def made_up():
    """A table with a change that changed nothing, draws, and a loss that is not finite."""
    rows = [
        ("zero", 0, 10, 10, 12.0, 0.3, ""),
        ("mean", 0, 10, 0, 0.0, 0.0, "no cells changed"),
        ("move", 0, 10, 10, 1.2, 0.1, "dimension 5 to 7"),
        ("move", 1, 10, 9, 7.5, 0.1, "dimension 5 to <b>"),
        ("flip", 0, 10, 10, np.nan, np.nan, ""),
        ("random-cells", 0, 10, 10, -0.001, 0.001, ""),
    ]
    names = ["change", "draw", "cells", "changed", "loss_change", "loss_change_se", "note"]
    return pd.DataFrame(rows, columns=names)


def test_a_bar_has_its_value_and_the_cells_that_really_changed_beside_it():
    figure = effect_bars(made_up(), title="t", subtitle="s", unchanged="unchanged: 3.1")
    (bars,) = figure.data
    assert list(bars.x) == [12.0, 0.0, 1.2, 7.5, None, -0.001]
    assert list(bars.error_x.array)[:3] == [0.3, 0.0, 0.1]
    written = {(note.y, note.text) for note in figure.layout.annotations}
    assert (0, "10 of 10") in written
    assert (3, "9 of 10") in written
    assert (1, "none of 10") in written
    assert (1, "no cells changed") in written
    assert sum(text == "no cells changed" for _, text in written) == 1
    assert bars.marker.color[1] == style.INK
    assert bars.marker.color[0] == style.COOL[0]
    assert bars.marker.color[5] == style.WARM[0]
    assert list(figure.layout.yaxis.ticktext) == change_labels(made_up())
    assert figure.layout.meta["notes"] == ["Blank, without a finite loss: flip."]
    assert bars.customdata[3][1] == "dimension 5 to &lt;b&gt;"


def test_draws_are_numbered_from_1_and_single_changes_are_not():
    assert change_labels(made_up()) == [
        "zero",
        "mean",
        "move 1",
        "move 2",
        "flip",
        "random-cells",
    ]


def test_the_sinks_after_each_change_are_means_over_the_heads_of_a_layer(effects):
    figure = sinks_after(effects.heads, effects.table, title="t", subtitle="s")
    (whole,) = figure.data
    assert np.shape(whole.z) == (1 + 5 + 3 * 2, 3)
    labels = list(figure.layout.yaxis.ticktext)
    assert labels[0] == "unchanged"
    assert labels[-1] == "random-cells 2"
    own = effects.heads
    for label, change, draw in (("unchanged", "none", 0), ("move 2", "move", 1)):
        rows = own[(own["change"] == change) & (own["draw"] == draw)]
        expected = rows.groupby("layer")["sinks"].mean().tolist()
        assert list(whole.z[labels.index(label)]) == pytest.approx(expected, rel=1e-5)


# --- sentences ------------------------------------------------------------------------------------


def test_findings_of_the_link_name_the_tokens_the_layer_and_the_mass(sinks):
    first, mass, norms = outlier_sink_findings(sinks)
    assert first == (
        "outlier sinks: 3 tokens in 3 sequences hold massive activations, 3 of them '11' at "
        "position 0"
    )
    assert mass.startswith("from layer 0 on, where most of them are massive, heads give 0.")
    assert "of 12 heads there lie more than 0.3 above an even head" in mass
    assert "before" not in mass  # no layer is
    ratio = sinks.table["key_norm_ratio"].median()
    assert f"their keys are {ratio:.2g} times as long" in norms


def test_findings_never_call_it_evidence_where_no_cells_changed(effects):
    lines = outlier_effect_findings(effects)
    assert lines[0].startswith("outlier effects: 3 tokens in 3 sequences hold massive activations")
    (costs,) = [line for line in lines if line.startswith("the loss changes, in nats")]
    assert "zero" in costs
    assert "mean" not in costs
    assert "resample" not in costs
    assert "random-cells" not in costs
    (nothing,) = [line for line in lines if line.startswith("no cells changed")]
    assert nothing.startswith("no cells changed: mean and resample, because")
    assert "no evidence" in nothing


def test_findings_give_the_range_of_draws_and_the_error_of_a_single_change(effects):
    result = dataclasses.replace(
        effects, table=made_up().assign(loss=3.0, n=3, outlier_mass=0.1, sink_heads=2)
    )
    lines = outlier_effect_findings(result)
    told = "the loss changes, in nats a token: zero +12.00 ± 0.30, move +1.2 to +7.5 (2 draws)"
    assert told in lines
    control = "−0.0010 ± 0.0010 (not clearly different from 0)"
    assert f"as many other cells set to 0, the control: {control}" in lines


def test_where_only_the_last_stream_is_massive_no_head_is_said_to_read_it(sinks):
    summary = {**sinks.summary, "main_layer": 3, "heads_after": 0, "heads_before": 12}
    lines = outlier_sink_findings(dataclasses.replace(sinks, summary=summary))
    assert lines[1] == ("most of them are massive after the last block alone, where no head reads")


# --- pages and terminals --------------------------------------------------------------------------


def test_pages_have_the_figures_the_rows_and_the_findings(sinks, effects, tmp_path):
    for result, kind, told in (
        (sinks, OutlierSinks, ("Massive activations and the attention they draw", "key norm")),
        (effects, OutlierEffects, ("no cells changed", "Attention on the first token after each")),
    ):
        record = result.save(tmp_path)[1]
        again = read_scores(record)
        assert isinstance(again, kind)
        page = result_page(again)
        assert page == result_page(result)
        for text in told:
            assert text in page
    page = report([sinks, effects], tmp_path / "both.html").read_text("utf-8")
    assert "Outlier sinks" in page
    assert "Outlier effects" in page
    assert findings([sinks])[0].startswith("Outlier sinks: 3 tokens")


def test_a_result_shows_its_figure_and_a_column_of_the_link_its_map(sinks, effects):
    assert interp.figure(sinks).layout.title.text == (
        "Massive activations and the attention they draw"
    )
    assert interp.figure(sinks, column="value_norm_ratio").data[0].type == "heatmap"
    assert interp.figure(effects).data[0].type == "bar"
    with pytest.raises(AnalysisError, match="a column is chosen of a table of heads"):
        interp.figure(effects, column="loss")


def test_tables_without_rows_are_told_in_words(sinks, effects):
    empty = dataclasses.replace(sinks, table=sinks.table[:0])
    assert "No heads to show: the table has no rows." in result_page(empty)
    none = dataclasses.replace(effects, table=effects.table[:0])
    assert "No change to show: the table has no rows." in result_page(none)


def test_a_token_is_never_markup(sinks):
    records = [{**record, "token": "</script><b>"} for record in sinks.summary["tokens"]]
    result = dataclasses.replace(sinks, summary={**sinks.summary, "tokens": records})
    assert "</script><b>" not in result_page(result)


def test_terminals_print_every_layer_and_every_change(sinks, effects, capsys):
    print_outlier_sinks(sinks)
    printed = capsys.readouterr().out
    assert "massive activations and sinks of" in printed
    assert "5,000" in printed
    assert "mass: the attention they draw" in printed
    print_outlier_effects(effects)
    printed = capsys.readouterr().out
    assert "changed outliers of" in printed
    assert "in nats a token" in printed
    assert "0 of 12" in printed or "0 of 9" in printed
    for label in change_labels(effects.table):
        assert label in printed


def test_a_change_without_a_standard_error_is_printed_without_one(effects, capsys):
    alone = dataclasses.replace(effects, table=effects.table.assign(loss_change_se=np.nan))
    print_outlier_effects(alone)
    printed = capsys.readouterr().out
    assert "nan" not in printed
    value = effects.table["loss_change"].iloc[0]
    assert f"{value:+.4f}".replace("-", "−") in printed
