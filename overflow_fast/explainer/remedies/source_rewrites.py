"""A source file with edits that are tried: the file itself is never written to."""

from __future__ import annotations

import ast
import functools
import linecache
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ...scanner.text import source_name
from ..users_lines import Span
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

    Attributes:
        shown: The name that remedies have for it.
    """

    def __init__(self, name: str, lines: Sequence[str] | None = None) -> None:
        self.name = name
        self.shown = source_name(name)
        self.lines = list(linecache.getlines(name) if lines is None else lines)

    @classmethod
    def of(cls, name: str) -> SourceFile:
        """A file without edits, read once as long as its text is the same."""
        return _unedited(name, tuple(linecache.getlines(name)))

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
    def imports(self) -> set[str]:
        """The names that its imports give to modules and what they take of them."""
        kinds = ast.Import, ast.ImportFrom
        found = [
            each
            for node in self._nodes
            if isinstance(node, kinds)
            for each in node.names
        ]
        return {(each.asname or each.name).partition(".")[0] for each in found}

    @functools.cached_property
    def _parents(self) -> dict[int, ast.AST]:
        return {
            id(child): node
            for node in self._nodes
            for child in ast.iter_child_nodes(node)
        }

    def node_at(self, span: Span) -> ast.AST | None:
        """The expression or augmented assignment that stands at a place, or None."""
        return self._nodes_by_span.get(span)

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

    def statement_at(self, line: int) -> ast.AST | None:
        """The innermost statement that a line is of, or None."""
        found = None
        for node in self._nodes:
            if not isinstance(node, ast.stmt):
                continue
            if node.lineno <= line <= (node.end_lineno or node.lineno):
                found = node
        return found

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yields the nodes around one, from the innermost on."""
        parent = self._parents.get(id(node))
        while parent is not None:
            yield parent
            parent = self._parents.get(id(parent))

    def text_of(self, node: ast.AST) -> str:
        """The source of a node."""
        if getattr(node, "end_lineno", None) is None:
            return ""
        return self.text[self._offset(node) : self._offset(node, is_end=True)]

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


@functools.lru_cache(maxsize=4)
def _unedited(name: str, lines: tuple[str, ...]) -> SourceFile:
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


# Calls and operators as they are written, to be written in another way.


_OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Div: ("div", "/"),
    ast.FloorDiv: ("div", "//"),
    ast.Pow: ("pow", "**"),
    ast.Mult: ("mul", "*"),
    ast.MatMult: ("matmul", "@"),
    ast.Add: ("add", "+"),
    ast.Sub: ("sub", "-"),
}
_NAMESPACES = {
    *("torch", "F", "functional", "nn.functional", "torch.nn.functional", "math"),
    *("torch.linalg", "linalg", "torch.special", "special", "torch.fft"),
}


class Written:
    """A call or an operator as it is written: what it is called, and its operands.

    Args:
        source: The file.
        node: The expression.

    Attributes:
        source: The file.
        name: The function's name, such as "sqrt"; of operators, that of the function.
        operands: The texts of the operands; the one of a method call comes first.
        nodes: The operands themselves.
    """

    def __init__(self, source: SourceFile, node: ast.AST) -> None:
        self.source, self._node = source, node
        self.name = ""
        self.operands: list[str] = []
        self.nodes: list[ast.AST] = []
        self._keywords: dict[str, str] = {}
        self._is_method = self._writes = False
        if isinstance(node, ast.BinOp):
            self.name = _OPERATORS.get(type(node.op), ("", ""))[0]
            self.nodes = [node.left, node.right]
        elif isinstance(node, ast.AugAssign):
            self.name = _OPERATORS.get(type(node.op), ("", ""))[0]
            self.nodes = [node.target, node.value]
        elif isinstance(node, ast.Call):
            self._read_call(node)
        self.operands = [self._text(each) for each in self.nodes]

    def _read_call(self, node: ast.Call) -> None:
        function = node.func
        starred = any(isinstance(each, ast.Starred) for each in node.args)
        if starred or any(each.arg is None for each in node.keywords):
            return
        text_of = self.source.text_of
        self._keywords = {str(k.arg): text_of(k.value) for k in node.keywords}
        self.nodes = list(node.args)
        if isinstance(function, ast.Name):
            self.name = function.id
        elif isinstance(function, ast.Attribute):
            self.name = function.attr
            if self.source.text_of(function.value) not in _NAMESPACES:
                self._is_method = True
                self._writes = function.attr.endswith("_")
                self.name = function.attr.rstrip("_")
                self.nodes.insert(0, function.value)
        values = {str(k.arg): k.value for k in node.keywords}
        for place, name in enumerate(("input", "other")):  # as torch calls operands
            if name in values and len(self.nodes) == place:
                self.nodes.append(values[name])
                del self._keywords[name]

    def _text(self, node: ast.AST) -> str:
        text = self.source.text_of(node)
        is_simple = isinstance(
            node,
            (ast.Name, ast.Call, ast.Attribute, ast.Subscript, ast.Constant, ast.Tuple),
        )
        return text if is_simple else f"({text})"

    @property
    def argument(self) -> str:
        """The rest of the arguments of a call, such as "dim=-1"."""
        rest = [self.source.text_of(each) for each in self.nodes[1:]]
        named = [f"{key}={value}" for key, value in self._keywords.items()]
        return ", ".join([*rest, *named])

    @property
    def function(self) -> str:
        """The called function as it is written, such as "self.criterion"; or ""."""
        is_call = isinstance(self._node, ast.Call)
        return self.source.text_of(self._node.func) if is_call else ""  # type: ignore[attr-defined]

    @property
    def arguments(self) -> list[str]:
        """The texts of a call's arguments without a name."""
        return self.operands[1:] if self._is_method else self.operands

    def is_constant(self, place: int) -> bool:
        """Returns True if an operand is a number that is written there."""
        return isinstance(self.nodes[place], ast.Constant)

    def keyword(self, name: str) -> str:
        """The text of a keyword argument, or ""."""
        return self._keywords.get(name, "")

    def has_keyword(self, *names: str) -> bool:
        """Returns True if one of the keywords is given."""
        return any(name in self._keywords for name in names)

    @property
    def has_any_keyword(self) -> bool:
        """Returns True if an argument is given by its name."""
        return bool(self._keywords)

    def with_operands(self, *changed: str | None) -> str:
        """The expression with other operands; None leaves one as it is."""
        return self._written(list(changed), self._keywords)

    def with_keyword(self, name: str, text: str) -> str:
        """The expression with another keyword argument."""
        return self._written([], {**self._keywords, name: text})

    def _written(self, changed: Sequence[str | None], keywords: dict[str, str]) -> str:
        node = self._node
        given = [*changed, *[None] * (len(self.operands) - len(changed))]
        if isinstance(node, (ast.BinOp, ast.AugAssign)):
            left, right = (
                new or old for new, old in zip(given, self.operands, strict=True)
            )
            symbol = _OPERATORS[type(node.op)][1]
            if isinstance(node, ast.AugAssign) and given[0] is None:
                return f"{left} {symbol}= {right}"
            target = f"{self.operands[0]} = " * isinstance(node, ast.AugAssign)
            return f"{target}{left} {symbol} {right}"
        assert isinstance(node, ast.Call)
        texts = [
            (new or old)
            if i == 0 and self._is_method
            else _bare(new or self.source.text_of(each))
            for i, (new, old, each) in enumerate(
                zip(given, self.operands, self.nodes, strict=True)
            )
        ]
        named = [f"{key}={value}" for key, value in keywords.items()]
        function = self.source.text_of(node.func)
        if self._is_method:
            assert isinstance(node.func, ast.Attribute)
            function = f"{texts.pop(0)}.{node.func.attr}"
        return f"{function}({', '.join([*texts, *named])})"

    @property
    def text(self) -> str:
        """The expression as it is."""
        return self.source.text_of(self._node)

    @property
    def is_in_place(self) -> bool:
        """Returns True for an augmented assignment, and a method such as `sqrt_()`."""
        return isinstance(self._node, ast.AugAssign) or self._writes

    def with_sum(self, text: str) -> str:
        """The expression with a number added to its first operand."""
        first = self.operands[0]
        return self.with_operands(
            f"{first}.add_({text})" if self._writes else f"({first} + {text})"
        )

    def with_clamp(self, limits: str) -> str:
        """The expression with its first operand clamped."""
        return self.with_operands(
            f"{self.operands[0]}.clamp{'_' * self._writes}({limits})"
        )


def _bare(text: str) -> str:
    """An argument without the brackets around it."""
    inner = text[1:-1]
    if not (text.startswith("(") and text.endswith(")")):
        return text
    try:
        is_tuple = isinstance(ast.parse(inner.strip(), mode="eval").body, ast.Tuple)
    except SyntaxError:  # two pairs of brackets
        return text
    return text if is_tuple else inner


def atom(text: str) -> str:
    """An expression that a method can be called on: in brackets where it needs them."""
    node = ast.parse(text, mode="eval").body
    is_atom = isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    is_bracketed = node.col_offset > 0 and (node.end_col_offset or 0) < len(text)
    return text if is_atom or is_bracketed else f"({text})"


# The code between an expression and where its value ends up.


PRODUCTS = {"matmul", "bmm", "mm", "mv", "dot", "linear", "einsum"}
PRODUCTS |= {"addmm", "baddbmm", "addbmm"}
_SOFTMAX = {"softmax", "log_softmax"}
_BOUNDS = (ast.Lambda, ast.comprehension, ast.stmt)


def statement_of(source: SourceFile, node: ast.AST) -> ast.stmt | None:
    """The innermost statement around an expression."""
    for each in source.around(node):
        if isinstance(each, ast.stmt):
            return each
    return None


def following(source: SourceFile, statement: ast.stmt) -> Sequence[ast.stmt]:
    """The statements after one, in the same block."""
    block = _block_of(source, statement)
    return block[block.index(statement) + 1 :] if block else ()


def preceding(source: SourceFile, statement: ast.stmt) -> Sequence[ast.stmt]:
    """The statements before one, in the same block."""
    block = _block_of(source, statement)
    return block[: block.index(statement)] if block else ()


def _block_of(source: SourceFile, statement: ast.stmt) -> list[ast.stmt]:
    for parent in source.around(statement):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(parent, name, None)
            if isinstance(block, list) and statement in block:
                return block
        break
    return []


def target_of(statement: ast.stmt | None, value: ast.AST) -> str:
    """The one name that a statement gives a value to, or ""."""
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign) and statement.value is value:
        targets = statement.targets
    if isinstance(statement, ast.AnnAssign) and statement.value is value:
        targets = [statement.target]
    if len(targets) == 1 and isinstance(targets[0], ast.Name):
        return targets[0].id
    return ""


def loads(node: ast.AST, names: set[str]) -> list[ast.Name]:
    """Where one of some names is read."""
    return [
        each
        for each in ast.walk(node)
        if isinstance(each, ast.Name)
        and each.id in names
        and isinstance(each.ctx, ast.Load)
    ]


def softmax_around(source: SourceFile, node: ast.AST) -> ast.expr | None:
    """The softmax that an expression is an argument of, or None."""
    for each in source.around(node):
        if isinstance(each, _BOUNDS):
            return None
        if isinstance(each, ast.Call) and Written(source, each).name in _SOFTMAX:
            return each
    return None


def later_softmax(source: SourceFile, node: ast.AST) -> ast.expr | None:
    """The softmax that a later statement takes of an expression's value, or None."""
    statement = statement_of(source, node)
    value = getattr(statement, "value", None)
    name = target_of(statement, value) if value is not None else ""
    if statement is None or not name:
        return None
    names = {name}
    for each in following(source, statement):
        if isinstance(each, (ast.FunctionDef, ast.ClassDef)) or not loads(each, names):
            continue
        for call in ast.walk(each):
            is_call = isinstance(call, ast.Call) and bool(loads(call, names))
            if is_call and Written(source, call).name in _SOFTMAX:
                assert isinstance(call, ast.Call)
                return call
        names |= {
            target.id
            for target in ast.walk(each)
            if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store)
        }
    return None


def outermost(source: SourceFile, node: ast.AST) -> ast.AST:
    """The largest expression around one that takes part in no other product."""
    whole, last = node, node
    for each in source.around(node):
        if isinstance(each, ast.Attribute) and each.value is last:
            last = each  # a method, which is called next
            continue
        if not isinstance(each, (ast.BinOp, ast.UnaryOp, ast.Call, ast.Subscript)):
            break
        if Written(source, each).name in PRODUCTS:
            break
        whole = last = each
    return whole
