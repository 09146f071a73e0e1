"""The guard as a callback of transformers' Trainer."""

from __future__ import annotations

from typing import Any

from .guarded import GuardOwner

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "overflow_fast.integrations.trainer needs transformers: run "
        f"`pip install transformers` ({error})"
    ) from error


class GuardCallback(GuardOwner, TrainerCallback):
    """Has an `OverflowGuard` watch while a Trainer trains; see `GuardOwner`.

    The learning rate's schedule stands still in skipped steps.

    Example:
        >>> callback = GuardCallback(on_overflow="skip", log="guard.jsonl")
    """

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        """Puts the guard on."""
        self.put_on(kwargs["model"], kwargs["optimizer"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes the guard off."""
        self.take_off()
