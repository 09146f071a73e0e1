"""Random states, autocast and training mode at one moment, to be set again."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ...base.shared_models import set_shares_buffers
from ..undo.contents import Kept, restore_all
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

    @contextmanager
    def applied(self, models: Iterable[nn.Module]) -> Iterator[None]:
        """Sets all of it; autocast is as it was afterwards, the rest is not."""
        self.random.restore()
        restore_all(self.generators)
        for model in models:
            if model.training != self.training:
                model.train(self.training)
            if self.shares_buffers is not None:
                set_shares_buffers(model, self.shares_buffers)
        was_caching = torch.is_autocast_cache_enabled()
        caches = self.caches and was_caching  # see `without_cached_casts()`
        with ExitStack() as stack:
            now = autocast_of(type for type, _, _ in self.autocast)
            for before, kept in zip(now, self.autocast, strict=True):
                # The end of a region drops what autocast has cached for any thread.
                if (before, was_caching) != (kept, caches):
                    type, enabled, dtype = kept
                    stack.enter_context(
                        torch.autocast(
                            type, dtype=dtype, enabled=enabled, cache_enabled=caches
                        )
                    )
            yield

    def with_autocast_of_now(self) -> Ambient:
        """The same, with autocast as it is at this moment."""
        now = copy.copy(self)
        now.autocast = autocast_of(type for type, _, _ in self.autocast)
        return now


def autocast_of(types: Iterable[str]) -> list[tuple[str, bool, torch.dtype]]:
    """Of each kind of device: whether autocast is on, and its dtype."""
    return [
        (type, torch.is_autocast_enabled(type), torch.get_autocast_dtype(type))
        for type in types
    ]
