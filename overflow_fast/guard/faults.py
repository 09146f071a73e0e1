"""Faults that are planted in a model, and everything put back behind them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..hooks import put_first


class Fault:
    """Spoils a value of a module's first output, or of the gradient of it, once.

    Args:
        module: The module.
        value: What to put there.
        is_backward: Whether to spoil the gradient.

    Attributes:
        is_planted: Whether it has come to that.
    """

    def __init__(self, module: nn.Module, value: float, is_backward: bool) -> None:
        self._module = module
        self._value = value
        self._is_backward = is_backward
        self.is_planted = False

    def __enter__(self) -> Fault:
        self._handle = self._module.register_forward_hook(self._on_forward)
        put_first(self._module._forward_hooks, self._handle.id)
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
    """Which leaf of an output is the first tensor of floating point numbers."""
    for place, leaf in enumerate(pytree.tree_leaves(output)):
        is_tensor = isinstance(leaf, torch.Tensor)
        if is_tensor and leaf.is_floating_point() and leaf.numel():
            return place
    return None


@contextlib.contextmanager
def everything_kept(models: Sequence[nn.Module]) -> Iterator[None]:
    """Puts gradients, buffers and random states back as they were, bit for bit.

    Raises:
        RuntimeError: If a parameter was written to. Those that have a hook behind their
            gradient, such as an optimizer's step, have been put back then.
    """
    parameters = [each for model in models for each in model.parameters()]
    modules = [module for model in models for module in model.modules()]
    versions = [each._version for each in parameters]
    stepped = [_Kept(p) for p in parameters if p._post_accumulate_grad_hooks]
    gradients = [_Kept(each.grad) for each in parameters]
    buffers = [
        {name: _Kept(buffer) for name, buffer in module._buffers.items()}
        for module in modules
    ]
    devices = {each.device.index for each in parameters if each.is_cuda}
    for each in parameters:
        each.grad = None
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        was_written = [each._version for each in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.put_back()
        for module, kept in zip(modules, buffers, strict=True):
            for name, buffer in kept.items():
                module._buffers[name] = buffer.put_back()
    is_changed = [each.has_changed() for each in stepped]
    for kept_parameter in stepped:
        kept_parameter.put_back()
    if any(is_changed) or versions != was_written:
        raise RuntimeError(
            "the model's forward or backward changes its parameters (does an optimizer "
            "step in backward?): what is changed by hooks behind gradients was put "
            "back, the optimizer's state and the rest was not; load a checkpoint"
        )


class _Kept:
    """A tensor, or None, and what is in it."""

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self._tensor = tensor
        self._copy = None if tensor is None else tensor.detach().clone()

    def has_changed(self) -> bool:
        """Whether something else is in it now."""
        if self._tensor is None or self._copy is None:
            return False
        return not torch.equal(self._tensor, self._copy)

    @torch.no_grad()
    def put_back(self) -> torch.Tensor | None:
        """Has the tensor hold what it held; returns it."""
        if self._tensor is not None and self._copy is not None:
            self._tensor.copy_(self._copy)
        return self._tensor
