"""The names that code reads and writes: one rule for all that runs lines again.

A statement writes a name in its own scope where it binds or deletes it: by assignment
(also to a starred part, augmented, annotated with a value, or by a walrus, which in a
comprehension binds outside of it), as the target of a loop, `with`, `except` or a
pattern, by an import, a definition, `del`, `global` or `nonlocal`. A definition also
writes what its body declares `global` or `nonlocal`, since a call of it does. The
targets of comprehensions and the bodies of functions and classes are scopes of their
own. An item or an attribute that is stored or deleted writes no name, and changes the
object of one.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SCOPES = (*DEFINITIONS, ast.Lambda)
BLOCKS = (ast.stmt, ast.ExceptHandler, ast.match_case)
_NAMESPACES = {"torch", "F", "nn", "functional", "init"}  # of torch.relu_(x)
# What writes to gradients alone, which no loss reads; a replay begins without them.
_OF_GRADIENTS = {
    *("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "unscale_")
}
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def read(node: ast.AST) -> set[str]:
    """The names that code reads, those of inner scopes included."""
    names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {n.id for n in names if isinstance(n.ctx, ast.Load)}


def assigned(node: ast.AST) -> set[str]:
    """The names that a node writes, with all statements in its blocks."""
    return {name for each in _in_scope(node) for name in _bound_by(each)}


def assigned_itself(node: ast.AST) -> set[str]:
    """The names that a statement writes itself, without those in its blocks."""
    found = set(_bound_by(node))
    if not isinstance(node, SCOPES):
        cases = getattr(node, "cases", [])  # they have no line of their own
        parts = [*ast.iter_child_nodes(node), *(each.pattern for each in cases)]
        found |= {n for p in parts if not isinstance(p, BLOCKS) for n in assigned(p)}
    return found


def changed(
    node: ast.AST, attributes: Collection[tuple[str, str]] | None = None
) -> set[str]:
    """The names whose objects a node writes to: by an item, or in place.

    Args:
        node: The node.
        attributes: The attributes of names that count; None for all.
    """
    found: set[str] = set()
    for each in ast.walk(node):
        is_stored = isinstance(each, (ast.Subscript, ast.Attribute)) and not isinstance(
            each.ctx, ast.Load
        )
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
            is_other = (each.value.id, each.attr) not in (attributes or ())
            is_stored = is_stored and not (is_other and attributes is not None)
        if is_stored:
            found |= _owner_of(each)
        if isinstance(each, ast.Call):
            outputs = [key.value for key in each.keywords if key.arg == "out"]
            name = getattr(each.func, "attr", getattr(each.func, "id", ""))
            is_in_place = name.endswith("_") and not name.endswith("__")
            if is_in_place and name not in _OF_GRADIENTS:
                is_function = bool(_owner_of(each.func) & _NAMESPACES)
                outputs += each.args[:1] if is_function else [each.func]
            found |= {name for output in outputs for name in _owner_of(output)}
    return found


def written(statement: ast.stmt) -> set[str]:
    """The names that a statement assigns, or whose objects it may write to."""
    found = assigned(statement) | changed(statement)
    for each in ast.walk(statement):
        call = each.value if isinstance(each, ast.Expr) else None
        function = call.func if isinstance(call, ast.Call) else None
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            found.add(function.value.id)  # losses.append(x)
    return found


def _owner_of(node: ast.AST) -> set[str]:
    """The name at the beginning of `a.b[0].c`, also behind calls, as a set."""
    while True:
        if isinstance(node, (ast.Subscript, ast.Attribute, ast.Starred)):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func  # x.view(-1).mul_(2) writes to x
        else:
            return {node.id} if isinstance(node, ast.Name) else set()


def _in_scope(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes whose names are those of the scope around a node."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        yield each
        if isinstance(each, _COMPREHENSIONS):
            walrus = (n for n in ast.walk(each) if isinstance(n, ast.NamedExpr))
            waiting += [name.target for name in walrus]
        elif isinstance(each, DEFINITIONS):
            waiting += each.decorator_list
        elif not isinstance(each, ast.Lambda):
            waiting += ast.iter_child_nodes(each)


def _bound_by(node: ast.AST) -> list[str]:
    """The names that one node writes by itself."""
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, DEFINITIONS):
        inner = (n for n in ast.walk(node) if isinstance(n, (ast.Global, ast.Nonlocal)))
        return [node.name, *(name for each in inner for name in each.names)]
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        return list(node.names)
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(each.asname or each.name).partition(".")[0] for each in node.names]
    if isinstance(node, ast.MatchMapping):
        return [node.rest] if node.rest else []
    if isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
        return [node.name] if node.name else []
    return []
