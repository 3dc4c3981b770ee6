"""What a sweep would take: passes, operations, time and memory, before it is run.

A few ablations are timed, and the rest follows from the operations counted for each. Nothing is
written.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from interp.ablation.flops import ChunkFlops, chunk_flops
from interp.ablation.interventions import Head, Intervention, Site, Zero, site_heads
from interp.ablation.measuring import Heads, Setting, check_read
from interp.ablation.methods import COMPARED, check_method_for
from interp.ablation.metrics import PLACES, SLICE_NUMBERS, AnyMetric, LogitsFunction
from interp.ablation.passes import Chunk, chunks, compute_dtype, passes
from interp.ablation.sweep import TOGETHER, Options, evenly
from interp.errors import AnalysisError
from interp.inputs import Inputs
from interp.models.bridge import BridgedModel
from interp.models.place_logits import VOCABULARY_TILE
from interp.models.watch import HookedModel, looking_at
from interp.tables import strict_json

SIDE = 1024
"""Side of the square product by which this machine's speed is measured."""

Found = TypeVar("Found")


@dataclass(frozen=True)
class Round:
    """Sets of heads that a sweep measures together."""

    sets: Sequence[Heads]
    direct: bool = False
    first_method_alone: bool = False

    @property
    def begun(self) -> Counter[tuple[int, int]]:
        """How many of the sets begin in which layer, with how many heads of it."""
        firsts = [(min(layer for layer, _ in heads), heads) for heads in self.sets]
        return Counter((first, sum(own == first for own, _ in heads)) for first, heads in firsts)


@dataclass(frozen=True)
class Plan:
    """What a sweep would take.

    `passes` are ablated passes over one part of the sequences. `floor_seconds` is `flops` at the
    speed of a large matrix product, which a real pass does not reach. `seconds` comes from a timed
    sample. `memory` has estimated bytes by part; what Python and its libraries take comes on top.
    """

    kind: str
    site: str
    sets: int
    methods: dict[str, int]
    sequences: int
    tokens: int
    parts: int
    passes: int
    flops: int
    flops_per_second: float
    floor_seconds: float
    seconds: float
    memory: dict[str, int]

    def to_json(self) -> str:
        """Everything as strict JSON."""
        return strict_json(asdict(self))

    def lines(self) -> list[str]:
        """The plan in words."""
        noun = "head" if self.site == "z" else "KV head"
        unit, told = {
            "heads": (noun, ", one at a time"),
            "pairs": ("set", f": every pair of {noun}s, and each by itself"),
            "all-but-one": ("set", f": all {noun}s of a layer but one"),
            "layers": ("layer", ""),
            "cumulative": ("set", f", each with one more {noun}"),
        }[self.kind]
        methods = ", ".join(
            name if draws == 1 else f"{name} in {draws} draws"
            for name, draws in self.methods.items()
        )
        parts = ", ".join(f"{name} {_mib(size)}" for name, size in self.memory.items())
        return [
            f"{_number(self.sets, unit)}{told}; method: {methods}",
            f"{_number(self.sequences, 'sequence')}, {_number(self.tokens, 'token')} in all, in "
            f"{_number(self.parts, 'part')}: {_number(self.passes, 'ablated pass', 'es')}",
            f"operations: {_scaled(self.flops)}FLOP, products only",
            f"floor: {_duration(self.floor_seconds)} at {_scaled(self.flops_per_second)}FLOP/s, "
            "the speed of a large product here",
            f"estimated time: {_duration(self.seconds)}, from a timed sample",
            f"estimated peak memory: {_mib(sum(self.memory.values()))} MiB beside Python and its "
            f"libraries ({parts})",
        ]


def plan_sweep(
    model: HookedModel,
    inputs: Inputs,
    options: Options,
    kind: str = "heads",
    heads: Sequence[Head] | None = None,
) -> Plan:
    """What a sweep of these heads, or of all of them, would take.

    Timed are the unablated pass over the longest part of the sequences, and ablations that begin
    in the first, the middle and the last layer of the sweep.

    Raises: AnalysisError as the sweep would, where that can be told.
    """
    options.check_for(model)
    check_read(options.metric, inputs)
    check_method_for(inputs, options.method, reference=options.reference, pooled=options.pooled)
    rounds = sweep_rounds(model, options, kind, heads)
    parts = list(chunks(model, inputs.batches))
    costs = [chunk_flops(model, part, options.metric) for part in parts]
    longest = int(np.argmax([cost.n_tokens for cost in costs]))
    methods = _methods(options)
    sample = _Sample(model, parts[longest], costs[longest], options, rounds[0])
    flops, seconds, n_passes = 0, 0.0, 0
    for one in rounds:
        own = dict([next(iter(methods.items()))]) if one.first_method_alone else methods
        n_passes += len(parts) * len(one.sets) * sum(own.values())
        for cost in costs:
            for name, draws in own.items():
                counted, timed = sample.of_draw(cost, name, one)
                flops, seconds = flops + draws * counted, seconds + draws * timed
    if options.reference is not None and "mean" in methods:
        for part in chunks(model, options.reference.batches):
            watched = chunk_flops(model, part, options.metric).watched
            flops, seconds = flops + watched, seconds + watched * sample.unablated
    speed = _speed(model, options)
    return Plan(
        kind=kind,
        site=options.site,
        sets=len(rounds[0].sets),
        methods=methods,
        sequences=sum(len(batch.tokens) for batch in inputs.batches),
        tokens=sum(int(batch.real.sum()) for batch in inputs.batches),
        parts=len(parts),
        passes=n_passes,
        flops=flops,
        flops_per_second=speed,
        floor_seconds=flops / speed,
        seconds=seconds,
        memory=_memory(model, parts[longest], costs[longest], options, methods),
    )


def sweep_rounds(
    model: HookedModel, options: Options, kind: str, heads: Sequence[Head] | None
) -> list[Round]:
    """The sets of heads that a sweep measures, round by round.

    Which of a whole sweep's heads are the strongest is not known before: the earliest stand in.

    Raises: AnalysisError where there is no set.
    """
    every = [
        (layer, head)
        for layer in range(model.cfg.n_layers)
        for head in site_heads(model, layer, options.site)
    ]
    chosen = list(heads) if heads is not None else every
    singles: list[Heads] = [(head,) for head in chosen]
    layers = [[own for own in every if own[0] == layer] for layer in range(model.cfg.n_layers)]
    if kind == "heads":
        together = tuple(chosen if heads is not None else chosen[:TOGETHER])
        joint = [Round([together])] if len(together) > 1 else []
        return [Round(singles, options.direct), *_strays(options, singles), *joint]
    sets: list[Heads] = []
    direct = False
    if kind == "pairs":
        sets = list(combinations(chosen, 2))
    elif kind == "all-but-one":
        sets = [tuple(own for own in layers[head[0]] if own != head) for head in chosen]
    elif kind == "layers":
        sets, direct = [tuple(own) for own in layers], options.direct
    else:
        sets = [tuple(chosen[: n + 1]) for n in range(len(chosen))]
    sets = list(dict.fromkeys(own for own in sets if own))
    if not sets:
        raise AnalysisError("there is nothing to take away")
    alone = singles if kind == "pairs" else []
    return [Round([*alone, *sets], direct), *_strays(options, sets)]


def _strays(options: Options, sets: Sequence[Heads]) -> list[Round]:
    """What holds bfloat16 against float32."""
    return [Round(evenly(sets), first_method_alone=True)] if options.bfloat16 else []


def sweep_flops(
    model: HookedModel, inputs: Inputs, metric: AnyMetric, sets: Sequence[Heads]
) -> int:
    """Operations of zeroing each of some sets of heads, the unablated passes with them."""
    one = Round(sets)
    costs = [chunk_flops(model, part, metric) for part in chunks(model, inputs.batches)]
    return sum(
        _before_flops(cost, "zero", one) + sum(_ablation_flops(cost, one, "z").values())
        for cost in costs
    )


def _before_flops(cost: ChunkFlops, method: str, one: Round) -> int:
    """Operations of the unablated pass, of another run, and of coming to the ablated layers."""
    start = cost.start(frozen=method == "pattern-preserving", direct=one.direct)
    other = cost.watched if method in ("resample", "patch") else 0
    return start + other + cost.entering(max(first for first, _ in one.begun))


def _ablation_flops(cost: ChunkFlops, one: Round, site: Site) -> Counter[int]:
    """Operations of a round's ablations, by the layer in which they begin."""
    counted: Counter[int] = Counter()
    for (first, own), times in one.begun.items():
        counted[first] += times * cost.ablation(first, own, site, direct=one.direct)
    return counted


class _Sample:
    """Seconds for each operation, of a few passes that were run."""

    def __init__(
        self, model: HookedModel, part: Chunk, cost: ChunkFlops, options: Options, one: Round
    ):
        self._site = options.site
        by_first: dict[int, list[Heads]] = {}
        for heads in one.sets:
            by_first.setdefault(min(layer for layer, _ in heads), []).append(heads)
        firsts = sorted(by_first)
        self._layers = sorted({firsts[0], firsts[len(firsts) // 2], firsts[-1]})
        rates: list[float] = []
        setting = Setting(options.metric, options.site, bfloat16=options.bfloat16)
        frozen, direct = options.method == "pattern-preserving", one.direct
        with looking_at(model), setting.precision(model):
            passes(model, part, options.metric, frozen=frozen, direct=direct)  # warms up
            run, seconds = _timed(
                lambda: passes(model, part, options.metric, frozen=frozen, direct=direct)
            )
            self.unablated = seconds / cost.start(frozen=frozen, direct=direct)
            for layer in self._layers:
                together = [
                    Intervention(heads, Zero(), options.site)
                    for heads in by_first[layer][: run.at_once]
                ]
                run.ablated(together[:1], direct=direct)  # the pass up to the layer is kept
                _, seconds = _timed(partial(run.ablated, together, direct=direct))
                work = Round([own.heads for own in together], direct)
                rates.append(seconds / sum(_ablation_flops(cost, work, options.site).values()))
        self._rates = rates

    def of_draw(self, cost: ChunkFlops, method: str, one: Round) -> tuple[int, float]:
        """Operations and seconds of one method's round over a part, for each of its draws."""
        before = _before_flops(cost, method, one)
        counted = _ablation_flops(cost, one, self._site)
        seconds = sum(flops * self._rate(first) for first, flops in counted.items())
        return before + sum(counted.values()), before * self.unablated + seconds

    def _rate(self, layer: int) -> float:
        return float(np.interp(layer, self._layers, self._rates))


def _timed(call: Callable[[], Found]) -> tuple[Found, float]:
    start = time.perf_counter()
    found = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return found, time.perf_counter() - start


def _methods(options: Options) -> dict[str, int]:
    """The methods of a sweep, and in how many draws."""
    names = COMPARED if options.method == "all" else (options.method,)
    return {name: options.draws if name == "resample" else 1 for name in names}


def _speed(model: HookedModel, options: Options) -> float:
    """Operations in a second of a large product, the best of three."""
    with Setting(options.metric, bfloat16=options.bfloat16).precision(model):
        dtype = compute_dtype(model)
    square = torch.ones(SIDE, SIDE, device=str(model.cfg.device), dtype=dtype)
    return 2 * SIDE**3 / min(_timed(lambda: square @ square)[1] for _ in range(4))


def _memory(
    model: HookedModel, part: Chunk, cost: ChunkFlops, options: Options, methods: dict[str, int]
) -> dict[str, int]:
    """Estimated bytes, by what takes them.

    Activations: for each token of the ablations that run together four residual streams and the
    widest layer (queries, keys, values and z, or the MLP); for each of the unablated part the
    residual streams that are kept; where patterns or another run's values are kept, those of every
    layer. Logits: two tiles of the vocabulary, or three slices of whole rows.
    """
    cfg = model.cfg
    width = torch.promote_types(cfg.dtype, torch.float32).itemsize
    module = model.bridge if isinstance(model, BridgedModel) else model
    assert isinstance(module, nn.Module)
    weights = sum(own.numel() * own.itemsize for own in module.parameters())
    if options.bfloat16:
        weights += 2 * cfg.d_model * cfg.d_vocab
    together = cost.n_tokens * (part.copies if cost.restarts else 1)
    inner = 2 * (cfg.n_heads + cfg.n_key_value_heads) * cfg.d_head
    if not cfg.attn_only and cfg.d_mlp is not None:
        inner = max(inner, (3 if cfg.gated_mlp else 2) * cfg.d_mlp)
    numbers = together * (4 * cfg.d_model + inner)
    numbers += cost.n_tokens * (6 * cfg.d_model + cfg.n_heads * cfg.d_head)
    kept = 0
    if options.method == "pattern-preserving":
        kept += cfg.n_heads + cfg.n_key_value_heads
    if methods.keys() & {"resample", "patch"}:
        kept += cfg.n_heads if options.site == "z" else cfg.n_key_value_heads
    numbers += cost.n_tokens * cfg.n_layers * kept * cfg.d_head
    if not cost.restarts:
        numbers += 3 * part.batch.tokens.shape[0] * cfg.n_heads * cost.n_pos**2
    if not cost.restarts or isinstance(options.metric, LogitsFunction):
        logits = 3 * cost.n_tokens * cfg.d_vocab
    elif options.metric.whole_rows:
        logits = 3 * max(1, min(PLACES, SLICE_NUMBERS // cfg.d_vocab)) * cfg.d_vocab
    else:
        logits = 2 * PLACES * min(VOCABULARY_TILE, cfg.d_vocab)
    return {"weights": weights, "activations": numbers * width, "logits": logits * width}


def _number(count: int, noun: str, ending: str = "s") -> str:
    return f"{count:,} {noun}{'' if count == 1 else ending}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f}"


def _scaled(number: float | int) -> str:
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number >= factor:
            return f"{number / factor:.3g} {prefix}"
    return f"{number:.3g} "


def _duration(seconds: float | int) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
