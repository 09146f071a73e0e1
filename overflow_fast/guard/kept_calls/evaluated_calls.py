"""The last forwards without autograd of a training, held until they are judged.

One is judged by itself, where no step keeps it: an observation's normalizer, a teacher,
a validation. On a device that is when the stats of a later one are sent.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...torch_internals.running import is_recorded
from ..process import world_size
from ..requests.held_call import CallHolder, HeldCall
from ..verdict.bad_frames import BadFrame
from ..watching.entries import entries_of
from ..watching.watch import ModelWatch

_MOST = 2  # the last one's stats may be on their way from a device
_RANKS = (
    "The forward was not replayed: there are several ranks, and collectives in it "
    "would wait for the others."
)
_NOT_HELD = "The forward was not replayed: what it was called with was not held{}."
_OF_PART = ", as it began at a part of the model"
_ENTRY = " Within `guard.request()` it is."


class _OfThread(threading.local):
    call: HeldCall | None = None

    def __reduce__(self) -> tuple[type[_OfThread], tuple[()]]:  # a copied guard's
        return _OfThread, ()


class EvaluatedCalls:
    """Holds what forwards without autograd were called with.

    Attributes:
        is_off: They are judged as requests, which hold them.
    """

    def __init__(self) -> None:
        self.is_off = False
        self._now = _OfThread()
        self._holder = CallHolder()
        self._ended: dict[tuple[int, int], HeldCall] = {}

    def begin(
        self, module: nn.Module, args: Any, kwargs: Any, has_stand_ins: bool = False
    ) -> None:
        """Holds the arguments; nothing where a step keeps them, or they are unseen."""
        self._now.call = None
        is_known = args is not None and not (has_stand_ins or is_recorded())
        if is_known and not (self.is_off or torch.is_grad_enabled()):
            self._now.call = self._holder.hold(module, args, kwargs or {})

    def end(self, output: Any, loss: torch.Tensor | None) -> None:
        """Does nothing: it ends where it is judged."""

    def leave(self) -> None:
        """Lets go of one that an exception has left: it is judged with its step."""
        self._now.call = None

    def clear(self) -> None:
        """Lets go of all."""
        self.leave()
        self._ended.clear()

    @contextlib.contextmanager
    def ending(self, watch: ModelWatch, batch: int) -> Iterator[None]:
        """Ends the forward of this thread, which is judged within."""
        call, self._now.call = self._now.call, None
        if call is None or call.module is not watch.called:
            yield
            return
        call.end()
        self._ended[id(watch), batch] = call
        if len(self._ended) > _MOST:
            del self._ended[next(iter(self._ended))]
        try:
            yield
        finally:
            if not call.is_on_device:
                self._ended.pop((id(watch), batch), None)

    def of(self, bad: BadFrame) -> HeldCall | str:
        """The forward that a bad frame is of, or why it cannot be made again."""
        watch = bad.watch
        if world_size() > 1:
            return _RANKS
        call = self._ended.get((id(watch), watch.frames.batch_of(bad.frame)))
        if call is not None:
            return call
        model, part = watch.model, watch.called
        if model is None or part is None or part is model:
            return _NOT_HELD.format("")
        is_entry = any(each is part for each in entries_of(model))
        return _NOT_HELD.format(_OF_PART) + _ENTRY * is_entry
