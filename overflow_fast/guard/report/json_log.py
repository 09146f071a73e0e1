"""A file of one JSON object a line, which many processes may append to."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from ..files.json_text import dumps, parse_object
from ..files.reading import is_regular, open_regular
from ..files.writing import make_folder, open_appending

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
        header: Callable[[], Any],
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


# 0.2 s in all, for a line that another process writes; chosen. With fewer of them a
# line that is written slowly is cut in two, which readers count as damaged.
_LOOKS_AT_THE_END = 20


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
    """Locks a file among processes unless another has locked it; never waits.

    Without the lock two processes that find the file full would both rename, and the
    second would put a file of a few lines in place of the full one.
    """
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
