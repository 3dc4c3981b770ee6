"""What the explorer of a page knows of heads, taken from results."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from pages import NASTY
from test_patterns import made as made_patterns
from test_patterns import triangle

from interp.tables import HeadScores
from interp.views.figures.runs import runs
from interp.views.pages.chapters import bound
from interp.views.pages.explorer import Score, Subject, merged
from interp.views.pages.scores import scores_chapter
from interp.views.pages.subjects import pattern_text, result_subjects, run_subject


def scores(values, analysis="induction", model="m", **more):
    """A result with a row for each cell of a grid that is not None."""
    cells = [(a, b, v) for a, row in enumerate(values) for b, v in enumerate(row) if v is not None]
    score = analysis.replace("-", "_")
    table = pd.DataFrame(cells, columns=["layer", "head", score])
    table[f"{score}_se"], table[f"{score}_null"], table["n"] = 0.5, 0.25, 4
    fields = {
        "unit": "attention probability",
        "params": {},
        "inputs": "some tokens",
        "seed": 3,
        "summary": {},
        "versions": {},
        **more,
    }
    return HeadScores(table=table, score=score, analysis=analysis, model=model, **fields)


def test_a_result_is_a_subject_with_its_values_errors_and_nulls_by_head():
    (subject,) = result_subjects([scores([[0.1, 0.9], [None, 0.3]])])
    assert (subject.name, subject.n_layers, subject.n_heads) == ("m", 2, 2)
    (score,) = subject.scores
    assert score.values == ((0.1, 0.9, None, 0.3),)
    assert score.errors == ((0.5, 0.5, None, 0.5),)
    assert score.nulls == ((0.25, 0.25, None, 0.25),)
    assert (score.low, score.high, score.diverging, score.effect) == (0.0, 1.0, False, False)
    assert score.about == "some tokens; n = 4; seed 3"
    assert score.name == "Induction"


def test_effects_have_a_range_around_0_and_say_so():
    result = scores([[0.5, -2.0]], "ablation", unit="nats", params={"method": "zero"})
    (score,) = result_subjects([replace(result, score="ablation")])[0].scores
    assert (score.low, score.high, score.diverging, score.effect) == (-2.0, 2.0, True, True)
    assert "zero" in score.name


def test_importance_is_a_size_and_starts_at_0():
    result = scores([[0.5, 2.0]], "importance", unit="nats")
    (score,) = result_subjects([result])[0].scores
    assert (score.low, score.high, score.diverging, score.effect) == (0.0, 2.0, False, True)


def test_constant_and_missing_values_have_a_finite_range():
    (score,) = result_subjects([scores([[0.0, 0.0]], unit="nats")])[0].scores
    assert score.high > score.low
    (subject,) = result_subjects([scores([[float("nan"), float("inf")]])])
    assert subject.scores == ()


def test_results_of_one_model_come_together_and_pruned_heads_widen_the_grid():
    pruned = scores([[0.1]], "sinks", params={"pruned_heads": ["1.1"]})
    results = [scores([[0.1, 0.2], [0.3, 0.4]]), pruned, scores([[1.0]], model="other")]
    first, second = merged(result_subjects(results))
    assert (first.name, second.name) == ("m", "other")
    assert (first.n_layers, first.n_heads, first.gone) == (2, 2, ("1.1",))
    assert [score.name for score in first.scores] == ["Induction", "Sinks"]
    assert first.scores[1].values == ((0.1, None, None, None),)


def test_a_smaller_grid_is_widened_place_by_place():
    small = result_subjects([scores([[1.0], [2.0]])])
    large = result_subjects([scores([[0.1, 0.2, 0.3]] * 3, "sinks")])
    (subject,) = merged([*small, *large])
    assert subject.scores[0].values == ((1.0, None, None, 2.0, None, None, None, None, None),)
    assert subject.scores[0].errors == ((0.5, None, None, 0.5, None, None, None, None, None),)


def test_what_is_there_twice_stays_once():
    one = result_subjects([scores([[0.1]])])
    (subject,) = merged([*one, *one])
    assert len(subject.scores) == 1


def test_key_value_heads_and_sets_are_no_heads_of_the_explorer():
    assert result_subjects([scores([[1.0]], "ablation", params={"site": "k"})]) == ()


def test_patterns_bring_their_text_and_say_what_was_left_out():
    patterns = made_patterns(triangle(4), ["a", NASTY, "a", "12"])
    (subject,) = result_subjects([patterns])
    (text,) = subject.texts
    assert text.tokens == ("a", NASTY, "a", "12")
    assert text.heads == ("0.1",)
    assert text.data == tuple(patterns.coded)
    start = "a <b>\"'&amp;</script><script>alert(1)</s"
    assert text.about == f"A text, “{start}…”; 1 pattern kept, 1 left out."
    assert [score.name for score in subject.scores] == ["From uniform, on the text"]
    assert pattern_text(patterns, 500).step == 500


def test_a_run_has_its_scores_at_every_step():
    table = pd.DataFrame(
        {
            "model": "two-layer",
            "seed": 0,
            "step": np.repeat([0, 20], 2),
            "tokens": np.repeat([0, 640], 2),
            "layer": 0,
            "head": [0, 1, 0, 1],
            "induction": [0.1, 0.2, 0.3, np.nan],
        }
    )
    (run,) = runs(table)
    subject = run_subject(run, "r", {"induction": "Induction score"}, "probes")
    assert (subject.steps, subject.tokens) == ((0, 20), (0, 640))
    assert subject.scores[0].values == ((0.1, 0.2), (0.3, None))
    assert subject.scores[0].nulls is None


def test_a_page_of_several_chapters_has_one_explorer_and_names_of_its_own():
    one = scores_chapter([scores([[0.1]])], "One")
    two = scores_chapter([scores([[0.2]], "sinks")], "Two")
    page = bound([one, two])
    assert [section.name for section in page.sections] == ["explorer", "result-1-1", "result-1-2"]
    assert [section.heading for section in page.sections[1:]] == ["One: Heads", "Two: Heads"]
    assert page.title == "One and Two"
    assert len(page.findings) == 2
    (explorer,) = page.sections[0].parts
    assert [score.name for score in explorer.subjects[0].scores] == ["Induction", "Sinks"]


def test_a_page_without_heads_has_no_explorer():
    chapter = replace(scores_chapter([scores([[0.1]])], "One"), subjects=())
    assert [section.name for section in bound([chapter]).sections] == ["result-1"]


@pytest.mark.parametrize("kind", [Score, Subject])
def test_facts_can_be_told_apart_by_what_they_hold(kind):
    (subject,) = result_subjects([scores([[0.1]])])
    (again,) = result_subjects([scores([[0.1]])])
    mine, other = (subject, again) if kind is Subject else (subject.scores[0], again.scores[0])
    assert mine == other
    assert hash(mine) == hash(other)
