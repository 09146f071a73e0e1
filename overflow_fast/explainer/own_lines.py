"""The program's own lines, run again: those of the loss, and those behind backward.

Where no `guard.run()` names the loss, the statements that computed what `backward()`
was called on become a function, which is replayed as one given to `guard.run()` is.
Which statements these are is a guess, by the names that they write and read. Whether
they are the step is not reasoned about, but seen: they give the models the same inputs
in the same random states, and come to the same loss by the same graph. Of a loss that
no variable holds, as in `loss_of(output).backward()`, the gradients that the models'
modules are given are the same instead. Else they count for nothing.

Where all gradients are non-finite, and a replayed backward leaves finite ones, code
between backward and the optimizer's step has written to them: clipping by a norm,
scaling, noise. Those of its statements that work on what leads to a model, and what
follows from these, are run behind the replayed backward, one by one. The answer counts
where the same gradients are non-finite then. One that is ended before an effect (see
`effects`) is left out.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..base.modules import modules_in
from ..base.text import is_of_program
from ..base.tree import find
from ..guard.kept_calls.ambient import Ambient
from ..guard.kept_calls.held_function import data_in
from ..torch_internals.registry import stack
from .ambient import with_autocast_of_now
from .calls import Call, Captured, ModelCall
from .replay_check import SameStep, UncertainError, without_optimizer_steps
from .syntax import code_of, module_of
from .tensor_kinds import floats_in, kinds_of
from .users_lines import Site, note_made_of_lines, source_lines

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = (ast.stmt, ast.ExceptHandler, ast.match_case)
_REPEATED = (ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
_BACKWARDS = {"backward", "manual_backward"}  # of tensors, Accelerate, Lightning
_UNNAMED = "the_loss"  # a variable for a loss that has none
_FORBIDDEN = (ast.Global, ast.Nonlocal)  # what they assign is the program's
# What writes to gradients alone, which no loss reads; a replay begins without them.
_OF_GRADIENTS = {"clip_grad_norm_", "clip_grad_value_", "unscale_"}
_MOST_FRAMES = 64  # chosen, not measured
_MOST_CODE = 200  # characters of a line that advice writes out
_MOST_VALUES = 256  # of an object that may lead to a model
_OWN_REFERENCES = 3  # of the frame, of a local variable, and of getrefcount()
_DIRECT = "Write it as `{name} = guard.run(lambda: {code})` ({place})."
_INDIRECT = (
    "The loss is computed at {place}: `{name} = {code}`. Call the model and that line "
    "in one function, and that by `{name} = guard.run(function)`."
)


# The running code, and what is written in it.


def running_code() -> Iterator[tuple[FrameType, str, ast.AST]]:
    """Yields the program's frames, innermost first, with file's text and function."""
    for frame in stack()[:_MOST_FRAMES]:
        if is_of_program(frame.f_code.co_filename):
            source = "".join(source_lines(frame.f_code, frame.f_globals))
            with contextlib.suppress(SyntaxError):
                around: ast.AST = module_of(source)
                for node in ast.walk(around):  # the outer ones come first
                    is_function = isinstance(node, _FUNCTIONS)
                    if is_function and _is_within(frame.f_lineno, node):
                        around = node
                yield frame, source, around


def _is_within(line: int, node: Any) -> bool:
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


def _names(node: ast.AST, kind: type[ast.expr_context]) -> set[str]:
    found = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {n.id for n in found if isinstance(n.ctx, kind)}


def _owner(node: ast.AST) -> str:
    """The name at the beginning of `a.b[0].c`, also behind calls."""
    while isinstance(node, (ast.Subscript, ast.Attribute, ast.Starred, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _writes(
    statement: ast.AST, reads: Collection[tuple[str, str]] | None = None
) -> set[str]:
    """The names that a statement assigns, or whose objects it may write to.

    Args:
        statement: The statement.
        reads: The attributes that count, with their owners' names; None for all, and
            for what methods may write to.
    """
    found = _names(statement, ast.Store)
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
        elif isinstance(each, _FUNCTIONS):
            found.add(each.name)
    return found


def _losses(around: ast.AST) -> list[ast.expr]:
    """The expressions that backward is called on, or with, in the order of lines."""
    found = list[ast.expr]()
    calls = [n for n in ast.walk(around) if isinstance(n, ast.Call)]
    for call in sorted(calls, key=lambda each: each.lineno):
        if getattr(call.func, "attr", "") in _BACKWARDS:
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
        source: The text of its file.
        around: Its function in that text, or the whole file.
        backward: What backward is called on: a variable, or another expression.
    """

    frame: FrameType
    variables: Mapping[str, Any]
    source: str
    around: ast.AST
    backward: ast.expr

    @property
    def is_held(self) -> bool:
        """True if a variable has the loss."""
        return isinstance(self.backward, ast.Name)

    @property
    def name(self) -> str:
        """The variable of the loss."""
        return self.backward.id if isinstance(self.backward, ast.Name) else _UNNAMED

    @property
    def others(self) -> set[str]:
        """The other expressions that the function calls backward on."""
        return set(map(ast.dump, _losses(self.around))) - {ast.dump(self.backward)}

    @property
    def assignment(self) -> ast.Assign | None:
        """The one assignment to it that does not go on from its value, or None."""
        own = self.name
        found = [n for n in _own_statements(self.around) if own in _targets(n)]
        first = [n for n in found if own not in _names(n, ast.Load)]
        is_plain = all(
            isinstance(getattr(n, "targets", [0])[0], ast.Name) for n in found
        )
        if len(first) != 1 or not is_plain or not isinstance(first[0], ast.Assign):
            return None
        given = first[0].value.args if isinstance(first[0].value, ast.Call) else []
        reads = any(_names(each, ast.Load) for each in given or [first[0].value])
        return first[0] if reads or len(found) == 1 else None  # else others add to it


def _own_statements(around: ast.AST) -> Iterator[Any]:
    """Yields the statements of a function, without those of functions within it."""
    for each in ast.iter_child_nodes(around):
        if isinstance(each, _BLOCKS):
            yield each
            if not isinstance(each, (*_FUNCTIONS, ast.ClassDef)):
                yield from _own_statements(each)


def _targets(statement: Any) -> set[str]:
    """The names that a statement assigns itself, without those in its blocks."""
    parts = [*getattr(statement, "targets", ()), getattr(statement, "target", None)]
    parts += [each.optional_vars for each in getattr(statement, "items", ())]
    return {name for each in parts if each for name in _names(each, ast.Store)}


def find_loss_line() -> LossLine | None:
    """Finds the line that computed the loss, or returns None. Calls no program code."""
    loss: Any = None
    for frame, source, around in running_code():
        of: ast.expr | None
        if loss is None:
            before = [n for n in _losses(around) if n.lineno <= frame.f_lineno]
            of = before[-1] if before else None
        else:
            of = _given_in(around, frame, loss)
        if of is None:
            continue
        line = LossLine(frame, variables_of(frame), source, around, of)
        is_assigned = (line.name in _targets(each) for each in _own_statements(around))
        if not line.is_held or any(is_assigned):
            return line
        loss = line.variables.get(line.name)  # an argument: its caller computed it
    return None


def _given_in(around: ast.AST, frame: FrameType, loss: Any) -> ast.Name | None:
    """The variable with the loss in the call of a frame that runs."""
    held = variables_of(frame)
    for each in ast.walk(around):
        if isinstance(each, ast.Call) and _is_within(frame.f_lineno, each):
            for name in each.args:
                if isinstance(name, ast.Name) and held.get(name.id) is loss:
                    return name
    return None


def advice(line: LossLine, models: Sequence[nn.Module]) -> str:
    """Describes what to change for the loss to be replayed, or returns ""."""
    assigned = line.assignment
    if assigned is None or line.others:
        return ""  # which loss was bad is not known
    code = ast.get_source_segment(line.source, assigned.value) or ""
    if not code or "\n" in code or len(code) > _MOST_CODE or ".run(" in code:
        return ""
    called = [n.func for n in ast.walk(assigned.value) if isinstance(n, ast.Call)]
    around = {**line.frame.f_globals, **line.variables}
    values = [_value(each, around) for each in called]
    held = {e for v in values if isinstance(v, nn.Module) for e in modules_in(v)}
    form = _DIRECT if held & set(models) else _INDIRECT
    place = Site(line.frame.f_code, assigned.lineno, 0).text
    return form.format(name=line.name, code=code, place=place)


def _value(node: ast.AST, around: Mapping[str, Any]) -> Any:
    """The value of `a.b.c`, without running code of the program."""
    if isinstance(node, ast.Attribute):
        of = _value(node.value, around)
        own = getattr(of, "__dict__", {}).get("_modules", {})
        return own.get(node.attr) or inspect.getattr_static(of, node.attr, None)
    return around.get(node.id) if isinstance(node, ast.Name) else None


# The statements that compute the loss, as a function.


def _blocks_to(around: ast.AST, of: ast.expr) -> list[tuple[Any, list[Any], int]]:
    """The blocks around a node, the outermost first, each with its place in them."""
    found: list[tuple[Any, list[Any], int]] = []
    owner: ast.AST | None = around
    while owner is not None:
        inner = None
        for _, value in ast.iter_fields(owner):
            for place, each in enumerate(value if isinstance(value, list) else []):
                if isinstance(each, _BLOCKS) and of in ast.walk(each):
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
        elif _writes(each) & wanted and not _only_gives(each, wanted, own):
            found.append(each)
            is_plain = isinstance(each, (ast.Assign, ast.AnnAssign))
            wanted -= _targets(each) if is_plain else set()
        else:
            continue
        reads = {name for part in parts for name in _names(part, ast.Load)}
        wanted |= {
            name for name in reads if _is_followed(own(name)) or _is_bad(own(name))
        }
    return found[::-1]


def _only_gives(each: ast.stmt, wanted: set[str], own: Any) -> bool:
    """True for an assignment of bad values alone that are computed of no tensors."""
    if any(_is_followed(own(n)) or not _is_bad(own(n)) for n in _writes(each) & wanted):
        return False
    reads = _names(each, ast.Load) - _targets(each)
    return not any(floats_in([t for _, t in data_in(own(n))]) for n in reads)


def _with(block: Any, body: list[Any]) -> Any:
    return ast.copy_location(type(block)(items=block.items, body=body), block)


def _is_followed(value: Any) -> bool:
    """True for tensors that autograd has computed, and data that holds some."""
    return any(each.grad_fn is not None for _, each in data_in(value))


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
        if isinstance(owner, (ast.With, ast.AsyncWith)) and not _is_within(now, owner):
            body = [_with(owner, body)] if body else []
        if isinstance(owner, _REPEATED):
            break
    nodes = [n for each in body for n in ast.walk(each)]
    if not body or any(isinstance(n, _FORBIDDEN) for n in nodes):
        raise UncertainError("the loss is assigned elsewhere")
    return body


def _assigned(loss: ast.expr) -> ast.stmt:
    """The statement that gives the value of an expression to the loss's variable."""
    assigned = ast.Assign([ast.Name(_UNNAMED, ast.Store())], loss)
    return ast.fix_missing_locations(ast.copy_location(assigned, loss))


def _held_by(body: Sequence[ast.stmt], line: LossLine) -> list[str]:
    """The variables that statements read and have not assigned before."""
    first, written = dict[str, int](), set[str]()
    for each in body:
        for name in _names(each, ast.Load) - written:
            first.setdefault(name, each.lineno)
        written |= _names(each, ast.Store)
    held = [n for n in first if n in line.variables and n not in written]
    # A call as `nn.init.zeros_(x)` writes to no `nn`.
    modules = {n for n in held if isinstance(line.variables[n], types.ModuleType)}
    nodes = [n for each in body for n in ast.walk(each) if isinstance(n, ast.Attribute)]
    reads = {(n.value.id, n.attr) for n in nodes if isinstance(n.value, ast.Name)}
    blocks = (*_FUNCTIONS, *_REPEATED, ast.With, ast.If)
    for node in ast.walk(line.around):  # which hold another value by now
        since = getattr(node, "lineno", 0)
        is_over = isinstance(node, ast.stmt) and since <= line.frame.f_lineno
        if is_over and not isinstance(node, blocks):
            for name in _writes(node, reads).intersection(held) - modules:
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
        is_gone = line.is_held and not _is_followed(self._loss)
        if is_gone or len(self._forwards) != len(calls):
            raise UncertainError("the loss is not held, or another function was kept")
        body = _statements_of(line)
        last = max(each.end_lineno or 0 for each in body)
        self.place = Site(line.frame.f_code, last, 0).text
        self.is_held, self.is_only_loss = line.is_held, not line.others
        self._captured = Captured(_function_of(line, body))
        self._models = models
        self._begin(0)

    def _begin(self, num_before: int) -> None:
        forwards = self._forwards[num_before:]
        model = next(iter(self._models.values()))
        ambient = forwards[0].ambient if forwards else Ambient(model, ())
        ambient = with_autocast_of_now(ambient)
        call = Call(self._captured, self._captured.values, ambient)
        call.returns_loss = True
        call.seconds = max((each.seconds for each in self._forwards), default=0.0)
        self.calls: list[Call] = [*self._forwards[:num_before], call]
        self.check = SameStep(call, forwards, self._loss)

    def leave_out(self, num_made: int) -> bool:
        """Keeps forwards that the lines do not make before them; False if none is."""
        num_before = len(self._forwards) - num_made
        if not num_made or num_before <= 0 or len(self.calls) > 1:
            return False
        self._begin(num_before)
        return True


# The lines between backward and the optimizer's step.

_EFFECTS = {*_BACKWARDS, "step", "zero_grad", "exec", "eval", "locals"}
_LEAVES = (ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Delete, *_FORBIDDEN)
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
    for frame, _, around in running_code():
        lines = _lines_behind(around, frame.f_lineno)
        if lines is not None:
            names = variables_of(frame)
            picked = _on_models(lines, {**frame.f_globals, **names})
            file, reads = (
                frame.f_code.co_filename,
                [_names(e, ast.Load) for e in picked],
            )
            codes = [code_of(ast.Module([each], []), file) for each in picked]
            for each in codes:
                note_made_of_lines(each)
            held = {n: names[n] for each in reads for n in each if n in names}
            return GradientCode(codes, held, frame.f_globals) if picked else None
    return None


def _lines_behind(around: ast.AST, line: int) -> list[ast.stmt] | None:
    """The statements between the last call of backward and a line, in one block."""
    calls = [n for n in ast.walk(around) if isinstance(n, ast.Call)]
    calls = [n for n in calls if getattr(n.func, "attr", "") in _BACKWARDS]
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
    return next((i for i, each in enumerate(block) if _is_within(line, each)), None)


def _on_models(lines: Sequence[ast.stmt], names: Mapping[str, Any]) -> list[ast.stmt]:
    """The statements that work on what leads to a model, and what follows from them."""
    made, found = set[str](), []
    for each in lines:
        reads, nodes = _names(each, ast.Load), list(ast.walk(each))
        is_own = bool(reads & made) or any(_leads_to_model(names.get(n)) for n in reads)
        if is_own and not any(isinstance(n, _LEAVES) or _acts(n) for n in nodes):
            found.append(each)
            made |= _names(each, ast.Store)
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
