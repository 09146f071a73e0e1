"""A module's forward and weights in float32, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..torch_internals.tensor_internals import is_wrapper
from ..tree import CALL_DEPTH, Loan, tensors_in
from .replaced_forward import ReplacedForward

_HALF = (torch.float16, torch.bfloat16)

# The dtype of float32 outputs in a model that is half precision itself.
RETURNS_HALF = "returns half"  # that of the module's weights, or of its inputs
FOLLOWS = "follows"  # that of the inputs
STAYS = "stays"


class Float32Forward(ReplacedForward):
    """A module's forward in float32, with autocast off.

    Args:
        module: The module.
        output: `RETURNS_HALF`, `FOLLOWS` or `STAYS`.
        half: The half-precision dtype that the module returned, as far as known.
    """

    def __init__(
        self, module: nn.Module, output: str, half: torch.dtype | None
    ) -> None:
        self._output = output
        self._half = half
        super().__init__(module)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward in float32."""
        given = tensors_in((args, kwargs), CALL_DEPTH)
        dtypes = [tensor.dtype for tensor in given]
        half = next((dtype for dtype in dtypes if dtype in _HALF), None)
        loan = None
        if half is not None:
            loan = Loan((args, kwargs), _to_float32, CALL_DEPTH)
            args, kwargs = loan.value
        device = _autocast_device(self.module, given)
        if device is not None:
            with torch.autocast(device, enabled=False):
                output = self.__wrapped__(*args, **kwargs)
        else:
            output = self.__wrapped__(*args, **kwargs)
        if loan is not None:
            loan.give_back()
        if device is not None:
            return output
        has_float = any(dtype.is_floating_point for dtype in dtypes)
        dtype = self._dtype_after(half, has_float)
        return output if dtype is None else _from_float32(output, dtype)

    def _dtype_after(
        self, half: torch.dtype | None, has_float: bool
    ) -> torch.dtype | None:
        """Returns the dtype to cast float32 outputs to; None if they stay."""
        if self._output == STAYS:
            return None
        if self._output == RETURNS_HALF:
            return self._half or half
        return half if has_float else self._half


def _autocast_device(module: nn.Module, given: Sequence[Tensor]) -> str | None:
    """Returns the type of the device of a call, if its autocast is on."""
    tensor = given[0] if given else next(module.parameters(), None)
    if tensor is None or not _has_autocast(tensor.device.type):
        return None
    device = tensor.device.type
    return device if torch.is_autocast_enabled(device) else None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_autocast(device: str) -> bool:
    """Tells it to compiled code as a constant: torch 2.11 breaks the graph for it."""
    return torch.amp.is_autocast_available(device)


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def _from_float32(value: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.dtype == torch.float32 else tensor

    return Loan(value, cast).value


class Float32Weights:
    """The half-precision weights and buffers of modules, to be cast to float32.

    Args:
        model: The model; its first half-precision weight has its dtype.
        modules: The modules by their names, with all that is within them.
        fixed_by: The wrapper that relies on the weights' dtypes, such as "DDP", or "".
    """

    def __init__(
        self, model: nn.Module, modules: Mapping[str, nn.Module], fixed_by: str
    ) -> None:
        self._models_dtype = _half_of(model)
        self._tensors = {
            id(tensor): tensor
            for prefix, module in modules.items()
            for name, tensor in _named_tensors(module, prefix)
            if _is_castable(name, tensor, fixed_by)
        }

    def are_of(self, module: nn.Module) -> bool:
        """Returns whether a module itself owns one of them."""
        own = _named_tensors(module, recurse=False)
        return any(id(tensor) in self._tensors for _, tensor in own)

    def others_of(self, module: nn.Module) -> list[str]:
        """Lists a module's half-precision weights that are not among them."""
        return [
            name
            for name, tensor in _named_tensors(module)
            if tensor.dtype in _HALF and id(tensor) not in self._tensors
        ]

    def half_of(self, module: nn.Module, or_models: bool = False) -> torch.dtype | None:
        """Returns the half-precision dtype of a module's weights, or of the model's."""
        return _half_of(module) or (self._models_dtype if or_models else None)

    def cast(self) -> None:
        """Casts them in place, and their gradients."""
        for tensor in self._tensors.values():
            grad = tensor.grad if tensor.is_leaf else None
            if grad is not None:
                tensor.grad = None
            tensor.data = tensor.data.float()
            if grad is not None:
                tensor.grad = grad.float()


def _named_tensors(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(prefix, recurse)
    yield from module.named_buffers(prefix, recurse)


def _half_of(module: nn.Module) -> torch.dtype | None:
    dtypes = (tensor.dtype for _, tensor in _named_tensors(module))
    return next((dtype for dtype in dtypes if dtype in _HALF), None)


def _is_castable(name: str, tensor: Tensor, fixed_by: str) -> bool:
    """Returns whether a weight is half precision; raises if it cannot be cast."""
    if tensor.dtype not in _HALF:
        return False
    if is_lazy(tensor):
        why = "is not initialized yet: run the model once first"
    elif fixed_by:
        why = f"belongs to {fixed_by} already: call keep_in_fp32 before that"
    elif is_wrapper(tensor):
        why = f"is a {type(tensor).__name__}, which cannot be cast in place"
    else:
        return True
    raise ValueError(f"names must hold modules whose weights can be cast; {name} {why}")
