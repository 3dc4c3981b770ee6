"""Text without a network: Python's own library and its prose, a file, or a folder.

Held-out text comes from other files than training text, chosen by a hash of their names, so that
the split is the same on every machine that holds the same files.
"""

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from interp.errors import ConfigError

NAMES = ("stdlib", "docs")

HELD_OUT = 0.1
"""Share of a corpus's files that is held out, as for training runs unless their config differs."""


@dataclass(frozen=True)
class Corpus:
    """The texts of a corpus by file name, split, with the hash that identifies them."""

    name: str
    training: dict[str, str]
    held_out: dict[str, str]
    sha256: str

    def facts(self) -> dict[str, object]:
        """What a run records of its text."""
        return {
            "corpus": self.name,
            "files": len(self.training),
            "held_out_files": len(self.held_out),
            "characters": sum(map(len, self.training.values())),
            "sha256": self.sha256,
        }


def read_corpus(name: str, held_out_fraction: float) -> Corpus:
    """The corpus `stdlib`, `docs`, or the text at a path.

    A single file has no other file to hold out: its last part is held out instead.

    Raises: ConfigError for a path that is missing, empty or not UTF-8 text.
    """
    if name == "stdlib":
        texts = dict(_library_sources())
    elif name == "docs":
        texts = dict(_library_prose())
    else:
        texts = _read_path(name)
    digest = hashlib.sha256()
    for file in sorted(texts):
        digest.update(file.encode() + b"\0" + texts[file].encode() + b"\0")
    if len(texts) == 1:
        ((file, text),) = texts.items()
        cut = int(len(text) * (1 - held_out_fraction))
        training, held_out = {file: text[:cut]}, {file: text[cut:]}
    else:
        by_hash = sorted(texts, key=lambda file: hashlib.sha256(file.encode()).hexdigest())
        n_held_out = max(1, round(held_out_fraction * len(by_hash)))
        held_out = {file: texts[file] for file in sorted(by_hash[:n_held_out])}
        training = {file: texts[file] for file in sorted(by_hash[n_held_out:])}
    return Corpus(name, training, held_out, digest.hexdigest())


def check_corpus(name: str) -> None:
    """Refuse, without reading it, a corpus that is not there.

    Raises: ConfigError for what is neither a name nor a path of something.
    """
    # An empty name would be the path of this folder.
    if name not in NAMES and not (name and Path(name).exists()):
        raise ConfigError(
            f"no corpus {name!r}: it should be {' or '.join(NAMES)}, or the path of a text file "
            "or of a folder of them"
        )


def _library_sources() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        # Tests double the size and are data more than prose; packages are not the library.
        if {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(relative.parts):
            continue
        text = _decode(path)
        if text:
            yield relative.as_posix(), text


def _library_prose() -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics

    for topic, text in sorted(topics.items()):
        yield f"topics/{topic}", text
    for file, source in _library_sources():
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue  # templates and deliberately broken files
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = (node for node in ast.walk(tree) if isinstance(node, documented))
        prose = [doc for node in nodes if (doc := ast.get_docstring(node))]
        if prose:
            yield file, "\n\n".join(prose) + "\n"


def read_text(path: Path) -> str:
    """The text of one file.

    Raises: ConfigError for a file that is missing, empty or not UTF-8 text.
    """
    text = _decode(path)
    if text is None:
        raise ConfigError(f"{path}: not a UTF-8 text file")
    if not text.strip():
        raise ConfigError(f"{path}: the text file is empty")
    return text


def _read_path(name: str) -> dict[str, str]:
    check_corpus(name)
    path = Path(name)
    if path.is_file():
        return {path.name: read_text(path)}
    texts = {
        file.relative_to(path).as_posix(): text
        for file in sorted(path.rglob("*"))
        if file.is_file() and (text := _decode(file)) and text.strip()
    }
    if not texts:
        raise ConfigError(f"{path}: no UTF-8 text file in this folder")
    return texts


def _decode(path: Path) -> str | None:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    return None if "\0" in text else text
