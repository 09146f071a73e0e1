"""The search for a module that avoids a float16 overflow in float32."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from .. import _C
from ..core.modules import (
    children_of,
    has_weights,
    is_dropout,
    is_linear,
    is_small_step,
    modules_in,
    named_modules,
    own_parameters_of,
    parameters_of,
)
from .headroom import OutputHistory
from .verdict import BadFrame, Verdict, in_order

# The search for casts in a module's code that undo running it in float32.


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
    """True if the code of a module, or within it, may make float16 or an exp.

    torch's own modules follow the dtype of their inputs. Of other code, the functions
    that names reach are read, as bytecode; a dtype that is only compared is no cast.

    Args:
        module: The module.

    Returns:
        False if no such code was found, True also where code cannot be read.
    """
    return any(_Code(each).may_leave() for each in modules_in(module))


class _Code:
    """The functions that a module's forward reaches."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._seen: set[types.CodeType] = set()

    def may_leave(self) -> bool:
        """True if a function may exceed the range of float16 or float32."""
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
    """True if a name of risk is more than compared."""
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


_LONG_HISTORY = 16  # frames: a norm that runs first in a block is among them


@dataclass(frozen=True)
class Float32Region:
    """The arguments of a `keep_in_fp32` that was not tried.

    Attributes:
        names: The qualified names of the modules to run in float32.
        until: Those of the modules up to which values stay in float32; empty if `names`
            ends with a module that makes them small.
        end: The name of the normalization that makes them small.
    """

    names: list[str]
    until: list[str] = field(default_factory=list)
    end: str = ""

    @property
    def code(self) -> str:
        """The call, where `model` is the watched model."""
        until = f", until={self.until}" if self.until else ""
        return f"overflow_fast.keep_in_fp32(model, {self.names}{until})"


def remedy_for(frames: Sequence[BadFrame], verdict: Verdict) -> Float32Region | None:
    """Finds the modules to run in float32 where float16 has certainly overflowed.

    A module that only multiplies and adds has a finite float32 result if its inputs are
    finite. The smallest module around it that ends with a normalization then computes
    in one dtype, and returns small values.

    Args:
        frames: The bad frames of a step.
        verdict: The verdict on them.

    Returns:
        The remedy, or None if the overflow is not certain, or no such module is known.
    """
    entry = verdict.first
    if entry is None or entry.kind != "output" or verdict.source != "module":
        return None
    if entry.dtype != "float16" or entry.num_nan:
        return None
    ordered = in_order(frames)
    model = ordered[0].watch.model
    if model is None or not _is_overflow(ordered[0]):
        return None
    return _Search(ordered, model).remedy()


def _is_overflow(first: BadFrame) -> bool:
    """True if only float16's range can have made the inf that a module returned."""
    module = first.watch.module_at(first.frame.module)
    if module is None or first.watch.prefix:
        return False
    is_child = first.watch.name_at(first.frame.module) != ""
    is_forward = first.frame.kind == _C.FrameKind.FORWARD
    return is_forward and is_child and (is_linear(module) or is_dropout(module))


def _bad_outputs(bad: BadFrame) -> list[tuple[int, bool]]:
    """Lists the sizes of bad outputs, and if they hold infs, as no norm returns."""
    infs = _C.POSITIVE_INF | _C.NEGATIVE_INF
    return [
        (entry.numel, bool(entry.nonfinite_kinds & infs))
        for entry in bad.bad_entries
        if entry.role == _C.Role.OUTPUT
    ]


def _is_origin(bad: BadFrame) -> bool:
    """True if a call with finite inputs and weights has a bad output."""
    return bool(_bad_outputs(bad)) and not bad.bad_inputs and not bad.bad_weights


class _Search:
    """A search for a normalization behind the first bad call."""

    def __init__(self, ordered: Sequence[BadFrame], model: nn.Module) -> None:
        first = ordered[0]
        self._watch = watch = first.watch
        self._name = watch.name_at(first.frame.module)
        self._modules = dict(named_modules(model))
        batch = first.frame.batch
        self._before = {
            watch.name_at(frame.module)
            for frame in watch.frames.before
            if frame.batch == batch and frame.kind == _C.FrameKind.FORWARD
        }
        self._is_history_long = len(watch.frames.before) >= _LONG_HISTORY or any(
            frame.opens_batch for frame in watch.frames.before
        )
        calls = [
            bad
            for bad in ordered
            if bad.watch is watch and bad.frame.batch == batch
            if bad.frame.kind == _C.FrameKind.FORWARD
        ]
        self._after = [watch.name_at(bad.frame.module) for bad in calls[1:]]
        self._returned = {
            watch.name_at(bad.frame.module): _bad_outputs(bad) for bad in calls
        }
        self._history = OutputHistory(watch)
        self._origins = [
            name
            for bad in calls
            if _is_origin(bad) and (name := watch.name_at(bad.frame.module))
            if not any(each.startswith(f"{name}.") for each in self._returned)
        ]

    def remedy(self) -> Float32Region | None:
        """Finds the smallest part of the model that can run in float32 by itself."""
        end = self._end_in_sequence()
        if end and self._is_whole([self._name, end]):
            return Float32Region([self._name], [end], end)
        around = self._name.rpartition(".")[0]
        while around:
            end = self._end_of(around)
            if end and self._is_whole([around]):
                return Float32Region([around], [], end)
            around = around.rpartition(".")[0]
        return None

    def _end_in_sequence(self) -> str:
        """Finds the normalization behind it in an `nn.Sequential`."""
        parent = self._name.rpartition(".")[0]
        is_sequence = type(self._modules[parent]) is nn.Sequential
        if not is_sequence or not self._is_called(parent):
            return ""
        children = list(self._children(parent))
        place = [name for name, _ in children].index(self._name)
        for name, module in children[place + 1 :]:
            if self._history.normalizes(name, module):
                return name
            if not is_small_step(module):
                break
        return ""

    def _end_of(self, around: str) -> str:
        """Finds the normalization that ends a module's call, or ""."""
        end = self._last_in(around)
        is_last = (
            end
            and self._runs_last(end, around)
            and self._history.returns(end, around, self._modules)
        )
        return end if is_last else ""

    def _last_in(self, around: str) -> str:
        """Finds the normalization behind which a module has no other weights, or ""."""
        children = [child for child in self._children(around) if has_weights(child[1])]
        if children and self._history.has_room_in(*children[-1]):
            children.pop()
        if not children or not self._is_called(around):
            return ""
        name, module = children[-1]
        return name if self._history.normalizes(name, module) else self._last_in(name)

    def _is_called(self, name: str) -> bool:
        return name in self._history or name in self._after

    def _is_whole(self, names: Sequence[str]) -> bool:
        """True if modules stay in float32, and nothing else needs to.

        Another call that made a bad value of finite ones overflows again. A layer
        elsewhere that shares a weight, as a tied head does, runs in float32, too, and
        its outputs are cast back: they must have been far from overflowing.
        """
        inside = {each for name in names for each in modules_in(self._modules[name])}
        weights = {id(p) for module in inside for p in parameters_of(module)}
        large = {id(p) for p in parameters_of(self._modules[self._name])}
        sharing = {
            name: set(map(id, own_parameters_of(module).values()))
            for name, module in self._modules.items()
            if module not in inside and not isinstance(module, nn.Embedding)
        }
        is_shared = any(
            shared & weights
            and (
                shared & large
                or not self._history.has_room_in(name, self._modules[name])
            )
            for name, shared in sharing.items()
        )
        return (
            not is_shared
            and all(self._modules[name] in inside for name in self._origins)
            and not any(may_leave_float32(self._modules[name]) for name in names)
        )

    def _runs_last(self, end: str, around: str) -> bool:
        """True if a normalization may run last, by the calls that were seen."""
        is_known = end in self._after or self._is_history_long
        if end in self._before or not is_known:
            return False
        begin = self._after.index(end) if end in self._after else len(self._after)
        behind = [name for name in self._after[begin:] if name.startswith(f"{around}.")]
        sizes = {size for name in behind for size, _ in self._returned[name]}
        return all(
            size in sizes and not is_inf
            for size, is_inf in self._returned.get(around, [])
        ) and not any(self._computes(name) for name in behind[1:])

    def _computes(self, name: str) -> bool:
        """True if a module with weights of its own may make large values."""
        module = self._modules[name]
        has_own = bool(own_parameters_of(module))
        return has_own and not self._history.has_room_in(name, module)

    def _children(self, name: str) -> Iterator[tuple[str, nn.Module]]:
        module = self._modules[name]
        for key, child in children_of(module).items():
            yield f"{name}.{key}".lstrip("."), child
