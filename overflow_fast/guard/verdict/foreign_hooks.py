"""Hooks of others on a module, which may change what it is given or returns."""

from __future__ import annotations

import functools

from torch import nn

from ... import _C
from ...torch_internals.module_internals import (
    forward_hooks,
    forward_pre_hooks,
    global_forward_hooks,
    global_forward_pre_hooks,
)

_OURS = (_C.run_hook, _C.run_paused)


def has_pre_hooks(module: nn.Module | None) -> bool:
    """True if a hook of others may replace a module's inputs."""
    hooks = {} if module is None else forward_pre_hooks(module)
    ours = map(is_ours, (*hooks.values(), *global_forward_pre_hooks().values()))
    return not all(ours)


def has_earlier_hooks(module: nn.Module | None) -> bool:
    """True if a hook of others may replace an output before it is scanned."""
    hooks = [] if module is None else list(forward_hooks(module).values())
    ours = next((i for i, hook in enumerate(hooks) if is_ours(hook)), len(hooks))
    return not all(map(is_ours, (*global_forward_hooks().values(), *hooks[:ours])))


def has_later_hooks(module: nn.Module | None) -> bool:
    """True if a hook of others may replace an output after it was scanned."""
    hooks = [] if module is None else list(forward_hooks(module).values())
    ours = [i for i, hook in enumerate(hooks) if is_ours(hook)]
    return bool(ours) and not all(map(is_ours, hooks[ours[0] :]))


def is_ours(hook: object) -> bool:
    """True for a hook of this package."""
    if isinstance(hook, functools.partial):
        return hook.func in _OURS
    owner = getattr(hook, "__self__", None)
    return type(owner).__module__.startswith("overflow_fast.")
