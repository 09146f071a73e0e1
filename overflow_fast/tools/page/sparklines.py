"""The sparklines above the heatmap, from top to bottom, with the words before them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ...guard.record.record_step import RecordStep
from ..record.table import DRAWN, FlightRecord
from .columns import Column

Sparkline = list[float | None]
_GRADIENT = "largest_gradient"  # stands for the norm where nobody gave that
SPARKLINES = {
    **{name: DRAWN[name] for name in ("loss", "grad_norm")},
    _GRADIENT: "largest gradient",
    **DRAWN,
    "spikes": "spikes",
    "skips": "skips",
}


def sparklines_of(
    records: Sequence[FlightRecord], columns: Sequence[Column]
) -> dict[str, Sparkline]:
    """The numbers of each column: the largest of its steps and of all ranks.

    Returns:
        Lists by the names of `SPARKLINES`, in their order: those of which a number is
        known, "skips", the most that a rank has skipped, and "spikes", if there were
        any.
    """
    found: dict[str, Sparkline] = {
        name: [_largest(getattr(s, name) for s in _steps(records, c)) for c in columns]
        for name in DRAWN
    }
    if not any_known(found["grad_norm"]):
        largest = [_largest_gradients(record) for record in records]
        found[_GRADIENT] = [_largest(_of_column(largest, c)) for c in columns]
    known = {
        name: sparkline for name, sparkline in found.items() if any_known(sparkline)
    }
    events: dict[str, Sparkline] = {
        "spikes": [_spikes(records, column) for column in columns],
        "skips": [_skips(records, column) for column in columns],
    }
    known |= {name: sparkline for name, sparkline in events.items() if any(sparkline)}
    return {name: known[name] for name in SPARKLINES if name in known}


def _largest_gradients(record: FlightRecord) -> Sparkline:
    """The largest magnitude of all gradients of weights, for each step of a record."""
    rows = [i for i, each in enumerate(record.entries) if each.kind == "gradient"]
    values = record.values["abs_max"]
    if values is None or not rows or not len(record):
        return [None] * len(record.steps)
    bad = record.is_nonfinite()[:, rows].any(1).tolist()
    seen = values[:, rows].double().nan_to_num(-1.0).amax(1).tolist()
    return [
        math.nan if is_bad else None if most < 0 else most
        for is_bad, most in zip(bad, seen, strict=True)
    ]


def _of_column(
    sparklines: Sequence[Sparkline], column: Column
) -> Iterator[float | None]:
    for sparkline, lines in zip(sparklines, column.lines, strict=True):
        yield from (sparkline[i] for i in lines)


def any_known(sparkline: Sparkline) -> bool:
    """True if a sparkline has a number."""
    return any(value is not None for value in sparkline)


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
