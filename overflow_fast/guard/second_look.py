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
from ..core.restore import KeptState
from ..core.tensors import loss_in
from ..recording.schedule import ScanLevel
from ..recording.step_tensors import StepTensors
from ..recording.watch import ModelWatch
from ..replay.capture import Capture
from ..replay.kept_call import KeptCall, ModelCall
from ..replay.rerun import Outcome, Rerun
from ..verdict.verdict import BadFrame
from .config import NORM
from .step_result import StepResult

_CLEAN = (
    "The step was run again with every module watched, and is finite: the fault was "
    "transient, or outside of the models' forward and backward."
)
_PARTLY = (
    "The models' forward and backward were run again with every module watched, and "
    "are finite; the loss outside of them was not: use `guard.run(lambda: loss)`."
)
_NOT_ALONE = (
    "The step was not run again: there are several ranks, and collectives in it would "
    "wait for the others."
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
        frames: list[BadFrame] = []
        watches = self._make_watches()
        for watch, own in zip(watches, self._watches, strict=True):
            num_calls = len(self._capture.calls)
            watch.begin_at(max(0, own.batch_number - num_calls))
            watch.inputs.loop_batches = own.inputs.loop_batches
            watch.has_seen_loss = own.has_seen_loss
        outcome = self._replay(watches, frames)
        if outcome.error is not None:
            kind = type(outcome.error).__name__
            return _with_note(found, f"The step was run again, and raised {kind}.")
        if not frames:
            is_whole = all(call.returns_loss for call in self._capture.calls)
            return _with_note(found, _CLEAN if is_whole else _PARTLY)
        frames = [*_recorded(found, frames), *frames]
        return dataclasses.replace(found, frames=frames, watches=watches)

    def _why_not(self, found: StepResult) -> str:
        if found.moment == "after":
            return _LATE
        if not self._capture.calls:
            return _NOTHING
        has_ranks = dist.is_available() and dist.is_initialized()
        return _NOT_ALONE * (has_ranks and dist.get_world_size() > 1)

    def _replay(self, watches: Sequence[ModelWatch], frames: list[BadFrame]) -> Outcome:
        models = {w.prefix: w.model for w in watches if w.model is not None}
        with KeptState(models, self._capture.start()) as state:
            rerun = Rerun(models, self._capture.calls, state)
            return rerun.run(
                change=_Watched(watches, frames),
                is_whole=True,
                on_output=functools.partial(_record_loss, watches[0]),
            )


class _Watched:
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
