"""The candidates for the first bad gradient of an output, by the order of calls."""

from __future__ import annotations

from torch import nn

from .. import _C
from .calls import Called, Calls, ancestors, joined, name_of
from .hooked import only_calls_submodules
from .verdict import BATCH, LOSS, BadFrame, Origin


def origin_of_gradient(first: BadFrame, calls: Calls) -> Origin:
    """Finds the origin of the gradient of an output, which is the first bad one.

    It is a sum over all that was computed from the output, and no hook shows which of
    these parts is bad. All gradients that were scanned before it are finite.

    Args:
        first: Its frame.
        calls: The calls of all watched models.

    Returns:
        The loss, where nothing else can have used the output, or all that can have.
    """
    frame = first.frame
    found = calls.in_backward(first.watch, frame.module, frame.order)
    is_known = len(found) == 1 and found[0].call.kind != _C.FrameKind.RECOMPUTED
    if not is_known:
        return _any_of(found, first, calls)
    users = _Users(found[0], calls, frame.order)
    if not (users.makers or users.code or _is_unwatched_around(first)):
        return loss_origin(first, "the backward of the loss")
    return users.origin(first)


class _Users:
    """The users of the output of a call, direct or through others.

    Attributes:
        makers: The modules whose backward can have made its gradient.
        code: The modules whose own code can have.
        scope: The nearest call around it whose own gradients were all finite, or None.
    """

    def __init__(self, called: Called, calls: Calls, before: int) -> None:
        self._called = called
        self._calls = calls
        self._before = before
        found = calls.gradients(called.call.order, before)
        self._seen = {(each.watch, each.call.module): each for each in found}
        self.makers: list[str] = []
        self.code: list[str] = []
        self.scope: Called | None = None
        inner = called
        for around in calls.chain(called)[1:]:
            self._add(inner, around)
            if self._is_clean(around):
                self.scope = around
                return
            inner = around
        self._add(inner, None)

    def _add(self, inner: Called, around: Called | None) -> None:
        """Adds the users of a call's output within the call around it.

        A user has had a gradient itself by then, or its output has.
        """
        later = self._calls.after(inner, around, self._before)
        if around is not None and only_calls_submodules(_module_of(around)):
            later = later[:1]  # it gives each module's output to the next one alone
        used = [each for each in later if self._has_gradient(each)]
        for user in used:
            names = [c.name for c in (user, *self._calls.within(user))]
            self.makers += [name for name in names if name not in self.makers]
        if around is None or only_calls_submodules(_module_of(around)):
            return
        if used or self._is_seen(around) or around.call.has_unseen:
            self.code.append(around.name)

    def _has_gradient(self, called: Called) -> bool:
        inside = (called, *self._calls.within(called))
        return any(self._is_seen(each) or each.call.has_unseen for each in inside)

    def _is_seen(self, called: Called) -> bool:
        return (called.watch, called.call.module) in self._seen

    def _is_clean(self, around: Called) -> bool:
        watch, module = around.watch, around.call.module
        is_one = len(self._calls.in_backward(watch, module, self._before)) == 1
        is_whole = not (around.call.has_unseen or around.may_pass_through)
        return self._is_seen(around) and is_one and is_whole

    def origin(self, first: BadFrame) -> Origin:
        here, near = self._called.name, self._near()
        words = [f"the code of {name}" for name in self.code]
        words += [f"the backward of {name}" for name in self.makers]
        names = [*self.makers, *self.code]
        if self.scope is None:
            words.append(LOSS)
        else:
            words.append(f"code that uses what {self.scope.name} kept in attributes")
        words.append("a hook on that gradient")
        names += [*loss_origin(first, "").candidates, here]
        between = f"between {near} and {here}: " if near else ""
        names = list(dict.fromkeys(names))
        return Origin("unclear", "unclear", f"{between}{joined(words)}", names, near)

    def _near(self) -> str:
        """Returns the module of the last finite gradient, if it bounds the search."""
        last = next(reversed(self._seen), None)
        if last is None:
            return ""
        name = name_of(*last)
        bounds = [*self.makers, *([self.scope.name] if self.scope else [])]
        return name if name in bounds else ""


def _is_unwatched_around(first: BadFrame) -> bool:
    """Returns whether the code of an unwatched module around it may have used it."""
    watch = first.watch
    around = ancestors(watch, first.frame.module)
    return any(not watch.modules.is_selected(index) for index in around)


def _module_of(called: Called) -> nn.Module | None:
    return called.watch.module_at(called.call.module)


def loss_origin(first: BadFrame, maker: str) -> Origin:
    """Makes the origin of a value that arose in the loss, or in its other inputs."""
    if first.watch.has_seen_loss:
        return Origin("passed_on", "loss", maker, [LOSS])
    maker = f"{maker}, or values that do not pass through the model, such as labels"
    return Origin("passed_on", "loss", maker, [LOSS, BATCH])


def _any_of(found: list[Called], first: BadFrame, calls: Calls) -> Origin:
    """Makes the origin where the gradient's call is not known, or ran again."""
    here = name_of(first.watch, first.frame.module)
    around = [
        name_of(first.watch, index)
        for index in ancestors(first.watch, first.frame.module)
    ]
    users = calls.users(found[0]) if found else []
    names = [*users, *around, *loss_origin(first, "").candidates]
    names = list(dict.fromkeys(names))
    maker = f"code that used the output of {here}: {joined(names)}"
    return Origin("unclear", "unclear", maker, names)
