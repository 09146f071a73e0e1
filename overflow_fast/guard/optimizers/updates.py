"""Updates that may overflow where every gradient is finite.

A second moment holds the square of a gradient: above the root of its dtype's maximum
it becomes inf, and its weight never moves again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from ...scanner.modules import stepped_by
from ...scanner.ops import scan
from ...scanner.text import dtype_name
from ..report.causes import RANGE_OVERFLOW
from ..report.explanation import Explanation
from ..verdict.verdict import BadEntry, Verdict, take_bad

if TYPE_CHECKING:
    from ..pipeline import Pipeline
    from .optimizer_hook import OptimizerHook

_MARGIN = 16.0  # of sums over steps, such as a momentum of 0.9
_ACCUMULATED = 1024.0  # steps whose squares a sum may have without a decay
_WIDE = torch.finfo(torch.float32).max  # what kernels of narrow dtypes compute in
_LINEAR = (torch.optim.SGD, torch.optim.ASGD, torch.optim.Rprop, torch.optim.Adamax)
# The settings that say how much of a square enters a step's state.
_DECAYS = ("alpha", "rho")

_limits: weakref.WeakKeyDictionary[Optimizer, float] = weakref.WeakKeyDictionary()


def may_overflow(optimizer: Optimizer, largest: float) -> bool:
    """True if a step with finite gradients may give a non-finite state or weight.

    It is asked in each step, and errs on the side of True.

    Args:
        optimizer: The optimizer.
        largest: The largest magnitude of the gradients; 0 if it is not known.
    """
    if not largest:
        return False
    limit = _limit_of(optimizer)
    rates = (g["lr"] for g in optimizer.param_groups if isinstance(g.get("lr"), float))
    if largest * max([1.0, *rates]) > limit / _MARGIN:
        return True
    if isinstance(optimizer, _LINEAR):
        return False
    square = largest * largest
    return square > _WIDE or square * _share_of_square(optimizer) > limit


def _limit_of(optimizer: Optimizer) -> float:
    limit = _limits.get(optimizer)
    if limit is None:
        dtypes = {p.dtype for p in stepped_by(optimizer) if p.is_floating_point()}
        limit = min((torch.finfo(each).max for each in dtypes), default=_WIDE)
        _limits[optimizer] = limit = min(limit, _WIDE)
    return limit


def _share_of_square(optimizer: Optimizer) -> float:
    """How much of a gradient's square its state takes in; 0 if that is not known."""
    if isinstance(optimizer, torch.optim.Adagrad):
        return _ACCUMULATED
    group: Any = optimizer.param_groups[0]
    betas = group.get("betas")
    decays = [betas[1]] if isinstance(betas, (tuple, list)) and len(betas) > 1 else []
    decays += [group[name] for name in _DECAYS if name in group]
    return max((1.0 - d for d in decays if isinstance(d, float)), default=0.0)


# What a doubtful step has come to.


def judge_update(
    pipeline: Pipeline, hook: OptimizerHook, was_finite: Callable[[], bool]
) -> bool:
    """Judges a step's weights and state; see `Pipeline.skips_update()`."""
    optimizer, watches = hook.optimizer, pipeline._watches
    if optimizer is None:
        return False
    named = pipeline.tensors.scan_update(optimizer)
    pipeline._send_stats()
    for watch in watches:
        watch.frames.receive(is_lagged=False)
    step = pipeline._new_step(hook)
    step.is_update = True
    step.frames = take_bad(watches, step.last_frame)
    try:
        if not step.frames or not was_finite():
            return False
        step.verdict = of_update(pipeline._detect(step), optimizer)
        report = pipeline._make_report(step, step.verdict)
        if not pipeline._explaining.is_off and step.verdict.first is not None:
            report.explanation = explain_update(step.verdict.first, optimizer, named)
        report = pipeline._choose_action(step, report)
        pipeline._count(step, report)
        if report.action != "warn":
            report.notes += pipeline._restore()
        pipeline._publish(step, report, is_own=True)
        return report.action == "skip"
    finally:
        pipeline._end_judgement()


def of_update(verdict: Verdict, optimizer: Optimizer) -> Verdict:
    """The verdict on what an optimizer has made of finite gradients."""
    maker = f"the step of {type(optimizer).__name__}, whose gradients were finite"
    return replace(
        verdict,
        origin="passed_on",
        source="update",
        maker=maker,
        candidates=[],
        remarks=[],
        nonfinite_state=[],
    )


def explain_update(
    first: BadEntry, optimizer: Optimizer, parameters: dict[str, torch.Tensor]
) -> Explanation:
    """Explains what a step has made of finite gradients. Incurs a CPU-GPU sync.

    Args:
        first: The weight, or state, that has become non-finite.
        optimizer: The optimizer.
        parameters: Its parameters, by name.
    """
    names = [n for n in parameters if first.fqn == n or first.fqn.startswith(f"{n}.")]
    name = max(names, key=len, default="")
    found = Explanation("optimizer", tensor=first.fqn)
    found.module = name.rpartition(".")[0]
    gradient = parameters[name].grad if name else None
    if gradient is None:
        return found
    (stat,) = scan([gradient])
    largest, dtype = stat.abs_max or 0.0, gradient.dtype
    limit = torch.finfo(dtype).max
    given = f"the gradient of {name} is finite, up to {largest:.3g} in magnitude"
    beyond = f"is beyond {dtype_name(dtype)}'s maximum {limit:.5g}"
    if first.kind == "optimizer_state" and largest * largest > limit:
        found.cause = RANGE_OVERFLOW.name
        given = f"{given}; its square {beyond}"
    elif first.kind == "weight":
        rate = next(
            g["lr"]
            for g in optimizer.param_groups
            if any(p is parameters[name] for p in g["params"])
        )
        if isinstance(rate, float) and rate * largest > limit:
            found.cause = RANGE_OVERFLOW.name
            given = f"{given}; times the learning rate {rate:.3g} it {beyond}"
    found.evidence.append(given)
    return found
