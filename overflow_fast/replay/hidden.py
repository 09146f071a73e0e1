"""Non-finite values inside of a finite step: masked, clamped or divided away again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from ..state.snapshot import Snapshot
from .capture import KeptCall
from .explanation import Explanation
from .finding import explain_culprit
from .rank_coordinator import Team
from .replayer import Rerun
from .slice import Culprit, ForwardRows

_MOST = 8


def hidden_failures(
    models: Mapping[str, nn.Module],
    calls: Sequence[KeptCall],
    state: Snapshot,
) -> list[Explanation]:
    """Replays a step and finds the operations that made non-finite values in it.

    Looks at the last of the step's forwards and its backward. Constants, such as a mask
    of -inf, and what was bad before the step are left out. Everything is put back
    afterwards. Incurs a CPU-GPU sync for each operation on a device.

    Args:
        models: The models, by what their modules' names begin with.
        calls: The calls of the step.
        state: Keeps what the replay changes; it is not taken yet.

    Returns:
        One explanation for each line of code and operation, in order, at most eight.
        None, if the state has parts that cannot be put back: nothing was replayed.
    """
    for call in calls:
        call.note_overwritten()
    with state:
        if state.lost:
            return []
        rerun = Rerun(models, calls, state, Team())
        outcome = rerun.run(len(calls) - 1)
    table = outcome.table
    if table is None or outcome.error is not None:
        return []
    rows = ForwardRows(table)
    found: dict[tuple[object, ...], Explanation] = {}
    for row in table.rows:
        place = row.name, row.module, row.frames[:1]
        makes_bad = row.kinds and not row.parents and not row.is_meant
        if makes_bad and place not in found and len(found) < _MOST:
            found[place] = explain_culprit(Culprit(row, [row]), rows, row.in_backward)
    return list(found.values())
