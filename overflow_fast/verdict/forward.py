"""The origin of a forward's first bad value, from the inputs and outputs of calls."""

from __future__ import annotations

import dataclasses

from .. import _C
from ..recording.labels import label_text
from ..torch_internals.module_internals import is_batch_norm
from .calls import Called, Calls, ancestors, joined, name_of, unwatched_in
from .hooked import (
    has_earlier_hooks,
    has_later_hooks,
    has_pre_hooks,
    never_writes,
)
from .kept import Candidate, or_by_state
from .outer_inputs import (
    Bad,
    origin_of_inputs,
    origin_of_minus_infs,
    origin_of_unsearched,
)
from .verdict import BATCH, LOOP, BadFrame, Origin


def origin_in_forward(first: BadFrame, bad: Bad, calls: Calls) -> Origin:
    """Finds the origin of the bad value in a call, which is the first bad one.

    Args:
        first: The call's frame.
        bad: All bad frames, by `key_of`.
        calls: The calls of all watched models.
    """
    origin = _by_calls(first, bad, calls)
    if origin.source == "buffer":
        return origin
    others = _around(first, origin, calls)
    return or_by_state(origin, first, bad, calls, others)


def _around(first: BadFrame, origin: Origin, calls: Calls) -> list[Candidate]:
    """Lists further callers that may have given a call its bad input."""
    called = calls.of_frame(first.watch, first.frame.order)
    if called is None or not first.has_bad_input:
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


def _by_calls(first: BadFrame, bad: Bad, calls: Calls) -> Origin:
    called = calls.of_frame(first.watch, first.frame.order)
    if not first.has_bad_input:
        return _made_within(first, called, bad, calls)
    name = name_of(first.watch, first.frame.module)
    if called is None:
        candidates = [name, *_names_around(first), BATCH, LOOP]
        return Origin("unclear", "unclear", "one of those around it", candidates)
    writers = [name] if _may_change_input(first, called) else []
    outermost = called
    for around in calls.chain(called)[1:]:
        frame = bad.get((id(around.watch), around.call.order))
        if frame is None or not frame.has_bad_input:
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
    unwatched = unwatched_in(first.watch, first.frame.module)
    if called is not None:
        unwatched += [c.name for c in calls.within(called) if _may_hide(c)]
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
    unwatched = unwatched_in(around.watch, around.call.module)
    unwatched += [
        other.name
        for other in calls.within(around)
        if other.call.order < called.call.order and _may_hide(other)
        if called not in calls.chain(other)
    ]
    candidates = list(dict.fromkeys([name, *writers, *unwatched]))
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
    """Returns whether the bad input of a call may have been written within it."""
    module = first.watch.module_at(first.frame.module)
    if has_pre_hooks(module):
        return True
    if never_writes(module):
        return False
    is_written = any(entry.version for entry in first.bad_inputs())
    return is_written or called.call.is_traced


def _may_hide(called: Called) -> bool:
    """Returns whether a call may have returned something bad that was not seen."""
    module = called.watch.module_at(called.call.module)
    return called.call.has_unseen or has_later_hooks(module)


def _bad_buffer_of(first: BadFrame, bad: Bad) -> str | None:
    name = first.watch.name_at(first.frame.module)
    for frame in bad.values():
        if frame.watch is first.watch and frame.frame.kind == _C.FrameKind.BUFFERS:
            for entry in frame.bad_entries():
                label = label_text(entry.label)
                if label.rpartition(".")[0] == name:
                    return label
    return None


def _reads_buffers_only(first: BadFrame) -> bool:
    """Returns whether a module is known not to write to its buffers in this call."""
    module = first.watch.module_at(first.frame.module)
    is_norm = is_batch_norm(module)
    return is_norm and module is not None and not module.training


def _names_around(first: BadFrame) -> list[str]:
    indices = ancestors(first.watch, first.frame.module)
    return [name_of(first.watch, index) for index in indices]
