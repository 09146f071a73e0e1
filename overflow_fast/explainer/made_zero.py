"""The makers of a 0, or a number below 0, that an operation is not defined for.

It is a walk back over the operations of the replay's table. It begins with the number
that the last of them was given where its result is not finite:

1. Who has written the numbers is found by their places in memory (`writers_of`).
2. What these operations have read for them is known of those that compute each element
   by itself. Any other is run again in float64, on numbers a little off: what the
   gradient of its result reaches is what it has read (`read_for`).
3. An operation that has made zeros of other numbers ends the walk, or a difference that
   has made a number below 0, and a text says how (`_Walk._made`). Else all that it has
   read is 0, or one part of it is below 0 as its result is, and the walk goes on there;
   up to a weight or an input, which is named.

There is a text only where it holds for all of the numbers. Where a part of the way is
not known, as where memory is no longer held, there is none.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..base.torch_ops import has, is_sum, op_of
from ..guard.report.gist import applied_text, spoken_name, sum_text, told_number
from .budget import Budget
from .leaves import Leaf
from .memory import TapedTensor
from .op_call import OpCall
from .op_table import OpTable
from .read_numbers import Numbers, chooses, index_text, is_each, read_for, writers_of
from .root_op import failed_place
from .trace_back import memory_before
from .users_lines import operands_at, place_text

# Chosen: with less, a maker that is far away is not found; more takes longer.
_MOST_OPS = 48
_MOST_TEXTS = 2  # of several makers; more are no answer
_BELOW_ROUNDING = 4  # times the precision of the operands of a difference
_NUMBERS = (int, float)
_NEAR = 1e-2  # of a number that an operation has hardly changed
# A number of which others near 0 are made, as its square: with less, one that made them
# itself is passed over, and with more its maker is named with a number that is small.
_SMALL = 1e-3


@dataclass(frozen=True, eq=False)
class Maker:
    """The maker of a number, or of some of the zeros that it is made of.

    Attributes:
        op: The operation; None for what was there before the step.
        made: What it has made.
        text: How, as a clause.
        operands: The two numbers, made in the step, of which it has left less than
            their rounding; or none.
        is_start: Whether the code has written these zeros, as what others are added to.
    """

    op: OpCall | None
    made: Numbers
    text: str
    operands: tuple[float, ...] = ()
    is_start: bool = False


def makers_of(op: OpCall, table: OpTable, budget: Budget) -> list[Maker]:
    """Finds what has made the number for which an operation is not defined.

    Args:
        op: The operation.
        table: The table, which holds it and what it depends on.
        budget: How long the walk may take.
    """
    number = _failed(op)
    return [] if number is None else _Walk(table, op, budget).makers(number, op)


def _failed(op: OpCall) -> Numbers | None:
    """The number of 0 or less, or near it, that it was given where it failed."""
    failed = failed_place(op)
    if failed is None:
        return None
    own, index = failed
    at = own.offset + sum(i * n for i, n in zip(index, own.stride, strict=True))
    given = read_for(op, Numbers(own, torch.tensor([at], device=own.device)))
    if has(op.base, "divides"):
        divisor = op.given.get(id(op.args[-1]))
        given = [each for each in given or () if each.tensor is divisor]
    if not given or len(given[0].at) > 1:
        return None
    return given[0] if _is_small(op) or bool(given[0].values <= 0) else None


def _is_small(op: OpCall) -> bool:
    """True if an operation has overflowed by a divisor near 0."""
    return op.details is not None and op.details.divisor is not None


class _Walk:
    """A walk back from numbers to what has made them; see above.

    Args:
        table: The table of operations.
        failed: The operation that is not defined for them.
        budget: How long it may take.
    """

    def __init__(self, table: OpTable, failed: OpCall, budget: Budget) -> None:
        self._table, self._budget, self._left = table, budget, _MOST_OPS
        self._known_line = place_text(failed.named.sites)
        self._is_small = _is_small(failed)

    def makers(self, numbers: Numbers, reader: OpCall) -> list[Maker]:
        """Finds what has made all of some numbers; nothing if it is not known.

        Args:
            numbers: The numbers.
            reader: The operation that has read them.
        """
        return _together(
            [
                self._given(part) if op is None else self._made(op, part)
                for op, part in writers_of(numbers, reader)
            ]
        )

    def _given(self, numbers: Numbers) -> list[Maker]:
        """Names the weight or the input that holds one number, or those below 0."""
        name = self._name_of(numbers) if numbers.is_one else ""
        if name:
            return [Maker(None, numbers, f"{name} is {numbers.spoken}")]
        leaf, least = self._leaf_of(numbers), float(numbers.values.min())
        if leaf is None or least >= 0:
            return []
        text = f"`{leaf.name}` has numbers below 0 there, down to {told_number(least)}"
        return [Maker(None, numbers, text)]

    def _name_of(self, numbers: Numbers) -> str:
        """The weight or the input that numbers are of, with their index, or ""."""
        leaf = self._leaf_of(numbers)
        if leaf is None or leaf.tensor is None:
            return ""
        own = leaf.tensor
        place = own.shape, own.stride(), int(own.storage_offset())
        index = index_text(numbers.within(*place))
        return "" if index is None else f"`{leaf.name}{index}`"

    def _leaf_of(self, numbers: Numbers) -> Leaf | None:
        """The weight or the input that numbers are of, or None."""
        leaf = self._table.leaf_of(numbers.tensor.value)
        if numbers.tensor.contents.is_made or leaf is None or leaf.tensor is None:
            return None
        return leaf if leaf.tensor.dtype == numbers.tensor.dtype else None

    def _made(self, op: OpCall, made: Numbers) -> list[Maker]:
        """Finds what has made the numbers that an operation has written."""
        if has(op.base, "draws"):
            return [Maker(op, made, f"{self._named(op)} drew {made.spoken}")]
        if op.is_constant and op.read_from:
            read = [op.read_from[i] for i in made.mask.flatten().nonzero().flatten()]
            return _together([self._item(each) for each in read])
        given = self._read(op, made)
        if given is None:
            return []
        found = self._by(op, made, given)
        is_of_torch = op.in_backward and not op.custom  # and no line has it
        return [] if is_of_torch and any(each.op is op for each in found) else found

    def _item(self, op: OpCall) -> list[Maker]:
        """Finds what has made a number that was read into Python."""
        if not op.is_held:
            return []
        (given,) = op.given.values()
        at = torch.tensor([given.offset], device=given.device)
        return self.makers(Numbers(given, at), op)

    def _read(self, op: OpCall, made: Numbers) -> list[Numbers] | None:
        """The numbers that an operation has read, as long as the walk may go on."""
        self._left -= 1
        may_go_on = self._left >= 0 and self._budget.has_time
        return read_for(op, made) if may_go_on else None

    def _by(self, op: OpCall, made: Numbers, given: Sequence[Numbers]) -> list[Maker]:
        """Ends the walk with an operation, or goes on to what it was given."""
        if not given or (chooses(op) and not bool(given[0].tensor.value.any())):
            return self._written(op, made)
        cancelled = self._cancelled(op, made, given)
        if cancelled is not None:
            return [cancelled]
        if not made.is_zero:
            is_small = self._is_small and len(made.at) == 1
            way = self._near_zero if is_small else self._below_zero
            return way(op, made, given)
        if has(op.base, "bilinear") and is_each(op) and len(given) == 2:
            return self._product(op, made, given)
        if op.base in ("prod", "cumprod") and not bool(given[0].values.all()):
            given = [given[0].of(given[0].values == 0)]
        zeros = [each for each in given if each.is_zero]
        if not zeros:
            return self._of_others(op, made, given)
        if len(zeros) < len(given) or has(op.base, "product"):
            return next(filter(None, (self.makers(each, op) for each in zeros)), [])
        return _together([self.makers(each, op) for each in zeros])

    def _near_zero(
        self, op: OpCall, made: Numbers, given: Sequence[Numbers]
    ) -> list[Maker]:
        """Goes on to the least of what it was given, or ends with what is not small."""
        if has(op.base, "softmax"):
            read, own = given[0].values, given[0].tensor.value[made.mask].double()
            below = f"{told_number(float(read.max() - own))} below the largest"
            text = f"{self._named(op)} made {made.spoken} of a score that is {below}"
            return [Maker(op, made, f"{text} of {len(read)}")]
        if any(len(each.at) > 1 for each in given):
            return []
        least = min(given, key=lambda each: float(each.values.abs()))
        if abs(least.values) < _SMALL or _is_near(least.values, made.values):
            return self.makers(least, op)
        text = self._applied(op, made, given)
        return [Maker(op, made, text)] if text else []

    def _applied(self, op: OpCall, made: Numbers, given: Sequence[Numbers]) -> str:
        """The numbers that one was made of, as "0.51 * 2 is 1.02"; "" if not known."""
        numbers = [float(e) for e in _arguments(op, made, given) if e is not None]
        if len(numbers) < len(op.args):
            return ""
        return f"{applied_text(op.name, numbers)} is {made.spoken}{self._line(op)}"

    def _products(self, number: Numbers, reader: OpCall) -> list[str]:
        """How one number was made by products, back to a function of one number."""
        (op, part), *others = writers_of(number, reader)
        if op is None or others or not is_each(op):
            return []
        is_product = op_of(spoken_name(op.name)).sign in ("*", "/", "**")
        given = self._read(op, part) if is_product or len(op.args) == 1 else None
        text = self._applied(op, part, given) if given else ""
        if not given or not text or any(len(each.at) > 1 for each in given):
            return []
        largest = max(given, key=lambda each: float(each.values.abs()))
        return [text, *(self._products(largest, op) if is_product else ())]

    def _below_zero(
        self, op: OpCall, made: Numbers, given: Sequence[Numbers]
    ) -> list[Maker]:
        """Goes on to the one part below 0, or ends with a difference of two numbers."""
        near = [each for each in given if _is_near(each.values, made.values)]
        if len(near) == 1 and (is_each(op) or len(given) == 1):
            return self.makers(near[0], op)
        lower = [e.of(e.values < 0) for e in given if bool((e.values < 0).any())]
        operands = self._operands(op, made, given) if len(made.at) == 1 else None
        if operands is not None:
            one, other = (float(each[0]) for each in operands)
            sign = "-" if has(op.base, "difference") else "+"
            if sign == "-" and other > 0:
                rest = told_number(float(made.values))
                held = [self._held_at(each, op) for each in given]
                of = f", of {' and '.join(held)}" if all(held) else ""
                if not of and len(given) == 1 and float(given[0].values) == other:
                    made_of = ", ".join(self._products(given[0], op))
                    of = f", where {made_of}" if made_of else ""
                text = f"{sum_text(one, other, sign)} is {rest}{self._line(op)}{of}"
                return [Maker(op, made, text)]
        is_factor = has(op.base, "bilinear") or has(op.base, "divides")
        is_passed = has(op.base, "linear") or (is_factor and is_each(op))
        is_passed |= _are_among(made.values, [each.values for each in given])
        is_passed |= operands is not None
        return self.makers(lower[0], op) if is_passed and len(lower) == 1 else []

    def _held_at(self, number: Numbers, reader: OpCall) -> str:
        """The weight or the input that a number was copied from, with its index."""
        op, part = writers_of(number, reader)[0]
        if op is None:
            return self._name_of(part)
        given = self._read(op, part) or []
        is_copied = len(given) == 1 and torch.equal(given[0].values, part.values)
        return self._held_at(given[0], op) if is_copied else ""

    def _product(
        self, op: OpCall, made: Numbers, given: Sequence[Numbers]
    ) -> list[Maker]:
        """Finds which factor is 0 where, and why."""
        one, other = sorted(given, key=lambda each: not _is_mask(each.tensor))
        is_own = one.values == 0
        if _is_mask(one.tensor):
            is_own &= other.values != 0
        sides = ((one, other, is_own), (other, one, ~is_own))
        return _together(
            [
                self._factor(op, *(each.of(which) for each in (made, zero, beside)))
                for zero, beside, which in sides
                if bool(which.any())
            ]
        )

    def _factor(
        self, op: OpCall, made: Numbers, zero: Numbers, beside: Numbers
    ) -> list[Maker]:
        """Finds what has made a factor 0, where it is more than a mask."""
        known = [] if _is_mask(zero.tensor) else self.makers(zero, op)
        if known or beside.is_zero:
            return known or self.makers(beside, op)
        text = f"{self._named(op)} multiplied {beside.spoken} by 0"
        return [Maker(op, made, text)]

    def _cancelled(
        self, op: OpCall, made: Numbers, given: Sequence[Numbers]
    ) -> Maker | None:
        """Finds operands that are equal, or that rounding alone keeps apart."""
        operands = self._operands(op, made, given)
        if operands is None:
            return None
        is_difference, (one, other) = has(op.base, "difference"), operands
        largest = torch.maximum(one.abs(), other.abs())
        least = _BELOW_ROUNDING * torch.finfo(made.tensor.dtype).eps * largest
        is_lost = bool((made.values.abs() <= least).all())
        if not (is_lost and bool(largest.any())):
            return None
        place = int(largest.argmax())
        first = float(one[place]), float(other[place])
        if made.is_zero and is_difference and torch.equal(one, other):
            text = self._equal_text(op, made, given)
        elif len(made.at) == 1:
            sign = "-" if is_difference else "+"
            rest = told_number(float(made.values))
            text = f"{sum_text(*first, sign)} cancels to {rest}{self._line(op)}"
        else:
            return None
        are_made = len(given) == 2 and all(e.tensor.contents.is_made for e in given)
        return Maker(op, made, text, first if are_made else ())

    def _operands(
        self, op: OpCall, made: Numbers, given: Sequence[Numbers]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The numbers on both sides of a sum or a difference; None for others."""
        is_sum = has(op.base, "difference") or op.base.rstrip("_") == "add"
        if not is_sum or not is_each(op) or op.kwargs.get("alpha", 1) != 1:
            return None
        numbers = _arguments(op, made, given)
        one, other = numbers if op.base != "rsub" else numbers[::-1]
        return None if one is None or other is None else (one, other)

    def _equal_text(self, op: OpCall, made: Numbers, given: Sequence[Numbers]) -> str:
        """Writes which operands are equal, and which inputs they are made of."""
        one, other = given[0], given[-1]
        is_same = op.args[0] is op.args[1] or (
            one.tensor.memory == other.tensor.memory
            and len(given) == 2
            and torch.equal(one.at, other.at)
        )
        names, at = operands_at(op.sites), index_text(made.mask)
        at = f" at {at}" if at else ""
        if names is not None and len({*names}) == 1:
            return f"`{names[0]}` is subtracted from itself{self._line(op)}"
        both = "its two operands" if names is None else "`{}` and `{}`".format(*names)
        inputs = [self._name_of(each) for each in given]
        if names is None and all(inputs) and len(inputs) == 2:
            both, at = "{} and {}".format(*inputs), ""
        is_of_inputs = len(given) == 2 and not is_same
        of = self._equal_inputs(one, other, op) if is_of_inputs else ""
        at = "" if of else at
        equal = "the same" if is_same else "equal"
        return f"{both} are {equal}{at}{self._line(op)}{of}"

    def _equal_inputs(self, one: Numbers, second: Numbers, reader: OpCall) -> str:
        """Names the samples of the batch that are equal as these numbers are, or ""."""
        row, other_row = _row_of(one, reader), _row_of(second, reader)
        if row is None or other_row is None:
            return ""
        (i, num), (j, other_num) = row, other_row
        lefts = self._inputs_of(one, reader, num)
        rights = self._inputs_of(second, reader, other_num)
        for (name, tensor), (its_name, other) in itertools.product(lefts, rights):
            is_other = tensor is not other or i != j
            is_alike = _is_same(tensor[i], other[j]) and tensor[i].numel() > 1
            is_usual = tensor is not other and _is_same(tensor, other)
            if is_other and is_alike and not is_usual:
                return f", as `{name}[{i}]` and `{its_name}[{j}]` are"
        return ""

    def _inputs_of(
        self, numbers: Numbers, reader: OpCall, num: int
    ) -> list[tuple[str, torch.Tensor]]:
        """The tensors of the batch, of so many rows, that numbers may be made of."""
        ops = [op for op, _ in writers_of(numbers, reader) if op is not None]
        read = {numbers.tensor.memory, *memory_before(ops)}
        batch = ((leaf.name, leaf.tensor) for leaf in self._table.batch)
        return [
            (name, tensor)
            for name, tensor in batch
            if tensor is not None and tensor.is_floating_point() and tensor.dim()
            if len(tensor) == num and self._table.number_of(tensor) in read
        ]

    def _of_others(
        self, op: OpCall, made: Numbers, given: Sequence[Numbers]
    ) -> list[Maker]:
        """Writes how an operation has made zeros of numbers none of which is 0."""
        if len(given) > 1:
            return []
        read, num = given[0], len(given[0].at)
        one = float(read.values[0])
        is_number = 0 in (each for each in op.args if isinstance(each, (int, float)))
        is_whole = any(not each.is_float for each in op.given.values())
        if has(op.base, "bilinear") and (is_number or is_whole):
            text = f"{self._named(op)} multiplied {read.spoken} by 0"
        elif num == len(made.at):
            what = (
                f"it 0, of {told_number(one)}" if num == 1 else f"all {num} numbers 0"
            )
            text = f"{self._named(op)} made {what}"
        elif has(op.base, "deviation") and read.is_one:
            text = f"{self._named(op)} is of {num} equal numbers, {told_number(one)}"
        elif len(made.at) == 1 and is_sum(op.base):
            text = f"{self._named(op)} of {num} numbers is 0, and not all of these are"
        else:
            return []
        return [Maker(op, made, text)]

    def _written(self, op: OpCall, made: Numbers) -> list[Maker]:
        """Writes how an operation has made zeros of no number that it was given."""
        it = "that 0" if len(made.at) == 1 else "zeros there"
        is_start = False
        is_plain = op.is_constant or has(op.base, "overwrites") or not op.given
        if has(op.base, "deviation"):
            text = f"{self._named(op)} is of one number"
        elif chooses(op):
            text = f"{self._named(op)} wrote {it}"
        elif op.is_constant and op.torch_call and not op.torch_call.is_in_place:
            text, is_start = f"the 0 is a number of Python{self._line(op)}", True
        elif is_plain or op.base.startswith(("zeros_", "new_", "full_")):
            text, is_start = f"the code{self._line(op)} wrote {it}", True
        else:
            return []  # of whole numbers, such as a count
        return [Maker(op, made, text, (), is_start)] if made.is_zero else []

    def _line(self, op: OpCall) -> str:
        """Where an operation was called, if not in the line that is known."""
        line = place_text(op.sites)
        return line if line != self._known_line else ""

    def _named(self, op: OpCall) -> str:
        return f"{spoken_name(op.name)}{self._line(op)}"


def _arguments(
    op: OpCall, made: Numbers, given: Sequence[Numbers]
) -> list[torch.Tensor | None]:
    """The numbers of each argument of an operation, None where these are not known."""
    by_tensor = {id(each.tensor): each.values for each in given}
    return [
        by_tensor.get(id(op.given.get(id(each))))
        if isinstance(each, torch.Tensor)
        else (torch.full_like(made.values, each) if type(each) in _NUMBERS else None)
        for each in op.args
    ]


def _together(parts: Sequence[list[Maker]]) -> list[Maker]:
    """The makers of several parts; none if it is not known of one of these."""
    makers = [each for part in parts for each in part]
    makers = [each for each in makers if not each.is_start] or makers
    are_few = len({each.text for each in makers}) <= _MOST_TEXTS
    return makers if all(parts) and are_few else []


def _is_near(values: torch.Tensor, number: torch.Tensor) -> bool:
    is_one = len(values) == len(number) == 1
    return is_one and bool(abs(values - number) <= _NEAR * abs(number))


def _are_among(some: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    return bool(torch.isin(some, torch.cat([each.flatten() for each in others])).all())


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    is_alike = (one.dtype, one.device) == (other.dtype, other.device)
    return is_alike and torch.equal(one, other)


def _is_mask(tensor: TapedTensor) -> bool:
    """True if a tensor holds ones, and zeros beside them alone."""
    values = tensor.value
    return bool(((values == 0) | (values == 1)).all() & values.any())


def _row_of(numbers: Numbers, reader: OpCall) -> tuple[int, int] | None:
    """The row of many that numbers lie in, as they were made or given, or None."""
    (_, part), *others = writers_of(numbers, reader)
    rows = [*{*part.mask.nonzero()[:, :1].flatten().tolist()}]
    return (rows[0], part.tensor.size[0]) if len(rows) == 1 and not others else None
