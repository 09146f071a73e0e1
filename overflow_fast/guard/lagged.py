"""Steps that are made before their verdict is there: `sync="lagged"`.

A step whose stats are on their way waits in a queue. When they have arrived, it is
judged as any other: a verdict that arrives later is the same verdict. Meanwhile its
device may have skipped it by itself.

`arrived()` is called in each judgement of a step. It receives all stats, those of the
step at hand too, unless that step is lagged itself. Without `sync="lagged"` it does no
more: the queue stays empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from .collect import Collector
from .core import GuardCore
from .optimizers.device_flags import DeviceFlags
from .optimizers.loss_scaling import has_skipped, without_expected
from .optimizers.optimizer_hook import OptimizerHook
from .unit import LATE, Unit


class LaggedSteps:
    """The steps whose verdicts are on their way.

    Args:
        guard: The guard's core.
        collector: Collects what was seen.
    """

    def __init__(self, guard: GuardCore, collector: Collector) -> None:
        self._collector, self._start = collector, guard.undone_to
        self._waiting: deque[Unit] = deque()
        self._doubted: set[OptimizerHook] = set()
        self._flags: DeviceFlags | None = None
        if guard.config.verdicts_are_late:
            self._flags = DeviceFlags(guard)

    def holds(self, hook: OptimizerHook) -> bool:
        """True if an optimizer's step is made before its verdict is there."""
        return self._flags is not None and self._flags.are_lagged(hook)

    def leave_to_device(self, unit: Unit, hook: OptimizerHook) -> None:
        """Makes the device skip a step, and put buffers back, if it is bad."""
        assert self._flags is not None
        if self._flags.skip(hook, unit.scaler is not None, self._start):
            unit.skipped_by = "optimizer's kernel"

    def push(self, unit: Unit) -> None:
        """Queues a step that is made now."""
        self._waiting.append(unit)

    def arrived(self, is_lagged: bool) -> Iterator[Unit]:
        """Receives stats, and yields the steps that wait for them, to be judged.

        Incurs the sync.

        Args:
            is_lagged: Wait only for the stats of steps before the last.
        """
        self._collector.receive(is_lagged)
        while self._waiting:
            step = self._waiting.popleft()
            frames = [*step.frames, *self._collector.take(step.last_frame)]
            frames, skipped_by = without_expected(frames, step.scaler, has_skipped)
            is_skipped = f", which was skipped by the {step.skipped_by}"
            subject = f"Step {step.number}{is_skipped * bool(step.skipped_by)}"
            frames = self._collector.masks.left_out(frames, subject)
            if not frames and step.is_decided:
                continue
            if frames:
                skipped_by = skipped_by or step.skipped_by
            late = Unit(step.number, LATE, step.hook, left_out=step.left_out)
            late.frames, late.skipped_by = frames, skipped_by
            yield late

    def clear(self) -> None:
        """Forgets the steps that wait."""
        self._waiting.clear()

    # A step that may overflow is looked at in the next one, with what it has made.

    def doubt(self, hook: OptimizerHook) -> None:
        """Notes that an optimizer's step may overflow."""
        self._doubted.add(hook)

    def scan_doubted(self, hook: OptimizerHook) -> None:
        """Scans what an optimizer's last step has made, if that was doubted."""
        if hook in self._doubted and hook.optimizer is not None:
            self._doubted.remove(hook)
            self._collector.tensors.scan_update(hook.optimizer)
