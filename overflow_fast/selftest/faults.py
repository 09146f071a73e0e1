"""Faults that are planted in a model, and the restoration of all they changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..recording.hooks import move_hook_to_front
from ..state.snapshot import Snapshot
from ..torch_internals.module_internals import forward_hooks
from ..tree import NotRebuilt, mapped, tensors_in


class Fault:
    """A bad value in a module's first output, or in the gradient of it, once.

    Args:
        module: The module.
        value: The value to plant.
        is_backward: Plant it in the gradient.

    Attributes:
        is_planted: True once it is planted.
    """

    def __init__(self, module: nn.Module, value: float, is_backward: bool) -> None:
        self._module = module
        self._value = value
        self._is_backward = is_backward
        self.is_planted = False

    def __enter__(self) -> Fault:
        self._handle = self._module.register_forward_hook(self._on_forward)
        move_hook_to_front(forward_hooks(self._module), self._handle.id)
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.remove()

    def _on_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.is_planted:
            return None
        first = first_float(output)
        if first is None:
            return None
        try:
            return mapped(output, lambda t: self._made(t) if t is first else t)
        except NotRebuilt:
            self.is_planted = False
            return None

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that the module returns instead of its own."""
        if not self._is_backward:
            return self._spoiled(tensor)
        # The output may be that of a module within, and is to be this one's own.
        copy = tensor.clone()
        if tensor.requires_grad:
            copy.register_hook(self._on_backward)  # type: ignore[no-untyped-call]
        return copy

    def _on_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if self.is_planted else self._spoiled(gradient)

    def _spoiled(self, tensor: torch.Tensor) -> torch.Tensor:
        self.is_planted = True
        spoiled = tensor.clone()
        spoiled[(0,) * spoiled.dim()] = self._value
        return spoiled


def first_float(output: Any) -> torch.Tensor | None:
    """Finds the first floating-point tensor of an output that is not empty."""
    found = tensors_in(output)
    return next((t for t in found if t.is_floating_point() and t.numel()), None)


@contextlib.contextmanager
def everything_kept(models: Sequence[nn.Module]) -> Iterator[None]:
    """Restores weights, gradients, buffers, attributes and random states.

    Raises:
        RuntimeError: If a hook behind a gradient has changed a parameter, which is
            restored, or something could not be put back.
    """
    state = Snapshot({f"{i}.": m for i, m in enumerate(models)}, calls_hooks=True)
    has_stepped = False
    with state:
        try:
            yield
        finally:
            has_stepped = state.has_stepped()
    if state.problems:
        raise RuntimeError("\n".join(state.problems))
    if has_stepped:
        raise RuntimeError(
            "the model's forward or backward changes its parameters (does an optimizer "
            "step in backward?).\nChanges by hooks behind gradients were undone; those "
            "of the optimizer's state and others were not.\nLoad a checkpoint."
        )
