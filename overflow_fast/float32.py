"""A module's forward and weights in float32, and back."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_HALF = (torch.float16, torch.bfloat16)

# What becomes of a float32 output in a model that is half precision itself.
FOLLOWS = "follows"  # it gets the dtype of the inputs
STAYS = "stays"
RETURNS_HALF = "returns half"


class Float32Forward:
    """Stands in for a module's forward on the instance.

    It is plain code without state between calls: dynamo traces it, threads share it,
    and a copy of the module has a copy of it.

    Args:
        module: The module.
        output: `FOLLOWS`, `STAYS` or `RETURNS_HALF`.
        half: The half-precision dtype to return where the inputs do not tell, or None.
    """

    def __init__(
        self, module: nn.Module, output: str, half: torch.dtype | None
    ) -> None:
        self.module = module
        self.is_active = True
        self._output = output
        self._half = half
        self._is_first = "forward" not in module.__dict__
        self.__wrapped__ = module.forward  # `inspect.signature` follows it
        module.__dict__["forward"] = self
        module.__dict__[_REPLICATE] = functools.partial(_replicate, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward in float32."""
        if not self.is_active:
            return self.__wrapped__(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        dtypes = [leaf.dtype for leaf in leaves if isinstance(leaf, Tensor)]
        half = next((dtype for dtype in dtypes if dtype in _HALF), None)
        if half is not None:
            leaves = [_to_float32(leaf) for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(leaves, spec)
        device = self._autocast_device(leaves)
        if device is not None:
            with torch.autocast(device, enabled=False):
                return self.__wrapped__(*args, **kwargs)
        output = self.__wrapped__(*args, **kwargs)
        has_float = any(dtype.is_floating_point for dtype in dtypes)
        dtype = self._dtype_after(half, has_float)
        return output if dtype is None else _from_float32(output, dtype)

    def _autocast_device(self, leaves: Sequence[object]) -> str | None:
        """The type of device whose autocast is on."""
        tensor = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
        if tensor is None:
            tensor = next(self.module.parameters(), None)
        if tensor is None or not torch.amp.is_autocast_available(tensor.device.type):
            return None
        device = tensor.device.type
        return device if torch.is_autocast_enabled(device) else None

    def _dtype_after(
        self, half: torch.dtype | None, has_float: bool
    ) -> torch.dtype | None:
        """The dtype to cast float32 outputs to; None if they stay."""
        if self._output == STAYS:
            return None
        if self._output == RETURNS_HALF:
            return self._half or half
        return half if has_float else self._half

    def remove(self) -> None:
        """Puts back the forward that was there; one put over this one stays."""
        self.is_active = False
        own = self.module.__dict__
        over = own.get("forward")
        if over is self:
            own["forward"] = self.__wrapped__
            if self._is_first:
                del own["forward"]
        while isinstance(over, Float32Forward):
            if over.__wrapped__ is self:
                over.__wrapped__, over._is_first = self.__wrapped__, self._is_first
            over = over.__wrapped__
        if not isinstance(own.get("forward"), Float32Forward):
            own.pop(_REPLICATE, None)

    def _bound_to(self, module: nn.Module) -> Float32Forward:
        """A copy that runs another module, such as a replica of this one."""
        bound = copy.copy(self)
        bound.module = module
        forward = self.__wrapped__
        if isinstance(forward, Float32Forward):
            bound.__wrapped__ = forward._bound_to(module)
        elif isinstance(forward, types.MethodType) and forward.__self__ is self.module:
            bound.__wrapped__ = types.MethodType(forward.__func__, module)
        return bound


_REPLICATE = "_replicate_for_data_parallel"  # which `nn.DataParallel` calls


def _replicate(module: nn.Module) -> nn.Module:
    replica: nn.Module
    replica = type(module)._replicate_for_data_parallel(module)  # type: ignore[no-untyped-call]
    del replica.__dict__[_REPLICATE]
    forward = module.__dict__.get("forward")
    if isinstance(forward, Float32Forward):
        replica.__dict__["forward"] = forward._bound_to(replica)
    return replica


def _to_float32(leaf: object) -> object:
    if isinstance(leaf, Tensor) and leaf.dtype in _HALF:
        return leaf.float()
    return leaf


def _from_float32(output: Any, dtype: torch.dtype) -> Any:
    leaves, spec = pytree.tree_flatten(output)
    if not any(_is_float32(leaf) for leaf in leaves):
        return output
    return pytree.tree_unflatten(
        [leaf.to(dtype) if _is_float32(leaf) else leaf for leaf in leaves], spec
    )


def _is_float32(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == torch.float32


class Float32Weights:
    """The half-precision weights and buffers of modules, to be cast to float32.

    Args:
        model: The model, whose first half-precision weight tells its dtype.
        modules: The modules by their names, with all that is within them.
        fixed_by: What has taken the weights as they are already, such as "DDP", or "".
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
        """Whether a module itself owns one of them."""
        own = _named_tensors(module, recurse=False)
        return any(id(tensor) in self._tensors for _, tensor in own)

    def others_of(self, module: nn.Module) -> list[str]:
        """The names of a module's half-precision weights that are not among them."""
        return [
            name
            for name, tensor in _named_tensors(module)
            if tensor.dtype in _HALF and id(tensor) not in self._tensors
        ]

    def half_of(self, module: nn.Module, or_models: bool = False) -> torch.dtype | None:
        """The half-precision dtype of a module's weights, or of the model's."""
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
    """Whether a weight is half precision; raises if it cannot be cast."""
    if tensor.dtype not in _HALF:
        return False
    if is_lazy(tensor):
        why = "is not initialized yet: run the model once first"
    elif fixed_by:
        why = f"belongs to {fixed_by} already: call keep_in_fp32 before that"
    elif is_traceable_wrapper_subclass(tensor):
        why = f"is a {type(tensor).__name__}, which cannot be cast in place"
    else:
        return True
    raise ValueError(f"names must hold modules whose weights can be cast; {name} {why}")
