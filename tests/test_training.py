"""Training: what a run leaves behind, and that an interrupted one ends with the same bits."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from interp.config import RunConfig, parse_config
from interp.errors import ConfigError, ModelError
from interp.models.loading import checkpoint_steps, load_model
from interp.training import checkpoints as checkpoints_module
from interp.training.loop import learning_rate, train

STEPS = 24


def small_config(**changes: object) -> RunConfig:
    tables: dict[str, dict[str, object]] = {
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
            "steps": STEPS,
            "batch_size": 4,
            "lr": 1e-2,
            "threads": 1,
            "checkpoint_every": 4,
            "warmup_steps": 3,
        },
        "data": {"kind": "repeated", "span": [3, 8]},
        "probe": {
            "every": 6,
            "icl_early": [2, 4],
            "icl_late": [18, 23],
            "blocks": [4, 6],
            "repeats": 2,
            "sequences": 8,
        },
    }
    for key, value in changes.items():
        table, _, name = key.partition("__")
        tables[table][name] = value
    return parse_config(tables, "test")


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def results(folder: Path) -> dict[str, str]:
    """Everything that has to be the same after an interruption, as comparable text."""
    last = checkpoint_steps(folder)[STEPS]
    tensors = {
        f"{name} {key}": value.numpy().tobytes().hex()
        for name in ("model", "optimizer")
        for key, value in load_file(last / f"{name}.safetensors").items()
    }
    return {
        "metrics": (folder / "metrics.jsonl").read_text(),
        "probes": (folder / "probes.csv").read_text(),
        "state": (last / "state.json").read_text(),
        **tensors,
    }


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], float]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    began = time.perf_counter()
    train(small_config(), folder)
    return results(folder), time.perf_counter() - began


def in_child(work: object) -> int:
    """Run `work` in a forked process; returns its process id."""
    child = os.fork()
    if child == 0:
        try:
            work()  # type: ignore[operator]
        finally:
            os._exit(0)
    return child


def train_and_die_after(folder: Path, seconds: float) -> None:
    child = in_child(lambda: train(small_config(), folder, resume=True))
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def train_and_die_in_checkpoint(folder: Path, file: int) -> None:
    """Killed while writing a checkpoint: in the middle of its `file`-th tensor file."""

    def work() -> None:
        written = 0
        save = checkpoints_module.save_file

        def dying_save(tensors: dict[str, torch.Tensor], path: Path) -> None:
            nonlocal written
            written += 1
            save(tensors, path)
            if written == file:
                whole = path.read_bytes()
                path.write_bytes(whole[: len(whole) // 2])
                os.kill(os.getpid(), signal.SIGKILL)

        checkpoints_module.save_file = dying_save  # type: ignore[assignment]
        train(small_config(), folder, resume=True)

    _, status = os.waitpid(in_child(work), 0)
    assert os.WIFSIGNALED(status)
    assert any((folder / "checkpoints").glob(".making/optimizer.safetensors"))


@pytest.mark.parametrize("attempt", range(16))
def test_killed_at_a_random_moment_and_resumed_equals_uninterrupted(
    attempt: int, tmp_path: Path, uninterrupted: tuple[dict[str, str], float]
) -> None:
    whole, seconds = uninterrupted
    rng = random.Random(attempt)
    for _ in range(rng.randint(1, 2)):
        train_and_die_after(tmp_path / "run", rng.uniform(0.0, seconds))
    train(small_config(), tmp_path / "run", resume=True)
    assert results(tmp_path / "run") == whole


@pytest.mark.parametrize("file", [1, 2, 4, 6])
def test_killed_while_writing_a_checkpoint_and_resumed_equals_uninterrupted(
    file: int, tmp_path: Path, uninterrupted: tuple[dict[str, str], float]
) -> None:
    train_and_die_in_checkpoint(tmp_path / "run", file)
    train(small_config(), tmp_path / "run", resume=True)
    assert results(tmp_path / "run") == uninterrupted[0]


def test_resume_cuts_files_back_to_the_checkpoint(
    tmp_path: Path, uninterrupted: tuple[dict[str, str], float]
) -> None:
    folder = tmp_path / "run"
    train(small_config(train__steps=12), folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 18, "tokens": 1}\n{"step": 2')
    with (folder / "probes.csv").open("a") as file:
        file.write("18,1,0,0,0.1,0.1,0.1\n24,")
    train(small_config(), folder, resume=True)
    steps = [line["step"] for line in metrics(folder)]
    assert steps == [0, 6, 12, 18, 24]
    assert results(folder) == uninterrupted[0]


def test_run_folder_holds_what_the_docs_say(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    model = train(small_config(), folder, command="interp train x.toml")
    assert not model.training
    names = {"config.toml", "run.json", "metrics.jsonl", "timing.jsonl", "probes.csv"}
    assert {path.name for path in folder.iterdir()} == names | {"checkpoints"}
    assert list(checkpoint_steps(folder)) == [0, 4, 8, 12, 16, 20, 24]
    facts = json.loads((folder / "run.json").read_text())
    assert facts["kind"] == "train"
    assert facts["command"] == "interp train x.toml"
    assert facts["seeds"] == {"init": 0, "data": 0, "probe": 0}
    assert facts["threads"] == 1
    assert facts["versions"]["torch"].startswith("2.")
    probes = pd.read_csv(folder / "probes.csv")
    assert list(probes.columns) == [
        "step", "tokens", "layer", "head", "induction", "previous_token", "sink",
    ]  # fmt: skip
    assert len(probes) == 5 * 4  # five probes of two layers of two heads
    assert (probes["tokens"] == probes["step"] * 4 * 24).all()
    assert probes[["induction", "previous_token", "sink"]].map(lambda p: 0 <= p <= 1).all().all()


def test_a_trained_run_loads_with_equal_logits(tmp_path: Path) -> None:
    model = train(small_config(), tmp_path / "run")
    tokens = torch.arange(20)[None]
    for ref in (tmp_path / "run", f"{tmp_path / 'run'}@24"):
        assert torch.equal(load_model(ref)(tokens), model(tokens))
    assert not torch.equal(load_model(f"{tmp_path / 'run'}@4")(tokens), model(tokens))


def test_same_seed_same_run_and_another_seed_differs_from_step_0(tmp_path: Path) -> None:
    def losses(name: str, seed: int) -> list[float]:
        train(small_config(train__seed=seed), tmp_path / name)
        return [line["loss"] for line in metrics(tmp_path / name)]

    first, again, other = losses("a", 1), losses("b", 1), losses("c", 2)
    assert first == again
    assert all(one != two for one, two in zip(first, other, strict=True))


def test_training_leaves_the_callers_random_state_and_threads_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    train(small_config(train__threads=2), tmp_path / "run")
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


def test_a_loss_falls_when_there_is_something_to_learn(tmp_path: Path) -> None:
    config = small_config(train__steps=150, model__dropout=0.0, train__checkpoint_every=150)
    train(config, tmp_path / "run")
    losses = [line["loss"] for line in metrics(tmp_path / "run")]
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize(
    ("steps", "warmup", "expected"),
    [
        (3, 0, [1.0, 1.0, 1.0]),
        (4, 4, [0.25, 0.5, 0.75, 1.0]),
        (2, 4, [0.25, 0.5]),
        (1, 1, [1.0]),
    ],
)
def test_learning_rate_warms_up_without_division_by_zero(
    steps: int, warmup: int, expected: list[float]
) -> None:
    config = small_config(train__lr=1.0, train__warmup_steps=warmup, train__steps=steps)
    assert [learning_rate(config, step) for step in range(steps)] == expected


def test_bfloat16_trains_with_float32_weights(tmp_path: Path) -> None:
    model = train(small_config(train__dtype="bfloat16"), tmp_path / "run")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_folder_in_use_is_refused_without_resume(tmp_path: Path) -> None:
    train(small_config(train__steps=4), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"already holds something: --resume continues"):
        train(small_config(train__steps=4), tmp_path / "run")


def test_resume_refuses_another_config(tmp_path: Path) -> None:
    train(small_config(train__steps=4), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"another config: data\.span, train\.lr differ"):
        train(
            small_config(train__steps=4, train__lr=0.5, data__span=[3, 9]),
            tmp_path / "run",
            resume=True,
        )


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_resume_from_a_checkpoint_cut_short_is_refused(file: str, tmp_path: Path) -> None:
    train(small_config(train__steps=4), tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "step-000004" / file
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ModelError, match=rf"{file} is cut short"):
        train(small_config(), tmp_path / "run", resume=True)


def test_an_unknown_device_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device = 'gpu7' cannot be used here"):
        train(small_config(train__device="gpu7"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
