"""Modules of the program whose own forwards may write to them, as their code reads.

Such as a codebook that k-means begins, or a normalization that the first batch does: in
a step that no forward was seen to write in before, there would be no copy to go back
to. The code of a class is read once: its forward, and the functions of the program that
this calls by a name of the class or of its file. None of it runs.
"""

from __future__ import annotations

import dis
import itertools
import types
import weakref
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from ...base.modules import children_of

# Without one of these, autograd refuses to write to a trained weight.
_UNTRACKED = {"no_grad", "inference_mode", "set_grad_enabled", "data"}
_MOST = 64  # functions of a class that are read; chosen, not measured
_LOADS = ("LOAD_ATTR", "LOAD_METHOD")


class Writes(NamedTuple):
    """The writes that a class's code may make.

    Attributes:
        attributes: True for any attribute of the module.
        weights: True for weights.
        carried: The attributes that it may read before it has written to them: these
            hold what an earlier call has left.
    """

    attributes: bool
    weights: bool
    carried: frozenset[str] = frozenset()


_known: weakref.WeakKeyDictionary[type, Writes] = weakref.WeakKeyDictionary()


def writes_of(module: nn.Module) -> Writes:
    """The writes that a module's class may make in its forward; none of torch's do."""
    kind = type(module)
    if kind not in _known:
        found = [] if _is_torchs(kind) else list(_writes_in(kind))
        _known[kind] = Writes(
            any(each.attributes for each in found),
            any(each.weights for each in found),
            frozenset().union(*(each.carried for each in found)),
        )
    return _known[kind]


def written_by(module: nn.Module) -> set[nn.Module]:
    """The modules whose weights a module's own code may write to, if it may to any.

    Those are itself, and the layers of torch's in it.
    """
    found = {module} if writes_of(module).weights else set[nn.Module]()
    waiting = list(found)
    for each in waiting:  # it grows meanwhile
        layers = {e for e in children_of(each).values() if _is_torchs(type(e))}
        waiting += layers - found
        found |= layers
    return found


def _is_torchs(kind: type) -> bool:
    return kind.__module__.startswith("torch.")


def _writes_in(kind: type) -> Iterator[Writes]:
    """Yields the writes of a class's forward, and of each function that it calls."""
    bases = [vars(e) for e in kind.__mro__ if not _is_torchs(e)]
    waiting = [(own.get("forward"), False) for own in bases]
    seen = set[types.FunctionType]()
    for function, is_untracked in waiting:  # it grows meanwhile
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        if len(seen) == _MOST:
            return
        seen.add(function)
        around, within = function.__globals__, getattr(function, "__wrapped__", None)
        is_torchs = str(around.get("__name__")).startswith("torch.")
        if within is not None:  # decorated, maybe by @torch.no_grad()
            waiting.append((within, is_untracked or is_torchs))
        if is_torchs:
            continue
        code = _Code.of(function.__code__)
        is_untracked |= not _UNTRACKED.isdisjoint(code.names)
        yield Writes(code.sets, code.writes and is_untracked, code.carried)
        waiting += [(e[name], False) for e in bases for name in code.reads & e.keys()]
        waiting += [(around[name], False) for name in code.names & around.keys()]


class _Code(NamedTuple):
    """The parts of a function's code, and of functions in it, that count here.

    Attributes:
        names: All names.
        reads: The attributes that it reads of its first argument: the module.
        sets: It sets an attribute of that.
        writes: It writes to attributes, items, or in place.
        carried: See `Writes`.
    """

    names: set[str]
    reads: set[str]
    sets: bool
    writes: bool
    carried: frozenset[str]

    @classmethod
    def of(cls, code: types.CodeType) -> _Code:
        """Reads a code, of which nothing runs."""
        module, codes = "".join(code.co_varnames[:1]), list(_codes_in(code))
        names = {name for each in codes for name in each.co_names}
        writes = any(name.endswith("_") and name[-2:] != "__" for name in names)
        sets, reads, last = False, set[str](), None
        carried, written = set[str](), set[str]()  # certainly, by what ran before
        for each in itertools.chain.from_iterable(map(dis.get_instructions, codes)):
            if each.opname == "EXTENDED_ARG":
                continue
            if each.is_jump_target:
                written.clear()
            if each.opname == "STORE_ATTR":
                written.add(each.argval)
            elif each.opname in _LOADS and each.argval not in written:
                carried.add(each.argval)
            writes |= each.opname in ("STORE_ATTR", "STORE_SUBSCR")
            if last == module and each.argval in names:
                sets |= each.opname == "STORE_ATTR"
                reads.add(each.argval)
            value = each.argval  # of some instructions the names of two variables
            last = value[-1] if isinstance(value, tuple) and value else value
        return cls(names, reads, sets, writes, frozenset(carried))


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a code, and those of functions and comprehensions in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes_in(inner)
