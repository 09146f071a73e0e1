"""The flight record of a run: a line for each watched step, in a bounded file.

The flow of a step:

1. While it runs, the recorder of each watched model keeps a row of its numbers.
2. `end_step()` ends the rows, and makes the step's line without them: its time, its
   learning rate, what was done about it.
3. A row may still be on its way from a device. Steps wait until all models have sent
   theirs, with `sync="lagged"` until the step after has ended, too.
4. The line gets the columns of its rows, and is written; before it the names of
   entries that are new, and before the first one the line of the run.

The state: `_steps` wait for their rows; `_num_entries`, `_name_bytes` and `_is_begun`
say what the file has so far, and begin anew with each file.
"""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch.optim import Optimizer

from ... import _C
from ...base.modules import parameters_of
from ..files.json_text import line_bytes
from ..optimizers.engine_scaler import LossScaler
from ..report.cost import Cost
from ..report.report import Report
from ..report.run_identity import RunIdentity
from ..watching.watch import ModelWatch
from .record_file import RecordFile
from .record_lines import EntriesLine, StepsLine
from .written_lines import columns_of, entries_line, run_line, step_line

_log = logging.getLogger("overflow_fast")


@dataclass
class _Step:
    """A step whose stats may still be on their way."""

    number: int  # counts the steps of the record
    line: StepsLine


_EMPTY_LINE = 80  # bytes of a line of entries that has none


def _size_of(line: Struct) -> int:
    return len(line_bytes(line)) + 1


class FlightRecorder:
    """Writes what recorders have collected of each step. Never raises.

    Args:
        path: Where the record is to be.
        num_full: How many steps keep a line of their own, where there is room.
        max_bytes: How many bytes the file may have.
        watches: The watched models.
        policy: The guard's `on_overflow`.
        is_lagged: Whether a step's verdict comes with the next one.
        run: Returns the run that the guard's other files name, too.

    Attributes:
        path: Where it was asked to be.
        file_path: The last file that was written; None before the first step.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        num_full: int,
        max_bytes: int,
        watches: Sequence[ModelWatch],
        policy: object,
        is_lagged: bool,
        run: Callable[[], RunIdentity] = RunIdentity.begin,
    ) -> None:
        self.path = Path(path)
        self._watches = watches
        self._policy = policy
        self._is_lagged = is_lagged
        self._run_of = run
        # A line of a step has at most 64 bytes an entry: an eighth of the file.
        self._max_entries = max(1, max_bytes // 512)
        self._max_names = max_bytes // 4
        self._open = functools.partial(
            RecordFile, num_full=num_full, max_bytes=max_bytes
        )
        self._file: RecordFile | None = None
        self._run: RunIdentity | None = None  # of the file
        self.file_path: Path | None = None
        self._num_entries = [0] * len(watches)  # that are in the file
        self._name_bytes = 0  # that they take
        self._is_full = False  # of names
        self._is_begun = False  # the file: its first line is there
        self._steps: collections.deque[_Step] = collections.deque()
        self._num_steps = 0
        self._last_report: Report | None = None
        self._has_warned = False
        for watch in watches:
            watch.recorder.keep_rows()

    def scan_loss_scale(self, scaler: LossScaler) -> None:
        """Adds a scaler's scale to the step. Does not incur a CPU-GPU sync."""
        model = self._watches[0].model
        if model is None:
            return
        device = next((p.device for p in parameters_of(model)), torch.device("cpu"))
        with torch.no_grad():
            scale: Any = scaler.scale(torch.ones((), device=device))
        self._watches[0].record(_C.FrameKind.RECORDED, (["loss_scale"], [scale]))

    def end_step(
        self,
        step: int,
        cost: Cost | None,
        optimizers: Sequence[Optimizer],
        report: Report | None,
        is_skipped: bool,
        has_spike: bool = False,
    ) -> None:
        """Ends a step, and writes those of which everything is known.

        Args:
            step: The step's number.
            cost: What it and the guard took; None if that was not measured.
            optimizers: The learning rate is that of the first one's first group.
            report: The last report of the run, or None.
            is_skipped: Whether the optimizer's step was skipped, by whomever.
            has_spike: Whether its loss or gradients were far above the last ones.
        """
        for watch in self._watches:
            watch.recorder.end_row(self._num_steps)
        line = step_line(step, cost, optimizers)
        line.actions = {"spike": 1} if has_spike else {}
        line.num_skipped = int(is_skipped and not self._is_lagged)
        self._steps.append(_Step(self._num_steps, line))
        self._num_steps += 1
        self._note(report)
        self._write_known(int(self._is_lagged))

    def lines_of(self, report: Report) -> list[Struct]:
        """Returns the lines of the step that a report stops, before it is written.

        Args:
            report: The report.
        """
        if report.moment != "before" or report.is_of_state:
            return []
        line = step_line(report.step, None, [])
        line.actions = {report.action: 1}
        line.num_skipped = int(report.action == "skip")
        rows = [watch.recorder.running_row() for watch in self._watches]
        heads, counts = self._new_heads()
        line.models = list(map(columns_of, rows, counts))
        return [*heads, line]

    def _note(self, report: Report | None) -> None:
        """Adds what was done about a step to its line, when its report is new."""
        if report is None or report is self._last_report:
            return
        self._last_report = report
        for each in self._steps:
            if each.line.first == report.step:
                each.line.actions = {report.action: 1}
                if report.action == "skip" or report.skipped_by:
                    each.line.num_skipped = 1

    def _write_known(self, num_left: int) -> None:
        recorders = [watch.recorder for watch in self._watches]
        while len(self._steps) > num_left and all(r.has_row for r in recorders):
            rows = [recorder.take_row() for recorder in recorders]
            step = self._steps.popleft()
            while step.number < rows[0].number and self._steps:
                step = self._steps.popleft()  # a step of which no row is kept
            self._isolated(functools.partial(self._write, step.line, rows))

    def close(self, report: Report | None = None) -> None:
        """Writes what has arrived, and closes the file; a later step has a new one.

        Args:
            report: The last report of the run, or None.
        """
        self._note(report)
        self._write_known(0)
        file, self._file = self._file, None
        if file is not None:
            self._isolated(file.close)

    # The file.

    def _isolated(self, function: Callable[[], None]) -> None:
        """Calls a function; its first failure is logged, and none stops the run."""
        try:
            function()
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "Steps of the flight record %s are lost: %s. This is logged once.",
                    self.path,
                    error,
                )

    def _write(self, line: StepsLine, rows: Sequence[_C.StepRow]) -> None:
        file = self._opened()
        heads, counts = self._new_heads()
        names = b"".join(map(line_bytes, heads))
        line.models = list(map(columns_of, rows, counts))
        file.append(names, line_bytes(line))
        self._num_entries, self._is_begun = counts, True
        self._name_bytes += len(names)

    def _new_heads(self) -> tuple[list[Struct], list[int]]:
        """The lines of the run and its entries that are not in the file; all counts."""
        counts = list(self._num_entries)
        heads = list[Struct]()
        if not self._is_begun:
            run = self._run or self._run_of()
            heads.append(run_line(run, self._watches, self._policy))
        for i, watch in enumerate(self._watches):
            if self._is_full:
                break
            line = entries_line(watch, i, counts[i])
            self._cut(line, sum(counts), heads)
            counts[i] += len(line.entries)
            heads += [line] if line.entries else []
        return heads, counts

    def _cut(self, line: EntriesLine, num_before: int, heads: Sequence[Struct]) -> None:
        """Leaves out of a line the entries for which the file has no room."""
        entries = line.entries
        room = self._max_names - self._name_bytes - sum(map(_size_of, heads))
        sizes = itertools.accumulate(map(_size_of, entries), initial=_EMPTY_LINE)
        fits = [size <= room for size in sizes][1:]
        num = min(sum(fits), max(0, self._max_entries - num_before))
        if num < len(entries):
            line.entries = entries[:num]
            self._is_full = True
            _log.warning(
                "The flight record %s has room for the names of %d entries: others, "
                "and those that are new from now on, are not recorded. Record(mib=) "
                "gives it more. Logged once.",
                self.path,
                num_before + num,
            )

    def _opened(self) -> RecordFile:
        """The file; a new one where another process, or an end, has closed it."""
        if self._file is None or not self._file.is_own:
            self._run = self._run_of() if self._run is None else RunIdentity.begin()
            wanted = self._run.path_of_rank(self.path)
            self._file = self._open(wanted)
            self.file_path = self._file.path
            self._num_entries, self._is_begun = [0] * len(self._watches), False
            self._name_bytes, self._is_full = 0, False
            if self._file.path != wanted:
                _log.warning(
                    "%s is there already: this run's flight record is %s.",
                    wanted,
                    self._file.path,
                )
        return self._file
