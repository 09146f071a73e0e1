"""The attribution of a step's bad frames: the first bad entry, and its origin."""

from __future__ import annotations

import bisect
import functools
import logging
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from .. import _C
from ..capture.inputs import (
    Given,
    LoopBatch,
    WeakTensor,
    finite_places,
    is_batch_first,
    is_mask,
    is_plain,
)
from ..capture.watch import ModelWatch
from ..core.modules import (
    children_of,
    is_layer_of_torch,
    module_of_parameter,
    own_parameters_of,
)
from ..core.ops import scan
from ..core.process import world_size
from ..core.tensors import is_number
from ..flags import is_label
from ..text import dtype_name, either
from ..torch_internals.module_internals import (
    forward_hooks,
    forward_pre_hooks,
    global_forward_hooks,
    global_forward_pre_hooks,
    is_batch_norm,
    is_dropout,
)
from ..tree import entry_label, label_text, tensors_in
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
    STAND_IN,
    BadEntry,
    BadFrame,
    EntryHeadroom,
    NonModuleOrigin,
    Origin,
    SettingRemark,
    Verdict,
    first_bad,
    headroom_of,
    kind_of,
    reach_loss,
)

Bad = Mapping[tuple[int, int], BadFrame]  # by watch and order
Candidate = tuple[str, str]  # its name among `Verdict.candidates`, and in words
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
    first, entry, ordered = first_bad(frames, is_check)
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
        reaches_loss=reach_loss(frames),
    )


def caller_of(watch: ModelWatch) -> NonModuleOrigin:
    """Names the code that calls a watched model, such as "the training loop"."""
    return NonModuleOrigin(watch.inputs.caller)


def _bad_entry(bad: BadFrame, entry: _C.Entry) -> BadEntry:
    stat = entry.stat
    assert stat is not None
    label = entry_label(entry.place)
    is_of_call = entry.role in OF_CALLS
    fqn = bad.watch.name_at(bad.frame.module)
    is_weight = entry.role == _C.Role.WEIGHT and bad.is_of_call
    if is_weight:
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
        is_weight and _is_finite_now(bad, entry),
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
        return replace(origin, remarks=remarks)
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


def _makers(words: Iterable[str]) -> str:
    """Lists who may have made a value, cut after a number of them."""
    return either(words, 6)


# Modules whose inputs or outputs may be changed by code that is not theirs.


_OURS = (_C.run_hook, _C.run_paused)


def never_writes(module: nn.Module | None) -> bool:
    """True if a module is known not to write to its inputs: torch's layers."""
    return is_layer_of_torch(module) and not getattr(module, "inplace", False)


def only_calls_submodules(module: nn.Module | None) -> bool:
    """True if a module's own code only calls its submodules in a row."""
    if not isinstance(module, nn.Sequential) or "forward" in vars(module):
        return False
    return type(module).forward is nn.Sequential.forward


def has_hooks(module: nn.Module) -> bool:
    """True if hooks of others run around a module's forward."""
    every = (has_pre_hooks, has_earlier_hooks, has_later_hooks)
    return any(has_any(module) for has_any in every)


def has_pre_hooks(module: nn.Module | None) -> bool:
    """True if a hook of others may replace a module's inputs."""
    hooks = {} if module is None else forward_pre_hooks(module)
    every = (*hooks.values(), *global_forward_pre_hooks().values())
    return not all(map(_is_ours, every))


def has_earlier_hooks(module: nn.Module | None) -> bool:
    """True if a hook of others may replace an output before it is scanned."""
    hooks = [] if module is None else list(forward_hooks(module).values())
    ours = next((i for i, hook in enumerate(hooks) if _is_ours(hook)), len(hooks))
    return not all(map(_is_ours, (*global_forward_hooks().values(), *hooks[:ours])))


def has_later_hooks(module: nn.Module | None) -> bool:
    """True if a hook of others may replace an output after it was scanned."""
    hooks = [] if module is None else list(forward_hooks(module).values())
    ours = [i for i, hook in enumerate(hooks) if _is_ours(hook)]
    return bool(ours) and not all(map(_is_ours, hooks[ours[0] :]))


def _is_ours(hook: object) -> bool:
    if isinstance(hook, functools.partial):
        return hook.func in _OURS
    owner = getattr(hook, "__self__", None)
    return type(owner).__module__.startswith("overflow_fast.")


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
        return Origin("unclear", "unclear", f"{between}{_makers(words)}", names, near)

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
    maker = f"code that used the output of {here}: {_makers(names)}"
    return Origin("unclear", "unclear", maker, names)


# The origin of a forward's first bad value, from the inputs and outputs of calls.


def origin_in_forward(first: BadFrame, bad: Bad, calls: Calls) -> Origin:
    """Finds the origin of the bad value in a call, which is the first bad one.

    Args:
        first: The call's frame.
        bad: All bad frames, by `key_of`.
        calls: The calls of all watched models.
    """
    chain = calls.chain_of(first.watch, first.frame.order)
    origin = _find_by_calls(first, chain, bad, calls)
    if origin.source == "buffer":
        return origin
    others = _around(first, chain, origin, calls)
    return or_by_state(origin, first, bad, calls, others)


def _around(
    first: BadFrame, chain: Sequence[Called], origin: Origin, calls: Calls
) -> list[Candidate]:
    """Lists the modules that share one, and may have called it with the bad input.

    Args:
        first: The frame of the first bad call.
        chain: The call and those around it; empty if they are not known.
        origin: Who can have made it, as far as these show.
        calls: The calls of all watched models.
    """
    if not (chain and first.bad_inputs):
        return []
    # The root's inputs are its caller's, whichever module called those within it.
    if origin.origin == "given" and not chain[-1].call.module:
        return []
    return [
        (name, f"{name}, which has {around.name} too and may have called it")
        for around in chain
        for name in calls.other_callers(around)
    ]


def _find_by_calls(
    first: BadFrame, chain: Sequence[Called], bad: Bad, calls: Calls
) -> Origin:
    called = chain[0] if chain else None
    if not first.bad_inputs:
        return _made_within(first, called, bad, calls)
    if called is None:
        name = name_of(first.watch, first.frame.module)
        candidates = [name, *_names_around(first), BATCH, caller_of(first.watch)]
        return Origin("unclear", "unclear", "one of those around it", candidates)
    passed = [(first, called)]
    for around in chain[1:]:
        frame = bad.get((id(around.watch), around.call.order))
        if frame is None or not frame.bad_inputs:
            writers = [c.name for f, c in passed if _may_change_input(f, c)]
            return _between(called, around, frame, writers, bad, calls)
        passed.append((frame, around))
    return origin_of_inputs(*passed[-1], calls)


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
        for other in calls.within(around, called.call.order)
        if _may_hide(other) and called not in calls.chain(other)
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
        return replace(given, candidates=candidates, unwatched=unwatched)
    if writers:
        others = _makers(writers)
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
    is_written = any(entry.version for entry in first.bad_inputs)
    may_write = (is_written or called.call.is_traced) and not never_writes(module)
    return may_write or has_pre_hooks(module)


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
        if all(entry.label != given.label for given in first.given_weights):
            maker = f"{label} before the step, or {owner}, which may write to it"
            return Origin("unclear", "unclear", maker, [label, owner])
    if first.is_of_call and _is_finite_now(first, entry):
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


def _is_finite_now(first: BadFrame, entry: _C.Entry) -> bool:
    """True if the weight of a call's module is finite; incurs a CPU-GPU sync."""
    module = first.watch.module_at(first.frame.module)
    own = {} if module is None else own_parameters_of(module)
    weight = own.get(entry.label.name)
    return is_plain(weight) and bool(finite_places(weight).all())


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
    calls = first.watch.recorder.calls()
    unseen = [c.has_unseen for c in calls if c.kind == _C.FrameKind.BACKWARD]
    if all(unseen):
        maker = (
            "the loss, the backward of any module, a hook on a gradient, gradients "
            "that were there before, or code after it: no gradient of an output was "
            "checked"
        )
        return Origin("unclear", "unclear", maker, [*owners, *others])
    seen = " that could be scanned" * any(unseen)
    reduced = ", or what another rank had in its gradients" * bool(_other_ranks())
    if len(bad) == count and len(owners) > 1:
        maker = (
            "code that changed gradients after backward (clipping by a non-finite norm "
            "spreads to all), gradients that were there before this backward, hooks on "
            "gradients, or a term of the loss that is computed from the weights: "
            f"all {count} gradients are non-finite, and those of outputs{seen} were "
            f"finite{reduced}"
        )
        candidates = [AFTER_BACKWARD, *dict.fromkeys([LOSS, *others[2:]])]
        return Origin("unclear", "after_backward", maker, candidates)
    maker = (
        f"the backward of {_makers(owners)}, a term of the loss that is computed from "
        "weights, a hook on a gradient, gradients that were there before this "
        "backward, or code that changed gradients after backward: the gradients of all "
        f"watched outputs{seen} were finite{reduced}"
    )
    return Origin("unclear", "unclear", maker, [*owners, *others])


def _other_ranks() -> list[str]:
    """Lists the candidate that collectives of the training add to gradients."""
    return [OTHER_RANK] if world_size() > 1 else []


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


# The origin of what a call was given: the batch, the training loop or a caller.


def origin_of_inputs(frame: BadFrame, outermost: Called, calls: Calls) -> Origin:
    """Finds the origin of an outermost call's bad inputs: the batch, or the loop."""
    watch, call = outermost
    around = watch.modules.ancestors(call.module) if call.module else []
    unwatched = [i for i in around if not watch.modules.is_selected(i)]
    if call.kind == _C.FrameKind.RECOMPUTED:
        names = [name_of(watch, index) for index in around] or [outermost.name]
        maker = f"code that backward ran again: {_makers(names)}"
        return Origin("unclear", "unclear", maker, names)
    module = watch.module_at(call.module)
    is_written = not call.is_traced and _is_written(frame, module)
    if unwatched or is_written or has_pre_hooks(module):
        names = [name_of(watch, index) for index in unwatched] or [outermost.name]
        caller = caller_of(watch)
        maker = f"{_batch_words(frame)}, {caller}, or {_makers(names)}"
        return Origin("unclear", "unclear", maker, [*names, BATCH, caller])
    return _origin_of_given(outermost, frame, frame.bad_inputs, calls)


def _origin_of_given(
    outermost: Called, frame: BadFrame, inputs: Sequence[_C.Entry], calls: Calls
) -> Origin:
    """Makes the origin: the batch if a trainer has noted it as bad, else the loop's."""
    loop = frame.watch.inputs.loop_batches.of(outermost.call.batch)
    places = [_place_in_loop(loop, frame, entry.label) for entry in inputs]
    if all(places):
        return _blame_batch(places, outermost)
    is_computed = all(entry.is_computed for entry in inputs)
    before = calls.before(outermost, None)
    after = "" if before is None else before.name
    if is_computed or (loop is not None and loop.bad_places() == []):
        where = f"between {after} and" if after else "before"
        caller = caller_of(outermost.watch)
        maker = f"{caller}, {where} {outermost.name}"
        return Origin("passed_on", "caller", maker, [caller], after)
    places = [
        place or _place_in_call(frame, entry.label)
        for place, entry in zip(places, inputs, strict=True)
    ]
    origin = _blame_batch_or_loop(places, outermost, after)
    return origin if loop is None else replace(origin, batch_places=[])


def _is_written(frame: BadFrame, module: nn.Module | None) -> bool:
    """True if the outermost module may have written to its inputs."""
    return any(
        entry.version != (_held(frame, entry.label).version or 0)
        for entry in frame.bad_inputs
    ) and not never_writes(module)


def _held(frame: BadFrame, label: _C.Label) -> WeakTensor:
    """Returns an input that the training loop gave a root."""
    return _given(frame).find(label_text(label))


def _given(frame: BadFrame) -> Given:
    """Returns all inputs that the training loop gave a root."""
    given = (
        None if frame.frame.module else frame.watch.inputs.given.get(frame.frame.batch)
    )
    return given or Given()


def _blame_batch(places: list[str], outermost: Called) -> Origin:
    maker = f"the batch, as {outermost.name} received it: {', '.join(places)}"
    return Origin("given", "batch", maker, [BATCH], batch_places=places)


def _blame_batch_or_loop(places: list[str], outermost: Called, after: str) -> Origin:
    """Makes the origin of a loop's input: the batch, or computed from anything."""
    caller = caller_of(outermost.watch)
    maker = f"the batch or from {caller}"
    maker += f", which had called {after} before" if after else ""
    maker += f", as {outermost.name} received it" if outermost.call.module else ""
    maker += f": {', '.join(places)}"
    candidates: list[str] = [BATCH, caller]
    return Origin("given", "unclear", maker, candidates, after, batch_places=places)


def _batch_words(frame: BadFrame) -> str:
    """Names the batch, with the labels of the bad tensors in it."""
    labels = [entry_label(entry.place) for entry in frame.bad_inputs]
    return f"the batch ({', '.join(labels)})"


def _place_in_loop(loop: LoopBatch | None, frame: BadFrame, label: _C.Label) -> str:
    """Returns the place of an outermost call's input in the trainer's batch, or ""."""
    if loop is None:
        return ""
    are_samples = is_batch_first(frame.watch.model)
    return loop.place_of(_held(frame, label).tensor(), are_samples)


def _place_in_call(frame: BadFrame, label: _C.Label) -> str:
    """Returns the place of an outermost call's input in the call."""
    return _given(frame).place_of(label_text(label), frame.watch.model)


def origin_of_unsearched(
    called: Called, frame: BadFrame | None, name: str, calls: Calls
) -> Origin | None:
    """Makes the origin where a call's input that was not searched may be bad."""
    if is_layer_of_torch(called.watch.module_at(called.call.module)):
        return None
    around = calls.chain(called)[1:]
    outermost = around[-1] if around else called
    given = None
    if not outermost.call.module:
        given = outermost.watch.inputs.given.get(outermost.call.batch)
    labels = [] if given is None else given.unseen
    is_known = bool(given) and not around
    own = [] if frame is None else _unseen_inputs(frame, is_known)
    if not labels and not own:
        return None
    caller = caller_of(called.watch)
    outside = [BATCH, caller] if labels or not given else []
    hidden = [
        each.name
        for each in calls.within(outermost, called.call.order)
        if each.call.has_unseen and called not in calls.chain(each)
    ]
    givers = [each.name for each in around]
    candidates = list(dict.fromkeys([name, *givers, *hidden, *outside]))
    where = ", ".join(labels or own)
    of = outermost.name if labels else name
    maker = f"{_makers(candidates)}; {where} of {of} was not searched"
    return Origin("unclear", "unclear", maker, candidates)


def _unseen_inputs(frame: BadFrame, is_known: bool) -> list[str]:
    """Lists the inputs of a call that were not searched, where they may be the data.

    Tensors that are not scanned may be; objects only where there is no other input
    and their type is not known.
    """
    inputs = [each for each in frame.entries if each.role == _C.Role.INPUT]
    odd = _select_kind(inputs, _C.EntryKind.NOT_SCANNED)
    if not (odd or is_known or _select_kind(inputs, _C.EntryKind.TENSOR)):
        odd = _select_kind(inputs, _C.EntryKind.NOT_TENSOR)
    return [label_text(entry.label) for entry in odd]


def _select_kind(entries: Sequence[_C.Entry], kind: _C.EntryKind) -> list[_C.Entry]:
    return [entry for entry in entries if entry.kind == kind]


def origin_of_minus_infs(
    called: Called, frame: BadFrame, name: str, bad: Bad, calls: Calls
) -> Origin | None:
    """Makes the origin where a call's inputs hold -inf that may be no mask."""
    inputs = _minus_inf_inputs(frame)
    if not inputs:
        return None
    around = calls.chain(called)[1:]
    outermost = around[-1] if around else called
    root = bad.get((id(outermost.watch), outermost.call.order))
    module = called.watch.module_at(called.call.module)
    if not around and isinstance(module, nn.Linear) and not has_pre_hooks(module):
        # No output can be finite then.
        return _origin_of_given(called, frame, inputs, calls)
    is_given = any(_is_mask(frame, entry.label) is False for entry in inputs)
    givers = [each.name for each in around] if is_given else []
    places = []
    if root is not None:
        labels = [entry.label for entry in _minus_inf_inputs(root)]
        labels = [label for label in labels if _is_mask(root, label) is not True]
        loop = root.watch.inputs.loop_batches.of(root.frame.batch)
        places = [
            _place_in_loop(loop, root, label) or _place_in_call(root, label)
            for label in labels
        ]
    if not places and not givers:
        return None
    caller = caller_of(called.watch)
    outside = [BATCH, caller] if places or root is None else []
    candidates = list(dict.fromkeys([name, *givers, *outside]))
    maker = f"{name}, or {_makers(candidates[1:])}, which passed on -inf"
    maker += f" in {', '.join(places)}" if places else ""
    return Origin("unclear", "unclear", maker, candidates, batch_places=places)


def _minus_inf_inputs(frame: BadFrame) -> list[_C.Entry]:
    return [
        entry
        for entry in frame.entries
        if entry.nonfinite_kinds == _C.NEGATIVE_INF and not entry.is_bad
        if entry.role == _C.Role.INPUT
    ]


def _is_mask(frame: BadFrame, label: _C.Label) -> bool | None:
    """True if an input that holds -inf is an additive mask; None if it may be.

    A mask holds 0 besides, and comes with something to mask.
    """
    is_known = is_mask(_held(frame, label).unchanged())
    others, lowest = 0, None
    for entry in frame.entries:
        if entry.stat is not None and entry.label == label:
            lowest = entry.stat.abs_min
        elif entry.stat is not None:
            others += entry.role == _C.Role.INPUT
    if is_known is not None:
        return is_known and bool(others)
    if not others or lowest not in (0, math.inf):
        return False
    return None


# Remarks on a bad call: the batch, fill values, negative variances.


# Masks are filled with the lowest finite number, or with nearly that.
_NEAR_MAX = 0.999  # finds -3.4e38, not values that only come near


def remarks_on(first: BadFrame) -> list[str]:
    """Writes what else was seen at the first bad call, in sentences.

    Incurs a CPU-GPU sync for each running variance on a device.
    """
    return [*_sentinels(first), *_negative_variances(first)]


def batch_remarks(first: BadFrame) -> list[str]:
    """Writes where the batch that a trainer has noted is non-finite, in sentences.

    Incurs a CPU-GPU sync for each tensor of the batch.
    """
    noted = first.watch.inputs.loop_batches.of(first.frame.batch)
    if noted is None:
        return []
    places = noted.bad_places(is_batch_first(first.watch.model))
    return [f"The batch is non-finite: {', '.join(places)}."] if places else []


def _sentinels(first: BadFrame) -> list[str]:
    """Lists finite inputs that reach the end of their dtype, as finfo.min does."""
    sentences = []
    for entry in first.entries:
        stat, dtype = entry.stat, entry.dtype
        if stat is None or entry.role != _C.Role.INPUT:
            continue
        limit, abs_max = _limit(dtype), stat.abs_max
        num_bad = stat.num_nan + stat.num_inf
        if abs_max is None or limit is None or num_bad or abs_max < _NEAR_MAX * limit:
            continue
        label = entry_label(entry.place)
        sentences.append(
            f"`{label}` holds a magnitude of {abs_max:.3g}, at the end of {dtype}: a "
            "fill value such as finfo.min overflows when something is added to it."
        )
    return sentences


def _limit(dtype: str) -> float | None:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        return None
    return float(torch.finfo(found).max)


def _negative_variances(first: BadFrame) -> list[str]:
    module = first.watch.module_at(first.frame.module)
    variance = getattr(module, "running_var", None)
    if variance is None or not is_plain(variance):
        return []
    count = int((variance < 0).sum())
    name = f"{first.watch.name_at(first.frame.module)}.running_var".lstrip(".")
    return [f"{count} of {variance.numel()} values of {name} are negative."] * bool(
        count
    )


# Non-finite weights, buffers and attributes of modules, which code may have read.


_Owner = tuple[ModelWatch, int]


class _Kept(NamedTuple):
    """A non-finite value that a module keeps from call to call.

    Attributes:
        name: The name of the weight, buffer or attribute.
        candidate: The value as a candidate.
        was_bad: It was never seen finite.
        is_buffer: It is a buffer.
    """

    name: str
    candidate: Candidate
    was_bad: bool = False
    is_buffer: bool = False


def or_by_state(
    origin: Origin,
    first: BadFrame,
    bad: Bad,
    calls: Calls,
    others: Sequence[Candidate] = (),
) -> Origin:
    """Returns an origin, which is unclear if modules keep what can have made it, too.

    A weight that no call can have written is the first bad value itself, and its origin
    known. Others are those without a gradient in custom modules, which may keep
    statistics in them, and those that the step has not checked; buffers; attributes.
    Leaves out what only a later call can have made bad. Incurs CPU-GPU syncs for values
    on a device.

    Args:
        origin: Who can have made it, as far as calls show.
        first: The frame with the first bad value.
        bad: All bad frames.
        calls: The calls of all watched models.
        others: Further candidates.
    """
    state = [] if origin.origin == "given" else _readable(first, origin, bad, calls)
    others = [*(kept.candidate for kept in state), *_stand_ins(origin, calls), *others]
    if not others:
        return origin
    maker, colon, why = origin.maker, "", ""
    if origin.origin == "made":
        maker = f"the code of {maker}"
    if not first.is_of_call:  # what was not checked stands last
        maker, colon, why = maker.partition(": ")
    names = dict.fromkeys([*origin.candidates, *(name for name, _ in others)])
    return replace(
        origin,
        origin="unclear",
        source="unclear",
        maker=f"{maker}, or {_makers(words for _, words in others)}{colon}{why}",
        candidates=list(names),
        nonfinite_state=[kept.name for kept in state],
    )


def _stand_ins(origin: Origin, calls: Calls) -> Iterator[Candidate]:
    """Yields tensors that stood in for weights which the step has not checked."""
    if origin.origin != "given" and any(
        watch.inputs.have_stand_ins and not _checks_weights(watch, calls)
        for watch in calls.watches
    ):
        words = f"{STAND_IN} in the place of a weight, which was not checked"
        yield STAND_IN, words


def _checks_weights(watch: ModelWatch, calls: Calls) -> bool:
    """True if the weights of selected modules were checked in the step."""
    return watch.wanted.weights and calls.has_any(watch)


def _readable(first: BadFrame, origin: Origin, bad: Bad, calls: Calls) -> list[_Kept]:
    """Lists the non-finite values that the code which made the first may have read."""
    owners = {
        watch.name_at(index): (watch, index)
        for watch in calls.watches
        for index in watch.modules.order
    }
    found = [*_weights(bad, calls, owners), *_buffers(bad, calls)]
    module = first.watch.module_at(first.frame.module)
    if origin.source == "module" and is_layer_of_torch(module):
        own = first.watch.name_at(first.frame.module)  # all that it reads
        return [kept for kept in found if module_of_parameter(kept.name) == own]
    found += _attributes(owners)
    makers = origin.candidates
    return [each for each in found if _may_be_read(each, owners, makers, first, calls)]


def _may_be_read(
    kept: _Kept,
    owners: Mapping[str, _Owner],
    makers: Sequence[str],
    first: BadFrame,
    calls: Calls,
) -> bool:
    """True if one of the makers may have read a module's value."""
    name = module_of_parameter(kept.name)
    owner = owners.get(name)
    if owner is None:
        return True
    if kept.is_buffer and _only_writes(owner):
        return False
    is_own = (name or "the model") in makers
    return is_own or _is_earlier(owner, kept.was_bad, first, calls)


def _is_earlier(owner: _Owner, was_bad: bool, first: BadFrame, calls: Calls) -> bool:
    """True if a module's value may have been bad before the first one was.

    Where it was finite, and its owner only called later, that call has made it bad. A
    call that is given the first bad value comes later, too.
    """
    watch, index = owner
    began = first.frame.order + (not first.bad_inputs)
    before = calls.last_of(watch, index, began)
    after = calls.last_of(watch, index, _C.Recorder.num_frames() + 1)
    return was_bad or before is not None or after is None


def _only_writes(owner: _Owner) -> bool:
    """True if a module only writes to its buffers: statistics, in training."""
    watch, index = owner
    module = watch.module_at(index)
    return module is not None and is_batch_norm(module) and module.training


def _weights(bad: Bad, calls: Calls, owners: Mapping[str, _Owner]) -> Iterator[_Kept]:
    """Yields the weights that were bad in a call, or that are, and were not checked."""
    seen = dict(_weights_in_frames(bad, calls, owners))
    unchecked = set(_unchecked(calls, owners))
    for name in _nonfinite_weights(calls, unchecked | seen.keys()):
        was_bad = seen.pop(name, None)
        how = "which is non-finite too"
        if was_bad is None:
            how = "which is non-finite now and was not checked"
        yield _weight(name, how, bool(was_bad))
    for name, was_bad in seen.items():
        how = "which was non-finite in the call and is finite now: something else "
        yield _weight(name, f"{how}stood in for it, or it changed", was_bad)


def _weight(name: str, how: str, was_bad: bool) -> _Kept:
    return _Kept(name, (name, f"the weight {name}, {how}"), was_bad)


def _weights_in_frames(
    bad: Bad, calls: Calls, owners: Mapping[str, _Owner]
) -> Iterator[tuple[str, bool]]:
    """Yields the bad weights of the step's calls, and whether each was never finite."""
    for frame in bad.values():
        for entry in frame.bad_weights:
            name = entry.label.name
            if frame.is_of_call:
                owner = frame.watch.name_at(frame.frame.module)
                name = f"{owner}.{name}".lstrip(".")
            elif _is_called(owners.get(module_of_parameter(name)), calls):
                continue  # scanned after its call, which has seen it finite
            yield name, frame.watch.recorder.last_peak(entry.place) is None


def _unchecked(calls: Calls, owners: Mapping[str, _Owner]) -> Iterator[str]:
    """Yields the names of the weights that the step has not checked."""
    for watch in calls.watches:
        model = watch.model
        is_checked = _checks_weights(watch, calls)
        for name in [] if model is None else watch.tensors.parameters(model, True)[0]:
            owner = owners.get(module_of_parameter(name))
            is_selected = owner is not None and watch.modules.is_selected(owner[1])
            if not (is_checked and is_selected):
                yield name


def _nonfinite_weights(calls: Calls, among: Container[str]) -> Iterator[str]:
    for watch in calls.watches:
        model = watch.model
        named = ([], []) if model is None else watch.tensors.parameters(model, True)
        asked = [pair for pair in zip(*named, strict=True) if pair[0] in among]
        stats = scan([weight for _, weight in asked])
        for (name, _), stat in zip(asked, stats, strict=True):
            if stat.has_nan or stat.has_inf:
                yield name


def _is_called(owner: _Owner | None, calls: Calls) -> bool:
    last = _C.Recorder.num_frames() + 1
    return owner is not None and calls.last_of(*owner, last) is not None


def _buffers(bad: Bad, calls: Calls) -> Iterator[_Kept]:
    """Yields the bad buffers; not those that hold nothing worse than -inf: masks."""
    found: dict[str, bool] = {}
    for watch in calls.watches:
        if (model := watch.model) is not None:
            names, buffers = watch.tensors.buffers(model, all_modules=True)
            worst = _worst(buffers)
            found.update((n, True) for n, w in zip(names, worst, strict=True) if w)
    for frame in bad.values():
        if frame.frame.kind == _C.FrameKind.BUFFERS:
            for entry in frame.bad_entries:
                was_finite = frame.watch.recorder.last_peak(entry.place)
                found[entry.label.name] = was_finite is None
    for name, was_bad in found.items():
        words = f"the buffer {name}, which is non-finite too"
        yield _Kept(name, (name, words), was_bad, is_buffer=True)


_NUMBERS = (bool, int, float, str)  # most attributes


def _attributes(owners: Mapping[str, _Owner]) -> Iterator[_Kept]:
    """Yields the attributes that hold a nan or an inf in what is no buffer."""
    for owner, (watch, index) in owners.items():
        module = watch.module_at(index)
        for key, value in () if module is None else vars(module).items():
            if key.startswith("_") or value is None or isinstance(value, _NUMBERS):
                continue
            worst = set(_worst(tensors_in(value)))
            for what in ("nan", "inf"):
                if what in worst:
                    name = f"{owner}.{key}".lstrip(".")
                    words = f"a value kept in {name}, which holds {what}"
                    yield _Kept(name, (owner or "the model", words))
                    break


def _worst(tensors: list[torch.Tensor]) -> list[str]:
    """Returns for each tensor "nan" or "inf" if it holds one; "" if at worst -inf."""
    if not tensors:
        return []
    return [
        "nan" if stat.has_nan else "inf" if stat.has_inf and _has_inf(tensor) else ""
        for tensor, stat in zip(tensors, scan(tensors), strict=True)
    ]


def _has_inf(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and bool((tensor == torch.inf).any())


# The calls of a step's modules: their order, and the calls around them.


class Called(NamedTuple):
    """A module's call, and the watch that recorded it."""

    watch: ModelWatch
    call: _C.Call

    @property
    def name(self) -> str:
        """The module's qualified name."""
        return name_of(self.watch, self.call.module)

    def encloses(self, inner: Called) -> bool:
        """True if `inner` ran within it, by names, order and inputs."""
        a, b = self.call, inner.call
        is_around = a.order > b.order and (a.batch, a.kind) == (b.batch, b.kind)
        # Its inputs did not exist yet when the other call ended.
        is_later = a.thread == b.thread and a.begins_after > b.ends_before
        return is_around and not is_later and self.watch is inner.watch

    @property
    def may_pass_through(self) -> bool:
        """True if the call may have returned one of its inputs."""
        module = self.watch.module_at(self.call.module)
        is_known = isinstance(module, nn.Identity) or is_dropout(module)
        return is_known or self.call.begins_after >= self.call.ends_before


class Calls:
    """All known calls, in the order in which they ended.

    Args:
        watches: The watched models.
        until: The order of the frame before which they have ended; None for all.

    Attributes:
        watches: The watched models.
    """

    def __init__(self, watches: Sequence[ModelWatch], until: int | None = None) -> None:
        self.watches = watches
        found = [
            Called(watch, call)
            for watch in watches
            for call in watch.recorder.calls()
            if until is None or call.order < until
        ]
        found.sort(key=_order)
        self._all, self._gradients = list[Called](), list[Called]()
        for each in found:
            is_forward = each.call.kind in FORWARDS
            (self._all if is_forward else self._gradients).append(each)
        self._modules: dict[tuple[int, int], list[Called]] = {}
        for called in self._all:
            watch, call = called
            self._modules.setdefault((id(watch), call.module), []).append(called)
        self._callers: dict[int, Called | None] = {}
        self._holders: dict[int, dict[int, list[tuple[int, int]]]] = {}

    def has_any(self, watch: ModelWatch) -> bool:
        """True if a call of a watch's modules is known."""
        return any(called.watch is watch for called in self._all)

    def last_of(self, watch: ModelWatch, module: int, before: int) -> Called | None:
        """Returns the last call of a module that ended before a frame."""
        found = self._modules.get((id(watch), module), [])
        place = bisect.bisect_left(found, before, key=_order)
        return found[place - 1] if place else None

    def caller(self, called: Called) -> Called | None:
        """Returns the nearest watched call around one; None for an outermost call."""
        order = called.call.order
        if not called.call.module:  # the model itself
            return None
        if order not in self._callers:
            self._callers[order] = self._find_caller(called)
        return self._callers[order]

    def _find_caller(self, called: Called) -> Called | None:
        for index in called.watch.modules.ancestors(called.call.module):
            found = self._modules.get((id(called.watch), index), [])
            place = bisect.bisect_right(found, called.call.order, key=_order)
            if place < len(found) and found[place].encloses(called):
                return found[place]
        return None

    def chain(self, called: Called) -> list[Called]:
        """Lists a call and all watched calls around it, from the innermost."""
        chain, around = [called], self.caller(called)
        while around is not None:
            chain.append(around)
            around = self.caller(around)
        return chain

    def chain_of(self, watch: ModelWatch, order: int) -> list[Called]:
        """Lists the same of the call whose frame has this order; empty if unknown."""
        place = bisect.bisect_left(self._all, order, key=_order)
        for found in self._all[place : place + 1]:
            if found.call.order == order and found.watch is watch:
                return self.chain(found)
        return []

    def other_callers(self, called: Called) -> list[str]:
        """Lists the modules that share a call's module, which may have called it too.

        A module that others hold as well is named by the first of them.
        """
        module = called.watch.module_at(called.call.module)
        by_name = set(called.watch.modules.ancestors(called.call.module))
        return [
            name_of(watch, index)
            for watch in self.watches
            for index in sorted(self._above(watch, module), key=watch.modules.place)
            if watch.modules.has_forward(index)
            if not (watch is called.watch and index in by_name)
            if self._may_be_around(watch, index, called)
        ]

    def _above(self, watch: ModelWatch, module: nn.Module | None) -> set[int]:
        """The modules of a watch that hold another one, directly or through others."""
        holders = self._holders.get(id(watch))
        if holders is None:
            holders = self._holders[id(watch)] = {}
            for index, each in watch.modules.present():
                for child in children_of(each).values():
                    holders.setdefault(id(child), []).append((index, id(each)))
        found, waiting = set[int](), [id(module)]
        while waiting:
            for index, holder in holders.get(waiting.pop(), ()):
                if index not in found and holder != id(module):
                    found.add(index)
                    waiting.append(holder)
        return found

    def _may_be_around(self, watch: ModelWatch, index: int, called: Called) -> bool:
        found = self._modules.get((id(watch), index), [])
        if not watch.modules.is_selected(index):
            return True
        place = bisect.bisect_right(found, called.call.order, key=_order)
        if watch is called.watch:
            return any(each.encloses(called) for each in found[place:])
        return place < len(found)

    def before(self, called: Called, within: Called | None) -> Called | None:
        """Returns the last call that ended before one began, in the same outer call."""
        end = bisect.bisect_left(self._all, called.call.order, key=_order)
        for other in reversed(self._all[:end]):
            chain = self.chain(other)
            if called not in chain and (within is None or within in chain):
                place = len(chain) if within is None else chain.index(within)
                return chain[place - 1]
        return None

    def last_within(self, called: Called) -> Called | None:
        """Returns the last call that a call itself has made."""
        end = bisect.bisect_left(self._all, called.call.order, key=_order)
        for other in reversed(self._all[:end]):
            if self.caller(other) == called:
                return other
        return None

    def within(self, called: Called, before: int | None = None) -> Iterator[Called]:
        """Yields the calls that ran within one, up to a frame with an order."""
        end = called.call.order if before is None else before
        place = bisect.bisect_left(self._all, end, key=_order)
        return (c for c in self._all[:place] if called in self.chain(c))

    def users(self, called: Called) -> list[str]:
        """Lists the modules that can have used a call's output, as they ended."""
        start = bisect.bisect_right(self._all, called.call.order, key=_order)
        if called.may_pass_through:  # others may have been given it before
            start = 0
        return list(dict.fromkeys(other.name for other in self._all[start:]))

    def after(self, called: Called, within: Called | None, before: int) -> list[Called]:
        """Lists later calls of the same outer call that ended before a frame."""
        start = bisect.bisect_right(self._all, called.call.order, key=_order)
        if called.may_pass_through:
            start = 0
        end = bisect.bisect_left(self._all, before, key=_order)
        around = None if within is None else within.call.order
        return [
            other
            for other in self._all[start:end]
            if other != called and _order_of(self.caller(other)) == around
        ]

    def in_backward(self, watch: ModelWatch, module: int, before: int) -> list[Called]:
        """Lists a module's calls that one backward may run through, before a frame.

        Those since the last gradient of an output before its last call.
        """
        last = self.last_of(watch, module, before)
        if last is None:
            return []
        place = bisect.bisect_left(self._gradients, last.call.order, key=_order)
        begin = self._gradients[place - 1].call.order if place else -1
        found = self._modules[id(watch), module]
        return [c for c in found if begin < c.call.order < before]

    def gradients(self, begin: int, end: int) -> list[Called]:
        """Lists the gradients of outputs that came between two frames."""
        first = bisect.bisect_right(self._gradients, begin, key=_order)
        return self._gradients[
            first : bisect.bisect_left(self._gradients, end, key=_order)
        ]


def _order(called: Called) -> int:
    return called.call.order


def _order_of(called: Called | None) -> int | None:
    return None if called is None else called.call.order


def name_of(watch: ModelWatch, index: int) -> str:
    """Returns the qualified name of a module, or "the model"."""
    return watch.name_at(index) or "the model"


# Settings of optimizers that make weights non-finite.


# Settings that an optimizer adds to a root that may be 0, and divides by.
_EPS = ("eps", "epsilon")


def bad_settings(
    optimizers: Sequence[Optimizer], had_finite_gradients: bool = True
) -> list[str]:
    """Lists the settings in `param_groups` that can make weights non-finite.

    A number that is non-finite, and an epsilon that is 0 in the dtype of a group's
    parameters. The latter is listed only where the gradients of the step before were
    finite. Incurs a CPU-GPU sync for each setting that is a tensor on a device.
    """
    sentences: list[str] = []
    for optimizer in optimizers:
        for i, group in enumerate(optimizer.param_groups):
            of = f"of param_groups[{i}] of {type(optimizer).__name__}"
            sentences += _group_remarks(group, of, had_finite_gradients)
    return list(dict.fromkeys(sentences))


def _group_remarks(
    group: Mapping[str, Any], of: str, had_finite_gradients: bool
) -> Iterable[str]:
    for name, value in group.items():
        if name == "params":
            continue
        for number in _numbers(value):
            if not math.isfinite(number):
                remark = SettingRemark(f"It may come from {name}={number} {of}.")
                remark.setting = f"{name} {of}"
                yield remark
            elif name in _EPS and had_finite_gradients:
                for text in _vanishing(name, number, group["params"]):
                    yield f"{text} {of}."


def _vanishing(name: str, eps: float, parameters: Sequence[torch.Tensor]) -> list[str]:
    dtypes = dict.fromkeys(p.dtype for p in parameters if p.is_floating_point())
    return [
        f"It may come from {name}={eps:g}, which is 0 in {dtype_name(dtype)}, the dtype"
        for dtype in dtypes
        if float(torch.tensor(eps, dtype=dtype)) == 0
    ]


def _numbers(value: object) -> Iterable[float]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, torch.Tensor) and value.numel() == 1:
        yield float(value.detach())
    elif is_number(value):
        yield float(value)
