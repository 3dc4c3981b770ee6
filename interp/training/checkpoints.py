"""Checkpoints of a run: everything from which training continues bit for bit.

A checkpoint is filled in a hidden folder and published by one rename, so that a folder named
`step-000500` is whole however the process ended.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from interp.errors import ModelError
from interp.models.loading import WEIGHTS, checkpoint_steps, save_model
from interp.models.transformer import Transformer
from interp.models.weights import read_tensors, set_weights

_OPTIMIZER, _STATE, _SCRATCH = "optimizer.safetensors", "state.json", ".making"


@dataclass
class TrainState:
    """Where training stands, beside weights and optimizer."""

    step: int
    sequences_drawn: int
    """The data position: a batch follows from seed and step, this says how far they reach."""
    losses_since_probe: list[float]
    rng: str
    """torch's CPU generator as hex; dropout draws from it."""
    device_rng: list[str]


def save_checkpoint(
    checkpoints: Path, model: Transformer, optimizer: torch.optim.Optimizer, state: TrainState
) -> None:
    """Publish `step-NNNNNN`; one that exists is left as it is."""
    folder = checkpoints / f"step-{state.step:06d}"
    if folder.is_dir():
        return
    scratch = checkpoints / _SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)  # what a killed process left
    scratch.mkdir()
    save_model(model, scratch)
    save_file(_optimizer_tensors(model, optimizer), scratch / _OPTIMIZER)
    (scratch / _STATE).write_text(json.dumps(asdict(state)) + "\n", encoding="utf-8")
    scratch.rename(folder)


def load_checkpoint(
    checkpoints: Path, model: Transformer, optimizer: torch.optim.Optimizer
) -> TrainState | None:
    """Set model, optimizer and torch's generators to the last checkpoint; None where none is.

    Raises: ModelError where a file of it is missing or cut short.
    """
    steps = checkpoint_steps(checkpoints.parent)
    if not steps:
        return None
    folder = steps[max(steps)]
    state = _read_state(folder / _STATE)
    set_weights(model, read_tensors(folder / WEIGHTS), folder / WEIGHTS)
    _set_optimizer(model, optimizer, read_tensors(folder / _OPTIMIZER), folder / _OPTIMIZER)
    torch.set_rng_state(_generator_state(state.rng))
    if state.device_rng:
        torch.cuda.set_rng_state_all([_generator_state(rng) for rng in state.device_rng])
    return state


def capture_rng(device: torch.device) -> tuple[str, list[str]]:
    """torch's generators as hex: the CPU's, and where the run is on CUDA those of its devices."""
    device_states = torch.cuda.get_rng_state_all() if device.type == "cuda" else []
    return _hex(torch.get_rng_state()), [_hex(state) for state in device_states]


def _hex(state: Tensor) -> str:
    return bytes(state.tolist()).hex()


def _generator_state(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


def _read_state(path: Path) -> TrainState:
    try:
        state = TrainState(**json.loads(path.read_text(encoding="utf-8")))
        for rng in (state.rng, *state.device_rng):
            bytes.fromhex(rng)
        return state
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: the checkpoint is incomplete") from None
    except (ValueError, TypeError) as error:
        raise ModelError(f"{path} is cut short or is not a training state: {error}") from None


def _optimizer_tensors(model: Transformer, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value.detach().contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _set_optimizer(
    model: Transformer, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], path: Path
) -> None:
    parameters = dict(model.named_parameters())
    wanted = {f"{name}.{key}" for name in parameters for key in ("step", "exp_avg", "exp_avg_sq")}
    # Before the first step AdamW has no state at all.
    if tensors and tensors.keys() != wanted:
        odd = sorted(tensors.keys() ^ wanted)
        raise ModelError(f"{path} does not fit the model: {', '.join(odd[:3])}")
    for full_name, value in tensors.items():
        name, _, key = full_name.rpartition(".")
        device = "cpu" if key == "step" else parameters[name].device
        optimizer.state[parameters[name]][key] = value.to(device)
