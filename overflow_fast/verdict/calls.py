"""The calls of a step's modules: their order, and the calls around them."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from .. import _C
from ..capture.watch import ModelWatch
from ..core.modules import children_of
from ..torch_internals.module_internals import (
    forward_hooks,
    forward_pre_hooks,
    global_forward_hooks,
    global_forward_pre_hooks,
    is_dropout,
)
from .verdict import FORWARDS


class Called(NamedTuple):
    """A module's call, and the watch that recorded it."""

    watch: ModelWatch
    call: _C.Call

    @property
    def name(self) -> str:
        """The module's qualified name."""
        return name_of(self.watch, self.call.module)

    def encloses(self, inner: Called) -> bool:
        """True if `inner` ran within it, by names, order and inputs."""
        a, b = self.call, inner.call
        is_around = a.order > b.order and (a.batch, a.kind) == (b.batch, b.kind)
        # Its inputs did not exist yet when the other call ended.
        is_later = a.thread == b.thread and a.begins_after > b.ends_before
        return is_around and not is_later and self.watch is inner.watch

    @property
    def may_pass_through(self) -> bool:
        """True if the call may have returned one of its inputs."""
        module = self.watch.module_at(self.call.module)
        is_known = isinstance(module, nn.Identity) or is_dropout(module)
        return is_known or self.call.begins_after >= self.call.ends_before


class Calls:
    """All known calls, in the order in which they ended.

    Args:
        watches: The watched models.
        until: The order of the frame before which they have ended; None for all.

    Attributes:
        watches: The watched models.
    """

    def __init__(self, watches: Sequence[ModelWatch], until: int | None = None) -> None:
        self.watches = watches
        found = [
            Called(watch, call)
            for watch in watches
            for call in watch.recorder.calls()
            if until is None or call.order < until
        ]
        found.sort(key=_order)
        self._all, self._gradients = list[Called](), list[Called]()
        for each in found:
            is_forward = each.call.kind in FORWARDS
            (self._all if is_forward else self._gradients).append(each)
        self._modules: dict[tuple[int, int], list[Called]] = {}
        for called in self._all:
            watch, call = called
            self._modules.setdefault((id(watch), call.module), []).append(called)
        self._callers: dict[int, Called | None] = {}
        self._holders: dict[int, dict[int, list[tuple[int, int]]]] = {}

    def of_frame(self, watch: ModelWatch, order: int) -> Called | None:
        """Returns the call whose frame has this order."""
        place = bisect.bisect_left(self._all, order, key=_order)
        if place == len(self._all) or self._all[place].call.order != order:
            return None
        return self._all[place] if self._all[place].watch is watch else None

    def has_any(self, watch: ModelWatch) -> bool:
        """True if a call of a watch's modules is known."""
        return any(called.watch is watch for called in self._all)

    def last_of(self, watch: ModelWatch, module: int, before: int) -> Called | None:
        """Returns the last call of a module that ended before a frame."""
        found = self._modules.get((id(watch), module), [])
        place = bisect.bisect_left(found, before, key=_order)
        return found[place - 1] if place else None

    def caller(self, called: Called) -> Called | None:
        """Returns the nearest watched call around one; None for an outermost call."""
        order = called.call.order
        if order not in self._callers:
            self._callers[order] = self._find_caller(called)
        return self._callers[order]

    def _find_caller(self, called: Called) -> Called | None:
        for index in called.watch.modules.ancestors(called.call.module):
            found = self._modules.get((id(called.watch), index), [])
            place = bisect.bisect_right(found, called.call.order, key=_order)
            if place < len(found) and found[place].encloses(called):
                return found[place]
        return None

    def chain(self, called: Called) -> list[Called]:
        """Lists a call and all watched calls around it, from the innermost."""
        chain, around = [called], self.caller(called)
        while around is not None:
            chain.append(around)
            around = self.caller(around)
        return chain

    def other_callers(self, called: Called) -> list[str]:
        """Lists the modules that share a call's module, which may have called it too.

        A module that others hold as well is named by the first of them.
        """
        module = called.watch.module_at(called.call.module)
        by_name = set(called.watch.modules.ancestors(called.call.module))
        return [
            name_of(watch, index)
            for watch in self.watches
            for index in sorted(self._above(watch, module), key=watch.modules.place)
            if watch.modules.has_forward(index)
            if not (watch is called.watch and index in by_name)
            if self._may_be_around(watch, index, called)
        ]

    def _above(self, watch: ModelWatch, module: nn.Module | None) -> set[int]:
        """The modules of a watch that hold another one, directly or through others."""
        holders = self._holders.get(id(watch))
        if holders is None:
            holders = self._holders[id(watch)] = {}
            for index, each in watch.modules.present():
                for child in children_of(each).values():
                    holders.setdefault(id(child), []).append((index, id(each)))
        found, waiting = set[int](), [id(module)]
        while waiting:
            for index, holder in holders.get(waiting.pop(), ()):
                if index not in found and holder != id(module):
                    found.add(index)
                    waiting.append(holder)
        return found

    def _may_be_around(self, watch: ModelWatch, index: int, called: Called) -> bool:
        found = self._modules.get((id(watch), index), [])
        if not watch.modules.is_selected(index):
            return True
        place = bisect.bisect_right(found, called.call.order, key=_order)
        if watch is called.watch:
            return any(each.encloses(called) for each in found[place:])
        return place < len(found)

    def before(self, called: Called, within: Called | None) -> Called | None:
        """Returns the last call that ended before one began, in the same outer call."""
        end = bisect.bisect_left(self._all, called.call.order, key=_order)
        for other in reversed(self._all[:end]):
            chain = self.chain(other)
            if called not in chain and (within is None or within in chain):
                place = len(chain) if within is None else chain.index(within)
                return chain[place - 1]
        return None

    def last_within(self, called: Called) -> Called | None:
        """Returns the last call that a call itself has made."""
        end = bisect.bisect_left(self._all, called.call.order, key=_order)
        for other in reversed(self._all[:end]):
            if self.caller(other) == called:
                return other
        return None

    def within(self, called: Called, before: int | None = None) -> Iterator[Called]:
        """Yields the calls that ran within one, up to a frame with an order."""
        end = called.call.order if before is None else before
        place = bisect.bisect_left(self._all, end, key=_order)
        return (c for c in self._all[:place] if called in self.chain(c))

    def users(self, called: Called) -> list[str]:
        """Lists the modules that can have used a call's output, as they ended."""
        start = bisect.bisect_right(self._all, called.call.order, key=_order)
        if called.may_pass_through:  # others may have been given it before
            start = 0
        return list(dict.fromkeys(other.name for other in self._all[start:]))

    def after(self, called: Called, within: Called | None, before: int) -> list[Called]:
        """Lists later calls of the same outer call that ended before a frame."""
        start = bisect.bisect_right(self._all, called.call.order, key=_order)
        if called.may_pass_through:
            start = 0
        end = bisect.bisect_left(self._all, before, key=_order)
        around = None if within is None else within.call.order
        return [
            other
            for other in self._all[start:end]
            if other != called and _order_of(self.caller(other)) == around
        ]

    def in_backward(self, watch: ModelWatch, module: int, before: int) -> list[Called]:
        """Lists a module's calls that one backward may run through, before a frame.

        Those since the last gradient of an output before its last call.
        """
        last = self.last_of(watch, module, before)
        if last is None:
            return []
        place = bisect.bisect_left(self._gradients, last.call.order, key=_order)
        begin = self._gradients[place - 1].call.order if place else -1
        found = self._modules[id(watch), module]
        return [c for c in found if begin < c.call.order < before]

    def gradients(self, begin: int, end: int) -> list[Called]:
        """Lists the gradients of outputs that came between two frames."""
        first = bisect.bisect_right(self._gradients, begin, key=_order)
        return self._gradients[
            first : bisect.bisect_left(self._gradients, end, key=_order)
        ]


def _order(called: Called) -> int:
    return called.call.order


def _order_of(called: Called | None) -> int | None:
    return None if called is None else called.call.order


def name_of(watch: ModelWatch, index: int) -> str:
    """Returns the qualified name of a module, or "the model"."""
    return watch.name_at(index) or "the model"


def joined(words: Iterable[str], most: int = 6) -> str:
    """Joins alternatives as text, cut after a number of them."""
    listed = list(words)
    if len(listed) > most:
        return f"{', '.join(listed[:most])} or one of {len(listed) - most} more"
    return " or ".join([", ".join(listed[:-1]), listed[-1]][len(listed) < 2 :])


# Modules whose inputs or outputs may be changed by code that is not theirs.


_OURS = (_C.run_hook, _C.run_paused)


def never_writes(module: nn.Module | None) -> bool:
    """True if a module is known not to write to its inputs: torch's layers."""
    return is_layer_of_torch(module) and not getattr(module, "inplace", False)


def is_layer_of_torch(module: nn.Module | None) -> bool:
    """True if a module is one of torch.nn's, and has no submodules."""
    if module is None or children_of(module):
        return False
    return type(module).__module__.startswith("torch.nn.")


def only_calls_submodules(module: nn.Module | None) -> bool:
    """True if a module's own code only calls its submodules in a row."""
    if not isinstance(module, nn.Sequential) or "forward" in vars(module):
        return False
    return type(module).forward is nn.Sequential.forward


def has_hooks(module: nn.Module) -> bool:
    """True if hooks of others run around a module's forward."""
    every = (has_pre_hooks, has_earlier_hooks, has_later_hooks)
    return any(has_any(module) for has_any in every)


def has_pre_hooks(module: nn.Module | None) -> bool:
    """True if a hook of others may replace a module's inputs."""
    hooks = {} if module is None else forward_pre_hooks(module)
    every = (*hooks.values(), *global_forward_pre_hooks().values())
    return not all(map(_is_ours, every))


def has_earlier_hooks(module: nn.Module | None) -> bool:
    """True if a hook of others may replace an output before it is scanned."""
    hooks = [] if module is None else list(forward_hooks(module).values())
    ours = next((i for i, hook in enumerate(hooks) if _is_ours(hook)), len(hooks))
    return not all(map(_is_ours, (*global_forward_hooks().values(), *hooks[:ours])))


def has_later_hooks(module: nn.Module | None) -> bool:
    """True if a hook of others may replace an output after it was scanned."""
    hooks = [] if module is None else list(forward_hooks(module).values())
    ours = [i for i, hook in enumerate(hooks) if _is_ours(hook)]
    return bool(ours) and not all(map(_is_ours, hooks[ours[0] :]))


def _is_ours(hook: object) -> bool:
    if isinstance(hook, functools.partial):
        return hook.func in _OURS
    owner = getattr(hook, "__self__", None)
    return type(owner).__module__.startswith("overflow_fast.")
