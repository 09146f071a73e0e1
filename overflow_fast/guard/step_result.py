"""The bad frames of a step, as its judgement passes them to the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ..recording.schedule import LeftOut
from ..recording.step_tensors import StepTensors
from ..recording.watch import ModelWatch
from ..verdict.verdict import BadFrame
from .monitors.monitor import Notice
from .optimizer_hook import OptimizerHook


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
