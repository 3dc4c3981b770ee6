"""What a page says of any result besides its figures: the summary, and where it comes from."""

import json
import re
from collections.abc import Mapping, Sequence

import pandas as pd

from interp.tables import Result, strict_json
from interp.views.pages.page import Part, Table, frame_table, number


def facts(result: Result) -> tuple[Part, ...]:
    """The summary of the whole model, its records as tables, and the result's provenance."""
    figures, records = [], []
    summary, params = _as_filed(result.summary), _as_filed(result.params)
    for name, value in summary.items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            table = pd.DataFrame(value)
            told = quoted(table)
            if "head" in table:  # a label, not a token
                told["head"] = table["head"]
            records.append(frame_table(told, f"{words(name)}.", ["head"]))
        elif name.endswith("_head") and re.fullmatch(r"\d+\.\d+", str(value)):
            # As the tables name it: 2.0 reads as a number.
            figures.append((words(name), "L" + str(value).replace(".", "H")))
        else:
            figures.append((words(name), number(value)))
    origin = (
        ("analysis", str(result.analysis)),
        ("model", str(result.model)),
        ("inputs", _plain(result.inputs)),
        ("seed", _plain(result.seed)),
        # In words, which wrap on a phone.
        *((name.replace("_", " "), _plain(value)) for name, value in params.items()),
        *((f"{name} version", _plain(value)) for name, value in result.versions.items()),
    )
    told = (
        [Table("Summary of the whole model.", ("figure", "value"), tuple(figures), words=2)]
        if figures
        else []
    )
    return (*told, *records, Table("Where this comes from.", ("fact", "value"), origin, words=2))


def quoted(table: pd.DataFrame) -> pd.DataFrame:
    """The table with its texts in quotes: a token may be a space or a line break."""
    texts = [name for name in table if table[name].map(lambda cell: isinstance(cell, str)).any()]
    return table.assign(
        **{
            name: table[name].map(lambda cell: repr(cell) if isinstance(cell, str) else cell)
            for name in texts
        }
    )


def telling(results: Sequence[Result]) -> list[str]:
    """For each result what tells it from others of its analysis; empty where it is the only one.

    Of several of one model it is the parameters and the seed that differ, else the inputs, else a
    number.
    """
    details = []
    for result in results:
        rivals = [other for other in results if other.analysis == result.analysis]
        own, others = _settings(result), [_settings(other) for other in rivals]
        told = [
            _TELLING[key].get(own.get(key, ""), own.get(key, ""))
            for key in _TELLING
            if len({one.get(key) for one in others}) > 1
        ]
        details.append(list(filter(None, told)))
    found = []
    for result, known in zip(results, details, strict=True):
        rivals = [
            other
            for other, also in zip(results, details, strict=True)
            if (other.analysis, other.model, also) == (result.analysis, result.model, known)
        ]
        found.append(", ".join([*known, *_difference(result, rivals)]))
    return found


_TELLING: dict[str, dict[str, str]] = {
    "method": {"all": "three methods"},
    "metric": {},
    "site": {"z": "heads", "k": "keys", "v": "values"},
    "normalize": {"True": "normalized", "False": ""},
}

_SHORT = 30


def _settings(result: Result) -> dict[str, str]:
    return {key: _plain(value) for key, value in _as_filed(result.params).items()}


def _as_filed(fields: Mapping[str, object]) -> dict[str, object]:
    """The fields as a file has them: a page of a result is that of its file, tensors or not."""
    plain = json.loads(strict_json(fields))
    assert isinstance(plain, dict)  # as it was given
    return plain


def _difference(result: Result, rivals: Sequence[Result]) -> list[str]:
    """What sets a result apart from others of the same analysis and model."""
    if len(rivals) < 2:
        return []
    every = [{**_settings(one), "seed": str(one.seed)} for one in rivals]
    own = {**_settings(result), "seed": str(result.seed)}
    differing = [key for key in own if len({one.get(key) for one in every}) > 1]
    told = [
        f"{key.replace('_', ' ')} {own[key]}"
        for key in differing
        if all(len(one.get(key, "")) <= _SHORT for one in every)
    ]
    if len({one.inputs for one in rivals}) > 1 and not told:
        told = [result.inputs]
    alike = [
        other
        for other, settings in zip(rivals, every, strict=True)
        if other.inputs == result.inputs
        and all(settings.get(key) == own[key] for key in differing if len(own[key]) <= _SHORT)
    ]
    if len(alike) > 1:
        place = next(number for number, one in enumerate(alike, start=1) if one is result)
        told.append(f"{place} of {len(alike)}")
    return told


def words(name: str) -> str:
    """A column or an analysis as the beginning of a sentence."""
    return name.replace("_", " ").replace("-", " ").capitalize()


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_plain(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value) or "–"
    return "–" if value is None or value == "" else str(value)
