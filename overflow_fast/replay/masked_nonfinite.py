"""Non-finite values inside of a finite step: masked, clamped or divided away again."""

from __future__ import annotations

from .explanation import Explanation
from .finding import explain_root_op
from .replayer import Replayer, StepPart
from .slice import ForwardRows, RootOp

_MOST = 8


def find_masked_nonfinite(replayer: Replayer) -> list[Explanation]:
    """Replays a step and finds the operations that made non-finite values in it.

    Looks at the last of the step's forwards and its backward. Constants, such as a mask
    of -inf, and what was bad before the step are left out. Everything is put back
    afterwards. Incurs a CPU-GPU sync for each operation on a device.

    Args:
        replayer: Runs the step; it is not entered yet.

    Returns:
        One explanation for each line of code and operation, in order, at most eight.
        None, if the state has parts that cannot be put back: nothing was replayed.
    """
    with replayer:
        if replayer.state.lost:
            return []
        result = replayer.run(StepPart(traced=len(replayer.calls) - 1))
    table = result.table
    if table is None or result.error is not None:
        return []
    rows = ForwardRows(table)
    found: dict[tuple[object, ...], Explanation] = {}
    for row in table.rows:
        place = row.name, row.module, row.frames[:1]
        makes_bad = row.kinds and not row.parents and not row.is_meant
        if makes_bad and place not in found and len(found) < _MOST:
            found[place] = explain_root_op(RootOp(row, [row]), rows, row.in_backward)
    return list(found.values())
