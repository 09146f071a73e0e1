"""The strips above the heatmap: loss, gradient norm, learning rate, scale, skips."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ..record.record_types import RecordStep
from ..record.table import FlightRecord
from .columns import Column

Strip = list[float | None]
STRIPS = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "loss_scale": "loss scale",
}


def strips_of(
    records: Sequence[FlightRecord], columns: Sequence[Column]
) -> dict[str, Strip]:
    """The numbers of each column: the largest of its steps and of all ranks.

    Returns:
        Lists by the names of `STRIPS` (only those of which a number is known), and
        "skips": the most that a rank has skipped; and "spikes", if there were any.
    """
    found: dict[str, Strip] = {
        name: [_largest(getattr(s, name) for s in _steps(records, c)) for c in columns]
        for name in STRIPS
    }
    known = {name: strip for name, strip in found.items() if any_known(strip)}
    spikes: Strip = [_spikes(records, column) for column in columns]
    return {
        **known,
        **({"spikes": spikes} if any(spikes) else {}),
        "skips": [_skips(records, column) for column in columns],
    }


def any_known(strip: Strip) -> bool:
    """Tells whether a strip has a number."""
    return any(value is not None for value in strip)


def _steps(records: Sequence[FlightRecord], column: Column) -> Iterator[RecordStep]:
    for record, lines in zip(records, column.lines, strict=True):
        for i in lines:
            yield record.steps[i]


def _largest(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.nan if any(map(math.isnan, known)) else max(known, default=None)


def _spikes(records: Sequence[FlightRecord], column: Column) -> float:
    counts = (step.actions.get("spike", 0) for step in _steps(records, column))
    return max(counts, default=0)


def _skips(records: Sequence[FlightRecord], column: Column) -> float:
    return max(
        sum(record.steps[i].num_skipped for i in lines)
        for record, lines in zip(records, column.lines, strict=True)
    )
