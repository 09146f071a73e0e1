"""Finds which tensors of two runs belong together, whichever ranks hold parts.

1. Of several ranks, parts of a tensor are added up, and equal tensors count once.
2. Tensors are paired by the names of their modules, without what PEFT adds, and after
   the user's replacements.
3. The calls of modules that are left are aligned in their order: those of equal
   results, and between them the rest by class and shapes.
"""

from __future__ import annotations

import collections
import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch

from .recordings import RankStep, RecordedTensor
from .summary import Summary
from .tensor_hooks import STATE

# Tensors of a step as a whole, whichever ranks have parts of them.


def tensors_of(
    own: Sequence[RankStep], other: Sequence[RankStep]
) -> tuple[list[RecordedTensor], list[RecordedTensor]]:
    """The tensors of both: rank by rank where both are shared alike, else as wholes."""
    layouts = [[(step.rank, _parts(step)) for step in side] for side in (own, other)]
    if len(own) == 1 or layouts[0] != layouts[1]:
        return _of_ranks(own), _of_ranks(other)
    mine, its = ([row for step in side for row in step.rows] for side in (own, other))
    return mine, its


def _parts(step: RankStep) -> dict[object, object]:
    return {row.place.key: row.part for row in step.rows if row.part is not None}


def is_shared(steps: Sequence[RankStep]) -> bool:
    """True if ranks have parts of tensors."""
    return any(map(_parts, steps))


def _of_ranks(ranks: Sequence[RankStep]) -> list[RecordedTensor]:
    """The tensors of all ranks: parts put together, equal ones once."""
    groups: dict[object, list[RecordedTensor]] = {}
    if len(ranks) == 1 and not _parts(ranks[0]):
        for row in ranks[0].rows:
            row.rank = None
        return ranks[0].rows
    for step in ranks:
        for row in step.rows:
            groups.setdefault(row.place.key, []).append(row)
    found = [entry for group in groups.values() for entry in _combined(group)]
    return sorted(found, key=lambda entry: entry.order)


def _combined(group: list[RecordedTensor]) -> list[RecordedTensor]:
    if all(row.part is not None for row in group):
        return [_joined(group)]
    sums = [None if row.summary is None else row.summary.sums for row in group]
    first = sums[0]
    is_equal = first is not None and all(
        s is not None and torch.equal(s, first) for s in sums
    )
    if is_equal or (first is None and len({row.line.why for row in group}) == 1):
        return [replace(group[0], rank=None)]
    return group


def _joined(group: list[RecordedTensor]) -> RecordedTensor:
    """Puts the parts of a tensor together; replicas count once."""
    parts = dict[object, RecordedTensor]()
    for row in group:
        if row.part is not None:
            parts.setdefault((row.part.offset, row.part.partial), row)
    rows = list(parts.values())
    whole = replace(group[0], rank=None, summary=None, parts=rows)
    found = [row.summary for row in rows if row.summary is not None]
    is_partial = any(row.part is not None and row.part.is_partial for row in rows)
    held, numel = sum(math.prod(r.local) for r in rows), math.prod(whole.shape)
    why = whole.line.why
    if len(found) < len(rows):
        why = why or "a part was not recorded"
    elif held != numel and not is_partial:
        why = f"parts of {held} of {numel} elements"
    else:
        whole.summary = _sum_of(found, is_partial)
    whole.line = msgspec.structs.replace(whole.line, why=why)
    return whole


def _sum_of(found: Sequence[Summary], is_partial: bool) -> Summary:
    """The sum of parts; of those that are added the range is not known."""
    total = Summary(
        min((s.low for s in found if not math.isnan(s.low)), default=math.nan),
        max((s.high for s in found if not math.isnan(s.high)), default=math.nan),
        sum(s.squares for s in found),
        sum(s.num_nan for s in found),
        sum(s.num_inf for s in found),
        torch.stack([s.sums for s in found]).sum(0),
    )
    if not is_partial:
        return total
    squares = float(total.sums.square().sum())
    return replace(total, low=math.nan, high=math.nan, squares=squares)


# Pairs of tensors of two runs.


_PEFT = "base_model.model."
Call = tuple[str, int]  # a module's name, and which call of it
Pair = tuple[RecordedTensor, RecordedTensor]  # the second one is the reference


@dataclass
class Matched:
    """The pairs of two runs, and what has no twin.

    Attributes:
        pairs: The pairs, in the order in which the first run has them.
        alone: The entries that the first run alone has, and those of the reference.
        renamed: The modules that were paired by order and shape, not by name.
    """

    pairs: list[Pair] = field(default_factory=list)
    alone: tuple[list[RecordedTensor], list[RecordedTensor]] = ((), ())  # type: ignore[assignment]
    renamed: dict[str, str] = field(default_factory=dict)

    def missing_modules(self) -> set[str]:
        """The modules of which a run has activations or gradients without a twin."""
        missing = (*self.alone[0], *self.alone[1])
        return {each.place.module for each in missing if each.place.phase != STATE}

    def lone_sources(self) -> dict[str, list[str]]:
        """The inputs, parameters and buffers of each module without a twin."""
        found: dict[str, list[str]] = {}
        for each in (*self.alone[0], *self.alone[1]):
            if each.place.role in ("input", "parameter", "buffer"):
                text = f"{each.place} of one run alone"
                found.setdefault(each.place.module, []).append(text)
        return found


def match(
    entries: Sequence[RecordedTensor],
    references: Sequence[RecordedTensor],
    names: Mapping[str, str],
) -> Matched:
    """Pairs the tensors of a step of two runs.

    Args:
        entries: Those of the first run.
        references: Those of the reference.
        names: Patterns of module names of the first run, and what the reference has.
    """
    mine = {id(e): mapped_name(_plain_name(e), names) for e in entries}
    its = {id(e): _plain_name(e) for e in references}
    matched = Matched()
    left = _pair_by_key(matched, entries, references, mine, its)
    # A module that both runs have is its own twin, also where one did not call it.
    known = {*mine.values()} & {*its.values()}
    renamed = _aligned(_calls(left[0], mine, known), _calls(left[1], its, known))
    if renamed:
        matched.renamed = {name: other for (name, _), (other, _) in renamed.items()}
        moved = {
            id(e): renamed.get((mine[id(e)], e.place.call), (mine[id(e)], 0))[0]
            for e in left[0]
        }
        left = _pair_by_key(matched, *left, moved, its)
    matched.alone = left
    matched.pairs.sort(key=lambda pair: (pair[0].order, pair[0].rank or 0))
    return matched


def _plain_name(entry: RecordedTensor) -> str:
    """The name without what PEFT puts before it, and around adapted layers."""
    name = entry.place.module
    if not name.startswith(_PEFT):
        return name
    return name[len(_PEFT) :].removesuffix(".base_layer")


def mapped_name(name: str, names: Mapping[str, str]) -> str:
    """A module's name after the replacements."""
    for pattern, new in names.items():
        name = re.sub(pattern, new, name)
    return name


def _pair_by_key(
    matched: Matched,
    entries: Iterable[RecordedTensor],
    references: Iterable[RecordedTensor],
    mine: Mapping[int, str],
    its: Mapping[int, str],
) -> tuple[list[RecordedTensor], list[RecordedTensor]]:
    """Pairs equal keys, then the nth inputs or outputs of equal calls.

    Returns:
        What is left of both.
    """
    waiting_a, waiting_b = list(entries), list(references)
    for has_path in (True, False):
        pool: dict[object, collections.deque[RecordedTensor]] = {}
        for each in waiting_b:
            key = _key(each, its[id(each)], has_path)
            pool.setdefault(key, collections.deque()).append(each)
        left = []
        for each in waiting_a:
            found = pool.get(_key(each, mine[id(each)], has_path))
            if found:
                matched.pairs.append((each, found.popleft()))
            else:
                left.append(each)
        waiting_a = left
        waiting_b = [each for queue in pool.values() for each in queue]
    return waiting_a, sorted(waiting_b, key=lambda each: each.order)


def _key(entry: RecordedTensor, name: str, has_path: bool) -> object:
    place = entry.place
    # An argument may be given by position in one run and by name in the other.
    is_whole = has_path or not place.is_of_call
    path = place.path if is_whole else entry.shape
    return name, place.call, place.role, path, entry.rank


def _calls(
    entries: Sequence[RecordedTensor], names: Mapping[int, str], known: set[str]
) -> dict[Call, list[RecordedTensor]]:
    """The outputs of calls of other modules, in the order of their return."""
    found: dict[Call, list[RecordedTensor]] = {}
    for entry in entries:
        name = names[id(entry)]
        if entry.place.role == "output" and not entry.rank and name not in known:
            found.setdefault((name, entry.place.call), []).append(entry)
    return found


def _aligned(
    calls: Mapping[Call, list[RecordedTensor]],
    others: Mapping[Call, list[RecordedTensor]],
) -> dict[Call, Call]:
    """Aligns calls in their order: those of equal results, and between them the rest.

    Results are equal bit for bit; the rest is aligned by class and shapes.
    """
    sides = list(calls.items()), list(others.items())
    found: dict[Call, Call] = {}
    i = j = 0
    ends = len(calls), len(others)
    for k, m in (*_common([[_result(c[1]) for c in side] for side in sides]), ends):
        part, its = sides[0][i:k], sides[1][j:m]
        kinds = [[_kind(c[1]) for c in side] for side in (part, its)]
        found |= {part[x][0]: its[y][0] for x, y in _common(kinds)}
        if k < len(calls):
            found[sides[0][k][0]] = sides[1][m][0]
        i, j = k + 1, m + 1
    return found


def _common(keys: Sequence[Sequence[Any]]) -> list[tuple[int, int]]:
    """The indices of equal keys of two lists, in both orders."""
    matcher = difflib.SequenceMatcher[Any](None, keys[0], keys[1], autojunk=False)
    blocks = matcher.get_matching_blocks()
    return [(i + k, j + k) for i, j, length in blocks for k in range(length)]


def _kind(outputs: Sequence[RecordedTensor]) -> object:
    return outputs[0].place.class_name, tuple(each.shape for each in outputs)


def _result(outputs: Sequence[RecordedTensor]) -> object:
    """The shapes and fingerprints of a result; equal to no other if not known."""
    sums = [e.summary.sums.tolist() for e in outputs if e.summary is not None]
    is_known = len(sums) == len(outputs)
    return (_kind(outputs), tuple(map(tuple, sums))) if is_known else object()
