"""Figures of pairs of heads and of outliers, with cells planted where they are looked for."""

import math

import numpy as np
import pandas as pd
import pytest
from pages import NASTY, strict

from interp.errors import AnalysisError
from interp.views.figures.matrices import composition_matrix, outlier_landscape


def pair(layer_a, head_a, layer_b, head_b, value):
    return {
        "layer_a": layer_a,
        "head_a": head_a,
        "layer_b": layer_b,
        "head_b": head_b,
        "k_composition": value,
    }


def composed(*rows, **more):
    return composition_matrix(pd.DataFrame(list(rows)), "k_composition", **more)


def test_the_earlier_head_is_down_and_the_later_across():
    figure = strict(composed(pair(0, 3, 1, 0, 0.75), pair(0, 10, 1, 1, 0.25)))
    [trace], layout = figure["data"], figure["layout"]
    assert layout["yaxis"]["ticktext"] == ["L0H3", "L0H10"]
    assert layout["xaxis"]["ticktext"] == ["L1H0", "L1H1"]
    assert trace["z"] == [[0.75, None], [None, 0.25]]
    assert trace["customdata"][1][1] == ["L0H10", "L1H1"]
    assert layout["yaxis"]["autorange"] == "reversed"
    assert layout["yaxis"]["title"]["text"] == "earlier head"
    assert layout["xaxis"]["title"]["text"] == "later head"


def test_pairs_that_cannot_be_are_told_apart_from_those_without_a_value():
    figure = composed(
        pair(0, 0, 1, 0, 0.5),
        pair(0, 0, 2, 0, math.nan),
        pair(1, 1, 2, 0, 0.5),
        pair(1, 1, 3, 0, 1),
    )
    assert "Only a head of a later layer can read an earlier one" in figure.layout.meta["caption"]
    assert figure.layout.meta["notes"] == [
        "Blank, not measured: L0H0–L3H0 (1 of 5 pairs).",
        "Blank, without a finite value: L0H0–L2H0 (1 of 5 pairs).",
    ]


def test_every_pair_of_a_whole_model_is_in_its_own_cell():
    """The value of a pair says which it is, and each is looked up by its labels."""
    heads = [(layer, head) for layer in range(4) for head in range(5)]
    rows = [
        pair(*a, *b, 1000 * a[0] + 100 * a[1] + 10 * b[0] + b[1])
        for a in heads
        for b in heads
        if b[0] > a[0]
    ]
    figure = composed(*rows)
    [trace] = figure.data
    seen = 0
    for row, labels in zip(trace.z, trace.customdata, strict=True):
        for value, (earlier, later) in zip(row, labels, strict=True):
            a, b = ([int(part) for part in name[1:].split("H")] for name in (earlier, later))
            expected = 1000 * a[0] + 100 * a[1] + 10 * b[0] + b[1] if b[0] > a[0] else None
            assert value == expected, (earlier, later)
            seen += value is not None
    assert seen == len(rows) == 150


def test_many_heads_have_ticks_by_layer_and_lines_between_layers():
    heads = [(layer, head) for layer in range(3) for head in range(8)]
    figure = composed(*(pair(*a, *b, 0.5) for a in heads for b in heads if b[0] > a[0]))
    axis = figure.layout.xaxis
    assert list(axis.ticktext) == ["L1", "L2"]
    assert list(axis.tickvals) == [3.5, 11.5]
    assert [shape.x0 for shape in figure.layout.shapes if shape.x0 == shape.x1] == [7.5]


@pytest.mark.parametrize("diverging", [False, True])
def test_equal_values_have_a_range_of_colours(diverging):
    layout = composed(pair(0, 0, 1, 0, -0.5), pair(0, 1, 1, 0, -0.5), diverging=diverging).layout
    low, high = layout.coloraxis.cmin, layout.coloraxis.cmax
    assert math.isfinite(low)
    assert low < high
    assert not diverging or low == -high


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([pair(1, 0, 1, 1, 0.5)], "L1H0 then L1H1: the later head"),
        ([pair(2, 0, 1, 1, 0.5)], "L2H0 then L1H1: the later head"),
        ([pair(0, 0, 1, 1, 0.5)] * 2, "L0H0 then L1H1 has several"),
    ],
)
def test_pairs_in_the_wrong_order_or_twice_are_refused(rows, message):
    with pytest.raises(AnalysisError, match=message):
        composed(*rows)


def test_a_table_without_pairs_is_refused():
    with pytest.raises(AnalysisError, match="no column 'layer_a'"):
        composition_matrix(pd.DataFrame({"layer": [0]}), "k_composition")
    with pytest.raises(AnalysisError, match="nothing to draw"):
        composition_matrix(pd.DataFrame([pair(0, 0, 1, 0, 1)])[:0], "k_composition")


# Outliers


def planted(low=1.0, high=100.0, tokens=True):
    """3 layers, 4 positions, dimensions 7 and 300: one large value, at L1, position 2, in 300."""
    rows = [
        {
            "layer": layer,
            "position": position,
            "dimension": dimension,
            "magnitude": high if (layer, position, dimension) == (1, 2, 300) else low,
        }
        | ({"token": ("<s>", "a", NASTY, "a")[position]} if tokens else {})
        for layer in range(3)
        for position in range(4)
        for dimension in (7, 300)
    ]
    return pd.DataFrame(rows)


def test_a_planted_outlier_is_in_its_cell_of_both_maps_and_nowhere_else():
    figure = strict(outlier_landscape(planted()))
    by_position, by_dimension = figure["data"]
    assert by_position["z"] == [[1, 1, 1, 1], [1, 1, 100, 1], [1, 1, 1, 1]]
    assert by_dimension["z"] == [[1, 1], [1, 100], [1, 1]]
    assert figure["layout"]["xaxis2"]["ticktext"] == ["7", "300"]
    assert by_dimension["x"] == [0, 1]
    for axis in ("yaxis", "yaxis2"):
        assert figure["layout"][axis]["autorange"] == "reversed"
    assert by_position["customdata"][1][2][:3] == [100, 2, 300]
    assert by_dimension["customdata"][1][1][:3] == [100, 2, 300]
    assert "&lt;b&gt;" in by_position["customdata"][1][2][3]
    assert '<b>"' not in str(figure)


def test_each_cell_is_the_largest_of_its_values():
    random = np.random.default_rng(0)
    table = planted().assign(magnitude=random.random(24))
    figure = outlier_landscape(table)
    for trace, axis, places in zip(
        figure.data, ("position", "dimension"), ((0, 1, 2, 3), (7, 300)), strict=True
    ):
        for layer in range(3):
            for column, place in enumerate(places):
                mine = [
                    row["magnitude"]
                    for row in table.to_dict("records")
                    if row["layer"] == layer and row[axis] == place
                ]
                assert trace.z[layer][column] == pytest.approx(max(mine), rel=1e-5)


def test_colours_are_logarithmic_only_above_a_span_of_1000_and_say_so():
    plain = outlier_landscape(planted(high=1000.0))
    assert (plain.layout.coloraxis.cmin, plain.layout.coloraxis.cmax) == (0, 1000)
    assert "powers of ten" not in plain.layout.meta["caption"]
    wide = outlier_landscape(planted(low=0.1, high=1000.0))
    assert wide.data[0].z[1][2] == pytest.approx(3)
    assert wide.data[0].z[0][0] == pytest.approx(-1)
    assert wide.data[0].customdata[1][2][0] == 1000
    assert (wide.layout.coloraxis.cmin, wide.layout.coloraxis.cmax) == (-1, 3)
    assert list(wide.layout.coloraxis.colorbar.ticktext) == ["0.1", "1", "10", "100", "1k"]
    assert "powers of ten" in wide.layout.meta["caption"]


def test_cells_without_a_value_are_blank_and_counted():
    table = planted(tokens=False)
    table.loc[(table["layer"] == 0) & (table["position"] == 3), "magnitude"] = math.nan
    figure = outlier_landscape(table)
    assert strict(figure)["data"][0]["z"][0][3] is None
    assert figure.layout.meta["notes"] == [
        "Blank, without a value: 1 of 12 cells by position.",
        "Left out, not finite: 2 of 24 values.",
    ]


def test_zeros_have_no_place_on_a_logarithmic_scale():
    table = planted(low=0.01, high=1000.0)
    table.loc[table["layer"] == 0, "magnitude"] = 0.0
    figure = outlier_landscape(table)
    assert set(figure.data[0].z[0]) == {None}
    assert "0 has no place on a logarithmic scale: 8 of 24 values" in " ".join(
        figure.layout.meta["notes"]
    )


@pytest.mark.parametrize("value", [0.0, 5.0])
def test_equal_magnitudes_have_a_range_of_colours(value):
    layout = outlier_landscape(planted(low=value, high=value)).layout
    assert layout.coloraxis.cmin < layout.coloraxis.cmax


def test_a_size_below_0_is_refused():
    with pytest.raises(AnalysisError, match="magnitude -2: a size is 0 or above"):
        outlier_landscape(planted(low=-2.0))
    with pytest.raises(AnalysisError, match="no column 'layer'"):
        outlier_landscape(pd.DataFrame({"x": [1]}))
