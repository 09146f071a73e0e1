"""Where a product is divided or multiplied by a number after it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from .source_file import SourceFile
from .value_flow import following, loads, statement_of, target_of

_SHAPES = {
    *("transpose", "permute", "view", "reshape", "contiguous", "unsqueeze", "squeeze"),
    *("flatten", "unflatten", "swapaxes"),
}
_BY = {"div": "/", "mul": "*", "div_": "/", "mul_": "*"}
_OPERATORS: dict[type[ast.operator], str] = {ast.Div: "/", ast.Mult: "*"}
_NOT_TWICE = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Lambda)
_SIMPLE = (ast.Name, ast.Call, ast.Attribute, ast.Subscript, ast.Constant)


@dataclass(frozen=True)
class Scaling:
    """A division or multiplication by a number.

    Attributes:
        whole: The expression or statement.
        scaled: What it scales.
        by: The operator and the number, such as "/ math.sqrt(d)".
        checked: The same, which fails where it is no number.
        rest: The text that is left of `whole` without it; None where `scaled` is.
    """

    whole: ast.AST
    scaled: ast.AST
    by: str
    checked: str
    rest: str | None = None


def scalings_of(source: SourceFile, node: ast.AST) -> Iterator[Scaling]:
    """Yields how an expression is scaled: in its own statement, or in the next."""
    same = _shaped(source, node)
    whole = next(source.around(same), None)
    found = None if whole is None else _scaling(source, whole, same, None)
    if found is not None:
        yield found
        return
    statement = statement_of(source, node)
    name = target_of(statement, same)
    if statement is None or not name:
        return
    for after in following(source, statement)[:1]:
        scaling = _in_next(source, after, name)
        if scaling is not None and _is_read_once(source, after, name):
            yield scaling


def _shaped(source: SourceFile, node: ast.AST) -> ast.AST:
    """The expression with methods that change no value, such as `.transpose()`."""
    around = list(source.around(node))
    for function, call in zip(around[::2], around[1::2], strict=False):
        if not isinstance(function, ast.Attribute) or not isinstance(call, ast.Call):
            break
        if call.func is not function or function.attr not in _SHAPES:
            break
        node = call
    return node


def _in_next(source: SourceFile, after: ast.stmt, name: str) -> Scaling | None:
    """How the next statement scales a variable."""
    if isinstance(after, ast.AugAssign):
        target = after.target
        if isinstance(target, ast.Name) and target.id == name:
            symbol = _OPERATORS.get(type(after.op), "")
            return _made(source, after, target, symbol, after.value, "pass")
        return None
    for read in loads(after, {name})[:1]:
        whole = next(source.around(read), None)
        if isinstance(whole, ast.Attribute):
            whole = next(source.around(whole), None)
        return None if whole is None else _scaling(source, whole, read, name)
    return None


def _is_read_once(source: SourceFile, after: ast.stmt, name: str) -> bool:
    """Tells whether nothing but the scaling sees the value before it."""
    if isinstance(after, ast.AugAssign):
        return True
    if len(loads(after, {name})) != 1:
        return False
    value = getattr(after, "value", None)
    if isinstance(after, ast.Expr) or (value and target_of(after, value) == name):
        return True
    return not any(loads(each, {name}) for each in following(source, after))


def _scaling(
    source: SourceFile, whole: ast.AST, scaled: ast.AST, rest: str | None
) -> Scaling | None:
    """How an expression scales another one, or None."""
    if isinstance(whole, ast.BinOp):
        symbol = _OPERATORS.get(type(whole.op), "")
        other = whole.right if whole.left is scaled else whole.left
        if whole.left is not scaled and symbol == "/":
            return None
        return _made(source, whole, scaled, symbol, other, rest)
    calls = [each for each in source.around(scaled)][1:2]
    call = calls[0] if calls else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        symbol = _BY.get(call.func.attr, "")
        if call.func.value is scaled and len(call.args) == 1 and not call.keywords:
            return _made(source, call, scaled, symbol, call.args[0], rest)
    return None


def _made(
    source: SourceFile,
    whole: ast.AST,
    scaled: ast.AST,
    symbol: str,
    number: ast.expr,
    rest: str | None,
) -> Scaling | None:
    names = {scaled.id} if isinstance(scaled, ast.Name) else set()
    is_odd = any(isinstance(each, _NOT_TWICE) for each in ast.walk(number))
    if not symbol or is_odd or loads(number, names):
        return None
    text = source.text_of(number)
    text = text if isinstance(number, _SIMPLE) else f"({text})"
    checked = f'({text} if not getattr({text}, "ndim", 0) else None)'
    return Scaling(whole, scaled, f"{symbol} {text}", f"{symbol} {checked}", rest)
