"""The flight record of a guard, where one was asked for."""

from __future__ import annotations

from collections.abc import Sequence

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ..record.flight import FlightRecorder
from ..report.report import Cost
from .isolation import ErrorIsolation
from .policy_engine import PolicyEngine
from .rounds import Rounds


class StepRecord:
    """Passes what became of each step to the flight recorder, if there is one.

    Args:
        recorder: Keeps the record, or None.
        isolation: Isolates the guard's own errors.
        engine: Has the last report.
        rounds: Has what became of the optimizers' steps.
    """

    def __init__(
        self,
        recorder: FlightRecorder | None,
        isolation: ErrorIsolation,
        engine: PolicyEngine,
        rounds: Rounds,
    ) -> None:
        self._recorder = recorder
        self._isolation = isolation
        self._engine = engine
        self._rounds = rounds

    def scan_loss_scale(self, scaler: GradScaler | None) -> None:
        """Adds a scaler's scale to the step. Does not incur a CPU-GPU sync."""
        if self._recorder is not None and scaler is not None:
            with self._isolation.isolated():
                self._recorder.scan_loss_scale(scaler)

    def end_step(
        self, step: int, cost: Cost | None, optimizers: Sequence[Optimizer]
    ) -> None:
        """Ends the step; its cost is None where it was not measured."""
        if self._recorder is None:
            return
        report, is_skipped = self._engine.last_report, self._rounds.is_skipped
        has_spike = self._engine.spike_step == step
        with self._isolation.measured():
            self._recorder.end_step(
                step, cost, optimizers, report, is_skipped, has_spike
            )

    def close(self) -> None:
        """Writes what is known of the last step, and closes the file."""
        if self._recorder is not None:
            with self._isolation.isolated():
                self._recorder.close(self._engine.last_report)
