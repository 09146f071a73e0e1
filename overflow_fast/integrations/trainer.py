"""The guard as a callback of transformers' Trainer."""

from __future__ import annotations

import logging
from typing import Any

from ..report.report import NonFiniteError, Report
from .trainer_support import GuardOwner

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "overflow_fast.integrations.trainer needs transformers: run "
        f"`pip install transformers` ({error})"
    ) from error

_log = logging.getLogger("overflow_fast")


class GuardCallback(GuardOwner, TrainerCallback):
    """Puts an `OverflowGuard` on the model while a Trainer trains; see `GuardOwner`.

    The learning rate's schedule stands still in skipped steps. A step's number is the
    Trainer's `global_step` when it began, also after a resume. Where a checkpoint is
    due, nothing is saved that is not finite: the last good one stays, and the callback
    raises `NonFiniteError`, or logs an error where the policy is not to raise.

    Example:
        >>> callback = GuardCallback(on_overflow="skip", log="guard.jsonl")
    """

    def __init__(self, *, learn: int | None = None, **arguments: Any) -> None:
        super().__init__(learn=learn, **arguments)
        self._last_seen: Report | None = None
        self._has_told_of_filter = False

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        """Puts a guard on, and takes one off that an earlier training has left."""
        self.take_off()
        guard = self.put_on(kwargs["model"], kwargs["optimizer"])
        guard.step = state.global_step
        self._last_seen, self._has_told_of_filter = None, False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gives the step the Trainer's number."""
        if self.guard is not None:
            self.guard.step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Looks at what would be saved, and at what Trainer does not show."""
        self._gate(args, control)
        report = None if self.guard is None else self.guard.last_report
        if report is None or report is self._last_seen:
            return
        self._last_seen = report
        hides = args.logging_nan_inf_filter and report.verdict.reaches_loss
        if hides and not self._has_told_of_filter:
            self._has_told_of_filter = True
            _log.warning(
                "Trainer's log will not show it: with logging_nan_inf_filter=True a "
                "nan or inf loss is counted as the mean of those before. To see it: "
                "TrainingArguments(logging_nan_inf_filter=False)."
            )

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Looks at what would be saved."""
        self._gate(args, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes the guard off."""
        self.take_off()

    def _gate(self, args: Any, control: Any) -> None:
        saves_best = control.should_evaluate and args.save_strategy == "best"
        if self.guard is None or not (control.should_save or saves_best):
            return
        try:
            self.guard.assert_finite_state(joint=True)
        except NonFiniteError as error:
            if self.raises:
                raise
            _log.error("No checkpoint is saved, the last good one stays. %s", error)
            control.should_save = False
            # What is best is saved by how it does, without asking again.
            control.should_evaluate = control.should_evaluate and not saves_best
