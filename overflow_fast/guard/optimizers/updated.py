"""An optimizer's step with finite gradients, as a unit of judgement."""

from __future__ import annotations

from dataclasses import replace

from torch.optim import Optimizer

from ... import _C
from ..collect import Collector
from ..judge import Judge
from ..outer import outer
from ..undo.optimizer import OptimizerSnapshot
from ..unit import Unit
from ..verdict.optimizer_settings import SettingRemark, bad_settings
from ..verdict.verdict import Verdict


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
    step = verdict.first, optimizer, named, kept
    unit.explains = lambda _: outer("update")(*step)


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
