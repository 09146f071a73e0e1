"""The headroom of each tensor of a run: its history, and all of them as a table."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...base.text import bits_left, printable
from .entry_headroom import EntryHeadroom

_FLOAT16_MAX = 65504.0  # (2 - 2**-10) * 2**15
_LEAST_STEPS = 4  # watched, before there is a trend: of fewer one step may decide it
_FEW_ROWS = 24  # of a text; more do not fit a screen


@dataclass(frozen=True)
class UnderflowCounts:
    """The numbers of a tensor's values that are 0 or nearly.

    Attributes:
        numel: How many values there are.
        zeros: How many are 0.
        subnormals: How many are not, and nearer to 0 than the smallest normal number.
    """

    numel: int
    zeros: int
    subnormals: int

    def __add__(self, other: UnderflowCounts) -> UnderflowCounts:
        """The counts of several tensors together."""
        return UnderflowCounts(
            self.numel + other.numel,
            self.zeros + other.zeros,
            self.subnormals + other.subnormals,
        )


@dataclass(frozen=True)
class HeadroomHistory(EntryHeadroom):
    """The headroom of an entry over the steps; `abs_max` is of the last one.

    Attributes:
        highest: The largest magnitude of all watched steps; inf if it has overflowed,
            or was a nan (not of gradients, which a GradScaler may scale).
        recent: The largest magnitude of each of the last watched steps, at most 16.
        underflow: The last counts, or None if there are none.
    """

    highest: float = 0.0
    recent: list[float] = field(default_factory=list)
    underflow: UnderflowCounts | None = None

    @property
    def float16_bits(self) -> float:
        """The bits left for the highest magnitude in float16; negative: too large."""
        return bits_left(_FLOAT16_MAX, self.highest)

    @property
    def trend(self) -> float:
        """The bits that each watched step takes, by a line through the recent ones."""
        ys = [math.log2(value) for value in self.recent if value]
        if len(ys) < _LEAST_STEPS:
            return 0.0
        mean_x, mean_y = (len(ys) - 1) / 2, sum(ys) / len(ys)
        covariance = sum((x - mean_x) * (y - mean_y) for x, y in enumerate(ys))
        return covariance / sum((x - mean_x) ** 2 for x in range(len(ys)))

    @property
    def steps_left(self) -> float:
        """The watched steps until the trend reaches the end of the dtype."""
        return self.bits / self.trend if self.trend > 0 else math.inf


@dataclass(frozen=True, repr=False)
class HeadroomTable:
    """The headroom of all that modules made, and of weights and gradients.

    Attributes:
        rows: A row for each entry, those with the fewest bits left first.
    """

    rows: list[HeadroomHistory]

    def __str__(self) -> str:
        """The first rows as text, and whether all would fit float16."""
        if not self.rows:
            return "Nothing has been checked yet."
        head = f"{'bits':>6} {'trend':>7} {'float16':>7} {'abs max':>9}"
        has_counts = any(row.underflow for row in self.rows)
        lines = [head + " zeros  subnorm." * has_counts + "  entry"]
        for row in self.rows[:_FEW_ROWS]:
            counts = _counts_text(row.underflow) if has_counts else ""
            lines.append(
                f"{row.bits:6.1f} {_drift(row):+7.2f} {row.float16_bits:7.1f} "
                f"{row.abs_max:9.2e}{counts}  {printable(row.where)} ({row.dtype})"
            )
        if len(self.rows) > _FEW_ROWS:
            lines.append(f"... and {len(self.rows) - _FEW_ROWS} more")
        spent = sum(math.isinf(row.highest) for row in self.rows)
        beyond = sum(row.float16_bits < 0 for row in self.rows) - spent
        left, others = len(self.rows) - spent, " other" * bool(spent)
        if spent:
            lines.append(f"{spent} of {len(self.rows)} have been inf or nan already.")
        lines.append(
            f"{beyond} of {left}{others}{'s' * bool(spent)} would overflow in float16."
            if beyond
            else f"All{others} magnitudes so far would fit float16."
        )
        return "\n".join(lines)

    __repr__ = __str__


def _drift(row: HeadroomHistory) -> float:
    """Returns the bits that a step gives, without the sign of a 0."""
    return round(-row.trend, 2) + 0.0


def _counts_text(counts: UnderflowCounts | None) -> str:
    if counts is None:
        return " " * 15
    zeros, subnormals = counts.zeros / counts.numel, counts.subnormals / counts.numel
    return f" {zeros:6.1%} {subnormals:7.1%}"
