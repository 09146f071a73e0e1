"""Marks by which the function of an earlier step is known again, without holding it."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .held_function import HeldFunction

# Held in a mark; of all else a mark has a weak reference.
VALUES = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


def marks_of(function: Any) -> list[Any]:
    """The marks of a kept function: its code, and what it reads besides the batch.

    Values are held; objects weakly, or a model would live as long as its guard.
    """
    if not isinstance(function, HeldFunction):
        return [weakref.ref(function)]
    held, called, given = function.held, function.called, function.given
    read = [e for e in given.values() if type(e) not in VALUES]
    if function.plain is None:  # a method may read the batch from its object
        read.append(getattr(called, "stands_for", called))
    for each, variables in held.items():
        read += [*variables.values(), *(each.__defaults__ or ())]
        read += (each.__kwdefaults__ or {}).values()
    known = {id(each) for each in (*function.values.values(), *held)}
    marks = [_mark(each) for each in read if id(each) not in known]
    return [*(each.__code__ for each in held), *given, *function.values, *marks]


def _mark(value: Any) -> Any:
    try:
        return value if type(value) in VALUES else weakref.ref(value)
    except TypeError:  # a list may be another one by now, at the same place
        return object()
