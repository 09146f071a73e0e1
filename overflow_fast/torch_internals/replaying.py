"""Private APIs of what a replay looks at: modes, hooks, operations, threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import torch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from .registry import INTERNALS, Internal, direct, internal

_overrides: Any = torch.overrides
_torch: Any = torch._C
_NO_REPLAY = "Steps cannot be replayed"

autograd_node: Callable[[], Any] = direct(  # the one that runs in this thread, or None
    "torch._C._current_autograd_node",
    "which forward operation's derivative runs",
    "Operations in backward are not named",
)
# The number that autograd gives the next node of this thread.
next_sequence: Callable[[], int] = direct(
    "torch._C._autograd._get_sequence_nr",
    "autograd numbers its nodes by the forward operation that made them",
    "Operations in backward are not named",
    0,
)
# Switches `__torch_function__` off while it is entered.
without_torch_function: Callable[[], AbstractContextManager[None]] = direct(
    "torch._C.DisableTorchFunction",
    "what a trace computes of operations is none of the program's torch calls",
    "Remedies of torch calls may not be found",
    contextlib.nullcontext(),
)
for _name, _api, _reason in (
    (
        "TorchDispatchMode",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "the operations that a step runs, one by one",
    ),
    (
        "without_function_modes",
        "torch.overrides._pop_mode",
        "no TorchFunctionMode of the user's may see a replay",
    ),
    (
        "without_operator_modes",
        "torch._C._pop_torch_dispatch_stack",
        "no TorchDispatchMode of the user's may see a replay",
    ),
    (
        "without_saving_hooks",
        "torch._C._autograd._pop_saved_tensors_default_hooks",
        "hooks on what autograd saves may move it to another device",
    ),
    (
        "attention_by_definition",
        "torch.ops.aten._scaled_dot_product_attention_math",
        "fused attention, computed again in float64",
    ),
):
    INTERNALS[_name] = Internal(_api, _reason, _NO_REPLAY)


def with_torch_function() -> AbstractContextManager[None]:
    """Switches `__torch_function__` on while it is entered."""
    found: AbstractContextManager[None] = _torch._EnableTorchFunction()
    return found


@internal(
    "torch.autograd.has_torch_function",
    "autograd takes the function mode off that is to see calls within backward",
    "Calls within backward, as of checkpoints, get no remedy",
)
def _with_modes(function: Any) -> Any:
    space = {**function.__globals__, "has_torch_function": lambda tensors: False}
    copy = FunctionType(function.__code__, space, function.__name__)
    copy.__defaults__, copy.__kwdefaults__ = (
        function.__defaults__,
        function.__kwdefaults__,
    )
    return copy


def with_function_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of `torch.autograd.backward` or `grad` that leaves function modes on."""
    found: Callable[..., Any] | None = _with_modes(function)
    return function if found is None else found


def active_modes() -> list[str]:
    """The names of the modes and saving hooks that the user has switched on."""
    functions = _overrides._get_current_function_mode_stack()
    operators = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    names = [type(m).__name__ for m in functions if not isinstance(m, DeviceContext)]
    names += [type(mode).__name__ for mode in operators]
    return names + ["saved tensor hooks"] * (_top_saving_hooks() is not None)


@contextlib.contextmanager
def without_function_modes() -> Iterator[None]:
    """Takes all function modes off, but the one that sets the default device."""
    modes = [
        _overrides._pop_mode() for _ in range(_overrides._len_torch_function_stack())
    ]
    kept = [mode for mode in modes if isinstance(mode, DeviceContext)]
    for mode in reversed(kept):
        _overrides._push_mode(mode)
    try:
        yield
    finally:
        for _ in kept:
            _overrides._pop_mode()
        for mode in reversed(modes):
            _overrides._push_mode(mode)


@contextlib.contextmanager
def without_operator_modes() -> Iterator[None]:
    """Takes all dispatch modes off; torch's own way imports all of torch.fx."""
    count = int(_torch._len_torch_dispatch_stack())
    modes = [_torch._pop_torch_dispatch_stack() for _ in range(count)]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _torch._push_on_torch_dispatch_stack(mode)


@contextlib.contextmanager
def without_saving_hooks() -> Iterator[None]:
    """Takes off hooks on what autograd saves."""
    hooks = []
    while (top := _top_saving_hooks()) is not None:
        hooks.append(top)
        _torch._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            _torch._autograd._push_saved_tensors_default_hooks(pack, unpack)


def _top_saving_hooks() -> Any:
    return _torch._autograd._top_saved_tensors_default_hooks(True)


@internal(
    "torch.autograd.graph.Node._sequence_nr",
    "which forward operation a node of autograd belongs to",
    "Operations in backward are not named",
    -1,
)
def sequence_of(node: Any) -> int:
    """The number of a node of autograd, by the order of forward operations, or -1."""
    return int(node._sequence_nr())


def attention_by_definition(*arguments: Any, **named: Any) -> Any:
    """Attention without a fused kernel; see scaled_dot_product_attention."""
    return torch.ops.aten._scaled_dot_product_attention_math(*arguments, **named)


def schema_names(function: Any) -> list[str]:
    """The names of an operator's arguments."""
    return [argument.name for argument in function._schema.arguments]


def schema_defaults(function: Any) -> dict[str, Any]:
    """The values of an operator's arguments that are not given."""
    arguments = function._schema.arguments
    return {e.name: e.default_value for e in arguments if e.has_default_value()}


def schema_of(function: Any) -> Any:
    """The schema of an operator, or None."""
    return getattr(function, "_schema", None)
