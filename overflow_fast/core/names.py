"""Names of modules as their author knows them, without the parts of wrappers."""

from __future__ import annotations

from collections.abc import Container, Iterator

from torch import nn

from ..torch_internals.wrappers import COMPOSED, WRAPPED, local_tensor

_FSDP = {"FSDPModule", "FullyShardedDataParallel"}


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the pairs of `model.named_modules()`, with the names before wrapping.

    A wrapper and what it wraps have the same name; the wrapper comes first.
    """
    names: dict[str, str] = {}
    wrapped: set[str] = set()  # by their names after wrapping
    for fqn, module in model.named_modules():
        parent, _, key = fqn.rpartition(".")
        name = names.get(parent, "")
        if fqn and fqn not in wrapped:
            name = f"{name}.{key}" if name else key
        names[fqn] = name
        inner = _wrapped_by(module)
        if inner is not None:
            wrapped.add(f"{fqn}.{inner}" if fqn else inner)
        yield name, module


def has_base(cls: type, names: Container[str]) -> bool:
    """Returns whether a class, or one of its bases, has one of these names."""
    return any(base.__name__ in names for base in cls.__mro__)


def is_sharded(model: nn.Module) -> bool:
    """Returns whether a model's own parameters are shards of its modules' weights.

    This is so under FSDP, and where parameters are DTensors. A module's call then sees
    gathered parameters, or parts with a layout of their own; the parts are what
    `model.parameters()` yields outside of calls.
    """
    if any(has_base(each, _FSDP) for each in {type(m) for m in model.modules()}):
        return True
    return any(local_tensor(each) is not None for each in model.parameters())


def unwrapped_class(cls: type) -> type:
    """A module's class without the one that FSDP2 or `replicate()` puts over it."""
    own, *bases = cls.__mro__
    prefix = COMPOSED.get(bases[0].__name__) if bases else None
    for base in bases[1:]:
        if prefix is not None and own.__name__ == prefix + base.__name__:
            return base
    return own


def _wrapped_by(module: nn.Module) -> str | None:
    for cls in type(module).__mro__:
        if cls.__name__ in WRAPPED and cls.__module__.startswith("torch."):
            return WRAPPED[cls.__name__]
    return None
