"""Paired differences as evidence: mean, standard error, p and false-discovery rate.

The same sequences with and without an ablation: what varies between sequences cancels. Sequences of
one document are not independent and count as one cluster.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from scipy import stats

from interp.evidence import sequence_statistics


@dataclass(frozen=True)
class Paired:
    """One row for each ablation."""

    mean: Float[np.ndarray, " row"]
    standard_error: Float[np.ndarray, " row"]
    """NaN where fewer than two documents count."""
    n: Int[np.ndarray, " row"]
    p: Float[np.ndarray, " row"]
    """Of a two-sided t test of no difference; NaN with the standard error."""
    q: Float[np.ndarray, " row"]
    """The false-discovery rate at which the row would be called; Benjamini and Hochberg 1995."""


def paired(
    differences: Float[np.ndarray, "row sequence"],
    documents: Int[np.ndarray, " sequence"] | None = None,
) -> Paired:
    """The evidence that each row's differences are not 0; NaN where a sequence does not count."""
    mean, error, n = (part[0] for part in sequence_statistics(differences.T[None], documents))
    clusters = n
    if documents is not None:
        clusters = np.array(
            [len(np.unique(documents[~np.isnan(own)])) for own in differences], dtype=int
        )
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(mean == 0, 0.0, mean / error)
        p = 2 * stats.t.sf(np.abs(t), np.maximum(clusters - 1, 1))
    p = np.where(np.isnan(error), np.nan, p)
    return Paired(mean, error, n, p, false_discovery(p))


def false_discovery(p: Float[np.ndarray, " row"]) -> Float[np.ndarray, " row"]:
    """The adjusted p of each test: the share of false ones among those with less, at most."""
    known = ~np.isnan(p)
    q = np.full_like(p, np.nan)
    if known.any():
        q[known] = stats.false_discovery_control(p[known])
    return q
