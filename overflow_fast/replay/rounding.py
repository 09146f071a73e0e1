"""Finds the operation whose rounding made a later result undefined, such as log of 0.

The operations that an undefined result depends on are kept in one more replay. They
are then run in float64, from one of them on: if the result is finite from one on and
not from the next on, the first of the two is where the value was lost.

First the nearest of them alone. Where the result stays undefined, they are run with
what they read moved by far more than rounding: if it is undefined then, too, rounding
before them is not what made it so, and no more is kept.
"""

from __future__ import annotations

import heapq
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..core.tensors import PLAIN
from ..state.snapshot import is_same_bits
from ..text import dtype_name
from ..tree import find, mapped, tensors_in
from .explanation import Explanation
from .op_trace import ModuleStack, OpCall, Row, StorageMap, is_float
from .places import op_at, place_text
from .replayer import Observer
from .root_op import first_new, run_in_float64

UNDERFLOW, ROUNDING = "underflow", "rounding"
LOOKED_AT = (12, 96)  # operations: first the nearest, then more
_NOISE = 0.01  # of a value; rounding is at most 0.004, in bfloat16
_MOST_NUMEL = 2**26  # of all that is kept, in elements


def rows_before(row: Row, most: int) -> list[Row]:
    """The operations that a result depends on and the operation itself, in order.

    Those that ran last, up to a number of them; what they read of earlier ones is taken
    as it was.
    """
    found: dict[int, Row] = {}
    waiting = [(-row.index, row)]
    while waiting and len(found) < most:
        _, each = heapq.heappop(waiting)
        if each.index in found or each.is_communication or each.is_empty:
            continue
        found[each.index] = each
        for before in each.read_from:
            heapq.heappush(waiting, (-before.index, before))
    return [found[index] for index in sorted(found)]


# What operations read and wrote, kept while a step runs.


@dataclass(frozen=True)
class _Kept:
    """A tensor that an operation has read or written.

    Attributes:
        memory: A number for its memory.
        size: Its size.
        stride: Its strides.
        offset: Where it begins in its memory.
        value: Its values, or all of its memory's where it was read and is of floats.
    """

    memory: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    value: torch.Tensor

    @property
    def is_float(self) -> bool:
        """True if it is computed in float64."""
        return self.value.is_floating_point()

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor in other memory of the same layout."""
        return memory.as_strided(self.size, self.stride, self.offset)


@dataclass
class _KeptCall:
    """An operation with what it read, and what it returned and wrote to."""

    func: Any
    base: str
    row: Row
    args: Any
    kwargs: Any
    results: list[_Kept] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)  # of memory, in elements

    def kept(self) -> list[_Kept]:
        """All that it has read, returned and written to."""
        return [k for _, k in find((self.args, self.kwargs), (_Kept,))] + self.results


class _TooLarge(Exception):
    """Raised where what an operation reads cannot be kept."""


class Tape(Observer):
    """Keeps what some operations of a traced run read and write.

    At most 2**26 elements at a time: operations that ran last displace the first, and
    what did not change between two operations is kept once.

    Args:
        rows: The operations, of the table of another run.

    Attributes:
        calls: What was kept, by the places of the operations in the order of execution.
        is_same: Up to the last of them this run had the same operations there.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {row.index: row for row in rows}
        self._numbers: StorageMap[int] = StorageMap()
        self._last: dict[int, weakref.ref[_Kept]] = {}  # of each memory
        self._num_run = self._count = self._numel = 0
        self.calls: dict[int, _KeptCall] = {}
        self.is_same = True

    def run(self, op: OpCall, modules: ModuleStack) -> Any:
        """Runs an operation, and keeps what it reads and writes; see `OpObserver`."""
        if op.waits:
            return op.run()
        row = self._rows.get(self._num_run)
        self._num_run += 1
        if row is None:
            return op.run()
        self.is_same &= op.name == row.name
        kept = self._begin(op, row)
        output = op.run()
        if kept is not None:
            with torch.no_grad():
                self._end(kept, op, output)
        return output

    def on_module(self, name: str, output: Any) -> None:
        """Takes in nothing; see `OpObserver`."""

    def _begin(self, op: OpCall, row: Row) -> _KeptCall | None:
        """Keeps what an operation is about to read."""
        self._numel = 0
        try:
            args, kwargs = mapped((op.args, op.kwargs), self._read)
        except (_TooLarge, RuntimeError, TypeError):
            return None
        return _KeptCall(op.func, op.base, row, args, kwargs)

    def _end(self, kept: _KeptCall, op: OpCall, output: Any) -> None:
        """Keeps what it has returned and written to."""
        results = [t for t in [*tensors_in(output), *op.written] if is_float(t)]
        try:
            kept.results = [self._written(tensor) for tensor in results]
        except (_TooLarge, RuntimeError):
            return
        for each, tensor in zip(kept.results, results, strict=True):
            kept.sizes[each.memory] = _whole(tensor).numel()
        self.calls[kept.row.index] = kept

    def _read(self, tensor: torch.Tensor) -> _Kept:
        value = tensor.detach()
        return self._kept(tensor, _whole(value) if is_float(value) else value)

    def _written(self, tensor: torch.Tensor) -> _Kept:
        return self._kept(tensor, tensor.detach())

    def _kept(self, tensor: torch.Tensor, value: torch.Tensor) -> _Kept:
        self._numel += value.numel()
        is_plain = type(tensor) in PLAIN and tensor.layout is torch.strided
        if not is_plain or tensor.is_complex() or self._numel > _MOST_NUMEL:
            raise _TooLarge
        number = self._numbers.get(tensor)
        if number is None:
            number = self._count = self._count + 1
            self._numbers.put(tensor, number)
        size, offset = tuple(tensor.shape), int(tensor.storage_offset())
        copy = self._copy(number, value)
        kept = _Kept(number, size, tensor.stride(), offset, copy)
        self._last[number] = weakref.ref(kept)
        return kept

    def _copy(self, number: int, value: torch.Tensor) -> torch.Tensor:
        """A copy of values: what was kept of the memory last, if they are the same."""
        last = self._last.get(number, lambda: None)()
        if last is not None and _is_same(last.value, value):
            return last.value.view(value.shape)
        while self.calls and self._num_kept() + self._numel > _MOST_NUMEL:
            del self.calls[next(iter(self.calls))]
        return value.clone()

    def _num_kept(self) -> int:
        """How many elements are kept, without those of the operation that runs."""
        values = [k.value for call in self.calls.values() for k in call.kept()]
        sizes = {each.untyped_storage().data_ptr(): each.numel() for each in values}
        return sum(sizes.values())


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not (one.is_contiguous() and other.is_contiguous()):
        return False
    return is_same_bits(one.view(-1), other.view(-1))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's memory, as one row of elements."""
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


# What was kept, run in float64.


class _InFloat64:
    """Runs kept operations in float64, one after another.

    What they read that none of them has written is taken as it was.

    Args:
        nudged: The operations whose results of exactly 0 and 1 are moved by the least
            that float64 can.
        noise: By how much of it what none of them has written is moved, at most.
    """

    def __init__(self, nudged: Sequence[_KeptCall] = (), noise: float = 0.0) -> None:
        self._memory: dict[int, torch.Tensor] = {}
        self._nudged = nudged
        self._noise = noise
        self.failed: list[Row] = []

    def run(self, call: _KeptCall) -> None:
        """Runs an operation; one that has no float64 is taken as it was."""
        kinds = _Kept, torch.dtype
        read: set[int] = set()

        def widened(value: Any) -> Any:
            if isinstance(value, _Kept):
                read.add(value.memory)
            return self._widened(value)

        try:
            args, kwargs = mapped((call.args, call.kwargs), widened, kinds=kinds)
            output = run_in_float64(call.func, call.base, args, kwargs)
            found = [t for t in tensors_in(output) if is_float(t)]
            for kept, result in zip(call.results, found, strict=False):
                if kept.memory not in read:
                    self._put(kept, call.sizes[kept.memory], result)
            if any(call is each for each in self._nudged):
                kept = call.results[0]
                _nudge(kept.of(self._memory[kept.memory]), _impossible(call))
        except Exception:
            self.failed.append(call.row)
            for kept in call.results:
                self._memory.pop(kept.memory, None)

    def _widened(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return torch.float64 if value.is_floating_point else value
        if not value.is_float:
            return value.value.clone()
        if value.memory not in self._memory:
            given = value.value.to(torch.float64, copy=True)
            self._memory[value.memory] = given
            if self._noise:
                _move(
                    given, self._noise, torch.finfo(value.value.dtype).smallest_normal
                )
        return value.of(self._memory[value.memory])

    def _put(self, kept: _Kept, size: int, result: torch.Tensor) -> None:
        if tuple(result.shape) != kept.size:
            raise ValueError("its float64 result has another shape")
        memory = torch.zeros(size, dtype=torch.float64, device=result.device)
        kept.of(memory).copy_(result)
        self._memory[kept.memory] = memory

    def value(self, kept: _Kept) -> torch.Tensor | None:
        """The value of a result now, or None."""
        memory = self._memory.get(kept.memory)
        return None if memory is None else kept.of(memory)


_DIFFERENCES = ("sub", "sub_", "rsub")
# Magnitudes that the results of finite numbers never are.
_NEVER_EXACT: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("exp", "exp2", "_softmax", "erfc", "softplus"), (0.0,)),
    **dict.fromkeys(("tanh", "erf"), (1.0,)),
    "sigmoid": (0.0, 1.0),
}


def _impossible(call: _KeptCall) -> list[float]:
    """The values of an operation's result that it cannot have of finite numbers."""
    values = _NEVER_EXACT.get(call.base.removesuffix("_"), ())
    if not values or not all(bool(each.isfinite().all()) for each in _values(call)):
        return []
    own = call.results[0].value
    return [value for value in values if bool((own.abs() == value).any())]


def _nudge(values: torch.Tensor, impossible: Sequence[float]) -> None:
    info = torch.finfo(torch.float64)
    if 0.0 in impossible:
        values[values == 0] = info.smallest_normal
    if 1.0 in impossible:
        values[values.abs() == 1] *= 1 - info.eps / 2


def _move(values: torch.Tensor, share: float, least: float) -> None:
    """Moves each value by up to a share of it, and by up to twice the least."""
    places = torch.arange(values.numel(), dtype=torch.float64, device=values.device)
    shifts = places.mul_(12.9898).add_(1).sin_().view_as(values)  # looks random
    values.mul_(1 + share * shifts).add_(shifts.mul_(math.copysign(2 * least, share)))


@dataclass(frozen=True)
class Lost:
    """The outcome of computing an undefined result in float64.

    Attributes:
        first: The operation from which on it was in float64.
        value: The result then; where `is_beyond`, with the nudged results.
        is_beyond: Whether float64 loses it, too: by an operation that of finite numbers
            is never exactly 0 or 1, as its result was.
        is_whole: Whether it depends on nothing that was not in float64 but what was
            there before the step: weights and the batch.
        as_they_were: The names of operations between that have no float64.
        row: The operation whose rounding lost the value; None where `value` is not
            finite either.
        is_steady: Whether it is not finite either where what the operations read is
            moved by far more than rounding.
        own: A value that this operation returned, as it was.
        true: The same value in float64, of the same inputs.
        least: The smallest normal number of its dtype; smaller ones may become 0.
        dtype: Its dtype.
    """

    first: Row
    value: float
    is_whole: bool = False
    is_beyond: bool = False
    as_they_were: Sequence[str] = ()
    row: Row | None = None
    is_steady: bool = False
    own: float = math.nan
    true: float = math.nan
    least: float = 0.0
    dtype: str = ""

    @property
    def cause(self) -> str:
        """UNDERFLOW or ROUNDING."""
        if self.is_beyond:
            return UNDERFLOW if self.own == 0 else ROUNDING
        return UNDERFLOW if self.own == 0 and abs(self.true) < self.least else ROUNDING


def lost_value(tape: Tape, rows: Sequence[Row]) -> Lost | None:
    """Finds which operation's rounding made the last of some operations undefined.

    Args:
        tape: Has kept them in a replay.
        rows: The operations; see `rows_before()`.

    Returns:
        None if it is not known.
    """
    last = rows[-1]
    calls = [tape.calls[row.index] for row in rows if row.index in tape.calls]
    if not tape.is_same or not calls or calls[-1].row is not last:
        return None  # the replay was another one
    bad = [each for each in calls[-1].results if not each.value.isfinite().all()]
    if not bad:
        return None
    index = first_new(bad[0].value, _values(calls[-1]))
    assert index is not None

    def is_finite(first: int) -> bool:
        return math.isfinite(_result(calls[first:], bad[0], index)[0])

    value, failed = _result(calls, bad[0], index)
    if calls[-1].row in failed:
        return None
    first = next(call.row for call in calls if call.row not in failed)
    between = [row for row in failed if row.read_from]
    as_they_were = list(dict.fromkeys(row.name for row in between))
    known = {row.index for row in rows}
    is_whole = len(calls) == len(rows) and not as_they_were
    is_whole &= all(each.index in known for row in rows for each in row.read_from)
    lost = Lost(first, value, is_whole, as_they_were=as_they_were)
    if not math.isfinite(value):
        lost = _beyond_float64(calls, lost, bad[0], index)
        moved = (_result(calls, bad[0], index, (), n)[0] for n in (_NOISE, -_NOISE))
        is_steady = lost.row is None and not any(map(math.isfinite, moved))
        return replace(lost, is_steady=is_steady)
    low, high = 0, len(calls) - 1  # finite from `low` on, and not from `high` on
    if is_finite(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_finite(middle) else (low, middle)
    if _meets_given_numbers(calls[low], calls):
        return None
    return _lost_at(calls[low:], lost, bad[0], index)


def _result(
    calls: Sequence[_KeptCall],
    bad: _Kept,
    index: tuple[int, ...],
    nudged: Sequence[_KeptCall] = (),
    noise: float = 0.0,
) -> tuple[float, list[Row]]:
    """Runs operations in float64; the last one's result, and which have no float64."""
    run = _InFloat64(nudged, noise)
    for call in calls:
        run.run(call)
    value = None if calls[-1].row in run.failed else run.value(bad)
    return math.nan if value is None else float(value[index]), run.failed


def _meets_given_numbers(call: _KeptCall, calls: Sequence[_KeptCall]) -> bool:
    """True if a result equals numbers that were given, from which it is subtracted.

    Such as a prediction its target. A target that is no whole number was rounded
    itself: that the difference is not 0 in float64 does not say that it was lost.
    """
    own = {kept.memory for kept in call.results}
    made = {kept.memory for each in calls for kept in each.results}
    for each in calls:
        operands = [kept for _, kept in find((each.args, each.kwargs), (_Kept,))]
        results = [kept for kept in operands if kept.memory in own]
        given = [kept for kept in operands if kept.memory not in made and kept.is_float]
        if each.base not in _DIFFERENCES or not results or not given:
            continue
        number = given[0].of(given[0].value)
        is_same = results[0].of(results[0].value) == number
        if bool((is_same & (number != number.round())).any()):
            return True
    return False


def _beyond_float64(
    calls: Sequence[_KeptCall], lost: Lost, bad: _Kept, index: tuple[int, ...]
) -> Lost:
    """Finds an operation that loses the value in float64, too; see `Lost`."""
    suspects = [each for each in reversed(calls[:-1]) if _impossible(each)]
    # Nearly always there are some, such as masked attention, and it is none of them.
    if not suspects or not math.isfinite(_result(calls, bad, index, suspects)[0]):
        return lost
    for call in suspects:
        value, _ = _result(calls, bad, index, [call])
        if math.isfinite(value):
            dtype = dtype_name(call.results[0].value.dtype)
            found = replace(lost, value=value, row=call.row, is_beyond=True)
            return replace(found, own=_impossible(call)[0], dtype=dtype)
    return lost


def _values(call: _KeptCall) -> list[torch.Tensor]:
    return [each.value for _, each in find((call.args, call.kwargs), (_Kept,))]


def _lost_at(
    calls: Sequence[_KeptCall], lost: Lost, bad: _Kept, index: tuple[int, ...]
) -> Lost | None:
    """Compares what an operation returned with its results in float64.

    Args:
        calls: The operation and those after it.
        lost: The outcome so far.
        bad: The undefined result.
        index: The place in it.
    """
    call = calls[0]
    run = _InFloat64()
    run.run(call)
    for kept in call.results:
        true = run.value(kept)
        if true is None or not kept.value.numel():
            continue
        place = _decisive_place(calls, kept, true, bad, index)
        info = torch.finfo(kept.value.dtype)
        dtype = dtype_name(kept.value.dtype)
        return replace(
            lost,
            row=call.row,
            own=float(kept.value[place]),
            true=float(true[place]),
            least=float(info.smallest_normal),
            dtype=dtype,
        )
    return None


def _decisive_place(
    calls: Sequence[_KeptCall],
    kept: _Kept,
    true: torch.Tensor,
    bad: _Kept,
    index: tuple[int, ...],
) -> tuple[int, ...]:
    """Finds the element of a result whose rounding makes a later one undefined.

    With the elements up to it as they are in float64 the later result is finite, and
    without it they do not suffice. The element at the same place is tried first.
    """
    own = kept.value.double()
    changed = ((own != true) & true.isfinite()).flatten().nonzero().flatten()
    is_there = len(index) == own.dim() and all(
        i < n for i, n in zip(index, own.shape, strict=True)
    )
    if is_there:
        strides = torch.empty(own.shape, device="meta").stride()
        is_it = changed == sum(i * n for i, n in zip(index, strides, strict=True))
        changed = torch.cat([changed[is_it], changed[~is_it]])

    def is_finite(count: int) -> bool:
        """True if the first of the changed elements suffice."""
        run, mixed = _InFloat64(), own.flatten().clone()
        mixed[changed[:count]] = true.flatten()[changed[:count]]
        run.run(calls[0])
        value = run.value(kept)
        if value is None:
            return False
        value.copy_(mixed.view_as(own))
        for call in calls[1:]:
            run.run(call)
        later = None if calls[-1].row in run.failed else run.value(bad)
        return later is not None and math.isfinite(float(later[index]))

    low, high = 0, len(changed)
    if not high or not is_finite(high):
        return _most_changed(own, true)
    if is_there and is_finite(1):
        high = 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_finite(middle) else (middle, high)
    return _index_at(int(changed[high - 1]), own)


def _most_changed(own: torch.Tensor, true: torch.Tensor) -> tuple[int, ...]:
    """Where a result was changed most by its rounding: what became 0 comes first."""
    error = (own - true).abs() / true.abs()
    error = torch.where((own == true) | ~error.isfinite(), 0.0, error)
    return _index_at(int(error.flatten().argmax()), own)


def _index_at(place: int, of: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(place), of.shape))


# In words.


def explain_lost(lost: Lost, found: Explanation) -> None:
    """Adds to an explanation what a computation in float64 has shown.

    Args:
        lost: What it has come to.
        found: The explanation of the undefined result.
    """
    on = f"computed in float64 from {_place(lost.first)} on"
    if lost.as_they_were:
        on += f", but for {', '.join(lost.as_they_were)}"
    if lost.row is None:
        is_sure = "; a wider dtype would not help" * lost.is_whole
        found.evidence[1:2] = [f"{on}, it is {lost.value:g} as well{is_sure}"]
        return
    found.cause = lost.cause
    if lost.is_beyond:
        found.lost_by = op_at(lost.row.name, lost.row.frames)
        verb = "underflowed" if lost.cause == UNDERFLOW else "was rounded"
        found.evidence[1:2] = [
            f"{_place(lost.row)} {verb} to {lost.own:g}, in float64 as well: of finite "
            "numbers it is never that",
            f"with the float64 number next to {lost.own:g} instead, it is finite",
        ]
        return
    found.lost_by = op_at(lost.row.name, lost.row.frames)
    found.evidence[1:2] = [
        f"{_place(lost.row)} {_change(lost)}",
        f"{on}, it is finite ({lost.value:.4g}); with that one result in {lost.dtype}, "
        "it is not",
    ]
    if found.op is not None:
        found.op.true_value = lost.value


def _place(row: Row) -> str:
    return f"{row.name}{place_text(row.frames)}"


def _change(lost: Lost) -> str:
    if lost.cause == UNDERFLOW:
        least = f"{lost.dtype}'s smallest normal number is {lost.least:.2g}"
        return f"underflowed: {lost.true:.3g} became 0 ({least})"
    return "was rounded: {} became {}".format(*_told_apart(lost.true, lost.own))


def _told_apart(one: float, other: float) -> tuple[str, str]:
    """Two numbers with as many digits as tell them apart."""
    for digits in range(3, 17):
        texts = f"{one:.{digits}g}", f"{other:.{digits}g}"
        if texts[0] != texts[1]:
            return texts
    return f"{one:.17g}", f"{other:.17g}"
