"""Finds which tensors of two runs belong together, whichever ranks hold parts."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .recordings import RankStep, RecordedTensor, Source
from .summary import Summary, estimated
from .tensor_hooks import STATE, StepPath

# Tensors of a step as a whole, whichever ranks have parts of them.


Key = tuple[str, int, str, str]


@dataclass
class StepTensor:
    """A tensor of a step.

    Attributes:
        sources: The rows that it is made of; the first one has its place and dtype.
        rank: The rank whose it is; None if it is of all of them together.
        shape: Its shape.
        summary: Its numbers, or None.
        why: Why it has none, or "".
    """

    sources: list[Source]
    rank: int | None
    shape: tuple[int, ...]
    summary: Summary | None
    why: str

    @classmethod
    def of(cls, source: Source, rank: int | None) -> StepTensor:
        """Makes the tensor of one row."""
        row, line = source.row, source.row.line
        shape = line.shape if row.part is None else tuple(row.part.shape)
        return cls([source], rank, shape, row.summary, line.why)

    @property
    def row(self) -> RecordedTensor:
        """The row of the first rank that has it."""
        return self.sources[0].row

    @property
    def place(self) -> StepPath:
        """Where it was."""
        return self.row.place

    @property
    def order(self) -> int:
        """Its number in the step, of the first rank that has it."""
        return self.row.line.order

    @property
    def dtype(self) -> str:
        """Its dtype."""
        return self.row.line.dtype

    @property
    def same(self) -> int | None:
        """The order of an earlier entry with the same tensor, or None."""
        return self.row.line.same

    @property
    def requires_grad(self) -> bool | None:
        """True if it required gradients on any rank; None if that is not known."""
        known = [source.row.line.requires_grad for source in self.sources]
        return None if None in known else any(known)

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


def entries_of_rank(step: RankStep) -> list[StepTensor]:
    """The tensors of one rank, its parts as they are."""
    return [StepTensor.of(source, source.rank) for source in step.sources]


def entries_of_ranks(ranks: Sequence[RankStep]) -> list[StepTensor]:
    """The tensors of all ranks: parts put together, equal ones once."""
    if len(ranks) == 1 and all(s.row.part is None for s in ranks[0].sources):
        return [StepTensor.of(source, None) for source in ranks[0].sources]
    groups: dict[Key, list[Source]] = {}
    for step in ranks:
        for source in step.sources:
            groups.setdefault(source.row.place.key, []).append(source)
    found = [entry for group in groups.values() for entry in _combined(group)]
    return sorted(found, key=lambda entry: entry.order)


def _combined(group: list[Source]) -> Iterable[StepTensor]:
    rows = [source.row for source in group]
    if all(row.part is not None for row in rows):
        return [_joined(group)]
    prints = [row.summary for row in rows]
    first = prints[0]
    is_equal = first is not None and all(
        p is not None and torch.equal(p.sums, first.sums) for p in prints
    )
    if is_equal or (first is None and len({row.line.why for row in rows}) == 1):
        return [StepTensor.of(group[0], None)]
    return [StepTensor.of(source, source.rank) for source in group]


def _joined(group: list[Source]) -> StepTensor:
    """Puts the parts of a tensor together; replicas count once."""
    parts: dict[object, Source] = {}
    for source in group:
        part = source.row.part
        assert part is not None
        parts.setdefault((part.offset, part.partial), source)
    entry = StepTensor.of(group[0], None)
    entry.sources = list(parts.values())
    rows = [source.row for source in entry.sources]
    found = [row.summary for row in rows if row.summary is not None]
    if len(found) < len(rows):
        entry.summary, entry.why = None, entry.why or "a part was not recorded"
        return entry
    if not any(row.part is not None and row.part.is_partial for row in rows):
        held = sum(math.prod(row.local) for row in rows)
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
        _added([s.magnitudes for s in found]),
    )


def _added(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The sums of counts of parts; none if a part has others than the rest."""
    if len({len(each) for each in counts}) != 1:
        return ()
    return tuple(map(sum, zip(*counts, strict=True)))


def _sum_of_partial(found: Sequence[Summary]) -> Summary:
    """The sum of parts that are added; its range is not known, its norm estimated."""
    total = _sum_of(found)
    squares = float(total.sums.square().sum())
    return dataclasses.replace(
        total, low=math.nan, high=math.nan, squares=squares, magnitudes=()
    )


_PEFT = "base_model.model."
_GAP = 1.0  # what it costs to leave a module without a twin; a difference is at most 1
_MAX_CELLS = 4_000_000  # pairs of calls, of which a table is kept; chosen, not measured

Call = tuple[str, int]  # a module's name, and which call of it


@dataclass(frozen=True)
class Pair:
    """Two tensors that belong together; the second is the reference."""

    entry: StepTensor
    reference: StepTensor


@dataclass
class Matched:
    """The pairs of two runs, and what has no twin.

    Attributes:
        pairs: The pairs, in the order in which the first run has them.
        only: The entries that the first run alone has.
        only_reference: Those that the reference alone has.
        renamed: The modules that were paired by order and shape, not by name.
        is_coarse: True if these were too many to align each with each.
    """

    pairs: list[Pair]
    only: list[StepTensor]
    only_reference: list[StepTensor]
    renamed: dict[str, str]
    is_coarse: bool = False

    def missing_modules(self) -> set[str]:
        """The modules of which a run has activations or gradients without a twin."""
        missing = (*self.only, *self.only_reference)
        return {each.place.module for each in missing if each.place.phase != STATE}

    def lone_sources(self) -> dict[str, list[str]]:
        """The inputs, parameters and buffers of each module without a twin."""
        found: dict[str, list[str]] = {}
        for each in (*self.only, *self.only_reference):
            if each.place.role in ("input", "parameter", "buffer"):
                text = f"{each.place} of one run alone"
                found.setdefault(each.place.module, []).append(text)
        return found


def match(
    entries: Sequence[StepTensor],
    references: Sequence[StepTensor],
    names: Mapping[str, str],
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
    left = _pair_by_key(matched, entries, references, mine, its)
    # A module that both runs have is its own twin, also where one did not call it.
    known = {*mine.values()} & {*its.values()}
    calls, others = _calls(left[0], mine, known), _calls(left[1], its, known)
    matched.is_coarse = len(calls) * len(others) > _MAX_CELLS
    renamed = _aligned(list(calls), list(others), calls, others)
    if renamed:
        matched.renamed = {name: other for (name, _), (other, _) in renamed.items()}
        moved = {
            key: renamed.get((name, entry.place.call), (name, 0))[0]
            for entry in left[0]
            for key, name in [(id(entry), mine[id(entry)])]
        }
        left = _pair_by_key(matched, *left, {**mine, **moved}, its)
    matched.only, matched.only_reference = left
    matched.pairs.sort(key=lambda pair: (pair.entry.order, pair.entry.rank or 0))
    return matched


def _plain_name(entry: StepTensor, entries: Sequence[StepTensor]) -> str:
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
        name = re.sub(pattern, new, name)
    return name


def _pair_by_key(
    matched: Matched,
    entries: Iterable[StepTensor],
    references: Iterable[StepTensor],
    mine: Mapping[int, str],
    its: Mapping[int, str],
) -> tuple[list[StepTensor], list[StepTensor]]:
    """Pairs equal keys, then the nth inputs or outputs of equal calls.

    Returns:
        What is left of both.
    """
    waiting_a, waiting_b = list(entries), list(references)
    for has_path in (True, False):
        pool: dict[object, collections.deque[StepTensor]] = {}
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


def _key(entry: StepTensor, name: str, has_path: bool) -> object:
    place = entry.place
    is_state = place.role in ("parameter", "buffer", "parameter_gradient")
    # An argument may be given by position in one run and by name in the other.
    path = place.path if has_path or is_state else entry.shape
    return name, place.call, place.role, path, entry.rank


def _aligned(
    rows: Sequence[Call],
    columns: Sequence[Call],
    calls: Mapping[Call, list[StepTensor]],
    others: Mapping[Call, list[StepTensor]],
) -> dict[Call, Call]:
    """Aligns the calls of modules that have no twin of their name, in their order.

    Each with each, by dynamic programming; beyond `_MAX_CELLS` calls with equal results
    split the order into stretches, and a stretch that is still too long without any is
    paired by class and shapes.
    """
    if not rows or not columns:
        return {}
    if len(rows) * len(columns) <= _MAX_CELLS:
        return _aligned_exactly(rows, columns, calls, others)
    anchors = _anchors(rows, columns, calls, others)
    if not anchors:
        return _paired_by_shape(rows, columns, calls, others)
    found: dict[Call, Call] = {}
    i = j = 0
    for at, its in (*anchors, (len(rows), len(columns))):
        found |= _aligned(rows[i:at], columns[j:its], calls, others)
        if at < len(rows):
            found[rows[at]] = columns[its]
        i, j = at + 1, its + 1
    return found


def _anchors(
    rows: Sequence[Call],
    columns: Sequence[Call],
    calls: Mapping[Call, list[StepTensor]],
    others: Mapping[Call, list[StepTensor]],
) -> list[tuple[int, int]]:
    """The indices of calls with a result that both runs have once, in both orders."""
    mine = _positions([_result_of(calls[each]) for each in rows])
    its = _positions([_result_of(others[each]) for each in columns])
    pairs = sorted((i, its[key]) for key, i in mine.items() if key in its)
    # The longest increasing subsequence, by patience sorting.
    ends, last, before = list[int](), list[int](), dict[int, int]()
    for k, (_, j) in enumerate(pairs):
        at = bisect.bisect_left(ends, j)
        before[k] = last[at - 1] if at else -1
        ends[at : at + 1], last[at : at + 1] = [j], [k]
    chain, k = list[tuple[int, int]](), last[-1] if last else -1
    while k >= 0:
        chain.append(pairs[k])
        k = before[k]
    return chain[::-1]


def _result_of(outputs: Sequence[StepTensor]) -> object:
    """The shapes and fingerprints of a call's outputs; None if one is not known."""
    prints = [e.summary.sums for e in outputs if e.summary is not None]
    if len(prints) < len(outputs):
        return None
    return tuple(
        (e.shape, tuple(p.tolist())) for e, p in zip(outputs, prints, strict=True)
    )


def _positions(keys: Sequence[object]) -> dict[object, int]:
    """Where each key is that there is once."""
    counts = collections.Counter(keys)
    return {k: i for i, k in enumerate(keys) if k is not None and counts[k] == 1}


def _paired_by_shape(
    rows: Sequence[Call],
    columns: Sequence[Call],
    calls: Mapping[Call, list[StepTensor]],
    others: Mapping[Call, list[StepTensor]],
) -> dict[Call, Call]:
    """Pairs the nth calls of equal classes and shapes."""
    waiting: dict[object, collections.deque[Call]] = {}
    for each in columns:
        waiting.setdefault(_kind_of(others[each]), collections.deque()).append(each)
    pairs = ((each, waiting.get(_kind_of(calls[each]))) for each in rows)
    return {each: queue.popleft() for each, queue in pairs if queue}


def _kind_of(outputs: Sequence[StepTensor]) -> object:
    return outputs[0].place.class_name, tuple(each.shape for each in outputs)


def _aligned_exactly(
    rows: Sequence[Call],
    columns: Sequence[Call],
    calls: Mapping[Call, list[StepTensor]],
    others: Mapping[Call, list[StepTensor]],
) -> dict[Call, Call]:
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
    calls: Mapping[Call, list[StepTensor]],
    others: Mapping[Call, list[StepTensor]],
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
    entries: Sequence[StepTensor], names: Mapping[int, str], known: Container[str]
) -> dict[Call, list[StepTensor]]:
    """The outputs of each call of other modules, in the order in which they return."""
    found: dict[Call, list[StepTensor]] = {}
    for entry in entries:
        name = names[id(entry)]
        if entry.place.role == "output" and not entry.rank and name not in known:
            found.setdefault((name, entry.place.call), []).append(entry)
    return found


def _distance(outputs: Sequence[StepTensor], others: Sequence[StepTensor]) -> float:
    """The distance of two calls: below 1 if their outputs have equal shapes."""
    if [e.shape for e in outputs] != [e.shape for e in others]:
        return 3 * _GAP  # dearer than two gaps
    apart = 0.0
    for mine, its in zip(outputs, others, strict=True):
        if mine.summary is not None and its.summary is not None:
            relative = estimated(mine.summary, its.summary).relative
            apart = max(apart, min(1.0, relative))
    same_class = outputs[0].place.class_name == others[0].place.class_name
    return 0.8 * apart + (0.0 if same_class else 0.1)
