"""Changes of precision and of weights that are undone bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ...precision.keep_in_fp32 import keep_in_fp32
from ...torch_internals.running import inherited, set_inherited

_KEY = "overflow_fast_bfloat16"  # of what threads inherit


@contextmanager
def in_float32(
    model: nn.Module, names: Sequence[str], until: Sequence[str] | None = None
) -> Iterator[None]:
    """Runs modules in float32, as `keep_in_fp32` does; casts their weights back.

    Args:
        model: The model.
        names: The qualified names of the modules.
        until: See `keep_in_fp32`.
    """
    with kept_data([model]), keep_in_fp32(model, names, until):
        yield


@contextmanager
def kept_data(models: Iterable[nn.Module]) -> Iterator[None]:
    """Puts back the memory of parameters and buffers that were given other memory."""
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    kept = [(tensor, tensor.data) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, data in kept:
            if tensor.dtype != data.dtype or tensor.data_ptr() != data.data_ptr():
                if tensor.is_leaf:
                    tensor.grad = None  # of the trial; those of the step are set aside
                tensor.data = data


@contextmanager
def in_bfloat16(models: Iterable[nn.Module]) -> Iterator[None]:
    """Runs what is float16, by weights or by autocast, in bfloat16.

    Weights change for all threads; autocast in those alone that work for this one.
    """
    models = list(models)
    with ExitStack() as stack:
        stack.enter_context(kept_data(models))
        stack.callback(set_inherited, _KEY, None)
        set_inherited(_KEY, True)
        for model in models:
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.dtype == torch.float16:
                    tensor.data = tensor.data.bfloat16()
            for module in model.modules():
                handle = module.register_forward_pre_hook(_begin_bfloat16, prepend=True)
                stack.callback(handle.remove)
        torch.clear_autocast_cache()
        stack.callback(torch.clear_autocast_cache)
        yield


def _begin_bfloat16(module: nn.Module, args: object) -> None:
    if not inherited(_KEY):
        return
    for device in ("cpu", "cuda", "mps", "xpu"):
        if not torch.amp.is_autocast_available(device):
            continue
        is_half = torch.get_autocast_dtype(device) == torch.float16
        if torch.is_autocast_enabled(device) and is_half:
            torch.set_autocast_dtype(device, torch.bfloat16)


@contextmanager
def with_weights(
    named: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]
) -> Iterator[None]:
    """Gives parameters and buffers other values, and then their own memory again.

    Args:
        named: The parameters and buffers, by name.
        other: The values, by name; what is missing there stays.
    """
    kept = [(named[name], named[name].data) for name in other if name in named]
    try:
        for name, value in other.items():
            if name in named:
                own = named[name]
                own.data = value.to(own.device, own.dtype, copy=True)
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data
