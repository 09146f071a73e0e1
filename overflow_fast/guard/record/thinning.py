"""Room in the file of a flight record: which lines become one, and the file anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import FileIO
from typing import BinaryIO, NamedTuple, TypeVar

from ..files.json_text import line_bytes
from ..files.schema import decode
from ..files.writing import write_all
from .folding import fold
from .record_lines import LineSpan, StepsLine

# So many lines of a level are folded into one of the next. With more of them a step
# that has no line of its own shares one with more others; with fewer a line of the top
# level has fewer steps, and long runs are folded into one line there sooner.
FOLD = 16
TOP_LEVEL = 3  # 4,096 steps, or more where there is no room
# Eighths of a file that it has at most then. With more of them it is full again sooner,
# with fewer more steps are folded than need be.
_THINNED = 6

_T = TypeVar("_T")


class Folded(NamedTuple):
    """Lines that are to be one line of a level."""

    level: int
    parts: list[LineSpan | Folded]


def thin(
    places: Sequence[LineSpan], num_full: int, max_bytes: int
) -> list[LineSpan | Folded]:
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
    levels: list[list[LineSpan | Folded]] = [[] for _ in range(TOP_LEVEL + 1)]
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


def thinned(
    old: BinaryIO,
    new: FileIO,
    places: Sequence[LineSpan],
    num_full: int,
    max_bytes: int,
) -> list[LineSpan]:
    """Writes thinned lines, as few as it takes for the file to have room again.

    How long a line will be is not known before it is folded: it has the entries of the
    widest, and all columns that one of them has.

    Args:
        old: The file with the lines.
        new: The one that takes its place; written from its end on.
        places: The lines, the oldest first.
        num_full: How many steps keep a line of their own, where there is room.
        max_bytes: How many bytes the file may have.
    """
    begin, room = new.tell(), max_bytes
    while True:
        plan = thin(places, num_full, room)
        found = [_write(old, new, each) for each in plan]
        if is_small(new.tell(), max_bytes) or len(found) == 1 or not room:
            return found
        room //= 2
        new.seek(begin)
        new.truncate()


def is_small(size: int, max_bytes: int) -> bool:
    """True if a file of so many bytes need not be thinned any more."""
    return size <= max_bytes * _THINNED // 8


def _line_at(old: BinaryIO, place: LineSpan) -> bytes:
    old.seek(place.offset)
    return old.read(place.length)


def copied(old: BinaryIO, new: FileIO, place: LineSpan) -> LineSpan:
    """Copies a line to the end of a new file, and returns its place there."""
    return _append(new, _line_at(old, place), place.level)


def _append(new: FileIO, data: bytes, level: int) -> LineSpan:
    offset = new.tell()
    write_all(new, data)
    return LineSpan(offset, len(data), level)


def _write(old: BinaryIO, new: FileIO, line: LineSpan | Folded) -> LineSpan:
    if isinstance(line, LineSpan):
        return copied(old, new, line)
    return _append(new, line_bytes(_folded(old, line)), line.level)


def _folded(old: BinaryIO, line: LineSpan | Folded) -> StepsLine:
    if isinstance(line, LineSpan):
        return decode(_line_at(old, line), StepsLine)
    return fold([_folded(old, part) for part in line.parts], line.level)
