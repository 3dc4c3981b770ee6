"""The tables of a sweep: one row for each head, pair, layer, or step of an order.

Every row has the paired difference to the unablated model on the same sequences, its standard error
and its false-discovery rate over the sweep.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
import pandas as pd

from interp.ablation.interventions import Head
from interp.ablation.measuring import Heads, Measured, label
from interp.ablation.paired import paired
from interp.ablation.ranks import disagreement
from interp.ablation.sweep import TOGETHER, Sweep
from interp.errors import AnalysisError
from interp.measure import sequence_documents
from interp.tables import HeadScores, SetScores, head_label


def ablate_heads(sweep: Sweep, heads: Sequence[Head] | None = None) -> HeadScores:
    """A table of what taking each head away does to the metric, one head at a time.

    `ablation` is the mean paired difference on the same sequences, ablated minus clean: of a loss,
    above 0 the head helps. `ablation_q` is its false-discovery rate over the sweep. Its null is 0
    by construction. `direct` is the part that the head's own contribution to the logits makes, all
    later layers writing what they wrote; `self_repair`, direct less total, is what later layers
    made up for. With the method `all` there is such a column for each of zero, mean and resample.

    The summary has the joint effect of the heads, or of the strongest where all were swept, beside
    the sum of their single effects.

    Raises: AnalysisError for a metric that is not finite without any ablation.
    """
    chosen = list(heads) if heads is not None else sweep.heads
    singles: list[Heads] = [(head,) for head in chosen]
    measured = sweep.measure(singles, direct=sweep.options.direct)
    columns = _single_columns(sweep, measured, singles, "ablation")
    table = pd.DataFrame(
        {"layer": [layer for layer, _ in chosen], "head": [head for _, head in chosen], **columns}
    )
    score = next(iter(measured)) if len(measured) > 1 else "ablation"
    summary = _overall(sweep, measured, singles) | _largest(table, score)
    summary |= _jointly(sweep, measured, chosen, table, score, whole=heads is None)
    return HeadScores(table=table, score=score, analysis="ablation", **_origin(sweep, summary))


def ablate_all_but_one(sweep: Sweep, heads: Sequence[Head] | None = None) -> HeadScores:
    """What keeping one head only of a layer does: the others are taken away together.

    The summary has each layer's best head, chosen on one half of the sequences and estimated on the
    other. Source: Michel et al. 2019, tables 2 and 3.
    """
    chosen = list(heads) if heads is not None else sweep.heads
    others = {
        head: tuple(own for own in sweep.heads if own[0] == head[0] and own != head)
        for head in chosen
    }
    chosen = [head for head in chosen if others[head]]
    if not chosen:
        raise AnalysisError("no layer has two heads: there is nothing to take away")
    sets = [others[head] for head in chosen]
    measured = sweep.measure(sets)
    columns = _single_columns(sweep, measured, sets, "all_but_one")
    table = pd.DataFrame(
        {"layer": [layer for layer, _ in chosen], "head": [head for _, head in chosen], **columns}
    )
    score = next(iter(measured)) if len(measured) > 1 else "all_but_one"
    summary = _overall(sweep, measured, sets) | _largest(table, score)
    first = next(iter(measured.values()))
    summary["kept_heads"] = _best_kept(sweep, chosen, np.stack([first.effect(own) for own in sets]))
    return HeadScores(table=table, score=score, analysis="all-but-one", **_origin(sweep, summary))


def ablate_pairs(sweep: Sweep, heads: Sequence[Head] | None = None) -> SetScores:
    """Every pair of heads: their joint effect, and what it is more than the sum of the two.

    `interaction` is joint less sum, paired over sequences: above 0 in a loss, each head does part
    of the other's work.
    """
    chosen = list(heads) if heads is not None else sweep.heads
    pairs: list[Heads] = list(combinations(chosen, 2))
    if not pairs:
        raise AnalysisError("pairs need two heads")
    measured = sweep.measure([*((head,) for head in chosen), *pairs])
    documents = sequence_documents(sweep.inputs.batches)
    columns: dict[str, object] = {
        "layer_a": [a[0] for a, _ in pairs],
        "head_a": [a[1] for a, _ in pairs],
        "layer_b": [b[0] for _, b in pairs],
        "head_b": [b[1] for _, b in pairs],
        **_single_columns(sweep, measured, pairs, "ablation"),
    }
    for name, own in measured.items():
        prefix = "" if len(measured) == 1 else f"{name}_"
        sums = np.stack([own.effect((a,)) + own.effect((b,)) for a, b in pairs])
        joint = np.stack([own.effect(pair) for pair in pairs])
        apart = paired(joint - sums, documents)
        columns |= {
            f"{prefix}sum_of_singles": paired(sums, documents).mean,
            f"{prefix}interaction": apart.mean,
            f"{prefix}interaction_se": apart.standard_error,
            f"{prefix}interaction_q": apart.q,
        }
    score = next(iter(measured)) if len(measured) > 1 else "ablation"
    table = pd.DataFrame(columns)
    summary = _overall(sweep, measured, pairs)
    return SetScores(table=table, score=score, analysis="pairs", **_origin(sweep, summary))


def ablate_layers(sweep: Sweep) -> SetScores:
    """Each layer's heads taken away together; its attention adds `b_O` then, and nothing else."""
    layers = [
        tuple(head for head in sweep.heads if head[0] == layer)
        for layer in range(sweep.model.cfg.n_layers)
    ]
    layers = [heads for heads in layers if heads]
    measured = sweep.measure(layers, direct=sweep.options.direct)
    columns = _single_columns(sweep, measured, layers, "ablation")
    table = pd.DataFrame({"layer": [heads[0][0] for heads in layers], **columns})
    score = next(iter(measured)) if len(measured) > 1 else "ablation"
    summary = _overall(sweep, measured, layers)
    return SetScores(table=table, score=score, analysis="layers", **_origin(sweep, summary))


def ablate_cumulatively(sweep: Sweep, order: Sequence[Head]) -> SetScores:
    """The first head of an order taken away, then the first two, and so on."""
    sets = [tuple(order[: n + 1]) for n in range(len(order))]
    measured = sweep.measure(sets)
    columns = _single_columns(sweep, measured, sets, "ablation")
    table = pd.DataFrame(
        {
            "removed": range(1, len(order) + 1),
            "layer": [layer for layer, _ in order],
            "head": [head for _, head in order],
            **columns,
        }
    )
    score = next(iter(measured)) if len(measured) > 1 else "ablation"
    summary = _overall(sweep, measured, sets)
    return SetScores(table=table, score=score, analysis="cumulative", **_origin(sweep, summary))


def _single_columns(
    sweep: Sweep, measured: dict[str, Measured], sets: Sequence[Heads], name: str
) -> dict[str, object]:
    """The columns of one row for each set; of each method where there are several."""
    documents = sequence_documents(sweep.inputs.batches)
    metric = sweep.options.metric.name.replace("-", "_")
    columns: dict[str, object] = {}
    for method, own in measured.items():
        score = name if len(measured) == 1 else method
        effects = np.stack([own.effect(heads) for heads in sets])
        total = paired(effects, documents)
        columns |= {
            score: total.mean,
            f"{score}_se": total.standard_error,
            f"{score}_null": 0.0,
            "n": total.n,
            f"{score}_p": total.p,
            f"{score}_q": total.q,
        }
        if own.direct:
            prefix = "" if len(measured) == 1 else f"{method}_"
            straight = np.stack([own.direct_effect(heads) for heads in sets])
            alone, repaired = paired(straight, documents), paired(straight - effects, documents)
            columns |= {
                f"{prefix}direct": alone.mean,
                f"{prefix}direct_se": alone.standard_error,
                f"{prefix}self_repair": repaired.mean,
                f"{prefix}self_repair_se": repaired.standard_error,
            }
    if len(measured) > 1:
        kinds = {
            method: np.stack([own.effect(h) for h in sets]) for method, own in measured.items()
        }
        columns |= disagreement(kinds, documents)
    clean = float(np.nanmean(next(iter(measured.values())).clean))
    columns[f"{metric}_clean"] = clean
    if len(measured) == 1:
        columns[f"{metric}_ablated"] = clean + np.asarray(columns[name])
    return columns


def _overall(
    sweep: Sweep, measured: Mapping[str, Measured], sets: Sequence[Heads]
) -> dict[str, object]:
    """The unablated metric, what failed, and how far bfloat16 strays."""
    metric = sweep.options.metric.name.replace("-", "_")
    first = next(iter(measured.values()))
    summary: dict[str, object] = {f"{metric}_clean": float(np.nanmean(first.clean))}
    failed = [
        {"ablation": f"{name} {label(heads)}", "reason": reason}
        for name, own in measured.items()
        for heads, reason in own.failed.items()
    ]
    if failed:
        summary["failed"] = failed
    if sweep.options.bfloat16:
        summary |= sweep.strays(sets, first)
    return summary


def _largest(table: pd.DataFrame, score: str) -> dict[str, object]:
    if table[score].isna().all():
        return {}
    strongest = table.loc[table[score].abs().idxmax()]
    return {
        "largest_effect": float(strongest[score]),
        "largest_effect_head": head_label(int(strongest["layer"]), int(strongest["head"])),
    }


def _jointly(
    sweep: Sweep,
    measured: dict[str, Measured],
    heads: Sequence[Head],
    table: pd.DataFrame,
    score: str,
    *,
    whole: bool,
) -> dict[str, object]:
    """The joint effect of the heads, or of the strongest of a whole sweep, beside their sum."""
    rows = table[score].abs().sort_values(ascending=False, kind="stable").dropna().index
    chosen = [heads[row] for row in (rows[:TOGETHER] if whole else rows)]
    if len(chosen) < 2:
        return {}
    together = tuple(sorted(chosen))
    first = next(iter(measured))
    # Beside the single heads, which are there: one failing set is not all of them.
    joint = sweep.measure([*((head,) for head in chosen), together])[first]
    if together in joint.failed:
        return {}
    documents = sequence_documents(sweep.inputs.batches)
    sums = np.sum([measured[first].effect((head,)) for head in chosen], axis=0)
    both = paired(
        np.stack([joint.effect(together), sums, joint.effect(together) - sums]), documents
    )
    return {
        "together_heads": " ".join(head_label(*head) for head in together),
        "together": both.mean[0],
        "together_se": both.standard_error[0],
        "sum_of_singles": both.mean[1],
        "together_less_sum": both.mean[2],
        "together_less_sum_se": both.standard_error[2],
    }


def _best_kept(
    sweep: Sweep, chosen: Sequence[Head], effects: np.ndarray
) -> list[dict[str, object]]:
    """Each layer's best head to keep: chosen on one half of the documents, told of the other.

    None where nobody knows whether more of the metric is better.
    """
    if sweep.options.metric.unit not in ("nats", "logits", "share"):
        return []
    documents = sequence_documents(sweep.inputs.batches)
    first = np.isin(documents, np.unique(documents)[::2])
    lower = sweep.options.metric.unit == "nats"  # a loss or a divergence: less is better
    best = []
    for layer in sorted({layer for layer, _ in chosen}):
        rows = [n for n, head in enumerate(chosen) if head[0] == layer]
        on_half = paired(effects[rows][:, first], documents[first]).mean
        if np.isnan(on_half).all() or first.all():
            continue
        row = rows[int(np.nanargmin(on_half) if lower else np.nanargmax(on_half))]
        told = paired(effects[[row]][:, ~first], documents[~first])
        best.append(
            {
                "layer": layer,
                "kept": chosen[row][1],
                "held_out": told.mean[0],
                "held_out_se": told.standard_error[0],
                "held_out_p": told.p[0],
            }
        )
    return best


def _origin(sweep: Sweep, summary: dict[str, object]) -> dict:
    return {
        "unit": sweep.options.metric.unit,
        "model": sweep.model.cfg.model_name,
        "params": sweep.params,
        "inputs": sweep.inputs.description,
        "seed": sweep.options.seed,
        "summary": summary,
    }
