"""The `interp` command: what it prints and writes, and one line for every mistake."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner
from user_analyses import GOOD, one

import interp
from interp import registry
from interp.cli import app
from interp.errors import AnalysisError
from interp.measure import analyze
from interp.models.loading import load_model
from interp.tables import HeadScores

CONFIG = """
[model]
n_layers = 2
d_model = 24
n_ctx = 16
d_vocab = 19
bos_token_id = 0
tie_embeddings = true

[model.attention]
n_heads = 4
n_key_value_heads = 2

[train]
steps = 3
batch_size = 2
lr = 1e-2
checkpoint_every = 2
threads = 1

[data]
kind = "repeated"
span = [3, 6]

[probe]
every = 2
icl_early = [1, 3]
icl_late = [10, 15]
blocks = [4]
repeats = 2
sequences = 4
"""
TEXT_CONFIG = (
    CONFIG.replace("d_vocab = 19\nbos_token_id = 0", "d_vocab = 260")
    .replace("n_layers = 2", "n_layers = 1")
    .replace("tie_embeddings = true\n", "")
    .replace('kind = "repeated"\nspan = [3, 6]', 'kind = "text"\ncorpus = "corpus.txt"')
)
COMMANDS = ("induction", "previous-token", "sinks", "ablate")
HELP_MODULES = "{'torch', 'numpy', 'pandas', 'plotly', 'transformer_lens', 'safetensors'}"
TEXTS = {"token": str}
"""Columns of text; a tiny model's tokens are shown as their ids."""
runner = CliRunner()


def call(*words):
    """The result of a command that works."""
    result = runner.invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result


def tree(folder):
    """Every file below a folder with its content."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def refused(*words):
    """The one line of a command that is refused, which leaves every file here as it was."""
    before = tree(Path.cwd())
    result = runner.invoke(app, [str(word) for word in words])
    assert isinstance(result.exception, SystemExit), result.exc_info
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("interp: ")
    assert result.stderr.endswith("\n")
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert tree(Path.cwd()) == before
    return result.stderr.removeprefix("interp: ").removesuffix("\n")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on repeated tokens and a run on text, trained by the command."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        (folder / "tiny.toml").write_text(CONFIG)
        (folder / "text.toml").write_text(TEXT_CONFIG)
        (folder / "corpus.txt").write_text("the cat sat on the mat, the dog on the log. " * 50)
        call("train", "tiny.toml")
        call("train", "text.toml", "--out", "elsewhere/text")
    return folder


@pytest.fixture
def here(trained, tmp_path, monkeypatch):
    """An empty folder to run commands in, beside copies of the runs and their configs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(trained / "reports" / "tiny", tmp_path / "run")
    shutil.copytree(trained / "elsewhere" / "text", tmp_path / "text-run")
    for name in ("tiny.toml", "text.toml", "corpus.txt"):
        shutil.copy(trained / name, tmp_path / name)
    (tmp_path / "nothing").mkdir()
    np.save("tokens.npy", np.arange(36).reshape(3, 12) % 5)
    return tmp_path


# --- help and lists -------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--help"], ["ablate", "--help"], ["list"]])
def test_help_and_lists_import_nothing_heavy(words):
    code = (
        "import sys\n"
        "from interp.cli import app\n"
        f"app({words!r}, standalone_mode=False)\n"
        f"print('HEAVY', sorted({HELP_MODULES} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr == ""
    assert result.stdout.endswith("HEAVY []\n")


def test_every_verb_and_analysis_has_its_line_of_help():
    text = call("--help").stdout
    for name in ("train", "run", "ablate", "report", "info", "list", *registry.names()):
        assert re.search(rf"│ {name} +\S", text), name


def test_list_names_every_analysis_with_its_meaning():
    lines = call("list").stdout.splitlines()
    assert [line.split("  ")[0].strip() for line in lines] == list(registry.names())
    assert "Attention that goes to the first token." in lines[-1]


def test_run_list_names_the_configs_here_with_their_first_line(here):
    Path("configs").mkdir()
    Path("configs/b.toml").write_text("# The second.\n[model]\n")
    Path("configs/a.toml").write_text("# The first.\n")
    listed = "configs/a.toml  The first.\nconfigs/b.toml  The second.\n"
    assert call("run", "--list").stdout == call("run").stdout == listed


def test_info_gives_shapes_and_parameters_by_part(here):
    lines = call("info", "run").stdout.splitlines()
    assert lines[:7] == [
        "run: training run, run/checkpoints/step-000003",
        "layers 2, d_model 24, n_ctx 16, d_vocab 19",
        "attention GQA: 4 query heads over 2 key-value heads of width 6",
        "  causal, no QK norm, biases of q, k, v, o",
        "positions standard",
        "norm LN (eps 1e-05), attention-only, tied embeddings",
        "no tokenizer; BOS 0",
    ]
    model = load_model("run")
    total = sum(parameter.numel() for parameter in model.parameters())
    assert lines[8] == f"parameters {total:,}"
    rows = [re.fullmatch(r"  (\S.*?) +([\d,]+) +[\d.]+%", line) for line in lines[9:]]
    parts = {row[1]: int(row[2].replace(",", "")) for row in rows if row}
    # A tied unembedding has no parameters of its own.
    heads = {"attention Q", "attention K", "attention V", "attention O"}
    assert parts.keys() == {"embed", "positions", "norms"} | heads
    assert parts["embed"] == 19 * 24
    assert sum(parts.values()) == total
    assert call("info", "run@0").stdout.startswith(
        "run@0: training run, run/checkpoints/step-000000\n"
    )
    untied = call("info", "text-run").stdout
    assert re.search(r"\n  unembed +6,240 ", untied)  # 260 tokens of 24
    assert re.search(r"\n  embed +6,240 ", untied)


# --- results --------------------------------------------------------------------------------


def expected_table(command):
    model = load_model("run")
    if command == "ablate":
        return interp.ablate(model).table
    return analyze(model, command).table


@pytest.mark.parametrize("command", COMMANDS)
def test_csv_and_json_are_the_result_and_nothing_else(here, command):
    table = expected_table(command)
    printed = call(command, "run", "--format", "csv")
    assert printed.stderr == ""
    read = pd.read_csv(io.StringIO(printed.stdout), dtype=TEXTS)
    pd.testing.assert_frame_equal(read, table)
    printed = call(command, "run", "--format", "json")
    assert printed.stderr == ""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    saved = json.loads(printed.stdout, parse_constant=refuse)
    pd.testing.assert_frame_equal(pd.DataFrame(saved["table"]), table)
    assert (saved["model"], saved["seed"]) == ("run", 0)
    assert saved["params"]["blocks"] == [7]
    assert (
        saved["inputs"]
        == "[BOS = 0] + blocks of 7 distinct random tokens twice, 8 sequences of each"
    )
    assert not Path("reports").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_table_has_the_strongest_head_first_and_says_what_it_is(here, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "400")  # a number in a narrow column is folded
    printed = call(command, "run")
    assert printed.stderr == ""
    table = expected_table(command)
    column = table.columns[2]
    sizes = table[column].abs() if command == "ablate" else table[column]
    best = table.loc[sizes.idxmax()]
    rows = [line.split("│")[1:3] for line in printed.stdout.splitlines() if "│" in line]
    first = next(row for row in rows if row[0].strip())
    assert first[0].strip() == f"{int(best['layer'])}.{int(best['head'])}"
    assert float(first[1].split("±")[0]) == pytest.approx(best[column], abs=5e-5)
    name = {"ablate": "ablation"}.get(command, command)
    assert printed.stdout.startswith(f"{name} of run")
    errors = "nats, ± one standard error over n = 8"
    unit = errors if command == "ablate" else "attention probability"
    assert f"{unit}; [BOS = 0] + blocks of 7 distinct random tokens twice" in printed.stdout
    assert "seed 0" in printed.stdout


def test_no_column_of_a_table_is_cut_on_a_narrow_terminal(here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert "…" not in call("ablate", "run").stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_out_gets_three_files_and_the_same_again(here, command):
    name = {"ablate": "ablation", "previous-token": "previous_token"}.get(command, command)
    printed = call(command, "run", "--out", "deep/er")
    files = [f"deep/er/{name}.{ending}" for ending in ("csv", "json", "html")]
    assert printed.stderr == f"written: {', '.join(files)}\n"
    first = tree(here / "deep")
    assert sorted(first) == sorted(["er", *(f"er/{name}.{e}" for e in ("csv", "html", "json"))])
    quiet = call(command, "run", "--out", "deep/er", "--format", "json")
    assert quiet.stderr == ""
    assert tree(here / "deep") == first
    assert quiet.stdout.encode() == first[f"er/{name}.json"]
    pd.testing.assert_frame_equal(pd.read_csv(files[0], dtype=TEXTS), expected_table(command))
    assert HeadScores.load(Path(files[1])).analysis == name.replace("_", "-")
    page = first[f"er/{name}.html"].decode("utf-8")
    assert "<html" in page
    assert not re.search(r'<script[^>]+src=|<link[^>]+href="http', page)
    assert call("report", "deep/er").stdout == "deep/er/report.html\n"


def test_two_processes_write_identical_files(here):
    words = ["ablate", "run", "--seed", "7", "--out"]
    call(*words, "1")
    # Another hash seed than that of this process orders sets differently.
    result = subprocess.run(
        [sys.executable, "-m", "interp", *words, "2"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert tree(here / "1") == tree(here / "2")
    assert len(tree(here / "1")) == 3


def test_tokens_are_taken_exactly_as_given(here):
    printed = call("induction", "run", "--tokens", "tokens.npy", "--format", "json").stdout
    scores = analyze(load_model("run"), "induction", np.load("tokens.npy"))
    assert printed == scores.to_json() + "\n"
    ids = np.load("tokens.npy").astype(np.uint8)
    np.save("bytes.npy", ids)
    np.save("row.npy", ids[0])
    again = call("induction", "run", "--tokens", "bytes.npy", "--format", "json").stdout
    assert again == printed
    assert "1 given sequence of 12 tokens" in call("sinks", "run", "--tokens", "row.npy").stdout


def test_tokens_of_exactly_n_ctx_are_taken_and_one_more_are_not(here):
    for width in (16, 17):
        np.save(f"{width}.npy", np.arange(2 * width).reshape(2, width) % 7)
    call("sinks", "run", "--tokens", "16.npy")
    for command in COMMANDS:
        assert refused(command, "run", "--tokens", "17.npy") == "sequence 17 > n_ctx 16"


def test_text_is_cut_into_windows(here):
    printed = call("induction", "text-run", "--text", "corpus.txt", "--format", "json").stdout
    saved = json.loads(printed)
    ids = load_model("text-run").vocabulary.encode(Path("corpus.txt").read_text())[0]
    n_windows = len(ids) // 16
    assert saved["inputs"] == f"{n_windows} windows of 16 tokens from corpus.txt"
    assert saved["params"]["shape"] == [n_windows, 16]
    windows = np.array(ids[: n_windows * 16]).reshape(n_windows, 16)
    table = analyze(load_model("text-run"), "induction", windows).table
    pd.testing.assert_frame_equal(pd.DataFrame(saved["table"]), table)
    call("ablate", "text-run", "--text", "corpus.txt", "--heads", "0.0")


def test_blocks_and_batch_and_seed_are_those_asked_for(here):
    words = ["--block", "4,5", "--batch", "3", "--seed", "2", "--format", "json"]
    saved = json.loads(call("sinks", "run", *words).stdout)
    params = {"blocks": [4, 5], "batch": 3, "bos": 0, "null": "uniform"}
    assert saved["params"].items() >= params.items()
    assert saved["seed"] == 2
    assert [row["n"] for row in saved["table"]] == [6] * 8
    assert call("induction", "run", "--block", "3").exit_code == 0


@pytest.mark.parametrize(
    ("words", "heads"),
    [
        (["--heads", "0.1,1.2"], [(0, 1), (1, 2)]),
        (["--heads", "0.1", "--heads", "1.2"], [(0, 1), (1, 2)]),
        (["--heads", "0.1, 1.2"], [(0, 1), (1, 2)]),
        (["--heads", "0.1,1.2,"], [(0, 1), (1, 2)]),
        (["--heads", "L0H1 L1H2"], [(0, 1), (1, 2)]),
        (["--heads", "1.*"], [(1, 0), (1, 1), (1, 2), (1, 3)]),
    ],
)
def test_heads_are_written_in_any_of_the_usual_ways(here, words, heads):
    table = pd.read_csv(io.StringIO(call("ablate", "run", *words, "--format", "csv").stdout))
    assert list(zip(table["layer"], table["head"], strict=True)) == heads
    assert np.isfinite(table["ablation"]).all()


def test_a_checkpoint_of_a_step_is_another_model(here):
    first, last = (call("sinks", ref, "--format", "csv").stdout for ref in ("run@0", "run"))
    assert first != last
    assert call("sinks", "run@3", "--format", "csv").stdout == last
    assert call("sinks", "run/checkpoints/step-000003", "--format", "csv").stdout == last


def test_results_and_runs_are_reported_by_their_folder(here):
    Path("run/report.html").unlink()
    assert call("report", "run").stdout == "run/report.html\n"
    page = Path("run/report.html").read_bytes()
    call("report", "run")
    assert Path("run/report.html").read_bytes() == page
    model = load_model("run")
    results = [analyze(model, name) for name in ("sinks", "induction")]
    page = interp.report(results, "made/by/hand.html").read_text("utf-8")
    assert page.index(">Sinks<") < page.index(">Induction<")
    with pytest.raises(AnalysisError, match="no results to report"):
        interp.report([], "made/empty.html")
    assert not Path("made/empty.html").exists()


# --- all analyses, corpora, a user's own file ------------------------------------------------


@pytest.fixture
def mine(here, monkeypatch):
    """A user's own file, forgotten afterwards."""
    for name in registry.names():
        registry.get(name)  # a module is run once
    monkeypatch.setattr(registry, "_added", {})
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    Path("mine.py").write_text(GOOD)
    return Path("mine.py")


def test_the_flags_of_an_analysis_are_its_parameters(here):
    for name, description in registry.described().items():
        text = call(name, "--help").stdout
        for parameter in description.parameters:
            assert parameter.flag in text, (name, parameter)
    text = " ".join(call("induction", "--help").stdout.split())
    assert re.search(r"--effect <float> how far above its null .* \[default: 0.1\]", text)
    saved = json.loads(call("induction", "run", "--effect", "0.25", "--format", "json").stdout)
    assert saved["params"]["effect"] == 0.25
    table = analyze(load_model("run"), "induction", effect=0.25).table
    pd.testing.assert_frame_equal(pd.DataFrame(saved["table"]), table)


def test_a_corpus_is_read_in_windows_of_its_held_out_files(here):
    words = ["--corpus", "docs", "--length", "12", "--sequences", "9", "--format", "json"]
    for command in ("sinks", "ablate"):
        saved = json.loads(call(command, "text-run", *words).stdout)
        assert saved["inputs"].startswith("9 windows of 12 tokens from 9 documents of docs (held")
        assert saved["params"].items() >= {"corpus": "docs", "documents": 9, "length": 12}.items()
    again = call("ablate", "text-run", *words).stdout
    assert json.loads(again) == saved
    other = json.loads(call("ablate", "text-run", *words, "--seed", "1").stdout)
    assert other["table"] != saved["table"]
    text = ["--text", "corpus.txt", "--length", "8", "--sequences", "3", "--format", "json"]
    saved = json.loads(call("sinks", "text-run", *text).stdout)
    assert saved["params"]["shape"] == [3, 8]


def joined(printed):
    return pd.read_csv(io.StringIO(printed))


def test_scores_are_those_of_each_analysis_alone(here):
    printed = call("scores", "run", "--only", "induction,sinks", "--only", "entropy,sinks,")
    lines = printed.stdout.splitlines()
    for name in ("induction", "sinks", "entropy"):
        assert sum(line.startswith(f"{name}: strongest ") for line in lines) == 1
    assert re.fullmatch(r"3 analyses of 8 heads in \d+\.\d s\n", printed.stderr)
    names = list(registry.names())
    printed = call("scores", "run", "--format", "csv")
    told = dict(re.findall(r"^left out: ([\w-]+): (.*)$", printed.stderr, re.MULTILINE))
    table = joined(printed.stdout)
    able = [name for name in names if name not in told]
    assert {"induction", "sinks", "previous-token", "entropy"} <= set(able)
    assert list(table) == ["layer", "head", *(name.replace("-", "_") for name in able)]
    for name in able:
        column = name.replace("-", "_")
        alone = joined(call(name, "run", "--format", "csv").stdout)
        assert np.allclose(table[column], alone[column], atol=1e-6), name
    for name, reason in told.items():
        assert refused(name, "run") == reason
    printed = call("scores", "run", "--only", "sinks,induction", "--format", "json")
    assert [one["analysis"] for one in json.loads(printed.stdout)] == ["sinks", "induction"]


def test_scores_name_and_leave_out_what_given_tokens_do_not_allow(here):
    np.save("plain.npy", np.stack([np.arange(12), np.arange(1, 13)]))
    words = ["run", "--tokens", "plain.npy"]
    printed = call("scores", *words, "--format", "csv")
    told = dict(re.findall(r"^left out: ([\w-]+): (.*)$", printed.stderr, re.MULTILINE))
    assert {"retrieval", "induction"} <= told.keys()
    assert told["induction"].startswith("induction is not measurable on these tokens: 2 given")
    table = joined(printed.stdout)
    assert "induction" not in table
    alone = joined(call("sinks", *words, "--format", "csv").stdout)
    assert np.allclose(table["sinks"], alone["sinks"], atol=1e-6)
    message = refused("scores", *words, "--only", "induction")
    assert message.startswith("nothing could be measured: induction: induction is not measurable")


def test_scores_take_one_pass_for_each_kind_of_tokens(here, monkeypatch):
    from interp import measure

    passes = []
    watched = measure.watch_attention
    monkeypatch.setattr(
        measure, "watch_attention", lambda *given: passes.append(given) or watched(*given)
    )
    call("scores", "run", "--only", "sinks,entropy,distance", "--tokens", "tokens.npy")
    assert len(passes) == 1
    passes.clear()
    # Their null is a pass of its own, one for both.
    call("scores", "run", "--only", "sinks,induction,duplicate-token", "--tokens", "tokens.npy")
    assert len(passes) == 2


def test_out_of_scores_gets_every_table_and_one_page(here):
    words = ["--only", "sinks,previous-token", "--out", "out"]
    printed = call("scores", "run", *words)
    files = ["sinks.csv", "sinks.json", "previous_token.csv", "previous_token.json", "scores.html"]
    assert sorted(tree(here / "out")) == sorted(files)
    assert printed.stderr.startswith(f"written: {', '.join(f'out/{name}' for name in files)}\n")
    page = Path("out/scores.html").read_text("utf-8")
    assert page.index(">Sinks<") < page.index(">Previous token<")
    first = tree(here / "out")
    call("scores", "run", *words, "--format", "json")
    assert tree(here / "out") == first


def test_a_users_own_file_gets_a_command_like_any_other(mine):
    listed = call("list", "--from", "mine.py").stdout.splitlines()
    assert "my-score         Attention some tokens back." in listed
    assert "plain" in listed
    text = " ".join(
        re.sub("[│╭╮╰╯─]", " ", call("my-score", "--help", "--from=mine.py").stdout).split()
    )
    for words in (
        "Attention some tokens back.",
        "--offset <int> how far back [tokens] [default: 1]",
        "--share <float> [default: 0.5]",
        "--strict --no-strict",
        "--from <path>",
        "--corpus",
    ):
        assert words in text, words
    words = ["my-score", "run", "--share", "1", "--no-strict", "--from", "mine.py"]
    saved = json.loads(call(*words, "--format", "json").stdout)
    own = {"offset": 1, "share": 1.0, "strict": False, "label": "x", "effect": 0.2}
    assert saved["params"].items() >= own.items()
    alone = joined(call("previous-token", "run", "--format", "csv").stdout)
    column = pd.DataFrame(saved["table"])["my_score"]
    assert np.allclose(column, alone["previous_token"], atol=1e-6)
    call(*words, "--out", "out")
    assert sorted(tree(Path("out"))) == ["my_score.csv", "my_score.html", "my_score.json"]
    table = joined(call("scores", "run", "--from", "mine.py", "--format", "csv").stdout)
    assert {"my_score", "plain", "sinks"} <= set(table)
    assert refused("my-score", "run", "--from", "mine.py", "--offset", "x").startswith(
        "Invalid value for '--offset': Input should be a valid integer"
    )
    message = refused("my-scor", "run", "--from", "mine.py")
    assert message.startswith("No such command 'my-scor'. Did you mean 'my-score'")
    assert refused("sinks", "run", "--from", "mine.py").startswith("No such option: --from")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n", "mine.py: not a Python file: invalid syntax"),
        ("x = 1\n", "mine.py: no function in it stands under @interp.analysis"),
        (one("sinks"), "mine.py: there is an analysis 'sinks' already; rename this one"),
        (one("train"), "mine.py: 'train' is a verb of interp already; rename this one"),
        (one("scores"), "mine.py: 'scores' is a verb of interp already; rename this one"),
        (one(keywords="offset: int"), "mine.py: the parameter 'offset' should be annotated as"),
        (
            one(keywords="seed: int = 3"),
            "mine.py: the parameter 'seed' of my-score is the name of something that every",
        ),
        (one(top="import nowhere_at_all"), "mine.py: ModuleNotFoundError: No module named"),
        (one(top="raise ValueError('two\\nlines')"), "mine.py: ValueError: two lines"),
        (one(body="return attention.nothing"), "mine.py:7: AttributeError: "),
        (one(body="return {'other': 1}"), "my-score returned the columns ['other']; the first"),
        (one(), "my-score returned int for 'my_score'; it should be [batch, n_heads]"),
    ],
)
def test_a_users_file_with_a_fault_is_one_line(mine, text, message):
    mine.write_text(text)
    assert refused("my-score", "run", "--from", "mine.py").startswith(message)


# --- training -------------------------------------------------------------------------------


def test_a_run_goes_to_reports_under_the_name_of_its_config(trained):
    names = {path.name for path in (trained / "reports" / "tiny").iterdir()}
    assert names == {
        "checkpoints",
        "config.toml",
        "metrics.jsonl",
        "probes.csv",
        "report.html",
        "run.json",
        "timing.jsonl",
    }
    text = {path.name for path in (trained / "elsewhere" / "text").iterdir()}
    assert text - names == {"tokenizer.json"}


def test_seed_device_and_set_reach_the_saved_config(here):
    words = ["--seed", "3", "--device", "cpu", "--set", "model.tie_embeddings=false"]
    result = call("train", "tiny.toml", "--out", "other", "--set", "train.steps=1", *words)
    assert result.stdout == "other/report.html\n"
    assert re.search(r"^step 1/1  loss \d", result.stderr, re.MULTILINE)
    saved = Path("other/config.toml").read_text()
    assert "seed = 3" in saved
    assert "tie_embeddings = false" in saved
    config = json.loads(Path("other/checkpoints/step-000001/config.json").read_text())
    assert config["model"]["tie_embeddings"] is False
    facts = json.loads(Path("other/run.json").read_text())
    assert facts["seeds"] == {"init": 3, "data": 3, "probe": 0}
    first = [Path(run, "metrics.jsonl").read_text().split("\n")[0] for run in ("run", "other")]
    assert first[0] != first[1]


def test_the_same_command_again_gives_the_same_numbers_and_weights(here):
    call("train", "tiny.toml", "--out", "again")
    for name in ("metrics.jsonl", "probes.csv", "config.toml"):
        assert Path("again", name).read_bytes() == Path("run", name).read_bytes(), name
    assert tree(here / "again" / "checkpoints") == tree(here / "run" / "checkpoints")


def test_resume_carries_a_run_further_as_if_it_had_not_stopped(here):
    call("train", "tiny.toml", "--out", "run", "--resume", "--set", "train.steps=5")
    call("train", "tiny.toml", "--out", "whole", "--set", "train.steps=5")
    last = "checkpoints/step-000005/model.safetensors"
    assert Path("run", last).read_bytes() == Path("whole", last).read_bytes()


def test_resume_deletes_no_file_of_the_users(here):
    Path("mine").mkdir()
    Path("mine/.keep").write_text("mine")
    runner.invoke(app, ["train", "tiny.toml", "--out", "mine", "--resume"])
    assert Path("mine/.keep").read_text() == "mine"


def test_an_interrupted_run_says_how_to_continue(here, monkeypatch):
    def interrupt(*words, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr("interp.training.loop.train", interrupt)
    result = runner.invoke(app, ["train", "tiny.toml", "--out", "new"])
    assert result.exit_code == 130
    assert result.stderr == "interp: interrupted; --resume continues\n"


def test_an_experiment_is_the_function_run_of_the_file_its_config_names(here):
    Path("configs").mkdir()
    Path("configs/x.toml").write_text(CONFIG + '[experiment]\nfile = "../x.py"\nextra = [1]\n')
    Path("x.py").write_text(
        "def run(config, out, *, resume, command, say):\n"
        "    say('working')\n"
        "    return out / f'{config.train.steps}-{config.experiment[\"extra\"]}-{resume}'\n"
    )
    result = call("run", "configs/x.toml", "--set", "train.steps=9", "--resume")
    assert result.stdout == "reports/x/9-[1]-True\n"
    assert result.stderr == "working\n"


# --- mistakes -------------------------------------------------------------------------------

BLOCK_1_OR_2 = (
    "should be at least 3: with 1 the induction target is the query itself, with 2 it is the "
    "previous token"
)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("induction ./nowhere", "no model './nowhere': no such file or folder"),
        ("export run out", "no model type that transformers knows has this shape: gpt2 has no "),
        ("induction run@7", "run has no checkpoint '7'; its steps: 0, 2, 3"),
        ("induction run --block 1", f"--block 1 {BLOCK_1_OR_2}"),
        ("induction run --block 2", f"--block 2 {BLOCK_1_OR_2}"),
        ("induction run --block 8,2", f"--block 2 {BLOCK_1_OR_2}"),
        ("induction run --block 8", "block = 8: 16 tokens are longer than n_ctx = 16; at most 7"),
        ("induction run --block x", "--block x: one number, or several with commas between"),
        ("induction run --block -3", "--block -3: one number, or several with commas between"),
        ("induction run --block ,", "--block ,: one number, or several with commas between"),
        (
            "ablate run --heads 9.9",
            "head '9.9' is out of range: the model has layers 0 to 1 with heads 0 to 3",
        ),
        (
            "ablate run --heads 1.4",
            "head '1.4' is out of range: the model has layers 0 to 1 with heads 0 to 3",
        ),
        ("ablate run --heads x", "head 'x': written like 5.1, L5H1, or 5.* for a whole layer"),
        ("ablate run --heads ,", "no head was named"),
        ("ablate run --metric acuracy", "no metric 'acuracy'; known: loss, second-copy-loss, "),
        ("ablate run --method means", "no ablation method 'means'; known: zero, mean, resample, "),
        ("sinks run --tokens none.npy", "none.npy: no such file"),
        ("sinks run --text none.txt", "none.txt: no such file"),
        ("sinks run --tokens run", "run: no such file"),
        ("sinks run --text corpus.txt", "this model has no tokenizer: give --tokens, not text"),
        (
            "sinks run --text corpus.txt --tokens tokens.npy",
            "--tokens and --text: one source of tokens at a time",
        ),
        (
            "scores run --text corpus.txt --corpus docs",
            "--text and --corpus: one source of tokens at a time",
        ),
        (
            "ablate run --corpus docs --block 4",
            "--corpus and --block: one source of tokens at a time",
        ),
        ("sinks run --corpus none", "no corpus 'none': it should be stdlib or docs, or the path"),
        ("sinks text-run --corpus configs", "no corpus 'configs': it should be stdlib or docs,"),
        ("sinks text-run --corpus nothing", "nothing: no UTF-8 text file in this folder"),
        ("sinks run --corpus corpus.txt", "this model has no tokenizer: give --tokens, not text"),
        ("sinks text-run --corpus corpus.txt --length 17", "length = 17 is longer than n_ctx = 16"),
        ("sinks text-run --text corpus.txt --length 17", "length = 17 is longer than n_ctx = 16"),
        ("scores text-run --text corpus.txt --length 99", "length = 99 is longer than n_ctx = 16"),
        ("sinks run --length 8", "--length is for windows of text: --text or --corpus"),
        ("sinks run --sequences 8", "--sequences is for windows of text: --text or --corpus"),
        (
            "sinks run --tokens tokens.npy --batch 2",
            "--tokens and --batch: that is the number of random sequences",
        ),
        (
            "sinks text-run --corpus docs --length -5",
            "Invalid value for '--length': Input should be gre",
        ),
        (
            "sinks text-run --corpus docs --length 1",
            "Invalid value for '--length': Input should be gre",
        ),
        (
            "sinks text-run --corpus docs --length x",
            "Invalid value for '--length': Input should be a v",
        ),
        (
            "sinks text-run --corpus docs --sequences 0",
            "Invalid value for '--sequences': Input should be",
        ),
        (
            "induction run --effect x",
            "Invalid value for '--effect': Input should be a valid number",
        ),
        ("induction run --effect nan", "--effect nan: not a number"),
        ("induction run --efect 0.1", "No such option: --efect"),
        ("scores run --only ,", "--only: no analysis was named"),
        ("scores run --only sinks,inductoin", "no analysis 'inductoin'; did you mean 'induction'?"),
        ("list --from none.py", "none.py: no such file"),
        ("scores run --from none.py", "none.py: no such file"),
        ("list --from corpus.txt", "corpus.txt: not a Python file: "),
        ("list --from", "Option '--from' requires an argument."),
        ("train tiny.toml --from none.py", "No such option: --from"),
        ("ablate run --from none.py", "No such option: --from"),
        ("my-score run", "No such command 'my-score'."),
        (
            "sinks run --block 3 --text corpus.txt",
            "--text and --block: one source of tokens at a time",
        ),
        ("sinks nowhere --out corpus.txt", "corpus.txt is a file, not a folder for results"),
        ("sinks nowhere --out corpus.txt/x/y", "corpus.txt is a file, not a folder for results"),
        ("sinks run --device gpu", "device = 'gpu' cannot be used here: Expected one of cpu, "),
        ("sinks run --device meta", "device = 'meta' cannot be used here: "),
        ("report nowhere", "nowhere: no such folder; a report is made of a folder of results"),
        ("report cache", "cache: no such folder"),
        (
            "info corpus.txt",
            "corpus.txt is a file; a model is a folder, a .gguf file or a Hub id",
        ),
        (
            "train tiny.toml --out run",
            "run already holds something: --resume continues a run, --out names another folder",
        ),
        ("train tiny.toml --out corpus.txt", "corpus.txt is a file, not a folder for a run"),
        ("train tiny.toml --out corpus.txt/x", "corpus.txt/x cannot be written: Not a directory"),
        ("train none.toml", "none.toml: no such config file"),
        ("train corpus.txt", "corpus.txt: not valid TOML: "),
        (
            "train tiny.toml --out new --set train.step=3",
            "tiny.toml: unknown key train.step; did you mean steps? known: batch_size, betas,",
        ),
        (
            "train tiny.toml --out new --set model.attention.n_key_value_heads=3",
            "tiny.toml: model.attention.n_key_value_heads = 3 does not divide n_heads = 4; one of "
            "1, 2, 4 would",
        ),
        ("train tiny.toml --out new --set train.steps", "--set train.steps: expected key.subkey="),
        ("train tiny.toml --out new --device gpu", "device = 'gpu' cannot be used here: "),
        (
            "train text.toml --out new --set data.corpus=none.txt",
            "no corpus 'none.txt': it should be stdlib or docs, or the path of a text file",
        ),
        (
            "train tiny.toml --out run --resume --set train.lr=3",
            "run holds a run of another config: train.lr differ",
        ),
        (
            "run tiny.toml",
            "tiny.toml: no [experiment] with a file; `interp train tiny.toml` trains its model",
        ),
        (
            "run tiny.toml --set experiment.file=none.py",
            "tiny.toml: experiment.file = 'none.py': no such file",
        ),
        # What the parser itself refuses.
        ("sink run", "No such command 'sink'. Did you mean 'sinks'?"),
        ("sinks", "Missing argument 'model'."),
        ("sinks run --nonsense", "No such option: --nonsense"),
        ("sinks run --block", "Option '--block' requires an argument."),
        ("sinks run --format xml", "Invalid value for '--format': "),
        ("sinks run --batch 0", "Invalid value for '--batch': "),
        ("sinks run --seed x", "Invalid value for '--seed': "),
        ("sinks run more", "Got unexpected extra argument"),
    ],
)
def test_a_mistake_is_one_line_with_exit_code_2_and_leaves_nothing_behind(here, words, message):
    assert refused(*words.split()).startswith(message)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 9)), "token ids should be integers, got float64"),
        (np.full((2, 9), 19), "token ids should be within 0 and d_vocab - 1 = 18"),
        (np.full((2, 9), -1), "token ids should be within 0 and d_vocab - 1 = 18"),
        (np.zeros((2, 3, 4), int), "token ids should be [batch, pos], got [2, 3, 4]"),
        (np.zeros((0, 9), int), "the tokens are empty"),
        (np.zeros((2, 9), bool), "token ids should be integers, got bool"),
    ],
    ids=["floats", "too_large", "negative", "three_axes", "empty", "booleans"],
)
def test_an_array_that_holds_no_token_ids_is_refused(here, command, array, message):
    np.save("bad.npy", array)
    assert refused(command, "run", "--tokens", "bad.npy") == message


@pytest.mark.parametrize(
    "content",
    [b"", b"no array", b"\x93NUMPY\x01\x00", b"PK\x03\x04 no archive"],
    ids=["empty", "text", "cut_short", "broken_archive"],
)
def test_a_file_that_is_no_array_is_refused(here, content):
    Path("bad.npy").write_bytes(content)
    message = refused("sinks", "run", "--tokens", "bad.npy")
    assert message == "bad.npy: not an array of numbers in a .npy file"


def test_an_array_of_objects_is_never_unpickled(here):
    class Explosive:
        def __reduce__(self):
            return (exec, ("raise AssertionError('the pickle was run')",))

    np.save("bad.npy", np.array([Explosive()], dtype=object), allow_pickle=True)
    message = refused("sinks", "run", "--tokens", "bad.npy")
    assert message == "bad.npy: not an array of numbers in a .npy file"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "bad.txt: the text file is empty"),
        (b" \n", "bad.txt: the text file is empty"),
        (b"\x89PNG\xff", "bad.txt: not a UTF-8 text file"),
        (b"a", "bad.txt: a text of 1 tokens says nothing of attention"),
    ],
    ids=["empty", "blank", "binary", "one_letter"],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_text_that_says_nothing_is_refused(here, command, content, message):
    Path("bad.txt").write_bytes(content)
    assert refused(command, "text-run", "--text", "bad.txt") == message


def test_a_corpus_that_is_no_text_is_refused_before_anything_is_written(here):
    words = ["train", "text.toml", "--out", "new", "--set", "data.corpus=bad.txt"]
    Path("bad.txt").write_bytes(b"\xff")
    assert refused(*words) == "bad.txt: not a UTF-8 text file"
    Path("bad.txt").write_bytes(b"")
    assert refused(*words) == "bad.txt: the text file is empty"


def test_tokens_without_repeats_have_no_induction(here):
    np.save("bad.npy", np.arange(12)[None])
    assert refused("induction", "run", "--tokens", "bad.npy").startswith(
        "induction is not measurable on these tokens: 1 given sequence of 12 tokens"
    )
    np.save("short.npy", np.arange(7)[None])
    assert refused("sinks", "run", "--tokens", "short.npy").startswith("sinks is not measurable")
    np.save("one.npy", np.array([[1]]))
    assert refused("ablate", "run", "--tokens", "one.npy") == (
        "the metric loss is defined nowhere in these sequences: no place is read"
    )


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("damage", ["cut_short", "missing"])
@pytest.mark.parametrize("words", ["sinks run", "ablate run", "info run"])
def test_a_damaged_checkpoint_is_named(here, words, damage, name):
    path = Path("run/checkpoints/step-000003", name)
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:50])
    said = "is cut short" if damage == "cut_short" else "is missing: the checkpoint is incomplete"
    assert refused(*words.split()).startswith(f"{path} {said}")


def test_a_resume_from_a_damaged_checkpoint_is_refused(here):
    path = Path("run/checkpoints/step-000003/optimizer.safetensors")
    path.write_bytes(path.read_bytes()[:50])
    message = refused("train", "tiny.toml", "--out", "run", "--resume")
    assert message.startswith(f"{path} is cut short or is not a safetensors file: ")


@pytest.mark.parametrize("ending", ["csv", "json", "html"])
def test_a_result_that_cannot_be_written_leaves_no_part_of_a_file(here, ending):
    call("sinks", "run", "--out", "whole")
    Path("out", f"sinks.{ending}").mkdir(parents=True)  # a file cannot replace a folder
    result = runner.invoke(app, ["sinks", "run", "--out", "out", "--format", "csv"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.fullmatch(r"interp: .*: Is a directory\n", result.stderr)
    written = tree(here / "out")
    del written[f"sinks.{ending}"]
    assert written.items() <= tree(here / "whole").items()


def test_a_damaged_result_is_named_by_report(here):
    Path("out").mkdir()
    Path("out/sinks.json").write_text('{"analysis": "sinks", "table": ')
    assert refused("report", "out").startswith("out/sinks.json: not JSON: ")
    Path("out/sinks.json").write_text('{"analysis": "sinks"}')
    assert refused("report", "out").startswith("out/sinks.json: not a head-score file: ")
    Path("out/sinks.json").unlink()
    assert refused("report", "out").startswith("out: nothing to report: no run.json")


def test_the_installed_command_has_no_traceback_either(here):
    result = subprocess.run(
        [sys.executable, "-m", "interp", "sink", "run"], capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "interp: No such command 'sink'. Did you mean 'sinks'?\n"


def test_commands_leave_torch_as_they_found_it(here):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    call("ablate", "run", "--heads", "0.0")
    call("sinks", "run")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
