"""Operators for frames in the graphs of `torch.compile`, and how they are read again.

AOTAutograd runs `emit` and `watch_gradient` with the tensors of its trace. They put one
operator for each frame into the graph: it takes the tensors that no earlier one was
given, and a constant that says what they are, which `parse` reads when it first runs.
"""

from __future__ import annotations

import itertools
import json
import urllib.parse
import weakref
from typing import Any

import torch
from torch._subclasses.functional_tensor import (
    FunctionalTensor,
    FunctionalTensorMode,
)
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

from . import _C
from .tensors import NotScanned

RANK = 1 << 8  # what of a plan is above tells owners apart
NAME, INDEX, KEY, ATTRIBUTE = range(4)  # styles of labels

Label = tuple[tuple[int, object], ...]
# An entry as it is traced: the path of its label, its kind, and how it is listed.
Item = tuple[Label, str, bool, int, bool, bool]
# The phase, the class's name, whether the root's call ends, whether there is a frame,
# whether a loss is among what the root returned.
Header = tuple[str, str, bool, bool, bool]


def make_item(
    path: Label,
    kind: str = "TENSOR",
    is_quiet: bool = False,
    allowed: int = 0,
    is_input: bool = False,
    is_named: bool = False,
) -> Item:
    return path, kind, is_quiet, allowed, is_input, is_named


_numbers = itertools.count()


def emit(
    ticket: torch.Tensor,
    plan: int,
    header: Header,
    items: tuple[Item, ...],
    tensors: list[torch.Tensor],
) -> None:
    """Puts the operator for one frame into the graph that is traced.

    Args:
        ticket: The hook's `ticket`.
        plan: The hook's `plan`.
        header: What the frame is.
        items: The frame's entries.
        tensors: Those of the entries that are tensors, in order.
    """
    if torch.compiler.is_exporting():
        return  # what is exported runs without its hooks
    given: list[torch.Tensor] = []
    lines: list[tuple[object, ...]] = []
    rest = iter(tensors)
    for path, kind, *listing, is_named in items:
        number, is_new, why = -1, False, ""
        if kind == "TENSOR":
            tensor = _readable(next(rest))
            if isinstance(tensor, NotScanned):
                kind, why = "NOT_SCANNED", str(tensor)
            else:
                number, is_new = (-1, True) if is_named else _number_of(tensor, plan)
                # What takes no gradient would be run in the forward.
                if is_new or header[0] == "BACKWARD":
                    given.append(tensor)
        lines.append((path, kind, *listing, is_named, number, is_new, why))
    # Inductor's C++ wrapper writes the constant between quotes as it is.
    text = urllib.parse.quote(json.dumps([header, lines]), safe="[], ")
    torch.ops.overflow_fast.frame(ticket, text, given)


def emit_call(ticket: torch.Tensor, method: str) -> None:
    """Puts the operator that calls a method of the hook's owner into the graph."""
    if not torch.compiler.is_exporting():
        torch.ops.overflow_fast.call(ticket, method)


def watch_gradient(
    ticket: torch.Tensor,
    plan: int,
    class_name: str,
    path: Label,
    tensor: torch.Tensor,
) -> None:
    """Has the gradient of an output recorded, if no module within has asked for it.

    Args:
        ticket: The hook's `ticket`.
        plan: The hook's `plan`.
        class_name: The module's.
        path: The output's label.
        tensor: The output.
    """
    node = tensor.grad_fn
    if node is None or torch.compiler.is_exporting():
        return
    key = f"overflow_fast {plan // RANK} {tensor.output_nr}"
    metadata: dict[str, object] = node.metadata  # type: ignore[assignment]
    if key in metadata:
        return
    metadata[key] = True

    def record(gradient: torch.Tensor) -> None:
        header = ("BACKWARD", class_name, False, True, False)
        emit(ticket, plan, header, (make_item(path),), [gradient])

    tensor.register_hook(record)  # type: ignore[no-untyped-call]


def _readable(tensor: torch.Tensor) -> torch.Tensor | NotScanned:
    """What of a tensor in a trace the operator can be given."""
    local = getattr(tensor, "_local_tensor", None)  # DTensor
    if isinstance(local, torch.Tensor):
        return local
    if torch._C._functorch.is_batchedtensor(tensor):
        return NotScanned("inside a torch.func transform")
    if tensor.layout is not torch.strided:
        return NotScanned(f"layout {tensor.layout} in compiled code")
    is_wrapper = is_traceable_wrapper_subclass(tensor)
    if is_wrapper and not isinstance(tensor, FunctionalTensor):
        return NotScanned(f"tensor subclass {type(tensor).__name__}")
    return tensor


def _number_of(tensor: torch.Tensor, plan: int) -> tuple[int, bool]:
    """A value's number in the trace, and whether it was seen for the first time."""
    mode = _functional_mode()
    if mode is None or not isinstance(tensor, FunctionalTensor):
        return -1, True
    torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]
    # What the tensor is right now: another one after each write to it.
    value = torch._from_functional_tensor(tensor.elem)
    name = f"_overflow_fast_{plan // RANK}"
    known = getattr(value, name, None)
    if known is not None and known[0]() is mode:
        return known[1], False
    number = next(_numbers)
    setattr(value, name, (weakref.ref(mode), number))
    return number, True


def _functional_mode() -> FunctionalTensorMode | None:
    modes = _get_current_dispatch_mode_stack()
    found = (mode for mode in modes if isinstance(mode, FunctionalTensorMode))
    return next(found, None)


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
    *("path", "kind", "is_quiet", "allowed", "is_input", "is_named"),
    *("number", "is_new", "why"),
)


def _parse_item(line: list[Any]) -> dict[str, object]:
    item = dict(zip(_FIELDS, line, strict=True))
    path = tuple(map(tuple, item["path"]))
    return {**item, "path": path, "kind": getattr(_C.EntryKind, item["kind"])}
