"""The page on multi-head attention: its Python prints what it says, its commands and links work."""

import contextlib
import io
import re
import shlex
import shutil
from pathlib import Path

import hf_models
import pytest
from PIL import Image
from tiny_tokenizers import gpt2_like
from typer.testing import CliRunner

from interp.cli import app
from interp.views.figures import images

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "multi-head-attention.md"
MADE = ("kv_cache", "induction_head")
"""Images that the page's Python draws; those beside the page have 256 colours, to be small."""

has_browser = any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))


def fenced():
    """The language and the text of every block, in order."""
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def with_output():
    """Every block that is not output, with the output that stands below it, or nothing."""
    found = fenced()
    below = [*found[1:], ("", "")]
    return [
        (language, block, after if kind == "text" else "")
        for (language, block), (kind, after) in zip(found, below, strict=True)
        if language != "text"
    ]


def commands():
    """The words of each command without `interp`."""
    return [
        shlex.split(line)[1:]
        for language, block in fenced()
        if language == ""
        for line in block.splitlines()
    ]


def told_by(words):
    """The lines that the page gives as a command's output, which may be some of them."""
    text = PAGE.read_text(encoding="utf-8")
    alone = f"```\n{shlex.join(['interp', *words])}\n```\n"
    behind = text.partition(alone)[2]
    found = re.match(r"(?:\n[^`\n]*)?\n*```text\n(.*?)^```$", behind, re.MULTILINE | re.DOTALL)
    return found[1].splitlines() if found else []


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Runs the page's Python from top to bottom; what each block printed, what was to be drawn."""
    folder = tmp_path_factory.mktemp("repository")
    (folder / "reports").symlink_to(ROOT / "reports")
    printed, drawn = [], []

    def kept(figures, to, formats):
        drawn.extend((name, figure, Path(to), tuple(formats)) for name, figure in figures)

    names = {}
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "save_images", kept)
        for number, (language, block, output) in enumerate(with_output()):
            if language == "python":
                out = io.StringIO()
                with contextlib.redirect_stdout(out):
                    exec(compile(block, f"<block {number} of the page>", "exec"), names)
                printed.append((out.getvalue(), output))
    return printed, drawn


def test_the_python_of_the_page_prints_what_stands_below_it(ran):
    printed, _ = ran
    assert len(printed) >= 20
    for actual, told in printed:
        assert actual == told


def test_the_page_draws_the_images_that_it_shows(ran):
    _, drawn = ran
    shown = re.findall(r"!\[[^]]+\]\((\w+)\.png\)", PAGE.read_text(encoding="utf-8"))
    assert [name for name, *_ in drawn] == list(MADE)
    # The times are those of a machine, and are drawn by the benchmark.
    assert [name for name in shown if name != "attention_speed"] == [*MADE, "phase_change"]
    for name, figure, folder, formats in drawn:
        assert len(figure.data) >= 1
        assert (folder, formats) == (Path("docs"), ("png",))
        assert (ROOT / "docs" / f"{name}.png").stat().st_size < 80_000


@pytest.mark.skipif(not has_browser, reason="no Chromium is installed")
def test_the_images_beside_the_page_are_as_large_as_those_that_it_draws(ran, tmp_path):
    _, drawn = ran
    paths = images.save_images([(name, figure) for name, figure, *_ in drawn], tmp_path, ["png"])
    for path in paths:
        with Image.open(path) as new, Image.open(ROOT / "docs" / path.name) as beside:
            assert new.size == beside.size


def test_the_induction_head_set_by_hand_attends_behind_the_first_copy(ran):
    _, drawn = ran
    (figure,) = (figure for name, figure, *_ in drawn if name == "induction_head")
    rows = figure.data[0].z
    # 1 5 9 12 7 3 5 9 12 7: the second 5 is token 6, and what followed the first is token 2.
    assert [round(rows[query][query - 4], 2) for query in (6, 7, 8, 9)] == [1.0] * 4


def test_the_page_gives_the_output_of_two_commands():
    assert [len(told_by(words)) for words in commands()[:2]] == [4, 3]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_the_commands_of_the_page_run_and_print_what_stands_below(
    words, tmp_path, monkeypatch, tiny_folder
):
    monkeypatch.chdir(tmp_path)
    # A tiny model in the real one's place, and lengths that fit it.
    known = {"smollm2-135m": str(tiny_folder), "64": "12", "50": "5", "100": "8"}
    result = CliRunner().invoke(app, [known.get(word, word) for word in words])
    assert result.exit_code == 0, result.output
    told = told_by(words)
    assert [line for line in result.stdout.splitlines() if line in told] == told


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    """A folder of a tiny GPT-2 that reads text."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    hf_models.gpt2(vocab_size=270, bos_token_id=0, eos_token_id=0).save_pretrained(folder)
    gpt2_like().save_pretrained(folder)
    return folder


def test_files_and_pages_that_the_page_names_exist():
    text = PAGE.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    linked = re.findall(r"\]\(([\w./-]+)\)", prose)
    named = re.findall(r"`((?:interp|reports|experiments)/[\w./-]+)`", text)
    assert len(linked) >= 7
    assert len(named) >= 8
    for path in linked:
        assert (PAGE.parent / path).exists(), path
    for path in named:
        assert (ROOT / path).exists(), path
    (benchmark,) = re.findall(r"`python ([\w./]+)`", text)
    assert (ROOT / benchmark).is_file()
