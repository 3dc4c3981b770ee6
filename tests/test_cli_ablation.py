"""`interp ablate`, `interp importance` and `interp prune`: flags, files, refusals, resuming."""

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tiny_models import perturbed, tiny, tiny_config
from typer.testing import CliRunner

import interp
from interp.ablation.sweep import JOURNAL
from interp.cli import app
from interp.cli.progress import QUIET_SECONDS, SweepProgress
from interp.inputs import random_inputs
from interp.models.loading import load_model, save_folder

runner = CliRunner()
WORDS = ("--block", "5", "--batch", "4")


def call(*words):
    """The result of a command that works."""
    result = runner.invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result


def csv_of(*words):
    """The table that a command prints as CSV."""
    return pd.read_csv(io.StringIO(call(*words, "--format", "csv").stdout))


def files():
    """Every file here with its content."""
    return {p.as_posix(): p.read_bytes() for p in Path().rglob("*") if p.is_file()}


def refusal(*words):
    """The one line of a command that is refused and leaves everything as it was."""
    before = files(), sorted(Path().rglob("*"))
    result = runner.invoke(app, [str(word) for word in words])
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.count("\n") == 1, result.stderr
    assert (files(), sorted(Path().rglob("*"))) == before
    return result.stderr.removeprefix("interp: ").rstrip("\n")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of tiny models; `wide` has eleven heads in a layer."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("mha", "llama"):
        save_folder(tiny(name), folder / name)
    config = tiny_config(d_model=22, attention={"n_heads": 11, "d_head": 2})
    save_folder(perturbed(config), folder / "wide")
    save_folder(tiny("mha", n_layers=12, n_ctx=64), folder / "deep")
    call("prune", folder / "mha", *WORDS, "--heads", "0.*,1.*", "--out", folder / "headless")
    return folder


@pytest.fixture(scope="module")
def plain(saved):
    """What `interp.ablate` gives of `llama` without a flag, as JSON."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(saved)
        return interp.ablate(load_model("llama"), blocks=[5], batch=4).to_json()


@pytest.fixture
def here(saved, tmp_path, monkeypatch):
    """A folder to run commands in; the models' names are links."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for model in saved.iterdir():
        (tmp_path / model.name).symlink_to(model)
    np.save("tokens.npy", np.arange(36).reshape(3, 12) % 5)
    np.save("others.npy", (np.arange(36).reshape(3, 12) * 3 + 1) % 7)
    return tmp_path


# --- heads --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "heads"),
    [
        (["--heads", "0.1,1.2"], [(0, 1), (1, 2)]),
        (["--heads", "0.1", "--heads", "1.2"], [(0, 1), (1, 2)]),
        (["--heads", "0.1, 1.2"], [(0, 1), (1, 2)]),
        (["--heads", "0.1,1.2,"], [(0, 1), (1, 2)]),
        (["--heads", "L0H1 L1H2"], [(0, 1), (1, 2)]),
        (["--heads", "1.2", "--heads", "0.1,1.2"], [(1, 2), (0, 1)]),
        (["--heads", "1.10"], [(1, 10)]),
        (["--heads", "1.1,1.10"], [(1, 1), (1, 10)]),
        (["--heads", "1.*"], [(1, head) for head in range(11)]),
        ([], [(layer, head) for layer in range(2) for head in range(11)]),
    ],
)
def test_heads_are_written_in_any_of_the_usual_ways(here, words, heads):
    table = csv_of("ablate", "wide", *WORDS, "--no-direct", *words)
    assert list(zip(table["layer"], table["head"], strict=True)) == heads
    assert table["ablation"].notna().all()


def test_a_table_of_head_1_10_reads_back_as_head_10(here):
    call("ablate", "wide", *WORDS, "--heads", "1.10,1.1", "--out", "out")
    table = pd.read_csv("out/ablation.csv")
    assert table[["layer", "head"]].to_numpy().tolist() == [[1, 10], [1, 1]]
    table = interp.HeadScores.load("out/ablation.json").table
    assert table["head"].tolist() == [10, 1]
    effects = interp.ablate(load_model("wide"), blocks=[5], batch=4, heads="1.10").table
    assert table["ablation"][0] == pytest.approx(effects["ablation"][0], abs=1e-7)


def test_of_a_pruned_model_the_heads_that_are_left_are_ablated(here):
    call("prune", "mha", *WORDS, "--heads", "1.0,1.2", "--out", "out")
    table = csv_of("ablate", "out/model", *WORDS, "--heads", "1.*")
    assert table["head"].tolist() == [1, 3]
    message = refusal("ablate", "out/model", "--heads", "1.2")
    assert message == "head 1.2 is pruned from this model"


@pytest.mark.parametrize("words", ["", "--layers", "--site v", "--method all", "--plan"])
def test_a_model_without_any_head_has_nothing_to_ablate(here, words):
    message = refusal("ablate", "headless/model", *WORDS, *words.split(), "--out", "more")
    assert message == "headless/model has no head left: all of them are pruned"


# --- what each flag does to the numbers ---------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ([], {}),
        (["--method", "mean"], {"method": "mean"}),
        (["--method", "mean", "--pooled"], {"method": "mean", "pooled": True}),
        (
            ["--method", "mean", "--reference", "repeats"],
            {"method": "mean", "reference": "repeats"},
        ),
        (["--method", "resample"], {"method": "resample"}),
        (["--method", "resample", "--draws", "2"], {"method": "resample", "draws": 2}),
        (["--method", "patch"], {"method": "patch"}),
        (["--method", "pattern-preserving"], {"method": "pattern-preserving"}),
        (["--method", "all"], {"method": "all"}),
        (["--metric", "second-copy-loss"], {"metric": "second-copy-loss"}),
        (["--metric", "last-token"], {"metric": "last-token"}),
        (["--metric", "kl"], {"metric": "kl"}),
        (["--metric", "accuracy"], {"metric": "accuracy"}),
        (
            ["--metric", "logit-diff", "--answer", "3", "--against", "4"],
            {"metric": "logit-diff", "answer": 3, "against": 4},
        ),
        (["--positions", "2:4,-1"], {"positions": [slice(2, 4), -1]}),
        (["--site", "k"], {"site": "k"}),
        (["--site", "v"], {"site": "v"}),
        (["--no-direct"], {"direct": False}),
        (["--pairs"], {"kind": "pairs"}),
        (["--all-but-one"], {"kind": "all-but-one"}),
        (["--layers"], {"kind": "layers"}),
        (["--cumulative", "--heads", "1.1,0.2"], {"kind": "cumulative", "heads": "1.1,0.2"}),
        (["--dtype", "bfloat16"], {"dtype": "bfloat16"}),
        (["--seed", "3"], {"seed": 3}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_flag_is_the_argument_of_that_name(here, plain, words, given):
    printed = json.loads(call("ablate", "llama", *WORDS, *words, "--format", "json").stdout)
    result = interp.ablate(load_model("llama"), blocks=[5], batch=4, **given)
    assert printed == json.loads(result.to_json())
    assert bool(words) == (result.to_json() != plain)


def test_given_tokens_are_ablated_by_the_mean_of_a_reference_that_a_file_holds(here):
    words = ("--tokens", "tokens.npy", "--method", "mean", "--reference")
    first = csv_of("ablate", "mha", *words, "others.npy")
    model, tokens = load_model("mha"), np.load("tokens.npy")
    others = np.load("others.npy")
    own = interp.ablate(model, tokens, method="mean", reference=others).table
    pd.testing.assert_frame_equal(first, own)
    itself = csv_of("ablate", "mha", *words, "tokens.npy")
    assert not np.allclose(itself["ablation"], first["ablation"])


def test_the_number_of_sequences_is_the_one_that_was_asked_for(here):
    assert set(csv_of("ablate", "mha", *WORDS)["n"]) == {4}
    assert set(csv_of("ablate", "mha", "--block", "4,5", "--batch", "3")["n"]) == {6}
    assert set(csv_of("ablate", "mha", "--tokens", "tokens.npy")["n"]) == {3}


def test_bfloat16_says_how_far_it_strays(here):
    printed = call("ablate", "mha", *WORDS, "--dtype", "bfloat16").stdout
    assert "bfloat16 strays from float32 by " in " ".join(printed.split())


def test_the_table_says_how_and_on_what_it_was_measured(here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    printed = call("ablate", "mha", *WORDS, "--method", "mean").stdout
    assert "ablation of mha" in printed
    assert "4 sequences of random tokens that do not repeat" in printed
    assert "over n = 4" in printed


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--method means", "no ablation method 'means'; known: zero, mean, resample, patch, "),
        ("--metric x", "no metric 'x'; known: loss, second-copy-loss, last-token, kl, accuracy, l"),
        ("--site q", "Invalid value for '--site': "),
        ("--heads x", "head 'x': written like 5.1, L5H1, or 5.* for a whole layer"),
        ("--heads 1", "head '1': written like 5.1"),
        ("--heads ,", "no head was named"),
        ("--site v --heads x", "KV head 'x': written like 5.1"),
        ("--resume", "--resume goes on with what is noted in --out: name that folder"),
        ("--plan --resume --out out", "--plan runs nothing: there is nothing to --resume"),
        ("--plan --format csv", "--plan has no table: --format json has its numbers"),
        ("--pairs --layers", "--pairs and --layers: one kind of sweep"),
        ("--layers --heads 0.1", "layers are ablated whole: no heads are named"),
        ("--cumulative", "a cumulative sweep needs heads, in the order of their removal"),
        ("--pairs --direct", "--direct and --pairs: the direct effect is of heads or whole layers"),
        ("--draws 2", "--draws belongs to --method resample, and it is zero"),
        ("--draws 0 --method resample", "Invalid value for '--draws': "),
        ("--draws 99999999999999999999 --method resample", "Invalid value for '--draws': "),
        ("--pooled", "zero has no mean to pool: mean has"),
        ("--reference repeats", "zero has no reference: mean and patch do"),
        ("--method mean --reference none.npy", "none.npy: no such file"),
        ("--method mean --reference bad.npy", "bad.npy: not an array of numbers in a .npy file"),
        ("--method mean --reference none", "no corpus 'none': it should be stdlib or docs"),
        ("--method mean --reference=", "no corpus '': it should be stdlib or docs"),
        ("--corpus=", "no corpus '': it should be stdlib or docs"),
        ("--method pattern-preserving --site k", "keys make the pattern: it cannot be kept"),
        ("--answer 3", "answer and against go together, and belong to logit-diff"),
        ("--answer 3 --against 4", "answer and against go together, and belong to logit-diff"),
        ("--metric logit-diff", "logit-diff needs the tokens of an answer and of one against it"),
        ("--metric kl --positions 1", "positions belong to the metric loss"),
        ("--positions x", "--positions x: places and ranges such as 10:20,-1"),
        ("--positions 1:2:3", "--positions 1:2:3: places and ranges such as 10:20,-1"),
        ("--positions ,", "--positions ,: no place was named"),
        ("--dtype float16", "Invalid value for '--dtype': "),
        ("--tokens none.npy", "none.npy: no such file"),
        ("--out tokens.npy", "tokens.npy is a file, not a folder for results"),
    ],
)
def test_a_mistake_is_told_before_there_is_a_model(here, words, message):
    Path("bad.npy").write_bytes(b"no array")
    assert refusal("ablate", "nowhere", *words.split()).startswith(message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--heads 2.0",
            "head '2.0' is out of range: the model has layers 0 to 1 with heads 0 to 3",
        ),
        ("--site v --heads 1.2", "KV head '1.2' is out of range: the model has layers 0 to 1"),
        ("--heads 0.1 --pairs", "pairs need two heads"),
        (
            "--metric logit-diff --answer 3 --against 99",
            "answers should be within 0 and d_vocab - ",
        ),
        ("--metric logit-diff --answer a --against b", "llama has no tokenizer: give token ids"),
        (
            "--metric logit-diff --answer 3 --against \u0663",
            "llama has no tokenizer: give token ids",
        ),
        (
            f"--metric logit-diff --answer 3 --against {2**70}",
            "answers are token ids, or text: Overflow",
        ),
        (
            "--tokens tokens.npy --method mean --reference short.npy --plan",
            "the reference (3 given ",
        ),
        ("--batch 1 --method resample", "resample needs two sequences of each length, and there"),
        ("--positions 40", "the metric loss is defined nowhere in these sequences"),
        ("--tokens tokens.npy --method patch --reference others.npy --batch 2", "--tokens and --b"),
        ("--exclude-bos", "llama has no BOS token to leave out"),
    ],
)
def test_what_the_model_does_not_allow_is_one_line_and_leaves_no_file(here, words, message):
    np.save("short.npy", np.arange(12).reshape(3, 4) % 5)
    assert refusal("ablate", "llama", *words.split(), "--out", "out").startswith(message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "importance nowhere --metric accuracy",
            "importance follows a gradient, and accuracy has ",
        ),
        ("importance nowhere --metric x", "no metric 'x'; known: loss"),
        ("importance nowhere --sample 1", "Invalid value for '--sample': "),
        ("prune nowhere --backend bridge", "pruning needs the native backend: "),
        ("prune nowhere --order importance --out out", "--order and --share go together, such as "),
        ("prune nowhere --share 0.3 --out out", "--order and --share go together, such as "),
        ("prune nowhere --order best --share 0.3 --out out", "no order 'best'"),
        ("prune nowhere --order random --share 1 --out out", "--share 1: more than 0 and less "),
        ("prune nowhere --heads 0.1", "the pruned model is written into --out: name a folder"),
        ("prune nowhere --heads x --out out", "head 'x': written like 5.1"),
        ("prune nowhere --heads 0.1 --order random --out out", "--heads names what is removed: "),
        ("prune nowhere --heads 0.1 --step 0.1 --out out", "--step is of the curves"),
        ("prune nowhere --heads 0.1 --metric kl --out out", "--metric ranks heads, and --heads "),
        ("prune nowhere --heads 0.1 --format csv --out out", "a pruned model has no table: "),
        ("prune nowhere --heads 0.1 --out full", "full/model is not empty: a model is written "),
        ("prune nowhere --metric logit-diff", "--metric logit-diff needs the answers"),
        ("prune mha --heads 9.9 --out out", "head '9.9' is out of range: the model has layers 0 "),
        ("prune mha --order random --share 0.01 --out out", "--share 0.01 of 8 heads is less than"),
    ],
)
def test_importance_and_pruning_refuse_what_cannot_be(here, words, message):
    Path("full/model").mkdir(parents=True)
    Path("full/model/file").write_text("kept")
    assert refusal(*words.split()).startswith(message)


# --- plan ---------------------------------------------------------------------------------------


def test_a_plan_says_what_it_would_take_and_writes_nothing(here):
    before = files(), sorted(Path().rglob("*"))
    printed = call("ablate", "mha", *WORDS, "--method", "all", "--plan", "--out", "out")
    assert (files(), sorted(Path().rglob("*"))) == before
    lines = printed.stdout.splitlines()
    assert lines[0] == "8 heads, one at a time; method: zero, mean, resample in 4 draws"
    assert lines[1].endswith("in 1 part: 54 ablated passes")
    assert [line.split(":")[0] for line in lines[2:]] == [
        "operations",
        "floor",
        "estimated time",
        "estimated peak memory",
    ]
    plan = json.loads(call("ablate", "mha", *WORDS, "--plan", "--pairs", "--format", "json").stdout)
    assert (plan["sets"], plan["kind"], plan["sequences"]) == (36, "pairs", 4)


# --- files, and going on ------------------------------------------------------------------------


def test_out_gets_the_table_the_record_and_the_page_and_no_journal(here):
    for words, name in (
        ((), "ablation"),
        (("--pairs",), "pairs"),
        (("--all-but-one",), "all_but_one"),
        (("--layers",), "layers"),
    ):
        out = Path("out", name)
        printed = call("ablate", "mha", *WORDS, *words, "--out", out)
        endings = ("csv", "html", "json")
        assert sorted(path.name for path in out.iterdir()) == [f"{name}.{e}" for e in endings]
        written = ", ".join(f"{out}/{name}.{e}" for e in ("csv", "json", "html"))
        assert printed.stderr == f"written: {written}\n"
        assert "<html" in (out / f"{name}.html").read_text(encoding="utf-8")


def interrupted_after(monkeypatch, n):
    """Ctrl-C in the n-th group of ablations."""
    from interp.ablation import measuring

    whole, calls = measuring._group, []

    def group(*given):
        calls.append(given)
        if len(calls) > n:
            raise KeyboardInterrupt
        return whole(*given)

    monkeypatch.setattr(measuring, "_group", group)
    return calls


def test_an_interrupted_sweep_says_how_it_goes_on_and_does(here, monkeypatch):
    call("ablate", "deep", *WORDS, "--out", "whole")
    with monkeypatch.context() as patch:
        interrupted_after(patch, 5)
        result = runner.invoke(app, ["ablate", "deep", *WORDS, "--out", "out"])
        assert result.exit_code == 130
        assert result.stdout == ""
        assert result.stderr == "interp: interrupted; --resume --out out goes on from here\n"
        assert [path.name for path in Path("out").iterdir()] == [JOURNAL]
        result = runner.invoke(app, ["ablate", "deep", *WORDS])
        assert result.stderr == "interp: interrupted\n"
    message = refusal("ablate", "deep", *WORDS, "--out", "out")
    assert message.startswith(f"out/{JOURNAL} is of an unfinished sweep: --resume goes on with it")
    message = refusal("ablate", "deep", *WORDS, "--seed", "1", "--out", "out", "--resume")
    assert message.startswith(f"out/{JOURNAL} is of another sweep: ")
    with monkeypatch.context() as patch:
        calls = interrupted_after(patch, 1000)
        call("ablate", "deep", *WORDS, "--out", "out", "--resume")
    assert len(calls) == 12 - 5 + 1  # a layer's heads go together; the strongest come last
    for name in ("ablation.csv", "ablation.json", "ablation.html"):
        assert Path("out", name).read_bytes() == Path("whole", name).read_bytes()
    assert not Path("out", JOURNAL).exists()


def test_a_killed_command_goes_on_to_the_same_bytes(here):
    # Two seconds of some three hundred lines, of which a dozen have to be there in time.
    words = ["ablate", "deep", "--block", "18", "--batch", "16"]
    words += ["--metric", "kl", "--method", "all"]
    call(*words, "--out", "whole")
    process = subprocess.Popen(
        [sys.executable, "-m", "interp", *words, "--out", "out"], stdout=subprocess.DEVNULL
    )
    journal = Path("out", JOURNAL)
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") > 10:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.01)
    assert process.wait() == -signal.SIGKILL
    assert [path.name for path in Path("out").iterdir()] == [JOURNAL]
    known = journal.read_bytes()
    with journal.open("ab") as file:
        file.write(b'{"key": ["zero", 0')  # what was being written
    call(*words, "--out", "out", "--resume")
    assert known.count(b"\n") > 10
    for name in ("ablation.csv", "ablation.json", "ablation.html"):
        assert Path("out", name).read_bytes() == Path("whole", name).read_bytes()
    assert not journal.exists()


def test_a_table_that_cannot_be_written_is_named_and_its_numbers_are_kept(here):
    Path("out/ablation.csv").mkdir(parents=True)
    result = runner.invoke(app, ["ablate", "mha", *WORDS, "--out", "out"])
    assert result.exit_code == 2
    assert result.stderr == "interp: out/ablation.csv: Is a directory\n"
    assert {path.name for path in Path("out").iterdir()} == {JOURNAL, "ablation.csv"}
    Path("out/ablation.csv").rmdir()
    call("ablate", "mha", *WORDS, "--out", "out", "--resume")
    call("ablate", "mha", *WORDS, "--out", "whole")
    assert Path("out/ablation.csv").read_bytes() == Path("whole/ablation.csv").read_bytes()


def test_a_head_that_failed_is_told_and_tried_again_by_resume(here, monkeypatch):
    from interp.ablation import measuring

    whole = measuring._group

    def group(run, together, direct, read):
        if any(one.heads == ((1, 2),) for one in together):
            raise ArithmeticError("no such number")
        return whole(run, together, direct, read)

    call("ablate", "mha", *WORDS, "--out", "whole")
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "_group", group)
        printed = call("ablate", "mha", *WORDS, "--out", "out").stdout
    assert "ArithmeticError: no such number" in printed
    assert Path("out", JOURNAL).is_file()
    table = pd.read_csv("out/ablation.csv")
    assert table["ablation"].isna().tolist() == [False] * 6 + [True, False]
    call("ablate", "mha", *WORDS, "--out", "out", "--resume")
    assert Path("out/ablation.csv").read_bytes() == Path("whole/ablation.csv").read_bytes()
    assert not Path("out", JOURNAL).exists()


# --- progress -----------------------------------------------------------------------------------


def test_progress_is_silent_in_a_short_sweep_and_tells_the_time_left_of_a_long_one(
    monkeypatch, capsys
):
    clock = {"now": 0.0}
    monkeypatch.setattr("interp.cli.progress.time.perf_counter", lambda: clock["now"])
    with SweepProgress() as progress:
        progress(40, 100)  # a resumed sweep begins in the middle
        for done in range(41, 101):
            clock["now"] += QUIET_SECONDS / 10
            progress(done, 100)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "50/100 ablated passes, 5 s, about 25 s left"
    assert [line.split("/")[0] for line in lines] == ["50", "60", "70", "80", "90", "100"]
    with SweepProgress() as progress:
        for done in range(1, 101):
            clock["now"] += QUIET_SECONDS / 200
            progress(done, 100)
    assert capsys.readouterr().err == ""


# --- importance and pruning ---------------------------------------------------------------------


def test_importance_is_that_of_the_function_and_comes_with_its_correlation(here):
    words = ("importance", "llama", *WORDS, "--sample", "5")
    saved = json.loads(call(*words, "--normalize", "--format", "json").stdout)
    own = interp.importance(load_model("llama"), blocks=[5], batch=4, sample=5, normalize=True)
    assert saved == json.loads(own.to_json())
    printed = call(*words, "--metric", "second-copy-loss", "--out", "out").stdout
    assert "correlation" in printed
    assert sorted(path.name for path in Path("out").iterdir()) == [
        f"importance.{ending}" for ending in ("csv", "html", "json")
    ]


def test_curves_of_every_order_are_printed_and_written(here):
    words = ("prune", "mha", "--block", "5", "--batch", "8", "--step", "0.25")
    printed = call(*words, "--out", "out").stdout
    table = pd.read_csv("out/prune.csv")
    orders = {"oracle", "importance", "importance-again", "magnitude", "random-1"}
    assert orders <= set(table["order"])
    assert sorted(set(table["removed"])) == [0, 2, 4, 6, 8]
    assert "oracle" in printed
    assert Path("out/prune.html").is_file()


def test_the_pruned_model_is_written_and_is_the_masked_one(here):
    printed = call("prune", "llama", *WORDS, "--heads", "0.0,0.1,1.2", "--out", "out")
    assert printed.stderr == "written: out/model\n"
    lines = printed.stdout.splitlines()
    assert lines[:5] == [
        "3 heads removed",
        "  layer 0: 0, 1",
        "  layer 1: 2",
        "1 KV head left with them",
        "  layer 0: 0",
    ]
    model, pruned = load_model("llama"), load_model("out/model")
    before, after = (sum(p.numel() for p in own.parameters()) for own in (model, pruned))
    assert lines[5] == f"parameters {before:,} -> {after:,}"
    # Two KV heads of width 8 in each of two layers, keys and values, four bytes each.
    assert lines[6] == "KV cache 256 -> 192 bytes for each token"
    assert float(lines[7].split(": ")[1].split(" ")[0]) < 1e-5
    assert "loss " in lines[8]
    assert lines[9].startswith("time of a pass ")
    tokens = torch.arange(24).reshape(2, 12) % 19
    hooks = []
    for layer, heads in ((0, [0, 1]), (1, [2])):

        def zero(z, hook, heads=heads):
            z[:, :, heads] = 0
            return z

        hooks.append((f"blocks.{layer}.attn.hook_z", zero))
    with torch.no_grad():
        masked = model.run_with_hooks(tokens, fwd_hooks=hooks)
        assert torch.allclose(pruned(tokens), masked, atol=1e-5)


def test_an_order_and_a_share_name_the_heads_that_leave(here):
    words = ("prune", "mha", *WORDS, "--order", "importance", "--share", "0.4", "--out", "out")
    saved = json.loads(call(*words, "--format", "json").stdout)
    model = load_model("mha")
    every = random_inputs(model, [5], 4).batches[0].tokens
    importance = interp.importance(model, every[::2]).table  # ranked on every second sequence
    least = importance.nsmallest(3, "importance")[["layer", "head"]].to_numpy().tolist()
    removed = [[int(layer), head] for layer, own in saved["heads"].items() for head in own]
    assert sorted(removed) == sorted(least)
    assert saved["inputs"].startswith("one half of ")
    told = interp.ablate(model, every[1::2], heads=[tuple(head) for head in removed])
    assert saved["loss"][0] == pytest.approx(told.summary["loss_clean"], abs=1e-5)
    assert saved["loss"][1] == pytest.approx(saved["loss_masked"], abs=1e-5)
    assert sum(map(len, load_model("out/model").cfg.pruned_heads.values())) == 3


def test_a_pruned_model_that_disagrees_is_not_written(here, monkeypatch):
    from interp.ablation import removal

    def other(model, heads):
        pruned = prune(model, heads)
        with torch.no_grad():
            pruned.unembed.weight[0] += 1
        return pruned

    prune = removal.prune_heads
    monkeypatch.setattr(removal, "prune_heads", other)
    message = refusal("prune", "mha", *WORDS, "--heads", "0.1", "--out", "out")
    assert message.startswith("the pruned model's logits differ from the masked one's by ")
