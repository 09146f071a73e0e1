"""Opens and reads files that anyone may have made, within bounds.

Only regular files are read: a FIFO or a device would never end. What cannot be opened
is an OSError that names the file; what does not hold what it should is a FileError.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from io import BufferedReader

MAX_LINE = 2**26  # a step of 65,536 entries takes 5.6 MB, their names about 15 MB
MAX_DOCUMENT = 2**28
_MAX_LINES = 2**34  # of a file of lines: half a minute of reading
_FLAGS = os.O_RDONLY | sum(
    getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
)


class FileError(ValueError):
    """A file that does not hold what it should; says why."""


def why_unreadable(error: Exception) -> str:
    """Writes why a file cannot be read; of the system's errors without the name."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Opens a regular file, and never waits for a writer.

    Raises:
        OSError: If there is none, or it cannot be read, or is of another kind.
    """
    try:
        number = os.open(path, _FLAGS)
    except ValueError as error:  # a NUL, or half a surrogate pair
        raise _unreadable(path, "no file can have this name") from error
    try:
        mode = os.fstat(number).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(
                errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path)
            )
        if not stat.S_ISREG(mode):
            raise _unreadable(path, "it is not a regular file")
        return open(path, "rb", opener=lambda *_: number)  # errors name the file
    except BaseException:
        os.close(number)
        raise


def is_regular(path: str | os.PathLike[str]) -> bool:
    """True if a path leads to a regular file; asks without opening it."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def read_bytes(path: str | os.PathLike[str], most: int = MAX_DOCUMENT) -> bytes:
    """Reads a whole regular file of at most so many bytes.

    Raises:
        OSError: If it cannot be read, or is larger.
    """
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise _unreadable(path, f"it is larger than {most / 2**20:g} MiB")
    return data


def lines_of(file: BufferedReader, most: int = _MAX_LINES) -> Iterator[bytes | None]:
    """Yields the rest of a file by lines, with their ends; the last one may lack it.

    A line that is longer than any that is written is None. Memory is bounded by it.

    Args:
        file: The file.
        most: How many bytes it may have.

    Raises:
        OSError: If the file cannot be read, or is larger than any that is written.
    """
    if os.fstat(file.fileno()).st_size > most:
        raise _unreadable(file.name, f"it is larger than {most // 2**30} GiB")
    while line := file.readline(MAX_LINE):
        if len(line) < MAX_LINE or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE)
        yield None


def _unreadable(path: object, why: str) -> OSError:
    return OSError(errno.EINVAL, why, path)
