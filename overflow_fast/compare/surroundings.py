"""Versions, random states and modes, which may make two runs differ."""

from __future__ import annotations

import collections
import os
import platform
import socket
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..core.devices import devices_of
from ..core.names import named_modules
from ..state.random import RandomStates
from ..torch_internals.module_internals import is_dropout

_LIBRARIES = ("transformers", "accelerate", "lightning", "peft", "timm", "numpy")


def versions() -> dict[str, str]:
    """The versions of what computes, of loaded libraries alone."""
    from .. import __version__

    found = {
        "overflow_fast": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    backends: Any = torch.backends
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(backends.cudnn.version())
    for name in _LIBRARIES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found


def process() -> dict[str, Any]:
    """The host, the process and its rank."""
    rank, world = 0, 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "rank": rank,
        "world_size": world,
    }


def modes(model: nn.Module) -> dict[str, Any]:
    """Settings, dtypes and random states at the beginning of a step, as JSON."""
    devices = devices_of([model])
    types = ["cpu", *dict.fromkeys(device.type for device in devices)]
    autocast = [t for t in types if torch.is_autocast_enabled(t)]
    tensors = [*model.parameters(), *model.buffers()]
    dtypes = collections.Counter(str(tensor.dtype)[6:] for tensor in tensors)
    return {
        "devices": [torch.device("cpu").type, *map(str, devices)],
        "dtypes": dict(dtypes.most_common()),
        "autocast": {t: str(torch.get_autocast_dtype(t))[6:] for t in autocast},
        "matmul_precision": torch.get_float32_matmul_precision(),
        "tf32": _has_tf32(devices),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "training": model.training,
        "dropout": [name for name, module in named_modules(model) if _drops(module)],
        "random": RandomStates(devices).digests(),
    }


def _has_tf32(devices: list[torch.device]) -> bool:
    """Tells whether float32 products of a GPU may be rounded to TF32."""
    backends: Any = torch.backends
    allowed = backends.cuda.matmul.allow_tf32 or backends.cudnn.allow_tf32
    return bool(allowed) and any(device.type == "cuda" for device in devices)


def has_unequal_states(mine: Mapping[str, Any], its: Mapping[str, Any]) -> bool:
    """Tells whether torch's generators of the models' devices were in other states."""
    own, other = mine.get("random", {}), its.get("random", {})
    names = [n for n in own if n in other and n not in ("cpu", "python", "numpy")]
    return any(own[n] != other[n] for n in names or ["cpu"] if n in own and n in other)


def _drops(module: nn.Module) -> bool:
    """Tells whether a module sets random values to 0 now.

    Attention that is one function has its probability in an attribute of its module.
    """
    if not module.training:
        return False
    if is_dropout(module):
        return bool(getattr(module, "p", 0))
    found = (vars(module).get(name) for name in ("dropout", "attention_dropout"))
    return any(isinstance(each, float) and each > 0 for each in found)
