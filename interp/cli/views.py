"""Verbs that show: every head on one text, and the report of folders of results."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from interp.cli.analysis_command import show_result
from interp.cli.app import app
from interp.cli.options import (
    Backend,
    Bos,
    Device,
    Dtype,
    Format,
    Model,
    Out,
    Seed,
    check_folder,
    load_named_model,
)
from interp.errors import AnalysisError, ConfigError

if TYPE_CHECKING:
    from interp.views.pages.page import Page


@app.command()
def attend(
    model: Model,
    text: Annotated[str | None, typer.Argument(help="the text, in quotes")] = None,
    file: Annotated[
        Path | None, typer.Option("--text", help="a text file instead, read whole")
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="integer array of ids in a .npy file, taken as given")
    ] = None,
    index: Annotated[
        int | None, typer.Option(min=0, help="which sequence of --tokens, from 0")
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(help="heads whose pattern is kept, such as 5.1,7.*; all that fit by default"),
    ] = None,
    bos: Bos = None,
    seed: Seed = 0,
    out: Out = None,
    output: Format = "table",
    opened: Annotated[
        bool, typer.Option("--open", help="open the page in the browser of this machine")
    ] = False,
    backend: Backend = "native",
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """Every head's pattern on one text, with its scores, into reports/attend-MODEL unless --out."""
    given = _given_text(text, file, tokens, index, bos)
    from interp.tables import head_words

    if heads is not None:
        head_words(heads)  # a word that is no head is told before a model is read
    folder = out or Path("reports") / f"attend-{Path(model).name or 'model'}"
    check_folder(folder)
    loaded = load_named_model(model, device, backend, dtype)
    from interp.attending import attend as look
    from interp.views.terminal.scores import print_patterns

    patterns = look(loaded, given, heads=heads, index=index, prepend_bos=bos, seed=seed)
    show_result(patterns, print_patterns, output, folder)
    if opened:
        typer.launch(str(folder / f"{patterns.analysis}.html"))


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="folders that commands wrote into")],
    out: Annotated[
        Path | None,
        typer.Option(help="where the page goes: a folder, or a path that ends in .html"),
    ] = None,
    png: Annotated[bool, typer.Option("--png", help="its figures as PNG too (kaleido)")] = False,
    svg: Annotated[bool, typer.Option("--svg", help="its figures as SVG too (kaleido)")] = False,
    cdn: Annotated[
        bool, typer.Option("--cdn", help="a small page that fetches plotly.js from the network")
    ] = False,
    stamp: Annotated[bool, typer.Option("--stamp", help="the time of writing, below")] = False,
) -> None:
    """One page of everything in these folders: report.html, in the folder that holds them all."""
    from interp.views.report import FILE, report_page, report_path, write_page

    page = report_page(*folders)
    path = report_path(*folders) if out is None else out
    if path.suffix.lower() not in (".html", ".htm"):
        path = path / FILE
    check_folder(path.parent)
    write_page(page, path, cdn=cdn, stamp=_now() if stamp else "")
    typer.echo(str(path))
    formats: list[Literal["png", "svg"]] = []
    if png:
        formats.append("png")
    if svg:
        formats.append("svg")
    if formats:
        _save_images(page, path, formats)


def _given_text(
    text: str | None, file: Path | None, tokens: Path | None, index: int | None, bos: bool | None
) -> Any:
    """The text or the ids, from the one place that was named."""
    sources = {"TEXT": text, "--text": file, "--tokens": tokens}
    named = [name for name, value in sources.items() if value is not None]
    if len(named) != 1:
        told = " and ".join(named) if named else "nothing to look at"
        raise ConfigError(
            f"{told}: give one of a text in quotes, --text FILE, and --tokens FILE.npy"
        )
    if text == "":
        raise ConfigError("the text is empty")
    for path in (file, tokens):
        if path is not None and not path.is_file():
            raise ConfigError(f"{path}: no such file")
    if tokens is None:
        if index is not None:
            raise ConfigError("--index chooses a sequence of --tokens, and none were given")
        if file is None:
            return text
        from interp.data.corpus import read_text

        return read_text(file)
    if bos is not None:
        raise ConfigError(
            f"--tokens and --{'' if bos else 'no-'}bos: ids are taken exactly as given"
        )
    from interp.data.token_file import token_file

    return token_file(tokens)


def _now() -> str:
    import datetime

    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"


def _save_images(page: "Page", path: Path, formats: list[Literal["png", "svg"]]) -> None:
    """The page's figures beside it, in figures/, each named by its section and place."""
    from interp.views.figures.images import save_images
    from interp.views.pages.page import Plot

    figures = [
        (f"{section.heading}-{place}", part.figure)
        for section in page.sections
        for place, part in enumerate((p for p in section.parts if isinstance(p, Plot)), start=1)
    ]
    if not figures:
        raise AnalysisError("the report has no figure to export")
    for image in save_images(figures, path.parent / "figures", formats):
        typer.echo(str(image))
