"""The guard as a callback of transformers' Trainer."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..guard.guard import OverflowGuard

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "overflow_fast.integrations.trainer needs transformers: run "
        f"`pip install transformers` ({error})"
    ) from error


class GuardCallback(TrainerCallback):
    """Has an `OverflowGuard` watch while a Trainer trains.

    The learning rate's schedule stands still in skipped steps.

    Args:
        arguments: What `OverflowGuard` takes besides the model and the optimizer, by
            name.

    Attributes:
        guard: The guard of the last training, or None before the first.

    Example:
        >>> callback = GuardCallback(on_overflow="skip", log="guard.jsonl")
    """

    def __init__(self, **arguments: Any) -> None:
        OverflowGuard(nn.Identity(), **arguments).remove()  # wrong ones are told now
        self._arguments = arguments
        self.guard: OverflowGuard | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        """Puts the guard on; one that a training has left behind is taken off."""
        self._remove()
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        self.guard = OverflowGuard(model, optimizer, **self._arguments)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes the guard off."""
        self._remove()

    def _remove(self) -> None:
        if self.guard is not None:
            self.guard.remove()
