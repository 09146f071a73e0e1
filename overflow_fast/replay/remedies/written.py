"""Calls and operators as they are written, to be written in another way."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from .source_file import SourceFile

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
        name: The function's name, such as "sqrt"; of operators, that of the function.
        operands: The texts of the operands; the one of a method call comes first.
        nodes: The operands themselves.
    """

    def __init__(self, source: SourceFile, node: ast.AST) -> None:
        self._source, self._node = source, node
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
        text_of = self._source.text_of
        self._keywords = {str(k.arg): text_of(k.value) for k in node.keywords}
        self.nodes = list(node.args)
        if isinstance(function, ast.Name):
            self.name = function.id
        elif isinstance(function, ast.Attribute):
            self.name = function.attr
            if self._source.text_of(function.value) not in _NAMESPACES:
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
        text = self._source.text_of(node)
        is_simple = isinstance(
            node,
            (ast.Name, ast.Call, ast.Attribute, ast.Subscript, ast.Constant, ast.Tuple),
        )
        return text if is_simple else f"({text})"

    @property
    def argument(self) -> str:
        """The rest of the arguments of a call, such as "dim=-1"."""
        rest = [self._source.text_of(each) for each in self.nodes[1:]]
        named = [f"{key}={value}" for key, value in self._keywords.items()]
        return ", ".join([*rest, *named])

    def is_constant(self, place: int) -> bool:
        """Returns True if an operand is a number that is written there."""
        return isinstance(self.nodes[place], ast.Constant)

    def keyword(self, name: str) -> str:
        """The text of a keyword argument, or ""."""
        return self._keywords.get(name, "")

    def has_keyword(self, *names: str) -> bool:
        """Returns True if one of the keywords is given."""
        return any(name in self._keywords for name in names)

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
            else _bare(new or self._source.text_of(each))
            for i, (new, old, each) in enumerate(
                zip(given, self.operands, self.nodes, strict=True)
            )
        ]
        named = [f"{key}={value}" for key, value in keywords.items()]
        function = self._source.text_of(node.func)
        if self._is_method:
            assert isinstance(node.func, ast.Attribute)
            function = f"{texts.pop(0)}.{node.func.attr}"
        return f"{function}({', '.join([*texts, *named])})"

    @property
    def text(self) -> str:
        """The expression as it is."""
        return self._source.text_of(self._node)

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
