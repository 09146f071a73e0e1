"""The calls of a step's modules: their order, and the calls around each."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from ... import _C
from ...base.modules import children_of, module_of_parameter
from ...torch_internals.module_internals import is_dropout
from ..watching.watch import ModelWatch
from .roles import FORWARDS


def name_of(watch: ModelWatch, index: int) -> str:
    """Returns the qualified name of a module, or "the model"."""
    return watch.name_at(index) or "the model"


class Called(NamedTuple):
    """A module's call, and the watch that recorded it."""

    watch: ModelWatch
    call: _C.Call

    @property
    def name(self) -> str:
        """The module's qualified name."""
        return name_of(self.watch, self.call.module)

    @property
    def module(self) -> nn.Module | None:
        """The module; None if it is gone."""
        return self.watch.module_at(self.call.module)

    @property
    def key(self) -> tuple[int, int]:
        """The watch and the module."""
        return id(self.watch), self.call.module

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
        is_known = isinstance(self.module, nn.Identity) or is_dropout(self.module)
        return is_known or self.call.begins_after >= self.call.ends_before


class Calls:
    """All known calls, in the order in which they ended.

    Args:
        watches: The watched models.

    Attributes:
        watches: The watched models.
    """

    def __init__(self, watches: Sequence[ModelWatch]) -> None:
        self.watches = watches
        found = [Called(w, call) for w in watches for call in w.recorder.calls()]
        found.sort(key=_order)
        self._all = [each for each in found if each.call.kind in FORWARDS]
        self._gradients = [each for each in found if each.call.kind not in FORWARDS]
        self._of: dict[tuple[int, int], list[Called]] = {}
        for called in self._all:
            self._of.setdefault(called.key, []).append(called)
        self._callers: dict[int, Called | None] = {}

    def has_any(self, watch: ModelWatch) -> bool:
        """True if a call of a watch's modules is known."""
        return any(called.watch is watch for called in self._all)

    def last_of(self, watch: ModelWatch, module: int, before: int) -> Called | None:
        """Returns the last call of a module that ended before a frame."""
        found = _between(self._of.get((id(watch), module), []), -1, before)
        return found[-1] if found else None

    def find(self, watch: ModelWatch, order: int) -> Called | None:
        """Returns the call whose frame has an order; None if it is not known."""
        found = _between(self._all, order - 1, order + 1)
        return next((each for each in found if each.watch is watch), None)

    def chain(self, called: Called | None) -> list[Called]:
        """Lists a call and all watched calls around it, innermost first."""
        chain = list[Called]()
        while called is not None:
            chain.append(called)
            called = self._caller(called)
        return chain

    def _caller(self, called: Called) -> Called | None:
        """Returns the nearest watched call around one; None for an outermost call."""
        order = called.call.order
        if order not in self._callers:
            self._callers[order] = self._find_caller(called)
        return self._callers[order]

    def _find_caller(self, called: Called) -> Called | None:
        watch, call = called
        for index in watch.modules.ancestors(call.module) if call.module else []:
            found = self._of.get((id(watch), index), [])
            place = bisect.bisect_right(found, call.order, key=_order)
            if place < len(found) and found[place].encloses(called):
                return found[place]
        return None

    def last_within(self, around: Called | None, before: int) -> Called | None:
        """Returns the last call that one call itself has made before a frame.

        Args:
            around: The call; None for the code that makes the outermost calls.
            before: The frame's order.
        """
        found = reversed(_between(self._all, -1, before))
        return next((each for each in found if self._caller(each) == around), None)

    def that_made(self, node: int, user: Called) -> Called | None:
        """Finds the call that computed a tensor, by the tensor's node of autograd.

        Autograd numbers its nodes as they are made. The call is the first one at whose
        end that node was the newest, and at whose beginning it was not there yet.

        Args:
            node: One more than the node's number.
            user: The call that was given what the node computed.
        """
        for called in self._all:
            call = called.call
            if call.order >= user.call.order:
                return None
            is_here = call.thread == user.call.thread and call.ends_before == node
            if is_here and call.begins_after < node:
                return called
        return None

    def between(self, first: Called, last: Called) -> list[Called]:
        """Lists the calls that ended between the ends of two others."""
        return _between(self._all, first.call.order, last.call.order)

    def within(self, around: Called, before: int) -> list[Called]:
        """Lists the calls that ran within one, at any depth, before a frame."""
        found = _between(self._all, -1, before)
        return [each for each in found if around in self.chain(each)]

    def users(self, called: Called, before: int) -> list[Called]:
        """Lists the calls that had a gradient and can have used the output of one.

        Args:
            called: The call.
            before: The order of a frame, before which they had it.
        """
        # Where it returned its input, others may have been given that before.
        begin = -1 if called.may_pass_through else called.call.order
        seen = {each.key for each in self.gradients(called.call.order, before)}
        return [
            each
            for each in _between(self._all, begin, before)
            if each != called and (each.key in seen or each.call.has_unseen)
        ]

    def in_backward(self, watch: ModelWatch, module: int, before: int) -> list[Called]:
        """Lists a module's calls that one backward may run through, before a frame.

        A gradient of an output that came before the module's last call is of an earlier
        backward, and so are the calls before that gradient.
        """
        last = self.last_of(watch, module, before)
        if last is None:
            return []
        earlier = self.gradients(-1, last.call.order)
        begin = earlier[-1].call.order if earlier else -1
        return _between(self._of[last.key], begin, before)

    def gradients(self, begin: int, end: int) -> list[Called]:
        """Lists the gradients of outputs that came between two frames."""
        return _between(self._gradients, begin, end)

    def sharers(self, called: Called) -> list[str]:
        """Lists the modules that have a call's module too, and may have called it."""
        names = self._holders.get(id(called.module), {}).values()
        parent = module_of_parameter(called.watch.name_at(called.call.module))
        return [n for n in names if n != (parent or "the model")] * (len(names) > 1)

    @functools.cached_property
    def _holders(self) -> dict[int, dict[int, str]]:
        """The modules that have each module as a child, with their names."""
        holders: dict[int, dict[int, str]] = {}
        for watch in self.watches:
            for index, each in watch.modules.present():
                for child in children_of(each).values():
                    found = holders.setdefault(id(child), {})
                    found.setdefault(id(each), name_of(watch, index))
        return holders


def _between(calls: list[Called], begin: int, end: int) -> list[Called]:
    """The calls that ended after one frame and before another."""
    first = bisect.bisect_right(calls, begin, key=_order)
    return calls[first : bisect.bisect_left(calls, end, key=_order)]


def _order(called: Called) -> int:
    return called.call.order
