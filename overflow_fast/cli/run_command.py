"""The command `run`."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

from .adding import Commands, add_command


def add_to(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "run",
        _run,
        "run a program whose Trainer(debug=...) shall use this detector",
        """
        run train.py --debug underflow_overflow
        run -m package.train --debug underflow_overflow
        """,
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="PROGRAM is a module's name"
    )
    parser.add_argument("program", help="a script's path, or a module's name after -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)


def _run(parsed: argparse.Namespace) -> int:
    from ..integrations.transformers import install

    install()
    _run_as_main(parsed.program, parsed.arguments, parsed.is_module)
    return 0


def _run_as_main(program: str, arguments: Sequence[str], is_module: bool) -> None:
    sys.argv = [program, *arguments]
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    if not os.path.exists(program):
        sys.exit(f"program must be a script or a folder with __main__.py: {program}")
    sys.path[0] = os.path.dirname(os.path.abspath(program))
    runpy.run_path(program, run_name="__main__")
