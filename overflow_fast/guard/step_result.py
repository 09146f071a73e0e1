"""The bad frames of a step, as its judgement passes them to the policy."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.amp.grad_scaler import GradScaler

from .. import _C
from ..capture.schedule import LeftOut
from ..capture.step_tensors import StepTensors
from ..capture.watch import ModelWatch
from ..verdict.verdict import BadFrame
from .monitors.monitor import Notice
from .optimizers import OptimizerHook


@dataclass(frozen=True)
class StepResult:
    """The bad frames of a step, and the actions that are still possible.

    Attributes:
        step: The step's number.
        frames: Its bad frames.
        can_skip: The optimizer's step can still be skipped.
        skipped_by: The code that has skipped the step already, or "".
        tensors: Has the tensors that stand in no module's call, for evidence.
        notes: Further sentences for the report.
        hook: The hook of the optimizer that steps, or None.
        restore: Puts back what the forward changed; returns sentences about failures.
        makes_finite: True for a weight that a restoration makes finite again.
        is_of_step: Every rank judges it too.
        is_whole: All that the guard watches was checked, and no gradient is bad, also
            none that a GradScaler handles.
        is_check: It is not counted: `check()` was called.
        is_late: The step is over already (`sync="lagged"`).
        watches: The watches that have seen it, if it was run again; else empty.
        notices: What monitors say of it, if it is finite.
        left_out: The steps before it that were not judged.
    """

    step: int
    frames: list[BadFrame]
    can_skip: bool = False
    skipped_by: str = ""
    tensors: StepTensors | None = None
    notes: list[str] = field(default_factory=list)
    hook: OptimizerHook | None = None
    restore: Callable[[], list[str]] = list
    makes_finite: Callable[[torch.Tensor], bool] = lambda weight: False
    is_of_step: bool = True
    is_whole: bool = False
    is_check: bool = False
    is_late: bool = False
    watches: Sequence[ModelWatch] = ()
    notices: Sequence[Notice] = ()
    left_out: LeftOut = field(default_factory=LeftOut)

    @property
    def moment(self) -> str:
        """The moment at which it was found: see `Report.moment`."""
        if self.is_check:
            return "check"
        if not self.is_of_step:
            return "evaluation"
        return "after" if self.is_late else "before"


# Collects the bad frames of a step from the watches: on time, or one step later.


@dataclass
class PendingStep:
    """A step whose stats may still be on their way from a device.

    Attributes:
        number: The step's number.
        hook: The hook of the optimizer that makes it, or None.
        scaler: The GradScaler that steps the optimizer, or None.
        last_frame: The number of frames when it was judged: later ones are not of it.
        is_decided: It was decided on when its optimizer was called, by the frames that
            had arrived.
        skipped_by: The code that has skipped it, or "".
        left_out: The steps before it that were not judged.
    """

    number: int
    hook: OptimizerHook | None = None
    scaler: GradScaler | None = None
    last_frame: int = field(default_factory=_C.Recorder.num_frames)
    is_decided: bool = False
    skipped_by: str = ""
    left_out: LeftOut = field(default_factory=LeftOut)


class StepFrames:
    """The bad frames of the watches, by the step that they belong to.

    Args:
        watches: The watched models.
    """

    def __init__(self, watches: Sequence[ModelWatch]) -> None:
        self._watches = watches
        self._pending: collections.deque[PendingStep] = collections.deque()

    def send(self, is_lagged: bool = False) -> None:
        """Starts the copy of all stats to the host; does not wait."""
        for watch in self._watches:
            watch.frames.send(with_captured=not is_lagged)

    def receive(self, is_lagged: bool) -> Iterator[tuple[PendingStep, list[BadFrame]]]:
        """Takes in stats, and yields the pending steps with their bad frames.

        Incurs a CPU-GPU sync for each device, unless it is lagged.
        """
        for watch in self._watches:
            watch.frames.receive(is_lagged)
        while self._pending:
            step = self._pending.popleft()
            yield step, self.take(step)

    def postpone(self, step: PendingStep) -> None:
        """Yields a step from the next `receive()`."""
        self._pending.append(step)

    def take(self, step: PendingStep) -> list[BadFrame]:
        """Takes the bad frames of a step that have arrived."""
        return [
            BadFrame(watch, frame)
            for watch in self._watches
            for frame in watch.frames.take_bad(step.last_frame)
        ]

    def take_evaluated(self, *watches: ModelWatch) -> list[BadFrame]:
        """Takes the bad frames of models' forwards that ran without autograd."""
        return [
            BadFrame(w, frame) for w in watches for frame in w.frames.take_evaluated()
        ]

    def forget(self) -> None:
        """Forgets all frames, those of pending steps too. Incurs the sync."""
        self._pending.clear()
        for watch in self._watches:
            watch.frames.receive(is_lagged=False)
            watch.frames.take_bad(_C.Recorder.num_frames())
            watch.frames.take_evaluated()

    def end(self, is_lagged: bool) -> None:
        """Ends the judgement of a step."""
        for watch in self._watches:
            watch.end_judgement(is_lagged)
