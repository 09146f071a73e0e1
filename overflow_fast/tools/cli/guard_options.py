"""The guard's arguments for `run`: some as options, all of them in a file of TOML.

1. Options and file give the same tree: the names of `OverflowGuard`'s arguments, and
   under those that take an object the names of its fields, such as
   `{"record": {"path": "run.ofr", "mib": 16}}`. `monitors` has a table for each class.
2. A typed word is read and checked by its field's kind where argparse reads it. A value
   of the file is checked where its object is made.
3. Where both give the same value, the typed one counts.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from ...base.text import either, nearest
from ...guard.config import GuardConfig
from ...guard.files.reading import open_regular, why_unreadable
from ...guard.files.writing import why_not_writable
from ...guard.kinds import Kind
from ...guard.options import Evidence, Log, Option, Record, options_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Tree = dict[str, Any]


@dataclass(frozen=True)
class _Typed:
    """An option of the command line.

    Attributes:
        argument: The guard's argument.
        field: The field of its object, or "" where the argument itself is typed.
        option: The definition.
        default: The default.
    """

    argument: str
    field: str
    option: Option
    default: Any

    @property
    def flag(self) -> str:
        """The option as it is typed."""
        return f"--{self.option.typed}"

    @property
    def dest(self) -> str:
        """The name under which the parser keeps it."""
        return f"guard_{self.argument}"


def _all_typed() -> Iterator[_Typed]:
    for name, own in options_of(GuardConfig):
        if own.typed is not None:
            yield _Typed(name, "", own, _default(GuardConfig, name))
        for field, each in options_of(own.kind.options) if own.kind.options else ():
            if each.typed is not None:
                yield _Typed(name, field, each, _default(own.kind.options, field))


def _default(owner: type[Any] | None, name: str) -> Any:
    assert owner is not None
    return next(each.default for each in fields(owner) if each.name == name)


def add_guard_options(parser: argparse.ArgumentParser) -> None:
    """Adds the guard's arguments that can be typed, and the option of a file."""
    vars(parser).update(instead_of=instead_of)
    group = parser.add_argument_group(
        "options of the guard", "As the arguments of OverflowGuard."
    )
    for each in _all_typed():
        group.add_argument(
            each.flag,
            dest=each.dest,
            default=argparse.SUPPRESS,
            help=_help(each),
            metavar=_metavar(each.option.kind),
            type=_reader(each.option.kind),
        )
    group.add_argument(
        "--config",
        metavar="FILE.toml",
        help="a file of these and all other arguments, by their names in Python",
    )


def _metavar(kind: Kind) -> str | None:
    return f"{{{','.join(kind.choices)}}}" if kind.choices else kind.metavar


def _reader(kind: Kind) -> Callable[[str], Any]:
    """Reads and checks a typed word; its sentence lacks the option, as argparse's."""
    parse = kind.parse
    assert parse is not None

    def read(text: str) -> Any:
        value = parse(text)
        if kind.choices and value not in kind.choices:
            wrong = f"{text!r}{nearest(text, kind.choices)}"
            raise argparse.ArgumentTypeError(
                f"must be {either(kind.choices)}, got {wrong}"
            )
        try:
            kind.check("", value)
        except (TypeError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error).strip()) from None
        return value

    read.__name__ = parse.__name__  # argparse: "invalid int value: 'x'"
    return read


def _help(typed: _Typed) -> str:
    """The first sentence about an option, and its default."""
    kind = typed.option.kind
    sentence = re.split(r"(?<=[\w`)\"])\. ", typed.option.help)[0].rstrip(".")
    sentence = re.sub(r"; None for (\w+)", r" (default: \1)", sentence)
    shown = (sentence[0].lower() + sentence[1:] + kind.note).strip()
    if isinstance(typed.default, (int, float, str)):
        shown += f" (default: {typed.default})"
    return shown.replace("%", "%%")


def instead_of(word: str) -> str:
    """Writes what stands for an option that there is not; "" for no argument's name.

    Args:
        word: The option, with its dashes.
    """
    name = word.strip("-").replace("-", "_")
    if name not in dict(options_of(GuardConfig)):
        return ""
    flags = [each.flag for each in _all_typed() if each.argument == name]
    return f": use {either([*flags, f'`{name}` in the file of --config'])}"


def typed_options(parsed: argparse.Namespace) -> list[str]:
    """Returns the options of the guard that were typed."""
    typed = [each.flag for each in _all_typed() if hasattr(parsed, each.dest)]
    return [*typed, *(["--config"] if parsed.config else [])]


def guard_arguments(parsed: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of the guard that were typed or stand in the file.

    Raises:
        TypeError, ValueError: If one of them cannot be used.
        ImportError: If one of them needs a library that is missing.
    """
    path: str | None = parsed.config
    tree = {} if path is None else _read(path)
    for each in _all_typed():
        if hasattr(parsed, each.dest):
            value, below = getattr(parsed, each.dest), tree.get(each.argument)
            if each.field:
                above = below if isinstance(below, dict) else {}
                value = {**above, each.field: value}
            tree[each.argument] = value
    try:
        given = _objects(tree)
        config = GuardConfig(**given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{path}: {error}" if path else str(error)) from None
    for each in _all_typed():
        if each.field == "path" and each.argument in given:
            is_typed = hasattr(parsed, each.dest)
            name = each.flag if is_typed else f"{path}: {each.argument}"
            _check_can_be_written(name, getattr(config, each.argument))
    return given


def _read(path: str) -> Tree:
    """Reads a file of arguments.

    Raises:
        ValueError: If there is none, or it is no TOML.
    """
    try:
        with open_regular(path) as file:
            return tomllib.load(file)
    except (OSError, ValueError) as error:
        why = why_unreadable(error)
        raise ValueError(
            f"--config must be a file of TOML, got {path!r}: {why}"
        ) from None


def _objects(tree: Tree) -> dict[str, Any]:
    """The arguments of a guard, of tables the objects that they describe."""
    known = dict(options_of(GuardConfig))
    _check_keys("a key", tree, known)
    given: dict[str, Any] = {}
    for name, value in tree.items():
        options = known[name].kind.options
        if name == "monitors":
            given[name] = _monitors(value)
        elif options is not None and isinstance(value, dict):
            given[name] = _object(name, options, value)
        else:
            given[name] = value
    return given


def _monitors(tables: Any) -> list[Any]:
    from ...monitors import MONITORS  # some load what clean runs never need

    kinds = {each.__name__: each for each in MONITORS}
    _check_table("monitors", tables)
    _check_keys("a key of monitors", tables, kinds)
    return [
        _object(f"monitors.{name}", kinds[name], table)
        for name, table in tables.items()
    ]


def _object(name: str, options: type[Any], table: Any) -> Any:
    _check_table(name, table)
    _check_keys(f"a key of {name}", table, dict(options_of(options)))
    for each in fields(options):
        if each.default is MISSING and each.name not in table:
            raise ValueError(f"{name} must have the key {each.name}, got none")
    return options(**table)


def _check_table(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise TypeError(f"{name} must be a table, got {type(value).__name__}")


def _check_keys(name: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
    for key in table:
        if key not in known:
            wrong = f"{key!r}{nearest(key, known)}"
            raise ValueError(f"{name} must be {either(known)}, got {wrong}")


def _check_can_be_written(name: str, target: Evidence | Log | Record) -> None:
    """Raises ValueError where a run could write nothing to a path."""
    is_folder = isinstance(target, Evidence)
    if why_not := why_not_writable(target.path, is_folder):
        what = "a folder" if is_folder else "a file"
        raise ValueError(
            f"{name} must be {what} that can be written, got "
            f"{os.fspath(target.path)!r}: {why_not}"
        )
