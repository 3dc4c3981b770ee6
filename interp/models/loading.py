"""Models on disk: what a checkpoint's folder holds, and `load_model(ref)`.

Tensors are safetensors, everything else JSON beside them; no pickle is read or written. Every
tensor of a file is used exactly once and every parameter is set exactly once.
"""

import json
import re
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from interp.config import ModelConfig, config_tables, explain
from interp.data.tokenizer import BytePairVocabulary
from interp.errors import ConfigError, ModelError
from interp.models.transformer import Transformer
from interp.models.weights import model_with_weights, read_tensors, stored_weights

WEIGHTS, CONFIG, TOKENIZER, CHECKPOINTS = (
    "model.safetensors",
    "config.json",
    "tokenizer.json",
    "checkpoints",
)
_STEP_FOLDER = re.compile(r"step-(\d+)")


def load_model(ref: str | Path, *, device: str = "cpu") -> Transformer:
    """The model of a training run, in eval mode.

    `ref` is a run's folder (its last checkpoint), `FOLDER@STEP`, or a checkpoint's own folder.

    Raises: ModelError where there is no such run or step, or a file is missing or cut short;
    ConfigError for an unknown device.
    """
    folder = checkpoint_folder(ref)
    run = folder.parent.parent
    path = run / TOKENIZER if folder.parent.name == CHECKPOINTS else folder / TOKENIZER
    vocabulary = BytePairVocabulary.load(path) if path.is_file() else None
    config = _read_config(folder)
    if vocabulary is not None and len(vocabulary) > config.d_vocab:
        raise ModelError(
            f"{path} has {len(vocabulary)} tokens, more than d_vocab = {config.d_vocab}"
        )
    path = folder / WEIGHTS
    model = model_with_weights(
        config, read_tensors(path), path, vocabulary=vocabulary, model_name=str(ref)
    )
    return model.to(torch_device(device))


def checkpoint_folder(ref: str | Path) -> Path:
    """The folder that holds the weights `ref` names.

    Raises: ModelError, saying which steps or runs there are.
    """
    text, at, wanted = str(ref), "", ""
    if "@" in text and not Path(text).is_dir():  # a folder's own name may hold an @
        text, at, wanted = text.rpartition("@")
    folder = Path(text)
    if not folder.is_dir():
        raise ModelError(f"no model {text!r}: it should be the folder of a training run")
    steps = checkpoint_steps(folder)
    if at:
        if not wanted.isdecimal() or int(wanted) not in steps:
            known = ", ".join(map(str, steps)) or "none"
            raise ModelError(f"{folder} has no checkpoint {wanted!r}; its steps: {known}")
        return steps[int(wanted)]
    if steps:
        return steps[max(steps)]
    if (folder / WEIGHTS).is_file():
        return folder
    runs = sorted(path.parent for path in folder.glob(f"*/*/{CHECKPOINTS}"))
    if runs:
        raise ModelError(
            f"{folder} is an experiment of several runs: choose one, such as {runs[0]}"
        )
    raise ModelError(f"{folder} has no checkpoint")


def checkpoint_steps(run: Path) -> dict[int, Path]:
    """The published checkpoints of a run, by step, in order."""
    found = {
        int(match[1]): path
        for path in (run / CHECKPOINTS).glob("step-*")
        if (match := _STEP_FOLDER.fullmatch(path.name))
    }
    return dict(sorted(found.items()))


def save_model(model: Transformer, folder: Path) -> None:
    """Write `model.safetensors` and `config.json` into an existing folder."""
    save_file(stored_weights(model), folder / WEIGHTS)
    text = json.dumps({"format": "interp", "model": config_tables(model.config)}, indent=2)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def torch_device(name: str) -> torch.device:
    """A device that is really there.

    Raises: ConfigError for an unknown or absent device.
    """
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # the meta device has memory, but no values
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"device = {name!r} cannot be used here: {reason}") from None
    return device


def _read_config(folder: Path) -> ModelConfig:
    path = folder / CONFIG
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: the checkpoint is incomplete") from None
    except ValueError as error:
        raise ModelError(f"{path} is cut short or is not JSON: {error}") from None
    ours = isinstance(data, dict) and data.get("format") == "interp"
    if not ours or not isinstance(data.get("model"), dict):
        raise ModelError(f"{path} is not a config of this toolkit")
    try:
        return ModelConfig.model_validate(data["model"])
    except ValidationError as error:
        raise ModelError(f"{path}: {explain(error, ModelConfig)}") from None
