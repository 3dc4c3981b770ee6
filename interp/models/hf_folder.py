"""The tensors of a Hugging Face folder: one safetensors file, or shards and their index.

The folder is checked whole before any tensor is read: every file that the index names is there, and
index and files name the same tensors. Tensors are read one at a time; no pickle is read.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from interp.errors import ModelError
from interp.models.hub import WEIGHTS, pickle_fault, read_json

_INDEX = f"{WEIGHTS}.index.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file that holds each tensor, by the tensor's name.

    Raises: ModelError, in one line, for weights that are missing, cut short or pickled, and where
    the index and the files do not name the same tensors.
    """
    single, index = folder / WEIGHTS, folder / _INDEX
    if single.is_file():  # where both are there, transformers too takes the single file
        return dict.fromkeys(_names_in(single), single)
    if index.is_file():
        return _indexed(folder, _weight_map(index))
    loose = sorted(path.name for path in folder.glob("*.safetensors"))
    if loose:
        raise ModelError(
            f"{folder} holds {', '.join(loose[:3])} but no {WEIGHTS}, and no {_INDEX} that says "
            "which tensors are the model's"
        )
    raise ModelError(
        pickle_fault(folder) or f"{folder} holds a config but no weights: {WEIGHTS} is missing"
    )


def read_tensor(path: Path, name: str) -> Tensor:
    """One tensor of a file. It may be a view of the file, which stays open as long as it lives."""
    # Opened for each tensor: a file that stays mapped counts as memory, page by page read.
    with _opened(path) as file:
        return file.get_tensor(name)


def _indexed(folder: Path, weight_map: Mapping[str, str]) -> dict[str, Path]:
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        missing = [shard for shard in absent if _SHARD.fullmatch(shard)]
        if missing:
            raise ModelError(
                f"{folder} lacks {', '.join(missing)}: {len(absent)} of its {len(shards)} shards "
                f"{'is' if len(absent) == 1 else 'are'} missing"
            )
        present = sorted(path.name for path in folder.glob("*.safetensors"))
        raise ModelError(
            f"{folder / _INDEX} names {absent[0]}, which is no file of the folder; its files: "
            f"{', '.join(present) or 'none'}"
        )
    unused = sorted({path.name for path in folder.glob("model-*-of-*.safetensors")} - set(shards))
    if unused:
        raise ModelError(f"{folder} holds {_some(unused)}, which {_INDEX} does not name")
    for shard in shards:
        held = _names_in(folder / shard)
        named = {name for name, file in weight_map.items() if file == shard}
        lost, extra = sorted(named - held), sorted(held - named)
        if lost:
            raise ModelError(
                f"{folder / _INDEX} places {_some(lost)} in {shard}, which does not hold "
                f"{'it' if len(lost) == 1 else 'them'}"
            )
        if extra:
            raise ModelError(
                f"{folder / shard} holds {_some(extra)}, which {_INDEX} does not place there"
            )
    return {name: folder / shard for name, shard in weight_map.items()}


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path} has no weight_map that says which file holds each tensor")
    return {str(name): str(file) for name, file in weight_map.items()}


def _names_in(path: Path) -> set[str]:
    with _opened(path) as file:
        return set(file.keys())


@contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is cut short or is not a safetensors file: {error}") from None


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
