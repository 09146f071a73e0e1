"""Adds a command to the command line."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from ...base.text import capitalized, printable
from ...guard.files.reading import is_regular

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Commands = object

Run = Callable[[argparse.Namespace], int]
Add = Callable[[Commands], None]

_LISTED: dict[str, tuple[str, Add]] = {}


def command(after: str) -> Callable[[Add], Add]:
    """Returns a decorator of a function `add_NAME` that adds the command NAME.

    Its file must be named `NAME_command.py`: the command line imports those beside it.

    Args:
        after: The command behind which `--help` lists it; "" for the first one.
    """

    def listed(add: Add) -> Add:
        _LISTED[add.__name__.removeprefix("add_")] = after, add
        return add

    return listed


def listed_after(name: str) -> Iterator[Add]:
    """The functions that add the commands behind one, in the order of `--help`."""
    for own, (after, add) in sorted(_LISTED.items()):
        if after == name:
            yield add
            yield from listed_after(own)


def add_command(
    commands: Commands,
    name: str,
    run: Run,
    summary: str,
    example: str,
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None,
    more: str = "",
    needs_extension: bool = False,
) -> argparse.ArgumentParser:
    """Adds a command, and returns the parser of its arguments.

    Args:
        commands: What the parser of all commands has made.
        name: The word that users type.
        run: Runs the command and returns its exit status; it imports what it needs.
        summary: A line for `--help`, which begins with a verb in lower case.
        example: One or more command lines, without the program's name.
        add_arguments: Adds its arguments when it is chosen, if they take long to make.
        more: What docs/guides/command-line.md says besides the summary.
        needs_extension: It does nothing where no extension is built.
    """
    lines = textwrap.dedent(example).strip().splitlines()
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{capitalized(summary)}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    prog = parser.prog.removesuffix(name)
    parser.epilog = "\n".join(["example:", *(f"  {prog}{line}" for line in lines)])
    parser.set_defaults(run=run)
    vars(parser).update(add_arguments=add_arguments, more=more)
    vars(parser).update(needs_extension=needs_extension)
    return parser


def require_content(paths: Iterable[str]) -> None:
    """Raises ValueError if one of them is an empty file."""
    for path in paths:
        if is_regular(path) and not os.path.getsize(path):
            raise ValueError(f"{path} is empty: it has no steps yet.")


def reason(error: Exception) -> str:
    """Writes an error for readers: of the system's its file and what is wrong."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


def fail(message: str) -> int:
    """Prints why a command cannot do its work, and returns the exit status 2."""
    warn(message)
    return 2


def warn(message: str) -> None:
    """Prints a sentence to stderr."""
    print(printable(message), file=sys.stderr)
