"""The devices that a program runs on, as operators know them."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import torch
from torch import nn


def place_of(device: torch.device) -> str:
    """Names a device and its host, with the UUID of a GPU."""
    host = socket.gethostname()
    if device.type != "cuda":
        return f"{device} of host {host}"
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", "unknown")
    return f"{device} ({properties.name}, UUID {uuid}) of host {host}"


def devices_of(models: Iterable[nn.Module]) -> list[torch.device]:
    """The devices besides the CPU that hold parameters or buffers."""
    found = {
        tensor.device
        for model in models
        for tensors in (model.parameters(), model.buffers())
        for tensor in tensors
    }
    return sorted((d for d in found if d.type not in ("cpu", "meta")), key=str)
