"""The registry: what is read from files, parameters and their types, a user's own file."""

import subprocess
import sys

import numpy as np
import pytest
from tiny_models import perturbed, tiny_config
from user_analyses import GOOD, one

import interp
from interp import registry
from interp.errors import AnalysisError
from interp.registry import Parameter


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    for name in registry.names():
        registry.get(name)  # a module is run once
    monkeypatch.setattr(registry, "_added", {})
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


def written(folder, text, name="mine.py"):
    path = folder / name
    path.write_text(text)
    return path


# --- what files say -------------------------------------------------------------------------


def test_a_file_is_read_and_not_run(tmp_path):
    path = written(tmp_path, GOOD + "\nraise RuntimeError('was run')\n")
    assert registry.add_file(path) == ["my-score", "plain"]
    mine = registry.described()["my-score"]
    assert (mine.meaning, mine.path) == ("Attention some tokens back.", path)
    assert mine.parameters == (
        Parameter("offset", int, 1, "how far back [tokens]"),
        Parameter("share", float, 0.5, ""),
        Parameter("strict", bool, True, "only real tokens"),
        Parameter("label", str, "x", ""),
        Parameter("effect", float, 0.2, "how far above its null a head has to score"),
    )
    assert mine.parameters[0].flag == "--offset"
    assert registry.names()["plain"] == ""


@pytest.mark.parametrize("name", registry.names())
def test_the_text_and_the_running_file_agree_on_parameters(name):
    told = registry.described()[name]
    analysis = registry.get(name)
    assert told.parameters == analysis.parameters
    assert told.meaning == (analysis.measure.__doc__ or "").split("\n")[0]
    assert told.meaning.endswith(".")


def test_reading_imports_nothing_heavy():
    code = (
        "import sys\nfrom interp import registry\nregistry.described()\n"
        "print(sorted({'torch', 'numpy', 'pandas', 'rich'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n", "mine.py: not a Python file: invalid syntax"),
        ("\0", "mine.py: not a Python file: source code string cannot contain null bytes"),
        ("x = 1\n", 'mine.py: no function in it stands under @interp.analysis("name", ...)'),
        ("", "mine.py: no function in it stands under"),
        (one("sinks"), "mine.py: there is an analysis 'sinks' already; rename this one"),
        (one("train"), "mine.py: 'train' is a verb of interp already; rename this one"),
        (one("My_Score"), "mine.py: an analysis is named by lower-case words with - between them"),
        (
            one(keywords="offset: int"),
            "mine.py: the parameter 'offset' should be annotated as int, float, str or bool, with",
        ),
        (one(keywords="offset=1"), "mine.py: the parameter 'offset' should be annotated as int,"),
        (one(keywords="offset: list = []"), "mine.py: the parameter 'offset' should be annotated"),
        (
            one(keywords="offset: int = 2 * N"),
            "mine.py: the default of 'offset' should be written out, as in = 0.3",
        ),
    ],
)
def test_a_file_that_is_no_analysis_is_refused(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, text).relative_to(tmp_path)
    before = registry.described()
    with pytest.raises(AnalysisError) as caught:
        registry.add_file(path, reserved={"train"})
    assert str(caught.value).startswith(message)
    assert registry.described() == before


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "mine.py"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(AnalysisError, match="not a Python file: 'utf-8' codec"):
        registry.add_file(path)
    with pytest.raises(AnalysisError, match="no such file"):
        registry.add_file(tmp_path / "none.py")
    with pytest.raises(AnalysisError, match="no such file"):
        registry.add_file(tmp_path)


def test_an_edited_file_is_read_and_run_anew(tmp_path):
    path = written(tmp_path, one(keywords="offset: int = 1"))
    registry.add_file(path)
    assert registry.get("my-score").params == {"offset": 1}
    path.write_text(one(keywords="offset: int = 22"))
    registry.add_file(path)
    assert registry.get("my-score").params == {"offset": 22}


def test_a_file_that_fails_or_makes_nothing_is_named(tmp_path):
    registry.add_file(written(tmp_path, one(top="import nowhere_at_all"), "fails.py"))
    with pytest.raises(AnalysisError, match=r"fails\.py: ModuleNotFoundError: No module named"):
        registry.get("my-score")
    text = one("other").replace("from interp import analysis", "analysis = lambda *a, **k: id")
    registry.add_file(written(tmp_path, text, "nothing.py"))
    with pytest.raises(AnalysisError, match=r"nothing\.py: running it made no analysis 'other'"):
        registry.get("other")


# --- parameters -----------------------------------------------------------------------------


def test_an_unknown_analysis_or_parameter_names_the_near_one():
    with pytest.raises(AnalysisError, match="no analysis 'sink'; did you mean 'sinks'"):
        registry.get("sink")
    with pytest.raises(AnalysisError, match="has no parameter 'efect'; did you mean 'effect'"):
        registry.get("induction").with_params({"efect": 0.2})


@pytest.mark.parametrize(
    ("kind", "given", "made"),
    [
        (int, 3, 3),
        (float, 3, 3.0),
        (float, 0.5, 0.5),
        (str, "a", "a"),
        (bool, False, False),
        (int, 0.5, None),
        (int, True, None),
        (float, True, None),
        (float, "1", None),
        (bool, 1, None),
        (str, 1, None),
    ],
)
def test_a_parameter_takes_its_own_type(kind, given, made):
    parameter = Parameter("x", kind, kind())
    if made is None:
        with pytest.raises(AnalysisError) as caught:
            parameter.checked(given)
        assert str(caught.value) == f"x = {given!r} should be of type {kind.__name__}"
    else:
        assert parameter.checked(given) == made
        assert type(parameter.checked(given)) is kind


def test_parameters_reach_the_function_and_the_results(tmp_path):
    registry.add_file(written(tmp_path, GOOD))
    model = perturbed(tiny_config())
    tokens = [[1, 2, 3, 4, 5, 6]]
    previous = interp.analyze(model, "previous-token", tokens).table["previous_token"]
    half = interp.analyze(model, "my-score", tokens)
    whole = interp.analyze(model, "my-score", tokens, share=1)
    assert np.allclose(whole.table["my_score"], previous, atol=1e-6)
    assert np.allclose(half.table["my_score"], previous / 2, atol=1e-6)
    assert (half.params["share"], whole.params["share"]) == (0.5, 1.0)
    assert registry.get("my-score").params["share"] == 0.5
