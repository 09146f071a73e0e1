"""The search for casts in a module's code that undo running it in float32."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterable, Iterator

import torch
from torch import nn

# To float16, to autocast's dtype, or beyond the range of float32.
_NAMES = {
    *("float16", "half", "HalfTensor", "autocast", "custom_fwd"),
    *("exp", "exp_", "expm1", "expm1_", "exp2", "exp2_", "cosh", "sinh"),
}
_TEXTS = {"float16", "half", "torch.float16", "fp16", "torch.HalfTensor"}
_HALVES = (torch.float16, torch.complex32)
_LOADS = ("LOAD_", "BUILD_", "EXTENDED_ARG", "CACHE", "NOP", "PUSH_NULL")
_COMPARES = ("COMPARE_OP", "CONTAINS_OP", "IS_OP")
_MAX_FUNCTIONS = 400


def may_leave_float32(module: nn.Module) -> bool:
    """Returns whether the code of a module, or within it, may make float16 or an exp.

    torch's own modules follow the dtype of their inputs. Of other code, the functions
    that names reach are read, as bytecode; a dtype that is only compared is no cast.

    Args:
        module: The module.

    Returns:
        False if no such code was found, True also where code cannot be read.
    """
    return any(_Code(each).may_leave() for each in module.modules())


class _Code:
    """The functions that a module's forward reaches."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._seen: set[types.CodeType] = set()

    def may_leave(self) -> bool:
        """Returns whether a function may exceed the range of float16 or float32."""
        module = self._module
        if "forward" not in module.__dict__ and _is_torchs(type(module).forward):
            return False
        values = [value for value in module.__dict__.values() if _is_half(value)]
        forward = getattr(module.forward, "__func__", module.forward)
        return bool(values) or self._is_risky(forward)

    def _is_risky(self, function: object) -> bool:
        if not isinstance(function, types.FunctionType):
            return True
        if _is_torchs(function) or function.__code__ in self._seen:
            return False
        self._seen.add(function.__code__)
        held = [
            *(function.__defaults__ or ()),
            *(function.__kwdefaults__ or {}).values(),
        ]
        held += list(_cells(function))
        if any(map(_is_half, held)) or len(self._seen) > _MAX_FUNCTIONS:
            return True
        codes = list(_codes(function.__code__))
        if any(_makes_risk(code, function.__globals__) for code in codes):
            return True
        names = {name for code in codes for name in code.co_names}
        called = [*held, *self._named(names, function.__globals__)]
        called += [getattr(function, "__wrapped__", None)]
        return any(
            self._is_risky(each)
            for each in called
            if isinstance(each, types.FunctionType)
        )

    def _named(self, names: set[str], scope: dict[str, object]) -> Iterator[object]:
        """Yields the values of names: globals, attributes of modules, and methods."""
        found = [scope[name] for name in names if name in scope]
        places = [each for each in found if isinstance(each, types.ModuleType)]
        yield from found
        for place in places:
            if not _is_torchs(place):
                yield from (vars(place)[name] for name in names if name in vars(place))
        for base in type(self._module).__mro__:
            for name in names & vars(base).keys():
                value = vars(base)[name]
                value = value.fget if isinstance(value, property) else value
                yield getattr(value, "__func__", value)


def _makes_risk(code: types.CodeType, scope: dict[str, object]) -> bool:
    """Returns whether a name of risk is more than compared."""
    instructions = list(dis.get_instructions(code))
    for place, instruction in enumerate(instructions):
        value = instruction.argval
        is_text = isinstance(value, str) and "LOAD_CONST" in instruction.opname
        is_name = isinstance(value, str) and not is_text
        is_risk = (is_text and value in _TEXTS) or (
            is_name and (value in _NAMES or _is_half(scope.get(value)))
        )
        if is_risk and not _is_compared(instructions[place + 1 :]):
            return True
    return False


def _is_compared(following: Iterable[dis.Instruction]) -> bool:
    for instruction in following:
        if not instruction.opname.startswith(_LOADS):
            return instruction.opname in _COMPARES
    return False


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


def _cells(function: types.FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty
            continue


def _is_half(value: object) -> bool:
    return isinstance(value, torch.dtype) and value in _HALVES


def _is_torchs(value: object) -> bool:
    name = getattr(value, "__module__", None) or getattr(value, "__name__", "")
    return str(name).split(".")[0] == "torch"
