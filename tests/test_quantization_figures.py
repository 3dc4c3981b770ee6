"""Figures of quantization: every mark stands where its table says."""

import itertools
import math
import re

import numpy as np
import pandas as pd
import pytest
from quantization_tables import result, row, several_bits, w4a16, w8a8

from interp.errors import AnalysisError
from interp.views.figures.quantization import errors_by_layer, rounding_costs


def costs(rows, **more):
    given = {"title": "t", "subtitle": "s", "unit": "nats", "reading": "r"} | more
    return rounding_costs(pd.DataFrame(rows), **given)


def read_back(value, knee):
    """The value at a place of the axis that is linear within the knee."""
    size = abs(value)
    return math.copysign(knee * (size if size <= 1 else 10 ** (size - 1)), value)


def test_costs_stand_where_the_axis_says():
    """Written backwards: each drawn place is turned into a value by the ticks' own knee."""
    rows = w8a8()
    drawn = costs(rows)
    knee = float(re.search(r"linear within ([\d.e-]+) nats", drawn.layout.meta["caption"])[1])
    assert knee == 0.01  # 0.019 is the least clear cost
    ticks = dict(zip(drawn.layout.xaxis.ticktext, drawn.layout.xaxis.tickvals, strict=True))
    for text, at in ticks.items():
        assert read_back(at, knee) == pytest.approx(float(text), rel=1e-5)
    assert ticks["0"] == 0
    assert [trace.name for trace in drawn.data] == ["sinks rounded", "sinks kept"]
    for trace, sinks in zip(drawn.data, ("rounded", "kept"), strict=True):
        own = [one for one in rows if one["sinks"] == sinks]
        plus, minus = trace.error_x.array, trace.error_x.arrayminus
        for x, high, low, one in zip(trace.x, plus, minus, own, strict=True):
            change, error = one["loss_change"], one["loss_change_se"]
            assert read_back(x, knee) == pytest.approx(change, rel=1e-4)
            assert read_back(x + high, knee) == pytest.approx(change + error, rel=1e-3)
            assert read_back(x - low, knee) == pytest.approx(change - error, rel=1e-3)


def test_costs_close_to_each_other_stand_on_a_linear_axis():
    drawn = costs(w4a16())
    assert list(drawn.data[0].x) == [0.30, 0.15]
    assert drawn.layout.xaxis.tickvals is None
    assert "powers of ten" not in drawn.layout.meta["caption"]


def test_an_unclear_cost_does_not_stretch_the_axis():
    rows = [
        row("round-to-nearest", "w8a8", "channel", "tensor", "rounded", 0.5, 0.02),
        row("llm.int8", "w8a8", "channel", "vector", "rounded", 1e-7, 0.01),
    ]
    assert costs(rows).layout.xaxis.tickvals is None


def test_the_line_of_no_change_passes_every_row_and_strikes_no_heading_through():
    drawn = costs(several_bits().table)
    zeros = [(line.y0, line.y1) for line in drawn.layout.shapes if line.x0 == line.x1 == 0]
    marks = {y for trace in drawn.data for y in trace.y}
    assert all(sum(top < y < bottom for top, bottom in zeros) == 1 for y in marks)
    # A heading's text stands on its place, and is less than 22 high.
    headings = [note.y for note in drawn.layout.annotations]
    assert len(headings) == len(zeros) > 2
    assert not any(top < y and y - 22 < bottom for y in headings for top, bottom in zeros)


def test_each_row_stands_under_its_scheme():
    drawn = costs(several_bits().table)
    headings = {note.text: note.y for note in drawn.layout.annotations}
    assert list(headings) == [
        "<b>round-to-nearest, weights per channel</b>",
        "<b>LLM.int8, weights per channel</b>",
        "<b>SmoothQuant, weights per channel</b>",
        "<b>round-to-nearest, weights per group</b>",
        "<b>AWQ, weights per group</b>",
    ]
    rows = dict(zip(drawn.layout.yaxis.tickvals, drawn.layout.yaxis.ticktext, strict=True))
    starts = [*headings.values(), math.inf]
    under = [
        [text for at, text in rows.items() if start < at < end]
        for start, end in itertools.pairwise(starts)
    ]
    assert under == [
        ["W8A8 per tensor", "W8A8 per token", "W4A4 per tensor", "W4A4 per token"],
        ["W8A8 vector-wise"],
        ["W8A8 per tensor", "W8A8 per token", "W4A4 per tensor"],
        ["W4A16"],
        ["W4A16"],
    ]
    low, high = drawn.layout.yaxis.range[1], drawn.layout.yaxis.range[0]
    assert all(low < at < high for at in rows)


def test_each_mark_stands_in_its_own_row():
    """On either side of the middle, nearer to it than to any other row's."""
    drawn = costs(several_bits().table)
    rows = dict(zip(drawn.layout.yaxis.tickvals, drawn.layout.yaxis.ticktext, strict=True))
    for trace in drawn.data:
        for at, told in zip(trace.y, trace.customdata, strict=True):
            nearest = min(rows, key=lambda row: abs(row - at))
            assert rows[nearest] == told[1]
            assert abs(nearest - at) < 8
    one, other = (set(trace.y) for trace in drawn.data[:2])
    assert not one & other


def test_what_has_no_value_is_named_and_not_drawn():
    drawn = costs(several_bits().table)
    assert drawn.layout.meta["notes"] == [
        "Not drawn, without a value: SmoothQuant W4A4 per tensor, sinks rounded."
    ]
    assert sum(len(trace.x) for trace in drawn.data) == len(several_bits().table) - 1


def test_the_axis_holds_every_whisker():
    for rows in (w8a8(), several_bits().table, w4a16()):
        drawn = costs(rows)
        low, high = drawn.layout.xaxis.range
        for trace in drawn.data:
            spread = trace.error_x
            for x, more, less in zip(trace.x, spread.array, spread.arrayminus, strict=True):
                assert low < x - less
                assert x + more < high


def errors(layers, **more):
    return errors_by_layer(layers, **({"title": "t", "subtitle": "s", "reading": "r"} | more))


def test_each_line_has_the_errors_of_its_row_by_layer():
    drawn = errors(several_bits().layers.sample(frac=1, random_state=0))
    panels = [note.text for note in drawn.layout.annotations]
    assert len(set(panels)) == len(panels) == 6
    layers = several_bits().layers
    for trace in drawn.data:
        assert list(trace.x) == list(range(12))
        assert any(
            np.allclose(own["error"], np.array(trace.y, dtype=float), rtol=1e-5, equal_nan=True)
            for _, own in layers.groupby(["scheme", "bits", "activation_scales", "sinks"])
        )
    assert len(drawn.data) == len(several_bits().table) - 1
    assert "Blank, without a value: 12 of 204 errors." in drawn.layout.meta["notes"]
    named = [trace.name for trace in drawn.data if trace.showlegend]
    assert sorted(named) == sorted(set(named))


def test_panels_share_one_axis_of_errors_and_do_not_overlap():
    drawn = errors(several_bits().layers)
    axes = [drawn.layout[f"yaxis{number or ''}"] for number in (0, 2, 3, 4, 5, 6)]
    assert len({tuple(axis.range) for axis in axes}) == 1
    ends = [end for axis in axes for end in reversed(axis.domain)]
    assert ends == sorted(ends, reverse=True)
    assert all(0 <= end <= 1 for end in ends)


def test_panels_that_have_no_room_are_named():
    rows = [
        row("round-to-nearest", f"w{w}a{a}", "channel", "token", "rounded", 0.1)
        for w in (8, 6, 4)
        for a in (8, 6, 4)
    ]
    drawn = errors(result(rows).layers)
    assert len(drawn.data) == 8
    (note,) = drawn.layout.meta["notes"]
    assert note.startswith("Not drawn: round-to-nearest, W4A4, weights per channel.")


def test_no_error_at_all_is_blank_among_powers_of_ten():
    rows = [
        row("round-to-nearest", "w8a8", "channel", "token", "rounded", 0.1, error=0.5),
        row("round-to-nearest", "w16a16", "channel", "", "", 0.0),
    ]
    layers = result(rows).layers
    layers.loc[layers["bits"] == "w16a16", "error"] = 0.0
    layers.loc[0, "error"] = 1e-5
    drawn = errors(layers)
    assert list(drawn.data[1].y) == [None] * 4
    (note,) = drawn.layout.meta["notes"]
    assert "0 has no place on a logarithmic scale: 4 of 8 errors" in note


def test_nothing_to_draw_is_said():
    with pytest.raises(AnalysisError, match="no way of rounding has a finite loss"):
        costs([one | {"loss_change": math.nan} for one in w8a8()])
    with pytest.raises(AnalysisError, match="no layer has a finite error"):
        errors(result(w8a8()).layers.assign(error=math.nan))
    with pytest.raises(AnalysisError, match="no column 'loss_change'"):
        costs(pd.DataFrame({"scheme": ["awq"]}))
