"""The search for the origin of a step's first bad value.

The origin of an output is its module, of an input the module whose code called that,
of weights, buffers and the batch that they were given. It is unclear wherever anything
else can have made the value: a maker is never named on suspicion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ... import _C
from ..undo.restore_point import RestorePoint
from ..watching.watch import ModelWatch
from .bad_frames import BadFrame
from .call_order import Calls
from .doubts import Doubt, either_of
from .forward_origin import origin_in_forward
from .given import batch_remarks
from .gradient_origin import origin_of_gradient, origin_of_gradients
from .kept_state import Bad, checks_weights, nonfinite_state
from .roles import FORWARDS
from .state_origin import origin_of_buffer, origin_of_weight
from .verdict import BATCH, LOSS, STAND_IN, Origin


def origin_of(
    first: BadFrame,
    entry: _C.Entry,
    ordered: Sequence[BadFrame],
    watches: Sequence[ModelWatch],
    start: RestorePoint | None = None,
) -> Origin:
    """Finds the origin, by the kind of the first bad entry.

    Args:
        first: The frame with the first bad value.
        entry: That of the value.
        ordered: All bad frames, in order.
        watches: All watched models.
        start: The models as they were when the step began, or None.
    """
    if entry.is_unseen:
        return Origin("unclear", "unclear", "")
    if entry.role in (_C.Role.WEIGHT, _C.Role.OPTIMIZER_STATE):
        return origin_of_weight(first, entry, start)
    origin = _origin(first, entry, ordered, watches)
    if origin.source not in ("unclear", "loss", "after_backward"):
        return origin
    return replace(origin, remarks=batch_remarks(first))


def _origin(
    first: BadFrame,
    entry: _C.Entry,
    ordered: Sequence[BadFrame],
    watches: Sequence[ModelWatch],
) -> Origin:
    kind = first.frame.kind
    if kind == _C.FrameKind.BUFFERS:
        return origin_of_buffer(first, entry)
    bad: Bad = {(id(each.watch), each.frame.order): each for each in ordered}
    calls, doubts = Calls(watches), list[Doubt]()
    if kind in FORWARDS:
        origin, doubts = origin_in_forward(first, bad, calls)
    elif kind == _C.FrameKind.GRADIENTS:
        origin = origin_of_gradients(first, ordered)
    elif not all(w.wanted.activations and w.modules.is_selected(0) for w in watches):
        maker = "the model, the loss or the batch: the model's outputs were not checked"
        if first.watch.is_served:  # these are what was recorded
            maker = "the model or its inputs: its modules were not checked"
        origin = Origin("unclear", "unclear", maker)
    elif kind == _C.FrameKind.BACKWARD:
        origin = origin_of_gradient(first, calls)
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
        words = f"{STAND_IN}, which was not checked"
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
