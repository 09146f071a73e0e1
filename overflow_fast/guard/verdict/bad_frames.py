"""The bad frames of a step, in the order in which they ran."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from torch import nn

from ... import _C
from ...base.module_kinds import is_layer_of_torch
from ...base.modules import own_parameters_of
from ..undo.model_restore_point import WrittenState
from ..watching.inputs import finite_places, is_plain
from ..watching.watch import ModelWatch
from .entry_headroom import EntryHeadroom, headroom_of
from .roles import FORWARDS, GRADIENTS


class BadFrame:
    """A bad frame, and the watch that recorded it.

    Attributes:
        watch, frame: The same.
        is_backward: It is of the gradient of an output.
        is_of_call: It is of a module's call, or of the gradient of its output.
        is_gradient: It is of gradients: of an output, or of parameters.
        is_around: It is of what a function has written to modules around the models.
    """

    is_around = False

    def __init__(self, watch: ModelWatch, frame: _C.Frame) -> None:
        self.watch = watch
        self.frame = frame
        self.is_backward = frame.kind == _C.FrameKind.BACKWARD
        self.is_of_call = self.is_backward or frame.kind in FORWARDS
        self.is_gradient = frame.kind in GRADIENTS

    # Listed once, when asked for: of gradients that a GradScaler expects, never.

    @functools.cached_property
    def entries(self) -> list[_C.Entry]:
        """The frame's entries."""
        return self.watch.recorder.entries(self.frame)

    @functools.cached_property
    def bad_entries(self) -> list[_C.Entry]:
        """Those that are bad."""
        return [entry for entry in self.entries if entry.is_bad]

    def leave_out(self, around: Sequence[WrittenState]) -> None:
        """Leaves out what was not finite before, or holds an inf and no nan.

        Those may be placeholders, and what running extremes and masks begin with.

        Args:
            around: What was written to modules around the models. Incurs a CPU-GPU sync
                for each that is bad.
        """
        if self.frame.kind != _C.FrameKind.BUFFERS:
            return
        known = {each.name: each for each in around}
        self.is_around = any(each.label.name in known for each in self.bad_entries)
        if self.is_around:
            self.bad_entries = [
                entry
                for entry in self.bad_entries
                if entry.nonfinite_kinds & _C.NAN
                if (state := known.get(entry.label.name)) and state.was_finite
            ]

    @functools.cached_property
    def is_unseen(self) -> bool:
        """True if all that is bad is that no way to scan it was left."""
        return not self.is_of_call and all(each.is_unseen for each in self.bad_entries)

    @functools.cached_property
    def bad_inputs(self) -> list[_C.Entry]:
        """The bad inputs of a call."""
        return [each for each in self.bad_entries if each.role == _C.Role.INPUT]

    @functools.cached_property
    def bad_weights(self) -> list[_C.Entry]:
        """The bad weights."""
        return [each for each in self.bad_entries if each.role == _C.Role.WEIGHT]

    @functools.cached_property
    def given_weights(self) -> list[_C.Entry]:
        """The bad weights that its call cannot have written.

        Weights are scanned when a call is over. Custom modules keep statistics in
        parameters without a gradient, and change them in their forward.
        """
        if not (self.bad_weights and self.is_of_call):
            return self.bad_weights
        module = self.watch.module_at(self.frame.module)
        if module is None or is_layer_of_torch(module):
            return self.bad_weights
        owned = own_parameters_of(module)
        return [
            entry
            for entry in self.bad_weights
            if (p := owned.get(entry.label.name)) is not None and p.requires_grad
        ]


def take_bad(watches: Iterable[ModelWatch], last: int) -> list[BadFrame]:
    """Takes the bad frames that have arrived, up to one with a number."""
    return [BadFrame(w, frame) for w in watches for frame in w.frames.take_bad(last)]


def take_evaluated(
    watches: Iterable[ModelWatch], batch: int | None = None
) -> list[BadFrame]:
    """Takes the bad frames of models' forwards that ran without autograd.

    Args:
        watches: The models'.
        batch: See `UnjudgedFrames.take_evaluated()`.
    """
    return [
        BadFrame(watch, frame)
        for watch in watches
        for frame in watch.frames.take_evaluated(batch)
    ]


def collect(watches: Sequence[ModelWatch]) -> list[BadFrame]:
    """Takes all bad frames, of evaluations too. Incurs one CPU-GPU sync per device."""
    for watch in watches:
        watch.frames.send()
        watch.frames.receive(is_lagged=False)
    last = _C.Recorder.num_frames()
    return [*take_bad(watches, last), *take_evaluated(watches)]


def in_order(frames: Iterable[BadFrame], is_check: bool = False) -> list[BadFrame]:
    """Sorts frames as they ran; weights, set before, come first, but in a check."""
    return sorted(frames, key=_number if is_check else _sequence)


def first_bad(
    frames: Iterable[BadFrame], is_check: bool
) -> tuple[BadFrame, _C.Entry, list[BadFrame]]:
    """Finds the first bad frame and entry, and sorts all frames as they ran.

    A weight that was bad before comes first, if there is one. Weights are scanned where
    they are used, so a later module's come behind the outputs of an earlier module.
    """
    ordered = sorted(in_order(frames, is_check), key=lambda bad: bad.is_unseen)
    earliest = ordered[0]
    for bad in ordered:
        weights = bad.given_weights
        is_of_step = not is_check or (
            bad.frame.kind == _C.FrameKind.FORWARD
            and (bad.watch, bad.frame.batch) == (earliest.watch, earliest.frame.batch)
        )
        if weights and is_of_step:
            return bad, weights[0], ordered
    # A weight that the call may have written stands in front of its inputs.
    bad_entries = earliest.bad_inputs or earliest.bad_entries
    entry = min(bad_entries, key=lambda entry: entry.is_unseen)
    return earliest, entry, ordered


def reach_loss(frames: Iterable[BadFrame]) -> bool:
    """True if a bad entry of the frames is a loss, or an output of a model."""
    for bad in frames:
        roles = [entry.role for entry in bad.bad_entries]
        is_root = bad.frame.module == 0 and bad.is_of_call
        if _C.Role.RECORDED in roles or (is_root and _C.Role.OUTPUT in roles):
            return True
    return False


def leading_frame(frames: Sequence[BadFrame]) -> BadFrame:
    """Returns the first frame of a call, or the first of all if no call was bad."""
    return min(frames, key=lambda bad: (not bad.is_of_call, _sequence(bad)))


def _sequence(bad: BadFrame) -> tuple[bool, int]:
    return bad.frame.kind != _C.FrameKind.WEIGHTS, bad.frame.order


def _number(bad: BadFrame) -> int:
    return bad.frame.order


def headroom_before(bad: BadFrame, entry: _C.Entry) -> EntryHeadroom | None:
    """Returns the headroom that a bad entry had when it was last seen finite."""
    peak = bad.watch.recorder.last_peak(entry.place)
    return None if peak is None else headroom_of(bad.watch, peak)


def weight_of(first: BadFrame, entry: _C.Entry) -> nn.Parameter | None:
    """The weight of a call's module, as the module holds it now."""
    module = first.watch.module_at(first.frame.module)
    own = {} if module is None else own_parameters_of(module)
    return own.get(entry.label.name)


def is_finite_now(first: BadFrame, entry: _C.Entry) -> bool:
    """True if the weight of a call's module is finite; incurs a CPU-GPU sync."""
    weight = weight_of(first, entry)
    return is_plain(weight) and bool(finite_places(weight).all())
