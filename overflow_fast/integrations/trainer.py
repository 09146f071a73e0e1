"""A guard as a callback of transformers' Trainer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

from ..guard.report.report import NonFiniteError
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
        self._has_warned_of_filter = False
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
        if report is None or report.moment == "evaluation":  # of no loss of a step
            return
        hides = args.logging_nan_inf_filter and report.verdict.reaches_loss
        if hides and not self._has_warned_of_filter:
            self._has_warned_of_filter = True
            _log.warning(
                "Trainer's log does not show this loss: with "
                "logging_nan_inf_filter=True it puts the mean of the losses since the "
                "last logged step in its place, or 0 where there is none (as with "
                "logging_steps=1). With False it logs this loss as it is, and nan for "
                "all after it."
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
