"""Edits one expression of a source file, and runs the edited code."""

from __future__ import annotations

import ast
import gc
import linecache
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType

from ..places import Span


class SourceFile:
    """A file that code comes from.

    Args:
        name: Its path, or what `linecache` knows a cell of a notebook by.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines = linecache.getlines(name)
        self._tree: ast.Module | None = None

    def node_at(self, span: Span) -> ast.AST | None:
        """The expression or augmented assignment that stands at a place, or None."""
        if self._tree is None:
            try:
                self._tree = ast.parse("".join(self.lines))
            except (SyntaxError, ValueError):
                self._tree = ast.Module([], [])
        found = None
        for node in ast.walk(self._tree):
            if isinstance(node, (ast.expr, ast.AugAssign)) and _span(node) == span:
                found = node  # the innermost of those that span the same
        return found

    def text_of(self, node: ast.AST) -> str:
        """The source of a node."""
        return ast.get_source_segment("".join(self.lines), node) or ""

    def edited(self, node: ast.AST, text: str) -> LineEdit:
        """The edit that puts a text in the place of a node."""
        first, last, begin, end = _span(node)
        head = self.lines[first - 1].encode()[:begin].decode()
        tail = self.lines[last - 1].encode()[end:].decode()
        lines = [*self.lines[: first - 1], head + text + tail, *self.lines[last:]]
        # What spans several lines becomes one: those below keep their numbers.
        lines[first:first] = ["\n"] * (last - first)
        return LineEdit(self, first, last, textwrap.dedent(head + text + tail), lines)


class LineEdit:
    """An edit of one line of a file, which is not written to.

    Attributes:
        source: The file.
        first: The number of the first line that is replaced.
        last: That of the last one.
        code: The line that replaces them, without its indentation.
    """

    def __init__(
        self, source: SourceFile, first: int, last: int, code: str, lines: list[str]
    ) -> None:
        self.source = source
        self.first, self.last = first, last
        self.code = code.rstrip("\n")
        self.lines = lines

    def as_file(self) -> SourceFile:
        """The edited file, to be edited again."""
        edited = SourceFile(self.source.name)
        edited.lines = self.lines
        return edited

    @contextmanager
    def applied(self, code: CodeType) -> Iterator[None]:
        """Lets the functions that a code belongs to run the edited file's code.

        The functions have their own code again afterwards.

        Args:
            code: That of the edited line, as it runs.

        Raises:
            NotEditableError: If the file is not what runs, or another thread runs it.
        """
        pairs = self._changed_codes(code)
        changes = [
            (function, new)
            for old, new in pairs
            for function in gc.get_referrers(old)
            if isinstance(function, FunctionType) and function.__code__ is old
        ]
        if not changes:
            raise NotEditableError("no function with that line was found")
        if _runs_elsewhere({old for old, _ in pairs}):
            raise NotEditableError("another thread runs that code")
        kept = [(function, function.__code__) for function, _ in changes]
        try:
            for function, new in changes:
                function.__code__ = new
            yield
        finally:
            for function, old in kept:
                function.__code__ = old

    def _changed_codes(self, code: CodeType) -> list[tuple[CodeType, CodeType]]:
        """The running code with those around it, and what replaces each of them."""
        name = self.source.name
        original = "".join(linecache.getlines(name))
        try:
            old = _nested(compile(original, name, "exec", dont_inherit=True))
            new = _nested(compile("".join(self.lines), name, "exec", dont_inherit=True))
        except (SyntaxError, ValueError) as error:
            raise NotEditableError(f"the line does not compile: {error}") from error
        places = [i for i, (each, _) in enumerate(old) if _is_same(each, code)]
        if len(places) != 1 or len(old) != len(new):
            raise NotEditableError("the file is not the code that runs")
        pairs = [(code, new[places[0]][0])]
        outer = old[places[0]][1]
        while outer is not None and outer:  # 0 is the file itself
            running = [each for each in _running_codes(old[outer][0])]
            pairs += [(each, new[outer][0]) for each in running]
            outer = old[outer][1]
        return pairs


class NotEditableError(Exception):
    """Raised where a line cannot be edited for a trial."""


def _span(node: ast.AST) -> Span:
    place = (
        getattr(node, key)
        for key in ("lineno", "end_lineno", "col_offset", "end_col_offset")
    )
    first, last, begin, end = place
    return first, last, begin, end


def _nested(module: CodeType) -> list[tuple[CodeType, int | None]]:
    """A file's code objects in order, each with the place of the one around it."""
    found: list[tuple[CodeType, int | None]] = [(module, None)]
    for place, (code, _) in enumerate(found):  # it grows meanwhile
        inner = [each for each in code.co_consts if isinstance(each, CodeType)]
        found += [(each, place) for each in inner]
    return found


def _is_same(a: CodeType, b: CodeType) -> bool:
    return a == b or (
        a.co_name == b.co_name
        and a.co_firstlineno == b.co_firstlineno
        and a.co_code == b.co_code
        and a.co_freevars == b.co_freevars
        and a.co_names == b.co_names
    )


def _running_codes(code: CodeType) -> list[CodeType]:
    """The code objects of live functions that are the same as one of a file."""
    functions = (each for each in gc.get_objects() if isinstance(each, FunctionType))
    return list(
        {
            id(f.__code__): f.__code__ for f in functions if _is_same(f.__code__, code)
        }.values()
    )


def _runs_elsewhere(codes: set[CodeType]) -> bool:
    """Whether another thread is within one of these codes."""
    own = threading.get_ident()
    for thread, frame in sys._current_frames().items():
        current = frame if thread != own else None
        while current is not None:
            if current.f_code in codes:
                return True
            current = current.f_back
    return False
