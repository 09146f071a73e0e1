"""What the training loop handed to a model: held weakly, searched when it is bad."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import torch

from .. import _C

_MAX_DEPTH = 4
_FEW = 4
_MAX_ITEMS = 64


class Held(NamedTuple):
    """A tensor, held weakly, and how often it had been written to in place."""

    tensor: Callable[[], torch.Tensor | None]
    version: int | None


# The positional and the keyword inputs of a call, as `weakly()` holds them.
Given = tuple[Any, Any]


def weakly(value: object, depth: int = 0) -> Any:
    """The tensors of a nesting as `Held`, in dicts and lists like it."""
    if isinstance(value, torch.Tensor):
        version = None if value.is_inference() else value._version
        return Held(weakref.ref(value), version)
    if depth == _MAX_DEPTH:
        return None
    # The types' own methods: those of subclasses may do anything.
    if isinstance(value, dict):
        return {key: weakly(each, depth + 1) for key, each in dict.items(value)}
    if isinstance(value, (list, tuple)):
        few = itertools.islice(value, _MAX_ITEMS)
        return [weakly(each, depth + 1) for each in few]
    return None


def find(given: Given, path: _C.LabelPath) -> Held:
    """The tensor of an input's label.

    Args:
        given: The inputs of the call.
        path: The label's.
    """
    steps = [value for _, value in path[1:]]
    found: Any = given[bool(steps) and not isinstance(steps[0], int)]
    for step in steps:
        try:
            found = found[step]
        except (KeyError, IndexError, TypeError):
            break
    return found if isinstance(found, Held) else Held(lambda: None, None)


def samples(tensor: torch.Tensor | None) -> str:
    """Which entries of a tensor's first dimension are non-finite, unless all, in words.

    Incurs a CPU-GPU sync.
    """
    if not is_plain(tensor) or tensor.dim() == 0 or len(tensor) < 2:
        return ""
    bad = ~torch.isfinite(tensor.detach())
    places = bad.flatten(1).any(1) if bad.dim() > 1 else bad
    found = places.nonzero().flatten().tolist()
    if not found or len(found) == len(tensor):
        return ""
    shown = ", ".join(map(str, found[:_FEW])) + " ..." * (len(found) > _FEW)
    return f", sample{'s' * (len(found) > 1)} {shown} of {len(tensor)} (from 0)"


def is_mask(tensor: torch.Tensor | None) -> bool | None:
    """Whether a tensor that holds -inf is an additive mask: 0 else. None if unknown."""
    if not is_plain(tensor):
        return None
    finite = tensor.detach()[torch.isfinite(tensor.detach())]
    return not bool((finite != 0).any())


def is_plain(tensor: object) -> TypeGuard[torch.Tensor]:
    """Whether a tensor is there and its elements can be looked at."""
    return (
        isinstance(tensor, torch.Tensor)
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and tensor.is_floating_point()
    )
