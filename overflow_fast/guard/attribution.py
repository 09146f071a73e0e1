"""What a step's bad frames say: the first bad entry, and who made it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from .. import _C
from ..report import entry_label, label_text
from .verdict import (
    FORWARDS,
    OF_CALLS,
    BadEntry,
    BadFrame,
    Headroom,
    Verdict,
    headroom_of,
    kind_of,
)
from .watch import ModelWatch


def judge(frames: Sequence[BadFrame]) -> Verdict:
    """Says what the bad frames of one step mean.

    Args:
        frames: All bad frames of a step, in any order.

    Returns:
        The verdict; a clean one if there are no frames.
    """
    if not frames:
        return Verdict()
    ordered = sorted(frames, key=lambda bad: bad.rank)
    first = ordered[0]
    place, entry = first.bad_entries()[0]
    origin, source, maker = _origin(first, kind_of(entry[0]), ordered)
    dirty, clean = _around_gradients(ordered)
    return Verdict(
        batch=first.frame.batch,
        first=_bad_entry(first, place, entry),
        origin=origin,
        source=source,
        maker=maker,
        masks=_masks(first, are_masks=True),
        allowed=_masks(first, are_masks=False),
        headroom=_headroom_before(first, place),
        num_bad_frames=len(frames),
        dirty_gradients=dirty,
        clean_gradients=clean,
        is_recomputed=first.frame.is_recomputed,
        reaches_loss=any(map(_is_of_loss, frames)),
    )


def _is_of_loss(bad: BadFrame) -> bool:
    """Whether it is of a loss, or of what a model returned."""
    kinds = [kind_of(entry[0]) for _, entry in bad.bad_entries()]
    is_root = bad.frame.module == 0 and bad.is_of_call
    return "recorded" in kinds or (is_root and "output" in kinds)


def _bad_entry(bad: BadFrame, place: int, entry: _C.EntryTuple) -> BadEntry:
    path, _, stat, numel, _, _, dtype = entry
    assert isinstance(stat, tuple)
    label = entry_label(bad.frame.phase, path)
    kind = kind_of(path)
    is_of_call = kind in OF_CALLS
    fqn = bad.watch.name_at(bad.frame.module)
    if kind == "weight" and bad.is_of_call:
        label = f"{fqn}.{label}".lstrip(".")
    return BadEntry(
        kind,
        fqn if is_of_call else label,
        bad.frame.class_name if is_of_call else "",
        label,
        dtype,
        stat[2],
        stat[3],
        numel,
        _signs(bad.watch.recorder.nonfinite_kinds(bad.frame)[place]),
    )


def _signs(kinds: int) -> str:
    return "".join(
        sign
        for sign, kind in (("+", _C.POSITIVE_INF), ("-", _C.NEGATIVE_INF))
        if kinds & kind
    )


def _masks(bad: BadFrame, are_masks: bool) -> list[str]:
    """The labels of inputs that are not finite and not bad, by whether all is -inf."""
    kinds = bad.watch.recorder.nonfinite_kinds(bad.frame)
    return [
        entry_label(bad.frame.phase, path)
        for kind, (path, *_, is_bad, _) in zip(kinds, bad.entries(), strict=True)
        if kind_of(path) == "input" and kind and not is_bad
        if (kind == _C.NEGATIVE_INF) == are_masks
    ]


def _headroom_before(bad: BadFrame, place: int) -> Headroom | None:
    peak = bad.watch.recorder.last_peak(bad.frame, place)
    return None if peak is None else headroom_of(bad.watch, peak)


# Who made it.


_Origin = tuple[str, str, str]


def _origin(first: BadFrame, kind: str, ordered: Sequence[BadFrame]) -> _Origin:
    phase = first.frame.phase
    if kind in ("weight", "optimizer_state"):
        return "given", kind, "an earlier optimizer step, or whoever loaded it"
    if phase in FORWARDS:
        return _origin_in_forward(first, ordered)
    if phase == _C.Phase.BACKWARD:
        return _origin_in_backward(first)
    if phase == _C.Phase.GRADIENTS:
        return _origin_of_gradients(first)
    if phase == _C.Phase.RECORDED:
        return "made", "loss", "what was computed after the model, which was finite"
    return "unclear", "buffer", "whoever wrote to the buffer: no call was bad"


def _origin_in_forward(first: BadFrame, ordered: Sequence[BadFrame]) -> _Origin:
    name = _name(first.watch, first.frame.module)
    if not first.has_bad_input:
        buffer = _bad_buffer_of(first.watch, first.frame.module, ordered)
        if buffer:
            return "given", "buffer", f"its buffer {buffer}"
        return "made", "module", name
    module = first.watch.module_at(first.frame.module)
    if getattr(module, "inplace", False):
        return (
            "unclear",
            "unclear",
            f"{name}, which writes to its input, or who called it",
        )
    for index in _ancestors(first.watch, first.frame.module):
        caller = _frame_of(first.watch, index, first.frame, ordered)
        if caller is None or not caller.has_bad_input:
            where = _name(first.watch, index)
            maker = f"{where}, between the calls of its submodules"
            return "passed_on", "caller", maker
    return "given", "batch", "the batch: the model's own input is bad"


def _bad_buffer_of(
    watch: ModelWatch, index: int, ordered: Sequence[BadFrame]
) -> str | None:
    for bad in ordered:
        if bad.watch is watch and bad.frame.phase == _C.Phase.BUFFERS:
            for _, entry in bad.bad_entries():
                label = label_text(entry[0])
                if label.rpartition(".")[0] == watch.name_at(index):
                    return label
    return None


def _origin_in_backward(first: BadFrame) -> _Origin:
    for frame in reversed(first.watch.before):
        if frame.phase == _C.Phase.BACKWARD:
            name = _name(first.watch, frame.module)
            maker = f"the backward of {name}, whose own gradient was clean"
            return "passed_on", "unclear", maker
        if frame.phase == _C.Phase.FORWARD:
            break
    return "passed_on", "loss", "the backward of the loss"


def _origin_of_gradients(first: BadFrame) -> _Origin:
    if not first.watch.wanted.grad_outputs:
        return "unclear", "unclear", "its backward, or a module's after it"
    maker = "its own backward: the gradients of all outputs were finite"
    return "made", "unclear", maker


def _name(watch: ModelWatch, index: int) -> str:
    return watch.name_at(index) or "the model"


def _ancestors(watch: ModelWatch, index: int) -> Iterator[int]:
    """The indices of the modules around one, from the nearest out to the root."""
    if index >= len(watch.names):
        return
    name = watch.names[index]
    while name:
        name = name.rpartition(".")[0]
        if not watch.selection.takes(name):
            continue
        # A wrapper has the name of the module in it, which comes behind it.
        for around in reversed(watch.modules.before(index)):
            if watch.names[around] == name and _is_called(watch.module_at(around)):
                yield around


def _is_called(module: nn.Module | None) -> bool:
    """Whether a module has a forward at all; a ModuleList has none."""
    return module is None or type(module).forward is not nn.Module.forward


def _frame_of(
    watch: ModelWatch, index: int, inner: _C.Frame, ordered: Sequence[BadFrame]
) -> BadFrame | None:
    """The bad frame of a module's call that ended after a call within it."""
    for bad in ordered:
        frame = bad.frame
        is_later = frame.batch == inner.batch and frame.order >= inner.order
        if bad.watch is watch and frame.module == index and is_later:
            return bad
    return None


def _around_gradients(ordered: Sequence[BadFrame]) -> tuple[list[str], list[str]]:
    dirty: list[str] = []
    clean: list[str] = []
    for bad in ordered:
        if bad.frame.phase != _C.Phase.GRADIENTS:
            continue
        entries = [(label_text(entry[0]), entry[5]) for entry in bad.entries()]
        for i, (name, is_bad) in enumerate(entries):
            if is_bad:
                dirty.append(name)
            elif any(is_near for _, is_near in entries[max(0, i - 1) : i + 2]):
                clean.append(name)
    return dirty, clean
