"""Edits one expression of a source file, and runs the edited code."""

from __future__ import annotations

import ast
import gc
import hashlib
import linecache
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
        run = text
        if isinstance(node, ast.expr):  # a closure keeps the variables of the old text
            run = f"(({text}) if True else ({ast.unparse(node)}))"
        lines = [*self.lines[: first - 1], head + run + tail, *self.lines[last:]]
        # What spans several lines becomes one: those below keep their numbers.
        lines[first:first] = ["\n"] * (last - first)
        code = textwrap.dedent(head + text + tail).rstrip("\n")
        return LineEdit(first, last, code, "".join(lines))


@dataclass(frozen=True)
class LineEdit:
    """An edit of one line of a file, which is not written to.

    Attributes:
        first: The number of the first line that is replaced.
        last: That of the last one.
        code: The line that replaces them, without its indentation.
        text: The edited file, to be run.
    """

    first: int
    last: int
    code: str
    text: str


@dataclass(frozen=True)
class CodePlace:
    """A function's code in a file; the same in every process that runs the file.

    Attributes:
        file: The file.
        index: Its place among the file's code objects; see `_nested()`.
        digest: Of the file's text.
    """

    file: str
    index: int
    digest: str

    @classmethod
    def of(cls, code: CodeType) -> CodePlace:
        """The place of a code that runs.

        Raises:
            NotEditableError: If the file is not what runs.
        """
        file = code.co_filename
        text = "".join(linecache.getlines(file))
        codes = _nested(_compiled(text, file))
        places = [i for i, (each, _) in enumerate(codes) if _is_same(each, code)]
        if len(places) != 1:
            raise NotEditableError("the file is not the code that runs")
        return cls(file, places[0], _digest(text))


@contextmanager
def edited_code(place: CodePlace, text: str) -> Iterator[None]:
    """Lets functions run an edited file's code; they have their own again afterwards.

    Args:
        place: The code that is edited. Codes around it are replaced with it.
        text: The edited file.

    Raises:
        NotEditableError: If the file is not what runs, or another thread runs it.
    """
    changes = _changes(place, text)
    if not changes:
        raise NotEditableError("no function with that line was found")
    if _runs_elsewhere({function.__code__ for function, _ in changes}):
        raise NotEditableError("another thread runs that code")
    kept = [(function, function.__code__) for function, _ in changes]
    try:
        for function, new in changes:
            function.__code__ = new
        yield
    finally:
        for function, old in kept:
            function.__code__ = old


def _changes(place: CodePlace, text: str) -> list[tuple[FunctionType, CodeType]]:
    """The live functions whose code is replaced, with their new code."""
    own = "".join(linecache.getlines(place.file))
    if _digest(own) != place.digest:
        raise NotEditableError("the file is another one here")
    old = _nested(_compiled(own, place.file))
    new = _nested(_compiled(text, place.file))
    if len(old) != len(new):
        raise NotEditableError("the edit changes more than a line")
    wanted: list[tuple[CodeType, CodeType]] = []
    index: int | None = place.index
    while index:  # 0 is the file itself
        wanted.append((old[index][0], new[index][0]))
        index = old[index][1]
    functions = [each for each in gc.get_objects() if type(each) is FunctionType]
    return [
        (function, after)
        for function in functions
        for before, after in wanted
        if _is_same(function.__code__, before)
    ]


def _compiled(text: str, file: str) -> CodeType:
    try:
        return compile(text, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise NotEditableError(f"the line does not compile: {error}") from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


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


def _runs_elsewhere(codes: set[CodeType]) -> bool:
    """Tells whether another thread is within one of these codes."""
    own = threading.get_ident()
    for thread, frame in sys._current_frames().items():
        current = frame if thread != own else None
        while current is not None:
            if current.f_code in codes:
                return True
            current = current.f_back
    return False
