"""Reports: one self-contained HTML file for a folder of results.

One invariant: the same results give the same bytes; every date and version comes from the results.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from interp.comparison.result import FILE as COMPARISON
from interp.comparison.result import Comparison
from interp.errors import AnalysisError
from interp.tables import HeadScores, SetScores, write_text
from interp.views import page
from interp.views.ablation_words import title as result_title
from interp.views.compare_report import compare_page
from interp.views.run_report import phase_change_page, series_page, training_page
from interp.views.scores_report import read_scores, scores_page, several_title

_PAGES = {"train": training_page, "phase-change": phase_change_page, "series": series_page}


def write_report(folder: Path) -> Path:
    """Write `report.html` into a folder of results and return its path.

    The folder is a training run or an experiment (its `run.json` says which by `kind`), or holds
    the JSON files of analyses or of a comparison.

    Raises:
        AnalysisError: the folder is none of these, or one of its files cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise AnalysisError(f"{folder}: no such folder; a report is made of a folder of results")
    path = folder / "report.html"
    write_text(path, page.render(_page(folder)))
    return path


def report(results: Sequence[HeadScores | SetScores], path: str | Path) -> Path:
    """Write one page of several analyses or sweeps, in the order given; returns its path.

    Raises:
        AnalysisError: there are no results.
    """
    if not results:
        raise AnalysisError("no results to report")
    models = ", ".join(dict.fromkeys(scores.model for scores in results))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    title = f"{several_title(results)} of {models}"
    write_text(path, page.render(scores_page(list(results), title)))
    return path


def result_page(result: HeadScores | SetScores) -> str:
    """The HTML page of one analysis or sweep: its figures, its strongest rows, its facts."""
    named = result_title(result)
    return page.render(scores_page([result], named[:1].upper() + named[1:]))


def comparison_page(comparison: Comparison) -> str:
    """The HTML page of a comparison of two models."""
    return page.render(compare_page(comparison))


def _page(folder: Path) -> page.Page:
    facts = _facts(folder / "run.json")
    kind = facts.get("kind")
    if isinstance(kind, str) and kind in _PAGES:
        return _PAGES[kind](folder, facts)
    saved = [read_scores(path) for path in sorted(folder.glob("*.json")) if path.name != "run.json"]
    results = [scores for scores in saved if scores is not None]
    alone = scores_page(results, f"{several_title(results)}: {folder.resolve().name}")
    if (folder / COMPARISON).is_file():
        compared = compare_page(Comparison.load(folder / COMPARISON))
        return replace(compared, sections=(*compared.sections, *alone.sections))
    if results:
        return alone
    given = f"run.json of kind {kind!r}" if facts else "no run.json"
    raise AnalysisError(
        f"{folder}: nothing to report: {given} and no analysis; expected run.json with kind "
        f"{' or '.join(_PAGES)}, or JSON files written by an analysis or a comparison"
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
