"""The phase-change experiment: tables from made-up curves, and the whole of it on a tiny config."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from interp.cli import app
from interp.training.changes import LeastSizes, find_changes

ROOT = Path(__file__).parents[1]
STEPS = np.arange(0, 2001, 50)
LEAST = LeastSizes(induction=0.1, icl_score=0.5)


@pytest.fixture(scope="module")
def experiment() -> ModuleType:
    path = ROOT / "experiments" / "phase_change.py"
    spec = importlib.util.spec_from_file_location("phase_change", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["phase_change"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def settings(experiment: ModuleType) -> object:
    return experiment.Settings(
        file="x.py", title="made up", seeds=[0], min_induction=0.1, min_icl=0.5
    )


def sigmoid(middle: float) -> np.ndarray:
    return 1 / (1 + np.exp(-(STEPS - middle) / 50))


def made_up_curves(middle: float = 800.0, lag: float = 100.0) -> pd.DataFrame:
    """A two-layer run that changes at `middle` (induction) and `lag` later (in-context score), in
    which predictable tokens gain 2 nats and others 0.5; and a control that drifts."""
    rise = sigmoid(middle)
    two = pd.DataFrame(
        {
            "model": "two-layer",
            "best_induction": 0.02 + 0.7 * rise,
            "icl_score": -0.5 - 2.5 * sigmoid(middle + lag),
            "predictable_loss": 3.0 - 2.0 * rise,
            "other_loss": 3.5 - 0.5 * rise,
        }
    )
    drift = pd.DataFrame(
        {
            "model": "one-layer",
            "best_induction": 0.02 + 1e-5 * STEPS,
            "icl_score": -0.5 - 3e-4 * STEPS,
            "predictable_loss": 3.0,
            "other_loss": 3.5,
        }
    )
    return pd.concat(
        [t.assign(seed=0, step=STEPS, tokens=STEPS * 1000) for t in (two, drift)],
        ignore_index=True,
    )


def test_changes_are_found_in_the_two_layer_model_and_not_in_the_control() -> None:
    changes = find_changes(made_up_curves(), LEAST)
    two = changes[changes["model"] == "two-layer"].set_index("curve")
    assert two["found"].all()
    assert abs(two.loc["induction", "step"] - 800) <= 50  # one logging interval
    assert abs(two.loc["icl_score", "step"] - 900) <= 50
    assert two.loc["icl_score", "size"] < -1.5
    assert two.loc["induction", "step_tokens"] == two.loc["induction", "step"] * 1000
    assert not changes[changes["model"] == "one-layer"]["found"].any()


def test_distance_and_losses_across_the_change(experiment: ModuleType, settings: object) -> None:
    curves = made_up_curves()
    changes = find_changes(curves, LEAST)
    (apart,) = experiment.distances(changes, settings).to_dict("records")
    assert abs(apart["step_distance"] - 100) <= 50
    assert apart["step_tokens_distance"] == apart["step_distance"] * 1000
    (across,) = experiment.across_changes(curves, changes, settings).to_dict("records")
    assert across["predictable_drop"] == pytest.approx(4 * across["other_drop"])
    assert 1.5 < across["predictable_drop"] < 2.0


def test_no_change_leaves_the_tables_without_one(experiment: ModuleType, settings: object) -> None:
    curves = made_up_curves()
    flat = curves.assign(best_induction=0.02, icl_score=-0.5)
    changes = find_changes(flat, LEAST)
    assert not changes["found"].any()
    assert experiment.distances(changes, settings).empty
    across = experiment.across_changes(flat, changes, settings)
    assert "predictable_drop" not in across
    said = experiment.findings(
        flat, changes, pd.DataFrame(), across, pd.DataFrame({"group": []}), settings
    )
    assert any("no change in the best induction score" in line for line in said)


def test_groups_are_the_strongest_half_of_a_layer_with_controls_beside_them(
    experiment: ModuleType,
) -> None:
    scores = pd.DataFrame(
        [
            {"layer": 0, "head": 0, "induction": 0.0, "previous_token": 0.2},
            {"layer": 0, "head": 1, "induction": 0.0, "previous_token": 0.9},
            {"layer": 0, "head": 2, "induction": 0.0, "previous_token": 0.1},
            {"layer": 0, "head": 3, "induction": 0.0, "previous_token": 0.3},
            {"layer": 1, "head": 0, "induction": 0.8, "previous_token": 0.0},
            {"layer": 1, "head": 1, "induction": 0.7, "previous_token": 0.0},
            {"layer": 1, "head": 2, "induction": 0.6, "previous_token": 0.0},
            {"layer": 1, "head": 3, "induction": 0.1, "previous_token": 0.0},
        ]
    )
    norms = np.array([[1.0, 5.0, 4.0, 2.0], [3.0, 2.0, 1.9, 2.9]])
    assert experiment.head_groups(scores, norms) == [
        ("induction heads", [(1, 0), (1, 1)]),
        # 1.2 is strong too, so it is no control.
        ("controls of the induction heads", [(1, 3)]),
        ("previous-token heads", [(0, 1)]),
        ("controls of the previous-token heads", [(0, 2)]),
    ]


def run_tiny(out: Path, *more: str) -> object:
    sets = [
        "model.d_model=16", "model.n_ctx=32", "model.d_vocab=24", "model.attention.n_heads=2",
        "train.steps=30", "train.checkpoint_every=30", "train.batch_size=4", "data.span=[3,8]",
        "probe.every=2", "probe.icl_late=[24,31]", "probe.blocks=[4]", "probe.sequences=8",
        "experiment.seeds=[3]", "experiment.workers=1", "experiment.ablation_sequences=8",
    ]  # fmt: skip
    flags = [word for each in sets for word in ("--set", each)]
    config = ROOT / "configs" / "phase_change.toml"
    return CliRunner().invoke(app, ["run", str(config), "--out", str(out), *flags, *more])


def test_the_whole_experiment_writes_its_tables_and_report_and_resumes_to_the_same(
    tmp_path: Path,
) -> None:
    out = tmp_path / "tiny"
    result = run_tiny(out)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(out / "report.html")
    names = ["curves", "heads", "changes", "distance", "across", "ablation"]
    tables = {name: (out / f"{name}.csv").read_text() for name in names}
    curves = pd.read_csv(out / "curves.csv")
    assert set(curves["model"]) == {"two-layer", "one-layer"}
    assert len(curves) == 2 * 16
    ablation = pd.read_csv(out / "ablation.csv")
    assert np.allclose(ablation["icl_score_ablated"] - ablation["icl_score"], ablation["effect"])
    facts = json.loads((out / "run.json").read_text())
    assert facts["kind"] == "phase-change"
    assert set(facts["runs"]) == {"two-layer-seed-3", "one-layer-seed-3"}

    again = run_tiny(out)
    assert again.exit_code == 2
    assert "already holds something" in again.stderr
    resumed = run_tiny(out, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert {name: (out / f"{name}.csv").read_text() for name in names} == tables


def test_an_experiment_with_an_unknown_setting_is_refused_before_it_begins(tmp_path: Path) -> None:
    result = run_tiny(tmp_path / "tiny", "--set", "experiment.seed=4")
    assert result.exit_code == 2
    assert "unknown key seed; did you mean seeds?" in result.stderr
    assert not (tmp_path / "tiny").exists()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("experiment.seeds=[-1]", "seeds.0 = -1"),
        ("experiment.seeds=[0,0]", "holds a seed twice"),
        ("model.n_layers=3", "model.n_layers = 3: this experiment sets a two-layer model"),
        ("train.device=gpu7", "device = 'gpu7' cannot be used here"),
    ],
)
def test_a_wrong_setting_is_one_line_before_anything_is_trained(
    setting: str, said: str, tmp_path: Path
) -> None:
    result = run_tiny(tmp_path / "tiny", "--set", setting)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "tiny").exists()


def test_an_interrupted_experiment_ends_its_workers_at_once(tmp_path: Path) -> None:
    config = ROOT / "configs" / "phase_change.toml"
    out = tmp_path / "long"
    command = [sys.executable, "-m", "interp", "run", str(config), "--out", str(out)]
    # What is ignored here, as Ctrl-C is in a shell's background job, the command would ignore too.
    own = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, own)
    try:
        metrics = list(out.glob("runs/*/metrics.jsonl"))
        while not metrics and process.poll() is None:
            time.sleep(0.2)
            metrics = list(out.glob("runs/*/metrics.jsonl"))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert said.strip().endswith("interp: interrupted; --resume continues")
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/metrics.jsonl")}
    time.sleep(2)  # a worker that lived on would have written several lines by now
    assert before == {path: path.stat().st_mtime_ns for path in out.glob("runs/*/metrics.jsonl")}
