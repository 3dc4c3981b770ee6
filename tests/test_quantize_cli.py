"""`interp quantize`: what it prints, writes, saves and refuses."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from tiny_models import tiny
from tiny_tokenizers import reader
from typer.testing import CliRunner

import interp
from interp.cli import app, options
from interp.cli import quantization as verb
from interp.models.loading import save_folder
from interp.quantization import quantize

TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8], [1, 6, 1, 8, 0, 3, 3, 9]])
GIVEN = ("--tokens", "tokens.npy")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model that reads text and one that does not, each in a folder, and tokens."""
    folder = tmp_path_factory.mktemp("models")
    save_folder(reader(), folder / "reader")
    save_folder(tiny(), folder / "model")
    np.save(folder / "tokens.npy", TOKENS)
    return folder


@pytest.fixture
def here(models, tmp_path, monkeypatch):
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words):
    """What `interp quantize` gives, whether it works or not."""
    return CliRunner().invoke(app, ["quantize", *map(str, words)])


def test_the_command_prints_what_the_function_measures(here):
    words = ("--bits", "w8a8,w4a16", "--weight-scales", "group", "--group-size", "4", "--affine")
    printed = run("model", *GIVEN, *words, "--format", "json")
    assert printed.exit_code == 0, printed.output
    given = {"bits": ["w8a8", "w4a16"], "weight_scales": "group", "group": 4, "affine": True}
    measured = quantize(interp.load_model("model"), TOKENS, **given)
    assert json.loads(printed.stdout)["table"] == json.loads(measured.to_json())["table"]
    assert len(measured.table) == 12


def test_every_number_reaches_the_recipes(here, monkeypatch):
    """Each is unlike its default, and stands in the result's parameters."""
    words = {"alpha": 0.25, "threshold": 3.5, "fold": "norms", "magnitude": 7.0, "ratio": 9.0}
    flags = [word for name, value in words.items() for word in (f"--{name}", value)]
    more = ("--scheme", "smoothquant,llm.int8", "--activation-scales", "token", "--seed", "5")
    printed = run("model", *GIVEN, *flags, *more, "--format", "json")
    assert printed.exit_code == 0, printed.output
    result = json.loads(printed.stdout)
    assert {name: result["params"][name] for name in words} == words
    assert result["seed"] == 5
    kinds = {(row["scheme"], row["activation_scales"]) for row in result["table"]}
    assert kinds == {("smoothquant", "token"), ("llm.int8", "vector")}


def test_the_command_writes_its_files_and_joins_a_report(here):
    printed = run("model", *GIVEN, "--out", "found")
    assert printed.exit_code == 0, printed.output
    assert "quantization of model" in printed.stdout
    assert "round-to-nearest W8A8 per tensor" in printed.stdout
    names = {"quantization.csv", "quantization.json", "quantization_layers.csv"}
    written = {path.name for path in (here / "found").iterdir()}
    assert written == {*names, "quantization.html"}
    assert all(f"found/{name}" in printed.stderr for name in names)
    assert len(pd.read_csv("found/quantization.csv")) == 10
    assert CliRunner().invoke(app, ["report", "found"]).exit_code == 0
    assert "What rounding costs" in (here / "found" / "report.html").read_text("utf-8")


def test_the_saved_model_has_the_rounded_weights_and_loads_again(here):
    words = ("--scheme", "round-to-nearest", "--bits", "w2a16", "--save", "small")
    printed = run("model", *GIVEN, *words)
    assert printed.exit_code == 0, printed.output
    assert "written: small" in printed.stderr
    before, after = interp.load_model("model"), interp.load_model("small")
    name = "blocks.0.attn.q_proj.weight"
    weight, rounded = before.get_parameter(name), after.get_parameter(name)
    assert not torch.equal(weight, rounded)
    # Two bits, symmetric: -1, 0 and 1 times one scale a row.
    assert all(len(row.abs().unique()) <= 2 for row in rounded.detach())


def test_a_model_that_reads_text_is_measured_on_text(here, monkeypatch):
    monkeypatch.setattr("interp.text_inputs.CORPUS_SEQUENCES", 4)
    words = ("--scheme", "round-to-nearest", "--format", "json")
    assert "of docs (held out" in json.loads(run("reader", *words).stdout)["inputs"]
    random = run("reader", *words, "--block", "5", "--batch", "2").stdout
    assert "random" in json.loads(random)["inputs"]
    assert "random" in json.loads(run("model", *words, "--batch", "2").stdout)["inputs"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--scheme", "gptq"), "scheme 'gptq': it should be one of round-to-nearest, llm.int8"),
        (("--scheme", ","), "--scheme: nothing is named"),
        (("--scheme", "awq"), "awq with w8a8: it is for weights alone, such as w4a16"),
        (("--bits", "8"), "bits '8': written like w8a8 or w4a16"),
        (("--bits", "w1a8"), "each of 2 to 8 bits, or 16"),
        (("--bits", ""), "--bits: nothing is named"),
        (("--activation-scales", "channel"), "activation scales 'channel': it should be one of"),
        (("--weight-scales", "row"), "Invalid value for '--weight-scales'"),
        (("--alpha", "1.5"), "Invalid value for '--alpha'"),
        (("--alpha", "nan"), "Invalid value for '--alpha'"),
        (("--threshold", "0"), "threshold = 0: it is above 0"),
        (("--group-size", "1"), "Invalid value for '--group-size'"),
        (("--group-size", "32"), "--group-size is for --weight-scales group"),
        (("--out", "tokens.npy"), "tokens.npy is a file, not a folder for results"),
        (("--save", "new"), "--save writes one model: name one --scheme and one --bits"),
        (
            ("--save", "new", "--scheme", "awq", "--bits", "w4a16,w3a16"),
            "--save writes one model: name one --scheme and one --bits",
        ),
        (
            ("--save", "new", "--scheme", "llm.int8"),
            "--save with llm.int8: which of its weights are rounded depends on each input",
        ),
        (("--save", "model", "--scheme", "smoothquant"), "model is not empty"),
        (("--save", "tokens.npy", "--scheme", "smoothquant"), "tokens.npy is not empty"),
        (
            ("--save", "new", "--scheme", "smoothquant", "--out", "new/found"),
            "--save new holds --out: a model has a folder of its own",
        ),
        (("--tokens", "tokens.npy", "--corpus", "docs"), "one source of tokens at a time"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_read(here, monkeypatch, words, said):
    def read(*given, **more):
        raise AssertionError("a model was read")

    for module in (verb, options):
        monkeypatch.setattr(module, "load_named_model", read)
    refused = run("model", *words)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert said in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_calibration_without_a_second_sequence_is_refused_in_one_line(here):
    np.save("one.npy", TOKENS[:1])
    refused = run("model", "--tokens", "one.npy", "--scheme", "smoothquant")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "smoothquant calibrates on sequences that are not evaluated" in refused.stderr
    assert refused.stderr.count("\n") == 1
