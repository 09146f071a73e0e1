"""The guards of this process that are on: several may watch the same model."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Iterable, Sequence

from torch import nn

from ..base.modules import modules_in
from .parts import GuardParts
from .watching.watch import ModelWatch, models_of

_log = logging.getLogger("overflow_fast")
_guards: weakref.WeakSet[GuardParts] = weakref.WeakSet()


def note_enabled(parts: GuardParts) -> None:
    """Notes a guard that is switched on, and warns of others on the same models.

    Those that give way are switched off: at once, or when the program lets go of them.
    """
    others = [each for each in _guards if each.is_enabled and each is not parts]
    _guards.add(parts)
    own, ending = _modules_of(parts), list[ModelWatch]()
    for each in others:
        if own.isdisjoint(_modules_of(each)):
            continue
        if each.note_later(parts):
            ending += each.watches
    watches = [w for each in others if each.is_enabled for w in each.watches]
    _warn_of_other_guards(parts.watches, watches, ending)


def num_guards_of(modules: Iterable[nn.Module]) -> int:
    """The number of guards that are on and watch one of these modules."""
    wanted = set(modules)
    enabled = (parts for parts in list(_guards) if parts.is_enabled)
    return sum(not wanted.isdisjoint(_modules_of(parts)) for parts in enabled)


def _modules_of(parts: GuardParts) -> set[nn.Module]:
    """The modules of the models that a guard watches."""
    models = models_of(parts.watches).values()
    return {each for model in models for each in modules_in(model)}


def _warn_of_other_guards(
    watches: Sequence[ModelWatch],
    others: Sequence[ModelWatch],
    ending: Sequence[ModelWatch],
) -> None:
    """Logs a warning if other guards, which are on, watch modules of the same models.

    Args:
        watches: The guard's.
        others: Those of the other guards.
        ending: Those of them that end when the program lets go of their guard.
    """
    for watch, each in itertools.product(watches, others):
        model, other = watch.model, each.model
        if model is None or other is None:
            continue
        if other in set(modules_in(model)) or model in set(modules_in(other)):
            until = ", until your program lets go of that one, as in a cell's next run"
            _log.warning(
                "Another OverflowGuard already watches this %s. Both work, each by "
                "its own policy%s. Call remove() on the other to replace it.",
                type(model).__name__,
                until * (each in ending),
            )
            return
