"""Reports: one self-contained HTML file for the results in folders.

One invariant: the same results give the same bytes; every date and version comes from the results.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from interp.comparison.result import FILE as COMPARISON
from interp.comparison.result import Comparison
from interp.errors import AnalysisError
from interp.tables import Result, write_text
from interp.views.ablation_words import title as result_title
from interp.views.pages.chapters import Chapter, bound
from interp.views.pages.comparison import compare_chapter
from interp.views.pages.page import Page, render
from interp.views.pages.runs import phase_change_chapter, series_chapter, training_chapter
from interp.views.pages.scores import read_scores, scores_chapter, several_title

_CHAPTERS = {
    "train": training_chapter,
    "phase-change": phase_change_chapter,
    "series": series_chapter,
}

FILE = "report.html"


def write_report(*folders: Path | str, path: Path | None = None) -> Path:
    """Write one page of everything in some folders of results and return its path.

    A folder is a training run or an experiment (its `run.json` says which by `kind`), or holds the
    JSON files of analyses, patterns or a comparison, or several of these. The page is `path`, or
    `report.html` in the folder, of several folders in the one that holds them all.

    Raises:
        AnalysisError: a folder is none of these, or one of its files cannot be read.
    """
    paths = [Path(folder) for folder in folders]
    return write_page(report_page(*paths), path or report_path(*paths))


def write_page(page: Page, path: Path, *, cdn: bool = False, stamp: str = "") -> Path:
    """Write a page as one HTML file and return its path.

    With `cdn` it fetches plotly.js from its public address instead of holding it; `stamp` is a line
    at its end.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, render(page, cdn=cdn, stamp=stamp))
    return path


def report_path(*folders: Path) -> Path:
    """Where the report of some folders goes unless told otherwise: into the one that holds all.

    Raises: AnalysisError where they share no folder but the root of the file system.
    """
    if len(folders) == 1:
        return folders[0] / FILE
    plain = [Path(os.path.normpath(folder)) for folder in folders]
    if any(folder.is_absolute() or ".." in folder.parts for folder in plain):
        plain = [folder.resolve() for folder in folders]
    common = Path(os.path.commonpath(plain))
    if common == Path(common.anchor) and common.is_absolute():
        raise AnalysisError("these folders lie in no common one: --out says where the page goes")
    return common / FILE


def report_page(*folders: Path) -> Page:
    """The page of everything in some folders, its figures included.

    Raises: AnalysisError as `write_report` does.
    """
    for folder in folders:
        if folder.is_file():
            raise AnalysisError(f"{folder} is a file; a report is made of the folder that holds it")
        if not folder.is_dir():
            raise AnalysisError(
                f"{folder}: no such folder; a report is made of a folder of results"
            )
    once = {folder.resolve(): folder for folder in folders}
    labels = _labels(list(once))
    return bound(
        [
            chapter
            for folder, label in zip(once.values(), labels, strict=True)
            for chapter in _chapters(folder, label)
        ]
    )


def report(results: Sequence[Result], path: str | Path) -> Path:
    """Write one page of several analyses or sweeps, in the order given; returns its path.

    Raises:
        AnalysisError: there are no results.
    """
    if not results:
        raise AnalysisError("no results to report")
    models = ", ".join(dict.fromkeys(scores.model for scores in results))
    title = f"{several_title(results)} of {models}"
    return write_page(bound([scores_chapter(list(results), title)]), Path(path))


def result_page(result: Result) -> str:
    """The HTML page of one analysis or sweep: its figures, its strongest rows, its facts."""
    named = result_title(result)
    return render(bound([scores_chapter([result], named[:1].upper() + named[1:])]))


def comparison_page(comparison: Comparison) -> str:
    """The HTML page of a comparison of two models."""
    return render(bound([compare_chapter(comparison)]))


def _labels(folders: Sequence[Path]) -> list[str]:
    """A name for each of some resolved folders: the last parts of its path that no other has."""

    def tail(folder: Path, length: int) -> tuple[str, ...]:
        return folder.parts[-length:]

    return [
        next(
            "/".join(tail(folder, length))
            for length in range(1, len(folder.parts) + 1)
            if sum(tail(other, length) == tail(folder, length) for other in folders) == 1
        )
        for folder in folders
    ]


def _chapters(folder: Path, label: str) -> list[Chapter]:
    """What a folder holds: a run or an experiment, a comparison, results of analyses."""
    facts = _facts(folder / "run.json")
    kind = facts.get("kind")
    chapters = []
    if isinstance(kind, str) and kind in _CHAPTERS:
        chapters.append(_CHAPTERS[kind](folder, facts))
    if (folder / COMPARISON).is_file():
        chapters.append(compare_chapter(Comparison.load(folder / COMPARISON)))
    files = [path for path in sorted(folder.glob("*.json")) if path.is_file()]
    saved = [read_scores(path) for path in files if path.name != "run.json"]
    results = [scores for scores in saved if scores is not None]
    if results:
        chapters.append(scores_chapter(results, f"{several_title(results)}: {label}"))
    if chapters:
        return [replace(chapter, label=label) for chapter in chapters]
    given = f"run.json of kind {kind!r}" if facts else "no run.json"
    inner = sorted({path.parent.name for path in folder.glob("*/*.json")})
    hint = f"; its own folders are not read: {', '.join(inner[:5])}" if inner else ""
    raise AnalysisError(
        f"{folder}: nothing to report: {given} and no analysis; expected run.json with kind "
        f"{' or '.join(_CHAPTERS)}, or JSON files written by an analysis or a comparison{hint}"
    )


def _facts(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise AnalysisError(f"{path}: not JSON: {fault}") from None
    if not isinstance(facts, dict):
        raise AnalysisError(
            f"{path}: a run's facts are one JSON object, not {type(facts).__name__}"
        )
    return facts
