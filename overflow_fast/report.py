"""Frames as text: the report that transformers prints, line for line."""

from __future__ import annotations

import re
from collections.abc import Sequence

from . import _C

PREFIX = " " * 17
COLUMNS = f"{'abs min':8} {'abs max':8} metadata"

_BRACKETS = re.compile(r"""\[['"]?(.*?)['"]?\]""")
_BACKWARD = " (backward)"
_STYLES = {1: "[{}]", 2: "[{!r}]", 3: ".{}"}


def label_text(path: _C.LabelPath) -> str:
    """Writes a label's path as text, such as `output[0]['logits']`."""
    (_, root), *rest = path
    return f"{root}" + "".join(_STYLES[style].format(value) for style, value in rest)


def dotted(label: str) -> str:
    """A label with `.x` for each `[x]` and `['x']`, as patterns have it."""
    return _BRACKETS.sub(r".\1", label)


def entry_label(phase: _C.Phase, path: _C.LabelPath) -> str:
    """Writes an entry's label; a gradient's is that of the output it belongs to."""
    return f"{'grad_' * (phase == _C.Phase.BACKWARD)}{label_text(path)}"


def batch_header(number: int) -> list[str]:
    """The lines in front of a batch's first frame."""
    return [f"\n\n{PREFIX} *** Starting batch number={number} ***", COLUMNS]


def stat_line(abs_min: float | None, abs_max: float | None, label: str) -> str:
    """One line of a frame for a tensor's stat."""
    if abs_min is None or abs_max is None:
        return f"{'empty':>17} {label}"
    return f"{abs_min:8.2e} {abs_max:8.2e} {label}"


def _entry_line(phase: _C.Phase, entry: _C.EntryTuple) -> str | None:
    path, kind, value, _, is_quiet, is_bad, _ = entry
    if is_quiet and not is_bad:
        return None
    label = entry_label(phase, path)
    if kind == _C.EntryKind.TENSOR:
        assert isinstance(value, tuple)
        return stat_line(value[0], value[1], label)
    if kind == _C.EntryKind.NONE:
        return f"{'None':>17} {label}"
    if kind == _C.EntryKind.NOT_SCANNED:
        why = str(value).partition("\n")[0]
        return f"{'not scanned':>17} {label}: {why}"
    return f"{'not a tensor':>17} {label}"


def frame_text(
    recorder: _C.Recorder, frame: _C.Frame, fqn: str, weights: Sequence[str] = ()
) -> str:
    """Writes a frame: its batch's header if it opens one, its name, its entries.

    Args:
        recorder: Who recorded it.
        frame: The frame of a module's call, or of the gradient of its output.
        fqn: The module's qualified name.
        weights: Lines to put in front of the entries.

    Returns:
        The text, without a newline at its end.
    """
    lines = batch_header(frame.batch) if frame.opens_batch else []
    mark = _BACKWARD if frame.phase == _C.Phase.BACKWARD else ""
    mark = " (recomputed)" if frame.is_recomputed else mark
    lines.append(f"{PREFIX} {fqn} {frame.class_name}{mark}")
    entries = (_entry_line(frame.phase, entry) for entry in recorder.entries(frame))
    lines += [*weights, *(line for line in entries if line is not None)]
    return "\n".join(lines)


def frames_text(batch: int, frames: Sequence[str]) -> list[str]:
    """The lines of a report: its header and the frames."""
    has_backward = any(_BACKWARD in frame for frame in frames)
    return [
        f"Detected inf/nan during batch_number={batch}",
        f"Last {len(frames)} {'' if has_backward else 'forward '}frames:",
        COLUMNS,
        "\n".join(frames),
    ]


def nonfinite_lines(recorder: _C.Recorder, frame: _C.Frame) -> list[str]:
    """What is said as soon as a bad entry is looked at, such as `output has infs`."""
    lines = []
    for path, _, value, _, _, is_bad, _ in recorder.entries(frame):
        if not is_bad:
            continue
        assert isinstance(value, tuple)
        label = label_text(path)
        if value[2]:
            lines.append(f"{label} has nans")
        if value[3]:
            lines.append(f"{label} has infs")
    return lines
