"""Folders of a model that appear whole or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from interp.errors import ModelError


def check_new_folder(folder: Path | str) -> None:
    """Refuse a folder that holds something.

    Raises: ModelError for one.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{folder} is not empty: a model is written into a folder of its own")


@contextmanager
def new_folder(folder: Path | str) -> Iterator[Path]:
    """A folder to fill, which takes the place of `folder` when the block ends without a fault.

    Raises: ModelError for a folder that holds something, or that cannot be written.
    """
    check_new_folder(folder)
    target = Path(folder).resolve()
    scratch = target.with_name(f".{target.name}.making")
    try:
        shutil.rmtree(scratch, ignore_errors=True)  # what a killed process left
        scratch.mkdir(parents=True)
        yield scratch
        if target.exists():
            target.rmdir()
        scratch.rename(target)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder} cannot be written: {error}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
