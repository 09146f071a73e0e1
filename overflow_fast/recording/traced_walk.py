"""The walk over a call that dynamo traces; the extension has the one of eager mode.

Both follow the rule of `tree`; here objects that do not declare what they hold are not
opened: see `tree.traced_parts()`. The extension decides how each value is listed, by
its path.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from ..tree import ATTRIBUTE as _ATTRIBUTE
from ..tree import KEY as _KEY
from ..tree import MAX_DEPTH, layout, plain_key, traced_parts, type_name
from .traced_text import (
    ATTRIBUTE,
    INDEX,
    INPUT,
    KEY,
    NAME,
    NONE,
    NOT_TENSOR,
    OPAQUE,
    OUTPUT,
    QUIET_OUTPUT,
    Item,
    Label,
    make_item,
)

# Flags of an owner's `plan`: the entries of its frames.
PARAMETERS, CALLS, GRADIENTS, STRICT, ROOT, LOSS = (1 << i for i in range(6))

# Entries with the tensors of those that are one.
Entries = list[tuple[Item, Any]]

_INPUT: Label = ((INPUT, ""),)
_OUTPUT: Label = ((OUTPUT, ""),)


def opaque_name(kind: type) -> str:
    """The name of a type whose objects are not opened and may hold tensors, or "".

    Dynamo calls it while it traces.
    """
    known = layout(kind)
    has_parts = known.has_dict or known.slots or known.is_asked
    is_iterable = any("__iter__" in vars(base) for base in kind.__mro__)
    if not known.may_hide or not (has_parts or is_iterable):
        return ""
    is_opened_elsewhere = known.is_open and has_parts
    return f"{type_name(kind)}{' (in compiled code)' if is_opened_elsewhere else ''}"


def wraps_of(kind: type) -> str:
    """The attribute whose dict's items objects of a type show as theirs, or ""."""
    return layout(kind).wraps


def deep_name(kind: type) -> str:
    """The name of a type whose object is nested too deep to be opened."""
    return f"{type_name(kind)} (nested too deep)"


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
    opened: list[Any] = []
    if not isinstance(args, tuple):
        entries.append(_flat(args, _INPUT))
    else:
        for i, value in enumerate(args):
            label = (*_INPUT, (INDEX, i))
            entries.append(_flat(value, label))
            if not plan & STRICT and not isinstance(value, torch.Tensor):
                found, _ = _walk_parts(value, label, 1, entries, opened, False)
                entries += found
    if plan & STRICT or not isinstance(kwargs, dict):
        return
    for name, value in kwargs.items():
        label = (*_INPUT, (ATTRIBUTE, name))
        if isinstance(value, torch.Tensor):
            entries.append(_flat(value, label))
        elif not _is_plain(value):
            has_line = traced_parts(value, wraps_of(type(value))) is not None
            found, has_tensor = _walk_parts(value, label, 1, entries, opened, False)
            entries += found
            if has_line and not has_tensor:
                entries.append(_flat(value, label))


def _walk_outputs(plan: int, output: Any, entries: Entries) -> None:
    opened: list[Any] = []
    if not isinstance(output, tuple):
        _walk_output(plan, output, _OUTPUT, 1, entries, opened)
        return
    for i, part in enumerate(output):
        label = (*_OUTPUT, (INDEX, i))
        if not isinstance(part, tuple):
            _walk_output(plan, part, label, 2, entries, opened)
            continue
        for j, inner in enumerate(part):
            _walk_output(plan, inner, (*label, (INDEX, j)), 3, entries, opened)


def _walk_output(
    plan: int, value: Any, label: Label, depth: int, entries: Entries, opened: list[Any]
) -> None:
    if plan & STRICT:
        entries.append(_flat(value, label))
    else:
        found, _ = _walk_value(value, label, depth, entries, opened, False)
        entries += found


def _walk_value(
    value: Any,
    label: Label,
    depth: int,
    entries: Entries,
    opened: list[Any],
    is_quiet: bool,
) -> tuple[Entries, bool]:
    """Lists a value: its tensors, or itself if there is none.

    Returns:
        Its entries, and whether one of them is a tensor that is always listed. What is
        opaque is added to `entries` at once.
    """
    if isinstance(value, torch.Tensor):
        return [_flat(value, label)], not is_quiet
    found: Entries = []
    has_tensor = False
    if not _is_plain(value):
        found, has_tensor = _walk_parts(value, label, depth, entries, opened, is_quiet)
    if not has_tensor and not is_quiet:
        found = [_flat(value, label), *found]
    return found, has_tensor


def _walk_parts(
    value: Any,
    label: Label,
    depth: int,
    entries: Entries,
    opened: list[Any],
    is_quiet: bool,
) -> tuple[Entries, bool]:
    """Lists what is within a value; nothing but quiet tensors if no other is there."""
    if _is_plain(value) or _is_opened(value, opened):
        return [], False
    wraps = wraps_of(type(value))
    parts = traced_parts(value, wraps)
    if parts is None:
        _note(opaque_name(type(value)), entries)
        return [], False
    if depth > MAX_DEPTH:
        if not all([_is_plain(child) for _, _, child, _ in parts]):
            _note(deep_name(type(value)), entries)
        return [], False
    opened.append(value)
    if wraps != "" and isinstance(getattr(value, wraps, None), dict):
        wrapped = getattr(value, wraps)
        if _is_opened(wrapped, opened):
            return [], False
        opened.append(wrapped)
    listed: Entries = []
    quiet: Entries = []
    has_tensor = False
    for style, key, child, is_beside in parts:
        is_hushed = is_quiet or is_beside
        part = (*label, (_mark(style), plain_key(key)))
        if is_hushed and label[0][0] == OUTPUT:
            part = ((QUIET_OUTPUT, ""), *part[1:])
        found, is_listed = _walk_value(
            child, part, depth + 1, entries, opened, is_hushed
        )
        listed += found
        has_tensor = has_tensor or is_listed
        if not is_listed:
            quiet += [each for each in found if each[1] is not None]
    return (listed, True) if has_tensor else (quiet, False)


def _note(name: str, entries: Entries) -> None:
    if name != "":
        entries.append((make_item(((NAME, name),), OPAQUE), None))


def _is_opened(value: Any, opened: list[Any]) -> bool:
    # Dynamo does not compare tuples and deques by their identities.
    if isinstance(value, (tuple, deque)):
        return False
    for each in opened:  # noqa: SIM110  (dynamo traces it)
        if type(each) is type(value) and each is value:
            return True
    return False


def _flat(value: Any, label: Label) -> tuple[Item, Any]:
    if isinstance(value, torch.Tensor):
        return make_item(label), value
    return make_item(label, NONE if value is None else NOT_TENSOR), None


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (int, float, complex, str, bytes))


def _mark(style: str) -> str:
    return KEY if style == _KEY else ATTRIBUTE if style == _ATTRIBUTE else INDEX
