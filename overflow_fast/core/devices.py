"""The devices that a program runs on, as operators know them."""

from __future__ import annotations

import socket

import torch


def place_of(device: torch.device) -> str:
    """Names a device and its host, with the UUID of a GPU."""
    host = socket.gethostname()
    if device.type != "cuda":
        return f"{device} of host {host}"
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", "unknown")
    return f"{device} ({properties.name}, UUID {uuid}) of host {host}"
