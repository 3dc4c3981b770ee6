"""Results as tidy tables: one row for each head, with units, standard errors, nulls, provenance.

Figures and reports are drawn from these, never from models. Files are strict JSON and CSV; heads
are two integer columns, because a label such as 1.10 reads back as the number 1.1.
"""

import importlib.metadata
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pandas as pd

from interp.errors import AnalysisError, ShapeError

Kind = TypeVar("Kind", bound="Result")

_HEAD = re.compile(r"(?:L?(\d+)[.H])(\d+|\*)", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Result:
    """A table of one analysis, and where it comes from.

    `score` is the main column, `unit` its unit; `<score>_se` is its standard error over independent
    sequences, `n` their number. `summary` has figures of the whole model by name.
    """

    table: pd.DataFrame
    score: str
    unit: str
    analysis: str
    model: str
    params: dict[str, object]
    inputs: str
    seed: int
    summary: dict[str, object]
    versions: dict[str, str] = field(default_factory=lambda: versions())

    @property
    def pruned_heads(self) -> list[tuple[int, int]]:
        """The layer and number of each head that the model has no longer."""
        return labelled_heads(self.params.get("pruned_heads"))

    def to_json(self) -> str:
        """Everything as strict JSON: missing numbers are null."""
        frames = {
            name: getattr(self, name).to_dict(orient="records") for name in ("table", *self._frames)
        }
        plain = {own.name: getattr(self, own.name) for own in fields(self)}
        return strict_json({**plain, **frames})

    def save(self, folder: Path | str) -> list[Path]:
        """Write `<name>.csv` and `<name>.json` into `folder`, and `<name>_<table>.csv` of a further
        table; returns the paths, the JSON file's second."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        name = self.analysis.replace("-", "_")
        csv, record = folder / f"{name}.csv", folder / f"{name}.json"
        write_text(csv, self.table.to_csv(index=False))
        write_text(record, self.to_json() + "\n")
        further = [folder / f"{name}_{own}.csv" for own in self._frames]
        for own, path in zip(self._frames, further, strict=True):
            write_text(path, getattr(self, own).to_csv(index=False))
        return [csv, record, *further]

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> dict[str, object]:
        """The figure of the result, for IPython and its notebooks."""
        from interp.views.drawing import notebook_bundle  # asked for by name, when it is shown

        return notebook_bundle(self)

    def _repr_html_(self) -> str:
        """The same for notebooks of other kinds, such as marimo, as HTML that needs no network."""
        from interp.views.drawing import notebook_html

        return notebook_html(self)

    @classmethod
    def load(cls: type[Kind], path: Path | str) -> Kind:
        """The result in a JSON file that `save` wrote.

        Raises: AnalysisError where the file is missing or is something else.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            _check_record(data)
            table = _frame(data.pop("table"))
            whole = cls._indices(table)
            if lacking := [name for name in whole if name not in table]:
                raise ValueError(f"its table has no {lacking[0]}")
            table = table.astype(dict.fromkeys(whole, int))
            if (table[whole] < 0).any(axis=None):
                raise ValueError("a layer or a head is below 0")
            frames = {name: _frame(data.pop(name)) for name in cls._frames}
            cls._check_whole({"table": table, **frames}, data["summary"])
            return cls(table=table, **frames, **cls._given(data))
        except FileNotFoundError:
            raise AnalysisError(f"{path}: no such file") from None
        except KeyError as error:
            raise AnalysisError(f"{path}: not {cls._kind}: it has no {error}") from None
        except (ValueError, TypeError, AttributeError, ShapeError) as error:
            raise AnalysisError(f"{path}: not {cls._kind}: {error}") from None

    _kind: ClassVar[str] = "a file of results"

    _frames: ClassVar[tuple[str, ...]] = ()
    """The names of further tables."""

    _columns: ClassVar[Mapping[str, str]] = {}
    """The columns, with spaces between, without which a table with rows is none of this kind."""

    _figures: ClassVar[str] = ""
    """The figures that the summary always has."""

    @classmethod
    def _check_whole(cls, frames: Mapping[str, pd.DataFrame], summary: Mapping[str, Any]) -> None:
        for name, columns in cls._columns.items():
            lacking = [own for own in columns.split() if own not in frames[name]]
            if lacking and len(frames[name]):
                raise ValueError(f"its {name} has no {lacking[0]}")
        if lacking := [own for own in cls._figures.split() if own not in summary]:
            raise ValueError(f"its summary has no {lacking[0]}")

    @classmethod
    def _given(cls, record: dict[str, Any]) -> dict[str, Any]:
        """What the file's own fields are to the constructor."""
        return record

    @classmethod
    def _indices(cls, table: pd.DataFrame) -> list[str]:
        """The columns of whole numbers, which every table of this kind has."""
        return []


@dataclass(frozen=True, eq=False)
class HeadScores(Result):
    """One analysis of every head.

    `table` has integer `layer` and `head`, then `<score>`, `<score>_se` (standard error over
    independent sequences), `<score>_null` (the same measure where there is nothing to find), `n`
    (sequences), and the analysis's own columns. `unit` is that of the score.
    """

    _kind: ClassVar[str] = "a head-score file"

    @classmethod
    def _indices(cls, table: pd.DataFrame) -> list[str]:
        return ["layer", "head"]

    def matrix(self, column: str | None = None) -> np.ndarray:
        """`[n_layers, n_heads]` values of a column, NaN for heads not in the table or pruned."""
        column = column or self.score
        if column not in self.table:
            raise AnalysisError(
                f"no column {column!r}; the table has {', '.join(self.table.columns)}"
            )
        layer, head = self.table["layer"].to_numpy(), self.table["head"].to_numpy()
        last = [(layer.max(), head.max()), *self.pruned_heads]
        n_layers, n_heads = np.max(last, axis=0) + 1
        grid = np.full((n_layers, n_heads), np.nan)
        grid[layer, head] = self.table[column].to_numpy()
        return grid

    def top(self, n: int = 10) -> pd.DataFrame:
        """The `n` heads with the highest score, highest first."""
        ordered = self.table.sort_values(
            [self.score, "layer", "head"], ascending=[False, True, True]
        )
        return ordered.head(n).reset_index(drop=True)


@dataclass(frozen=True, eq=False)
class SetScores(Result):
    """What was measured of sets of heads: pairs, layers, the first k of an order.

    The columns that say which set a row is of come first: `layer_a`, `head_a`, `layer_b`, `head_b`
    of pairs; `layer`; `removed` (how many), `layer` and `head` (the one removed last) and `order`
    of a removal curve.
    """

    _kind: ClassVar[str] = "a file of sets of heads"

    @classmethod
    def _indices(cls, table: pd.DataFrame) -> list[str]:
        names = ("layer_a", "head_a", "layer_b", "head_b", "layer", "removed")
        return [name for name in names if name in table]


def _frame(records: Any) -> pd.DataFrame:
    """A table from its records, in which a column of nulls is one of missing numbers."""
    return pd.DataFrame(records).fillna(np.nan).infer_objects()


def _check_record(record: dict[str, Any]) -> None:
    """Refuse a file whose fields are missing or of another kind.

    Raises: KeyError, TypeError, ShapeError.
    """
    kinds: dict[str, type] = {
        **dict.fromkeys(("score", "unit", "analysis", "model", "inputs"), str),
        **dict.fromkeys(("params", "summary", "versions"), dict),
        "table": list,
        "seed": int,
    }
    for name, kind in kinds.items():
        if name not in record and name != "versions":
            raise KeyError(name)
        if not isinstance(record.get(name, {}), kind):
            given = type(record[name]).__name__
            raise TypeError(f"{name} should be {kind.__name__}, got {given}")
    if pruned := record["params"].get("pruned_heads"):
        head_words(pruned)


def head_label(layer: int, head: int) -> str:
    """`5.1`: how heads are written."""
    return f"{layer}.{head}"


def head_labels(heads: Mapping[int, Iterable[int]]) -> list[str]:
    """The labels of some heads of each layer, as `params["pruned_heads"]` holds them."""
    return [head_label(layer, head) for layer in sorted(heads) for head in heads[layer]]


def labelled_heads(labels: object) -> list[tuple[int, int]]:
    """The layer and number of each head of a list of labels; none of anything else."""
    pairs = [str(label).split(".") for label in labels] if isinstance(labels, list) else []
    return [(int(layer), int(head)) for layer, head in pairs]


def parse_heads(
    words: str | Iterable[str], n_layers: int, n_heads: int, noun: str = "head"
) -> list[tuple[int, int]]:
    """The (layer, head) pairs that some text names, each once, in the order given.

    `5.1` and `L5H1` are layer 5 head 1, `1.10` is layer 1 head 10, `7.*` all heads of layer 7;
    commas and spaces separate. `noun` is what they are called: query heads or KV heads.

    Raises: ShapeError for anything else, or a head the model does not have.
    """
    heads: dict[tuple[int, int], None] = {}
    for layer, head in head_words(words, noun):
        if layer >= n_layers or (head is not None and head >= n_heads):
            word = f"{layer}.{'*' if head is None else head}"
            raise ShapeError(
                f"{noun} {word!r} is out of range: the model has layers 0 to {n_layers - 1} with "
                f"{noun}s 0 to {n_heads - 1}"
            )
        chosen = range(n_heads) if head is None else [head]
        heads.update(dict.fromkeys((layer, own) for own in chosen))
    return list(heads)


def head_words(words: str | Iterable[str], noun: str = "head") -> list[tuple[int, int | None]]:
    """Layer and head of each word that names heads, None for a whole layer, of whatever model.

    Raises: ShapeError for a word that is written otherwise, or none at all.
    """
    text = words if isinstance(words, str) else ",".join(words)
    found: list[tuple[int, int | None]] = []
    for word in re.split(r"[,\s]+", text.strip()):
        if not word:
            continue
        match = _HEAD.fullmatch(word)
        if match is None:
            raise ShapeError(f"{noun} {word!r}: written like 5.1, L5H1, or 5.* for a whole layer")
        found.append((int(match[1]), None if match[2] == "*" else int(match[2])))
    if not found:
        raise ShapeError("no head was named")
    return found


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    names = ("interp", "torch", "transformer-lens", "numpy")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def strict_json(value: object, indent: int | None = 2) -> str:
    """JSON that every parser accepts: numbers as numbers, missing and infinite ones as null."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False, ensure_ascii=False)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {_key(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(inner) for inner in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays, tensors of any dtype
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)


def _key(key: object) -> str:
    return ".".join(str(part) for part in key) if isinstance(key, tuple) else str(key)


def write_text(path: Path, text: str) -> None:
    """Write a whole file or none of it: filled aside, then published by one rename."""
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        # mkstemp's file is for its owner only; a result is as readable as its folder's others.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(scratch, 0o666 & ~umask)
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise
