"""Where a bad value of a forward began.

An output is its module's, an input of the module whose code called that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from ... import _C
from ...base.modules import module_of_parameter
from ...base.tree import entry_label
from ...torch_internals.module_internals import is_batch_norm
from .bad_frames import BadFrame
from .call_order import Called, Calls, name_of
from .doubts import Doubt, either_of, minus_inf_inputs, minus_infs, unsearched_inputs
from .foreign_hooks import has_earlier_hooks, has_later_hooks, has_pre_hooks
from .given import caller_of, held, origin_of_given
from .kept_state import Bad
from .unseen_writes import never_writes, stale_inputs, written_unseen
from .verdict import BATCH, Origin


def origin_in_forward(
    first: BadFrame, bad: Bad, calls: Calls
) -> tuple[Origin, list[Doubt]]:
    """Finds the origin of the bad value in the first bad call, and what casts doubt.

    Goes outwards from that call to the first one around it whose inputs were finite:
    its code, or that of what it called and is not watched, made the value.
    """
    chain = calls.chain(calls.find(first.watch, first.frame.order))
    written = written_unseen(first, chain[0], calls) if chain else None
    if written is not None:
        return written, []
    crossed: list[tuple[BadFrame, Called]] = []
    for called in chain:
        frame = bad.get((id(called.watch), called.call.order))
        if frame is None or not frame.bad_inputs:
            break
        crossed.append((frame, called))
    else:
        return _origin_of_inputs(first, crossed, calls)
    name, module = called.name, called.module
    if not crossed and (buffer := _read_buffer(first, bad)):
        maker = f"its buffer {buffer}"
        return Origin("given", "buffer", maker, [buffer]), []
    if called is chain[-1] and not crossed and isinstance(module, nn.Linear):
        inputs = minus_inf_inputs(first)
        if inputs and not has_pre_hooks(module):  # no output can be finite then
            return origin_of_given(first, inputs, called, calls), []
    earlier = calls.last_within(called, first.frame.order)
    after = "" if earlier is None else earlier.name
    unwatched = called.watch.modules.unwatched_in(called.call.module)
    unwatched += filter(None, map(_hidden_by, calls.within(called, first.frame.order)))
    doubts = [
        *_sharers_and_writers(crossed, calls),
        *minus_infs(called, frame, chain, bad),
        *unsearched_inputs(called, frame, chain),
    ]
    if not crossed:
        if has_earlier_hooks(module):
            unwatched.append("a forward hook on it")
        stale = stale_inputs(first) if called is chain[0] else []
        origin = Origin("made", "module", name, [name], after, unwatched)
        return replace(origin, stale_inputs=stale), doubts
    where = ", between the calls of its submodules"
    where = ", or what it calls that is not watched" if unwatched else where
    maker = f"{name}{where}"
    return Origin("passed_on", "caller", maker, [name], after, unwatched), doubts


def _read_buffer(first: BadFrame, bad: Bad) -> str:
    """The bad buffer of a module that reads its buffers in this call alone, or ""."""
    module = first.watch.module_at(first.frame.module)
    if module is None or not is_batch_norm(module) or module.training:
        return ""
    own = first.watch.name_at(first.frame.module)
    labels = [
        entry.label.name
        for frame in bad.values()
        if frame.watch is first.watch and frame.frame.kind == _C.FrameKind.BUFFERS
        for entry in frame.bad_entries
    ]
    return next((each for each in labels if module_of_parameter(each) == own), "")


def _hidden_by(called: Called) -> str:
    """Names what was not seen of a call, and may be bad; "" for nothing."""
    if called.call.has_unseen:
        return f"a part of what {called.name} was given or returned"
    return f"a forward hook on {called.name}" * has_later_hooks(called.module)


def _sharers_and_writers(
    crossed: Sequence[tuple[BadFrame, Called]], calls: Calls
) -> Iterator[Doubt]:
    """Yields who else can have given calls their bad input, or have written to it."""
    for frame, called in crossed:
        name, module = called.name, called.module
        is_written = any(entry.version for entry in frame.bad_inputs)
        may_write = (is_written or called.call.is_traced) and not never_writes(module)
        if may_write or has_pre_hooks(module):
            yield Doubt(f"{name}, which may change its input", [name])
        for other in calls.sharers(called):
            words = f"{other}, which has {name} too and may have called it"
            yield Doubt(words, [other])


def _origin_of_inputs(
    first: BadFrame, crossed: Sequence[tuple[BadFrame, Called]], calls: Calls
) -> tuple[Origin, list[Doubt]]:
    """Finds the origin of an outermost call's bad inputs: the batch, or the loop.

    Args:
        first: The first bad frame.
        crossed: The call of that and those around it, all with bad inputs; empty if
            the call is not known.
        calls: The calls of all watched models.
    """
    if not crossed:
        name = name_of(first.watch, first.frame.module)
        if not first.bad_inputs:
            return Origin("made", "module", name, [name]), []
        return Origin("unclear", "unclear", f"code around {name}"), []
    frame, outermost = crossed[-1]
    watch, call = outermost
    caller, module = caller_of(watch), outermost.module
    around = watch.modules.ancestors(call.module) if call.module else []
    if call.kind == _C.FrameKind.RECOMPUTED:
        maker = f"code that backward ran again, around {outermost.name}"
        return Origin("unclear", "unclear", maker), []
    unwatched = [i for i in around if not watch.modules.is_selected(i)]
    is_written = not (call.is_traced or never_writes(module)) and any(
        entry.version != (held(frame, entry.label).version or 0)
        for entry in frame.bad_inputs
    )
    if unwatched or is_written or has_pre_hooks(module):
        names = [name_of(watch, index) for index in unwatched] or [outermost.name]
        labels = ", ".join(entry_label(entry.place) for entry in frame.bad_inputs)
        maker = f"the batch ({labels}), {caller}, or {either_of(names)}"
        return Origin("unclear", "unclear", maker, [*names, BATCH, caller]), []
    # The root's inputs are its caller's, whichever module called those within it.
    doubts = _sharers_and_writers(crossed, calls) if call.module else ()
    return origin_of_given(frame, frame.bad_inputs, outermost, calls), list(doubts)
