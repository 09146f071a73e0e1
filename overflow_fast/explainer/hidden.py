"""Values that were not finite within a finite forward, and what they did to the output.

An inf that is clamped, or of which a quotient makes 0, leaves one that looks sound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..guard.report.explanation import Explanation
from .explain_origin import explain_root_op
from .op_rows import Row
from .remedies.nearness import NEAR, Nearness, Outputs
from .replayer import Replayer, ReplayResult, StepPart
from .trace_back import ForwardRows, RootOp
from .users_lines import place_text


class HiddenValues(NamedTuple):
    """The values found within a finite forward.

    Attributes:
        found: The explanation; a note alone where the output is not known to be wrong.
        root_op: The operation.
        traced: The replay in which it was found.
        is_wrong: Whether the output is far from that in float32.
    """

    found: Explanation
    root_op: RootOp
    traced: ReplayResult
    is_wrong: bool


def find_hidden(replayer: Replayer, place: int) -> HiddenValues | None:
    """Traces a finite forward; None where all within it was finite, or meant.

    Args:
        replayer: Runs it; it is entered.
        place: The place of its call.
    """
    outputs = Outputs()
    part = StepPart(place, looks_back=True, has_calls=True)
    traced = replayer.run(part, observers=[outputs])
    table = traced.table
    if table is None or traced.error is not None or not traced.is_clean:
        return None
    bad = next((row for row in table.rows if row.makes_bad and not row.is_empty), None)
    if bad is None:
        return None
    root_op = RootOp(bad, [bad])
    call = replayer.calls[place]
    found = explain_root_op(root_op, ForwardRows(table), False, call)
    hider = hidden_by(bad, table.rows)
    where = f" by {hider.name}{place_text(hider.sites)}" if hider else ""
    distance = Nearness(replayer).distance(outputs)
    far = "" if distance is None else f" and {100 * distance:.2g} % from float32"
    found.evidence.insert(1, f"hidden{where}: the output is finite{far}")
    is_wrong = distance is not None and distance > NEAR
    if not is_wrong:
        told = "; ".join(map(str, found.evidence[:2]))
        found = Explanation(notes=[f"The forward is finite. Within it: {told}."])
    return HiddenValues(found, root_op, traced, is_wrong)


def hidden_by(bad: Row, rows: Sequence[Row]) -> Row | None:
    """The first operation that read what an operation made, and returned finite values.

    Args:
        bad: The operation.
        rows: All operations, in order.
    """
    carried = {bad}
    for row in rows[bad.index + 1 :]:
        if carried.intersection(row.read_from):
            if not row.kinds:
                return row
            carried.add(row)
    return None
