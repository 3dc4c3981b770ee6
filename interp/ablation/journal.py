"""What a sweep has measured so far, in a file that grows as it goes.

A line is written when its numbers are there; a killed sweep loses what was in flight and no more.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from interp.errors import AnalysisError
from interp.tables import strict_json

Key = tuple[str, int, int, str]
"""Method, draw, chunk, and what was ablated."""

# What the unablated model answers may differ in the last digits on another number of threads.
SAME = 1e-4


def check_unfinished(path: Path, *, resume: bool) -> None:
    """Refuse to begin where another sweep has not ended.

    Raises: AnalysisError where there is a journal and it is not to be gone on with.
    """
    if path.is_file() and not resume:
        raise AnalysisError(
            f"{path} is of an unfinished sweep: --resume goes on with it; delete it to begin "
            "anew, or choose another --out"
        )


class Journal:
    """The measured values by key, on disk and in memory; without a path in memory only."""

    def __init__(self, path: Path | None, facts: Mapping[str, object], *, resume: bool = False):
        self.path = path
        self._values: dict[Key, list[list[float]]] = {}
        self._clean: dict[str, list[float]] = {}
        # Written with the first value: a sweep that is refused leaves no file.
        self._held: list[Mapping[str, object]] = []
        told = json.loads(strict_json(dict(facts)))
        if path is None:
            return
        check_unfinished(path, resume=resume)
        if path.is_file():
            self._read(path, told)
        else:
            self._held.append({"facts": told})

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key) -> list[np.ndarray]:
        """The metric's values, and those of the direct effect where it was measured."""
        return [np.array(own, dtype=np.float64) for own in self._values[key]]

    def add(self, found: Iterable[tuple[Key, list[np.ndarray]]]) -> None:
        """Write values of some keys, all of them or none.

        They were computed together: beside another number of ablations their last digits differ.
        """
        line = []
        for key, values in found:
            self._values[key] = [own.tolist() for own in values]
            line.append({"key": list(key), "values": self._values[key]})
        if line:
            self._append({"found": line})

    def check_clean(self, key: str, values: np.ndarray) -> None:
        """Note what the unablated model answers, or compare it with what it did before.

        Raises: AnalysisError where it is another model or machine.
        """
        before = self._clean.get(key)
        if before is None:
            self._clean[key] = values.tolist()
            self._held.append({"clean": key, "values": self._clean[key]})
        elif not np.allclose(values, np.array(before, dtype=float), atol=SAME, equal_nan=True):
            where = "" if self.path is None else f"{self.path}: "
            raise AnalysisError(
                f"{where}the unablated model gives other numbers than when the sweep began: it is "
                "not the same model, or not the same machine"
            )

    def close(self) -> None:
        """Take the file away: the results are written."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _append(self, *lines: Mapping[str, object]) -> None:
        if self.path is not None and lines:
            text = "".join(json.dumps(line) + "\n" for line in (*self._held, *lines))
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8", newline="\n") as file:
                file.write(text)
            self._held = []

    def _read(self, path: Path, facts: Mapping[str, object]) -> None:
        whole = path.read_bytes()
        # A line without its end was being written when the sweep was killed.
        kept = whole[: whole.rfind(b"\n") + 1]
        try:
            lines = [json.loads(line) for line in kept.splitlines()]
            begun = dict(lines[0]["facts"] if lines else facts)
            for line in lines[1:]:
                if "clean" in line:
                    self._clean[line["clean"]] = line["values"]
                    continue
                for one in line["found"]:
                    method, draw, chunk, label = one["key"]
                    self._values[method, draw, chunk, label] = one["values"]
        except (ValueError, KeyError, TypeError) as error:
            raise AnalysisError(f"{path}: not a sweep's journal: {error}") from None
        if not lines:
            self._held.append({"facts": facts})
        different = [
            name for name in dict.fromkeys([*begun, *facts]) if begun.get(name) != facts.get(name)
        ]
        if different:
            told = "; ".join(
                f"{name} was {begun.get(name)}, now {facts.get(name)}" for name in different
            )
            raise AnalysisError(f"{path} is of another sweep: {told[:500]}")
        if kept != whole:
            path.write_bytes(kept)
