"""Modules whose inputs or outputs may be changed by code that is not theirs."""

from __future__ import annotations

import functools

from torch import nn

from .. import _C
from ..torch_internals.module_internals import (
    forward_hooks,
    forward_pre_hooks,
    global_forward_hooks,
    global_forward_pre_hooks,
)

_OURS = (_C.run_hook, _C.run_paused)


def never_writes(module: nn.Module | None) -> bool:
    """Returns whether a module is known not to write to its inputs: torch's layers."""
    return is_layer_of_torch(module) and not getattr(module, "inplace", False)


def is_layer_of_torch(module: nn.Module | None) -> bool:
    """Returns whether a module is one of torch.nn's, and has no submodules."""
    if module is None or next(module.children(), None) is not None:
        return False
    return type(module).__module__.startswith("torch.nn.")


def only_calls_submodules(module: nn.Module | None) -> bool:
    """Returns whether a module's own code only calls its submodules in a row."""
    if not isinstance(module, nn.Sequential) or "forward" in vars(module):
        return False
    return type(module).forward is nn.Sequential.forward


def has_hooks(module: nn.Module) -> bool:
    """Returns whether hooks of others run around a module's forward."""
    every = (has_pre_hooks, has_earlier_hooks, has_later_hooks)
    return any(has_any(module) for has_any in every)


def has_pre_hooks(module: nn.Module | None) -> bool:
    """Returns whether a hook of others may replace a module's inputs."""
    hooks = {} if module is None else forward_pre_hooks(module)
    every = (*hooks.values(), *global_forward_pre_hooks().values())
    return not all(map(_is_ours, every))


def has_earlier_hooks(module: nn.Module | None) -> bool:
    """Returns whether a hook of others may replace an output before it is scanned."""
    hooks = [] if module is None else list(forward_hooks(module).values())
    ours = next((i for i, hook in enumerate(hooks) if _is_ours(hook)), len(hooks))
    return not all(map(_is_ours, (*global_forward_hooks().values(), *hooks[:ours])))


def has_later_hooks(module: nn.Module | None) -> bool:
    """Returns whether a hook of others may replace an output after it was scanned."""
    hooks = [] if module is None else list(forward_hooks(module).values())
    ours = [i for i, hook in enumerate(hooks) if _is_ours(hook)]
    return bool(ours) and not all(map(_is_ours, hooks[ours[0] :]))


def _is_ours(hook: object) -> bool:
    if isinstance(hook, functools.partial):
        return hook.func in _OURS
    owner = getattr(hook, "__self__", None)
    return type(owner).__module__.startswith("overflow_fast.")
