"""The tripwire's second look: a bad step is run again with everything watched."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from .. import _C
from ..core.tensors import loss_in
from ..distributed.agreement import Agreed
from ..recording.schedule import ScanLevel
from ..recording.step_tensors import StepTensors
from ..recording.watch import ModelWatch
from ..replay.capture import Capture
from ..replay.change import Change
from ..replay.explain import kept_state
from ..replay.kept_call import KeptCall, ModelCall
from ..replay.rerun import Rerun
from ..replay.team import NotJoined, Team
from ..verdict.verdict import BadFrame
from .arguments import NORM
from .joint_replay import team_of, why_not_together
from .step_result import StepResult

_CLEAN = (
    "The step was run again with every module watched, and is finite: the fault was "
    "transient, or outside of the models' forward and backward."
)
_PARTLY = (
    "The models' forward and backward were run again with every module watched, and "
    "are finite; the loss outside of them was not: use `guard.run(lambda: loss)`."
)
_STOOD_IN = (
    "The models' forward and backward were run again with every module watched and the "
    "models' own weights, and are finite: the step ran under functional_call(), whose "
    "tensors were not kept. Use `guard.run(lambda: loss)`."
)
_NOT_ALONE = (
    "The step was not run again: there are several ranks, which do not decide together."
)
_LATE = "The step was not run again: its weights had been stepped when it was judged."
_NOTHING = "The step was not run again: no forward of it was kept."


class SecondLook:
    """Replaces what the tripwire saw of a bad step by what a full watch sees.

    Args:
        capture: Keeps the calls of a step.
        watches: The tripwire's.
        make_watches: Makes watches of the models that look at everything.
    """

    def __init__(
        self,
        capture: Capture,
        watches: Sequence[ModelWatch],
        make_watches: Callable[[], list[ModelWatch]],
    ) -> None:
        self._watches = watches
        self._capture = capture
        self._make_watches = make_watches

    def look(self, found: StepResult) -> StepResult:
        """Runs the step again; everything is put back bit for bit afterwards.

        Incurs a CPU-GPU sync.

        Args:
            found: What the tripwire saw, with at least one bad frame.

        Returns:
            The same with the bad frames of the replay; with a note if there are none.
        """
        why = self._why_not(found)
        if why:
            return _with_note(found, why)
        seen, error = self._replayed(found, Team())
        if error is not None:
            return _with_note(found, f"The step was run again, and raised {error}.")
        if not seen.frames:
            return _with_note(found, self.finite_note())
        return seen

    def finite_note(self) -> str:
        """Writes what follows if the step is finite when it is run again."""
        calls = self._capture.calls
        if any(call.has_stand_ins for call in calls):
            return _STOOD_IN
        return _CLEAN if all(call.returns_loss for call in calls) else _PARTLY

    def look_together(
        self, found: StepResult, agreed: Agreed
    ) -> tuple[StepResult, str, bool]:
        """Runs the step again on all ranks that agreed on it.

        Args:
            found: See `look()`.
            agreed: What they agreed on.

        Returns:
            What this rank has seen; a note, the same on all ranks, if it could not be
            run, else ""; and whether a rank was lost.
        """
        why = _LATE if found.moment == "after" else why_not_together(agreed.offers)
        if why:
            return found, why, False
        team = team_of(agreed.offers, agreed.rank)
        try:
            seen, error = self._replayed(found, team)
        except NotJoined as lost:
            return found, str(lost), True
        # Each rank's run has agreed on errors: all of them have one.
        note = "" if error is None else "The step was run again, and raised an error."
        return seen, note, False

    def _why_not(self, found: StepResult) -> str:
        if found.moment == "after":
            return _LATE
        if not self._capture.calls:
            return _NOTHING
        has_ranks = dist.is_available() and dist.is_initialized()
        return _NOT_ALONE * (has_ranks and dist.get_world_size() > 1)

    def _replayed(
        self, found: StepResult, team: Team
    ) -> tuple[StepResult, Exception | None]:
        """Runs the step with everything watched; returns it, and its error."""
        frames: list[BadFrame] = []
        watches = self._watches_now()
        models = {w.prefix: w.model for w in watches if w.model is not None}
        with kept_state(
            models, self._capture.calls, self._capture.start, team
        ) as state:
            rerun = Rerun(models, self._capture.calls, state, team)
            rerun.watched = _Watched(watches, frames)
            rerun.on_output = functools.partial(_record_loss, watches[0])
            if team.leads:
                outcome = rerun.run(is_whole=True, is_watched=True)
            else:
                outcome = rerun.follow(team.receive())
        seen = [*_recorded(found, frames), *frames] if frames else []
        return dataclasses.replace(found, frames=seen, watches=watches), outcome.error

    def _watches_now(self) -> list[ModelWatch]:
        """Watches that number and name what runs as the tripwire's do."""
        watches = self._make_watches()
        for watch, own in zip(watches, self._watches, strict=True):
            num_calls = len(self._capture.calls)
            watch.begin_at(max(0, own.batch_number - num_calls))
            watch.inputs.loop_batches = own.inputs.loop_batches
            watch.has_seen_loss = own.has_seen_loss
        return watches


class _Watched(Change):
    """A change of a replay: it is watched, and its bad frames are collected."""

    def __init__(self, watches: Sequence[ModelWatch], frames: list[BadFrame]) -> None:
        self._watches = watches
        self._frames = frames

    @contextlib.contextmanager
    def applied(self, models: Mapping[str, nn.Module]) -> Iterator[None]:
        """Watches what runs within."""
        for watch in self._watches:
            watch.attach()
        try:
            yield
            self._collect()
        finally:
            for watch in self._watches:
                watch.detach()

    def _collect(self) -> None:
        StepTensors(self._watches).scan(None, ScanLevel.ALL)
        for watch in self._watches:
            watch.frames.send()
            watch.frames.receive(is_lagged=False)
            last = _C.Recorder.num_frames()
            self._frames += [
                BadFrame(watch, frame) for frame in watch.frames.take_bad(last)
            ]


def _record_loss(watch: ModelWatch, call: KeptCall, output: Any) -> None:
    """Records the loss that a function returned, as `guard.run()` does."""
    loss = None if isinstance(call, ModelCall) else loss_in(output)
    if loss is not None:
        watch.record(_C.FrameKind.RECORDED, (["loss"], [loss]))


def _recorded(found: StepResult, frames: Sequence[BadFrame]) -> list[BadFrame]:
    """Takes over what the user has recorded, if no forward of the replay is bad."""
    kinds = {bad.frame.kind for bad in frames}
    if kinds & {_C.FrameKind.FORWARD, _C.FrameKind.RECORDED}:
        return []
    recorded = [b for b in found.frames if b.frame.kind == _C.FrameKind.RECORDED]
    return [bad for bad in recorded if not _is_norm(bad)]


def _is_norm(bad: BadFrame) -> bool:
    """Tells whether it is the norm of the gradients, which have frames of their own."""
    return all(entry.label.name == NORM for entry in bad.bad_entries())


def _with_note(found: StepResult, note: str) -> StepResult:
    return dataclasses.replace(found, notes=[*found.notes, note])
