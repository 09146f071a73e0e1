"""Replays a step with a change, and keeps what came of it."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch

from ..change import Change
from ..explanation import Remedy
from ..kept_call import KeptCall
from ..kinds import kinds_of
from ..outcome import Outcome
from ..rerun import Rerun
from .changes import FromLoss
from .line_edit import NotEditableError

_STEP_TIMES = 4.0
_LEAST_SECONDS = 5.0
_ENOUGH = 2  # remedies that help


class Trials:
    """The trials on one step.

    Args:
        rerun: Runs the step.
        budget: How many forwards may be run.
        step_seconds: How long a plain replay took.

    Attributes:
        remedies: What was tried, in order.
        notes: Why something could not be tried, in sentences.
    """

    def __init__(self, rerun: Rerun, budget: int, step_seconds: float) -> None:
        self.rerun = rerun
        self.remedies: list[Remedy] = []
        self.notes: list[str] = []
        self._most = rerun.num_forwards + budget
        self._end = time.perf_counter() + max(
            _LEAST_SECONDS, _STEP_TIMES * step_seconds
        )
        bad = [call for call in rerun.calls if _has_bad_gradients(call)]
        self._drops_gradients = bool(bad)
        self._has_loss = all(call.returns_loss for call in bad)

    @property
    def is_over(self) -> bool:
        """Tells whether enough has helped, or the budget is spent."""
        is_spent = self.rerun.num_forwards + len(self.rerun.calls) > self._most
        num_good = sum(each.is_finite for each in self.remedies)
        return is_spent or num_good >= _ENOUGH or time.perf_counter() > self._end

    def attempt(self, remedy: Remedy, change: Change) -> bool:
        """Replays the step with a change; returns True if it is finite then.

        Args:
            remedy: The change in words and as code; its outcome is filled in.
            change: The change.

        Raises:
            NotEditableError: If the change could not be made.
        """
        change = FromLoss(change) if self._drops_gradients else change
        outcome = self.rerun.run(change=change)
        if isinstance(outcome.error, NotEditableError):
            raise outcome.error
        is_finite = outcome.is_clean
        is_tried = not isinstance(outcome.error, torch.OutOfMemoryError)
        if is_finite and not self._is_whole(outcome):
            self._note_forward(remedy)
            return False
        loss = _loss_of(outcome) if is_finite else None
        self.remedies.append(
            replace(remedy, tried=is_tried, is_finite=is_finite, loss=loss)
        )
        return is_finite

    def _is_whole(self, outcome: Outcome) -> bool:
        """Tells whether loss and backward were replayed, and not the forward alone."""
        return self._has_loss and outcome.has_backward

    def _note_forward(self, remedy: Remedy) -> None:
        """Notes what makes the forward finite where the loss could not be tried."""
        if not self.notes:
            self.notes.append(
                f"Tried: {remedy.text} (`{remedy.code}`): the forward is finite; loss "
                "and backward could not be tried: use `guard.run(lambda: loss)`."
            )


def _loss_of(outcome: Outcome) -> float | None:
    """The loss; the mean of those of micro-batches."""
    losses = [float(loss) for loss in outcome.losses]
    if not losses or not all(map(math.isfinite, losses)):
        return None
    return sum(losses) / len(losses)


def _has_bad_gradients(call: KeptCall) -> bool:
    return any(kinds_of(held) for held in call.held.values())
