"""A unit of judgement: what it is, what was seen of it, and the verdict on that.

1. begun: its kind and its number are fixed.
2. seen: its bad frames are taken, and what is not its own is left out.
3. judged, once: it has a verdict; see `Judge`.
4. closed by what has called for it, such as an optimizer's hook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from .. import _C
from .monitors.monitor import Notice
from .optimizers.engine_scaler import LossScaler
from .optimizers.optimizer_hook import OptimizerHook
from .ranks.agreement import NO_WISHES, Wishes
from .report.explanation import Explanation
from .report.report import Report
from .requests.held_call import HeldCall
from .step_clock import LeftOut
from .verdict.bad_frames import BadFrame
from .verdict.verdict import Verdict
from .watching.watch import ModelWatch


@dataclass(frozen=True)
class UnitKind:
    """All that units of judgement differ in; nothing else asks what a unit is.

    Attributes:
        moment: When it is judged; see `Report.moment`.
        is_shared: The ranks that share the models judge it, too. What has raised is
            judged alone: the others may be in a collective. So are forwards without
            autograd.
        is_scanned: Gradients and state were scanned for it, not for a later unit.
        runs_again: It may be run again to be explained. An update may not: its
            gradients are used up. It is explained by numbers.
        can_restore: What its forward has changed can be put back.
        may_skip: The optimizer's step can be left out, or undone.
        doubts: Its optimizer is about to step: what it makes may have to be judged.
        ends_finite: Where it is finite, that is counted and logged.
        is_request: Requests come in no order: each has a line of the log of its own.
        is_last: The program may end with it: it ends the flight record's line. Where
            the loop catches the exception and goes on, the step keeps its number and
            has a second line, in the log too.
    """

    moment: Literal["before", "after", "check", "evaluation", "raised"]
    is_shared: bool = True
    is_scanned: bool = True
    runs_again: bool = True
    can_restore: bool = True
    may_skip: bool = False
    doubts: bool = False
    ends_finite: bool = True
    is_request: bool = False
    is_last: bool = False

    @property
    def is_evaluation(self) -> bool:
        """It is of forwards without autograd, which are no step: a request, too."""
        return self.moment == "evaluation"


STEP = UnitKind("before", may_skip=True, doubts=True)
UPDATE = UnitKind("before", runs_again=False, may_skip=True, ends_finite=False)
LATE = UnitKind("after", is_scanned=False, can_restore=False)
CHECK = UnitKind("check", can_restore=False)
EVALUATION = UnitKind("evaluation", is_shared=False, is_scanned=False)
RAISED = UnitKind("raised", is_shared=False, ends_finite=False, is_last=True)
REQUEST = UnitKind(
    "evaluation",
    is_shared=False,
    is_scanned=False,
    can_restore=False,
    is_request=True,
)


class RunsAgain(Protocol):
    """The way to run a unit again; that of steps is `Explaining`."""

    is_off: bool
    looks_again: bool

    def look_again(self, found: Unit) -> Unit:
        """Sees in full what a tripwire has seen."""

    def explain(self, unit: Unit, verdict: Verdict, ends: bool) -> Explanation | None:
        """Explains it, or returns None where that is not due."""


def _same(report: Report) -> Report:
    return report


def _nothing(report: Report) -> None:
    pass


@dataclass
class Unit:
    """A unit of judgement, and what was seen of it.

    Attributes:
        number: The step's number, or the request's.
        kind: What it is.
        hook: The hook of the optimizer that makes the step, or None.
        scaler: The GradScaler, or engine's scaler, that steps the optimizer, or None.
        left_out: The steps before it that were not judged.
        can_restore: That of its kind, unless it was decided otherwise for this one.
        skipped_by: The code that has skipped it already, or "".
        last_frame: The number of frames when it was judged: later ones are not of it.
        is_decided: Its optimizer's step was skipped or made by the frames that had
            arrived by then; what arrives later is reported, and skips nothing.
        frames: Its bad frames.
        watches: The watches that have seen it, if it was run again; else empty.
        verdict: The verdict on its bad frames, once it was asked for.
        known: What a search has found where no module has shown a bad value.
        notices: What monitors say of it, if it is finite.
        notes: Further sentences for the report.
        policy: "warn" where nothing else is done about it; "" for the guard's policy.
        is_together: The ranks that share the models judge it with this one.
        wishes: Those of all ranks that have judged it.
        error: The program's exception that has ended it, or None.
        ends: The run ends with it, whatever the policy is.
        has_room: There are memory and a device to run it again.
        again: The way to run it again; None for the guard's.
        explains: Explains it without running it again; None where it is run again.
        call: Of a forward without autograd in a training: the call to run again, or why
            there is none; None for others.
        made: Makes the report that is given of the plain one.
        noted: Takes in the report once it is explained.
        line: Its line in the log, where it has one of its own.
    """

    number: int
    kind: UnitKind
    hook: OptimizerHook | None = None
    scaler: LossScaler | None = None
    left_out: LeftOut = field(default_factory=LeftOut)
    can_restore: bool = False
    skipped_by: str = ""
    last_frame: int = field(default_factory=_C.Recorder.num_frames)
    is_decided: bool = False
    frames: list[BadFrame] = field(default_factory=list)
    watches: Sequence[ModelWatch] = ()
    verdict: Verdict | None = None
    known: Explanation | None = None
    notices: Sequence[Notice] = ()
    notes: list[str] = field(default_factory=list)
    policy: Literal["", "warn"] = ""
    is_together: bool = False
    wishes: Wishes = NO_WISHES
    error: Exception | None = None
    ends: bool = False
    has_room: bool = True
    again: RunsAgain | None = None
    explains: Callable[[Verdict], Explanation] | None = None
    call: HeldCall | str | None = None
    made: Callable[[Report], Report] = _same
    noted: Callable[[Report], None] = _nothing
    line: Callable[[Report], str] = str

    @property
    def is_bad(self) -> bool:
        """True if something bad was seen in it, or found by a search."""
        return bool(self.frames) or self.known is not None

    def with_note(self, note: str) -> Unit:
        """Returns the same with one more note."""
        return replace(self, notes=[*self.notes, note])

    def forget_frames(self) -> None:
        """Leaves out what was seen: it is no part of the unit."""
        self.frames, self.verdict = [], None
