"""The inputs of a model's outermost forwards, kept until their step is judged."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch

from ...torch_internals.running import is_functional_call
from .inputs import Given
from .loop_batches import LoopBatches

_MOST = 8  # forwards; of more in a step the first are not searched; chosen


class ForwardCapture(Protocol):
    """Keeps the outermost forwards of a step, or of requests, for a replay."""

    def begin(self, module: Any, args: Any, kwargs: Any, has_stand_ins: bool) -> None:
        """Keeps the inputs of a forward; see `ForwardInputs.have_stand_ins`."""

    def end(self, output: Any, loss: torch.Tensor | None) -> None:
        """Keeps its output, and the loss that is in it."""

    def leave(self) -> None:
        """Keeps a forward that an exception has left."""

    def clear(self) -> None:
        """Forgets the step."""


class _OfThread(threading.local):
    """The forward that runs in a thread."""

    given = Given()
    running: tuple[object, object] = None, None
    has_stand_ins = False


class ForwardInputs:
    """The inputs of the last forwards, by the numbers of their batches.

    Args:
        is_listed: Keep inputs weakly, for the search for where a bad one came from.
        is_held: Keep the inputs themselves, for the evidence.

    Attributes:
        given: Their tensors, held weakly.
        batches: The inputs themselves.
        have_stand_ins: The batches in which other tensors stood in for the model's own
            (`functional_call`).
        loop_batches: The batches that the trainer took from its loader.
        captures: Keep whole forwards for a replay: those of a step, and of requests.
        caller: The code that calls the models, in words.
    """

    def __init__(self, is_listed: bool, is_held: bool) -> None:
        self._is_listed = is_listed
        self._is_held = is_held
        self._now = _OfThread()
        self.given: dict[int, Given] = {}
        self.batches: dict[int, tuple[object, object]] = {}
        self.have_stand_ins: set[int] = set()
        self.loop_batches = LoopBatches()
        self.captures: list[ForwardCapture] = []
        self.caller = "the training loop"

    def begin(self, module: object, args: object, kwargs: object) -> None:
        """Notes what a forward is given, before it can write to it."""
        now = self._now
        now.has_stand_ins = is_functional_call()
        for capture in self.captures:
            capture.begin(module, args, kwargs or {}, now.has_stand_ins)
        if self._is_listed:
            now.given = Given(args, kwargs)
        if self._is_held:
            now.running = args, kwargs

    def end(
        self,
        number: int,
        args: object,
        kwargs: object,
        output: object,
        loss: torch.Tensor | None = None,
    ) -> None:
        """Keeps the inputs of a forward that has returned, as those of a batch."""
        self._keep_inputs(number, (args, kwargs))
        for capture in self.captures:
            capture.end(output, loss)

    def leave(self, number: int) -> None:
        """Keeps the inputs of a forward that an exception has left."""
        self._keep_inputs(number, self._now.running)
        for capture in self.captures:
            capture.leave()

    def _keep_inputs(self, number: int, batch: tuple[object, object]) -> None:
        now = self._now
        _keep(self.given, number, now.given)
        if now.has_stand_ins:
            self.have_stand_ins.add(number)
        if self._is_held:
            _keep(self.batches, number, batch)
            now.running = None, None

    def end_step(self, is_over: bool) -> None:
        """Forgets the forwards that are kept for a replay.

        Args:
            is_over: No bad frame of the step is left: forget the inputs as well.
        """
        for capture in self.captures:
            capture.clear()
        if is_over:
            self.batches.clear()
            self.have_stand_ins.clear()
            self.given.clear()


def _keep(kept: dict[int, Any], number: int, value: object) -> None:
    kept[number] = value
    if len(kept) > _MOST:
        oldest, *_ = tuple(kept)  # other threads may keep theirs meanwhile
        kept.pop(oldest, None)
