"""From the origin of bad values to an explanation: phase, cause, place, evidence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..text import nonfinite_text
from .capture import KeptCall
from .explanation import Explanation, Op, TensorSummary
from .op_trace import (
    EMPTY,
    INTERMEDIATE,
    RANGE,
    SINGULAR,
    UNDEFINED,
    Details,
    Leaf,
    Row,
    Source,
)
from .places import op_at, place_text, programs_line
from .root_op import ForwardRows, RootOp
from .without_operation import explain_leaf, looked_up

_CAUSES = {
    RANGE: "range overflow",
    INTERMEDIATE: "range overflow",
    UNDEFINED: "undefined",
    EMPTY: "empty reduction",
    SINGULAR: "rounding",
}
_NOT_CLIPPED = (
    "Clipping gradients by their norm after backward does not help: it makes nan of an "
    "inf."
)
_LOOKUPS = ("aten.embedding", "aten._embedding_bag", "aten.index", "aten.gather")
_LEFT_OUT = (
    "It arises in the forward, whose result is finite all the same; backward runs "
    "through it."
)
_IN_HOOK = "it ran in a hook that backward called"
_UNWRITTEN = (
    "it reads memory of {} that nothing has written to: its values are left over from "
    "an earlier use of that memory"
)


def explain_root_op(
    root_op: RootOp,
    forward_rows: ForwardRows,
    in_gradients: bool,
    call: KeptCall | None = None,
) -> Explanation:
    """Explains the origin of bad values.

    Args:
        root_op: What was found.
        forward_rows: Knows the operations of the same replay.
        in_gradients: Whether what the forward returned was finite.
        call: What was replayed; None if it is not known to be the step's own.
    """
    source = root_op.source
    if isinstance(source, Leaf):
        reader = root_op.first_reader
        found = explain_leaf(source, _read_by(root_op), call)
        if reader is not None and reader.name.startswith(_LOOKUPS) and call is not None:
            found.evidence += looked_up(source.tensor, call)
    else:
        found = _explain_row(source, forward_rows, in_gradients)
        if found.op is not None and call is not None:
            frames = named_row(source, forward_rows).frames
            found.op.called_from = programs_line(frames, call.called_at)
    found.chain = _chain_text(root_op)
    return found


def _read_by(root_op: RootOp) -> str:
    reader = root_op.first_reader
    if reader is None:
        return ""
    return f"; it was first read by {reader.name}{place_text(reader.frames)}"


def _explain_row(
    row: Row, forward_rows: ForwardRows, in_gradients: bool
) -> Explanation:
    forward = forward_rows.of(row) if row.in_backward else row
    is_backward = in_gradients or row.in_backward
    found = Explanation("backward" if is_backward else "forward")
    named = named_row(row, forward_rows)
    if row.in_hook:
        found.evidence.append(_IN_HOOK)
    elif forward is not None:
        found.module = forward_rows.module_of(forward)
    elif row.variable is None:
        found.notes.append(f"Which line of the forward {row.node} is of is not known.")
    if row.in_backward and row.variable is not None and not row.in_hook:
        found.evidence.append("produced where gradients are added up")
    found.op = _op_of(named, row)
    details = row.details
    if row.is_communication:
        if "reduce" in row.name:
            found.cause = "range overflow"
        text = "no rank gave it non-finite values, and what it returned holds some"
        found.evidence.append(f"{row.name}: {text}")
    elif row.is_empty:
        found.cause = "not reproducible"
        found.evidence.append(_UNWRITTEN.format(row.name))
    elif details is None:
        found.notes.append("The operation was not computed again.")
    else:
        found.cause = _cause_of(details, is_backward and not row.in_hook)
        found.evidence += _evidence(details, found.op)
        if found.cause == "range overflow":
            _add_growth(found, growth_of(row, forward_rows))
    if in_gradients and not row.in_backward:
        found.notes.append(_LEFT_OUT)
    if row.masks:
        found.evidence.append(_mask_text(row))
    return found


def _add_growth(found: Explanation, growth: CallGrowth | None) -> None:
    """Adds how results grew up to an overflow; of gradients it is the cause."""
    if growth is None:
        return
    if not growth.explodes:
        found.evidence[-1] += f"; {growth.text}"
        return
    found.cause = "gradient explosion"
    found.evidence.insert(0, growth.text)
    found.notes.append(_NOT_CLIPPED)


def _mask_text(row: Row) -> str:
    """Names what made the infs that an operation was given, and returned."""
    made = mask_of(row)
    assert made is not None
    if isinstance(made, Row):
        return f"its infs are those of a mask: {made.name}{place_text(made.frames)}"
    return f"its infs are those of a mask: `{made.name}`"


def mask_of(row: Row) -> Source | None:
    """The source of a mask's infs that an operation was given, or None."""
    made: Source = row
    while isinstance(made, Row) and made.masks:
        made = made.masks[0]
    return None if made is row else made


def named_row(row: Row, forward_rows: ForwardRows) -> Row:
    """The operation that is named: of a derivative, that of the forward."""
    forward = forward_rows.of(row) if row.in_backward else row
    return row if row.custom or forward is None else forward


def _cause_of(details: Details, is_backward: bool) -> str:
    cause = _CAUSES.get(details.why, "unknown")
    if is_backward and cause == "undefined":
        return "singular gradient"
    return cause


def _op_of(named: Row, ran: Row) -> Op:
    op = op_at(named.name, named.frames)
    op.derivative = ran.name if named is not ran else ""
    if ran.details is not None:
        details = ran.details
        op.inputs, op.outputs = details.inputs, details.outputs
        op.first_index = details.first_index
        op.true_value, op.limit = details.true_value, details.limit
    return op


def _evidence(details: Details, op: Op) -> list[str]:
    output = details.outputs[0]
    ran = f"its derivative ({op.derivative}) made " if op.derivative else ""
    made = f"{ran}{_bad_text(output)}"
    inputs = ", ".join(_range_text(each) for each in details.inputs[:3])
    if inputs and not details.has_bad_inputs:
        made += f"; inputs finite: {inputs}"
    elif inputs:
        made += f"; inputs: {inputs}"
    if details.outside:
        made += f"; {details.outside}"
    return [made, _why_text(details, output.dtype)]


def _why_text(details: Details, dtype: str) -> str:
    value, limit = details.true_value, details.limit
    computed = f"computed in float64{details.part}"
    if details.why == RANGE and value is not None:
        is_beyond = value in (float("inf"), float("-inf"))
        true = "beyond its maximum as well" if is_beyond else _number(value)
        return f"{computed}: {true}; {dtype}'s maximum is {limit:.5g}"
    if details.why == INTERMEDIATE and value is not None:
        return (
            f"{computed}: {_number(value)}, which fits {dtype}: an intermediate value "
            "overflowed"
        )
    if details.why == SINGULAR and value is not None:
        return (
            f"{computed}: {_number(value)}; in {dtype} the matrix is singular: "
            "rounding has left 0 on its diagonal"
        )
    if details.why == UNDEFINED and value is not None:
        return f"{computed} from the same inputs, it is {value:g} as well"
    return details.reason or "it was not computed again"


def _number(value: float) -> str:
    """Three digits of a number, in plain figures below ten million: 175000."""
    return f"{float(f'{value:.3g}'):.7g}"


def _bad_text(each: TensorSummary) -> str:
    return nonfinite_text(each.num_nan, each.num_inf, each.signs, each.numel)


def _range_text(each: TensorSummary) -> str:
    what = f"{each.name} {list(each.shape)}".lstrip()
    if each.abs_max is None:
        return f"{what} without a finite value" if each.numel else "nothing"
    return f"{what} in magnitude {each.abs_min:.3g} to {each.abs_max:.3g}"


def _chain_text(root_op: RootOp) -> list[str]:
    source = root_op.source
    names = [f"`{source.name}`"] if isinstance(source, Leaf) and source.name else []
    rows = itertools.groupby(row.name for row in root_op.chain)
    return [*names, *(name for name, _ in rows)]


# The growth of results up to an overflow: in a recurrence, a loop, by depth.


_FEWEST = 6  # calls; fewer tell no factor
_LEAST_FACTOR = 1.01
_LEAST_GROWTH = 10.0
_EXPLODES = 1e3  # so much of the way to the overflow: more than a loss's scale explains
_MOST_CALLS = 4096
_MOST_BACK = 8  # operations from the one that overflowed to the one that grew
# How far results may be from a constant factor: by 4, or by so much of all growth.
_SPREAD, _PART = math.log(4), 0.05


@dataclass(frozen=True)
class CallGrowth:
    """Results that grow by a factor with each call, up to an overflow.

    Attributes:
        factor: By how much the largest magnitude grows with each call.
        total: By how much it has grown in all.
        number: How many calls there were before the one that overflowed.
        first: The number of the call since which it grows, from 1 on.
        unit: "call" or "module".
        since: The name of the module since which it grows; "" for calls.
        is_backward: True of the derivatives of calls.
        modules: The names of the modules that make such calls, each once.
        before: The operation that grew, where it is another one than that which
            overflowed; else None.
    """

    factor: float
    total: float
    number: int
    first: int
    unit: str
    since: str
    is_backward: bool
    modules: tuple[str, ...]
    before: Row | None = None

    @property
    def explodes(self) -> bool:
        """True if it is what the overflow of a gradient comes from."""
        return self.is_backward and self.total >= _EXPLODES

    @property
    def text(self) -> str:
        """The growth in words."""
        factor = f"grew by a factor of {self.factor:.3g} a {self.unit}"
        num = self.number - self.first + 1
        if self.unit == "module":
            since = f"from {self.since} on"
            return f"the largest gradient {factor} over {num} modules, {since}"
        if self.before is not None:
            at = f"{self.before.name}{place_text(self.before.frames)}"
            return f"the largest result of {at} {factor} over the {num} calls before"
        if self.is_backward:
            return (
                f"the largest gradient {factor} back through {num} calls at this line"
            )
        return (
            f"it is call {self.number + 1} at this line, and the largest result "
            f"{factor} since call {self.first}"
        )


def growth_of(row: Row, forward_rows: ForwardRows) -> CallGrowth | None:
    """Finds how results grew up to an operation that overflowed.

    Args:
        row: The operation.
        forward_rows: Knows the operations of the same replay.

    Returns:
        The growth over the calls at the same line, or of modules in backward; None
        where there is none by an almost constant factor.
    """
    calls = forward_rows.calls_like(row)
    found = _trend(calls[: calls.index(row)], calls, forward_rows, "call")
    if found is None and row.in_backward:
        largest = _of_modules(row, forward_rows)
        return _trend(largest, [*largest, row], forward_rows, "module")
    return found or _growth_before(row, forward_rows)


def _growth_before(row: Row, forward_rows: ForwardRows) -> CallGrowth | None:
    """The growth of what an operation was given, such as the state at a loop's end."""
    for _ in range(_MOST_BACK):
        given = [each for each in row.read_from if not each.in_backward]
        if not given:
            return None
        row = max(given, key=lambda each: each.abs_max or 0.0)
        calls = forward_rows.calls_like(row)
        found = _trend(calls[: calls.index(row) + 1], calls, forward_rows, "call")
        if found is not None and found.total >= _EXPLODES:
            return replace(found, before=row)
    return None


def _of_modules(row: Row, forward_rows: ForwardRows) -> list[Row]:
    """The largest operation of each module in backward, in the order that it ran."""
    largest: dict[str, Row] = {}
    for each in forward_rows.rows_before(row):
        if not each.in_backward or each.variable is not None or each.abs_max is None:
            continue
        name = forward_rows.module_of(each)
        before = largest[name].abs_max if name in largest else None
        if name and (before is None or each.abs_max > before):
            largest[name] = each
    own = forward_rows.module_of(row)
    return [each for name, each in largest.items() if name != own]


def _trend(
    before: Sequence[Row], calls: Sequence[Row], forward_rows: ForwardRows, unit: str
) -> CallGrowth | None:
    """The growth of the calls before an overflow, out of all calls."""
    sizes = [each.abs_max or 0.0 for each in before]
    logs = [math.log(s) if 0 < s < math.inf else None for s in sizes]
    starts = range(max(0, len(logs) - _MOST_CALLS), len(logs))
    first = next((i for i in starts if _is_even(logs[i:])), len(logs))
    num = len(logs) - 1 - first
    if num < _FEWEST:
        return None
    total = sizes[-1] / sizes[first]
    factor = total ** (1 / num)
    if factor < _LEAST_FACTOR or total < _LEAST_GROWTH:
        return None
    names = [forward_rows.module_of(each) for each in calls]
    since = forward_rows.module_of(before[first]) if unit == "module" else ""
    return CallGrowth(
        *(factor, total, len(before), first + 1, unit, since, before[0].in_backward),
        modules=tuple(dict.fromkeys(names)),
    )


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
