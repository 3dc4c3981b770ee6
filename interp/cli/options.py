"""The options that verbs share, and what is made of them: a model, its inputs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from interp.errors import AnalysisError, ConfigError

if TYPE_CHECKING:
    import numpy as np

    from interp.measure import Inputs
    from interp.models.bridge import BridgedModel
    from interp.models.transformer import Transformer
    from interp.models.watch import HookedModel

Model = Annotated[
    str,
    typer.Argument(
        help="a run's folder or FOLDER@STEP, a Hugging Face folder, a Hub id (gpt2, "
        "NAME@REVISION), a .gguf file, or smollm2-135m"
    ),
]
Backend = Annotated[
    Literal["native", "bridge"],
    typer.Option(help="native: our model; bridge: anything TransformerLens's bridge boots"),
]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"], typer.Option(help="of the weights and activations")
]
Out = Annotated[Path | None, typer.Option(help="folder for the results")]
Seed = Annotated[int, typer.Option(min=0, help="seed of the random tokens")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
Tokens = Annotated[
    Path | None, typer.Option(help="integer array \\[batch, pos] in a .npy file, taken as given")
]
Text = Annotated[
    Path | None,
    typer.Option(help="text file, cut into windows of n_ctx tokens, 512 at most"),
]
Bos = Annotated[
    bool | None,
    typer.Option(
        "--bos/--no-bos", help="lead random tokens and text by BOS; as the model expects by default"
    ),
]
CommonText = Annotated[
    Path | None, typer.Option(help="text file, cut into windows that fit both models")
]
Block = Annotated[
    str | None, typer.Option(help="block length(s) of the repeated random tokens, such as 8,16")
]
Batch = Annotated[int, typer.Option(min=1, help="random sequences of each block length")]
Format = Annotated[Literal["table", "csv", "json"], typer.Option("--format", help="what to print")]
Config = Annotated[Path, typer.Argument(help="a TOML file, such as those in configs/")]
Override = Annotated[
    list[str] | None, typer.Option("--set", help="override, such as train.lr=1e-3; repeatable")
]
Resume = Annotated[bool, typer.Option("--resume", help="continue an interrupted run")]


def check_flags(
    tokens: Path | None,
    text: Path | None,
    block: str | None,
    out: Path | None,
    bos: bool | None = None,
) -> None:
    given = [
        flag
        for flag, value in (("--tokens", tokens), ("--text", text), ("--block", block))
        if value
    ]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: one source of tokens at a time")
    if tokens is not None and bos is not None:
        raise ConfigError(
            f"--tokens and --{'' if bos else 'no-'}bos: ids are taken exactly as given, with the "
            "BOS they have"
        )
    for path in (tokens, text):
        if path is not None and not path.is_file():
            raise ConfigError(f"{path}: no such file")
    block_lengths(block)
    if out is not None:
        nearest = next(path for path in (out, *out.parents) if path.exists())
        if not nearest.is_dir():
            raise ConfigError(f"{nearest} is a file, not a folder for results")


def block_lengths(block: str | None) -> list[int] | None:
    if block is None:
        return None
    from interp.config import BLOCK_RULE

    words = [word for word in block.replace(" ", "").split(",") if word]
    if not words or not all(word.isdecimal() for word in words):
        raise ConfigError(f"--block {block}: one number, or several with commas between")
    for word in words:
        if int(word) < 3:
            raise ConfigError(f"--block {word} {BLOCK_RULE}")
    return list(dict.fromkeys(map(int, words)))


def load_named_model(
    ref: str,
    device: str,
    backend: Literal["native", "bridge"] = "native",
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
) -> "Transformer | BridgedModel":
    from interp.models.hub import resolve

    source = resolve(ref, pickles=backend == "bridge")  # a misspelt name is told at once
    from interp.models.loading import load_model

    return load_model(source, backend=backend, device=device, dtype=dtype)


def token_file(path: Path) -> "np.ndarray":
    from zipfile import BadZipFile

    import numpy as np

    try:
        with path.open("rb") as file:
            return np.load(file, allow_pickle=False)
    except (ValueError, EOFError, BadZipFile):
        raise AnalysisError(f"{path}: not an array of numbers in a .npy file") from None


def make_inputs(
    model: "HookedModel",
    tokens: Path | None,
    text: Path | None,
    block: str | None,
    batch: int,
    seed: int,
    bos: bool | None,
) -> "Inputs":
    from interp.measure import repeated_inputs, text_inputs, token_inputs

    if text is not None:
        return text_inputs(model, text, prepend_bos=bos)
    if tokens is None:
        return repeated_inputs(model, block_lengths(block), batch, seed, bos)
    return token_inputs(model, token_file(tokens))
