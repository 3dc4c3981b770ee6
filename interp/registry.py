"""The one registry of analyses, which serves Python, the command line and reports.

An analysis is one file: a function that reduces one layer's attention to one number for each
sequence and head, under the `analysis` decorator. Those in `interp/analyses/` are known by
themselves; a user's own file becomes known by `add_file`. `interp.measure` feeds the function
sequences, averages, and adds standard errors, the null, the heads it selects, and provenance.

Names, meanings and parameters are read from the files' text, so that listing them imports nothing.
"""

import ast
import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from interp.errors import AnalysisError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from interp.data.drawing import Drawing

Null = Literal["unrepeated", "uniform", "own"]
_FOLDER = Path(__file__).parent / "analyses"
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Parameter:
    """One of an analysis's own settings: a keyword of its function, a flag of its command."""

    name: str
    type: type
    default: object
    meaning: str = ""

    @property
    def flag(self) -> str:
        """As the command line has it."""
        return "--" + self.name.replace("_", "-")

    def checked(self, value: object) -> object:
        """The value, as what the parameter should be.

        Raises: AnalysisError where it is something else.
        """
        if self.type is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if type(value) is not self.type:
            raise AnalysisError(f"{self.name} = {value!r} should be of type {self.type.__name__}")
        return value


@dataclass(frozen=True)
class Description:
    """What the text of a file says of an analysis."""

    name: str
    meaning: str
    path: Path
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class Found:
    """What an analysis measured on all sequences, as its `finish` gets it.

    `columns` are `[layer, sequence, n_heads, ...]`, where a pruned head has NaN, -1 in columns of
    integers and False in those of truths; `token_text` says how an id is shown.
    """

    columns: Mapping[str, "np.ndarray"]
    params: Mapping[str, object]
    token_text: Callable[[int], str]


Finish = Callable[
    [Found], tuple[Mapping[str, "np.ndarray | list[list[object]]"], Mapping[str, object]]
]


@dataclass(frozen=True)
class Analysis:
    """A named measure of heads, as `analysis` describes it."""

    name: str
    unit: str
    null: Null
    measure: Callable[..., Mapping[str, "Tensor"]]
    noun: str | None = None
    drawing: "Drawing | None" = None
    finish: Finish | None = None
    parameters: tuple[Parameter, ...] = ()
    params: Mapping[str, object] = field(default_factory=dict)

    @property
    def score(self) -> str:
        """The main column: the name as an identifier."""
        return self.name.replace("-", "_")

    def with_params(self, given: Mapping[str, object]) -> "Analysis":
        """The same analysis with some of its parameters set.

        Raises: AnalysisError for a parameter it does not have, or a value of another type.
        """
        known = {parameter.name: parameter for parameter in self.parameters}
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise AnalysisError(
                    f"{self.name} has no parameter {name!r}; {hint}it has "
                    f"{', '.join(known) or 'none'}"
                )
        checked = {name: known[name].checked(value) for name, value in given.items()}
        return replace(self, params={**self.params, **checked})

    @property
    def arguments(self) -> dict[str, object]:
        """The parameters that the function itself takes."""
        own = inspect.signature(self.measure).parameters
        return {name: value for name, value in self.params.items() if name in own}


_registered: dict[str, Analysis] = {}
_added: dict[str, Description] = {}


def analysis(
    name: str,
    *,
    unit: str,
    null: Null,
    noun: str | None = None,
    effect: float | None = None,
    drawing: "Drawing | None" = None,
    finish: Finish | None = None,
) -> Callable[[Callable], Callable]:
    """Register a measure, which makes `{column: [batch, n_heads]}` of one layer's attention.

    It is called as `measure(LayerAttention, TokenBatch, **parameters)`. The first column has to be
    the analysis's own name, with `_` for `-`; the others are averaged beside it. A NaN leaves its
    sequence out of the mean. Keyword-only arguments with defaults (`epsilon: Annotated[float, "what
    it is"] = 0.3`) are parameters, and flags of the command line.

    `null` says what stands for chance: the same measure on sequences in which nothing repeats; on
    attention spread evenly over the allowed keys; or the function's own column `<score>_null`.

    `noun` is what a head with a high score is called, and `effect` how far above the null it has to
    be for that; it becomes a parameter too. `drawing` says which random tokens it is defined on,
    repeated ones by default. `finish` makes more of all sequences than means: columns for the table
    `[layer, n_heads]`, and figures of the whole model. Columns with further axes are for it alone.
    """

    def register(measure: Callable) -> Callable:
        parameters = list(_own_parameters(measure))
        if effect is not None:
            parameters.append(_effect(effect))
        _registered[name] = Analysis(
            name,
            unit,
            null,
            measure,
            noun=noun,
            drawing=drawing,
            finish=finish,
            parameters=tuple(parameters),
            params={parameter.name: parameter.default for parameter in parameters},
        )
        return measure

    return register


def _effect(default: float) -> Parameter:
    return Parameter("effect", float, default, "how far above its null a head has to score")


def _own_parameters(measure: Callable) -> Iterable[Parameter]:
    for argument in inspect.signature(measure, eval_str=True).parameters.values():
        if argument.kind is argument.KEYWORD_ONLY:
            kind = getattr(argument.annotation, "__origin__", argument.annotation)
            words = getattr(argument.annotation, "__metadata__", ("",))
            yield Parameter(argument.name, kind, argument.default, str(words[0]))


# --- what the files say ---------------------------------------------------------------------------


def described() -> dict[str, Description]:
    """Every analysis by name, by reading the files, not by importing them."""
    found: dict[str, Description] = {}
    for path in sorted(_FOLDER.glob("[!_]*.py")):
        found |= _read(path)
    return found | _added


def names() -> dict[str, str]:
    """Every analysis and its one-line meaning."""
    return {name: description.meaning for name, description in described().items()}


def add_file(path: Path, reserved: Collection[str] = ()) -> list[str]:
    """Make the analyses of a user's own file known; returns their names. It is not run yet.

    A file that was added before is read anew. `reserved` names are taken by something else.

    Raises: AnalysisError for a file that is missing, is not Python, holds no analysis, or one
    whose name cannot be a command's or is taken.
    """
    if not path.is_file():
        raise AnalysisError(f"{path}: no such file")
    try:
        found = _read(path)
    except (SyntaxError, ValueError) as error:
        raise AnalysisError(f"{path}: not a Python file: {error}") from None
    if not found:
        raise AnalysisError(f'{path}: no function in it stands under @interp.analysis("name", ...)')
    known = described()
    for name in found:
        if not _NAME.fullmatch(name):
            raise AnalysisError(
                f"{path}: an analysis is named by lower-case words with - between them, "
                f"not {name!r}"
            )
        if name in known and known[name].path.resolve() != path.resolve():
            raise AnalysisError(f"{path}: there is an analysis {name!r} already; rename this one")
        if name in reserved:
            raise AnalysisError(f"{path}: {name!r} is a verb of interp already; rename this one")
    for name in found:
        _registered.pop(name, None)
    _added.update(found)
    return list(found)


def _read(path: Path) -> dict[str, Description]:
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8"), filename=str(path)).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            match decorator:
                case ast.Call(
                    func=ast.Name(id="analysis") | ast.Attribute(attr="analysis"),
                    args=[ast.Constant(value=str(name)), *_],
                    keywords=keywords,
                ):
                    meaning = (ast.get_docstring(node) or "").split("\n")[0]
                    parameters = [
                        _read_parameter(path, argument, default)
                        for argument, default in zip(
                            node.args.kwonlyargs, node.args.kw_defaults, strict=True
                        )
                    ]
                    for keyword in keywords:
                        if keyword.arg == "effect":
                            parameters.append(_effect(float(ast.literal_eval(keyword.value))))
                    found[name] = Description(name, meaning, path, tuple(parameters))
    return found


_TYPES: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}


def _read_parameter(path: Path, argument: ast.arg, default: ast.expr | None) -> Parameter:
    meaning = ""
    annotation = argument.annotation
    match annotation:
        case ast.Subscript(
            value=ast.Name(id="Annotated"),
            slice=ast.Tuple(elts=[inner, ast.Constant(value=str(words)), *_]),
        ):
            annotation, meaning = inner, words
    kind = _TYPES.get(annotation.id) if isinstance(annotation, ast.Name) else None
    if kind is None or default is None:
        raise AnalysisError(
            f"{path}: the parameter {argument.arg!r} should be annotated as int, float, str or "
            "bool, with a default"
        )
    try:
        return Parameter(argument.arg, kind, kind(ast.literal_eval(default)), meaning)
    except (ValueError, TypeError):
        raise AnalysisError(
            f"{path}: the default of {argument.arg!r} should be written out, as in = 0.3"
        ) from None


def get(name: str) -> Analysis:
    """The analysis of that name, importing its file.

    Raises: AnalysisError for an unknown name, with near ones, or a user's file that fails.
    """
    if name in _registered:  # a probe asks at every step: no file is read again
        return _registered[name]
    known = described()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise AnalysisError(f"no analysis {name!r}; {hint}known: {', '.join(known)}")
    path = known[name].path
    if path.parent == _FOLDER:
        importlib.import_module(f"interp.analyses.{path.stem}")
    else:
        _run(path)
    if name not in _registered:
        raise AnalysisError(f"{path}: running it made no analysis {name!r}")
    return _registered[name]


def _run(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(f"interp_analysis_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses and pickles look there
    try:
        spec.loader.exec_module(module)
    except AnalysisError:
        raise
    except Exception as error:
        raise AnalysisError(f"{path}: {type(error).__name__}: {error}") from error
