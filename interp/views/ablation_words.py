"""What a table of ablations says, in words and rows: for a terminal and for a page alike.

One invariant: everything is read from the table, its summary and its parameters, and what is not
in them is not said.
"""

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd

from interp.tables import Result

HEAD_TABLES = ("ablation", "all-but-one", "importance")
SET_TABLES = ("pairs", "layers", "cumulative", "prune")
"""Analyses whose rows are sets of heads."""

_TITLES = {
    "all-but-one": "all but one head of a layer",
    "pairs": "ablation of pairs",
    "layers": "ablation of whole layers",
    "cumulative": "cumulative ablation",
    "prune": "pruning curves",
}

LOWER_IS_BETTER = ("loss", "second-copy-loss", "last-token", "kl")
HIGHER_IS_BETTER = ("accuracy", "logit-diff")

CALLED = 0.05
"""The false-discovery rate at which rows are counted as different from 0."""

Name = Callable[[int, int], str]
"""How a head is written, of its layer and index."""


def title(result: Result) -> str:
    """What was done to which model."""
    return f"{_TITLES.get(result.analysis, result.analysis)} of {result.model}"


def noun(result: Result) -> str:
    """What the rows are called: `k` and `v` belong to key-value heads, `z` to query heads."""
    return "KV head" if result.params.get("site") in ("k", "v") else "head"


def page_name(result: Result) -> Name:
    """How a page writes heads: L5H1, or L5KV1; 5.10 reads as a number."""
    letter = "KV" if noun(result) == "KV head" else "H"
    return lambda layer, head: f"L{layer}{letter}{head}"


def compared(result: Result) -> list[str]:
    """The columns of effects: the score, or one for each method where several were compared."""
    table = result.table
    several = [own for own in table if f"{own}_rank" in table and f"{own}_se" in table]
    return several or [result.score]


def column(result: Result, score: str, name: str) -> str:
    """The column of something that belongs to one of the effects: `direct`, or `mean_direct`."""
    return f"{score}_{name}" if len(compared(result)) > 1 else name


def strongest(result: Result, n: int, by: str | None = None) -> pd.DataFrame:
    """The `n` rows furthest from 0, furthest first, without those that have no value."""
    size = pd.to_numeric(result.table[by or result.score], errors="coerce").abs()
    order = size.dropna().sort_values(ascending=False, kind="stable").index
    return result.table.loc[order[:n]]


def orders(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The rows of each order of removal, fewest removed first."""
    names = dict.fromkeys(table["order"])
    return [(str(o), table[table["order"] == o].sort_values("removed")) for o in names]


def row_labels(result: Result, table: pd.DataFrame, name: Name) -> list[str]:
    """What each row is of: a head, a pair, a layer, how many heads are gone."""
    if result.analysis == "pairs":
        columns = ("layer_a", "head_a", "layer_b", "head_b")
        rows = table[list(columns)].astype(int).itertuples(index=False, name=None)
        return [f"{name(la, ha)}+{name(lb, hb)}" for la, ha, lb, hb in rows]
    if result.analysis in ("cumulative", "prune"):
        return [str(int(removed)) for removed in table["removed"]]
    if result.analysis == "layers":
        return [f"{name(int(layer), 0)[:-1]}*" for layer in table["layer"]]
    places = zip(table["layer"], table["head"], strict=True)
    return [name(int(layer), int(head)) for layer, head in places]


def effect_words(result: Result) -> str:
    """What the score is called on an axis."""
    if result.analysis == "importance":
        return "importance"
    return f"change of {result.params.get('metric', 'the metric')}"


def signed(value: object) -> str:
    """A figure inside a sentence, with its sign."""
    return f"{float(str(value)):+.3g}"


def with_error(value: object, error: object, decimals: int = 4) -> str:
    """`+2.0131 ± 0.1200`; without the error where there is none, empty where there is no value."""
    number, spread = float(str(value)), float(str(error))
    if np.isnan(number):
        return ""
    return f"{number:+.{decimals}f}" + ("" if np.isnan(spread) else f" ± {spread:.{decimals}f}")


# --- sentences --------------------------------------------------------------------------------


def methods_in_words(result: Result) -> list[str]:
    """How heads were taken away, each method with what it puts in their place."""
    if result.analysis == "importance":
        return []
    params = result.params
    method = str(params.get("method", ""))
    taken = {"k": "keys", "v": "values"}.get(str(params.get("site")), "output z")
    owner = noun(result)
    replaced = "each head's" if owner == "head" else f"each {owner}'s"
    places = str(params.get("mean"))
    mean = (
        f"mean: {replaced} {taken} replaced by its mean {places} "
        f"{'of' if places.startswith('over') else 'over'} {params.get('reference')} "
        f"({_count(params.get('reference_tokens'))} tokens)"
    )
    draws = params.get("draws")
    known = {
        "zero": f"zero: {replaced} {taken} replaced by 0",
        "mean": mean,
        "resample": f"resample: {replaced} {taken} taken from {params.get('resampled_from')}, "
        f"averaged over {draws} draw{'' if draws == 1 else 's'}",
        "patch": f"patch: {replaced} {taken} taken from {params.get('patched_from')}",
        "pattern-preserving": f"pattern-preserving: {replaced} {taken} replaced by 0, all "
        "attention patterns kept as they were",
    }
    return [
        known[own] for own in (compared(result) if method == "all" else [method]) if own in known
    ]


def meanings(result: Result) -> list[str]:
    """What signs and columns mean, where that is not in their names."""
    metric = result.params.get("metric")
    gone = "without the others" if result.analysis == "all-but-one" else "without"
    lines = []
    if result.analysis == "importance":
        lines.append("attribution: the effect of zeroing to first order")
    elif metric == "kl":
        lines.append("kl: of the next-token distribution, from that of the unablated model")
    elif metric in LOWER_IS_BETTER:
        lines.append(f"an effect above 0: the model is worse off {gone}; below 0: better off")
    elif metric in HIGHER_IS_BETTER:
        lines.append(f"an effect below 0: the model is worse off {gone}; above 0: better off")
    if column(result, result.score, "self_repair") in result.table:
        lines.append("self-repair: direct less total effect, what later layers make up for")
    if result.analysis == "pairs":
        lines.append("interaction: joint effect less the sum of the two single ones")
    return lines


def findings(result: Result, name: Name) -> list[str]:
    """What the whole table shows, a sentence each: what single rows show is in the rows."""
    lines = [*_clean(result), *_called(result), *_disagreeing(result), *_together(result, name)]
    lines += [*_correlation(result), *_prunable(result), *_rounding(result)]
    return lines


def failures(result: Result, name: Name) -> list[str]:
    """A line for each ablation that failed, and why."""
    failed = result.summary.get("failed")
    if not isinstance(failed, list):
        return []
    several = len(compared(result)) > 1
    lines = []
    for record in failed:
        method, _, heads = str(record["ablation"]).rpartition(" ")
        if result.analysis == "prune":  # named by their number
            method, heads = "", str(record["ablation"])
        how = f"{method} of " if several and method else ""
        lines.append(f"failed: {how}{renamed(heads, name)}: {record['reason']}")
    return lines


def renamed(heads: str, name: Name) -> str:
    """Heads of a summary, `5.1 7.2` or `5.1+7.2`, as `name` writes them."""
    words = heads.replace("+", " ").split()
    pairs = [word.split(".") for word in words]
    if not all(len(pair) == 2 and all(part.isdecimal() for part in pair) for pair in pairs):
        return heads
    return ("+" if "+" in heads else " ").join(name(int(layer), int(h)) for layer, h in pairs)


def metric_unit(result: Result) -> str:
    """The metric's unit: a normalised importance has one of its own, which says nothing of it."""
    if result.score != "importance_normalized":
        return result.unit
    return "nats" if result.params.get("metric") in LOWER_IS_BETTER else ""


def _clean(result: Result) -> list[str]:
    metric = str(result.params.get("metric", ""))
    value = result.summary.get(f"{metric.replace('-', '_')}_clean")
    if value is None or metric == "kl":  # which is 0 from itself
        return []
    unit = f" {metric_unit(result)}" if metric_unit(result) else ""
    return [f"{metric} of the unablated model: {float(str(value)):.4g}{unit}"]


def _called(result: Result) -> list[str]:
    """How many rows differ from 0."""
    if result.analysis in ("cumulative", "prune", "importance"):
        return []
    rows = {"pairs": "pairs", "layers": "layers", "all-but-one": "kept heads"}
    what = rows.get(result.analysis, f"{noun(result)}s")
    effect = "interaction" if result.analysis == "pairs" else "effect"
    own = compared(result)
    names = [column(result, o, "interaction_q") if what == "pairs" else f"{o}_q" for o in own]
    rates = [result.table[name].dropna() for name in names if name in result.table]
    if not rates:
        return []
    if all(rate.empty for rate in rates):
        return ["one sequence or document has no standard error: nothing is told from chance"]
    counts = [f"{int((rate <= CALLED).sum())} of {len(rate)}" for rate in rates]
    told = [f"{o} {count}" for o, count in zip(own, counts, strict=True)] if own[1:] else counts
    return [f"{what} with an {effect} at a false-discovery rate of {CALLED}: {', '.join(told)}"]


def _disagreeing(result: Result) -> list[str]:
    if "disagree" not in result.table:
        return []
    number = int(result.table["disagree"].astype(bool).sum())
    return [
        f"the methods disagree on the rank of {number} of {len(result.table)} {noun(result)}s: "
        "one puts it above another head that a second puts above it, each by two standard errors"
    ]


def _together(result: Result, name: Name) -> list[str]:
    summary = result.summary
    if "together" not in summary:
        return []
    joint, sums = (signed(summary[key]) for key in ("together", "sum_of_singles"))
    apart = with_spread(summary, "together_less_sum")
    by = f" ({compared(result)[0]})" if len(compared(result)) > 1 else ""
    spread = with_spread(summary, "together") if "together_se" in summary else joint
    return [
        f"together{by} {renamed(str(summary['together_heads']), name)}: {spread}, where their "
        f"single effects add up to {sums}; together less sum {apart}"
    ]


def with_spread(summary: dict[str, object], key: str) -> str:
    """A figure of the summary with its standard error, where it has one."""
    error = summary.get(f"{key}_se")
    told = error is not None and not np.isnan(float(str(error)))
    return signed(summary[key]) + (f" ± {float(str(error)):.2g}" if told else "")


def _correlation(result: Result) -> list[str]:
    if result.analysis != "importance":
        return []
    size, sign = (
        result.summary.get(key) for key in ("rank_correlation", "rank_correlation_signed")
    )
    heads = result.summary.get("sample")
    number = len(heads) if isinstance(heads, list) else 0
    if size is None or np.isnan(float(str(size))):
        return ["an approximation of zeroing; its rank correlation to that is not known here"]
    line = (
        f"an approximation of zeroing: over {number} heads spread evenly, its rank correlation "
        f"(Spearman) to the size of the true effect is {float(str(size)):.2f}"
    )
    known = sign is not None and not np.isnan(float(str(sign)))
    return [line + (f", of the attribution to the effect {float(str(sign)):.2f}" if known else "")]


def _prunable(result: Result) -> list[str]:
    shares = result.summary.get("prunable_share")
    if result.analysis != "prune" or not isinstance(shares, Mapping):
        return []
    told = ", ".join(f"{order} {float(share):.0%}" for order, share in shares.items())
    return [f"can be removed: {told}; that is {result.summary['prunable_rule']}"]


def _rounding(result: Result) -> list[str]:
    summary = result.summary
    if "bfloat16_largest_difference" not in summary:
        return []
    return [
        "bfloat16 strays from float32 by "
        f"{float(str(summary['bfloat16_largest_difference'])):.2g} at most in the effects of "
        f"{len(str(summary['bfloat16_sample']).split())} heads, and by "
        f"{signed(summary['bfloat16_clean_difference'])} in the unablated {result.params['metric']}"
    ]


def _count(number: object) -> str:
    return f"{number:,}" if isinstance(number, int) else str(number)
