"""Copies what an optimizer's step may change, to undo a skipped step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from ..core.nested_optimizers import is_optimizer

# Restores a value and returns it.
_Restore = Callable[[], Any]


class OptimizerSnapshot:
    """The attributes of an optimizer, with all tensors in them, as they are now.

    Includes parameters, state, groups, all that its dicts, lists and tuples hold, and
    the same of optimizers among its attributes. Containers and tensors keep their
    identity when they are restored. Copies the parameters and their state.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._known: dict[int, _Restore] = {}
        with torch.no_grad():
            self._restore = self._of_dict(optimizer, vars(optimizer))

    def restore(self) -> None:
        """Restores everything but the gradients, which stay as they are."""
        with torch.no_grad():
            self._restore()

    def _remember(self, value: Any) -> _Restore:
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, torch.Tensor):
            restore = _of_tensor(value)
        elif isinstance(value, dict):
            restore = self._of_dict(value, value)
        elif isinstance(value, (list, tuple)):
            restore = self._of_sequence(value)
        elif is_optimizer(value):
            restore = self._of_dict(value, vars(value))
        else:
            return lambda: value
        self._known[id(value)] = restore
        return restore

    def _of_dict(self, value: Any, items: dict[Any, Any]) -> _Restore:
        self._known[id(value)] = lambda: value  # it may hold itself
        saved = [
            (key, self._remember(key), self._remember(each))
            for key, each in items.items()
        ]

        def restore() -> Any:
            items.clear()
            for key, restore_key, restore_value in saved:
                restore_key()
                items[key] = restore_value()
            return value

        return restore

    def _of_sequence(self, value: Any) -> _Restore:
        self._known[id(value)] = lambda: value
        saved = [self._remember(each) for each in value]

        def restore() -> Any:
            values = [each() for each in saved]
            if isinstance(value, list):
                value[:] = values
            return value

        return restore


def _of_tensor(tensor: torch.Tensor) -> _Restore:
    try:
        copied = tensor.detach().clone()
    except Exception:  # not initialized yet, say
        return lambda: tensor

    def restore() -> torch.Tensor:
        # A tensor that cannot be written to has not changed: an expanded one, say.
        with contextlib.suppress(RuntimeError):
            tensor.detach().copy_(copied)
        return tensor

    return restore
