"""Syntax trees of source text, made while other threads make theirs.

CPython up to 3.12 counts the depth of the tree that it builds in one number for all
threads: a thread that is switched to in between makes it raise a SystemError.
"""

from __future__ import annotations

import ast
import contextlib
import threading
import time
from collections.abc import Callable
from types import CodeType
from typing import TypeVar

_lock = threading.RLock()  # own threads do not disturb each other
_MOST_TRIES = 100  # the program's threads do, for the microseconds that a tree takes

_Result = TypeVar("_Result")


def module_of(text: str) -> ast.Module:
    """The tree of a file's text, or of some statements.

    Raises:
        SyntaxError, ValueError: As `ast.parse` does.
    """
    return _undisturbed(lambda: ast.parse(text))


def expression_of(text: str) -> ast.expr:
    """The tree of one expression.

    Raises:
        SyntaxError, ValueError: As `ast.parse` does.
    """
    return _undisturbed(lambda: ast.parse(text, mode="eval")).body


def code_of(tree: ast.Module, name: str, flags: int = 0) -> CodeType:
    """The code of statements, with the flags of `__future__` that they are under.

    Raises:
        SyntaxError, ValueError: As `compile` does.
    """

    def compiled() -> CodeType:
        code: CodeType = compile(tree, name, "exec", flags, dont_inherit=True)
        return code

    return _undisturbed(compiled)


def _undisturbed(function: Callable[[], _Result]) -> _Result:
    for _ in range(_MOST_TRIES):
        with _lock, contextlib.suppress(SystemError):
            return function()
        time.sleep(0.001)  # seconds; their tree is done then
    return function()
