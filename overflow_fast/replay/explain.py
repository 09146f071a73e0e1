"""From an alarm to its explanation: what can be said at once, else by a replay."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from ..state.snapshot import Snapshot
from ..state.step_start import StepStart
from .bad_leaf import first_bad_weight
from .capture import GRAPH
from .explanation import Artifact, Explanation
from .incident import Incident
from .kept_call import KeptCall
from .kinds import bad_names
from .optimizer_step import explain_update
from .places import names_of
from .remedies.attempts import find_remedies
from .remedies.failure import Failure
from .rerun import Rerun
from .saved_step import saved_step
from .search import Search
from .team import BEGIN, NotJoined, Team, text_of
from .witness import Witness

BUDGET = 8
_NOT_ALONE = (
    "The step was not replayed: there are several ranks, which do not decide together. "
    "Collectives in it would wait for the others. Give the guard process_group=."
)
_NO_CALLS = (
    "The step was not replayed: no forward of it was kept{}. Call the model and the "
    "loss within `guard.run(lambda: loss)`."
)


def _has_peers() -> bool:
    """Tells whether a replay may meet collectives that other ranks would not join."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def investigate(
    models: Mapping[str, nn.Module],
    calls: Sequence[KeptCall],
    incident: Incident | None = None,
    *,
    start: StepStart | None = None,
    budget: int = BUDGET,
    team: Team | None = None,
    checkpoints: Sequence[str | os.PathLike[str]] = (),
    artifact_bytes: int = 0,
    witness: Witness | None = None,
) -> Explanation:
    """Replays a step and says why it is not finite. Everything is put back afterwards.

    Args:
        models: The models, by what their modules' names begin with.
        calls: The calls of the step.
        incident: What a guard saw; None where nobody watched.
        start: The models as they were when the step began; None for now.
        budget: How many forwards it may run; as many again for remedies.
        team: The ranks that replay it together, all of which call this; None for this
            one alone.
        checkpoints: Files of weights to try where weights are bad, the newest last.
        artifact_bytes: How many bytes of tensors its artifacts may have; 0 for none.
        witness: Compares the first replay with the step; None where nobody watched.
    """
    begin = time.perf_counter()
    team = Team() if team is None else team
    found, reruns = Explanation(), list[Rerun]()

    def replay() -> Explanation:
        with kept_state(models, calls, start, team) as state:
            reruns.append(Rerun(models, calls, state, team, artifact_bytes > 0))
            reruns[0].watched = witness
            search = Search(reruns[0], incident, budget, checkpoints, artifact_bytes)
            found = search.run()
        found.notes += state.not_restored() if team.leads else []
        return found

    try:
        if team.leads:
            known = (
                None if incident is None else _without_replay(models, incident, start)
            )
            known = known or _not_replayable(calls, incident, team)
            if known is None:
                team.order(BEGIN)
            found = known or replay()
            if known is not None and checkpoints and calls and team.is_alone:
                with kept_state(models, calls, start, team) as state:
                    reruns.append(Rerun(models, calls, state, team))
                    failure = Failure(found, None, 0, checkpoints=checkpoints)
                    find_remedies(failure, reruns[0], budget, 0.0)
        elif team.receive() == BEGIN:
            found = replay()
    except NotJoined as error:
        team.is_broken = True
        found.notes.append(str(error))
    except Exception as error:
        found.notes.append(f"The explanation ended early: {text_of(error)}.")
    own = found.artifacts
    if artifact_bytes and calls:
        own += _saved(models, calls, start, artifact_bytes, found)
    if found is not team.result:  # which has the numbers of the rank that led
        found.replays = sum(each.num_forwards for each in reruns)
        found.seconds = time.perf_counter() - begin
    result = team.finish(found)
    result.artifacts = own
    return result


def _saved(
    models: Mapping[str, nn.Module],
    calls: Sequence[KeptCall],
    start: StepStart | None,
    most: int,
    found: Explanation,
) -> list[Artifact]:
    """The files of the step, or a note on why there are none."""
    used = sum(t.nbytes for each in found.artifacts for t in each.tensors.values())
    try:
        pairs = [] if start is None else start.pairs()
        return saved_step(models, calls, pairs, most - used)
    except Exception as error:
        found.notes.append(f"The step was not saved: {text_of(error)}.")
        return []


def _not_replayable(
    calls: Sequence[KeptCall], incident: Incident | None, team: Team
) -> Explanation | None:
    if team.is_alone and _has_peers():
        return Explanation(notes=[_NOT_ALONE])
    if calls:
        return None
    why = "" if incident is None else incident.hidden_by
    if why == GRAPH:
        return Explanation(notes=[f"The step was not replayed: it {why}."])
    return Explanation(notes=[_NO_CALLS.format(f": it {why}" * bool(why))])


def kept_state(
    models: Mapping[str, nn.Module],
    calls: Sequence[KeptCall],
    start: StepStart | None,
    team: Team,
) -> Snapshot:
    """Keeps what is put back afterwards; raises on all ranks if one cannot."""
    state = Snapshot(models, start, variables_of(calls))
    error: Exception | None = None
    try:
        for call in calls:
            call.note_overwritten()
        state.take()
    except Exception as raised:
        error = raised
    try:
        team.check(error)
    except BaseException:
        state.restore()
        raise
    return state


def variables_of(calls: Sequence[KeptCall]) -> dict[str, Any]:
    """The variables that calls read, and their batches."""
    found: dict[str, Any] = {}
    for call in calls:
        found |= call.around() or {"batch": call.batch}
    return found


def _of_written(name: str) -> Explanation:
    """The explanation of a weight that the forward wrote to, without a copy of it."""
    text = f"the step's forward has written to {name}, which is non-finite now"
    note = (
        f"The value of `{name}` before the step is not held: whether it was finite is "
        "not known, and the step was not replayed."
    )
    return Explanation(tensor=name, evidence=[text], notes=[note])


def _without_replay(
    models: Mapping[str, nn.Module], incident: Incident, start: StepStart | None
) -> Explanation | None:
    """The explanation of weights that are bad: no replay is needed for it.

    Unless the step's forward has written to one, and its value of before is held.
    """
    if incident.kind not in ("weight", "optimizer_state"):
        return None
    found = first_bad_weight(models, "parameter")
    if found is not None and start is not None:
        named = {name: tensor for _, name, tensor in names_of(models)}
        weight = named[found.tensor]
        held = start.held(weight)
        if start.written_in_step(weight):
            if held is not None and not bad_names([("", held)], masks=False):
                return None
            if held is None:
                return _of_written(found.tensor)
    if found is not None and incident.weights.get(found.tensor):
        return explain_update(models, incident, found)
    if found is None and incident.kind == "optimizer_state":
        return Explanation(
            "optimizer", notes=["Which step made the optimizer's state is not known."]
        )
    return found
