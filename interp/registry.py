"""The one registry of analyses, which serves Python, the command line and reports.

An analysis is one file in `interp/analyses/`: a function that reduces one layer's attention to one
number for each sequence and head, under the `analysis` decorator. `interp.measure` feeds it
sequences, averages, and adds standard errors, the null and provenance. Names and meanings are read
from the files' text, so that listing them imports nothing.
"""

import ast
import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from interp.errors import AnalysisError

if TYPE_CHECKING:
    from torch import Tensor

    from interp.data.repeated import TokenBatch
    from interp.models.watch import LayerAttention

Null = Literal["unrepeated", "uniform"]
_FOLDER = Path(__file__).parent / "analyses"


@dataclass(frozen=True)
class Analysis:
    """A named measure of heads.

    `null` says what stands for chance: the same measure on sequences in which nothing repeats, or
    on attention spread evenly over the allowed keys.
    """

    name: str
    unit: str
    null: Null
    measure: Callable[["LayerAttention", "TokenBatch"], Mapping[str, "Tensor"]]

    @property
    def score(self) -> str:
        """The main column: the name as an identifier."""
        return self.name.replace("-", "_")


_registered: dict[str, Analysis] = {}


def analysis(name: str, *, unit: str, null: Null) -> Callable[[Callable], Callable]:
    """Register a measure: `(LayerAttention, TokenBatch) -> {column: [batch, n_heads]}`.

    The first column has to be the analysis's own name, with `_` for `-`. A NaN leaves its sequence
    out of the mean.
    """

    def register(measure: Callable) -> Callable:
        _registered[name] = Analysis(name, unit, null, measure)
        return measure

    return register


def names() -> dict[str, str]:
    """Every analysis and its one-line meaning, by reading the files, not by importing them."""
    found = {}
    for path in sorted(_FOLDER.glob("[!_]*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                match decorator:
                    case ast.Call(
                        func=ast.Name(id="analysis"), args=[ast.Constant(value=str(name)), *_]
                    ):
                        found[name] = (ast.get_docstring(node) or "").split("\n")[0]
    return found


def get(name: str) -> Analysis:
    """The analysis of that name, importing its file.

    Raises: AnalysisError for an unknown name, with near ones.
    """
    if name not in _registered:
        known = names()
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise AnalysisError(f"no analysis {name!r}; {hint}known: {', '.join(known)}")
        module = name.replace("-", "_")
        if not (_FOLDER / f"{module}.py").is_file():
            raise AnalysisError(f"the analysis {name!r} should be in interp/analyses/{module}.py")
        importlib.import_module(f"interp.analyses.{module}")
    return _registered[name]
