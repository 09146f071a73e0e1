"""The walk over a call that dynamo traces; the extension has the one of eager mode.

The extension decides how each value is listed, by its path.
"""

from __future__ import annotations

from typing import Any

import torch

from .traced_text import (
    ATTRIBUTE,
    INDEX,
    INPUT,
    KEY,
    NAME,
    NONE,
    NOT_TENSOR,
    OUTPUT,
    Item,
    Label,
    make_item,
)

# Flags of an owner's `plan`: the entries of its frames.
PARAMETERS, CALLS, GRADIENTS, STRICT, ROOT, LOSS = (1 << i for i in range(6))
_MAX_DEPTH = 16

# Entries with the tensors of those that are one.
Entries = list[tuple[Item, Any]]

_INPUT: Label = ((INPUT, ""),)
_OUTPUT: Label = ((OUTPUT, ""),)


def walk(
    plan: int,
    module: Any,
    args: Any,
    kwargs: Any,
    output: Any,
    inputs: Entries,
    outputs: Entries,
) -> None:
    """Lists the entries of a call: its module's parameters, its inputs, its outputs."""
    if plan & PARAMETERS:
        for key, parameter in module.named_parameters(recurse=False):
            inputs.append((make_item(((NAME, key),)), parameter))
    if plan & CALLS:
        _walk_inputs(plan, args, kwargs, inputs)
        _walk_outputs(plan, output, outputs)


def _walk_inputs(plan: int, args: Any, kwargs: Any, entries: Entries) -> None:
    if not isinstance(args, tuple):
        _flat(args, _INPUT, entries)
    else:
        for i, value in enumerate(args):
            label = (*_INPUT, (INDEX, i))
            _flat(value, label, entries)
            is_open = not plan & STRICT and not isinstance(value, torch.Tensor)
            if is_open and _holds_tensor(value, 1):
                _walk_children(value, label, 1, entries)
    if plan & STRICT or not isinstance(kwargs, dict):
        return
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) or _is_container(value):
            _walk_value(value, (*_INPUT, (ATTRIBUTE, name)), 1, entries)


def _walk_outputs(plan: int, output: Any, entries: Entries) -> None:
    if not isinstance(output, tuple):
        _walk_output(plan, output, _OUTPUT, 1, entries)
        return
    for i, part in enumerate(output):
        label = (*_OUTPUT, (INDEX, i))
        if not isinstance(part, tuple):
            _walk_output(plan, part, label, 2, entries)
            continue
        for j, inner in enumerate(part):
            _walk_output(plan, inner, (*label, (INDEX, j)), 3, entries)


def _walk_output(
    plan: int, value: Any, label: Label, depth: int, entries: Entries
) -> None:
    if plan & STRICT:
        _flat(value, label, entries)
    else:
        _walk_value(value, label, depth, entries)


def _walk_value(value: Any, label: Label, depth: int, entries: Entries) -> None:
    if not isinstance(value, torch.Tensor) and _holds_tensor(value, depth):
        _walk_children(value, label, depth, entries)
    else:
        _flat(value, label, entries)


def _walk_children(value: Any, label: Label, depth: int, entries: Entries) -> None:
    for part, child in _children(value):
        _walk_value(child, (*label, part), depth + 1, entries)


def _flat(value: Any, label: Label, entries: Entries) -> None:
    if isinstance(value, torch.Tensor):
        entries.append((make_item(label), value))
    else:
        kind = NONE if value is None else NOT_TENSOR
        entries.append((make_item(label, kind), None))


def _children(value: Any) -> list[tuple[tuple[str, str | int], Any]]:
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
    if isinstance(key, (str, int)) and not isinstance(key, bool):
        return key
    return f"<{type(key).__name__}>"


def _is_container(value: Any) -> bool:
    is_dataclass = hasattr(type(value), "__dataclass_fields__")
    return is_dataclass or isinstance(value, (tuple, list, dict))


def _holds_tensor(value: Any, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if depth > _MAX_DEPTH or value is None or isinstance(value, (int, float, str)):
        return False
    for _, child in _children(value):  # noqa: SIM110  (dynamo traces it)
        if _holds_tensor(child, depth + 1):
            return True
    return False
