"""A source file with edits that are shown: the file itself is never written to."""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...base.text import source_name
from ..syntax import expression_of, module_of
from ..users_lines import Span


@dataclass(frozen=True)
class Operand:
    """An expression of the file that an edit takes over.

    Attributes:
        node: The expression.
        is_bare: Whether it stands alone, as an argument of a call does.
    """

    node: ast.AST
    is_bare: bool


@dataclass(frozen=True)
class Edit:
    """Another text for an expression or an augmented assignment.

    Attributes:
        file: The file.
        node: The expression, of the tree of its `SourceFile`.
        parts: Texts, and expressions of the file as they read with other edits.
    """

    file: str
    node: ast.AST
    parts: tuple[str | Operand, ...]


class SourceFile:
    """The text of a file.

    Args:
        name: Its path, or what `linecache` knows a cell of a notebook by.
        lines: Its lines.

    Attributes:
        shown: The name that remedies have for it.
    """

    def __init__(self, name: str, lines: Sequence[str]) -> None:
        self.name = name
        self.shown = source_name(name)
        self.lines = list(lines)

    @staticmethod
    def of(name: str) -> SourceFile:
        """A file, read once as long as its text is the same."""
        return _read(name, tuple(linecache.getlines(name)))

    @functools.cached_property
    def _nodes(self) -> list[ast.AST]:
        try:
            return list(ast.walk(module_of("".join(self.lines))))
        except (SyntaxError, ValueError):
            return []

    @functools.cached_property
    def imports(self) -> set[str]:
        """The names that its imports give to modules and what they take of them."""
        kinds = ast.Import, ast.ImportFrom
        found = [
            n for node in self._nodes if isinstance(node, kinds) for n in node.names
        ]
        return {(each.asname or each.name).partition(".")[0] for each in found}

    @functools.cached_property
    def stores(self) -> list[ast.Name]:
        """Where names are given values."""
        names = (node for node in self._nodes if isinstance(node, ast.Name))
        return [each for each in names if isinstance(each.ctx, ast.Store)]

    @functools.cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The node around each node."""
        return {
            child: node for node in self._nodes for child in ast.iter_child_nodes(node)
        }

    def node_at(self, span: Span | None) -> ast.AST | None:
        """The expression or augmented assignment that stands at a place, or None."""
        return None if span is None else self._nodes_by_span.get(span)

    @functools.cached_property
    def _nodes_by_span(self) -> dict[Span, ast.AST]:
        """Expressions and augmented assignments: the innermost where several span it.

        A call is found at the place that Python gives to it, too.
        """
        return {
            span: node
            for node in self._nodes
            if isinstance(node, (ast.expr, ast.AugAssign))
            for span in (span_in(node), _call_span(node))
            if span is not None
        }

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yields the nodes around one, from the innermost on."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def text_of(self, node: ast.AST, edits: Sequence[Edit] = ()) -> str:
        """The source of a node in one line, with edits of what it holds."""
        return _in_one_line(self._spliced(*self._range(node), edits), node)

    def edited(self, edits: Sequence[Edit]) -> SourceFile:
        """The file with edits; lines below one keep their numbers."""
        whole = self._spliced(0, len(self._text), edits, is_numbered=True)
        lines: list[str] = []
        for line in whole.splitlines(keepends=True):
            lines += [line.replace(_LINE, ""), *["\n"] * line.count(_LINE)]
        return SourceFile(self.name, lines)

    def _spliced(
        self, begin: int, end: int, edits: Sequence[Edit], is_numbered: bool = False
    ) -> str:
        """A part of the text with edits."""
        places = [(*self._range(edit.node), edit) for edit in edits]
        found, at = "", begin
        for left, right, edit in sorted(places, key=lambda each: (each[0], -each[1])):
            if at <= left and right <= end:  # else it is within another one
                written = self._written(edit, [e for e in edits if e is not edit])
                if at < left and right < end and self._brackets(left, right, written):
                    left, right = left - 1, right + 1
                found += self._text[at:left] + written
                found += _LINE * self._text.count("\n", left, right) * is_numbered
                at = right
        return found + self._text[at:end]

    def _brackets(self, left: int, right: int, written: str) -> bool:
        """True if there are brackets around a place which a text there needs not."""
        before = self._text[max(left - 2, 0) : left]
        is_call = len(before) == 2 and (before[0].isalnum() or before[0] in "_)]")
        is_pair = before[-1:] == "(" and self._text[right : right + 1] == ")"
        return is_pair and not is_call and _is_atom(written)

    def _written(self, edit: Edit, others: Sequence[Edit]) -> str:
        text = ""
        for part in edit.parts:
            if isinstance(part, str):
                text += part
            else:
                inner = self.text_of(part.node, others)
                text += inner if part.is_bare and _is_bare(inner) else atom(inner)
        parent = self.parents.get(edit.node)
        stands_alone = isinstance(parent, (ast.stmt, ast.keyword)) or (
            isinstance(parent, ast.Call) and edit.node in parent.args
        )
        begin, end = self._range(edit.node)
        is_bracketed = self._text[begin - 1 : begin] + self._text[end : end + 1] == "()"
        stands_alone = stands_alone or is_bracketed
        is_statement = isinstance(edit.node, ast.stmt)
        return text if stands_alone or is_statement else atom(text)

    @functools.cached_property
    def _text(self) -> str:
        return "".join(self.lines)

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [0, *itertools.accumulate(map(len, self.lines))]

    def _range(self, node: ast.AST) -> tuple[int, int]:
        first, last, begin, end = span_in(node)
        return self._offset(first, begin), self._offset(last, end)

    def _offset(self, line: int, column: int) -> int:
        before = self.lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(before)

    def block(self, first: int, last: int) -> str:
        """The lines from one number to another, without the first's indentation."""
        return "".join(self.lines[first - 1 : last]).lstrip(" \t").rstrip("\n")


_LINE = "\0"  # stands for a line that an edit has joined with the one before


@functools.lru_cache(maxsize=4)
def _read(name: str, lines: tuple[str, ...]) -> SourceFile:
    return SourceFile(name, lines)


_SPAN = operator.attrgetter("lineno", "end_lineno", "col_offset", "end_col_offset")


def span_in(node: ast.AST) -> Span:
    """Where a node stands."""
    place: Span = _SPAN(node)
    return place


def _call_span(node: ast.AST) -> Span | None:
    """Where Python says that a call of a method stands whose name begins a line."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    _, last, _, end = span_in(node)
    _, first, _, begin = span_in(node.func)
    return first, last, begin - len(node.func.attr.encode()), end


def _in_one_line(text: str, node: ast.AST) -> str:
    if "\n" not in text:
        return text
    is_expression = isinstance(node, ast.expr)
    parsed = expression_of(f"({text}\n)") if is_expression else module_of(text)
    return ast.unparse(parsed).replace("e-0", "e-")  # 1e-6, as programs write it


def _is_bare(text: str) -> bool:
    """True if an expression can be an argument without brackets."""
    is_bracketed = text.startswith("(") and text.endswith(")")
    node = expression_of(f"({text})")
    kinds = (ast.GeneratorExp, ast.Yield, ast.NamedExpr, ast.Tuple)
    return is_bracketed or not isinstance(node, kinds)


_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant, ast.List)


def atom(text: str) -> str:
    """An expression that a method can be called on: in brackets where it needs them."""
    node = expression_of(text)
    is_bracketed = node.col_offset > 0 and (node.end_col_offset or 0) < len(text)
    return text if is_bracketed or isinstance(node, _ATOMS) else f"({text})"


def _is_atom(text: str) -> bool:
    try:
        return isinstance(expression_of(text), _ATOMS)
    except SyntaxError:  # a statement
        return False
