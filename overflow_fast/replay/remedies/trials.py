"""Replays a step with a change, and keeps what came of it."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from ..change import Change
from ..explanation import Remedy
from ..kept_call import KeptCall
from ..kinds import kinds_of
from ..outcome import Outcome
from ..rerun import Rerun
from ..team import text_of
from .changes import Eagerly, FromLoss
from .ground import Ground, Trial
from .line_edit import NotEditableError

STEP_TIMES = 4.0
LEAST_SECONDS = 5.0
_ENOUGH = 2  # remedies that help; of changes on top of others, one


def seconds_for(step_seconds: float) -> float:
    """The seconds that experiments on a step may take, by how long a replay takes."""
    return max(LEAST_SECONDS, STEP_TIMES * step_seconds)


class Trials:
    """The trials on one step.

    Args:
        rerun: Runs the step.
        budget: How many forwards may be run.
        step_seconds: How long a plain replay took.
        is_eager: Compiled code runs eagerly in the trials.

    Attributes:
        remedies: What was tried, in order.
        notes: Why something could not be tried, in sentences.
        ground: The changes that are in place.
        failed: What did not help on this ground, with the call that was bad then.
    """

    def __init__(
        self,
        rerun: Rerun,
        budget: int,
        step_seconds: float,
        is_eager: bool = False,
    ) -> None:
        self._is_eager = is_eager
        self.rerun = rerun
        self.remedies: list[Remedy] = []
        self.notes: list[str] = []
        self.ground = Ground()
        self.failed: list[tuple[Trial, int]] = []
        self._budget = budget
        self._most = rerun.num_forwards + budget
        self._end = time.perf_counter() + seconds_for(step_seconds)
        bad = [call for call in rerun.calls if _has_bad_gradients(call)]
        self._drops_gradients = bool(bad)
        self._has_loss = all(call.returns_loss for call in bad)

    @property
    def calls(self) -> list[KeptCall]:
        """The calls of the step, with the changes that are in place."""
        return self.ground.change.calls(self.rerun.calls)

    @property
    def has_helped(self) -> bool:
        """Tells whether something has made the step finite."""
        return any(each.is_finite for each in self.remedies)

    @property
    def is_over(self) -> bool:
        """Tells whether enough has helped, or the budget is spent."""
        num_good = sum(each.is_finite for each in self.remedies)
        enough = 1 if self.ground.changes else _ENOUGH
        return num_good >= enough or not self.may_run()

    def may_run(self) -> bool:
        """Tells whether the budget allows one replay more."""
        is_spent = self.rerun.num_forwards + len(self.rerun.calls) > self._most
        return not is_spent and time.perf_counter() <= self._end

    def renew(self) -> None:
        """Allows as many forwards again, within the same time."""
        self._most = self.rerun.num_forwards + self._budget

    def go_on(self, ground: Ground) -> None:
        """Puts other changes in place, on which further ones are tried."""
        self.ground, self.failed = ground, []

    def attempt(self, trial: Trial) -> bool:
        """Replays the step with a change; returns True if it is finite then.

        Args:
            trial: The change. It is made besides those that are in place.

        Raises:
            NotEditableError: If the change could not be made.
        """
        ground = self.ground.with_trial(trial)
        outcome = self.run(ground.change)
        if isinstance(outcome.error, NotEditableError):
            raise outcome.error
        is_finite = outcome.is_clean
        is_tried = outcome.error is None
        remedy = ground.remedy
        if outcome.error is not None:
            remedy = replace(remedy, why=f"the replay raised {text_of(outcome.error)}")
        if is_finite and not self._is_whole(outcome):
            self._note_forward(remedy)
            return False
        if not is_finite and outcome.error is None:
            self.failed.append((trial, outcome.bad_call))
        loss = _loss_of(outcome) if is_finite else None
        self.remedies.append(
            replace(remedy, tried=is_tried, is_finite=is_finite, loss=loss)
        )
        return is_finite

    def run(self, change: Change, armed: int = -1) -> Outcome:
        """Replays the step with a change; see `Rerun.run()`."""
        change = FromLoss(change) if self._drops_gradients else change
        change = Eagerly(change) if self._is_eager else change
        return self.rerun.run(armed, change=change)

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
