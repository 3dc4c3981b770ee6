"""Outlier features: dimensions that are large in many layers and at many tokens.

One invariant: a share is of all tokens looked at, and of all layers that have the site, and a
boundary belongs to what is above it.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from jaxtyping import Float

from interp.activations.criteria import Criteria
from interp.activations.sites import Site

SITES = ("attn_in", "z", "mlp_in")
"""Where features are looked for: what the projections of attention and the first of the MLP read.
Source: Dettmers et al. 2022, section 4, who leave the MLP's last projection out."""

COLUMNS = (
    "site",
    "dimension",
    "layers",
    "layers_share",
    "positions_share",
    "first_layer",
    "last_layer",
    "largest",
    "one_signed",
)


class Reached:
    """Of one layer and site: how often each dimension has an |x| that reaches a magnitude."""

    def __init__(self, magnitude: float):
        # A numpy number of 64 bits: a plain one would be rounded to the values' dtype.
        self.magnitude = np.float64(magnitude)
        self.tokens = 0
        self.number = np.zeros(0, dtype=np.int64)
        self.above = np.zeros(0, dtype=np.int64)
        self.lowest = np.zeros(0)
        self.highest = np.zeros(0)

    def add(self, x: Float[np.ndarray, "pos width"], size: Float[np.ndarray, "pos width"]) -> None:
        """Count one sequence; `size` is |x|."""
        n_pos, width = x.shape
        if not self.tokens:
            self.number, self.above = np.zeros((2, width), dtype=np.int64)
            self.lowest, self.highest = np.zeros((2, width))
        self.tokens += n_pos
        if size.max() < self.magnitude:
            return
        place, dimension = np.nonzero(size >= self.magnitude)
        values = x[place, dimension].astype(np.float64)
        self.number += np.bincount(dimension, minlength=width)
        self.above += np.bincount(dimension[values > 0], minlength=width)
        np.minimum.at(self.lowest, dimension, values)
        np.maximum.at(self.highest, dimension, values)


def outlier_features(reached: Mapping[Site, Reached], criteria: Criteria) -> pd.DataFrame:
    """A row for each outlier feature, by site, those of most layers first.

    `layers` is the number of layers in which the dimension reaches the magnitude at enough tokens,
    `layers_share` that among the layers that have the site. Of these layers are `positions_share`,
    the mean share of tokens, `first_layer` and `last_layer`, the signed `largest`, and
    `one_signed`, the share of the values that reach the magnitude which have the commoner sign.
    """
    rows: list[dict[str, object]] = []
    for kind in SITES:
        layers = {site.layer: own for site, own in reached.items() if site.kind == kind}
        found = [
            _row(layers, d, criteria) for d in range(max(map(_width, layers.values()), default=0))
        ]
        rows += ({"site": kind, **row} for row in sorted(filter(None, found), key=_order))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _row(
    layers: Mapping[int, Reached], dimension: int, criteria: Criteria
) -> dict[str, int | float] | None:
    """The feature of one dimension, or None where it is none."""
    shares = {
        layer: own.number[dimension] / own.tokens
        for layer, own in layers.items()
        if dimension < _width(own) and own.number[dimension]
    }
    there = [layer for layer, share in shares.items() if share >= criteria.feature_positions]
    if not there or len(there) / len(layers) < criteria.feature_layers:
        return None
    own = [layers[layer] for layer in there]
    ends = [float(side[dimension]) for one in own for side in (one.lowest, one.highest)]
    number = sum(int(one.number[dimension]) for one in own)
    above = sum(int(one.above[dimension]) for one in own)
    return {
        "dimension": dimension,
        "layers": len(there),
        "layers_share": len(there) / len(layers),
        "positions_share": float(np.mean([shares[layer] for layer in there])),
        "first_layer": min(there),
        "last_layer": max(there),
        "largest": max(ends, key=abs),
        "one_signed": max(above, number - above) / number,
    }


def _width(own: Reached) -> int:
    return len(own.number)


def _order(row: Mapping[str, int | float]) -> tuple[int | float, ...]:
    return -row["layers"], -row["positions_share"], row["dimension"]
