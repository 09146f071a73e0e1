"""Options of a model, in place of what an installed file gives to a call.

Nobody edits such a file. Where the number or the flag is an attribute of a module of
the model, or of its `config`, it is set there, which is tried as it is written:
1. The argument is looked up in the file, and followed through the callers' frames as
   long as it is a parameter of theirs.
2. It ends in `self.NAME` or `self.config.NAME` of a method of modules of the model.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn

from ...base.text import is_of_program
from ...base.tree import layout
from ...guard.report.remedy import Remedy
from ..named_tensors import modules_by_name
from ..replayer import Patch
from ..torch_calls import TorchCall, calls_before
from ..users_lines import Site
from .failure import Failure
from .rules import named_numbers
from .source import NotWrittenError, SourceText, node_at
from .trials import Attempts, Trial, Trials
from .written import operand_of, parameters_of

_USUAL = 1e-6  # the eps of most norms
_FLAGS = {"ctc_loss": {"zero_infinity": True}}


@dataclass(frozen=True)
class OtherOption(Patch):
    """An attribute of modules, or of their configurations, has another value.

    Attributes:
        modules: The modules' full names.
        path: The names that lead from a module to the attribute.
        value: The value.
    """

    modules: tuple[str, ...]
    path: tuple[str, ...]
    value: Any

    @contextmanager
    def applied(self, models: Mapping[str, nn.Module]) -> Iterator[None]:
        """See `Patch`."""
        named = modules_by_name(models)
        with ExitStack() as stack:
            for name in self.modules:
                owner, key = _owner_of(named[name], self.path), self.path[-1]
                stack.callback(owner.__setitem__, key, owner[key])
                owner[key] = self.value
            yield


def option_trials(failure: Failure, trials: Trials) -> Attempts:
    """A larger eps in an option of a model, or a flag, that an installed file reads."""
    models = trials.replayer.models
    own = failure.failing_calls
    for call in [*own, *(each for failed in own for each in calls_before(failed))]:
        if is_of_program(call.sites[0].file):
            continue
        for node, given, value in _others_of(call):
            path, code = _attribute_of(node, call.sites)
            if code is None or not (value is True or "eps" in path[-1]):
                continue
            owners = [
                name
                for name, module in modules_by_name(models).items()
                if _has_code(type(module), code)
                and _is_equal(_owner_of(module, path).get(path[-1]), given)
            ]
            if owners:
                option = OtherOption(tuple(owners), path, value)
                yield Trial(_remedy_of(option, models), option, settles=True)


def _is_equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _others_of(call: TorchCall) -> Iterator[tuple[ast.AST | None, Any, Any]]:
    """Yields arguments of a call, as they are written, with their value and another."""
    whole, numbers = node_at(call.sites[0]), named_numbers(call.dtype)
    named = dict(
        zip(parameters_of(call.func), getattr(whole, "args", ()), strict=False)
    )
    named |= {k.arg: k.value for k in getattr(whole, "keywords", ()) if k.arg}
    for key, value in _FLAGS.get(call.name, {}).items():
        if key in named and call.kwargs.get(key) is not value:
            yield named[key], not value, value

    larger = max(numbers["EPS"], _USUAL)

    def is_small(given: Any) -> bool:
        return type(given) in (int, float) and 0 <= given < numbers["EPS"]

    for name, given in call.kwargs.items():
        if is_small(given) and name in named:
            yield named[name], given, larger
    for place, given in enumerate(call.operands):
        if is_small(given):
            with contextlib.suppress(NotWrittenError):
                yield operand_of(call, place, whole), given, larger


def _attribute_of(
    node: ast.AST | None, sites: Sequence[Site]
) -> tuple[tuple[str, ...], CodeType | None]:
    """The names behind `self` that an argument comes from, and the method's code."""
    for site, caller in itertools.zip_longest(sites, sites[1:]):
        path = () if node is None else _path_from_self(node, site.code)
        if path:
            return path, site.code
        node = None if node is None or caller is None else _given_to(node, site, caller)
    return (), None


def _path_from_self(node: ast.AST, code: CodeType) -> tuple[str, ...]:
    """The names behind the first parameter of a method; () for another expression."""
    names = list[str]()
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    is_self = isinstance(node, ast.Name) and [node.id] == [*code.co_varnames[:1]]
    return tuple(names) if is_self and code.co_argcount else ()


def _given_to(node: ast.AST, site: Site, caller: Site) -> ast.AST | None:
    """The expression that a caller gives for a parameter, or None.

    None, too, for one that its function may assign.
    """
    code, call = site.code, node_at(caller)
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    stored = {each.id for each in SourceText.of(site.file).stores}
    if not isinstance(node, ast.Name) or not isinstance(call, ast.Call):
        return None
    if node.id not in parameters or node.id in stored:
        return None
    return next((k.value for k in call.keywords if k.arg == node.id), None)


def _has_code(kind: type, code: CodeType) -> bool:
    """True if a method of a class runs a code, below decorators."""
    found = (vars(each).get(code.co_name) for each in kind.__mro__)
    method = next((each for each in found if each is not None), None)
    is_function = inspect.isfunction(method)
    return is_function and inspect.unwrap(method).__code__ is code  # type: ignore[arg-type]


def _owner_of(module: nn.Module, path: Sequence[str]) -> dict[str, Any]:
    """The plain attributes of the object that holds the last name of a path."""
    own: Any = vars(module)
    for name in path[:-1]:
        held = own.get(name)
        has_own = layout(type(held)).has_dict
        own = object.__getattribute__(held, "__dict__") if has_own else {}
    return own if type(own) is dict else {}


def _remedy_of(option: OtherOption, models: Mapping[str, nn.Module]) -> Remedy:
    """The option in words, and as a line that sets it."""
    named, path = modules_by_name(models), ".".join(option.path)
    value = f"{option.value}".replace("e-0", "e-")
    owners = {id(_owner_of(named[name], option.path)): name for name in option.modules}
    kinds = {type(named[name]).__name__ for name in option.modules}
    model = next(iter(models.values()))
    if len(owners) > 1:
        kind = kinds.pop()
        text = f"set {path} of each {kind} to {value}"
        code = (
            "for module in model.modules():\n"
            f'    if type(module).__name__ == "{kind}":\n'
            f"        module.{path} = {value}"
        ) * (not kinds)
    elif id(_owner_of(model, option.path)) in owners:
        text, code = f"set {path} of the model to {value}", f"model.{path} = {value}"
    else:
        (name,) = owners.values()
        text = f"set {path} of {name} to {value}"
        code = f'model.get_submodule("{name}").{path} = {value}'
    return Remedy(text, code * (len(models) == 1))
