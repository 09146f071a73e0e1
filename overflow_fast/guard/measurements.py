"""The numbers that a guard measures of a run: its own cost, headroom, counts."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence

from .. import _C
from .config import GuardConfig
from .kinds import exporters_of
from .overhead import OverheadTimer
from .record.flight import FlightRecorder
from .report.run_identity import RunIdentity
from .verdict.headroom import HeadroomTracker
from .watching.watch import ModelWatch

_log = logging.getLogger("overflow_fast")


class Measurements:
    """Measures a run, and sends the numbers to the exporters.

    Args:
        config: The guard's.
        watches: The watched models.

    Attributes:
        timer: Measures the guard's own cost.
        headroom: Tracks how far values are from the end of their dtype.
        record: Keeps the flight record, or None.
        are_read: There is one, or an exporter.
    """

    def __init__(self, config: GuardConfig, watches: Sequence[ModelWatch]) -> None:
        self._watches = watches
        self._exporters = exporters_of(config.metrics)
        self._failed: set[int] = set()  # exporters whose failure was logged
        self.timer = OverheadTimer(watches)
        self.headroom = HeadroomTracker(config, watches)
        self.record = _recorder_of(config, watches, lambda: self.run)
        self.are_read = self.record is not None or bool(self._exporters)

    @functools.cached_property
    def run(self) -> RunIdentity:
        """The run that files name; it begins with the first file: the rank is known."""
        return RunIdentity.begin()

    def metrics(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Returns all numbers. Does not incur a CPU-GPU sync.

        Args:
            counts: The numbers of all, bad and skipped steps.
        """
        not_scanned = (watch.recorder.coverage.not_scanned for watch in self._watches)
        values = {
            **counts,
            "not_scanned_total": sum(not_scanned),
            **self.timer.metrics(),
            **self.headroom.metrics(),
        }
        return {name: float(value) for name, value in values.items()}

    def emit(self, step: int, counts: Callable[[], Mapping[str, float]]) -> None:
        """Sends the numbers of a step to the exporters; none stops the run.

        Args:
            step: The step's number.
            counts: Returns the numbers of all, bad and skipped steps; called only if
                there is an exporter.
        """
        values = self.metrics(counts()) if self._exporters else {}
        for i, exporter in enumerate(self._exporters):
            try:
                with _C.Unwatched():
                    exporter(step, values)
            except Exception:
                if i not in self._failed:
                    self._failed.add(i)
                    _log.warning(
                        "A metrics exporter failed. Its later failures are not logged.",
                        exc_info=True,
                    )


def _recorder_of(
    config: GuardConfig,
    watches: Sequence[ModelWatch],
    run: Callable[[], RunIdentity],
) -> FlightRecorder | None:
    record = config.record
    if record is None or not RunIdentity.begin().collects(record.ranks):
        return None
    return FlightRecorder(
        record.path,
        record.steps,
        int(record.mib * 2**20),
        watches,
        config.on_overflow,
        config.verdicts_are_late,
        run,
    )
