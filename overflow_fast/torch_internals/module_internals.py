"""Private APIs of modules and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .registry import internal, listed

# Their names in a module's `__dict__`, for loops that must be fast.
PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"
_TABLE = (
    "the dict can be assigned to, holds None, and costs no walk",
    "The guard cannot work without it",
)


@listed("torch.nn.Module._parameters", *_TABLE)
def own_parameters(module: nn.Module) -> dict[str, Any]:
    """The parameters that a module itself holds, by name; None values are in it."""
    return module._parameters


@listed("torch.nn.Module._buffers", *_TABLE)
def own_buffers(module: nn.Module) -> dict[str, Any]:
    """The buffers that a module itself holds, by name; None values are in it."""
    return module._buffers


@listed("torch.nn.Module._modules", *_TABLE)
def submodules(module: nn.Module) -> dict[str, Any]:
    """The modules that a module itself holds, by name; None values are in it."""
    return module._modules


def share_tensors(module: nn.Module, source: nn.Module) -> None:
    """Makes a module hold another's parameters and buffers, those set later too."""
    module._parameters, module._buffers = source._parameters, source._buffers


@internal(
    "torch.nn.Module._forward_hooks",
    "the order of hooks, and whose they are",
    "Hooks of others around a module are not noticed",
    {},
)
def forward_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """A module's forward hooks, in the order of their calls."""
    return module._forward_hooks


@internal(
    "torch.nn.Module._forward_hooks_with_kwargs",
    "dynamo of torch 2.10 compiles a block again for each key of a hook on it",
    "With torch 2.10, blocks that are compiled share no graph",
)
def share_key(module: nn.Module, handle: RemovableHandle, key: int) -> None:
    """Moves a module's newest forward hook to a key, for torch 2.10.

    Args:
        module: The module, whose hook takes keyword arguments.
        handle: The hook's.
        key: The key of a hook of the same kind, of this or another module.
    """
    hooks: dict[int, Any] = module._forward_hooks
    flags = module._forward_hooks_with_kwargs
    if _IS_2_10 and key not in hooks:
        hooks[key], flags[key] = hooks.pop(handle.id), flags.pop(handle.id)
        handle.id = key


_IS_2_10 = torch.__version__ < "2.11"  # parses both: not for each module


@internal(
    "torch.nn.Module._forward_pre_hooks",
    "the order of hooks, and whose they are",
    "Hooks of others around a module are not noticed",
    {},
)
def forward_pre_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """A module's forward pre-hooks, in the order of their calls."""
    return module._forward_pre_hooks


@internal(
    "torch.nn.modules.module._global_forward_hooks",
    "whether a hook on all modules may replace an output",
    "Global hooks are not noticed",
    {},
)
def global_forward_hooks() -> Mapping[int, Callable[..., Any]]:
    """The forward hooks that run around every module."""
    return torch.nn.modules.module._global_forward_hooks


@internal(
    "torch.nn.modules.module._global_forward_pre_hooks",
    "whether a hook on all modules may replace an input",
    "Global hooks are not noticed",
    {},
)
def global_forward_pre_hooks() -> Mapping[int, Callable[..., Any]]:
    """The forward pre-hooks that run around every module."""
    return torch.nn.modules.module._global_forward_pre_hooks


@internal(
    "torch.nn.modules.batchnorm._NormBase",
    "which modules only write to their statistics in training",
    "Batch norms are taken for any other module",
    False,
)
def is_batch_norm(module: object) -> bool:
    """Returns True for torch's batch and instance norms, of any dimension."""
    return isinstance(module, torch.nn.modules.batchnorm._NormBase)


@listed(
    "torch.optim.SGD._optimizer_step_pre_hooks",
    "which of several wrapped objects is the optimizer",
    "No optimizer is recognized",
)
def has_step_hooks(optimizer: object) -> bool:
    """Returns True for an optimizer that has torch's step hooks."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


@internal(
    "torch.optim.optimizer._global_optimizer_pre_hooks",
    "whether other code may change weights before a closure is called",
    "Such steps are judged behind their closure",
    1,
)
def num_step_hooks(optimizer: Any) -> int:
    """The number of step pre-hooks that run around a step of an optimizer."""
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    own = getattr(optimizer, "_optimizer_step_pre_hooks", ())
    return len(own) + len(_global_optimizer_pre_hooks)


@listed(
    "torch.optim.SGD._step_supports_amp_scaling",
    "optimizers whose kernels leave a step out where a GradScaler sets a flag",
    "Steps of fused optimizers wait for the verdict",
)
def reads_found_inf(optimizer: object) -> bool:
    """Returns True for an optimizer whose kernels read `found_inf` themselves."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


@internal(
    "torch.nn.modules.dropout._DropoutNd",
    "which modules may return their inputs",
    "The makers of values that a dropout returns as they are may be named wrongly",
    False,
)
def is_dropout(module: object) -> bool:
    """Returns True for torch's dropouts, and classes derived from them."""
    return isinstance(module, torch.nn.modules.dropout._DropoutNd)


# The method by which `nn.DataParallel` copies each module.
REPLICATE = "_replicate_for_data_parallel"


@listed(
    f"torch.nn.Module.{REPLICATE}",
    "copies of a module whose forward is replaced must run their own",
    "nn.DataParallel over such modules runs the first device's",
)
def replicate(module: nn.Module) -> nn.Module:
    """Makes the copy of a module that `nn.DataParallel` runs on another device."""
    replica: nn.Module = getattr(type(module), REPLICATE)(module)
    return replica
