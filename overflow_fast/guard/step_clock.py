"""How much of a run is watched: its schedule, and what was left out before a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .options import Schedule
from .undo.restore_point import RestorePoint
from .watching.watch import ModelWatch


@dataclass(frozen=True)
class LeftOut:
    """The steps that were not judged, up to the one at hand.

    Attributes:
        num_steps: How many they are since the last step that was checked in full.
        by: The field of the guard's schedule that left the last of these out.
        total: How many they are in all.
        follows_check: A step was checked in full before these.
    """

    num_steps: int = 0
    by: str = ""
    total: int = 0
    follows_check: bool = False

    def and_step(self, left_out_by: str) -> LeftOut:
        """Returns the same behind a step.

        Args:
            left_out_by: The field that left it out, or "" where it was checked.
        """
        if not left_out_by:
            is_same = self.follows_check and not self.num_steps
            return self if is_same else LeftOut(total=self.total, follows_check=True)
        counts = self.num_steps + 1, left_out_by, self.total + 1
        return LeftOut(*counts, self.follows_check)

    def __str__(self) -> str:
        """Writes how many there are, and what that may have hidden."""
        steps = "1 step was" if self.num_steps == 1 else f"{self.num_steps} steps were"
        since = "since the last full check" if self.follows_check else "so far"
        return (
            f"{steps} not judged {since}, because of `schedule.{self.by}`: a "
            "non-finite update there would not have been noticed."
        )


class StepClock:
    """Numbers the steps, and attaches the hooks that each of them needs.

    Args:
        schedule: Chooses how much of each step is watched.
        watches: The watched models.
        start: The models as they were when the step began, or None.

    Attributes:
        step: The number of the step at hand.
        num_steps: The number of steps that are over.
        is_watched: The step is watched.
        left_out: The steps before the one at hand that were not judged.
    """

    def __init__(
        self,
        schedule: Schedule,
        watches: Sequence[ModelWatch],
        start: RestorePoint | None,
    ) -> None:
        self._schedule = schedule
        self._watches = watches
        self._start = start
        self._is_running = False
        self.step = 0
        self.num_steps = 0
        self.is_watched = False
        self.left_out = LeftOut()

    def start(self) -> None:
        """Begins to watch."""
        self._is_running = True
        self.begin()

    def stop(self) -> None:
        """Detaches all hooks."""
        self._is_running = self.is_watched = False
        for watch in self._watches:
            watch.detach()

    def watch(self, is_watched: bool) -> None:
        """Attaches the hooks that a watched step needs, or removes them."""
        self.is_watched = is_watched
        for watch in self._watches:
            watch.attach() if is_watched else watch.pause()
        if self._start is not None and is_watched:
            self._start.prepare()

    def set_step(self, number: int) -> None:
        """Gives the step at hand another number, from which the next ones count."""
        if number == self.step:
            return
        self.step = number
        if self._is_running:
            self.begin()

    def advance(self) -> None:
        """Ends the step at hand; `begin()` begins to watch the next."""
        left_out_by = self._schedule.left_out_by(self.step)
        self.left_out = self.left_out.and_step(left_out_by)
        self.step += 1
        self.num_steps += 1

    def begin(self) -> None:
        """Begins to watch the step at hand."""
        self.watch(not self._schedule.left_out_by(self.step))

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Watches nothing within; findings from before are judged as usual."""
        for watch in self._watches:
            watch.pause()
        try:
            yield
        finally:
            if self._is_running:
                self.watch(self.is_watched)
