"""Result tables: files that read back as they were, head names, strict JSON, whole files only."""

import csv
import io
import json
import math
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from interp.errors import AnalysisError, ShapeError
from interp.tables import HeadScores, head_label, parse_heads, strict_json, write_text


def made_scores(n_layers=2, n_heads=12, **changes):
    """Scores whose every cell is different, one standard error missing."""
    cells = n_layers * n_heads
    layer, head = np.divmod(np.arange(cells), n_heads)
    table = pd.DataFrame(
        {
            "layer": layer,
            "head": head,
            "previous_token": np.linspace(0.1, 0.9, cells),
            "previous_token_se": [math.nan, *np.linspace(0.01, 0.02, cells - 1)],
            "previous_token_null": 0.25,
            "n": 8,
        }
    )
    fields = {
        "table": table,
        "score": "previous_token",
        "unit": "attention probability",
        "analysis": "previous-token",
        "model": "a model",
        "params": {"blocks": [8, 12], "bos": None, "null": "uniform"},
        "inputs": "made up",
        "seed": 3,
        "summary": {"best": 0.9, "best_head": "1.11"},
    }
    return HeadScores(**{**fields, **changes})


def refuse_constant(name):
    raise AssertionError(f"{name} is not JSON")


def strictly(text):
    return json.loads(text, parse_constant=refuse_constant)


# --- files ----------------------------------------------------------------------------------


def test_saved_scores_load_to_what_they_were(tmp_path):
    scores = made_scores()
    paths = scores.save(tmp_path / "deep" / "er")
    assert [path.name for path in paths] == ["previous_token.csv", "previous_token.json"]
    assert sorted(os.listdir(tmp_path / "deep" / "er")) == [path.name for path in paths]
    again = HeadScores.load(paths[1])
    pd.testing.assert_frame_equal(again.table, scores.table)
    for field in ("score", "unit", "analysis", "model", "params", "inputs", "seed", "summary"):
        assert getattr(again, field) == getattr(scores, field), field
    assert again.versions == scores.versions
    assert again.to_json() == scores.to_json()


def test_saving_twice_gives_the_same_bytes(tmp_path):
    first = [path.read_bytes() for path in made_scores().save(tmp_path / "a")]
    second = [path.read_bytes() for path in made_scores().save(tmp_path / "b")]
    assert first == second
    assert not any(b"\r" in content for content in first)


def test_a_column_that_is_missing_everywhere_loads_as_numbers(tmp_path):
    scores = made_scores()
    scores.table["previous_token_se"] = math.nan  # as from a single sequence
    again = HeadScores.load(scores.save(tmp_path)[1])
    assert np.isnan(again.matrix("previous_token_se")).all()
    assert again.table["previous_token_se"].dtype == float


def test_missing_and_infinite_numbers_are_null(tmp_path):
    scores = made_scores(summary={"nan": math.nan, "inf": math.inf, "one": 1})
    text = scores.save(tmp_path)[1].read_text()
    saved = strictly(text)
    assert saved["summary"] == {"nan": None, "inf": None, "one": 1}
    assert saved["table"][0]["previous_token_se"] is None
    assert saved["params"]["bos"] is None


def test_a_csv_read_with_pandas_defaults_keeps_head_10_apart_from_head_1(tmp_path):
    path = made_scores().save(tmp_path)[0]
    table = pd.read_csv(path)
    assert [table[column].dtype.kind for column in ("layer", "head", "n")] == ["i", "i", "i"]
    assert len(table.drop_duplicates(["layer", "head"])) == 24
    assert {(1, 1), (1, 10)} <= set(zip(table["layer"], table["head"], strict=True))
    assert math.isnan(table["previous_token_se"][0])
    # The empty cell is empty, not a word.
    assert next(csv.DictReader(io.StringIO(path.read_text())))["previous_token_se"] == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("", "not a head-score file: "),
        ("[]", "not a head-score file: "),
        ('{"table": [{"layer": 0}]}', "not a head-score file: "),
        ('{"table": 3}', "not a head-score file: "),
        ('{"score": "x"}', "not a head-score file: "),
        ('{"table": [{"layer": "a", "head": 0}]}', "not a head-score file: "),
    ],
)
def test_a_file_that_holds_no_scores_is_named(tmp_path, content, message):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(AnalysisError) as caught:
        HeadScores.load(path)
    assert str(caught.value).startswith(f"{path}: {message}")


# --- values ---------------------------------------------------------------------------------


def test_a_matrix_has_its_values_at_layer_and_head_whatever_the_order_of_rows():
    scores = made_scores()
    shuffled = made_scores(table=scores.table.sample(frac=1, random_state=0))
    grid = shuffled.matrix()
    assert grid.shape == (2, 12)
    for row in scores.table.itertuples():
        assert grid[row.layer, row.head] == row.previous_token
    assert (shuffled.matrix("previous_token_null") == 0.25).all()


def test_heads_that_were_not_measured_are_missing_in_the_matrix_not_zero():
    table = made_scores().table
    grid = made_scores(table=table[(table["layer"] == 1) & (table["head"] == 2)]).matrix()
    assert grid.shape == (2, 3)
    assert np.isnan(grid).sum() == 5
    assert not np.isnan(grid[1, 2])


def test_an_unknown_column_lists_the_known_ones():
    with pytest.raises(AnalysisError) as caught:
        made_scores().matrix("sinks")
    assert str(caught.value) == (
        "no column 'sinks'; the table has layer, head, previous_token, previous_token_se, "
        "previous_token_null, n"
    )


def test_top_is_highest_first_with_ties_in_the_order_of_heads_and_missing_last():
    table = pd.DataFrame(
        {"layer": [0, 0, 1, 1], "head": [1, 0, 1, 0], "x": [0.5, 0.5, math.nan, 0.9]}
    )
    top = made_scores(table=table, score="x").top(4)
    assert list(zip(top["layer"], top["head"], strict=True)) == [(1, 0), (0, 0), (0, 1), (1, 1)]
    assert len(made_scores().top()) == 10
    assert len(made_scores().top(100)) == 24
    assert made_scores().top(1)["previous_token"].tolist() == [0.9]


# --- strict JSON ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([[1.0, math.nan]]), [[1.0, None]]),
        (torch.tensor(2.5), 2.5),
        (torch.tensor([1, 2]), [1, 2]),
        (torch.tensor([0.5, -math.inf], dtype=torch.bfloat16), [0.5, None]),
        (Path("a") / "b", "a/b"),
        ({(1, 10): 1, (1, 1): 2}, {"1.10": 1, "1.1": 2}),
        ({3: "x"}, {"3": "x"}),
        ((1, [2.0, None], "é"), [1, [2.0, None], "é"]),
        (-math.inf, None),
        (np.float64("nan"), None),
    ],
)
def test_framework_values_become_json_numbers(value, expected):
    found = strictly(strict_json({"value": value}))["value"]
    assert found == expected
    assert isinstance(found, bool) == isinstance(expected, bool)


def test_json_is_utf_8_and_a_line_where_asked():
    assert strict_json({"a": "é😀"}, indent=None) == '{"a": "é😀"}'


# --- whole files ----------------------------------------------------------------------------


def test_a_file_is_replaced_as_a_whole_and_readable_like_others(tmp_path):
    path = tmp_path / "x.txt"
    umask = os.umask(0o022)
    try:
        write_text(path, "one\n")
    finally:
        os.umask(umask)
    assert oct(path.stat().st_mode & 0o777) == "0o644"
    write_text(path, "é\n")
    assert path.read_bytes() == "é\n".encode()
    assert os.listdir(tmp_path) == ["x.txt"]


@pytest.mark.parametrize("text", ["x", "\ud800"], ids=["rename_fails", "encoding_fails"])
def test_a_write_that_fails_leaves_nothing_and_what_was_there(tmp_path, text):
    path = tmp_path / "x"
    if text == "x":
        (path / "inside").mkdir(parents=True)  # a file cannot replace a folder
    else:
        path.write_text("before")
    with pytest.raises((OSError, UnicodeEncodeError)):
        write_text(path, text)
    assert os.listdir(tmp_path) == ["x"]
    assert (path / "inside").is_dir() or path.read_text() == "before"


# --- heads ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "heads"),
    [
        ("0.1,1.2", [(0, 1), (1, 2)]),
        (["0.1", "1.2"], [(0, 1), (1, 2)]),
        ("0.1, 1.2", [(0, 1), (1, 2)]),
        ("0.1 1.2", [(0, 1), (1, 2)]),
        (["0.1,1.2", "0.1"], [(0, 1), (1, 2)]),
        ("0.1,1.2,", [(0, 1), (1, 2)]),
        (",0.1,,1.2", [(0, 1), (1, 2)]),
        ("1.2,0.1", [(1, 2), (0, 1)]),
        ("1.10", [(1, 10)]),
        ("L1H10", [(1, 10)]),
        ("l1h10", [(1, 10)]),
        ("1.1,1.10", [(1, 1), (1, 10)]),
        ("1.*", [(1, head) for head in range(12)]),
        ("L1H*", [(1, head) for head in range(12)]),
        ("1.3,1.*", [(1, 3), *((1, head) for head in range(12) if head != 3)]),
    ],
)
def test_heads_are_read_as_people_write_them(words, heads):
    assert parse_heads(words, 2, 12) == heads


@pytest.mark.parametrize("head", [(0, 0), (1, 1), (1, 10), (1, 11)])
def test_a_label_reads_back(head):
    assert parse_heads(head_label(*head), 2, 12) == [head]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("2.0", "head '2.0' is out of range: the model has layers 0 to 1 with heads 0 to 11"),
        ("1.12", "head '1.12' is out of range: the model has layers 0 to 1 with heads 0 to 11"),
        ("7.*", "head '7.*' is out of range: the model has layers 0 to 1 with heads 0 to 11"),
        ("1", "head '1': written like 5.1, L5H1, or 5.* for a whole layer"),
        ("-1.0", "head '-1.0': written like 5.1, L5H1, or 5.* for a whole layer"),
        ("1.0.1", "head '1.0.1': written like 5.1, L5H1, or 5.* for a whole layer"),
        ("*.1", "head '*.1': written like 5.1, L5H1, or 5.* for a whole layer"),
        ("0.1;1.2", "head '0.1;1.2': written like 5.1, L5H1, or 5.* for a whole layer"),
        ("", "no head was named"),
        (" , ", "no head was named"),
        ([], "no head was named"),
    ],
)
def test_other_words_are_refused_with_what_would_be_right(words, message):
    with pytest.raises(ShapeError) as caught:
        parse_heads(words, 2, 12)
    assert str(caught.value) == message
