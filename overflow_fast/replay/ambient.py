"""Random states, autocast and training mode at one moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..core.tensors import dtype_named
from ..core.wrapped import set_shares_buffers
from ..state.random import RandomStates

if TYPE_CHECKING:
    from .step_schema import Ambient as Saved


class Ambient:
    """Random states, autocast and training mode at one moment.

    Does not incur a CPU-GPU sync.

    Args:
        model: The model whose training mode counts.
        devices: The devices besides the CPU that it is on.
    """

    def __init__(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        self._random = RandomStates(devices)
        self._training = model.training
        types = ("cpu", *dict.fromkeys(device.type for device in devices))
        self._autocast = [
            (type, torch.is_autocast_enabled(type), torch.get_autocast_dtype(type))
            for type in types
        ]
        self._caches = torch.is_autocast_cache_enabled()
        # DDP: whether the forward takes the first rank's buffers.
        self._shares_buffers = getattr(model, "require_forward_param_sync", None)

    def as_plain(self, put: Callable[[torch.Tensor], str]) -> dict[str, Any]:
        """All of it as JSON.

        Args:
            put: Keeps a tensor, and returns its name.
        """
        return {
            **self._random.as_plain(put),
            "training": self._training,
            "autocast": [
                [t, is_on, str(dtype)[6:]] for t, is_on, dtype in self._autocast
            ],
            "caches": self._caches,
        }

    @classmethod
    def of_plain(
        cls, plain: Saved, tensor_of: Callable[[str], torch.Tensor]
    ) -> Ambient:
        """Makes it of JSON; states of devices that are not here are left out.

        Args:
            plain: What `as_plain()` returned.
            tensor_of: Returns the tensor that it kept by a name.

        Raises:
            ValueError: If a state, a dtype or a device is none.
            RuntimeError: Likewise, as torch says it.
        """
        ambient = cls.__new__(cls)
        ambient._random = RandomStates.of_saved(plain, tensor_of)
        ambient._training = plain.training
        ambient._autocast = [
            (type, is_on, _dtype_of(dtype))
            for type, is_on, dtype in plain.autocast
            if torch.amp.is_autocast_available(type)
        ]
        ambient._caches = plain.caches
        ambient._shares_buffers = None
        return ambient

    @contextmanager
    def applied(self, models: Iterable[nn.Module]) -> Iterator[None]:
        """Sets all of it; autocast is as it was afterwards, the rest is not."""
        self._random.restore()
        for model in models:
            if model.training != self._training:
                model.train(self._training)
            if self._shares_buffers is not None:
                set_shares_buffers(model, self._shares_buffers)
        with ExitStack() as stack:
            for type, enabled, dtype in self._autocast:
                stack.enter_context(
                    torch.autocast(
                        type, dtype=dtype, enabled=enabled, cache_enabled=self._caches
                    )
                )
            yield


def _dtype_of(name: str) -> torch.dtype:
    found = dtype_named(name)
    if found is None:
        raise ValueError(f"{name!r} is no dtype of torch")
    return found
