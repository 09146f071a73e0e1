"""The headroom of values as a table, and in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...scanner.text import printable

if TYPE_CHECKING:
    from .headroom import HeadroomHistory, UnderflowCounts

_FEW_ROWS = 24  # of a text


@dataclass(frozen=True)
class HeadroomTable:
    """The headroom of all that modules made, and of weights and gradients.

    Attributes:
        rows: A row for each entry, those with the fewest bits left first.
    """

    rows: list[HeadroomHistory]

    @property
    def fits_float16(self) -> bool:
        """True if no magnitude so far exceeded float16's largest number."""
        return all(row.float16_bits >= 0 for row in self.rows)

    def _repr_html_(self) -> str:
        from ...scanner.notebook_html import table_html, text_html

        names = ("bits", "trend", "float16 bits", "abs max", "entry", "dtype")
        rows = [
            (
                *(f"{row.bits:.1f}", f"{_drift(row):+.2f}", f"{row.float16_bits:.1f}"),
                *(f"{row.abs_max:.3g}", row.where, row.dtype),
            )
            for row in self.rows[:_FEW_ROWS]
        ]
        *_, last = str(self).splitlines()
        return table_html(names, rows) + text_html(last, [], str(self))

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


def _drift(row: HeadroomHistory) -> float:
    """Returns the bits that a step gives, without the sign of a 0."""
    return round(-row.trend, 2) + 0.0


def _counts_text(counts: UnderflowCounts | None) -> str:
    if counts is None:
        return " " * 15
    zeros, subnormals = counts.zeros / counts.numel, counts.subnormals / counts.numel
    return f" {zeros:6.1%} {subnormals:7.1%}"
