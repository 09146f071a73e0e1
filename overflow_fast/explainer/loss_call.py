"""The program's own lines of the loss, run again as one function.

Where no `guard.run()` names the loss, the statements that computed what `backward()`
was called on become a function, which is replayed as one given to `guard.run()` is.
Which statements these are is a guess, by the names that they write and read. Whether
they are the step is not reasoned about, but seen: they give the models the same inputs
in the same random states, and come to the same loss by the same graph. Of a loss that
no variable holds, as in `loss_of(output).backward()`, the gradients that the models'
modules are given are the same instead. Else they count for nothing. What they draw
before a forward is drawn again, in random states as far before those that were kept.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from ..guard.kept_calls.ambient import Ambient
from ..guard.kept_calls.held_function import HeldFunction, data_in
from .calls import Call, ModelCall
from .loss_line import BLOCKS, LOOPS, UNNAMED, LossLine, is_followed
from .replay_check import SameStep, UncertainError
from .rewound import rewound
from .running_code import (
    FORBIDDEN,
    FUNCTIONS,
    is_within,
    names_in,
    targets_of,
    writes_of,
)
from .syntax import code_of, module_of
from .tensor_kinds import floats_in, kinds_of
from .users_lines import Site, note_made_of_lines

_REPEATED = (*LOOPS, ast.ExceptHandler, ast.match_case)


def _blocks_to(around: ast.AST, of: ast.expr) -> list[tuple[Any, list[Any], int]]:
    """The blocks around a node, the outermost first, each with its place in them."""
    found: list[tuple[Any, list[Any], int]] = []
    owner: ast.AST | None = around
    while owner is not None:
        inner = None
        for _, value in ast.iter_fields(owner):
            for place, each in enumerate(value if isinstance(value, list) else []):
                if isinstance(each, BLOCKS) and of in ast.walk(each):
                    found.append((owner, value, place))
                    inner = each
        owner = inner
    return found


def _picked(statements: Sequence[Any], wanted: set[str], own: Any) -> list[Any]:
    """Those of a block that write to what is wanted, which grows by what they read."""
    found: list[Any] = []
    for each in reversed(statements):
        parts = [each]
        if isinstance(each, ast.With):
            body = _picked(each.body, wanted, own)
            parts = [item.context_expr for item in each.items] if body else []
            found += [_with(each, body)] if body else []
        elif writes_of(each) & wanted and not _only_gives(each, wanted, own):
            found.append(each)
            is_plain = isinstance(each, (ast.Assign, ast.AnnAssign))
            wanted -= targets_of(each) if is_plain else set()
        else:
            continue
        reads = {name for part in parts for name in names_in(part, ast.Load)}
        wanted |= {
            name for name in reads if is_followed(own(name)) or _is_bad(own(name))
        }
    return found[::-1]


def _only_gives(each: ast.stmt, wanted: set[str], own: Any) -> bool:
    """True for an assignment of bad values alone that are computed of no tensors."""
    if any(
        is_followed(own(n)) or not _is_bad(own(n)) for n in writes_of(each) & wanted
    ):
        return False
    reads = names_in(each, ast.Load) - targets_of(each)
    return not any(floats_in([t for _, t in data_in(own(n))]) for n in reads)


def _with(block: Any, body: list[Any]) -> Any:
    return ast.copy_location(type(block)(items=block.items, body=body), block)


def _is_bad(value: Any) -> bool:
    return any(map(kinds_of, floats_in([each for _, each in data_in(value)])))


def _statements_of(line: LossLine) -> list[ast.stmt]:
    """The statements that computed the loss, in order."""
    body: list[ast.stmt] = []
    wanted, now = {line.name}, line.frame.f_lineno
    last = [] if line.is_held else [_assigned(line.backward)]
    for owner, block, place in reversed(_blocks_to(line.around, line.backward)):
        body = _picked([*block[:place], *last], wanted, line.variables.get) + body
        last = []
        if isinstance(owner, (ast.With, ast.AsyncWith)) and not is_within(now, owner):
            body = [_with(owner, body)] if body else []
        if isinstance(owner, _REPEATED):
            break
    nodes = [n for each in body for n in ast.walk(each)]
    if not body or any(isinstance(n, FORBIDDEN) for n in nodes):
        raise UncertainError("the loss is assigned elsewhere")
    return body


def _assigned(loss: ast.expr) -> ast.stmt:
    """The statement that gives the value of an expression to the loss's variable."""
    assigned = ast.Assign([ast.Name(UNNAMED, ast.Store())], loss)
    return ast.fix_missing_locations(ast.copy_location(assigned, loss))


def _held_by(body: Sequence[ast.stmt], line: LossLine) -> list[str]:
    """The variables that statements read and have not assigned before."""
    first, written = dict[str, int](), set[str]()
    for each in body:
        for name in names_in(each, ast.Load) - written:
            first.setdefault(name, each.lineno)
        written |= names_in(each, ast.Store)
    held = [n for n in first if n in line.variables and n not in written]
    # A call as `nn.init.zeros_(x)` writes to no `nn`.
    modules = {n for n in held if isinstance(line.variables[n], types.ModuleType)}
    nodes = [n for each in body for n in ast.walk(each) if isinstance(n, ast.Attribute)]
    reads = {(n.value.id, n.attr) for n in nodes if isinstance(n.value, ast.Name)}
    blocks = (*FUNCTIONS, *_REPEATED, ast.With, ast.If)
    for node in ast.walk(line.around):  # which hold another value by now
        since = getattr(node, "lineno", 0)
        is_over = isinstance(node, ast.stmt) and since <= line.frame.f_lineno
        if is_over and not isinstance(node, blocks):
            for name in writes_of(node, reads).intersection(held) - modules:
                if since > first[name]:
                    raise UncertainError(f"{name} was written to since")
    return held


def _function_of(line: LossLine, body: Sequence[ast.stmt]) -> Callable[[], Any]:
    """The function that computes the loss again from what the frame holds now."""
    own = getattr(line.around, "name", "")
    if line.frame.f_code.co_name != (own or "<module>"):
        raise UncertainError("the file is not the code that runs")
    names = _held_by(body, line) if own else []
    text = f"def outer({', '.join(names)}):\n def inner():\n  return {line.name}\n"
    made: Any = module_of(f"{text} return inner")
    for node in ast.walk(made):
        ast.copy_location(node, body[-1])
    made.body[0].body[0].body[:0] = body
    flags = line.frame.f_code.co_flags & annotations.compiler_flag
    space: dict[str, Any] = {}
    code = code_of(made, line.frame.f_code.co_filename, flags)
    exec(code, line.frame.f_globals, space)
    function: Any = space["outer"](*(line.variables[name] for name in names))
    function.__code__ = function.__code__.replace(co_name=own or "<module>")
    note_made_of_lines(function.__code__)
    return function  # type: ignore[no-any-return]


class LossCall:
    """The calls of a step, with the program's lines of the loss in place of forwards.

    Attributes:
        calls: The calls before those that the lines make, and that of the lines.
        check: Sees whether a replay of them is the step.
        place: The file and the number of the last of the lines.
        is_held: A variable has the loss of the step.
        is_only_loss: No other loss can be seen in the function.
    """

    def __init__(
        self, line: LossLine, models: Mapping[str, nn.Module], calls: Sequence[Call]
    ) -> None:
        self._loss: Any = line.variables.get(line.name) if line.is_held else None
        self._forwards = [each for each in calls if isinstance(each, ModelCall)]
        is_gone = line.is_held and not is_followed(self._loss)
        if is_gone or len(self._forwards) != len(calls):
            raise UncertainError("the loss is not held, or another function was kept")
        body = _statements_of(line)
        last = max(each.end_lineno or 0 for each in body)
        self.place = Site(line.frame.f_code, last, 0).text
        self.is_held, self.is_only_loss = line.is_held, not line.others
        self._captured = HeldFunction(_function_of(line, body))
        self._models = models
        self._begin(0)

    def _begin(self, num_before: int) -> None:
        forwards = self._forwards[num_before:]
        model = next(iter(self._models.values()))
        ambient = forwards[0].ambient if forwards else Ambient(model, ())
        ambient = ambient.with_autocast_of_now()
        call = Call(self._captured, self._captured.values, ambient)
        call.returns_loss = True
        call.seconds = max((each.seconds for each in self._forwards), default=0.0)
        self.calls: list[Call] = [*self._forwards[:num_before], call]
        self.check = SameStep(call, forwards, self._loss)

    def rewind(self) -> bool:
        """Begins before what the lines draw for a forward; False if it is not that."""
        call, check, then = self.calls[-1], self.check, self.check.at_first
        if check.is_given_alike or not check.has_same_graph or then is None:
            return False
        if not call.ambient.random.others_in(then):
            return False
        call.ambient.random = rewound(call.ambient.random, then)
        return True

    def leave_out(self, num_made: int) -> bool:
        """Keeps forwards that the lines do not make before them; False if none is."""
        num_before = len(self._forwards) - num_made
        if not num_made or num_before <= 0 or len(self.calls) > 1:
            return False
        self._begin(num_before)
        return True
