"""The line of the program that computes the loss, where it was not replayed."""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn

from ..core.modules import children_of, modules_in
from ..text import is_of_program, short_name
from ..torch_internals.registry import stack
from .names import BLOCKS, SCOPES, assigned, assigned_itself, read
from .places import source_lines

_MOST_FRAMES = 64
_MOST_CODE = 200
_DIRECT = "Write it as `{name} = guard.run(lambda: {code})` ({place})."
_INDIRECT = (
    "The loss is computed at {place}: `{line}`. Call the model and that line in one "
    "function, and that by `{name} = guard.run(function)`."
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_OWN_REFERENCES = 3  # of the frame, of a local variable, and of getrefcount()


@dataclass(frozen=True)
class LossLine:
    """The code that computes what backward was called on.

    Attributes:
        frame: The running code that called backward.
        variables: Its local variables, as they are now.
        source: The text of its file.
        tree: That text, parsed.
        around: Its function in that text, or the whole file.
        backward: The variable where backward is called on it.
        assignment: The line that computes it, if that is certain.
    """

    frame: FrameType
    variables: Mapping[str, Any]
    source: str
    tree: ast.Module
    around: ast.AST
    backward: ast.Name
    assignment: ast.Assign | None

    @property
    def others(self) -> set[str]:
        """The other variables that the function calls backward on."""
        return {each.id for each in losses_in(self.around)} - {self.backward.id}

    def place_of(self, line: int) -> str:
        """A line of its file, such as "train.py:12"."""
        return f"{short_name(self.frame.f_code.co_filename)}:{line}"


def running_code() -> Iterator[tuple[FrameType, str, ast.Module]]:
    """Yields the program's frames, innermost first, with their files' text and tree."""
    for frame in stack()[:_MOST_FRAMES]:
        code = frame.f_code
        if not is_of_program(code.co_filename):
            continue
        source = "".join(source_lines(code, frame.f_globals))
        with contextlib.suppress(SyntaxError):
            yield frame, source, ast.parse(source)


def find_loss_line() -> LossLine | None:
    """Finds the line that computed the loss, or returns None.

    Looks for `loss.backward()` in the functions of the program that run now, and for
    the line that assigns to that variable before. Nothing of the program is called.
    """
    loss: Any = None
    for frame, source, tree in running_code():
        around = function_at(tree, frame.f_lineno)
        if loss is None:
            name = _backward_on(around, frame.f_lineno)
        else:
            name = _given_in(around, frame, loss)
        if name is None:
            continue
        variables = variables_of(frame)
        if any(name.id in assigned_itself(each) for each in _own_statements(around)):
            found = _assignment(around, name)
            return LossLine(frame, variables, source, tree, around, name, found)
        loss = variables.get(name.id)  # an argument: its caller computed it
    return None


def _given_in(around: ast.AST, frame: FrameType, loss: Any) -> ast.Name | None:
    """The variable with the loss in the call of a frame that runs."""
    line = frame.f_lineno
    for each in ast.walk(around):
        end = getattr(each, "end_lineno", None) or 0
        if isinstance(each, ast.Call) and each.lineno <= line <= end:
            names = [n for n in each.args if isinstance(n, ast.Name)]
            own = variables_of(frame) if names else {}
            for name in names:
                if own.get(name.id) is loss:
                    return name
    return None


def variables_of(frame: FrameType) -> dict[str, Any]:
    """The local variables of a frame, which keeps no reference to them afterwards."""
    held = frame.f_locals
    found = dict(held)
    is_copy = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    # Before Python 3.13 the frame keeps a dict of them, which locals() returns, too.
    if is_copy and type(held) is dict and sys.getrefcount(held) <= _OWN_REFERENCES:
        held.clear()
    return found


def function_at(tree: ast.Module, line: int) -> ast.AST:
    """The innermost function around a line, or the whole file."""
    found: ast.AST = tree
    for node in ast.walk(tree):  # the outer ones come first
        is_around = isinstance(node, _FUNCTIONS) and node.lineno <= line
        if is_around and line <= (getattr(node, "end_lineno", None) or 0):
            found = node
    return found


def losses_in(around: ast.AST) -> list[ast.Name]:
    """The variables that backward is called on, in the order of lines."""
    calls = [n for n in ast.walk(around) if isinstance(n, ast.Call)]
    calls.sort(key=lambda each: each.lineno)
    return [name for name in map(_loss_of, calls) if name is not None]


def _backward_on(around: ast.AST, line: int) -> ast.Name | None:
    """The variable that backward was called on last before a line."""
    before = [each for each in losses_in(around) if each.lineno <= line]
    return before[-1] if before else None


def _assignment(around: ast.AST, name: ast.Name) -> ast.Assign | None:
    """The last assignment to what backward was called on.

    None if it is not certain that backward was called on what it has assigned.
    """
    nodes = list(_own_statements(around))
    before = sorted(
        (each for each in nodes if each.lineno <= name.lineno),
        key=lambda each: each.lineno,
    )
    branches = _branches(around)
    for each in reversed(before):
        if name.id not in assigned_itself(each):
            continue
        targets = each.targets if isinstance(each, ast.Assign) else []
        is_plain = len(targets) == 1 and getattr(targets[0], "id", "") == name.id
        if not isinstance(each, ast.Assign) or not is_plain:
            return None
        if name.id not in read(each.value) | assigned(each.value):
            own, its = branches[id(each)], branches[id(name)]
            between = set(its[len(own) :])
            later = (
                n
                for n in nodes
                if n.lineno > name.lineno and name.id in assigned_itself(n)
            )
            is_alone = not any(between & set(branches[id(n)]) for n in later)
            return each if its[: len(own)] == own and is_alone else None
    return None


def _own_statements(around: ast.AST) -> Iterator[Any]:
    """Yields the statements of a function that run when it does, with their parts."""
    waiting = list(ast.iter_child_nodes(around))
    while waiting:
        node = waiting.pop()
        if isinstance(node, BLOCKS):
            if hasattr(node, "lineno"):
                yield node
            if not isinstance(node, SCOPES):
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
            is_block = any(isinstance(each, BLOCKS) for each in parts)
            inner = (*path, (id(node), field)) if is_block and not is_certain else path
            waiting += [(each, inner) for each in parts if isinstance(each, ast.AST)]
    return found


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


def advice(line: LossLine, models: Sequence[nn.Module]) -> str:
    """Describes what to change for the loss to be replayed, or returns "".

    Args:
        line: The line of the loss.
        models: The models that are watched.
    """
    if line.assignment is None or line.others:
        return ""  # which loss was bad is not known
    value, name = line.assignment.value, line.backward.id
    place = line.place_of(line.assignment.lineno)
    code = ast.get_source_segment(line.source, value) or ""
    is_short = bool(code) and "\n" not in code and len(code) <= _MOST_CODE
    if not is_short or ".run(" in code:
        return ""
    if any(_is_call_of(n, line, models) for n in ast.walk(value)):
        return _DIRECT.format(name=name, code=code, place=place)
    return _INDIRECT.format(name=name, line=f"{name} = {code}", place=place)


def _is_call_of(node: ast.AST, line: LossLine, models: Sequence[nn.Module]) -> bool:
    """True if a node is a call of a model, or of one that holds it."""
    called = _value(node.func, line) if isinstance(node, ast.Call) else None
    if not isinstance(called, nn.Module):
        return False
    own = set(map(id, models))
    return any(id(each) in own for each in modules_in(called))


def _value(node: ast.AST, line: LossLine) -> Any:
    """The value of a name or of an attribute, without running code of the program."""
    if isinstance(node, ast.Name):
        return {**line.frame.f_globals, **line.variables}.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    of = _value(node.value, line)
    if isinstance(of, nn.Module):
        return children_of(of).get(node.attr)
    return inspect.getattr_static(of, node.attr, None)
