"""The figure of any result, and what a notebook shows of one."""

import html
import json
import math
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from pages import NASTY, Elements, strict
from plotly.offline import get_plotlyjs

import interp
from interp.comparison.result import Comparison
from interp.errors import AnalysisError
from interp.patterns import Patterns
from interp.tables import HeadScores, Result, SetScores
from interp.views.drawing import MIME, figure, notebook_bundle, notebook_html
from interp.views.figures import style


def cells(n_layers=2, n_heads=3):
    return {
        "layer": [layer for layer in range(n_layers) for _ in range(n_heads)],
        "head": list(range(n_heads)) * n_layers,
    }


def scores(values=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6), **more):
    given = {
        "table": pd.DataFrame(
            {**cells(), "sink": values, "sink_se": 0.01, "entropy": range(6), "token": "a", "n": 8}
        ),
        "score": "sink",
        "unit": "attention probability",
        "analysis": "sinks",
        "model": "tiny",
        "params": {},
        "inputs": "8 sequences",
        "seed": 3,
        "summary": {},
        "versions": {},
    }
    return HeadScores(**(given | more))


def effects(analysis="ablation", **columns):
    table = pd.DataFrame({**columns, "effect_se": 0.1, "effect_q": 0.5, "effect_p": 0.5, "n": 4})
    kind = HeadScores if analysis == "ablation" else SetScores
    return kind(
        table=table,
        score="effect",
        unit="nats",
        analysis=analysis,
        model="tiny",
        params={"method": "zero", "metric": "loss", "site": "z"},
        inputs="4 sequences",
        seed=7,
        summary={"loss_clean": 2.5},
        versions={},
    )


def patterns(n_heads=3, n_pos=4, **more):
    weights = {
        (0, head): np.full((n_pos, n_pos), 1 / n_pos, dtype=np.float32) for head in range(n_heads)
    }
    table = pd.DataFrame({"layer": 0, "head": range(n_heads), "from_uniform": 0.5, "sink": 0.25})
    given = {
        "table": table,
        "score": "from_uniform",
        "unit": "share",
        "analysis": "attention",
        "model": "tiny",
        "params": {"causal": False, "left_out": []},
        "inputs": f"a text of {n_pos} tokens",
        "seed": 0,
        "summary": {},
        "versions": {},
        "tokens": ("a",) * n_pos,
        "weights": weights,
    }
    return Patterns(**(given | more))


def comparison(**more):
    table = pd.DataFrame(
        [
            {
                "model": model,
                "layer": 0,
                "head": head,
                **{
                    f"{score}{end}": value
                    for score in ("induction", "sink")
                    for end, value in (
                        ("", 0.5),
                        ("_se", 0.1),
                        ("_null", 0.1),
                        ("_n", 8),
                        ("_selected", False),
                        ("_held_out", 0.5),
                    )
                },
            }
            for model in "ab"
            for head in range(2)
        ]
    )
    given = {
        "table": table,
        "differences": pd.DataFrame(),
        "labels": ("a", "b"),
        "units": dict.fromkeys(("induction", "sink"), "attention probability"),
        "why_no_differences": "other shapes",
        "paired": True,
        "params": {"effect": {"induction": 0.1, "sink": 0.1}},
        "inputs": "8 sequences",
        "seed": 5,
        "versions": {},
    }
    return Comparison(**(given | more))


ABLATED = {**cells(), "effect": [0.5, -2.0, 0.1, 0.2, 0.3, 1.0]}


def rows(drawn):
    return [list(row) for row in drawn.data[0].z]


# The figure


def test_head_scores_give_their_map_and_another_column_its_own():
    drawn = figure(scores())
    assert rows(drawn) == [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]
    assert (drawn.layout.coloraxis.cmin, drawn.layout.coloraxis.cmax) == (0, 1)
    assert drawn.data[0].meta == {"subject": "tiny"}
    assert drawn.layout.title.subtitle.text == "tiny, unit: attention probability, n = 8, seed 3"
    other = figure(scores(), column="entropy")
    assert rows(other) == [[0, 1, 2], [3, 4, 5]]
    # Which unit it has the result does not say.
    assert other.layout.title.subtitle.text == "tiny, n = 8, seed 3"
    assert other.layout.title.text == "Entropy by head"


def test_ablations_give_the_first_figure_of_their_page():
    drawn = figure(effects(**ABLATED))
    assert drawn.data[0].type == "heatmap"
    assert drawn.layout.coloraxis.cmin == -drawn.layout.coloraxis.cmax == -2
    layers = figure(effects("layers", layer=[0, 1], effect=[0.5, 2.0]))
    assert list(layers.data[0].x) == [0.5, 2.0]
    removal = figure(
        effects("cumulative", removed=[1, 2], layer=[0, 1], head=[0, 0], effect=[0.5, 2.0])
    )
    assert removal.data[-1].mode == "lines+markers"


def test_effects_of_another_column_are_symmetric_around_0():
    drawn = figure(effects(**ABLATED, direct=[0.5, -1, 0, 0, 0, 0]), column="direct")
    assert (drawn.layout.coloraxis.cmin, drawn.layout.coloraxis.cmax) == (-1, 1)
    # A standard error of effects is none.
    assert figure(effects(**ABLATED), column="effect_se").layout.coloraxis.cmin == 0


def test_patterns_give_a_grid_or_one_head_or_the_map_of_a_column():
    assert [trace.name for trace in figure(patterns()).data] == ["L0H0", "L0H1", "L0H2"]
    one = figure(patterns(), layer=0, head=2)
    assert one.layout.title.text == "Attention of L0H2"
    assert rows(figure(patterns(), column="sink")) == [[0.25, 0.25, 0.25]]


def test_of_more_patterns_than_fit_the_first_are_drawn_and_it_is_said(monkeypatch):
    monkeypatch.setattr(style, "MOST_CELLS", 40)
    drawn = figure(patterns())
    assert [trace.name for trace in drawn.data] == ["L0H0", "L0H1"]
    told = "Drawn: the 2 heads furthest from even attention, of 3."
    assert drawn.layout.meta["notes"] == [told]
    monkeypatch.setattr(style, "MOST_CELLS", 10)
    assert rows(figure(patterns())) == [[0.5, 0.5, 0.5]]


def test_a_comparison_gives_the_maps_of_its_first_score_or_another():
    assert figure(comparison()).layout.title.text == "Induction by head"
    assert figure(comparison(), column="sink").layout.title.text == "Sink by head"
    assert [trace.meta for trace in figure(comparison()).data] == [
        {"subject": "a"},
        {"subject": "b"},
    ]


@pytest.mark.parametrize(
    ("result", "choice", "message"),
    [
        (scores, {"layer": 1}, "both are needed"),
        (scores, {"layer": 1, "head": 0}, "sinks of tiny holds none"),
        (comparison, {"layer": 1, "head": 0}, "a comparison holds none"),
        (scores, {"column": "token"}, "no column 'token' of numbers; there are sink, "),
        (scores, {"column": "layer"}, "no column 'layer'"),
        (comparison, {"column": "entropy"}, "no score 'entropy' here; there are induction, sink"),
        (patterns, {"layer": 7, "head": 0}, r"no pattern of head 7\.0"),
        (patterns, {"layer": 0, "head": 0, "column": "sink"}, "either a column, or the pattern"),
        (lambda: scores([math.nan] * 6), {}, "No head has a finite value"),
        (lambda: scores([math.nan] * 6), {"column": "sink"}, "no head has a finite sink"),
        (lambda: scores(table=scores().table[:0]), {}, "No heads to show"),
        (lambda: effects("layers", layer=[0], effect=[1.0]), {"column": "n"}, "layers is of sets"),
    ],
)
def test_a_choice_that_a_result_does_not_have_is_refused(result, choice, message):
    with pytest.raises(AnalysisError, match=message):
        figure(result(), **choice)


def test_the_public_name_is_the_function():
    assert interp.figure is figure


# Notebooks


def parts(fragment):
    """The figure of an HTML fragment, read strictly, and the fragment without the library."""
    text = re.sub(r'atob\("[A-Za-z0-9+/=]*"\)', "atob()", fragment)

    def refuse(token):
        raise AssertionError(token)

    start = text.index("const figure = ") + len("const figure = ")
    drawn, _ = json.JSONDecoder(parse_constant=refuse).raw_decode(text, start)
    return drawn, text


@pytest.mark.parametrize(
    "make", [scores, patterns, comparison, lambda: effects(**ABLATED)], ids="spca"
)
def test_a_bundle_has_plotlys_type_html_and_text_of_one_figure_with_its_words(make):
    bundle = notebook_bundle(make())
    assert list(bundle) == [MIME, "text/html", "text/plain"]
    json.dumps(bundle, allow_nan=False)
    drawn, _ = parts(bundle["text/html"])
    assert drawn == {name: bundle[MIME][name] for name in ("data", "layout")}
    own = figure(make())
    words = bundle["text/plain"].splitlines()
    assert words[0] == own.layout.title.text
    assert words[2] == own.layout.meta["caption"]
    # Only one of the types is shown, so the caption is in the figure too.
    [below] = [n["text"] for n in drawn["layout"]["annotations"] if n.get("yanchor") == "top"]
    assert html.unescape(below.replace("<br>", " ")) == own.layout.meta["caption"]


def test_the_html_has_no_address_and_is_the_same_twice_and_about_2_mb():
    fragment = notebook_html(scores())
    assert fragment == notebook_html(scores())
    assert fragment != notebook_html(patterns())
    _, text = parts(fragment)
    assert "http" not in text
    assert 'src="' not in text
    assert len(fragment) < len(get_plotlyjs()) / 2
    assert Elements(text).ids == []


def test_text_of_a_result_is_no_markup_in_a_notebook():
    bundle = notebook_bundle(scores(model=NASTY))
    _, text = parts(bundle["text/html"])
    assert Elements(text).tags.count("script") == 1
    assert "b" not in Elements(text).tags
    assert NASTY in bundle["text/plain"]
    # What a click reads is the name itself, and never drawn.
    assert bundle[MIME]["data"][0].pop("meta") == {"subject": NASTY}
    assert "$x$" not in str(bundle[MIME])


@pytest.mark.parametrize(
    "result",
    [
        scores([math.nan] * 6),
        scores(table=scores().table[:0]),
        scores(score="nothing"),
        comparison(table=comparison().table.assign(induction=math.nan, sink=math.nan)),
        patterns(table=patterns().table.assign(from_uniform=math.nan), weights={}),
        Result(pd.DataFrame({"a": [1]}), "a", "", "other", "<b>", {}, "", 0, {}),
    ],
)
def test_a_result_with_nothing_to_draw_is_text(result):
    bundle = notebook_bundle(result)
    assert list(bundle) == ["text/plain", "text/html"]
    assert bundle["text/plain"]
    assert bundle["text/html"].startswith("<p>")
    assert notebook_html(result) == bundle["text/html"]


def test_missing_values_are_null_in_a_notebook():
    bundle = notebook_bundle(scores((0.1, math.nan, 0.3, 0.4, 0.5, 0.6)))
    assert bundle[MIME]["data"][0]["z"][0][1] is None
    assert "Blank, without a finite value: L0H1 (1 of 6 heads)." in bundle["text/plain"]


def test_drawing_does_not_import_kaleido():
    code = (
        "import sys, interp.views.drawing, interp.views.figures.images;"
        "print(sorted({'kaleido', 'choreographer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_figure_of_a_result_is_strict_json():
    for result in (scores(), patterns(), comparison(), effects(**ABLATED)):
        assert strict(figure(result))["data"]
