"""Figures as PNG and SVG files, drawn by kaleido with the Chromium or Chrome of the machine.

One invariant: it ends. A browser that is missing, or does not answer, costs a line of text.
"""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import plotly.graph_objects as go

from interp.errors import AnalysisError
from interp.views.figures.standalone import standalone

Format = Literal["png", "svg"]

PATIENCE = 30.0
"""Seconds that the browser has to start, and then for each image."""

SCALE = 2
"""Pixels of a PNG for each pixel of the figure."""

_CLOSING = 5.0

_INK = "#30363d"


def save_images(
    figures: Sequence[tuple[str, go.Figure]], folder: Path | str, formats: Sequence[Format]
) -> list[Path]:
    """Write each figure, with its title, caption and notes in it, into `folder`; the paths.

    A file is called by the figure's name, without what file systems mind, and numbered where the
    name comes again. Images are as wide as the figure says, or 900 pixels, on white; PNGs have
    twice as many pixels. All are drawn before the first is written.

    Raises:
        AnalysisError: a format is another, kaleido is not installed, there is no Chromium or Chrome
            (also looked for in the environment variable BROWSER_PATH), or it does not answer.
    """
    for own in formats:
        if own not in get_args(Format):
            raise AnalysisError(f"format {own!r}: known are {', '.join(get_args(Format))}")
    if not figures or not formats:
        return []
    names = _file_names([name for name, _ in figures])
    jobs = [
        (f"{name}.{own}", _on_white(figure), own)
        for name, (_, figure) in zip(names, figures, strict=True)
        for own in formats
    ]
    images = _drawn([(figure, own) for _, figure, own in jobs])
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for (name, _, _), image in zip(jobs, images, strict=True):
        paths.append(folder / name)
        scratch = folder / f".{name}.part"
        scratch.write_bytes(image)
        scratch.replace(paths[-1])
    return paths


def _file_names(names: Sequence[str]) -> list[str]:
    taken: dict[str, int] = {}
    found = []
    for name in names:
        safe = re.sub(r"[^\w.-]+", "-", name.lower(), flags=re.ASCII).strip("-.")[:80] or "figure"
        taken[safe] = taken.get(safe, 0) + 1
        found.append(safe if taken[safe] == 1 else f"{safe}-{taken[safe]}")
    return found


def _on_white(figure: go.Figure) -> go.Figure:
    whole = standalone(figure)
    whole.update_layout(paper_bgcolor="#ffffff", plot_bgcolor="#ffffff", font={"color": _INK})
    return whole


def _drawn(jobs: Sequence[tuple[go.Figure, Format]]) -> list[bytes]:
    """The bytes of each image, from one browser."""
    try:
        from choreographer.errors import ChromeNotFoundError
        from kaleido import Kaleido  # type: ignore[import-untyped]
    except ImportError:
        raise AnalysisError(
            "images need kaleido, which is not installed: pip install 'interp[images]'"
        ) from None
    images: list[bytes] = []
    faults: list[BaseException] = []
    ended = threading.Event()
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def job() -> list[bytes]:
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task))
        return await _all(Kaleido, jobs)

    def work() -> None:
        try:
            images.extend(asyncio.run(job()))
        except BaseException as fault:
            faults.append(fault)
        finally:
            ended.set()

    # A thread of its own: a notebook runs an event loop in this one.
    thread = threading.Thread(target=work, name="images", daemon=True)
    thread.start()
    try:
        ended.wait()  # an interrupted join takes the thread for ended
    except BaseException:  # Ctrl-C: the browser would outlive this process
        for loop, task in running:
            with contextlib.suppress(RuntimeError):  # it ended by itself meanwhile
                loop.call_soon_threadsafe(task.cancel)
        ended.wait(4 * _CLOSING)
        raise
    thread.join()
    if not faults:
        return images
    if isinstance(faults[0], ChromeNotFoundError):
        given = os.environ.get("BROWSER_PATH")
        where = f"BROWSER_PATH is {given}" if given else "install one, or name it in BROWSER_PATH"
        raise AnalysisError(f"images need Chromium or Chrome, and none was found: {where}")
    if isinstance(faults[0], Exception):
        told = (str(faults[0]) or type(faults[0]).__name__).splitlines()[0]
        raise AnalysisError(f"images: the browser did not draw them: {told}")
    raise faults[0]


async def _all(kind: Any, jobs: Sequence[tuple[go.Figure, Format]]) -> list[bytes]:
    # MathJax would be fetched from the network; no text of ours is a formula.
    browser = kind(mathjax=False, timeout=None)
    opening = asyncio.ensure_future(browser.open())
    images: list[bytes] = []
    try:
        async with _in_time("start"):
            await asyncio.shield(opening)
        for figure, own in jobs:
            layout = figure.layout
            size = {"width": layout.width, "height": layout.height}
            scale = SCALE if own == "png" else 1
            async with _in_time("draw a figure"):
                image = await browser.calc_fig(figure, {"format": own, "scale": scale, **size})
            images.append(_settled(image) if own == "svg" else image)
    finally:
        await _end(browser, opening, at_once=len(images) < len(jobs))
    return images


@contextlib.asynccontextmanager
async def _in_time(what: str) -> Any:
    """Give up after a while, whatever the cancelled call makes of it."""
    try:
        async with asyncio.timeout(PATIENCE) as limit:
            yield
    except Exception:
        if limit.expired():
            raise TimeoutError(f"no answer in {PATIENCE:g} s to {what}") from None
        raise


async def _end(browser: Any, opening: asyncio.Future[Any], *, at_once: bool) -> None:
    """Close the browser, and end what is left of it where it does not close, or `at_once`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CLOSING):
            # A process that has just been asked for comes all the same, and nobody would know it.
            while not opening.done() and not hasattr(browser, "subprocess"):
                await asyncio.sleep(0.02)
    process = getattr(browser, "subprocess", None)
    if at_once and process is not None:
        _kill(process)
    opening.cancel()
    await asyncio.wait([opening], timeout=_CLOSING)
    if opening.done() and not opening.cancelled():
        opening.exception()  # told already; unread it would be told again
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_CLOSING):
            await browser.close()
    if process is not None:
        _kill(process)
        process.wait()


def _kill(process: subprocess.Popen[Any]) -> None:
    # The browser is the child of a process that leads a group, and may outlive it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def _settled(image: bytes) -> bytes:
    """The SVG with plotly's random id replaced, so that one figure gives the same bytes twice."""
    text = image.decode("utf-8")
    found = re.search(r'id="defs-([0-9a-f]{6})"', text)
    return (text.replace(found[1], "figure") if found else text).encode("utf-8")
