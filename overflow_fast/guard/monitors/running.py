"""The monitors of one guard, and what they say of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from torch.optim import Optimizer

from .magnitudes import Saturation
from .monitor import Guarded, Monitor, MonitoredStep, Notice
from .spikes import SPIKE, Spikes


class RunningMonitors:
    """Calls the monitors of a guard, each without the others' errors.

    Only those that have a method are called: most steps need none.

    Args:
        monitors: The monitors, as the guard was given them.
        guarded: The training.
        isolated: Isolates the errors of a monitor, by its name.
        looks: Look at steps before their optimizers step.
    """

    def __init__(
        self,
        monitors: Sequence[Monitor],
        guarded: Guarded,
        isolated: Callable[[str], AbstractContextManager[None]],
        looks: bool,
    ) -> None:
        self._guarded = guarded
        self._isolated = isolated
        self._running = [each.start(guarded) for each in monitors]
        self._names = {
            id(running): type(each).__name__
            for each, running in zip(monitors, self._running, strict=True)
        }
        self._may_skip = {
            id(running): each.may_skip
            for each, running in zip(monitors, self._running, strict=True)
        }
        self._beginning = self._with("begin_step")
        self._looking = self._with("look") if looks else []
        self._ending = self._with("end_step")

    def _with(self, method: str) -> list[Monitor]:
        default = getattr(Monitor, method)
        return [e for e in self._running if getattr(type(e), method) is not default]

    def begin_step(self, step: int) -> None:
        """Prepares for a step."""
        for each in self._beginning:
            with self._isolated(self._names[id(each)]):
                each.begin_step(step)

    def look(
        self, step: int, optimizer: Optimizer | None, is_scaled: bool
    ) -> list[Notice]:
        """Returns what the monitors say of a finite step.

        Args:
            step: The step's number.
            optimizer: The optimizer that is about to step.
            is_scaled: Whether a GradScaler scales the gradients.
        """
        if not self._looking:
            return []
        seen = MonitoredStep(step, optimizer, is_scaled, self._guarded)
        found: list[Notice] = []
        for each in self._looking:
            with self._isolated(self._names[id(each)]):
                found += self._notices_of(each, seen)
        return found

    def _notices_of(self, monitor: Monitor, step: MonitoredStep) -> Iterator[Notice]:
        name = self._names[id(monitor)]
        said = monitor.look(step)
        for each in [said] if isinstance(said, (str, Notice)) else said:
            notice = Notice(each) if isinstance(each, str) else each
            if not self._may_skip[id(monitor)]:
                notice = dataclasses.replace(notice, action="warn")
            yield dataclasses.replace(notice, monitor=name)

    def end_step(self, step: int) -> None:
        """Ends a step, once its optimizers have stepped."""
        for each in self._ending:
            with self._isolated(self._names[id(each)]):
                each.end_step(step)

    def stop(self) -> None:
        """Removes hooks."""
        for each in self._running:
            with self._isolated(self._names[id(each)]):
                each.stop()

    def metrics(self) -> dict[str, float]:
        """Returns the monitors' numbers."""
        found: dict[str, float] = {}
        for each in self._running:
            with self._isolated(self._names[id(each)]):
                found |= each.metrics()
        return found


def clauses_of(
    notices: Sequence[Notice], has_spike: bool, is_skipped: bool
) -> list[str]:
    """Clauses for a line on a finite step: "spikes: loss ...", "DeadUnits: ...".

    Args:
        notices: This rank's.
        has_spike: A rank has seen a spike.
        is_skipped: The step is skipped, for a notice of some rank.
    """
    spikes = [each.text for each in notices if each.kind == SPIKE]
    others = [each for each in notices if each.kind != SPIKE]
    clauses = [f"{each.monitor}: {each.text}" for each in others]
    if has_spike:
        clauses.insert(0, f"spikes: {'; '.join(spikes) or 'seen on another rank'}")
    if is_skipped and not clauses:
        clauses.append("another rank skips it")
    return clauses


DEFAULT_MONITORS = (Spikes(), Saturation())
