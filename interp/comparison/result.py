"""The result of a comparison: every head of two models in one table, and what follows from it.

One invariant: everything here is computed from the tables, never from a model.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from interp.errors import AnalysisError
from interp.tables import head_label, labelled_heads, strict_json, versions, write_text

KIND = "compare"
FILE = f"{KIND}.json"
QUANTILES = {"q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95}


@dataclass(frozen=True, eq=False)
class Comparison:
    """Every head of two models on the same probes.

    `table` has a row for each model, layer and head: for every score its mean, its standard error
    (`_se`, over independent sequences or documents), its null (`_null`), its number of sequences
    (`_n`), whether the head is selected on one half of them (`_selected`) and its mean over the
    other half (`_held_out`).
    `labels` are the models' names, made distinct where they are one. `differences` has a row for
    each head, second model minus first, with the standard error; it is empty, and
    `why_no_differences` says why, where the models have not the same layers and heads. `paired`
    says whether both models saw the same sequences, so that differences were taken within them.
    """

    table: pd.DataFrame
    differences: pd.DataFrame
    labels: tuple[str, str]
    units: dict[str, str]
    why_no_differences: str
    paired: bool
    params: dict[str, object]
    inputs: str
    seed: int
    versions: dict[str, str] = field(default_factory=lambda: versions())

    @property
    def scores(self) -> list[str]:
        """The columns that hold a score, in the order of the table."""
        return list(self.units)

    def heads_of(self, label: str) -> pd.DataFrame:
        """The rows of one of the two models.

        Raises: AnalysisError for another name.
        """
        if label not in self.labels:
            raise AnalysisError(f"no model {label!r} here; there are {' and '.join(self.labels)}")
        return self.table[self.table["model"] == label].reset_index(drop=True)

    def pruned_of(self, label: str) -> list[tuple[int, int]]:
        """The layer and number of each head that one of the two models has no longer."""
        gone = self.params.get("pruned_heads")
        return labelled_heads(gone.get(label)) if isinstance(gone, dict) else []

    def heads_of_both(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """The rows of the heads that neither model lacks, in the same order for each."""
        first, second = (self.heads_of(label).set_index(["layer", "head"]) for label in self.labels)
        both = first.index.intersection(second.index)
        return first.loc[both].reset_index(), second.loc[both].reset_index()

    def strongest(self, k: int = 5) -> pd.DataFrame:
        """The k heads with the highest score, for each score and model, highest first."""
        rows = []
        for score in self.scores:
            for label in self.labels:
                heads = self.heads_of(label).dropna(subset=[score])
                order = heads.sort_values(
                    [score, "layer", "head"], ascending=[False, True, True]
                ).head(k)
                for rank, row in enumerate(order.to_dict("records"), start=1):
                    rows.append(
                        {
                            "score": score,
                            "model": label,
                            "rank": rank,
                            "layer": row["layer"],
                            "head": row["head"],
                            "value": row[score],
                            "se": row[f"{score}_se"],
                            "null": row[f"{score}_null"],
                            "selected": row[f"{score}_selected"],
                        }
                    )
        columns = ["score", "model", "rank", "layer", "head", "value", "se", "null", "selected"]
        return pd.DataFrame(rows, columns=columns)

    @property
    def distributions(self) -> pd.DataFrame:
        """Quantiles over heads of each score and model, the largest null, the heads selected."""
        rows = []
        for score in self.scores:
            for label in self.labels:
                heads = self.heads_of(label)
                values = heads[score].dropna()
                selected = int(heads[f"{score}_selected"].sum())
                rows.append(
                    {
                        "score": score,
                        "model": label,
                        "heads": len(values),
                        "min": values.min(),
                        **{name: values.quantile(q) for name, q in QUANTILES.items()},
                        "max": values.max(),
                        "largest_null": heads[f"{score}_null"].max(),
                        "selected": selected,
                        "share_selected": selected / len(values) if len(values) else np.nan,
                    }
                )
        return pd.DataFrame(rows)

    @property
    def rank_correlations(self) -> dict[str, float]:
        """Spearman's rank correlation over heads of each score; {} where heads do not correspond.

        NaN where a model's heads all score the same, so that there are no ranks.
        """
        if self.differences.empty:
            return {}
        first, second = self.heads_of_both()
        return {
            score: rank_correlation(first[score].to_numpy(), second[score].to_numpy())
            for score in self.scores
        }

    @property
    def summary(self) -> dict[str, dict[str, object]]:
        """For each score: the strongest head of each model, and how the two models differ."""
        strongest = self.strongest(1)
        shares = self.distributions.set_index(["score", "model"])["share_selected"]
        correlations = self.rank_correlations
        found: dict[str, dict[str, object]] = {}
        for score in self.scores:
            best = strongest[strongest["score"] == score].to_dict("records")
            found[score] = {
                "best": {
                    row["model"]: {
                        "head": head_label(row["layer"], row["head"]),
                        "value": row["value"],
                    }
                    for row in best
                },
                "share_selected": {label: shares[score, label] for label in self.labels},
            }
            largest = self.largest_difference(score)
            if largest is not None:
                found[score]["largest_difference"] = {
                    "head": head_label(int(largest["layer"]), int(largest["head"])),
                    "value": float(largest[score]),
                    "se": float(largest[f"{score}_se"]),
                }
                found[score]["rank_correlation"] = correlations[score]
        return found

    def largest_difference(self, score: str) -> pd.Series | None:
        """The row of the head whose score differs most; None where there is none."""
        if self.differences.empty or self.differences[score].isna().all():
            return None
        return self.differences.loc[self.differences[score].abs().idxmax()]

    def to_json(self) -> str:
        """Everything as strict JSON: missing numbers are null."""
        return strict_json(
            {
                "kind": KIND,
                "models": self.labels,
                "units": self.units,
                "inputs": self.inputs,
                "paired": self.paired,
                "seed": self.seed,
                "params": self.params,
                "versions": self.versions,
                "why_no_differences": self.why_no_differences,
                "summary": self.summary,
                "distributions": self.distributions.to_dict(orient="records"),
                "table": self.table.to_dict(orient="records"),
                "differences": self.differences.to_dict(orient="records"),
            }
        )

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> dict[str, object]:
        """The maps of the first score, for IPython and its notebooks."""
        from interp.views.drawing import notebook_bundle  # as in `interp.tables`

        return notebook_bundle(self)

    def save(self, folder: Path | str) -> list[Path]:
        """Write `compare.csv`, `compare.json` and, where there are differences, their CSV."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        csv, record = folder / f"{KIND}.csv", folder / FILE
        differences = folder / f"{KIND}_differences.csv"
        write_text(csv, self.table.to_csv(index=False))
        if self.differences.empty:
            differences.unlink(missing_ok=True)  # of an earlier comparison in this folder
        else:
            write_text(differences, self.differences.to_csv(index=False))
        write_text(record, self.to_json() + "\n")
        return [csv, record, *([] if self.differences.empty else [differences])]

    @classmethod
    def load(cls, path: Path | str) -> "Comparison":
        """The comparison in a JSON file that `save` wrote.

        Raises: AnalysisError where the file is missing or is something else.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data["kind"] != KIND:
                raise ValueError(f"its kind is {data['kind']!r}")
            first, second = data["models"]
            table, differences = _table(data["table"]), _table(data["differences"])
            _check_columns(table, data["units"])
            return cls(
                table=table,
                differences=differences,
                labels=(first, second),
                units=data["units"],
                why_no_differences=data["why_no_differences"],
                paired=data["paired"],
                params=data["params"],
                inputs=data["inputs"],
                seed=data["seed"],
                versions=data["versions"],
            )
        except FileNotFoundError:
            raise AnalysisError(f"{path}: no such file") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise AnalysisError(f"{path}: not a comparison of two models: {error}") from None


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's rank correlation of two columns, equal values sharing their mean rank.

    -1..1; a pair with a missing value is left out; NaN where a column has no ranks.
    """
    both = ~(np.isnan(first) | np.isnan(second))
    ranks = [pd.Series(values[both]).rank().to_numpy() for values in (first, second)]
    a, b = (own - own.mean() if own.size else own for own in ranks)
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size > 0 else float("nan")


def _table(records: Sequence[dict[str, object]]) -> pd.DataFrame:
    table = pd.DataFrame(records)
    if table.empty:
        return table
    # A column of nulls is one of missing numbers.
    table = table.fillna(np.nan).infer_objects()
    return table.astype({"layer": int, "head": int})


def _check_columns(table: pd.DataFrame, units: dict[str, str]) -> None:
    ends = ("", "_se", "_null", "_n", "_selected", "_held_out")
    wanted = ["model", *(f"{score}{end}" for score in units for end in ends)]
    lacking = [column for column in wanted if column not in table]
    if lacking:
        raise ValueError(f"its table has no column {lacking[0]!r}")
