"""A series of checkpoints: equal to what a run measured itself, a planted change, and faults."""

import dataclasses
import gc
import json
import math
import weakref
from pathlib import Path
from types import SimpleNamespace

import hf_models
import numpy as np
import pandas as pd
import pytest
import tokenizers
import torch
import transformers
from typer.testing import CliRunner

from interp.cli import app
from interp.config import ModelConfig, parse_config
from interp.data.repeated import repeated_tokens
from interp.errors import AnalysisError, ConfigError, InterpError, ModelError
from interp.models.loading import save_model
from interp.models.transformer import Transformer
from interp.training import series as series_module
from interp.training.changes import LeastSizes
from interp.training.loop import train
from interp.training.series import SeriesOptions, search_series
from interp.training.series_members import hub_steps, load_series
from interp.training.series_probe import ProbeOptions, Texts, _positions, probe_for
from interp.views.report import write_report

TOKENS, PLACES = 16, 32
"""The hand-made models' vocabulary and context."""
STEPS = list(range(0, 2001, 100))
MIDDLE = 1000.0
BLOCK = 12
TABLES = ("curves.csv", "heads.csv", "changes.csv")


def call(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["phase-change", *map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def refused(*words: object) -> str:
    """The one line that a wrong command prints."""
    code, stdout, stderr = call(*words)
    assert code == 2, stderr
    assert stdout == ""
    assert stderr.startswith("interp: ")
    assert stderr.count("\n") == 1
    return stderr.removeprefix("interp: ").rstrip("\n")


# --- hand-made models -----------------------------------------------------------------------


def hand_made(score: float) -> Transformer:
    """Two layers of one head: the token before, and a match of that with the current token.

    The residual stream holds the token, its position, the token before, and the prediction, each
    one-hot. In layer 1 the target of the last query of 2 * BLOCK tokens gets `score`.
    """
    config = ModelConfig(
        n_layers=2,
        d_model=3 * TOKENS + PLACES,
        n_ctx=PLACES,
        d_vocab=TOKENS,
        normalization_type="none",
        attention={"n_heads": 1, "d_head": PLACES, "bias": False, "scale": 1.0},
    )
    model = Transformer(config, seed=0)
    token, place = slice(0, TOKENS), slice(TOKENS, TOKENS + PLACES)
    before = slice(place.stop, place.stop + TOKENS)
    guess = slice(before.stop, before.stop + TOKENS)
    others = 2 * BLOCK - 1
    strength = math.log(score * others / (1 - score))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed.weight[:, token] = torch.eye(TOKENS)
        model.pos_embed.weight[:, place] = torch.eye(PLACES)
        first, second = (block.attn for block in model.blocks)
        # Query p asks for place p - 1.
        first.q_proj.weight[: PLACES - 1, place][:, 1:] = 50 * torch.eye(PLACES - 1)
        first.k_proj.weight[:, place] = torch.eye(PLACES)
        first.v_proj.weight[:TOKENS, token] = torch.eye(TOKENS)
        first.o_proj.weight[before, :TOKENS] = torch.eye(TOKENS)
        second.q_proj.weight[:TOKENS, token] = strength * torch.eye(TOKENS)
        second.k_proj.weight[:TOKENS, before] = torch.eye(TOKENS)
        second.v_proj.weight[:TOKENS, token] = torch.eye(TOKENS)
        second.o_proj.weight[guess, :TOKENS] = torch.eye(TOKENS)
        model.unembed.weight[:, guess] = 5 * torch.eye(TOKENS)
    return model


def planted(step: int) -> float:
    """The score planted at a step: a sigmoid whose 10 and 90 per cent points lie 440 apart."""
    return 0.05 + 0.85 / (1 + math.exp(-(step - MIDDLE) / 100))


def saved(root: Path, scores: dict[int, float], name: str = "step{}") -> Path:
    for step, score in scores.items():
        folder = root / name.format(step)
        folder.mkdir(parents=True)
        save_model(hand_made(score), folder)
    return root


@pytest.fixture(scope="module")
def planted_series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("planted")
    # Sorted as words the steps would come in another order.
    return saved(root / "series", {step: planted(step) for step in STEPS})


@pytest.fixture(scope="module")
def measured(planted_series: Path) -> Path:
    """The planted series, measured by the command."""
    out = planted_series.parent / "out"
    code, stdout, stderr = call(planted_series, "--block", BLOCK, "--out", out)
    assert code == 0, stderr
    (out / "said.txt").write_text(stdout)
    (out / "progress.txt").write_text(stderr)
    return out


def test_a_hand_made_head_scores_what_was_planted(measured: Path) -> None:
    heads = pd.read_csv(measured / "heads.csv")
    induction = heads[heads["layer"] == 1].set_index("step")["induction"]
    for step in STEPS:
        # The key count of query p is p + 1, of which one is the target.
        others = np.arange(BLOCK, 2 * BLOCK)
        odds = planted(step) * (2 * BLOCK - 1) / (1 - planted(step))
        expected = odds / (odds + others)
        # Place 0 has no token before it and takes its own: a second match of the first query.
        expected[0] = odds / (2 * odds + BLOCK - 1)
        assert induction[step] == pytest.approx(expected.mean(), abs=1e-5)
    # Layer 0 looks at the token before, which on repeated tokens no text is needed to see.
    assert heads[heads["layer"] == 0]["previous_token"].min() > 0.95


def test_a_planted_change_is_found_at_its_step(measured: Path) -> None:
    changes = pd.read_csv(measured / "changes.csv").set_index("curve")
    assert list(changes.index) == ["induction"]  # without text there is no other curve
    change = changes.loc["induction"]
    assert change["found"]
    # The mean over queries of different key counts moves the midpoint by less than one interval.
    assert abs(change["step"] - MIDDLE) <= 100
    assert abs(change["onset"] - (MIDDLE - 220)) <= 100
    assert 0.6 < change["size"] < 0.9
    assert "step_tokens" not in changes
    said = (measured / "said.txt").read_text().splitlines()
    assert said[0].startswith("A change in the best induction score: +0.")
    assert f"midway at step {change['step']:,.0f}" in said[0]
    assert said[1] == "The in-context-learning score was not measured: it needs text."
    assert said[-1] == str(measured / "report.html")
    progress = (measured / "progress.txt").read_text().splitlines()
    assert len(progress) == len(STEPS)
    assert progress[2].startswith("step 200 (3/21)  induction 0.")


def test_the_facts_and_the_page_say_what_was_done(measured: Path) -> None:
    facts = json.loads((measured / "run.json").read_text())
    assert facts["kind"] == "series"
    assert facts["checkpoints"][1] == "step100"
    assert facts["asked"]["kind"] == "folders"
    assert facts["probe"]["blocks"] == [BLOCK]
    assert facts["probe"]["text"] == "none"
    assert facts["notes"][0].startswith("The rule works on the axis of steps as given;")
    assert "every 100:" in facts["notes"][1]
    assert facts["model"]["n_layers"] == 2
    page = (measured / "report.html").read_text()
    for words in ("Training curves", "Heads at chosen steps", "midpoint", "The rule:", "Caveats"):
        assert words in page
    assert write_report(measured).read_text() == page


def test_no_change_is_found_in_a_flat_series_nor_in_a_short_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    flat = saved(
        tmp_path / "flat", {step: 0.3 + 0.01 * rng.standard_normal() for step in range(0, 400, 20)}
    )
    code, stdout, stderr = call(flat, "--block", BLOCK, "--out", tmp_path / "a")
    assert code == 0, stderr
    assert stdout.startswith("No change in the best induction score is called: no change in the")
    assert not pd.read_csv(tmp_path / "a" / "changes.csv")["found"].any()

    code, stdout, stderr = call(
        flat, "--steps", "20,0,40", "--block", BLOCK, "--tokens-per-step", 10, "--out",
        tmp_path / "b",
    )  # fmt: skip
    assert code == 0, stderr
    assert stderr.startswith(
        "3 checkpoints: the rule calls no change with fewer than 12\nstep 0 (1/3)"
    )
    assert "only 3 points after the 0 left out; the rule needs 12" in stdout
    curves = pd.read_csv(tmp_path / "b" / "curves.csv")
    assert curves["step"].tolist() == [0, 20, 40]
    assert curves["tokens"].tolist() == [0, 200, 400]


def test_an_interrupted_series_is_continued_to_the_same_tables(
    planted_series: Path, measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, loaded = tmp_path / "out", []
    load = series_module.load_model

    def interrupted(ref: object, **how: object) -> object:
        loaded.append(ref)
        if len(loaded) == 8:
            raise KeyboardInterrupt
        return load(ref, **how)

    monkeypatch.setattr(series_module, "load_model", interrupted)
    code, _, stderr = call(planted_series, "--block", BLOCK, "--out", out)
    assert code == 130
    assert stderr.rstrip().endswith("interp: interrupted; --resume continues")
    with (out / "measured.jsonl").open("a") as file:
        file.write('{"step": 700, "metr')  # what a killed writer leaves
    again = refused(planted_series, "--block", BLOCK, "--out", out)
    assert again.startswith(f"{out} already holds something: --resume continues")
    other = refused(planted_series, "--block", 8, "--seed", 3, "--out", out, "--resume")
    assert other == f"{out} holds a series measured otherwise: block, seed differ"

    code, _, stderr = call(planted_series, "--block", BLOCK, "--out", out, "--resume")
    assert code == 0, stderr
    assert len(loaded) == 8 + len(STEPS) - 7
    assert len(set(map(str, loaded))) == len(STEPS)
    for name in (*TABLES, "measured.jsonl"):
        assert (out / name).read_bytes() == (measured / name).read_bytes(), name


@pytest.mark.parametrize("backend", ["native", "bridge"])
def test_one_model_is_in_memory_at_a_time(
    backend: str, planted_series: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref] = []
    load = series_module.load_model

    def watched(ref: object, **how: object) -> object:
        assert not any(part() for part in alive)
        model = load(ref, **how)
        alive.extend(weakref.ref(part) for part in model.modules())
        return model

    series = planted_series
    if backend == "bridge":
        series = tmp_path / "series"
        for step in STEPS[:3]:
            hf_models.gpt2(seed=step).save_pretrained(series / f"step{step}")
    monkeypatch.setattr(series_module, "load_model", watched)
    gc.disable()  # a collection by chance would hide a model that is kept
    try:
        options = SeriesOptions(backend=backend, probe=ProbeOptions(blocks=(4,), batch=1))
        search_series(series, tmp_path / "out", steps=STEPS[:3], options=options)
    finally:
        gc.enable()
    assert len(alive) > 3 * 10


def test_steps_that_grow_by_powers_get_a_logarithmic_axis(tmp_path: Path) -> None:
    steps = [0, *(2**power for power in range(10))]
    series = saved(tmp_path / "series", dict.fromkeys(steps, 0.3), "checkpoint-{}")
    search_series(series, tmp_path / "out")
    facts = json.loads((tmp_path / "out" / "run.json").read_text())
    assert "1 to 256 apart" in facts["notes"][1]
    page = write_report(tmp_path / "out").read_text()
    assert "on a logarithmic axis" in page
    assert "Step 0 has no place on a logarithmic axis." in page


def test_a_change_on_a_logarithmic_axis_is_found_where_it_is_asked_for(tmp_path: Path) -> None:
    """A sigmoid in log(step) around 1000, at steps spaced as Pythia's: on the steps themselves it
    is over before the second thousand, and then only slows down."""
    steps = [0, *(2**power for power in range(10)), *range(1000, 16001, 1000)]
    scores = {step: 0.05 + 0.85 / (1 + (1000 / (step + 1)) ** 2) for step in steps}
    series = saved(tmp_path / "series", scores)
    words = (series, "--block", BLOCK, "--batch", 2)
    code, stdout, stderr = call(*words, "--log-steps", "--out", tmp_path / "a")
    assert code == 0, stderr
    change = pd.read_csv(tmp_path / "a" / "changes.csv").loc[0]
    assert change["found"]
    assert change["onset"] in steps
    assert 512 <= change["step"] <= 2000
    assert change["width"] == change["end"] - change["onset"]
    assert change["reason"].startswith("with log2(step + 1) for the step, rise of 0.")
    facts = json.loads((tmp_path / "a" / "run.json").read_text())
    assert facts["notes"][0].startswith("The rule works on the axis of log2(step + 1), as asked")
    code, stdout, stderr = call(*words, "--out", tmp_path / "b")
    assert code == 0, stderr
    assert stdout.startswith("No change in the best induction score is called")


# --- a run's own checkpoints ----------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = parse_config(
        {
            "model": {
                "n_layers": 2,
                "d_model": 16,
                "n_ctx": 24,
                "d_vocab": 20,
                "positional_embedding_type": "shortformer",
                "dropout": 0.1,
                "attention": {"n_heads": 2},
            },
            "train": {
                "steps": 27,
                "batch_size": 4,
                "lr": 1e-2,
                "threads": 1,
                "checkpoint_every": 2,
            },
            "data": {"kind": "repeated", "span": [3, 8]},
            "probe": {
                "every": 1,
                "sequences": 8,
                "icl_early": [2, 4],
                "icl_late": [16, 23],
                "blocks": [4, 6],
                "repeats": 3,
            },
        },
        "made up",
    )
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(config, folder)
    return folder


def test_a_run_gives_what_it_measured_itself(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, stdout, stderr = call(run, "--out", out)
    assert code == 0, stderr
    steps = [*range(0, 27, 2), 27]
    heads = pd.read_csv(out / "heads.csv")
    own = pd.read_csv(run / "probes.csv")
    own = own[own["step"].isin(steps)].reset_index(drop=True)
    # The same weights and sequences: only the order of float32 sums could differ.
    pd.testing.assert_frame_equal(heads, own, atol=1e-6, rtol=0)
    curves = pd.read_csv(out / "curves.csv")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    metrics = pd.DataFrame([json.loads(line) for line in lines])
    metrics = metrics[metrics["step"].isin(steps)].drop(columns="train_loss")
    assert list(curves.columns) == [*metrics.columns, "best_induction"]
    pd.testing.assert_frame_equal(
        curves.drop(columns="best_induction"), metrics.reset_index(drop=True), atol=1e-5, rtol=0
    )
    best = own.groupby("step")["induction"].max().to_numpy()
    assert curves["best_induction"].to_numpy() == pytest.approx(best, abs=1e-6)
    changes = pd.read_csv(out / "changes.csv")
    assert list(changes["curve"]) == ["induction", "icl_score"]
    assert "No change in the in-context-learning score is called" in stdout
    facts = json.loads((out / "run.json").read_text())
    assert facts["probe"]["icl_late"] == [16, 23]
    assert facts["probe"]["data"]["kind"] == "repeated"


def test_a_run_is_measured_as_its_config_says_and_its_checkpoints_otherwise(
    run: Path, tmp_path: Path
) -> None:
    said = refused(run, "--block", 5, "--seed", 1, "--out", tmp_path / "out")
    assert said == (
        f"--block, --seed: {run} is measured as its own config.toml says; give {run}/checkpoints "
        "to measure it otherwise"
    )
    code, _, stderr = call(
        run / "checkpoints", "--steps", "0,2", "--block", 5, "--out", tmp_path / "out"
    )
    assert code == 0, stderr
    assert json.loads((tmp_path / "out" / "run.json").read_text())["probe"]["blocks"] == [5]


# --- text -----------------------------------------------------------------------------------


def test_positions_are_those_published_where_the_context_allows() -> None:
    assert _positions(2048, ProbeOptions()) == ((40, 60), (490, 510), 512)
    assert _positions(512, ProbeOptions()) == ((40, 60), (490, 510), 512)
    assert _positions(128, ProbeOptions()) == ((10, 15), (122, 127), 128)
    assert _positions(8, ProbeOptions()) == ((1, 1), (7, 7), 8)
    wide = ProbeOptions(icl_early=(1, 5), icl_late=(900, 999))
    assert _positions(2048, wide) == ((1, 5), (900, 999), 1000)
    with pytest.raises(AnalysisError, match="needs 8"):
        _positions(7, ProbeOptions())
    with pytest.raises(AnalysisError, match=r"--icl-late 900,999 should lie within 1 and .* 511$"):
        _positions(512, wide)


class Letters:
    """A vocabulary of one token a character, with a leading token 0."""

    bos_token_id = 0
    special_ids = frozenset({0})

    def __init__(self, shift: int = 0):
        self.shift = shift

    def __len__(self) -> int:
        return TOKENS

    def encode(self, text: object, *, prepend_bos: bool | None = None) -> list[list[int]]:
        assert prepend_bos is False
        texts = [text] if isinstance(text, str) else text
        return [[1 + (ord(c) + self.shift) % (TOKENS - 1) for c in each] for each in texts]

    def decode(self, ids: object) -> str:
        raise NotImplementedError

    single_token = token_texts = decode


def with_letters(config: ModelConfig, shift: int = 0) -> Transformer:
    model = Transformer(config, seed=0, model_name="letters")
    model.vocabulary = Letters(shift)
    return model


LETTERS = ModelConfig(
    n_layers=2, d_model=16, n_ctx=16, d_vocab=TOKENS, bos_token_id=0, attention={"n_heads": 2}
)


def test_text_is_cut_into_windows_that_begin_with_bos_and_gives_the_icl_score() -> None:
    model = with_letters(LETTERS)
    texts = Texts("made up", {"a": "abcdefghij" * 3, "b": "klmno" * 6}, "hash")
    probe, facts = probe_for(model, ProbeOptions(blocks=(5,), sequences=3, batch=2), texts)
    ids = np.array(Letters().encode(["abcdefghij" * 3 + "klmno" * 6], prepend_bos=False)[0])
    # Fifteen tokens a window, since BOS takes a place; 60 tokens spread over three windows.
    starts = [0, 22, 45]
    expected = np.stack([np.concatenate(([0], ids[start : start + 15])) for start in starts])
    assert probe.held_out.tolist() == expected.tolist()
    assert facts["windows"] == "3 of 16 tokens"
    assert facts["icl_early"] == (1, 2)
    assert facts["icl_late"] == (15, 15)
    measured = probe.measure(model).metrics
    losses = model(torch.from_numpy(expected), return_type="loss", loss_per_token=True)
    icl = (losses[:, 14] - losses[:, :2].mean(dim=1)).mean().item()
    assert measured["icl_score"] == pytest.approx(icl, abs=1e-5)
    assert measured["loss"] == pytest.approx(losses.mean().item(), abs=1e-5)
    # Special ids stay out of the random blocks, and text shorter than a window is refused.
    assert all((batch.tokens[:, 1:] > 0).all() for batch in probe.repeated)
    short = Texts("short", {"a": "abc"}, "hash")
    with pytest.raises(AnalysisError, match="short: 3 tokens are fewer than one window of 15"):
        probe_for(model, ProbeOptions(), short)


def test_a_model_that_sees_later_tokens_has_no_phase_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = with_letters(LETTERS)
    facts = dataclasses.replace(model.cfg, attention_dir="bidirectional")
    monkeypatch.setattr(Transformer, "cfg", property(lambda self: facts))
    with pytest.raises(ModelError, match="letters attends to later tokens too: it has no next-tok"):
        probe_for(model, ProbeOptions(), None)


def test_another_tokenizer_in_a_series_is_refused() -> None:
    texts = Texts("made up", {"a": "abcdefghij" * 3}, "hash")
    texts.encode(with_letters(LETTERS), "first")
    texts.refuse_another_vocabulary(with_letters(LETTERS), "second")
    texts.refuse_another_vocabulary(hand_made(0.5), "one without")
    with pytest.raises(ModelError, match="third encodes the text otherwise than the first"):
        texts.refuse_another_vocabulary(with_letters(LETTERS, shift=1), "third")


# --- models of transformers -----------------------------------------------------------------


def word_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """The words w0 to w95, and a token that begins a text."""
    words = {f"w{number}": number for number in range(96)} | {"<bos>": 96}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<bos>")


def test_checkpoints_of_transformers_give_the_same_natively_and_bridged(tmp_path: Path) -> None:
    """A trainer's folder: GPT-2s with a tokenizer, out of order, and logs beside them."""
    for step in (1000, 0, 500):
        folder = tmp_path / "trainer" / f"checkpoint-{step}"
        hf_models.gpt2(seed=step).save_pretrained(folder)
        word_tokenizer().save_pretrained(folder)
    (tmp_path / "trainer" / "runs").mkdir()
    text = tmp_path / "words.txt"
    rng = np.random.default_rng(0)
    text.write_text(" ".join(f"w{number}" for number in rng.integers(0, 96, 500)))
    words = (tmp_path / "trainer", "--text", text, "--block", "4,8", "--batch", 2)
    for backend in ("native", "bridge"):
        code, _, stderr = call(*words, "--backend", backend, "--out", tmp_path / backend)
        assert code == 0, stderr
    for name in ("curves", "heads"):
        native, bridged = (
            pd.read_csv(tmp_path / backend / f"{name}.csv") for backend in ("native", "bridge")
        )
        pd.testing.assert_frame_equal(native, bridged, atol=1e-4, rtol=0)
        assert list(dict.fromkeys(native["step"])) == [0, 500, 1000]
    facts = json.loads((tmp_path / "bridge" / "run.json").read_text())
    # 500 words in windows of n_ctx = 64, each led by BOS: seven of 63 words fit.
    assert facts["probe"]["windows"] == "7 of 64 tokens"
    # transformers' own loss on the first window, from its own weights and tokenizer.
    hf = hf_models.gpt2(seed=500)
    ids = word_tokenizer()(text.read_text())["input_ids"]
    starts = np.linspace(0, len(ids) - 63, 7).astype(int)
    windows = torch.tensor([[96, *ids[start : start + 63]] for start in starts])
    with torch.no_grad():
        loss = hf(windows, labels=windows).loss.item()
    curves = pd.read_csv(tmp_path / "native" / "curves.csv").set_index("step")
    assert curves.loc[500, "loss"] == pytest.approx(loss, abs=1e-4)


# --- the Hub --------------------------------------------------------------------------------


def listing(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    asked = []

    def list_repo_refs(self: object, name: str) -> SimpleNamespace:
        asked.append(name)
        branches = [SimpleNamespace(name=branch) for branch in names]
        return SimpleNamespace(branches=branches, tags=[])

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_refs", list_repo_refs)
    return asked


def test_revisions_of_a_hub_model_are_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = listing(monkeypatch, "main", "step1000", "step2", "step10", "xstep3", "step4-fp16")
    series = load_series("EleutherAI/pythia-70m")
    assert asked == ["EleutherAI/pythia-70m"]
    assert series.kind == "hub"
    assert series.refs == {
        2: "EleutherAI/pythia-70m@step2",
        10: "EleutherAI/pythia-70m@step10",
        1000: "EleutherAI/pythia-70m@step1000",
    }
    assert load_series("org/name", [512, 0]).refs == {0: "org/name@step0", 512: "org/name@step512"}
    assert len(asked) == 1  # given steps need no listing


def test_a_hub_model_without_steps_or_without_a_network_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listing(monkeypatch, "main")
    assert refused("org/name") == (
        "org/name has no revisions named step<N>: it is one model, not a series"
    )

    def offline(self: object, name: str) -> None:
        raise ConnectionError("no route\nsecond line")

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_refs", offline)
    with pytest.raises(ModelError) as caught:
        hub_steps("org/name")
    assert str(caught.value) == (
        "org/name: its revisions cannot be listed (no route); without a network, --steps names "
        "those that are already downloaded"
    )


# --- faults ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a/b@step5"], "a/b@step5 is one checkpoint, and a series has several: give a/b, with"),
        (["./nothing"], "no model 'nothing': no such file or folder"),
        (["full/nothing"], "no model 'full/nothing': no such file or folder"),
        (["a file"], "a file is one file, and a series has several checkpoints: a training run's"),
        (["empty"], "empty holds no checkpoint: a training run's folder"),
        (["one"], "one: 1 checkpoint; a series has several"),
        (["one/step1"], "one/step1 is one model, and a series has several checkpoints"),
        (["named"], "named/final: the name of a checkpoint in a series ends in its step"),
        (["twice"], "twice/a-1 and twice/b-1 are both step 1"),
        (["hollow"], "hollow/step2 has no config.json: it holds no model"),
        (["full", "--steps", "1,3"], "full has no checkpoint at step 3; its: 1, 2"),
        (["full", "--steps", "1,x"], "--steps 1,x: whole numbers with commas between"),
        (["full", "--icl-early", "4"], "--icl-early 4: the first and the last position, such as"),
        (["full", "--icl-late", "4,5"], "--icl-early and --icl-late say where in a text"),
        (["full", "--text", "no.txt"], "no.txt: cannot be read: No such file or directory"),
        (["full", "--text", "a file", "--corpus", "docs"], "--text and --corpus: one source"),
        (["full", "--text", "a file", "--block", "12"], "full/step1 has no tokenizer"),
        (["full", "--block", "17"], "block = 17: 34 tokens are longer than n_ctx = 32"),
        (["full", "--device", "gpu7"], "device = 'gpu7' cannot be used here"),
        (["full", "--out", "a file"], "a file is a file, not a folder for results"),
        (["full", "--out", "one", "--resume"], "one holds no series that could be continued"),
        (["shapes"], "shapes/step2 has n_layers = 3, the first checkpoint has 2: they are not of"),
        (["broken"], "broken/step2 gives numbers that are not finite"),
        (["bare run"], "bare run/config.toml is missing"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a file").write_text("some text\n")
    Path("empty/logs").mkdir(parents=True)
    saved(Path("one"), {1: 0.5})
    full = {1: 0.5, 2: 0.5}
    for name in ("full", "named", "shapes", "broken"):
        saved(Path(name), full)
    Path("full/logs").mkdir()  # what a trainer writes beside its checkpoints
    saved(Path("bare run/checkpoints"), full, "step-{:06d}")
    Path("named/step1").rename("named/final")
    saved(Path("twice"), {1: 0.5}, "a-{}")
    saved(Path("twice"), {1: 0.5}, "b-{}")
    saved(Path("hollow"), {1: 0.5})
    Path("hollow/step2").mkdir()
    config = ModelConfig(n_layers=3, d_model=8, n_ctx=16, d_vocab=16, attention={"n_heads": 1})
    save_model(Transformer(config, seed=0), Path("shapes/step2"))
    model = hand_made(0.5)
    with torch.no_grad():
        model.unembed.weight[0, 0] = torch.nan
    save_model(model, Path("broken/step2"))
    if words[0] in ("shapes", "broken"):  # which the second checkpoint shows
        code, _, stderr = call(*words, "--block", BLOCK)
        assert code == 2
        assert stderr.splitlines()[-1].startswith(f"interp: {said}")
    else:
        assert refused(*words).startswith(said)
        assert not Path("reports").exists()


def test_a_text_that_is_not_the_runs_own_is_refused(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    copy.mkdir()
    for name in ("config.toml", "checkpoints"):
        (copy / name).symlink_to(run / name)
    (copy / "run.json").write_text(json.dumps({"data": {"sha256": "another"}}))
    with pytest.raises(ConfigError, match="the corpus is not the text that this run trained on"):
        search_series(copy, tmp_path / "out")
    assert issubclass(ConfigError, InterpError)


def test_least_sizes_decide_what_is_a_change(planted_series: Path, measured: Path) -> None:
    options = SeriesOptions(
        probe=ProbeOptions(blocks=(BLOCK,)), least=LeastSizes(induction=0.95, icl_score=1)
    )
    said = search_series(planted_series, measured, options=options, resume=True)
    assert "its size is under min_size, 0.95" in said[0]


def test_repeated_tokens_are_those_of_every_analysis(measured: Path) -> None:
    """The losses of the copies, from the oracle of the hand-made model's guesses."""
    curves = pd.read_csv(measured / "curves.csv").set_index("step")
    batch = repeated_tokens(8, BLOCK, TOKENS, seed=0)
    model = hand_made(planted(2000))
    losses = model(batch.tokens, return_type="loss", loss_per_token=True)
    second = losses[:, BLOCK : 2 * BLOCK - 1].mean().item()
    assert curves.loc[2000, "second_copy_loss"] == pytest.approx(second, abs=1e-5)
    assert second < 0.5 < curves.loc[0, "second_copy_loss"]
