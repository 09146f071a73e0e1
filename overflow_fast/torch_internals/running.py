"""Private APIs of what runs: traces, transforms, a backward, modes, operations."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from .registry import INTERNALS, Internal, direct, internal, stack


@internal(
    "torch._C._get_tracing_state",
    "torch.jit.trace records what hooks do",
    "Hooks act inside torch.jit.trace",
    False,
)
def is_jit_tracing() -> bool:
    """Returns True inside torch.jit.trace."""
    return torch._C._get_tracing_state() is not None


@internal(
    "torch._C._functorch.peek_interpreter_stack",
    "buffers inside a transform are no tensors of the program",
    "Restore points are made inside torch.func transforms",
    False,
)
def is_transforming() -> bool:
    """Returns True inside a torch.func transform."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_recorded() -> bool:
    """Returns True where a program is traced, exported or transformed by torch.func."""
    return is_jit_tracing() or is_transforming() or torch.compiler.is_exporting()


# The number of the backward that runs in this thread, or -1.
graph_task_id: Callable[[], int] = direct(
    "torch._C._current_graph_task_id",
    "whether backward runs, which computes checkpointed forwards again",
    "Checkpointed forwards count as forwards of their own",
    -1,
)


@internal(
    "torch.autograd.Variable._execution_engine.queue_callback",
    "the end of a backward, which has no public hook",
    "Checkpointed forwards are judged one step late",
)
def call_after_backward(callback: Callable[[], None]) -> None:
    """Calls a function when the backward that runs ends."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


@internal(
    "torch.nn.Module._wrapped_call_impl",
    "which call of a watched module is the outermost, where the root's does not run",
    "Each module that is called on its own counts as a step",
)
def running_modules() -> list[tuple[int, nn.Module]] | None:
    """The calls of modules that run in this thread, the innermost first.

    Returns:
        An identity of each, equal as long as it runs, and its module; None where torch
        has changed.
    """
    code = nn.Module._wrapped_call_impl.__code__
    calls = [frame for frame in stack() if frame.f_code is code]
    return [(id(frame), frame.f_locals["self"]) for frame in calls]


@internal(
    "torch.nn.utils.stateless._functional_call",
    "tensors that stand in for a model's weights are gone when its step is judged",
    "A value may be laid at code that only read it from such a tensor",
    False,
)
def is_functional_call() -> bool:
    """Returns True inside torch.func.functional_call.

    It is asked in each forward: a loop takes less time than `stack()` does.
    """
    code = nn.utils.stateless._functional_call.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


@internal(
    "torch.fx.Interpreter.run_node",
    "which tensors a graph that is traced returns as they are",
    "Gradients of what compiled code returns are listed for an inner module",
    (),
)
def running_nodes() -> list[Any]:
    """The nodes that interpreters of graphs run in this thread."""
    code = fx.Interpreter.run_node.__code__
    return [frame.f_locals["n"] for frame in stack() if frame.f_code is code]


@internal(
    "torch._C._stash_obj_in_tls",
    "autograd's threads that work for a replay run its edited lines, others do not",
    "Remedies in lines that backward runs in threads of its own are not tried",
)
def _stash(key: str, value: object) -> None:
    if value is not None:
        torch._C._stash_obj_in_tls(key, value)
    elif torch._C._is_key_in_tls(key):
        # A thread that ends with an object there may hang: it needs the interpreter.
        remove = getattr(torch._C, "_remove_obj_from_tls", None)
        if remove is None:
            torch._C._stash_obj_in_tls(key, None)
        else:
            remove(key)


@internal(
    "torch._C._get_obj_in_tls",
    "autograd's threads that work for a replay run its edited lines, others do not",
    "Remedies in lines that backward runs in threads of its own are not tried",
)
def _stashed(key: str) -> Any:
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


_own_objects = threading.local()


def set_inherited(key: str, value: object) -> None:
    """Sets an object of this thread; autograd's have it while they work for this one.

    Args:
        key: Its name.
        value: The object; None takes it away.
    """
    setattr(_own_objects, key, value)
    _stash(key, value)


def inherited(key: str) -> Any:
    """The object that was set in the thread that this one works for, or None."""
    own = getattr(_own_objects, key, None)
    return _stashed(key) if own is None else own


# For replays: modes and hooks taken off, operations, the node that runs.


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
# Switches dispatch modes off while it is entered.
no_dispatch: Callable[[], AbstractContextManager[None]] = direct(
    "torch._C._DisableTorchDispatch",
    "scans within a mode must not be seen by it",
    _NO_REPLAY,
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


def schema_of(function: Any) -> Any:
    """The schema of an operator, or None."""
    return getattr(function, "_schema", None)
