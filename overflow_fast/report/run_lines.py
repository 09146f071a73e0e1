"""The line that a guard logs when its run begins, and the one when it ends."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist
from torch.optim import Optimizer

from ..recording.schedule import WatchSchedule
from ..recording.watch import ModelWatch
from ..text import counted
from .guard_coverage import GuardCoverage
from .report import Cost

_log = logging.getLogger("overflow_fast")


def log_begin(
    watches: Sequence[ModelWatch],
    optimizers: Sequence[Optimizer],
    policy: object,
    coverage: GuardCoverage,
) -> None:
    """Logs (INFO) the watched modules, and the policy for a non-finite step.

    Args:
        watches: The watched models.
        optimizers: The optimizers.
        policy: The guard's `on_overflow`.
        coverage: Its coverage.
    """
    if not _log.isEnabledFor(logging.INFO):
        return
    models = [watch.model for watch in watches]
    found = [model for model in models if model is not None]
    parameters = sum(
        len(watch.tensors.parameters(model)[0])
        for watch, model in zip(watches, models, strict=True)
        if model is not None
    )
    if not parameters and not optimizers:
        return  # nothing is trained
    modules, watched = coverage.modules, coverage.modules_watched
    _log.info(
        "Watching %s modules and %d parameters of %s; optimizer: %s; on_overflow=%s.",
        modules if watched == modules else f"{watched} of {modules}",
        parameters,
        _counted(found),
        _counted(optimizers) or "none",
        repr(policy) if isinstance(policy, str) else "a callable",
    )


def log_left_out(schedule: WatchSchedule, step: int) -> None:
    """Logs (WARNING) that a budget leaves steps out, whatever the policy is.

    Args:
        schedule: Chooses the steps.
        step: The number of the first step that is left out.
    """
    steps = counted(schedule.num_left_out(step), "step")
    _log.warning(
        "Schedule(budget=%g) is too small to check each step: the cheapest check takes "
        "%.1f%% of a step's time.\nUp to %s from step %d on are not judged, and "
        "on_overflow does not apply to them. `coverage()` counts all of them; this is "
        "logged once.",
        schedule.budget,
        100 * schedule.least_share,
        steps,
        step,
    )


def log_end(
    coverage: GuardCoverage, num_reports: int, num_skipped: int, cost: Cost
) -> None:
    """Logs a summary of a run: WARNING after a report or a failure, else INFO.

    Of several ranks the first one warns.

    Args:
        coverage: The guard's coverage.
        num_reports: How many reports there were.
        num_skipped: How many steps were skipped.
        cost: The time that the guard took.
    """
    if not (coverage.steps or num_reports or coverage.failures):
        return
    parts = [counted(num_reports, "report"), f"{counted(num_skipped, 'step')} skipped"]
    if cost.share:
        parts.append(f"{cost.share:.1%} of their time in the guard")
    if coverage.failures:
        parts.append(f"{counted(coverage.failures, 'failure')} of the guard")
    if not coverage.has_seen_loss and "loss" not in coverage.not_watched:
        parts.append("no loss seen")
    if coverage.ignores_spikes:
        parts.append("spikes not looked for (they need sync='step')")
    is_first = not (dist.is_available() and dist.is_initialized() and dist.get_rank())
    is_worth_it = is_first and (num_reports or coverage.failures)
    _log.log(
        logging.WARNING if is_worth_it else logging.INFO,
        "%d of %d steps watched: %s.",
        coverage.steps_watched,
        coverage.steps,
        ", ".join(parts),
    )


def _counted(objects: Sequence[object]) -> str:
    """Names the objects' classes, each once, and how many there are."""
    counts = Counter(type(each).__name__ for each in objects)
    return ", ".join(f"{n} x {name}" if n > 1 else name for name, n in counts.items())
