"""The sentences on an operation: what it made of what, and its result in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...base.text import numbered
from .gist import number_by, told_number
from .op import Op, TensorSummary

# Such sentences say how the first line is known; of a lost value another one does.
IN_FLOAT64 = "computed in float64"
_MOST_INPUTS = 3  # in a sentence; chosen


def made_text(op: Op, columns: Sequence[int], clauses: Sequence[str] = ()) -> str:
    """Writes what an operation made, and of what.

    Args:
        op: The operation.
        columns: The columns of its result that hold all that is not finite.
        clauses: What else is known of it.
    """
    ran = f"its derivative ({op.derivative}) made " if op.derivative else ""
    all_in = f" (all in {numbered('column', columns)})" if columns else ""
    finite = " finite" * all(each.is_finite for each in op.inputs)
    inputs = ", ".join(map(_range_text, op.inputs[:_MOST_INPUTS]))
    given = f"inputs{finite}: {inputs}" if inputs else ""
    bad = op.outputs[0].nonfinite_text(has_numel=op.outputs[0].numel != 1)
    made = f"{ran}{bad}{all_in}"
    return "; ".join(filter(None, [made, given, op.outside, *clauses]))


def in_float64_text(op: Op, part: str = "") -> str:
    """Writes what float64 makes of an operation; "" where that is not known.

    Args:
        op: The operation.
        part: Where it was computed again, if not as a whole; or "".
    """
    value, limit = op.true_value, op.limit
    if value is None or limit is None:
        return ""
    dtype = op.outputs[0].dtype
    if not math.isfinite(value):
        return f"{IN_FLOAT64}{part} from the same inputs, it is {value:g} as well"
    beyond, fits = f"; {dtype}'s maximum is {limit:.5g}", f", which fits {dtype}"
    end = beyond if abs(value) > limit else fits
    return f"{IN_FLOAT64}{part}: {number_by(value, limit)}{end}"


def tells_float64(sentence: str) -> bool:
    """True if a sentence says what float64 makes of an operation."""
    return sentence.startswith(IN_FLOAT64)


def retell_float64(evidence: list[str], text: str) -> None:
    """Puts a sentence on float64 in place of those that tell less, behind the first."""
    others = [each for each in evidence[1:] if not tells_float64(each)]
    evidence[1:] = [text, *others]


def _range_text(each: TensorSummary) -> str:
    what = f"{each.name} {list(each.shape)}".lstrip()
    if each.abs_max is None:
        return f"{what} without a finite value" if each.numel else "nothing"
    if not each.is_finite:
        what += f" with {each.nonfinite_text(has_numel=False)}, else"
    least, most = told_number(each.abs_min or 0.0), told_number(each.abs_max)
    return f"{what} in magnitude " + (f"{least} to {most}" if least != most else most)
