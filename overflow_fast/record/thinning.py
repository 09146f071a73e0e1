"""Which lines of a full record are folded, so that it fits its file again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from .record_lines import FOLD, TOP_LEVEL

_T = TypeVar("_T")


class Place(NamedTuple):
    """Where a line of steps lies in its file, or several that are to be one line."""

    offset: int
    length: int
    level: int


class Folded(NamedTuple):
    """Lines that are to be one line of a level."""

    level: int
    parts: list[Place | Folded]


def thin(
    places: Sequence[Place], num_full: int, max_bytes: int
) -> list[Place | Folded]:
    """Plans the lines of a record that is to have half of its bytes again.

    A quarter of the bytes is for single steps, and a twelfth for each level above.

    Args:
        places: The lines, the oldest first.
        num_full: How many steps keep a line of their own, where there is room.
        max_bytes: How many bytes the file may have.

    Returns:
        The lines to be, the oldest first.
    """
    mean = max(1, sum(place.length for place in places) // max(1, len(places)))
    levels: list[list[Place | Folded]] = [[] for _ in range(TOP_LEVEL + 1)]
    for place in places:
        levels[place.level].append(place)
    for level, lines in enumerate(levels):
        share = max_bytes // (4 if level == 0 else 4 * TOP_LEVEL) // mean
        most = max(1, min(num_full, share) if level == 0 else share)
        excess = len(lines) - most
        if excess <= 0:
            continue
        if level == TOP_LEVEL:
            lines[: excess + 1] = [Folded(level, lines[: excess + 1])]
            continue
        if most >= FOLD:
            excess -= excess % FOLD
        folded = [Folded(level + 1, part) for part in _parts(lines[:excess])]
        levels[level + 1] += folded
        del lines[:excess]
    return [line for level in reversed(levels) for line in level]


def _parts(lines: Sequence[_T]) -> Iterator[list[_T]]:
    for i in range(0, len(lines), FOLD):
        yield list(lines[i : i + FOLD])
