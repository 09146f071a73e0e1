"""The step at hand: its number, and how much of it is watched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from ..recording.schedule import LeftOut, ScanLevel, WatchSchedule
from ..recording.watch import ModelWatch
from ..report.report import Cost
from ..report.run_lines import log_left_out
from ..state.step_start import StepStart
from ..verdict.headroom import HeadroomTracker


class StepClock:
    """Numbers the steps, and attaches the hooks that each of them needs.

    Args:
        schedule: Chooses how much of each step is watched.
        watches: The watched models.
        headroom: Tracks the headroom of the watched steps.
        start: The models as they were when the step began, or None.
        acts: The policy may do more than warn, where a step is judged.

    Attributes:
        step: The number of the step at hand.
        num_steps: The number of steps that are over.
        level: How much of the step is watched.
        left_out: The steps before the one at hand that were not judged.
        on_begin: Called when a watched step begins.
    """

    def __init__(
        self,
        schedule: WatchSchedule,
        watches: Sequence[ModelWatch],
        headroom: HeadroomTracker,
        start: StepStart | None,
        acts: bool,
    ) -> None:
        self._schedule = schedule
        self._watches = watches
        self._headroom = headroom
        self._start = start
        self._warns = acts
        self._is_running = False
        self.step = 0
        self.num_steps = 0
        self.level = ScanLevel.OFF
        self.left_out = LeftOut()
        self.on_begin: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Begins to watch."""
        self._is_running = True
        self.begin()

    def stop(self) -> None:
        """Detaches all hooks."""
        self._is_running = False
        self.level = ScanLevel.OFF
        for watch in self._watches:
            watch.detach()

    def set_level(self, level: ScanLevel) -> None:
        """Attaches the hooks that a step of this level needs, and removes others."""
        self.level = level
        self._headroom.begin_step()
        for watch in self._watches:
            watch.attach() if level is ScanLevel.ALL else watch.pause()
        if self._start is not None and level is not ScanLevel.OFF:
            self._start.prepare()

    def set_step(self, number: int) -> None:
        """Gives the step at hand another number, from which the next ones count."""
        if number == self.step:
            return
        self._schedule.move(number - self.step)
        self.step = number
        if self._is_running:
            self.begin()

    def advance(self) -> None:
        """Ends the step at hand; `begin()` begins to watch the next."""
        left_out_by = self._schedule.left_out_by
        self.left_out = self.left_out.and_step(self.level, left_out_by)
        self.step += 1
        self.num_steps += 1

    def note(self, cost: Cost, is_bad: bool) -> None:
        """Notes what the step before has cost, for the schedule.

        Args:
            cost: The cost.
            is_bad: The step was bad: the next is watched as a whole.
        """
        if is_bad:
            self._schedule.alarm()
        seconds = cost.guard_seconds, cost.step_seconds
        self._schedule.note(self.step - 1, self.level, *seconds)

    def begin(self) -> None:
        """Begins to watch the step at hand."""
        self.set_level(self._schedule.level(self.step))
        if self._warns and self._schedule.left_out_by == "budget":
            self._warns = False
            log_left_out(self._schedule, self.step)
        if self.level is not ScanLevel.OFF:
            self.on_begin()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Watches nothing within; findings from before are judged as usual."""
        for watch in self._watches:
            watch.pause()
        try:
            yield
        finally:
            if self._is_running:
                self.set_level(self.level)
