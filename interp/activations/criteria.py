"""From where on an activation stands out: the thresholds of every rule, and their sources.

One invariant: a threshold that means nothing is refused before a model runs.
"""

from dataclasses import asdict, dataclass

from interp.errors import AnalysisError

MAGNITUDE, RATIO = 100.0, 1000.0
"""From where on an activation is massive. Source: Sun et al. 2024, "Massive Activations in Large
Language Models", section 2, who call the criterion loose."""


@dataclass(frozen=True)
class Criteria:
    """How many cells are listed, and what counts as an outlier.

    `top` cells of each layer and site are listed, 3 as Sun et al. do. An activation is massive
    above `magnitude` and at `ratio` times the median |x| at least. It is beyond when it is more
    than `deviations` standard deviations off, 6 in Bondarenko et al. 2023, section 3. A dimension
    is an outlier feature with |x| of `feature_magnitude` at least, at `feature_positions` of the
    tokens at least, in `feature_layers` of the layers at least: Dettmers et al. 2022, section 4.

    Raises: AnalysisError for `top` below 1, a threshold that is negative or not a number, or a
    share above 1.
    """

    top: int = 3
    magnitude: int | float = MAGNITUDE
    ratio: int | float = RATIO
    deviations: int | float = 6.0
    feature_magnitude: int | float = 6.0
    feature_layers: int | float = 0.25
    feature_positions: int | float = 0.06

    def __post_init__(self) -> None:
        if self.top < 1:
            raise AnalysisError(f"top = {self.top}: at least one activation a layer is listed")
        for name, value in self.params.items():
            if not value >= 0:
                raise AnalysisError(f"{name} = {value:g}: a threshold is 0 or above")
        for name in ("feature_layers", "feature_positions"):
            if (share := self.params[name]) > 1:
                raise AnalysisError(f"{name} = {share:g}: a share of all is 1 at most")

    @property
    def params(self) -> dict[str, int | float]:
        """Everything by name, thresholds as floats."""
        return {**{name: float(value) for name, value in asdict(self).items()}, "top": self.top}
