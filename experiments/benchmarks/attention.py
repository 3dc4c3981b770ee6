"""Time and memory of exact attention computed four ways, and of decoding with a cache.

1. Causal attention of 8 heads of 64, one sequence, in float32, from queries, keys and values: a
   loop over heads (kept here for this table only), the batched dense form, tiles with the online
   softmax in plain tensor operations (`interp.models.online`), and PyTorch's fused operator, which
   the model runs. Milliseconds are medians of rounds in turns. Peaks of memory are above the
   inputs, each of a process of its own (Linux only). FLOPs are counted from the shapes: 4 n^2 d
   for each head, the masked half included, as the dense form has it; bytes are the least that have
   to be moved: inputs and output once, and for what makes n x n matrices each of them four times
   (Dao et al. 2022, algorithm 0). The outputs are compared first.
2. `--decode`: seconds of 256 new tokens of SmolLM2-135M after a prompt of 64, greedy, with a cache:
   ours beside `transformers`' generate, in turns. A ratio above 1 says that ours is faster; the
   tokens are compared first.

    python experiments/benchmarks/attention.py [--rounds 5] [--threads 2] [--figure FILE.png]
    python experiments/benchmarks/attention.py --decode
"""

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import plotly.graph_objects as go
import torch
import transformers
from torch import Tensor

from interp.models.attention import (
    attention_pattern,
    attention_scores,
    fused_attention,
    weighted_values,
)
from interp.models.hub import resolve
from interp.models.loading import load_model
from interp.models.masks import AttentionMask
from interp.models.online import online_attention
from interp.models.transformer import Transformer

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
N_HEADS, D_HEAD = 8, 64
SCALE = 1 / math.sqrt(D_HEAD)
TOLERANCE = 1e-4
TILE = 256
PROMPT, NEW = 64, 256

Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--figure", type=Path, help="draw the table, log against log")
    parser.add_argument("--decode", action="store_true", help="decoding beside transformers'")
    parser.add_argument("--peak", nargs=2, metavar=("WAY", "TOKENS"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    transformers.utils.logging.disable_progress_bar()
    if options.peak:
        way, n_pos = options.peak
        print(peak(WAYS[way], int(n_pos)))
        return
    print(f"{options.threads} threads, {options.rounds} rounds in turns", flush=True)
    if options.decode:
        print_decoding(options.rounds)
        return
    rows = print_ways(options.rounds, options.threads)
    if options.figure is not None:
        if options.figure.suffix == ".png":
            figure(rows).write_image(options.figure, width=900, height=380)
        else:
            options.figure.write_text(figure(rows).to_html(include_plotlyjs=True))
        print(f"written: {options.figure}")


# --- four ways ----------------------------------------------------------------------------------


def looped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head after the other."""
    n_pos = q.shape[1]
    later = torch.ones(n_pos, n_pos, dtype=torch.bool).triu(1)
    heads = []
    for head in range(q.shape[2]):
        scores = q[:, :, head] @ k[:, :, head].mT * SCALE
        pattern = scores.masked_fill(later, -math.inf).softmax(dim=-1)
        heads.append(pattern @ v[:, :, head])
    return torch.stack(heads, dim=2)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All heads together, with their patterns."""
    allowed = AttentionMask().allowed(q.shape[1], k.shape[1], q.device)
    return weighted_values(attention_pattern(attention_scores(q, k, allowed, SCALE)), v)


def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Tiles with the online softmax."""
    return online_attention(q, k, v, scale=SCALE, mask=AttentionMask(), tile=TILE)[0]


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What the model runs."""
    return fused_attention(q, k, v, scale=SCALE, mask=AttentionMask())[0]


WAYS: dict[str, Way] = {"loop": looped, "dense": dense, "tiled": tiled, "fused": fused}
COLOURS = {"loop": "#6b7280", "dense": "#c2410c", "tiled": "#7c3aed", "fused": "#0b63b0"}


def inputs(n_pos: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one layer."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, n_pos, N_HEADS, D_HEAD)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    return q, k, v


def flops(n_pos: int) -> float:
    """Of the two products of all heads."""
    return 4.0 * n_pos**2 * D_HEAD * N_HEADS


def least_bytes(way: str, n_pos: int) -> float:
    """What has to be moved: inputs, output, and the n x n matrices where they are made."""
    moved = 4 * n_pos * N_HEADS * D_HEAD
    if way in ("loop", "dense"):
        moved += 4 * N_HEADS * n_pos**2
    return 4.0 * moved


def print_ways(rounds: int, threads: int) -> list[dict[str, float | str]]:
    """Table 1, and its rows."""
    print(f"causal attention, {N_HEADS} heads of {D_HEAD}, float32; tiles of {TILE}")
    heads = ("tokens", "way", "ms", "peak MB", "GFLOP", "least MB", "GFLOP/s")
    print("".join(f"{name:>10}" for name in heads))
    rows: list[dict[str, float | str]] = []
    for n_pos in LENGTHS:
        given = inputs(n_pos)
        expected = fused(*given)
        for name, way in WAYS.items():
            off = float((way(*given) - expected).abs().max())
            if not off < TOLERANCE:
                raise SystemExit(f"{name} differs by {off:.1e} at {n_pos} tokens")
        ways = {name: partial(way, *given) for name, way in WAYS.items()}
        for name, times in in_turns(ways, rounds).items():
            milliseconds = 1000 * statistics.median(times)
            command = [sys.executable, __file__, "--threads", str(threads)]
            command += ["--peak", name, str(n_pos)]
            answer = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append(
                {
                    "tokens": n_pos,
                    "way": name,
                    "ms": milliseconds,
                    "peak": int(answer.stdout) / 1e6,
                    "gflop": flops(n_pos) / 1e9,
                    "least": least_bytes(name, n_pos) / 1e6,
                }
            )
            cells = (*rows[-1].values(), flops(n_pos) / milliseconds / 1e6)
            shown = (f"{own:.1f}" if isinstance(own, float) else str(own) for own in cells)
            print("".join(f"{own:>10}" for own in shown), flush=True)
    return rows


def in_turns(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every way, round by round."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - began)
    return times


def figure(rows: list[dict[str, float | str]]) -> go.Figure:
    """Time and memory against tokens, both axes logarithmic."""
    drawn = go.Figure()
    for name in WAYS:
        own = [row for row in rows if row["way"] == name]
        for column, axis in (("ms", ""), ("peak", "2")):
            drawn.add_scatter(
                x=[row["tokens"] for row in own],
                y=[row[column] for row in own],
                name=name,
                legendgroup=name,
                showlegend=not axis,
                mode="lines+markers",
                line={"color": COLOURS[name]},
                xaxis=f"x{axis}",
                yaxis=f"y{axis}",
            )
    drawn.update_layout(
        title="Exact attention four ways: time and peak memory",
        template="plotly_white",
        xaxis={"type": "log", "title": "tokens", "domain": [0, 0.46]},
        xaxis2={"type": "log", "title": "tokens", "domain": [0.54, 1], "anchor": "y2"},
        yaxis={"type": "log", "title": "milliseconds"},
        yaxis2={"type": "log", "title": "peak, MB above the inputs", "anchor": "x2"},
    )
    return drawn


# --- memory -------------------------------------------------------------------------------------


def peak(way: Way, n_pos: int) -> int:
    """Bytes by which resident memory peaked over what there was with the inputs."""
    way(*inputs(64))
    given = inputs(n_pos)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = resident("VmRSS")
    way(*given)
    return max(0, resident("VmHWM") - before)


def resident(field: str) -> int:
    """Bytes of resident memory: `VmRSS` now, `VmHWM` at its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


# --- decoding -----------------------------------------------------------------------------------


def print_decoding(rounds: int) -> None:
    """Table 2."""
    path = resolve("smollm2-135m").path
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    ours = load_model("smollm2-135m")
    if not isinstance(ours, Transformer):
        raise RuntimeError("SmolLM2 is ours natively")
    prompt = torch.randint(100, 40_000, (1, PROMPT), generator=torch.Generator().manual_seed(0))

    def generated_by_us() -> Tensor:
        return ours.generate(prompt, NEW)

    def generated_by_them() -> Tensor:
        return theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )

    mine, other = generated_by_us(), generated_by_them()
    same = int((mine == other).long().cumprod(dim=1).sum()) - PROMPT
    print(f"{NEW} new tokens after {PROMPT}; the first {same} are the same")
    ways = {"ours": generated_by_us, "transformers": generated_by_them}
    times = in_turns(ways, rounds)
    ratios = [b / a for a, b in zip(times["ours"], times["transformers"], strict=True)]
    for name, own in times.items():
        middle = statistics.median(own)
        print(f"{name:<13} {middle:.2f} s, {NEW / middle:.1f} tokens a second")
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"transformers' time over ours {middle:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
