"""Private APIs that tell what runs: a trace, a transform, a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .registry import internal


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


@internal(
    "torch._C._current_graph_task_id",
    "whether backward runs, which computes checkpointed forwards again",
    "Checkpointed forwards count as forwards of their own",
    -1,
)
def graph_task_id() -> int:
    """The number of the backward that runs in this thread, or -1."""
    return torch._C._current_graph_task_id()


@internal(
    "torch.autograd.Variable._execution_engine.queue_callback",
    "the end of a backward, which has no public hook",
    "Checkpointed forwards are judged one step late",
)
def call_after_backward(callback: Callable[[], None]) -> None:
    """Has the backward that runs call a function when it ends."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)
