"""What dynamo traces to list a call: what the extension's walk lists in eager mode."""

from __future__ import annotations

from typing import Any

import torch

from . import _C
from .traced_graph import ATTRIBUTE, INDEX, KEY, NAME, Item, Label, make_item

# What an owner's `plan` is made of: what its frames list, and where they look.
PARAMETERS, CALLS, GRADIENTS, STRICT, KWARGS, MASKS, ROOT, LOSS = (
    1 << i for i in range(8)
)
_MAX_DEPTH = 16

# Entries with the tensors of those that are one.
Entries = list[tuple[Item, Any]]

_INPUT: Label = ((NAME, "input"),)
_OUTPUT: Label = ((NAME, "output"),)


def walk(
    plan: int,
    module: Any,
    args: Any,
    kwargs: Any,
    output: Any,
    inputs: Entries,
    outputs: Entries,
) -> None:
    """Lists a call: its module's parameters and what it was given, and its outputs."""
    if plan & PARAMETERS:
        for key, parameter in module.named_parameters(recurse=False):
            inputs.append((make_item(((NAME, key),), role="WEIGHT"), parameter))
    if plan & CALLS:
        _walk_inputs(plan, args, kwargs, inputs)
        _walk_outputs(plan, output, outputs)


def _walk_inputs(plan: int, args: Any, kwargs: Any, entries: Entries) -> None:
    listed = _Walk(entries, False, _C.NEGATIVE_INF if plan & MASKS else 0, "INPUT")
    within = _Walk(entries, not plan & KWARGS, _C.NEGATIVE_INF, "INPUT")
    if not isinstance(args, tuple):
        listed.flat(args, _INPUT)
    else:
        for i, value in enumerate(args):
            label = (*_INPUT, (INDEX, i))
            listed.flat(value, label)
            is_open = not plan & STRICT and not isinstance(value, torch.Tensor)
            if is_open and _holds_tensor(value, 1):
                within.children(value, label, 1)
    if plan & STRICT or not isinstance(kwargs, dict):
        return
    for name, value in kwargs.items():
        if _holds_tensor(value, 1):
            within.value(value, (*_INPUT, (ATTRIBUTE, name)), 1)


def _walk_outputs(plan: int, output: Any, entries: Entries) -> None:
    walk = _Walk(entries, False, 0, "OUTPUT")
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
        entries: Entries,
        only_if_bad: bool,
        allowed: int,
        role: str,
    ) -> None:
        self.entries = entries
        self.only_if_bad = only_if_bad
        self.allowed = allowed
        self.role = role

    def flat(self, value: Any, label: Label) -> None:
        if isinstance(value, torch.Tensor):
            listing = (self.only_if_bad, self.allowed, self.role)
            self.entries.append((make_item(label, "TENSOR", *listing), value))
        else:
            kind = "NONE" if value is None else "NOT_TENSOR"
            self.entries.append((make_item(label, kind, role=self.role), None))

    def value(self, value: Any, label: Label, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            self.flat(value, label)
        elif _holds_tensor(value, depth):
            self.children(value, label, depth)
        elif not self.only_if_bad:
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
