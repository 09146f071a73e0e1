"""Runs the program's own lines between backward and the optimizer's step again.

Where all gradients are non-finite, and a replayed backward leaves finite ones, code in
between has written to them: clipping by a norm, scaling, noise. Those of its lines that
work on what leads to a model, and what follows from these, are run behind the replayed
backward, out of the function that called it. The answer counts where the same gradients
are non-finite then.

The program never asked for these lines to run again, so none runs that may reach beyond
its variables: a call is followed into the program's own functions, and has to come to
torch, mathematics or containers. What is left out costs an answer, and no more.
"""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .. import tree
from ..text import is_of_program
from .loss_code import (
    EFFECTS,
    UNSUITABLE,
    function_at,
    has_effects,
    running_code,
    variables_of,
    without_optimizer_steps,
)
from .names import assigned, read
from .places import source_lines
from .remedies.line_edit import forbid_edit

_KINDS = (nn.Module, nn.Parameter, Optimizer)
# Parts of the names of functions that may write to files, terminals, other processes.
_OUTWARD = {
    *("callback", "callbacks", "checkpoint", "close", "dump", "emit", "eval"),
    *("exec", "execute", "export", "flush", "histogram", "image", "import"),
    *("input", "mkdir", "notify", "open", "plot", "post", "postfix", "print"),
    *("publish", "push", "put", "record", "remove", "rename", "report", "run"),
    *("save", "scalar", "scalars", "send", "show", "spawn", "store", "submit"),
    *("track", "unlink", "upload", "wait", "write"),
}
_OUTWARD_OBJECTS = {"logger", "logging", "mlflow", "tracker", "wandb", "writer"}
_LIBRARIES = {"torch", "math", "operator", "itertools", "functools", "contextlib"}
_LIBRARIES |= {"numpy", "builtins", "collections"}
_DEEPEST = 8  # of functions that call functions
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
        with without_optimizer_steps("the lines behind backward make a step"):
            exec(self._code, {**self._globals, **self.variables})


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
        forbid_edit(code, "lines behind backward are run again as they are")
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
        if is_own and not (is_left or reaches_out(each, names)):
            found.append(each)
            made |= assigned(each)
    return found


def _leads_to_model(value: Any) -> bool:
    """True for models, optimizers, parameters, and what holds one of them."""
    if isinstance(value, _KINDS):
        return True
    if isinstance(value, (type, ModuleType, FunctionType)):
        return False
    return bool(tree.find(value, _KINDS, most=_MOST_VALUES))


# Which code may reach beyond the program's variables.


def reaches_out(node: ast.AST, names: Mapping[str, Any], depth: int = 0) -> bool:
    """True if code may do more than compute and write to the program's variables.

    Args:
        node: The code.
        names: The values of names in it, as far as they are known.
        depth: How many functions of the program have led to it.
    """
    nodes = list(ast.walk(node))
    if any(isinstance(each, (ast.Import, ast.ImportFrom)) for each in nodes):
        return True
    calls = [each for each in nodes if isinstance(each, ast.Call)]
    inner = {each.name for each in nodes if isinstance(each, ast.FunctionDef)}
    return any(_may_reach_out(each, names, inner, depth) for each in calls)


def _may_reach_out(
    call: ast.Call, names: Mapping[str, Any], inner: set[str], depth: int
) -> bool:
    """True if a call may."""
    function, path = call.func, list[str]()
    while isinstance(function, ast.Attribute):
        path.insert(0, function.attr)
        function = function.value
    if isinstance(function, ast.Name):
        path.insert(0, function.id)
    if _OUTWARD & _words(path[-1:]) or _OUTWARD_OBJECTS & _words(path):
        return True
    is_begun = path == ["next"] and isinstance(call.args[0], ast.Call)
    if EFFECTS.intersection(path[-1:]) and not is_begun:
        return True  # of schedules and iterators; next(model.parameters()) begins one
    if not isinstance(function, ast.Name):
        return not path  # a method of what is computed here, such as a tensor
    if path[0] in inner and len(path) == 1:
        return False  # its code stands here, too
    if path[0] not in names and not hasattr(builtins, path[0]):
        return len(path) == 1  # else a method of a variable that is made here
    value, owner = names.get(path[0], getattr(builtins, path[0], None)), None
    for part in path[1:]:
        owner, value = value, inspect.getattr_static(value, part, None)
        if value is None:
            return False  # a method of a submodule or of one of its parameters
    is_object = not isinstance(owner, (type, ModuleType))
    return not _stays_within(value, owner if is_object else None, depth)


def _words(names: Sequence[str]) -> set[str]:
    return {word for name in names for word in name.lower().split("_")}


def _stays_within(function: Any, owner: Any, depth: int) -> bool:
    """True if a call of a function only computes, and writes to variables.

    Args:
        function: The function.
        owner: The object whose method it is, or None.
        depth: How many functions of the program have led to it.
    """
    if isinstance(function, (staticmethod, classmethod)):
        owner, function = None, function.__func__
    if isinstance(function, MethodType):
        owner, function = function.__self__, function.__func__
    while isinstance(function, FunctionType) and hasattr(function, "__wrapped__"):
        if is_of_program(function.__code__.co_filename):
            break
        function = function.__wrapped__  # as by torch.no_grad()
    if isinstance(function, type):
        return _library_of(function) in _LIBRARIES or issubclass(function, Exception)
    if not inspect.isroutine(function):
        return False
    if not isinstance(function, FunctionType):
        return _library_of(function) in _LIBRARIES
    code = function.__code__
    if not is_of_program(code.co_filename):
        return _library_of(function) in _LIBRARIES
    definition = _definition(function)
    if definition is None or depth == _DEEPEST:
        return False
    names = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    names = {k: each for k, each in names.items() if k not in code.co_varnames}
    if owner is not None and code.co_argcount:
        names[code.co_varnames[0]] = owner
    return not reaches_out(definition, names, depth + 1)


def _library_of(function: Any) -> str:
    """The package of a function, of a class, or of the class of a method."""
    owner = getattr(function, "__objclass__", function)
    return str(getattr(owner, "__module__", None)).partition(".")[0]


def _definition(function: FunctionType) -> ast.FunctionDef | ast.Lambda | None:
    """A function's definition in the text of its file; None if that is not certain."""
    code = function.__code__
    tree = ast.parse("".join(source_lines(code, function.__globals__)))
    found = [
        each
        for each in ast.walk(tree)
        if isinstance(each, (ast.FunctionDef, ast.Lambda))
        if getattr(each, "name", "<lambda>") == code.co_name
        if _first_line(each) == code.co_firstlineno
    ]
    return found[0] if len(found) == 1 else None


def _first_line(function: ast.FunctionDef | ast.Lambda) -> int:
    decorators: list[ast.expr] = getattr(function, "decorator_list", [])
    return min([function.lineno, *(each.lineno for each in decorators)])
