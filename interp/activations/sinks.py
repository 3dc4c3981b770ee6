"""Massive activations and attention sinks: what the tokens that have the first draw of the second.

One invariant: a layer's numbers are of the residual stream that its block reads, so that "from the
main layer on" means the same for activations, keys, values and attention.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from scipy import stats
from torch import Tensor

from interp.activation_tables import OutlierSinks
from interp.activations.mass import STRONG, counted_tokens, least_keys, masses
from interp.activations.massive import MAGNITUDE, RATIO, MassiveCells, find_massive, parts
from interp.activations.sites import residual_sites
from interp.data.repeated import TokenBatch
from interp.errors import AnalysisError
from interp.evidence import head_table, sequence_statistics
from interp.inputs import Inputs
from interp.measure import sequence_documents, token_text, without_pruned
from interp.models.watch import HookedModel, as_hooked
from interp.tables import head_labels
from interp.text_inputs import inputs_from

RECORDS = 20
"""Tokens that the summary lists, the most frequent first."""

NORMS = ("key_norm", "value_norm")


def outlier_sinks(
    model: object,
    tokens: object = None,
    *,
    attention_mask: Tensor | None = None,
    seed: int = 0,
    blocks: Sequence[int] | None = None,
    batch: int | None = None,
    prepend_bos: bool | None = None,
    corpus: str | None = None,
    length: int | None = None,
    sequences: int | None = None,
    exclude_bos: bool = False,
    magnitude: int | float = MAGNITUDE,
    ratio: int | float = RATIO,
) -> OutlierSinks:
    """The attention that the tokens with massive activations draw from every head.

    Tokens are found as `outliers` finds them: those with a massive activation in any layer of the
    residual stream. The table has a row a head:

    - `outlier_sinks`: the mass on the found tokens, 0..1, a mean over the real queries that see
      one, are none themselves, and have at least 8 keys, as in the analysis `sinks`; with its
      standard error over sequences, clustered by document, and as `outlier_sinks_null` the mass of
      a head that spreads its attention evenly. `n` is the number of sequences that have such a
      query;
    - `first_token`: the mass on the first token over the same queries. Where that token is the only
      one found, it is the same number;
    - `after`: whether the layer is the main one or a later one: `main_layer` is the first in which
      at least half as many tokens have a massive activation as in the layer with the most. A single
      token that is large early does not move it, as `first_layer` is moved;
    - `key_norm`, `value_norm`: the mean length of the head's keys and values at found tokens, and
      with `_others` at the other real tokens of the same sequences; `_ratio` is the one over the
      other, below 1 where found tokens are short. Query heads that share a key-value head share
      these. Keys are those that are attended to, of `hook_rot_k`, after their norm where they have
      one; without rotary positions of `hook_k`, before it. NaN where a model shows neither.

    `layers` has a row a layer: `magnitude`, the mean over found tokens of the largest |x| of the
    stream before the block, and `magnitude_others`; means over heads of the mass, of its null and
    of the norm ratios; `heads_above`, the heads whose mass lies above that of an even head by more
    than 0.3. `summary` has the same before the main layer and from it on, and Spearman's rank
    correlation over the heads of these later layers, between the mass and each norm's ratio, and
    the mass and that on the first token; NaN where one of them is constant or there are fewer
    than 3.

    Attention is not influence: mass on a token whose values are short moves little. That both grow
    in one layer is no proof that one makes the other: `outlier_effects` changes one of them.

    Raises: AnalysisError where nothing is massive, naming the largest activation, for thresholds
    below 0, a model whose heads are all pruned, or as `outliers`; ModelError for a model without
    hooks on the residual stream.

    Source: massive activations: Sun et al. 2024 (arXiv 2402.17762), whose sections 2 and 4 tie them
    to attention. Short keys and values of sink tokens: Gu et al. 2024 (arXiv 2410.10781).
    """
    hooked = as_hooked(model)
    inputs = inputs_from(
        hooked,
        tokens,
        attention_mask=attention_mask,
        blocks=blocks,
        batch=batch,
        corpus=corpus,
        length=length,
        sequences=sequences,
        prepend_bos=prepend_bos,
        exclude_bos=exclude_bos,
        seed=seed,
    )
    return outlier_sinks_in(hooked, inputs, seed=seed, magnitude=magnitude, ratio=ratio)


def outlier_sinks_in(
    model: HookedModel,
    inputs: Inputs,
    *,
    seed: int = 0,
    magnitude: int | float = MAGNITUDE,
    ratio: int | float = RATIO,
) -> OutlierSinks:
    """`outlier_sinks` on inputs that are already made. Raises: as `outlier_sinks`."""
    check_linkable(model, magnitude, ratio)
    found = find_massive(model, inputs.batches, float(magnitude), float(ratio))
    documents = sequence_documents(inputs.batches)
    columns = _measured(model, inputs.batches, found)
    cells = pd.concat(cell_rows(inputs.batches, found), ignore_index=True)
    main = _main_layer(cells)
    score = "outlier_sinks"
    table = head_table(columns["on_found"], columns["uniform"], score, documents)
    if table[score].isna().all():
        raise AnalysisError(
            f"no query of {inputs.description} sees a massive token, is none itself and has "
            f"{least_keys()} keys: the sequences are too short"
        )
    for name in ("first_token", *NORMS, *(f"{name}_others" for name in NORMS)):
        table[name] = sequence_statistics(columns[name], documents)[0].ravel()
    table.insert(table.columns.get_loc("first_token") + 1, "after", table["layer"] >= main)
    for name in NORMS:
        place = table.columns.get_loc(f"{name}_others")
        assert isinstance(place, int)  # names are unique
        table[f"{name}_ratio"] = table[name] / table[f"{name}_others"]
    order = [f"{name}{end}" for name in NORMS for end in ("", "_others", "_ratio")]
    table = table[[*(name for name in table if name not in order), *order]]
    table = without_pruned(model, table)
    gone = head_labels(model.cfg.pruned_heads)
    return OutlierSinks(
        table=table,
        layers=_layers(model, table, columns),
        score=score,
        unit="attention probability",
        analysis="outlier-sinks",
        model=model.cfg.model_name,
        params={
            **inputs.params,
            "magnitude": float(magnitude),
            "ratio": float(ratio),
            "min_keys": least_keys(),
            "strong": STRONG,
            "null": "uniform",
            "keys": _key_words(model),
            **({"pruned_heads": gone} if gone else {}),
        },
        inputs=inputs.description,
        seed=seed,
        summary=_summary(table, cells, main, token_text(model)),
    )


def check_linkable(model: HookedModel, magnitude: int | float, ratio: int | float) -> None:
    """Refuse what can be told before a pass.

    Raises: AnalysisError for a threshold below 0 or not a number, or a model without heads.
    """
    for name, value in (("magnitude", magnitude), ("ratio", ratio)):
        if not value >= 0:
            raise AnalysisError(f"{name} = {value:g}: a threshold is 0 or above")
    if not any(model.cfg.heads(layer) for layer in range(model.cfg.n_layers)):
        raise AnalysisError(f"{model.cfg.model_name} has no head left: all of them are pruned")


def cell_rows(batches: Sequence[TokenBatch], found: Sequence[MassiveCells]) -> list[pd.DataFrame]:
    """For each batch its massive activations as rows, in their order.

    `sequence` counts through all batches, `position` among the real tokens of the sequence, `token`
    is an id.
    """
    rows, first = [], 0
    for batch, cells in zip(batches, found, strict=True):
        places = batch.real.long().cumsum(dim=1) - 1
        at = (cells.row, cells.column)
        rows.append(
            pd.DataFrame(
                {
                    "layer": cells.layer.numpy(),
                    "sequence": cells.row.numpy() + first,
                    "position": places[at].cpu().numpy(),
                    "token": batch.tokens[at].cpu().numpy(),
                    "dimension": cells.dimension.numpy(),
                    "value": cells.value.numpy(),
                }
            )
        )
        first += len(batch.tokens)
    return rows


def token_records(cells: pd.DataFrame, text: Callable[[int], str]) -> list[dict[str, object]]:
    """The tokens that massive activations are in: how many of each, where, and how large."""
    records = []
    for token, own in cells.groupby("token", sort=False):
        places = own[["sequence", "position"]].drop_duplicates()
        only = places["position"].unique()
        records.append(
            {
                "token": text(int(str(token))),
                **({"position": int(only[0])} if len(only) == 1 else {}),
                "tokens": len(places),
                "sequences": int(places["sequence"].nunique()),
                "first_layer": int(own["layer"].min()),
                "last_layer": int(own["layer"].max()),
                "largest": float(own["value"].loc[own["value"].abs().idxmax()]),
            }
        )
    ordered = sorted(records, key=lambda record: -int(str(record["tokens"])))
    return ordered[:RECORDS]


def number_of_tokens(cells: pd.DataFrame) -> int:
    """How many tokens massive activations are in."""
    return len(cells[["sequence", "position"]].drop_duplicates())


def _main_layer(cells: pd.DataFrame) -> int:
    """The first layer with half as many tokens that have a massive activation as any layer."""
    places = cells[["layer", "sequence", "position"]].drop_duplicates()
    number = places.groupby("layer").size()
    return int(number.index[2 * number >= number.max()][0])


def _measured(
    model: HookedModel, batches: Sequence[TokenBatch], found: Sequence[MassiveCells]
) -> dict[str, Float[np.ndarray, "layer sequence n_heads"]]:
    """The masses and norms of each layer, sequence and head; `magnitude` has one column a layer."""
    device = torch.device(str(model.cfg.device))
    chunks: list[dict[str, np.ndarray]] = []
    for batch, cells in zip(batches, found, strict=True):
        tokens = cells.tokens(batch.tokens.shape)
        for first, part in parts(model, batch):
            there = part.each(lambda tensor: tensor.to(device))
            here = tokens[first : first + len(part.tokens)].to(device)
            own: dict[tuple[str, int], Tensor] = {}
            hooks = [*_norm_hooks(model, there, here, own), *_size_hooks(model, there, here, own)]
            known, _ = masses(model, there, here, fwd_hooks=hooks)
            chunks.append({**known, **_by_head(model, own, len(part.tokens))})
    return {
        name: np.concatenate([chunk[name] for chunk in chunks], axis=1)
        for name in next(iter(chunks))
    }


def _norm_hooks(
    model: HookedModel,
    batch: TokenBatch,
    found: Bool[Tensor, "batch pos"],
    into: dict[tuple[str, int], Tensor],
) -> list[tuple[str, Callable]]:
    """Hooks that put each layer's mean key and value lengths `[batch, n_key_value_heads]` away."""

    def see(value: Tensor, hook: object = None, *, name: str, layer: int) -> None:
        if value.ndim == 4:
            lengths = value.to(torch.promote_types(value.dtype, torch.float32)).norm(dim=-1)
            _put(into, name, layer, lengths, batch, found)

    hooks: list[tuple[str, Callable]] = []
    for layer in range(model.cfg.n_layers):
        for name, kinds in (("key_norm", ("rot_k", "k")), ("value_norm", ("v",))):
            known = (hook for kind in kinds if (hook := _hook(layer, kind)) in model.hook_dict)
            if model.cfg.heads(layer) and (there := next(known, None)) is not None:
                hooks.append((there, partial(see, name=name, layer=layer)))
    return hooks


def _size_hooks(
    model: HookedModel,
    batch: TokenBatch,
    found: Bool[Tensor, "batch pos"],
    into: dict[tuple[str, int], Tensor],
) -> list[tuple[str, Callable]]:
    """Hooks that put the mean largest |x| of the stream before each block away."""

    def see(value: Tensor, hook: object = None, *, layer: int) -> None:
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        _put(into, "magnitude", layer, wide.abs().amax(dim=-1, keepdim=True), batch, found)

    before = residual_sites(model)[: model.cfg.n_layers]
    return [(site.hook, partial(see, layer=site.layer)) for site in before]


def _put(
    into: dict[tuple[str, int], Tensor],
    name: str,
    layer: int,
    values: Float[Tensor, "batch pos column"],
    batch: TokenBatch,
    found: Bool[Tensor, "batch pos"],
) -> None:
    """Means of each sequence that has a found token: over these, and over its other tokens."""
    others = counted_tokens(batch) & ~found & found.any(dim=1, keepdim=True)
    for named, where in ((name, found), (f"{name}_others", others)):
        number = where.sum(dim=1)[:, None].to(values.dtype)
        total = values.where(where[:, :, None], 0.0).sum(dim=1)
        into[named, layer] = (total / number.where(number > 0, float("nan"))).double().cpu()


def _by_head(
    model: HookedModel, known: dict[tuple[str, int], Tensor], n_rows: int
) -> dict[str, np.ndarray]:
    """The means with a place for every query head, which has those of its key-value head."""
    cfg = model.cfg
    group = cfg.n_heads // cfg.n_key_value_heads
    whole = {}
    for name in (*NORMS, *(f"{name}_others" for name in NORMS)):
        whole[name] = np.full((cfg.n_layers, n_rows, cfg.n_heads), np.nan)
        for layer in range(cfg.n_layers):
            if (name, layer) in known:
                there = cfg.key_value_heads(layer)
                for head in cfg.heads(layer):
                    own = known[name, layer][:, there.index(head // group)]
                    whole[name][layer][:, head] = own.numpy()
    for name in ("magnitude", "magnitude_others"):
        whole[name] = np.stack([known[name, layer].numpy() for layer in range(cfg.n_layers)])
    return whole


def _hook(layer: int, kind: str) -> str:
    return f"blocks.{layer}.attn.hook_{kind}"


def _key_words(model: HookedModel) -> str:
    rotary = any(_hook(layer, "rot_k") in model.hook_dict for layer in range(model.cfg.n_layers))
    return "hook_rot_k: after their norm and rotary positions" if rotary else "hook_k"


def _layers(
    model: HookedModel, table: pd.DataFrame, columns: dict[str, np.ndarray]
) -> pd.DataFrame:
    numbers = range(model.cfg.n_layers)
    sizes = {
        name: sequence_statistics(columns[name])[0].ravel()
        for name in ("magnitude", "magnitude_others")
    }
    heads = table.assign(heads_above=_above(table)).groupby("layer")
    names = {"outlier_sinks": "mass", "outlier_sinks_null": "mass_null"}
    means = heads[[*names, *(f"{name}_ratio" for name in NORMS)]].mean()
    means = means.rename(columns=names).reindex(numbers)
    count = heads["heads_above"].sum().reindex(numbers, fill_value=0).astype(int)
    frame = pd.DataFrame({"layer": list(numbers), **sizes})
    return frame.join(means, on="layer").join(count, on="layer")


def _above(table: pd.DataFrame) -> pd.Series:
    return table["outlier_sinks"] - table["outlier_sinks_null"] > STRONG


def _summary(
    table: pd.DataFrame, cells: pd.DataFrame, main: int, text: Callable[[int], str]
) -> dict[str, object]:
    after, above = table["after"], _above(table)
    later = table[after]
    mass = "outlier_sinks"
    return {
        "found": number_of_tokens(cells),
        "sequences": int(cells["sequence"].nunique()),
        "main_layer": main,
        "first_layer": int(cells["layer"].min()),
        "last_layer": int(cells["layer"].max()),
        "mass_before": float(table[mass][~after].mean()),
        "mass_after": float(later[mass].mean()),
        "heads_before": int((~after).sum()),
        "heads_after": int(after.sum()),
        "heads_above_before": int(above[~after].sum()),
        "heads_above_after": int(above[after].sum()),
        **{
            f"correlation_{name}": _correlation(later[mass], later[other])
            for name, other in (
                ("key_norm", "key_norm_ratio"),
                ("value_norm", "value_norm_ratio"),
                ("first_token", "first_token"),
            )
        },
        "tokens": token_records(cells, text),
    }


def _correlation(one: pd.Series, other: pd.Series) -> float:
    """Spearman's, over the heads that have both; NaN where one of them is constant."""
    known = one.notna() & other.notna()
    if known.sum() < 3 or one[known].nunique() < 2 or other[known].nunique() < 2:
        return float("nan")
    return float(stats.spearmanr(one[known], other[known]).statistic)
