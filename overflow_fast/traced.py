"""Hooks under `torch.compile`.

Dynamo traces `trace_call` in place of `_C.run_hook`. Both walk a call alike; this one
only writes down what the frame lists, and leaves the rest to `traced_graph`.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from . import _C
from .names import authors_class
from .tensors import traced_loss_in
from .traced_graph import (
    ATTRIBUTE,
    INDEX,
    KEY,
    NAME,
    Header,
    Item,
    Label,
    emit,
    emit_call,
    emit_hidden,
    make_item,
    watch_gradient,
)
from .traced_place import EXPORT, step_in, step_out

# What an owner's `plan` is made of: what its frames list, and where they look.
PARAMETERS, CALLS, GRADIENTS, STRICT, KWARGS, MASKS, ROOT, LOSS = (
    1 << i for i in range(8)
)
_MAX_DEPTH = 16
_log = logging.getLogger("overflow_fast")
_AFTER = "after_root"
_METHODS = {"before_root": "before", "root_ended": "ended"}  # of TracedRoot

# Entries with the tensors of those that are one.
_Entries = list[tuple[Item, Any]]

_INPUT: Label = ((NAME, "input"),)
_OUTPUT: Label = ((NAME, "output"),)


@functools.cache
def register() -> None:
    """Has dynamo know the hooks. Imports dynamo."""
    for function in (emit, emit_call, emit_hidden, watch_gradient):
        torch._dynamo.allow_in_graph(function)  # type: ignore[no-untyped-call]
    for function in (step_in, step_out):
        torch._dynamo.assume_constant_result(function)  # type: ignore[no-untyped-call]
    for called, traced in ((_C.run_hook, trace_call), (_C.run_paused, trace_root)):
        torch.compiler.substitute_in_graph(called, skip_signature_check=True)(traced)
    # So that compiled code drops none of them, and keeps their order.
    for name in ("frame", "call"):
        effect = torch._library.effects.EffectType.ORDERED
        torch.library._register_effectful_op(f"overflow_fast::{name}", effect)


def has_compiled() -> bool:
    """Whether dynamo has compiled anything in this process."""
    return bool(torch._dynamo.convert_frame.input_codes.seen)


def recompile() -> None:
    """Has compiled code compiled again, with the hooks that were put on since.

    Dynamo does not notice a hook on a module that had none when it compiled its call.
    """
    if not has_compiled():
        return
    torch._dynamo.reset_code_caches()
    _log.info("Hooks were put on: compiled code is compiled again at its next call.")


# What dynamo traces.


def trace_call(hook: Any, module: Any, args: Any, kwargs: Any, output: Any) -> None:
    """Stands for `_C.run_hook`."""
    place = step_out()
    if place == "":
        _trace(hook, module, args, kwargs, output, False, False)
    elif place != EXPORT:
        _hide(hook, module, args, kwargs, output, place)
        step_in()


def trace_root(root_hook: Any, *arguments: Any) -> None:
    """Stands for `_C.run_paused` of a `RootHook`."""
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
        emit_call(hook.ticket, method)
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
    plan, ticket, owner = hook.plan, hook.ticket, hook.owner_ticket
    name = authors_class(type(module)).__name__
    inputs: _Entries = []
    outputs: _Entries = []
    has_frame = not is_root or plan & ROOT != 0
    if has_frame:
        _walk(plan, module, args, kwargs, output, inputs, outputs)
    if has_loss and not plan & CALLS:
        item = make_item(((NAME, "loss"),), is_named=True)
        _emit(
            ticket,
            owner,
            ("RECORDED", "", False, True, False),
            [(item, traced_loss_in(output))],
        )
    if has_frame or is_root:
        header = ("FORWARD", name, is_root, has_frame, has_loss)
        _emit(ticket, owner, header, inputs + outputs)
    if plan & GRADIENTS:
        for item, tensor in outputs:
            if tensor is not None and tensor.requires_grad:
                watch_gradient(ticket, owner, name, item[0], tensor)


def _hide(
    hook: Any, module: Any, args: Any, kwargs: Any, output: Any, why: str
) -> None:
    entries: _Entries = []
    _walk(hook.plan, module, args, kwargs, output, entries, entries)
    tensors = [tensor for _, tensor in entries if tensor is not None]
    if len(tensors) > 0:
        emit_hidden(hook.ticket, len(tensors), why)


def _emit(ticket: Any, owner: Any, header: Header, entries: _Entries) -> None:
    items = tuple([item for item, _ in entries])
    tensors = [tensor for _, tensor in entries if tensor is not None]
    emit(ticket, owner, header, items, tensors)


def _walk(
    plan: int,
    module: Any,
    args: Any,
    kwargs: Any,
    output: Any,
    inputs: _Entries,
    outputs: _Entries,
) -> None:
    if plan & PARAMETERS:
        for key, parameter in module.named_parameters(recurse=False):
            inputs.append((make_item(((NAME, key),), is_named=True), parameter))
    if plan & CALLS:
        _walk_inputs(plan, args, kwargs, inputs)
        _walk_outputs(plan, output, outputs)


def _walk_inputs(plan: int, args: Any, kwargs: Any, entries: _Entries) -> None:
    listed = _Walk(entries, False, _C.NEGATIVE_INF if plan & MASKS else 0, True)
    quiet = _Walk(entries, not plan & KWARGS, _C.NEGATIVE_INF, True)
    if not isinstance(args, tuple):
        listed.flat(args, _INPUT)
    else:
        for i, value in enumerate(args):
            label = (*_INPUT, (INDEX, i))
            listed.flat(value, label)
            is_open = not plan & STRICT and not isinstance(value, torch.Tensor)
            if is_open and _holds_tensor(value, 1):
                quiet.children(value, label, 1)
    if plan & STRICT or not isinstance(kwargs, dict):
        return
    for name, value in kwargs.items():
        if _holds_tensor(value, 1):
            quiet.value(value, (*_INPUT, (ATTRIBUTE, name)), 1)


def _walk_outputs(plan: int, output: Any, entries: _Entries) -> None:
    walk = _Walk(entries, False, 0, False)
    if not isinstance(output, tuple):
        walk.output(plan, output, _OUTPUT, 1)
        return
    for i, part in enumerate(output):
        label = (*_OUTPUT, (INDEX, i))
        if not isinstance(part, tuple):
            walk.output(plan, part, label, 2)
            continue
        for j, inner in enumerate(part):
            walk.output(plan, inner, (*label, (INDEX, j)), 3)


class _Walk:
    """Lists what a call was given or returned, as the extension's walk does."""

    def __init__(
        self,
        entries: _Entries,
        is_quiet: bool,
        allowed: int,
        is_input: bool,
    ) -> None:
        self.entries = entries
        self.is_quiet = is_quiet
        self.allowed = allowed
        self.is_input = is_input

    def flat(self, value: Any, label: Label) -> None:
        if isinstance(value, torch.Tensor):
            listing = (self.is_quiet, self.allowed, self.is_input)
            self.entries.append((make_item(label, "TENSOR", *listing), value))
        else:
            kind = "NONE" if value is None else "NOT_TENSOR"
            self.entries.append((make_item(label, kind), None))

    def value(self, value: Any, label: Label, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            self.flat(value, label)
        elif _holds_tensor(value, depth):
            self.children(value, label, depth)
        elif not self.is_quiet:
            self.flat(value, label)

    def output(self, plan: int, value: Any, label: Label, depth: int) -> None:
        if plan & STRICT:
            self.flat(value, label)
        else:
            self.value(value, label, depth)

    def children(self, value: Any, label: Label, depth: int) -> None:
        for part, child in _children(value):
            self.value(child, (*label, part), depth + 1)


def _children(value: Any) -> list[tuple[tuple[int, object], Any]]:
    if isinstance(value, (tuple, list)):
        return [((INDEX, i), child) for i, child in enumerate(value)]
    is_dataclass = hasattr(type(value), "__dataclass_fields__")
    if isinstance(value, dict):
        style = ATTRIBUTE if is_dataclass else KEY
        return [((style, _plain(key)), child) for key, child in value.items()]
    if is_dataclass:
        names = [name for name in value.__dataclass_fields__ if hasattr(value, name)]
        return [((ATTRIBUTE, name), getattr(value, name)) for name in names]
    return []


def _plain(key: Any) -> str | int:
    return key if isinstance(key, (str, int)) else f"<{type(key).__name__}>"


def _holds_tensor(value: Any, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if depth > _MAX_DEPTH or value is None or isinstance(value, (int, float, str)):
        return False
    for _, child in _children(value):  # noqa: SIM110  (dynamo traces it)
        if _holds_tensor(child, depth + 1):
            return True
    return False
