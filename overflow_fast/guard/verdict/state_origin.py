"""Where a weight, a buffer or an optimizer's state that is bad began."""

from __future__ import annotations

from ... import _C
from ...base.module_kinds import is_layer_of_torch
from ...base.modules import module_of_parameter
from ..undo.restore_point import RestorePoint
from ..watching.inputs import finite_places
from ..watching.watch import ModelWatch
from .bad_frames import BadFrame, headroom_before, is_finite_now, weight_of
from .call_order import name_of
from .foreign_hooks import has_earlier_hooks, has_later_hooks, has_pre_hooks
from .roles import kind_of
from .unseen_writes import only_calls_submodules
from .verdict import CODE, Origin

_SEEN = "every checked output was finite"


def origin_of_weight(
    first: BadFrame, entry: _C.Entry, start: RestorePoint | None = None
) -> Origin:
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
        weight = weight_of(first, entry)
        if start and weight is not None and start.written_in_step(weight):
            held = start.held(weight)
            before = f", or {label} before the step" * (held is None)
            maker = f"the step's forward, which has written to {label}{before}"
            if held is None or finite_places(held).all():
                return Origin("unclear", "unclear", maker, [label, CODE])
        if _may_write_weights(first.watch):
            maker = (
                f"it is not known whether {label} was non-finite before the step, or "
                "was written within it"
            )
            return Origin("given", kind, maker, [label, CODE])
    if headroom_before(first, entry) is None:
        return never_finite(entry.role, label)
    maker = "an optimizer step since it was last seen finite, or another write"
    return Origin("given", kind, maker, [label])


def never_finite(role: _C.Role, label: str) -> Origin:
    """The origin of a weight, buffer or state that was never seen finite."""
    if role == _C.Role.BUFFER:
        maker = f"{label}, which was never seen finite; {_SEEN}"
        return Origin("unclear", "buffer", maker, [_owner_of(label)])
    maker = "initialization, a checkpoint or a write: it was never seen finite"
    return Origin("given", kind_of(role), maker, [label])


def _may_write_weights(watch: ModelWatch) -> bool:
    """True if a module's own code, or a hook on one, may write to weights."""
    every = (has_pre_hooks, has_earlier_hooks, has_later_hooks)
    return any(
        any(has_any(module) for has_any in every)
        or not (only_calls_submodules(module) or is_layer_of_torch(module))
        for _, module in watch.modules.present()
    )


def origin_of_buffer(first: BadFrame, entry: _C.Entry) -> Origin:
    label = entry.label.name
    if headroom_before(first, entry) is None:
        return never_finite(entry.role, label)
    maker = f"code that writes to {label}, such as {_owner_of(label)}; {_SEEN}"
    return Origin("unclear", "buffer", maker, [_owner_of(label)])


def _owner_of(label: str) -> str:
    return module_of_parameter(label) or "the model"
