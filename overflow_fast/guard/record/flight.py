"""The flight record of a run: a line for each watched step, in a bounded file."""

from __future__ import annotations

import base64
import collections
import contextlib
import functools
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from ... import _C
from ...scanner.modules import class_name_of, parameters_of
from ...scanner.text import shortened
from ...scanner.tree import entry_label
from ...scanner.types import TensorPath
from ..files.fields import line_of
from ..files.json_text import line_bytes, to_plain
from ..files.reading import open_regular
from ..files.writing import make_folder, open_new, write_all
from ..optimizers.engines import LossScaler
from ..report.cost import Cost
from ..report.report import Report
from ..report.run_log import RunIdentity
from ..verdict.roles import kind_of
from ..watching.watch import ModelWatch, models_of
from .record_lines import (
    COLUMNS,
    RECORD_SCHEMA,
    Columns,
    EntriesLine,
    EntryName,
    FlightRecordLine,
    Line,
    LineSpan,
    StepsLine,
)

# The lines of a record: its run, its entries, its steps, folded ones.


def columns_of(row: _C.StepRow, most: int) -> Line:
    """The columns of one model's row; one that was not counted is left out.

    Args:
        row: The row.
        most: How many entries have a name in the file; further ones are left out.
    """
    num = min(row.num_entries, most)
    columns: dict[str, Any] = {"num": num}
    # Names that a row of the extension may lack: not counted there.
    for name in COLUMNS:
        packed = getattr(row, name, None)
        if packed is not None:
            if num < row.num_entries:
                packed = packed[: num * (len(packed) // row.num_entries)]
            columns[name] = base64.b64encode(packed).decode()
    left_out = row.num_left_out + row.num_entries - num
    if left_out:
        columns["left_out"] = left_out
    return line_of(Columns, **columns)


# The lines of a flight record: its run, its entries, a step without its values.


_OF_CALLS = (_C.FrameKind.FORWARD, _C.FrameKind.BACKWARD)


def run_line(run: RunIdentity, watches: Sequence[ModelWatch], policy: object) -> Line:
    """The first line: schema, versions, host, rank, devices, models."""
    line: Line = to_plain(
        line_of(
            FlightRecordLine,
            **{**run.fields(watches, policy), "schema": RECORD_SCHEMA},
            byteorder=sys.byteorder,
            devices=_devices(watches),
        )
    )
    return line


def _devices(watches: Sequence[ModelWatch]) -> list[str]:
    models = models_of(watches).values()
    devices = {
        parameter.device for model in models for parameter in parameters_of(model)
    }
    return sorted(map(_device_name, devices))


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    return f"{device} ({torch.cuda.get_device_name(device)})"


def entry_lines(watch: ModelWatch, model: int, first: int) -> list[Line]:
    """The line of a model's entries from one on, if there are more.

    Args:
        watch: The model's.
        model: Which of the watched models it is.
        first: How many are in the file already.
    """
    columns = watch.recorder.row_columns(first)
    if not columns:
        return []
    entries = [_entry(watch, column) for column in columns]
    return [line_of(EntriesLine, model=model, first=first, entries=entries)]


def _entry(watch: ModelWatch, column: _C.RowColumn) -> Line:
    label, module, class_name = entry_label(column.place), "", ""
    kind = kind_of(column.place.label.role)
    if column.place.kind in _OF_CALLS:
        module = watch.name_at(column.place.module)
        own = watch.module_at(column.place.module)
        class_name = "" if own is None else class_name_of(type(own))
    elif column.place.kind != _C.FrameKind.RECORDED:
        path = TensorPath.from_fqn(kind, label)
        module, label = path.module, path.path
    entry: Line = to_plain(
        line_of(
            EntryName,
            module=shortened(module),
            class_name=shortened(class_name),
            kind=kind,
            label=shortened(label),
            dtype=column.dtype,
            limit=column.limit,
            numel=column.numel,
        )
    )
    return entry


def step_line(step: int, cost: Cost | None, optimizers: Sequence[Optimizer]) -> Line:
    """The line of a step without its values; see `FlightRecorder.end_step`."""
    return line_of(
        StepsLine,
        level=0,
        first=step,
        last=step,
        count=1,
        time=round(time.time(), 3),
        seconds=None if cost is None else round(cost.step_seconds, 6),
        guard_seconds=None if cost is None else round(cost.guard_seconds, 6),
        learning_rate=to_plain(_learning_rate(optimizers)),
        actions={},
        num_skipped=0,
        models=[],
    )


def _learning_rate(optimizers: Sequence[Optimizer]) -> float | None:
    """Of the first group of the first optimizer; None where it is on a device."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, torch.Tensor) and not rate.is_cpu:
                return None
            return None if rate is None else float(rate)
    return None


# The file of a flight record: lines are appended, and the old ones thinned.


_FULL = 7  # eighths of a file: when it is thinned


class RecordFile:
    """A file of this process alone, made anew: where there is one, `run.2.ofr`.

    A line is one write behind the last whole one, so a process that is killed leaves
    all lines but the one that it was writing. There are no locks: a copy that is made
    meanwhile is a record. A file that is nearly full is written anew by a thread,
    thinned, and takes the place of the old one in one rename; a writer that fills it
    before that is done waits. So it never has more than `max_bytes` and a line, and the
    one that is written anew has fewer.

    Args:
        path: Where the file is to be; folders are made.
        num_full: How many steps keep a line of their own, where there is room.
        max_bytes: How many bytes the file may have.

    Attributes:
        path: Where it is.

    Raises:
        OSError: If the file cannot be made.
    """

    def __init__(self, path: Path, num_full: int, max_bytes: int) -> None:
        make_folder(path.parent)
        self.path, self._file = _create(path)
        self._num_full = num_full
        self._max_bytes = max_bytes
        self._thin_at = max_bytes * _FULL // 8
        self._end = 0
        self._heads: list[LineSpan] = []  # what is no line of steps
        self._places: list[LineSpan] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._failed: Exception | None = None
        self._pid = os.getpid()

    @property
    def is_own(self) -> bool:
        """True in the process that made it; a forked one may not write to it."""
        return self._pid == os.getpid()

    def append(self, heads: bytes, steps: bytes) -> None:
        """Appends lines: of the run and its entries, and one of a step.

        Raises:
            OSError: If there is no room; then none of them is there.
        """
        more = len(heads) + len(steps)
        thread, is_full = self._thread, self._end + more > self._max_bytes
        if is_full and thread is not None and thread.is_alive():
            thread.join()
        with self._lock:
            self._check_room(more)
            self._file.seek(self._end)
            write_all(self._file, heads + steps)
            if heads:
                self._heads.append(LineSpan(self._end, len(heads), 0))
            self._places.append(LineSpan(self._end + len(heads), len(steps), 0))
            self._end += more
        if self._end > self._thin_at and self._thread is None:
            self._start_thinning()

    def _start_thinning(self) -> None:
        thread = threading.Thread(target=self._thin, name="overflow_fast-record")
        with contextlib.suppress(RuntimeError):  # the interpreter ends
            self._thread = thread
            thread.start()

    def _check_room(self, more: int) -> None:
        """Raises OSError if the file could not be thinned, and has no room."""
        if self._failed is not None and self._end + more > self._max_bytes:
            raise OSError(f"the file is full and cannot be thinned: {self._failed}")

    def close(self) -> None:
        """Waits until what was written is on the disk, and closes the file."""
        if not self.is_own:
            return
        thread = self._thread
        if thread is not None and thread.is_alive():
            thread.join()
        if self._end > self._thin_at and self._failed is None:
            self._thin()
        with contextlib.suppress(OSError):
            os.fsync(self._file.fileno())
        self._file.close()

    # A thinned file takes its place.

    def _thin(self) -> None:
        try:
            self._replace()
            self._thread = None
        except Exception as error:
            self._failed = error  # and no thread begins any more

    def _replace(self) -> None:
        from .thinning import copied, is_small, thinned

        with self._lock:
            heads, places, end = list(self._heads), list(self._places), self._end
        with open_regular(self.path) as old:
            if not os.path.samestat(os.fstat(old.fileno()), _status(self._file)):
                raise OSError(f"{self.path} was moved")
            new_path, new = _create(self.path.with_name(f"{self.path.name}.new"))
            try:
                new_heads = [copied(old, new, place) for place in heads]
                sizes = self._num_full, self._max_bytes
                new_places = thinned(old, new, places, *sizes)
                has_room = is_small(new.tell(), self._max_bytes)
                os.fsync(new.fileno())
                with self._lock:
                    shift = new.tell() - end
                    copied(old, new, LineSpan(end, self._end - end, 0))
                    os.replace(new_path, self.path)
                    self._file.close()
                    self._file, self._end = new, new.tell()
                    self._heads = new_heads + _moved(self._heads[len(heads) :], shift)
                    self._places = new_places + _moved(
                        self._places[len(places) :], shift
                    )
                    # Lines may be so long that no thinning makes room.
                    full = self._max_bytes * _FULL // 8
                    self._thin_at = full if has_room else max(full, 2 * self._end)
            except BaseException:
                new.close()
                with contextlib.suppress(OSError):
                    os.unlink(new_path)
                raise


def _create(path: Path) -> tuple[Path, FileIO]:
    """A new file here, or under the first name with a number that is free."""
    for candidate in _names(path):
        with contextlib.suppress(FileExistsError):
            return candidate, open_new(candidate)
    raise AssertionError("unreachable")


def _names(path: Path) -> Iterator[Path]:
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.stem}.{number}{path.suffix}")


def _status(file: FileIO) -> os.stat_result:
    return os.fstat(file.fileno())


def _moved(places: list[LineSpan], shift: int) -> list[LineSpan]:
    return [LineSpan(p.offset + shift, p.length, p.level) for p in places]


_log = logging.getLogger("overflow_fast")


@dataclass
class _Step:
    """A step whose stats may still be on their way."""

    number: int  # counts the steps of the record
    line: Line


_EMPTY_LINE = 80  # bytes of a line of entries that has none


def _size_of(line: Line) -> int:
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
        is_told: It was said that the path cannot be used: a first step that is lost is
            not said again.

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
        is_told: bool = False,
    ) -> None:
        self.path = Path(path)
        self._is_told = is_told
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
        line["actions"] = {"spike": 1} if has_spike else {}
        line["skipped"] = int(is_skipped and not self._is_lagged)
        self._steps.append(_Step(self._num_steps, line))
        self._num_steps += 1
        self._note(report)
        self._write_known(int(self._is_lagged))

    def lines_of(self, report: Report) -> list[Line]:
        """Returns the lines of the step that a report stops, before it is written.

        Args:
            report: The report.
        """
        if report.moment != "before" or report.is_of_state:
            return []
        line = step_line(report.step, None, [])
        line["actions"] = {report.action: 1}
        line["skipped"] = int(report.action == "skip")
        rows = [watch.recorder.running_row() for watch in self._watches]
        heads, counts = self._new_heads()
        line["models"] = list(map(columns_of, rows, counts))
        return [*heads, line]

    def _note(self, report: Report | None) -> None:
        """Adds what was done about a step to its line, when its report is new."""
        if report is None or report is self._last_report:
            return
        self._last_report = report
        for each in self._steps:
            if each.line["first"] == report.step:
                each.line["actions"] = {report.action: 1}
                if report.action == "skip" or report.skipped_by:
                    each.line["skipped"] = 1

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
            if not (self._has_warned or self._is_told):
                self._has_warned = True
                _log.warning(
                    "Steps of the flight record %s are lost: %s. This is logged once.",
                    self.path,
                    error,
                )

    def _write(self, line: Line, rows: Sequence[_C.StepRow]) -> None:
        file = self._opened()
        heads, counts = self._new_heads()
        names = b"".join(map(line_bytes, heads))
        line["models"] = list(map(columns_of, rows, counts))
        file.append(names, line_bytes(line))
        self._num_entries, self._is_begun, self._is_told = counts, True, False
        self._name_bytes += len(names)

    def _new_heads(self) -> tuple[list[Line], list[int]]:
        """The lines of the run and its entries that are not in the file; all counts."""
        counts = list(self._num_entries)
        heads = list[Line]()
        if not self._is_begun:
            run = self._run or self._run_of()
            heads.append(run_line(run, self._watches, self._policy))
        for i, watch in enumerate(self._watches):
            if self._is_full:
                break
            for line in entry_lines(watch, i, counts[i]):
                self._cut(line, sum(counts), heads)
                counts[i] += len(line["entries"])
                heads += [line] if line["entries"] else []
        return heads, counts

    def _cut(self, line: Line, num_before: int, heads: Sequence[Line]) -> None:
        """Leaves out of a line the entries for which the file has no room."""
        entries = line["entries"]
        room = self._max_names - self._name_bytes - sum(map(_size_of, heads))
        sizes = itertools.accumulate(map(_size_of, entries), initial=_EMPTY_LINE)
        fits = [size <= room for size in sizes][1:]
        num = min(sum(fits), max(0, self._max_entries - num_before))
        if num < len(entries):
            line["entries"] = entries[:num]
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
