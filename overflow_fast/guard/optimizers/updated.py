"""An optimizer's step with finite gradients, as a unit of judgement."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.optim import Optimizer

from ... import _C
from ...scanner.ops import scan
from ..collect import Collector
from ..judge import Judge
from ..outer import outer
from ..report.explanation import Explanation
from ..undo.optimizer import OptimizerSnapshot
from ..unit import Unit
from ..verdict.optimizer_settings import SettingRemark, bad_settings
from ..verdict.verdict import BadEntry, Verdict


def see_update(
    unit: Unit,
    collector: Collector,
    judge: Judge,
    optimizer: Optimizer,
    kept: OptimizerSnapshot,
) -> None:
    """Sees what is bad behind an optimizer's step, and was not before.

    Args:
        unit: The update.
        collector: Collects what is seen.
        judge: Finds the first bad value.
        optimizer: The optimizer that has stepped.
        kept: What it steps, as that was before.
    """
    named = collector.tensors.scan_update(optimizer)
    collector.send()
    collector.receive()
    unit.last_frame = _C.Recorder.num_frames()
    frames = collector.take(unit.last_frame)
    unit.frames = frames if frames and kept.was_finite() else []
    if not unit.frames:
        return
    unit.verdict = verdict = of_update(judge.verdict_on(unit), optimizer)
    first = verdict.first
    if first is not None:
        unit.explains = lambda _: explain_update(first, optimizer, named, kept)


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
    wrong = bad_settings([optimizer])
    return [each for each in wrong if each.setting.startswith("lr ")]


def explain_update(
    first: BadEntry,
    optimizer: Optimizer,
    parameters: dict[str, torch.Tensor],
    kept: OptimizerSnapshot,
) -> Explanation:
    """Explains what a step has made of finite gradients, by making it again on copies.

    Incurs a CPU-GPU sync.

    Args:
        first: The weight, or state, that has become non-finite.
        optimizer: The optimizer.
        parameters: Its parameters, by name.
        kept: What it steps, as that was before.
    """
    names = [n for n in parameters if first.fqn == n or first.fqn.startswith(f"{n}.")]
    name = max(names, key=len, default="")
    found = Explanation("optimizer", tensor=first.fqn)
    found.module = name.rpartition(".")[0]
    gradient = parameters[name].grad if name else None
    if gradient is None:
        return found
    (stat,) = scan([gradient])
    largest = stat.abs_max or 0.0
    size = f"finite, up to {largest:.3g} in magnitude" if largest else "0 throughout"
    found.evidence.append(f"the gradient of {name} is {size}")
    step = optimizer, parameters[name], first.fqn.removeprefix(name), kept
    made: Explanation = outer("update")(*step, found)
    return made
