"""Sinks: where does a head park its attention, and does it read anything there?

Where attention goes and what it brings are told side by side: a sink's value is often near zero.
"""

from typing import Annotated

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from interp.data.repeated import TokenBatch
from interp.errors import AnalysisError
from interp.models.layer_attention import LayerAttention
from interp.models.masks import AttentionMask
from interp.registry import Found, analysis

KEPT = 3
"""Keys that are kept of each sequence and head: those that get most."""

SHORT = 0.5
"""An output is short below this share of the median head's; a convention of ours."""

LISTED = 10
"""Sink tokens in the summary."""

PUBLISHED_LENGTH = 64
"""Tokens of a sequence in Gu et al.: their metric falls as sequences get longer."""


def _whole_model(
    found: Found,
) -> tuple[dict[str, np.ndarray | list[list[object]]], dict[str, object]]:
    """Where each head's strongest key is, and how many heads of the model are sinks."""
    columns, epsilon = found.columns, float(str(found.params["epsilon"]))
    anywhere, places = columns["anywhere"], columns["anywhere_position"]
    ids = columns["anywhere_token"]

    n_layers, _, n_heads = anywhere.shape[:3]
    position = np.full((n_layers, n_heads), -1)
    token: list[list[object]] = [[""] * n_heads for _ in range(n_layers)]
    for layer, head in np.ndindex(n_layers, n_heads):
        own, own_ids = places[layer, :, head, 0], ids[layer, :, head, 0]
        if (own >= 0).any():
            position[layer, head] = _most_frequent(own[own >= 0])
            there = own_ids[own == position[layer, head]]
            token[layer][head] = _shown(found, _most_frequent(there))

    figures: dict[str, object] = {
        "gu_metric_percent": 100 * float(_mean(columns["gu_sink"], (0, 1, 2)))
    }
    lengths = columns["length"]
    lengths = lengths[lengths >= 0]  # a pruned head has -1
    shortest, longest = int(lengths.min()), int(lengths.max())
    if (shortest, longest) != (PUBLISHED_LENGTH, PUBLISHED_LENGTH):
        span = str(shortest) if shortest == longest else f"{shortest} to {longest}"
        figures["gu_length"] = (
            f"sequences of {span} tokens; published values are for {PUBLISHED_LENGTH}"
        )
    figures["heads_raw"] = int((_mean(columns["sinks"], 1) > epsilon).sum())
    if not np.isnan(columns["weighted"]).all():
        figures["heads_weighted"] = int((_mean(columns["weighted"], 1) > epsilon).sum())
        figures["heads_dormant"] = int((_mean(columns["dormant"], 1) > 0.5).sum())
    figures["sink_tokens"] = _sink_tokens(found, epsilon)
    grids: dict[str, np.ndarray | list[list[object]]] = {
        "anywhere": _mean(anywhere[..., 0].astype(np.float64), 1),
        "position": position,
        "token": token,
    }
    return grids, figures


def _sink_tokens(found: Found, epsilon: float) -> list[dict[str, object]]:
    """The places and tokens that get more than epsilon, those of most heads and sequences first."""
    layer, sequence, head, rank = np.nonzero(found.columns["anywhere"] > epsilon)
    at = (layer, sequence, head, rank)
    pairs = np.stack((found.columns["anywhere_position"][at], found.columns["anywhere_token"][at]))
    kinds, kind, number = np.unique(pairs, axis=1, return_inverse=True, return_counts=True)
    kind = kind.ravel()
    return [
        {
            "position": int(kinds[0, i]),
            "token": _shown(found, int(kinds[1, i])),
            "heads": len(set(zip(layer[kind == i], head[kind == i], strict=True))),
            "sequences": len(np.unique(sequence[kind == i])),
        }
        for i in np.argsort(-number, kind="stable")[:LISTED]
    ]


def _most_frequent(values: Int[np.ndarray, " n"]) -> int:
    """The smallest of equals."""
    kinds, number = np.unique(values, return_counts=True)
    return int(kinds[number.argmax()])


def _mean(
    values: Float[np.ndarray, "*axes"], axis: int | tuple[int, ...]
) -> Float[np.ndarray, "*left"]:
    """The mean over what is defined; NaN where nothing is."""
    n = (~np.isnan(values)).sum(axis=axis)
    return np.asarray(np.nansum(values, axis=axis) / np.where(n > 0, n, np.nan))


def _shown(found: Found, token: int) -> str:
    # A line break would break the table.
    return repr(found.token_text(token))[1:-1]


@analysis(
    "sinks",
    unit="attention probability",
    null="uniform",
    noun="sink head",
    effect=0.3,
    finish=_whole_model,
)
def sinks(
    attention: LayerAttention,
    batch: TokenBatch,
    *,
    min_keys: Annotated[int, "queries with fewer keys are left out"] = 8,
    epsilon: Annotated[float, "a head that puts more than this on one key has a sink"] = 0.3,
    ids: Annotated[str, "token ids whose mass is wanted too, such as 198,13"] = "",
) -> dict[str, Shaped[Tensor, "batch n_heads *own"]]:
    """Attention that goes to the first token.

    The mean mass on the first real token over the queries that see it and have at least `min_keys`
    keys. 0..1: 1 is a pure sink; a head that spreads its attention evenly scores the mean of
    1 / (i + 1) over those queries, given as the null. NaN for a sequence without such a query.

    It says where attention goes, not what it brings. Beside it, over the same queries:

    - `weighted`: the share of the first token in the lengths of all that is read,
      `p[q,f] ‖v_f W_O‖ / sum_j p[q,j] ‖v_j W_O‖`. 0..1; far below the raw mass where the sink's
      value is small. Lengths add up though vectors may cancel.
    - `dormant`: the share of queries that put more than `epsilon` on the first token and write less
      than half of what the median head of the layer writes at that query. 0..1. It compares heads:
      where a whole layer is silent, or has one head, none is dormant.
    - `on_ids`: the mass on all keys that hold one of `ids`, over the queries that see one, and
      `on_ids_uniform`, that of a head that spreads its attention evenly; only where `ids` are
      given.

    `output_norm` is the mean length of what the head writes, ‖z W_O‖, over real tokens, in units of
    the residual stream. These are NaN where only attention weights are known.

    `gu_alpha` is Gu's α₁: the mean mass on the first token over all queries, the first included,
    which puts 1 there in every causal head. `gu_sink` is 1 for a sequence where it exceeds
    `epsilon`, else 0, and `gu_metric_percent` its mean over sequences, layers and heads, in
    percent. It is comparable for sequences of 64 tokens only.

    A sink can sit anywhere. `anywhere` is the largest mean mass that any one key gets from the
    queries that see it, averaged over sequences: 0..1, `position` is where that key is most often,
    counted in real tokens from 0 (-1 if nowhere), and `token` what stands there most often. Only
    keys that `min_keys` of these queries see are compared: the last keys would win by chance.
    As the largest of many it lies above the null of `sinks`, and a key that differs from sequence
    to sequence is something the head looks for rather than a sink.
    `sink_tokens` lists what gets more than `epsilon` most often: of each sequence and head the
    three strongest keys are looked at.

    Raises: AnalysisError for `min_keys` below 1, `epsilon` outside 0..1, or `ids` that are not ids.

    Source: the attention sink of Xiao et al. 2023 ("Efficient Streaming Language Models"), without
    the short rows that make every head look like one. α and metric: Gu et al. 2024 ("When Attention
    Sink Emerges", section 3). Weighted mass: Kobayashi et al. 2020 ("Attention is Not Only a
    Weight"). `dormant` is a rule of ours.
    """
    if min_keys < 1:
        raise AnalysisError(f"min_keys = {min_keys} should be at least 1")
    if not 0 <= epsilon < 1:
        raise AnalysisError(f"epsilon = {epsilon} should be at least 0 and below 1")
    real = attention.key_mask
    enough = attention.n_keys >= min_keys
    index = torch.arange(real.shape[1], device=real.device)
    counted = enough & (_n_visible(attention, index == attention.first) > 0)
    mass = attention.prob_at(torch.where(real, attention.first, -1))

    columns: dict[str, Tensor] = {"sinks": attention.mean(mass, counted)}
    columns |= _read_and_written(attention, mass, counted, epsilon)
    alpha = attention.mean(mass, real)
    columns["gu_alpha"] = alpha
    columns["gu_sink"] = _whether(alpha > epsilon, alpha)
    wanted = _token_ids(ids)
    if wanted:
        held = real & torch.isin(batch.tokens, torch.tensor(wanted, device=real.device))
        n_held = _n_visible(attention, held)
        seeing = enough & (n_held > 0)
        on_ids = attention.expected(held[:, :, None].to(mass.dtype))[..., 0]
        columns["on_ids"] = attention.mean(on_ids, seeing)
        share = (n_held / attention.n_keys.clamp(min=1))[:, None].expand_as(on_ids)
        columns["on_ids_uniform"] = attention.mean(share, seeing)
    columns |= _strongest_keys(attention, batch.tokens, enough, min_keys)
    columns["length"] = real.sum(dim=1)[:, None, None].expand(-1, attention.n_heads, 1)
    return columns


def _read_and_written(
    attention: LayerAttention,
    mass: Float[Tensor, "batch n_heads query"],
    counted: Bool[Tensor, "batch query"],
    epsilon: float,
) -> dict[str, Float[Tensor, "batch n_heads"]]:
    """`weighted`, `dormant` and `output_norm`."""
    if not attention.has_values:
        unknown = torch.full_like(mass[..., 0], float("nan"))
        return {"weighted": unknown, "dormant": unknown, "output_norm": unknown}
    norms = attention.value_norms()
    first = attention.first[:, :, None].expand(-1, -1, norms.shape[2])
    from_first = mass * norms.gather(1, first).transpose(1, 2)
    from_all = attention.expected(norms[..., None])[..., 0]
    # Where nothing at all is read, the first token's share of it is none.
    weighted = (from_first / from_all.where(from_all != 0, 1.0)).clamp(max=1.0)

    written = attention.output_norms().transpose(1, 2)  # batch n_heads pos
    ordered, n_heads = written.sort(dim=1).values, written.shape[1]
    median = (ordered[:, (n_heads - 1) // 2] + ordered[:, n_heads // 2]) / 2
    dormant = _whether((mass > epsilon) & (written < SHORT * median[:, None]), mass + written)
    return {
        "weighted": attention.mean(weighted, counted),
        "dormant": attention.mean(dormant, counted),
        "output_norm": attention.mean(written, attention.key_mask),
    }


def _whether(true: Bool[Tensor, "*axes"], of: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """1 where true and 0 where not; NaN where what it was asked of is NaN."""
    return true.to(of.dtype).masked_fill(of.isnan(), float("nan"))


def _strongest_keys(
    attention: LayerAttention,
    tokens: Int[Tensor, "batch pos"],
    queries: Bool[Tensor, "batch query"],
    min_keys: int,
) -> dict[str, Shaped[Tensor, "batch n_heads kept"]]:
    """The keys with the largest mean mass from the queries that see them: mass, place, token id.

    NaN, -1 and -1 where there are fewer.
    """
    received = attention.received(queries.float())
    seeing = _n_seeing(attention, queries)
    alpha = (received / seeing.clamp(min=1)[:, None]).clamp(max=1.0)
    alpha = alpha.masked_fill((seeing < min_keys)[:, None], -1.0)
    best, key = alpha.sort(dim=2, descending=True, stable=True)
    missing = max(0, KEPT - alpha.shape[2])
    best = torch.nn.functional.pad(best[..., :KEPT], (0, missing), value=-1.0)
    key = torch.nn.functional.pad(key[..., :KEPT], (0, missing))
    none = best < 0

    def at_keys(values: Int[Tensor, "batch pos"]) -> Int[Tensor, "batch n_heads kept"]:
        return values[:, None].expand(-1, key.shape[1], -1).gather(2, key).masked_fill(none, -1)

    return {
        "anywhere": best.masked_fill(none, float("nan")),
        "anywhere_position": at_keys(attention.places),
        "anywhere_token": at_keys(tokens),
    }


def _n_visible(
    attention: LayerAttention, keys: Bool[Tensor, "batch key"]
) -> Int[Tensor, "batch query"]:
    """How many of these keys each query may attend to."""
    n_pos = keys.shape[1]
    mask = AttentionMask(attention.causal, keys & attention.key_mask, attention.window)
    return mask.n_allowed(n_pos, n_pos, keys.device)


def _n_seeing(
    attention: LayerAttention, queries: Bool[Tensor, "batch query"]
) -> Int[Tensor, "batch key"]:
    """How many of these queries may attend to each key; 0 on padding."""
    n_pos = queries.shape[1]
    before = torch.nn.functional.pad(queries.long().cumsum(dim=1), (1, 0))
    place = torch.arange(n_pos, device=queries.device)
    window = n_pos if attention.window is None else attention.window
    last = (place + window).clamp(max=n_pos)
    first = place if attention.causal else torch.zeros_like(place)
    return (before[:, last] - before[:, first]).where(attention.key_mask, 0)


def _token_ids(ids: str) -> list[int]:
    words = ids.replace(",", " ").split()
    if not all(word.isdecimal() for word in words):
        raise AnalysisError(f"ids = {ids!r} should be token ids with commas between: 198,13")
    return [int(word) for word in words]
