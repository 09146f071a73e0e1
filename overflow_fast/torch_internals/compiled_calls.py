"""Calls of compiled code: known, and run as the function that it was made of."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from .compiler import is_compiled_call
from .registry import internal


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
