"""Writes that torch does not count: by raw kernels, NumPy arrays, other streams.

A value that was finite after one call, and non-finite at its next use, was written to
in between: its reader is not its maker. That is known where it was scanned at both.
"""

from __future__ import annotations

from torch import nn

from ... import _C
from ...base.module_kinds import is_layer_of_torch
from ...base.text import either
from ...base.tree import entry_label
from .bad_frames import BadFrame
from .call_order import Called, Calls
from .given import caller_of
from .verdict import Origin

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
