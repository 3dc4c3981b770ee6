"""Token ids in a .npy file."""

from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from interp.errors import AnalysisError


def token_file(path: Path) -> np.ndarray:
    """The array in a .npy file, of whatever type and shape; nothing in it is unpickled.

    Raises: AnalysisError for anything else.
    """
    try:
        with path.open("rb") as file:
            array = np.load(file, allow_pickle=False)
    except (ValueError, EOFError, BadZipFile):
        array = None
    if not isinstance(array, np.ndarray):  # a .npz file is a table of arrays
        raise AnalysisError(f"{path}: not an array of numbers in a .npy file")
    return array
