"""Runs the program's own lines again: those of the loss, and those behind backward.

The lines of the loss, where no `guard.run()` names them, are those of the function that
called `backward()`: from the first one whose result autograd has followed to the one
that assigns the loss. They become a function, which is replayed as one given to
`guard.run()` is. All else that they read is held by the running function. What they
come to counts only where it is seen to be the step: the models are given the same
inputs by the same random states, the loss has the same graph, and it is the same.

Where all gradients are non-finite, and a replayed backward leaves finite ones, code
between backward and the optimizer's step has written to them: clipping by a norm,
scaling, noise. Those of its lines that work on what leads to a model, and what follows
from these, are run behind the replayed backward, out of the function that called it.
The answer counts where the same gradients are non-finite then. One that is ended before
an effect (see `effects`) is left out.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..base.modules import Handles, children_of, modules_in
from ..base.text import is_of_program
from ..base.tree import CALL_DEPTH, find, tensors_in
from ..guard.kept_calls.ambient import Ambient
from ..guard.kept_calls.held_function import data_in
from ..torch_internals.compiler import has_compiled
from ..torch_internals.registry import stack
from ..torch_internals.replaying import no_dispatch
from .ambient import with_autocast_of_now
from .calls import Call, Captured, ModelCall
from .replayer import Observer
from .statement_names import (
    BLOCKS,
    SCOPES,
    assigned,
    assigned_itself,
    changed,
    read,
    written,
)
from .syntax import code_of, module_of
from .tensor_kinds import floats_in, is_float, kinds_of
from .users_lines import Site, note_made_of_lines, source_lines

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_UNSUITABLE = (
    *(ast.Yield, ast.YieldFrom, ast.Await, ast.Return, ast.Delete, ast.Global),
    *(ast.Nonlocal, ast.AsyncFor, ast.AsyncWith, ast.NamedExpr),
)
_EFFECTS = {"backward", "step", "zero_grad", "exec", "eval", "locals"}
_OF_FRAME = {"exec", "eval", "locals", "super", "__class__"}
_FUTURE = annotations.compiler_flag
_MAX_NODES = 100_000  # of a graph
_RTOL = 1e-3  # of a loss whose kernels are not deterministic


class UncertainError(Exception):
    """Raised where the lines of the loss cannot be run as they ran in the step."""


# Finds the line that computes the loss.


_MOST_FRAMES = 64  # chosen, not measured
_MOST_CODE = 200  # characters of a line that advice writes out
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
        return Site(self.frame.f_code, line, 0).text


def running_code() -> Iterator[tuple[FrameType, str, ast.Module]]:
    """Yields the program's frames, innermost first, with their files' text and tree."""
    for frame in stack()[:_MOST_FRAMES]:
        code = frame.f_code
        if not is_of_program(code.co_filename):
            continue
        source = "".join(source_lines(code, frame.f_globals))
        with contextlib.suppress(SyntaxError):
            yield frame, source, module_of(source)


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
    """The one assignment of a function to what backward is called on.

    Those that go on from its value, as by a division, are left out. None if there are
    several, or others than `x = ...`: which one has run is not certain; None as well if
    it is the 0 that others add to.
    """
    nodes = [n for n in _own_statements(around) if name.id in assigned_itself(n)]
    plain = [n for n in nodes if isinstance(n, ast.Assign) and _is_to_name(n)]
    first = [n for n in plain if name.id not in read(n.value) | assigned(n.value)]
    if len(first) != 1 or len(plain) != len(nodes):
        return None
    is_start = len(plain) > 1 and _reads_nothing(first[0].value)
    return None if is_start else first[0]


def _reads_nothing(value: ast.AST) -> bool:
    """True for a constant, and for a call with nothing else, as `torch.zeros(())`."""
    given = value.args if isinstance(value, ast.Call) else [value]
    parts = [part for each in given for part in ast.walk(each)]
    return bool(parts) and not any(isinstance(each, ast.Name) for each in parts)


def _is_to_name(statement: ast.Assign) -> bool:
    return len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name)


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


# Picks the statements that compute the loss.


# A statement; of `with`, also those within it that are picked.
_Picked = tuple[ast.stmt, "list[_Picked] | None"]


class _Statements:
    """The statements that are run again, and what they read.

    Args:
        line: The line of the loss.

    Attributes:
        body: The statements, in order.
        held: The names of the variables that they read, and do not assign, each with
            the first line that reads it.

    Raises:
        UncertainError: If it is not certain that they are what ran.
    """

    def __init__(self, line: LossLine) -> None:
        self._line = line
        self._again = {line.backward.id}  # names that are computed again
        self._bad: set[str] = set()  # names that hold non-finite values
        body: list[_Picked] = []
        for owner, statements, place in reversed(_blocks_to(line)):
            body = self._picked(statements[:place]) + body
            if isinstance(owner, (ast.With, ast.AsyncWith)) and not self._runs(owner):
                body = [(owner, body)] if body else []
            if isinstance(owner, ast.If) and not self._runs(owner):
                self._check_branch(owner)
            if isinstance(owner, (*_LOOPS, ast.ExceptHandler, ast.match_case)):
                self._check_loop(owner)
                break
        self.body = body
        self.held = self._read_from_outside()
        self._check()

    @property
    def last_line(self) -> int:
        """The number of their last line."""
        return max(each.end_lineno or 0 for each in _flat(self.body))

    def _picked(self, statements: Sequence[ast.stmt]) -> list[_Picked]:
        """Those of a block that write to what is computed again, in order."""
        found: list[_Picked] = []
        for each in reversed(statements):
            if isinstance(each, ast.With):
                inner = self._picked(each.body)
                if inner:
                    found.append((each, inner))
                    self._need(*(item.context_expr for item in each.items))
                continue
            if not (written(each) & self._again or self._makes_bad(each)):
                continue
            found.append((each, None))
            if isinstance(each, (ast.Assign, ast.AnnAssign)):
                self._again -= assigned(each)
                self._bad -= assigned(each)
            self._need(each)
        return found[::-1]

    def _need(self, *nodes: ast.AST) -> None:
        """Takes in the names that are read, by the tensors that they hold."""
        for name in {name for node in nodes for name in read(node)}:
            if _is_followed(self._value(name)):
                self._again.add(name)
            elif _is_bad(self._value(name)):
                self._bad.add(name)

    def _makes_bad(self, each: ast.stmt) -> bool:
        """True for an assignment of non-finite values that are computed of tensors."""
        if not isinstance(each, ast.Assign) or not assigned(each) & self._bad:
            return False
        values = [self._value(name) for name in read(each) - assigned(each)]
        return any(floats_in([t for _, t in data_in(value)]) for value in values)

    def _value(self, name: str) -> Any:
        return self._line.variables.get(name)

    def _runs(self, block: ast.AST) -> bool:
        """True if the running line of the frame is within a block."""
        end = getattr(block, "end_lineno", None) or 0
        first: int = block.lineno  # type: ignore[attr-defined]
        return first <= self._line.frame.f_lineno <= end

    def _check_branch(self, branch: ast.AST) -> None:
        """Another branch may have called backward on another loss."""
        if {each.id for each in losses_in(branch)} != {self._line.backward.id}:
            raise UncertainError("which branch ran is not known")

    def _check_loop(self, loop: ast.AST) -> None:
        """A loop that goes on may have given names other values than the loss had."""
        leaves = any(isinstance(n, (ast.Break, ast.Continue)) for n in ast.walk(loop))
        if leaves and not self._runs(loop):
            raise UncertainError("the loop around the loss was left")

    def _read_from_outside(self) -> dict[str, int]:
        """The names that are read and were not assigned before, with the first line."""
        found: dict[str, int] = {}
        written: set[str] = set()
        for each in _flat(self.body):
            own = assigned(each)
            is_simple = isinstance(each, (ast.Assign, ast.AnnAssign, ast.Expr))
            reads = read(each) - (set() if is_simple else own)
            if isinstance(each, ast.AugAssign):
                reads |= own
            for name in sorted(reads - written):
                found.setdefault(name, each.lineno)
            written |= own
        self._written = written
        held = self._line.variables
        return {name: line for name, line in found.items() if name in held}

    def _check(self) -> None:
        modules = {n for n in self.held if isinstance(self._value(n), types.ModuleType)}
        held = set(self.held) - modules  # nn.init.zeros_(x) writes to no `nn`
        if not self.body:
            raise UncertainError("the loss is assigned elsewhere")
        if held & self._written or any(_is_followed(self._value(n)) for n in held):
            raise UncertainError("a variable is read before it is assigned")
        nodes = [node for each in _flat(self.body) for node in ast.walk(each)]
        for node in nodes:
            if isinstance(node, _UNSUITABLE) or _has_effects(node):
                raise UncertainError("a statement has effects")
        attributes = {
            (node.value.id, node.attr)
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        for each in ast.walk(self._line.around):
            if not isinstance(each, ast.stmt) or isinstance(each, SCOPES):
                continue
            names = (assigned(each) | changed(each, attributes)) & held
            line = each.lineno
            is_over = line <= self._line.frame.f_lineno
            if is_over and any(line > self.held[name] for name in names):
                raise UncertainError("a variable was written to since")


def _blocks_to(line: LossLine) -> list[tuple[ast.AST, list[ast.stmt], int]]:
    """The blocks around the call of backward, the outermost first, with its places."""
    found: list[tuple[ast.AST, list[ast.stmt], int]] = []
    owner: ast.AST | None = line.around
    while owner is not None:
        inner = None
        for _, value in ast.iter_fields(owner):
            for place, each in enumerate(value if isinstance(value, list) else []):
                is_block = isinstance(each, BLOCKS)
                if is_block and any(n is line.backward for n in ast.walk(each)):
                    found.append((owner, value, place))
                    inner = each
        owner = inner
    return found


def _flat(body: Sequence[_Picked]) -> Iterator[ast.stmt]:
    """Yields statements in order; of `with` its items, then those within it."""
    for each, inner in body:
        if inner is None:
            yield each
        else:
            assert isinstance(each, (ast.With, ast.AsyncWith))
            yield ast.copy_location(type(each)(items=each.items, body=[]), each)
            yield from _flat(inner)


def _is_followed(value: Any) -> bool:
    """True for tensors that autograd has computed, and data that holds some."""
    return any(each.grad_fn is not None for _, each in data_in(value))


def _is_bad(value: Any) -> bool:
    """True for tensors, and data that holds some, that are non-finite."""
    return any(map(kinds_of, floats_in([each for _, each in data_in(value)])))


def _has_effects(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        is_private = node.attr.startswith("__") and not node.attr.endswith("__")
        return is_private or node.attr in _EFFECTS
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in _EFFECTS  # a number may be called `step`
    return isinstance(node, ast.Name) and node.id in _OF_FRAME


# Makes a function of them, and a call that can be replayed.


_MADE = "__lines_of_the_loss__"  # hides no name that the statements read


class _LossCode:
    """The code of the statements.

    Args:
        line: The line of the loss.

    Attributes:
        place: The file and the number of the last line.
    """

    def __init__(self, line: LossLine) -> None:
        code, statements = line.frame.f_code, _Statements(line)
        is_module = isinstance(line.around, ast.Module)
        own_name = "<module>" if is_module else getattr(line.around, "name", "")
        if code.co_name != own_name:
            raise UncertainError("the file is not the code that runs")
        self._names = [] if is_module else list(statements.held)
        self._name, self._returns = own_name, line.backward.id
        self._whole = self._compiled(_body_of(statements.body), code)
        self.place = line.place_of(statements.last_line)

    def function(self, line: LossLine) -> Callable[[], Any]:
        """The function that computes the loss again from what the frame holds now."""
        made = types.FunctionType(self._whole, line.frame.f_globals)
        function: Any = made(*(line.variables[name] for name in self._names))
        function.__code__ = function.__code__.replace(co_name=self._name)
        note_made_of_lines(function.__code__)
        loss: Callable[[], Any] = function
        return loss

    def _compiled(
        self, body: Sequence[ast.stmt], own: types.CodeType
    ) -> types.CodeType:
        """The code of a function that makes the one with some statements."""
        inner = _definition(_MADE, [], body, self._returns)
        outer = _definition("outer", self._names, [inner], _MADE)
        for each in (inner, outer):
            ast.copy_location(each, body[-1])
        module = ast.fix_missing_locations(ast.Module([outer], []))
        flags = own.co_flags & _FUTURE
        code = code_of(module, own.co_filename, flags)
        return next(e for e in code.co_consts if isinstance(e, types.CodeType))


def _definition(
    name: str, names: Sequence[str], body: Sequence[ast.stmt], returns: str
) -> ast.FunctionDef:
    empty = module_of(f"def {name}(): return {returns}").body[0]
    assert isinstance(empty, ast.FunctionDef)
    empty.args.args = [ast.arg(each) for each in names]
    for node in ast.walk(empty):
        ast.copy_location(node, body[-1])
    empty.body = [*body, *empty.body]
    return empty


def _body_of(picked: Sequence[_Picked]) -> list[ast.stmt]:
    """The statements, and of blocks those within them that are wanted."""
    body: list[ast.stmt] = []
    for each, inner in picked:
        if inner is not None:
            assert isinstance(each, (ast.With, ast.AsyncWith))
            block = type(each)(items=each.items, body=_body_of(inner))
            each = ast.copy_location(block, each)
        body.append(each)
    return body


class LossCall:
    """The calls of a step, with the program's lines of the loss in place of forwards.

    Args:
        line: The line of the loss.
        models: The models, by what their modules' names begin with.
        calls: The calls that were kept: forwards of models.

    Attributes:
        calls: The calls before those that the lines make, and that of the lines.
        check: Sees whether a replay of them is the step.
        place: The file and the number of the last of the lines.
        is_only_loss: No other loss can be seen in the function.

    Raises:
        UncertainError: If it is not certain what ran.
    """

    def __init__(
        self, line: LossLine, models: Mapping[str, nn.Module], calls: Sequence[Call]
    ) -> None:
        loss = line.variables.get(line.backward.id)
        if not isinstance(loss, torch.Tensor) or loss.grad_fn is None:
            raise UncertainError("the loss is not held")
        self._forwards = [each for each in calls if isinstance(each, ModelCall)]
        if len(self._forwards) != len(calls):
            raise UncertainError("another function was kept")
        code = _LossCode(line)
        self.place = code.place
        self.is_only_loss = not line.others
        self._captured = Captured(code.function(line))
        self._models, self._loss = models, loss
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


# Compares a replay with the step.


class SameStep(Observer):
    """Compares the forwards and the loss of a replay with those of the step.

    Args:
        call: The call of the lines.
        forwards: The forwards of the step that it is to make.
        loss: The loss of the step.

    Attributes:
        num_forwards: How many forwards it has made.
        is_given_alike: They are the step's, with the same inputs and random states.
        has_same_graph: The loss was computed by the same operations of autograd.
        has_same_loss: The loss is the same.
    """

    def __init__(
        self, call: Call, forwards: Sequence[ModelCall], loss: torch.Tensor
    ) -> None:
        self._call, self._forwards, self._loss = call, forwards, loss
        self._forget()

    def _forget(self) -> None:
        self.num_forwards = self._depth = 0
        self.is_given_alike = True
        self.has_same_graph = self.has_same_loss = False

    @contextlib.contextmanager
    def observing(self, models: Mapping[str, nn.Module]) -> Iterator[None]:
        """Sees the outermost forwards, and keeps optimizers from stepping."""
        handles = Handles()
        self._forget()
        for model in models.values():
            handles += [
                model.register_forward_pre_hook(
                    self._before, prepend=True, with_kwargs=True
                ),
                model.register_forward_hook(self._after, always_call=True),
            ]
        with handles, without_optimizer_steps("the lines of the loss make a step"):
            yield

    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth > 1 or not torch.is_grad_enabled():
            return
        place = self.num_forwards
        self.num_forwards += 1
        if place >= len(self._forwards):
            self.is_given_alike = False
            return
        kept = self._forwards[place]
        with no_dispatch():
            now, then = (
                tensors_in(e, CALL_DEPTH) for e in ((args, kwargs), kept.batch)
            )
            is_alike = len(now) == len(then) and all(map(_is_same, now, then))
        is_alike = is_alike and not kept.ambient.random.drawn()
        self.is_given_alike = self.is_given_alike and is_alike

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1

    def on_output(self, call: Call, output: Any) -> None:
        """Compares the loss."""
        if call.function is not self._call.function:
            self._forget()  # a call that was made before those lines
            return
        self.is_given_alike &= self.num_forwards == len(self._forwards)
        if isinstance(output, torch.Tensor):
            self.has_same_graph = has_compiled() or _is_same_graph(output, self._loss)
            with no_dispatch():
                self.has_same_loss = _is_same(output, self._loss)


@contextlib.contextmanager
def without_optimizer_steps(why: str) -> Iterator[None]:
    """Raises UncertainError where an optimizer is about to step within."""

    def refuse(optimizer: object, args: object, kwargs: object) -> None:
        raise UncertainError(why)

    with register_optimizer_step_pre_hook(refuse):
        yield


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other:
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = one.detach(), other.detach()
    if not is_float(one):
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=_RTOL, atol=0.0, equal_nan=True)


def _is_same_graph(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors were computed by the same nodes, of the same parameters."""
    waiting: list[tuple[Any, Any]] = [(one.grad_fn, other.grad_fn)]
    seen: dict[Any, Any] = {}
    while waiting and len(seen) < _MAX_NODES:
        a, b = waiting.pop()
        if a is None or b is None or a in seen:
            if a is not b and seen.get(a) is not b:
                return False
            continue
        seen[a] = b
        edges, others = a.next_functions, b.next_functions
        places = [place for _, place in edges], [place for _, place in others]
        if a.name() != b.name() or places[0] != places[1] or not _is_same_leaf(a, b):
            return False
        waiting += [(x, y) for (x, _), (y, _) in zip(edges, others, strict=True)]
    return not waiting


def _is_same_leaf(a: Any, b: Any) -> bool:
    """True if nodes add up gradients of one parameter, or of tensors made anew."""
    one, other = getattr(a, "variable", None), getattr(b, "variable", None)
    return one is other or not isinstance(one, nn.Parameter)


# The lines between backward and the optimizer's step.


_KINDS = (nn.Module, nn.Parameter, Optimizer)
_MOST_VALUES = 256  # of an object that may lead to a model


class GradientCode:
    """Statements that write to gradients, which can be run again one by one.

    Args:
        statements: The code of each.
        variables: What they read of the function that they are of, by name.
        globals_: The variables of its file.

    Attributes:
        variables: The same.
    """

    def __init__(
        self,
        statements: Sequence[types.CodeType],
        variables: Mapping[str, Any],
        globals_: Mapping[str, Any],
    ) -> None:
        self.variables = variables
        self._statements, self._globals = statements, globals_

    def parts(self) -> Iterator[Callable[[], None]]:
        """Yields what runs one statement each; an optimizer's step is refused."""
        around = {**self._globals, **self.variables}
        for code in self._statements:
            yield functools.partial(_run_statement, code, around)


def _run_statement(code: types.CodeType, around: dict[str, Any]) -> None:
    with without_optimizer_steps("the lines behind backward make a step"):
        exec(code, around)


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
        statements = []
        for each in picked:
            code = code_of(ast.Module([each], []), frame.f_code.co_filename)
            note_made_of_lines(code)
            statements.append(code)
        held = {n: names[n] for each in picked for n in read(each) if n in names}
        return GradientCode(statements, held, frame.f_globals)
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
        is_left = any(isinstance(n, _UNSUITABLE) or _has_effects(n) for n in nodes)
        if is_own and not is_left:
            found.append(each)
            made |= assigned(each)
    return found


def _leads_to_model(value: Any) -> bool:
    """True for models, optimizers, parameters, and what holds one of them."""
    if isinstance(value, _KINDS):
        return True
    if isinstance(value, (type, types.ModuleType, types.FunctionType)):
        return False
    return bool(find(value, _KINDS, most=_MOST_VALUES))
