"""Writes that torch does not count: by raw kernels, NumPy arrays, other streams.

A value that was finite after one call, and non-finite at its next use, was written to
in between: its reader is not its maker. That is known where the value was scanned at
both, or where the reader's layer cannot make its output from what was seen.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ... import _C
from ...base.modules import (
    is_bounded,
    is_layer_of_torch,
    is_linear,
    is_normalization,
    is_of_torch,
    parameters_of,
)
from ...base.text import either
from ...base.tree import entry_label
from ...scanner.ops import scan
from .bad_frames import BadFrame
from .call_order import Called, Calls
from .foreign_hooks import has_earlier_hooks
from .given import caller_of
from .remarks import limit_of
from .verdict import Origin

_SQUARABLE = 1e15  # squares of smaller numbers are finite in float32: their mean, too
_MOST = 6  # names in a sentence; chosen
_HOW = "a raw kernel, a NumPy array or another stream changed it"


def written_unseen(first: BadFrame, user: Called, calls: Calls) -> Origin | None:
    """Finds a bad input of a call that was finite after an earlier call.

    Args:
        first: The first bad frame.
        user: Its call.
        calls: The calls of all watched models.
    """
    for entry in first.bad_inputs:
        seen = _finite_after(entry, user, calls)
        if seen is not None:
            label = entry_label(entry.place)
            what = (
                f"`{label}` of {user.name} was finite after {seen.name}, and torch "
                f"counted no write to it since; {_HOW}"
            )
            return _origin([label], what, seen, _writers(seen, user, calls))
    return None


def impossible(first: BadFrame, user: Called, calls: Calls) -> Origin | None:
    """Finds the origin if a layer cannot have made its output from what was seen.

    That is if its inputs were scanned before its call alone. Incurs a CPU-GPU sync for
    a layer with weights.
    """
    labels, module = stale_inputs(first), user.module
    if not labels or module is None or not _stays_finite(module, first):
        return None
    stale = next(e for e in first.entries if e.seen_in and e.role == _C.Role.INPUT)
    seen = calls.find(first.watch, stale.seen_in)
    if seen is None:
        return None
    what = (
        f"{user.name} cannot make it of `{labels[0]}` as that was after {seen.name}, "
        f"and torch counted no write to it since; its kernel failed, or {_HOW}"
    )
    origin = _origin(labels, what, seen, _writers(seen, user, calls))
    return replace(origin, candidates=[*origin.candidates, user.name])


def stale_inputs(frame: BadFrame) -> list[str]:
    """Lists the finite inputs of a call that were scanned before it, and not again."""
    return [
        entry_label(entry.place)
        for entry in frame.entries
        if entry.role == _C.Role.INPUT and entry.seen_in and not entry.is_bad
    ]


def never_writes(module: nn.Module | None) -> bool:
    """True if a module is known not to write to its inputs: torch's layers."""
    return is_layer_of_torch(module) and not getattr(module, "inplace", False)


def only_calls_submodules(module: nn.Module | None) -> bool:
    """True if a module has no code of its own."""
    if not isinstance(module, nn.Sequential) or "forward" in vars(module):
        return False
    return type(module).forward is nn.Sequential.forward


def _stays_finite(module: nn.Module, frame: BadFrame) -> bool:
    """True if a layer's output is finite for all inputs as large as those seen."""
    inputs = [entry for entry in frame.entries if entry.role == _C.Role.INPUT]
    if has_earlier_hooks(module) or any(entry.nonfinite_kinds for entry in inputs):
        return False
    if is_bounded(module):
        return True
    largest = max((e.stat.abs_max or 0.0 for e in inputs if e.stat), default=0.0)
    if is_normalization(module) and is_of_torch(module):
        if not getattr(module, "eps", None) or largest > _SQUARABLE:
            return False
        largest = 1.0
    elif not is_linear(module):
        return False
    weights = scan([weight.detach() for weight in parameters_of(module)])
    if not all(stat.is_finite for stat in weights):
        return False
    count = max((stat.numel for stat in weights), default=1)
    factor = max((stat.abs_max or 0.0 for stat in weights), default=1.0)
    bound = count * max(largest, 1.0) * max(factor, 1.0)
    limits = [limit_of(e.dtype) for e in frame.entries if e.role == _C.Role.OUTPUT]
    return all(limit is not None and 2 * bound < limit for limit in limits)


def _finite_after(entry: _C.Entry, user: Called, calls: Calls) -> Called | None:
    """Returns the call after which a bad input was seen finite, if torch counted none.

    Tensors that are not remembered are recognized as the output of a call by the node
    of autograd that computed them.
    """
    if entry.is_rewritten:
        return calls.find(user.watch, entry.seen_in)
    if entry.version or not entry.node or user.call.is_traced:
        return None
    return calls.that_made(entry.node, user)


def _writers(seen: Called, user: Called, calls: Calls) -> list[str]:
    """Lists whose code ran between two calls, or within the second one."""
    chain = calls.chain(user)
    between = calls.between(seen, user)
    names = [
        each.name
        for each in [*between, *chain]
        if not (never_writes(each.module) or only_calls_submodules(each.module))
    ]
    if calls.chain(seen)[-1] != chain[-1]:
        names.append(caller_of(user.watch))
    return list(dict.fromkeys(names))


def _origin(labels: list[str], what: str, seen: Called, names: list[str]) -> Origin:
    maker = f"{what}, in {either([*names, 'another thread'], _MOST)}"
    few = names if len(names) <= _MOST else []
    return Origin("unclear", "unclear", maker, few, seen.name, stale_inputs=labels)
