"""Lets ranks that run out of batches go on joining the others' judgements."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ...torch_internals.module_internals import is_first, is_joining


class GuardJoinable(Joinable):
    """The object by which `torch.distributed.algorithms.join.Join` includes a guard.

    Args:
        group: The ranks that decide together.
        device: Returns the device that the model's collectives run on.
        judge: Judges the others' step on a rank that makes none.
    """

    def __init__(
        self,
        group: Any,
        device: Callable[[], torch.device],
        judge: Callable[[], None],
    ) -> None:
        super().__init__()
        self._group = group
        self._device = device
        self._judge = judge

    def notify(self, models: Iterable[Any], optimizers: Iterable[Any]) -> None:
        """Notifies `Join` that this rank has a batch; a collective if this is first.

        Args:
            models: The watched models.
            optimizers: Their optimizers.

        Raises:
            ValueError: If a `Join` has a model after this, whose collectives come
                before the guard's, or an optimizer first, whose come after them.
        """
        if is_first(self) and any(map(is_joining, models)):
            raise ValueError(
                "Join must be given the model before the guard: `with Join([model, "
                "guard.joinable]):`, got them the other way round"
            )
        if is_joining(self) and any(map(is_first, optimizers)):
            raise ValueError(
                "Join must be given the optimizer after the guard: `with Join([model, "
                "guard.joinable, optimizer]):`, got the optimizer first"
            )
        Join.notify_join_context(self)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Returns the hook that runs for each step of the others."""
        return _Hook(self._judge)

    @property
    def join_device(self) -> torch.device:
        """The device that the collectives of `Join` run on."""
        return self._device()

    @property
    def join_process_group(self) -> Any:
        """The ranks that decide together."""
        return self._group


class _Hook(JoinHook):
    def __init__(self, judge: Callable[[], None]) -> None:
        self._judge = judge

    def main_hook(self) -> None:
        self._judge()
