"""The growth of results up to an overflow: in a recurrence, by depth, or at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .bounds import EXPLODING, GROWING, LEAP, RISING
from .op_call import OpCall
from .users_lines import Site

_FEWEST = 6  # calls; fewer tell no factor
# Of a call: less is no growth of a recurrence; those of benchmarks/answers are by 1.4
# and more. Too low, a large sum of many calls is taken for one.
_LEAST_FACTOR = 1.01
_MOST_CALLS = 4096  # each look at an even part takes time by their square
# Operations from the one that overflowed to those which made large numbers; chosen.
_MOST_ON_WAY = 512
_FEWEST_RISING = 3  # calls of a line; fewer may be a sum and a product of it; chosen
# How far results may be from a constant factor: by 4, or by so much of all growth.
_SPREAD, _PART = math.log(4), 0.05


@dataclass(frozen=True)
class CallGrowth:
    """Results that grow by a factor with each call, up to an overflow.

    Attributes:
        factor: By how much the largest magnitude grows with each call.
        total: By how much it has grown in all.
        num_calls: How many calls it grew over, before the one that overflowed.
        is_backward: True of the derivatives of calls.
        modules: The names of the modules whose operations lie between such calls, each
            once.
    """

    factor: float
    total: float
    num_calls: int
    is_backward: bool
    modules: tuple[str, ...]

    @property
    def explodes(self) -> bool:
        """True if it is what the overflow of a gradient comes from."""
        return self.is_backward and EXPLODING.is_passed(self.total, 1.0)

    @property
    def text(self) -> str:
        """The growth in words."""
        factor = f"grew by a factor of {self.factor:.3g} a call"
        num = f"{self.num_calls} calls"
        if self.is_backward:
            return f"the largest gradient {factor} back through {num} at this line"
        return f"the largest result {factor} over the {num} before at this line"


def growth_of(op: OpCall, ops: Sequence[OpCall]) -> CallGrowth | None:
    """Finds how results grew up to an operation that overflowed.

    Args:
        op: The operation.
        ops: All operations of the same replay, in order.

    Returns:
        The growth over the calls at the same line; None where there is none by an
        almost constant factor.
    """
    calls = _calls_like(op, ops)
    before = calls[: calls.index(op)]
    sizes = [each.abs_max or 0.0 for each in before]
    logs = [math.log(s) if 0 < s < math.inf else None for s in sizes]
    starts = range(max(0, len(logs) - _MOST_CALLS), len(logs))
    first = next((i for i in starts if _is_even(logs[i:])), len(logs))
    num = len(logs) - 1 - first
    if num < _FEWEST:
        return None
    total = sizes[-1] / sizes[first]
    factor = total ** (1 / num)
    if factor < _LEAST_FACTOR or not GROWING.is_passed(total, 1.0):
        return None
    between = ops[before[first].index : calls[-1].index + 1]
    return CallGrowth(
        *(factor, total, len(before) - first, op.in_backward),
        modules=tuple(dict.fromkeys(each.owner for each in between)),
    )


def leap_before(op: OpCall) -> OpCall | None:
    """Finds the operation that made the large numbers which another one overflowed of.

    Args:
        op: The one that overflowed.

    Returns:
        The last one before it whose result is far larger than all that it was given;
        None where the large numbers are of a batch or a weight, or of more operations.
    """
    for made, least in _way_back(op):
        if made.is_leap:
            is_it = _explains(op, least, made.most_read) and not _is_again(made, op)
            return made if is_it else None
    return None


def rise_before(op: OpCall) -> list[OpCall]:
    """Finds the calls of a line that made what another operation overflowed of.

    As those of layers each of which multiplies what the one before has made: none of
    them alone, and by no constant factor.

    Args:
        op: The one that overflowed.

    Returns:
        The last calls, in order, each with a result more than twice as large as the one
        before; those of the line that has most. Empty where they are few, or in
        backward.
    """
    lines = dict[tuple[str, Site], list[tuple[OpCall, float]]]()
    for made, least in () if op.in_backward else _way_back(op):
        if made.sites:
            lines.setdefault((made.name, made.sites[0]), []).append((made, least))
    found = list[OpCall]()
    for calls in lines.values():
        (last, least), *others = calls
        rise = [last]
        for each, _ in others:
            if not RISING.is_passed(rise[0].abs_max or 0.0, each.abs_max or 0.0):
                break
            rise.insert(0, each)
        is_it = _explains(op, least, rise[0].abs_max or 0.0)
        if is_it and len(rise) >= max(_FEWEST_RISING, len(found) + 1):
            found = rise
    return found


def _way_back(op: OpCall) -> Iterator[tuple[OpCall, float]]:
    """Yields the maker of the largest number that one has read, then the maker's, too.

    Each with the least of these numbers from there on. It ends where that is of a batch
    or a weight.
    """
    least = op.most_read
    for _ in range(_MOST_ON_WAY):
        made = max(op.read_from, key=lambda each: each.abs_max or 0.0, default=None)
        if made is None or made.abs_max is None or made.abs_max < op.most_read:
            return
        least = min(least, made.abs_max)
        yield made, least
        op = made


def _explains(op: OpCall, least: float, usual: float) -> bool:
    """True if an operation overflowed of large numbers that were made of usual ones.

    Args:
        op: The operation.
        least: The least of these numbers from where they were made on.
        usual: What they were made of.
    """
    is_made = LEAP.is_passed(least, usual) and not LEAP.is_passed(usual, 1.0)
    return is_made and least * least >= op.most_read


def _calls_like(op: OpCall, ops: Sequence[OpCall]) -> list[OpCall]:
    """The calls of the same operation at the same line, in order, with the own one.

    In backward, those of the derivatives of one line's operation: of each node of
    autograd's the one at the same place, such as its gradient of a weight.
    """
    line = _line_of(op)
    if line is None:
        return [op]
    alike = [
        each
        for each in ops
        if each.name == op.name and each.in_backward == op.in_backward
        if not op.in_backward or each.node == op.node
        if _line_of(each) == line
    ]
    if not op.in_backward:
        return alike
    of_node: dict[tuple[int, int], list[OpCall]] = {}
    for each in alike:
        of_node.setdefault((each.thread, each.node_sequence), []).append(each)
    place = of_node[op.thread, op.node_sequence].index(op)
    return [found[place] for found in of_node.values() if len(found) > place]


def _is_again(one: OpCall, other: OpCall) -> bool:
    """True of the same operation at the same line."""
    return one.named.name == other.named.name and _line_of(one) == _line_of(other)


def _line_of(op: OpCall) -> tuple[object, int] | None:
    named = op.forward
    return named.sites[0][:2] if named is not None and named.sites else None


def _is_even(logs: Sequence[float | None]) -> bool:
    """True if numbers lie near the line from the first to the last one."""
    if len(logs) < 2 or logs[0] is None or logs[-1] is None:
        return False
    slope = (logs[-1] - logs[0]) / (len(logs) - 1)
    most = max(_SPREAD, _PART * abs(logs[-1] - logs[0]))
    return all(
        each is not None and abs(each - (logs[0] + slope * i)) <= most
        for i, each in enumerate(logs)
    )
