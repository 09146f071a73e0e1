"""What the integrations of the trainers have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from ..guard.guard import OverflowGuard
from ..guard.options import kept


class GuardOwner:
    """Has a guard of its own for each training.

    Where there are several ranks, all of them decide together, unless the policy is to
    warn, or `process_group` says otherwise.

    Args:
        learn: From how many clean steps to learn what is not finite by design, in each
            training; see `OverflowGuard.learn()`. None for none.
        arguments: What `OverflowGuard` takes besides the model and the optimizer, by
            name.

    Attributes:
        guard: The guard of the last training, switched off when that is over, or None
            before the first. Each training has a new one.

    Raises:
        TypeError, ValueError: If an argument cannot be used.
    """

    def __init__(self, *, learn: int | None = None, **arguments: Any) -> None:
        # Wrong ones are told now, but for names of modules: those are not known yet.
        named = ("include", "exclude", "allow")
        arguments = kept(arguments)  # each training has a guard of its own
        known = {name: arg for name, arg in arguments.items() if name not in named}
        trial = OverflowGuard(nn.Identity(), **known)
        trial.remove()
        if learn is not None:
            trial.learn(learn)
        self._learn = learn
        self._arguments = arguments
        self.guard: OverflowGuard | None = None

    @property
    def raises(self) -> bool:
        """Whether the policy is to raise."""
        return bool(self._arguments.get("on_overflow", "raise") == "raise")

    def put_on(self, model: Any, optimizer: Any) -> OverflowGuard:
        """Puts a guard on; one that a training has left behind is taken off."""
        self.take_off()
        arguments = self._arguments
        is_there = dist.is_available() and dist.is_initialized()
        if is_there and arguments.get("process_group") is None:
            # What the trainers give has no wrapper that would tell.
            acts = arguments.get("on_overflow") != "warn"
            arguments = {
                **arguments,
                "process_group": dist.group.WORLD if acts else None,
            }
        self.guard = OverflowGuard(model, optimizer, **arguments)
        if self._learn is not None:
            self.guard.learn(self._learn)
        return self.guard

    def take_off(self) -> None:
        """Takes the guard off, after its last verdict."""
        if self.guard is not None:
            self.guard.remove()


class SaveGate:
    """Saves, unless there is a nan or an inf in what the guard watches.

    Stands where the function stood that saves, so that nothing has been written, or
    removed to make room, when it raises. Every rank has to call it.

    Args:
        save: The function.
        guard: The guard. Where it is off, everything is saved.
    """

    def __init__(self, save: Callable[..., Any], guard: OverflowGuard) -> None:
        functools.update_wrapper(self, save)
        self._save = save
        self._guard = guard

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises `NonFiniteError` in place of saving what is not finite."""
        if self._guard.enabled:
            self._guard.assert_finite_state(joint=True)
        return self._save(*args, **kwargs)
