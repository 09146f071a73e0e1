"""Models that several ranks share: what wraps them, in a replay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from ..torch_internals.module_internals import holds_gradients
from .modules import has_base, is_ddp, modules_in

_FSDP2 = {"FSDPModule"}


@contextlib.contextmanager
def without_reduction(models: Iterable[nn.Module]) -> Iterator[None]:
    """Makes DDP leave gradients as each rank computes them.

    They tell which rank is to blame, no communication hook is called, and the memory
    that gradients are reduced in, of which the step's own may be views, stays as it is.
    """
    wrappers = _ddp_in(models)
    before = [wrapper.require_backward_grad_sync for wrapper in wrappers]
    for wrapper in wrappers:
        wrapper.require_backward_grad_sync = False
    try:
        yield
    finally:
        for wrapper, was_reducing in zip(wrappers, before, strict=True):
            wrapper.require_backward_grad_sync = was_reducing


def set_shares_buffers(model: nn.Module, value: bool) -> None:
    """Makes DDP take the first rank's buffers in its next forward, or not."""
    for wrapper in _ddp_in([model]):
        wrapper.require_forward_param_sync = value


def reshard(models: Iterable[nn.Module]) -> None:
    """Makes FSDP2 forget gathered parameters, as only a backward does."""
    for module in _all_of(models, _FSDP2):
        module.reshard()


def reduces(models: Mapping[str, nn.Module]) -> bool:
    """True if a replay reduces gradients as the step did: with FSDP2 alone."""
    return _has(models.values(), _FSDP2) and not _ddp_in(models.values())


def why_not(models: Iterable[nn.Module]) -> str:
    """Why a step of several ranks cannot be replayed with its models; else ""."""
    models = list(models)
    if _has(models, {"FullyShardedDataParallel"}):
        return "has a model under FSDP1, whose gradients cannot be set aside"
    if _has(models, {"DDP"}):
        return "has a model under replicate(), whose reduction cannot be left out"
    if any(holds_gradients(module) for module in _all_of(models, _FSDP2)):
        return "has gradients under fully_shard() that are not reduced yet"
    return ""


def _has(models: Iterable[nn.Module], names: set[str]) -> bool:
    return any(True for _ in _all_of(models, names))  # one may have the length 0


def _ddp_in(models: Iterable[nn.Module]) -> list[Any]:
    return [each for model in models for each in modules_in(model) if is_ddp(each)]


def _all_of(models: Iterable[nn.Module], names: set[str]) -> Iterator[Any]:
    """Yields the modules of classes with these names."""
    for model in models:
        for module in modules_in(model):
            if has_base(type(module), names):
                yield module
