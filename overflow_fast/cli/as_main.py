"""Runs a program as `python` runs it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

_OURS = str(Path(__file__).parents[1])


def run_as_main(program: str, arguments: Sequence[str], is_module: bool) -> None:
    """Runs a script or a module as `__main__`, with its own `sys.argv` and `sys.path`.

    Args:
        program: A script, a folder with a `__main__.py`, or a module's name.
        arguments: The program's arguments.
        is_module: Whether it is a module's name.

    Raises:
        SystemExit: If there is no such script, or the program raises it.
        BaseException: Whatever the program raises.
    """
    sys.argv = [program, *arguments]
    is_safe = getattr(sys.flags, "safe_path", False)  # Python 3.11
    if is_module:
        if not is_safe:
            sys.path[0] = os.getcwd()
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    if not os.path.exists(program):
        sys.exit(f"program must be a script or a folder with __main__.py: {program}")
    if not is_safe:
        sys.path[0] = os.path.dirname(os.path.realpath(program))
    runpy.run_path(program, run_name="__main__")


def print_traceback(error: BaseException) -> None:
    """Prints an error of the program as Python does, without the frames above it."""
    shown = error.__traceback__
    while shown is not None and _is_above(shown):
        shown = shown.tb_next
    error = error.with_traceback(shown or error.__traceback__)
    sys.excepthook(type(error), error, error.__traceback__)


def _is_above(traceback: TracebackType) -> bool:
    """Returns True for a frame of this package, or of what runs programs."""
    name = traceback.tb_frame.f_code.co_filename
    return name.startswith(("<frozen runpy>", _OURS + os.sep)) or name == runpy.__file__
