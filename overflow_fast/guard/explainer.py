"""When a guard has a step explained, and what it knows of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _C
from ..core.wrapped import local_part
from ..distributed.agreement import Agreed
from ..recording.watch import ModelWatch
from ..replay.capture import Capture
from ..replay.explain import investigate
from ..replay.explanation import Explanation
from ..replay.incident import Incident
from ..replay.team import Team, text_of
from ..replay.witness import Witness
from ..state.step_start import StepStart
from ..torch_internals.compiler import has_compiled
from ..verdict.hardware import is_of_flag
from ..verdict.verdict import GRADIENTS, Verdict
from .comparison import StepComparison
from .config import GuardConfig
from .joint_replay import ReplayOffer, offer_of, team_of, why_not_together

_STEPS_BETWEEN = 100
_LATE = (
    "The step was not replayed: its verdict came when the weights had been stepped "
    "(sync='lagged')."
)
_UNSAFE = "The step was not replayed: replay_safe=False."
_NO_STEP = "The forward was not replayed: it ran without autograd."


class Explainer:
    """Explains a guard's alarms, as often as it was asked for.

    Args:
        config: The guard's. "auto" explains always where the run ends; else the first
            time for each place, at most once in 100 steps.
        watches: The watched models.
        capture: Keeps the calls of a step; None if nothing is to be explained.
        make_watches: Makes watches of the models that look at everything.
    """

    def __init__(
        self,
        config: GuardConfig,
        watches: Sequence[ModelWatch],
        capture: Capture | None,
        make_watches: Callable[[], list[ModelWatch]],
    ) -> None:
        self._asked = config.explain.when
        self._budget = config.explain.budget
        self._steps_between = config.weights_every or 1
        self._is_replay_safe = config.explain.replay_safe or config.sync == "lagged"
        self._checkpoints = config.explain.checkpoints
        evidence = config.evidence
        self._artifact_bytes = 0 if evidence is None else int(evidence.mib * 2**20)
        self._watches = watches
        self._capture = capture
        self._make_watches = make_watches
        has_frames = not config.is_tripwire and config.sync != "lagged"
        self._compares = capture is not None and has_frames
        if self._compares:
            for watch in watches:
                watch.recorder.note_row()
        self._places: set[tuple[str, str, str]] = set()
        self._last: int | None = None

    def explain(
        self,
        step: int,
        verdict: Verdict,
        ends: bool,
        moment: str,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> Explanation | None:
        """Explains a step, or returns None if it is not asked for.

        Args:
            step: Its number.
            verdict: What was found.
            ends: Whether the run ends with it.
            moment: See `Report.moment`.
            optimizers: The guard's.
        """
        if not self._is_due(step, verdict, ends):
            return None
        return self._explained(verdict, moment, optimizers)

    def offer(
        self, step: int, verdict: Verdict, ends: bool, joins: bool
    ) -> ReplayOffer:
        """This rank's part in a replay of all ranks.

        Args:
            step: See `explain()`, as all others.
            verdict: This rank's.
            ends: Whether the run ends with it.
            joins: Whether a `Join` has ranks without batches take part.
        """
        is_due = self._is_due(step, verdict, ends)
        models = [watch.model for watch in self._watches if watch.model is not None]
        try:
            return offer_of(is_due, self._capture, models, joins)
        except Exception as error:  # the others wait for this rank's report
            return ReplayOffer(is_due, f"failed ({text_of(error)})")

    def explain_together(
        self, agreed: Agreed, moment: str, optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple[Explanation | None, bool]:
        """Explains a step along with all other ranks that agreed on it.

        Args:
            agreed: What they agreed on.
            moment: See `Report.moment`.
            optimizers: The guard's.

        Returns:
            The explanation, or None if none is due, and whether a rank was lost in it.
        """
        offers, report = agreed.offers, agreed.report
        if report is None or not offers[agreed.rank].is_due:
            return None, False
        text = why_not_together(offers)
        if text:
            return Explanation(notes=[text]), False
        team = team_of(offers, agreed.rank)
        return self._explained(report.verdict, moment, optimizers, team), team.is_broken

    def _explained(
        self,
        verdict: Verdict,
        moment: str,
        optimizers: Sequence[torch.optim.Optimizer],
        team: Team | None = None,
    ) -> Explanation:
        if moment == "after":
            return Explanation(notes=[_LATE])
        if moment == "evaluation":
            return Explanation(notes=[_NO_STEP])
        models = {w.prefix: w.model for w in self._watches if w.model is not None}
        capture = self._capture
        if capture is None:
            incident = self._incident(verdict, moment, optimizers)
            found = investigate(models, [], incident)
            return found if found.phase else Explanation(notes=[_UNSAFE])
        return investigate(
            models,
            capture.calls,
            self._incident(verdict, moment, optimizers),
            start=capture.start,
            budget=self._budget,
            checkpoints=self._checkpoints,
            artifact_bytes=self._artifact_bytes,
            team=team,
            witness=self._witness(),
        )

    def _witness(self) -> Witness | None:
        """Compares a replay with the step, but for compiled code: hooks change that."""
        if not self._compares or has_compiled():
            return None
        return StepComparison(self._watches, self._make_watches)

    def _is_due(self, step: int, verdict: Verdict, ends: bool) -> bool:
        first = verdict.first
        if self._capture is not None and first is not None:
            self._capture.note_bad()
        is_off = self._capture is None and self._is_replay_safe
        if self._asked == "never" or is_off or first is None:
            return False
        if self._asked == "always" or ends:
            return True
        place = first.kind, first.fqn, first.label
        is_soon = self._last is not None and step - self._last < _STEPS_BETWEEN
        if place in self._places or is_soon:
            return False
        self._places.add(place)
        self._last = step
        return True

    def _incident(
        self, verdict: Verdict, moment: str, optimizers: Sequence[torch.optim.Optimizer]
    ) -> Incident:
        first = verdict.first
        assert first is not None
        weights, gradients = self._histories()
        is_gradient = first.kind in ("gradient", "grad_output", "recorded")
        return Incident(
            kind=first.kind,
            module=first.fqn if first.class_name else "",
            is_made=verdict.origin == "made" and bool(first.class_name),
            reaches_loss=verdict.reaches_loss
            or is_gradient
            or bool(verdict.dirty_gradients),
            weights=weights,
            steps_between=self._steps_between,
            largest_gradient=max((r[-1] for r in gradients if r), default=0.0),
            gradients=self._bad_gradients(verdict.dirty_gradients),
            optimizers=optimizers,
            is_late=moment == "check",
            num_dropped=0 if self._capture is None else self._capture.num_dropped,
            hidden_by="" if self._capture is None else self._capture.hidden_by,
            is_of_flag=is_of_flag(verdict),
            had_gradients=self._capture is not None and self._capture.had_gradients,
        )

    def _histories(self) -> tuple[dict[str, list[float]], list[list[float]]]:
        """The largest magnitudes in past steps: of weights, by name, and gradients."""
        weights: dict[str, list[float]] = {}
        gradients = []
        for watch in self._watches:
            for history in watch.recorder.headroom():
                place = history.last.place
                if place.label.role == _C.Role.WEIGHT:
                    name = place.label.name
                    if place.kind == _C.FrameKind.FORWARD:
                        name = f"{watch.name_at(place.module)}.{name}".lstrip(".")
                    weights[name] = history.recent
                elif place.kind in GRADIENTS and place.label.role == _C.Role.GRADIENT:
                    gradients.append(history.recent)
        return weights, gradients

    def _bad_gradients(self, names: Sequence[str]) -> dict[str, Any]:
        wanted = set(names)
        return {
            f"{watch.prefix}{name}": local_part(parameter.grad)
            for watch in self._watches
            if watch.model is not None
            for name, parameter in watch.model.named_parameters()
            if f"{watch.prefix}{name}" in wanted and parameter.grad is not None
        }


def make_capture(
    options: GuardConfig, watches: Sequence[ModelWatch], start: StepStart | None
) -> Capture | None:
    """Makes the watches keep their calls, if steps may be run again."""
    if start is None or not options.may_replay:
        return None
    capture = Capture(start)
    for watch in watches:
        watch.inputs.capture = capture
    return capture
