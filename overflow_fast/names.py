"""Names of modules as their author knows them, without what wrappers put in."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

# What wrapper classes of torch's call the module that they wrap.
_WRAPPED = {
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",  # of torch.compile
}


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields what `model.named_modules()` does, under the names before wrapping.

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


def _wrapped_by(module: nn.Module) -> str | None:
    for cls in type(module).__mro__:
        if cls.__name__ in _WRAPPED and cls.__module__.startswith("torch."):
            return _WRAPPED[cls.__name__]
    return None
