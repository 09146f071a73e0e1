"""A bound of an argument, written where the argument is assigned.

A log scale is read by the exp that overflows, and by the line that adds it up. Where no
dtype holds the result there is no true value that a bound of the one might keep, and
all readers have to agree: each is given the bounded value in the replay.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace

from ..syntax import expression_of
from ..torch_calls import TorchCall, Value
from .call_patch import CallPatch, RuleChange
from .edited_lines import remedy_of
from .patterns import Found
from .rules import READERS, RULES, with_numbers
from .source import NOT_WRITTEN, Edit, NotWrittenError, SourceText, node_at, rebuilt
from .trials import Trial
from .written import operand_of

_BOUND = "y.clamp(max=N)"


def bounded_where_assigned(
    trial: Trial, root: TorchCall, found: Found, calls: Sequence[TorchCall]
) -> Trial:
    """The trial of a bound for all that reads the argument of a call.

    Args:
        trial: The trial of the bound for the call alone.
        root: The call.
        found: What is put there.
        calls: All calls of the replay.

    Returns:
        The trial; the one that was given where nothing else reads the argument, or it
        is not assigned once.
    """
    value, number = root.operands[0], found.numbers["N"]
    readers = [e for e in calls if e is not root and value in e.inputs]
    is_bound = found.new == f"CALL_ON({_BOUND})"
    if not (is_bound and readers and isinstance(trial.patch, CallPatch)):
        return trial
    changes = list(trial.patch.changes)
    for each in readers:
        place = each.args.index(value) if value in each.args else len(READERS)
        alike = [call for call in calls if call.key == each.key]
        is_same = place < len(READERS) and all(_reads(e, place, value) for e in alike)
        if each.is_in_place or not is_same:
            return trial
        rule = RULES.index(READERS[place])
        changes.append(RuleChange(each.key, rule, root.dtype, number))
    try:
        edits = (_edit(root, found),)
        remedy = remedy_of(f"{trial.remedy.text} where it is assigned", edits)
    except NOT_WRITTEN:
        return trial
    patch = CallPatch(tuple(dict.fromkeys(changes)))
    return replace(trial, remedy=remedy, patch=patch, edits=edits)


def _reads(call: TorchCall, place: int, value: Value) -> bool:
    """True if a call was given what a line has made that made a value."""
    given = call.args[place] if place < len(call.args) else None
    made = given.call if isinstance(given, Value) else None
    return made is not None and value.call is not None and made.key == value.call.key


def _is_in(source: SourceText, node: ast.AST, scope: ast.AST | None) -> bool:
    return any(each is scope for each in source.around(node))


def _edit(root: TorchCall, found: Found) -> Edit:
    """The edit of the one assignment of an argument.

    Raises:
        NotWrittenError: If there is none, or several.
    """
    site, made = root.sites[0], root.operands[0].call
    source = SourceText.of(site.file)
    name = operand_of(root, 0, node_at(site))
    if not isinstance(name, ast.Name):
        raise NotWrittenError("it has no name")
    functions = (e for e in source.around(name) if isinstance(e, ast.FunctionDef))
    scope = next(functions, None)
    stores = [n for n in source.stores if n.id == name.id and _is_in(source, n, scope)]
    assigned = source.parents[stores[0]] if len(stores) == 1 else None
    if not isinstance(assigned, ast.Assign) or len(assigned.targets) > 1:
        raise NotWrittenError("it is not assigned once")
    lines = range(assigned.lineno, (assigned.end_lineno or assigned.lineno) + 1)
    sites = () if made is None else made.sites
    if not any(each.code is site.code and each.line in lines for each in sites):
        raise NotWrittenError("another line has made it")
    bound = expression_of(with_numbers(_BOUND, found.numbers))
    names = [n for n in ast.walk(bound) if isinstance(n, ast.Name)]
    return Edit.of(
        site.file, assigned.value, rebuilt(bound, {names[0]: assigned.value})
    )
