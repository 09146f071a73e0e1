"""A step of a guarded run: what is known of it, and how much of it is watched."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .. import _C
from .monitors.monitor import Notice
from .optimizers.engine_scaler import LossScaler
from .optimizers.optimizer_hook import OptimizerHook
from .undo.restore_point import RestorePoint
from .verdict.bad_frames import BadFrame
from .verdict.verdict import Verdict
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

    def and_step(self, left_out_by: str) -> LeftOut:
        """Returns the same behind a step.

        Args:
            left_out_by: The field that left it out, or "" where it was checked.
        """
        if not left_out_by:
            is_same = self.follows_check and not self.num_steps
            return self if is_same else LeftOut(total=self.total, follows_check=True)
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
    watches: Sequence[ModelWatch] = ()
    verdict: Verdict | None = None
    notices: Sequence[Notice] = ()
    notes: list[str] = field(default_factory=list)
    policy: Literal["", "warn"] = ""


class WatchSchedule:
    """Chooses the steps that are watched.

    Args:
        every: Watch every N-th step, from `warmup` on.
        warmup: How many steps are left out at first.
        ranges: Only steps in one of these half-open ranges; None for all.
    """

    def __init__(
        self,
        every: int = 1,
        warmup: int = 0,
        ranges: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self._every = every
        self._warmup = warmup
        self._ranges = ranges

    def left_out_by(self, step: int) -> str:
        """The field that leaves a step out, or ""."""
        if step < self._warmup:
            return "warmup"
        if (step - self._warmup) % self._every:
            return "every"
        if self._ranges is not None and not any(a <= step < b for a, b in self._ranges):
            return "ranges"
        return ""


class StepClock:
    """Numbers the steps, and attaches the hooks that each of them needs.

    Args:
        schedule: Chooses how much of each step is watched.
        watches: The watched models.
        start: The models as they were when the step began, or None.
        overflow_flags: Those of devices, which a watched step clears.

    Attributes:
        step: The number of the step at hand.
        num_steps: The number of steps that are over.
        is_watched: The step is watched.
        left_out: The steps before the one at hand that were not judged.
    """

    def __init__(
        self,
        schedule: WatchSchedule,
        watches: Sequence[ModelWatch],
        start: RestorePoint | None,
        overflow_flags: OverflowFlags,
    ) -> None:
        self._schedule = schedule
        self._watches = watches
        self._start = start
        self._overflow_flags = overflow_flags
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
        if self.is_watched:
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
                self.watch(self.is_watched)
