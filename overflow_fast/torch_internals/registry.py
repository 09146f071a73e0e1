"""The table of the private APIs of torch, and what happens where one is missing.

A function whose API is missing logs one line, returns its fallback and leaves one
feature off; nothing here breaks an import. `INTERNALS` is the table of them; the tests
resolve each entry against the installed torch.
"""

from __future__ import annotations

import functools
import importlib
import logging
import operator
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn

_log = logging.getLogger("overflow_fast")
# What using an API raises that is gone, or takes other arguments than it did.
MISSING = (AttributeError, ImportError, KeyError, TypeError)
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Internal(NamedTuple):
    """A private API.

    Attributes:
        api: Its dotted name, from `torch` on; `Class.attribute` of an instance where
            the last part is set in `__init__`.
        reason: The use that the package makes of it; no public API does the same.
        without: The behaviour where it is missing.
    """

    api: str
    reason: str
    without: str


INTERNALS: dict[str, Internal] = {}
_missing: set[str] = set()


def listed(api: str, reason: str, without: str) -> Callable[[_Function], _Function]:
    """Registers a function that needs no fallback where its private API is missing."""

    def register(function: _Function) -> _Function:
        INTERNALS[function.__name__] = Internal(api, reason, without)
        return function

    return register


def internal(
    api: str, reason: str, without: str, fallback: Any = None
) -> Callable[[_Function], _Function]:
    """Registers a function that uses a private API, and gives it its fallback."""

    def register(function: _Function) -> _Function:
        name = listed(api, reason, without)(function).__name__

        @functools.wraps(function)
        def guarded(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except MISSING as error:
                note_missing(name, error)
                return fallback

        return cast(_Function, guarded)

    return register


def direct(api: str, reason: str, without: str, fallback: Any = None) -> Any:
    """Registers a private function, or a reader of what is none, to be called itself.

    Returns:
        The function; of a class's attribute one that reads it of its argument, of a
        module's variable one that reads it: no code of this package runs with a call.
        Where it is missing, what returns the fallback.
    """
    INTERNALS[api] = own = Internal(api, reason, without)
    if is_there(own):
        holder, _, name = api.rpartition(".")
        owner = functools.reduce(_part_of, holder.split(".")[1:], cast(Any, torch))
        found = _part_of(owner, name)
        if callable(found) and not hasattr(found, "__set__"):
            return found
        is_variable = isinstance(owner, ModuleType)
        reader = functools.partial(getattr, owner, name)
        return reader if is_variable else operator.attrgetter(name)

    def instead(*_: Any) -> Any:
        note_missing(api, AttributeError("it is not there"))
        return fallback

    return instead


def _part_of(found: Any, part: str) -> Any:
    return getattr(found, part, None)  # None for what is set in `__init__`


def note_missing(name: str, error: Exception) -> None:
    """Logs once that a private API is missing, and what is off for that."""
    if name not in _missing:
        _missing.add(name)
        api, _, without = INTERNALS[name]
        _log.warning("torch has changed: %s (%s). %s.", api, error, without)


def stack(frame: FrameType | None = None) -> list[FrameType]:
    """Lists the frames of the Python stack from the caller's, or a given one, out."""
    frames: list[FrameType] = []
    frame = frame or sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def callers() -> Iterator[Any]:
    """Yields the objects whose methods run in this thread, the innermost first."""
    found = (frame.f_locals.get("self") for frame in stack())
    return (each for each in found if each is not None)


def is_there(internal: Internal) -> bool:
    """Returns True if the API is in the installed torch."""
    parts = internal.api.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:split]))
        except ImportError:
            continue
        for part in parts[split:]:
            if isinstance(found, type) and not hasattr(found, part):
                return part in _instance_of(found).__dict__
            if not hasattr(found, part):
                return False
            found = getattr(found, part)  # may be None, as a class's default is
        return True
    return False


def _instance_of(kind: type) -> Any:
    if issubclass(kind, torch.optim.Optimizer):
        return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, fused=True)
    return kind()


def table() -> Iterator[str]:
    """Yields the rows of the table of internals in Markdown, as in `README.md`."""
    yield "| API | used for | without it |"
    yield "|---|---|---|"
    for api, reason, without in sorted(set(INTERNALS.values())):
        yield f"| `{api}` | {reason} | {without} |"
