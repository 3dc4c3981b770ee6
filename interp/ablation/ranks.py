"""Where ablation methods order heads differently, by more than chance would."""

import numpy as np
from jaxtyping import Float, Int
from scipy import stats

from interp.ablation.paired import paired

ERRORS = 2.0
"""Standard errors by which a head has to lie above another for their order to count."""


def disagreement(
    effects: dict[str, Float[np.ndarray, "head sequence"]],
    documents: Int[np.ndarray, " sequence"],
) -> dict[str, np.ndarray]:
    """The rank of each head by each method, 1 the strongest, and whether the methods disagree.

    `disagree` is True for a head that one method puts above some other head and another method
    below it, either by two standard errors of their paired difference at least.
    """
    columns = {}
    for name, own in effects.items():
        mean = paired(own, documents).mean
        columns[f"{name}_rank"] = stats.rankdata(-mean, method="min", nan_policy="omit")
    n_heads = len(next(iter(effects.values())))
    disagree = np.zeros(n_heads, dtype=bool)
    for head in range(n_heads):
        above = np.zeros((len(effects), n_heads), dtype=bool)
        below = np.zeros_like(above)
        for row, own in enumerate(effects.values()):
            apart = paired(own[head] - own, documents)
            with np.errstate(invalid="ignore"):
                certain = np.abs(apart.mean) >= ERRORS * apart.standard_error
            above[row] = certain & (apart.mean > 0)
            below[row] = certain & (apart.mean < 0)
        disagree[head] = bool((above.any(axis=0) & below.any(axis=0)).any())
    return {**columns, "disagree": disagree}
