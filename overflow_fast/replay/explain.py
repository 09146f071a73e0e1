"""The decision tree from an alarm to its explanation."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..core.restore import KeptState
from . import sample
from .answers import Answers
from .explanation import Artifact, Explanation
from .finding import explain_culprit, first_bad_weight, named_row
from .growth import growth_of
from .incident import Incident
from .kept_call import KeptCall
from .optimizer_step import explain_update
from .places import module_of_parameter, names_of
from .remedies.changes import ScaledWeights
from .remedies.search import Failure, find_remedies
from .repro import repro_of
from .rerun import Outcome, Rerun
from .rows import Row
from .saved_step import saved_step
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
    checkpoints: Sequence[str | os.PathLike[str]] = (),
    artifact_bytes: int = 0,
) -> Explanation:
    """Replays a step and says why it is not finite. Everything is put back afterwards.

    Args:
        models: The models, by what their modules' names begin with.
        calls: The calls of the step.
        incident: What a guard saw; None where nobody watched.
        start: Buffers and what was in them when the step began.
        budget: How many forwards it may run; as many again for remedies.
        checkpoints: Files of weights to try where weights are bad, the newest last.
        artifact_bytes: How many bytes of tensors its artifacts may have; 0 for none.
    """
    begin = time.perf_counter()
    found, rerun = Explanation(), None
    try:
        known = None if incident is None else _without_replay(models, incident)
        if known is not None:
            found = known
            if checkpoints and calls and not _has_peers():
                with KeptState(models, start) as state:
                    rerun = Rerun(models, calls, state)
                    failure = Failure(found, None, calls[0], checkpoints=checkpoints)
                    find_remedies(failure, rerun, budget, 0.0)
        elif _has_peers():
            found.notes.append(_NOT_ALONE)
        elif not calls:
            found.notes.append(
                "The step was not replayed: no forward of it was kept. Call the model "
                "and the loss within `guard.run(lambda: loss)`."
            )
        else:
            with KeptState(models, start) as state:
                rerun = Rerun(models, calls, state, artifact_bytes > 0)
                found = _Search(
                    rerun, incident, budget, checkpoints, artifact_bytes
                ).run()
                found.notes += state.lost
    except Exception as error:
        text = str(error).splitlines()
        found.notes.append(
            f"The explanation ended early: {type(error).__name__}: "
            f"{text[0][:120] if text else ''}."
        )
    if artifact_bytes and calls:
        found.artifacts += _saved(models, calls, start, artifact_bytes, found)
    found.replays = 0 if rerun is None else rerun.num_forwards
    found.seconds = time.perf_counter() - begin
    return found


def _saved(
    models: Mapping[str, nn.Module],
    calls: Sequence[KeptCall],
    start: Sequence[tuple[torch.Tensor, torch.Tensor]],
    most: int,
    found: Explanation,
) -> list[Artifact]:
    """The files of the step, or a note on why there are none."""
    used = sum(t.nbytes for each in found.artifacts for t in each.tensors.values())
    try:
        return saved_step(models, calls, start, most - used)
    except Exception as error:
        found.notes.append(f"The step was not saved: {type(error).__name__}: {error}.")
        return []


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

    def __init__(
        self,
        rerun: Rerun,
        incident: Incident | None,
        budget: int,
        checkpoints: Sequence[str | os.PathLike[str]],
        artifact_bytes: int,
    ) -> None:
        self._artifact_bytes = artifact_bytes
        self._rerun = rerun
        self._checkpoints = checkpoints
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
        if found.cause == "range overflow":
            self._test_growth(found)
        sample.find(found, culprit, self._rerun, place, self.may_run)
        call = culprit.source.call if isinstance(culprit.source, Row) else None
        if call is not None:
            found.artifacts += repro_of(call, found, self._artifact_bytes)
        self._try_remedies(found, culprit, rows, place)
        return found

    def _try_remedies(
        self, found: Explanation, culprit: Culprit, rows: ForwardRows, place: int
    ) -> None:
        source = culprit.source
        failure = Failure(
            found,
            None,
            self._rerun.calls[place],
            self._incident,
            checkpoints=self._checkpoints,
        )
        if isinstance(source, Row):
            failure.row = named_row(source, rows)
            failure.modules = rows.modules_from(failure.row)
        else:
            failure.bad = source.tensor
        find_remedies(failure, self._rerun, self._budget, self._step_seconds)

    def _test_growth(self, found: Explanation) -> None:
        """Tests whether it is the size of the weights: they are scaled back."""
        models = self._rerun.models
        growth = growth_of(models, self._incident)
        if growth is None:
            return
        found.evidence.insert(0, growth.text)
        if not self.may_run():
            return
        if not self._rerun.run(change=ScaledWeights(growth.factors)).bad_outputs:
            found.cause = "divergence"
            found.evidence[0] += "; with weights as large as before it is finite"

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
