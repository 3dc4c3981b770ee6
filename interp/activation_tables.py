"""Results on activations: where they are large, what goes with it, what changing or rounding them
does.

One invariant: a file that lacks a column or a figure of its kind is refused when it is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import pandas as pd

from interp.tables import HeadScores, Result


@dataclass(frozen=True, eq=False)
class Activations(Result):
    """The largest activations of each layer and site.

    `table` has a row for each: integers `layer`, `sequence`, `position` and `dimension`, the `site`
    and the `token` as text, the signed `value`, its `magnitude` (the score), and what that is
    compared with. `sites` has a row for each layer and site, of all its activations, and `features`
    one for each outlier feature.
    """

    sites: pd.DataFrame = field(default_factory=pd.DataFrame)
    features: pd.DataFrame = field(default_factory=pd.DataFrame)

    _kind: ClassVar[str] = "a file of activations"
    _frames: ClassVar[tuple[str, ...]] = ("sites", "features")
    _columns: ClassVar[Mapping[str, str]] = {
        "table": "site token value magnitude median ratio deviation massive",
        "sites": "layer site n median largest ratio massive infinity_norm kurtosis beyond_sigma "
        "beyond_sigma_share beyond_robust beyond_robust_share",
        "features": "site dimension layers layers_share positions_share first_layer last_layer "
        "largest one_signed",
    }

    @classmethod
    def _indices(cls, table: pd.DataFrame) -> list[str]:
        return ["layer", "sequence", "position", "dimension"]


@dataclass(frozen=True, eq=False)
class OutlierSinks(HeadScores):
    """What every head does with the tokens that have massive activations.

    `table` has a row a head; the score is the attention those tokens draw. `layers` has a row a
    layer: how large their activations are there, and how long their keys and values.
    """

    layers: pd.DataFrame = field(default_factory=pd.DataFrame)

    _kind: ClassVar[str] = "a file of outliers and sinks"
    _frames: ClassVar[tuple[str, ...]] = ("layers",)
    _columns: ClassVar[Mapping[str, str]] = {
        "table": "outlier_sinks outlier_sinks_se outlier_sinks_null n first_token after key_norm "
        "key_norm_others key_norm_ratio value_norm value_norm_others value_norm_ratio",
        "layers": "layer magnitude magnitude_others mass mass_null key_norm_ratio value_norm_ratio "
        "heads_above",
    }
    _figures: ClassVar[str] = (
        "found sequences main_layer first_layer last_layer mass_before mass_after heads_before "
        "heads_after heads_above_before heads_above_after correlation_key_norm "
        "correlation_value_norm correlation_first_token tokens"
    )


@dataclass(frozen=True, eq=False)
class OutlierEffects(Result):
    """What changes when massive activations are changed.

    `table` has a row for each change and draw of it; the score is the change in loss. `heads` has a
    row for each of these and each head: how much of its attention the tokens get.
    """

    heads: pd.DataFrame = field(default_factory=pd.DataFrame)

    _kind: ClassVar[str] = "a file of changed outliers"
    _frames: ClassVar[tuple[str, ...]] = ("heads",)
    _columns: ClassVar[Mapping[str, str]] = {
        "table": "change draw cells changed loss loss_change loss_change_se n outlier_mass "
        "sink_heads note",
        "heads": "change draw layer head sinks outlier_mass",
    }
    _figures: ClassVar[str] = (
        "loss cells found sequences dimensions layers outlier_mass sink_heads heads tokens"
    )


@dataclass(frozen=True, eq=False)
class Quantization(Result):
    """What rounding a model's weights and activations costs.

    `table` has a row for each way of rounding; the score is the change in loss. `layers` has a row
    for each of these and each layer: how far its residual stream is off.
    """

    layers: pd.DataFrame = field(default_factory=pd.DataFrame)

    _kind: ClassVar[str] = "a file of quantization"
    _frames: ClassVar[tuple[str, ...]] = ("layers",)
