"""Finds which tensors of two runs belong together."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .measures import estimated
from .places_of import STATE
from .whole import Entry

_PEFT = "base_model.model."
_GAP = 1.0  # what it costs to leave a module without a twin; a difference is at most 1
_MAX_CELLS = 4_000_000

Call = tuple[str, int]  # a module's name, and which call of it


@dataclass(frozen=True)
class Pair:
    """Two tensors that belong together; the second is the reference."""

    entry: Entry
    reference: Entry


@dataclass
class Matched:
    """The pairs of two runs, and what has no twin.

    Attributes:
        pairs: The pairs, in the order in which the first run has them.
        only: The entries that the first run alone has.
        only_reference: Those that the reference alone has.
        renamed: The modules that were paired by order and shape, not by name.
    """

    pairs: list[Pair]
    only: list[Entry]
    only_reference: list[Entry]
    renamed: dict[str, str]

    def missing_modules(self) -> set[str]:
        """The modules of which a run has activations or gradients without a twin."""
        missing = (*self.only, *self.only_reference)
        return {each.place.module for each in missing if each.place.phase != STATE}

    def lone_inputs(self) -> set[str]:
        """The modules of which a run has inputs without a twin."""
        missing = (*self.only, *self.only_reference)
        return {each.place.module for each in missing if each.place.role == "input"}


def match(
    entries: Sequence[Entry], references: Sequence[Entry], names: Mapping[str, str]
) -> Matched:
    """Pairs the tensors of a step of two runs.

    By the modules' names, then by the order and the shapes of modules; where that is
    ambiguous, the modules with the nearest fingerprints.

    Args:
        entries: Those of the first run.
        references: Those of the reference.
        names: Patterns of module names of the first run, and what the reference has.
    """
    mine = {id(e): mapped_name(_plain_name(e, entries), names) for e in entries}
    its = {id(e): _plain_name(e, references) for e in references}
    matched = Matched([], [], [], {})
    left = _by_key(matched, entries, references, mine, its)
    renamed = _aligned(*left, mine, its)
    if renamed:
        matched.renamed = {name: other for (name, _), (other, _) in renamed.items()}
        moved = {
            key: renamed.get((name, entry.place.call), (name, 0))[0]
            for entry in left[0]
            for key, name in [(id(entry), mine[id(entry)])]
        }
        left = _by_key(matched, *left, {**mine, **moved}, its)
    matched.only, matched.only_reference = left
    matched.pairs.sort(key=lambda pair: (pair.entry.order, pair.entry.rank or 0))
    return matched


def _plain_name(entry: Entry, entries: Sequence[Entry]) -> str:
    """The name without what PEFT puts before it, and around adapted layers."""
    name = entry.place.module
    if not name.startswith(_PEFT):
        return name
    name = name[len(_PEFT) :]
    if name.endswith(".base_layer"):
        return name[: -len(".base_layer")]
    # An adapted layer shares its name with the layer within.
    return name


def mapped_name(name: str, names: Mapping[str, str]) -> str:
    """A module's name after the replacements."""
    for pattern, new in names.items():
        try:
            name = re.sub(pattern, new, name)
        except (re.error, IndexError) as error:
            raise ValueError(
                f"names must be regular expressions and replacements: {pattern!r} to "
                f"{new!r}: {error}"
            ) from error
    return name


def _by_key(
    matched: Matched,
    entries: Iterable[Entry],
    references: Iterable[Entry],
    mine: Mapping[int, str],
    its: Mapping[int, str],
) -> tuple[list[Entry], list[Entry]]:
    """Pairs equal keys, then the nth inputs or outputs of equal calls.

    Returns:
        What is left of both.
    """
    waiting_a, waiting_b = list(entries), list(references)
    for has_path in (True, False):
        pool: dict[object, collections.deque[Entry]] = {}
        for each in waiting_b:
            key = _key(each, its[id(each)], has_path)
            pool.setdefault(key, collections.deque()).append(each)
        left = []
        for each in waiting_a:
            found = pool.get(_key(each, mine[id(each)], has_path))
            if found:
                matched.pairs.append(Pair(each, found.popleft()))
            else:
                left.append(each)
        waiting_a = left
        paired = {id(pair.reference) for pair in matched.pairs}
        waiting_b = [each for each in waiting_b if id(each) not in paired]
    return waiting_a, waiting_b


def _key(entry: Entry, name: str, has_path: bool) -> object:
    place = entry.place
    is_state = place.role in ("parameter", "buffer", "parameter_gradient")
    # An argument may be given by position in one run and by name in the other.
    path = place.path if has_path or is_state else entry.shape
    return name, place.call, place.role, path, entry.rank


def _aligned(
    entries: Sequence[Entry],
    references: Sequence[Entry],
    mine: Mapping[int, str],
    its: Mapping[int, str],
) -> dict[Call, Call]:
    """Aligns the calls of modules that have no twin of their name, in their order."""
    calls, others = _calls(entries, mine), _calls(references, its)
    if not calls or not others or len(calls) * len(others) > _MAX_CELLS:
        return {}
    rows, columns = list(calls), list(others)
    costs = [[0.0] * (len(columns) + 1) for _ in range(len(rows) + 1)]
    for i in range(len(rows) + 1):
        for j in range(len(columns) + 1):
            if i and j:
                apart = _distance(calls[rows[i - 1]], others[columns[j - 1]])
                costs[i][j] = min(
                    costs[i - 1][j] + _GAP,
                    costs[i][j - 1] + _GAP,
                    costs[i - 1][j - 1] + apart,
                )
            else:
                costs[i][j] = _GAP * (i + j)
    return _traced_back(rows, columns, calls, others, costs)


def _traced_back(
    rows: Sequence[Call],
    columns: Sequence[Call],
    calls: Mapping[Call, list[Entry]],
    others: Mapping[Call, list[Entry]],
    costs: Sequence[Sequence[float]],
) -> dict[Call, Call]:
    found: dict[Call, Call] = {}
    i, j = len(rows), len(columns)
    while i and j:
        apart = _distance(calls[rows[i - 1]], others[columns[j - 1]])
        if costs[i][j] == costs[i - 1][j - 1] + apart:
            i, j = i - 1, j - 1
            found[rows[i]] = columns[j]
        elif costs[i][j] == costs[i - 1][j] + _GAP:
            i -= 1
        else:
            j -= 1
    return dict(reversed(found.items()))


def _calls(
    entries: Sequence[Entry], names: Mapping[int, str]
) -> dict[Call, list[Entry]]:
    """The outputs of each call, in the order in which the calls return."""
    found: dict[Call, list[Entry]] = {}
    for entry in entries:
        if entry.place.role == "output" and not entry.rank:
            found.setdefault((names[id(entry)], entry.place.call), []).append(entry)
    return found


def _distance(outputs: Sequence[Entry], others: Sequence[Entry]) -> float:
    """How little two calls look alike: below 1 if their outputs have equal shapes."""
    if [e.shape for e in outputs] != [e.shape for e in others]:
        return 3 * _GAP  # dearer than two gaps
    apart = 0.0
    for mine, its in zip(outputs, others, strict=True):
        if mine.summary is not None and its.summary is not None:
            relative = estimated(mine.summary, its.summary).relative
            apart = max(apart, min(1.0, relative))
    same_class = outputs[0].place.class_name == others[0].place.class_name
    return 0.8 * apart + (0.0 if same_class else 0.1)
