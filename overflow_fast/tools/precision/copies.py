"""A model on copies of its weights, buffers and batches, of another dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...base.modules import has_base, is_sharded, named_modules
from ...base.tree import CALL_DEPTH, mapped
from ...explainer.snapshot import Snapshot
from ...explainer.wider import FLOATS
from ...torch_internals.module_internals import own_buffers, own_parameters
from ...torch_internals.tensor_internals import is_wrapper

_OWN = set(vars(nn.Module()))
_PARALLEL = {"DistributedDataParallel", "DataParallel"}


class Copies:
    """Copies of tensors in a dtype, one for each: what is shared stays shared."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of a tensor; a parameter's is a parameter."""
        if id(tensor) not in self._known:
            made = to_dtype(tensor.detach(), self._dtype)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, tensor.requires_grad)
            self._known[id(tensor)] = tensor, made
        return self._known[id(tensor)][1]

    def known(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of this very tensor, or the tensor where there is none."""
        return self._known.get(id(tensor), (tensor, tensor))[1]


def to_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy, cast if it is float32, float16 or bfloat16."""
    return tensor.to(dtype if tensor.dtype in FLOATS else tensor.dtype, copy=True)


@contextlib.contextmanager
def on_copies(model: nn.Module, dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Lets a model compute with copies of its parameters and buffers, in a dtype.

    On exit the model has its own tensors again, and its attributes and the random
    states are what they were, bit for bit. The own ones are never written to, get no
    gradient and call no hook.
    """
    with Snapshot({"": model}):
        copies = Copies(dtype)
        for module in model.modules():
            for table in (own_parameters(module), own_buffers(module)):
                for key, tensor in list(table.items()):
                    if tensor is not None:
                        table[key] = copies.of(tensor)
        for module in model.modules():
            _replace_attributes(module, copies)
        yield


def _replace_attributes(module: nn.Module, copies: Copies) -> None:
    """Puts the copies into attributes, too, such as the flat weights of an LSTM."""
    for key, value in list(vars(module).items()):
        if isinstance(value, torch.Tensor):
            vars(module)[key] = copies.of(value)
        elif type(value) is list:
            value[:] = [mapped(each, copies.known) for each in value]
        elif key not in _OWN:
            vars(module)[key] = mapped(value, copies.known)


def copied_batch(batch: Any) -> Any:
    """A batch whose tensors are copies, float32 instead of half precision."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return to_dtype(tensor.detach(), torch.float32).requires_grad_(
            tensor.requires_grad
        )

    return mapped(batch, copied, CALL_DEPTH, anew=True)


def check_model(model: nn.Module) -> None:
    """Raises ValueError for a model that cannot run on copies.

    Args:
        model: The model.
    """
    for name, module in named_modules(model):
        if has_base(type(module), _PARALLEL):
            raise ValueError(
                "model must be the module that is wrapped, without its wrapper: "
                f"{name or 'it'} is a {type(module).__name__}; give model.module"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                "model must not be scripted: modules inside of "
                f"{name or 'it'} cannot be hooked; pass the module that was scripted"
            )
    if is_sharded(model):
        raise ValueError(
            "model must hold whole weights; they are sharded (FSDP or DTensor): give "
            "the model before it is sharded"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        why = _why_not(tensor)
        if why:
            raise ValueError(f"model must hold plain tensors; {name} {why}")


def _why_not(tensor: torch.Tensor) -> str:
    if is_lazy(tensor):
        return "is not initialized yet: run the model once first"
    if tensor.is_meta:
        return "is on the meta device"
    if tensor.is_quantized or is_wrapper(tensor):
        return f"is a {type(tensor).__name__} that is quantized or wraps others"
    return ""
