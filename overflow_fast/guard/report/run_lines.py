"""The first and the last line that a guard logs of a run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from torch.optim import Optimizer

from ...base.text import counted
from ..process import own_rank
from ..watching.watch import ModelWatch, models_of
from .cost import Cost
from .coverage import GuardCoverage

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
    found = list(models_of(watches).values())
    parameters = sum(
        len(watch.tensors.parameters(model)[0])
        for watch in watches
        if (model := watch.model) is not None
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


def _counted(objects: Sequence[object]) -> str:
    """Names the objects' classes, each once, and how many there are."""
    counts = Counter(type(each).__name__ for each in objects)
    return ", ".join(f"{n} x {name}" if n > 1 else name for name, n in counts.items())


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
    has_run = coverage.steps or coverage.requests
    if not (has_run or num_reports or coverage.failures):
        return
    is_worth_it = own_rank() == 0 and (num_reports or coverage.failures)
    level = logging.WARNING if is_worth_it else logging.INFO
    _log.log(level, "%s", summary(coverage, num_reports, num_skipped, cost))


def summary(
    coverage: GuardCoverage, num_reports: int, num_skipped: int, cost: Cost
) -> str:
    """Writes the summary of a run; see `log_end()`."""
    parts = [counted(num_reports, "report")]
    if coverage.steps or not coverage.requests:
        parts.append(f"{counted(num_skipped, 'step')} skipped")
    if cost.share:
        parts.append(f"{cost.share:.1%} of their time in the guard")
    if coverage.failures:
        parts.append(f"{counted(coverage.failures, 'failure')} of the guard")
    if not coverage.has_seen_loss and "loss" not in coverage.not_watched:
        parts.append("no loss seen")
    if coverage.ignores_spikes:
        parts.append("spikes not looked for (they need sync='step')")
    watched = f"{coverage.steps_watched} of {coverage.steps} steps watched"
    if not coverage.steps:
        requests = counted(coverage.requests, "request")
        watched = requests if coverage.requests else "No step was completed"
    return f"{watched}: {', '.join(parts)}."
