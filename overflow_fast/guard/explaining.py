"""Decides when a step is explained; the explainer is imported only then.

A clean run never loads what runs steps again. Where that cannot be imported any more,
because the package was changed or its disk is gone under a run of weeks, the alarm, the
policy, the log and the evidence are what they are without an explanation.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from ..base.text import error_line
from .core import GuardCore
from .kept_calls.call_keeper import KeptCalls
from .outer import outer
from .process import world_size
from .ranks.agreement import Agreed
from .ranks.replay_offer import ReplayOffer, why_not_together
from .report.explanation import Explanation
from .requests.held_call import HeldCall
from .time_share import TimeShare
from .unit import Unit
from .verdict.verdict import Verdict

_log = logging.getLogger("overflow_fast")
USE_RUN = "guard.run(lambda: loss)"
_STEPS_BETWEEN = 100  # until another place is explained; chosen, not measured
_SOON = (
    f"The last explanation was less than {_STEPS_BETWEEN} steps before: "
    "`explain=True` explains each."
)
_ALONE = (
    "The step was not replayed: an exception has ended it on this rank, and its "
    "collectives would wait for the others."
)


class Explainer(Protocol):
    """Explains the bad steps of one guard, by running them again."""

    def explain(self, verdict: Verdict, moment: str) -> Explanation:
        """Explains a step; see `Explaining.explain()`."""

    def search(self, moment: str) -> tuple[Verdict, Explanation] | None:
        """Looks for a bad value that no module showed; see `Explaining.search()`."""

    def offer(self, is_due: bool, joins: bool) -> ReplayOffer:
        """This rank's part in a replay of all ranks; see `Explaining.offer()`."""

    def explain_together(self, agreed: Agreed, moment: str) -> tuple[Explanation, bool]:
        """Explains a step on all ranks; see `Explaining.explain_together()`."""

    def look_again(self, found: Unit) -> Unit:
        """Sees a step in full; see `Explaining.look_again()`."""

    def look_together(self, found: Unit, agreed: Agreed) -> tuple[Unit, str, bool]:
        """Sees it on all ranks; see `Explaining.look_together()`."""

    def finite_note(self) -> str:
        """Writes what follows if the step is finite when it is run again."""


class Explaining:
    """Decides which of a guard's alarms are explained, and asks the explainer.

    Args:
        guard: The guard's core. Its `explain="auto"` explains always where the run
            ends; else the first time for each place, at most once in 100 steps.

    Attributes:
        is_off: No step is kept, and none is to be explained.
        looks_again: A bad step is run again with everything watched.
    """

    def __init__(self, guard: GuardCore) -> None:
        config, watches, keeper = guard.config, guard.watches, guard.keeper
        self._timer, self._keeper = guard.measurements.timer, keeper
        self._asked = config.explain.when
        is_replay_safe = config.explain.replay_safe or config.verdicts_are_late
        is_asked = self._asked != "never"
        self.is_off = keeper is None and (is_replay_safe or not is_asked)
        self.looks_again = config.is_tripwire and keeper is not None
        has_frames = not (config.is_tripwire or config.verdicts_are_late)
        compares = is_asked and keeper is not None and has_frames
        if compares:  # a replay with the step
            for watch in watches:
                watch.recorder.note_row()
        self._last_steps = guard.last_steps
        self._arguments = (
            *(config, watches, keeper, guard.full_watches, guard.optimizers),
            *(self._last_steps, compares),
        )
        self._explainer: Explainer | None = None
        # Of steps, and of forwards without autograd, which take none's turn.
        self._places: set[tuple[bool, str, str, str]] = set()
        self._last: dict[bool, int] = {}
        self._searching = TimeShare()

    def note_step(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Takes in that an optimizer has made its step."""
        if optimizer is not None and self._asked != "never":
            self._last_steps.note(optimizer)

    def explain(self, unit: Unit, verdict: Verdict, ends: bool) -> Explanation | None:
        """Explains a step, or returns None if it is not asked for.

        Args:
            unit: The step, or its update.
            verdict: What was found.
            ends: Whether the run ends with it.
        """
        why_not = self._why_not(unit, verdict, ends)
        if why_not is not None:
            return _noting(why_not) if why_not else None
        if isinstance(unit.call, str) and self._keeper is not None:
            return _noting(unit.call)
        if unit.kind.moment == "raised" and world_size() > 1:
            return _noting(_ALONE)
        try:
            with self._timer.left_out():
                if unit.explains is not None:
                    return unit.explains(verdict)
                is_held = isinstance(unit.call, HeldCall)
                explainer = self._of_call(unit) if is_held else self._loaded()
                return explainer.explain(verdict, unit.kind.moment)
        except Exception as error:  # the alarm matters more than its explanation
            what = "step" if unit.call is None else "forward"
            return _noting(f"The {what} was not explained: {error_line(error)}.")

    def search(self, unit: Unit) -> tuple[Verdict, Explanation] | None:
        """Runs a step again that has raised, where no module showed a bad value.

        Returns:
            What the replay has found up to the exception; None for nothing.
        """
        is_asked = self._asked != "never" and self._keeper is not None
        if not is_asked or self._searching.is_spent or world_size() > 1:
            return None
        try:
            with self._timer.left_out(), self._searching.spending():
                return self._loaded().search(unit.kind.moment)
        except Exception as error:  # nothing is known of it
            _log.debug("A step that has raised was not explained: %s", error)
            return None

    def offer(
        self, unit: Unit, verdict: Verdict, ends: bool, joins: bool
    ) -> ReplayOffer:
        """This rank's part in a replay of all ranks. Calls no collective.

        Args:
            unit: See `explain()`, as all others.
            verdict: This rank's.
            ends: Whether the run ends with it.
            joins: Whether a `Join` has ranks without batches take part.
        """
        is_due = self._why_not(unit, verdict, ends) is None
        if self._keeper is None:
            return ReplayOffer(is_due, "keeps no steps (explain, replay_safe or sync)")
        try:
            return self._loaded().offer(is_due, joins)
        except Exception as error:  # the others wait for this rank's report
            return ReplayOffer(is_due, f"failed ({error_line(error)})")

    def explain_together(
        self, agreed: Agreed, moment: str
    ) -> tuple[Explanation | None, bool]:
        """Explains a step along with all other ranks that agreed on it.

        Args:
            agreed: What they agreed on.
            moment: See `Report.moment`.

        Returns:
            The explanation, or None if none is due, and whether a rank was lost in it.
        """
        offers, report = agreed.offers, agreed.report
        if report is None or not offers[agreed.rank].is_due:
            return None, False
        text = why_not_together(offers)
        if text:
            return _noting(text), False
        with self._timer.left_out():
            return self._loaded().explain_together(agreed, moment)

    def look_again(self, found: Unit) -> Unit:
        """Replaces what the tripwire saw of a bad step by what a full watch sees.

        Runs the step again; everything is put back bit for bit afterwards. Incurs a
        CPU-GPU sync.

        Args:
            found: What the tripwire saw, with at least one bad frame.

        Returns:
            The same with the bad frames of the replay; with a note if there are none.
        """
        try:
            with self._timer.left_out():
                return self._loaded().look_again(found)
        except Exception as error:
            return found.with_note(f"The step was not run again: {error_line(error)}.")

    def look_together(self, found: Unit, agreed: Agreed) -> tuple[Unit, str, bool]:
        """Runs the step again on all ranks that agreed on it.

        Args:
            found: See `look_again()`.
            agreed: What they agreed on.

        Returns:
            What this rank has seen; a note, the same on all ranks, if it could not be
            run, or was finite, else ""; and whether a rank was lost.
        """
        why = why_not_together(agreed.offers)
        if why:
            return found, why, False
        with self._timer.left_out():
            return self._loaded().look_together(found, agreed)

    def finite_note(self) -> str:
        """Writes what follows if the step is finite when it is run again."""
        return self._loaded().finite_note()

    def _of_call(self, unit: Unit) -> Explainer:
        """The explainer of a forward without autograd, which no step keeps."""
        assert isinstance(unit.call, HeldCall)
        call, start = unit.call.again([])
        config, _, _, *others, _ = self._arguments
        first = unit.frames[0]
        kept = KeptCalls([call], start, {id(first.watch): first.frame.batch})
        made: Explainer = outer("explainer")(
            *(config, [first.watch], kept, *others, False)
        )
        return made

    def _loaded(self) -> Explainer:
        if self._explainer is None:
            self._explainer = outer("explainer")(*self._arguments)
        return self._explainer

    def _why_not(self, unit: Unit, verdict: Verdict, ends: bool) -> str | None:
        """Why a step is not explained, "" where that goes without saying; else None."""
        first, is_apart = verdict.first, unit.kind.is_evaluation
        if self._asked == "never" or self.is_off or first is None:
            return ""
        if self._asked == "always" or ends:
            return None
        place = is_apart, first.kind, first.fqn, first.label
        if place in self._places:
            return ""
        if unit.number < self._last.get(is_apart, -_STEPS_BETWEEN) + _STEPS_BETWEEN:
            return _SOON if self._keeper is not None else ""
        self._places.add(place)
        self._last[is_apart] = unit.number
        return None


def _noting(text: str) -> Explanation:
    """An explanation that says why there is none."""
    return Explanation(notes=[text])
