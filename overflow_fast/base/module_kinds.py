"""Kinds of modules, known from their classes: torch's own, and normalizations."""

from __future__ import annotations

import inspect
import re

from torch import nn
from torch.nn.utils import parametrize

from ..torch_internals.module_internals import forward_pre_hooks
from .modules import children_of

_LINEAR = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_NORMALIZATIONS = (
    *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NORMALIZATION_NAME = re.compile(r"(Layer|RMS|Group)_?Norm(\w*[a-z0-9])?$")


def is_linear(module: nn.Module) -> bool:
    """True if a module only multiplies its input by its weights, and adds."""
    forwards = [each.forward for each in _LINEAR]
    return type(module).forward in forwards and _is_plain(module)


def is_normalization(module: nn.Module) -> bool:
    """True if a module returns small values for any input.

    So do torch's normalizations; batch norms in training alone. Classes of others are
    recognized by their names and their code, if they have no submodules.
    """
    if isinstance(module, _BATCH_NORMS):
        return module.training and is_of_torch(module)
    if isinstance(module, _NORMALIZATIONS):
        return is_of_torch(module) or _normalizes_once(module)
    is_named = _NORMALIZATION_NAME.search(type(module).__name__) is not None
    has_children = bool(children_of(module))
    return is_named and not has_children and _normalizes_once(module)


def is_of_torch(module: nn.Module) -> bool:
    """True if a module's forward is torch's own, unchanged."""
    forward = inspect.getattr_static(type(module), "forward", None)  # a scripted one's
    place = str(getattr(forward, "__module__", ""))  # is a descriptor that raises
    return place.startswith("torch.nn.") and _is_plain(module)


def is_layer_of_torch(module: nn.Module | None) -> bool:
    """True if a module is one of torch.nn's, and has no submodules."""
    if module is None or children_of(module):
        return False
    return type(module).__module__.startswith("torch.nn.")


def _normalizes_once(module: nn.Module) -> bool:
    """True if a forward takes one tensor, and divides by one measure of it.

    A forward that takes a second tensor, or measures a fused normalization's input, may
    scale its output by that.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or "forward" in module.__dict__ or code.co_argcount != 2:
        return False
    from .torch_ops import has  # a scan needs no table of operations

    names = set(code.co_names)
    num_roots = sum(has(name, "root") for name in names)
    if "super" in names or any(has(name, "normalizes") for name in names):
        return not num_roots and not any(has(name, "measure") for name in names)
    return num_roots == 1


def _is_plain(module: nn.Module) -> bool:
    """True if a module computes what its class does, unchanged."""
    return not (
        "forward" in module.__dict__
        or forward_pre_hooks(module)
        or parametrize.is_parametrized(module)
    )
