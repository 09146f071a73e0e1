"""Runs a clean step again, and looks inside its operations."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..base.text import as_lines
from ..explainer.calls import made_again
from ..explainer.questions import masked_ops, masked_text
from ..explainer.replayer import Replayer, StepPart
from ..guard.kinds import whole
from ..guard.monitors.monitor import Guarded, Monitor, MonitoredStep
from ..guard.options import option
from ..guard.process import world_size
from ..guard.report.explanation import Explanation

_log = logging.getLogger("overflow_fast")


@dataclass(frozen=True)
class MaskedOps(Monitor):
    """Operations whose non-finite values were masked, clamped or divided away.

    Not with several ranks, nor with `sync="lagged"`.
    """

    needs_magnitudes = False
    replays = True

    every: int = field(
        default=1000,
        metadata=option(
            "Run one clean step in this many again, and log its operations whose "
            "non-finite values were masked.",
            whole(1),
            see="guides/production.md#what-hooks-cannot-see",
        ),
    )

    def start(self, guarded: Guarded) -> Monitor:
        return _MaskedOpsLog(guarded, self.every)


class _MaskedOpsLog(Monitor):
    """Logs each operation once.

    Args:
        guarded: The training.
        every: One step in this many is run again.
    """

    def __init__(self, guarded: Guarded, every: int) -> None:
        self._guarded = guarded
        self._every = every
        self._known: set[tuple[str, int, str]] = set()  # the places that were logged
        self._num_masked = 0
        self._is_stopped = False  # a replay was: the next ones would be, too
        self._has_warned = False

    def look(self, step: MonitoredStep) -> tuple[()]:
        keeper = self._guarded.keeper
        if step.number % self._every or keeper is None or not keeper.calls:
            return ()
        if world_size() > 1 or self._is_stopped:
            return ()
        replayer = Replayer(
            step.models, list(map(made_again, keeper.calls)), keeper.start
        )
        with replayer:
            result = replayer.run(StepPart(traced=len(replayer.calls) - 1))
        table = None if result.error else result.table
        found = [] if table is None else masked_ops(table)
        self._warn_of_trace(replayer)
        self._report(step.number, found)
        return ()

    def metrics(self) -> dict[str, float]:
        return {"hidden_failures_total": self._num_masked}

    def _warn_of_trace(self, replayer: Replayer) -> None:
        """Warns once that steps are not replayed, or have left a trace."""
        texts = list(replayer.state.problems)
        if replayer.stopped:
            self._is_stopped = True
            texts.append(
                f"MaskedOps(): clean steps are not replayed: {replayer.stopped}."
            )
        if texts and not self._has_warned:
            self._has_warned = True
            _log.warning("%s", as_lines([*texts, "Logged once."]))

    def _report(self, step: int, found: Sequence[Explanation]) -> None:
        lines = []
        for each in found:
            op = each.op
            assert op is not None
            place = op.file, op.line, op.name
            if place not in self._known:
                self._known.add(place)
                lines.append(f"{masked_text(each)}.")
        self._num_masked += len(lines)
        if lines:
            _log.warning(
                "%s",
                as_lines(
                    [
                        f"Step {step} is finite, but values inside of it were not:",
                        *lines,
                        "They did not reach the loss or a gradient.",
                    ]
                ),
            )
