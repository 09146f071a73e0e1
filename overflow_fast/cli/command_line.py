"""The parser of all commands, and the call of the one that was chosen."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..text import printable
from . import (
    compare_command,
    demo_command,
    doctor_command,
    env_command,
    explain_command,
    export_command,
    log_command,
    report_command,
    run_command,
    watch_command,
)
from .subcommand import Commands

# In the order of `--help`.
_COMMANDS = (
    demo_command,
    run_command,
    watch_command,
    report_command,
    explain_command,
    compare_command,
    doctor_command,
    log_command,
    export_command,
    env_command,
)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of `overflow-fast` and `python -m overflow_fast`."""
    parser: argparse.ArgumentParser = _Parser(
        prog=_called_as(),
        description="The numerics flight recorder that PyTorch users leave on.",
    )
    parser.add_argument("--version", action=_Version)
    commands: Commands = parser.add_subparsers(dest="command", required=True)
    for each in _COMMANDS:
        each.add_to(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line.

    Args:
        arguments: What stands behind the program's name; `sys.argv[1:]` by default.

    Returns:
        The exit status: 0, or 2 where a path or an argument cannot be used; of
        `compare` 1 where the runs differ.
    """
    parsed = make_parser().parse_args(arguments)
    if parsed.command != "run" and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # such as ASCII, and a name
    try:
        status: int = parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:  # such as `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _called_as() -> str:
    """The name that users called it by."""
    called = os.path.basename(sys.argv[0]) if sys.argv else ""
    name = called.removesuffix(".exe")
    return name if name == "overflow-fast" else "python -m overflow_fast"


class _Parser(argparse.ArgumentParser):
    """A parser, also of each command, whose errors name arguments escaped."""

    def error(self, message: str) -> NoReturn:
        """Prints usage and an error, and exits with 2."""
        super().error(printable(message))


class _Version(argparse.Action):
    """Prints the versions, which only then are asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print versions and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(_version())
        parser.exit()


def _version() -> str:
    import torch

    from .. import _C, __version__

    cuda = "CUDA kernels" if _C.has_kernels("cuda") else "no CUDA kernels"
    torch_version = f"torch {torch.__version__}"
    return f"overflow_fast {__version__}, {torch_version}, CPU {_C.isa()}, {cuda}"
