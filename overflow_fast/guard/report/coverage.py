"""The coverage of a guard, in numbers; and the lines that open and close a run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.optim import Optimizer

from ... import _C
from ...detector.selection import Wanted
from ...scanner.text import counted
from ..process import own_rank
from ..watching.watch import ModelWatch, models_of
from .report import Cost

_log = logging.getLogger("overflow_fast")


@dataclass(frozen=True)
class GuardCoverage:
    """The tensors and steps that a guard's clean verdicts cover, and the gaps.

    Attributes:
        tensors_listed: How many tensors the frames list.
        tensors_scanned: How many scans that took.
        bytes_scanned: How many bytes the scanned tensors have.
        not_scanned: How many listed tensors were not scanned, by the reason.
        opaque: How many values may hold tensors and were not looked into, by type.
        modules: How many modules the models have.
        modules_watched: How many of them are watched.
        steps: How many steps there were.
        steps_watched: How many of them were checked, in whatever detail.
        without_gradient: How many parameters had no gradient in the last watched step.
        not_watched: The kinds of tensors that `watch` leaves out.
        has_seen_loss: True if a loss was among the outputs, or recorded.
        failures: How often the guard itself failed, so that something was not judged.
        rules_unused: The rules of `allow` that nothing has matched yet.
        ignores_spikes: True if spikes were asked for, and cannot be looked for.
        requests: How many requests there were: forwards without autograd, outside of
            which there was no step.
        unused_kernels: The devices whose tensors torch operations scan although there
            are kernels, with the reason.
    """

    tensors_listed: int
    tensors_scanned: int
    bytes_scanned: int
    not_scanned: dict[str, int]
    opaque: dict[str, int]
    modules: int
    modules_watched: int
    steps: int
    steps_watched: int
    without_gradient: int
    not_watched: list[str]
    has_seen_loss: bool
    failures: int
    rules_unused: list[str]
    ignores_spikes: bool = False
    requests: int = 0
    unused_kernels: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        watches: Sequence[ModelWatch],
        steps: int,
        steps_watched: int,
        without_gradient: int,
        failures: int,
        rules_unused: list[str],
        ignores_spikes: bool,
    ) -> GuardCoverage:
        """Sums up what the watches of a guard have checked so far."""
        found = [watch.recorder.coverage for watch in watches]
        reasons: Counter[str] = Counter()
        opaque: Counter[str] = Counter()
        for each in found:
            reasons.update(each.reasons())
            opaque.update(each.opaque())
        wanted = watches[0].wanted
        counts = [watch.modules.count(watch.model) for watch in watches]
        return cls(
            sum(each.tensors_listed for each in found),
            sum(each.tensors_scanned for each in found),
            sum(each.bytes_scanned for each in found),
            dict(reasons),
            dict(opaque),
            sum(count for count, _ in counts),
            sum(count for _, count in counts) if wanted.activations else 0,
            steps,
            steps_watched,
            without_gradient,
            [kind for kind in Wanted._fields if not getattr(wanted, kind)],
            any(watch.has_seen_loss for watch in watches),
            failures,
            rules_unused,
            ignores_spikes,
            unused_kernels=_C.unused_kernels(),
        )

    @classmethod
    def unknown(cls, failures: int) -> GuardCoverage:
        """Makes the coverage of a guard whose counts cannot be read."""
        return cls(0, 0, 0, {}, {}, 0, 0, 0, 0, 0, [], False, failures, [])

    def gaps(self) -> list[str]:
        """Lists what was not checked, in sentences."""
        from .wording import gaps_of

        return gaps_of(self)

    def __str__(self) -> str:
        """Writes what was checked, what was not, and the rules that match nothing."""
        from .wording import coverage_text

        return coverage_text(self)


# The first and the last line that a guard logs of a run.


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
