"""Values that were not finite within a finite forward, and what they did to the output.

An inf that is clamped, or of which a quotient makes 0, leaves one that looks sound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..base.torch_ops import has, op_of, plain_name
from ..guard.report.explanation import Explanation
from ..guard.report.remedy import off_text
from .bounds import tolerance
from .explain_origin import explain_root_op
from .op_call import OpCall
from .op_table import OpTable
from .remedies.nearness import Nearness
from .replayer import LastOutputs, Replayer, ReplayResult, StepPart
from .trace_back import RootOp

_LARGE = 65504.0  # what half precision holds at most, and less than overflows
_MOST = 16  # operations asked whether they overflowed; none behind them is; chosen


def find_hidden(
    replayer: Replayer, place: int, traced: ReplayResult
) -> tuple[Explanation, RootOp] | None:
    """Explains what was not finite within a finite forward; None where nothing was.

    Args:
        replayer: Runs it; it is entered.
        place: The place of its call.
        traced: A replay that lists its operations.

    Returns:
        The explanation, and the operation. The explanation is a note alone where the
        output is not known to be far from that in float32.
    """
    table = traced.table
    if table is None or traced.error is not None or not traced.is_clean:
        return None
    all_bad = [op for op in table.ops if op.makes_bad and not op.is_empty]
    if not all_bad:
        return None
    call = replayer.calls[place]
    explained = [
        (bad, explain_root_op(RootOp(bad, [bad]), table.ops, False, call))
        for bad in all_bad[:_MOST]
    ]
    # An inf that float32 has as well, as of log(0), does not set the output apart, nor
    # one that tanh makes the 1 of that is near to what it makes of any large number.
    overflows = [each for each in explained if each[1].is_overflow]
    telling = (e for e in overflows if not _saturates(hidden_by(e[0], table.ops)))
    bad, found = next(telling, (overflows or explained)[0])
    root_op = RootOp(bad, [bad])
    distance = _distance(replayer)
    found.evidence.insert(1, _told(bad, table.ops, distance))
    if distance is None or distance <= tolerance(()):
        told = f"{bad.text}: {'; '.join(map(str, found.evidence[:2]))}"
        found = Explanation(notes=[f"Values within it were not finite: {told}."])
    return found, root_op


def tell_hidden(replayer: Replayer, bad: OpCall, table: OpTable) -> str:
    """Describes what has hidden an operation's values, and how far off the output is.

    Runs the forward as it is and in float32.

    Args:
        replayer: Runs the forward, which ends finite; it is entered.
        bad: The operation.
        table: The operations.
    """
    return _told(bad, table.ops, _distance(replayer))


def _distance(replayer: Replayer) -> float | None:
    """How far a forward's output is from that in float32; None if it is not known."""
    own, nearness = LastOutputs(), Nearness(replayer)
    if nearness.wide != "float32":
        return None
    replayer.run(StepPart(), observers=[own])
    return nearness.distance(own)


def _told(bad: OpCall, ops: Sequence[OpCall], distance: float | None) -> str:
    hider = hidden_by(bad, ops)
    where = f" by {hider.text}" if hider else ""
    told = f"hidden{where}: the output is finite"
    if distance is None:
        return told
    return f"{told} and {off_text(distance, 'float32')}"


def _saturates(hider: OpCall | None) -> bool:
    """True if what hides an operation's infs gives the same for large numbers."""
    name = "" if hider is None else plain_name(hider.base)
    function = getattr(torch, name, None)
    if function is None or not op_of(name).never:
        return False
    try:
        ends = function(torch.tensor([_LARGE, math.inf, -_LARGE, -math.inf]))
    except (TypeError, RuntimeError):  # it takes more arguments
        return False
    return bool(ends[0] == ends[1] and ends[2] == ends[3])


def hidden_by(bad: OpCall, ops: Sequence[OpCall]) -> OpCall | None:
    """The first operation that read what an operation made, and returned finite values.

    Args:
        bad: The operation.
        ops: All operations, in order.
    """
    carried = {bad}
    for op in ops[bad.index + 1 :]:
        if carried.intersection(op.read_from):
            name = op.base
            if name.startswith("is"):  # isinf, isfinite, ...
                continue  # it looks at them
            if not op.kinds and not has(name, "moves"):
                return op
            carried.add(op)  # what moves values is not scanned
    return None
