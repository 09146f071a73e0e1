"""A guard for loops that use Accelerate."""

from __future__ import annotations

from typing import Any

from ..guard.guard import OverflowGuard
from .patched_methods import PatchedMethod
from .trainer_support import check_before_saving

try:
    from accelerate import Accelerator  # type: ignore[import-untyped]
except ImportError as error:
    raise ImportError(
        "overflow_fast.integrations.accelerate needs accelerate: run "
        f"`pip install accelerate` ({error})"
    ) from error


def guard_with(
    accelerator: Accelerator, model: Any, optimizer: Any, **arguments: Any
) -> OverflowGuard:
    """Makes a guard, and keeps `accelerator.save_state` from saving non-finite state.

    Prepared schedulers pause in skipped steps. Until the guard is removed, `save_state`
    raises `NonFiniteError` before it writes, or removes a checkpoint to make room;
    every rank has to call it, as Accelerate requires.

    Args:
        accelerator: The Accelerator.
        model: The prepared model, or a list or dict of them.
        optimizer: The prepared optimizer, or a list of them, or None.
        arguments: Other arguments of `OverflowGuard`, by name.

    Raises:
        TypeError, ValueError: If an argument cannot be used.

    Example:
        >>> accelerator = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> guard = guard_with(accelerator, model, optimizer, on_overflow="skip")
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(
            "accelerator must be an accelerate.Accelerator, got "
            f"{type(accelerator).__name__}"
        )
    return _AcceleratorGuard(accelerator, model, optimizer, **arguments)


class _AcceleratorGuard(OverflowGuard):
    """A guard that checks the state in `accelerator.save_state` until it is removed."""

    def __init__(
        self, accelerator: Accelerator, model: Any, optimizer: Any, **arguments: Any
    ) -> None:
        super().__init__(model, optimizer, **arguments)
        self._saving = PatchedMethod(
            accelerator, "save_state", lambda *_, **__: check_before_saving(self)
        )

    def remove(self) -> None:
        try:
            super().remove()
        finally:
            self._saving.remove()
