"""Hooks under `torch.compile`.

Dynamo traces `trace_call` in place of `_C.run_hook`. Both walk a call alike; this one
only lists the frame's entries, and leaves the rest to `traced_graph`.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from .. import _C
from ..core.names import unwrapped_class
from ..core.tensors import traced_loss_in
from ..torch_internals.compiler import (
    guard_on_hooks,
    has_compiled,
    keep_in_order,
    recompile_all,
)
from .traced_graph import emit, emit_call, emit_hidden, watch_gradient
from .traced_place import EXPORT, step_in, step_out
from .traced_text import FORWARD, NAME, OUTPUT, RECORDED, Header, make_item
from .traced_walk import (
    CALLS,
    GRADIENTS,
    LOSS,
    ROOT,
    Entries,
    deep_name,
    opaque_name,
    walk,
    wraps_of,
)

_log = logging.getLogger("overflow_fast")
_AFTER = "after_root"
_METHODS = {"before_root": "before", "root_ended": "ended"}  # of CompiledStepBoundary


@functools.cache
def register() -> None:
    """Registers the hooks with dynamo. Imports dynamo. Never raises.

    Where torch has changed, a line is logged, and dynamo leaves hooks out of compiled
    code, or breaks its graphs where they run.
    """
    try:
        _register()
    except Exception as error:
        _log.warning(
            "torch has changed: torch.compile cannot trace hooks (%s: %s). Graphs "
            "break there.",
            type(error).__name__,
            error,
        )


def _register() -> None:
    guard_on_hooks()
    for function in (emit, emit_call, emit_hidden, watch_gradient):
        torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]
    for constant in (step_in, step_out, opaque_name, deep_name, wraps_of):
        torch.compiler.assume_constant_result(constant)  # type: ignore[no-untyped-call]
    # Compiled code may drop none of them, and must keep their order.
    names = ("frame", "call")
    are_kept = all([keep_in_order(f"overflow_fast::{name}") for name in names])
    for name in names:
        plain = getattr(torch.ops.overflow_fast, f"plain_{name}")
        torch.fx.node.has_side_effect(plain.default)
    for called, traced in ((_C.run_hook, trace_call), (_C.run_paused, trace_root)):
        substitute = torch.compiler.substitute_in_graph(
            called, skip_signature_check=True
        )
        substitute(traced if are_kept else trace_nothing)


def recompile() -> None:
    """Discards compiled code, so that it is compiled with the hooks put on since.

    What was compiled before `register()` does not notice a hook on a module that had
    none then.
    """
    if not has_compiled():
        return
    recompile_all()
    _log.info("Hooks were added: compiled code is compiled again at its next call.")


# Traced by dynamo.


def trace_call(hook: Any, module: Any, args: Any, kwargs: Any, output: Any) -> None:
    """Stands for `_C.run_hook`."""
    place = step_out()
    if place == "":
        _trace(hook, module, args, kwargs, output, False, False)
    elif place != EXPORT:
        _hide(hook, module, args, kwargs, output, place)
        step_in()


def trace_nothing(*_: Any) -> None:
    """Stands for both where compiled code might drop the operators."""


def trace_root(root_hook: Any, *arguments: Any) -> None:
    """Stands for `_C.run_paused` of a `StepBoundaryHook`."""
    place = step_out()
    if place == EXPORT:
        return
    hook = root_hook.owner.root_hook
    if root_hook.name == _AFTER:
        module, args, kwargs, output = arguments
        if place == "":
            has_loss = hook.plan & LOSS != 0 and traced_loss_in(output) is not None
            _trace(hook, module, args, kwargs, output, True, has_loss)
        elif hook.plan & ROOT:
            _hide(hook, module, args, kwargs, output, place)
    elif place == "" and root_hook.name in _METHODS:
        method = _METHODS[root_hook.name]
        if method == "ended" and not torch.is_grad_enabled():
            method = "evaluation_ended"
        emit_call(hook.handle_tensor, method)
    if place != "":
        step_in()


def _trace(
    hook: Any,
    module: Any,
    args: Any,
    kwargs: Any,
    output: Any,
    is_root: bool,
    has_loss: bool,
) -> None:
    plan, handle_tensor, owner = hook.plan, hook.handle_tensor, hook.owner_handle
    name = unwrapped_class(type(module)).__name__
    inputs: Entries = []
    outputs: Entries = []
    has_frame = not is_root or plan & ROOT != 0
    if has_frame:
        walk(plan, module, args, kwargs, output, inputs, outputs)
    if has_loss and not plan & CALLS:
        loss = make_item(((NAME, "loss"),)), traced_loss_in(output)
        _emit(handle_tensor, owner, (RECORDED, "", False, True, False), [loss])
    if has_frame or is_root:
        header = (FORWARD, name, is_root, has_frame, has_loss)
        _emit(handle_tensor, owner, header, inputs + outputs)
    if plan & GRADIENTS:
        for item, tensor in outputs:
            is_listed = tensor is not None and item[0][0][0] == OUTPUT
            if is_listed and tensor.requires_grad:
                watch_gradient(handle_tensor, owner, name, item[0], tensor)


def _hide(
    hook: Any, module: Any, args: Any, kwargs: Any, output: Any, why: str
) -> None:
    entries: Entries = []
    walk(hook.plan, module, args, kwargs, output, entries, entries)
    tensors = [tensor for _, tensor in entries if tensor is not None]
    if len(tensors) > 0:
        emit_hidden(hook.handle_tensor, len(tensors), why)


def _emit(handle_tensor: Any, owner: Any, header: Header, entries: Entries) -> None:
    items = tuple([item for item, _ in entries])
    tensors = [tensor for _, tensor in entries if tensor is not None]
    emit(handle_tensor, owner, header, items, tensors)
