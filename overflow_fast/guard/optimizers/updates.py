"""Updates that may overflow where every gradient is finite.

A second moment holds the square of a gradient: above the root of its dtype's maximum
it becomes inf, and its weight never moves again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ...base.modules import stepped_by
from ...base.tensors import is_number
from ..undo.optimizer import OptimizerSnapshot
from .optimizer_hook import OptimizerHook

_MARGIN = 16.0  # of weights that are near the maximum, and of roundings
_ACCUMULATED = 1024.0  # steps that a sum may have without a decay
_WIDE = torch.finfo(torch.float32).max  # what kernels of narrow dtypes compute in
_LINEAR = (torch.optim.SGD, torch.optim.ASGD, torch.optim.Rprop, torch.optim.Adamax)
# The settings that say how much of a state a step keeps.
_DECAYS = ("betas", "momentum", "alpha", "rho")


def may_overflow(optimizer: Optimizer, largest: float, rate: float) -> bool:
    """True if a step with finite gradients may give a non-finite state or weight.

    It is asked in each step, and errs on the side of True. A sum over steps with a
    decay d that was within its dtype's maximum exceeds it only if a part of 1 - d is
    added to it; a mean of such a decay, only if what it is the mean of does.

    Args:
        optimizer: The optimizer.
        largest: The largest magnitude of the gradients; 0 if it is not known.
        rate: The largest magnitude of the learning rates; inf if one is not finite.
    """
    limit, groups = _limit_of(optimizer), optimizer.param_groups
    is_known = is_torchs(optimizer)
    sums = max((_steps_of(group, is_known) for group in groups), default=1.0)
    # An update that is divided by a mean of the gradients is of the order of the rate,
    # and weights that it has made as large decay by a part of the rate.
    update = max(largest, rate, 1.0) * max(rate, 1.0)
    if not update * max(_MARGIN, 2.0 * sums) <= limit:
        return True
    if isinstance(optimizer, _LINEAR):
        return False
    square = largest * largest
    if isinstance(optimizer, torch.optim.Adagrad):
        return square * _ACCUMULATED > limit
    return square * (1.0 if is_known else sums) > limit


def is_torchs(optimizer: Optimizer) -> bool:
    """True for an optimizer of torch's own, whose arithmetic is known."""
    return type(optimizer).__module__.startswith("torch.optim.")


def _limit_of(optimizer: Optimizer) -> float:
    """The least maximum of the weights' dtypes."""
    dtypes = {p.dtype for p in stepped_by(optimizer) if p.is_floating_point()}
    return min([_WIDE, *(torch.finfo(each).max for each in dtypes)])


def _steps_of(group: Mapping[str, Any], is_known: bool) -> float:
    """How many steps of one size a sum over steps comes to, by a group's settings.

    Of torch's optimizers, those of `betas`, `alpha` and `rho` take means.
    """
    if is_known:
        decays = [group.get("momentum")]
    else:
        found = [group[name] for name in _DECAYS if name in group]
        decays = [d for each in found for d in (each if _is_tuple(each) else [each])]
    known = [float(each) for each in decays if is_number(each)]
    steps = [1.0 / (1.0 - d) if d < 1.0 else _ACCUMULATED for d in known]
    return max(steps, default=1.0 if is_known else _ACCUMULATED)


def _is_tuple(value: object) -> bool:
    return isinstance(value, (tuple, list))


def kept_step(
    hook: OptimizerHook, before: OptimizerSnapshot | None
) -> OptimizerSnapshot:
    """Keeps what a step may make non-finite.

    Args:
        hook: That of its optimizer.
        before: What a step with a closure was before its first evaluation, or None.
    """
    optimizer = hook.layers[1]
    if hook.is_of_engine:
        return OptimizerSnapshot(hook.optimizer, can_restore=False)
    try:
        return before or OptimizerSnapshot(optimizer)
    except torch.OutOfMemoryError:
        return OptimizerSnapshot(optimizer, can_restore=False)
