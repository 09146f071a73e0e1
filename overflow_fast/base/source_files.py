"""Files of code: the program's, those of installed packages, ours, and cells."""

from __future__ import annotations

import functools
import os
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

_CELL = re.compile(r"In\[\d+\]")


def short_name(file: str) -> str:
    """Shortens a file's path to its name, or to its cell's, such as "In[3]".

    Of an installed package the path begins with the package's.
    """
    return installed_name(file) or os.path.basename(source_name(file))


def source_name(file: str) -> str:
    """The name of a notebook's cell, such as "In[3]"; of any other file its path.

    A cell's path is that of a temporary file that does not exist.
    """
    compiler = getattr(notebook_shell(), "compile", None)
    label_of = getattr(compiler, "format_code_name", None)
    label = label_of(file) if callable(label_of) else None
    return file if label is None else str(label[1])


def notebook_shell() -> Any:
    """The shell of IPython that runs the program, or None."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def is_cell(name: str) -> bool:
    """True for what `source_name()` calls a cell, in any process."""
    return _CELL.fullmatch(name) is not None


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_DEMO = os.path.join(_PACKAGE, "tools", "demo.py")
_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def _absolute(file: str) -> str:
    """The absolute path of a file; as it is, where the working directory is gone."""
    try:
        return os.path.abspath(file)
    except OSError:
        return file


@functools.cache
def installed_name(file: str) -> str:
    """The path of an installed package's file from the package on; "" for any other.

    Of the standard library's, too. This package's own files are none.
    """
    path = _absolute(file)
    if is_own(path) or path == _DEMO:
        return ""
    for folder in ("site-packages", "dist-packages"):
        _, found, name = path.rpartition(f"{os.sep}{folder}{os.sep}")
        if found:
            return name
    is_standard = path.startswith(_STANDARD)
    return path.removeprefix(_STANDARD) if is_standard else ""


@functools.cache
def is_of_program(file: str) -> bool:
    """True for a file that is the program's own: no package's, and not ours."""
    is_frozen = file.startswith("<frozen")
    return not (is_frozen or is_own(file) or installed_name(file))


def modules_of_program() -> list[types.ModuleType]:
    """The modules of the program's own files, as far as they are imported."""
    found = []
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            own = vars(module)  # what is imported at its first use is not
            file = own.get("__file__")
            is_main = file is None and own.get("__name__") == "__main__"
            if is_main or (isinstance(file, str) and is_of_program(file)):
                found.append(module)
    return found


@functools.cache
def is_own(file: str) -> bool:
    """True for a file of this package, but not of its demonstration."""
    path = _absolute(file)
    return path.startswith(_PACKAGE) and path != _DEMO


@functools.cache
def is_of_user(file: str) -> bool:
    """True if a file is neither torch's, which is imported, nor this package's."""
    torch = _absolute(str(sys.modules["torch"].__file__))
    is_torchs = _absolute(file).startswith(os.path.dirname(torch) + os.sep)
    return not (is_own(file) or is_torchs or file.startswith("<frozen"))


def drop_own_frames(error: BaseException) -> None:
    """Removes this package's frames from a traceback, before it is raised again.

    What raises it adds one. Frames of the program and of libraries stay.
    """
    kept: types.TracebackType | None = None
    for frame in reversed(list(_entries(error.__traceback__))):
        if not is_own(frame.tb_frame.f_code.co_filename):
            place = frame.tb_frame, frame.tb_lasti, frame.tb_lineno
            kept = types.TracebackType(kept, *place)
    error.__traceback__ = kept


def _entries(entry: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while entry is not None:
        yield entry
        entry = entry.tb_next
