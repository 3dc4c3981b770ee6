"""Milliseconds and memory of head scores, beside the dense pattern and TransformerLens's cache.

Four tables; a ratio is the median of paired ratios in turns, with its quartiles.

1. One layer of 12 heads of 64 from its queries and keys: sink, previous token, induction, entropy
   and distance together, averaged over queries. Ours knows no log-sum-exp beforehand. "dense" is
   the pattern as one writes it: scores, mask, softmax. "in place" is the same in the memory of the
   scores, which cannot be had from a model's hooks. Bars against dense: at least 6 times faster at
   4096 tokens, never below 0.9 times at 512.
2. The same scores from tokens, on a model of that one layer with random weights: our
   `watch_attention` beside the five reductions of `run_with_cache(tokens, names_filter=pattern)`
   of TransformerLens's `TransformerBridge`. Both times are of the whole call, MLP included.
3. GPT-2 small's shape with 2048 tokens: a plain forward pass without logits beside
   `watch_attention` with the scores that are gathered (induction, previous token, first token).
   Bar: at most 1.15 times.
4. Peak of the resident memory above what there was before, of table 1's two ways, each in a
   process of its own. Ours should double where the tokens do. Linux only.

The numbers of every way are compared first.

    python experiments/benchmarks/head_scores.py [--rounds 15] [--threads 2]

`--smollm2` times instead every analysis on SmolLM2-135M at its whole context of 8192 tokens, and
says what memory that takes. Bar: 6 GB.
"""

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import GPT2Config, GPT2LMHeadModel

from interp import registry
from interp.data.repeated import TokenBatch, repeated_tokens
from interp.models.layer_attention import LayerAttention
from interp.models.loading import load_model
from interp.models.masks import AttentionMask
from interp.models.patterns import QueryKeys
from interp.models.transformer import Transformer
from interp.models.watch import as_hooked, watch_attention

LENGTHS = (512, 1024, 2048, 4096)
N_HEADS, D_HEAD = 12, 64
SCALE = 1 / math.sqrt(D_HEAD)
# Distances are divided by the sequence's length, so that every score lies in 0 to ln n.
TOLERANCE = 1e-5
# The one layer's queries and keys differ in rounding between the libraries.
MODEL_TOLERANCE = 1e-3

Scores = Mapping[str, Tensor]
Way = Callable[[], Scores]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--smollm2", action="store_true", help="every analysis at 8192 tokens")
    parser.add_argument("--peak", nargs=2, metavar=("WAY", "TOKENS"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    transformers.utils.logging.disable_progress_bar()
    if options.peak:
        way, n_pos = options.peak
        print(peak(WAYS[way], int(n_pos)))
        return
    print(f"{options.threads} threads, {options.rounds} rounds in turns; milliseconds", flush=True)
    if options.smollm2:
        print_smollm2()
        return
    print_one_layer(options.rounds)
    print_beside_transformerlens(options.rounds)
    print_whole_model(options.rounds)
    print_memory(options.threads)


# --- the five scores --------------------------------------------------------------------------


def our_scores(q: Tensor, k: Tensor) -> Scores:
    """From queries and keys, without the pattern."""
    real = torch.ones(q.shape[:2], dtype=torch.bool)
    weights = QueryKeys(q, k, SCALE, AttentionMask())
    return watched_scores(LayerAttention(0, weights, real))


def watched_scores(attention: LayerAttention) -> dict[str, Tensor]:
    """As an analysis would ask for them."""
    n_pos = attention.key_mask.shape[1]
    return {
        **gathered_scores(attention),
        "entropy": attention.entropy.mean(dim=-1),
        "distance": attention.distance.mean(dim=-1) / n_pos,
    }


def gathered_scores(attention: LayerAttention) -> dict[str, Tensor]:
    """Those that look at one key of each query."""
    place = attention.places
    block = place.shape[1] // 2
    target = torch.where(place >= block, place - block + 1, -1)
    return {
        "sink": attention.prob_at(torch.zeros_like(place)).mean(dim=-1),
        "previous": attention.prob_at(place - 1).sum(dim=-1) / (place.shape[1] - 1),
        "induction": attention.prob_at(target).sum(dim=-1) / block,
    }


def dense_scores(q: Tensor, k: Tensor) -> Scores:
    """From the pattern."""
    n_pos = q.shape[1]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * SCALE
    later = torch.ones(n_pos, n_pos, dtype=torch.bool).triu(1)
    return pattern_scores(scores.masked_fill(later, -math.inf).softmax(dim=-1))


def in_place_scores(q: Tensor, k: Tensor) -> Scores:
    """From the pattern, which is made in the place of the scores."""
    n_pos = q.shape[1]
    scores = (q.transpose(1, 2) * SCALE) @ k.transpose(1, 2).mT
    scores.masked_fill_(torch.ones(n_pos, n_pos, dtype=torch.bool).triu_(1), -math.inf)
    pattern = torch.softmax(scores, dim=-1, out=scores)
    return pattern_scores(pattern)


def pattern_scores(pattern: Tensor) -> Scores:
    """The five reductions of a pattern."""
    n_pos = pattern.shape[-1]
    block = n_pos // 2
    place = torch.arange(n_pos, dtype=pattern.dtype)
    distance = place - pattern @ place
    return {
        "sink": pattern[..., 0].mean(dim=-1),
        "previous": pattern.diagonal(-1, 2, 3).mean(dim=-1),
        "induction": pattern.diagonal(1 - block, 2, 3)[..., 1:].sum(dim=-1) / block,
        "entropy": torch.special.entr(pattern).sum(dim=-1).mean(dim=-1),
        "distance": distance.mean(dim=-1) / n_pos,
    }


WAYS: dict[str, Callable[[Tensor, Tensor], Scores]] = {
    "ours": our_scores,
    "dense": dense_scores,
    "in place": in_place_scores,
}


def queries_and_keys(n_pos: int) -> tuple[Tensor, Tensor]:
    """Random ones of one layer."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, n_pos, N_HEADS, D_HEAD)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


# --- times ------------------------------------------------------------------------------------


def print_one_layer(rounds: int) -> None:
    """Table 1."""
    print("\none layer from queries and keys: five scores, ours beside the pattern's")
    for n_pos in LENGTHS:
        ways = {name: partial(way, *queries_and_keys(n_pos)) for name, way in WAYS.items()}
        print_turns(f"{n_pos} tokens", ways, rounds, TOLERANCE)


def print_beside_transformerlens(rounds: int) -> None:
    """Table 2."""
    print("\none-layer model from tokens: five scores, ours beside TransformerLens's cache")
    hf = gpt2(1, max(LENGTHS), d_vocab=1000)
    ours = native(hf)
    hf.set_attn_implementation("eager")  # the one that has patterns
    bridge = build_bridge_from_module(
        hf, "GPT2LMHeadModel", hf_config=hf.config, model_name="one layer"
    )
    name = "blocks.0.attn.hook_pattern"
    for n_pos in LENGTHS:
        tokens = random_tokens(n_pos, 1000)

        def cached(tokens: Tensor = tokens) -> Scores:
            _, cache = bridge.run_with_cache(tokens, names_filter=name)
            return pattern_scores(cache[name])

        def watched(tokens: Tensor = tokens) -> Scores:
            return watch_attention(ours, tokens, watched_scores)[0]

        ways = {"ours": watched, "TransformerLens": cached}
        print_turns(f"{n_pos} tokens", ways, rounds, MODEL_TOLERANCE)


def print_whole_model(rounds: int) -> None:
    """Table 3."""
    print("\nGPT-2 small's shape: gathered scores of every layer, beside a plain forward pass")
    n_pos = 2048
    model = native(gpt2(12, n_pos, d_vocab=50257))
    tokens = random_tokens(n_pos, 50257)

    def watched() -> Scores:
        layers = watch_attention(model, tokens, gathered_scores)
        return {
            f"{name} {layer}": v for layer, seen in enumerate(layers) for name, v in seen.items()
        }

    def plain() -> Scores:
        model(tokens, return_type=None)
        return {}

    print_turns(f"{n_pos} tokens", {"watched": watched, "plain": plain}, rounds, TOLERANCE)


def print_turns(title: str, ways: Mapping[str, Way], rounds: int, tolerance: float) -> None:
    """A line for each further way: medians, and how many times faster the first way is."""
    found = {name: way() for name, way in ways.items()}  # also warms up
    mine, *others = ways
    for other in others:
        for score in found[mine].keys() & found[other].keys():
            difference = float((found[mine][score] - found[other][score]).abs().max())
            if not difference < tolerance:
                raise SystemExit(f"{title}: {score} differs by {difference:.1e}")
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - began)
    for other in others:
        ratios = [b / a for a, b in zip(times[mine], times[other], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        medians = "  ".join(
            f"{name} {1000 * statistics.median(times[name]):.1f}" for name in (mine, other)
        )
        slower = f"; time {1 / middle:.3f} of it" if middle < 1.5 else ""
        print(
            f"{title:>12}  {medians}  {middle:.2f} times faster ({low:.2f} to {high:.2f}){slower}",
            flush=True,
        )


def gpt2(n_layers: int, n_pos: int, d_vocab: int) -> GPT2LMHeadModel:
    """Random weights, three times as large as usual so that attention is not uniform."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=n_layers, n_positions=n_pos, vocab_size=d_vocab, initializer_range=0.06
    )
    return GPT2LMHeadModel(config).eval()


def native(hf: GPT2LMHeadModel) -> Transformer:
    """The same weights as our model."""
    model = load_model(hf)
    if not isinstance(model, Transformer):
        raise RuntimeError("a GPT-2 is ours natively")
    return model


def random_tokens(n_pos: int, d_vocab: int) -> Tensor:
    """One sequence."""
    return torch.randint(d_vocab, (1, n_pos), generator=torch.Generator().manual_seed(0))


# --- memory -----------------------------------------------------------------------------------


def print_memory(threads: int) -> None:
    """Table 4."""
    print("\npeak memory of the five scores of one layer, in MB above its queries and keys")
    for n_pos in (*LENGTHS, 2 * max(LENGTHS), 4 * max(LENGTHS)):
        peaks = {}
        for way in ("ours", "dense") if n_pos <= max(LENGTHS) else ("ours",):
            command = [sys.executable, __file__, "--threads", str(threads)]
            command += ["--peak", way, str(n_pos)]
            answer = subprocess.run(command, capture_output=True, text=True, check=True)
            peaks[way] = int(answer.stdout)
        line = "  ".join(f"{way} {size / 1e6:.0f}" for way, size in peaks.items())
        print(
            f"{n_pos:>6} tokens  {line}  ({peaks['ours'] / n_pos / 1e3:.1f} KB a token)", flush=True
        )


def peak(way: Callable[[Tensor, Tensor], Scores], n_pos: int) -> int:
    """Bytes by which resident memory peaked over what there was with queries and keys."""
    way(*queries_and_keys(64))
    q, k = queries_and_keys(n_pos)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = resident("VmRSS")
    way(q, k)
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Bytes of resident memory: `VmRSS` now, `VmHWM` at its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


# --- SmolLM2 ----------------------------------------------------------------------------------


def print_smollm2() -> None:
    """Seconds of each analysis over all layers, of the plain pass, and the peak of memory."""
    model = as_hooked(load_model("smollm2-135m"))
    n_ctx, bos = model.cfg.n_ctx, 1
    batch = repeated_tokens(1, n_ctx // 2 - 1, model.cfg.d_vocab, seed=0, bos=bos)
    place = torch.arange(batch.tokens.shape[1])[None]
    batch = replace(batch, needle=(place >= 32) & (place < 64), question=place >= n_ctx - 32)
    analyses = [registry.get(name) for name in registry.names()]
    began = time.perf_counter()
    watch_attention(model, batch.tokens, lambda attention: {})
    print(
        f"\n{batch.tokens.shape[1]} tokens; a plain pass {time.perf_counter() - began:.1f} s",
        flush=True,
    )
    seconds = {analysis.name: 0.0 for analysis in analyses}

    def reduce(attention: LayerAttention, batch: TokenBatch = batch) -> dict[str, Tensor]:
        columns = {}
        for analysis in analyses:
            began = time.perf_counter()
            for name, value in analysis.measure(attention, batch, **analysis.arguments).items():
                columns[f"{analysis.name} {name}"] = value
            seconds[analysis.name] += time.perf_counter() - began
        return columns

    began = time.perf_counter()
    watch_attention(model, batch.tokens, reduce)
    print(f"the pass with {len(analyses)} analyses {time.perf_counter() - began:.1f} s, of which:")
    for name, spent in sorted(seconds.items(), key=itemgetter(1), reverse=True):
        print(f"  {name:<20} {spent:6.1f} s")
    print("what several share is counted where it is first asked for")
    print(f"peak of resident memory {resident('VmHWM') / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
