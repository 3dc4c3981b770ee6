"""Rotary angles from what a config states, in float64 and by formulas of its own.

It shares no code with the model, so that a wrong frequency in the model is seen.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.doctor.diagnosis import NotApplicable


@dataclass(frozen=True)
class Rope:
    """Rotary positions as a config states them.

    `settings` uses Hugging Face's names (`rope_type`, `rope_theta`, `factor`, ...). From `first` on
    `n_turned` dimensions of a head are turned in pairs: dimension i with i + n_turned / 2, or with
    its neighbour.
    """

    settings: Mapping[str, object]
    n_turned: int
    neighbours: bool = False
    first: int = 0
    """Where in a head the dimensions that are turned begin."""

    def frequencies(self) -> np.ndarray:
        """Radians by which each pair turns from one position to the next.

        Raises: NotApplicable for a scaling whose formula is not known here.
        """
        kind = str(self.settings.get("rope_type", "default"))
        base = float(str(self.settings["rope_theta"]))
        plain = np.array(
            [base ** (-2 * pair / self.n_turned) for pair in range(self.n_turned // 2)]
        )
        if kind in ("default", "dynamic"):  # dynamic scaling begins beyond the trained context
            return plain
        if kind == "linear":
            return plain / self._number("factor")
        if kind == "llama3":
            return np.array([self._llama3(float(frequency)) for frequency in plain])
        raise NotApplicable(f"the angles of rope type {kind!r} have no independent formula here")

    def _llama3(self, frequency: float) -> float:
        low, high = self._number("low_freq_factor"), self._number("high_freq_factor")
        context, factor = self._number("original_max_position_embeddings"), self._number("factor")
        wavelength = 2 * math.pi / frequency
        if wavelength < context / high:
            return frequency
        if wavelength > context / low:
            return frequency / factor
        mix = (context / wavelength - low) / (high - low)
        return (1 - mix) * frequency / factor + mix * frequency

    def _number(self, name: str) -> float:
        return float(str(self.settings[name]))

    def pairs(
        self, x: Float[Tensor, "batch pos heads d_head"]
    ) -> Float[Tensor, "batch pos heads pair 2"]:
        """The dimensions that are turned, two by two."""
        turned = x[..., self.first : self.first + self.n_turned]
        if self.neighbours:
            return turned.unflatten(-1, (-1, 2))
        return turned.unflatten(-1, (2, -1)).transpose(-1, -2)

    def turned(
        self, x: Float[Tensor, "batch pos heads d_head"], positions: Int[Tensor, " pos"]
    ) -> Float[Tensor, "batch pos heads d_head"]:
        """`x` after each position's turn."""
        angles = torch.from_numpy(np.outer(positions.numpy(), self.frequencies()))
        cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
        first, second = self.pairs(x).unbind(-1)
        both = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
        whole = both if self.neighbours else both.transpose(-1, -2)
        last = self.first + self.n_turned
        return torch.cat((x[..., : self.first], whole.flatten(-2), x[..., last:]), dim=-1)
