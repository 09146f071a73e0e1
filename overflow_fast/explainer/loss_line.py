"""The program's line that computes what `backward()` is called on.

It is found by the names that are written in the running code. Calls none of it.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from ..guard.kept_calls import held_function
from .running_code import (
    BACKWARDS,
    is_within,
    own_nodes,
    running_code,
    targets_of,
    variables_of,
    writes_of,
)

LOOPS = (ast.For, ast.AsyncFor, ast.While)
BLOCKS = (ast.stmt, ast.ExceptHandler, ast.match_case)
UNNAMED = "the_loss"  # a variable for a loss that has none


def losses_in(around: ast.AST) -> list[ast.expr]:
    """The expressions that backward is called on, or with, in the order of lines."""
    found = list[ast.expr]()
    calls = [n for n in ast.walk(around) if isinstance(n, ast.Call)]
    for call in sorted(calls, key=lambda each: each.lineno):
        if getattr(call.func, "attr", "") in BACKWARDS:
            func: Any = call.func
            of: Any = call.args[0] if call.args else func.value
            is_scaled = isinstance(of, ast.Call) and len(of.args) == 1
            if is_scaled and getattr(of.func, "attr", "") == "scale":  # GradScaler's
                of = of.args[0]
            found.append(of)
    return found


@dataclass(frozen=True)
class LossLine:
    """The code that computes what backward was called on.

    Attributes:
        frame: The running code that called backward.
        variables: Its local variables, as they are now.
        around: Its function in the text of its file, or the whole file.
        backward: What backward is called on: a variable, or another expression.
    """

    frame: FrameType
    variables: Mapping[str, Any]
    around: ast.AST
    backward: ast.expr

    @property
    def is_held(self) -> bool:
        """True if a variable has the loss."""
        return isinstance(self.backward, ast.Name)

    @property
    def name(self) -> str:
        """The variable of the loss."""
        return self.backward.id if isinstance(self.backward, ast.Name) else UNNAMED

    @property
    def others(self) -> set[str]:
        """The other expressions that the function calls backward on."""
        return set(map(ast.dump, losses_in(self.around))) - {ast.dump(self.backward)}

    @property
    def statements(self) -> list[ast.stmt]:
        """Those of the function, without those of functions within."""
        return [n for n in own_nodes(self.around) if isinstance(n, ast.stmt)]

    @property
    def assignments(self) -> list[Any]:
        """The statements that assign to it."""
        return [each for each in self.statements if self.name in targets_of(each)]


def find_loss_line() -> LossLine | None:
    """Finds the line that computed the loss, or returns None. Calls no program code."""
    loss: Any = None
    for frame, around in running_code():
        of: ast.expr | None
        if loss is None:
            before = [n for n in losses_in(around) if n.lineno <= frame.f_lineno]
            of = before[-1] if before else None
        else:
            of = _given_in(around, frame, loss)
        if of is None:
            continue
        line = LossLine(frame, variables_of(frame), around, of)
        if not line.is_held or line.assignments:
            return line
        loss = line.variables.get(line.name)  # an argument: its caller computed it
    return None


def _given_in(around: ast.AST, frame: FrameType, loss: Any) -> ast.Name | None:
    """The variable with the loss in the call of a frame that runs."""
    held = variables_of(frame)
    for each in ast.walk(around):
        if isinstance(each, ast.Call) and is_within(frame.f_lineno, each):
            for name in each.args:
                if isinstance(name, ast.Name) and held.get(name.id) is loss:
                    return name
    return None


def loss_at_hand() -> torch.Tensor | None:
    """The loss that the running code has called backward on, or None if it may not be.

    It may not be where another loss of the same function may have been the last, the
    variable was written to since, or a loop is in another turn than the backward.
    """
    line = find_loss_line()
    if line is None or line.others or not line.is_held:
        return None
    frame, loss = line.frame, line.variables.get(line.name)
    if not isinstance(loss, torch.Tensor) or loss.grad_fn is None:
        return None
    since = range(line.backward.lineno + 1, frame.f_lineno + 1)
    later = [each for each in line.statements if each.lineno in since]
    written = [each for each in later if line.name in writes_of(each, ())]
    with contextlib.closing(running_code()) as code:  # else its frames hold this one
        within = itertools.takewhile(lambda each: each[0] is not frame, code)
        loops = [n for inner, around in within for n in _loops_at(inner, around)]
    loops += [
        loop
        for loop in _loops_at(frame, line.around)
        if not any(each is line.backward for each in ast.walk(loop))
    ]
    return None if written or loops else loss


def _loops_at(frame: FrameType, around: ast.AST) -> list[ast.AST]:
    """The loops that a frame is in."""
    loops = (n for n in own_nodes(around) if isinstance(n, LOOPS))
    return [each for each in loops if is_within(frame.f_lineno, each)]


def is_followed(value: Any) -> bool:
    """True for tensors that autograd has computed, and data that holds some."""
    return any(each.grad_fn is not None for _, each in held_function.data_in(value))
