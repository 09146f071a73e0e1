"""Rounds of steps: one of each optimizer."""

from __future__ import annotations

from collections.abc import Sequence

from .optimizers.optimizer_hook import OptimizerHook
from .report.report import Report


class Rounds:
    """Counts rounds: one ends when each optimizer has stepped, or one steps again.

    A round has one verdict: a bad one holds for all optimizers that step later in it.

    Args:
        hooks: The optimizers' hooks.

    Attributes:
        report: The report of the round, if it is bad.
        is_skipped: A step was skipped in this round, by the guard or a GradScaler.
        num_skipped: The number of rounds in which the guard has skipped a step.
    """

    def __init__(self, hooks: Sequence[OptimizerHook]) -> None:
        self._hooks = hooks
        self._stepped: set[OptimizerHook] = set()
        self._skips_in_row = dict.fromkeys(hooks, 0)
        self._was_skipped = dict.fromkeys(hooks, False)
        self._made: set[OptimizerHook] = set()  # unless the guard skips them yet
        self._is_over = False
        self._is_counted = False
        self.is_skipped = False
        self.report: Report | None = None
        self.num_skipped = 0

    def has_stepped(self, hook: OptimizerHook) -> bool:
        """Returns True if an optimizer has stepped in this round."""
        return hook in self._stepped

    def begin(self) -> None:
        """Begins a round if the last is over. Until then the last can be read."""
        if self._is_over:
            self._is_over = self._is_counted = self.is_skipped = False
            self.report = None

    def end(self) -> None:
        """Ends the round."""
        for hook in list(self._made):
            self._end_row(hook)
        self._stepped.clear()
        self._is_over = True

    def note_step(self, hook: OptimizerHook) -> bool:
        """Notes the end of an optimizer's step; returns True if it ends the round."""
        if hook in self._made:
            self._end_row(hook)
        self._stepped.add(hook)
        return len(self._stepped) == len(self._hooks)

    def note(
        self,
        hook: OptimizerHook,
        is_skipped: bool,
        is_by_guard: bool,
        is_over: bool = False,
    ) -> None:
        """Notes whether an optimizer's step is skipped.

        The guard may yet skip one that it has let pass: for a monitor, or its update.

        Args:
            hook: The optimizer's.
            is_skipped: It is skipped, by the guard or by other code.
            is_by_guard: The guard skips it.
            is_over: It was made before it was judged.
        """
        self._was_skipped[hook] = is_skipped
        self.is_skipped |= is_skipped
        if is_by_guard:
            self._made.discard(hook)
            self._skips_in_row[hook] += 1
        elif is_over:
            self._end_row(hook)
        else:
            self._made.add(hook)
        if is_by_guard and not self._is_counted:
            self._is_counted = True
            self.num_skipped += 1

    def _end_row(self, hook: OptimizerHook) -> None:
        """Ends a row of skips: a step was not skipped by the guard."""
        self._made.discard(hook)
        self._skips_in_row[hook] = 0

    def note_unwatched(self, hook: OptimizerHook) -> None:
        """Notes a step that is not judged: it resets no count."""
        self._was_skipped[hook] = False

    def take_back(self) -> None:
        """Uncounts the skip of the round: it raises instead."""
        self._skips_in_row = dict.fromkeys(self._hooks, 0)
        if self._is_counted:
            self._is_counted = False
            self.num_skipped -= 1

    @property
    def consecutive_skips(self) -> int:
        """The steps in a row that the guard skipped, of the worst optimizer."""
        return max(self._skips_in_row.values(), default=0)

    def was_skipped(self, optimizer: object) -> bool:
        """Returns True if the last step of one optimizer was skipped, by any code.

        Raises:
            ValueError: If the guard does not have it.
        """
        for hook in self._hooks:
            if hook.is_of(optimizer):
                return self._was_skipped[hook]
        raise ValueError(
            "optimizer must be one that the guard was given, got another "
            f"{type(optimizer).__name__}"
        )
