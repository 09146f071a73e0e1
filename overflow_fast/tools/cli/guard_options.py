"""The guard's arguments as options of a command, from their own definitions."""

from __future__ import annotations

import argparse
import errno
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from ...base.text import either, nearest
from ...guard.config import GuardConfig
from ...guard.monitors.monitor import Monitor
from ...guard.monitors.running import DEFAULT_MONITORS
from ...guard.options import (
    Evidence,
    Option,
    options_of,
    snake_case,
    written_name,
)
from ...monitors import MONITORS

_LONG = 150  # characters of a sentence
_NONE = "none"  # switches off what is on by default


@dataclass(frozen=True)
class _Typed:
    """An option of the command line.

    Attributes:
        owner: The class of options that has the field.
        field: The field's name.
        argument: The guard's argument that takes the object, or is the field.
        option: The field's definition.
        default: Its default.
    """

    owner: type[Any]
    field: str
    argument: str
    option: Option
    default: Any

    @property
    def flag(self) -> str:
        """The option as it is typed."""
        name = self.option.typed
        if name is None:
            own = "" if self.owner is GuardConfig else f"{snake_case(_name(self))}_"
            name = f"{own}{self.field}".replace("_", "-")
        return f"--{name}"

    @property
    def dest(self) -> str:
        """The name under which the parser keeps it."""
        is_own = self.owner is GuardConfig
        return f"guard_{self.field if is_own else f'{_name(self)}.{self.field}'}"

    @property
    def can_be_none(self) -> bool:
        """True if the word none switches a monitor off that is on by default."""
        return self.owner in map(type, DEFAULT_MONITORS)


def _name(typed: _Typed) -> str:
    return typed.owner.__name__


def _all_typed() -> Iterator[_Typed]:
    for name, own in options_of(GuardConfig):
        if own.kind.options is not None:
            yield from _typed_of(own.kind.options, name)
        elif name == "monitors":
            for monitor in MONITORS:
                yield from _typed_of(monitor, name)
        elif own.kind.parse is not None or own.kind.is_flag:
            yield _Typed(GuardConfig, name, name, own, _default(GuardConfig, name))


def _typed_of(owner: type[Any], argument: str) -> Iterator[_Typed]:
    for name, own in options_of(owner):
        if own.kind.parse is not None or own.kind.is_flag:
            yield _Typed(owner, name, argument, own, _default(owner, name))


def _default(owner: type[Any], name: str) -> Any:
    return next(each.default for each in fields(owner) if each.name == name)


def add_guard_options(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each of the guard's arguments that can be typed."""
    group = parser.add_argument_group(
        "options of the guard", "As the arguments of OverflowGuard and their fields."
    )
    flags: dict[str, list[str]] = {}
    for each in _all_typed():
        flags.setdefault(f"--{each.argument}", []).append(each.flag)
        group.add_argument(
            each.flag,
            dest=each.dest,
            default=argparse.SUPPRESS,
            help=_help(each),
            **_form(each),
        )
    vars(parser).update(flags_of=flags)


def guard_arguments(parsed: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of the guard that were typed.

    Raises:
        TypeError, ValueError: If one of them cannot be used.
        ImportError: If one of them needs a library that is missing.
    """
    typed = [each for each in _all_typed() if hasattr(parsed, each.dest)]
    given: dict[str, Any] = {}
    try:
        for each in typed:
            if each.owner is GuardConfig:
                given[each.field] = getattr(parsed, each.dest)
            elif each.argument != "monitors" and each.argument not in given:
                values = _values(parsed, typed, each.owner)
                _check_has_path(each, values)
                given[each.argument] = each.owner(**values)
        if any(each.argument == "monitors" for each in typed):
            given["monitors"] = _monitors(parsed, typed)
        GuardConfig(**given)
        for each in typed:
            if each.field == "path":
                _check_can_be_written(each, getattr(parsed, each.dest))
    except (TypeError, ValueError) as error:
        raise type(error)(_as_typed(str(error))) from None
    return given


def typed_options(parsed: argparse.Namespace) -> list[str]:
    """Returns the options of the guard that were typed."""
    return [each.flag for each in _all_typed() if hasattr(parsed, each.dest)]


def _values(
    parsed: argparse.Namespace, typed: list[_Typed], owner: type[Any]
) -> dict[str, Any]:
    own = [each for each in typed if each.owner is owner]
    return {each.field: getattr(parsed, each.dest) for each in own}


def _check_has_path(typed: _Typed, values: dict[str, Any]) -> None:
    first = fields(typed.owner)[0].name
    if first == "path" and first not in values:
        raise ValueError(f"{typed.flag} needs --{typed.argument} PATH")


def _check_can_be_written(typed: _Typed, path: str) -> None:
    """Raises ValueError where a run could write nothing to a path."""
    is_folder = typed.owner is Evidence
    folder = path if is_folder else os.path.dirname(os.path.abspath(path))
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        if not is_folder and os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        what = "a folder" if is_folder else "a file"
        raise ValueError(
            f"{typed.flag} must be {what} that can be written, got {path!r}: "
            f"{error.strerror or error}"
        ) from None


def _monitors(parsed: argparse.Namespace, typed: list[_Typed]) -> list[Any]:
    """The monitors that are on by default, but for those that are typed."""
    by_default = {type(each): each for each in DEFAULT_MONITORS}
    found: list[Monitor] = []
    for kind in MONITORS:
        values = _values(parsed, typed, kind)
        if not values and kind in by_default:
            found.append(by_default[kind])
        elif values and None not in values.values():
            found.append(kind(**values))
    return found


def _as_typed(sentence: str) -> str:
    """An error's sentence with the option in place of the field's name."""
    for each in _all_typed():
        name = written_name(each.owner, each.field)
        if sentence.startswith(f"{name} "):
            return f"{each.flag}{sentence.removeprefix(name)}"
    return sentence


def _help(typed: _Typed) -> str:
    """The first sentence about an option, and its default."""
    text = typed.option.help
    sentence = re.split(r"(?<=[\w`)\"])\. ", text)[0].rstrip(".")
    if len(sentence) > _LONG:
        sentence = re.split(": | \\(", sentence)[0]
    sentence = re.sub(r"; None for (\w+)", r" (default: \1)", sentence)
    shown = (sentence[0].lower() + sentence[1:] + typed.option.kind.note).strip()
    if typed.argument == "monitors" and not typed.can_be_none:
        shown += " (default: not at all)"
    elif typed.option.kind.is_flag:
        shown += " (default)"
    elif isinstance(typed.default, (int, float, str)):
        shown += f" (default: {typed.default})"
    return shown.replace("%", "%%")


def _form(typed: _Typed) -> dict[str, Any]:
    """The arguments with which argparse reads an option."""
    kind = typed.option.kind
    if kind.is_flag:
        return {"action": argparse.BooleanOptionalAction}
    if kind.choices and not typed.can_be_none:
        return {"choices": kind.choices}
    assert kind.parse is not None
    if kind.choices:
        words = (*kind.choices, _NONE)
        return {"type": _word_of(words), "metavar": f"{{{','.join(words)}}}"}
    if typed.can_be_none:
        metavar = f"{kind.metavar}|{_NONE}"
        return {"type": _number_or_none(kind.parse), "metavar": metavar}
    return {"type": kind.parse, "metavar": kind.metavar}


def _word_of(words: tuple[str, ...]) -> Callable[[str], str | None]:
    def read(text: str) -> str | None:
        if text not in words:
            wrong = f"{text!r}{nearest(text, words)}"
            raise argparse.ArgumentTypeError(f"must be {either(words)}, got {wrong}")
        return None if text == _NONE else text

    return read


def _number_or_none(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return None if text == _NONE else parse(text)
        except ValueError:
            wrong = f"must be a number or none, got {text!r}"
            raise argparse.ArgumentTypeError(wrong) from None

    return read
