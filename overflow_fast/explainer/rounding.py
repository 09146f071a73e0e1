"""Finds the operation whose rounding made a later result undefined, such as log of 0.

The operations that an undefined result depends on are held in the replay's table. They
are run in float64, from one of them on: if the result is finite from one on and not
from the next on, the first of the two is where the value was lost.

First the nearest of them alone, while they are small, which takes less. Where the
result stays undefined, they are run with the numbers that they read, which were made
before, a little off. If it is another then (nan for inf, too), ever more are run, up to
all that are held. Else what rounding did before does not matter, unless it left nothing
but an error: a wider dtype would not help.
TimeoutError is raised once the budget has no time left.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..base.text import dtype_name
from ..base.torch_ops import has
from ..guard.report.causes import ROUNDING, UNDERFLOW
from ..guard.report.explanation import Explanation
from ..guard.report.gist import spoken_name, told_apart
from ..guard.report.op import TensorSummary
from ..guard.report.op_words import IN_FLOAT64, retell_float64
from .budget import Budget
from .float64 import Float64Run, impossible
from .halving import Halving
from .made_zero import Maker
from .memory import Contents, TapedTensor
from .op_call import OpCall
from .root_op import failed_place
from .tensor_kinds import Index, index_at
from .users_lines import op_at, place_text

# Operations that are run before the others: of all that lost a value in
# benchmarks/answers, none ran more than 6 operations before the one that failed.
_NEAREST = 12
_CHEAP = 2**18  # elements: operations on fewer, up to the first on more, come first
# What rounding makes of a number lies between these times it, and of 0 near it: chosen
# far wider than it does where nothing cancels.
_AS_ROUNDED = (0.9, 1.1)
_TIMES_MORE = 8  # of a loop, which puts thousands between, few runs take all; chosen

NO_HELP = "; a wider dtype would not help"


@dataclass(frozen=True)
class Lost:
    """The outcome of computing an undefined result in float64.

    Attributes:
        first: The operation from which on it was in float64.
        value: The result then; where `is_beyond`, with the nudged results.
        is_beyond: Whether float64 loses it, too: by an operation that of finite numbers
            is never exactly 0 or 1, as its result was.
        is_steady: Whether it stays so with other numbers than were read, as rounding
            could make them, or none were read that the step had made.
        as_they_were: The names of operations between that have no float64.
        op: The operation whose rounding lost the value; None where `value` is not
            finite either.
        own: A value that this operation returned, as it was.
        true: The same value in float64, of the same inputs.
        least: The smallest normal number of its dtype; smaller ones may become 0.
        dtype: Its dtype.
        tie: An operation that was given two equal numbers, one of them made of given
            ones alone: that float64 makes them differ does not say what was lost.
        run: All of the operations in float64.
    """

    first: OpCall
    value: float
    is_steady: bool = False
    is_beyond: bool = False
    as_they_were: Sequence[str] = ()
    op: OpCall | None = None
    own: float = math.nan
    true: float = math.nan
    least: float = 0.0
    dtype: str = ""
    tie: OpCall | None = None
    run: Float64Run = field(default_factory=Float64Run, repr=False)

    @property
    def is_told(self) -> bool:
        """True if more operations would tell nothing else."""
        return self.op is not None or self.tie is not None or self.is_steady

    @property
    def cause(self) -> str:
        """The name of UNDERFLOW or of ROUNDING."""
        if self.is_beyond:
            return UNDERFLOW.name if self.own == 0 else ROUNDING.name
        return (
            UNDERFLOW.name
            if self.own == 0 and abs(self.true) < self.least
            else ROUNDING.name
        )


class _Undefined:
    """One number of what the last of some operations returned, run in float64.

    Args:
        ops: The operations.
        budget: How long they may run.

    Attributes:
        ops: The same.
        index: The place of the number, which is not finite; None if all are.
        shape: The shape of what it is in.
    """

    def __init__(self, ops: Sequence[OpCall], budget: Budget) -> None:
        self.ops, self._budget = ops, budget
        self._bad: TapedTensor | None = None
        self.index: Index | None = None
        failed = failed_place(ops[-1])
        if failed is not None:
            self._bad, self.index = failed
        self.shape = None if failed is None else failed[0].size

    def run(self, first: int = 0, *how: Any) -> Float64Run:
        """Runs the operations from one on; see `Float64Run`."""
        if not self._budget.has_time:
            raise TimeoutError
        return Float64Run(*how).run(self.ops[first:])

    def run_alone(self, place: int) -> Float64Run:
        """Runs one operation alone."""
        return Float64Run().run(self.ops[place : place + 1])

    def of(self, run: Float64Run) -> float:
        """The number that a run has come to; nan where it has none."""
        assert self._bad is not None and self.index is not None
        has_failed = self.ops[-1] in run.failed
        value = None if has_failed else run.value(self._bad)
        return math.nan if value is None else float(value[self.index])

    def is_finite(self, *how: Any) -> bool:
        """True if it is finite in a run; see `run()`."""
        return math.isfinite(self.of(self.run(*how)))

    def is_moved(self, times: Sequence[float]) -> bool:
        """True if it is another with other numbers; see `Float64Run`."""
        assert self._bad is not None and self.index is not None
        run, own = self.run(0, (), times), float(self._bad.value[self.index])
        is_known = self.ops[-1] not in run.failed
        return is_known and str(self.of(run)) != str(own)  # nan is nan


def nearest_first(ops: Sequence[OpCall]) -> Iterator[Sequence[OpCall]]:
    """Yields the last of some operations: those of few elements, ever more, then all.

    More are to be run where the nearest do not tell; see above.
    """
    num, numel, seen = 0, 0, set[Contents]()
    for op in reversed(ops[-_NEAREST:]):
        new = {each.contents for each in op.taped} - seen
        numel += sum(each.numel for each in new)
        if numel > _CHEAP:
            break
        num, seen = num + 1, seen | new
    num = max(num, 1)
    while num < len(ops):
        yield ops[-num:]
        num *= _TIMES_MORE
        if num * _TIMES_MORE >= len(ops):  # all take little more
            break
    yield ops


def _read_of(ops: Sequence[OpCall]) -> set[OpCall]:
    """The operations that have written what some operations read."""
    return {each for op in ops for each in op.read_from}


def lost_value(
    ops: Sequence[OpCall], budget: Budget, weights: Collection[int]
) -> Lost | None:
    """Finds which operation's rounding made the last of some operations undefined.

    Args:
        ops: The operations, as a table of operations holds them.
        budget: How long they may run.
        weights: The numbers of the memory of what is trained.

    Returns:
        None if it is not known.
    """
    held = [each for each in ops if each.is_held]
    if not held or held[-1] is not ops[-1]:
        return None
    ops, undefined = held, _Undefined(held, budget)
    if undefined.index is None:
        return None
    run = undefined.run()
    value, failed = undefined.of(run), run.failed
    if ops[-1] in failed:
        return None
    first = next(op for op in ops if op not in failed)
    as_they_were = list(dict.fromkeys(op.name for op in failed if op.read_from))
    lost = Lost(first, value, as_they_were=as_they_were, run=run)
    if not math.isfinite(value):
        is_whole = _read_of(ops) <= {*ops} and not as_they_were
        lost = replace(lost, is_steady=is_whole or not undefined.is_moved(_AS_ROUNDED))
        return _beyond_float64(undefined, lost)
    if undefined.is_finite(len(ops) - 1):
        return None
    search = Halving(len(ops) - 1)  # for the last one from which on it is finite
    for half in search:
        search.note(not undefined.is_finite(half.stop))
    found = _lost_at(undefined, search.place, lost)
    if found is None or found.cause != ROUNDING.name:
        return found
    ties = (op for op in ops[search.place :] if _is_tie(undefined, op, weights))
    tie = next(ties, None)
    return found if tie is None else replace(lost, tie=tie)


def _is_tie(undefined: _Undefined, op: OpCall, weights: Collection[int]) -> bool:
    """True if two numbers that meet are equal, one of them made of given ones alone.

    Such as a prediction and its target. A target that is no whole number was rounded
    itself: that the two differ in float64 does not say that a value was lost. They are
    compared where the later result is, if there is such a place.
    """
    operands = [each for each in op.given.values() if each.is_float]
    is_meeting = has(op.base, "difference") or has(op.base, "kink")
    if not is_meeting or len(operands) != 2:
        return False
    one, other = (each.value for each in operands)
    is_same = (one == other) & (one != one.round())
    if is_same.shape == undefined.shape and undefined.index is not None:
        is_same = is_same[undefined.index]
    return bool(is_same.any()) and any(_is_given(e, op, weights) for e in operands)


def _is_given(tensor: TapedTensor, op: OpCall, weights: Collection[int]) -> bool:
    """True if what an operation reads is seen to be made of nothing that is trained."""
    waiting, seen = [(tensor, op)], set[OpCall]()
    while waiting:
        tensor, op = waiting.pop()
        before = [e for e in op.read_from if e.num_holders]  # the others are let go of
        makers = [e for e in before if tensor.memory in {r.memory for r in e.results}]
        if tensor.memory in weights or (tensor.contents.is_made and not makers):
            return False
        new = [each for each in makers if each not in seen]
        seen.update(new)
        waiting += [(given, each) for each in new for given in each.given.values()]
    return True


def _beyond_float64(undefined: _Undefined, lost: Lost) -> Lost:
    """Finds an operation that loses the value in float64, too; see `Lost`."""
    suspects = [each for each in reversed(undefined.ops[:-1]) if impossible(each)]
    # Nearly always there are some, such as masked attention, and it is none of them.
    if not suspects or not undefined.is_finite(0, suspects):
        return lost
    search = Halving(len(suspects))  # for the last one without which it is not finite
    for half in search:
        search.note(undefined.is_finite(0, suspects[: half.stop]))
    op = suspects[search.place]
    value = undefined.of(undefined.run(0, [op]))
    if not math.isfinite(value):
        return lost
    dtype = dtype_name(op.results[0].dtype)
    found = replace(lost, value=value, op=op, is_beyond=True)
    return replace(found, own=impossible(op)[0], dtype=dtype)


def _lost_at(undefined: _Undefined, place: int, lost: Lost) -> Lost | None:
    """Compares what an operation returned with its results in float64.

    Args:
        undefined: The undefined result.
        place: The operation's place among those before it.
        lost: The outcome so far.
    """
    op = undefined.ops[place]
    run = undefined.run_alone(place)
    for own in op.results:
        true = run.value(own)
        if true is None or not true.numel():
            continue
        values = own.value.double()
        index = _decisive_place(undefined, place, own, values, true)
        if index is None:
            continue
        return replace(
            lost,
            op=op,
            own=float(values[index]),
            true=float(true[index]),
            least=float(torch.finfo(own.dtype).smallest_normal),
            dtype=dtype_name(own.dtype),
        )
    return None


def _decisive_place(
    undefined: _Undefined,
    place: int,
    result: TapedTensor,
    own: torch.Tensor,
    true: torch.Tensor,
) -> Index | None:
    """Finds the element of a result whose rounding makes a later one undefined.

    With the elements up to it as they are in float64 the later result is finite, and
    without it they do not suffice. The element at the same place is tried first.

    Args:
        undefined: The later result.
        place: The place of the result's operation among those before it.
        result: The result.
        own: Its values.
        true: Those in float64.

    Returns:
        None if all of them do not suffice.
    """
    index = undefined.index
    assert index is not None
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
        run, mixed = undefined.run_alone(place), own.flatten().clone()
        mixed[changed[:count]] = true.flatten()[changed[:count]]
        value = run.value(result)
        if value is None:
            return False
        value.copy_(mixed.view_as(own))
        run.run(undefined.ops[place + 1 :])
        return math.isfinite(undefined.of(run))

    if not len(changed) or not is_finite(len(changed)):
        return None
    search = Halving(1 if is_there and is_finite(1) else len(changed))
    for half in search:
        search.note(is_finite(half.stop))
    return index_at(int(changed[search.place]), own.shape)


# In words.


def explain_lost(lost: Lost, makers: Sequence[Maker], found: Explanation) -> None:
    """Adds to an explanation what a computation in float64 has shown.

    Args:
        lost: What it has come to.
        makers: What has made the number that is undefined.
        found: The explanation of the undefined result.
    """
    cancelled = None
    if lost.op is not None:
        found.cause, found.lost_by = lost.cause, op_at(lost.op.name, lost.op.sites)
        found.lost_by.value = lost.own
        found.lost_by.outputs = [
            TensorSummary(
                tuple(e.size), dtype=dtype_name(e.dtype), numel=e.size.numel()
            )
            for e in lost.op.results
        ]
        if not lost.is_beyond:
            found.lost_by.true_value = lost.true
            if found.op is not None:
                found.op.true_value = lost.value
        # The first line names this operation, and leaves out a reason.
        found.evidence += [found.reason] * bool(found.reason)
        found.reason = _beside(lost.op, makers)
        cancelled = next((e for e in makers if _has_cancelled(e, lost)), None)
    if cancelled is not None and cancelled.op is not None:
        found.lost_by = op_at(cancelled.op.name, cancelled.op.sites)
        found.lost_by.operands = [*cancelled.operands]
        found.lost_by.value = float(cancelled.made.values)
        true = lost.run.value(cancelled.made.tensor)
        assert true is not None and lost.op is not None
        found.lost_by.true_value = float(true[cancelled.made.mask])
        by = f"{spoken_name(lost.op.name)}{place_text(lost.op.sites)}"
        found.reason = found.reason or f"{by} rounds it away in {lost.dtype}"
    retell_float64(found.evidence, _text_of(lost, cancelled))


def _beside(op: OpCall, makers: Sequence[Maker]) -> str:
    """Writes how zeros were made beside those that an operation lost, or ""."""
    own = sum(len(each.made.at) for each in makers if each.op is op)
    others = [each for each in makers if each.op is not op]
    if not (own and others):
        return ""
    num = own + sum(len(each.made.at) for each in others)
    return f"{own} of {num} numbers are 0 so, and {others[0].text}"


def _has_cancelled(maker: Maker, lost: Lost) -> bool:
    """True for a difference that has left of its operands only what rounding made."""
    if not maker.operands or maker.op is None or len(maker.made.at) != 1:
        return False
    is_behind = lost.op is not None and lost.op.index < maker.op.index
    is_known = lost.run.value(maker.made.tensor) is not None
    return is_behind and is_known and lost.cause == ROUNDING.name and not lost.is_beyond


def _text_of(lost: Lost, cancelled: Maker | None) -> str:
    if lost.op is not None and lost.is_beyond:
        return (
            f"{IN_FLOAT64}, {lost.op.text} gives {lost.own:g} as well, which of finite "
            f"numbers it never is; with the float64 number next to {lost.own:g} in its "
            "place, the result is finite"
        )
    on = f"{IN_FLOAT64} from {lost.first.name} on"
    if lost.as_they_were:
        on += f", but for {', '.join(lost.as_they_were)}"
    if lost.tie is not None:
        return (
            f"{on}, it is finite ({lost.value:.4g}), which shows no loss: two operands "
            f"of {lost.tie.text} are equal, one of them made of given numbers alone"
        )
    if lost.op is None:
        return f"{on}, it is {lost.value:g} as well{NO_HELP * lost.is_steady}"
    one = "that one result"
    if cancelled is not None:
        true, own = told_apart(lost.true, lost.own)
        one = f"the result of {lost.op.text}, {own} for {true},"
    least = f", whose smallest normal number is {lost.least:.2g},"
    is_small = lost.cause == UNDERFLOW.name
    return (
        f"{on}, it is finite ({lost.value:.4g}); with {one} in {lost.dtype}"
        f"{least * is_small} it is not"
    )
