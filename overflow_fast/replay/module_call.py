"""A module's call that runs, with what it takes to make it alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..torch_internals.tensor_internals import version_of
from ..tree import CALL_DEPTH, tensors_in

_DEVICES = ("cpu", "cuda", "mps", "xpu")


@dataclass
class ModuleCall:
    """A call of a module, by reference.

    Attributes:
        module: The module.
        name: Its name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        autocast: The devices that autocast is on for, with the dtypes.
    """

    module: nn.Module
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: list[tuple[str, torch.dtype]] = field(default_factory=list)
    _versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    @classmethod
    def begun(
        cls, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ModuleCall:
        """Notes a call that begins now, in the state of this moment."""
        devices = [d for d in _DEVICES if torch.amp.is_autocast_available(d)]
        autocast = [
            (device, torch.get_autocast_dtype(device))
            for device in devices
            if torch.is_autocast_enabled(device)
        ]
        versions = [
            (tensor, version_of(tensor))
            for tensor in tensors_in((args, kwargs), CALL_DEPTH)
            if not tensor.is_inference()
        ]
        return cls(module, name, args, kwargs, autocast, versions)

    @property
    def is_as_it_was(self) -> bool:
        """Tells whether nobody has written to its arguments since it began."""
        return all(version_of(tensor) == before for tensor, before in self._versions)
