"""Runs a program as `python` runs it."""

from __future__ import annotations

import builtins
import io
import os
import pkgutil
import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

_OURS = str(Path(__file__).parents[1])
_RUNNERS = ("<frozen runpy>", "<frozen importlib.", _OURS + os.sep)


class NoProgramError(Exception):
    """Raised where there is no program to run; says why.

    Attributes:
        status: The exit status that `python` has then, or 2 for a wrong path.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def run_as_main(program: str, arguments: Sequence[str], is_module: bool) -> None:
    """Runs a script or a module as `__main__`, with its own `sys.argv` and `sys.path`.

    Args:
        program: A script, a folder with a `__main__.py`, or a module's name.
        arguments: The program's arguments.
        is_module: Whether it is a module's name.

    Raises:
        NoProgramError: If there is no such program.
        BaseException: Whatever the program raises.
    """
    sys.argv = [program, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11
        sys.path[0] = os.getcwd() if is_module else _folder_of(program)
    try:
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        elif _is_source(program):
            _run_source(program)
        else:
            runpy.run_path(program, run_name="__main__")
    except (ImportError, OSError) as error:
        if _below(error.__traceback__) is not None:
            raise
        if is_module:
            raise NoProgramError(str(error), 1) from error
        raise NoProgramError(
            f"program must be a script or a folder with __main__.py: {error}", 2
        ) from error


def print_traceback(error: BaseException) -> None:
    """Prints an error of the program as Python does, without the frames above it."""
    shown = _below(error.__traceback__)
    if shown is None and not isinstance(error, SyntaxError):
        shown = error.__traceback__
    error = error.with_traceback(shown)
    sys.excepthook(type(error), error, shown)


def hide_frames_above(error: BaseException) -> None:
    """Lets Python end with an error of the program without the frames above it."""
    shown, hook = _below(error.__traceback__), sys.excepthook

    def print_shown(
        kind: type[BaseException], raised: BaseException, _: TracebackType | None
    ) -> None:
        hook(kind, raised.with_traceback(shown), shown)

    sys.excepthook = print_shown


def hide_frames_below(error: BaseException) -> None:
    """Takes the guard's own frames away from the end of an error's traceback."""
    last, each = None, error.__traceback__
    while each is not None:
        if not each.tb_frame.f_code.co_filename.startswith(_OURS + os.sep):
            last = each
        each = each.tb_next
    if last is not None:
        last.tb_next = None


def _folder_of(program: str) -> str:
    return os.path.dirname(os.path.realpath(program))


def _is_source(program: str) -> bool:
    """Returns True for what is no folder, no archive and no compiled file."""
    is_compiled = program.endswith(".pyc")
    return not is_compiled and pkgutil.get_importer(program) is None


def _run_source(program: str) -> None:
    """Runs a script with an absolute `__file__`, and `sys.argv[0]` as it is."""
    path = os.path.abspath(program)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    module = types.ModuleType("__main__")
    vars(module).update(__file__=path, __builtins__=builtins)
    sys.modules["__main__"] = module
    exec(code, vars(module))


def _below(traceback: TracebackType | None) -> TracebackType | None:
    """The frames of the program: None if it did not come so far."""
    while traceback is not None and _is_above(traceback):
        traceback = traceback.tb_next
    return traceback


def _is_above(traceback: TracebackType) -> bool:
    """Returns True for a frame of this package, or of what runs programs."""
    name = traceback.tb_frame.f_code.co_filename
    return name.startswith(_RUNNERS) or name == runpy.__file__
