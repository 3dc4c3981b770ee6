"""Chapters on a training run and on a phase-change experiment, from the files in their folders.

One invariant: a missing or empty file costs its section, which then says so in one sentence; a file
that is there but cannot be read is an error that names it.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import plotly.graph_objects as go

from interp.views.figures.curves import training_curves
from interp.views.figures.heads import ablation_bars, heads_at_steps
from interp.views.figures.runs import found_changes, runs
from interp.views.figures.style import drawable, short_count
from interp.views.findings import sentence
from interp.views.pages.change_tables import (
    ablation_table,
    change_table,
    distance_table,
    seed_table,
    unfound,
)
from interp.views.pages.chapters import Chapter
from interp.views.pages.explorer import Subject
from interp.views.pages.page import (
    Page,
    Part,
    Plot,
    Points,
    Section,
    Source,
    Table,
    Words,
    frame_table,
    number,
)
from interp.views.pages.run_tables import (
    HEAD_SCORES,
    Folder,
    head_results,
    read_csv,
    read_folder,
    read_json_lines,
    text_of,
    texts_of,
)
from interp.views.pages.subjects import pattern_text, result_subjects, run_subject

HEADS_UNIT = "Mean attention, from 0 to 1, of each head."

# Shown elsewhere on the page, so not repeated among the facts.
_TOLD = ("kind", "title", "findings", "rule", "notes")


def training_chapter(folder: Path, facts: dict[str, object]) -> Chapter:
    """The chapter of a training run: where it ended, its curves, its heads, facts and config."""
    notes: list[str] = []
    read = read_folder(
        folder, facts, read_json_lines(folder / "metrics.jsonl", notes), "probes.csv", notes
    )
    page = Page(
        title=text_of(facts, "title") or f"Training run {read.name}",
        origin=_origin(read),
        findings=_findings(facts) or _where_it_ended(read),
        sections=(
            _curves(read),
            _heads(read),
            *((_change(read),) if len(read.changes) else ()),
            *_caveats(read),
            _facts(read),
        ),
    )
    return Chapter(page, _subjects(read))


def phase_change_chapter(folder: Path, facts: dict[str, object]) -> Chapter:
    """The chapter of a phase-change experiment: curves, heads, change points, ablation, caveats."""
    read = read_folder(folder, facts, read_csv(folder / "curves.csv"), "heads.csv", [])
    page = Page(
        title=text_of(facts, "title") or f"Phase change: {read.name}",
        origin=_origin(read),
        findings=_findings(facts),
        sections=(
            _curves(read),
            _heads(read),
            _change(read),
            _ablation(read),
            *_caveats(read),
            _facts(read),
        ),
    )
    return Chapter(page, _subjects(read))


def series_chapter(folder: Path, facts: dict[str, object]) -> Chapter:
    """The chapter of a series of checkpoints: curves, heads, change points, caveats."""
    read = read_folder(folder, facts, read_csv(folder / "curves.csv"), "heads.csv", [])
    page = Page(
        title=text_of(facts, "title") or f"Phase change in {read.name}",
        origin=_origin(read),
        findings=_findings(facts),
        sections=(_curves(read), _heads(read), _change(read), *_caveats(read), _facts(read)),
    )
    return Chapter(page, _subjects(read))


def _subjects(read: Folder) -> tuple[Subject, ...]:
    """Each run as the explorer has it: its heads at every step, their patterns, their ablation."""
    columns = {c: name for c, name in HEAD_SCORES.items() if c in read.heads}
    if read.heads.empty or "step" not in read.heads:
        return ()
    found = []
    for run in runs(read.heads):
        name = run.name or read.name
        known = {c: called for c, called in columns.items() if run.table[c].notna().any()}
        about = f"Probes of {name} while it trained"
        subject = run_subject(run, name, known, about)
        patterns, ablation = head_results(read.path, run.key)
        texts = tuple(pattern_text(own, step) for step, own in patterns.items())
        found.append(replace(subject, texts=texts))
        if ablation is not None:
            found += [replace(own, name=name) for own in result_subjects([ablation])]
    return tuple(found)


def _findings(facts: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(sentence(line) for line in texts_of(facts, "findings"))


def _where_it_ended(read: Folder) -> tuple[str, ...]:
    names = {
        "loss": "held-out loss {} nats per token",
        "icl_score": "in-context-learning score {} nats",
    }
    if "step" not in read.curves or read.curves.empty:
        return ()
    said = []
    for column, words in names.items():
        if column in read.curves and read.curves[column].notna().any():
            rows = read.curves[read.curves[column].notna()]
            last = rows.iloc[-1]
            tokens = f" ({short_count(last['tokens'])} tokens)" if "tokens" in rows else ""
            value = words.format(number(float(last[column])))
            said.append(f"At step {last['step']:,.0f}{tokens}: {value}.")
    for column, words in HEAD_SCORES.items():
        if column in read.heads and read.heads[column].notna().any():
            last_step = read.heads["step"].max()
            rows = read.heads[(read.heads["step"] == last_step) & read.heads[column].notna()]
            if len(rows):
                top = rows.loc[rows[column].idxmax()]
                head = f"L{top['layer']:.0f}H{top['head']:.0f}"
                value = number(float(top[column]))
                said.append(f"Highest {words.lower()} at step {last_step:,}: {value} ({head}).")
    return tuple(said)


def _curves(read: Folder) -> Section:
    changes = read.changes if len(read.changes) else None
    parts: list[Part] = []
    if read.curves.empty:
        parts.append(Words("No training curves: the folder holds no logged metrics."))
    else:
        figure = training_curves(
            read.curves,
            changes,
            title="Losses and head scores while training",
            subtitle=_who(read),
        )
        steps = sorted(set(read.curves["step"]))
        if _grows_by_powers(steps):
            _logarithmic(figure, steps)
        parts.append(Plot(figure))
        models = {run.key[0] for run in runs(read.curves)}
        if "model" in read.curves and len(models) == 1:
            parts.append(Words("There is no control model in this folder to compare with."))
    return Section("curves", "Training curves", tuple(parts))


def _grows_by_powers(steps: list[int]) -> bool:
    """Whether the first steps lie ten times closer than others: 0, 1, 2, 4, ..., 1000, 2000."""
    gaps = [after - before for before, after in pairwise(steps)]
    return len(gaps) > 5 and 10 * sorted(gaps[:5])[2] <= max(gaps)


def _logarithmic(figure: go.Figure, steps: list[int]) -> None:
    """Set the shared axis of steps to powers of ten; step 0 has no place on it."""
    low, high = math.log10(next(step for step in steps if step > 0)), math.log10(steps[-1])
    ticks = [10**power for power in range(math.ceil(low), math.floor(high) + 1)]
    figure.update_xaxes(
        type="log",
        range=[low - 0.01 * (high - low), high + 0.01 * (high - low)],
        tickvals=ticks,
        ticktext=[short_count(tick) for tick in ticks],
        title_text="training step, on a logarithmic axis",
    )
    if steps[0] == 0:
        notes = [*figure.layout.meta["notes"], "Step 0 has no place on a logarithmic axis."]
        figure.update_layout(meta={**figure.layout.meta, "notes": notes})


def _heads(read: Folder) -> Section:
    columns = [c for c in HEAD_SCORES if c in read.heads and read.heads[c].notna().any()]
    if read.heads.empty or not columns:
        words = "No head maps: the folder holds no head scores over training."
        return Section("heads", "Heads at chosen steps", (Words(words),))
    # Named runs have their names on the rows of the figure.
    named = all(run.name for run in runs(read.heads))
    subtitle = f"{HEADS_UNIT} {read.name if named else _who(read)}"
    labels, steps, why = _moments(read)
    plots = [
        Plot(
            heads_at_steps(
                read.heads,
                c,
                steps,
                labels=labels,
                title=HEAD_SCORES[c],
                subtitle=subtitle,
                subject=read.name,
            )
        )
        for c in columns
    ]
    return Section("heads", "Heads at chosen steps", (Words(why), *plots))


def _moments(
    read: Folder,
) -> tuple[tuple[str, ...], Mapping[tuple[str, str], list[int]], str]:
    """Four steps for each run: around its own induction change, else around the first one found."""
    found = {key: row for key, row in found_changes(read.changes) if row["curve"] == "induction"}
    steps: dict[tuple[str, str], list[int]] = {}
    parts = runs(read.heads)
    for run in parts:
        first, last = int(run.table["step"].min()), int(run.table["step"].max())
        change = found.get(run.key) or next(iter(found.values()), None)
        if change is None:
            steps[run.key] = sorted({first + (last - first) * i // 3 for i in range(4)})
        else:
            places = [drawable(change[place]) for place in ("onset", "step", "end")]
            steps[run.key] = [first, *(round(place) for place in places if place is not None)]
    if not found:
        why = "Four evenly spaced moments, since no change of the induction score is known."
        return (), steps, why
    why = (
        "Each run at its first logged step and at the logged steps nearest to the onset, midpoint "
        "and end of its induction change"
    )
    if not all(run.key in found for run in parts):
        why += "; a run without one is shown at the steps of the first run that has one"
    return ("start", "onset", "midpoint", "end"), steps, f"{why}."


def _change(read: Folder) -> Section:
    parts: list[Part] = []
    if read.changes.empty:
        parts.append(Words("No change points: the folder holds no table of changes."))
    else:
        found = found_changes(read.changes)
        if found:
            parts += [change_table(found), seed_table(read.changes), *distance_table(found)]
        else:
            parts.append(Words("The rule found no change in any run."))
        if missed := unfound(read.changes):
            parts += [Words("Where the rule found no change:"), Points(missed)]
    if len(read.distance):
        parts.append(frame_table(read.distance, "Distances as recorded.", ("seed", "curve")))
    if rule := text_of(read.facts, "rule"):
        parts += [Words(f"The rule: {rule}")]
    return Section("change", "Where the change is", tuple(parts))


def _ablation(read: Folder) -> Section:
    if read.ablation.empty:
        words = "No ablation: the folder holds no table of ablated groups."
        return Section("ablation", "Ablation", (Words(words),))
    parts: list[Part] = []
    columns = {"effect": "in-context-learning score", "loss_effect": "loss"}
    for column, what in columns.items():
        if column in read.ablation and "group" in read.ablation:
            title = f"Effect of ablating groups of heads on the {what}"
            parts.append(Plot(ablation_bars(read.ablation, column, title=title)))
    parts.append(ablation_table(read.ablation))
    return Section("ablation", "Ablation", tuple(parts))


def _caveats(read: Folder) -> tuple[Section, ...]:
    items = (*texts_of(read.facts, "notes"), *read.notes)
    return (Section("caveats", "Caveats", (Points(items),)),) if items else ()


def _facts(read: Folder) -> Section:
    rows = tuple(_flat({k: v for k, v in read.facts.items() if k not in _TOLD}))
    table = Table("What run.json says of this run.", ("fact", "value"), rows, words=2)
    config = (Source("config.toml, as resolved", read.config),) if read.config else ()
    return Section("facts", "Facts of the run", (table, *config))


def _flat(facts: Mapping[str, object], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in facts.items():
        name = f"{prefix}{key}"
        if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
            value = {str(place): item for place, item in enumerate(value)}
        if isinstance(value, dict):
            rows += _flat(value, f"{name}.")
        else:
            # Not `number`: a seed or a version is shown digit for digit.
            items = value if isinstance(value, list) else [value]
            rows.append((name, ", ".join("–" if i is None else str(i) for i in items)))
    return rows


def _who(read: Folder) -> str:
    names = [run.name for run in runs(read.curves if len(read.curves) else read.heads) if run.name]
    shown = names or [
        read.name,
        *([f"seed {s}"] if (s := read.facts.get("seed")) is not None else []),
    ]
    return "; ".join(shown)


def _origin(read: Folder) -> str:
    facts = read.facts
    known = {"device": facts.get("device"), "dtype": facts.get("dtype")}
    words = [f"{key} {value}" for key, value in known.items() if isinstance(value, str)]
    if isinstance(size := facts.get("n_parameters"), int):
        words.insert(0, f"{size:,} parameters")
    return " · ".join([read.name, *words])
