"""The line of the program that computes the loss, where it was not replayed."""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from torch import nn

from ..core.modules import children_of, modules_in
from ..text import is_of_program, short_name
from ..torch_internals.registry import stack

_MOST_FRAMES = 64
_MOST_CODE = 200
_DIRECT = "Write it as `{name} = guard.run(lambda: {code})` ({place})."
_INDIRECT = (
    "The loss is computed at {place}: `{line}`. Call the model and that line in one "
    "function, and that by `{name} = guard.run(function)`."
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def loss_line(models: Sequence[nn.Module]) -> str:
    """Describes what to change for the loss to be replayed, or returns "".

    Looks for `loss.backward()` in the functions of the program that run now, and for
    the line that assigns to that variable before. Nothing of the program is called.

    Args:
        models: The models that are watched.
    """
    for frame in stack()[:_MOST_FRAMES]:
        code = frame.f_code
        if not is_of_program(code.co_filename):
            continue
        source = "".join(linecache.getlines(code.co_filename, frame.f_globals))
        try:
            around = _function_at(ast.parse(source), frame.f_lineno)
        except SyntaxError:
            continue
        found = _assignment(around, frame.f_lineno)
        if found is not None:
            return _text(found, source, frame, models)
    return ""


def _function_at(tree: ast.Module, line: int) -> ast.AST:
    """The innermost function around a line, or the whole file."""
    found: ast.AST = tree
    for node in ast.walk(tree):  # the outer ones come first
        is_around = isinstance(node, _FUNCTIONS) and node.lineno <= line
        if is_around and line <= (getattr(node, "end_lineno", None) or 0):
            found = node
    return found


def _assignment(around: ast.AST, line: int) -> ast.Assign | None:
    """The last assignment to what backward was called on before a line.

    None if it is not certain that backward was called on what it has assigned.
    """
    nodes = [each for each in _own_nodes(around) if hasattr(each, "lineno")]
    before = sorted(
        (each for each in nodes if each.lineno <= line), key=lambda each: each.lineno
    )
    losses = [_loss_of(each) for each in before if isinstance(each, ast.Call)]
    name = next((each for each in reversed(losses) if each is not None), None)
    if name is None:
        return None
    branches = _branches(around)
    for each in reversed(before):
        if not _writes(each, name.id) or each.lineno > name.lineno:
            continue
        if not isinstance(each, ast.Assign) or not isinstance(
            each.targets[0], ast.Name
        ):
            return None
        reads = {n.id for n in ast.walk(each.value) if isinstance(n, ast.Name)}
        if len(each.targets) == 1 and name.id not in reads:
            own, its = branches[id(each)], branches[id(name)]
            between = set(its[len(own) :])
            later = (n for n in nodes if n.lineno > name.lineno and _writes(n, name.id))
            is_alone = not any(between & set(branches[id(n)]) for n in later)
            return each if its[: len(own)] == own and is_alone else None
    return None


def _own_nodes(around: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a function that run when it does, not those of inner ones."""
    waiting = [around]
    while waiting:
        node = waiting.pop()
        yield node
        if node is around or not isinstance(node, (*_FUNCTIONS, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)


_Branch = tuple[int, str]


def _branches(around: ast.AST) -> dict[int, tuple[_Branch, ...]]:
    """The blocks around each node, by its id, that may run or not, outermost first.

    Those are of branches, loops, handlers and functions, but not of `with`.
    """
    found: dict[int, tuple[_Branch, ...]] = {}
    waiting: list[tuple[ast.AST, tuple[_Branch, ...]]] = [(around, ())]
    while waiting:
        node, path = waiting.pop()
        found[id(node)] = path
        is_certain = node is around or isinstance(node, (ast.With, ast.AsyncWith))
        for field, value in ast.iter_fields(node):
            parts = value if isinstance(value, list) else [value]
            is_block = any(isinstance(each, _IN_BLOCKS) for each in parts)
            inner = (*path, (id(node), field)) if is_block and not is_certain else path
            waiting += [(each, inner) for each in parts if isinstance(each, ast.AST)]
    return found


_IN_BLOCKS = (ast.stmt, ast.ExceptHandler, ast.match_case)


def _loss_of(call: ast.Call) -> ast.Name | None:
    """The variable that `x.backward()` or `f(x).backward()` is called on, or None."""
    function = call.func
    if not isinstance(function, ast.Attribute) or function.attr != "backward":
        return None
    of = function.value
    of = of.args[0] if isinstance(of, ast.Call) and len(of.args) == 1 else of
    if isinstance(of, ast.Name) and not call.args:
        return of
    first = call.args[0] if call.args else None  # accelerator.backward(loss)
    return first if isinstance(first, ast.Name) else None


def _writes(node: ast.AST, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.NamedExpr)):
        targets = [node.target]
    inner = [n for target in targets for n in ast.walk(target)]
    return any(isinstance(n, ast.Name) and n.id == name for n in inner)


def _text(
    found: ast.Assign, source: str, frame: FrameType, models: Sequence[nn.Module]
) -> str:
    code = ast.get_source_segment(source, found.value) or ""
    target = found.targets[0]
    assert isinstance(target, ast.Name)
    place = f"{short_name(frame.f_code.co_filename)}:{found.lineno}"
    is_short = bool(code) and "\n" not in code and len(code) <= _MOST_CODE
    if not is_short or ".run(" in code:
        return ""
    if any(_is_call_of(n, frame, models) for n in ast.walk(found.value)):
        return _DIRECT.format(name=target.id, code=code, place=place)
    return _INDIRECT.format(name=target.id, line=f"{target.id} = {code}", place=place)


def _is_call_of(node: ast.AST, frame: FrameType, models: Sequence[nn.Module]) -> bool:
    """True if a node is a call of a model, or of one that holds it."""
    called = _value(node.func, frame) if isinstance(node, ast.Call) else None
    if not isinstance(called, nn.Module):
        return False
    own = set(map(id, models))
    return any(id(each) in own for each in modules_in(called))


def _value(node: ast.AST, frame: FrameType) -> Any:
    """The value of a name or of an attribute, without running code of the program."""
    if isinstance(node, ast.Name):
        held: Mapping[str, Any] = {**frame.f_globals, **frame.f_locals}
        return held.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    of = _value(node.value, frame)
    if isinstance(of, nn.Module):
        return children_of(of).get(node.attr)
    return inspect.getattr_static(of, node.attr, None)
