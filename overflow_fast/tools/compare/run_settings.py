"""Versions, settings and random states, which may make two runs differ."""

from __future__ import annotations

import collections
import platform
import sys
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import nn

from ... import __version__
from ...base.modules import named_modules, stepped_by, tensor_name
from ...base.tensors import devices_of
from ...base.text import dtype_name
from ...torch_internals.compiler import uncompiled
from ...torch_internals.module_internals import own_parameters
from ..torch_settings import settings_of_torch

RUN, OPTIMIZER = "the run", "the optimizer"  # begin names that are not of modules
Settings = dict[str, dict[str, str]]
_LIBRARIES = ("transformers", "accelerate", "lightning", "peft", "timm", "numpy")
_SCALARS = (bool, int, float, str, type(None))
_MAX_TEXT, _MAX_LENGTH = 80, 8  # of a setting that is shown; chosen


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


_ON_GPU = ("cuda.matmul", "cudnn.conv", "cudnn.rnn")


def settings_of(model: nn.Module) -> Settings:
    """Versions, the settings of torch, and those of each module.

    A module's are its plain attributes, such as eps, and which of its parameters are
    frozen or one tensor with another.
    """
    devices = devices_of([model])
    types = ["cpu", *dict.fromkeys(device.type for device in devices)]
    tensors = [*model.parameters(), *model.buffers()]
    dtypes = collections.Counter(dtype_name(tensor.dtype) for tensor in tensors)
    autocast = [
        f"{t} {dtype_name(torch.get_autocast_dtype(t))}"
        for t in types
        if torch.is_autocast_enabled(t)
    ]
    run = {
        **versions(),
        "devices": ", ".join(["cpu", *map(str, devices)]),
        "dtypes of weights": ", ".join(f"{k} {n}" for k, n in dtypes.most_common()),
        "autocast": ", ".join(autocast) or "none",
        "threads": str(torch.get_num_threads()),
        **{name: str(value) for name, value in settings_of_torch().items()},
    }
    modules = named_modules(model)
    names: dict[int, list[str]] = {}  # of each parameter
    for name, module in modules:
        for path, each in own_parameters(module).items():
            names.setdefault(id(each), []).append(tensor_name(name, path))
    found: Settings = {RUN: run}
    for name, module in modules:
        values = scalars_in(vars(uncompiled(module)))
        own = {k: p for k, p in own_parameters(module).items() if p is not None}
        for path, each in own.items():
            fqn = tensor_name(name, path)
            others = [n for n in names[id(each)] if n != fqn]
            if others and each.numel():
                values[path] = f"one tensor with {', '.join(others)}"
        if own:
            frozen = [path for path, each in own.items() if not each.requires_grad]
            values["requires_grad"] = (
                f"False of {', '.join(frozen)}" if frozen else "True"
            )
        found[name] = values
    return found


def has_tf32(model: nn.Module) -> bool:
    """True if float32 products on a GPU may be rounded to TF32."""
    on_gpu = {settings_of_torch()[f"{each}.fp32_precision"] for each in _ON_GPU}
    return "tf32" in on_gpu and any(d.type == "cuda" for d in devices_of([model]))


def settings_of_optimizer(optimizer: Any, number: int, own: Set[int]) -> Settings:
    """The plain values of an optimizer's groups, by a name for each, such as lr.

    Args:
        optimizer: The optimizer.
        number: How many others of the model have stepped before it.
        own: The ids of the model's parameters that require gradients; groups without
            any are left out.
    """
    found: Settings = {}
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


def scalars_in(values: Mapping[str, Any]) -> dict[str, str]:
    """The plain values and short sequences of such, as text, without private ones."""
    return {
        name: repr(value)[:_MAX_TEXT]
        for name, value in values.items()
        if not name.startswith("_") and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return len(value) <= _MAX_LENGTH and all(type(v) in _SCALARS for v in value)
    return type(value) in _SCALARS
