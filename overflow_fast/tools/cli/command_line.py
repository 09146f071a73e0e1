"""The parser of all commands, and the call of the one that was chosen."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import io
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ... import binaries
from ...base.text import either, nearest, printable
from .subcommand import fail, listed_after

_FILES = re.compile(r"\w+_command")


def make_parser() -> _Parser:
    """Returns the parser of `overflow-fast` and `python -m overflow_fast`."""
    parser = _Parser(
        prog=_called_as(),
        description="The numerics flight recorder that PyTorch users leave on.",
    )
    parser.add_argument("--version", action=_Version)
    commands: Any = parser.add_subparsers(dest="command")
    package = importlib.import_module(__package__)
    for found in pkgutil.iter_modules(package.__path__, f"{__package__}."):
        if _FILES.fullmatch(found.name.rpartition(".")[2]):
            importlib.import_module(found.name)
    for add in listed_after(""):
        add(commands)
    parser.commands = list(commands.choices)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line.

    Args:
        arguments: What stands behind the program's name; `sys.argv[1:]` by default.

    Returns:
        The exit status, as docs/guides/command-line.md lists them.
    """
    try:
        return _run(make_parser(), arguments)
    except ImportError as error:
        if error.name not in (binaries.EXTENSION, "torch"):
            raise
        return fail(f"{_called_as()}: {' '.join(str(error).splitlines())}")


def _run(parser: _Parser, arguments: Sequence[str] | None) -> int:
    parsed = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
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
    """A parser, also of each command, whose errors are one sentence.

    Attributes:
        commands: The names of its commands.
        add_arguments: Adds the arguments of a command that are not there yet, or None.
        needs_extension: The command does nothing where no extension is built.
        instead_of: Writes what stands for an option that there is not, or "".
    """

    commands: Sequence[str] = ()
    needs_extension = False
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None
    instead_of: Callable[[str], str] = staticmethod(lambda word: "")

    def complete(self) -> None:
        """Adds the arguments that are not there yet."""
        add, self.add_arguments = self.add_arguments, None
        if add is not None:
            add(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses arguments; a command itself refuses those that it does not know."""
        if self.needs_extension and args[:1] not in (["-h"], ["--help"]):
            binaries.require_extension()  # before arguments that the guard has
        self.complete()
        named = [each for each in args if self.commands and not each.startswith("-")]
        if named and named[0] not in self.commands:
            wrong = f"{named[0]!r}{nearest(named[0], self.commands)}"
            self.error(f"command must be {either(self.commands)}, got {wrong}")
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].partition("=")[0]
            meant = self.instead_of(word) or nearest(word, self._option_string_actions)
            self.error(f"there is no {word}{meant}")
        if self.commands and parsed.command is None:
            self.error(f"a command is missing: {either(self.commands)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Prints a sentence, and exits with 2."""
        more = f"(`{self.prog} --help` lists all)"
        self.exit(2, f"{self.prog}: {printable(message)} {more}\n")


class _Version(argparse.Action):
    """Prints the versions, which only then are asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print versions and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(_version())
        parser.exit()


def _version() -> str:
    """The versions, and if there is no extension for them; imports neither."""
    from ... import __version__

    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return f"overflow_fast {__version__}, no torch"
    lack = "" if binaries.is_there(torch) else ", no extension for it (see `env`)"
    return f"overflow_fast {__version__}, torch {torch}{lack}"
