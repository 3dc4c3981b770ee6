"""From numbers of sequences to evidence: means, clustered standard errors, selected heads."""

import numpy as np
import pandas as pd
from jaxtyping import Float, Int


def head_table(
    values: Float[np.ndarray, "layer sequence n_heads"],
    null: Float[np.ndarray, "layer null_sequence n_heads"],
    score: str,
    documents: Int[np.ndarray, " sequence"] | None = None,
) -> pd.DataFrame:
    """One row for each head: mean, standard error over sequences, the null's mean, and n."""
    n_layers, _, n_heads = values.shape
    mean, standard_error, n = sequence_statistics(values, documents)
    layer, head = np.meshgrid(np.arange(n_layers), np.arange(n_heads), indexing="ij")
    return pd.DataFrame(
        {
            "layer": layer.ravel(),
            "head": head.ravel(),
            score: mean.ravel(),
            f"{score}_se": standard_error.ravel(),
            f"{score}_null": sequence_statistics(null)[0].ravel(),
            "n": n.ravel(),
        }
    )


def sequence_statistics(
    values: Float[np.ndarray, "layer sequence n_heads"],
    documents: Int[np.ndarray, " sequence"] | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, standard error and number over the sequences in which the measure is defined.

    Sequences of one document are not independent: the standard error is that of a mean of
    clusters, which is the usual one where every sequence is a document of its own. It is NaN where
    fewer than two documents count.
    """
    defined = ~np.isnan(values)
    n = defined.sum(axis=1)
    filled = np.where(defined, values, 0.0)
    mean = filled.sum(axis=1) / np.where(n > 0, n, np.nan)
    deviations = np.where(defined, values - mean[:, None], 0.0)
    n_documents = n
    if documents is not None and len(np.unique(documents)) < len(documents):
        numbers = np.unique(documents, return_inverse=True)[1]
        n_layers, _, n_heads = values.shape
        sums = np.zeros((numbers.max() + 1, n_layers, n_heads))
        counted = np.zeros_like(sums)
        np.add.at(sums, numbers, deviations.swapaxes(0, 1))
        np.add.at(counted, numbers, defined.swapaxes(0, 1))
        deviations, n_documents = sums.swapaxes(0, 1), (counted > 0).sum(axis=0)
    correction = n_documents / np.where(n_documents > 1, n_documents - 1, np.nan)
    variance = (deviations**2).sum(axis=1) * correction
    return mean, np.sqrt(variance) / np.where(n > 0, n, np.nan), n


def select_heads(
    table: pd.DataFrame,
    values: Float[np.ndarray, "layer sequence n_heads"],
    null: Float[np.ndarray, "layer sequence n_heads"],
    documents: Int[np.ndarray, " sequence"],
    score: str,
    effect: float,
) -> None:
    """Add `selected` and `<score>_held_out`: heads chosen on one half, estimated on the other.

    A head is selected where its mean over one half of the documents lies above the largest null of
    any head, and above its own null by `effect` at least. The nulls are means over the same half:
    those of twice as many sequences would vary less, and blocks of other lengths have other ones.
    The head's mean over the other half, which chance did not choose, is the held-out estimate. One
    document cannot be halved, and selects nothing.
    """
    in_first = np.isin(documents, np.unique(documents)[::2])
    halves = [
        sequence_statistics(values[:, half], documents[half]) for half in (in_first, ~in_first)
    ]
    (chosen_on, _, n_chosen), (held_out, _, n_held_out) = halves
    null_there = sequence_statistics(null[:, in_first])[0].ravel()
    score_there = chosen_on.ravel()
    enough = (n_chosen.ravel() > 0) & (n_held_out.ravel() > 0)
    with np.errstate(invalid="ignore"):
        above = score_there > np.fmax.reduce(null_there)
        above &= score_there - null_there >= effect
    table["selected"] = enough & above
    table[f"{score}_held_out"] = held_out.ravel()
