"""The argument of an operation for which it is not defined, and where that is.

What a function of one number needs, which numbers a second argument must be above, and
which operations divide or weigh are columns of `base/torch_ops.py`. What
needs more than a number is a check here. A further one is a row of `_CHECKS`; they are
asked in order, and the first that names an argument answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..base.torch_ops import has, op_of
from ..torch_internals.replaying import schema_names
from .op_call import OpCall
from .tensor_kinds import Index


def outside_of_domain(op: OpCall, index: Index | None) -> str:
    """Names an argument that is outside of the operation's domain, and where.

    Args:
        op: The operation, which has run.
        index: Where a new non-finite value is in its result; None if that is not known.

    Returns:
        A clause; "" where all arguments are within the domain, or that is not known.
    """
    if "batch_norm" in op.base and "backward" not in op.base:
        return _negative_variance(op)
    if index is None or not op.args:
        return ""
    given = _Operands(op, index)
    return next(filter(None, (check(given) for check in _CHECKS)), "")


_EDGES = (0.0, 1.0, -1.0)  # of the domains that functions of a number have


def beyond_pole(name: str, number: float) -> float:
    """How far a number is beyond the end of a domain where a function is infinite.

    0 where it is finite there, such as a root: a clamp continues it. Nor is a pole
    beyond the domain that begins beside it.

    Args:
        name: The operation.
        number: Its argument, for which it is not defined.
    """
    is_inside = op_of(name).is_inside
    if any(is_inside(math.nextafter(number, way)) for way in (-math.inf, math.inf)):
        return 0.0
    for edge in _EDGES:
        inner = math.nextafter(edge, 2 * edge - number)
        if is_inside(inner) and not (is_inside(edge) or is_inside(number)):
            return abs(number - edge)
    return 0.0


def value_at(value: Any, index: Index) -> float | None:
    """The number that an elementwise operation takes from an argument at an index.

    None where the argument has no such place, as that of a product.
    """
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, torch.Tensor):
        return None
    if value.dim() > len(index) or value.is_complex():
        return None
    place = _own_place(value, index)
    is_there = all(i < n for i, n in zip(place, value.shape, strict=True))
    return float(value[place]) if is_there else None


def _own_place(value: torch.Tensor, index: Index) -> Index:
    """The place in an argument that is broadcast to a place of the result."""
    own = index[len(index) - value.dim() :]
    return tuple(0 if n == 1 else i for i, n in zip(own, value.shape, strict=True))


class _Operands:
    """An operation with what it was given for one place of its result.

    Attributes:
        op: The operation.
        index: The place.
        base: Its name, without what says that it is in place.
        row: Its row in the table of operations.
        arguments: Its positional arguments as they were, and None for a second one.
        numbers: The numbers of the first two at the place; None for what has none.
    """

    def __init__(self, op: OpCall, index: Index) -> None:
        self.op, self.index = op, index
        self.base, self.row = op.base.removesuffix("_"), op_of(op.base)
        self.arguments = [op.before(each) for each in op.args]
        self.arguments += [None] * (len(op.args) < 2)
        self.numbers = [value_at(each, index) for each in self.arguments[:2]]

    def shown(self, place: int, number: str = "") -> str:
        """A number of an argument with its place, where that has several."""
        value, own = self.arguments[place], self.numbers[place]
        text = number or f"{own:.3g}"
        if not isinstance(value, torch.Tensor) or value.numel() == 1:
            return text
        return f"{text} at {list(_own_place(value, self.index))}"

    def matrix(self) -> torch.Tensor | None:
        """The first argument, if it is a tensor that has dimensions."""
        first = self.arguments[0]
        return first if isinstance(first, torch.Tensor) and first.dim() else None


def _input(given: _Operands) -> str:
    """The number that a function of one number is not defined for."""
    value, is_inside = given.numbers[0], given.row.is_inside
    if value is None or not math.isfinite(value) or is_inside(value):
        return ""
    texts = (f"{value:.{n}g}" for n in range(3, 18))
    shown = next(each for each in texts if not is_inside(float(each)))
    return f"its input is {given.shown(0, shown)}"


def _power(given: _Operands) -> str:
    """The base and the exponent of a power that is no real number."""
    value, power = given.numbers
    if given.base != "pow" or value is None or power is None:
        return ""
    if not math.isfinite(power):
        return ""
    if (value < 0 and power != int(power)) or (value == 0 and power < 0):
        return f"its input is {given.shown(0)}, the exponent {power:g}"
    return ""


def _second_input(given: _Operands) -> str:
    """The second argument, where it must be above a number."""
    above, second = given.row.above, given.numbers[1]
    if above is None or second is None or second > above:
        return ""
    return f"its second input is {given.shown(1)}"


def _of_infinity(given: _Operands) -> str:
    """The numbers that are added, multiplied or divided, where one is infinite."""
    sign, (value, second) = given.row.sign, given.numbers
    is_plain = given.op.kwargs.get("alpha", 1) == 1
    if not sign or not is_plain or value is None or second is None:
        return ""
    if math.inf not in (abs(value), abs(second)):
        return ""
    at = f" at {list(given.index)}" if given.index else ""
    return f"it is {value:g} {sign} {second:g}{at}"


def _masked_scores(given: _Operands) -> str:
    """A row of a softmax that is -inf throughout: nothing is left to weigh."""
    scores, dim, place = given.matrix(), given.arguments[1], list(given.index)
    if scores is None or not has(given.base, "softmax"):
        return ""
    if not isinstance(dim, int) or len(place) != scores.dim():
        return ""
    dim %= scores.dim()
    row = scores.movedim(dim, -1)[(*place[:dim], *place[dim + 1 :])]
    if not bool((row == -math.inf).all()):
        return ""
    at = ", ".join(":" if i == dim else str(n) for i, n in enumerate(place))
    return f"all {row.numel()} scores at [{at}] are -inf"


def _direction(given: _Operands) -> str:
    """A row of a weight that has no direction: it is 0 throughout."""
    weight, args = given.matrix(), given.op.args
    if given.base != "_weight_norm_interface" or weight is None:
        return ""
    dim = args[2] if len(args) > 2 else 0
    if bool(weight.select(dim, given.index[dim]).any()):
        return ""
    at = ", ".join(str(n) if i == dim else ":" for i, n in enumerate(given.index))
    return f"all of its input at [{at}] is 0, whose norm it divides by"


def _divisor(given: _Operands) -> str:
    """A divisor of 0."""
    if not has(given.base, "divides") or given.numbers[1] != 0:
        return ""
    if isinstance(given.arguments[1], torch.Tensor):
        return f"the divisor is {given.shown(1, '0')}"
    return f"the divisor is the number {given.arguments[1]:g}"


def _frames(given: _Operands) -> str:
    """A sample whose labels no alignment has: there are too few frames."""
    if given.base != "_ctc_loss" or len(given.index) != 1:
        return ""
    _, targets, frames, lengths, *_ = given.op.args
    (sample,) = given.index
    num, before = int(lengths[sample]), sum(map(int, lengths[:sample]))
    own = targets[sample] if targets.dim() == 2 else targets[before:]
    num_repeated = int((own[1:num] == own[: num - 1]).sum()) if num > 1 else 0
    if int(frames[sample]) >= num + num_repeated:
        return ""
    more = f", {num_repeated} of them the same as the one before" * (num_repeated > 0)
    has = f"has {int(frames[sample])} frames for {num} labels{more}"
    return f"sample {sample} (from 0) {has}"


def _negative_variance(op: OpCall) -> str:
    """Names a running variance that a batch norm takes the root of below 0."""
    names = schema_names(op.func)
    given = {**dict(zip(names, op.args, strict=False)), **op.kwargs}
    variance, eps = given.get("running_var"), given.get("eps", given.get("epsilon", 0))
    if variance is None or given.get("training"):
        return ""
    places = (variance + eps <= 0).nonzero().flatten().tolist()
    if not places:
        return ""
    return f"running_var is {float(variance[places[0]]):.3g} at {places[:1]}"


_CHECKS: tuple[Callable[[_Operands], str], ...] = (
    *(_frames, _input, _power, _second_input, _of_infinity),
    *(_masked_scores, _direction, _divisor),
)
