"""Private APIs of modules and optimizers, and of what wraps them.

Classes of wrappers are known by name: to import them would be slow, or fail, where none
is used.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as optim_module
from torch.utils.hooks import RemovableHandle

from .registry import INTERNALS, Internal, direct, internal, listed, stack

# Their names in a module's `__dict__`, for loops that must be fast.
PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"
_TABLE = (
    "the dict can be assigned to, holds None, and costs no walk",
    "The guard cannot work without it",
)


# The parameters that a module itself holds, by name; None values are in it.
own_parameters: Callable[[nn.Module], dict[str, Any]] = direct(
    "torch.nn.Module._parameters", *_TABLE
)
# The buffers that a module itself holds, by name; None values are in it.
own_buffers: Callable[[nn.Module], dict[str, Any]] = direct(
    "torch.nn.Module._buffers", *_TABLE
)
# The modules that a module itself holds, by name; None values are in it.
submodules: Callable[[nn.Module], dict[str, Any]] = direct(
    "torch.nn.Module._modules", *_TABLE
)


def share_tensors(module: nn.Module, source: nn.Module) -> None:
    """Makes a module hold another's parameters and buffers, those set later too."""
    module._parameters, module._buffers = source._parameters, source._buffers


# A module's forward hooks, in the order of their calls.
forward_hooks: Callable[[nn.Module], dict[int, Callable[..., Any]]] = direct(
    "torch.nn.Module._forward_hooks",
    "the order of hooks, and whose they are",
    "Hooks of others around a module are not noticed",
    {},
)


@listed(
    "torch.nn.Module._forward_hooks",
    "modules that compute in another way where they have hooks",
    "A watched nn.TransformerEncoderLayer does not take its fast path",
)
def asks_for_hooks(module: nn.Module) -> bool:
    """True if a module's forward asks whether modules have hooks.

    nn.TransformerEncoderLayer does, and takes its fast path only where none has any.
    """
    own = (vars(base).get("forward") for base in type(module).__mro__)
    codes = (getattr(forward, "__code__", None) for forward in own)
    return any(code is not None and _mentions_hooks(code) for code in codes)


@functools.lru_cache(4096)
def _mentions_hooks(code: types.CodeType) -> bool:
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    is_named = "_forward_hooks" in (*code.co_names, *code.co_consts)
    return is_named or any(map(_mentions_hooks, inner))


@contextlib.contextmanager
def spare_forward_hooks(module: nn.Module) -> Iterator[None]:
    """Gives a module a copy of its table of hooks, while torch walks through the own.

    torch calls the hooks of a forward that has raised: a hook that is added or removed
    meanwhile would make that walk raise in the place of the forward.
    """
    own = module._forward_hooks
    module._forward_hooks = own.copy()
    try:
        yield
    finally:
        module._forward_hooks = own


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


@internal(
    "torch.nn.Module._forward_hooks_always_called",
    "dynamo compiles a block again for each key of a hook on it that is always called",
    "Blocks that are compiled share no graph where forwards alone are watched",
)
def share_called_key(module: nn.Module, handle: RemovableHandle, key: int) -> None:
    """Moves a module's newest forward hook, which is always called, to a key.

    Args:
        module: The module, whose hook takes no keyword arguments.
        handle: The hook's.
        key: The key of a hook of the same kind, of this or another module.
    """
    hooks: dict[int, Any] = module._forward_hooks
    flags = module._forward_hooks_always_called
    if key not in hooks:
        hooks[key], flags[key] = hooks.pop(handle.id), flags.pop(handle.id)
        handle.id = key


def drop_hooks(module: nn.Module, is_dropped: Callable[[Any], bool]) -> None:
    """Removes forward hooks and pre-hooks of a module as their handles would."""
    for hooks, flags in (
        (
            module._forward_hooks,
            (module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
        ),
        (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
    ):
        for key in [key for key, each in list(hooks.items()) if is_dropped(each)]:
            for table in (hooks, *flags):
                table.pop(key, None)


_IS_2_10 = torch.__version__ < "2.11"  # parses both: not for each module


# A module's forward pre-hooks, in the order of their calls.
forward_pre_hooks: Callable[[nn.Module], dict[int, Callable[..., Any]]] = direct(
    "torch.nn.Module._forward_pre_hooks",
    "the order of hooks, and whose they are",
    "Hooks of others around a module are not noticed",
    {},
)


# The forward hooks, and pre-hooks, that run around every module.
global_forward_hooks: Callable[[], Mapping[int, Callable[..., Any]]] = direct(
    "torch.nn.modules.module._global_forward_hooks",
    "whether a hook on all modules may replace an output",
    "Global hooks are not noticed",
    {},
)
global_forward_pre_hooks: Callable[[], Mapping[int, Callable[..., Any]]] = direct(
    "torch.nn.modules.module._global_forward_pre_hooks",
    "whether a hook on all modules may replace an input",
    "Global hooks are not noticed",
    {},
)


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
    "whether other code may change gradients or weights before a step begins",
    "What step pre-hooks write is judged in the next step",
    (),
)
def step_pre_hooks(optimizer: Any) -> list[Callable[..., Any]]:
    """Lists the pre-hooks that a step of an optimizer begins with, in their order."""
    found = optim_module._global_optimizer_pre_hooks
    own = getattr(optimizer, "_optimizer_step_pre_hooks", {})
    return [*found.values(), *own.values()]


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


# The method by which `nn.Module.half()`, `to()` and others reach each module's tensors.
APPLY = "_apply"


@listed(
    f"torch.nn.Module.{APPLY}",
    "modules that keep_in_fp32 was given stay float32 when the model is cast to half",
    "half() casts them; call keep_in_fp32 after it",
)
def apply_to_tensors(
    module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool
) -> None:
    """Replaces a module's tensors, as the method of its class does."""
    getattr(type(module), APPLY)(module, function, recurse)


# What wraps modules, most of it for several ranks.


def _class(api: str, reason: str, without: str) -> str:
    name = api.rpartition(".")[2]
    INTERNALS[name] = Internal(api, reason, without)
    return name


_NAMES = "the names of modules before they were wrapped", "Names hold the wrapper's"
# The attribute in which a class keeps the module that it wraps, by the class's name.
WRAPPED = {
    _class(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper",
        *_NAMES,
    ): "_checkpoint_wrapped_module",
    _class("torch.nn.DataParallel", *_NAMES): "module",
    _class("torch.nn.parallel.DistributedDataParallel", *_NAMES): "module",
    _class("torch.distributed.fsdp.FullyShardedDataParallel", *_NAMES): (
        "_fsdp_wrapped_module"
    ),
    _class("torch._dynamo.eval_frame.OptimizedModule", *_NAMES): "_orig_mod",
}

_COMPOSED = "the author's class", "Composable functions show in the names of classes"
# What composable functions put first among a class's bases, and before its name. The
# extension has the same table, in csrc/torch_internals/modules.h.
COMPOSED = {
    _class("torch.distributed._composable.replicate.DDP", *_COMPOSED): "DDP",
    _class("torch.distributed.fsdp.FSDPModule", *_COMPOSED): "FSDP",
    _class(
        "torch.distributed._composable.replicate_with_fsdp.ReplicateModule", *_COMPOSED
    ): "Replicate",
}


@internal(
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
    "the ranks that a module is sharded over while its parameters are gathered",
    "Pass process_group= for modules under fully_shard()",
    (),
)
def fsdp_meshes(module: Any) -> list[Any]:
    """The device meshes of a module under `fully_shard()`."""
    return [group.mesh_info.mesh for group in _fsdp_groups(module)]


def _fsdp_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups = state._fsdp_param_groups
    else:  # torch 2.12 and older have one, or None
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


@internal(
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam",
    "gradients that wait for a later micro-batch cannot be put back",
    "Steps under fully_shard() are not replayed",
    True,
)
def holds_gradients(module: Any) -> bool:
    """True if a module under `fully_shard()` has gradients to be reduced."""
    return any(
        not group.reduce_grads
        or any(
            each.unsharded_accumulated_grad is not None for each in group.fsdp_params
        )
        for group in _fsdp_groups(module)
    )


@listed(
    "torch.distributed.fsdp._common_utils._FSDPState",
    "the ranks that replicate what FSDP with hybrid sharding shards",
    "Pass process_group= for hybrid sharding",
)
def inter_node_group(module: nn.Module) -> Any:
    """The second process group of FSDP with hybrid sharding, or None."""
    return getattr(module, "_inter_node_pg", None)


@internal(
    "torch.distributed._composable.replicate.replicate",
    "the ranks that a replicated module is shared by",
    "Pass process_group= for modules under replicate()",
)
def replicate_sharing(module: nn.Module) -> tuple[Any, Any] | None:
    """The process group and the mesh of a module under composable `replicate()`.

    Returns:
        Either may be None, both where it is replicated over all ranks; None for a
        module under no `replicate()`.
    """
    from torch.distributed._composable.replicate import replicate

    state: Any = replicate.state(module)
    if state is None:
        return None
    made = getattr(state, "_ddp", None)  # at the first forward
    if made is not None:
        return made.process_group, None
    arguments = state._init_kwargs
    return arguments.get("process_group"), arguments.get("device_mesh")


@internal(
    "torch.distributed.distributed_c10d._get_default_store",
    "messages between ranks in a replay wait for no collective of a model",
    "Steps on several ranks are not replayed",
)
def default_store() -> Any:
    """The key-value store that the ranks met at."""
    return torch.distributed.distributed_c10d._get_default_store()


@listed(
    "torch.distributed.algorithms.join.Joinable",
    "which of several objects a `Join` has, and which it has first",
    "The order of objects in a `Join` is not checked",
)
def join_config(joinable: Any) -> Any:
    """Returns the configuration that a `Join` gave an object, or None. It stays set."""
    return getattr(joinable, "_join_config", None)


def is_joining(joinable: Any) -> bool:
    """Returns True if a `Join` has this object; torch does not reset it afterwards."""
    return bool(getattr(join_config(joinable), "enable", False))


def is_first(joinable: Any) -> bool:
    """Returns True if a `Join` has this object first."""
    return is_joining(joinable) and bool(join_config(joinable).is_first_joinable)


@internal(
    "torch.distributed.algorithms.join.Join.__exit__",
    "whether a rank without batches shadows the others' steps",
    "Guards under a `Join` do not decide together",
    False,
)
def is_shadowing() -> bool:
    """True if a `Join` is calling its hooks, for a rank without a batch."""
    from torch.distributed.algorithms.join import Join

    code = Join.__exit__.__code__
    return any(frame.f_code is code for frame in stack())


@internal(
    "torch.distributed.pipelining.stage",
    "a pipeline runs its stage to learn shapes, with unset memory",
    "Values in unset memory may be reported",
    False,
)
def is_dry_run() -> bool:
    """True if a pipeline runs its stage to learn shapes, with unset memory."""
    stage = sys.modules.get("torch.distributed.pipelining.stage")
    if stage is None:
        return False
    codes = (frame.f_code for frame in stack())
    file = stage.__file__
    return any(c.co_filename == file and "inference" in c.co_name for c in codes)
