"""Opens and writes files while a run trains: whatever is at a path, nothing waits.

A FIFO without a reader is an error, one with a slow reader takes no more than it has
room for. All that goes wrong is an OSError, which the caller turns into one warning. A
file system that hangs cannot be helped: a call to it does not return.
"""

from __future__ import annotations

import errno
import os
from io import FileIO
from pathlib import Path

_COMMON = sum(
    getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY", "O_NOCTTY")
)
_APPENDING = os.O_WRONLY | os.O_APPEND | os.O_CREAT | _COMMON
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | _COMMON


def make_folder(path: Path) -> None:
    """Makes a folder, and those above it.

    Raises:
        OSError: If it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except ValueError as error:
        raise _impossible(path) from error


def open_appending(path: Path) -> FileIO:
    """Opens a file, or makes it; each write goes to its end.

    Raises:
        OSError: If it cannot be opened; ENXIO for a FIFO that nobody reads.
    """
    return FileIO(_opened(path, _APPENDING), "ab")


def open_new(path: Path) -> FileIO:
    """Makes a file that was not there.

    Raises:
        FileExistsError: If there is anything.
        OSError: If it cannot be made.
    """
    return FileIO(_opened(path, _NEW), "r+b")


def write_all(file: FileIO, data: bytes) -> None:
    """Writes all of some bytes.

    Raises:
        OSError: If there is no room for them; some may have been written.
    """
    if file.write(data) != len(data):  # a full disk; None of a FIFO that is full
        raise OSError(errno.ENOSPC, "there is no room")


def write_new(path: Path, text: str) -> None:
    """Makes a file of text, in UTF-8; what has no form in it is escaped.

    Raises:
        OSError: If it cannot be made, or there is no room.
    """
    with open_new(path) as file:
        write_all(file, text.encode("utf-8", "backslashreplace"))


def why_not_writable(path: str | os.PathLike[str], is_folder: bool) -> str:
    """Why nothing can be written to a path now, as a clause, or "". It makes nothing.

    Args:
        path: The path of a file, or of a folder of files.
        is_folder: True for a folder.
    """
    try:
        whole = there = Path(os.path.abspath(path))
        if whole.exists() and whole.is_dir() != is_folder:
            return "it is no folder" if is_folder else "it is a folder"
        while not os.path.lexists(there):
            there = there.parent
        if there != whole and not there.is_dir():
            return f"{there} is no folder"
        rights = os.W_OK | (os.X_OK if there.is_dir() else 0)
        return "" if os.access(there, rights) else f"{there} may not be written to"
    except (OSError, ValueError) as error:
        return str(error)


def _opened(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags, 0o666)
    except ValueError as error:
        raise _impossible(path) from error


def _impossible(path: Path) -> OSError:
    return OSError(errno.EINVAL, "no file can have this name", str(path))
