"""Collects what was seen of a unit: stats come from all devices, frames are taken."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch.optim import Optimizer

from .. import _C
from .core import GuardCore
from .optimizers.engine_scaler import LossScaler
from .optimizers.optimizer_hook import OptimizerHook
from .unit import Unit, UnitKind
from .verdict.bad_frames import BadFrame, take_bad, take_evaluated
from .verdict.masks import Masks
from .watching.judged_tensors import JudgedTensors

_log = logging.getLogger("overflow_fast")


class Collector:
    """Collects what was seen of a unit.

    Args:
        guard: The guard's core.

    Attributes:
        watches: The watched models.
        wanted: What is watched.
        tensors: Scans what stands in no module's call.
        masks: Leaves out -inf of outputs where nothing else is bad.
        has_scaler: A loss scaler was seen.
        lost: The last error of a device's own that `scan_failed()` has raised, or None.
    """

    def __init__(self, guard: GuardCore) -> None:
        self._guard = guard
        self._is_blind = False  # a tripwire had nothing to look at, which was logged
        self.watches = guard.watches
        self.wanted = guard.config.wanted
        self.tensors = JudgedTensors(guard.watches, guard.config.weights_every)
        self.masks = Masks(guard.rules)
        self.has_scaler = False
        self.lost: Exception | None = None

    def begun(
        self,
        kind: UnitKind,
        hook: OptimizerHook | None = None,
        scaler: LossScaler | None = None,
    ) -> Unit:
        """A unit of the step at hand, of which nothing was seen yet."""
        clock = self._guard.clock
        return Unit(clock.step, kind, hook, scaler, clock.left_out, kind.can_restore)

    @property
    def num_calls(self) -> int:
        """How many calls there were so far."""
        return sum(watch.total_calls for watch in self.watches)

    # From devices to the host.

    def send(self, is_lagged: bool = False) -> None:
        """Starts the copy of all stats to the host; does not wait."""
        for watch in self.watches:
            watch.frames.send(with_captured=not is_lagged)

    def receive(self, is_lagged: bool = False) -> None:
        """Waits for all stats, or only for those of steps before the last."""
        for watch in self.watches:
            watch.frames.receive(is_lagged)

    def take(self, last_frame: int, with_evaluated: bool = False) -> list[BadFrame]:
        """Takes the bad frames up to one; on request those of forwards alone, too."""
        frames = take_bad(self.watches, last_frame)
        start = self._guard.start
        around = [] if start is None else start.around
        for each in frames:
            each.leave_out(around)
        frames = [each for each in frames if not each.is_around or each.bad_entries]
        return frames + take_evaluated(self.watches) if with_evaluated else frames

    def forget(self) -> None:
        """Forgets the bad frames that nobody has taken. Incurs the sync."""
        self.receive()
        self.take(_C.Recorder.num_frames(), with_evaluated=True)
        self.end()

    def end(self, is_lagged: bool = False) -> None:
        """Ends a unit: its tensors are let go of."""
        self.tensors.forget()
        for watch in self.watches:
            watch.end_judgement(is_lagged)

    # What stands in no call.

    def scan(self, hook: OptimizerHook, others: Sequence[Optimizer] = ()) -> None:
        """Scans what belongs to no call. Does not incur a CPU-GPU sync.

        Args:
            hook: That of the optimizer which is about to step.
            others: The optimizers that step next.
        """
        engine = hook.all_layers if hook.is_of_engine else ()
        self.tensors.scan(hook.optimizer, others, engine)
        has_loss = any(watch.has_loss_of_step for watch in self.watches)
        is_blind = not (self.tensors.num_gradients or has_loss)
        if is_blind and self._guard.config.is_tripwire:
            self._warn_blind()

    def scan_all(self) -> None:
        """Scans weights, buffers and all gradients, whatever was scanned before."""
        self.tensors.begin_round()
        self.tensors.scan(None)

    def scan_failed(self) -> None:
        """Scans in another way what could not be scanned: the stats have arrived.

        Raises:
            Exception: A device's own error, which this wait has met for the program.
        """
        lost: list[Exception] = []
        for watch in self.watches:
            try:
                watch.recorder.raise_lost()
            except Exception as error:
                lost.append(error)
            watch.recorder.scan_failed(self.tensors.find)
        if lost:
            self._guard.isolation.programs_error = self.lost = lost[0]
            raise lost[0]

    def note_scaler(self, scaler: LossScaler | None) -> None:
        """Adds a scaler's scale to the step's record. Does not incur a sync."""
        if scaler is None:
            return
        self.has_scaler = True
        record = self._guard.measurements.record
        if record is not None:
            with self._guard.isolation.isolated():
                record.scan_loss_scale(scaler)

    def _warn_blind(self) -> None:
        """Logs, once, that a step had nothing that a tripwire looks at."""
        if self._is_blind:
            return
        self._is_blind = True
        _log.warning(
            "Step %d was not checked: watch='tripwire' saw neither a loss nor a "
            "gradient in it. Return the loss from the model or give "
            "guard.record(loss=loss), or leave watch at its default. Later steps of "
            "this kind are not logged.",
            self._guard.clock.step,
        )
