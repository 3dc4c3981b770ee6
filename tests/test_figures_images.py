"""Figures as image files: with a browser, without one, without kaleido, with one that hangs."""

import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time

import pandas as pd
import pytest
from pages import NASTY
from PIL import Image

from interp.errors import AnalysisError
from interp.views.figures import images, style
from interp.views.figures.heads import head_heatmap
from interp.views.figures.images import save_images
from interp.views.figures.standalone import plain_words, standalone

BROWSERS = ("/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome")
with_browser = pytest.mark.skipif(
    not any(map(os.path.exists, BROWSERS)), reason="no Chromium is installed"
)


def drawn(title="Sink by head", **more):
    table = pd.DataFrame({"layer": [0, 0, 1, 1], "head": [0, 1] * 2, "sink": [0.0, 0.25, 0.5, 1.0]})
    return head_heatmap(table, "sink", title=title, **more)


# Words in the figure


def test_a_figure_alone_has_its_caption_and_notes_below_and_grows_by_them():
    figure = style.figure("A title", "a subtitle", "How to read it.", plot_height=100, notes=["N."])
    alone = standalone(figure)
    [words] = alone.layout.annotations
    assert words.text == "How to read it.<br>N."
    assert words.yshift < -figure.layout.margin.b
    assert alone.layout.height > figure.layout.height
    inner = alone.layout.height - alone.layout.margin.t - alone.layout.margin.b
    assert inner == 100
    assert figure.layout.annotations == ()


def test_long_words_wrap_without_losing_one_and_stay_text():
    told = f"{NASTY} " + "word " * 80
    alone = standalone(style.figure(told, told, told, plot_height=100, width=500))
    layout = alone.layout
    for text in (layout.title.text, layout.title.subtitle.text, layout.annotations[0].text):
        assert text.count("word") == 80
        lines = text.split("<br>")
        assert len(lines) > 2
        assert all("<" not in line for line in lines)
        assert not any(mark in text for mark in ("$x$", "%{z}", "</script>"))
    assert layout.height - layout.margin.t - layout.margin.b == 100


def test_a_users_own_figure_without_our_words_is_drawn_as_it_is():
    import plotly.graph_objects as go

    alone = standalone(go.Figure(go.Scatter(y=[1, 2]), layout={"title": "own", "meta": "x"}))
    assert alone.layout.title.text == "own"
    assert alone.layout.annotations == ()
    assert alone.layout.width == 900
    assert plain_words(alone) == ["own"]


def test_the_words_of_a_figure_read_as_they_were_given():
    figure = style.figure(NASTY, "s", "c", plot_height=10, notes=["n"])
    assert plain_words(figure) == [NASTY, "s", "c", "n"]


# Files


@with_browser
def test_a_png_has_twice_the_pixels_is_on_white_and_shows_the_map(tmp_path):
    figure = drawn()
    [path] = save_images([("Heads: L5/H1 <b>", figure)], tmp_path / "new", ["png"])
    assert path == tmp_path / "new" / "heads-l5-h1-b.png"
    image = Image.open(path).convert("RGB")
    alone = standalone(figure)
    assert image.size == (2 * alone.layout.width, 2 * alone.layout.height)
    assert image.getpixel((0, 0)) == image.getpixel((image.width - 1, image.height - 1))
    assert image.getpixel((0, 0)) == (255, 255, 255)
    colours = {colour for _, colour in image.getcolors(image.width * image.height)}
    for end in (style.SEQUENTIAL[0][1], style.SEQUENTIAL[-1][1]):
        assert tuple(bytes.fromhex(end[1:])) in colours
    # Nothing reaches the edge, where it would be cut off.
    edge = [image.getpixel((x, y)) for x in range(image.width) for y in (0, image.height - 1)]
    edge += [image.getpixel((x, y)) for y in range(image.height) for x in (0, image.width - 1)]
    assert set(edge) == {(255, 255, 255)}
    assert [own.name for own in path.parent.iterdir()] == [path.name]


@with_browser
def test_the_same_figure_gives_the_same_bytes_twice_and_names_that_come_again_are_numbered(
    tmp_path,
):
    figures = [("a", drawn()), ("A", drawn()), ("", drawn(title="x"))]
    paths = save_images(figures, tmp_path, ["png", "svg"])
    assert [path.name for path in paths] == [
        *("a.png", "a.svg", "a-2.png", "a-2.svg"),
        *("figure.png", "figure.svg"),
    ]
    for end in ("png", "svg"):
        first, again = ((tmp_path / f"{name}.{end}").read_bytes() for name in ("a", "a-2"))
        assert first == again
        assert first != (tmp_path / f"figure.{end}").read_bytes()


@with_browser
def test_an_svg_holds_the_words_as_text_and_no_address_to_fetch(tmp_path):
    [path] = save_images([("a", drawn(title="<b>T</b> $x$"))], tmp_path, ["svg"])
    text = path.read_text(encoding="utf-8")
    assert "<b>" not in text
    assert ">&#60;b&#62;T&#60;/b&#62; $x$</text>" in text
    assert "One cell a head, the first layer at the top" in text
    assert not re.search(r'href="http', text)


@with_browser
def test_images_are_drawn_where_an_event_loop_runs_already(tmp_path):
    import asyncio

    async def notebook():
        return save_images([("a", drawn())], tmp_path, ["png"])

    [path] = asyncio.run(notebook())
    assert path.stat().st_size > 1000


def test_nothing_to_draw_needs_no_browser(tmp_path):
    assert save_images([], tmp_path / "none", ["png"]) == []
    assert save_images([("a", drawn())], tmp_path / "none", []) == []
    assert not (tmp_path / "none").exists()


def test_another_format_is_refused(tmp_path):
    with pytest.raises(AnalysisError, match="format 'gif': known are png, svg"):
        save_images.__wrapped__([("a", drawn())], tmp_path, ["gif"])


# Without a browser


def refused(tmp_path):
    started = time.monotonic()
    with pytest.raises(AnalysisError) as told:
        save_images([("a", drawn())], tmp_path / "out", ["png"])
    assert "\n" not in str(told.value)
    assert not (tmp_path / "out").exists()
    return str(told.value), time.monotonic() - started


def test_without_kaleido_it_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "kaleido", None)
    told, _ = refused(tmp_path)
    assert told == "images need kaleido, which is not installed: pip install 'interp[images]'"


def test_without_a_browser_it_says_so_at_once(tmp_path, monkeypatch):
    from choreographer.browsers.chromium import Chromium

    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("BROWSER_PATH", raising=False)
    monkeypatch.setattr(Chromium, "find_browser", lambda **_: None)
    told, seconds = refused(tmp_path)
    assert told.startswith("images need Chromium or Chrome, and none was found")
    assert seconds < 10


def test_a_browser_named_where_there_is_none_is_named_again(tmp_path, monkeypatch):
    monkeypatch.setenv("BROWSER_PATH", "/nowhere/chrome")
    told, seconds = refused(tmp_path)
    assert told == (
        "images need Chromium or Chrome, and none was found: BROWSER_PATH is /nowhere/chrome"
    )
    assert seconds < 10


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_browser_that_does_not_answer_is_given_up_and_ended(tmp_path, monkeypatch):
    started = tmp_path / "pid"
    slow = script(tmp_path / "chrome", f"echo $$ > {started}\ntrap '' TERM\nexec sleep 600")
    monkeypatch.setenv("BROWSER_PATH", slow)
    monkeypatch.setattr(images, "PATIENCE", 2.0)
    monkeypatch.setattr(images, "_CLOSING", 1.0)
    told, seconds = refused(tmp_path)
    assert told == "images: the browser did not draw them: no answer in 2 s to start"
    assert seconds < 15
    pid = started.read_text().strip()
    alive = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True)
    assert alive.stdout.strip()[:1] in ("", "Z")
    assert not any(own.name == "images" for own in threading.enumerate())


def test_a_browser_that_fails_at_once_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("BROWSER_PATH", script(tmp_path / "chrome", "exit 1"))
    told, seconds = refused(tmp_path)
    assert told.startswith("images: the browser did not draw them: ")
    assert seconds < 15


def test_an_interrupt_ends_the_browser_too(tmp_path):
    started = tmp_path / "pid"
    slow = script(tmp_path / "chrome", f"echo $$ > {started}\ntrap '' TERM\nexec sleep 600")
    code = (
        "import plotly.graph_objects as go; from interp.views.figures import images;"
        "images._CLOSING = 1.0;"
        f"images.save_images([('a', go.Figure())], {str(tmp_path / 'out')!r}, ['png'])"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "BROWSER_PATH": slow},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (started.exists() and started.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    _, told = child.communicate(timeout=20)
    assert told.rstrip().endswith("KeyboardInterrupt")
    pid = started.read_text().strip()
    alive = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True)
    assert alive.stdout.strip()[:1] in ("", "Z")
