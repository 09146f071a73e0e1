"""Writes calls in a wider dtype, from the first ones to where a result fits again."""

from __future__ import annotations

import ast
import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

from ...base.text import dtype_name
from ...base.torch_ops import has, is_sum
from ..syntax import expression_of
from ..torch_calls import Key, TorchCall, Value
from ..wider import CAST_METHODS
from .call_patch import InWider
from .edited_lines import inner_place, shown_at
from .patterns import Input
from .source import NOT_WRITTEN, Edit, NotWrittenError, node_at
from .written import Writer, first_turns, short_text


def wider_edits(change: InWider, calls: Sequence[TorchCall]) -> tuple[Edit, ...]:
    """The edits that compute calls in a wider dtype.

    Args:
        change: The first calls and the last ones.
        calls: All calls of the replay without it.

    Raises:
        NotWrittenError: If it has no text, with the reason.
    """
    found: dict[object, tuple[Edit, ...]] = {}
    root: TorchCall | None = None
    written, rare = {*first_turns(calls)}, _now_and_then(calls)
    for call, is_end, casts in _changed(change, calls):
        if call not in written:
            continue
        root = call if call.key in change.roots else root
        edits = _edits(change, call, is_end, casts, root, calls)
        if call.key in rare and isinstance(node_at(call.sites[0]), ast.BinOp):
            raise NotWrittenError("it may be of no tensor in some turns of a loop")
        if found.setdefault(call.key, edits) != edits:
            raise NotWrittenError("it differs from one turn of a loop to another")
    return tuple(edit for edits in found.values() for edit in edits)


def _now_and_then(calls: Sequence[TorchCall]) -> set[Key]:
    """The keys of calls that ran less often than another one on their line."""
    runs = Counter(call.key for call in calls)
    lines = {call.key: call.sites[0][:2] for call in calls if call.sites}
    most = dict[object, int]()
    for key, line in lines.items():
        most[line] = max(most.get(line, 0), runs[key])
    return {key for key, line in lines.items() if runs[key] < most[line]}


def has_text(
    change: InWider, roots: Sequence[TorchCall], calls: Sequence[TorchCall]
) -> bool:
    """True if the first calls can be written in a wider dtype."""
    try:
        for root in first_turns(roots):
            casts = _casts_of(change, root, True, set())
            _edits(change, root, False, casts, root, calls)
    except NOT_WRITTEN:
        return False
    return True


def _changed(
    change: InWider, calls: Sequence[TorchCall]
) -> Iterator[tuple[TorchCall, bool, list[int]]]:
    """Yields what differs: a call, if its result is cast back, operands to be cast."""
    wide: set[Value] = set()
    for call in calls:
        is_root = call.key in change.roots
        if not is_root and wide.isdisjoint(call.inputs):
            continue
        if call.is_in_place:
            if is_root:
                raise NotWrittenError("it writes to its argument")
            wide.update(call.results)
            continue
        is_end = call.key in change.ends
        if not is_end and call.key not in change.stops:
            wide.update(call.results)
        casts = _casts_of(change, call, is_root, wide)
        if is_end or casts or (is_root and call.name == "to"):
            yield call, is_end, casts


def _casts_of(
    change: InWider, call: TorchCall, is_root: bool, wide: set[Value]
) -> list[int]:
    """The places of a call's operands that are to be cast to the wider dtype."""
    narrow = change.narrow
    if call.name == "to":
        if not is_root and any(v.dtype == narrow for v in call.results):
            raise NotWrittenError(
                f"a later cast to {dtype_name(narrow)} is a wider one"
            )
        return []
    half = [
        value for value in call.inputs if value.dtype == narrow and value not in wide
    ]
    if is_root and not half and wide.isdisjoint(call.inputs):
        raise NotWrittenError(f"autocast makes it {dtype_name(narrow)}")
    # A number in a tensor widens no tensor that has dimensions.
    promotes = any(value in wide and value.shape for value in call.inputs)
    if not half or (not is_root and promotes and has(call.name, "promotes")):
        return []
    operands = call.operands
    casts = [i for i, each in enumerate(operands) if each in half]
    if len(casts) != len(half):
        raise NotWrittenError("an argument of it has no text of its own")
    return casts


def _edits(
    change: InWider,
    call: TorchCall,
    is_end: bool,
    casts: list[int],
    root: TorchCall | None,
    calls: Sequence[TorchCall],
) -> tuple[Edit, ...]:
    writer, cast = Writer(call, calls), CAST_METHODS[change.wide]
    if isinstance(writer.node, ast.AugAssign):
        raise NotWrittenError("it writes to its argument")
    if casts and inner_place(call):  # `keep_in_fp32` has the weights in float32, too
        raise NotWrittenError("it is a module's")
    if casts:
        new = writer.with_operands(
            call,
            {place: _cast(writer.text_of(Input(call, place)), cast) for place in casts},
        )
    elif call.name == "to" and not is_end:
        new = _cast(writer.text_of(Input(call, 0)), cast)
    else:
        new = writer.node
    if is_end:
        new = _cast_back(new, root, writer, CAST_METHODS[change.narrow])
    return writer.edits_to(new)


def _cast(of: ast.expr, name: str) -> ast.expr:
    return ast.Call(ast.Attribute(of, name), [], [])


def _cast_back(
    of: ast.expr, root: TorchCall | None, writer: Writer, method: str
) -> ast.expr:
    """A cast to the dtype that the first call was given, where that has a name."""
    operands = [] if root is None else root.operands
    for place, each in enumerate(operands):
        if root is not None and isinstance(each, Value):
            with contextlib.suppress(NotWrittenError):
                text = writer.name_of(root, place)
                if text.isidentifier():
                    dtype = expression_of(f"{text}.dtype")
                    return ast.Call(ast.Attribute(of, "to"), [dtype], [])
    return _cast(of, method)


def wider_text(change: InWider, calls: Sequence[TorchCall]) -> str:
    """The calls that are computed in a wider dtype, up to which line, in words."""
    wide, narrow = dtype_name(change.wide), dtype_name(change.narrow)
    roots = [*first_turns(call for call in calls if call.key in change.roots)]
    if all(root.name == "to" for root in roots):
        return f"cast to {wide} instead of {narrow}"
    file, line = shown_at(roots[-1])
    ends = [shown_at(call) for call in calls if call.key in change.ends]
    lines = [end for end_file, end in ends if end_file == file]
    until = f", up to line {lines[-1]}" if lines and lines[-1] != line else ""
    return f"compute {_named(roots)} in {wide}{until}"


def _named(roots: Sequence[TorchCall]) -> str:
    """The first calls in words, from three on by their lines in one file."""
    texts = list(dict.fromkeys(f"`{short_text(root)}`" for root in roots))
    places = [shown_at(root) for root in roots]
    if len(texts) < 3 or len(dict(places)) > 1:
        return " and ".join(texts)
    lines = sorted({line for _, line in places})
    are_sums = all(is_sum(root.name) for root in roots)
    what = "the sums" if are_sums else f"the {len(texts)} calls"
    if len(lines) == 1:
        return f"{what} of line {lines[0]}"
    return f"{what} of lines {lines[0]} {'to' if len(lines) > 2 else 'and'} {lines[-1]}"
