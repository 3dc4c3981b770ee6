"""The options that verbs share, and what is made of them: a model, its inputs."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from interp.data.corpus import check_corpus
from interp.errors import ConfigError

if TYPE_CHECKING:
    from interp.data.drawing import Drawing
    from interp.inputs import Inputs
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
Text = Annotated[Path | None, typer.Option(help="text file, cut into windows of --length tokens")]
Corpus = Annotated[
    str | None,
    typer.Option(
        help="docs, stdlib, or a text file or a folder of them: windows of its held-out documents"
    ),
]
Length = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="tokens in a window of text, BOS and all; 512 by default, or n_ctx where that is less",
    ),
]
Sequences = Annotated[
    int | None,
    typer.Option(min=1, help="at most so many windows; by default all of a text, 32 of a corpus"),
]
Bos = Annotated[
    bool | None,
    typer.Option(
        "--bos/--no-bos", help="lead random tokens and text by BOS; as the model expects by default"
    ),
]
ExcludeBos = Annotated[
    bool, typer.Option("--exclude-bos", help="count BOS neither as a query nor as a key")
]
CommonText = Annotated[
    Path | None, typer.Option(help="text file, cut into windows that fit both models")
]
Block = Annotated[
    str | None, typer.Option(help="block length(s) of the repeated random tokens, such as 8,16")
]
Batch = Annotated[
    int | None,
    typer.Option(min=1, help="random sequences of each block length; by default the analysis's"),
]
BatchOfEach = Annotated[int, typer.Option(min=1, help="random sequences of each block length")]
From = Annotated[
    Path | None,
    typer.Option("--from", help="a Python file of your own with functions under @interp.analysis"),
]
Format = Annotated[Literal["table", "csv", "json"], typer.Option("--format", help="what to print")]
Config = Annotated[Path, typer.Argument(help="a TOML file, such as those in configs/")]
Override = Annotated[
    list[str] | None, typer.Option("--set", help="override, such as train.lr=1e-3; repeatable")
]
Resume = Annotated[bool, typer.Option("--resume", help="continue an interrupted run")]


@dataclass(frozen=True)
class TokenFlags:
    """Where the tokens come from, as the command line says it."""

    tokens: Path | None = None
    text: Path | None = None
    corpus: str | None = None
    length: int | None = None
    sequences: int | None = None
    block: str | None = None
    batch: int | None = None
    bos: bool | None = None
    seed: int = 0
    exclude_bos: bool = False

    @property
    def random(self) -> bool:
        """Whether no tokens are given."""
        return self.tokens is None and self.text is None and self.corpus is None

    def check(self) -> None:
        """Refuse what can be told before a model is read."""
        sources = ("tokens", "text", "corpus", "block")
        given = [f"--{name}" for name in sources if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)}: one source of tokens at a time")
        if self.tokens is not None and self.bos is not None:
            raise ConfigError(
                f"--tokens and --{'' if self.bos else 'no-'}bos: ids are taken exactly as given, "
                "with the BOS they have"
            )
        if self.text is None and self.corpus is None:
            for name in ("length", "sequences"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"--{name} is for windows of text: --text or --corpus")
        if not self.random and self.batch is not None:
            raise ConfigError(f"{given[0]} and --batch: that is the number of random sequences")
        for path in (self.tokens, self.text):
            if path is not None and not path.is_file():
                raise ConfigError(f"{path}: no such file")
        if self.corpus is not None:
            check_corpus(self.corpus)
        block_lengths(self.block)

    def inputs(self, model: "HookedModel", drawing: "Drawing | None" = None) -> "Inputs":
        """The sequences; random ones as `drawing` has them, or repeated."""
        from interp.inputs import without_bos

        inputs = self._sequences(model, drawing)
        return without_bos(model, inputs) if self.exclude_bos else inputs

    def _sequences(self, model: "HookedModel", drawing: "Drawing | None") -> "Inputs":
        from interp.data.drawing import REPEATED
        from interp.data.token_file import token_file
        from interp.inputs import random_inputs, token_inputs
        from interp.text_inputs import corpus_inputs, text_inputs

        if self.tokens is not None:
            return token_inputs(model, token_file(self.tokens))
        if self.text is not None:
            return text_inputs(model, self.text, self.length, self.bos, sequences=self.sequences)
        if self.corpus is not None:
            return corpus_inputs(
                model,
                self.corpus,
                self.length,
                self.bos,
                sequences=self.sequences,
                seed=self.seed,
            )
        blocks = block_lengths(self.block)
        return random_inputs(model, blocks, self.batch, self.seed, self.bos, drawing or REPEATED)


def check_folder(out: Path | None) -> None:
    """Refuse a folder for results that cannot be one."""
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
