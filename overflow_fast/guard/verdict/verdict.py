"""A step's bad frames, and the verdict on them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ... import _C
from ...flags import is_label
from ...scanner.modules import is_layer_of_torch, own_parameters_of
from ...scanner.text import bits_left, rounded
from ...scanner.tree import entry_label
from ...scanner.types import TensorPath
from ..watching.inputs import finite_places, is_plain
from ..watching.watch import ModelWatch

# Roles of entries that are of a call.
OF_CALLS = (_C.Role.INPUT, _C.Role.OUTPUT, _C.Role.GRAD_OUTPUT)
FORWARDS = (_C.FrameKind.FORWARD, _C.FrameKind.RECOMPUTED)
GRADIENTS = (_C.FrameKind.BACKWARD, _C.FrameKind.GRADIENTS)

SOURCES = (
    *("module", "caller", "loss", "batch", "weight", "buffer", "optimizer_state"),
    *("after_backward", "update", "unclear"),
)


class NonModuleOrigin(str):
    """A candidate of `Origin.candidates` that is no module."""


BATCH = NonModuleOrigin("the batch")
LOSS = NonModuleOrigin("the loss")
CODE = NonModuleOrigin("code in the step")
STAND_IN = NonModuleOrigin("a tensor of functional_call()")


@dataclass(frozen=True)
class Origin:
    """Where the `first` bad value of a verdict began.

    Attributes:
        how: "made" by the module of `first`; "passed_on" by it, made before;
            "given", where the model's own inputs or weights were bad; "unclear".
        source: The kind of its first maker or holder, where known, out of `SOURCES`:
            "module" (the code of one module's call), "caller" (a module's own code
            between the calls of its submodules), "loss" (code after the model),
            "batch" (the batch that a trainer took from its loader),
            "weight", "buffer" and "optimizer_state" (non-finite before the step),
            "after_backward" (gradients were changed between backward and the
            optimizer's step), "update" (the optimizer's step made it of finite
            gradients), or "unclear".
        maker: The maker in words; the qualified name where it is a module.
        candidates: The possible makers where these are few, else empty (as for a
            gradient that any code behind a module may have made): qualified names of
            modules (their code), weights and buffers, "the model", "the loss" (code
            after the model), "the batch" (which includes labels), "the training loop"
            (Lightning: "training_step"), "code in the step", or "a tensor of
            functional_call()".
        after: The module whose call, or the gradient of whose output, was the last one
            seen before it where that is of use, or "".
        unwatched: What the guard does not watch within the maker: modules, hooks, and
            parts of what modules are given or return.
        batch_places: Its places in the batch, or in other inputs that the training loop
            gave the model, such as "`input.labels`, sample 3 of 8".
        nonfinite_state: The weights, buffers and attributes of modules that were
            non-finite too, and that the code may have read, where that is not certain.
        stale_inputs: The inputs of the first bad call that were scanned before it and
            not again, as on devices, or that were finite then and are not now: a write
            that torch does not count may have come between.
        remarks: Further observations that may explain it, in sentences.
    """

    how: str = ""
    source: str = ""
    maker: str = ""
    candidates: list[str] = field(default_factory=list)
    after: str = ""
    unwatched: list[str] = field(default_factory=list)
    batch_places: list[str] = field(default_factory=list)
    nonfinite_state: list[str] = field(default_factory=list)
    stale_inputs: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class BadEntry:
    """A tensor that holds a nan or an inf.

    Attributes:
        kind: "input", "output", "grad_output", "weight", "buffer", "gradient",
            "optimizer_state", "recorded" for a loss or what `record()` was given, or
            "value" for what a replay alone has seen, where the program has raised.
        fqn: The qualified name of the module; of the tensor itself where it belongs to
            no call.
        class_name: The module's class, or "".
        label: The entry of the call, such as `output[0]`, or the tensor's name.
        dtype: The tensor's dtype, such as "float16".
        num_nan: How many of its elements are nan.
        num_inf: How many are inf or -inf.
        numel: How many it has.
        signs: Those of its infs: "+", "-", "+-", or "" if there are none.
        is_finite_now: True for a weight that is finite: another tensor stood in for it
            in the call, as in `functional_call()`, or it has changed since.
        not_scanned: Why its values are not known, where it could not be scanned; or "".
    """

    kind: str
    fqn: str
    class_name: str
    label: str
    dtype: str
    num_nan: int
    num_inf: int
    numel: int
    signs: str = ""
    is_finite_now: bool = False
    not_scanned: str = ""

    @property
    def place(self) -> str:
        """The name of its module, or of the tensor; or "the model"."""
        return self.fqn or "the model"

    @property
    def path(self) -> TensorPath:
        """Where the tensor is."""
        if self.class_name:
            return TensorPath.from_label(self.fqn, self.kind, self.label)
        return TensorPath.from_fqn(self.kind, self.fqn)


@dataclass(frozen=True)
class EntryHeadroom:
    """The distance of a magnitude from the largest number of its dtype.

    Attributes:
        where: The entry that has the magnitude.
        abs_max: The largest magnitude.
        limit: The largest finite number of the dtype.
        dtype: The dtype, such as "float16".
    """

    where: str
    abs_max: float
    limit: float
    dtype: str

    @property
    def bits(self) -> float:
        """The number of times that it could double: log2(limit / abs_max)."""
        return bits_left(self.limit, self.abs_max)

    @property
    def growth(self) -> str:
        """The headroom as a factor, with its bits: "111-fold (6.8 bits)"."""
        return growth_text(self.bits)


def growth_text(bits: float) -> str:
    """Writes headroom in bits as a factor, with the bits: "111-fold (6.8 bits)"."""
    return f"{rounded(2.0 ** min(bits, 1023.0))}-fold ({bits:.1f} bits)"


@dataclass(frozen=True)
class Verdict:
    """The findings of a step.

    Attributes:
        batch: The forward that the first bad frame belongs to, counted from 0.
        first: The first bad entry in execution order; None if the step is clean.
        origin: Where the value began.
        masks: The inputs of the first bad call that hold -inf and nothing worse; that
            is no alarm, since additive masks are made of it.
        allowed: Those that hold what a rule allows; see `allow` of `OverflowGuard`.
        headroom: The same entry's largest magnitude when it was last finite.
        num_bad_frames: How many calls, gradients and lists of tensors are bad.
        dirty_gradients: The parameters whose gradients are bad, in the model's order.
        clean_gradients: The nearest parameters around those whose gradients are clean.
        is_recomputed: True if it was finite in the forward, and bad when backward
            computed that again.
        reaches_loss: True if the loss, or any output of the model, is bad.
    """

    batch: int = 0
    first: BadEntry | None = None
    origin: Origin = field(
        default_factory=Origin,
        metadata={"flat": {"how": "origin"}},  # in files; see `to_dict()`
    )
    masks: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)
    headroom: EntryHeadroom | None = None
    num_bad_frames: int = 0
    dirty_gradients: list[str] = field(default_factory=list)
    clean_gradients: list[str] = field(default_factory=list)
    is_recomputed: bool = False
    reaches_loss: bool = False

    @property
    def is_clean(self) -> bool:
        """True if nothing bad was found."""
        return self.first is None

    def with_remarks(self, remarks: list[str]) -> Verdict:
        """Returns the verdict with other remarks on its origin."""
        return replace(self, origin=replace(self.origin, remarks=remarks))

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as a dict, those of its origin among its own."""
        found = dict[str, Any]()
        for name, value in asdict(self).items():
            if name == "origin":
                found |= {name: value.pop("how"), **value}
            else:
                found[name] = value
        return found


class BadFrame:
    """A bad frame, and the watch that recorded it.

    Attributes:
        watch, frame: The same.
        is_backward: It is of the gradient of an output.
        is_of_call: It is of a module's call, or of the gradient of its output.
        is_gradient: It is of gradients: of an output, or of parameters.
    """

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


def kind_of(role: _C.Role) -> str:
    """Returns the kind of a role: see `BadEntry.kind`."""
    return role.name.lower()


def headroom_of(watch: ModelWatch, peak: _C.Peak) -> EntryHeadroom:
    """Makes the headroom of a recorder's peak."""
    where = where_of(watch, peak.place)
    return EntryHeadroom(where, peak.abs_max, peak.limit, peak.dtype)


def least_headroom(watches: Sequence[ModelWatch]) -> EntryHeadroom | None:
    """Returns the least headroom of a step, or None if nothing was checked."""
    found = [(watch, watch.recorder.least_headroom()) for watch in watches]
    peaks = [(watch, peak) for watch, peak in found if peak is not None]
    nearest = max(peaks, key=lambda each: each[1].abs_max / each[1].limit, default=None)
    return None if nearest is None else headroom_of(*nearest)


def where_of(watch: ModelWatch, place: _C.Place) -> str:
    """Names the place of an entry: see `EntryHeadroom.where`."""
    role, label = kind_of(place.label.role), entry_label(place)
    if place.kind in (*FORWARDS, _C.FrameKind.BACKWARD):
        return TensorPath.from_label(
            watch.name_at(place.module), role, label
        ).of_module()
    return TensorPath.from_fqn(role, label).in_words()


# Verdicts that a device's own overflow flag leads to.


# The words for where it came from.
OF_FLAG = (
    "the device's overflow flag was set, and no tensor that was seen is bad: an "
    "operation overflowed inside"
)


def is_of_flag(verdict: Verdict) -> bool:
    """True if a device's overflow flag was set, and no tensor was bad."""
    first = verdict.first
    return first is not None and first.kind == "recorded" and is_label(first.label)


def is_unseen(verdict: Verdict) -> bool:
    """True if nothing is known to be bad, and a tensor that matters was not scanned."""
    return verdict.first is not None and bool(verdict.first.not_scanned)


class SettingRemark(str):
    """A sentence on a setting that is no finite number.

    Attributes:
        setting: The setting, in words.
        value: Its value.
    """

    setting: str
    value: float


def headroom_before(bad: BadFrame, entry: _C.Entry) -> EntryHeadroom | None:
    peak = bad.watch.recorder.last_peak(entry.place)
    return None if peak is None else headroom_of(bad.watch, peak)


def is_finite_now(first: BadFrame, entry: _C.Entry) -> bool:
    """True if the weight of a call's module is finite; incurs a CPU-GPU sync."""
    module = first.watch.module_at(first.frame.module)
    own = {} if module is None else own_parameters_of(module)
    weight = own.get(entry.label.name)
    return is_plain(weight) and bool(finite_places(weight).all())
