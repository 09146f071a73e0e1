"""Random states, autocast and training mode at one moment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ..undo.contents import Kept
from ..undo.random import RandomStates


class Ambient:
    """Random states, autocast and training mode at one moment.

    Does not incur a CPU-GPU sync.

    Args:
        model: The model whose training mode counts.
        devices: The devices besides the CPU that it is on.
        random: The random states, where they are known; None for those of now.
        generators: The states of the program's own generators that the call may draw
            from.

    Attributes:
        random: The random states.
        generators: Those of the program's own generators.
        training: The model's training mode.
        autocast: Of each kind of device: whether autocast is on, and its dtype.
        caches: Whether autocast caches what it casts.
        shares_buffers: DDP: whether the forward takes the first rank's buffers.
    """

    def __init__(
        self,
        model: nn.Module,
        devices: Sequence[torch.device],
        random: RandomStates | None = None,
        generators: Sequence[Kept] = (),
    ) -> None:
        self.generators = generators
        self.random = RandomStates(devices) if random is None else random
        self.training = model.training
        types = ("cpu", *dict.fromkeys(device.type for device in devices))
        self.autocast = autocast_of(types)
        self.caches = torch.is_autocast_cache_enabled()
        self.shares_buffers = vars(model).get("require_forward_param_sync")


def autocast_of(types: Iterable[str]) -> list[tuple[str, bool, torch.dtype]]:
    """Of each kind of device: whether autocast is on, and its dtype."""
    return [
        (type, torch.is_autocast_enabled(type), torch.get_autocast_dtype(type))
        for type in types
    ]
