"""Reports of several results: what only shares a name is told apart, what is damaged is named."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from pages import figures_of
from plotly.offline import get_plotlyjs
from test_patterns import made as made_patterns
from test_patterns import triangle
from test_subjects import scores
from test_views import write_training_run

from interp.errors import AnalysisError
from interp.patterns import Patterns
from interp.tables import HeadScores
from interp.views.findings import findings
from interp.views.pages.chapters import bound
from interp.views.pages.page import Plot
from interp.views.pages.scores import scores_chapter
from interp.views.report import report_page, result_page, write_report

GRID = [[0.1, 0.2], [0.3, 0.4]]


def subjects_of(page):
    (explorer,) = page.sections[0].parts
    return {subject.name: subject for subject in explorer.subjects}


def maps_of(page):
    """The subject and the first cell of every map that chooses heads."""
    figures = [part.figure for own in page.sections for part in own.parts if isinstance(part, Plot)]
    return [
        (trace.meta["subject"], trace.z[0][0])
        for figure in figures
        for trace in figure.data
        if trace.meta and "subject" in trace.meta
    ]


# --- one analysis again ---------------------------------------------------------------------------


def test_one_analysis_with_other_settings_is_told_apart_in_headings_findings_and_the_explorer():
    short = scores(GRID, params={"blocks": [8], "batch": 4}, inputs="blocks of 8; twice")
    long = scores(
        [[0.9, 0.8], [0.7, 0.6]], params={"blocks": [12], "batch": 4}, inputs="blocks of 12; twice"
    )
    page = bound([scores_chapter([short, long], "x")])
    assert [own.heading for own in page.sections[1:]] == [
        "Induction, blocks 8",
        "Induction, blocks 12",
    ]
    assert [line.partition(":")[0] for line in page.findings] == [
        "Induction, blocks 8",
        "Induction, blocks 12",
    ]
    assert page.findings[0].startswith("Induction, blocks 8: the highest is L1H1 at 0.4 ")
    assert [own.name for own in subjects_of(page)["m"].scores] == [
        "Induction: blocks of 8",
        "Induction: blocks of 12",
    ]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"seed": 4}, ["seed 3", "seed 4"]),
        ({"inputs": "other tokens"}, ["some tokens", "other tokens"]),
        ({"params": {"null": "x" * 99}}, ["1 of 2", "2 of 2"]),
        ({}, ["1 of 2", "2 of 2"]),
    ],
)
def test_what_differs_is_the_name_and_else_a_number(changed, told):
    one = scores(GRID)
    page = bound([scores_chapter([one, replace(scores([[0.5, 0.6], [0.7, 0.8]]), **changed)], "x")])
    assert [own.heading for own in page.sections[1:]] == [f"Induction, {one}" for one in told]
    names = [own.name for own in subjects_of(page)["m"].scores]
    assert len(set(names)) == 2


def test_results_of_two_models_are_told_apart_by_the_model_alone():
    page = bound([scores_chapter([scores(GRID), scores(GRID, model="n", seed=9)], "x")])
    assert [own.heading for own in page.sections[1:]] == ["Induction, m", "Induction, n"]


def test_findings_of_two_folders_that_begin_alike_name_their_folder(tmp_path):
    scores(GRID).save(tmp_path / "a" / "out")
    scores(GRID, seed=4).save(tmp_path / "b" / "out")
    scores(GRID, "sinks").save(tmp_path / "c")
    page = report_page(*(tmp_path / name for name in ("a/out", "b/out", "c")))
    assert [line.split(" the ")[0] for line in page.findings] == [
        "a/out: Induction:",
        "b/out: Induction:",
        "Sinks:",
    ]
    assert [own.heading for own in page.sections[1:]] == [
        "Head scores: a/out: Heads",
        "Head scores: b/out: Heads",
        "Head scores: c: Heads",
    ]


def test_two_texts_are_told_apart_by_how_they_begin():
    one = replace(made_patterns(triangle(3), ["a", " b", "\n"]), inputs="a text of 3 tokens")
    other = replace(made_patterns(triangle(2), ["1", "2"]), inputs="a text of 2 tokens")
    page = bound([scores_chapter([one, other], "x")])
    (subject,) = subjects_of(page).values()
    assert [text.about.split("; ")[0] for text in subject.texts] == [
        "A text of 3 tokens, “a b\\n”",
        "A text of 2 tokens, “1 2”",
    ]
    assert [own.name for own in subject.scores] == [
        "From uniform, on the text: “a b\\n”",
        "From uniform, on the text: “1 2”",
    ]


# --- names that two runs or models share ----------------------------------------------------------


def test_two_runs_of_one_name_keep_their_own_heads_and_maps(tmp_path):
    for name in ("a", "b"):
        write_training_run(tmp_path / name)
    probes = pd.read_csv(tmp_path / "b" / "probes.csv")
    late = probes[probes["step"] >= 500].assign(induction=0.77)
    late.to_csv(tmp_path / "b" / "probes.csv", index=False)
    scores([[0.6] * 8] * 2, "sinks", model="stdlib-two-layer").save(tmp_path / "b")
    page = report_page(tmp_path / "a", tmp_path / "b")
    found = subjects_of(page)
    assert list(found) == ["stdlib-two-layer (a)", "stdlib-two-layer (b)"]
    first, second = found.values()
    assert first.steps[0] == 0
    assert second.steps[0] == 500
    assert {len(own.values) for own in first.scores} == {len(first.steps)}
    # The run's own scores at each step, and what a command measured at its end.
    assert {len(own.values) for own in second.scores} == {len(second.steps), 1}
    drawn = maps_of(page)
    assert {name for name, _ in drawn} == set(found)
    assert {name for name, cell in drawn if cell in (0.77, 0.6)} == {"stdlib-two-layer (b)"}
    assert len({section.heading for section in page.sections}) == len(page.sections)


def test_two_models_of_one_name_and_several_shapes_keep_their_own_heads_and_maps():
    small, large = scores(GRID), scores([[0.5, 0.6, 0.7]] * 3, "sinks")
    some = scores([[2.0]], "ablation", params={"method": "zero"}, unit="nats")
    page = bound([scores_chapter([small, large, some], "x")])
    found = subjects_of(page)
    assert list(found) == ["m (2 × 2 heads)", "m (3 × 3 heads)"]
    assert [len(own.scores) for own in found.values()] == [2, 1]
    assert maps_of(page)[:2] == [("m (2 × 2 heads)", 0.1), ("m (3 × 3 heads)", 0.5)]


def test_an_ablation_of_some_heads_is_of_the_model_that_was_measured_whole():
    some = scores([[2.0]], "ablation", params={"method": "zero"}, unit="nats")
    page = bound([scores_chapter([scores(GRID), some], "x")])
    (subject,) = subjects_of(page).values()
    assert subject.name == "m"
    assert len(subject.scores) == 2


# --- files ----------------------------------------------------------------------------------------


def test_a_page_from_a_file_is_the_page_from_the_result(tmp_path):
    patterns = made_patterns(triangle(4), ["a", " ", "</script>", "\n"])
    patterns.save(tmp_path)
    assert result_page(Patterns.load(tmp_path / "attention.json")) == result_page(patterns)
    result = scores([[0.1, math.nan], [0.3, 0.4]])
    result.save(tmp_path)
    assert result_page(HeadScores.load(tmp_path / "induction.json")) == result_page(result)


def test_a_result_of_framework_scalars_is_numbers_in_its_file_and_on_its_page(tmp_path):
    params = {
        "share": np.float32(0.5),
        "count": np.int64(3),
        "on": np.bool_(True),
        "zero_d": torch.tensor(2),
        "half": torch.tensor([0.5, 1.0], dtype=torch.bfloat16),
        "path": Path("a/b"),
        "by_head": {(1, 10): np.float64(0.25)},
    }
    result = replace(scores(GRID), params=params, summary={"best": torch.tensor(0.5)})
    result.save(tmp_path)
    loaded = HeadScores.load(tmp_path / "induction.json")
    assert loaded.params == {
        "share": 0.5,
        "count": 3,
        "on": True,
        "zero_d": 2,
        "half": [0.5, 1.0],
        "path": "a/b",
        "by_head": {"1.10": 0.25},
    }
    assert loaded.params["on"] is True
    assert loaded.summary == {"best": 0.5}
    assert loaded.to_json() == HeadScores.load(tmp_path / "induction.json").to_json()
    assert result_page(result) == result_page(loaded)


def damaged(record, field, value):
    if field == "layer":
        record["table"][0]["layer"] = value
    elif field == "pruned_heads":
        record["params"]["pruned_heads"] = value
    elif value is None:
        del record[field]
    else:
        record[field] = value
    return record


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("model", None, "it has no 'model'"),
        ("table", None, "it has no 'table'"),
        ("patterns", None, "it has no 'patterns'"),
        ("params", [], "params should be dict, got list"),
        ("model", 3, "model should be str, got int"),
        ("table", [], "its table has no layer"),
        ("layer", -1, "a layer or a head is below 0"),
        ("pruned_heads", ["a.b"], "head 'a.b': written like 5.1"),
    ],
)
def test_a_damaged_result_is_named_with_its_fault(tmp_path, field, value, fault):
    made_patterns(triangle(2), ["a", "b"]).save(tmp_path)
    path = tmp_path / "attention.json"
    path.write_text(json.dumps(damaged(json.loads(path.read_text()), field, value)))
    with pytest.raises(AnalysisError) as caught:
        write_report(tmp_path)
    assert str(caught.value).startswith(f"{path}: not a file of attention patterns: {fault}")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report.html").exists()


def test_a_report_of_twelve_figures_is_one_library_and_little_more(tmp_path):
    for name in "abcdefghijkl":
        scores(np.full((12, 12), 0.1).tolist(), f"kind-{name}").save(tmp_path)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    library = get_plotlyjs()
    assert len(figures_of(page)) == 12
    assert page.count("* plotly.js v") == library.count("* plotly.js v")
    assert len(page.encode()) < len(library.encode()) + 2_000_000


# --- findings -------------------------------------------------------------------------------------


def selected(count):
    result = scores([[0.1, 0.9]], params={"called": "induction head"})
    return replace(result, table=result.table.assign(selected=[False, count == 1]))


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (
            selected(1),
            "Induction: the highest is L0H1 at 0.9 ± 0.5, against a null of 0.25; 1 of 2 heads is "
            "selected as induction head.",
        ),
        (selected(0), "; 0 of 2 heads are selected as induction heads."),
        (scores([[-0.5, -0.9]], "copying"), "Copying: the highest is L0H0 at −0.5 ± 0.5, "),
        (scores([[math.nan]]), "Induction: no head has a value."),
    ],
)
def test_findings_are_sentences_that_hold(result, told):
    (line,) = findings([result])
    assert line.startswith(told) or line.endswith(told)


def test_patterns_say_which_head_is_furthest_from_even_and_how_many_were_kept():
    first, second = findings([made_patterns(triangle(2), ["a", "b"])])
    assert first.startswith("Attention: the head furthest from even is L0H1, ")
    assert second == ("Patterns kept: 1 of 2, the furthest from even attention first; left out: 1.")
