"""Runs chosen modules in float32 while the rest stays in half precision."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from .names import named_modules
from .selection import Selection, check_patterns

_HALF = (torch.float16, torch.bfloat16)


class Fp32Handle:
    """Takes back what `keep_in_fp32` did.

    Attributes:
        names: The qualified names of the modules that run in float32.
    """

    def __init__(self, names: list[str], handles: list[RemovableHandle]) -> None:
        self.names = names
        self._handles = handles

    def remove(self) -> None:
        """Lets the modules run as before; weights that were cast stay float32."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Fp32Handle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def keep_in_fp32(model: nn.Module, names: Iterable[str]) -> Fp32Handle:
    """Runs modules in float32: autocast is off around their forward.

    Their half-precision inputs are cast to float32, and so are their half-precision
    weights, in place, once. Under autocast their outputs stay float32. In a model that
    is half precision itself they are cast back to the inputs' dtype, as the modules
    that follow need it. Does not incur a CPU-GPU sync.

    Args:
        model: The model.
        names: Qualified names of modules, or shell-style patterns of them, such as
            `["encoder.block.4.layer.1.DenseReluDense"]` or `["*.norm"]`.

    Returns:
        A handle whose `remove()` lets the modules run as before.

    Raises:
        TypeError: If `model` is no module, or `names` is a single string.
        ValueError: If a name is that of no module.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2)).bfloat16()
        >>> keep_in_fp32(model, ["0"]).names
        ['0']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(names, str):
        raise TypeError(f"names must be a list of names, got the str {names!r}")
    names = list(names)
    named = list(named_modules(model))
    check_patterns("names", names, (name for name, _ in named))
    selection = Selection(names, ())
    chosen = [(name, module) for name, module in named if selection.takes(name)]
    handles: list[RemovableHandle] = []
    for _, module in chosen:
        _cast_weights(module)
        around = _Around()
        handles += [
            module.register_forward_pre_hook(around.enter, with_kwargs=True),
            module.register_forward_hook(around.exit, always_call=True),
        ]
    return Fp32Handle([name for name, _ in chosen], handles)


def _cast_weights(module: nn.Module) -> None:
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dtype in _HALF:
            tensor.data = tensor.data.float()


class _Around:
    """Switches autocast off around the calls of one module."""

    def __init__(self) -> None:
        self._calls: dict[int, list[tuple[Any, torch.dtype | None]]] = {}

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Goes to float32."""
        tensors = [
            leaf
            for leaf in pytree.tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        ]
        device = tensors[0].device.type if tensors else "cpu"
        half = next((t.dtype for t in tensors if t.dtype in _HALF), None)
        is_autocast = torch.is_autocast_enabled(device)
        autocast = torch.autocast(device, enabled=False)
        autocast.__enter__()  # type: ignore[no-untyped-call]
        calls = self._calls.setdefault(threading.get_ident(), [])
        calls.append((autocast, None if is_autocast else half))
        args, kwargs = pytree.tree_map_only(torch.Tensor, _to_float32, (args, kwargs))
        return args, kwargs

    def exit(self, module: nn.Module, args: object, output: Any) -> Any:
        """Goes back."""
        calls = self._calls.get(threading.get_ident())
        if not calls:
            return output  # another hook raised before `enter`
        autocast, dtype = calls.pop()
        autocast.__exit__(None, None, None)
        if dtype is None:
            return output
        return pytree.tree_map_only(
            torch.Tensor,
            lambda t: t.to(dtype) if t.dtype == torch.float32 else t,
            output,
        )


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor
