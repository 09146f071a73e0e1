"""Frames as text: the report that transformers prints, line for line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .. import _C
from ..base.text import printable, printable_lines
from ..base.tree import entry_label, label_text
from ..scanner.ops import scan

if TYPE_CHECKING:
    from ..guard.watching.watch import ModelWatch

PREFIX = " " * 17  # the width of transformers' two numbers, `{:8.2e} {:8.2e}`
COLUMNS = f"{'abs min':8} {'abs max':8} metadata"


class BackwardFrame(str):
    """The text of a frame of the gradient of an output."""


def batch_header(number: int) -> list[str]:
    """Writes the lines in front of a batch's first frame."""
    return [f"\n\n{PREFIX} *** Starting batch number={number} ***", COLUMNS]


def stat_line(abs_min: float | None, abs_max: float | None, label: str) -> str:
    """Writes one line of a frame for a tensor's stat, its label as it is."""
    if abs_min is None or abs_max is None:
        return f"{'empty':>17} {label}"
    return f"{abs_min:8.2e} {abs_max:8.2e} {label}"


def get_abs_min_max(var: torch.Tensor, ctx: str) -> str:
    """Formats the smallest and largest magnitude of a tensor as a report's line.

    Incurs one CPU-GPU sync if `var` is not on the CPU.

    Args:
        var: A tensor of any shape and dtype.
        ctx: The label at the end of the line.

    Returns:
        The line.
    """
    stat = scan([var])[0]
    if stat.not_scanned is not None:
        return f"{'not scanned':>17} {printable(ctx)}: {stat.not_scanned}"
    return printable(stat_line(stat.abs_min, stat.abs_max, ctx))


def is_in_part(stat: _C.Stat) -> bool:
    """True if only kinds of non-finite values are known: the device has failed."""
    return stat.abs_max is None and bool(stat.num_nan or stat.num_inf)


def _entry_line(entry: _C.Entry) -> str | None:
    if entry.only_if_bad and not entry.is_bad:
        return None
    label, stat = entry_label(entry.place), entry.stat
    if stat is not None and is_in_part(stat):
        found = "nan" if stat.num_nan else "inf"
        return f"{found:>17} {label}"
    if stat is not None:
        return stat_line(stat.abs_min, stat.abs_max, label)
    if entry.kind == _C.EntryKind.NONE:
        return f"{'None':>17} {label}"
    if entry.kind == _C.EntryKind.NOT_SCANNED:
        why = str(entry.reason).partition("\n")[0]
        return f"{'not scanned':>17} {label}: {why}"
    return f"{'not a tensor':>17} {label}"


def frame_text(
    recorder: _C.Recorder, frame: _C.Frame, fqn: str, weights: Sequence[str] = ()
) -> str:
    """Writes a frame: its batch's header if it opens one, its name, its entries.

    Args:
        recorder: The recorder that has it.
        frame: The frame of a module's call, or of the gradient of its output.
        fqn: The module's qualified name.
        weights: Lines to put in front of the entries.

    Returns:
        The text, without a newline at its end; a `BackwardFrame` for a gradient's.
    """
    lines = batch_header(frame.batch) if frame.opens_batch else []
    is_backward = frame.kind == _C.FrameKind.BACKWARD
    mark = " (backward)" * is_backward + " (recomputed)" * frame.is_recomputed
    entries = map(_entry_line, recorder.entries(frame))
    listed = [*weights, *(line for line in entries if line is not None)]
    lines += printable_lines([f"{PREFIX} {fqn} {frame.class_name}{mark}", *listed])
    text = "\n".join(lines)
    return BackwardFrame(text) if is_backward else text


def frames_text(batch: int, frames: Sequence[str]) -> list[str]:
    """Writes the lines of a report: its header and the frames."""
    has_backward = any(isinstance(frame, BackwardFrame) for frame in frames)
    return [
        f"Detected inf/nan during batch_number={batch}",
        f"Last {len(frames)} {'' if has_backward else 'forward '}frames:",
        COLUMNS,
        "\n".join(frames),
    ]


def nonfinite_lines(recorder: _C.Recorder, frame: _C.Frame) -> list[str]:
    """Writes a line for each bad entry, such as `output has infs`."""
    lines = []
    for entry in recorder.entries(frame):
        if not entry.is_bad:
            continue
        assert entry.stat is not None
        label = printable(label_text(entry.label))
        if entry.stat.num_nan:
            lines.append(f"{label} has nans")
        if entry.stat.num_inf:
            lines.append(f"{label} has infs")
    return lines


def frame_texts(watch: ModelWatch, frames: list[_C.Frame]) -> list[str]:
    """Writes frames as transformers does, their modules' weights as they are now.

    Incurs one CPU-GPU sync for each weight on a device.
    """
    return [
        frame_text(watch.recorder, frame, watch.name_at(frame.module), weights)
        for frame in frames
        for weights in [_weight_lines(watch, frame)]
    ]


def _weight_lines(watch: ModelWatch, frame: _C.Frame) -> list[str]:
    entries = watch.recorder.entries(frame)
    has_weights = any(entry.role == _C.Role.WEIGHT for entry in entries)
    if has_weights or frame.kind == _C.FrameKind.BACKWARD:
        return []
    module = watch.module_at(frame.module)
    named = () if module is None else module.named_parameters(recurse=False)
    return [get_abs_min_max(parameter, name) for name, parameter in named]
