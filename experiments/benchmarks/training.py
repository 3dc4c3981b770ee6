"""Tokens per second of one training step, beside TransformerLens's own native model.

Both models have the same shape, batch, optimizer and loss; they train in turns in one process, so
that whatever else the machine does falls on both. TransformerLens has no shortformer positions, so
its model adds learned ones to the residual stream, which costs it less.

    python experiments/benchmarks/training.py [--rounds 15] [--threads 2]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformer_lens.model_bridge.sources.native  # noqa: F401  (attaches boot_native)
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge

from interp.config import RunConfig, load_config
from interp.models.transformer import Transformer
from interp.training.loop import adamw

CONFIGS = Path(__file__).parents[2] / "configs"
STEPS_PER_TURN = 3


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.threads} threads, median of {options.rounds} rounds of {STEPS_PER_TURN} steps")
    print(f"{'config':<20} {'interp':>12} {'boot_native':>12} {'ratio':>7}   (tokens per second)")
    for name in ("phase_change", "phase_change_text"):
        config = load_config(CONFIGS / f"{name}.toml")
        batch, n_ctx = config.train.batch_size, config.model.n_ctx
        tokens = torch.randint(config.model.d_vocab, (batch, n_ctx))
        turns = [ours(config, tokens), theirs(config, tokens)]
        for step in turns:  # warm up
            step()
        times: list[list[float]] = [[], []]
        for _ in range(options.rounds):
            for seconds, step in zip(times, turns, strict=True):
                began = time.perf_counter()
                for _ in range(STEPS_PER_TURN):
                    step()
                seconds.append((time.perf_counter() - began) / STEPS_PER_TURN)
        speed = [batch * n_ctx / statistics.median(seconds) for seconds in times]
        # The median of paired ratios is steadier than the ratio of medians on a shared machine.
        ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
        print(f"{name:<20} {speed[0]:>12,.0f} {speed[1]:>12,.0f} {ratio:>7.2f}")


def ours(config: RunConfig, tokens: torch.Tensor) -> Callable[[], None]:
    """One training step of this toolkit's model, as the training loop takes it."""
    model = Transformer(config.model).train()
    return _step(model, adamw(model, config), tokens, config.train.clip_norm)


def theirs(config: RunConfig, tokens: torch.Tensor) -> Callable[[], None]:
    """The same step of TransformerLens's native model under its bridge."""
    model = TransformerBridge.boot_native(
        TransformerBridgeConfig(
            n_layers=config.model.n_layers,
            d_model=config.model.d_model,
            d_head=config.model.d_head,
            n_heads=config.model.attention.n_heads,
            n_ctx=config.model.n_ctx,
            d_vocab=config.model.d_vocab,
            attn_only=True,
            act_fn="relu",
            seed=0,
        ),
        device="cpu",
    )
    model.train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=config.train.lr, betas=config.train.betas, fused=True
    )
    return _step(model, optimizer, tokens, config.train.clip_norm)


def _step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    clip_norm: float,
) -> Callable[[], None]:
    def step() -> None:
        loss = model(tokens, return_type="loss")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
