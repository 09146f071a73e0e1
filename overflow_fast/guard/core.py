"""The core of a guard: the objects that its parts have in common, made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from .config import GuardConfig
from .isolation import ErrorIsolation
from .kept_calls.call_keeper import CallKeeper
from .measurements import Measurements
from .optimizers.last_steps import LastSteps
from .optimizers.optimizer_hook import OptimizerHook, living
from .ranks.agreement import Agreement
from .step_clock import StepClock
from .undo.restore_point import RestorePoint
from .verdict.rules import Rules
from .watching.watch import ModelWatch


@dataclass(frozen=True)
class GuardCore:
    """The objects that each part of a guard may need.

    Attributes:
        config: Its arguments.
        watches: The watched models.
        hooks: The optimizers' hooks.
        rules: The values that are allowed.
        start: The models as they were when the step began, or None.
        keeper: Keeps a step's calls, so that they can be made again, or None.
        full_watches: Makes watches of the models that look at everything.
        agreement: The ranks that decide together.
        isolation: Isolates the guard's own errors.
        clock: The step at hand: its number, and how much of it is watched.
        measurements: Its cost, headroom and flight record.
        last_steps: What explanations compare a step with: small weights as they were
            when the guard began, the settings of optimizers' last steps.
    """

    config: GuardConfig
    watches: Sequence[ModelWatch]
    hooks: Sequence[OptimizerHook]
    rules: Rules
    start: RestorePoint | None
    keeper: CallKeeper | None
    full_watches: Callable[[], list[ModelWatch]]
    agreement: Agreement
    isolation: ErrorIsolation
    clock: StepClock
    measurements: Measurements
    last_steps: LastSteps

    @property
    def undone_to(self) -> RestorePoint | None:
        """The beginning that a bad step puts back; None where it puts nothing back."""
        return self.start if self.config.may_restore else None

    def optimizers(self) -> list[Optimizer]:
        """The optimizers that still exist."""
        return living(self.hooks)
