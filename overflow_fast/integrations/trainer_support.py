"""Shares the code of the callbacks of all trainers."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Literal

import torch.distributed as dist

from ..guard.config import GuardConfig
from ..guard.guard import OverflowGuard
from ..guard.kinds import reusable
from ..guard.process import has_process_group


class GuardOwner:
    """Makes a guard for each training.

    Several ranks decide together, unless the policy is to warn or `process_group` is
    False. A copy or a pickle keeps the arguments, and has no guard until it is used in
    a training of its own.

    Args:
        evaluation: What is done about a bad value in an evaluation inside the training:
            "log" it with its batch and rows, and go on, or "alarm": what `on_overflow`
            says.
        arguments: Arguments of `OverflowGuard` but the model and the optimizer, by
            name.

    Attributes:
        guard: The guard of the last training, switched off when that is over, or None
            before the first.

    Raises:
        TypeError, ValueError: If an argument cannot be used.
    """

    def __init__(
        self,
        *,
        evaluation: Literal["log", "alarm"] = "log",
        **arguments: Any,
    ) -> None:
        if evaluation not in ("log", "alarm"):
            raise ValueError(f"evaluation must be 'log' or 'alarm', got {evaluation!r}")
        self._logs_evaluation = evaluation == "log"
        arguments = reusable(arguments)  # each training has a guard of its own
        GuardConfig.of_given(arguments)
        self._arguments = arguments
        self.guard: OverflowGuard | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "guard": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> GuardOwner:
        copied: GuardOwner = object.__new__(type(self))
        # Policies, groups and exporters are shared with the copy.
        memo |= {id(self): copied, id(self._arguments): self._arguments}
        vars(copied).update(copy.deepcopy(self.__getstate__(), memo))
        return copied

    @property
    def raises(self) -> bool:
        """True if the policy is to raise."""
        return bool(self._arguments.get("on_overflow", "raise") == "raise")

    def attach_guard(self, model: Any, optimizer: Any) -> OverflowGuard:
        """Attaches a guard for a training."""
        arguments = decided_by_all_ranks(self._arguments)
        self.guard = OverflowGuard(model, optimizer, **arguments)
        return self.guard

    def note_evaluation(self, batch: int | None, loader: int = 0) -> None:
        """Notes that a batch of an evaluation is run.

        Args:
            batch: Its index in the evaluation, from 0; None when that is over.
            loader: The index of the loader.
        """
        if self.guard is not None and self._logs_evaluation:
            self.guard.note_evaluation(batch, loader)

    def remove_guard(self) -> None:
        """Removes the guard, after its last verdict."""
        if self.guard is not None:
            self.guard.remove()


def decided_by_all_ranks(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns a guard's arguments, with the group of all ranks if none is given.

    A trainer's ranks train one model, which shows in no parameter while it is not
    wrapped yet, nor where the stages of a pipeline share none.
    """
    if not has_process_group() or arguments.get("process_group") is not None:
        return arguments
    acts = arguments.get("on_overflow") != "warn"
    return {**arguments, "process_group": dist.group.WORLD if acts else None}


def has_owner(callbacks: Iterable[object]) -> bool:
    """True if one of a Trainer's callbacks has a guard."""
    return any(isinstance(each, GuardOwner) for each in callbacks)


def check_before_saving(guard: OverflowGuard) -> None:
    """Raises `NonFiniteError` if the guard is on and the state is not finite.

    Call it on every rank, before a file is written, or removed to make room. Incurs a
    CPU-GPU sync for each device.
    """
    if guard.enabled and guard.models:
        guard.assert_finite_state(joint=True)
