"""The optimizers that an optimizer, or a wrapper of one, holds.

DeepSpeed, Megatron-core and others give the training loop an optimizer of their own,
which holds torch's and decides when to call it. Nothing here imports an engine: an
optimizer is told by its attributes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from ...base.tree import Part, children, is_container, path_text

# Wrappers may have them as properties.
_NAMES = ("optimizer", "optim", "inner")


def optimizers_in(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yields an optimizer and all that it holds, each once, the outermost first.

    Args:
        optimizer: An optimizer, or an object that has one as an attribute or in an
            attribute that is a list, a tuple or a dict. Others are searched in
            the same way if they are optimizers, or have `step` and `param_groups`.

    Yields:
        The path of attributes that leads to the optimizer, such as `optim.` or
        `chained[0].`, "" for the outermost, and the optimizer.
    """
    seen = {id(optimizer)}
    waiting = [("", optimizer)]
    while waiting:
        path, each = waiting.pop(0)
        yield path, each
        for name, part, value in _attributes(each):
            if id(value) not in seen and is_optimizer(value):
                seen.add(id(value))
                item = "" if part is None else path_text((part,))
                waiting.append((f"{path}{name}{item}.", value))


def _attributes(holder: Any) -> Iterator[tuple[str, Part | None, Any]]:
    """Yields attributes and the items of those that are lists, tuples or dicts.

    A key's text is not made here: the keys of a state are tensors.
    """
    if isinstance(holder, Module):  # an engine that is also the model's wrapper
        held = dict(vars(holder))
    else:
        held = {part.value: value for part, value in children(holder) or ()}
    for name in _NAMES:
        held.setdefault(name, attribute_of(holder, name))
    for name, value in held.items():
        yield name, None, value
        if is_container(value):
            for part, item in children(value) or ():
                yield name, part, item


def is_optimizer(value: Any) -> bool:
    """True if an object is an optimizer, or has `step` and `param_groups`."""
    if isinstance(value, Optimizer):
        return True
    has_step = callable(getattr(type(value), "step", None))
    return has_step and attribute_of(value, "param_groups") is not None


def has_torchs_step(optimizer: Any) -> bool:
    """True if an optimizer steps as torch's own do: a subclass of one may, too."""
    return bool(type(optimizer).step.__module__.startswith("torch.optim."))


def attribute_of(holder: Any, name: str) -> Any:
    """Returns an attribute, or None where there is none or its property raises."""
    try:
        return getattr(holder, name, None)
    except Exception:
        return None


def vars_of(holder: Any) -> dict[str, Any]:
    """The attributes that an object itself has, as it keeps them."""
    return getattr(holder, "__dict__", {})
