"""Non-finite buffers and attributes of modules, which any code may have read."""

from __future__ import annotations

from collections.abc import Iterator

from .. import _C
from ..recording.batch import is_plain
from ..recording.labels import label_text
from ..recording.watch import ModelWatch
from ..torch_internals.module_internals import is_batch_norm
from ..tree import tensors_in
from .calls import Calls
from .outer_inputs import Bad
from .verdict import BadFrame


def bad_buffers(first: BadFrame, bad: Bad, calls: Calls) -> list[str]:
    """The non-finite buffers that code may have read before a call ended.

    Incurs a CPU-GPU sync for each buffer on a device.

    Args:
        first: The call's frame.
        bad: All bad frames.
        calls: The calls of all watched models.

    Returns:
        Their names; not of those whose only non-finite values are -inf, as in masks.
    """
    found = {name: True for watch in calls.watches for name in _with_nan(watch)}
    for frame in bad.values():
        if frame.frame.kind == _C.FrameKind.BUFFERS:
            for entry in frame.bad_entries():
                was_finite = frame.watch.recorder.last_peak(entry.place)
                found[label_text(entry.label)] = was_finite is None
    owners = _owners(calls)
    return [
        name
        for name, was_bad in found.items()
        if _may_be_read(owners.get(name.rpartition(".")[0]), was_bad, first, calls)
    ]


def _with_nan(watch: ModelWatch) -> Iterator[str]:
    """Yields the buffers that hold a nan, also where buffers are not checked."""
    model = watch.model
    if model is not None:
        for name, buffer in zip(*watch.tensors.buffers(model, True), strict=True):
            if is_plain(buffer) and bool(buffer.isnan().any()):
                yield name


def bad_attributes(first: BadFrame, calls: Calls) -> list[tuple[str, str]]:
    """Finds the modules that keep a nan in an attribute which is no buffer.

    Not those that were only called later. Incurs a CPU-GPU sync for each tensor.
    """
    return [
        (name, f"{name}.{key}".lstrip("."))
        for name, (watch, index) in _owners(calls).items()
        if _may_be_read((watch, index), False, first, calls)
        if (module := watch.module_at(index)) is not None
        for key, value in vars(module).items()
        if not key.startswith("_") and _holds_nan(value)
    ]


def _holds_nan(value: object) -> bool:
    return any(
        is_plain(tensor) and bool(tensor.detach().isnan().any())
        for tensor in tensors_in(value)
    )


def _owners(calls: Calls) -> dict[str, tuple[ModelWatch, int]]:
    return {
        watch.name_at(index): (watch, index)
        for watch in calls.watches
        for index in watch.modules.order
    }


def _may_be_read(
    owner: tuple[ModelWatch, int] | None, was_bad: bool, first: BadFrame, calls: Calls
) -> bool:
    if owner is None:
        return True
    watch, index = owner
    module = watch.module_at(index)
    is_norm = is_batch_norm(module)
    if is_norm and module is not None and module.training:
        return False  # its statistics are only written to
    before = calls.last_of(watch, index, first.frame.order + 1)
    after = calls.last_of(watch, index, _C.Recorder.num_frames())
    # Where it was finite, and its owner only called later, that call has made it bad.
    return was_bad or before is not None or after is None
