"""Versions, random states and modes, which may make two runs differ."""

from __future__ import annotations

import collections
import os
import platform
import socket
import sys
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import nn

from ... import __version__
from ...base.modules import named_modules, stepped_by
from ...base.tensors import devices_of
from ...base.text import dtype_name
from ...guard.process import own_rank, world_size
from ...guard.undo.random import RandomStates
from ...torch_internals.compiler import uncompiled
from ...torch_internals.module_internals import is_dropout
from ..torch_settings import settings_of_torch
from .tensor_hooks import is_compiled, scalars_in

_LIBRARIES = ("transformers", "accelerate", "lightning", "peft", "timm", "numpy")


def versions() -> dict[str, str]:
    """The versions of what computes, of loaded libraries alone."""
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
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "rank": own_rank(),
        "world_size": world_size(),
    }


_ON_GPU = ("cuda.matmul", "cudnn.conv", "cudnn.rnn")
_PRODUCTS = ("cuda", "mkldnn")
# Those of `torch.set_float32_matmul_precision()`.
_WORDS = (("bf16", "medium"), ("tf32", "high"))


def modes(model: nn.Module) -> dict[str, Any]:
    """Settings, dtypes and random states at the beginning of a step, as JSON."""
    devices = devices_of([model])
    types = ["cpu", *dict.fromkeys(device.type for device in devices)]
    autocast = [t for t in types if torch.is_autocast_enabled(t)]
    tensors = [*model.parameters(), *model.buffers()]
    dtypes = collections.Counter(dtype_name(tensor.dtype) for tensor in tensors)
    switches = settings_of_torch()
    on_gpu = {switches[f"{each}.fp32_precision"] for each in _ON_GPU}
    products = {switches[f"{each}.matmul.fp32_precision"] for each in _PRODUCTS}
    return {
        "devices": [torch.device("cpu").type, *map(str, devices)],
        "dtypes": dict(dtypes.most_common()),
        "autocast": {t: dtype_name(torch.get_autocast_dtype(t)) for t in autocast},
        "matmul_precision": next((w for v, w in _WORDS if v in products), "highest"),
        "tf32": "cuda" in types and "tf32" in on_gpu,
        "deterministic": switches["deterministic_algorithms"],
        "threads": torch.get_num_threads(),
        "training": model.training,
        "compiled": [name for name, m in named_modules(model) if _hides(m)],
        "dropout": [name for name, module in named_modules(model) if _drops(module)],
        "random": RandomStates(devices, loads_numpys=False).digests(),
        "settings": {name: settings_of(m) for name, m in named_modules(model)},
    }


def settings_of(module: nn.Module) -> dict[str, str]:
    """The plain values among a module's attributes, such as eps, as text."""
    return scalars_in(vars(uncompiled(module)))


OPTIMIZER = "the optimizer"  # begins the names of optimizers among settings


def settings_of_optimizer(
    optimizer: Any, number: int, own: Set[int]
) -> dict[str, dict[str, str]]:
    """The plain values of an optimizer's groups, by a name for each, such as lr.

    Args:
        optimizer: The optimizer.
        number: How many others of the model have stepped before it.
        own: The ids of the model's parameters that require gradients; groups without
            any are left out.
    """
    found = dict[str, dict[str, str]]()
    held = set(map(id, stepped_by(optimizer)))
    values: dict[str, Any] = {"class": type(optimizer).__name__}
    values["parameters left out"] = len(own - held)
    for i, group in enumerate(optimizer.param_groups):
        if own.isdisjoint(id(each) for each in group["params"]):
            continue
        name = OPTIMIZER + (f" {number + 1}" if number else "")
        name += f", group {i + 1}" if i else ""
        values |= {k: _plain(v) for k, v in group.items() if not k.startswith("param")}
        found[name] = scalars_in(values)
    return found


def _plain(value: Any) -> Any:
    """A setting; of one in a tensor on the CPU its number."""
    is_tensor = isinstance(value, torch.Tensor) and value.device.type == "cpu"
    return value.item() if is_tensor and value.numel() == 1 else value


def has_unequal_states(mine: Mapping[str, Any], its: Mapping[str, Any]) -> bool:
    """True if torch's generators of the models' devices were in other states."""
    own, other = mine.get("random", {}), its.get("random", {})
    names = [n for n in own if n in other and n not in ("cpu", "python", "numpy")]
    return any(own[n] != other[n] for n in names or ["cpu"] if n in own and n in other)


def _hides(module: nn.Module) -> bool:
    """True if modules within are compiled, so that nothing of them is recorded."""
    return is_compiled(module) and any(True for _ in uncompiled(module).children())


def _drops(module: nn.Module) -> bool:
    """True if a module sets random values to 0 now.

    Attention that is one function has its probability in an attribute of its module.
    """
    if not module.training:
        return False
    if is_dropout(module):
        return bool(getattr(module, "p", 0))
    found = (vars(module).get(name) for name in ("dropout", "attention_dropout"))
    return any(isinstance(each, float) and each > 0 for each in found)
