"""The text of a file of the program, and edits of it, which are never applied.

An edit puts one expression in the place of another one of a file. What is put there is
a tree whose leaves are nodes of the file's own tree, so that edits within one another
become one when nodes are replaced. `ast.unparse` writes what is new; all other text
stays as it is.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import keyword
import linecache
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...base.source_files import source_name
from ..syntax import module_of
from ..users_lines import Site, Span, source_lines


class NotWrittenError(Exception):
    """Raised where a change has no text that says the same at the changed place."""


# The others are of code that Python cannot write anew.
NOT_WRITTEN = (NotWrittenError, SyntaxError, ValueError, RecursionError)


@dataclass(frozen=True)
class Edit:
    """Another expression (or statement) in the place of one of a file."""

    file: str
    node: ast.AST
    text: str
    new: ast.AST = field(compare=False)

    @classmethod
    def of(cls, file: str, node: ast.AST, new: ast.AST) -> Edit:
        """Makes an edit; of the same text it is the same one."""
        return cls(file, node, unparsed(new), new)


def unparsed(node: ast.AST) -> str:
    """The text of a tree."""
    made = _AsWritten().visit(_apart(node))
    text = ast.unparse(ast.fix_missing_locations(made))
    return re.sub(r"(?<=\de-)0", "", text if '"' in text else text.replace("'", '"'))


def _apart(node: Any) -> Any:
    """A copy, of a part at each place where it stands: brackets depend on the place."""
    made = copy.copy(node)
    for name, value in ast.iter_fields(node):
        if isinstance(value, list):
            parts = [_apart(e) if isinstance(e, ast.AST) else e for e in value]
            setattr(made, name, parts)
        elif isinstance(value, ast.AST):
            setattr(made, name, _apart(value))
    return made


class _AsWritten(ast.NodeTransformer):
    """Writes as people do: `1e9`, `x ** -2`, a generator in one pair of brackets."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if len(node.args) == 1 and isinstance(node.args[0], ast.GeneratorExp):
            inner = ast.unparse(ast.fix_missing_locations(node.args[0]))[1:-1]
            return ast.Call(node.func, [ast.Name(inner)], node.keywords)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.op, ast.Pow) and isinstance(node.right, ast.UnaryOp):
            exponent = ast.unparse(ast.fix_missing_locations(node.right))
            if isinstance(node.right.operand, (ast.Constant, ast.Name)):
                node.right = ast.Name(exponent)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        text: str = getattr(node, "text", "")
        return ast.Name(text) if text else node


def rebuilt(node: Any, new: Mapping[ast.AST, ast.AST]) -> Any:
    """A tree with others in place of some nodes; what holds none of these is kept."""
    if node in new:  # which may hold the node itself
        return rebuilt(new[node], {k: v for k, v in new.items() if k is not node})
    made = node
    for name, value in ast.iter_fields(node):
        parts = value if isinstance(value, list) else [value]
        again = [rebuilt(e, new) if isinstance(e, ast.AST) else e for e in parts]
        if any(a is not b for a, b in zip(parts, again, strict=True)):
            made = copy.copy(node) if made is node else made
            setattr(made, name, again if isinstance(value, list) else again[0])
    return made


class SourceText:
    """The text of a file, and its tree."""

    def __init__(self, file: str, lines: Sequence[str]) -> None:
        self.shown, self.lines, self._nodes = source_name(file), lines, list[ast.AST]()
        with contextlib.suppress(SyntaxError, ValueError):
            self._nodes = list(ast.walk(module_of("".join(lines))))
        of_names = [n for n in self._nodes if isinstance(n, ast.Name)]
        self.stores = [n for n in of_names if isinstance(n.ctx, ast.Store)]
        self.imports: dict[str, str] = {}  # names in the file, by full names
        for n in self._nodes:
            for each in n.names if isinstance(n, (ast.Import, ast.ImportFrom)) else ():
                whole, root = each.name, each.name.partition(".")[0]
                if isinstance(n, ast.ImportFrom):
                    whole = f"{n.module}.{each.name}"
                elif not each.asname:
                    self.imports[root] = root
                self.imports[whole] = each.asname or each.name
        self.parents = {c: n for n in self._nodes for c in ast.iter_child_nodes(n)}
        for n in self._nodes:
            if isinstance(n, ast.Constant) and type(n.value) in (int, float):
                n.text = self._number_at(n)  # type: ignore[attr-defined]

    def _number_at(self, node: ast.Constant) -> str:
        """How a number is written; "" in an f-string, where Python < 3.12 is wrong."""
        line, _, begin, end = span_of(node)
        text = self.lines[line - 1].encode()[begin:end].decode(errors="replace")
        with contextlib.suppress(ValueError, SyntaxError):
            return text if ast.literal_eval(text) == node.value else ""
        return ""

    @staticmethod
    def of(file: str) -> SourceText:
        """A file, read once as long as its text is the same."""
        return _read(file, tuple(linecache.getlines(file)))

    @functools.cached_property
    def by_span(self) -> dict[Span, Any]:
        """The innermost node of each place that Python may say a call stands at."""
        kinds = (ast.expr, ast.AugAssign)
        found = {span_of(n): n for n in self._nodes if isinstance(n, kinds)}
        for n in self._nodes:  # a method whose name begins a line
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute):
                (_, last, _, end), (_, first, _, begin) = span_of(n), span_of(n.func)
                found[first, last, begin - len(n.func.attr.encode()), end] = n
        return found

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yields the nodes around one, from the innermost on."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def _offset(self, line: int, column: int, first: int) -> int:
        before = self.lines[line - 1].encode()[:column].decode()
        return sum(map(len, self.lines[first - 1 : line - 1])) + len(before)

    def block(self, edits: Iterable[Edit], first: int, last: int) -> str:
        """Lines with edits, without the first one's indentation."""
        new = {edit.node: edit.new for edit in edits}
        text = "".join(self.lines[first - 1 : last])
        own = [n for n in new if first <= span_of(n)[0] and span_of(n)[1] <= last]
        outer = [n for n in own if not any(e in new for e in self.around(n))]
        for node in sorted(outer, key=span_of, reverse=True):
            begin, end, left, right = span_of(node)
            i, j = self._offset(begin, left, first), self._offset(end, right, first)
            made = rebuilt(node, new)
            written, parent = unparsed(made), self.parents.get(node)
            is_alone = isinstance(parent, (ast.stmt, ast.keyword, ast.Module))
            is_alone |= isinstance(parent, ast.Call) and node in parent.args
            is_within = text[i - 1 : i] + text[j : j + 1] == "()"
            if is_within and isinstance(made, _ATOMS):
                before = re.search(r"[\w)\]]*$", text[: i - 1].rstrip())
                is_call = before and before[0] and not keyword.iskeyword(before[0])
                i, j = (i, j) if is_call else (i - 1, j + 1)  # without the brackets
            if not (is_alone or is_within or isinstance(made, (*_ATOMS, ast.stmt))):
                written = f"({written})"
            text = text[:i] + written + text[j:]
        return text.lstrip(" \t").rstrip("\n")


_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant, ast.List)
_read = functools.lru_cache(maxsize=4)(SourceText)
span_of: Callable[[Any], Span] = operator.attrgetter(
    "lineno", "end_lineno", "col_offset", "end_col_offset"
)


def node_at(site: Site) -> Any:
    """The expression or augmented assignment that made a call, or None."""
    if site.span is None or not source_lines(site.code):
        return None
    return SourceText.of(site.file).by_span.get(site.span)
