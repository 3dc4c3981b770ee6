"""What a page says of any result besides its figures: the summary, and where it comes from."""

import re
from collections.abc import Mapping

import pandas as pd

from interp.tables import Result
from interp.views.page import Part, Table, frame_table, number


def facts(result: Result) -> tuple[Part, ...]:
    """The summary of the whole model, its records as tables, and the result's provenance."""
    figures, records = [], []
    for name, value in result.summary.items():
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
        *((name.replace("_", " "), _plain(value)) for name, value in result.params.items()),
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


def words(name: str) -> str:
    """A column or an analysis as the beginning of a sentence."""
    return name.replace("_", " ").replace("-", " ").capitalize()


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_plain(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value) or "–"
    return "–" if value is None or value == "" else str(value)
