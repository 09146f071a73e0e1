"""The -inf that a program writes as a constant and returns, as a filter of logits does.

A module that returns it is a bad frame like any other: that code has written it, and
nothing else is wrong, is found when the request is run again. Such a request is served,
and its report logged, with the rule of `allow=` for it. A later forward, of that
request or another, is finite where it has that -inf at the same places, and nothing
else.

+inf is not served so: an overflow makes the same, and at a place that is known nothing
is run again to tell them apart. A rule for it is the program's to give.

No row of what it has returned may be -inf as a whole, along its last dimension: a
softmax makes nan of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ... import _C
from ...base.tree import tensors
from ..report.causes import CONSTANT
from ..report.report import Report
from ..verdict.bad_frames import BadFrame
from ..watching.inputs import is_plain

_Place = tuple[int, int, str]  # watch, module and label


class WrittenInfs:
    """The places at which forwards have had infs that code has written."""

    def __init__(self) -> None:
        self._places = set[_Place]()

    def note(self, report: Report, frames: Sequence[BadFrame], output: Any) -> bool:
        """Takes in a report; True if such infs are all that is bad in its frames.

        Args:
            report: The report.
            frames: The bad frames of the forward, or of what a function has recorded.
            output: What it has returned.
        """
        found = report.explanation
        is_written = found is not None and found.cause == CONSTANT.name
        if not (is_written and _are_minus_inf(frames) and _leaves_rows(output)):
            return False
        self._places.update(_places(frames))
        return True

    def are_all(self, frames: Sequence[BadFrame], output: Any) -> bool:
        """True if bad frames have such infs alone, at places that are known.

        Args:
            frames: The bad frames of a forward.
            output: What it has returned.
        """
        return bool(self._places) and _are_at(self._places, frames, output)


def are_alike(
    first: Sequence[BadFrame], later: Sequence[BadFrame], output: Any
) -> bool:
    """True if a later forward has -inf alone, where an earlier one had it.

    Args:
        first: The bad frames of the earlier one.
        later: Those of the later one.
        output: What that has returned.
    """
    return _are_at(set(_places(first)), later, output)


def _are_at(places: set[_Place], frames: Sequence[BadFrame], output: Any) -> bool:
    is_known = places.issuperset(_places(frames))
    return is_known and _are_minus_inf(frames) and _leaves_rows(output)


def _entries(frames: Sequence[BadFrame]) -> Iterator[tuple[BadFrame, _C.Entry]]:
    return ((frame, entry) for frame in frames for entry in frame.bad_entries)


def _are_minus_inf(frames: Sequence[BadFrame]) -> bool:
    found = [entry.nonfinite_kinds for _, entry in _entries(frames)]
    return bool(found) and all(kinds == _C.NEGATIVE_INF for kinds in found)


def _places(frames: Sequence[BadFrame]) -> Iterator[_Place]:
    for bad, entry in _entries(frames):
        yield id(bad.watch), bad.frame.module, str(entry.label)


def _leaves_rows(output: Any) -> bool:
    """True if no row is -inf as a whole. Incurs a CPU-GPU sync for each tensor."""
    floats = (t for _, t in tensors(output) if is_plain(t) and t.is_floating_point())
    rows = (t.isneginf().all(-1) for t in floats if t.dim() and t.numel())
    return not any(bool(each.any()) for each in rows)
