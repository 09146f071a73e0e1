"""The file of a flight record: lines are appended, and the old ones thinned."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from ..files.reading import open_regular
from ..files.writing import make_folder, open_new, write_all
from .record_lines import LineSpan
from .thinning import copied, is_small, thinned

# Eighths of a file: when it is thinned. With more of them the writer fills the rest
# before a thread has thinned it, and waits; with fewer it is thinned more often.
_FULL = 7


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
