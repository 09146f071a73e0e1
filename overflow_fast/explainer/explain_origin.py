"""Explains where bad values began: phase, cause, evidence.

An operation has a cause by its `details` (`_explain_op`); one in backward is named by
that of the forward, and an overflow by how results grew up to it. A tensor from before
the replay has one by who holds it (`explain_leaf`). There is no state.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ..base.modules import module_of_parameter
from ..base.text import numbered, some
from ..guard.report import causes, notes
from ..guard.report.explanation import Explanation
from ..guard.report.findings import (
    BETWEEN_FORWARDS,
    FOLLOWS,
    IN_LOOP,
    OF_MASK,
    SEEN_IN_BACKWARD,
)
from ..guard.report.gist import call_text, spoken_name
from ..guard.report.op import Op
from ..guard.report.op_words import in_float64_text, made_text, tells_float64
from .call_growth import CallGrowth, growth_of, leap_before, rise_before
from .calls import Call, ModelCall, is_forward_alone
from .leaves import Leaf
from .named_tensors import names_of, pattern_of
from .op_call import WRITTEN, OpCall, Source
from .tensor_kinds import (
    INF,
    NAN,
    NEGATIVE_INF,
    as_wide,
    bad_columns,
    sizes_and_bad,
    summary_of,
)
from .trace_back import RootOp
from .users_lines import op_at, place_text, programs_line, torchs_place

_FEW = 4  # names in a sentence; chosen
_MOST_SIZES = 6  # numbers in one; chosen
DIVIDES_BY = "it divides by "
_IN_HOOK = "it ran in a hook that backward called"
_ADDED_UP = "produced where gradients are added up"
_OF_RANKS = "no rank gave it non-finite values, and what it returned holds some"
_UNWRITTEN = (
    "its memory is read before anything has written to it; the values there are left "
    "over from an earlier use of that memory"
)


def explain_root_op(
    root_op: RootOp,
    ops: Sequence[OpCall],
    in_gradients: bool,
    call: Call | None = None,
) -> Explanation:
    """Explains the origin of bad values.

    Args:
        root_op: What was found.
        ops: All operations of the same replay, in order.
        in_gradients: Whether what the forward returned was finite.
        call: What was replayed; None if it is not known to be the step's own.
    """
    source = root_op.source
    if isinstance(source, Leaf):
        found = explain_leaf(source, _read_by(root_op), call)
    else:
        found = _explain_op(source, ops, in_gradients)
        if found.op is not None and call is not None:
            sites = source.named.sites
            found.op.called_from = programs_line(sites, call.called_at)
    if root_op.zero is not None:
        found.evidence.append(f"{root_op.zero.text} made 0 of its infinite values")
    else:
        found.evidence += _nan_of_infs(root_op.chain)
    found.chain = _chain_text(root_op)
    return found


def _nan_of_infs(chain: Sequence[OpCall]) -> list[str]:
    """Names the product by 0 that made nan of the infs that it was given, if one did.

    A product of finite numbers is no nan, and all that is not finite among what it was
    given has a source. Memory that nothing has written to may hold nan itself.
    """
    if chain and chain[0].is_empty:
        return []
    for op in chain[1:]:
        sources = [*op.parents, *op.masks]
        ops = [each for each in sources if isinstance(each, OpCall)]
        kinds = functools.reduce(operator.or_, (each.kinds for each in ops), 0)
        if len(ops) < len(sources) or kinds & NAN:
            break
        if op.kinds & NAN:
            signs = {NEGATIVE_INF: "-inf", INF & ~NEGATIVE_INF: "inf"}
            product = f"0 * {signs.get(kinds, 'an infinite value')}"
            line = place_text(op.sites)
            is_other = line != place_text(chain[0].named.sites)
            text = f"{product} {FOLLOWS}{line * is_other}"
            return [text] if op.base == "mul" else []
    return []


def _read_by(root_op: RootOp) -> str:
    reader = root_op.first_reader
    if reader is None or reader.in_backward:  # the forward has read it before
        return ""
    return f"; it was first read by {reader.text}"


def _explain_op(op: OpCall, ops: Sequence[OpCall], in_gradients: bool) -> Explanation:
    forward, named = op.forward, op.named
    is_backward = in_gradients or op.in_backward
    found = Explanation("backward" if is_backward else "forward")
    clauses = []
    if op.in_hook:
        clauses.append(_IN_HOOK)
    elif forward is not None:
        found.module = forward.owner
    elif op.variable is None:
        found.notes.append(notes.WHICH_LINE.format(op.node))
    if op.in_backward and op.variable is not None and not op.in_hook:
        clauses.append(_ADDED_UP)
    if op.masks and op.is_meant:
        found.reason = _mask_text(op)
    elif op.masks:
        clauses.append(_mask_text(op))
    found.op = _op_of(named, op)
    details, texts = op.details, clauses
    if op.is_communication:
        if "reduce" in op.name:
            found.cause = causes.RANGE_OVERFLOW.name
        texts = [f"{op.name}: {_OF_RANKS}", *clauses]
    elif op.is_empty:
        found.cause, found.reason = causes.NOT_REPRODUCIBLE.name, _UNWRITTEN
    elif details is None:
        found.notes.append(notes.NOT_COMPUTED)
    else:
        # A forward that is not defined there, either, has no gradient that could be.
        is_singular = is_backward and not op.in_hook
        is_singular &= in_gradients or named is op or not _is_undefined(named)
        is_singular &= details.cause == causes.UNDEFINED.name
        found.cause = causes.SINGULAR_GRADIENT.name if is_singular else details.cause
        found.reason = details.reason or found.reason
        texts = [made_text(found.op, details.columns, clauses)]
        # The first line has a reason, and of an overflow the result in float64.
        if details.part or details.cause != causes.RANGE_OVERFLOW.name:
            texts.append(in_float64_text(found.op, details.part))
    found.evidence += filter(None, texts)
    if found.cause == causes.RANGE_OVERFLOW.name and not op.is_communication:
        _add_growth(found, growth_of(op, ops))
        leap = None if found.reason else leap_before(op)
        found.reason = found.reason if leap is None else _leap_text(leap)
        found.reason = found.reason or _rise_text(rise_before(op))
        by = None if details is None else details.divisor
        if not found.reason and by is not None:
            found.reason = f"{DIVIDES_BY}{by:.3g}"
    is_hidden = named is not op and named.makes_bad and not named.is_meant
    if in_gradients and not op.in_backward:
        found.notes.append(SEEN_IN_BACKWARD)
    elif in_gradients and is_hidden:
        found.notes.append(notes.BAD_BEFORE)
    return found


def _leap_text(leap: OpCall) -> str:
    """Names what made large numbers of small ones before an overflow."""
    call, by = call_text(_op_of(leap.named, leap)), ""
    if leap.divisor is not None:
        by = f", with a divisor of {leap.divisor:.3g}"
    return f"{call} made {leap.abs_max:.3g} of at most {leap.most_read:.3g}{by}"


def _rise_text(calls: Sequence[OpCall]) -> str:
    """Names the calls each of which made larger numbers than the one before, or ""."""
    sizes = [f"{each.abs_max:.3g}" for each in calls]
    if len(sizes) > _MOST_SIZES:
        sizes[1 : 2 - _MOST_SIZES] = ["..."]
    made = f"made larger and larger numbers: {', '.join(sizes)}"
    if not calls:
        return ""
    name, line = spoken_name(calls[0].name), place_text(calls[0].sites)
    return f"{len(calls)} calls of {name}{line} {made}"


def _add_growth(found: Explanation, growth: CallGrowth | None) -> None:
    """Adds how results grew up to an overflow; of gradients it is the cause."""
    if growth is None:
        return
    found.reason = growth.text
    if growth.explodes:
        found.cause = causes.GRADIENT_EXPLOSION.name
        tell_float64(found)
        found.notes.append(notes.NOT_CLIPPED)


def tell_float64(found: Explanation) -> None:
    """Tells the result in float64, which a first line with a reason leaves out."""
    is_told = any(map(tells_float64, found.evidence))
    if found.op is not None and not is_told:
        found.evidence += filter(None, [in_float64_text(found.op)])


def _mask_text(op: OpCall) -> str:
    """Names what made the infs that an operation was given, and returned."""
    made = mask_of(op)
    assert made is not None
    if isinstance(made, OpCall):
        return f"{OF_MASK}{spoken_name(made.name)}{place_text(made.sites)} wrote"
    return f"{OF_MASK}`{made.name}` holds"


def mask_of(op: OpCall) -> Source | None:
    """The source of a mask's infs that an operation was given, or None."""
    made = _first_mask(op)
    return None if made is op else made


def _first_mask(source: Source) -> Source:
    while isinstance(source, OpCall) and source.masks:
        source = source.masks[0]
    return source


def explain_mask(sources: Sequence[Source], call: Call) -> Explanation | None:
    """Explains -inf that code wrote as a constant.

    Args:
        sources: What wrote the -inf, none of which is the origin of a bad value.
        call: What was replayed.

    Returns:
        The explanation; None if an operation that writes them is not known.
    """
    made = [each for each in map(_first_mask, sources) if isinstance(each, OpCall)]
    if not made:
        return None
    first = min(made, key=lambda op: op.index)
    op = op_at(first.name, first.sites)
    op.called_from = programs_line(first.sites, call.called_at)
    module, reason = first.module or "", WRITTEN.format(-math.inf)
    return Explanation("forward", causes.CONSTANT.name, module, op=op, reason=reason)


def _is_undefined(op: OpCall) -> bool:
    details = op.details
    is_undefined = details is not None and details.cause == causes.UNDEFINED.name
    return op.makes_bad and is_undefined


def _op_of(named: OpCall, ran: OpCall) -> Op:
    details = ran.details
    op = op_at(named.name, named.sites, None if details is None else details.op)
    op.derivative = ran.name if named is not ran else ""
    call = named.torch_call
    op.within = "" if call is None else torchs_place(call.sites[0])
    return op


def _chain_text(root_op: RootOp) -> list[str]:
    source = root_op.source
    names = [f"`{source.name}`"] if isinstance(source, Leaf) and source.name else []
    ops = itertools.groupby(op.name for op in root_op.chain)
    return [*names, *(name for name, _ in ops)]


# Explains values that were bad before the replay: data, weights and what was kept.


CARRIED = (
    "The step writes to {}, which could not be put back to what it was before: the "
    "step itself may have left the bad values there."
)
_UNKEPT = (
    "What {} held when the step began is not known: the step itself may have left the "
    "bad values there."
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
    if leaf.look is not None:
        return _explain_held(leaf, what, read_by)
    if leaf.kind == "batch":
        return _explain_batch(leaf, what, read_by, call)
    if is_weight:
        is_alone = is_forward_alone([call])
        return _explain_weight(leaf.kind, leaf.name, what, is_alone, read_by)
    if leaf.kind == "gradient":
        text = f"the gradient that the model's output was given holds {what}"
        is_of_loss = call is not None and call.returns_loss
        if not is_of_loss or leaf.tensor is None or leaf.tensor.numel() != 1:
            return _held("", "", text, notes.OUTSIDE_LOSS)
        text = f"the gradient that the loss was given is {float(leaf.tensor)}"
        return _held("", "", text, notes.BEHIND_LOSS.format(float(leaf.tensor)))
    text = f"a tensor that no replayed operation has made holds {what}{read_by}"
    return _held("", "", text, notes.NOT_FOUND)


def _held(phase: str, name: str, text: str, *notes: str) -> Explanation:
    """The explanation of a tensor that was bad before it was read.

    Args:
        phase: "data" or "weights"; "" where it is open what made it so.
        name: The tensor's name, or "".
        text: What it held, and when.
        notes: What is open.
    """
    of = {"data": causes.BAD_DATA, "weights": causes.BAD_WEIGHTS}
    module = module_of_parameter(name) if phase == "weights" else ""
    cause = of.get(phase, causes.UNKNOWN).name
    return Explanation(
        *(phase, cause, module), tensor=name, evidence=[text], notes=[*notes]
    )


def _explain_batch(leaf: Leaf, what: str, at: str, call: Call | None) -> Explanation:
    """Explains an input: it is data, unless the program has computed it."""
    name, tensor, is_alone = leaf.name, leaf.tensor, is_forward_alone([call])
    caller, between = "the loop", IN_LOOP
    if is_alone:
        caller, between = "the program", BETWEEN_FORWARDS
    if call is not None:  # a replay may have been given a copy
        tensor = dict(call.leaves()).get(name, tensor)
    node, held = None if tensor is None else tensor.grad_fn, f"`{name}` held {what}"
    if node is not None:
        last = re.sub(r"Backward\d*$", "", type(node).__name__)
        text = f"{held} when it was handed over{at}; code that was not replayed had "
        text += f"computed it (its last operation: {last})"
        return _held("", name, text, between)
    if call is not None and tensor is not None and call.was_written(tensor):
        began = f"{held} when the replay began{at}"
        return _held("", name, f"{began}; it was written to since the step began")
    text = f"{held} before the forward{at}"
    if isinstance(call, ModelCall):
        text = f"{held} when the model received it from {caller}{at}"
    elif name.startswith("batch"):  # else it is the program's own variable
        text = f"`{name}` holds {what}{at}"
    if isinstance(call, ModelCall) and call.follows_others:
        text += f"; {caller} may have computed it from outputs of the forwards before"
        return _held("", name, text, between)
    return _held("data", name, text)


def _explain_held(leaf: Leaf, what: str, at: str) -> Explanation:
    """Explains a tensor that a module or an object holds."""
    name = f"`{leaf.name}`"
    if leaf.is_written or leaf.is_unkept:
        text = f"{name} held {what} when the replay began{at}"
        note = CARRIED if leaf.is_written else _UNKEPT
        return _held("", leaf.name, text, note.format(name))
    is_object = leaf.kind == "object"
    module = "the model" if leaf.kind == "attribute" else "a module that is not watched"
    of = "" if is_object else f" of {module}"
    text = f"{name}{of} held {what} when the step began{at}"
    if not leaf.is_kept:
        text = f"{name}{of} holds {what}, and the step does not write to it{at}"
    return _held("data" if is_object else "weights", leaf.name, text)


def _explain_weight(
    kind: str, name: str, what: str, is_alone: bool, at: str = ""
) -> Explanation:
    """Explains a parameter or buffer that was bad before the step, or the forward."""
    unit = "forward" if is_alone else "step"
    text = f"the {kind} {name} held {what} before the {unit}{at}"
    return _held("weights", name, text)


def first_bad_weight(
    models: Mapping[str, nn.Module],
    *kinds: str,
    masks: bool = False,
    is_alone: bool = False,
    within: str | None = None,
) -> Explanation | None:
    """The explanation of the first parameter or buffer that is bad, or None.

    Args:
        models: The models.
        kinds: What to look at.
        masks: Whether -inf counts.
        is_alone: Whether a forward is explained that no step follows.
        within: The name of the module that has it, or its own; None for any.
    """
    named = [
        (kind, name, tensor)
        for kind, name, tensor in names_of(models)
        if kind in kinds and within in (None, name, module_of_parameter(name))
    ]
    _, bad = sizes_and_bad([(name, each) for _, name, each in named], masks)
    found = [each for each in named if each[1] in bad]
    if not found:
        return None
    (kind, name, tensor), *others = found
    what = _counts(tensor, names_rows=True)
    if not others:
        return _explain_weight(kind, name, what, is_alone)
    names = some([each[1] for each in others], _FEW)
    explained = _explain_weight(kind, name, what, is_alone, f", as did {names}")
    explained.advice = _advice_on([each[1] for each in found])
    return explained


def _advice_on(names: Sequence[str]) -> str:
    """Advises on weights that were bad from the start; of biases by a line, too."""
    patterns = {pattern_of(name) for name in names}
    which = f"the {len(names)} weights that match `{min(patterns)}`"
    which = which if len(patterns) == 1 else some(names, _FEW)
    of_biases = all(name.endswith("bias") for name in names)
    return f"initialize {which}{_TO_0 * of_biases}, or load them again"


_TO_0 = " (`for p in model.parameters(): p.data.nan_to_num_(0, 0, 0)`)"


def _counts(tensor: torch.Tensor | None, names_rows: bool) -> str:
    values = None if tensor is None else as_wide(tensor)
    if values is None:
        return "non-finite values"
    what = summary_of(values).nonfinite_text()
    rows = _bad_rows(values) if names_rows else []
    columns = [] if rows else bad_columns(values)
    lines = numbered("row", rows) if rows else numbered("column", columns or [0])
    return f"{what} (all in {lines})" if rows or columns else what


_FEW_ROWS = 4  # more are no odd ones out that a sentence names; chosen


def _bad_rows(values: torch.Tensor) -> list[int]:
    """The rows that hold all non-finite values, where they are few of many, or none."""
    if values.dim() < 2 or len(values) <= 2 * _FEW_ROWS:
        return []
    is_bad = ~values.isfinite().flatten(1).all(1)
    rows = is_bad.nonzero().flatten().tolist()
    return rows if len(rows) <= _FEW_ROWS else []
