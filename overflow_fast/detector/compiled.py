"""Hooks under `torch.compile`.

Dynamo traces `trace_call` in place of `_C.run_hook`; its first trace loads this file.
Both walk a call alike; this one only lists the frame's entries, and leaves the rest to
`traced_graph`.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from typing import Any, NamedTuple

import torch

from ..base.losses import traced_loss_in
from ..base.modules import class_name_of
from ..base.tensors import NotScanned
from ..torch_internals.running import running_nodes
from ..torch_internals.tensor_internals import is_batched, is_wrapper, local_tensor
from ..torch_internals.tracing import (
    dynamo_translator,
    functional_mode,
    is_functional,
    is_split_for_ddp,
    keep_in_order,
    keep_partition,
    open_layouts,
    traced_value,
)
from .compiled_boundary import CALLS, EVALUATED, GRADIENTS, LOSS, ROOT
from .traced_walk import (
    BACKWARD,
    FORWARD,
    INPUT,
    NAME,
    NOT_SCANNED,
    OUTPUT,
    QUIET_OUTPUT,
    RECORDED,
    TENSOR,
    Entries,
    Header,
    Item,
    Label,
    deep_name,
    header_text,
    id_of,
    item_text,
    make_item,
    opaque_name,
    tensor_text,
    walk,
    wraps_of,
)

# Numbers that identify a tensor across the frames of a trace.


_counter = itertools.count()
_ATTRIBUTE = "_overflow_fast"


class _Number(NamedTuple):
    """The number of a value, in the trace that `mode` stands for."""

    owner: weakref.ref[torch.Tensor]
    mode: weakref.ref[object]
    call: int  # of the owner's root
    is_gradient: bool
    number: int


def begin_call(owner: torch.Tensor) -> None:
    """Forgets an owner's numbers: its root is called again in the same trace.

    Args:
        owner: The `handle_tensor` of its `root_hook`.
    """
    setattr(owner, _ATTRIBUTE, getattr(owner, _ATTRIBUTE, 0) + 1)


def number_of(
    tensor: torch.Tensor, owner: torch.Tensor, is_gradient: bool
) -> tuple[int, bool]:
    """Returns a value's number in the trace, and whether it is new to its owner.

    Args:
        tensor: The tensor that holds the value; another one after each write.
        owner: The `owner_handle` of the hook that sees it.
        is_gradient: True in backward, which may run behind another forward than the
            one before it: it shares no numbers with forwards.

    Returns:
        The number, or -1 where AOTAutograd does not trace, and whether it is new.
    """
    mode = functional_mode()
    if mode is None or not is_functional(tensor):
        return -1, True
    value = traced_value(tensor)
    call = getattr(owner, _ATTRIBUTE, 0)
    numbers: list[_Number] = value.__dict__.setdefault(_ATTRIBUTE, [])
    for known in numbers:
        of_call = (known.call, known.is_gradient) == (call, is_gradient)
        if known.owner() is owner and known.mode() is mode and of_call:
            return known.number, False
    references = weakref.ref(owner), weakref.ref(mode)
    numbers.append(_Number(*references, call, is_gradient, next(_counter)))
    return numbers[-1].number, True


# Operators for frames in the graphs of `torch.compile`.
#
# AOTAutograd runs `emit` and `watch_gradient` with the tensors of its trace. They put
# one operator for each frame into the graph: it takes the tensors that no earlier one
# has taken, and a constant that describes them (`traced_text`), with a number for it.


_BEFORE = "before"


def emit(
    handle_tensor: torch.Tensor,
    owner: torch.Tensor,
    header: Header,
    items: tuple[Item, ...],
    tensors: list[torch.Tensor],
) -> None:
    """Puts the operator for one frame into the graph that is traced.

    Args:
        handle_tensor: The hook's `handle_tensor`.
        owner: The hook's `owner_handle`.
        header: The kind of the frame.
        items: The frame's entries.
        tensors: Those of the entries that are tensors, in order.
    """
    given: list[torch.Tensor] = []
    lines: list[str] = []
    rest = zip(tensors, _which_are_returned(len(tensors)), strict=True)
    for path, kind in items:
        if kind != TENSOR:
            lines.append(item_text(path, kind))
            continue
        whole, is_returned = next(rest)
        is_returned = is_returned and path[0][0] not in (INPUT, QUIET_OUTPUT)
        tensor = _readable(whole)
        if isinstance(tensor, NotScanned):
            lines.append(item_text(path, NOT_SCANNED, str(tensor)))
            continue
        is_named = path[0][0] == NAME
        is_gradient = header[0] == BACKWARD
        number, is_new = -1, True
        if not is_named:
            number, is_new = number_of(tensor, owner, is_gradient)
        is_new = is_new or is_returned
        # An operator that takes no gradient would run in the forward.
        is_passed = is_new or is_gradient
        if is_passed:
            given.append(tensor)
        lines.append(tensor_text(path, number, is_new, is_passed, is_returned))
    _put(handle_tensor, header, lines, given)


def emit_hidden(handle_tensor: torch.Tensor, count: int, why: str) -> None:
    """Puts an operator into the graph that counts tensors as not scanned.

    Args:
        handle_tensor: The hook's `handle_tensor`.
        count: How many tensors.
        why: The reason.
    """
    line = item_text(((NAME, "hidden"),), NOT_SCANNED, why)
    _put(handle_tensor, (FORWARD, "", False, False, False), [line] * count, [])


def _put(
    handle_tensor: torch.Tensor,
    header: Header,
    lines: list[str],
    tensors: list[torch.Tensor],
) -> None:
    text = " ".join([header_text(header), *lines])
    operators = torch.ops.overflow_fast
    frame = operators.plain_frame if is_split_for_ddp() else operators.frame
    open_layouts(frame.default)
    keep_partition(operators.plain_frame.default, operators.frame.default)
    frame(handle_tensor, id_of(text), text, tensors)


def emit_call(handle_tensor: torch.Tensor, method: str) -> None:
    """Puts the operator that calls a method of the hook's owner into the graph."""
    if method == _BEFORE:
        # Tensors of earlier calls may belong to a step that is over when this runs.
        begin_call(handle_tensor)
    operators = torch.ops.overflow_fast
    (operators.plain_call if is_split_for_ddp() else operators.call)(
        handle_tensor, method
    )


def watch_gradient(
    handle_tensor: torch.Tensor,
    owner: torch.Tensor,
    class_name: str,
    path: Label,
    tensor: torch.Tensor,
) -> None:
    """Records the gradient of an output, unless a module within records it.

    Args:
        handle_tensor: The hook's `handle_tensor`.
        owner: The hook's `owner_handle`.
        class_name: The module's.
        path: The output's label.
        tensor: The output.
    """
    node = tensor.grad_fn
    if node is None:
        return
    metadata: dict[str, Any] = node.metadata  # type: ignore[assignment]
    watching = metadata.setdefault(f"overflow_fast {tensor.output_nr}", [])
    if any(known() is owner for known in watching):
        return
    watching.append(weakref.ref(owner))

    def record(gradient: torch.Tensor) -> None:
        header = (BACKWARD, class_name, False, True, False)
        emit(handle_tensor, owner, header, (make_item(path),), [gradient])

    tensor.register_hook(record)  # type: ignore[no-untyped-call]


def _readable(tensor: torch.Tensor) -> torch.Tensor | NotScanned:
    """Returns the part of a traced tensor that an operator can take, or why none."""
    local = local_tensor(tensor)
    if local is not None:
        return local
    if is_batched(tensor):
        return NotScanned("inside a torch.func transform")
    if tensor.layout is not torch.strided:
        return NotScanned(f"layout {tensor.layout} in compiled code")
    if is_wrapper(tensor):
        return NotScanned(f"tensor subclass {type(tensor).__name__}")
    return tensor


def _which_are_returned(count: int) -> list[bool]:
    """Returns for each tensor of `emit` whether its whole graph returns it unchanged.

    The interpreter that runs the graph is found on the Python stack. There is none
    where gradients are recorded, and none in bodies of other graphs.
    """
    nodes = running_nodes()
    if len(nodes) != 1 or nodes[0].target is not emit:
        return [False] * count
    (node,) = nodes
    returned = set(node.graph.output_node().all_input_nodes)
    return [tensor in returned for tensor in node.args[-1]]


# The place in a program that dynamo traces.


EXPORT = "export"

# The bodies of these may hold operators with effects, by the operator's name.
_OPEN = {"autograd.Function", "tag_activation_checkpoint"}
_NAMES = {
    "cond": "torch.cond",
    "invoke_subgraph": "nested_compile_region",
    "map_impl": "map",
    "while_loop": "torch.while_loop",
}


def step_out() -> str:
    """Finds out whether an operator of ours may be put where dynamo is.

    Dynamo calls it while it traces, and takes what it returns for a constant. Where no
    operator may stand it goes on in the outermost graph, until `step_in`.

    Returns:
        "" if one may, `EXPORT` if nothing is to be traced, else the reason why not.
    """
    try:
        return _step_out(dynamo_translator())
    except (AttributeError, IndexError):
        # Another version of dynamo: as if there were no bodies.
        _log.debug("dynamo's tracers are unknown", exc_info=True)
        return ""


def step_in() -> None:
    """Goes back to the body that `step_out` has left."""
    dynamo_translator().output.tracers.pop()


def _step_out(tx: Any) -> str:
    if torch.compiler.is_exporting() or tx.export:
        return EXPORT
    tracers = tx.output.tracers
    why = next(filter(None, map(_why_closed, tracers[1:])), "")
    if why:
        tracers.append(tracers[0])
    return why


def _why_closed(body: Any) -> str:
    target = body.source_target
    name = target if isinstance(target, str) else target.name()
    if name not in _OPEN:
        return f"inside {_NAMES.get(name, name)}"
    return ""


_log = logging.getLogger("overflow_fast")
_AFTER = "after_root"
_METHODS = {"before_root": "before", "root_ended": "ended"}  # of CompiledStepBoundary


def register() -> bool:
    """Registers what dynamo traces with it; `dynamo` calls it once.

    Returns:
        Whether compiled code keeps the operators that are put into it.
    """
    for function in (emit, emit_call, emit_hidden, watch_gradient):
        torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]
    # If dynamo traced the last, each call would compare the bases of all classes.
    constants = (step_in, step_out, opaque_name, deep_name, wraps_of, class_name_of)
    for constant in constants:
        torch.compiler.assume_constant_result(constant)  # type: ignore[no-untyped-call]
    # Compiled code may drop none of them, and must keep their order.
    names = ("frame", "call")
    are_kept = all([keep_in_order(f"overflow_fast::{name}") for name in names])
    for name in names:
        plain = getattr(torch.ops.overflow_fast, f"plain_{name}")
        torch.fx.node.has_side_effect(plain.default)
    return are_kept


# Traced by dynamo.


def trace_call(hook: Any, module: Any, args: Any, kwargs: Any, output: Any) -> None:
    """Stands for `_C.run_hook`."""
    place = step_out()
    if place == "":
        _trace(hook, module, args, kwargs, output, False, False)
    elif place != EXPORT:
        _hide(hook, module, args, kwargs, output, place)
        step_in()


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
    name = class_name_of(type(module))
    inputs: Entries = []
    outputs: Entries = []
    has_frame = not is_root or plan & ROOT != 0
    if has_frame:
        walk(plan, module, args, kwargs, output, inputs, outputs)
    if has_loss and not plan & CALLS:
        loss = make_item(((NAME, "loss"),)), traced_loss_in(output)
        _emit(handle_tensor, owner, (RECORDED, "", False, True, False), [loss])
    if is_root and plan & EVALUATED and not torch.is_grad_enabled():
        found: Entries = []
        walk(CALLS, module, (), {}, output, found, found)
        own = [each for each in found if each[1] is not None and len(each[0][0]) < 3]
        _emit(handle_tensor, owner, (RECORDED, "", False, True, False), own)
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
