"""Operators for frames in the graphs of `torch.compile`.

AOTAutograd runs `emit` and `watch_gradient` with the tensors of its trace. They put one
operator for each frame into the graph: it takes the tensors that no earlier one has
taken, and a constant that describes them (`traced_text`), with a number for it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..core.tensors import NotScanned
from ..torch_internals.compiler import is_functional, is_split_for_ddp
from ..torch_internals.running import running_nodes
from ..torch_internals.tensor_internals import is_batched, is_wrapper
from ..torch_internals.wrappers import local_tensor
from .traced_numbers import begin_call, number_of
from .traced_text import (
    BACKWARD,
    FORWARD,
    INPUT,
    NAME,
    NOT_SCANNED,
    QUIET_OUTPUT,
    TENSOR,
    Header,
    Item,
    Label,
    header_text,
    id_of,
    item_text,
    make_item,
    tensor_text,
)

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
        number, is_new = (-1, True) if is_named else number_of(tensor, owner)
        # An operator that takes no gradient would run in the forward.
        if is_returned or header[0] == BACKWARD:
            is_new = True
        if is_new:
            given.append(tensor)
        lines.append(tensor_text(path, number, is_new, is_returned))
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
    (operators.plain_frame if is_split_for_ddp() else operators.frame)(
        handle_tensor, id_of(text), text, tensors
    )


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
    if is_wrapper(tensor) and not is_functional(tensor):
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
