"""The functions by which ranks communicate, and the group of each call."""

from __future__ import annotations

import builtins
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

_MODULES = (
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
)
_BEGINNINGS = ("all_", "reduce", "broadcast", "gather", "scatter", "barrier")
_WRAPPER = "torch.nn.parallel.distributed:DistributedDataParallel._sync_buffers"


def _named(group: Any) -> tuple[str, Sequence[int]] | None:
    """The name and the ranks of a group; None for one that cannot be told."""
    if isinstance(group, tuple) and len(group) == 2 and hasattr(group[0], "get_group"):
        group = group[0].get_group(group[1])
    elif hasattr(group, "get_group"):
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        return None
    return str(group.group_name), dist.get_process_group_ranks(group)


def _by_argument(own: dict[str, Any]) -> tuple[str, Sequence[int]] | None:
    return _named(own.get("group"))


def _of_wrapper(own: dict[str, Any]) -> tuple[str, Sequence[int]] | None:
    return _named(own["self"].process_group)


def collectives() -> dict[str, Callable[[dict[str, Any]], Any]]:
    """For each function: what tells the group of a call, of its variables."""
    found: dict[str, Callable[[dict[str, Any]], Any]] = {_WRAPPER: _of_wrapper}
    for name in _MODULES:
        for key, value in vars(sys.modules.get(name, builtins)).items():
            is_function = type(value) is types.FunctionType
            if not is_function or not key.removeprefix("_").startswith(_BEGINNINGS):
                continue
            if "group" in inspect.signature(value).parameters:
                found[f"{name}:{key}"] = _by_argument
    return found
