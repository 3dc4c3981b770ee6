"""The verb that writes text."""

from typing import Annotated

import typer

from interp.cli.app import app
from interp.cli.options import Device, Dtype, Model, load_named_model
from interp.errors import ConfigError


@app.command()
def generate(
    model: Model,
    text: Annotated[str | None, typer.Argument(help="what it goes on from; or --ids")] = None,
    ids: Annotated[
        str | None, typer.Option(help="token ids instead of text, such as 5,7,11")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="new tokens at most")] = 50,
    temperature: Annotated[
        float, typer.Option(min=0, help="0: the most probable token; above: drawn")
    ] = 0.0,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="draw among so many tokens at most")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="and of those that hold this probability")
    ] = None,
    stop: Annotated[
        str | None,
        typer.Option(help="ids that end it, such as 0,2; the tokenizer's EOS unless given"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="seed of what is drawn")] = 0,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="keep keys and values, or run all again")
    ] = True,
    sinks: Annotated[
        int | None, typer.Option(min=0, help="first tokens that a --window keeps beside the latest")
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="keep the latest so many tokens: text without an end")
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """Text that a model goes on with, token by token.

    The text is printed with what it went on from, without a BOS that it was not given.
    """
    if (text is None) == (ids is None):
        raise ConfigError("generate goes on from a text, or from --ids")
    if not cache and window is not None:
        raise ConfigError("--no-cache and --window: a window is a kind of cache")
    if sinks is not None and window is None:
        raise ConfigError("--sinks belong to a --window")
    if top_p == 0:
        raise ConfigError("--top-p 0: it is above 0, and 1 at most")
    given = None if ids is None else _ids("--ids", ids)
    ends = None if stop is None else _ids("--stop", stop)
    loaded = load_named_model(model, device, dtype=dtype)
    from interp.models.transformer import Transformer

    assert isinstance(loaded, Transformer)  # the native backend makes no other
    vocabulary = loaded.vocabulary
    if ends is None:
        eos = getattr(vocabulary, "eos_token_id", None)
        ends = [] if eos is None else [eos]
    made = loaded.generate(
        text if given is None else [given],
        tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_tokens=ends,
        use_cache=cache,
        cache=loaded.new_cache(sinks=sinks, window=window) if window is not None else None,
    )
    row = made[0].tolist()
    if vocabulary is None:
        typer.echo(",".join(map(str, row)))
        return
    if text is not None:
        (bare,) = vocabulary.encode(text, prepend_bos=False)
        row = row[bare[:1] != row[:1] :]  # without a BOS that was put in front
    typer.echo(vocabulary.decode(row))


def _ids(flag: str, words: str) -> list[int]:
    parts = [word for word in words.replace(",", " ").split() if word]
    if not parts or not all(word.isdecimal() for word in parts):
        raise ConfigError(f"{flag} {words!r}: token ids with commas between, such as 5,7,11")
    return [int(word) for word in parts]
