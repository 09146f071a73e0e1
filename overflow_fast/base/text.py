"""Text on its way to a terminal, a logger or a page.

Names of modules, tensors and files, and what stands in files, may hold anything:
sequences that clear a terminal, the end of a line and a line that looks like one of
ours, marks that turn the direction of what follows, characters that nobody sees and
that make two names look the same. Such characters are written as Python writes them in
a string (`\\x1b`, `\\n`, `\\u202e`, `\\u200b`) where names become text. What is for
programs (`to_dict()`, JSON) has the names as they are.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import logging
import math
import os
import re
import sys
import textwrap
import traceback
import types
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

_T = TypeVar("_T")
_WIDTH = 84  # with what each logged line begins with: 100
_LONGEST = 1003  # characters of a name in a file
_CODE = re.compile(r"`[^`]*`|\{[^}]*\}|\[[\d:, ]{2,24}\]")
_FIXED_SPACE = "\0"
_CELL = re.compile(r"In\[\d+\]")


# Controls, formats (directions, what has no width), halves of surrogate pairs, which no
# terminal's encoding has, ends of lines and of paragraphs.
_UNSAFE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
_MAY_BE_UNSAFE = re.compile("[^\x20-\x7e]")


def printable(text: str, keep: str = "") -> str:
    """Escapes what is no part of a line; escaping twice changes nothing.

    Args:
        text: A name, a sentence, a line.
        keep: Characters to leave, such as "\\n" in a text of several lines.
    """
    if text.isprintable():
        return text
    return _MAY_BE_UNSAFE.sub(lambda found: _escaped(found[0], keep), text)


def _escaped(character: str, keep: str) -> str:
    if character in keep or unicodedata.category(character) not in _UNSAFE:
        return character
    return ascii(character)[1:-1]


def printable_lines(lines: Iterable[str]) -> list[str]:
    """Escapes what is no part of a line in each of several."""
    return [printable(line) for line in lines]


def shortened(name: str) -> str:
    """A name without its middle, where it is too long for a file."""
    return name if len(name) <= _LONGEST else f"{name[:500]}...{name[-500:]}"


def counted(number: int, noun: str) -> str:
    """Writes a number of things: `1 step`, `2 steps`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def some(names: Iterable[str], most: int) -> str:
    """Lists the first of several names: `a, b and 3 more`."""
    listed = list(names)
    more = f" and {len(listed) - most} more" * (len(listed) > most)
    return f"{', '.join(listed[:most])}{more}"


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """Writes things by numbers in order: `step 1`, `ranks 0 and 1`, `steps 0 to 9`."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    if len(numbers) == 2:
        return f"{noun}s {numbers[0]} and {numbers[1]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{noun}s {numbers[0]} to {numbers[-1]}"
    return f"{noun}s {some(map(str, numbers), 6)}"


def either(words: Iterable[str], most: int | None = None) -> str:
    """Lists alternatives: `a, b or c`, or `a, b or one of 3 more`."""
    listed = list(words)
    if most is not None and len(listed) > most:
        return f"{', '.join(listed[:most])} or one of {len(listed) - most} more"
    return " or ".join([", ".join(listed[:-1]), listed[-1]][len(listed) < 2 :])


def capitalized(sentence: str) -> str:
    """Writes the first letter of a sentence large, and leaves the others."""
    return f"{sentence[0].upper()}{sentence[1:]}"


def nearest(word: str, names: Iterable[str]) -> str:
    """Writes which name was probably meant: `: did you mean skip?`; "" for none.

    A name that is spelled alike, else those that begin with the same word: `on_nan` is
    meant for `on_overflow`.
    """
    bare, known = word.strip("-"), {name.strip("-"): name for name in names}
    found = difflib.get_close_matches(bare, known, n=1)
    if not found:
        first, *others = _WORDS.split(bare)
        alike = [each for each in known if others and _WORDS.split(each)[0] == first]
        found = alike[:_MOST_MEANT]
    return f": did you mean {either(known[each] for each in found)}?" if found else ""


_WORDS = re.compile("[-_.]")
_MOST_MEANT = 3  # more say nothing


def rounded(number: float, digits: int = 3) -> str:
    """Writes a factor as people read it: `53,000`, not `5.3e+04`."""
    return f"{float(f'{number:.{digits}g}'):,.10g}"


def bits_left(limit: float, abs_max: float) -> float:
    """The headroom: how often a magnitude could double before it passes a limit.

    Returns:
        inf for 0; -inf for inf; nan where one of the two is not known.
    """
    if abs_max == 0:
        return math.inf if limit > 0 else math.nan
    ratio = limit / abs_max
    if ratio > 0:
        return math.log2(ratio)
    return -math.inf if ratio == 0 else math.nan


def error_line(error: BaseException, most: int = 500) -> str:
    """Writes the class of an error and its first line, of which so many characters."""
    return f"{type(error).__name__}: {str(error)[:most]}".splitlines()[0]


def dtype_name(dtype: object) -> str:
    """Writes a dtype without its package: "float16"."""
    return str(dtype).removeprefix("torch.")


def as_lines(sentences: Iterable[str]) -> str:
    """Writes a message: one sentence a line, a long one continued in the next line."""
    return "\n".join(line for each in sentences for line in wrapped(each))


def kind_of(value: object) -> str:
    """Names the class of a value, for an error; a class as such."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return type(value).__name__


def aligned(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Writes the rows of a table as lines.

    Args:
        rows: The cells of each row, all of one length.
        right: The columns whose cells end together; those of others begin together.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ends = {i: str.rjust for i in right}
    return [
        "  ".join(
            ends.get(i, str.ljust)(cell, widths[i]) for i, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]


def wrapped(sentence: str, width: int = _WIDTH, indent: str = "  ") -> list[str]:
    """Wraps a sentence, but no code in backticks or braces, and no [0, 1]."""
    fixed = _CODE.sub(
        lambda code: code[0].replace(" ", _FIXED_SPACE), printable(sentence)
    )
    lines = textwrap.wrap(
        fixed,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_FIXED_SPACE, " ") for line in lines]


# The logger `overflow_fast`: each of its lines begins with the package's name.


def listed_fields(meanings: Iterable[tuple[str, str]]) -> str:
    """Lists fields as a docstring does, by their names and what they mean."""
    return "\n".join(
        textwrap.fill(
            f"{name}: {meaning}",
            _WIDTH,  # help() indents docstrings
            initial_indent="    ",
            subsequent_indent="        ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, meaning in meanings
    )


_PREFIX = "[overflow_fast] "
_formatter = logging.Formatter()


# A text of ours that has lines of its own stands in a line of its own; any other value
# is a part of a line, and cannot end it.
_OF_LINES = re.compile(r"^%s$", re.MULTILINE)
_TEXTS = (str, BaseException, os.PathLike)


def _prefixed(text: str) -> str:
    lines = printable(text, keep="\n\t").rstrip("\n").split("\n")
    return "\n".join(f"{_PREFIX}{line}".rstrip() for line in lines)


def _message(record: logging.LogRecord) -> str:
    if isinstance(record.args, tuple) and not _OF_LINES.search(str(record.msg)):
        record.args = tuple(map(_in_line, record.args))
    return record.getMessage()


def _in_line(value: Any) -> Any:
    return printable(str(value)) if isinstance(value, _TEXTS) else value


def _begin_lines(record: logging.LogRecord) -> bool:
    """Begins each line of a record, and of the traceback that comes with it."""
    try:
        record.msg, record.args = _prefixed(_message(record)), None
    except (TypeError, ValueError, KeyError):
        return True  # logging reports arguments that do not fit the message
    if record.exc_info and not record.exc_text:
        record.exc_text = _prefixed(_formatter.formatException(record.exc_info))
    return True


_DISABLED = (
    "The logger `overflow_fast` is disabled: reports are not seen. dictConfig() and "
    "fileConfig() of logging.config disable all loggers that exist, but for those "
    "that they name, without disable_existing_loggers=False."
)


class _Unfailing(logging.Logger):
    """A logger that an error of a handler, a filter or a record factory does not leave.

    Reports are logged between a decision and what it leads to. That it is disabled is
    warned of once: to configure logging does so to all loggers that exist.
    """

    _is_told = False

    def isEnabledFor(self, level: int) -> bool:
        """True if what is logged at a level is handed on."""
        if self.disabled and level >= logging.WARNING and not self._is_told:
            self._is_told = True
            with contextlib.suppress(Exception):  # a warning may be an error
                warnings.warn(_DISABLED, stacklevel=3)
        return super().isEnabledFor(level)

    def makeRecord(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        """Makes a record; a plain one where the program's factory raises."""
        try:
            return super().makeRecord(*args, **kwargs)
        except Exception:
            _show_error()
            name, level, path, line, message, values, error, *_ = args
            return logging.LogRecord(name, level, path, line, message, values, error)

    def handle(self, record: logging.LogRecord) -> None:
        """Passes a record to the filters and handlers; prints what they raise."""
        try:
            super().handle(record)
        except Exception:
            _show_error()


def _show_error() -> None:
    """Prints the error at hand where logging prints those of its own handlers."""
    if logging.raiseExceptions and sys.stderr is not None:
        with contextlib.suppress(Exception):
            traceback.print_exc()


# This logger alone: how users format and where they write is theirs. It may have been
# made before, and of a class of theirs.
_logger = logging.getLogger("overflow_fast")
_logger.__class__ = type("Logger", (_Unfailing, type(_logger)), {})
_logger.addFilter(_begin_lines)


# Names of files and cells.


def short_name(file: str) -> str:
    """Shortens a file's path to its name, or to its cell's, such as "In[3]".

    Of an installed package the path begins with the package's.
    """
    return installed_name(file) or os.path.basename(source_name(file))


def source_name(file: str) -> str:
    """The name of a notebook's cell, such as "In[3]"; of any other file its path.

    A cell's path is that of a temporary file that does not exist.
    """
    compiler = getattr(notebook_shell(), "compile", None)
    label_of = getattr(compiler, "format_code_name", None)
    label = label_of(file) if callable(label_of) else None
    return file if label is None else str(label[1])


def notebook_shell() -> Any:
    """The shell of IPython that runs the program, or None."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def is_cell(name: str) -> bool:
    """True for what `source_name()` calls a cell, in any process."""
    return _CELL.fullmatch(name) is not None


# Files of the program, of installed packages, and ours.


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_DEMO = os.path.join(_PACKAGE, "tools", "demo") + os.sep
_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def _absolute(file: str) -> str:
    """The absolute path of a file; as it is, where the working directory is gone."""
    try:
        return os.path.abspath(file)
    except OSError:
        return file


@functools.cache
def installed_name(file: str) -> str:
    """The path of an installed package's file from the package on; "" for any other.

    Of the standard library's, too. This package's own files are none.
    """
    path = _absolute(file)
    if is_own(path) or path.startswith(_DEMO):
        return ""
    for folder in ("site-packages", "dist-packages"):
        _, found, name = path.rpartition(f"{os.sep}{folder}{os.sep}")
        if found:
            return name
    is_standard = path.startswith(_STANDARD)
    return path.removeprefix(_STANDARD) if is_standard else ""


@functools.cache
def is_of_program(file: str) -> bool:
    """True for a file that is the program's own: no package's, and not ours."""
    is_frozen = file.startswith("<frozen")
    return not (is_frozen or is_own(file) or installed_name(file))


def modules_of_program() -> list[types.ModuleType]:
    """The modules of the program's own files, as far as they are imported."""
    found = []
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            own = vars(module)  # what is imported at its first use is not
            file = own.get("__file__")
            is_main = file is None and own.get("__name__") == "__main__"
            if is_main or (isinstance(file, str) and is_of_program(file)):
                found.append(module)
    return found


@functools.cache
def is_own(file: str) -> bool:
    """True for a file of this package, but not of its demonstration."""
    path = _absolute(file)
    return path.startswith(_PACKAGE) and not path.startswith(_DEMO)


@functools.cache
def is_of_user(file: str) -> bool:
    """True if a file is neither torch's, which is imported, nor this package's."""
    torch = _absolute(str(sys.modules["torch"].__file__))
    is_torchs = _absolute(file).startswith(os.path.dirname(torch) + os.sep)
    return not (is_own(file) or is_torchs or file.startswith("<frozen"))


def drop_own_frames(error: BaseException) -> None:
    """Removes this package's frames from a traceback, before it is raised again.

    What raises it adds one. Frames of the program and of libraries stay.
    """
    kept: types.TracebackType | None = None
    for frame in reversed(list(_entries(error.__traceback__))):
        if not is_own(frame.tb_frame.f_code.co_filename):
            place = frame.tb_frame, frame.tb_lasti, frame.tb_lineno
            kept = types.TracebackType(kept, *place)
    error.__traceback__ = kept


def _entries(entry: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while entry is not None:
        yield entry
        entry = entry.tb_next


def with_progress(items: Iterable[_T], unit: str, total: int | None) -> Iterable[_T]:
    """Iterates, with a progress bar on a terminal from the third second on.

    Args:
        items: The items.
        unit: The word for several of them.
        total: How many there are, or None.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    shown: Iterable[_T] = tqdm(
        items, total=total, unit=f" {unit}", delay=2, disable=None
    )
    return shown
