"""From bad values to their origin, and to its explanation: phase, cause, evidence."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from ..guard.report.explanation import Explanation, Op, TensorSummary
from ..scanner.modules import module_of_parameter
from ..scanner.text import nonfinite_text, numbered
from . import bad_step as notes
from .calls import Call, ModelCall
from .held_tensors import HeldTensor
from .named_tensors import names_of
from .op_rows import (
    EMPTY,
    INTERMEDIATE,
    RANGE,
    SINGULAR,
    UNDEFINED,
    Details,
    Leaf,
    Row,
    Source,
    is_meant,
)
from .op_table import OpTable
from .tensor_kinds import as_wide, bad_names, inf_signs
from .users_lines import op_at, place_text, programs_line

# Walks back from a bad value to the operation that made it.


OF_LEAVES = ("parameter", "buffer", "batch", "attribute", "weight", "object")
_KNOWN_LEAVES = (*OF_LEAVES, "gradient")


@dataclass
class RootOp:
    """Where the non-finite values of a tensor began.

    Attributes:
        source: The operation that made them, or the tensor that held them before.
        chain: The operations from there to the tensor.
        first_reader: The operation that read the source first, or None.
    """

    source: Row | Leaf
    chain: list[Row] = field(default_factory=list)

    @property
    def first_reader(self) -> Row | None:
        """The operation that first used a tensor which was bad before, or None."""
        rows = [row for row in self.chain if row is not self.source]
        return rows[0] if rows else None


def trace_back(sources: Sequence[Row | Leaf]) -> RootOp | None:
    """Finds the earliest origin of what is bad, infs that are meant left out.

    Args:
        sources: What wrote the bad values.

    Returns:
        The origin; None if all that is bad is meant, as far as can be seen.
    """
    child: dict[int, Row | None] = {}
    origins: list[Row | Leaf] = []
    waiting: list[tuple[Row | Leaf, Row | None]] = [(each, None) for each in sources]
    while waiting:
        source, reader = waiting.pop()
        if id(source) in child:
            continue
        child[id(source)] = reader
        if isinstance(source, Row) and source.parents:
            waiting += [(parent, source) for parent in source.parents]
        elif not is_meant(source):
            origins.append(source)
    if not origins:
        return None
    first = min(origins, key=_order)
    return RootOp(first, _chain(first, child))


def masked_whole(sources: Sequence[Row | Leaf]) -> RootOp | None:
    """Finds where a mask's infs have gone beyond the mask, for a loss that holds them.

    That is the first operation which returns fewer values than the mask has, such as
    the sum of a row that is masked as a whole.

    Args:
        sources: What wrote the loss.
    """
    child: dict[int, Row | None] = {}
    reducing: list[Row] = []
    waiting: list[tuple[Row | Leaf, Row | None]] = [(each, None) for each in sources]
    while waiting:
        source, reader = waiting.pop()
        if isinstance(source, Leaf) or id(source) in child:
            continue
        child[id(source)] = reader
        reducing += [source] * source.reduces
        waiting += [(each, source) for each in source.masks]
    if not reducing:
        return None
    first = min(reducing, key=_order)
    return RootOp(first, _chain(first, child))


def _order(source: Row | Leaf) -> tuple[int, int]:
    if isinstance(source, Row):
        return 1, source.index
    is_before = source.kind in _KNOWN_LEAVES and not source.is_written
    return (0 if is_before else 2), 0


def _chain(first: Row | Leaf, child: dict[int, Row | None]) -> list[Row]:
    chain = [first] if isinstance(first, Row) else []
    reader = child[id(first)]
    while reader is not None:
        chain.append(reader)
        reader = child[id(reader)]
    return chain


class ForwardRows:
    """Finds the forward operation whose derivative an autograd node computes.

    Autograd numbers its nodes as it makes them, just before their operation runs.

    Args:
        table: The operations of one replay.
    """

    def __init__(self, table: OpTable) -> None:
        self._rows = table.rows
        self._by_sequence: dict[int, list[Row]] = {}
        last: dict[int, int] = {}  # by thread
        for row in table.rows:
            if row.sequence > last.get(row.thread, -1):
                last[row.thread] = row.sequence
                self._by_sequence.setdefault(row.sequence, []).append(row)

    def of(self, row: Row) -> Row | None:
        """The forward operation, or None if it is not known."""
        for _ in range(4):  # a double backward's node was made in a backward
            found = self._node_of(row)
            if found is None or not found.in_backward or found.custom:
                return found
            row = found
        return None

    def calls_like(self, row: Row) -> list[Row]:
        """The calls of the same operation at the same line, in order, with the own one.

        In backward, those of the derivatives of one line's operation: of each node of
        autograd's the one at the same place, such as its gradient of a weight.
        """
        own = self._line_of(row)
        if own is None:
            return [row]
        alike = [
            each
            for each in self._rows
            if each.name == row.name and each.in_backward == row.in_backward
            if not row.in_backward or each.node == row.node
            if self._line_of(each) == own
        ]
        if not row.in_backward:
            return alike
        of_node: dict[tuple[int, int], list[Row]] = {}
        for each in alike:
            of_node.setdefault((each.thread, each.node_sequence), []).append(each)
        place = of_node[row.thread, row.node_sequence].index(row)
        return [rows[place] for rows in of_node.values() if len(rows) > place]

    def rows_before(self, row: Row) -> list[Row]:
        """The operations that ran before one, in order."""
        return self._rows[: row.index]

    def _line_of(self, row: Row) -> tuple[object, int] | None:
        named = self.of(row) if row.in_backward else row
        return named.frames[0][:2] if named is not None and named.frames else None

    def modules_from(self, row: Row) -> list[str]:
        """The names of the modules that ran from an operation on, in order, once."""
        names = [each.module for each in self._rows[row.index :] if each.module]
        return list(dict.fromkeys(names))

    def module_of(self, row: Row) -> str:
        """The module whose code a row belongs to; in backward, that of its node."""
        current: Row | None = row
        for _ in range(4):
            if current is None or current.module is not None:
                break
            current = self._node_of(current)
        return (current.module if current is not None else None) or ""

    def _node_of(self, row: Row) -> Row | None:
        rows = [r for r in self._by_sequence.get(row.node_sequence, []) if r is not row]
        if len(rows) > 1:  # each thread counts for itself
            rows = [each for each in rows if _is_derivative(row.node, each.name)]
        return rows[0] if len(rows) == 1 else None


def _is_derivative(node: str, op: str) -> bool:
    """True if a node such as PowBackward0 is that of an op such as aten.pow."""
    of = re.sub(r"Backward\d*$", "", node.rpartition("::")[2]).lower()
    name = op.split(".")[1] if "." in op else op
    return name.replace("_", "").lower().startswith(of)


# From the origin of bad values to its explanation.


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
_ADDED_UP = "produced where gradients are added up"
_UNWRITTEN = (
    "it reads memory of {} that nothing has written to: its values are left over from "
    "an earlier use of that memory"
)


def explain_root_op(
    root_op: RootOp,
    forward_rows: ForwardRows,
    in_gradients: bool,
    call: Call | None = None,
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
    clauses = []
    if row.in_hook:
        clauses.append(_IN_HOOK)
    elif forward is not None:
        found.module = forward_rows.module_of(forward)
    elif row.variable is None:
        found.notes.append(f"Which line of the forward {row.node} is of is not known.")
    if row.in_backward and row.variable is not None and not row.in_hook:
        clauses.append(_ADDED_UP)
    if row.masks:
        clauses.append(_mask_text(row))
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
        made, why = _evidence(details, found.op)
        found.evidence += ["; ".join([made, *clauses]), why]
        clauses = []
        if found.cause == "range overflow":
            _add_growth(found, growth_of(row, forward_rows))
    found.evidence += clauses
    if in_gradients and not row.in_backward:
        found.notes.append(_LEFT_OUT)
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
    return f"its infs are those that `{made.name}` holds"


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


def _evidence(details: Details, op: Op) -> tuple[str, str]:
    """Describes what an operation made of what, and what float64 makes of it."""
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
    return made, _why_text(details, output.dtype)


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
    if each.num_nan or each.num_inf:
        bad = nonfinite_text(each.num_nan, each.num_inf, each.signs)
        what += f" with {bad}, else"
    return f"{what} in magnitude {each.abs_min:.3g} to {each.abs_max:.3g}"


def _chain_text(root_op: RootOp) -> list[str]:
    source = root_op.source
    names = [f"`{source.name}`"] if isinstance(source, Leaf) and source.name else []
    rows = itertools.groupby(row.name for row in root_op.chain)
    return [*names, *(name for name, _ in rows)]


# Explains values that were bad before the replay: data, weights and what was kept.


_IN_LOOP = (
    "Code between the calls was not replayed. Call all of it within "
    "`guard.run(lambda: loss)`."
)
_NOT_FOUND = "Where the program holds that tensor was not found."
_CARRIED = (
    "The step writes to {}, which could not be put back to what it was before: the "
    "step itself may have left the bad values there."
)


def explain_leaf(leaf: Leaf, read_by: str, call: Call | None) -> Explanation:
    """Explains a tensor that no replayed operation has made.

    Args:
        leaf: The tensor.
        read_by: What read it first, as the end of a sentence, or "".
        call: What was replayed; None if it is not known to be the step's own.
    """
    is_weight = leaf.kind in ("parameter", "buffer")
    what = _counts(leaf.tensor, names_rows=is_weight)
    if isinstance(leaf, HeldTensor):
        return _explain_held(leaf, what, read_by)
    if leaf.kind == "batch":
        return _explain_batch(leaf, what, read_by, call)
    if is_weight:
        return _explain_weight(leaf.kind, leaf.name, what, read_by)
    if leaf.kind == "gradient":
        text = f"the gradient that the model's output was given holds {what}"
        return Explanation(evidence=[text], notes=[notes.OUTSIDE_LOSS])
    text = f"a tensor that no replayed operation has made holds {what}{read_by}"
    return Explanation(evidence=[text], notes=[_NOT_FOUND])


def _explain_batch(leaf: Leaf, what: str, at: str, call: Call | None) -> Explanation:
    """Explains an input: it is data, unless the training loop has computed it."""
    name, tensor = f"`{leaf.name}`", leaf.tensor
    if call is not None:  # a replay may have been given a copy
        tensor = dict(call.leaves()).get(leaf.name, tensor)
    node = None if tensor is None else tensor.grad_fn
    if node is not None:
        last = re.sub(r"Backward\d*$", "", type(node).__name__)
        text = f"{name} held {what} when it was handed over{at}; code that was not "
        text += f"replayed had computed it (its last operation: {last})"
        return Explanation(tensor=leaf.name, evidence=[text], notes=[_IN_LOOP])
    if call is not None and tensor is not None and call.was_written(tensor):
        text = f"{name} held {what} when the replay began{at}; it was written to since "
        return Explanation(tensor=leaf.name, evidence=[f"{text}the step began"])
    if not isinstance(call, ModelCall):
        is_given = leaf.name.startswith("batch")  # else the program's own variable
        held = f"holds {what}" if is_given else f"held {what} before the forward"
        text = f"{name} {held}{at}"
        return Explanation("data", "bad data", tensor=leaf.name, evidence=[text])
    text = f"{name} held {what} when the model received it from the loop{at}"
    if call.follows_others:
        text += "; the loop may have computed it from outputs of the forwards before"
        return Explanation(tensor=leaf.name, evidence=[text], notes=[_IN_LOOP])
    return Explanation("data", "bad data", tensor=leaf.name, evidence=[text])


def _explain_held(leaf: HeldTensor, what: str, at: str) -> Explanation:
    """Explains a tensor that a module or an object holds."""
    name = f"`{leaf.name}`"
    if leaf.is_written:
        text = f"{name} held {what} when the replay began{at}"
        note = _CARRIED.format(name)
        return Explanation(tensor=leaf.name, evidence=[text], notes=[note])
    if leaf.kind == "object":
        text = f"{name} holds {what}, and the step does not write to it{at}"
        return Explanation("data", "bad data", tensor=leaf.name, evidence=[text])
    of = "the model" if leaf.kind == "attribute" else "a module that is not watched"
    text = f"{name} of {of} holds {what}, and the step does not write to it{at}"
    module = module_of_parameter(leaf.name)
    return Explanation(
        "weights", "bad weights", module, tensor=leaf.name, evidence=[text]
    )


def _explain_weight(kind: str, name: str, what: str, at: str = "") -> Explanation:
    """Explains a parameter or buffer that was bad before the step."""
    evidence = f"the {kind} {name} held {what} before the step{at}"
    module = module_of_parameter(name)
    return Explanation(
        "weights", "bad weights", module, tensor=name, evidence=[evidence]
    )


def first_bad_weight(
    models: Mapping[str, nn.Module], *kinds: str
) -> Explanation | None:
    """The explanation of the first parameter or buffer that is bad, or None."""
    named = [(kind, name, t) for kind, name, t in names_of(models) if kind in kinds]
    bad = bad_names([(name, tensor) for _, name, tensor in named], masks=False)
    for kind, name, tensor in named:
        if name in bad:
            return _explain_weight(kind, name, _counts(tensor, names_rows=True))
    return None


def _counts(tensor: torch.Tensor | None, names_rows: bool) -> str:
    values = None if tensor is None else as_wide(tensor)
    if values is None:
        return "non-finite values"
    num_nan, num_inf = int(values.isnan().sum()), int(values.isinf().sum())
    what = nonfinite_text(num_nan, num_inf, inf_signs(values), values.numel())
    rows = _bad_rows(values) if names_rows else []
    at = f" (all in {numbered('row', rows)})" if rows else ""
    return f"{what}{at}"


_FEW_ROWS = 4


def _bad_rows(values: torch.Tensor) -> list[int]:
    """The rows that hold all non-finite values, where they are few of many, or none."""
    if values.dim() < 2 or len(values) <= 2 * _FEW_ROWS:
        return []
    is_bad = ~values.isfinite().flatten(1).all(1)
    rows = is_bad.nonzero().flatten().tolist()
    return rows if len(rows) <= _FEW_ROWS else []


def looked_up(table: torch.Tensor | None, call: Call) -> list[str]:
    """Describes where a call's batch holds the indices of a table's bad rows.

    Args:
        table: The table, such as an embedding.
        call: The call.
    """
    values = None if table is None else as_wide(table)
    rows = [] if values is None else _bad_rows(values)
    found = []
    for name, tensor in call.leaves():
        if tensor.dtype not in (torch.int32, torch.int64) or not tensor.dim():
            continue
        for row in rows:
            places = (tensor == row).nonzero()
            if len(places):
                text = f"`{name}` holds {row} at {places[0].tolist()}"
                more = f" and {len(places) - 1} more" * (len(places) > 1)
                found.append(f"{text}{more}")
    return found


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
