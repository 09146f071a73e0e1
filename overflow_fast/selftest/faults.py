"""Faults that are planted in a model, and the restoration of all they changed."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..recording.hooks import move_hook_to_front
from ..torch_internals.module_internals import forward_hooks, own_buffers
from ..torch_internals.tensor_internals import may_step_in_backward, version_of
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
    """Restores gradients, buffers and random states, bit for bit.

    Random states are torch's, Python's and numpy's.

    Raises:
        RuntimeError: If a parameter was written to, or something could not be put back.
            Parameters that have a hook behind their gradient, such as an optimizer's
            step, are restored even then.
    """
    parameters = [each for model in models for each in model.parameters()]
    modules = [module for model in models for module in model.modules()]
    gradients = [_Kept(each.grad) for each in parameters]
    buffers = [
        (module, name, _Kept(buffer))
        for module in modules
        for name, buffer in own_buffers(module).items()
    ]
    stepped = [_Kept(p) for p in parameters if may_step_in_backward(p)]
    versions = [version_of(each) for each in parameters]
    devices = {each.device.index for each in parameters if each.is_cuda}
    for each in parameters:
        each.grad = None
    try:
        with torch.random.fork_rng(devices), _other_random_states_kept():
            yield
    finally:
        is_written = versions != [version_of(each) for each in parameters]
        is_written |= any(kept.has_changed() for kept in stepped)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.tensor
        for module, name, buffer in buffers:
            own_buffers(module)[name] = buffer.tensor
        kept = [*gradients, *stepped, *(buffer for _, _, buffer in buffers)]
        failures = [error for each in kept if (error := each.put_back()) is not None]
    if failures:
        raise RuntimeError("a gradient or buffer was not restored") from failures[0]
    if is_written:
        raise RuntimeError(
            "the model's forward or backward changes its parameters (does an optimizer "
            "step in backward?).\nChanges by hooks behind gradients were undone; those "
            "of the optimizer's state and others were not.\nLoad a checkpoint."
        )


@contextlib.contextmanager
def _other_random_states_kept() -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    state = random.getstate()
    numpys = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpys)


class _Kept:
    """A tensor, or None, and a copy of its values.

    Attributes:
        tensor: The tensor itself.
    """

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self.tensor = tensor
        self._copy = None if tensor is None else tensor.detach().clone()

    def has_changed(self) -> bool:
        """Returns whether the tensor differs from the copy in any bit."""
        if self.tensor is None or self._copy is None:
            return False
        return not _is_same(self.tensor.detach(), self._copy)

    @torch.no_grad()
    def put_back(self) -> Exception | None:
        """Restores the tensor's values; returns what failed."""
        # Not if it holds them anyway: autograd would take it for changed.
        if self.tensor is None or self._copy is None or not self.has_changed():
            return None
        try:
            self.tensor.copy_(self._copy)
        except Exception as error:
            return error
        return None


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors are equal in every bit; False if unknown."""
    if a.layout is not torch.strided or type(a) not in (torch.Tensor, nn.Parameter):
        return False
    bits = [each.contiguous().view(-1).view(torch.uint8) for each in (a, b)]
    return torch.equal(*bits)
