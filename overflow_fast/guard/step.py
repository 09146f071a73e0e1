"""A step of a guarded run: what is known of it, and how much of it is watched."""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .. import _C
from ..scanner.text import counted
from .monitors.monitor import Notice
from .optimizers.engines import LossScaler
from .optimizers.optimizer_hook import OptimizerHook
from .report.cost import Cost
from .undo.restore_point import RestorePoint
from .verdict.bad_frames import BadFrame
from .verdict.verdict import Verdict
from .watching.judged_tensors import ScanLevel
from .watching.overflow_flags import OverflowFlags
from .watching.watch import ModelWatch


@dataclass(frozen=True)
class LeftOut:
    """The steps that were not judged, up to the one at hand.

    Attributes:
        num_steps: How many they are since the last step that was checked in full.
        by: The fields of the guard's schedule that left these out.
        total: How many they are in all.
        follows_check: A step was checked in full before these.
    """

    num_steps: int = 0
    by: tuple[str, ...] = ()
    total: int = 0
    follows_check: bool = False

    def and_step(self, level: ScanLevel, left_out_by: str) -> LeftOut:
        """Returns the same behind a step.

        Args:
            level: How much of it was checked.
            left_out_by: The field that left it out, or "".
        """
        if level is ScanLevel.ALL:
            is_same = self.follows_check and not self.num_steps
            return self if is_same else LeftOut(total=self.total, follows_check=True)
        if level is ScanLevel.GRADIENTS:
            return self
        by = self.by if left_out_by in self.by else (*self.by, left_out_by)
        return LeftOut(self.num_steps + 1, by, self.total + 1, self.follows_check)

    def __str__(self) -> str:
        """Writes how many there are, and what that may have hidden."""
        steps = "1 step was" if self.num_steps == 1 else f"{self.num_steps} steps were"
        since = "since the last full check" if self.follows_check else "so far"
        by = " and ".join(f"`schedule.{argument}`" for argument in self.by)
        return (
            f"{steps} not judged {since}, because of {by}: a non-finite update there "
            "would not have been noticed."
        )


@dataclass
class Step:
    """A step, as it is judged at once; the pipeline fills it in on the way.

    Attributes:
        number: The step's number.
        hook: The hook of the optimizer that makes it, or None.
        scaler: The GradScaler, or engine's scaler, that steps the optimizer, or None.
        left_out: The steps before it that were not judged.
        moment: When it is judged; see `Report.moment`. An "evaluation" is a forward
            without autograd, which other ranks do not judge too; a "check" is not
            counted; "after" it was made come lagged verdicts; out of one that was
            "raised", the program's own code did that.
        can_restore: What its forward has changed can be put back.
        skipped_by: The code that has skipped it already, or "".
        last_frame: The number of frames when it was judged: later ones are not of it.
        is_decided: It was decided on when its optimizer was called, by the frames that
            had arrived.
        frames: Its bad frames.
        is_whole: All that the guard watches was checked, and no gradient is bad, also
            none that a GradScaler handles.
        watches: The watches that have seen it, if it was run again; else empty.
        verdict: The verdict on its bad frames, once it was asked for.
        notices: What monitors say of it, if it is finite.
        notes: Further sentences for the report.
        policy: What is done about it, in place of the guard's policy; "" for that.
    """

    number: int
    hook: OptimizerHook | None = None
    scaler: LossScaler | None = None
    left_out: LeftOut = field(default_factory=LeftOut)
    moment: Literal["before", "after", "check", "evaluation", "raised"] = "before"
    can_restore: bool = False
    skipped_by: str = ""
    last_frame: int = field(default_factory=_C.Recorder.num_frames)
    is_decided: bool = False
    frames: list[BadFrame] = field(default_factory=list)
    is_whole: bool = False
    watches: Sequence[ModelWatch] = ()
    verdict: Verdict | None = None
    notices: Sequence[Notice] = ()
    notes: list[str] = field(default_factory=list)
    policy: Literal["", "warn"] = ""


# The choice of the steps to watch: by number, by range, or within a budget.


_MEMORY = 8  # steps of a level whose median is its cost: the first ones take longer
_TRIALS = 3  # checks of gradients before it is decided whether they fit
_MAX_EVERY = 1000  # steps; chosen, not measured
_log = logging.getLogger("overflow_fast")


class WatchSchedule:
    """Decides how much of each step is checked.

    Args:
        every: Check every N-th step, from `warmup` on.
        warmup: How many steps are left out at first.
        ranges: Only steps in one of these half-open ranges; None for all.
        budget: The share of a step's time that the guard may take on average, or None.
            Gradients are checked in every step if they fit the budget, everything else
            as often as the rest of it allows.
        has_gradients: True if gradients are to be checked at all.

    Attributes:
        left_out_by: The field that leaves out the step whose level was last asked
            for, or "".
    """

    def __init__(
        self,
        every: int = 1,
        warmup: int = 0,
        ranges: Sequence[tuple[int, int]] | None = None,
        budget: float | None = None,
        has_gradients: bool = True,
    ) -> None:
        self._every = every
        self._warmup = warmup
        self._ranges = ranges
        self.budget = budget
        self._has_gradients = has_gradients
        self._costs: dict[ScanLevel, deque[float]] = {}
        self._bare: deque[float] = deque(maxlen=_MEMORY)
        self._next_all = 0
        self._next_gradients = 0
        self._is_alarmed = False
        self.left_out_by = ""

    def level(self, step: int) -> ScanLevel:
        """Returns the part of a step to check."""
        self.left_out_by = self._left_out_by(step)
        if self.left_out_by:
            return ScanLevel.OFF
        return ScanLevel.ALL if self._allows_all(step) else ScanLevel.GRADIENTS

    def _left_out_by(self, step: int) -> str:
        if step < self._warmup:
            return "warmup"
        if (step - self._warmup) % self._every:
            return "every"
        if self._ranges is not None and not any(a <= step < b for a, b in self._ranges):
            return "ranges"
        is_due = self._has_gradients and step >= self._next_gradients
        return "" if is_due or self._allows_all(step) else "budget"

    def _allows_all(self, step: int) -> bool:
        return self.budget is None or self._is_alarmed or step >= self._next_all

    def alarm(self) -> None:
        """Checks the next step in full, whatever it costs."""
        self._is_alarmed = True

    def move(self, steps: int) -> None:
        """Adapts to larger numbers of the steps to come, by so many."""
        self._next_all += steps
        self._next_gradients += steps

    def num_left_out(self, step: int) -> int:
        """Returns how many steps from one on the budget leaves out, but for alarms."""
        gradients = self._next_gradients if self._has_gradients else self._next_all
        return max(0, min(self._next_all, gradients) - step)

    @property
    def least_share(self) -> float:
        """The share of a step's time that its cheapest check takes."""
        cheapest = ScanLevel.GRADIENTS if self._has_gradients else ScanLevel.ALL
        bare = statistics.median(self._bare) if self._bare else 0.0
        return (self._cost_of(cheapest) or 0.0) / bare if bare else 1.0

    def note(
        self, step: int, level: ScanLevel, guard_seconds: float, step_seconds: float
    ) -> None:
        """Notes the cost of a step, and plans the next ones by it."""
        if level is ScanLevel.ALL:
            self._is_alarmed = False
        if self.budget is None:
            return
        self._bare.append(max(step_seconds - guard_seconds, 0.0))
        if level is not ScanLevel.OFF:
            costs = self._costs.setdefault(level, deque(maxlen=_MEMORY))
            costs.append(guard_seconds)
        if level is ScanLevel.ALL:
            self._next_all = step + self._every_for(ScanLevel.ALL)
        if level is not ScanLevel.OFF:
            self._next_gradients = step + self._every_for(ScanLevel.GRADIENTS)

    def _cost_of(self, level: ScanLevel) -> float | None:
        costs = self._costs.get(level)
        return statistics.median(costs) if costs else None

    def _every_for(self, level: ScanLevel) -> int:
        assert self.budget is not None
        allowed = self.budget * statistics.median(self._bare)
        gradients = self._cost_of(ScanLevel.GRADIENTS)
        if level is ScanLevel.GRADIENTS:
            if gradients is None or len(self._costs[level]) < _TRIALS:
                return 1  # not known yet
            if gradients <= allowed:
                return 1
            return _every(gradients, allowed / 2)  # the other half is for all
        cost = self._cost_of(level)
        assert cost is not None
        if not self._has_gradients:
            return _every(cost, allowed)
        if gradients is None:
            return 2
        if gradients <= allowed:
            return _every(cost - gradients, allowed - gradients)
        return _every(cost, allowed / 2)


def _every(cost: float, allowed: float) -> int:
    """Returns in one step of how many a cost fits what is allowed for each."""
    if cost <= 0:
        return 1
    if allowed <= 0:
        return _MAX_EVERY
    return min(_MAX_EVERY, max(1, math.ceil(cost / allowed)))


# The step at hand.


class StepClock:
    """Numbers the steps, and attaches the hooks that each of them needs.

    Args:
        schedule: Chooses how much of each step is watched.
        watches: The watched models.
        start: The models as they were when the step began, or None.
        overflow_flags: Those of devices, which a watched step clears.
        acts: The policy may do more than warn, where a step is judged.

    Attributes:
        step: The number of the step at hand.
        num_steps: The number of steps that are over.
        level: How much of the step is watched.
        left_out: The steps before the one at hand that were not judged.
    """

    def __init__(
        self,
        schedule: WatchSchedule,
        watches: Sequence[ModelWatch],
        start: RestorePoint | None,
        overflow_flags: OverflowFlags,
        acts: bool,
    ) -> None:
        self._schedule = schedule
        self._watches = watches
        self._start = start
        self._overflow_flags = overflow_flags
        self._warns = acts
        self._is_running = False
        self.step = 0
        self.num_steps = 0
        self.level = ScanLevel.OFF
        self.left_out = LeftOut()

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

    def advance(self, cost: Cost, is_bad: bool) -> None:
        """Ends the step at hand; `begin()` begins to watch the next.

        Args:
            cost: What the step has cost, for the schedule.
            is_bad: The step was bad: the next is watched as a whole.
        """
        schedule = self._schedule
        self.left_out = self.left_out.and_step(self.level, schedule.left_out_by)
        if is_bad:
            schedule.alarm()
        schedule.note(self.step, self.level, cost.guard_seconds, cost.step_seconds)
        self.step += 1
        self.num_steps += 1

    def begin(self) -> None:
        """Begins to watch the step at hand."""
        self.set_level(self._schedule.level(self.step))
        if self._warns and self._schedule.left_out_by == "budget":
            self._warns = False
            _log_left_out(self._schedule, self.step)
        if self.level is not ScanLevel.OFF:
            self._overflow_flags.clear()

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


def _log_left_out(schedule: WatchSchedule, step: int) -> None:
    """Logs that a budget leaves steps out, whatever the policy is.

    Args:
        schedule: Chooses the steps.
        step: The number of the first step that is left out.
    """
    steps = counted(schedule.num_left_out(step), "step")
    _log.warning(
        "Schedule(budget=%g) is too small to check each step: the cheapest check takes "
        "%.1f%% of a step's time.\nUp to %s from step %d on are not judged, and "
        "on_overflow does not apply to them. `coverage()` counts all of them; this is "
        "logged once.",
        schedule.budget,
        100 * schedule.least_share,
        steps,
        step,
    )
