"""States of random number generators in a step on disk."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..guard.undo.random import RandomStates, plain_state
from .step_schema import SavedAmbient


def plain_states(
    states: RandomStates, put: Callable[[torch.Tensor], str]
) -> dict[str, Any]:
    """The states as JSON.

    Args:
        states: The states.
        put: Keeps a tensor, and returns its name.
    """
    known = states.states
    torchs = {n: s for n, s in known.items() if isinstance(s, torch.Tensor)}
    others = {n: plain_state(s) for n, s in known.items() if n not in torchs}
    devices = [["" if n == "cpu" else n, put(s)] for n, s in torchs.items()]
    return {"random": devices, **others}


def states_of(
    saved: SavedAmbient, tensor_of: Callable[[str], torch.Tensor]
) -> RandomStates:
    """Makes states of what was saved, without those of devices that are not here.

    Args:
        saved: The result of `plain_states()`, decoded.
        tensor_of: Returns the tensor that was kept by a name.

    Raises:
        ValueError: If a state is none.
        RuntimeError: Likewise, as torch says it.
    """
    states: dict[str, Any] = {
        device or "cpu": tensor_of(name).to(torch.uint8)
        for device, name in saved.random
        if not device or _is_here(torch.device(device))
    }
    if "cpu" in states:
        torch.Generator().set_state(states["cpu"])  # raises if it is none
    version, numbers, gauss = saved.python
    states["python"] = version, tuple(numbers), gauss
    random.Random().setstate(states["python"])
    numpys: Any = sys.modules.get("numpy.random")
    if saved.numpy and numpys is not None:
        try:
            numpys.RandomState().set_state(saved.numpy)
        except Exception as error:
            raise ValueError(f"no state of NumPy's generator: {error}") from error
        states["numpy"] = saved.numpy
    return RandomStates.of(states)


def _is_here(device: torch.device) -> bool:
    module = torch.get_device_module(device)
    return bool(module.is_available()) and (device.index or 0) < module.device_count()
