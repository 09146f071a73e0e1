"""The search for the origin of a step's first bad value.

The origin of an output is its module, of an input the module whose code called that,
of weights, buffers and the batch that they were given. It is unclear wherever anything
else can have made the value: a maker is never named on suspicion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from ... import _C
from ...flags import is_label
from ...scanner.modules import is_layer_of_torch, module_of_parameter
from ...scanner.tree import entry_label
from ...torch_internals.module_internals import is_batch_norm
from ..process import world_size
from ..watching.watch import ModelWatch
from .call_order import (
    Called,
    Calls,
    has_earlier_hooks,
    has_later_hooks,
    has_pre_hooks,
    name_of,
)
from .given import (
    Doubt,
    caller_of,
    either_of,
    held,
    minus_inf_inputs,
    minus_infs,
    origin_of_given,
    unsearched_inputs,
)
from .kept_state import Bad, checks_weights, nonfinite_state
from .remarks import batch_remarks, remarks_on
from .unseen_writes import (
    impossible,
    never_writes,
    only_calls_submodules,
    stale_inputs,
    written_unseen,
)
from .verdict import (
    BATCH,
    CODE,
    FORWARDS,
    LOSS,
    OF_FLAG,
    STAND_IN,
    BadFrame,
    Origin,
    headroom_before,
    is_finite_now,
    kind_of,
)


def origin_of(
    first: BadFrame,
    entry: _C.Entry,
    ordered: Sequence[BadFrame],
    watches: Sequence[ModelWatch],
) -> Origin:
    """Finds the origin, by the kind of the first bad entry.

    Args:
        first: The frame with the first bad value.
        entry: That of the value.
        ordered: All bad frames, in order.
        watches: All watched models.
    """
    if entry.is_unseen:
        return Origin("unclear", "unclear", "")
    origin = _origin(first, entry, ordered, watches)
    is_of_call = first.is_of_call and origin.source != "weight"
    remarks = remarks_on(first) if is_of_call else []
    if origin.source in ("unclear", "loss", "after_backward"):
        remarks = [*remarks, *batch_remarks(first)]
    return replace(origin, remarks=remarks)


def _origin(
    first: BadFrame,
    entry: _C.Entry,
    ordered: Sequence[BadFrame],
    watches: Sequence[ModelWatch],
) -> Origin:
    kind = first.frame.kind
    if entry.role in (_C.Role.WEIGHT, _C.Role.OPTIMIZER_STATE):
        return _origin_of_weight(first, entry)
    if kind == _C.FrameKind.BUFFERS:
        return _origin_of_buffer(first, entry)
    if kind == _C.FrameKind.RECORDED and is_label(entry.label.name):
        return Origin("unclear", "unclear", OF_FLAG)
    bad: Bad = {(id(each.watch), each.frame.order): each for each in ordered}
    calls, doubts = Calls(watches), list[Doubt]()
    if kind in FORWARDS:
        origin, doubts = _origin_in_forward(first, bad, calls)
    elif kind == _C.FrameKind.GRADIENTS:
        origin = _origin_of_gradients(first, ordered)
    elif not all(w.wanted.activations and w.modules.is_selected(0) for w in watches):
        maker = "the model, the loss or the batch: the model's outputs were not checked"
        origin = Origin("unclear", "unclear", maker)
    elif kind == _C.FrameKind.BACKWARD:
        origin = _origin_of_gradient(first, calls)
    else:
        maker = (
            "code after the model, whose outputs were finite, or values that do not "
            "pass through the model, such as labels"
        )
        origin = Origin("unclear", "loss", maker, [LOSS, BATCH])
    if origin.source == "loss" and any(w.has_unseen_outputs for w in watches):
        maker = (
            "the loss, the batch or the model, whose outputs are finite when the step "
            "is run again and were not checked before"
        )
        origin = Origin("unclear", "unclear", maker, [LOSS, BATCH, "the model"])
    return _with_doubts(origin, first, bad, calls, doubts)


def _with_doubts(
    origin: Origin, first: BadFrame, bad: Bad, calls: Calls, doubts: list[Doubt]
) -> Origin:
    """Returns an origin, which is unclear if something else can have made the value."""
    state = [] if origin.how == "given" else nonfinite_state(origin, first, bad, calls)
    doubts = [Doubt(kept.words, [kept.candidate]) for kept in state] + doubts
    if origin.how != "given" and any(
        watch.inputs.have_stand_ins and not checks_weights(watch, calls)
        for watch in calls.watches
    ):
        words = f"{STAND_IN} in the place of a weight, which was not checked"
        doubts.append(Doubt(words, [STAND_IN]))
    if not doubts:
        return origin
    maker, colon, why = origin.maker, "", ""
    if origin.how == "made":
        maker = f"the code of {maker}"
    if not first.is_of_call:  # what was not checked stands last
        maker, colon, why = maker.partition(": ")
    names = [*origin.candidates, *(name for each in doubts for name in each.names)]
    return replace(
        origin,
        how="unclear",
        source="unclear",
        maker=f"{maker}, or {either_of(d.words for d in doubts)}{colon}{why}",
        candidates=list(dict.fromkeys(names)),
        nonfinite_state=[kept.name for kept in state],
    )


# Weights, buffers and gradients.


def _origin_of_weight(first: BadFrame, entry: _C.Entry) -> Origin:
    """Finds the origin of a bad weight, or state of the optimizer."""
    label, kind = entry.label.name, kind_of(entry.role)
    if first.is_of_call:
        owner = name_of(first.watch, first.frame.module)
        label = f"{first.watch.name_at(first.frame.module)}.{label}".lstrip(".")
        if all(entry.label != given.label for given in first.given_weights):
            maker = f"{label} before the step, or {owner}, which may write to it"
            return Origin("unclear", "unclear", maker, [label, owner])
        if is_finite_now(first, entry):
            maker = (
                f"{label} is finite now: something else stood in for it, or it changed"
            )
            return Origin("unclear", "unclear", maker, [label, CODE])
        if _may_write_weights(first.watch):
            maker = (
                f"it is not known whether {label} was non-finite before the step, or "
                "was written within it"
            )
            return Origin("given", kind, maker, [label, CODE])
    if headroom_before(first, entry) is not None:
        maker = "an optimizer step since it was last seen finite, or another write"
    else:
        maker = "initialization, a checkpoint or a write: it was never seen finite"
    return Origin("given", kind, maker, [label])


def _may_write_weights(watch: ModelWatch) -> bool:
    """True if a module's own code, or a hook on one, may write to weights."""
    every = (has_pre_hooks, has_earlier_hooks, has_later_hooks)
    return any(
        any(has_any(module) for has_any in every)
        or not (only_calls_submodules(module) or is_layer_of_torch(module))
        for _, module in watch.modules.present()
    )


def _origin_of_buffer(first: BadFrame, entry: _C.Entry) -> Origin:
    label = entry.label.name
    owner = module_of_parameter(label) or "the model"
    seen = "every checked output was finite"
    if headroom_before(first, entry) is None:
        maker = f"{label}, which was never seen finite; {seen}"
    else:
        maker = f"code that writes to {label}, such as {owner}; {seen}"
    return Origin("unclear", "buffer", maker, [owner])


def _origin_of_gradient(first: BadFrame, calls: Calls) -> Origin:
    """Finds the origin of the gradient of an output, which is the first bad one.

    It is a sum over all that was computed from the output, and no hook shows which of
    these parts is bad. It is the loss's where no call that can have used the output
    had a gradient before.
    """
    watch, module, order = first.watch, first.frame.module, first.frame.order
    found = calls.in_backward(watch, module, order)
    around = watch.modules.ancestors(module)
    is_known = len(found) == 1 and found[0].call.kind != _C.FrameKind.RECOMPUTED
    is_watched = all(watch.modules.is_selected(index) for index in around)
    if is_known and is_watched and not calls.users(found[0], order):
        if watch.has_seen_loss:
            return Origin("passed_on", "loss", "the backward of the loss", [LOSS])
        maker = (
            "the backward of the loss, or values that do not pass through the model, "
            "such as labels"
        )
        return Origin("passed_on", "loss", maker, [LOSS, BATCH])
    before = calls.gradients(found[-1].call.order if found else order, order)
    near = next((e.name for e in reversed(before) if not e.call.has_unseen), "")
    maker = f"code that used the output of {name_of(watch, module)}, or a hook on it"
    if near:
        maker += f"; the gradient seen last before it, of {near}, was finite"
    return Origin("unclear", "unclear", maker, after=near)


def _origin_of_gradients(first: BadFrame, ordered: Sequence[BadFrame]) -> Origin:
    """Finds the origin of bad gradients of parameters; those of outputs were finite."""
    frames = [bad for bad in ordered if bad.frame.kind == _C.FrameKind.GRADIENTS]
    entries = [entry for bad in frames for entry in bad.entries]
    owners = {module_of_parameter(e.label.name) for e in entries if e.is_bad}
    are_all = all(entry.is_bad for entry in entries) and len(owners) > 1
    unseen = [
        call.has_unseen
        for call in first.watch.recorder.calls()
        if call.kind == _C.FrameKind.BACKWARD
    ]
    makers = [
        *["the backward of a module"] * (not are_all or all(unseen)),
        "a term of the loss that is computed from weights",
        "a hook on a gradient",
        "gradients that were there before this backward",
        "code that changed gradients after backward"
        + " (clipping by a non-finite norm spreads to all)" * are_all,
        *["what another rank had in its gradients"] * (world_size() > 1),
    ]
    if all(unseen):
        why = "no gradient of an output was checked"
    else:
        some = " that could be scanned" * any(unseen)
        why = f"the gradients of all watched outputs{some} were finite"
    source = "after_backward" if are_all and not all(unseen) else "unclear"
    return Origin("unclear", source, f"{either_of(makers)}: {why}")


# A forward: an output is its module's, an input of the module whose code called that.


def _origin_in_forward(
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
    if not crossed and (origin := impossible(first, called, calls)):
        return origin, []
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
