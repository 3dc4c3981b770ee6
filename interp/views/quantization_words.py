"""What a table of quantization says, in words: for a figure, a page and a terminal alike.

One invariant: no difference is told that lies within two standard errors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from interp.tables import Result
from interp.views.figures.style import drawable
from interp.views.pages.page import number

NOISE = 1e-4
"""Nats that the order of float sums alone may make: less is no difference, however small its
error."""

FEW = 8
"""Sequences below which a standard error is told to be rough."""

CAUTION = (
    "Differences between two rows are told where they exceed two standard errors, taken as if the "
    "errors of both were independent; since all rows are of the same tokens, this is mostly "
    "cautious."
)

_SCHEMES = {"llm.int8": "LLM.int8", "smoothquant": "SmoothQuant", "awq": "AWQ"}
_SHARED = {"tensor": "per tensor", "token": "per token"}
_SCALES = _SHARED | {"vector": "vector-wise"}


@dataclass(frozen=True)
class Variant:
    """A row of the table: one way of rounding, and what it costs; None where that is not known."""

    scheme: str
    bits: str
    weight_scales: str
    activation_scales: str
    sinks: str
    change: float | None
    change_se: float | None

    @property
    def method(self) -> str:
        """The scheme as its authors write it."""
        return _SCHEMES.get(self.scheme, self.scheme)

    @property
    def weights(self) -> str:
        """What of the weights shares a scale."""
        return f"per {self.weight_scales}" if self.weight_scales else "not rounded"

    @property
    def group(self) -> str:
        """The scheme, and what of the weights shares a scale."""
        return f"{self.method}, weights {self.weights}"

    @property
    def scales(self) -> str:
        """What of the activations shares a scale; empty where they are not rounded."""
        return _SCALES.get(self.activation_scales, self.activation_scales)

    @property
    def label(self) -> str:
        """The bits and the scales: `W8A8 per tensor`."""
        return " ".join(filter(None, [self.bits.upper(), self.scales]))

    @property
    def kept(self) -> bool:
        """Whether the activations of sink tokens are not rounded."""
        return self.sinks == "kept"

    @property
    def place(self) -> tuple[str, str, str, str]:
        """All but the sinks: rows of one place differ in these alone."""
        return self.scheme, self.bits, self.weight_scales, self.activation_scales


def variants(table: pd.DataFrame) -> list[Variant]:
    """The rows of a table with the column `loss_change`, or of errors by layer, in their order."""
    names = ("scheme", "bits", "weight_scales", "activation_scales", "sinks")
    found = []
    for row in table.to_dict(orient="records"):
        words = {name: "" if pd.isna(row.get(name)) else str(row[name]) for name in names}
        change, error = drawable(row.get("loss_change")), drawable(row.get("loss_change_se"))
        found.append(Variant(**words, change=change, change_se=error))
    return found


def quantization_findings(result: Result) -> list[str]:
    """What each way of rounding costs, what schemes and kept sinks win back, and the notes."""
    rows = variants(result.table) if result.score in result.table else []
    if not any(row.change is not None for row in rows):
        return ["quantization: no way of rounding has a value"]
    summary = result.summary
    lines = [
        f"quantization: before rounding the loss is {number(summary.get('loss'))} {result.unit} a "
        f"token, a perplexity of {number(summary.get('perplexity'))}"
    ]
    if all(row.change_se is None for row in rows):
        lines.append("there are no standard errors, so no differences are told")
    if any(row.activation_scales in _SHARED for row in rows):
        lines.append("per tensor and per token say which activations share a scale")
    for bits in dict.fromkeys(row.bits for row in rows):
        own = [row for row in rows if row.bits == bits]
        name = bits.upper()
        lines.append(f"{name} costs, in {result.unit} a token: {_costs(own)}")
        lines += [
            f"{name}: {told}" for told in (*_won_back(own, result.unit), *_sinks(own, summary))
        ]
    lines += rough(result)
    notes = summary.get("notes")
    return [*lines, *(map(str, notes) if isinstance(notes, list) else ())]


def rough(result: Result) -> list[str]:
    """A line that says so where few sequences make errors rough themselves."""
    n = pd.to_numeric(result.table["n"], errors="coerce").max() if "n" in result.table else None
    if n is None or not n < FEW:
        return []
    return [f"standard errors of {int(n)} sequence{'' if n == 1 else 's'} are rough"]


def clear(difference: float, error: float | None) -> bool:
    """Whether a difference exceeds two standard errors; never where they are not known."""
    return error is not None and abs(difference) > max(2 * error, NOISE)


def _costs(rows: Sequence[Variant]) -> str:
    """What each way costs where sinks are treated as other tokens."""
    plain = [row for row in rows if not row.kept]
    return ", ".join(f"{_called(row, rows)} {_cost(row)}" for row in plain or rows)


def _won_back(rows: Sequence[Variant], unit: str) -> list[str]:
    """The share of the cost of the plainest rounding that other ways do not have."""
    plain = [row for row in rows if not row.kept and row.change is not None]
    plainest = [row for row in plain if row.scheme == "round-to-nearest"]
    base = min(plainest, key=lambda row: row.activation_scales != "tensor", default=None)
    if base is None or base.change is None or base.change_se is None:
        return []
    if base.change < 0 or not clear(base.change, base.change_se):
        return []
    better: list[str] = []
    worse, alike = [], []
    for row in plain:
        if row is base or row.change is None or row.change_se is None:
            continue
        less, error = base.change - row.change, math.hypot(base.change_se, row.change_se)
        called = _called(row, rows)
        if not clear(less, error):
            alike.append(called)
        elif less < 0:
            worse.append(f"{called} by {-less:.3g} ± {error:.2g}")
        else:
            left = row.change / base.change
            spread = math.hypot(row.change_se, left * base.change_se) / base.change
            saves = "" if better else " saves"
            better.append(f"{called}{saves} {_percent(1 - left, spread)}")
    name, told = _called(base, rows), []
    if better:
        told.append(f"of the {base.change:.3g} {unit} that {name} costs, {', '.join(better)}")
    if worse:
        told.append(f"worse than {name}: {', '.join(worse)}")
    if alike:
        told.append(f"not clearly different from {name}: {', '.join(alike)}")
    return told


def _sinks(rows: Sequence[Variant], summary: Mapping[str, object]) -> list[str]:
    """What it changes that sink tokens are not rounded."""
    kept = {row.place: row for row in rows if row.kept}
    pairs = [(row, kept[row.place]) for row in rows if not row.kept and row.place in kept]
    count = summary.get("sink_tokens")
    if count == 0 and pairs:
        return ["no token is a sink, so keeping them changes nothing"]
    told, alike = [], []
    for row, own in pairs:
        if row.change is None or own.change is None:
            continue
        if row.change_se is None or own.change_se is None:
            continue
        less, error = row.change - own.change, math.hypot(row.change_se, own.change_se)
        called = _called(row, rows)
        if not clear(less, error):
            alike.append(called)
            continue
        way, to = ("takes", "off") if less > 0 else ("adds", "to")
        told.append(
            f"{way} {abs(less):.3g} ± {error:.2g} {to} the cost of {called}, which is then "
            f"{_cost(own)}"
        )
    if alike:
        told.append(f"makes no clear difference for {', '.join(alike)}")
    counted = f"{count:,} " if isinstance(count, int) else ""
    return [f"keeping the {counted}sink tokens unrounded {'; it '.join(told)}"] if told else []


def _called(row: Variant, rows: Sequence[Variant]) -> str:
    """A way of rounding among others of the same bits, as short as it can be."""
    several = {own.weight_scales for own in rows if own.scheme == row.scheme}
    scheme = row.method if len(several) < 2 else f"{row.method} (weights {row.weights})"
    return f"{scheme} {row.scales}" if row.activation_scales in _SHARED else scheme


def _cost(row: Variant) -> str:
    if row.change is None:
        return "without a value"
    if row.change_se is None:
        return f"{row.change:.3g}".replace("-", "−")
    unclear = "" if clear(row.change, row.change_se) else " (not clearly different from 0)"
    change = f"{row.change:.3g}".replace("-", "−")
    return f"{change} ± {row.change_se:.2g}{unclear}"


def _percent(share: float, error: float) -> str:
    decimals = 0 if error >= 0.01 else 1
    return f"{100 * share:.{decimals}f} ± {100 * error:.{decimals}f}%"
