"""Exceptions that a nan or an inf may have led to."""

from __future__ import annotations

import linecache
import opcode
import re
from types import TracebackType

import torch

from ..base.source_files import is_of_program
from .watching.inputs import is_plain

_UNRELATED = (
    *(KeyError, AttributeError, NameError, TypeError, ImportError, OSError),
    *(MemoryError, torch.OutOfMemoryError, NotImplementedError, StopIteration),
)
_WORDS = re.compile(r"\b(infs?|nans?|(non-?)?finite|infinity)\b", re.IGNORECASE)
_HINTS = re.compile(  # the last ones of indices, which a nan has been made
    r"\b(infinite|invalid (numeric|values?)|infeasible|singular|converged?|positive[- ]"
    r"(semi)?definite|between 0 and 1|p_in|elements of std|out of range in self|out of "
    r"bounds)\b",
    re.IGNORECASE,
)
_CHECKS = re.compile(r"nan|\b(is)?_?(inf|finite)", re.IGNORECASE)
_CHAINED = 8  # exceptions, each raised from or within the next; chosen
_RAISES = opcode.opmap["RAISE_VARARGS"]


def leaves_room(error: BaseException) -> bool:
    """True if what has raised could be run again: there are memory and a device."""
    return not isinstance(
        error, (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
    )


def is_of_values(error: BaseException) -> bool:
    """True if a nan or an inf may have led to an exception.

    Its text says so, or the program's own lines that raise it; or they do, and a
    variable of theirs holds one. Incurs a CPU-GPU sync for each on a device then.
    """
    chained: BaseException | None = error
    for _ in range(_CHAINED):
        if chained is None or isinstance(chained, _UNRELATED):
            return False
        if _says(chained, _WORDS, _HINTS) or _is_of_check(chained.__traceback__):
            return True
        chained = chained.__cause__ or chained.__context__
    return False


def _is_of_check(last: TracebackType | None) -> bool:
    """True if the program's own code has raised, and has looked at a nan or an inf."""
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or not is_of_program(last.tb_frame.f_code.co_filename):
        return False
    code, line = last.tb_frame.f_code, last.tb_lineno
    if code.co_code[last.tb_lasti] != _RAISES:  # but what it has called
        return False
    lines = linecache.getlines(code.co_filename, last.tb_frame.f_globals)[:line]
    if any(map(_CHECKS.search, [*lines[-1:], _condition_of(lines)])):
        return True
    held = last.tb_frame.f_locals.values()
    found = [each for each in held if is_plain(each) and each.is_floating_point()]
    with torch.no_grad():  # of -inf alone are masks
        return any(
            bool((each != each).any() | (each == torch.inf).any()) for each in found
        )


def _condition_of(lines: list[str]) -> str:
    """The line above the last one that is indented less; "" for none."""
    indents = [len(each) - len(each.lstrip()) for each in lines]
    pairs = zip(reversed(lines[:-1]), reversed(indents[:-1]), strict=True)
    return next((e for e, indent in pairs if e.strip() and indent < indents[-1]), "")


def _says(error: BaseException, *patterns: re.Pattern[str]) -> bool:
    try:
        text = str(error)
    except Exception:  # its class has a text of its own, which fails
        return False
    return any(each.search(text) for each in patterns)
