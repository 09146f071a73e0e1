"""The code between an expression and where its value ends up."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from .source_file import SourceFile
from .written import Written

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
    for parent in source.around(statement):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(parent, name, None)
            if isinstance(block, list) and statement in block:
                return block[block.index(statement) + 1 :]
        break
    return ()


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
