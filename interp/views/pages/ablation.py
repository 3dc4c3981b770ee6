"""Pages for ablations, importance and pruning: what was found, figures, rows, facts."""

from collections.abc import Mapping
from dataclasses import replace

import pandas as pd

from interp.tables import HeadScores, SetScores
from interp.views.ablation_words import (
    HEAD_TABLES,
    HIGHER_IS_BETTER,
    LOWER_IS_BETTER,
    Name,
    column,
    compared,
    effect_words,
    failures,
    findings,
    meanings,
    methods_in_words,
    metric_unit,
    noun,
    orders,
    page_name,
    renamed,
    row_labels,
    strongest,
)
from interp.views.figures.ablation import (
    Series,
    against,
    effect_bars,
    pair_matrix,
)
from interp.views.figures.heads import head_heatmap
from interp.views.figures.removal import removal_curves
from interp.views.figures.runs import about
from interp.views.findings import sentence
from interp.views.pages.ablation_tables import row_tables
from interp.views.pages.facts import facts, words
from interp.views.pages.page import Part, Plot, Points, Words

TOP = 12
"""Rows of bars."""

Tabled = HeadScores | SetScores


def ablation_parts(result: Tabled) -> tuple[Part, ...]:
    """What a page shows of one result: findings, figures, strongest rows, all rows, facts."""
    name = page_name(result)
    told = [*findings(result, name), *failures(result, name), *methods_in_words(result)]
    points = Points(tuple(sentence(line) for line in (*told, *meanings(result))))
    if result.table.empty or result.score not in result.table:
        parts: list[Part] = [
            Words(f"Nothing to show: the table holds no {result.score!r} column with rows.")
        ]
    elif not pd.to_numeric(result.table[result.score], errors="coerce").notna().any():
        parts = [Words("No head has a finite value, so there is no figure to draw.")]
    else:
        parts = [*_figures(result, name), *row_tables(result, name)]
    return (points, *parts, *facts(_for_facts(result, name)))


def _figures(result: Tabled, name: Name) -> list[Part]:
    if result.analysis == "pairs":
        return _pair_figures(result, name)
    if result.analysis in ("cumulative", "prune"):
        return [_curves(result)]
    parts: list[Part] = []
    if result.analysis in HEAD_TABLES and _fills_a_map(result.table):
        effect = result.analysis != "importance"
        figure = head_heatmap(
            result.table,
            result.score,
            title=f"{words(effect_words(result))} by {noun(result)}{_by(result)}",
            subtitle=_origin(result),
            unit=result.unit,
            diverging=effect,
            noun=noun(result),
            quantity=effect_words(result),
            reading=_taken(result, result.score),
            # Clicks choose query heads.
            subject=result.model if noun(result) == "head" else "",
            pruned=result.pruned_heads,
        )
        parts.append(Plot(figure))
    parts.append(_bars(result, name))
    parts += [_best_kept(result, name)] if result.summary.get("kept_heads") else []
    parts += _direct(result, name) if result.analysis in ("ablation", "layers") else []
    parts += _importance(result, name) if result.analysis == "importance" else []
    return parts


def _bars(result: Tabled, name: Name) -> Part:
    own = compared(result)
    layers = result.analysis == "layers"
    table = result.table if layers else strongest(result, TOP)
    which = "layer" if layers else noun(result)
    if result.analysis == "all-but-one":
        reading = "One row for each head that is kept alone in its layer, furthest from 0 first."
    elif layers:
        reading = "One row a layer, whose heads are all taken away together."
    else:
        reading = f"One row a {which}, the strongest first."
    if len(own) > 1:
        reading += " Where a head's bars disagree, what it does depends on what stands in for it."
    title = "Every layer" if layers else f"The strongest {which}s"
    if result.analysis == "all-but-one":
        title = "The heads whose staying alone matters most"
    figure = effect_bars(
        row_labels(result, table, name),
        [_series(table, score, words(score) if len(own) > 1 else score) for score in own],
        axis=_axis(effect_words(result), result.unit),
        title=title,
        subtitle=_origin(result),
        reading=" ".join(filter(None, [reading, _taken(result, *own)])),
    )
    return Plot(figure)


def _direct(result: Tabled, name: Name) -> list[Part]:
    straight = column(result, result.score, "direct")
    if straight not in result.table or not result.table[straight].notna().any():
        return []
    own = "the layer" if result.analysis == "layers" else f"the {noun(result)}"
    figure = against(
        row_labels(result, result.table, name),
        _series(result.table, result.score, "total"),
        _series(result.table, straight, "direct"),
        axes=(_axis("total effect", result.unit), _axis("direct effect", result.unit)),
        title=f"Direct against total effect{_by(result)}",
        subtitle=_origin(result),
        reading=f"Total is the change of {result.params.get('metric')}. Direct is what "
        f"{own}'s own contribution to the logits does to it, all later layers writing what they "
        f"wrote.{_self_repair(result, own)} Lines are one standard error. "
        + _taken(result, result.score),
        diagonal=True,
    )
    return [Plot(figure)]


def _self_repair(result: Tabled, own: str) -> str:
    """Which side of the diagonal is which: that depends on the direction of the metric."""
    metric = result.params.get("metric")
    if metric not in (*LOWER_IS_BETTER, *HIGHER_IS_BETTER):
        return " How far a point lies above the dotted line is direct less total."
    above, below = ("above", "below") if metric in LOWER_IS_BETTER else ("below", "above")
    return (
        f" As far as a point lies {above} the dotted line later layers made up for the loss; "
        f"{below} it, they build on {own}."
    )


def _best_kept(result: Tabled, name: Name) -> Part:
    records = result.summary["kept_heads"]
    assert isinstance(records, list)
    table = pd.DataFrame(records)
    figure = effect_bars(
        [name(int(row["layer"]), int(row["kept"])) for row in records],
        [_series(table, "held_out", "held out")],
        axis=_axis(effect_words(result), result.unit),
        title="The best head to keep in each layer",
        subtitle=_origin(result),
        reading="Chosen on one half of the sequences, estimated on the other: the head is kept, "
        "the others of its layer are taken away. Near 0 one head is enough. "
        + _taken(result, result.score),
    )
    return Plot(figure)


def _importance(result: Tabled, name: Name) -> list[Part]:
    """The approximation against what it approximates, on the heads that were ablated."""
    records = result.summary.get("sample")
    if not isinstance(records, list) or not records:
        return []
    sample = pd.DataFrame(records)
    labels = [renamed(str(head), name) for head in sample["head"]]
    effect = sample["ablation"].astype(float)
    errors = sample["ablation_se"].astype(float).tolist() if "ablation_se" in sample else []
    # A normalised score has a unit of its own, which these have not.
    unit = metric_unit(result)
    origin = _origin(replace(result, unit=unit))
    lines = " Lines are one standard error of the true effect." if errors else ""
    size = against(
        labels,
        Series("true effect", effect.abs().tolist(), errors),
        Series("importance", sample["importance"].astype(float).tolist()),
        axes=(_axis("size of the effect of zeroing", unit), _axis("importance", unit)),
        title="Importance against true ablation",
        subtitle=origin,
        reading=f"The {len(sample)} {noun(result)}s that were also ablated, spread evenly. "
        "Importance is good for ranking as far as points rise from left to right; its size is not "
        f"an effect.{lines}",
        diagonal=False,
    )
    signed = against(
        labels,
        Series("true effect", effect.tolist(), errors),
        Series("attribution", sample["attribution"].astype(float).tolist()),
        axes=(_axis("effect of zeroing", unit), _axis("attribution", unit)),
        title="Attribution against true ablation",
        subtitle=origin,
        reading="Attribution estimates the effect of zeroing to first order: on the dotted line "
        f"it is right.{lines}",
        diagonal=True,
    )
    return [Plot(size), Plot(signed)]


def _pair_figures(result: Tabled, name: Name) -> list[Part]:
    table = result.table
    apart = column(result, result.score, "interaction")
    a = list(zip(table["layer_a"].astype(int), table["head_a"].astype(int), strict=True))
    b = list(zip(table["layer_b"].astype(int), table["head_b"].astype(int), strict=True))
    heads = sorted({*a, *b})
    place = {head: number for number, head in enumerate(heads)}
    pairs = zip(a, b, table[apart], strict=True)
    values = {(place[one], place[other]): float(value) for one, other, value in pairs}
    reading = (
        f"Joint effect of two {noun(result)}s less the sum of their single effects; each pair "
        "stands on both sides of the diagonal. Orange: together they do more than one by one, as "
        "where each stands in for the other; blue: less. "
    ) + _taken(result, result.score)
    parts: list[Part] = []
    if table[apart].notna().any():
        figure = pair_matrix(
            [name(*head) for head in heads],
            values,
            column="interaction",
            title=f"Interaction of pairs{_by(result)}",
            subtitle=_origin(result),
            reading=reading,
        )
        parts.append(Plot(figure))
        rows = strongest(result, TOP, apart)
        bars = effect_bars(
            row_labels(result, rows, name),
            [_series(rows, apart, "interaction")],
            axis=_axis("interaction", result.unit),
            title=f"The strongest interactions{_by(result)}",
            subtitle=_origin(result),
            reading="Joint effect of the two less the sum of their single effects; one row a pair, "
            f"the strongest first. {_taken(result, result.score)}",
        )
        parts.append(Plot(bars))
    return parts


def _curves(result: Tabled) -> Part:
    table = result.table
    shares = result.analysis == "prune"
    at = "share" if shares else "removed"
    if shares:
        curves = [
            (_series(own, result.score, order), own[at].tolist()) for order, own in orders(table)
        ]
        reading = (
            f"One line for each order in which {noun(result)}s are taken away, ranked on one half "
            "of the sequences and evaluated on the other. The longer a line stays near 0, the more "
            "heads can go."
        )
    else:
        curves = [
            (
                _series(table, own, own if len(compared(result)) > 1 else "effect"),
                table[at].tolist(),
            )
            for own in compared(result)
        ]
        reading = f"The {noun(result)}s leave one after another, in the order given, and stay away."
    figure = removal_curves(
        curves,
        axes=(f"{noun(result)}s removed", _axis(effect_words(result), result.unit)),
        title="Pruning curves" if shares else "Cumulative ablation",
        subtitle=_origin(result),
        reading=f"{reading} {_taken(result, *compared(result))}",
        shares=shares,
    )
    return Plot(figure)


def _for_facts(result: Tabled, name: Name) -> Tabled:
    """The result with the heads of its summary as the page writes them."""
    summary: dict[str, object] = {}
    for key, value in result.summary.items():
        if key in ("failed", "prunable_share", "prunable_rule", "removal_orders"):
            continue  # told among the findings, and below the curves
        if isinstance(value, str):
            summary[key] = renamed(value, name)
        elif isinstance(value, list):
            summary[key] = [_record(item, name) for item in value]
        elif isinstance(value, Mapping):
            summary[key] = {k: _record(item, name) for k, item in value.items()}
        else:
            summary[key] = value
    return replace(result, summary=summary)


def _record(value: object, name: Name) -> object:
    if isinstance(value, str):
        return renamed(value, name)
    if isinstance(value, Mapping):
        return {key: _record(item, name) for key, item in value.items()}
    if isinstance(value, list):
        return [_record(item, name) for item in value]
    return value


def _series(table: pd.DataFrame, name: str, called: str) -> Series:
    errors = table[f"{name}_se"].astype(float).tolist() if f"{name}_se" in table else []
    return Series(called, table[name].astype(float).tolist(), errors)


def _by(result: Tabled) -> str:
    """The method of a figure that shows one of several."""
    return f", {result.score}" if len(compared(result)) > 1 else ""


def _taken(result: Tabled, *scores: str) -> str:
    """The methods of a figure as sentences, so that its caption needs nothing beside it."""
    lines = methods_in_words(result)
    several = len(compared(result)) > 1
    lines = [line for line in lines if not several or line.split(":")[0] in scores]
    return " ".join(map(sentence, lines))


def _axis(words_of: str, unit: str) -> str:
    return f"{words_of}, {unit}" if unit else words_of


def _origin(result: Tabled) -> str:
    told = (result.model, about(result.table, result.unit), f"seed {result.seed}")
    return ", ".join(filter(None, told))


def _fills_a_map(table: pd.DataFrame) -> bool:
    """Whether the heads measured are at least half of the map they span; a few are only bars."""
    cells = (table["layer"].max() + 1) * (table["head"].max() + 1)
    return bool(2 * len(table) >= cells)
