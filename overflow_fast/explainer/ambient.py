"""Random states, autocast and training mode of a call: set again, saved and read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..guard.files.fields import line_of
from ..guard.step_keeper import Ambient, autocast_of
from ..guard.undo.random import RandomStates
from ..scanner.modules import set_shares_buffers
from ..scanner.tensors import dtype_named
from ..scanner.text import dtype_name
from .step_schema import SavedAmbient


@contextmanager
def applied(ambient: Ambient, models: Iterable[nn.Module]) -> Iterator[None]:
    """Sets all of it; autocast is as it was afterwards, the rest is not."""
    ambient.random.restore()
    for model in models:
        if model.training != ambient.training:
            model.train(ambient.training)
        if ambient.shares_buffers is not None:
            set_shares_buffers(model, ambient.shares_buffers)
    was_caching = torch.is_autocast_cache_enabled()
    caches = ambient.caches and was_caching  # see `without_cached_casts()`
    with ExitStack() as stack:
        now = autocast_of(_types(ambient))
        for before, kept in zip(now, ambient.autocast, strict=True):
            # The end of a region drops what autocast has cached for any thread.
            if (before, was_caching) != (kept, caches):
                type, enabled, dtype = kept
                stack.enter_context(
                    torch.autocast(
                        type, dtype=dtype, enabled=enabled, cache_enabled=caches
                    )
                )
        yield


def with_autocast_of_now(ambient: Ambient) -> Ambient:
    """The same, with autocast as it is at this moment."""
    now = copy.copy(ambient)
    now.autocast = autocast_of(_types(ambient))
    return now


def _types(ambient: Ambient) -> list[str]:
    return [type for type, _, _ in ambient.autocast]


def as_plain(ambient: Ambient, put: Callable[[torch.Tensor], str]) -> dict[str, Any]:
    """All of it as JSON.

    Args:
        ambient: The states.
        put: Keeps a tensor, and returns its name.
    """
    return line_of(
        SavedAmbient,
        **ambient.random.as_plain(put),
        training=ambient.training,
        autocast=[
            [type, is_on, dtype_name(dtype)] for type, is_on, dtype in ambient.autocast
        ],
        caches=ambient.caches,
    )


def of_plain(plain: SavedAmbient, tensor_of: Callable[[str], torch.Tensor]) -> Ambient:
    """Makes it of JSON; states of devices that are not here are left out.

    Args:
        plain: What `as_plain()` returned.
        tensor_of: Returns the tensor that it kept by a name.

    Raises:
        ValueError: If a state, a dtype or a device is none.
        RuntimeError: Likewise, as torch says it.
    """
    ambient = Ambient.__new__(Ambient)
    ambient.random = RandomStates.of_saved(plain, tensor_of)
    ambient.training = plain.training
    ambient.autocast = [
        (type, is_on, _dtype_of(dtype))
        for type, is_on, dtype in plain.autocast
        if torch.amp.is_autocast_available(type)
    ]
    ambient.caches = plain.caches
    ambient.shares_buffers = None
    return ambient


def _dtype_of(name: str) -> torch.dtype:
    found = dtype_named(name)
    if found is None:
        raise ValueError(f"{name!r} is no dtype of torch")
    return found
