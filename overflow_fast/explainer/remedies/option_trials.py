"""Options of a model, in place of what an installed file gives to a call.

Nobody edits such a file. Where the number or the flag is an attribute of a module of
the model, or of its `config`, it is set there, which is tried as it is written:
1. A method that is on the way to the call reads the attribute.
2. Its name has the argument's in it, and its value is what the call was given.
Both may be so by chance: the trial tells whether the call was given that one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn

from ...base.source_files import is_of_program
from ...base.tree import layout
from ...guard.report.remedy import Remedy
from ..named_tensors import modules_by_name
from ..replayer import Patch
from ..torch_calls import TorchCall, calls_before
from .failure import Failure
from .rules import named_numbers
from .trials import Attempts, Trial, Trials

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
        codes = [site.code for site in call.sites]
        for word, given, value in _others_of(call):
            for path, names in _options(word, given, codes, models).items():
                option = OtherOption(tuple(names), path, value)
                yield Trial(_remedy_of(option, models), option, settles=True)


def _others_of(call: TorchCall) -> Iterator[tuple[str, Any, Any]]:
    """Yields a word of an option's name, its value in a call, and another value."""
    for key, value in _FLAGS.get(call.name, {}).items():
        if call.kwargs.get(key) is not value:
            yield key, not value, value
    least = named_numbers(call.dtype)["EPS"]
    for given in (*call.args, *call.kwargs.values()):
        if type(given) in (int, float) and 0 <= given < least:
            yield "eps", given, max(least, _USUAL)


def _options(
    word: str, given: Any, codes: Sequence[CodeType], models: Mapping[str, nn.Module]
) -> dict[tuple[str, ...], list[str]]:
    """The options that codes read, by their paths, each with the modules that have it.

    Args:
        word: What their names have in them.
        given: Their value.
        codes: The codes, of which methods of the modules are some.
        models: The models.
    """
    found = dict[tuple[str, ...], list[str]]()
    for name, module in modules_by_name(models).items():
        own = [code for code in codes if _has_code(type(module), code)]
        read = dict.fromkeys(each for code in own for each in code.co_names)
        for key in (each for each in read if word in each):
            for path in ((key,), ("config", key)):
                value = _owner_of(module, path).get(key)
                if type(value) is type(given) and value == given:
                    found.setdefault(path, []).append(name)
    return found


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
