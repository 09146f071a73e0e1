"""The attribution of a step's bad frames: the first bad entry, and its origin."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from .. import _C
from ..capture.inputs import finite_places, is_plain
from ..capture.watch import ModelWatch
from ..core.modules import own_parameters_of
from ..flags import is_label
from ..torch_internals.module_internals import is_batch_norm
from ..tree import entry_label
from .calls import (
    Called,
    Calls,
    has_earlier_hooks,
    has_hooks,
    has_later_hooks,
    has_pre_hooks,
    is_layer_of_torch,
    joined,
    name_of,
    never_writes,
    only_calls_submodules,
)
from .given import (
    Bad,
    Candidate,
    batch_remarks,
    or_by_state,
    origin_of_inputs,
    origin_of_minus_infs,
    origin_of_unsearched,
    remarks_on,
)
from .verdict import (
    AFTER_BACKWARD,
    BATCH,
    EARLIER_GRADIENTS,
    FORWARDS,
    HOOK,
    LOSS,
    OF_CALLS,
    OF_FLAG,
    OTHER_RANK,
    BadEntry,
    BadFrame,
    EntryHeadroom,
    Origin,
    Verdict,
    caller_of,
    headroom_of,
    in_order,
    kind_of,
)

# The candidates for the first bad gradient of an output, by the order of calls.


def origin_of_gradient(first: BadFrame, calls: Calls) -> Origin:
    """Finds the origin of the gradient of an output, which is the first bad one.

    It is a sum over all that was computed from the output, and no hook shows which of
    these parts is bad. All gradients that were scanned before it are finite.

    Args:
        first: Its frame.
        calls: The calls of all watched models.

    Returns:
        The loss, where nothing else can have used the output, or all that can have.
    """
    frame = first.frame
    found = calls.in_backward(first.watch, frame.module, frame.order)
    is_known = len(found) == 1 and found[0].call.kind != _C.FrameKind.RECOMPUTED
    if not is_known:
        return _any_of(found, first, calls)
    users = _Users(found[0], calls, frame.order)
    if not (users.makers or users.code or _is_unwatched_around(first)):
        return loss_origin(first, "the backward of the loss")
    return users.origin(first)


class _Users:
    """The users of the output of a call, direct or through others.

    Attributes:
        makers: The modules whose backward can have made its gradient.
        code: The modules whose own code can have.
        scope: The nearest call around it whose own gradients were all finite, or None.
    """

    def __init__(self, called: Called, calls: Calls, before: int) -> None:
        self._called = called
        self._calls = calls
        self._before = before
        found = calls.gradients(called.call.order, before)
        self._seen = {(each.watch, each.call.module): each for each in found}
        self.makers: list[str] = []
        self.code: list[str] = []
        self.scope: Called | None = None
        inner = called
        for around in calls.chain(called)[1:]:
            self._add(inner, around)
            if self._is_clean(around):
                self.scope = around
                return
            inner = around
        self._add(inner, None)

    def _add(self, inner: Called, around: Called | None) -> None:
        """Adds the users of a call's output within the call around it.

        A user has had a gradient itself by then, or its output has.
        """
        later = self._calls.after(inner, around, self._before)
        if around is not None and only_calls_submodules(_module_of(around)):
            later = later[:1]  # it gives each module's output to the next one alone
        used = [each for each in later if self._has_gradient(each)]
        for user in used:
            names = [c.name for c in (user, *self._calls.within(user))]
            self.makers += [name for name in names if name not in self.makers]
        if around is None or only_calls_submodules(_module_of(around)):
            return
        if used or self._is_seen(around) or around.call.has_unseen:
            self.code.append(around.name)

    def _has_gradient(self, called: Called) -> bool:
        inside = (called, *self._calls.within(called))
        return any(self._is_seen(each) or each.call.has_unseen for each in inside)

    def _is_seen(self, called: Called) -> bool:
        return (called.watch, called.call.module) in self._seen

    def _is_clean(self, around: Called) -> bool:
        watch, module = around.watch, around.call.module
        is_one = len(self._calls.in_backward(watch, module, self._before)) == 1
        is_whole = not (around.call.has_unseen or around.may_pass_through)
        return self._is_seen(around) and is_one and is_whole

    def origin(self, first: BadFrame) -> Origin:
        here, near = self._called.name, self._near()
        words = [f"the code of {name}" for name in self.code]
        words += [f"the backward of {name}" for name in self.makers]
        names = [*self.makers, *self.code]
        if self.scope is None:
            words.append(LOSS)
        else:
            words.append(f"code that uses what {self.scope.name} kept in attributes")
        words.append("a hook on that gradient")
        names += [*loss_origin(first, "").candidates, here]
        between = f"between {near} and {here}: " if near else ""
        names = list(dict.fromkeys(names))
        return Origin("unclear", "unclear", f"{between}{joined(words)}", names, near)

    def _near(self) -> str:
        """Returns the module of the last finite gradient, if it bounds the search."""
        last = next(reversed(self._seen), None)
        if last is None:
            return ""
        name = name_of(*last)
        bounds = [*self.makers, *([self.scope.name] if self.scope else [])]
        return name if name in bounds else ""


def _is_unwatched_around(first: BadFrame) -> bool:
    """True if the code of an unwatched module around it may have used it."""
    modules = first.watch.modules
    around = modules.ancestors(first.frame.module)
    return any(not modules.is_selected(index) for index in around)


def _module_of(called: Called) -> nn.Module | None:
    return called.watch.module_at(called.call.module)


def loss_origin(first: BadFrame, maker: str) -> Origin:
    """Makes the origin of a value that arose in the loss, or in its other inputs."""
    if first.watch.has_seen_loss:
        return Origin("passed_on", "loss", maker, [LOSS])
    maker = f"{maker}, or values that do not pass through the model, such as labels"
    return Origin("passed_on", "loss", maker, [LOSS, BATCH])


def _any_of(found: list[Called], first: BadFrame, calls: Calls) -> Origin:
    """Makes the origin where the gradient's call is not known, or ran again."""
    here = name_of(first.watch, first.frame.module)
    users = calls.users(found[0]) if found else []
    names = [*users, *_names_around(first), *loss_origin(first, "").candidates]
    names = list(dict.fromkeys(names))
    maker = f"code that used the output of {here}: {joined(names)}"
    return Origin("unclear", "unclear", maker, names)


# The origin of a forward's first bad value, from the inputs and outputs of calls.


def origin_in_forward(first: BadFrame, bad: Bad, calls: Calls) -> Origin:
    """Finds the origin of the bad value in a call, which is the first bad one.

    Args:
        first: The call's frame.
        bad: All bad frames, by `key_of`.
        calls: The calls of all watched models.
    """
    origin = _find_by_calls(first, bad, calls)
    if origin.source == "buffer":
        return origin
    others = _around(first, origin, calls)
    return or_by_state(origin, first, bad, calls, others)


def _around(first: BadFrame, origin: Origin, calls: Calls) -> list[Candidate]:
    """Lists further callers that may have given a call its bad input."""
    called = calls.of_frame(first.watch, first.frame.order)
    if called is None or not first.bad_inputs:
        return []
    # The root's inputs are its caller's, whichever module called those within it.
    if origin.origin != "given" or calls.chain(called)[-1].call.module:
        return _other_callers(called, calls)
    return []


def _other_callers(called: Called, calls: Calls) -> list[Candidate]:
    """Lists the modules that share one, and may have called it with the bad value."""
    return [
        (name, f"{name}, which has {around.name} too and may have called it")
        for around in calls.chain(called)
        for name in calls.other_callers(around)
    ]


def _find_by_calls(first: BadFrame, bad: Bad, calls: Calls) -> Origin:
    called = calls.of_frame(first.watch, first.frame.order)
    if not first.bad_inputs:
        return _made_within(first, called, bad, calls)
    name = name_of(first.watch, first.frame.module)
    if called is None:
        candidates = [name, *_names_around(first), BATCH, caller_of(first.watch)]
        return Origin("unclear", "unclear", "one of those around it", candidates)
    writers = [name] if _may_change_input(first, called) else []
    outermost = called
    for around in calls.chain(called)[1:]:
        frame = bad.get((id(around.watch), around.call.order))
        if frame is None or not frame.bad_inputs:
            return _between(called, around, frame, writers, bad, calls)
        if _may_change_input(frame, around):
            writers.append(around.name)
        outermost = around
    return origin_of_inputs(outermost, bad, calls)


def key_of(frame: BadFrame) -> tuple[int, int]:
    """Returns the key of a bad frame."""
    return id(frame.watch), frame.frame.order


def _made_within(
    first: BadFrame, called: Called | None, bad: Bad, calls: Calls
) -> Origin:
    name = name_of(first.watch, first.frame.module)
    buffer = _bad_buffer_of(first, bad) if _reads_buffers_only(first) else None
    if buffer:
        return Origin("given", "buffer", f"its buffer {buffer}", [buffer])
    if called is not None:
        given = origin_of_minus_infs(called, first, name, bad, calls)
        given = given or origin_of_unsearched(called, first, name, calls)
        if given is not None:
            return given
    last = None if called is None else calls.last_within(called)
    unwatched = first.watch.modules.unwatched_in(first.frame.module)
    if called is not None:
        unwatched += [_hidden_by(c) for c in calls.within(called) if _may_hide(c)]
    if has_earlier_hooks(first.watch.module_at(first.frame.module)):
        unwatched.append("a forward hook on it")
    after = "" if last is None else last.name
    return Origin("made", "module", name, [name], after, unwatched)


def _between(
    called: Called,
    around: Called,
    frame: BadFrame | None,
    writers: list[str],
    bad: Bad,
    calls: Calls,
) -> Origin:
    """Makes the origin of a value that arose in a call, before a call within it."""
    name = around.name
    before = calls.before(called, around)
    unwatched = around.watch.modules.unwatched_in(around.call.module)
    hiding = [
        other
        for other in calls.within(around)
        if other.call.order < called.call.order and _may_hide(other)
        if called not in calls.chain(other)
    ]
    names = [*unwatched, *(other.name for other in hiding)]
    candidates = list(dict.fromkeys([name, *writers, *names]))
    unwatched += map(_hidden_by, hiding)
    after = "" if before is None else before.name
    given = (
        None if frame is None else origin_of_minus_infs(around, frame, name, bad, calls)
    )
    given = given or origin_of_unsearched(around, frame, name, calls)
    if given is not None:
        candidates = list(dict.fromkeys([*candidates, *given.candidates]))
        return dataclasses.replace(given, candidates=candidates, unwatched=unwatched)
    if writers:
        others = joined(writers)
        maker = f"the code of {name}, or {others}, which may change its input"
        return Origin("unclear", "unclear", maker, candidates, after, unwatched)
    if unwatched:
        maker = f"{name}, or what it calls that is not watched"
        return Origin("passed_on", "caller", maker, candidates, after, unwatched)
    maker = f"{name}, between the calls of its submodules"
    return Origin("passed_on", "caller", maker, candidates, after)


def _may_change_input(first: BadFrame, called: Called) -> bool:
    """True if the bad input of a call may have been written within it."""
    module = first.watch.module_at(first.frame.module)
    if has_pre_hooks(module):
        return True
    if never_writes(module):
        return False
    is_written = any(entry.version for entry in first.bad_inputs)
    return is_written or called.call.is_traced


def _may_hide(called: Called) -> bool:
    """True if a call may have returned something bad that was not seen."""
    module = called.watch.module_at(called.call.module)
    return called.call.has_unseen or has_later_hooks(module)


def _hidden_by(called: Called) -> str:
    """Names what was not seen of a call whose frame may be listed."""
    if called.call.has_unseen:
        return f"a part of what {called.name} was given or returned"
    return f"a forward hook on {called.name}"


def _bad_buffer_of(first: BadFrame, bad: Bad) -> str | None:
    name = first.watch.name_at(first.frame.module)
    for frame in bad.values():
        if frame.watch is first.watch and frame.frame.kind == _C.FrameKind.BUFFERS:
            for entry in frame.bad_entries:
                label = entry.label.name
                if label.rpartition(".")[0] == name:
                    return label
    return None


def _reads_buffers_only(first: BadFrame) -> bool:
    """True if a module is known not to write to its buffers in this call."""
    module = first.watch.module_at(first.frame.module)
    is_norm = is_batch_norm(module)
    return is_norm and module is not None and not module.training


def _names_around(first: BadFrame) -> list[str]:
    indices = first.watch.modules.ancestors(first.frame.module)
    return [name_of(first.watch, index) for index in indices]


# The origin of bad weights, and of bad gradients of parameters.


def given_weights(bad: BadFrame) -> list[_C.Entry]:
    """Lists the bad weights of a frame that its call cannot have written.

    Weights are scanned when a call is over. Custom modules keep statistics in
    parameters without a gradient, and change them in their forward.
    """
    if not (bad.bad_weights and bad.is_of_call):
        return bad.bad_weights
    module = bad.watch.module_at(bad.frame.module)
    if module is None or is_layer_of_torch(module):
        return bad.bad_weights
    owned = own_parameters_of(module)
    return [
        entry
        for entry in bad.bad_weights
        if (p := owned.get(entry.label.name)) is not None and p.requires_grad
    ]


def origin_of_state(first: BadFrame, entry: _C.Entry, was_finite: bool) -> Origin:
    """Finds the origin of a bad weight, or state of the optimizer.

    Args:
        first: Its frame.
        entry: The entry.
        was_finite: True if it was seen finite before.
    """
    label, kind = entry.label.name, kind_of(entry.role)
    owner = name_of(first.watch, first.frame.module)
    if first.is_of_call:
        label = f"{first.watch.name_at(first.frame.module)}.{label}".lstrip(".")
        if all(entry.label != given.label for given in given_weights(first)):
            maker = f"{label} before the step, or {owner}, which may write to it"
            return Origin("unclear", "unclear", maker, [label, owner])
    if first.is_of_call and not _is_bad_now(first, label):
        maker = f"{label} is finite now: something else stood in for it, or it changed"
        return Origin(
            "unclear",
            "unclear",
            maker,
            [label, *_writers(first), caller_of(first.watch)],
        )
    if first.is_of_call and (writers := _writers(first)):
        maker = (
            f"it is not known whether {label} was non-finite before the step, or was "
            "written within it"
        )
        return Origin("given", kind, maker, [label, *writers])
    if was_finite:
        maker = "an optimizer step since it was last seen finite, or another write"
    else:
        maker = "initialization, a checkpoint or a write: it was never seen finite"
    return Origin("given", kind, maker, [label])


def _is_bad_now(first: BadFrame, label: str) -> bool:
    """True if the model's weight of a name is bad; incurs a CPU-GPU sync."""
    model = first.watch.model
    if model is None:
        return False
    named = dict(zip(*first.watch.tensors.parameters(model, True), strict=True))
    weight = named.get(label)
    return weight is not None and not (
        is_plain(weight) and bool(finite_places(weight).all())
    )


def _writers(first: BadFrame) -> list[str]:
    """Lists the modules whose own code, or hooks, may write to weights."""
    return [
        name_of(first.watch, index)
        for index, module in first.watch.modules.present()
        if has_hooks(module)
        or not (only_calls_submodules(module) or is_layer_of_torch(module))
    ]


def origin_of_gradients(first: BadFrame, ordered: Sequence[BadFrame]) -> Origin:
    """Finds the origin of bad gradients of parameters; those of outputs were finite."""
    bad, count = _bad_gradients(ordered)
    owners = list(dict.fromkeys(n.rpartition(".")[0] or "the model" for n in bad))
    others = [LOSS, AFTER_BACKWARD, HOOK, EARLIER_GRADIENTS, *_other_ranks()]
    if not any(c.kind == _C.FrameKind.BACKWARD for c in first.watch.recorder.calls()):
        maker = (
            "the loss, the backward of any module, a hook on a gradient, gradients "
            "that were there before, or code after it: no gradient of an output was "
            "checked"
        )
        return Origin("unclear", "unclear", maker, [*owners, *others])
    reduced = ", or what another rank had in its gradients" * bool(_other_ranks())
    if len(bad) == count and len(owners) > 1:
        maker = (
            "code that changed gradients after backward (clipping by a non-finite norm "
            "spreads to all), gradients that were there before this backward, hooks on "
            "gradients, or a term of the loss that is computed from the weights: "
            f"all {count} gradients are non-finite, and those of outputs were finite"
            f"{reduced}"
        )
        candidates = [AFTER_BACKWARD, *dict.fromkeys([LOSS, *others[2:]])]
        return Origin("unclear", "after_backward", maker, candidates)
    maker = (
        f"the backward of {joined(owners)}, a term of the loss that is computed from "
        "weights, a hook on a gradient, gradients that were there before this "
        "backward, or code that changed gradients after backward: the gradients of all "
        f"watched outputs were finite{reduced}"
    )
    return Origin("unclear", "unclear", maker, [*owners, *others])


def _other_ranks() -> list[str]:
    """Lists the candidate that collectives of the training add to gradients."""
    is_there = dist.is_available() and dist.is_initialized()
    return [OTHER_RANK] if is_there and dist.get_world_size() > 1 else []


def _bad_gradients(ordered: Sequence[BadFrame]) -> tuple[list[str], int]:
    """Returns the parameters with bad gradients, and the number of gradients."""
    entries = [
        entry
        for bad in ordered
        if bad.frame.kind == _C.FrameKind.GRADIENTS
        for entry in bad.entries
    ]
    return [each.label.name for each in entries if each.is_bad], len(entries)


def around_gradients(ordered: Sequence[BadFrame]) -> tuple[list[str], list[str]]:
    """Returns the parameters with bad gradients, and the nearest with finite ones."""
    dirty: list[str] = []
    clean: list[str] = []
    for bad in ordered:
        if bad.frame.kind != _C.FrameKind.GRADIENTS:
            continue
        entries = [(e.label.name, e.is_bad) for e in bad.entries]
        for i, (name, is_bad) in enumerate(entries):
            if is_bad:
                dirty.append(name)
            elif any(is_near for _, is_near in entries[max(0, i - 1) : i + 2]):
                clean.append(name)
    return dirty, clean


_log = logging.getLogger("overflow_fast")


def attribute(
    frames: Sequence[BadFrame],
    watches: Sequence[ModelWatch] = (),
    is_check: bool = False,
) -> Verdict:
    """Finds the first bad entry of a step and its origin.

    Incurs a CPU-GPU sync for each tensor on a device that is scanned again, if
    something is bad.

    Args:
        frames: All bad frames of a step, in any order.
        watches: All watched models; those of the frames if none are given.
        is_check: True if an optimizer that the guard does not have may have stepped
            since the frames of calls.

    Returns:
        The verdict; a clean one if there are no frames.
    """
    if not frames:
        return Verdict()
    ordered = in_order(frames, is_check)
    first, entry = _first_of(ordered, is_check)
    watches = watches or list(dict.fromkeys(bad.watch for bad in frames))
    origin = _origin_or_why_not(first, entry, ordered, watches)
    dirty, clean = around_gradients(ordered)
    return Verdict(
        batch=first.frame.batch,
        first=_bad_entry(first, entry),
        **vars(origin),
        masks=_tolerated(first, are_masks=True),
        allowed=_tolerated(first, are_masks=False),
        headroom=_headroom_before(first, entry),
        num_bad_frames=len(frames),
        dirty_gradients=dirty,
        clean_gradients=clean,
        is_recomputed=first.frame.is_recomputed,
        reaches_loss=any(map(_is_of_loss, frames)),
    )


def _first_of(ordered: Sequence[BadFrame], is_check: bool) -> tuple[BadFrame, _C.Entry]:
    """Finds the first bad frame and entry: a weight that was bad before, if any.

    Weights are scanned where they are used, so a later module's come behind the
    outputs of an earlier module.
    """
    earliest = ordered[0]
    for bad in ordered:
        weights = given_weights(bad)
        is_of_step = not is_check or (
            bad.frame.kind == _C.FrameKind.FORWARD
            and (bad.watch, bad.frame.batch) == (earliest.watch, earliest.frame.batch)
        )
        if weights and is_of_step:
            return bad, weights[0]
    # A weight that the call may have written stands in front of its inputs.
    return earliest, (earliest.bad_inputs or earliest.bad_entries)[0]


def _is_of_loss(bad: BadFrame) -> bool:
    """True if a bad entry is a loss, or an output of a model."""
    roles = [entry.role for entry in bad.bad_entries]
    is_root = bad.frame.module == 0 and bad.is_of_call
    return _C.Role.RECORDED in roles or (is_root and _C.Role.OUTPUT in roles)


def _bad_entry(bad: BadFrame, entry: _C.Entry) -> BadEntry:
    stat = entry.stat
    assert stat is not None
    label = entry_label(entry.place)
    is_of_call = entry.role in OF_CALLS
    fqn = bad.watch.name_at(bad.frame.module)
    if entry.role == _C.Role.WEIGHT and bad.is_of_call:
        label = f"{fqn}.{label}".lstrip(".")
    return BadEntry(
        kind_of(entry.role),
        fqn if is_of_call else label,
        bad.frame.class_name if is_of_call else "",
        label,
        entry.dtype,
        stat.num_nan,
        stat.num_inf,
        entry.numel,
        _signs(entry.nonfinite_kinds),
    )


def _signs(kinds: int) -> str:
    return "".join(
        sign
        for sign, kind in (("+", _C.POSITIVE_INF), ("-", _C.NEGATIVE_INF))
        if kinds & kind
    )


def _tolerated(bad: BadFrame, are_masks: bool) -> list[str]:
    """Lists the inputs that are tolerated although non-finite: masks, or by rules."""
    return [
        entry_label(entry.place)
        for entry in bad.entries
        if entry.role == _C.Role.INPUT and entry.nonfinite_kinds and not entry.is_bad
        if (entry.nonfinite_kinds == _C.NEGATIVE_INF) == are_masks
    ]


def _headroom_before(bad: BadFrame, entry: _C.Entry) -> EntryHeadroom | None:
    peak = bad.watch.recorder.last_peak(entry.place)
    return None if peak is None else headroom_of(bad.watch, peak)


# The origin.


def _origin_or_why_not(
    first: BadFrame,
    entry: _C.Entry,
    ordered: Sequence[BadFrame],
    watches: Sequence[ModelWatch],
) -> Origin:
    """Finds the origin; if that fails, the alarm is raised all the same."""
    try:
        origin = _origin(first, entry, ordered, watches)
        is_of_call = first.is_of_call and origin.source != "weight"
        remarks = remarks_on(first) if is_of_call else []
        if origin.source in ("unclear", "loss", "after_backward"):
            remarks = [*remarks, *batch_remarks(first)]
        return dataclasses.replace(origin, remarks=remarks)
    except Exception as error:
        message = "The search for the origin of a non-finite value failed."
        _log.warning(message, exc_info=True)
        maker = f"the search for it failed ({type(error).__name__}: {error})"
        return Origin("unclear", "unclear", maker)


def _origin(
    first: BadFrame,
    entry: _C.Entry,
    ordered: Sequence[BadFrame],
    watches: Sequence[ModelWatch],
) -> Origin:
    kind = first.frame.kind
    if entry.role in (_C.Role.WEIGHT, _C.Role.OPTIMIZER_STATE):
        was_finite = _headroom_before(first, entry) is not None
        return origin_of_state(first, entry, was_finite)
    if kind == _C.FrameKind.BUFFERS:
        return _origin_of_buffer(first, entry)
    if kind == _C.FrameKind.RECORDED and is_label(entry.label.name):
        return Origin("unclear", "unclear", OF_FLAG)
    bad, calls = {key_of(each): each for each in ordered}, Calls(watches)
    if kind in FORWARDS:
        return origin_in_forward(first, bad, calls)
    if kind == _C.FrameKind.BACKWARD:
        before = Calls(watches, until=first.frame.order)
        origin = origin_of_gradient(first, before)
    elif kind == _C.FrameKind.GRADIENTS:
        origin = origin_of_gradients(first, ordered)
    else:
        origin = _origin_of_recorded(watches)
    return or_by_state(origin, first, bad, calls)


def _origin_of_recorded(watches: Sequence[ModelWatch]) -> Origin:
    candidates: list[str] = [LOSS, BATCH]
    is_seen = all(w.wanted.activations and w.modules.is_selected(0) for w in watches)
    if is_seen:
        maker = (
            "code after the model, whose outputs were finite, or values that do not "
            "pass through the model, such as labels"
        )
        return Origin("unclear", "loss", maker, candidates)
    maker = "the model, the loss or the batch: the model's outputs were not checked"
    names = [watch.name_at(0) or "the model" for watch in watches]
    return Origin("unclear", "unclear", maker, [*names, *candidates])


def _origin_of_buffer(first: BadFrame, entry: _C.Entry) -> Origin:
    label = entry.label.name
    owner = label.rpartition(".")[0] or "the model"
    seen = "every checked output was finite"
    if _headroom_before(first, entry) is None:
        maker = f"{label}, which was never seen finite; {seen}"
    else:
        maker = f"code that writes to {label}, such as {owner}; {seen}"
    return Origin("unclear", "buffer", maker, [owner])
