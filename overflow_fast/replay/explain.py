"""The decision tree from an alarm to its explanation."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from . import sample
from .answers import Answers
from .explanation import Explanation
from .finding import explain_culprit, first_bad_weight
from .growth import growth_of
from .incident import Incident
from .kept_call import KeptCall
from .optimizer_step import explain_update
from .places import module_of_parameter, names_of
from .rerun import Outcome, Rerun
from .restore import KeptState
from .slice import Culprit, ForwardRows, culprit_of

BUDGET = 8
_STEP_TIMES = 4.0
_LEAST_SECONDS = 1.0
_NOT_ALONE = (
    "The step was not replayed: there are several ranks, and collectives in it would "
    "wait for the others."
)


def _has_peers() -> bool:
    """Whether a replay may meet collectives that other ranks would not join."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def investigate(
    models: Mapping[str, nn.Module],
    calls: Sequence[KeptCall],
    incident: Incident | None = None,
    *,
    start: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    budget: int = BUDGET,
) -> Explanation:
    """Replays a step and says why it is not finite. Everything is put back afterwards.

    Args:
        models: The models, by what their modules' names begin with.
        calls: The calls of the step.
        incident: What a guard saw; None where nobody watched.
        start: Buffers and what was in them when the step began.
        budget: How many forwards it may run.
    """
    begin = time.perf_counter()
    found, rerun = Explanation(), None
    try:
        known = None if incident is None else _without_replay(models, incident)
        if known is not None:
            found = known
        elif _has_peers():
            found.notes.append(_NOT_ALONE)
        elif not calls:
            found.notes.append(
                "The step was not replayed: no forward of it was kept. Call the model "
                "and the loss within `guard.run(lambda: loss)`."
            )
        else:
            with KeptState(models, start) as state:
                rerun = Rerun(models, calls, state)
                found = _Search(rerun, incident, budget).run()
                found.notes += state.lost
    except Exception as error:
        text = str(error).splitlines()
        found.notes.append(
            f"The explanation ended early: {type(error).__name__}: "
            f"{text[0][:120] if text else ''}."
        )
    found.replays = 0 if rerun is None else rerun.num_forwards
    found.seconds = time.perf_counter() - begin
    return found


def _without_replay(
    models: Mapping[str, nn.Module], incident: Incident
) -> Explanation | None:
    """The explanation of weights that are bad: no replay is needed for it."""
    if incident.kind not in ("weight", "optimizer_state"):
        return None
    found = first_bad_weight(models, "parameter")
    if found is not None and incident.weights.get(found.tensor):
        return explain_update(models, incident, found)
    if found is None and incident.kind == "optimizer_state":
        return Explanation(
            "optimizer", notes=["Which step made the optimizer's state is not known."]
        )
    return found


class _Search:
    """One explanation in the making."""

    def __init__(self, rerun: Rerun, incident: Incident | None, budget: int) -> None:
        self._rerun = rerun
        self._incident = incident
        self._budget = budget
        self._begin = time.perf_counter()
        self._step_seconds = 0.0
        self._answers = Answers(rerun, incident, self.may_run)

    def may_run(self, forwards: int = 1) -> bool:
        """Whether the budget allows so many forwards more."""
        seconds = time.perf_counter() - self._begin
        most = max(_LEAST_SECONDS, _STEP_TIMES * self._step_seconds)
        left = self._budget - self._rerun.num_forwards
        return left >= forwards and seconds < most

    def run(self) -> Explanation:
        first = self._rerun.run()
        self._step_seconds = first.seconds
        if first.error is not None:
            return self._answers.failed(first.error)
        is_inside = self._incident is not None and not self._incident.reaches_loss
        if first.is_clean and not is_inside:
            return self._answers.clean(first)
        place = max(first.bad_call, 0)
        armed = self._rerun.run(place if first.bad_call >= 0 else self._last())
        if armed.error is not None:
            return self._answers.failed(armed.error)
        culprit, in_gradients = self._culprit(armed)
        if culprit is None or (first.is_forward and not armed.is_forward):
            return self._answers.not_in_eager(first, armed)
        assert armed.table is not None
        rows = ForwardRows(armed.table)
        found = explain_culprit(culprit, rows, in_gradients)
        incident = self._incident
        was_finite = incident is not None and incident.weights.get(found.tensor)
        if incident is not None and found.phase == "weights" and was_finite:
            return explain_update(self._rerun.models, incident, found)
        if in_gradients and not found.tensor:
            found.tensor = self._only_gradient(armed, culprit)
        self._name_accumulated(found, culprit)
        self._answers.note_overwritten(found)
        growth = growth_of(self._rerun.models, self._incident)
        if found.cause == "range overflow" and growth:
            found.cause = "divergence"
            found.evidence.insert(0, growth)
        sample.find(found, culprit, self._rerun, place, self.may_run)
        return found

    def _last(self) -> int:
        return len(self._rerun.calls) - 1

    def _culprit(self, outcome: Outcome) -> tuple[Culprit | None, bool]:
        """What the bad values of a replay began with; whether in gradients alone."""
        table = outcome.table
        assert table is not None
        if outcome.bad_outputs:
            targets = outcome.bad_outputs
        elif outcome.bad_gradients:
            targets = [outcome.gradients[name] for name in outcome.bad_gradients]
        else:
            targets = [tensor for _, tensor in outcome.modules[:1]]
            if not targets and outcome.bad_buffers:
                named = {name: t for _, name, t in names_of(self._rerun.models)}
                targets = [named[name] for name in outcome.bad_buffers]
        sources = [each for tensor in targets for each in table.sources(tensor)]
        in_gradients = not outcome.bad_outputs and bool(outcome.bad_gradients)
        return culprit_of(sources), in_gradients

    def _name_accumulated(self, found: Explanation, culprit: Culprit) -> None:
        """Names the parameter whose gradients overflowed when they were added up."""
        variable = getattr(culprit.source, "variable", None)
        for _, name, tensor in names_of(self._rerun.models):
            if variable is not None and tensor is variable:
                found.tensor, found.module = name, module_of_parameter(name)

    def _only_gradient(self, outcome: Outcome, culprit: Culprit) -> str:
        """The one parameter whose gradient is bad because of a culprit, or ""."""
        table, names = outcome.table, []
        assert table is not None
        for name in outcome.bad_gradients:
            other = culprit_of(table.sources(outcome.gradients[name]))
            if other is not None and other.source is culprit.source:
                names.append(name)
        return names[0] if len(names) == 1 else ""
