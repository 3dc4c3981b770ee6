"""Seconds of a sweep over all heads, beside a loop of hooked passes on TransformerLens's bridge.

GPT-2 small's shape with random weights, 4 sequences of 128 tokens, 144 heads zeroed one at a time.
The peer is `TransformerBridge.run_with_hooks` for each head, without gradients, on the same
weights; both run in turns, a few heads each, in one process. Effects are compared first.

The floor is the time of the counted products alone, at the rate at which the model's own plain
forward computes its own: the layers behind each head, and the unembedding where the metric reads.

Peak memory is measured in processes of their own: the resident memory above what there was when the
model had been loaded and had read one token. Linux only.

    python experiments/benchmarks/ablation.py [--threads 2] [--layers 0-11]
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from interp.ablation.importance import head_gradients
from interp.ablation.measuring import Heads, Measured, Setting, measure_sets
from interp.ablation.methods import Zeroing
from interp.ablation.metrics import METRICS
from interp.ablation.plan import sweep_flops
from interp.config import ModelConfig
from interp.inputs import Inputs, token_inputs
from interp.models.loading import load_model
from interp.models.pretrained import save_pretrained
from interp.models.pruning import prune_heads
from interp.models.transformer import Transformer

SHAPE = ModelConfig.model_validate(
    {
        "n_layers": 12,
        "d_model": 768,
        "n_ctx": 1024,
        "d_vocab": 50257,
        "attention": {"n_heads": 12},
        "mlp": {"d_mlp": 3072},
        "tie_embeddings": True,
        "init_std": 0.02,
    }
)
BATCH, N_POS = 4, 128
# Float32 through 12 layers; the effects themselves are near 0.01.
TOLERANCE = 1e-5
ROUNDS = 7

SWEEPS = {
    "loss": ("loss", False),
    "last-token": ("last-token", False),
    "bfloat16": ("loss", True),
}
"""What is measured, and whether our products are in bfloat16."""

Peer = Callable[[int, int], Tensor]
"""The metric of every sequence without one head, as the peer computes it."""


def main() -> None:
    """Print the sweeps, the importance, the memory and the pruned model's speed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", default="0-11", help="first-last: fewer for a quick look")
    parser.add_argument("--sweeps", default=",".join(SWEEPS), help="which of the sweeps")
    parser.add_argument("--memory", nargs=2, metavar=("WHAT", "FOLDER"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory:
        print(peak_memory(*options.memory))
        return
    first, last = map(int, options.layers.split("-"))
    heads = [(layer, head) for layer in range(first, last + 1) for head in range(12)]
    print(f"{options.threads} threads; {BATCH}×{N_POS} tokens, {len(heads)} heads, in turns")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "model")
        save_pretrained(Transformer(SHAPE), folder)
        model = load_model(folder)
        assert isinstance(model, Transformer)
        bridge = TransformerBridge.boot_transformers(str(folder), device="cpu")
        tokens = random_tokens()
        inputs = token_inputs(model, tokens)
        rate = forward_rate(model, inputs)
        print(f"plain forward: {rate / 1e9:.0f} GFLOP/s")
        print(f"\n{'sweep':<22} {'interp':>9} {'floor':>9} {'bridge':>9} {'ratio':>6} {'apart':>8}")
        for sweep in options.sweeps.split(","):
            metric, bfloat16 = SWEEPS[sweep]
            loop = last_token_loop if metric == "last-token" else loss_loop
            print_sweep(model, inputs, heads, metric, bfloat16, loop(bridge, tokens), rate)
        print_importance(model, inputs)
        print_pruned(model, tokens)
        print_memory(folder, options.threads)


def random_tokens() -> Tensor:
    """The sequences."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(SHAPE.d_vocab, (BATCH, N_POS), generator=generator)


# --- sweeps -----------------------------------------------------------------------------------


def loss_loop(bridge: TransformerBridge, tokens: Tensor) -> Peer:
    """The loss without one head: what a user of the bridge writes."""

    def run(layer: int, head: int) -> Tensor:
        with torch.no_grad():
            losses = bridge.run_with_hooks(
                tokens,
                return_type="loss",
                loss_per_token=True,
                fwd_hooks=[(f"blocks.{layer}.attn.hook_z", zero_head(head))],
            )
        return losses.mean(dim=1)

    return run


def last_token_loop(bridge: TransformerBridge, tokens: Tensor) -> Peer:
    """The loss of the last token without one head."""

    def run(layer: int, head: int) -> Tensor:
        with torch.no_grad():
            logits = bridge.run_with_hooks(
                tokens,
                return_type="logits",
                fwd_hooks=[(f"blocks.{layer}.attn.hook_z", zero_head(head))],
            )
        log_probs = logits[:, -2].log_softmax(dim=-1)
        return -log_probs.gather(1, tokens[:, -1:])[:, 0]

    return run


def zero_head(head: int) -> Callable:
    """The hook that takes one head away."""

    def hook(z: Tensor, hook: object) -> Tensor:
        z = z.clone()
        z[:, :, head] = 0.0
        return z

    return hook


def print_sweep(
    model: Transformer,
    inputs: Inputs,
    heads: Sequence[tuple[int, int]],
    metric: str,
    bfloat16: bool,
    peer: Peer,
    rate: float,
) -> None:
    """One line: our sweep, the floor, and the peer's loop over the same heads in turns."""
    sets: list[Heads] = [(head,) for head in heads]
    theirs: list[Tensor] = []
    peer_seconds = 0.0
    peer(*heads[0])  # warms up

    def in_turn(done: int, total: int) -> None:
        nonlocal peer_seconds
        began = time.perf_counter()
        with torch.autocast("cpu", enabled=False):  # ours may be bfloat16, theirs stays float32
            theirs.extend(peer(*head) for head in heads[len(theirs) : done])
        peer_seconds += time.perf_counter() - began

    began = time.perf_counter()
    setting = Setting(METRICS[metric], bfloat16=bfloat16)
    measured: Measured = measure_sets(model, inputs, [Zeroing()], sets, setting, progress=in_turn)[
        "zero"
    ]
    seconds = time.perf_counter() - began - peer_seconds
    assert len(theirs) == len(heads)
    apart = max(
        float(abs(measured.ablated[one] - other.double().numpy()).max())
        for one, other in zip(sets, theirs, strict=True)
    )
    if not bfloat16 and apart > TOLERANCE:
        raise SystemExit(f"{metric}: the two differ by {apart:.1e}")
    floor = sweep_flops(model, inputs, METRICS[metric], sets) / rate
    told = f"{metric}{', bfloat16' if bfloat16 else ''}"
    floor_told = f"{floor:>7.1f} s" if not bfloat16 else f"{'':>9}"
    print(
        f"{told:<22} {seconds:>7.1f} s {floor_told} {peer_seconds:>7.1f} s "
        f"{peer_seconds / seconds:>6.2f} {apart:>8.1e}",
        flush=True,
    )


def forward_rate(model: Transformer, inputs: Inputs) -> float:
    """FLOP/s of a plain forward that returns logits."""
    from torch.utils.flop_counter import FlopCounterMode

    (batch,) = inputs.batches
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(batch.tokens)
    seconds = []
    with torch.no_grad():
        for _ in range(ROUNDS):
            began = time.perf_counter()
            model(batch.tokens)
            seconds.append(time.perf_counter() - began)
    return counter.get_total_flops() / statistics.median(seconds)


# --- importance and pruning -------------------------------------------------------------------


def print_importance(model: Transformer, inputs: Inputs) -> None:
    """Importance of all heads beside a plain forward, in turns: an approximation of the sweep."""
    (batch,) = inputs.batches
    ratios = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        with torch.no_grad():
            model(batch.tokens, return_type="loss")
        forward = time.perf_counter() - began
        began = time.perf_counter()
        head_gradients(model, inputs, METRICS["loss"])
        ratios.append((time.perf_counter() - began) / forward)
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"\nimportance of all heads (an approximation): {middle:.2f} ({low:.2f} to {high:.2f}) "
        "times a plain forward with its loss"
    )


def print_pruned(model: Transformer, tokens: Tensor) -> None:
    """The forward of a model without half of its heads beside the whole one, in turns."""
    half = [(layer, head) for layer in range(12) for head in range(0, 12, 2)]
    pruned = prune_heads(model, half)
    ratios = []
    with torch.no_grad():
        for _ in range(ROUNDS):
            times = []
            for one in (model, pruned):
                began = time.perf_counter()
                one(tokens, return_type=None)
                times.append(time.perf_counter() - began)
            ratios.append(times[1] / times[0])
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"pruned of 72 of 144 heads: {middle:.2f} ({low:.2f} to {high:.2f}) of the whole model's "
        "time, without logits"
    )


# --- memory -----------------------------------------------------------------------------------


def print_memory(folder: Path, threads: int) -> None:
    """Peak memory of a plain forward, of a sweep and of the peer's loop."""
    peaks = {}
    for what in ("forward", "forward with loss", "sweep", "importance", "bridge"):
        command = [sys.executable, __file__, "--threads", str(threads)]
        command += ["--memory", what, str(folder)]
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks[what] = int(answer.stdout)
    print(f"\n{'peak memory':<22} {'':>9} {'/ forward':>9}")
    for what, peak in peaks.items():
        print(f"{what:<22} {peak / 1e6:>6.0f} MB {peak / peaks['forward']:>9.2f}")


def peak_memory(what: str, folder: str) -> int:
    """Bytes by which resident memory peaks above that of the loaded model."""
    tokens = random_tokens()
    if what == "bridge":
        bridge = TransformerBridge.boot_transformers(folder, device="cpu")
        with torch.no_grad():
            bridge(tokens[:, :1])
        run: Callable[[], object] = partial(loss_loop(bridge, tokens), 6, 0)
    else:
        model = load_model(folder)
        assert isinstance(model, Transformer)
        inputs = token_inputs(model, tokens)
        with torch.no_grad():
            model(tokens[:, :1])
        run = memory_tasks(model, inputs)[what]
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Bytes of resident memory: `VmRSS` now, `VmHWM` at its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def memory_tasks(model: Transformer, inputs: Inputs) -> dict[str, Callable[[], object]]:
    """What is measured in our model."""
    (batch,) = inputs.batches
    sets: list[Heads] = [((layer, head),) for layer in (0, 6) for head in range(12)]

    def forward(return_type: str) -> object:
        with torch.no_grad():
            return model(batch.tokens, return_type=return_type)

    setting = Setting(METRICS["loss"], direct=True)
    return {
        "forward": lambda: forward("logits"),
        "forward with loss": lambda: forward("loss"),
        "sweep": lambda: measure_sets(model, inputs, [Zeroing()], sets, setting),
        "importance": lambda: head_gradients(model, inputs, METRICS["loss"]),
    }


if __name__ == "__main__":
    main()
