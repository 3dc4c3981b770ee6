"""What the doctor found: one line for each identity, as a table, as JSON and as files."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import pandas as pd

from interp.tables import strict_json, versions, write_text

Verdict = Literal["pass", "FAIL", "not applicable"]


class NotApplicable(Exception):
    """An identity says nothing about this model; the message is the reason, after "because"."""


@dataclass(frozen=True)
class Measured:
    """An identity's largest error, what rounding alone could make of it, and where it is."""

    error: float
    bound: float
    note: str = ""


@dataclass(frozen=True)
class Finding:
    """One line of a diagnosis. `measured` is missing where nothing could be measured."""

    check: str
    measured: float | None
    bound: float | None
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class Diagnosis:
    """Every identity with its measured error, its bound, and the verdict.

    `measured` is at most `bound` in a line that passes. `inputs` says what the model was run on.
    """

    model: str
    findings: tuple[Finding, ...]
    inputs: str
    dtype: str
    seed: int
    versions: dict[str, str] = field(default_factory=lambda: versions())

    @property
    def healthy(self) -> bool:
        """Whether no line fails."""
        return not any(finding.verdict == "FAIL" for finding in self.findings)

    @property
    def table(self) -> pd.DataFrame:
        """One row for each identity: check, measured, bound, verdict, reason."""
        return pd.DataFrame([asdict(finding) for finding in self.findings])

    def to_json(self) -> str:
        """Everything as strict JSON: missing numbers are null."""
        return strict_json({**asdict(self), "healthy": self.healthy})

    def save(self, folder: Path | str) -> list[Path]:
        """Write `doctor.csv` and `doctor.json` into `folder`; returns the paths."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        csv, record = folder / "doctor.csv", folder / "doctor.json"
        write_text(csv, self.table.to_csv(index=False))
        write_text(record, self.to_json() + "\n")
        return [csv, record]


def listed(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
