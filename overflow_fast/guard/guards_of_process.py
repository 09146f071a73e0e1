"""The guards of this process that are on: several may watch the same model."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Iterable

from torch import nn

from ..base.modules import modules_in
from .parts import GuardParts
from .watching.watch import models_of

_log = logging.getLogger("overflow_fast")
_guards: weakref.WeakSet[GuardParts] = weakref.WeakSet()


def note_enabled(parts: GuardParts) -> None:
    """Notes a guard that is switched on, and warns of another on the same model.

    Those that give way are switched off: at once, or when the program lets go of them.
    """
    others = [each for each in _guards if each.is_enabled and each is not parts]
    _guards.add(parts)
    is_said = False
    for each in others:
        model = _shared_model(parts, each)
        if model is None:
            continue
        is_ending = each.note_later(parts)
        if not each.is_enabled or is_said:
            continue
        is_said = True
        until = ", until your program lets go of that one, as in a cell's next run"
        _log.warning(
            "Another OverflowGuard already watches this %s. Both work, each by its own "
            "policy%s. Call remove() on the other to replace it.",
            type(model).__name__,
            until * is_ending,
        )


def num_guards_of(modules: Iterable[nn.Module]) -> int:
    """The number of guards that are on and watch one of these modules."""
    wanted = set(modules)
    enabled = (parts for parts in list(_guards) if parts.is_enabled)
    return sum(not wanted.isdisjoint(_modules_of(parts)) for parts in enabled)


def _modules_of(parts: GuardParts) -> set[nn.Module]:
    """The modules of the models that a guard watches."""
    models = models_of(parts.watches).values()
    return {each for model in models for each in modules_in(model)}


def _shared_model(parts: GuardParts, other: GuardParts) -> nn.Module | None:
    """The first model of a guard that another one watches, or more, or a part of it."""
    own, theirs = (models_of(each.watches).values() for each in (parts, other))
    for model, its in itertools.product(own, theirs):
        if its in set(modules_in(model)) or model in set(modules_in(its)):
            return model
    return None
