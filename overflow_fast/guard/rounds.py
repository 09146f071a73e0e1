"""Rounds of several optimizers: which have stepped, which were skipped, in a row."""

from __future__ import annotations

from ..report.report import Report
from .optimizer_hook import OptimizerHook


class Rounds:
    """Counts rounds: one is over when each optimizer has stepped, or one steps again.

    A round has one verdict: once it is bad, it is for all optimizers that step in what
    is left of it.

    Args:
        gates: Those of the optimizers.

    Attributes:
        report: That of the round, if it is bad.
        num_skipped: How many rounds a step was skipped in.
    """

    def __init__(self, gates: list[OptimizerHook]) -> None:
        self._gates = gates
        self._stepped: set[OptimizerHook] = set()
        self._skips_in_row = dict.fromkeys(gates, 0)
        self._was_skipped = dict.fromkeys(gates, False)
        self._is_over = False
        self._is_counted = False
        self.is_skipped = False
        self.report: Report | None = None
        self.num_skipped = 0

    def has_stepped(self, gate: OptimizerHook) -> bool:
        """Whether an optimizer has stepped in this round."""
        return gate in self._stepped

    def begin(self) -> None:
        """Begins a round if the one before is over; until then that one is told of."""
        if self._is_over:
            self._is_over = self._is_counted = self.is_skipped = False
            self.report = None

    def end(self) -> None:
        """Ends the round."""
        self._stepped.clear()
        self._is_over = True

    def note_step(self, gate: OptimizerHook) -> bool:
        """Notes that an optimizer's step is over; returns whether the round is."""
        self._stepped.add(gate)
        return len(self._stepped) == len(self._gates)

    def note(self, gate: OptimizerHook, is_skipped: bool, is_by_guard: bool) -> None:
        """Notes what becomes of an optimizer's step.

        Args:
            gate: The optimizer's.
            is_skipped: Whether it is skipped, by whomever.
            is_by_guard: Whether the round is bad, and the guard has it skipped.
        """
        self._was_skipped[gate] = is_skipped
        self.is_skipped |= is_skipped
        self._skips_in_row[gate] = self._skips_in_row[gate] + 1 if is_by_guard else 0
        if is_by_guard and not self._is_counted:
            self._is_counted = True
            self.num_skipped += 1

    def note_unwatched(self, gate: OptimizerHook) -> None:
        """Notes a step that nobody judges: it resets no count."""
        self._was_skipped[gate] = False

    def take_back(self) -> None:
        """Takes back that the round is skipped: it raises."""
        self._skips_in_row = dict.fromkeys(self._gates, 0)
        if self._is_counted:
            self._is_counted = False
            self.num_skipped -= 1

    @property
    def consecutive_skips(self) -> int:
        """How many of its steps the guard skipped in a row, of the worst optimizer."""
        return max(self._skips_in_row.values(), default=0)

    def was_skipped(self, optimizer: object) -> bool:
        """Whether the last step of one optimizer was skipped, by whomever.

        Raises:
            ValueError: If the guard does not have it.
        """
        for gate in self._gates:
            if gate.is_of(optimizer):
                return self._was_skipped[gate]
        raise ValueError(
            "optimizer must be one that the guard was given, got another "
            f"{type(optimizer).__name__}"
        )
