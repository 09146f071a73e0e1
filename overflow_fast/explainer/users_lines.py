"""The user's lines that run, and that led to an operation."""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import linecache
import os
import sys
import threading
import time
import weakref
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any, NamedTuple

from ..base.source_files import (
    installed_name,
    is_of_user,
    is_own,
    short_name,
    source_name,
)
from ..guard.report.gist import expression_of
from ..guard.report.op import Op
from .syntax import expression_of as parsed_expression

_MAX_FRAMES = 12  # lines of an operation that a report shows; chosen, not measured
_ENGINE = "_engine_run_backward"
# Files of torch that the engine calls, but for hooks of the user's.
_NO_HOOKS = tuple(
    os.path.join("torch", *parts)
    for parts in (("autograd", "function.py"), ("utils", "checkpoint.py"))
)
BEGINS = {"_run_call", "_made_again"}  # who runs the user's code again

# The first line, the last line, the first and the last column in UTF-8.
Span = tuple[int, int, int, int]


# A class of tensors is asked by these about each call that another line makes.
_HANDS_ON = ("__torch_function__", "__torch_dispatch__")


class Site(NamedTuple):
    """A place in code: Python 3.10 knows its line, later ones its columns, too."""

    code: CodeType
    line: int
    instruction: int

    @classmethod
    def of(cls, frame: FrameType) -> Site:
        """Where a frame runs now."""
        # What a named tuple's own `__new__` does, in half of the time.
        return tuple.__new__(cls, (frame.f_code, frame.f_lineno, frame.f_lasti))

    @property
    def file(self) -> str:
        """The path of its file."""
        return self.code.co_filename

    @property
    def text(self) -> str:
        """The file's short name and the line, such as "model.py:12"."""
        return f"{short_name(self.file)}:{self.line}"

    @property
    def line_text(self) -> str:
        """The text of its line; "" if its file has another one by now."""
        lines = source_lines(self.code)
        return lines[self.line - 1].strip() if 0 < self.line <= len(lines) else ""

    @property
    def key(self) -> tuple[str, str, int, int]:
        """The place as data, which is the same on each rank."""
        code = self.code
        return self.file, code.co_name, code.co_firstlineno, self.instruction

    @property
    def span(self) -> Span | None:
        """Where its call stands in the file; None if Python does not tell."""
        if not hasattr(self.code, "co_positions"):
            return None
        place = max(0, self.instruction // 2)
        here = itertools.islice(self.code.co_positions(), place, None)
        first, last, begin, end = next(here, (None,) * 4)
        if first is None or last is None or begin is None or end is None:
            return None
        return first, last, begin, end


Sites = tuple[Site, ...]  # the innermost first


class UsersLines:
    """Reads the running lines of the user's code, at one operation after another.

    What has called a frame that ran at the last look is where it was, and is not read
    again.
    """

    def __init__(self) -> None:
        # Of each thread, outermost first: what ran, and the lines that had called it.
        self._known: dict[int, dict[FrameType, Sites]] = {}

    def now(self) -> Sites:
        """The running lines, the innermost first.

        In a backward, those that run inside of autograd's engine only: of a custom
        Function, a hook, or a checkpoint that computes its forward again. Of a replay,
        what called the guard is left out.
        """
        known = self._known.setdefault(threading.get_ident(), {})
        new: list[FrameType] = []
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame not in known:
            code = frame.f_code
            name = code.co_name
            if name == _ENGINE or (name in BEGINS and is_own(code.co_filename)):
                frame = None
                break
            if new or not is_own(code.co_filename):  # which hold an operation's tensors
                new.append(frame)
            frame = frame.f_back
        while known and next(reversed(known)) is not frame:
            known.popitem()
        lines: Sites = ()
        if frame is not None:
            lines = _with_line(frame, known[frame])
        for each in reversed(new):
            known[each] = lines
            lines = _with_line(each, lines)
        return lines

    def forget(self) -> None:
        """Lets go of the frames."""
        self._known.clear()


def _with_line(frame: FrameType, callers: Sites) -> Sites:
    code = frame.f_code
    if is_of_user(code.co_filename) and code.co_name not in _HANDS_ON:
        return (Site.of(frame), *callers)[:_MAX_FRAMES]
    return callers


def runs_in_hook() -> bool:
    """True if autograd's engine has called a hook, which runs now.

    A custom Function's backward is none, nor is a checkpoint that runs again.
    """
    first, frame = "", sys._getframe(2)
    while frame is not None and frame.f_code.co_name != _ENGINE:
        first = frame.f_code.co_filename
        frame = frame.f_back  # type: ignore[assignment]
    return bool(first) and not first.endswith(_NO_HOOKS)


def stack_of(sites: Sites) -> list[str]:
    """Lines as text, the outermost first."""
    return [
        f"{source_name(each.file)}:{each.line} in {each.code.co_name}"
        for each in reversed(sites)
    ]


def code_at(sites: Sites) -> tuple[str, int, str]:
    """The file, the number and the text of the innermost line."""
    if not sites:
        return "", 0, ""
    return source_name(sites[0].file), sites[0].line, sites[0].line_text


_LOADED_AT = time.time()


def source_lines(code: CodeType, around: dict[str, Any] | None = None) -> list[str]:
    """The lines of a code's file; none if the code was not compiled from these.

    A file may be edited while the program runs.

    Args:
        code: The code.
        around: Its global variables, which know where an archive has the file.
    """
    lines = linecache.getlines(code.co_filename, around)
    written_at = 0.0
    with contextlib.suppress(OSError, ValueError):  # a cell of a notebook
        found = os.stat(code.co_filename)
        # What `mv`, `cp -p` and `rsync -t` put there has the date of another file.
        written_at = max(found.st_mtime, found.st_ctime)
    is_known = written_at < _LOADED_AT or code in _made_of_lines
    return lines if is_known or _is_compiled_from(code, "".join(lines)) else []


# Code that was made of some lines of a file, after a look that these are what ran.
_made_of_lines: weakref.WeakSet[CodeType] = weakref.WeakSet()


def note_made_of_lines(code: CodeType) -> None:
    """Notes that a code was made of some of its file's lines, as they are."""
    _made_of_lines.add(code)


@functools.lru_cache(maxsize=16)
def _is_compiled_from(code: CodeType, text: str) -> bool:
    try:
        waiting = [compile(text, code.co_filename, "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return False
    for each in waiting:  # it grows meanwhile
        if each == code:
            return True
        waiting += [inner for inner in each.co_consts if isinstance(inner, CodeType)]
    return False


def place_text(sites: Sites) -> str:
    """The file and the number of the innermost line, such as " (train.py:9)", or ""."""
    return f" ({sites[0].text})" if sites else ""


def programs_line(sites: Sites, called_at: tuple[str, int]) -> str:
    """The program's own line that led into an installed package, or "".

    Args:
        sites: The user's lines that led to an operation, the innermost first.
        called_at: Where the program called what was replayed.
    """
    if not sites or not installed_name(sites[0].file):
        return ""
    own = next((each for each in sites if not installed_name(each.file)), None)
    if own is None:
        file, line = called_at
        text = linecache.getline(file, line).strip()
    else:
        file, line, text = own.file, own.line, own.line_text
    return f"{short_name(file)}:{line}{': ' * bool(text)}{text}" if file else ""


def op_at(name: str, sites: Sites, ran: Op | None = None) -> Op:
    """An operation with the line that called it, and those that led there.

    Args:
        name: Its name.
        sites: The user's lines that led to it, the innermost first.
        ran: What it was given and returned, where that is known.
    """
    file, line, code = code_at(sites)
    return replace(
        ran or Op(name),
        name=name,
        file=file,
        line=line,
        code=code,
        stack=stack_of(sites),
        columns=_columns_in_line(sites),
    )


def torchs_place(site: Site) -> str:
    """Where a function of torch's own called an operation; "" for any other code."""
    if is_of_user(site.file):
        return ""
    text = expression_of(op_at("", (site,)))
    name = text if 0 < len(text) <= _LONGEST_NAME else site.code.co_name
    return f"`{name}` ({site.text})"


_LONGEST_NAME = 30  # characters of an operand that a sentence has; chosen


def operands_at(sites: Sites) -> tuple[str, str] | None:
    """The two operands of a difference as the innermost line has them, or None."""
    with contextlib.suppress(SyntaxError, ValueError):
        tree = parsed_expression(expression_of(op_at("", sites)))
        if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Sub):
            one, other = ast.unparse(tree.left), ast.unparse(tree.right)
            is_short = max(len(one), len(other)) <= _LONGEST_NAME
            return (one, other) if is_short else None
    return None


def _columns_in_line(sites: Sites) -> tuple[int, int] | None:
    """Where the innermost call begins and ends in the text of its line."""
    span = sites[0].span if sites else None
    if span is None:
        return None
    first, last, begin, end = span
    line, lines = sites[0].line, source_lines(sites[0].code)
    if first != line or not line <= len(lines):
        return None
    text = lines[line - 1].encode()
    end = end if last == line else len(text.rstrip())
    indent = len(text) - len(text.lstrip())
    return len(text[indent:begin].decode()), len(text[indent:end].decode())
