"""What is known of a module from its class: torch's own, and normalizations."""

from __future__ import annotations

import re

from torch import nn
from torch.nn.utils import parametrize

_LINEAR = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_POINTWISE = tuple(
    f"torch.nn.modules.{name}" for name in ("activation", "dropout", "flatten")
)
_NORMALIZATIONS = (
    *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NORMALIZATION_NAME = re.compile(r"(Layer|RMS|Group)_?Norm(\w*[a-z0-9])?$")


def is_linear(module: nn.Module) -> bool:
    """Tells whether a module multiplies its input by its weights and adds, no more."""
    forwards = [each.forward for each in _LINEAR]
    return type(module).forward in forwards and _is_plain(module)


def is_dropout(module: nn.Module) -> bool:
    """Tells whether a module is one of torch's dropouts."""
    return type(module) in _DROPOUTS and _is_plain(module)


def is_small_step(module: nn.Module) -> bool:
    """Tells whether a module of torch's without weights keeps small values small."""
    is_known = type(module).__module__ in _POINTWISE or type(module) is nn.Identity
    return is_known and not has_weights(module)


def has_weights(module: nn.Module) -> bool:
    """Tells whether a module, or one within it, has parameters."""
    return any(True for _ in module.parameters())


def is_normalization(module: nn.Module) -> bool:
    """Tells whether a module returns small values whatever it is given.

    So do torch's normalizations; batch norms in training alone. Classes of others are
    recognized by their names, if they have no submodules.
    """
    if isinstance(module, _BATCH_NORMS):
        return module.training
    if isinstance(module, _NORMALIZATIONS):
        return True
    is_named = _NORMALIZATION_NAME.search(type(module).__name__) is not None
    return is_named and not any(True for _ in module.children())


def _is_plain(module: nn.Module) -> bool:
    """Tells whether nobody has changed what the module computes."""
    return not (
        "forward" in module.__dict__
        or module._forward_pre_hooks
        or parametrize.is_parametrized(module)
    )
