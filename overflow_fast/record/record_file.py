"""The file of a flight record: lines are appended, and the old ones thinned."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

from ..files.json_text import line_bytes, parse_object
from ..files.reading import open_regular
from ..files.writing import make_folder, open_new, write_all
from .record_lines import FOLD, TOP_LEVEL, Line, fold

# Which lines of a full record are folded, so that it fits its file again.


_T = TypeVar("_T")


class LineSpan(NamedTuple):
    """Where a line of steps lies in its file, or several that are to be one line."""

    offset: int
    length: int
    level: int


class Folded(NamedTuple):
    """Lines that are to be one line of a level."""

    level: int
    parts: list[LineSpan | Folded]


def thin(
    places: Sequence[LineSpan], num_full: int, max_bytes: int
) -> list[LineSpan | Folded]:
    """Plans the lines of a record that is to have half of its bytes again.

    A quarter of the bytes is for single steps, and a twelfth for each level above.

    Args:
        places: The lines, the oldest first.
        num_full: How many steps keep a line of their own, where there is room.
        max_bytes: How many bytes the file may have.

    Returns:
        The lines to be, the oldest first.
    """
    mean = max(1, sum(place.length for place in places) // max(1, len(places)))
    levels: list[list[LineSpan | Folded]] = [[] for _ in range(TOP_LEVEL + 1)]
    for place in places:
        levels[place.level].append(place)
    for level, lines in enumerate(levels):
        share = max_bytes // (4 if level == 0 else 4 * TOP_LEVEL) // mean
        most = max(1, min(num_full, share) if level == 0 else share)
        excess = len(lines) - most
        if excess <= 0:
            continue
        if level == TOP_LEVEL:
            lines[: excess + 1] = [Folded(level, lines[: excess + 1])]
            continue
        if most >= FOLD:
            excess -= excess % FOLD
        folded = [Folded(level + 1, part) for part in _parts(lines[:excess])]
        levels[level + 1] += folded
        del lines[:excess]
    return [line for level in reversed(levels) for line in level]


def _parts(lines: Sequence[_T]) -> Iterator[list[_T]]:
    for i in range(0, len(lines), FOLD):
        yield list(lines[i : i + FOLD])


_log = logging.getLogger("overflow_fast")
_FULL, _THINNED = 7, 6  # eighths of a file: when it is thinned, what it has then


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
        with self._lock:
            heads, places, end = list(self._heads), list(self._places), self._end
        with open_regular(self.path) as old:
            if not os.path.samestat(os.fstat(old.fileno()), _status(self._file)):
                raise OSError(f"{self.path} was moved")
            new_path, new = _create(self.path.with_name(f"{self.path.name}.new"))
            try:
                new_heads = [_copy(old, new, place) for place in heads]
                new_places = self._thinned(old, new, places)
                is_small = new.tell() <= self._max_bytes * _THINNED // 8
                os.fsync(new.fileno())
                with self._lock:
                    shift = new.tell() - end
                    _copy(old, new, LineSpan(end, self._end - end, 0))
                    os.replace(new_path, self.path)
                    self._file.close()
                    self._file, self._end = new, new.tell()
                    self._heads = new_heads + _moved(self._heads[len(heads) :], shift)
                    self._places = new_places + _moved(
                        self._places[len(places) :], shift
                    )
                    # Lines may be so long that no thinning makes room.
                    full = self._max_bytes * _FULL // 8
                    self._thin_at = full if is_small else max(full, 2 * self._end)
            except BaseException:
                new.close()
                with contextlib.suppress(OSError):
                    os.unlink(new_path)
                raise

    def _thinned(
        self, old: BinaryIO, new: FileIO, places: Sequence[LineSpan]
    ) -> list[LineSpan]:
        """Writes thinned lines, as few as it takes for the file to have room again.

        How long a line will be is not known before it is folded: it has the entries of
        the widest, and all columns that one of them has.
        """
        begin, room = new.tell(), self._max_bytes
        while True:
            plan = thin(places, self._num_full, room)
            found = [_write(old, new, each) for each in plan]
            is_small = new.tell() <= self._max_bytes * _THINNED // 8
            if is_small or len(found) == 1 or not room:
                return found
            room //= 2
            new.seek(begin)
            new.truncate()


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


def _read(old: BinaryIO, place: LineSpan) -> bytes:
    old.seek(place.offset)
    return old.read(place.length)


def _copy(old: BinaryIO, new: FileIO, place: LineSpan) -> LineSpan:
    return _append(new, _read(old, place), place.level)


def _append(new: FileIO, data: bytes, level: int) -> LineSpan:
    offset = new.tell()
    write_all(new, data)
    return LineSpan(offset, len(data), level)


def _write(old: BinaryIO, new: FileIO, line: LineSpan | Folded) -> LineSpan:
    if isinstance(line, LineSpan):
        return _copy(old, new, line)
    return _append(new, line_bytes(_folded(old, line)), line.level)


def _folded(old: BinaryIO, line: LineSpan | Folded) -> Line:
    if isinstance(line, LineSpan):
        found = parse_object(_read(old, line))
        if found is None:
            raise OSError("a line is not as it was written")
        return found
    return fold([_folded(old, part) for part in line.parts], line.level)


def _moved(places: list[LineSpan], shift: int) -> list[LineSpan]:
    return [LineSpan(p.offset + shift, p.length, p.level) for p in places]
