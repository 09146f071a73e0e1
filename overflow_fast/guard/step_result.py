"""The bad frames of a step as its judgement collected them, for the policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..recording.step_tensors import StepTensors
from ..verdict.verdict import BadFrame
from .optimizer_hook import OptimizerHook


@dataclass(frozen=True)
class StepResult:
    """The bad frames of a step, and what can still be done about it.

    Attributes:
        step: The step's number.
        frames: Its bad frames.
        can_skip: Whether the optimizer can still be kept from stepping.
        skipped_by: Who has skipped the step already, or "".
        tensors: What was scanned besides the calls, for evidence.
        notes: What the report should say besides.
        gate: The optimizer's that steps, or None.
        restore: Puts back what the forward changed, and says what could not be.
        is_of_step: Whether every rank judges it too.
        is_whole: Whether all that the guard watches was looked at, and no gradient is
            bad, whoever's business that may be.
        is_check: Whether nobody counts it: `check()` was called.
        is_late: Whether the step is over already (`sync="lagged"`).
    """

    step: int
    frames: list[BadFrame]
    can_skip: bool = False
    skipped_by: str = ""
    tensors: StepTensors | None = None
    notes: list[str] = field(default_factory=list)
    gate: OptimizerHook | None = None
    restore: Callable[[], list[str]] = list
    is_of_step: bool = True
    is_whole: bool = False
    is_check: bool = False
    is_late: bool = False

    @property
    def moment(self) -> str:
        """When it was found: see `Report.moment`."""
        if self.is_check:
            return "check"
        if not self.is_of_step:
            return "evaluation"
        return "after" if self.is_late else "before"
