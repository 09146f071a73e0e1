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
from ..torch_internals.tensor_internals import pytree


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
        leaves, spec = pytree.tree_flatten(output)
        place = first_float(output)
        if place is None:
            return None
        if not self._is_backward:
            leaves[place] = self._spoiled(leaves[place])
        elif leaves[place].requires_grad:
            # The output may be that of a module within, and is to be this one's own.
            leaves[place] = leaves[place].clone()
            leaves[place].register_hook(self._on_backward)
        return pytree.tree_unflatten(leaves, spec)

    def _on_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if self.is_planted else self._spoiled(gradient)

    def _spoiled(self, tensor: torch.Tensor) -> torch.Tensor:
        self.is_planted = True
        spoiled = tensor.clone()
        spoiled[(0,) * spoiled.dim()] = self._value
        return spoiled


def first_float(output: Any) -> int | None:
    """Finds the leaf of an output that is the first floating-point tensor."""
    for place, leaf in enumerate(pytree.tree_leaves(output)):
        is_tensor = isinstance(leaf, torch.Tensor)
        if is_tensor and leaf.is_floating_point() and leaf.numel():
            return place
    return None


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
