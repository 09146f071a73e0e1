"""Private APIs of what wraps modules and tensors, most of it for several ranks.

Classes are known by name: to import them would be slow, or fail, where none is used.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from .registry import INTERNALS, Internal, internal, listed, stack


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


@listed(
    "torch.distributed.tensor.DTensor._local_tensor",
    "a rank's own part of a DTensor, without a collective",
    "DTensors are not scanned",
)
def local_tensor(tensor: object) -> torch.Tensor | None:
    """This rank's part of a DTensor; None for any other tensor."""
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, torch.Tensor) else None


@internal(
    "torch.distributed._functional_collectives.AsyncCollectiveTensor",
    "a collective's result that has not been waited for",
    "Such tensors are listed as not scanned",
)
def arrived(tensor: Any) -> torch.Tensor | None:
    """The result of a collective that may still run; None for any other tensor.

    The stream waits for it, or the host where there is no stream.
    """
    if type(tensor).__name__ != "AsyncCollectiveTensor":
        return None
    result: torch.Tensor = tensor.trigger_wait()
    return result


@listed(
    "torch.distributed.tensor.DTensor._spec",
    "the ranks that a DTensor is shared by",
    "Pass process_group= for models of DTensors",
)
def mesh_of(tensor: torch.Tensor) -> Any:
    """The device mesh of a DTensor, or None.

    DDP has local tensors in its place between two forwards.
    """
    spec = getattr(tensor, "_spec", None) or getattr(tensor, "_st_info", None)
    return getattr(spec, "mesh", None)


@internal(
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
    "the ranks that a module is sharded over while its parameters are gathered",
    "Pass process_group= for modules under fully_shard()",
    (),
)
def fsdp_meshes(module: Any) -> list[Any]:
    """The device meshes of a module under `fully_shard()`."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups = state._fsdp_param_groups
    else:  # torch 2.12 and older have one, or None
        groups = [state._fsdp_param_group]
    return [group.mesh_info.mesh for group in groups if group is not None]


@internal(
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam",
    "gradients that wait for a later micro-batch cannot be put back",
    "Steps under fully_shard() are not replayed",
    True,
)
def holds_gradients(module: Any) -> bool:
    """True if a module under `fully_shard()` has gradients to be reduced."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups = state._fsdp_param_groups
    else:
        groups = [state._fsdp_param_group]
    return any(
        not group.reduce_grads
        or any(
            each.unsharded_accumulated_grad is not None for each in group.fsdp_params
        )
        for group in groups
        if group is not None
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
    "what ranks tell one another in a replay waits for no collective of a model",
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
    file = getattr(stage, "__file__", None)
    codes = (frame.f_code for frame in stack()) if stage is not None else ()
    return any(c.co_filename == file and "inference" in c.co_name for c in codes)
