"""Overflow flags: what a device itself knows of overflows inside its operations.

Some accelerators keep a flag that an operation overflowed, also where its result is
finite: in saturation mode the largest number stands in place of an inf. A guard asks
the flag of its models' devices once for each watched step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("overflow_fast")
_LABEL = "overflow flag"
of_devices: dict[str, DeviceFlag] = {}  # the registered flags, by `torch.device.type`


@dataclass(frozen=True)
class DeviceFlag:
    """The overflow flag of a type of device.

    Attributes:
        clear: Clears the flag.
        read: Returns True if it is set: a bool, or a tensor of one element on the
            device, which is read along with the step's other values.
    """

    clear: Callable[[], object]
    read: Callable[[], bool | torch.Tensor]


def register(
    device_type: str,
    *,
    clear: Callable[[], object],
    read: Callable[[], bool | torch.Tensor],
) -> None:
    """Registers the overflow flag of a type of device, for all guards of this process.

    Args:
        device_type: The type, such as "npu", as in `torch.device.type`.
        clear: Clears the flag; called when a watched step begins.
        read: Returns True if the flag is set, as a bool or a tensor of one element;
            called once when the step is judged. May incur a CPU-GPU sync.

    Raises:
        TypeError: If `device_type` is no str, or a function is not callable.
    """
    if not isinstance(device_type, str):
        raise TypeError(f"device_type must be a str, got {type(device_type).__name__}")
    for name, function in (("clear", clear), ("read", read)):
        if not callable(function):
            raise TypeError(f"{name} must be callable, got {type(function).__name__}")
    of_devices[device_type] = DeviceFlag(clear, read)


def unregister(device_type: str) -> None:
    """Removes the flag of a type of device, if there is one."""
    of_devices.pop(device_type, None)


def registered(device_types: Iterable[str]) -> dict[str, DeviceFlag]:
    """Returns the flags of some types of devices."""
    types = set(device_types)
    return {each: flag for each, flag in of_devices.items() if each in types}


def attempt(device_type: str, function: Callable[[], object]) -> object:
    """Calls a function of a flag; one that raises is logged, and not asked again."""
    try:
        return function()
    except Exception as error:
        unregister(device_type)
        _log.warning(
            "The overflow flag of %s is no longer read: %s: %s.",
            device_type,
            type(error).__name__,
            error,
        )
        return False


def label_of(device_type: str) -> str:
    """Returns the name that an entry of the flag has in reports."""
    return f"{device_type} {_LABEL}"


def is_label(text: str) -> bool:
    """True if an entry is of a flag, by its name."""
    return text.endswith(f" {_LABEL}")
