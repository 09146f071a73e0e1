"""Operators for frames in the graphs of `torch.compile`, and how they are read again.

AOTAutograd runs `emit` and `watch_gradient` with the tensors of its trace. They put one
operator for each frame into the graph: it takes the tensors that no earlier one was
given, and a constant that says what they are, which `parse` reads when it first runs.
"""

from __future__ import annotations

import json
import urllib.parse
import weakref
from typing import Any

import torch

from . import _C
from .tensors import NotScanned
from .torch_internals.compiler import is_functional, is_split_for_ddp
from .torch_internals.running import running_nodes
from .torch_internals.tensors import is_batched, is_wrapper
from .torch_internals.wrappers import local_tensor
from .traced_numbers import begin_call, number_of

# Styles of labels, as numbers that dynamo takes for constants.
NAME, INDEX, KEY, ATTRIBUTE = map(int, _C.LabelStyle.__members__.values())

Label = tuple[tuple[int, object], ...]
# An entry as it is traced: the path of its label, its kind, whether it is listed only
# if it is bad, what is allowed there, and the name of its role.
Item = tuple[Label, str, bool, int, str]
# The phase, the class's name, whether the root's call ends, whether there is a frame,
# whether a loss is among what the root returned.
Header = tuple[str, str, bool, bool, bool]


def make_item(
    path: Label,
    kind: str = "TENSOR",
    only_if_bad: bool = False,
    allowed: int = 0,
    role: str = "OUTPUT",
) -> Item:
    return path, kind, only_if_bad, allowed, role


_BEFORE = "before"


def emit(
    ticket: torch.Tensor,
    owner: torch.Tensor,
    header: Header,
    items: tuple[Item, ...],
    tensors: list[torch.Tensor],
) -> None:
    """Puts the operator for one frame into the graph that is traced.

    Args:
        ticket: The hook's `ticket`.
        owner: The hook's `owner_ticket`.
        header: What the frame is.
        items: The frame's entries.
        tensors: Those of the entries that are tensors, in order.
    """
    given: list[torch.Tensor] = []
    lines: list[tuple[object, ...]] = []
    rest = zip(tensors, _which_are_returned(len(tensors)), strict=True)
    for path, kind, only_if_bad, allowed, role in items:
        number, is_new, is_returned, why = -1, False, False, ""
        if kind == "TENSOR":
            whole, is_returned = next(rest)
            is_returned = is_returned and role != "INPUT"
            tensor = _readable(whole)
            if isinstance(tensor, NotScanned):
                kind, why = "NOT_SCANNED", str(tensor)
            else:
                is_named = role not in ("INPUT", "OUTPUT")
                number, is_new = (-1, True) if is_named else number_of(tensor, owner)
                # What takes no gradient would be run in the forward.
                if is_returned or header[0] == "BACKWARD":
                    is_new = True
                if is_new:
                    given.append(tensor)
        listing = (path, kind, only_if_bad, allowed, role)
        lines.append((*listing, number, is_new, is_returned, why))
    _put(ticket, header, lines, given)


def emit_hidden(ticket: torch.Tensor, count: int, why: str) -> None:
    """Puts an operator into the graph that counts tensors as not scanned.

    Args:
        ticket: The hook's `ticket`.
        count: How many tensors.
        why: The reason.
    """
    item = make_item(((NAME, "hidden"),), "NOT_SCANNED")
    entry = (*item, -1, False, False, why)
    _put(ticket, ("FORWARD", "", False, False, False), [entry] * count, [])


def _put(
    ticket: torch.Tensor,
    header: Header,
    lines: list[tuple[object, ...]],
    tensors: list[torch.Tensor],
) -> None:
    # Inductor's C++ wrapper writes the constant between quotes as it is.
    text = urllib.parse.quote(json.dumps([header, lines]), safe="[], ")
    operators = torch.ops.overflow_fast
    (operators.plain_frame if is_split_for_ddp() else operators.frame)(
        ticket, text, tensors
    )


def emit_call(ticket: torch.Tensor, method: str) -> None:
    """Puts the operator that calls a method of the hook's owner into the graph."""
    if method == _BEFORE:
        # What it was given before may belong to a step that is over when this runs.
        begin_call(ticket)
    operators = torch.ops.overflow_fast
    (operators.plain_call if is_split_for_ddp() else operators.call)(ticket, method)


def watch_gradient(
    ticket: torch.Tensor,
    owner: torch.Tensor,
    class_name: str,
    path: Label,
    tensor: torch.Tensor,
) -> None:
    """Has the gradient of an output recorded, if no module within has asked for it.

    Args:
        ticket: The hook's `ticket`.
        owner: The hook's `owner_ticket`.
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
        header = ("BACKWARD", class_name, False, True, False)
        emit(ticket, owner, header, (make_item(path),), [gradient])

    tensor.register_hook(record)  # type: ignore[no-untyped-call]


def _readable(tensor: torch.Tensor) -> torch.Tensor | NotScanned:
    """What of a tensor in a trace the operator can be given."""
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
    """Which of the tensors that `emit` was given its whole graph returns as they are.

    The interpreter that runs the graph is found on the Python stack. Nobody runs one
    where gradients are recorded, and in bodies of other graphs none is.
    """
    nodes = running_nodes()
    if len(nodes) != 1 or nodes[0].target is not emit:
        return [False] * count
    (node,) = nodes
    returned = set(node.graph.output_node().all_input_nodes)
    return [tensor in returned for tensor in node.args[-1]]


# What reads it again.


def parse(text: str) -> dict[str, object]:
    """Reads what `emit` wrote, for the extension."""
    (phase, class_name, is_root, has_frame, has_loss), lines = json.loads(
        urllib.parse.unquote(text)
    )
    return {
        "phase": getattr(_C.Phase, phase),
        "class_name": class_name,
        "is_root": is_root,
        "has_frame": has_frame,
        "has_loss": has_loss,
        "items": [_parse_item(line) for line in lines],
    }


_FIELDS = (
    *("path", "kind", "only_if_bad", "allowed", "role"),
    *("number", "is_new", "is_returned", "why"),
)


def _parse_item(line: list[Any]) -> dict[str, object]:
    item = dict(zip(_FIELDS, line, strict=True))
    return {
        **item,
        "path": [_C.LabelPart(_C.LabelStyle(s), value) for s, value in item["path"]],
        "kind": getattr(_C.EntryKind, item["kind"]),
        "role": getattr(_C.Role, item["role"]),
    }
