"""A guard for torchtitan's Trainer, in one line."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from ..guard.guard import OverflowGuard
from .patched_methods import PatchedMethod
from .trainer_support import decided_by_all_ranks

_log = logging.getLogger("overflow_fast")


def guard_with(trainer: Any, **options: Any) -> OverflowGuard:
    """Makes a guard of the model parts and optimizers of torchtitan's Trainer.

    Its steps have the numbers of `trainer.step`. The learning rate's schedule pauses in
    skipped steps, and torchtitan's own error for a logged loss that is not finite ends
    no step that was skipped: the metrics of that step are not logged. All ranks decide
    together, unless `process_group` is another.

    Args:
        trainer: A `torchtitan.trainer.Trainer` that has been built.
        options: Those of `OverflowGuard`.

    Raises:
        TypeError: If it is no such Trainer.
    """
    parts = ("model_parts", "optimizers", "lr_schedulers", "train_step", "step")
    if not all(hasattr(trainer, name) for name in parts):
        raise TypeError(
            "trainer must be a torchtitan.trainer.Trainer that has been built, got "
            f"{type(trainer).__name__}"
        )
    return _TitanGuard(trainer, **options)


class _TitanGuard(OverflowGuard):
    """A guard that follows torchtitan's Trainer until it is removed."""

    def __init__(self, trainer: Any, **options: Any) -> None:
        options = decided_by_all_ranks(options)
        super().__init__(trainer.model_parts, trainer.optimizers, **options)
        self.step = trainer.step
        run = functools.partial(self._run, trainer, trainer.train_step)
        self._patched_methods = [
            PatchedMethod(trainer, "train_step", run),
            PatchedMethod(trainer.lr_schedulers, "step", self._may_schedule),
        ]

    def remove(self) -> None:
        try:
            super().remove()
        finally:
            for method in self._patched_methods:
                method.remove()

    def _may_schedule(self, *args: Any) -> bool:
        return not (self.enabled and self.last_step_skipped)

    def _run(self, trainer: Any, step: Callable[..., None], *args: Any) -> bool:
        """Runs the Trainer's step; returns False, so that it is not run again."""
        self.step = trainer.step
        try:
            step(*args)
        except RuntimeError as error:
            is_of_loss = str(error).startswith("Loss is not finite")
            if not is_of_loss or not self.enabled or not self.last_step_skipped:
                raise
            _log.info("torchtitan logs no metrics of step %d: %s", trainer.step, error)
        return False
