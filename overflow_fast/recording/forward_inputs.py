"""The inputs of a model's outermost forwards, kept until their step is judged."""

from __future__ import annotations

from typing import Any, Protocol

from ..torch_internals.running import is_functional_call
from .batch import Given
from .loop_batches import LoopBatches

_MAX_BATCHES = 8  # forwards before a judgement whose inputs are kept


class ForwardCapture(Protocol):
    """Keeps the outermost forwards of a step, for a replay."""

    def begin(self, module: Any, args: Any, kwargs: Any, has_stand_ins: bool) -> None:
        """Keeps the inputs of a forward; see `ForwardInputs.have_stand_ins`."""

    def end(self, output: Any) -> None:
        """Keeps its output."""

    def clear(self) -> None:
        """Forgets the step."""


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
        capture: Keeps whole forwards for a replay; None for none.
    """

    def __init__(self, is_listed: bool, is_held: bool) -> None:
        self._is_listed = is_listed
        self._is_held = is_held
        self._given = Given()
        self._has_stand_ins = False
        self.given: dict[int, Given] = {}
        self.batches: dict[int, tuple[object, object]] = {}
        self.have_stand_ins: set[int] = set()
        self.loop_batches = LoopBatches()
        self.capture: ForwardCapture | None = None

    def begin(self, module: object, args: object, kwargs: object) -> None:
        """Notes what a forward is given, before it can write to it."""
        self._has_stand_ins = is_functional_call()
        if self.capture is not None:
            self.capture.begin(module, args, kwargs or {}, self._has_stand_ins)
        if self._is_listed:
            self._given = Given(args, kwargs)

    def end(self, number: int, args: object, kwargs: object, output: object) -> None:
        """Keeps the inputs of a forward that has returned, as those of a batch."""
        _keep(self.given, number, self._given)
        if self._has_stand_ins:
            self.have_stand_ins.add(number)
        if self._is_held:
            _keep(self.batches, number, (args, kwargs))
        if self.capture is not None:
            self.capture.end(output)

    def clear_capture(self) -> None:
        """Forgets the forwards that are kept for a replay."""
        if self.capture is not None:
            self.capture.clear()

    def clear(self) -> None:
        """Forgets the inputs."""
        self.batches.clear()
        self.have_stand_ins.clear()
        self.given.clear()


def _keep(kept: dict[int, Any], number: int, value: object) -> None:
    kept[number] = value
    if len(kept) > _MAX_BATCHES:
        del kept[next(iter(kept))]
