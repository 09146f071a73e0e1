"""A source file with edits that are tried: the file itself is never written to."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..places import Span
from .line_edit import marked


@dataclass(frozen=True)
class Edit:
    """Another text for an expression or an augmented assignment.

    Attributes:
        node: The expression, of the tree of a `SourceFile`.
        text: The text that replaces it.
        run: The text that is tried, where it checks more; "" for the same.
    """

    node: ast.AST
    text: str
    run: str = ""


class SourceFile:
    """The text of a file, with the edits that were made so far.

    Args:
        name: Its path, or what `linecache` knows a cell of a notebook by.
        lines: Its lines with the edits; None for those of the file.
    """

    def __init__(self, name: str, lines: Sequence[str] | None = None) -> None:
        self.name = name
        self.lines = list(linecache.getlines(name) if lines is None else lines)

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.lines)

    @functools.cached_property
    def _nodes(self) -> list[ast.AST]:
        try:
            return list(ast.walk(ast.parse(self.text)))
        except (SyntaxError, ValueError):
            return []

    @functools.cached_property
    def _parents(self) -> dict[int, ast.AST]:
        return {
            id(child): node
            for node in self._nodes
            for child in ast.iter_child_nodes(node)
        }

    def node_at(self, span: Span) -> ast.AST | None:
        """The expression or augmented assignment that stands at a place, or None."""
        kinds = (ast.expr, ast.AugAssign)
        found = None
        for node in self._nodes:
            if isinstance(node, kinds) and span in (span_in(node), _call_span(node)):
                found = node  # the innermost of those that span the same
        return found

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yields the nodes around one, from the innermost on."""
        parent = self._parents.get(id(node))
        while parent is not None:
            yield parent
            parent = self._parents.get(id(parent))

    def text_of(self, node: ast.AST) -> str:
        """The source of a node."""
        return ast.get_source_segment(self.text, node) or ""

    def text_with(self, node: ast.AST, inner: ast.AST, text: str) -> str:
        """The source of a node with another text in place of one within it."""
        if node is inner:
            return text
        begin, end = self._offset(node), self._offset(node, is_end=True)
        left, right = self._offset(inner), self._offset(inner, is_end=True)
        return self.text[begin:left] + text + self.text[right:end]

    def _offset(self, node: ast.AST, is_end: bool = False) -> int:
        """Where a node begins or ends in the text."""
        first, last, begin, end = span_in(node)
        line, column = (last, end) if is_end else (first, begin)
        before = sum(map(len, self.lines[: line - 1]))
        return before + len(self.lines[line - 1].encode()[:column].decode())

    def block(self, first: int, last: int) -> str:
        """The lines from one number to another, without the first's indentation."""
        return "".join(self.lines[first - 1 : last]).lstrip(" \t").rstrip("\n")

    def edited(self, edits: Sequence[Edit]) -> SourceFile:
        """The file with edits, which do not overlap."""
        return SourceFile(self.name, self._with(edits, _as_it_reads))

    def to_run(self, edits: Sequence[Edit]) -> str:
        """The text to try edits by, which notes which of them run."""
        numbers = {id(edit): i for i, edit in enumerate(edits)}
        return "".join(self._with(edits, lambda each: _to_run(each, numbers[id(each)])))

    def _with(self, edits: Sequence[Edit], text_of: Callable[[Edit], str]) -> list[str]:
        lines = list(self.lines)
        for edit in sorted(edits, key=_start, reverse=True):
            first, last, begin, end = span_in(edit.node)
            head = lines[first - 1].encode()[:begin].decode()
            tail = lines[last - 1].encode()[end:].decode()
            # What spans several lines becomes one: those below keep their numbers.
            line = head + text_of(edit) + tail
            lines[first - 1 : last] = [line, *["\n"] * (last - first)]
        return lines


def span_in(node: ast.AST) -> Span:
    """Where a node stands."""
    place = (
        getattr(node, key)
        for key in ("lineno", "end_lineno", "col_offset", "end_col_offset")
    )
    first, last, begin, end = place
    return first, last, begin, end


def _call_span(node: ast.AST) -> Span | None:
    """Where Python says that a call of a method stands whose name begins a line."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    _, last, _, end = span_in(node)
    _, first, _, begin = span_in(node.func)
    return first, last, begin - len(node.func.attr.encode()), end


def _start(edit: Edit) -> tuple[int, int]:
    first, _, begin, _ = span_in(edit.node)
    return first, begin


def _as_it_reads(edit: Edit) -> str:
    return _in_one_line(edit.text, edit.node)


def _to_run(edit: Edit, number: int) -> str:
    text = _in_one_line(edit.run or edit.text, edit.node)
    return marked(f"({text})" if isinstance(edit.node, ast.expr) else text, number)


def _in_one_line(text: str, node: ast.AST) -> str:
    if "\n" not in text:
        return text
    whole = f"({text}\n)" if isinstance(node, ast.expr) else text
    return ast.unparse(ast.parse(whole))
