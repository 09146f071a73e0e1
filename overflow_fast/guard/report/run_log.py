"""The log of a run: its identity, its alarms, and one JSON object a line."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import platform
import re
import secrets
import socket
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...scanner.modules import parameters_of
from ...scanner.text import dtype_name, notebook_shell, shortened
from ..files.json_text import SCHEMA, dumps, parse_object
from ..files.reading import is_regular, open_regular
from ..files.writing import make_folder, open_appending
from ..process import own_rank, world_size
from ..watching.watch import ModelWatch, models_of
from .log_lines import RunLine
from .report import Report

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger("overflow_fast")
_LONGEST_HEADER = 2**16  # bytes; ours has some 300, other files may have no line


class JsonLog:
    """Appends lines to a file and begins a new one when it is full. Never raises.

    Each line is one write to the end of the file, so lines of other processes on this
    machine stand between those of this one, never within them. A file in which this
    run has not written yet gets its header first.

    Files that are no logs are left alone: where the file holds something else, another
    one beside it is written to; where one of the older files is something else, none
    is moved, and the log grows.

    Args:
        path: The file; the ones before it get `.1`, `.2` at their end.
        name: The run's, for the name of another file.
        header: Makes the header of the run.
        max_bytes: When a new file is begun.
        keep: How many older files are kept; 0: no new file is ever begun.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        name: str,
        header: Callable[[], dict[str, Any]],
        max_bytes: int,
        keep: int,
    ) -> None:
        self._given: Path | None = Path(path)
        self._path = self._given
        self._name = name
        self._header = header
        self._max_bytes = max_bytes
        self._keep = keep
        self._file: FileIO | None = None
        self._is_begun = self._is_torn = False
        self._warned: set[str] = set()

    def write(self, line: dict[str, Any]) -> None:
        """Appends a line. One that cannot be written is lost, which is logged once."""
        try:
            file, data = self._prepared(line)
            if self._is_full(file, len(data)) and self._rotate(file):
                file, data = self._prepared(line)
            self._append(file, data)
        except Exception as error:
            self._warn_once("Lines of the log %s are lost: %s.", self._path, error)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _prepared(self, line: dict[str, Any]) -> tuple[FileIO, bytes]:
        """Returns the file, and a line for it, behind the header if that is missing."""
        file, data = self._opened(), f"{dumps(line)}\n".encode()
        if self._is_begun:
            return file, data
        header = f"{dumps(self._header())}\n".encode()
        end = b"\n" if self._is_torn else _line_end(self._path)
        return file, end + header + data

    def _opened(self) -> FileIO:
        """Opens the file, anew where another process has moved or removed it."""
        if self._file is not None and _is_at(self._file, self._path):
            return self._file
        self.close()
        if self._given is not None:  # not earlier: asking the disk may fail
            real = Path(os.path.realpath(self._given))
            self._path = real if is_regular(real) else self._given
            self._given = None
        make_folder(self._path.parent)
        if not _is_own(self._path):
            other = f"{self._path.stem}.{self._name}{self._path.suffix}"
            self._warn_once(
                "%s is no log of overflow_fast and is left alone: the log is %s beside "
                "it.",
                self._path,
                other,
            )
            self._path = self._path.with_name(other)
        self._file = open_appending(self._path)
        self._is_begun = False
        return self._file

    def _append(self, file: FileIO, data: bytes) -> None:
        written = file.write(data) or 0  # one write: lines of processes do not mix
        self._is_begun = written == len(data)
        if not self._is_begun:
            self._is_torn = bool(written) and not _take_back(file, written)
            raise OSError("there is no room for a line")
        self._is_torn = False

    # When it is full.

    def _is_full(self, file: FileIO, more: int) -> bool:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            return False
        return status.st_size > 0 and status.st_size + more > self._max_bytes

    def _rotate(self, file: FileIO) -> bool:
        """Renames the full file; returns False if it has to stay."""
        numbers = range(1, self._keep + 1)
        older = [self._path.with_name(f"{self._path.name}.{i}") for i in numbers]
        with _locked(file) as is_locked:
            if not older or not is_locked:
                return False
            if not _is_at(file, self._path):
                return True
            for path in older:
                if path.is_symlink() or not _is_own(path):
                    self._warn_once(
                        "%s is no log of overflow_fast and is left alone: the log "
                        "grows beyond log.mib.",
                        path,
                    )
                    return False
            files = [self._path, *older]
            for newer, path in reversed(list(itertools.pairwise(files))):
                if newer.exists():
                    os.replace(newer, path)
        return True

    def _warn_once(self, text: str, *values: object) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning(f"{text} Logged once.", *values)


_LOOKS_AT_THE_END = 20  # 0.2 s in all, for a line that another process writes; chosen


def _is_at(file: FileIO, path: Path) -> bool:
    """True if a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except OSError:
        return False


def _is_own(path: Path) -> bool:
    """True if a file is missing, empty, not plain, or has a log's header."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return True
    except FileNotFoundError:
        return True
    with open_regular(path) as file:
        first = file.readline(_LONGEST_HEADER)
    if not first:
        return True
    header = parse_object(first)
    return header is not None and "overflow_fast" in header


def _line_end(path: Path) -> bytes:
    """Returns the end of the last line, where another process has left it half written.

    Waits for a line that another process is writing at this moment.
    """
    if not is_regular(path) or not path.stat().st_size:
        return b""
    with open_regular(path) as file:
        for _ in range(_LOOKS_AT_THE_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) == b"\n":
                return b""
            time.sleep(0.01)
    return b"\n"


def _take_back(file: FileIO, written: int) -> bool:
    """Removes half a line, unless another process has written behind it."""
    with contextlib.suppress(OSError):
        end = os.lseek(file.fileno(), 0, os.SEEK_CUR)
        if os.fstat(file.fileno()).st_size == end:
            os.ftruncate(file.fileno(), end - written)
            return True
    return False


@contextlib.contextmanager
def _locked(file: FileIO) -> Iterator[bool]:
    """Locks a file among processes unless another has locked it; never waits."""
    if fcntl is None:
        yield True
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


# The identity of a run, which marks its lines and folders.


_MOST_MODELS = 32  # that are named in the first line of a file


@dataclass(frozen=True)
class RunIdentity:
    """One guard's run in one process.

    Attributes:
        id: Its name, which no other run has: time, host, process, rank, random digits.
        started: When it began, in UTC.
        host: The machine's name.
        rank: Of `torch.distributed`; 0 without it.
        world_size: How many ranks there are.
    """

    id: str
    started: datetime
    host: str
    rank: int
    world_size: int

    @classmethod
    def begin(cls) -> RunIdentity:
        """Begins a run now."""
        started, host = datetime.now(timezone.utc), socket.gethostname()
        rank, size = own_rank(), world_size()
        parts = [
            f"{started:%Y%m%dT%H%M%SZ}",
            re.sub(r"[^A-Za-z0-9_.-]", "_", host)[:40],
            str(os.getpid()),
            *([f"rank{rank}"] if size > 1 else []),
            secrets.token_hex(3),
        ]
        return cls("-".join(parts), started, host, rank, size)

    def collects(self, ranks: str) -> bool:
        """True if this rank writes a log or record of these ranks; see `Log`."""
        if ranks == "node":
            return os.environ.get("LOCAL_RANK", "0") == "0"
        return ranks == "all" or self.rank == 0

    def path_of_rank(self, path: str | os.PathLike[str]) -> Path:
        """Returns a path of this rank's own: `guard.rank3.jsonl` with several ranks."""
        whole = Path(path)
        if self.world_size == 1 or not whole.name:
            return whole
        return whole.with_name(f"{whole.stem}.rank{self.rank}{whole.suffix}")

    def header(self, watches: Sequence[ModelWatch], policy: object) -> dict[str, Any]:
        """Makes the line that a run begins with in a log; see `fields()`."""
        return RunLine.line(**self.fields(watches, policy))

    def fields(self, watches: Sequence[ModelWatch], policy: object) -> dict[str, Any]:
        """The fields of a run in the first line of a log or of a record.

        Args:
            watches: The watched models.
            policy: The guard's `on_overflow`.
        """
        from ... import __version__

        found = list(models_of(watches).values())
        dtypes = {dtype_name(p.dtype) for model in found for p in parameters_of(model)}
        return {
            "schema": SCHEMA,
            "run": self.id,
            "time": round(self.started.timestamp(), 3),
            "started": f"{self.started:%Y-%m-%dT%H:%M:%SZ}",
            "host": self.host,
            "pid": os.getpid(),
            "script": _script(),
            "rank": self.rank,
            "world_size": self.world_size,
            "overflow_fast": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "models": _names_of(found),
            "dtypes": sorted(dtypes),
            "policy": policy if isinstance(policy, str) else "callable",
        }


def _script() -> str:
    """The program's file, or its package; "" where code is typed."""
    path = Path(next(iter(sys.argv), ""))
    name = path.parent.name if path.stem == "__main__" else path.name
    is_typed = notebook_shell() is not None or name in ("-c", "-m")
    return "" if is_typed else name


def _names_of(models: Sequence[nn.Module]) -> list[str]:
    """The names of models' classes, as far as there is room in a line."""
    names = [shortened(type(model).__name__) for model in models[:_MOST_MODELS]]
    more = len(models) - len(names)
    return [*names, f"{more} more"] if more else names


# The warnings that a guard logs: in full for a new place, then ever rarer.


_MAX_PLACES = 10_000  # 180 bytes each


class AlarmLog:
    """Logs the reports of bad steps (logger `overflow_fast`).

    An alarm of a new place is logged in full; of its repetitions, and of bad steps in a
    row, the 2nd, 4th, 8th and so on in short. One that an earlier run came to, from the
    same checkpoint, is logged in short.
    """

    def __init__(self) -> None:
        self._places: Counter[tuple[str, str, str]] = Counter()

    def warn(self, report: Report, num_in_row: int) -> None:
        """Logs the report of a bad step, unless it is a repetition to leave out.

        Args:
            report: The report.
            num_in_row: The number of bad steps in a row, this one included.
        """
        first = report.verdict.first
        assert first is not None
        place = first.kind, first.fqn, first.label
        if len(self._places) < _MAX_PLACES or place in self._places:
            self._places[place] += 1
        of_place = self._places[place]
        if report.repeats:
            earlier = f"Run {report.repeats} came to the same in this step."
            _log.warning("%s", report.short_text(earlier))
            return
        if num_in_row == 1 and of_place == 1:
            _log.warning("%s", report)
            return
        count, noun = (
            (num_in_row, "non-finite step in a row")
            if num_in_row > 1
            else (of_place, "alarm of this place")
        )
        if count & (count - 1) == 0:
            following = f"the next one logged is the {_ordinal(2 * count)}"
            counted = f"{_ordinal(count)} {noun}; {following}."
            _log.warning("%s", report.short_text(counted))


def _ordinal(count: int) -> str:
    is_teen = count % 100 in (11, 12, 13)
    ending = "th" if is_teen else {1: "st", 2: "nd", 3: "rd"}.get(count % 10, "th")
    return f"{count}{ending}"
