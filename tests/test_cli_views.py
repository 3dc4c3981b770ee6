"""`interp attend` and `interp report`: what they print, write and refuse."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from pages import Elements, figures_of, without_library
from plotly.offline import get_plotlyjs
from tiny_models import tiny
from tiny_tokenizers import reader
from typer.testing import CliRunner

import interp
from interp.cli import app
from interp.models.loading import save_folder
from interp.patterns import Patterns
from interp.training.head_results import save_head_results
from interp.views.pages.run_tables import HEADS, head_results

runner = CliRunner()
TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]]


def call(*words):
    """The result of a command that works."""
    result = runner.invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result


def refused(*words):
    """The one line of a command that is refused."""
    result = runner.invoke(app, [str(word) for word in words])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.removeprefix("interp: ").removesuffix("\n")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model with a vocabulary and one without, each in a folder."""
    folder = tmp_path_factory.mktemp("models")
    save_folder(reader(), folder / "reader")
    save_folder(tiny(), folder / "ids")
    np.save(folder / "tokens.npy", np.array(TOKENS))
    return folder


@pytest.fixture
def here(models, tmp_path, monkeypatch):
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_attend_prints_a_table_and_writes_three_files_under_the_models_name(here):
    result = call("attend", "reader", "ab ab")
    folder = Path("reports/attend-reader")
    assert sorted(path.name for path in folder.iterdir()) == [
        "attention.csv",
        "attention.html",
        "attention.json",
    ]
    assert "from uniform" in result.stdout
    assert "one sequence, so no standard errors" in result.stdout
    assert result.stderr.startswith(f"written: {folder}/attention.csv")
    assert len(pd.read_csv(folder / "attention.csv")) == 8
    assert len(Patterns.load(folder / "attention.json").drawn) == 8


def test_attend_reads_a_file_of_text_and_a_file_of_ids(here):
    Path("text.txt").write_text("ab ab", encoding="utf-8")
    call("attend", "reader", "--text", "text.txt", "--out", "a")
    call("attend", "reader", "ab ab", "--out", "b")
    assert Path("a/attention.json").read_bytes() == Path("b/attention.json").read_bytes()
    call("attend", "ids", "--tokens", "tokens.npy", "--index", 1, "--out", "c")
    assert Patterns.load("c/attention.json").params["ids"] == TOKENS[1]


def test_a_text_file_is_read_without_its_mark_of_byte_order_and_with_its_line_breaks(here):
    Path("text.txt").write_bytes(b"\xef\xbb\xbfab\r\nab")
    call("attend", "reader", "--text", "text.txt", "--out", "file")
    call("attend", "reader", "ab\r\nab", "--out", "words")
    file, words = (Patterns.load(f"{name}/attention.json") for name in ("file", "words"))
    assert file.tokens == words.tokens


def test_attend_says_of_all_heads_that_they_are_all_and_of_some_how_many(here, monkeypatch):
    assert "every head, the furthest from even" in call("attend", "reader", "ab ab").stdout
    monkeypatch.setattr("interp.views.terminal.scores.ROWS", 3)
    assert "the 3 of 8 heads furthest from" in call("attend", "reader", "ab ab").stdout


def test_attend_on_one_token_orders_no_heads(here):
    np.save("one.npy", np.array([[5]]))
    result = call("attend", "ids", "--tokens", "one.npy", "--out", "out")
    assert "no head has two keys to attend to" in result.stdout
    assert "furthest" not in result.stdout
    page = Path(call("report", "out").stdout.strip()).read_text(encoding="utf-8")
    assert "no head has a value" in Elements(without_library(page)).text


def test_attend_prints_csv_or_json_and_nothing_else(here):
    words = ("attend", "ids", "--tokens", "tokens.npy", "--index", 0, "--format")
    table = call(*words, "csv").stdout
    assert table == Path("reports/attend-ids/attention.csv").read_text()
    record = json.loads(call(*words, "json").stdout)
    assert record["tokens"] == list(map(str, TOKENS[0]))


def test_attend_opens_the_page_only_where_asked(here, monkeypatch):
    opened = []
    monkeypatch.setattr("typer.launch", opened.append)
    call("attend", "reader", "ab", "--out", "a")
    assert opened == []
    call("attend", "reader", "ab", "--out", "a", "--open")
    assert opened == ["a/attention.html"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["reader"], "nothing to look at: give one of a text in quotes, --text FILE, and"),
        (["reader", "ab", "--tokens", "tokens.npy"], "TEXT and --tokens: give one of"),
        (["reader", "--text", "none.txt"], "none.txt: no such file"),
        (["reader", "--text", "empty.txt"], "empty.txt: the text file is empty"),
        (["ids", "--tokens", "one.npy", "--index", "1"], "index = 1: there is one sequence, 0"),
        (["reader", "--text", "tokens.npy"], "tokens.npy: not a UTF-8 text file"),
        (["reader", "ab", "--index", "0"], "--index chooses a sequence of --tokens, and none"),
        (["ids", "--tokens", "tokens.npy"], "2 sequences were given, and one is looked at: index"),
        (["ids", "--tokens", "tokens.npy", "--index", "2"], "index = 2: the 2 sequences are"),
        (["ids", "--tokens", "tokens.npy", "--no-bos"], "--tokens and --no-bos: ids are taken"),
        (["ids", "ab"], "this model has no tokenizer"),
        (["reader", "ab", "--heads", "x"], "head 'x': written like 5.1"),
        (["reader", "ab", "--heads", "9.9"], "head '9.9' is out of range"),
        (["reader", ""], "the text is empty"),
        (["reader", "ab" * 500], "sequence"),
        (["reader", "ab", "--out", "tokens.npy"], "tokens.npy is a file, not a folder"),
        (["nowhere", "ab"], "nowhere"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(here, words, line):
    Path("empty.txt").touch()
    np.save("one.npy", np.array([3, 1, 4]))
    assert refused("attend", *words).startswith(line)
    assert not Path("reports").exists()


def test_report_assembles_what_commands_wrote_into_one_folder(here):
    for verb in ("induction", "sinks"):
        call(verb, "reader", "--out", "out", "--block", 4)
    call("ablate", "reader", "--out", "out", "--block", 4)
    call("attend", "reader", "ab ab", "--out", "out")
    assert call("report", "out").stdout == "out/report.html\n"
    page = Path("out/report.html").read_text(encoding="utf-8")
    text = Elements(without_library(page)).text
    for heading in ("Explorer", "Ablation", "Attention", "Induction", "Sinks"):
        assert heading in text
    facts = explorer_facts(page)
    (subject,) = facts["subjects"]
    assert subject["name"] == "reader"
    names = [score["name"] for score in subject["scores"]]
    assert "Induction" in names
    assert "Induction, on the text" in names
    assert any(name.startswith("Ablation, zero") for name in names)
    assert [score["effect"] for score in subject["scores"]].count(True) >= 1
    assert len(figures_of(page)) >= 5


def explorer_facts(page):
    body = page.split('id="explorer-data"', 1)[1]
    return json.loads(body[body.index(">") + 1 : body.index("</script>")])


def test_report_of_several_folders_is_one_page_in_the_folder_that_holds_them(here):
    call("induction", "reader", "--out", "out/a", "--block", 4)
    call("sinks", "ids", "--out", "out/b", "--block", 4)
    assert call("report", "out/a", "out/b").stdout == "out/report.html\n"
    page = Path("out/report.html").read_text(encoding="utf-8")
    elements = Elements(without_library(page))
    assert len(set(elements.ids)) == len(elements.ids)
    assert [one["name"] for one in explorer_facts(page)["subjects"]] == ["reader", "ids"]
    assert not Path("out/a/report.html").exists()
    assert call("report", "out/a", "out/b", "--out", "x").stdout == "x/report.html\n"
    assert Path("x/report.html").read_text(encoding="utf-8") == page
    assert call("report", "out/a", "out/b", "--out", "y/all.html").stdout == "y/all.html\n"


def test_the_same_results_give_the_same_bytes_and_a_stamp_only_where_asked(here):
    call("attend", "reader", "ab ab", "--out", "out")
    call("report", "out")
    first = Path("out/report.html").read_bytes()
    call("report", "out")
    assert Path("out/report.html").read_bytes() == first
    call("report", "out", "--stamp")
    assert b" UTC" in Path("out/report.html").read_bytes()
    assert b" UTC" not in first.replace(get_plotlyjs().encode(), b"")


def test_a_page_needs_no_network_unless_asked_to_be_small(here):
    call("attend", "reader", "ab ab", "--out", "out")
    page = Path("out/attention.html").read_text(encoding="utf-8")
    assert [
        value for tag, name, value in Elements(page).attributes if (tag, name) == ("script", "src")
    ] == []
    call("report", "out", "--cdn")
    small = Path("out/report.html").read_text(encoding="utf-8")
    sources = [
        value for tag, name, value in Elements(small).attributes if (tag, name) == ("script", "src")
    ]
    assert len(sources) == 1
    assert sources[0].startswith("https://cdn.plot.ly/plotly-")
    assert len(small) < 300_000


def test_images_without_kaleido_are_a_line_and_the_page_is_written(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "kaleido", None)
    call("attend", "reader", "ab ab", "--out", "out")
    result = runner.invoke(app, ["report", "out", "--png"])
    assert result.exit_code == 2
    assert result.stdout == "out/report.html\n"
    assert "kaleido" in result.stderr
    assert Path("out/report.html").is_file()


def test_report_of_nothing_is_refused(here):
    Path("empty").mkdir()
    assert refused("report", "empty").startswith("empty: nothing to report")
    assert refused("report", "nowhere").startswith("nowhere: no such folder")
    assert refused("report", "tokens.npy").startswith("tokens.npy is a file; a report is made of")
    call("attend", "reader", "ab", "--out", "outer/inner")
    assert refused("report", "outer").endswith("; its own folders are not read: inner")


def test_files_of_other_programs_are_passed_over(here):
    call("attend", "reader", "ab", "--out", "out")
    call("report", "out")
    page = Path("out/report.html").read_bytes()
    Path("out/package.json").write_text('{"name": "x", "analysis": {"rules": []}}')
    Path("out/list.json").write_text('["analysis"]')
    Path("out/folder.json").mkdir()
    call("report", "out/")
    assert Path("out/report.html").read_bytes() == page


def test_the_page_goes_into_the_folder_that_holds_all_however_they_are_written(here, monkeypatch):
    call("attend", "reader", "ab", "--out", "a/in")
    call("attend", "reader", "ab", "--out", "b")
    (here / "c").mkdir()
    monkeypatch.chdir(here / "c")
    assert call("report", "../a/in", "../b").stdout == f"{here}/report.html\n"
    assert call("report", "../c/../a/in", here / "b").stdout == f"{here}/report.html\n"
    monkeypatch.chdir(here)
    assert call("report", "a/../a/in", "./b/").stdout == "report.html\n"


def test_python_reports_patterns_beside_scores(here):
    model = interp.load_model("reader")
    results = [interp.attend(model, "ab ab"), interp.ablate(model, blocks=[4], batch=2)]
    page = interp.report(results, "made.html").read_text(encoding="utf-8")
    (subject,) = explorer_facts(page)["subjects"]
    assert len(subject["texts"]) == 1


def test_the_experiments_heads_are_read_where_it_puts_them(here):
    run = here / "run"
    for step in (0, 5):
        save_folder(tiny(seed=step), run / "checkpoints" / f"step-{step:06d}")
    folder = here / HEADS / "two-layer-seed-3"
    save_head_results(run, folder, torch.tensor(TOKENS), block=4, seed=3)
    patterns, ablation = head_results(here, ("two-layer", "3"))
    assert list(patterns) == [0, 5]
    assert len(patterns[5].tokens) == 8
    assert ablation is not None
    assert len(ablation.table) == 8
    assert head_results(here, ("one-layer", "3")) == ({}, None)
