"""The answer in a line: which operation, where, and why, from an explanation's fields.

A cause's row in `causes.py` has the sentence; here stand the fields that it may name:

    {name}     the cause's name, as a sentence begins
    {call}     the expression that failed, or its operation, and its place
    {numbers}  the numbers that it was given, such as "log(0) at train.py:49"
    {then}     the product by 0 that made nan of its inf
    {dtype}    the dtype of its result
    {size}     what float64 makes of it, and the dtype's maximum
    {lost}     the operation before it that has lost the value, and its place
    {change}   what that has made of which number, or is left of a difference
    {difference}  the numbers of the difference
    {also}     what else has made such numbers
    {outside}  which input is outside of the operation's domain
    {seen}     that a value arises in the forward and is met in backward
    {reason}   what the explanation says where no field tells
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ...base.text import capitalized, counted
from ...base.torch_ops import base_of, op_of
from .causes import ROUNDING, UNDEFINED, UNDERFLOW, Cause
from .findings import Findings
from .op import Op

BETWEEN = "between backward and the optimizer's step"
_LEFT_OUT = "the forward leaves it out, and its gradient is not finite"
_FINITE = "; the forward is finite all the same, its gradient is not"
_HALF = ("float16", "bfloat16")
_LONGEST_CALL = 40  # characters of an expression that a line names in code
_LONGEST_REASON = 150  # characters; a longer clause ends at its first colon


def gist_of(found: Findings) -> str:
    """Writes where the first bad value came from and why, as a clause.

    Args:
        found: The explanation, of a cause that is known.
    """
    cause, op = Cause.of(found.cause), found.op
    form = cause.gist
    is_lost = found.lost_by is not None
    if not is_lost and found.cause in (UNDERFLOW.name, ROUNDING.name):
        form = "{name}: {call}{reason}"
    if found.lost_by is not None and found.lost_by.operands:
        form = cause.cancelled
    if found.passes_infs:
        form = "{call} is infinite{reason}"
    if op is None:
        form = "{name}{reason}"
    elif found.phase == "optimizer" and not found.is_behind_backward:
        given = "{numbers}" if found.cause == UNDEFINED.name else "{call}"
        form = f"{{name}}: {given} in the optimizer's step{{reason}}"
    text = form.format(
        name=capitalized(cause.name),
        call="" if op is None else call_text(op),
        numbers="" if op is None else _numbers_text(op),
        then=", and ".join(["", *found.becomes_nan]),
        dtype=op.outputs[0].dtype if op is not None and op.outputs else "its dtype",
        size="" if op is None else _size_text(op),
        lost="" if found.lost_by is None else _named_at(found.lost_by),
        change="" if found.lost_by is None else _change_text(found.lost_by, op),
        difference=_difference_text(found.lost_by),
        outside=_outside_text(op),
        slope=_LEFT_OUT if found.is_seen_in_backward else "a singular gradient",
        reason=f": {clause}" if (clause := parted(found.stated)[0]) else "",
        also=f"; {clause}" if clause else "",
    )
    text = capitalized(text) if text.startswith("the ") else text
    where = f", {BETWEEN}" * found.is_behind_backward
    seen = _FINITE * (found.is_seen_in_backward and found.is_overflow)
    return f"{text}{where}{_sample_text(found)}{on_rank(found)}{seen}"


def parted(text: str) -> tuple[str, str]:
    """The first clause of a text, which a first line has, and what is left to say.

    Of a clause that is too long the line has the beginning, and all is left to say.
    """
    clause, *rest = re.split("[;.] ", text.removesuffix("."), maxsplit=1)
    if len(clause) > _LONGEST_REASON and ": " in clause:
        return clause.partition(": ")[0], text
    end = text[len(clause) + len("; ") :] if rest else ""
    return clause, capitalized(end) if end and text[0].isupper() else end


def told_apart(one: float, other: float) -> tuple[str, str]:
    """Two numbers with as many digits as tell them apart."""
    digits = _num_digits(one, other)
    return _with_digits(one, digits), _with_digits(other, digits)


def _num_digits(one: float, other: float) -> int:
    """How many digits tell two numbers apart, at least three."""
    each = range(3, 17)
    return next((n for n in each if f"{one:.{n}g}" != f"{other:.{n}g}"), 17)


def _with_digits(value: float, digits: int) -> str:
    """A number in so many digits, in fewer where these are all of it."""
    text = f"{value:.{digits}g}"
    return text if digits == 3 or float(text) == value else f"{value:#.{digits}g}"


def sum_text(one: float, other: float, sign: str) -> str:
    """Two numbers that are almost equal, or opposite, with the digits that are not."""
    digits = min(_num_digits(abs(one), abs(other)) + 3, 17)
    left, right = f"{one:.{digits}g}", f"{other:.{digits}g}"
    return f"{left} {sign} {f'({right})' if right[0] == '-' else right}"


def spoken_name(name: str) -> str:
    """The name of an operation as people know it: "softmax" of "aten._softmax"."""
    base = base_of(name).strip("_")
    return "to" if base == "to_copy" else base


def expression_of(op: Op) -> str:
    """The expression that called an operation, where its columns are known, or ""."""
    begin, end = op.columns or (0, 0)
    return op.code[begin:end]


def call_text(op: Op) -> str:
    """The expression that called an operation, or its name, and its place."""
    expression = expression_of(op)
    is_whole = "`" not in expression and expression.count("(") == expression.count(")")
    is_short = is_whole and 0 < len(expression) <= _LONGEST_CALL
    name = spoken_name(op.name)
    if is_short:  # which may call a module whose code runs the operation
        name = f"`{expression}`" if name in expression else f"{name} in `{expression}`"
    return f"{_of_derivative(op)}{name}{_at(op)}"


def _numbers_text(op: Op) -> str:
    if not op.operands:
        return call_text(op)
    numbers = applied_text(op.derivative or op.name, op.operands)
    if op.derivative:
        numbers += f" in the derivative of {spoken_name(op.name)}"
    within = f" in {op.within}" if op.within else ""
    return f"{numbers}{within}{_at(op)}"


def applied_text(name: str, numbers: Sequence[float]) -> str:
    """An operation of numbers, such as "log(0)" and "9 / 0"."""
    ran, texts = spoken_name(name), [told_number(each) for each in numbers]
    sign = op_of(ran).sign
    if not sign or len(texts) != 2:
        return f"{ran}({', '.join(texts)})"
    left, right = (f"({each})" if each[0] == "-" else each for each in texts)
    return f"{texts[0] if sign != '**' else left} {sign} {right}"


def plain_number(value: float, digits: int = 3) -> str:
    """Some digits of a number, in plain figures below ten million: 175000."""
    return f"{float(f'{value:.{digits}g}'):.7g}"


def number_by(value: float, limit: float) -> str:
    """Three digits of a number, or as many as leave it on its side of a limit."""
    texts = (plain_number(value, digits) for digits in range(3, 8))
    is_beyond = abs(value) > limit
    found = (t for t in texts if (abs(float(t)) > limit) == is_beyond)
    return next(found, f"{value:.17g}")


def told_number(value: float) -> str:
    """A number in three digits, or as many as tell it from 0 and 1."""
    value += 0.0  # no sign of 0
    for digits in range(3, 17):
        text = f"{value:.{digits}g}"
        if abs(float(text)) not in (0.0, 1.0) or float(text) == value:
            return text
    return f"{value:.17g}"


def _of_derivative(op: Op) -> str:
    return "the derivative of " if op.derivative else ""


def _at(op: Op) -> str:
    return f" at {op.place}" if op.place else ""


def _named_at(op: Op) -> str:
    return f"{spoken_name(op.name)}{f' ({op.place})' if op.place else ''}"


def _size_text(op: Op) -> str:
    if op.true_value is None or op.limit is None:
        return ""
    if abs(op.true_value) <= op.limit:
        result = number_by(op.true_value, op.limit)
        return f" in an intermediate value (its result, {result} in float64, fits)"
    if abs(op.true_value) == math.inf:
        return ", and float64 as well"
    true = _product_text(op, op.limit) or number_by(op.true_value, op.limit)
    return f" ({true} in float64; its maximum is {op.limit:.5g})"


def _product_text(op: Op, limit: float) -> str:
    """The two numbers whose product is too large, and the product; or ""."""
    sign = op_of(spoken_name(op.derivative or op.name)).sign
    product = math.prod(op.operands)
    if (sign, len(op.operands)) != ("*", 2) or not limit < abs(product) < math.inf:
        return ""
    left, right = map(plain_number, op.operands)
    right = f"({right})" if right[0] == "-" else right
    return f"{left} * {right} is {number_by(product, limit)}"


def _change_text(lost: Op, op: Op | None) -> str:
    """The change of a number, or the rest of a difference."""
    if lost.value is None:
        return ""
    if lost.true_value is None:
        return f" to {lost.value:g}"
    if lost.operands:
        place = "" if op is not None and op.place == lost.place else _at(lost)
        true = told_number(lost.true_value)
        return f"{told_number(lost.value)}{place} (float64: {true})"
    dtype = lost.outputs[0].dtype if lost.outputs else ""
    narrow = f" in {dtype}" * (dtype in _HALF)
    change = told_apart(lost.true_value, lost.value)
    return ": {} became {}".format(*change) + narrow


def _difference_text(lost: Op | None) -> str:
    if lost is None or not lost.operands:
        return ""
    one, other = lost.operands
    return sum_text(one, other, op_of(spoken_name(lost.name)).sign or "-")


def _outside_text(op: Op | None) -> str:
    """The input outside of the domain, where the numbers do not show it."""
    if op is None or op.operands or not op.outside:
        return ""
    return f": {op.outside}"


def _sample_text(found: Findings) -> str:
    is_told = _outside_text(found.op).startswith(": sample ")
    if found.sample is None or is_told:
        return ""
    of = f" of {found.num_samples}" if found.num_samples else ""
    return f", in sample {int(found.sample)}{of} (from 0)"


def on_rank(found: Findings) -> str:
    """The rank that found it, of several, and how many more; "" for one process."""
    if found.rank is None:
        return ""
    others = found.num_ranks - 1
    more = f" and {counted(others, 'other')}" if others > 0 else " alone"
    return f" on rank {found.rank}{more}"
