"""The training loop, straight down: draw, predict, step; measure and keep at stated steps.

On one CPU and thread count a run that was interrupted anywhere and resumed ends with the same bits
as one that was not: batches follow from seed and step, and a checkpoint holds the rest.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import torch

from interp.config import RunConfig
from interp.data.stream import open_stream
from interp.errors import ConfigError, ModelError
from interp.models.loading import torch_device
from interp.models.transformer import Transformer
from interp.tables import versions, write_text
from interp.training.checkpoints import (
    TrainState,
    capture_rng,
    load_checkpoint,
    save_checkpoint,
)
from interp.training.probes import Measurement, Probe
from interp.training.run_folder import RunFolder

Watch = Callable[[int, Measurement | None], None]
"""Told of every step, and of what was measured there."""


def train(
    config: RunConfig,
    out: Path | str,
    *,
    resume: bool = False,
    command: str = "",
    watch: Watch = lambda step, measurement: None,
) -> Transformer:
    """Train a model into the run folder `out`; returns it in eval mode.

    Raises: ConfigError for a device that is not there or a folder in use; ModelError for a
    checkpoint that is cut short.
    """
    out = Path(out)
    device = torch_device(config.train.device)
    if config.train.dtype == "bfloat16" and not _has_bfloat16(device):
        raise ConfigError(f"train.dtype = 'bfloat16': {config.train.device} has no bfloat16")
    stream, vocabulary = open_stream(config)
    folder = RunFolder(out)
    _refuse_another_text(folder, stream.facts(), resume)
    folder.open(config, resume=resume)
    if vocabulary is not None and not folder.tokenizer.is_file():
        write_text(folder.tokenizer, vocabulary.to_json())

    with (
        _threads(config.train.threads),
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
    ):
        torch.manual_seed(config.train.seed)
        model = Transformer(
            config.model, seed=config.train.seed, vocabulary=vocabulary, model_name=out.name
        )
        model.to(device).train()
        optimizer = adamw(model, config)
        probe = Probe(config.probe, config.model, stream.held_out(config.probe.sequences))
        state = load_checkpoint(folder.checkpoints, model, optimizer)
        folder.cut_back(state.step if state else -1)
        start = state.step if state else 0
        recent = state.losses_since_probe if state else []

        facts = _facts(config, model, stream.facts(), folder, command, start)
        folder.write_facts(facts)
        began = time.perf_counter()
        in_probes = 0.0
        for step in range(start, config.train.steps + 1):
            last = step == config.train.steps
            measured = None
            # What was measured at the step of a checkpoint came before it.
            if (step % config.probe.every == 0 or last) and not (state and step == start):
                probe_began = time.perf_counter()
                measured = probe.measure(model)
                in_probes += time.perf_counter() - probe_began
                tokens = step * config.train.batch_size * config.model.n_ctx
                where = {"step": step, "tokens": tokens}
                trained = {"train_loss": sum(recent) / len(recent)} if recent else {}
                folder.append_heads([{**where, **row} for row in measured.heads])
                folder.append_metrics({**where, **measured.metrics, **trained})
                seconds = time.perf_counter() - began
                folder.append_timing({"step": step, "seconds": seconds, "probes": in_probes})
                recent = []
            watch(step, measured)
            if step % config.train.checkpoint_every == 0 or last:
                rng, device_rng = capture_rng(device)
                drawn = step * config.train.batch_size
                save_checkpoint(
                    folder.checkpoints,
                    model,
                    optimizer,
                    TrainState(step, drawn, recent, rng, device_rng),
                )
            if last:
                break
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step)
            batch = stream.batch(config.train.seed, step, config.train.batch_size).to(device)
            with torch.autocast(
                device.type, torch.bfloat16, enabled=config.train.dtype == "bfloat16"
            ):
                loss = model(batch, return_type="loss")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip_norm)
            optimizer.step()
            recent.append(loss.item())
            if not math.isfinite(recent[-1]):
                raise ModelError(
                    f"the loss is {recent[-1]} at step {step}: training diverged; a lower train.lr "
                    "may help"
                )
        sessions = facts["sessions"]
        assert isinstance(sessions, list)
        sessions[-1]["seconds"] = round(time.perf_counter() - began, 3)
        # A session that was killed left no time of its own.
        facts["seconds"] = round(sum(session.get("seconds", 0.0) for session in sessions), 3)
        folder.write_facts(facts)
    return model.eval()


def _refuse_another_text(folder: RunFolder, data: dict[str, object], resume: bool) -> None:
    """A path may hold another text by now, and another Python another library."""
    begun = folder.read_facts().get("data") if resume else None
    if isinstance(begun, dict) and begun.get("sha256") != data.get("sha256"):
        raise ConfigError(f"{folder.path}: the corpus is not the text that this run began on")


def learning_rate(config: RunConfig, step: int) -> float:
    """The rate of update `step` (from 0): a line up to `lr` over `warmup_steps`, then `lr`."""
    warmup = config.train.warmup_steps
    return config.train.lr * min(1.0, (step + 1) / warmup if warmup else 1.0)


def adamw(model: Transformer, config: RunConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices, and neither gains nor biases."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {
                "params": [p for p in parameters if p.ndim >= 2],
                "weight_decay": config.train.weight_decay,
            },
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=config.train.lr,
        betas=config.train.betas,
        fused=True,
    )


def _has_bfloat16(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.is_bf16_supported()


@contextmanager
def _threads(n: int | None) -> Iterator[None]:
    """torch's CPU threads, set for the run and given back after it."""
    before = torch.get_num_threads()
    if n is not None:
        torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _facts(
    config: RunConfig,
    model: Transformer,
    data: dict[str, object],
    folder: RunFolder,
    command: str,
    start: int,
) -> dict[str, object]:
    sessions = folder.read_facts().get("sessions", [])
    assert isinstance(sessions, list)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "kind": "train",
        "name": folder.path.name,
        "command": command,
        "versions": versions(),
        "seeds": {"init": config.train.seed, "data": config.train.seed, "probe": 0},
        "device": config.train.device,
        "dtype": config.train.dtype,
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": config.train.steps,
        "tokens_per_step": config.train.batch_size * config.model.n_ctx,
        "data": data,
        "icl_positions": {"early": config.probe.icl_early, "late": config.probe.icl_late},
        "sessions": [*sessions, {"started": now, "from_step": start}],
    }
