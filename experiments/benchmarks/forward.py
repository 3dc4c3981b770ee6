"""Milliseconds of one forward pass, and memory of loading, beside transformers and its bridge.

Every model reads the same folder of random weights: GPT-2 small's shape and SmolLM2-135M's. Their
log-probs are compared first. They then run in turns in one process, so that whatever else the
machine does falls on all of them. transformers runs its fused attention (`sdpa`) without a cache,
TransformerLens's `TransformerBridge` as it boots.

Loading is measured until the first token has been read, since transformers maps the file and reads
no page before: the peak of the resident memory above what there was before, over the size of the
float32 weights. Each has a process of its own, which loaded a tiny model of the same family first,
so that imports do not count. Linux only.

    python experiments/benchmarks/forward.py [--rounds 15] [--threads 2]
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM

from interp.config import ModelConfig
from interp.models.loading import load_model
from interp.models.pretrained import save_pretrained
from interp.models.transformer import Transformer

SHAPES: dict[str, ModelConfig] = {
    "gpt2": ModelConfig.model_validate(
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
    ),
    "smollm2": ModelConfig.model_validate(
        {
            "n_layers": 30,
            "d_model": 576,
            "n_ctx": 8192,
            "d_vocab": 49152,
            "attention": {"n_heads": 9, "n_key_value_heads": 3, "bias": False},
            "mlp": {"d_mlp": 1536, "act_fn": "silu", "gated": True, "bias": False},
            "positional_embedding_type": "rotary",
            "rotary_base": 100000.0,
            "normalization_type": "RMS",
            "tie_embeddings": True,
            "init_std": 0.02,
        }
    ),
}
BATCHES = ((1, 128), (4, 128), (1, 1024))
# Float32 over 12 or 30 layers; a wrong bias or scale is off by more than 0.1.
TOLERANCE = 1e-3

Forward = Callable[[Tensor], Tensor]


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--load", nargs=3, metavar=("LIBRARY", "TINY", "FOLDER"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    if options.load:
        library, tiny, folder = options.load
        print(*loading(LOADERS[library], tiny, folder))
        return
    print(f"{options.threads} threads, {options.rounds} rounds; medians of ratios in turns")
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: Path(scratch, name) for name in SHAPES}
        for name, config in SHAPES.items():
            save_pretrained(random_model(config), folders[name])
            save_pretrained(random_model(tiny_shape(config)), Path(scratch, f"tiny-{name}"))
        print_loading(folders, options.threads)
        for name, folder in folders.items():
            print_forward(name, folder, options.rounds)


def random_model(config: ModelConfig) -> Transformer:
    """A model in which every parameter matters: gains and biases are random too."""
    model = Transformer(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def tiny_shape(config: ModelConfig) -> ModelConfig:
    """The same family in one layer of few tokens."""
    return config.model_copy(update={"n_layers": 1, "d_vocab": 300})


# --- forward ----------------------------------------------------------------------------------


def print_forward(name: str, folder: Path, rounds: int) -> None:
    """Print one line for each batch and length."""
    models = forwards(folder)
    print(f"\n{name:<9} {'tokens':>8} {'max diff':>9}", *(f"{kind:>13}" for kind in models), end="")
    print(f" {'/ transformers':>22} {'/ bridge':>22}   (ms; ratio of interp, quartiles)")
    for batch, n_pos in BATCHES:
        generator = torch.Generator().manual_seed(0)
        d_vocab = SHAPES[name].d_vocab
        tokens = torch.randint(d_vocab, (batch, n_pos), generator=generator)
        difference = largest_difference(models, tokens)  # also warms up
        if difference > TOLERANCE:
            raise SystemExit(f"{name}: log-probs differ by {difference:.1e} at {batch}×{n_pos}")
        times: dict[str, list[float]] = {kind: [] for kind in models}
        for _ in range(rounds):
            for kind, forward in models.items():
                began = time.perf_counter()
                with torch.inference_mode():
                    forward(tokens)
                times[kind].append(time.perf_counter() - began)
        print(f"{name:<9} {f'{batch}×{n_pos}':>8} {difference:>9.1e}", end="")
        for seconds in times.values():
            print(f" {1000 * statistics.median(seconds):>13.1f}", end="")
        for other in ("transformers", "bridge"):
            # The median of paired ratios is steadier than the ratio of medians.
            ratios = [a / b for a, b in zip(times["interp"], times[other], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f" {f'{middle:.2f} ({low:.2f} to {high:.2f})':>22}", end="")
        print(flush=True)


def forwards(folder: Path) -> dict[str, Forward]:
    """The logits of the same weights, by three libraries."""
    ours = load_model(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    bridge = TransformerBridge.boot_transformers(str(folder), device="cpu")
    return {
        "interp": ours,
        "transformers": lambda tokens: theirs(tokens, use_cache=False).logits,
        "bridge": lambda tokens: bridge(tokens, return_type="logits"),
    }


def largest_difference(models: dict[str, Forward], tokens: Tensor) -> float:
    """How far any two libraries' log-probs lie apart."""
    with torch.inference_mode():
        ours, *others = (forward(tokens).log_softmax(-1) for forward in models.values())
    return max(float((ours - other).abs().max()) for other in others)


# --- loading ----------------------------------------------------------------------------------

LOADERS: dict[str, Callable[[str], Callable[[Tensor], object]]] = {
    "interp": load_model,
    "transformers": AutoModelForCausalLM.from_pretrained,
}


def print_loading(folders: dict[str, Path], threads: int) -> None:
    """Print one line for each shape and library."""
    print(
        f"\n{'loading':<9} {'library':<13} {'weights':>9} {'peak':>9} {'ratio':>6} {'seconds':>8}"
    )
    for name, folder in folders.items():
        for library in LOADERS:
            tiny = folder.with_name(f"tiny-{name}")
            command = [sys.executable, __file__, "--threads", str(threads)]
            command += ["--load", library, str(tiny), str(folder)]
            answer = subprocess.run(command, capture_output=True, text=True, check=True)
            peak, seconds = map(float, answer.stdout.split())
            size = (folder / "model.safetensors").stat().st_size
            print(
                f"{name:<9} {library:<13} {size / 1e6:>6.0f} MB {peak / 1e6:>6.0f} MB "
                f"{peak / size:>6.2f} {seconds:>8.2f}",
                flush=True,
            )


def loading(
    load: Callable[[str], Callable[[Tensor], object]], tiny: str, folder: str
) -> tuple[int, float]:
    """Bytes by which resident memory peaked until the first token was read, and the seconds."""
    token = torch.zeros(1, 1, dtype=torch.long)
    with torch.inference_mode():
        load(tiny)(token)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = resident("VmRSS")
    began = time.perf_counter()
    with torch.inference_mode():
        load(folder)(token)
    seconds = time.perf_counter() - began
    return resident("VmHWM") - before, seconds


def resident(field: str) -> int:
    """Bytes of resident memory: `VmRSS` now, `VmHWM` at its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    main()
