"""The torch calls of a replay, as the program makes them: what made which value.

A mode sees each call of a torch function before autograd does, in its own thread and in
autograd's while they work for it. A call of `F.cross_entropy` is one call; the
operations that it consists of know it as their `torch_call`. No value is read, so that
no device is waited for, and tensors are referred to weakly.

1. A call begins: its arguments become `Value`s, which know the call that made them.
2. It runs, or what a change puts in its place (`ChangedCalls`), as the running call of
   its thread.
3. What it returned, or wrote to, are new `Value`s.

State: `calls`, and of each tensor its `Value` now. One is asked as it was in replays
with changes, where no operations are traced: it has a version, and a copy if need be.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import _C
from ..base.source_files import is_of_program, is_own
from ..base.tensors import PLAIN
from ..base.torch_ops import SWAPPED, has, op_of, plain_name
from ..torch_internals.replaying import with_function_modes
from .users_lines import BEGINS, Site, Sites

# Other names of the parameters that patterns read.
SAME = {"self": "input", "x": "input", "ord": "p", "axis": "dim", "_stacklevel": ""}
BACKWARD = (torch.autograd.backward, torch.Tensor.backward, torch.autograd.grad)
# From a torch call out to the program's own line; of a deeper call no line is known.
_MOST_SITES = 8
_MOST_BEFORE = 8  # calls before a failing one that may have made what it fails of
# A call's name and, of each of its sites, file, function, first line, instruction: data
# that is the same on each rank.
Key = tuple[str, tuple[tuple[str, str, int, int], ...]]


class Value:
    """A tensor as it was at a call.

    Attributes:
        call: The call that made it, or None.
        place: Its place among the call's results.
        version: How often it had been written to.
    """

    def __init__(
        self, tensor: torch.Tensor, call: TorchCall | None, place: int
    ) -> None:
        self.call, self.place = call, place
        self.version = _version_of(tensor)
        self.dtype, self.shape, self.device = tensor.dtype, tensor.shape, tensor.device
        self.requires_grad = tensor.requires_grad
        self._weak = weakref.ref(tensor)
        self._held: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor, if anything holds it still."""
        return self._weak() if self._held is None else self._held

    def is_of(self, tensor: torch.Tensor) -> bool:
        """True if it is of this tensor, and no other had its `id` before."""
        return self._weak() is tensor

    @property
    def is_as_it_was(self) -> bool:
        """False if it is gone, or was written to since."""
        tensor = self.tensor
        return tensor is not None and _version_of(tensor) == self.version

    def hold(self) -> int:
        """Keeps it alive; returns how many bytes that are."""
        if self._held is not None or (tensor := self._weak()) is None:
            return 0
        self._held = tensor
        return tensor.nbytes

    def keep_copy(self) -> None:
        """Keeps a copy of it, for it is about to be written to."""
        tensor = self.tensor
        self._held = None if tensor is None else tensor.clone()
        self.version = 0 if self._held is None else _version_of(self._held)

    def release(self) -> None:
        """Keeps it alive no longer."""
        self._held = None


@dataclass(eq=False)
class TorchCall:
    """A call of a torch function.

    Attributes:
        name: Its name, one for all ways to call what is one operation.
        func: The function.
        args: Its positional arguments, with a `Value` for each tensor.
        kwargs: Its keyword arguments, likewise.
        sites: The lines that led to it, from the innermost outside of torch's own
            plumbing out to the first one of the program.
        is_in_place: Whether it writes to an argument.
        results: What it returned, or wrote to.
        variables: The variables that hold its tensor, of a sum or a product with a
            number: `2 * x` and `x * 2` are the same call.
    """

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sites: Sites
    is_in_place: bool = False
    results: list[Value] = field(default_factory=list)
    variables: set[str] = field(default_factory=set)

    @functools.cached_property
    def key(self) -> Key:
        """The key that it has in common with the other calls of its expression."""
        return self.name, tuple(site.key for site in self.sites)

    @property
    def plain_name(self) -> str:
        """Its name as if its operands stood in their order."""
        return self.name[1:] if self.name in SWAPPED else self.name

    @functools.cached_property
    def operands(self) -> list[Any]:
        """Its arguments, in the order of its operation's parameters."""
        name = self.plain_name
        named = {SAME.get(k, k): v for k, v in self.kwargs.items()}
        found = list(self.args)
        if len(found) > 2 and name in ("sum", "mean"):  # x.sum(0, 1)
            is_more = all(type(each) is int for each in found[1:])
            found[1:] = [tuple(found[1:])] if is_more else found[1:]
        parameters = op_of(name).parameters or ("input",)
        for parameter in parameters[len(found) :]:
            found.append(named.get(parameter))
        return found[::-1] if self.name in SWAPPED else found

    @functools.cached_property
    def inputs(self) -> list[Value]:
        """The tensors that it was given."""
        return [e for e in leaves((self.args, self.kwargs)) if isinstance(e, Value)]

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest dtype of the numbers that it computes with."""
        dtypes = (value.dtype for value in (*self.inputs, *self.results))
        found = [dtype for dtype in dtypes if dtype.is_floating_point]
        least = {dtype: torch.finfo(dtype).tiny for dtype in found or [torch.float32]}
        return max(least, key=least.__getitem__)


class TorchCalls(TorchFunctionMode):
    """Records torch calls while it is entered.

    Attributes:
        calls: The calls, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[TorchCall] = []
        self._values: dict[int, Value] = {}  # by the ids of their tensors

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if func in BACKWARD:
            return self._backward(name, func, args, kwargs)
        return self.on_call(name, func, args, kwargs)

    def on_call(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a call of a torch function of this name, and records it."""
        if name == "__get__":  # such as of x.T
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if has(name, "tells"):  # it makes no tensor
            return func(*args, **kwargs)
        with _C.OwnCode(True):
            is_own = _are_plain((args, kwargs))
        with _C.OwnCode(is_own):
            frames = _frames(sys._getframe(1))
            try:  # it raises of a tensor of a kind that has no version
                call = self._begun(name, func, args, kwargs, frames) if frames else None
            except RuntimeError:
                call = None
        if call is None:  # it is none of the program's
            return func(*args, **kwargs)
        result = self.run(call, args, kwargs)
        with _C.OwnCode(True):
            is_own = is_own and _are_plain(result)
            with _C.OwnCode(is_own):
                self._end(call, args, kwargs, result)
        return result

    def run(self, call: TorchCall, args: Any, kwargs: Any) -> Any:
        """Runs a call, which is the one that runs in this thread meanwhile."""
        outer = running_call()
        _running.call = call
        try:
            return call.func(*args, **kwargs)
        finally:
            _running.call = outer

    def _backward(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs backward with the mode on, which torch took off: for checkpoints."""
        if func is torch.Tensor.backward:
            func, kwargs = torch.autograd.backward, {**kwargs}
            kwargs["grad_tensors"] = kwargs.pop("gradient", None)
        frames = _frames(sys._getframe(2)) if func is torch.autograd.grad else []
        call = self._begun(name, func, args, kwargs, frames) if frames else None
        with self:
            result = with_function_modes(func)(*args, **kwargs)
        if call is not None:
            self._end(call, args, kwargs, result)
        return result

    def _begun(
        self, name: str, func: Any, args: Any, kwargs: Any, frames: list[FrameType]
    ) -> TorchCall:
        is_in_place = name == "__setitem__" or kwargs.get("out") is not None
        if name.endswith("_") and not name.endswith("__"):
            name, is_in_place = name.rstrip("_"), True
        name = plain_name(name)
        given, named = _mapped((args, kwargs), self._value)
        sites = tuple(map(Site.of, frames))
        call = TorchCall(name, func, given, named, sites, is_in_place)
        if has(name, "commutes") and not isinstance(args[-1], torch.Tensor):
            variables = frames[0].f_locals.items()
            call.variables = {key for key, value in variables if value is args[0]}
        self.calls.append(call)
        return call

    def _value(self, tensor: torch.Tensor) -> Value:
        value = self._values.get(id(tensor))
        is_known = value is not None and value.is_of(tensor)
        if value is None or not is_known or value.version != _version_of(tensor):
            value = self._values[id(tensor)] = Value(tensor, None, 0)
        return value

    def _end(self, call: TorchCall, args: Any, kwargs: Any, result: Any) -> None:
        if call.is_in_place:  # its Value was that of its input
            result = args[:1] if kwargs.get("out") is None else kwargs["out"]
        for place, each in enumerate(tensors_among(result)):
            value = self._values[id(each)] = Value(each, call, place)
            call.results.append(value)


def calls_before(call: TorchCall) -> list[TorchCall]:
    """The calls that made its inputs, and those before them."""
    found: list[TorchCall] = []
    waiting = [value.call for value in call.inputs]
    while waiting and len(found) < _MOST_BEFORE:
        each = waiting.pop(0)
        if each is not None and each not in found:
            found.append(each)
            waiting += [value.call for value in each.inputs]
    return found


def leaves(value: Any) -> Iterator[Any]:
    """Yields what tuples, lists and dicts of a call hold."""
    if isinstance(value, (tuple, list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)
    else:
        yield value


def tensors_among(value: Any) -> list[torch.Tensor]:
    """Lists the tensors among the arguments or results of a call."""
    return [each for each in leaves(value) if isinstance(each, torch.Tensor)]


_LEAVES = {*PLAIN, torch.dtype, torch.device, int, float, bool, str, type(None)}


def _are_plain(value: Any) -> bool:
    """True for tensors of torch's own classes: of others code may be the program's."""
    kind = type(value)
    if kind in (tuple, list, dict, torch.Size):
        held = value.values() if kind is dict else value
        return _LEAVES.issuperset(map(type, held)) or all(map(_are_plain, held))
    return kind in PLAIN or not issubclass(kind, (torch.Tensor, tuple, list, dict))


def _mapped(value: Any, change: Callable[[torch.Tensor], Value]) -> Any:
    """The same with a `Value` for each tensor; pytree's own takes ten times as long."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(
            [change(e) if type(e) in PLAIN else _mapped(e, change) for e in value]
        )
    if kind is dict:
        return {key: _mapped(each, change) for key, each in value.items()}
    return change(value) if isinstance(value, torch.Tensor) else value


_running = threading.local()


def running_call() -> TorchCall | None:
    """The call that runs in this thread, or None."""
    return getattr(_running, "call", None)


def _version_of(tensor: torch.Tensor) -> int:
    return _C.version_of(tensor) or 0


_HERE, _TORCH = Path(__file__).parent, torch.__path__[0]
_MODES = ("torch_calls", "wider", "remedies/call_patch", "remedies/true_step")
# The files of the modes and of torch that stand between a call and who made it.
_PLUMBING = {str(_HERE / f"{name}.py") for name in _MODES} | {
    f"{_TORCH}/{name}.py"
    for name in (
        *("overrides", "_tensor", "functional", "nn/functional", "_VF"),
        *("_jit_internal", "nn/modules/module", "utils/_contextlib", "_compile"),
        *("utils/checkpoint", "utils/_device", "_dynamo/eval_frame"),
    )
}


def _frames(frame: FrameType | None) -> list[FrameType]:
    """From the innermost line out to the first one of the program's own.

    None for a call of this package's, as of its hooks.
    """
    found: list[FrameType] = []
    while frame is not None and len(found) < _MOST_SITES:
        code, file = frame.f_code, frame.f_code.co_filename
        if file not in _PLUMBING and is_own(file):
            if not found or code.co_name in BEGINS:
                break
        elif file not in _PLUMBING and code.co_name != "__torch_function__":
            found.append(frame)
            if is_of_program(file):
                break
        frame = frame.f_back
    return found
