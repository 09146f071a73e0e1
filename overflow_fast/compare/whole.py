"""Tensors of a step as a whole, whichever ranks have parts of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from .places_of import Place
from .run_reader import RankStep, Source
from .summary import Summary

Key = tuple[str, int, str, str]


@dataclass
class Entry:
    """A tensor of a step.

    Attributes:
        place: Where it was.
        order: Its number in the step, of the first rank that has it.
        rank: The rank whose it is; None if it is of all of them together.
        dtype: Its dtype.
        shape: Its shape.
        summary: Its numbers, or None.
        why: Why it has none, or "".
        sources: The rows that it is made of.
        same: The order of an earlier entry with the same tensor, or None.
    """

    place: Place
    order: int
    rank: int | None
    dtype: str
    shape: tuple[int, ...]
    summary: Summary | None
    why: str
    sources: list[Source]
    same: int | None = None

    def load(self) -> torch.Tensor | None:
        """Reads the tensor, put together of its parts; None if it was not kept."""
        parts = [(source, source.load()) for source in self.sources]
        first = parts[0][1]
        if first is None or parts[0][0].row.part is None or self.rank is not None:
            return first
        # What the rows claim to be whole is no larger than what there is of it.
        held = sum(0 if values is None else values.numel() for _, values in parts)
        if held < math.prod(self.shape):
            return None
        whole = torch.zeros(self.shape, dtype=first.dtype)
        for source, values in parts:
            part = source.row.part
            if values is None or part is None:
                return None
            pairs = zip(part.offset, values.shape, strict=True)
            whole[tuple(slice(begin, begin + size) for begin, size in pairs)] += values
        return whole


def entries_of_rank(step: RankStep) -> list[Entry]:
    """The tensors of one rank, its parts as they are."""
    return [_entry_of(source, source.rank) for source in step.sources]


def entries_of_ranks(ranks: Sequence[RankStep]) -> list[Entry]:
    """The tensors of all ranks: parts put together, equal ones once."""
    if len(ranks) == 1 and all(s.row.part is None for s in ranks[0].sources):
        return [dataclasses.replace(e, rank=None) for e in entries_of_rank(ranks[0])]
    groups: dict[Key, list[Source]] = {}
    for step in ranks:
        for source in step.sources:
            groups.setdefault(source.row.place.key, []).append(source)
    found = [entry for group in groups.values() for entry in _combined(group)]
    return sorted(found, key=lambda entry: entry.order)


def _entry_of(source: Source, rank: int | None) -> Entry:
    row = source.row
    shape = row.shape if row.part is None else tuple(row.part.shape)
    return Entry(
        row.place,
        row.order,
        rank,
        row.dtype,
        shape,
        row.summary,
        row.why,
        [source],
        row.same,
    )


def _combined(group: list[Source]) -> Iterable[Entry]:
    rows = [source.row for source in group]
    if all(row.part is not None for row in rows):
        return [_joined(group)]
    prints = [row.summary for row in rows]
    first = prints[0]
    is_equal = first is not None and all(
        p is not None and torch.equal(p.sums, first.sums) for p in prints
    )
    if is_equal or (first is None and len({row.why for row in rows}) == 1):
        return [_entry_of(group[0], None)]
    return [_entry_of(source, source.rank) for source in group]


def _joined(group: list[Source]) -> Entry:
    """Puts the parts of a tensor together; replicas count once."""
    parts: dict[object, Source] = {}
    for source in group:
        part = source.row.part
        assert part is not None
        parts.setdefault((part.offset, part.partial), source)
    entry = _entry_of(group[0], None)
    entry.sources = list(parts.values())
    rows = [source.row for source in entry.sources]
    found = [row.summary for row in rows if row.summary is not None]
    if len(found) < len(rows):
        entry.summary, entry.why = None, entry.why or "a part was not recorded"
        return entry
    if not any(row.part is not None and row.part.is_partial for row in rows):
        held = sum(row.local_numel for row in rows)
        if held != math.prod(entry.shape):
            entry.why = f"parts of {held} of {math.prod(entry.shape)} elements"
            entry.summary = None
            return entry
        entry.summary = _sum_of(found)
    else:
        entry.summary = _sum_of_partial(found)
    return entry


def _sum_of(found: Sequence[Summary]) -> Summary:
    return Summary(
        min((s.low for s in found if not math.isnan(s.low)), default=math.nan),
        max((s.high for s in found if not math.isnan(s.high)), default=math.nan),
        sum(s.squares for s in found),
        sum(s.num_nan for s in found),
        sum(s.num_inf for s in found),
        torch.stack([s.sums for s in found]).sum(0),
    )


def _sum_of_partial(found: Sequence[Summary]) -> Summary:
    """The sum of parts that are added; its range is not known, its norm estimated."""
    total = _sum_of(found)
    squares = float(total.sums.square().sum())
    return dataclasses.replace(total, low=math.nan, high=math.nan, squares=squares)
