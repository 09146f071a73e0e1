"""The requests that have begun and not ended, by the context that they have begun in.

A task of asyncio has a context of its own, which `asyncio.to_thread` passes on; other
threads begin without a request. A generator has the context of whoever runs it: what
has begun in one is found where it runs, before what has begun in others.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any

from ...torch_internals.registry import stack

_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Begun:
    """A request that has begun.

    Args:
        owner: Whose requests these are: those of a guard.
        request: The request.
        frame: The frame of the code that has begun it.

    Attributes:
        owner, request: The same; None once it has ended, since what was started within
            it may go on in its context.
    """

    def __init__(self, owner: object, request: Any, frame: FrameType) -> None:
        self.owner: object = owner
        self.request: Any = request
        frame = _beginner(frame)
        is_suspended = frame.f_code.co_flags & _SUSPENDED
        self._frame = frame if is_suspended else None
        self.before = _innermost()
        _BEGUN.set(self)

    def end(self) -> None:
        """Ends it, in whatever context."""
        self.owner = self.request = self._frame = None
        _BEGUN.set(_innermost())

    def runs_in(self, frames: list[FrameType]) -> bool:
        """True unless it has begun in a generator that is none of some frames."""
        return self._frame is None or self._frame in frames


_BEGUN: ContextVar[Begun | None] = ContextVar("overflow_fast", default=None)


def request_of(owner: object) -> Any:
    """The request that this code is in, of one owner; None if it is in none."""
    found = [each for each in _begun() if each.owner is owner]
    if len(found) > 1:
        frames = stack()
        found = [each for each in found if each.runs_in(frames)] or found
    return found[0].request if found else None


def _begun() -> Iterator[Begun]:
    """Yields what has begun in this context, the last one first."""
    each = _BEGUN.get()
    while each is not None:
        yield each
        each = each.before


def _innermost() -> Begun | None:
    return next((each for each in _begun() if each.owner is not None), None)


def _beginner(frame: FrameType) -> FrameType:
    """The frame that has begun it: beyond context managers that do so for another."""
    around: FrameType | None = frame
    while around is not None:
        outer = around.f_back
        is_within = outer is not None and _is_of_contextlib(outer)
        is_manager = bool(around.f_code.co_flags & _SUSPENDED) and is_within
        if not (is_manager or _is_of_contextlib(around)):
            return around
        around = outer
    return frame


def _is_of_contextlib(frame: FrameType) -> bool:
    return frame.f_code.co_filename == contextlib.__file__
