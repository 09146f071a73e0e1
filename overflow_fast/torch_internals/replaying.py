"""Private APIs of what a replay looks at: modes, hooks, operations, threads."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from .compiler import is_compiled_call
from .registry import INTERNALS, Internal, direct, internal

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


# The types of devices with an autocast, as far as torch names them itself.
_TYPES = "cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "ipu", "xla"


def autocast_devices() -> list[str]:
    """Lists the types of devices for which this torch has an autocast."""
    own = torch.accelerator.current_accelerator()  # it may have any name
    types = dict.fromkeys((*_TYPES, *([own.type] if own else [])))
    return [each for each in types if torch.amp.is_autocast_available(each)]


# Autocast keeps its casts of weights for all threads, by weight, until a region ends.


class _Stop(Exception):
    pass


class _FirstOperation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Ends at the first operation, and keeps which one that was."""

    found: Any = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else its first operation imports torch._dynamo

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.found = function
        raise _Stop


def _is_cached(weights: Iterable[torch.Tensor], device: str) -> bool:
    """True if autocast has a cast of a weight: it needs none before a product."""
    first = _FirstOperation()  # type: ignore[no-untyped-call]
    region = torch.autocast(device, cache_enabled=True)
    with region, torch.enable_grad(), first:
        for each in (w for w in weights if w.device.type == device):
            with contextlib.suppress(_Stop):
                torch.mm(each, each)
            if first.found is torch.ops.aten.mm.default:
                return True
    return False


def _reads_casts_later(weights: Iterable[torch.Tensor]) -> bool:
    """True if the program may read again what autocast caches, or has cached."""
    kinds = autocast_devices()
    if any(map(torch.is_autocast_enabled, kinds)):
        return True
    is_within = torch.autocast_increment_nesting() > 1
    try:
        own = [w for w in weights if type(w) in _PLAIN and w.dtype == torch.float32]
        own = [w for w in own if w.requires_grad and w.is_leaf]
        devices = {w.device.type for w in own}.intersection(kinds)
        return is_within or any(_is_cached(own, device) for device in devices)
    finally:
        torch.autocast_decrement_nesting()


_PLAIN = torch.Tensor, nn.Parameter


@contextlib.contextmanager
def without_cached_casts(weights: Iterable[torch.Tensor]) -> Iterator[None]:
    """Neither reads nor drops what autocast has cached for the program.

    Those casts may be of weights as they were. Where the program has none and is in no
    region, code that runs within caches its own, and drops them as the program does.

    Args:
        weights: The weights of what runs within.
    """
    if not _reads_casts_later(weights):
        yield
        return
    caches = torch.is_autocast_cache_enabled()
    torch.autocast_increment_nesting()  # at 0 a region that ends drops all casts
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(caches)
        torch.autocast_decrement_nesting()


# Code that was compiled.


def is_in_compiled_call() -> bool:
    """Returns True within a call of what was compiled, also where it runs eagerly.

    It is asked in each operation: a loop takes less time than `stack()` does.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_compiled_call(frame):
            return True
        frame = frame.f_back
    return False


@internal(
    "torch.nn.Module._compiled_call_impl",
    "module.compile() compiles a call with its hooks, which then do not run",
    "Modules that are compiled in place are not recorded",
)
def own_compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """The code of `module.compile()`, which runs in place of the module's call."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Replaces what runs in place of the module's call."""
    module._compiled_call_impl = call


# What was compiled calls the function that it was made of, and compiles nothing, where
# this thread's context of a trace says that a kernel runs for its shapes.


@functools.cache
def _kernel_context() -> Any:
    class KernelContext(torch._guards.TracingContext):
        """A context that only the wrapper of what was compiled sees."""

        in_kernel_invocation = True

        def __init__(self) -> None:
            super().__init__(None)
            self.fake_mode: Any = self

        def __bool__(self) -> bool:
            return is_compiled_call(sys._getframe(1))

    return KernelContext()


@internal(
    "torch._guards.TracingContext",
    "torch.compiler.set_stance() is of the process: other threads would run eagerly",
    "Replays of compiled models run compiled code, whose operations are not seen",
)
def _begin_context() -> list[Any]:
    local = torch._guards._TLS
    before = getattr(local, "tracing_context", None)
    local.tracing_context = _kernel_context()
    return [before]


@contextlib.contextmanager
def uncompiled_calls() -> Iterator[None]:
    """Calls of what was compiled run eagerly in this thread, and in no other.

    So do those within a backward, all of which runs in this thread meanwhile.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    before = _begin_context()
    # A call with fullgraph=True that compiles nothing leaves this on, if it is wanted.
    raises_on_nested = getattr(
        torch._C._dynamo.eval_frame,
        "set_fullgraph_error_on_nested_compile",
        lambda _: False,  # older torch
    )
    did_raise = raises_on_nested(False)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        raises_on_nested(did_raise)
        if before is not None:
            torch._guards._TLS.tracing_context = before[0]


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
