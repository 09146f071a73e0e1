"""A step of a guarded run: its number, its bad frames, the round that it belongs to."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .. import _C
from ..capture.schedule import LeftOut, ScanLevel, WatchSchedule
from ..capture.watch import ModelWatch
from ..core.engines import LossScaler
from ..report.report import Cost, Report
from ..report.run_log import log_left_out
from ..state.step_start import StepStart
from ..verdict.headroom import HeadroomTracker
from ..verdict.verdict import BadFrame, take_bad, take_evaluated
from .device_flags import OverflowFlags
from .monitors.monitor import Notice
from .optimizers import OptimizerHook


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
            counted; "after" it was made come lagged verdicts.
        can_restore: What its forward has changed can be put back.
        skipped_by: The code that has skipped it already, or "".
        last_frame: The number of frames when it was judged: later ones are not of it.
        is_decided: It was decided on when its optimizer was called, by the frames that
            had arrived.
        frames: Its bad frames.
        is_whole: All that the guard watches was checked, and no gradient is bad, also
            none that a GradScaler handles.
        watches: The watches that have seen it, if it was run again; else empty.
        notices: What monitors say of it, if it is finite.
        notes: Further sentences for the report.
    """

    number: int
    hook: OptimizerHook | None = None
    scaler: LossScaler | None = None
    left_out: LeftOut = field(default_factory=LeftOut)
    moment: Literal["before", "after", "check", "evaluation"] = "before"
    can_restore: bool = False
    skipped_by: str = ""
    last_frame: int = field(default_factory=_C.Recorder.num_frames)
    is_decided: bool = False
    frames: list[BadFrame] = field(default_factory=list)
    is_whole: bool = False
    watches: Sequence[ModelWatch] = ()
    notices: Sequence[Notice] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def is_evaluation(self) -> bool:
        """True for a forward without autograd."""
        return self.moment == "evaluation"

    @property
    def is_late(self) -> bool:
        """True for a step that is over already (`sync="lagged"`)."""
        return self.moment == "after"


class StepFrames:
    """The bad frames of the watches, by the step that they belong to.

    Args:
        watches: The watched models.
    """

    def __init__(self, watches: Sequence[ModelWatch]) -> None:
        self._watches = watches
        self._pending: collections.deque[Step] = collections.deque()

    def send(self, is_lagged: bool = False) -> None:
        """Starts the copy of all stats to the host; does not wait."""
        for watch in self._watches:
            watch.frames.send(with_captured=not is_lagged)

    def receive(self, is_lagged: bool) -> Iterator[tuple[Step, list[BadFrame]]]:
        """Takes in stats, and yields the pending steps with their bad frames.

        Incurs a CPU-GPU sync for each device, unless it is lagged.
        """
        for watch in self._watches:
            watch.frames.receive(is_lagged)
        while self._pending:
            step = self._pending.popleft()
            yield step, self.take(step.last_frame)

    def postpone(self, step: Step) -> None:
        """Yields a step from the next `receive()`."""
        self._pending.append(step)

    def take(self, last: int) -> list[BadFrame]:
        """Takes the bad frames that have arrived, up to one with a number."""
        return take_bad(self._watches, last)

    def forget(self) -> None:
        """Forgets all frames, those of pending steps too. Incurs the sync."""
        self._pending.clear()
        for watch in self._watches:
            watch.frames.receive(is_lagged=False)
        take_bad(self._watches, _C.Recorder.num_frames())
        take_evaluated(self._watches)

    def end(self, is_lagged: bool) -> None:
        """Ends the judgement of a step."""
        for watch in self._watches:
            watch.end_judgement(is_lagged)


class StepClock:
    """Numbers the steps, and attaches the hooks that each of them needs.

    Args:
        schedule: Chooses how much of each step is watched.
        watches: The watched models.
        headroom: Tracks the headroom of the watched steps.
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
        headroom: HeadroomTracker,
        start: StepStart | None,
        overflow_flags: OverflowFlags,
        acts: bool,
    ) -> None:
        self._schedule = schedule
        self._watches = watches
        self._headroom = headroom
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


class Rounds:
    """Counts rounds: one ends when each optimizer has stepped, or one steps again.

    A round has one verdict: a bad one holds for all optimizers that step later in it.

    Args:
        hooks: The optimizers' hooks.

    Attributes:
        report: The report of the round, if it is bad.
        is_skipped: A step was skipped in this round, by the guard or a GradScaler.
        num_skipped: The number of rounds in which the guard has skipped a step.
    """

    def __init__(self, hooks: Sequence[OptimizerHook]) -> None:
        self._hooks = hooks
        self._stepped: set[OptimizerHook] = set()
        self._skips_in_row = dict.fromkeys(hooks, 0)
        self._was_skipped = dict.fromkeys(hooks, False)
        self._is_over = False
        self._is_counted = False
        self.is_skipped = False
        self.report: Report | None = None
        self.num_skipped = 0

    def has_stepped(self, hook: OptimizerHook) -> bool:
        """Returns True if an optimizer has stepped in this round."""
        return hook in self._stepped

    def begin(self) -> None:
        """Begins a round if the last is over. Until then the last can be read."""
        if self._is_over:
            self._is_over = self._is_counted = self.is_skipped = False
            self.report = None

    def end(self) -> None:
        """Ends the round."""
        self._stepped.clear()
        self._is_over = True

    def note_step(self, hook: OptimizerHook) -> bool:
        """Notes the end of an optimizer's step; returns True if it ends the round."""
        self._stepped.add(hook)
        return len(self._stepped) == len(self._hooks)

    def note(self, hook: OptimizerHook, is_skipped: bool, is_by_guard: bool) -> None:
        """Notes whether an optimizer's step is skipped.

        Args:
            hook: The optimizer's.
            is_skipped: It is skipped, by the guard or by other code.
            is_by_guard: The round is bad, and the guard skips it.
        """
        self._was_skipped[hook] = is_skipped
        self.is_skipped |= is_skipped
        self._skips_in_row[hook] = self._skips_in_row[hook] + 1 if is_by_guard else 0
        if is_by_guard and not self._is_counted:
            self._is_counted = True
            self.num_skipped += 1

    def note_unwatched(self, hook: OptimizerHook) -> None:
        """Notes a step that is not judged: it resets no count."""
        self._was_skipped[hook] = False

    def take_back(self) -> None:
        """Uncounts the skip of the round: it raises instead."""
        self._skips_in_row = dict.fromkeys(self._hooks, 0)
        if self._is_counted:
            self._is_counted = False
            self.num_skipped -= 1

    @property
    def consecutive_skips(self) -> int:
        """The steps in a row that the guard skipped, of the worst optimizer."""
        return max(self._skips_in_row.values(), default=0)

    def was_skipped(self, optimizer: object) -> bool:
        """Returns True if the last step of one optimizer was skipped, by any code.

        Raises:
            ValueError: If the guard does not have it.
        """
        for hook in self._hooks:
            if hook.is_of(optimizer):
                return self._was_skipped[hook]
        raise ValueError(
            "optimizer must be one that the guard was given, got another "
            f"{type(optimizer).__name__}"
        )
