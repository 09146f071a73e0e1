"""Finds which tensors of two runs belong together, whichever ranks hold parts.

1. Of several ranks, parts of a tensor are added up, and equal tensors count once.
2. Tensors are paired by the names of their modules, without what PEFT adds, and after
   the user's replacements.
3. The calls of modules that are left are aligned in their order: those of equal
   results, and then the rest by class and shapes.
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

from .recorded import RankStep, RecordedTensor
from .summary import added

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
    return {r.line.key: r.line.part for r in step.rows if r.line.part is not None}


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
            groups.setdefault(row.line.key, []).append(row)
    found = [entry for group in groups.values() for entry in _combined(group)]
    return sorted(found, key=lambda entry: entry.line.order)


def _combined(group: list[RecordedTensor]) -> list[RecordedTensor]:
    first = group[0]
    if all(row.line.part is not None for row in group):
        return [_joined(group)]
    is_equal = len({row.line.fingerprint for row in group}) == 1
    if is_equal and (first.is_known or len({row.line.why for row in group}) == 1):
        return [replace(first, rank=None)]
    return group


def _joined(group: list[RecordedTensor]) -> RecordedTensor:
    """Puts the parts of a tensor together; replicas count once."""
    by_part = dict[object, RecordedTensor]()
    for row in group:
        by_part.setdefault(row.line.part, row)
    rows = list(by_part.values())
    line = msgspec.structs.replace(group[0].line, fingerprint=None)
    whole = RecordedTensor(line, rank=None, parts=rows)
    parts = [row.line.part for row in rows]
    is_partial = any(each is not None and each.partial for each in parts)
    held, numel = sum(math.prod(r.local) for r in rows), math.prod(whole.shape)
    if not all(row.is_known for row in rows):
        line.why = line.why or "a part was not recorded"
    elif held != numel and not is_partial:
        line.why = f"parts of {held} of {numel} elements"
    else:
        line.take(added([row.line for row in rows], is_partial))
    return whole


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

    def lone_sources(self) -> dict[str, list[str]]:
        """The inputs, parameters and buffers of each module without a twin."""
        found: dict[str, list[str]] = {}
        for each in (*self.alone[0], *self.alone[1]):
            if each.line.role in ("input", "parameter", "buffer"):
                text = f"{each.line} of one run alone"
                found.setdefault(each.line.module, []).append(text)
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
            id(e): renamed.get((mine[id(e)], e.line.call), (mine[id(e)], 0))[0]
            for e in left[0]
        }
        left = _pair_by_key(matched, *left, moved, its)
    matched.alone = left
    matched.pairs.sort(key=lambda pair: (pair[0].line.order, pair[0].rank or 0))
    return matched


def _plain_name(entry: RecordedTensor) -> str:
    """The name without what PEFT puts before it, and around adapted layers."""
    name = entry.line.module
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
    return waiting_a, sorted(waiting_b, key=lambda each: each.line.order)


def _key(entry: RecordedTensor, name: str, has_path: bool) -> object:
    place = entry.line
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
        if entry.line.role == "output" and not entry.rank and name not in known:
            found.setdefault((name, entry.line.call), []).append(entry)
    return found


def _aligned(
    calls: Mapping[Call, list[RecordedTensor]],
    others: Mapping[Call, list[RecordedTensor]],
) -> dict[Call, Call]:
    """Aligns calls in their order: those of equal results, then by class and shapes.

    A module that one run has more would shift all others of its kind.
    """
    found: dict[Call, Call] = {}
    for key in (_result, _kind):
        mine = [call for call in calls if call not in found]
        its = [call for call in others if call not in found.values()]
        keys = [key(calls[call]) for call in mine], [key(others[call]) for call in its]
        matcher = difflib.SequenceMatcher[Any](None, *keys, autojunk=False)
        for i, j, length in matcher.get_matching_blocks():
            found |= {mine[i + k]: its[j + k] for k in range(length)}
    return found


def _kind(outputs: Sequence[RecordedTensor]) -> object:
    return outputs[0].line.class_name, tuple(each.shape for each in outputs)


def _result(outputs: Sequence[RecordedTensor]) -> object:
    """The shapes and fingerprints of a result; equal to no other if not known."""
    is_known = all(each.is_known for each in outputs)
    prints = tuple(each.line.fingerprint for each in outputs)
    return (_kind(outputs), prints) if is_known else object()
