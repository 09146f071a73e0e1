"""Where a bad gradient began, of an output or of parameters."""

from __future__ import annotations

from collections.abc import Sequence

from ... import _C
from ...base.modules import module_of_parameter
from ..process import world_size
from .bad_frames import BadFrame
from .call_order import Calls, name_of
from .doubts import either_of
from .verdict import BATCH, LOSS, Origin


def origin_of_gradient(first: BadFrame, calls: Calls) -> Origin:
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


def origin_of_gradients(first: BadFrame, ordered: Sequence[BadFrame]) -> Origin:
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
