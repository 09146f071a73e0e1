"""The program's code that runs, and which names its statements read and write."""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
from collections.abc import Collection, Generator, Iterator
from types import FrameType
from typing import Any

from ..base.source_files import is_of_program
from ..torch_internals.registry import stack
from .syntax import module_of
from .users_lines import source_lines

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BACKWARDS = {"backward", "manual_backward"}  # of tensors, Accelerate, Lightning
FORBIDDEN = (ast.Global, ast.Nonlocal)  # what they assign is the program's
# What writes to gradients alone, which no loss reads; a replay begins without them.
_OF_GRADIENTS = {"clip_grad_norm_", "clip_grad_value_", "unscale_"}
_MOST_FRAMES = 64  # chosen, not measured
_OWN_REFERENCES = 3  # of the frame, of a local variable, and of getrefcount()


def running_code() -> Generator[tuple[FrameType, ast.AST], None, None]:
    """Yields the program's frames, innermost first, each with its function or file."""
    for frame in stack()[:_MOST_FRAMES]:
        if is_of_program(frame.f_code.co_filename):
            source = "".join(source_lines(frame.f_code, frame.f_globals))
            with contextlib.suppress(SyntaxError):
                around: ast.AST = module_of(source)
                for node in ast.walk(around):  # the outer ones come first
                    is_function = isinstance(node, FUNCTIONS)
                    if is_function and is_within(frame.f_lineno, node):
                        around = node
                yield frame, around


def is_within(line: int, node: Any) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)  # type: ignore[no-any-return]


def variables_of(frame: FrameType) -> dict[str, Any]:
    """The local variables of a frame, which keeps no reference to them afterwards."""
    held = frame.f_locals
    found = dict(held)
    is_copy = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    # Before Python 3.13 the frame keeps a dict of them, which locals() returns, too.
    if is_copy and type(held) is dict and sys.getrefcount(held) <= _OWN_REFERENCES:
        held.clear()
    return found


def own_nodes(around: ast.AST) -> Iterator[ast.AST]:
    """Yields what runs where some code does, without what it defines to run later."""
    for node in ast.iter_child_nodes(around):
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            yield node
            yield from own_nodes(node)


def names_in(node: ast.AST, kind: type[ast.expr_context]) -> set[str]:
    found = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {n.id for n in found if isinstance(n.ctx, kind)}


def _owner(node: ast.AST) -> str:
    """The name at the beginning of `a.b[0].c`, also behind calls."""
    while isinstance(node, (ast.Subscript, ast.Attribute, ast.Starred, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def writes_of(
    statement: ast.AST, reads: Collection[tuple[str, str]] | None = None
) -> set[str]:
    """The names that a statement assigns, or whose objects it may write to.

    Args:
        statement: The statement.
        reads: The attributes that count, with their owners' names; None for all, and
            for what methods may write to.
    """
    found = names_in(statement, ast.Store)
    for each in ast.walk(statement):
        call = each.value if isinstance(each, ast.Expr) else each
        method = call.func if isinstance(call, ast.Call) else None
        if isinstance(each, (ast.Attribute, ast.Subscript)):
            is_other = (
                reads is not None
                and isinstance(each, ast.Attribute)
                and (_owner(each), each.attr) not in reads
            )
            is_stored = not isinstance(each.ctx, ast.Load) and not is_other
            found |= {_owner(each)} if is_stored else set()
        elif isinstance(method, ast.Attribute):  # losses.append(x), x.mul_(2)
            is_any = reads is None and isinstance(each, ast.Expr)
            is_in_place = method.attr.endswith("_") and method.attr not in _OF_GRADIENTS
            is_written = is_in_place or is_any
            found |= {_owner(method)} if is_written else set()
        elif isinstance(each, FUNCTIONS):
            found.add(each.name)
    return found


def targets_of(statement: Any) -> set[str]:
    """The names that a statement assigns itself, without those in its blocks."""
    parts = [*getattr(statement, "targets", ()), getattr(statement, "target", None)]
    parts += [each.optional_vars for each in getattr(statement, "items", ())]
    return {name for each in parts if each for name in names_in(each, ast.Store)}
