"""What belongs to a series of checkpoints: a run's steps, a folder of folders, or Hub revisions.

Nothing is loaded here, so that a wrong name or step is told before any model is read.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from interp.config import RunConfig, load_config
from interp.errors import ConfigError, ModelError
from interp.models.hub import CHECKPOINTS, CONFIG, checkpoint_steps, resolve

_LAST_NUMBER = re.compile(r"(\d+)$")
_REVISION = re.compile(r"step(\d+)")
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)

_FORMS = (
    "a training run's folder, a folder of checkpoints' folders whose names end in their steps "
    "(step1000), or a Hub id with revisions step<N>"
)
_MANY = 24
"""More steps than these are not listed in an error."""


@dataclass(frozen=True)
class Series:
    """Checkpoints by step, in order: what `load_model` takes, and what to call each."""

    name: str
    kind: Literal["run", "folders", "hub"]
    refs: dict[int, str]
    names: dict[int, str]
    config: RunConfig | None = None
    """How a run was trained and measured; None for models made elsewhere."""

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of one training step, where the run's config says."""
        if self.config is None:
            return None
        return self.config.train.batch_size * self.config.model.n_ctx


def load_series(ref: str | Path, steps: Sequence[int] | None = None) -> Series:
    """The checkpoints that `ref` names, or those of them at `steps`.

    Raises: ConfigError for anything that is no series, and for a step it does not have; ModelError
    where a folder holds no model or the Hub cannot be asked.
    """
    text = str(ref)
    path = Path(text).expanduser()
    if path.is_dir():
        whole = _run(path) if checkpoint_steps(path) else _folders(path)
        series = whole if steps is None else _chosen(whole, steps)
    elif path.is_file():
        raise ConfigError(f"{text} is one file, and a series has several checkpoints: {_FORMS}")
    else:
        series = _hub(text, steps)
    if len(series.refs) < 2:
        raise ConfigError(f"{text}: {len(series.refs)} checkpoint; a series has several")
    return series


def _run(path: Path) -> Series:
    config = path / "config.toml"
    if not config.is_file():
        raise ConfigError(
            f"{config} is missing, which says what the run is measured on; {path / CHECKPOINTS} "
            "can be given as a folder of checkpoints"
        )
    folders = checkpoint_steps(path)
    return Series(
        str(path),
        "run",
        {step: str(folder) for step, folder in folders.items()},
        {step: folder.name for step, folder in folders.items()},
        load_config(config),
    )


def _folders(path: Path) -> Series:
    if (path / CONFIG).is_file():
        raise ConfigError(f"{path} is one model, and a series has several checkpoints: {_FORMS}")
    if runs := sorted(inner.parent for inner in path.glob(f"*/*/{CHECKPOINTS}")):
        raise ConfigError(f"{path} is an experiment of several runs: choose one, such as {runs[0]}")
    folders: dict[int, Path] = {}
    for folder in sorted(path.iterdir()):
        if not folder.is_dir() or folder.name.startswith("."):
            continue
        holds_model = (folder / CONFIG).is_file()
        match = _LAST_NUMBER.search(folder.name)
        if match is None and holds_model:
            raise ConfigError(
                f"{folder}: the name of a checkpoint in a series ends in its step, such as step1000"
            )
        if match is None:
            continue  # logs and the like, which lie beside a trainer's checkpoints
        if not holds_model:
            raise ModelError(f"{folder} has no {CONFIG}: it holds no model")
        step = int(match[1])
        if step in folders:
            raise ConfigError(f"{folders[step]} and {folder} are both step {step}")
        folders[step] = folder
    if not folders:
        raise ConfigError(f"{path} holds no checkpoint: {_FORMS}")
    ordered = dict(sorted(folders.items()))
    return Series(
        str(path),
        "folders",
        {step: str(folder) for step, folder in ordered.items()},
        {step: folder.name for step, folder in ordered.items()},
    )


def _hub(name: str, steps: Sequence[int] | None) -> Series:
    whole, at, _ = name.partition("@")
    if at and (_HUB_ID.fullmatch(whole) or Path(whole).is_dir()):
        raise ConfigError(
            f"{name} is one checkpoint, and a series has several: give {whole}, with --steps to "
            "choose"
        )
    if not _HUB_ID.fullmatch(name) or _lies_in_a_folder_here(name):
        resolve(Path(name))  # tells that there is no such path, with near names
    chosen = sorted(set(hub_steps(name) if steps is None else steps))
    revisions = {step: f"step{step}" for step in chosen}
    return Series(
        name, "hub", {step: f"{name}@{word}" for step, word in revisions.items()}, revisions
    )


def _lies_in_a_folder_here(name: str) -> bool:
    """`reports/x` beside a folder `reports` is a misspelt path and is not looked up."""
    first, slash, _ = name.partition("/")
    return bool(slash) and Path(first).exists()


def hub_steps(name: str) -> list[int]:
    """The steps N of a Hub repository's revisions `step<N>`.

    Raises: ModelError where the Hub cannot be asked; ConfigError where there are none.
    """
    from huggingface_hub import HfApi, errors

    try:
        refs = HfApi().list_repo_refs(name)
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"no model {name!r} on the Hub, or it is private and needs `hf auth login`"
        ) from None
    except (errors.HTTPError, errors.HFValidationError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"{name}: its revisions cannot be listed ({reason}); without a network, --steps names "
            "those that are already downloaded"
        ) from None
    found = [
        int(match[1])
        for revision in [*refs.branches, *refs.tags]
        if (match := _REVISION.fullmatch(revision.name))
    ]
    if not found:
        raise ConfigError(f"{name} has no revisions named step<N>: it is one model, not a series")
    return sorted(set(found))


def _chosen(series: Series, steps: Sequence[int]) -> Series:
    unknown = [step for step in steps if step not in series.refs]
    if unknown:
        known = [str(step) for step in series.refs]
        listed = ", ".join(known[:_MANY]) + (", …" if len(known) > _MANY else "")
        raise ConfigError(f"{series.name} has no checkpoint at step {unknown[0]}; its: {listed}")
    wanted = sorted(set(steps))
    return Series(
        series.name,
        series.kind,
        {step: series.refs[step] for step in wanted},
        {step: series.names[step] for step in wanted},
        series.config,
    )
