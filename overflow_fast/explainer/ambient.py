"""Random states, autocast and training mode of a call, set again."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ..base.modules import set_shares_buffers
from ..guard.kept_calls.ambient import Ambient, autocast_of
from ..guard.undo.contents import restore_all


@contextmanager
def applied(ambient: Ambient, models: Iterable[nn.Module]) -> Iterator[None]:
    """Sets all of it; autocast is as it was afterwards, the rest is not."""
    ambient.random.restore()
    restore_all(ambient.generators)
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
