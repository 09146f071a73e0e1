"""Runs the program's own lines between backward and the optimizer's step again.

Where all gradients are non-finite, and a replayed backward leaves finite ones, code in
between has written to them: clipping by a norm, scaling, noise. Those of its lines that
work on what leads to a model, and what follows from these, are run behind the replayed
backward, out of the function that called it. The answer counts where the same gradients
are non-finite then.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import tree
from .loss_code import UNSUITABLE, UncertainError, has_effects
from .loss_line import function_at, running_code, variables_of
from .names import assigned, read

_KINDS = (nn.Module, nn.Parameter, Optimizer)
_SHOW = {"print", "log", "log_dict", "log_metrics", "debug", "info", "warning"}
_SHOW |= {"write", "add_scalar", "add_scalars", "add_histogram", "set_postfix"}
_MOST_VALUES = 256  # of an object that may lead to a model


class GradientCode:
    """Lines that write to gradients, as a function that can be called again.

    Args:
        code: The lines, compiled.
        names: The variables of the running function, by name.
        globals_: Those of its file.
    """

    def __init__(
        self, code: CodeType, names: Mapping[str, Any], globals_: Mapping[str, Any]
    ) -> None:
        self.variables = names
        self._code, self._globals = code, globals_

    def __call__(self) -> None:
        """Runs the lines; an optimizer's step among them is refused."""
        handle = register_optimizer_step_pre_hook(_refuse)
        try:
            exec(self._code, {**self._globals, **self.variables})
        finally:
            handle.remove()


def _refuse(optimizer: object, args: object, kwargs: object) -> None:
    raise UncertainError("the lines behind backward make a step")


def find_gradient_code() -> GradientCode | None:
    """Finds the lines between backward and the line that runs now, or returns None."""
    for frame, _, file in running_code():
        lines = _lines_between(function_at(file, frame.f_lineno), frame.f_lineno)
        if lines is None:
            continue
        names = variables_of(frame)
        picked = _picked(lines, {**frame.f_globals, **names})
        if not picked:
            return None
        code = compile(ast.Module(picked, []), frame.f_code.co_filename, "exec")
        kept: set[str] = set()
        made: set[str] = set()
        for each in picked:
            kept |= read(each) - made
            made |= assigned(each)
        held = {name: names[name] for name in kept if name in names}
        return GradientCode(code, held, frame.f_globals)
    return None


def _lines_between(around: ast.AST, line: int) -> list[ast.stmt] | None:
    """The statements between the last call of backward and a line, in one block.

    None where backward was not called before it, or not around that block.
    """
    calls = [each for each in ast.walk(around) if isinstance(each, ast.Call)]
    ends = [each.end_lineno or 0 for each in calls if _is_backward(each)]
    last = max((each for each in ends if each < line), default=0)
    for block in _blocks(around):
        first = _place_of(block, last)
        now = _place_of(block, line)
        if first is not None and now is not None and first < now:
            return [*block[first + 1 : now], *_leading_to(block[now], line)]
    return None


def _leading_to(statement: ast.stmt, line: int) -> list[ast.stmt]:
    """The statements of branches around a line that come before it."""
    if not isinstance(statement, ast.If):
        return []
    for block in (statement.body, statement.orelse):
        place = _place_of(block, line)
        if place is not None:
            return [*block[:place], *_leading_to(block[place], line)]
    return []


def _is_backward(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "backward"


def _blocks(around: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(around):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value


def _place_of(block: Sequence[ast.stmt], line: int) -> int | None:
    for place, each in enumerate(block):
        if each.lineno <= line <= (each.end_lineno or each.lineno):
            return place
    return None


def _picked(lines: Sequence[ast.stmt], names: Mapping[str, Any]) -> list[ast.stmt]:
    """The statements that work on what leads to a model, and what follows from them."""
    made: set[str] = set()
    found = []
    for each in lines:
        reads = read(each)
        is_own = bool(reads & made) or any(_leads_to_model(names.get(n)) for n in reads)
        nodes = list(ast.walk(each))
        is_left = any(isinstance(n, UNSUITABLE) or has_effects(n) for n in nodes)
        is_left = is_left or _shows(each)
        if is_own and not is_left:
            found.append(each)
            made |= assigned(each)
    return found


def _shows(statement: ast.stmt) -> bool:
    """True for a call that prints or logs, and whose result nobody takes."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    function = call.func if isinstance(call, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", "")) in _SHOW


def _leads_to_model(value: Any) -> bool:
    """True for models, optimizers, parameters, and what holds one of them."""
    if isinstance(value, _KINDS):
        return True
    if isinstance(value, (type, ModuleType, FunctionType)):
        return False
    return bool(tree.find(value, _KINDS, most=_MOST_VALUES))
