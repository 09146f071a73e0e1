"""A guard as a callback of transformers' Trainer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

import torch

from ..guard.report.report import NonFiniteError, Report
from ..torch_internals.registry import callers
from .kept_step import KeptStep
from .patched_methods import JudgedMethod, PatchedMethod
from .trainer_support import GuardOwner, has_owner

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "overflow_fast.integrations.trainer needs transformers: run "
        f"`pip install transformers` ({error})"
    ) from error

_log = logging.getLogger("overflow_fast")
# Of Trainer: the sum of the losses that it has logged, and up to which step it has.
_TOTAL, _LAST_LOGGED = "_total_loss_scalar", "_globalstep_last_logged"


class TrainerGuardCallback(GuardOwner, TrainerCallback):
    """Attaches an `OverflowGuard` while a Trainer trains; see `GuardOwner`.

    The learning rate's schedule pauses in skipped steps. A step's number is the
    Trainer's `global_step` when it began, also after a resume. A checkpoint that is due
    is not saved if it is non-finite: the last good one stays, and the callback raises
    `NonFiniteError`, or logs an error if the policy is not to raise.

    Example:
        >>> callback = TrainerGuardCallback(on_overflow="skip", log="guard.jsonl")
    """

    def __init__(
        self,
        *,
        evaluation: Literal["log", "alarm"] = "log",
        **arguments: Any,
    ) -> None:
        super().__init__(evaluation=evaluation, **arguments)
        self._evaluated = 0  # batches of the evaluation that runs
        self._last_seen: Report | None = None
        self._steps: list[PatchedMethod] = []
        self._has_warned_of_filter = False

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        """Attaches a guard, and removes one that an earlier training has left."""
        self.remove_guard()
        trainer = self._trainer()
        engine = getattr(trainer, "deepspeed", None)
        model = kwargs["model"] if engine is None else engine
        guard = self.attach_guard(model, kwargs["optimizer"])
        guard.step = state.global_step
        self._last_seen, self._has_warned_of_filter = None, False
        if trainer is not None:
            kept = KeptStep(
                *(trainer, "compute_loss", guard, ("log",), _is_training),
                records_loss=True,
            )
            self._steps = [
                kept,
                JudgedMethod(trainer, "training_step", guard),
                PatchedMethod(trainer, "prediction_step", self._before_prediction),
            ]
            if hasattr(trainer, KeptLog.METHOD) and not args.logging_nan_inf_filter:
                self._steps += [log := KeptLog(trainer), NotedLoss(trainer, log)]

    def _trainer(self) -> Any:
        """The Trainer that calls this object, which it does not hand over."""
        for caller in callers():
            handler = getattr(caller, "callback_handler", None)
            if any(each is self for each in getattr(handler, "callbacks", ())):
                return caller
        return None

    def remove_guard(self) -> None:
        """Detaches the guard, and puts the Trainer's method back."""
        for each in self._steps:
            each.remove()
        self._steps = []
        super().remove_guard()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_steps": []}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sets the step's number to the Trainer's."""
        if self.guard is not None:
            self.guard.step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Checks the state to be saved; warns of a loss that Trainer's log hides."""
        self._check_before_saving(args, control)
        report = None if self.guard is None else self.guard.last_report
        if report is None or report is self._last_seen:
            return
        self._last_seen = report
        hides = args.logging_nan_inf_filter and report.verdict.reaches_loss
        if hides and not self._has_warned_of_filter:
            self._has_warned_of_filter = True
            _log.warning(
                "Trainer's log does not show this loss: with "
                "logging_nan_inf_filter=True it puts the mean of the losses since the "
                "last logged step in its place, or 0 where there is none (as with "
                "logging_steps=1). To log it, pass "
                "TrainingArguments(logging_nan_inf_filter=False)."
            )

    def _before_prediction(self, *args: Any, **kwargs: Any) -> None:
        self.note_evaluation(self._evaluated)
        self._evaluated += 1

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        """Ends a batch of an evaluation."""
        self.note_evaluation(None)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends an evaluation."""
        self._evaluated = 0

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Checks the state to be saved."""
        self._check_before_saving(args, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Removes the guard."""
        self.remove_guard()

    def _check_before_saving(self, args: Any, control: Any) -> None:
        saves_best = control.should_evaluate and args.save_strategy == "best"
        if self.guard is None or not (control.should_save or saves_best):
            return
        try:
            self.guard.assert_finite_state(joint=True)
        except NonFiniteError as error:
            if self.raises:
                raise
            _log.error("No checkpoint was saved; the last good one stays. %s", error)
            control.should_save = False
            # The best checkpoint is saved by its score, without another check.
            control.should_evaluate = control.should_evaluate and not saves_best


class KeptLog(PatchedMethod):
    """Stands for the method that logs the loss: a nan is logged once, for its steps.

    Trainer clears the sum of the losses by subtracting it from itself, which leaves a
    nan or an inf nan: all later losses in its log were nan. And it adds each logged sum
    up for the final `train_loss`: that is the mean of the losses that were finite.

    Args:
        trainer: The Trainer, whose log shows nan and inf.
    """

    METHOD = "_maybe_log_save_evaluate"

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer, self.METHOD, lambda *_, **__: True)
        self._first = trainer.state.global_step
        self._missing = 0.0  # steps whose loss was not finite; parts of an accumulation
        self._losses: torch.Tensor | None = None  # since the last logged step

    def note(self, loss: torch.Tensor) -> None:
        """Adds up a loss: finite ones, the steps that they are of, and the others."""
        is_finite = loss.isfinite()
        of = getattr(self.owner, "current_gradient_accumulation_steps", 1)
        steps = is_finite / of, ~is_finite / of
        noted = torch.stack([loss.where(is_finite, 0.0), *steps])
        self._losses = noted if self._losses is None else self._losses + noted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trainer, last = self.owner, getattr(self.owner, _LAST_LOGGED, None)
        before = getattr(trainer, _TOTAL, 0.0)
        result = super().__call__(*args, **kwargs)
        total = args[0] if args else kwargs.get("tr_loss")
        if self.is_removed or last is None or not isinstance(total, torch.Tensor):
            return result
        # Where it has logged, or ends, it waits for the sum: no sync is added.
        was_logged = getattr(trainer, _LAST_LOGGED) != last
        ends = trainer.state.global_step >= trainer.state.max_steps
        ends |= trainer.control.should_training_stop
        if (was_logged or ends) and not total.isfinite():
            finite = self._finite_since(last)
            total.fill_(0.0 if was_logged else finite)
            setattr(trainer, _TOTAL, before + finite * was_logged)
        if was_logged:
            self._losses = None
        if ends:
            self._spread(total.item())
        return result

    def _finite_since(self, last: int) -> float:
        """The sum of the finite losses since a step; counts the steps of others."""
        steps = self.owner.state.global_step - last
        losses = [0.0, 0, steps] if self._losses is None else self._losses.tolist()
        self._losses = None
        self._missing += losses[2]
        return float(losses[0])

    def _spread(self, rest: float) -> None:
        """Makes Trainer's division by all steps one by those that were finite."""
        steps = self.owner.state.global_step - self._first
        share, self._missing = self._missing / max(steps, 1), 0.0
        if 0 < share < 1:
            sum_of_all = getattr(self.owner, _TOTAL) + rest
            setattr(self.owner, _TOTAL, sum_of_all / (1 - share) - rest)


class NotedLoss(PatchedMethod):
    """Stands for the method that makes a step, and notes the loss that it returns.

    Args:
        trainer: The Trainer.
        log: Adds it up.
    """

    def __init__(self, trainer: Any, log: KeptLog) -> None:
        super().__init__(trainer, "training_step", lambda *_, **__: True)
        self._log = log

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().__call__(*args, **kwargs)
        if not self.is_removed and isinstance(loss, torch.Tensor):
            self._log.note(loss.detach())
        return loss


def _is_training(*args: Any, **kwargs: Any) -> bool:
    """Returns True for a call that backward follows; evaluation wants the outputs."""
    wants_outputs = kwargs.get("return_outputs", args[2] if len(args) > 2 else False)
    return not wants_outputs


def add_to(trainer: Any, arguments: Mapping[str, Any]) -> TrainerGuardCallback | None:
    """Gives a Trainer the callback, unless it has one or a detector; returns it."""
    has_detector = any(
        getattr(each, "value", each) == "underflow_overflow"
        for each in trainer.args.debug
    )
    if has_detector or has_owner(trainer.callback_handler.callbacks):
        return None
    made = TrainerGuardCallback(**arguments)
    trainer.add_callback(made)
    return made
