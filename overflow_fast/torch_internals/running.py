"""Private APIs of what runs: traces, transforms, a backward, modes, operations."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from .registry import direct, internal, stack


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
    "torch._C._is_fwd_grad_enabled",
    "whether a forward without autograd is that of an autograd function",
    "Forwards within a reentrant checkpoint count as evaluations",
    False,
)
def is_in_function() -> bool:
    """True within the forward of an autograd function, such as a reentrant checkpoint.

    torch turns off forward-mode gradients there, too, which `no_grad()` leaves on.
    """
    is_off = not (torch.is_grad_enabled() or torch._C._is_fwd_grad_enabled())
    return is_off and not torch.is_inference_mode_enabled()


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
def running_modules(
    frame: FrameType | None = None,
) -> list[tuple[int, nn.Module]] | None:
    """The calls of modules that run in this thread, the innermost first.

    Args:
        frame: The innermost frame of another thread, to look at that.

    Returns:
        An identity of each, equal as long as it runs, and its module; None where torch
        has changed.
    """
    code = nn.Module._wrapped_call_impl.__code__
    calls = [each for each in stack(frame) if each.f_code is code]
    return [(id(each), each.f_locals["self"]) for each in calls]


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
