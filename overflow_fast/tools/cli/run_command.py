"""The command `run`: a program as `python` runs it, under a guard."""

from __future__ import annotations

import argparse
import builtins
import io
import os
import pkgutil
import runpy
import sys
import traceback
import types
from collections.abc import Collection, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from ...base.source_files import drop_own_frames, is_own
from .subcommand import Commands, add_command, command, fail, reason

if TYPE_CHECKING:
    from ...guard.report.report import NonFiniteError
    from ...integrations.script_guard import ScriptGuard


# Runs a program as `python` runs it.


_RUNNERS = ("<frozen runpy>", "<frozen importlib.", runpy.__file__)


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
            f"program must be a script or a folder with __main__.py: {reason(error)}", 2
        ) from error


def print_traceback(error: BaseException) -> None:
    """Prints an error of the program as Python does, without the frames above it."""
    frames = _below(error.__traceback__)
    if frames is None and not isinstance(error, SyntaxError):
        frames = error.__traceback__
    error = error.with_traceback(frames)
    sys.excepthook(type(error), error, frames)


def print_report(error: NonFiniteError) -> None:
    """Prints the guard's error; on a terminal its report has that one's width."""
    from .terminal import is_shown_as_it_is, shown

    if sys.excepthook is not sys.__excepthook__ or is_shown_as_it_is(sys.stderr):
        print_traceback(error)
        return
    error = error.with_traceback(_below(error.__traceback__) or error.__traceback__)
    whole = "".join(traceback.format_exception(error))
    before, text, notes = whole.rpartition(str(error))
    above, end, name = before.rpartition("\n")
    report = shown(f"{name}{text}", sys.stderr)
    sys.stderr.write(f"{above}{end}{report}{notes}")


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
    return is_own(name) or name.startswith(_RUNNERS)


NON_FINITE = 3  # the exit status of a program that the guard has stopped
_OF_MODULES = {"include", "exclude", "allow"}  # arguments with patterns of names
_ELSEWHERE = (
    " (processes that it starts are not guarded: run each so, such as "
    "`torchrun -m overflow_fast run train.py`)"
)


@command(after="demo")
def add_run(commands: Commands) -> None:
    """Adds the command `run`."""
    parser = add_command(
        commands,
        "run",
        _run,
        "run a script with a guard on the models that it trains or runs",
        """
        run train.py --lr 3e-4
        run --on-overflow skip --record run.ofr --log guard.jsonl train.py --lr 3e-4
        run -m package.train --lr 3e-4
        """,
        _add_arguments,
        more=": [above](#without-a-change-to-the-script)",
        needs_extension=True,
    )
    parser.usage = f"{parser.prog} [options] program ..."


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    from .guard_options import add_guard_options

    add_guard_options(parser)
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="PROGRAM is a module's name"
    )
    parser.add_argument("program", help="a script's path, or a module's name after -m")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the program's own arguments"
    ).required = False


def _run(parsed: argparse.Namespace) -> int:
    from ...integrations.script_guard import ScriptGuard
    from .guard_options import guard_arguments, typed_options

    try:
        given = guard_arguments(parsed)
        guard = ScriptGuard(given)
    except (TypeError, ValueError, ImportError) as error:
        return fail(f"overflow_fast run: {error}")
    try:
        status = _run_guarded(guard, parsed, given.keys() & _OF_MODULES)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        status = 0
    for line in guard.summaries() if status == 0 else ():
        print(f"overflow_fast: {line}", file=sys.stderr)
    typed = typed_options(parsed)
    if status or not typed or not guard.is_unused:
        return status
    return fail(
        "overflow_fast run: the program has a guard or a detector of its own, which "
        f"was not given {', '.join(typed)}: nothing of that was done. Give it to that "
        "guard, or take that guard out of the program."
    )


def _run_guarded(
    guard: ScriptGuard, parsed: argparse.Namespace, patterns: Collection[str]
) -> int:
    from ...detector.selection import NoModuleError
    from ...guard.report.report import NonFiniteError
    from ...integrations.script_guard import UnusableArgumentsError

    has_program = True
    try:
        with guard.watching():
            run_as_main(parsed.program, parsed.arguments, parsed.is_module)
    except NoProgramError as error:
        has_program = False
        fail(f"overflow_fast run: {error}")
        return error.status
    except (UnusableArgumentsError, NoModuleError) as error:
        if isinstance(error, NoModuleError) and not patterns:
            print_traceback(error)  # of a guard that the program has made
            return 1
        has_program = False
        return fail(f"overflow_fast run: {error}")
    except NonFiniteError as error:
        drop_own_frames(error)
        print_report(error)
        return NON_FINITE
    except Exception as error:
        print_traceback(error)
        return 1
    finally:
        why_not = guard.why_nothing_was_guarded(_ELSEWHERE)
        if has_program and why_not is not None:
            print(f"overflow_fast: no step was guarded: {why_not}.", file=sys.stderr)
    return 0
