"""The ledger: the numbers of a run, and what is written down of each judgement."""

from __future__ import annotations

import logging
from typing import NamedTuple

from .archive import Archive
from .core import GuardCore
from .error_notes import add_report
from .optimizers.optimizer_hook import OptimizerHook
from .policy import limit_skips
from .report.alarm_log import AlarmLog
from .report.cost import Cost
from .report.report import NonFiniteError, Report
from .requests.request_numbers import RequestNumbers
from .rounds import Rounds
from .unit import Unit
from .verdict.verdict import Verdict

CLEAN = Verdict()  # that of most units
_log = logging.getLogger("overflow_fast")


class _Line(NamedTuple):
    """The log's line of a finite step, which a round may yet change."""

    step: int
    action: str | None
    num_left_out: int


class Ledger:
    """Counts what was judged, and writes it to evidence, log and flight record.

    Args:
        guard: The guard's core.

    Attributes:
        archive: Evidence and log.
        rounds: Counts steps and skips.
        requests: Counts requests.
        last_report: The report of the last bad unit, or None.
        num_bad: The number of bad units.
        num_bad_in_row: The bad steps since the last finite round.
    """

    def __init__(self, guard: GuardCore) -> None:
        self._guard, self._isolation = guard, guard.isolation
        self._alarms = AlarmLog()
        self._line: _Line | None = None
        self._spike_step: int | None = None  # the last finite step with a spike
        self._num_spikes = 0
        self.archive = Archive(guard)
        self.rounds = Rounds(guard.hooks)
        self.requests = RequestNumbers()
        self.last_report: Report | None = None
        self.num_bad = self.num_bad_in_row = 0

    def go_on_from(self, before: Ledger) -> None:
        """Counts on where the ledger of a guard has ended that this one replaces."""
        self.num_bad, self.last_report = before.num_bad, before.last_report
        self.requests.go_on_from(before.requests)

    # A bad unit: counted, written, told.

    def count(self, unit: Unit, report: Report) -> None:
        """Counts a bad unit and its action; too many skips in a row raise."""
        self.num_bad += 1
        self.num_bad_in_row += not unit.kind.is_evaluation
        self.requests.num_bad += unit.kind.is_request
        self.last_report = report
        if unit.hook is not None:
            if report.action == "skip":
                self._count_skip(unit.hook, report)
            else:
                self.rounds.note(unit.hook, bool(unit.skipped_by), is_by_guard=False)
            if unit.kind.moment != "after":
                self.rounds.report = report
        report.num_skipped = self.rounds.num_skipped

    def _count_skip(self, hook: OptimizerHook, report: Report) -> None:
        """Counts a step that is skipped; after too many in a row it raises instead."""
        rounds = self.rounds
        rounds.note(hook, is_skipped=True, is_by_guard=True)
        most = self._guard.config.max_consecutive_skips
        choice = limit_skips(rounds.consecutive_skips, most)
        if choice.action != "skip":
            rounds.take_back()
        report.action = choice.action
        report.notes += choice.notes

    def write(self, unit: Unit, report: Report, is_own: bool) -> None:
        """Writes a report to evidence, log and flight record."""
        if not unit.kind.is_request:
            self._line = None
        if unit.kind.is_last:
            self.record_step(unit.number, None)
        with self._isolation.isolated():  # the action is decided
            total = unit.left_out.total
            self.archive.end_report(report, unit.number, total, is_own)

    def tell(self, unit: Unit, report: Report, is_own: bool) -> None:
        """Tells the program of a bad unit, by a warning or an exception.

        Raises:
            NonFiniteError: If that is the action, unless the program itself has raised.
        """
        if unit.error is not None:  # the program's own goes on
            raises = self._guard.config.on_overflow == "raise"
            if add_report(unit.error, report) and not raises:
                _log.warning("%s", unit.line(report))
            return
        if report.action == "raise":
            raise NonFiniteError(report)
        if unit.kind.is_request:
            _log.warning("%s", unit.line(report))
        elif is_own:
            with self._isolation.isolated():
                is_step = not unit.kind.is_evaluation
                self._alarms.warn(report, self.num_bad_in_row * is_step)

    def tell_late(self, unit: Unit, report: Report) -> None:
        """Adds an explanation that has come late to the evidence, and logs its line."""
        with self._isolation.isolated():
            self.archive.add_report(report)
        _log.warning("%s", unit.line(report))

    # A finite one.

    def end_finite(self, unit: Unit) -> None:
        """Ends a finite unit: its line is written with its round's, if it has one."""
        skipper = unit.skipped_by or None
        line = _Line(unit.number, skipper, unit.left_out.total)
        is_over = unit.kind.moment == "after"
        if unit.hook is None or is_over:
            self.num_bad_in_row, self._line = 0, None
            self._write_line(line)
        else:  # a round has one line
            before = self._line
            if before is not None and not skipper:
                line = line._replace(action=before.action)
            self._line = line
        if unit.hook is not None:
            self.rounds.note(unit.hook, bool(skipper), False, is_over)

    def end_finite_request(self, number: int, num_left_out: int) -> None:
        """Ends a finite request, whose line is its own."""
        self._write_line(_Line(number, None, num_left_out))

    def skip_finite(self, unit: Unit, hook: OptimizerHook, notes: list[str]) -> Report:
        """Counts a finite step that a monitor skips.

        Raises:
            NonFiniteError: After too many skips in a row.
        """
        self.num_bad_in_row = 0
        report = Report(unit.number, "skip", CLEAN, notes=notes)
        report.moment = unit.kind.moment
        self._count_skip(hook, report)
        self._line = _Line(unit.number, report.action, unit.left_out.total)
        self.rounds.report = report
        if report.action == "raise":
            raise NonFiniteError(report)
        return report

    def note_spike(self, step: int) -> None:
        """Counts a step with a spike, once."""
        self._num_spikes += self._spike_step != step
        self._spike_step = step

    # The end of a step.

    def end_line(self) -> None:
        """Writes the line of the round that is over."""
        if self.rounds.report is None:
            self.num_bad_in_row = 0
        line, self._line = self._line, None
        if line is not None:
            self._write_line(line)

    def _write_line(self, line: _Line) -> None:
        left_out = self.rounds.num_skipped, line.num_left_out
        self.archive.log(line.step, CLEAN, line.action, *left_out, None)

    def record_step(self, step: int, cost: Cost | None) -> None:
        """Ends the flight record's line; its cost is None where it was not measured."""
        record = self._guard.measurements.record
        if record is None:
            return
        optimizers, has_spike = self._guard.optimizers(), self._spike_step == step
        report, is_skipped = self.last_report, self.rounds.is_skipped
        try:
            record.end_step(step, cost, optimizers, report, is_skipped, has_spike)
        except Exception as error:
            self._isolation.note(error)

    def close(self) -> None:
        """Writes what is known of the last step, and closes log and record."""
        self.end_line()
        self.archive.close()
        record = self._guard.measurements.record
        if record is not None:
            with self._isolation.isolated():
                record.close(self.last_report)

    def counts(self) -> dict[str, float]:
        """The numbers of bad, skipped and spiky steps, and of requests."""
        return {
            "bad_steps_total": self.num_bad,
            "skipped_steps_total": self.rounds.num_skipped,
            "spikes_total": self._num_spikes,
            "consecutive_skips": self.rounds.consecutive_skips,
            **self.requests.metrics(),
        }
