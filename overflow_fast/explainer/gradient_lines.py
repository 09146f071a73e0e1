"""The program's own lines behind backward, run again.

Where all gradients are non-finite, and a replayed backward leaves finite ones, code
between backward and the optimizer's step has written to them: clipping by a norm,
scaling, noise. Those of its statements that work on what leads to a model, and what
follows from these, are run behind the replayed backward, one by one. The answer counts
where the same gradients are non-finite then. One that is ended before an effect (see
`effects`) is left out.
"""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..base.tree import find
from .replay_check import without_optimizer_steps
from .running_code import (
    BACKWARDS,
    FORBIDDEN,
    is_within,
    names_in,
    own_nodes,
    running_code,
    variables_of,
)
from .syntax import code_of
from .users_lines import note_made_of_lines

_MOST_VALUES = 256  # of an object that may lead to a model
_EFFECTS = {*BACKWARDS, "step", "zero_grad", "exec", "eval", "locals"}
_LEAVES = (ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Delete, *FORBIDDEN)
_KINDS = (nn.Module, nn.Parameter, Optimizer)


@dataclass
class GradientCode:
    """Statements that write to gradients, which can be run again one by one.

    Attributes:
        variables: What they read of the function that they are of, by name.
    """

    statements: Sequence[types.CodeType]
    variables: Mapping[str, Any]
    globals_: Mapping[str, Any]

    def parts(self) -> Iterator[Callable[[], None]]:
        """Yields what runs one statement each; an optimizer's step is refused."""
        around = {**self.globals_, **self.variables}
        for code in self.statements:
            yield functools.partial(_run_statement, code, around)


def _run_statement(code: types.CodeType, around: dict[str, Any]) -> None:
    with without_optimizer_steps():
        exec(code, around)


def find_gradient_code() -> GradientCode | None:
    """Finds the lines between backward and the line that runs now, or returns None."""
    for frame, around in running_code():
        lines = _lines_behind(around, frame.f_lineno)
        if lines is not None:
            names = variables_of(frame)
            picked = _on_models(lines, {**frame.f_globals, **names})
            file, reads = (
                frame.f_code.co_filename,
                [names_in(e, ast.Load) for e in picked],
            )
            codes = [code_of(ast.Module([each], []), file) for each in picked]
            for each in codes:
                note_made_of_lines(each)
            held = {n: names[n] for each in reads for n in each if n in names}
            return GradientCode(codes, held, frame.f_globals) if picked else None
    return None


def _lines_behind(around: ast.AST, line: int) -> list[ast.stmt] | None:
    """The statements between the last call of backward and a line, in one block.

    None where the code calls no backward itself: in a function that it defines, or
    calls, backward may be called at any time.
    """
    calls = [n for n in own_nodes(around) if isinstance(n, ast.Call)]
    calls = [n for n in calls if getattr(n.func, "attr", "") in BACKWARDS]
    last = max(
        (n.end_lineno or 0 for n in calls if (n.end_lineno or 0) < line), default=0
    )
    for owner in ast.walk(around):
        for _, block in ast.iter_fields(owner):
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                first, now = _place_of(block, last), _place_of(block, line)
                if first is not None and now is not None and first < now:
                    return [*block[first + 1 : now], *_leading_to(block[now], line)]
    return None


def _leading_to(statement: ast.stmt, line: int) -> list[ast.stmt]:
    """The statements of branches around a line that come before it."""
    is_branch = isinstance(statement, ast.If)
    for block in (statement.body, statement.orelse) if is_branch else ():  # type: ignore[attr-defined]
        place = _place_of(block, line)
        if place is not None:
            return [*block[:place], *_leading_to(block[place], line)]
    return []


def _place_of(block: Sequence[ast.stmt], line: int) -> int | None:
    return next((i for i, each in enumerate(block) if is_within(line, each)), None)


def _on_models(lines: Sequence[ast.stmt], names: Mapping[str, Any]) -> list[ast.stmt]:
    """The statements that work on what leads to a model, and what follows from them."""
    made, found = set[str](), []
    for each in lines:
        reads, nodes = names_in(each, ast.Load), list(ast.walk(each))
        is_own = bool(reads & made) or any(_leads_to_model(names.get(n)) for n in reads)
        if is_own and not any(isinstance(n, _LEAVES) or _acts(n) for n in nodes):
            found.append(each)
            made |= names_in(each, ast.Store)
    return found


def _acts(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return getattr(node.func, "attr", getattr(node.func, "id", "")) in _EFFECTS
    return False


def _leads_to_model(value: Any) -> bool:
    """True for models, optimizers, parameters, and what holds one of them."""
    if isinstance(value, (*_KINDS, type, types.ModuleType, types.FunctionType)):
        return isinstance(value, _KINDS)
    return bool(find(value, _KINDS, most=_MOST_VALUES))
