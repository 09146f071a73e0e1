"""The numbers that a guard measures of a run: its own cost, headroom, counts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from ..record.flight import FlightRecorder
from ..record.table import FlightRecord
from ..recording.watch import ModelWatch
from ..report.report import Report
from ..report.run import Run
from ..verdict.headroom import HeadroomTracker
from .config import GuardConfig
from .metrics import MetricsDispatcher, exporters_of
from .monitors.magnitudes import Headroom, Saturation, Underflow
from .overhead import OverheadTimer


class Measurements:
    """Measures a run, and sends the numbers to the exporters.

    Args:
        config: The guard's.
        watches: The watched models.
        counts: Returns the numbers of all, bad and skipped steps.

    Attributes:
        timer: Measures the guard's own cost.
        headroom: Tracks how far values are from the end of their dtype.
        record: Keeps the flight record, or None.
    """

    def __init__(
        self,
        config: GuardConfig,
        watches: Sequence[ModelWatch],
        counts: Callable[[], Mapping[str, float]],
    ) -> None:
        self._watches = watches
        self._counts = counts
        self._dispatcher = MetricsDispatcher(exporters_of(config.metrics))
        self.timer = OverheadTimer(lambda: sum(w.recorder.seconds for w in watches))
        headroom, underflow = config.monitor(Headroom), config.monitor(Underflow)
        saturation = config.monitor(Saturation)
        self.headroom = HeadroomTracker(
            watches,
            None if headroom is None else headroom.bits,
            None if underflow is None else underflow.every,
            None if saturation is None else saturation.share,
            config.sync == "lagged",
        )
        self.record = _recorder_of(config, watches, lambda: self.run)

    @functools.cached_property
    def run(self) -> Run:
        """The run that files name; it begins with the first file: the rank is known."""
        return Run.begin()

    def record_of(self, report: Report, num_lines: int) -> FlightRecord | None:
        """Returns the flight record up to the step of a report, or None."""
        return None if self.record is None else self.record.so_far(report, num_lines)

    def metrics(self) -> dict[str, float]:
        """Returns all numbers. Does not incur a CPU-GPU sync."""
        not_scanned = (watch.recorder.coverage.not_scanned for watch in self._watches)
        values = {
            **self._counts(),
            "not_scanned_total": sum(not_scanned),
            **self.timer.metrics(),
            **self.headroom.metrics(),
        }
        return {name: float(value) for name, value in values.items()}

    def emit(self, step: int) -> None:
        """Sends the numbers of a step to the exporters."""
        self._dispatcher.emit(step, self.metrics)


def _recorder_of(
    config: GuardConfig, watches: Sequence[ModelWatch], run: Callable[[], Run]
) -> FlightRecorder | None:
    record = config.record
    if record is None or not Run.begin().collects(record.ranks):
        return None
    return FlightRecorder(
        record.path,
        record.steps,
        int(record.mib * 2**20),
        watches,
        config.on_overflow,
        config.sync == "lagged",
        run,
    )
