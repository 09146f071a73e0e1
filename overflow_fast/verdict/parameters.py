"""The origin of bad weights, and of bad gradients of parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from .. import _C
from ..recording.batch import finite_places, is_plain
from ..recording.labels import label_text
from .calls import joined, name_of
from .hooked import has_hooks, is_layer_of_torch, only_calls_submodules
from .verdict import (
    AFTER_BACKWARD,
    EARLIER_GRADIENTS,
    HOOK,
    LOOP,
    LOSS,
    OTHER_RANK,
    BadFrame,
    Origin,
    kind_of,
)


def given_weights(bad: BadFrame) -> list[_C.Entry]:
    """Lists the bad weights of a frame that its call cannot have written.

    Weights are scanned when a call is over. Custom modules keep statistics in
    parameters without a gradient, and change them in their forward.
    """
    module = bad.watch.module_at(bad.frame.module)
    if not bad.is_of_call or module is None or is_layer_of_torch(module):
        return bad.bad_weights()
    owned = {name: p for name, p in module.named_parameters(recurse=False)}
    return [
        entry
        for entry in bad.bad_weights()
        if (p := owned.get(label_text(entry.label))) is not None and p.requires_grad
    ]


def origin_of_state(first: BadFrame, entry: _C.Entry, was_finite: bool) -> Origin:
    """Finds the origin of a bad weight, or state of the optimizer.

    Args:
        first: Its frame.
        entry: The entry.
        was_finite: True if it was seen finite before.
    """
    label, kind = label_text(entry.label), kind_of(entry.role)
    owner = name_of(first.watch, first.frame.module)
    if first.is_of_call:
        label = f"{first.watch.name_at(first.frame.module)}.{label}".lstrip(".")
        if all(entry.label != given.label for given in given_weights(first)):
            maker = f"{label} before the step, or {owner}, which may write to it"
            return Origin("unclear", "unclear", maker, [label, owner])
    if first.is_of_call and not _is_bad_now(first, label):
        maker = f"{label} is finite now: something else stood in for it, or it changed"
        return Origin("unclear", "unclear", maker, [label, *_writers(first), LOOP])
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
    """Returns whether the model's weight of a name is bad; incurs a CPU-GPU sync."""
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
        for entry in bad.entries()
    ]
    return [label_text(each.label) for each in entries if each.is_bad], len(entries)


def around_gradients(ordered: Sequence[BadFrame]) -> tuple[list[str], list[str]]:
    """Returns the parameters with bad gradients, and the nearest with finite ones."""
    dirty: list[str] = []
    clean: list[str] = []
    for bad in ordered:
        if bad.frame.kind != _C.FrameKind.GRADIENTS:
            continue
        entries = [(label_text(e.label), e.is_bad) for e in bad.entries()]
        for i, (name, is_bad) in enumerate(entries):
            if is_bad:
                dirty.append(name)
            elif any(is_near for _, is_near in entries[max(0, i - 1) : i + 2]):
                clean.append(name)
    return dirty, clean
