"""What the documents tell a user to type works, word for word, on a tiny model."""

import importlib
import re
import shlex
from pathlib import Path

import hf_models
import numpy as np
import plotly.graph_objects as go
import pytest
import torch
from test_outlier_views import spiked, spiked_tokens
from tiny_tokenizers import gpt2_like
from typer.testing import CliRunner

import interp
from interp import registry
from interp.ablation.methods import METHODS
from interp.ablation.metrics import METRICS
from interp.cli import app
from interp.models.layer_attention import uniform_attention
from interp.models.loading import load_model, save_folder

ROOT = Path(__file__).parent.parent
SCORES, CONTRIBUTING = ROOT / "docs" / "scores.md", ROOT / "CONTRIBUTING.md"
ABLATION, REPORTS = ROOT / "docs" / "ablation.md", ROOT / "docs" / "reports.md"
OUTLIERS = ROOT / "docs" / "outliers.md"
MODEL = "smollm2-135m"
"""What documents call a model; here a tiny one has its place."""


def blocks(document, language):
    """The fenced blocks of a language in a document."""
    text = document.read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for own, block in found if own == language]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder of a tiny GPT-2 that reads text."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    hf_models.gpt2(vocab_size=270, bos_token_id=0, eos_token_id=0).save_pretrained(folder)
    gpt2_like().save_pretrained(folder)
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to work in; analyses that are made known here are forgotten afterwards."""
    for name in registry.names():
        registry.get(name)  # a module is run once
    monkeypatch.setattr(registry, "_added", {})
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*words):
    """What a command that works prints."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


def the_example(document):
    """The one analysis that a document spells out, written to `my_analysis.py`."""
    (code,) = blocks(document, "python")
    path = Path("my_analysis.py")
    path.write_text(code, encoding="utf-8")
    return path


def commands(document):
    """The words of each command that a document shows, without `interp`."""
    return [
        shlex.split(line, comments=True)[1:]
        for block in blocks(document, "")
        for line in block.splitlines()
        if line.startswith("interp ")
    ]


@pytest.mark.parametrize(
    ("document", "number"), [(SCORES, 5), (ABLATION, 11), (REPORTS, 9), (OUTLIERS, 8)]
)
def test_the_commands_of_a_page_run_as_they_stand(here, model, document, number):
    the_example(SCORES)
    np.save("tokens.npy", np.arange(20).reshape(2, 10))
    save_folder(load_model(model), Path("RUN/checkpoints/step-000500"))
    Path("RUN/run.json").write_text('{"kind": "train"}')
    Path("mine.txt").write_text("the cat sat on the mat, the dog on the log. " * 60)
    # Heads of the tiny model in place of those that the large one is known for.
    known = {MODEL: str(model), "18.6,17.3,29.8": "0.1,1.0,1.2"}
    if document == OUTLIERS:  # windows and groups that fit it
        known |= {"256": "12", "12": "5", "32": "4"}
    shown = commands(document)
    assert len(shown) >= number
    for command in shown:
        assert call(*(known.get(word, word) for word in command))


def test_the_python_of_the_page_on_reports_runs_as_it_stands(here, model, monkeypatch):
    loaded, shown = load_model(model), []
    monkeypatch.setattr(interp, "load_model", lambda ref: loaded, raising=False)
    monkeypatch.setattr(go.Figure, "show", lambda figure: shown.append(figure))
    (code,) = blocks(REPORTS, "python")
    exec(code, {})
    assert [len(figure.data) for figure in shown] == [1, 8]  # one head, eight heads


def test_every_figure_that_the_page_on_reports_names_is_there():
    rows = [
        line for line in REPORTS.read_text(encoding="utf-8").splitlines() if "interp.views" in line
    ]
    assert len(rows) == 11
    for row in rows:
        first, *others = re.findall(r"`([\w.]+)`", row.split("|")[2])
        module, _, name = first.rpartition(".")
        for function in (name, *others):
            assert callable(getattr(importlib.import_module(module), function))


def test_every_column_of_outliers_and_quantization_is_in_a_table_of_their_page():
    text = OUTLIERS.read_text(encoding="utf-8").partition("## Files and columns")[2]
    explained = {
        word
        for line in text.splitlines()
        if line.startswith("| `")
        for word in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    model, tokens = spiked(), spiked_tokens()
    found = [interp.outliers(model, tokens), interp.outlier_sinks(model, tokens)]
    found += [interp.outlier_effects(model, tokens, draws=1), interp.quantize(model, tokens)]
    written = {
        name
        for result in found
        for table in (result.table, *(getattr(result, own) for own in result._frames))
        for name in table.columns
    }
    assert written - {"head"} == explained
    for result in found:
        name = result.analysis.replace("-", "_")
        assert all(
            f"`{own}.csv`" in text for own in [name, *(f"{name}_{k}" for k in result._frames)]
        )


def test_every_method_metric_and_column_has_a_row_in_the_page_on_ablation(model):
    text = ABLATION.read_text(encoding="utf-8")
    firsts = {
        name
        for line in text.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`([^`]+)`", line.split("|")[1])
    }
    assert {*METHODS, "all", *METRICS, "logit-diff"} <= firsts
    table = interp.ablate(load_model(model), blocks=[8], batch=2).table
    told = {name.replace("<metric>", "loss") for name in firsts} | {"layer", "head", "n"}
    assert set(table) <= told


def test_the_analysis_of_the_page_on_scores_is_listed_run_and_has_its_parameter(here, model):
    path = the_example(SCORES)
    listed = call("list", "--from", path).splitlines()
    assert "on-token         Attention to one token." in listed
    words = [model, "--from", path, "--token", "13", "--format", "json"]
    assert '"token": 13' in call("on-token", *words, "--out", "out")
    assert sorted(file.name for file in Path("out").iterdir()) == [
        f"on_token.{ending}" for ending in ("csv", "html", "json")
    ]
    assert '"analysis": "on-token"' in call("scores", *words[:3], "--format", "json")
    # In Python the decorator is enough. The first token is BOS: on it, this is `sinks`.
    loaded = load_model(model)
    exec(path.read_text(encoding="utf-8"), {})
    mine = interp.analyze(loaded, "on-token", token=0)
    sinks = interp.analyze(loaded, "sinks")
    assert mine.matrix() == pytest.approx(sinks.matrix(), abs=1e-6)


@pytest.mark.parametrize("name", ["mine.py", "sub/../mine.py", "sub/link.py"])
def test_a_fault_in_a_users_analysis_is_one_line_however_its_file_is_named(here, model, name):
    code = the_example(SCORES).read_text().replace("attention.expected(there)", "attention.nothing")
    Path("mine.py").write_text(code)
    Path("sub").mkdir()
    Path("sub/link.py").symlink_to(Path("mine.py").resolve())
    result = CliRunner().invoke(app, ["on-token", str(model), "--from", name, "--block", "8"])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"interp: {name}:15: AttributeError: ")
    assert result.stderr.count("\n") == 1


def test_what_an_analysis_is_offered_is_there():
    attention = uniform_attention(torch.ones(1, 3, dtype=torch.bool))
    rows = SCORES.read_text(encoding="utf-8").split("| member | what it is |")[1]
    members = [
        name
        for row in rows.strip().splitlines()[1:]
        for name in re.findall(r"`(\w+)(?:\([\w, ]*\))?`", row.split("|")[1])
    ]
    assert len(members) >= 14
    for name in members:
        assert hasattr(attention, name), name


def test_the_analysis_to_contribute_runs(here, model):
    path = the_example(CONTRIBUTING)
    assert "my-score         What it returns, in one line" in call("list", "--from", path)
    entropy = interp.analyze(load_model(model), "entropy", blocks=[8])
    words = ["my-score", model, "--from", path, "--block", "8", "--format", "csv"]
    printed = call(*words, "--min-keys", "1").splitlines()
    assert printed[0].startswith("layer,head,my_score,my_score_se,my_score_null,n")
    assert len(printed) == 1 + len(entropy.table)
    assert call(*words) != call(*words, "--min-keys", "12")
