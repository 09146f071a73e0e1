"""The guards of this process that are on: several may watch the same model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

from .loop import GuardLoop
from .watched_models import warn_of_other_guards

_loops: weakref.WeakSet[GuardLoop] = weakref.WeakSet()


def note_enabled(loop: GuardLoop) -> None:
    """Notes a guard that is switched on, and warns of others on the same models.

    Those that give way are switched off.
    """
    others = [each for each in _loops if each.is_enabled and each is not loop]
    _loops.add(loop)
    own = modules_of(loop)
    for each in others:
        if each.gives_way and not own.isdisjoint(modules_of(each)):
            each.finish()
    watches = [w for each in others if each.is_enabled for w in each.watches]
    warn_of_other_guards(loop.watches, watches)


def guards_of(modules: Iterable[nn.Module]) -> list[GuardLoop]:
    """The guards that are on and watch one of these modules."""
    wanted = set(modules)
    return [
        loop
        for loop in list(_loops)
        if loop.is_enabled and not wanted.isdisjoint(modules_of(loop))
    ]


def modules_of(loop: GuardLoop) -> set[nn.Module]:
    """The modules of the models that a guard watches."""
    models = [watch.model for watch in loop.watches]
    return {each for model in models if model is not None for each in model.modules()}
