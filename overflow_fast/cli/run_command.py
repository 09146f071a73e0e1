"""The command `run`: a program as `python` runs it, under a guard."""

from __future__ import annotations

import argparse
import builtins
import io
import os
import pkgutil
import re
import runpy
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..guard.config import GuardConfig
from ..guard.monitors.monitor import Monitor
from ..guard.monitors.running import DEFAULT_MONITORS, MONITORS
from ..guard.options import Option, options_of, snake_case, written_name
from ..text import either, nearest
from .subcommand import Commands, add_command, fail, reason

if TYPE_CHECKING:
    from ..integrations.script_guard import ScriptGuard


# Runs a program as `python` runs it.


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
            f"program must be a script or a folder with __main__.py: {reason(error)}", 2
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


# The guard's arguments as options of a command, from their own definitions.


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
    for each in _all_typed():
        group.add_argument(
            each.flag,
            dest=each.dest,
            default=argparse.SUPPRESS,
            help=_help(each),
            **_form(each),
        )


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
    except (TypeError, ValueError) as error:
        raise type(error)(_as_typed(str(error))) from None
    return given


def _values(
    parsed: argparse.Namespace, typed: list[_Typed], owner: type[Any]
) -> dict[str, Any]:
    own = [each for each in typed if each.owner is owner]
    return {each.field: getattr(parsed, each.dest) for each in own}


def _check_has_path(typed: _Typed, values: dict[str, Any]) -> None:
    first = fields(typed.owner)[0].name
    if first == "path" and first not in values:
        raise ValueError(f"{typed.flag} needs --{typed.argument} PATH")


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


NON_FINITE = 3  # the exit status of a program that the guard has stopped


def add_run(commands: Commands) -> None:
    """Adds the command `run`."""
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
    try:
        status = _run_guarded(guard, parsed)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        status = 0
    typed = [each.flag for each in _all_typed() if hasattr(parsed, each.dest)]
    if status or not typed or not guard.is_unused:
        return status
    return fail(
        "overflow_fast run: the program has a guard or a detector of its own, which "
        f"was not given {', '.join(typed)}: nothing of that was done. Give it to that "
        "guard, or take that guard out of the program."
    )


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
