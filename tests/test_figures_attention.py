"""Figures of attention on a text: which cell is where, what is blank, what is refused."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from pages import NASTY, strict

from interp.errors import AnalysisError
from interp.patterns import Patterns
from interp.views.figures.attention import attention_grid, attention_map, pattern_map
from interp.views.figures.style import MOST_CELLS

REPEATED = ("a", "b", "a", "b")


def uneven(n, seed=0, causal=True):
    """Rows that sum to 1, no two weights alike."""
    weights = np.random.default_rng(seed).random((n, n)) + 0.01
    weights *= np.tri(n) if causal else 1
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def patterns(weights, tokens, **params):
    return Patterns(
        table=pd.DataFrame([{"layer": a, "head": b, "from_uniform": 0.5} for a, b in weights]),
        score="from_uniform",
        unit="share",
        analysis="attention",
        model="tiny",
        params={"causal": True, "left_out": [], **params},
        inputs=f"a text of {len(tokens)} tokens",
        seed=3,
        summary={},
        versions={},
        tokens=tuple(tokens),
        weights=weights,
    )


def test_repeated_tokens_keep_their_rows_and_columns_and_the_first_query_is_at_the_top():
    own = uneven(4)
    figure = strict(attention_map(patterns({(1, 2): own}, REPEATED), 1, 2))
    [trace], layout = figure["data"], figure["layout"]
    assert trace["x"] == trace["y"] == [0, 1, 2, 3]
    assert trace["z"][3][1] == pytest.approx(float(own[3, 1]), rel=1e-5)
    assert trace["z"][3][1] != pytest.approx(float(own[3, 2]), rel=1e-2)
    assert layout["yaxis"]["autorange"] == "reversed"
    assert layout["xaxis"]["title"]["text"] == "key"
    assert layout["yaxis"]["title"]["text"] == "query"
    assert layout["xaxis"]["ticktext"] == list(REPEATED)
    assert layout["yaxis"]["scaleanchor"] == "x"
    assert trace["customdata"][3][1] == ["3 “b”", "1 “b”"]


def test_every_cell_is_the_weight_of_its_query_and_key():
    own = uneven(7, causal=False)
    figure = attention_map(patterns({(0, 0): own}, "abcdefg", causal=False), 0, 0)
    for query in range(7):
        for key in range(7):
            drawn = figure.data[0].z[query][key]
            assert drawn == pytest.approx(float(own[query, key]), rel=1e-5), (query, key)


def test_what_a_causal_query_cannot_see_is_blank_and_a_weight_of_0_is_not():
    own = np.array([[1, 0, 0], [1, 0, 0], [0.25, 0.75, 0]], dtype=np.float32)
    causal = attention_map(patterns({(0, 0): own}, "abc"), 0, 0)
    assert [list(row) for row in causal.data[0].z] == [
        [1, None, None],
        [1, 0, None],
        [0.25, 0.75, 0],
    ]
    assert "Keys that a query cannot see are blank." in causal.layout.meta["caption"]
    encoder = attention_map(patterns({(0, 0): own}, "abc", causal=False), 0, 0)
    assert list(encoder.data[0].z[0]) == [1, 0, 0]
    assert "blank" not in encoder.layout.meta["caption"]


def test_outside_a_window_is_blank_in_the_layers_that_have_one():
    own = np.eye(4, dtype=np.float32)
    both = patterns({(0, 0): own, (1, 0): own}, "abcd", windows=[2, None])
    windowed, whole = (attention_map(both, layer, 0).data[0].z for layer in (0, 1))
    assert [value is None for value in windowed[3]] == [True, True, False, False]
    assert [value is None for value in whole[3]] == [False] * 4


def test_weight_on_a_later_key_is_a_fault_that_shows():
    own = np.array([[0.5, 0.5], [1, 0]], dtype=np.float32)
    assert attention_map(patterns({(0, 0): own}, "ab"), 0, 0).data[0].z[0][1] == 0.5


def test_weights_that_are_not_finite_are_blank_and_counted():
    own = np.array([[1, 0], [np.nan, np.nan]], dtype=np.float32)
    figure = attention_map(patterns({(0, 0): own}, "ab"), 0, 0)
    assert list(strict(figure)["data"][0]["z"][1]) == [None, None]
    assert figure.layout.meta["notes"] == ["Blank, not finite: 2 of 4 weights."]


def test_the_colours_go_from_0_to_1_or_to_what_is_asked_for_and_say_so():
    own = np.array([[1, 0], [0.7, 0.3]], dtype=np.float32)
    plain = attention_map(patterns({(0, 0): own}, "ab"), 0, 0)
    assert (plain.layout.coloraxis.cmin, plain.layout.coloraxis.cmax) == (0, 1)
    assert "Colours go from 0 to 1." in plain.layout.meta["caption"]
    closer = attention_map(patterns({(0, 0): own}, "ab"), 0, 0, top=0.5)
    assert closer.layout.coloraxis.cmax == 0.5
    assert closer.layout.meta["notes"] == ["Above 0.5, the end of the colours: 2 weights."]


def test_rows_of_an_edited_pattern_that_do_not_add_up_to_1_are_counted():
    own = np.array([[1, 0], [0.9, 0.9]], dtype=np.float32)
    notes = attention_map(patterns({(0, 0): own}, "ab"), 0, 0).layout.meta["notes"]
    assert notes == ["Not adding up to 1, as attention does: 1 of 2 rows."]
    grid = attention_grid(patterns({(1, 2): own}, "ab")).layout.meta["notes"]
    assert grid == ["L1H2: not adding up to 1, as attention does: 1 of 2 rows."]


@pytest.mark.parametrize("bits", [8, 16])
def test_rows_that_a_file_rounded_do_add_up(bits, monkeypatch, tmp_path):
    """Even attention, in which every weight of a row is rounded the same way."""
    monkeypatch.setattr("interp.patterns.FINE_CELLS", 0 if bits == 8 else 2**30)
    even = np.tri(512, dtype=np.float32) / np.arange(1, 513, dtype=np.float32)[:, None]
    whole = patterns({(0, 0): even}, ["a"] * 512)
    assert whole.bits == bits
    again = Patterns.load(whole.save(tmp_path)[1])
    assert attention_map(again, 0, 0).layout.meta["notes"] == []


@pytest.mark.parametrize("top", [0, -1, 1.5, float("nan")])
def test_a_range_of_colours_without_meaning_is_refused(top):
    with pytest.raises(AnalysisError, match="above 0 and at most 1"):
        attention_map(patterns({(0, 0): uneven(2)}, "ab"), 0, 0, top=top)


def test_a_pattern_of_other_tokens_names_both_numbers():
    with pytest.raises(AnalysisError, match="12 x 12 and there are 10 tokens"):
        pattern_map(uneven(12), "a" * 10, title="L0H0", subtitle="")
    with pytest.raises(AnalysisError, match="2 x 3 and there are 3 tokens"):
        pattern_map(np.ones((2, 3), dtype=np.float32), "abc", title="L0H0", subtitle="")


def test_one_token_is_a_map_of_one_cell():
    figure = strict(attention_map(patterns({(0, 0): uneven(1)}, ["only"]), 0, 0))
    assert figure["data"][0]["z"] == [[1.0]]


def test_tokens_are_text_and_what_cannot_be_seen_is_made_visible():
    tokens = [NASTY, "12", "\n", "  ", "", " the"]
    figure = attention_map(patterns({(0, 0): uneven(6)}, tokens), 0, 0)
    drawn = str(strict(figure)).replace(" %{z:", "")
    for mark in ('<b>"', "</script>", "$x$", "%{z}"):
        assert mark not in drawn
    assert figure.layout.xaxis.ticktext[1:] == ("12", "↵", "␣␣", "(empty)", "the")
    assert figure.data[0].customdata[5][5][0] == "5 “ the”"


def test_labels_are_thinned_where_there_is_no_room_and_hovers_are_whole():
    tokens = [f"token-number-{place}" for place in range(100)]
    figure = attention_map(patterns({(0, 0): uneven(100)}, tokens), 0, 0)
    shown = figure.layout.xaxis
    assert len(shown.tickvals) == len(shown.ticktext) < 50
    assert shown.tickvals[1] == int(shown.tickvals[1]) > 1
    assert all(len(text) <= 14 for text in shown.ticktext)
    assert figure.data[0].customdata[99][98] == ["99 “token-number-99”", "98 “token-number-98”"]


def test_a_figure_says_of_which_model_text_and_seed_it_is():
    figure = attention_map(patterns({(0, 0): uneven(2)}, "ab"), 0, 0)
    told = "tiny, a text of 2 tokens, unit: attention probability, n = 1 text, seed 3"
    assert figure.layout.title.subtitle.text == told
    grid = attention_grid(patterns({(0, 0): uneven(2)}, "ab"))
    assert grid.layout.title.subtitle.text == told


def test_a_pattern_too_large_for_a_figure_is_refused_in_one_line():
    count = int(MOST_CELLS**0.5) + 1
    with pytest.raises(AnalysisError, match=rf"725 tokens: 525,625 cells.*{MOST_CELLS:,}") as told:
        pattern_map(np.zeros((count, count), np.float32), ["a"] * count, title="L0H0", subtitle="")
    assert "\n" not in str(told.value)


# The grid


def test_a_grid_has_each_head_once_in_order_on_one_range():
    own = {(2, 1): uneven(3, 1), (0, 0): uneven(3, 2), (1, 5): uneven(3, 3)}
    figure = strict(attention_grid(patterns(own, "aba")))
    assert [trace["name"] for trace in figure["data"]] == ["L2H1", "L0H0", "L1H5"]
    assert [label["text"] for label in figure["layout"]["annotations"]] == ["L2H1", "L0H0", "L1H5"]
    assert {trace["coloraxis"] for trace in figure["data"]} == {"coloraxis"}
    for trace, pattern in zip(figure["data"], own.values(), strict=True):
        assert trace["z"][2][1] == pytest.approx(float(pattern[2, 1]), rel=1e-5)


def test_maps_of_a_grid_do_not_overlap_and_hovers_name_their_own_tokens():
    count, tokens = 5, ("x", "y", "x", "y", "z")
    own = {(0, head): uneven(count, head) for head in range(7)}
    figure = attention_grid(patterns(own, tokens), columns=3)
    boxes = [(min(t.x), max(t.x), min(t.y), max(t.y)) for t in figure.data]
    for place, one in enumerate(boxes):
        for other in boxes[:place]:
            apart = one[0] > other[1] or other[0] > one[1] or one[2] > other[3] or other[2] > one[3]
            assert apart, (one, other)
    assert len({box[2] for box in boxes}) == 3  # rows
    for axis, name in ((figure.layout.xaxis, "x"), (figure.layout.yaxis, "y")):
        said = dict(zip(axis.tickvals, axis.ticktext, strict=True))
        for trace in figure.data:
            told = [said[value] for value in trace[name]]
            assert told == [f"{place} “{token}”" for place, token in enumerate(tokens)]
    low, high = figure.layout.yaxis.range
    assert low > high  # the first row at the top


def test_a_grid_of_chosen_heads_draws_these_and_names_none_as_left_out():
    own = {(0, 0): uneven(2, 1), (0, 1): uneven(2, 2)}
    whole = patterns(own, "ab", left_out=["3.10"])
    figure = attention_grid(whole, [(0, 1)])
    assert [trace.name for trace in figure.data] == ["L0H1"]
    assert figure.layout.meta["notes"] == []
    notes = attention_grid(whole).layout.meta["notes"]
    assert notes == ["Not drawn, their patterns were left out: L3H10 (1 heads)."]


def test_a_grid_that_is_too_large_or_of_nothing_is_refused_in_one_line():
    own = dict.fromkeys([(0, head) for head in range(6)], uneven(300))
    with pytest.raises(AnalysisError, match=re.escape("6 heads on 300 tokens (name fewer)")):
        attention_grid(patterns(own, ["a"] * 300))
    with pytest.raises(AnalysisError, match="no pattern of any head"):
        attention_grid(patterns({}, "ab"))
    with pytest.raises(AnalysisError, match=r"no pattern of head 9\.9"):
        attention_grid(patterns({(0, 0): uneven(2)}, "ab"), [(9, 9)])
    with pytest.raises(AnalysisError, match="columns = 0"):
        attention_grid(patterns({(0, 0): uneven(2)}, "ab"), columns=0)


def test_a_long_text_has_positions_on_hover_and_stays_light():
    count = 210
    drawn = pattern_map(np.eye(count), [f"token {n}" for n in range(count)], title="", subtitle="")
    assert drawn.data[0].customdata is None
    assert "query %{y}" in drawn.data[0].hovertemplate
    assert "Hover gives positions" in drawn.layout.meta["caption"]
    assert len(json.dumps(drawn.to_plotly_json())) < 8 * count**2
