"""Notices that `guard.run()` is called for a model that the guard does not watch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from .. import _C
from ..base.modules import parameters_of
from .step_clock import StepClock
from .watching.watch import ModelWatch, models_of

_log = logging.getLogger("overflow_fast")
# Calls without a step, before it is said that they run another model. With fewer, a
# program that first runs another model a few times is warned in vain.
_MANY = 8
_Seen = list[tuple[int, int]]


class _Row(NamedTuple):
    """Calls in a row that ran nothing which is watched.

    Attributes:
        num_steps: The steps that were over at the first one.
        gradients: The gradients of the watched models then.
        num: How many they are.
    """

    num_steps: int
    gradients: list[tuple[int, int]]
    num: int = 0


class UnwatchedRuns:
    """Logs, once, that functions ran modules which are not watched alone.

    Args:
        watches: The watched models.
        clock: The step at hand.
    """

    def __init__(self, watches: Sequence[ModelWatch], clock: StepClock) -> None:
        self._watches = watches
        self._clock = clock
        self._row: _Row | None = None
        self._is_warned = False

    def seen(self) -> _Seen:
        """The numbers of forwards, and of calls, that watches have seen."""
        return [(each.batch_number, each.total_calls) for each in self._watches]

    def note(self, before: _Seen) -> None:
        """Notes a call whose loss has a backward.

        A tripwire does not see a model whose forward is not called: its gradients tell.

        Args:
            before: What watches had seen before it.
        """
        is_unseen = before == self.seen() and any(w.is_attached for w in self._watches)
        if self._is_warned or not is_unseen:
            self._row = None
            return
        row = self._row
        if row is None or row.num_steps != self._clock.num_steps:
            row = _Row(self._clock.num_steps, self._gradients())
        self._row = row._replace(num=row.num + 1)
        if row.num + 1 < _MANY or row.gradients != self._gradients():
            return
        self._is_warned = True
        _log.warning(
            "guard.run() was called %d times, and nothing of the model that the guard "
            "watches ran in it.\nWhere a cell has made the model anew, make the guard "
            "anew as well, of the model and the optimizer that run now. Logged once.",
            _MANY,
        )

    def _gradients(self) -> list[tuple[int, int]]:
        """The gradients of the models, as far as writes to them are counted."""
        models = models_of(self._watches).values()
        each = (p.grad for model in models for p in parameters_of(model))
        found = [gradient for gradient in each if gradient is not None]
        return list(zip(map(id, found), _C.versions_of(found), strict=False))
