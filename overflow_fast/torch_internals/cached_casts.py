"""Autocast's casts of weights, which it keeps for all threads until a region ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

# The types of devices with an autocast, as far as torch names them itself.
_TYPES = "cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "ipu", "xla"


def autocast_devices() -> list[str]:
    """Lists the types of devices for which this torch has an autocast."""
    own = torch.accelerator.current_accelerator()  # it may have any name
    types = dict.fromkeys((*_TYPES, *([own.type] if own else [])))
    return [each for each in types if torch.amp.is_autocast_available(each)]


class _Stop(Exception):
    pass


class _FirstOperation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Ends at the first operation, and keeps which one that was."""

    found: Any = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else its first operation imports torch._dynamo

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.found = function
        raise _Stop


def _is_cached(weights: Iterable[torch.Tensor], device: str) -> bool:
    """True if autocast has a cast of a weight: it needs none before a product."""
    first = _FirstOperation()  # type: ignore[no-untyped-call]
    region = torch.autocast(device, cache_enabled=True)
    with region, torch.enable_grad(), first:
        for each in (w for w in weights if w.device.type == device):
            with contextlib.suppress(_Stop):
                torch.mm(each, each)
            if first.found is torch.ops.aten.mm.default:
                return True
    return False


def _reads_casts_later(weights: Iterable[torch.Tensor]) -> bool:
    """True if the program may read again what autocast caches, or has cached."""
    kinds = autocast_devices()
    if any(map(torch.is_autocast_enabled, kinds)):
        return True
    is_within = torch.autocast_increment_nesting() > 1
    try:
        own = [w for w in weights if type(w) in _PLAIN and w.dtype == torch.float32]
        own = [w for w in own if w.requires_grad and w.is_leaf]
        devices = {w.device.type for w in own}.intersection(kinds)
        return is_within or any(_is_cached(own, device) for device in devices)
    finally:
        torch.autocast_decrement_nesting()


_PLAIN = torch.Tensor, nn.Parameter


@contextlib.contextmanager
def without_cached_casts(weights: Iterable[torch.Tensor]) -> Iterator[None]:
    """Neither reads nor drops what autocast has cached for the program.

    Those casts may be of weights as they were. Where the program has none and is in no
    region, code that runs within caches its own, and drops them as the program does.

    Args:
        weights: The weights of what runs within.
    """
    if not _reads_casts_later(weights):
        yield
        return
    caches = torch.is_autocast_cache_enabled()
    torch.autocast_increment_nesting()  # at 0 a region that ends drops all casts
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(caches)
        torch.autocast_decrement_nesting()
