"""Ranks that run out of batches: they go on joining the others' judgements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook


class GuardJoinable(Joinable):
    """What `torch.distributed.algorithms.join.Join` takes of a guard.

    Args:
        group: The ranks that decide together.
        device: Says where the model's collectives run.
        judge: Judges the step of the others without one of one's own.
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
        self._has_batch = True

    @property
    def is_entered(self) -> bool:
        """Whether a `Join` has this object."""
        return bool(self._join_config.enable)

    def notify(self, has_model: bool) -> None:
        """Says that this rank has a batch; a collective where `Join` has this first.

        Args:
            has_model: Whether the `Join` has the model too.

        Raises:
            ValueError: If it has it behind this: its collectives come before ours.
        """
        if has_model and self._join_config.is_first_joinable:
            raise ValueError(
                "Join must be given the model before the guard: `with Join([model, "
                "guard.joinable]):`, got them the other way round"
            )
        if self._has_batch:
            Join.notify_join_context(self)

    def judge(self) -> None:
        """Judges a step of the others for a rank without a batch."""
        self._has_batch = False
        try:
            self._judge()
        finally:
            self._has_batch = True

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank without batches does for each step of the others."""
        return _Hook(self.judge)

    @property
    def join_device(self) -> torch.device:
        """Where the collectives of `Join` run."""
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
