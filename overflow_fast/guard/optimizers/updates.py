"""Updates that may overflow where every gradient is finite.

A second moment holds the square of a gradient: above the root of its dtype's maximum
it becomes inf, and its weight never moves again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from ... import _C
from ...scanner.modules import stepped_by
from ...scanner.ops import scan
from ...scanner.tensors import is_number
from ...scanner.text import dtype_name
from ..report.causes import BAD_SETTING, RANGE_OVERFLOW
from ..report.explanation import Explanation
from ..undo.optimizer import OptimizerSnapshot, is_finite
from ..verdict.bad_frames import take_bad
from ..verdict.optimizer_settings import SettingRemark, bad_settings
from ..verdict.verdict import BadEntry, Verdict

if TYPE_CHECKING:
    from ..pipeline import Pipeline
    from ..report.report import Report
    from ..step import Step
    from .optimizer_hook import OptimizerHook

_MARGIN = 16.0  # of weights that are near the maximum, and of roundings
_ACCUMULATED = 1024.0  # steps that a sum may have without a decay
_WIDE = torch.finfo(torch.float32).max  # what kernels of narrow dtypes compute in
_LINEAR = (torch.optim.SGD, torch.optim.ASGD, torch.optim.Rprop, torch.optim.Adamax)
# The settings that say how much of a state a step keeps.
_DECAYS = ("betas", "momentum", "alpha", "rho")

_limits: weakref.WeakKeyDictionary[Optimizer, tuple[list[Any], float]] = (
    weakref.WeakKeyDictionary()
)


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
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    sums = max((_steps_of(group, is_torchs) for group in groups), default=1.0)
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
    return square * (1.0 if is_torchs else sums) > limit


def _limit_of(optimizer: Optimizer) -> float:
    groups = optimizer.param_groups
    now = [(len(own), own[0].dtype) for g in groups if (own := g["params"])]
    known, limit = _limits.get(optimizer, ([], _WIDE))
    if known != now:  # weights may be converted, and groups added
        dtypes = {p.dtype for p in stepped_by(optimizer) if p.is_floating_point()}
        limit = min((torch.finfo(each).max for each in dtypes), default=_WIDE)
        _limits[optimizer] = now, (limit := min(limit, _WIDE))
    return limit


def _steps_of(group: Mapping[str, Any], is_torchs: bool) -> float:
    """How many steps of one size a sum over steps comes to, by a group's settings.

    Of torch's optimizers, those of `betas`, `alpha` and `rho` take means.
    """
    if is_torchs:
        decays = [group.get("momentum")]
    else:
        found = [group[name] for name in _DECAYS if name in group]
        decays = [d for each in found for d in (each if _is_tuple(each) else [each])]
    known = [float(each) for each in decays if is_number(each)]
    steps = [1.0 / (1.0 - d) if d < 1.0 else _ACCUMULATED for d in known]
    return max(steps, default=1.0 if is_torchs else _ACCUMULATED)


def _is_tuple(value: object) -> bool:
    return isinstance(value, (tuple, list))


# What a doubtful step has come to.


class UndoableStep:
    """The way to undo a step, where there is one, and what was finite before it.

    That of an engine cannot: its gradients are used up, and its counters have risen.

    Args:
        optimizer: The optimizer that has the weights and the state.
        snapshot: These as they were, or None where they cannot be put back.
    """

    def __init__(self, optimizer: Any, snapshot: OptimizerSnapshot | None) -> None:
        self._snapshot = snapshot
        self._was_finite = snapshot is None and is_finite(optimizer)

    @property
    def can_restore(self) -> bool:
        """True if the step can be undone."""
        return self._snapshot is not None

    def is_finite(self) -> bool:
        """True if all was finite before the step. Incurs a CPU-GPU sync."""
        if self._snapshot is None:
            return self._was_finite
        return self._snapshot.is_finite()

    def restore(self) -> None:
        """Undoes the step, if it can."""
        if self._snapshot is not None:
            self._snapshot.restore()


def kept_step(hook: OptimizerHook, before: OptimizerSnapshot | None) -> UndoableStep:
    """Keeps what a step may make non-finite.

    Args:
        hook: That of its optimizer.
        before: What a step with a closure was before its first evaluation, or None.
    """
    optimizer = hook.layers[1]
    if hook.is_of_engine:
        return UndoableStep(hook.optimizer, None)
    try:
        return UndoableStep(optimizer, before or OptimizerSnapshot(optimizer))
    except torch.OutOfMemoryError:
        return UndoableStep(optimizer, None)


def judge_update(
    pipeline: Pipeline, hook: OptimizerHook | None, was_finite: Callable[[], bool]
) -> bool:
    """Judges a step's weights and state; see `Pipeline.skips_update()`.

    Ranks that decide together all call it: each of them has doubted the step, or was
    told that one has.
    """
    step, named = pipeline._new_step(hook), {}
    optimizer = None if hook is None else hook.optimizer
    try:
        try:
            if optimizer is not None:
                named = _collect(pipeline, step, optimizer, was_finite)
        except Exception as error:
            if not pipeline.agreement.is_needed:
                raise
            pipeline._isolation.note(error)  # the other ranks wait
            step.frames = []
        report, is_own = _decide(pipeline, step, optimizer, named)
        if report is None:
            return False
        pipeline._count(step, report)
        if report.action != "warn":
            report.notes += pipeline._restore()
        pipeline._publish(step, report, is_own)
        return report.action == "skip"
    finally:
        pipeline._end_judgement()


def _collect(
    pipeline: Pipeline, step: Step, optimizer: Optimizer, was_finite: Callable[[], bool]
) -> dict[str, torch.Tensor]:
    """Takes what is bad behind a step and was not before; returns its parameters."""
    named = pipeline.tensors.scan_update(optimizer)
    pipeline._send_stats()
    for watch in pipeline._watches:
        watch.frames.receive(is_lagged=False)
    step.last_frame = _C.Recorder.num_frames()
    frames = take_bad(pipeline._watches, step.last_frame)
    step.frames = frames if frames and was_finite() else []
    if step.frames:
        step.verdict = of_update(pipeline._detect(step), optimizer)
    return named


def _decide(
    pipeline: Pipeline,
    step: Step,
    optimizer: Optimizer | None,
    named: dict[str, torch.Tensor],
) -> tuple[Report | None, bool]:
    """The report that all ranks act on, or None, and whether it is this one's."""
    agreement, verdict = pipeline.agreement, pipeline._detect(step)
    is_asked = callable(pipeline._config.on_overflow)

    def make() -> Report:
        report = pipeline._make_report(step, verdict)
        if not pipeline._explaining.is_off and verdict.first and optimizer is not None:
            report.explanation = explain_update(verdict.first, optimizer, named)
        waits = is_asked and agreement.is_needed
        return report if waits else pipeline._choose_action(step, report)

    if not agreement.is_needed:
        return (make() if step.frames else None), True
    agreed = agreement.agree(step.number, verdict, 0, make, is_again=True)
    report = agreed.report
    if report is not None and is_asked:
        found = report
        report = agreement.act_on(
            agreed.is_own, lambda: pipeline._choose_action(step, found)
        )
    return report, agreed.is_own


def of_update(verdict: Verdict, optimizer: Optimizer) -> Verdict:
    """The verdict on what an optimizer has made of finite gradients."""
    maker = f"the step of {type(optimizer).__name__}, whose gradients were finite"
    origin = replace(
        verdict.origin,
        how="passed_on",
        source="update",
        maker=maker,
        candidates=[],
        remarks=[*_bad_rates(optimizer)],
        nonfinite_state=[],
    )
    return replace(verdict, origin=origin)


def _bad_rates(optimizer: Optimizer) -> list[SettingRemark]:
    """Lists learning rates that are no finite numbers, which each update multiplies by.

    Whether another setting that is none had a part in the update is not known.
    """
    wrong = bad_settings([optimizer], had_finite_gradients=False)
    settings = [each for each in wrong if isinstance(each, SettingRemark)]
    return [each for each in settings if each.setting.startswith("lr ")]


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
    rates = _bad_rates(optimizer) if first.kind == "weight" else []
    if rates:
        found.cause = BAD_SETTING.name
        found.evidence += [f"{each.setting} is {each.value}" for each in rates]
        return found
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
            float(g.get("lr") or 0.0)
            for g in optimizer.param_groups
            if any(p is parameters[name] for p in g["params"])
        )
        if rate * largest > limit:
            found.cause = RANGE_OVERFLOW.name
            given = f"{given}; times the learning rate {rate:.3g} it {beyond}"
    found.evidence.append(given)
    return found
