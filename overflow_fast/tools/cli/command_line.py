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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ... import binaries
from ...base.text import either, nearest, printable
from .subcommand import fail, listed_after

_FILES = re.compile(r"\w+_commands?")


def make_parser() -> _Parser:
    """Returns the parser of `overflow-fast` and `python -m overflow_fast`."""
    parser = _Parser(
        prog=_called_as(),
        description="The numerics flight recorder that PyTorch users leave on.",
    )
    parser.add_argument("--version", action=_Version)
    commands: Any = parser.add_subparsers(dest="command", required=True)
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
        The exit status: 0, or 2 where a path, an argument or the extension cannot be
        used; of `compare` 1 where the runs differ.
    """
    try:
        return _run(make_parser(), arguments)
    except ImportError as error:
        if error.name not in (binaries.EXTENSION, "torch"):
            raise
        return fail(f"{_called_as()}: {' '.join(str(error).splitlines())}")


def _run(parser: _Parser, arguments: Sequence[str] | None) -> int:
    parsed = parser.parse_args(arguments)
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


_UNKNOWN = re.compile(r"unrecognized arguments: (\S+)")
_NOT_READ = re.compile(r"argument (\S+): invalid (\S+) value: ('.*')")
_MISSING = "the following arguments are required: "
_CHOICE = re.compile(r"argument (\S+): invalid choice: '?(.*?)'? \(choose from (.*)\)")


class _Parser(argparse.ArgumentParser):
    """A parser, also of each command, whose errors are one sentence.

    Attributes:
        commands: The names of its commands.
        add_arguments: Adds the arguments of a command that are not there yet, or None.
        needs_extension: The command does nothing where no extension is built.
        flags_of: The options that stand for an argument of the guard, by `--argument`.
    """

    flags_of: Mapping[str, Sequence[str]] = {}
    commands: Sequence[str] = ()
    needs_extension = False
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None

    def complete(self) -> None:
        """Adds the arguments that are not there yet."""
        add, self.add_arguments = self.add_arguments, None
        if add is not None:
            add(self)

    def format_help(self) -> str:
        """Writes the help of all arguments."""
        self.complete()
        return super().format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses arguments; a command itself refuses those that it does not know."""
        if self.needs_extension and args[:1] not in (["-h"], ["--help"]):
            binaries.require_extension()  # before arguments that the guard has
        self.complete()
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Prints a sentence with the nearest valid name, and exits with 2."""
        sentence = printable(self._sentence(message).removeprefix("argument "))
        self.exit(2, f"{self.prog}: {sentence} (`{self.prog} --help` lists all)\n")

    def _sentence(self, message: str) -> str:
        if found := _UNKNOWN.match(message):
            word = found[1].partition("=")[0]
            if word in self.flags_of:
                return f"there is no {word}: use {either(self.flags_of[word])}"
            return f"there is no {word}{nearest(word, self._option_string_actions)}"
        if found := _CHOICE.match(message):
            names = [each.strip(" '") for each in found[3].split(",")]
            wrong = f"{found[2]!r}{nearest(found[2], names)}"
            return f"{found[1]} must be {either(names)}, got {wrong}"
        if found := _NOT_READ.match(message):
            kind = "a whole number" if found[2] == "int" else "a number"
            return f"{found[1]} must be {kind}, got {found[3]}"
        if message.endswith("required: command"):
            return f"a command is missing: {either(self.commands)}"
        if message.startswith(_MISSING):
            names = message.removeprefix(_MISSING).split(", ")
            return f"{names[0]} is missing"
        return message


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
