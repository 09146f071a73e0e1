"""The command `run`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from .adding import Commands, add_command, fail
from .as_main import (
    NoProgramError,
    hide_frames_above,
    hide_frames_below,
    print_traceback,
    run_as_main,
)
from .guard_options import add_guard_options, guard_arguments

if TYPE_CHECKING:
    from ..integrations.script_guard import ScriptGuard

NON_FINITE = 3  # the exit status of a program that the guard has stopped


def add_to(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "run",
        _run,
        "run a training script with a guard on its models, without a change to it",
        """
        run train.py --lr 3e-4
        run --on-overflow skip --record run.ofr --log guard.jsonl train.py --lr 3e-4
        run -m package.train --debug underflow_overflow
        """,
    )
    parser.usage = f"{parser.prog} [options] program ..."
    add_guard_options(parser)
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="PROGRAM is a module's name"
    )
    parser.add_argument("program", help="a script's path, or a module's name after -m")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the program's own arguments"
    )


def _run(parsed: argparse.Namespace) -> int:
    from ..integrations.script_guard import ScriptGuard

    try:
        guard = ScriptGuard(guard_arguments(parsed))
    except (TypeError, ValueError, ImportError) as error:
        return fail(f"overflow_fast run: {error}")
    return _run_guarded(guard, parsed)


def _run_guarded(guard: ScriptGuard, parsed: argparse.Namespace) -> int:
    from ..core.selection import NoModuleError
    from ..integrations.script_guard import UnusableArgumentsError
    from ..report.report import NonFiniteError

    has_program = True
    try:
        with guard.watching():
            run_as_main(parsed.program, parsed.arguments, parsed.is_module)
    except NoProgramError as error:
        has_program = False
        fail(f"overflow_fast run: {error}")
        return error.status
    except (UnusableArgumentsError, NoModuleError) as error:
        if isinstance(error, NoModuleError) and not _has_patterns(parsed):
            print_traceback(error)  # of a guard that the program has made
            return 1
        has_program = False
        return fail(f"overflow_fast run: {error}")
    except NonFiniteError as error:
        hide_frames_below(error)
        print_traceback(error)
        return NON_FINITE
    except KeyboardInterrupt as error:
        hide_frames_above(error)
        raise
    except Exception as error:
        print_traceback(error)
        return 1
    finally:
        why_not = guard.why_nothing_was_guarded()
        if has_program and why_not is not None:
            print(f"overflow_fast: no step was guarded: {why_not}.", file=sys.stderr)
    return 0


def _has_patterns(parsed: argparse.Namespace) -> bool:
    return any(hasattr(parsed, f"guard_{name}") for name in ("include", "exclude"))
