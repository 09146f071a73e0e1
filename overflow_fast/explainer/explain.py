"""From an alarm to its explanation: what can be said at once, else by a replay."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..guard.explaining import USE_RUN
from ..guard.options import BUDGET
from ..guard.process import world_size
from ..guard.report.causes import NOT_REPRODUCIBLE, RANGE_OVERFLOW, UNKNOWN
from ..guard.report.explanation import Artifact, Explanation
from ..guard.step_keeper import GRAPH, Ambient
from ..guard.undo.step_start import StepStart
from ..scanner.modules import (
    gradient_taker,
    module_of_parameter,
    named_modules,
    step_of,
)
from ..scanner.tensors import devices_of
from ..scanner.text import dtype_name, error_line
from ..torch_internals.compiler import (
    has_compiled,
)
from ..torch_internals.tensor_internals import sparse_indices, sparse_values
from .bad_step import ALL_BAD, NOT_BEHIND, STOPPED, STOPPED_FUNCTION, BadStep
from .calls import Call
from .explain_origin import first_bad_weight, looked_up
from .named_tensors import state_by_name
from .own_lines import (
    GradientCode,
    LossCall,
    LossLine,
    advice,
    find_gradient_code,
    find_loss_line,
)
from .remedies.attempts import find_remedies
from .remedies.trials import Failure
from .replay_ranks import BEGIN, NotJoined, RankCoordinator
from .replayer import Observer, ReplayCheck, Replayer, StepPart
from .search import Search
from .tensor_kinds import bad_names

_OWN_LINES = (
    "The program's own lines of the loss, up to {}, were run again, too, since it lies "
    "outside of the models."
)
_NOT_ALONE = (
    "The step was not replayed: there are several ranks, which do not decide together. "
    "Collectives in it would wait for the others. Pass process_group= to the guard."
)
_TAKEN = (
    "The step was not replayed: its forward was finite, and a second backward would "
    "write to the gradients that {} keeps."
)
_NO_CALLS = (
    "The step was not replayed: no forward of this step was captured{}. Call the model "
    "and the loss within `guard.run(lambda: loss)`."
)


def investigate(
    models: Mapping[str, nn.Module],
    calls: Sequence[Call],
    incident: BadStep | None = None,
    *,
    start: StepStart | None = None,
    budget: int = BUDGET,
    ranks: RankCoordinator | None = None,
    checkpoints: Sequence[str | os.PathLike[str]] = (),
    artifact_bytes: int = 0,
    replay_check: ReplayCheck | None = None,
) -> Explanation:
    """Replays a step and says why it is not finite. Everything is put back afterwards.

    Args:
        models: The models, by what their modules' names begin with.
        calls: The calls of the step.
        incident: What a guard saw; None where nobody watched.
        start: The models as they were when the step began; None for now.
        budget: How many forwards it may run; as many again for remedies.
        ranks: The ranks that replay it together, all of which call this; None for this
            one alone.
        checkpoints: Files of weights to try where weights are bad, the newest last.
        artifact_bytes: How many bytes of tensors its artifacts may have; 0 for none.
        replay_check: Compares the first replay with the step; None for nothing.
    """
    begin = time.perf_counter()
    ranks = RankCoordinator() if ranks is None else ranks
    found, replayer = Explanation(), None
    try:
        inner = _inner_of(incident) if ranks.is_alone else None
        keeps_calls = artifact_bytes > 0
        replayer = Replayer(models, calls, start, ranks, keeps_calls, inner)
        search = Search(
            *(replayer, incident, budget, checkpoints, artifact_bytes, replay_check)
        )
        if ranks.is_leader:
            known = (
                None if incident is None else _without_replay(models, incident, start)
            )
            if known is not None and known.phase == "weights":
                known.evidence += _lookups(models, known.tensor, calls)
            known = known or _not_replayable(calls, incident, ranks)
            known = known or _without_backward(models, incident)
            if known is None:
                ranks.order(BEGIN)
            found = known or search.run()
            if known is not None and checkpoints and calls and ranks.is_alone:
                with replayer:
                    failure = Failure(found, None, 0, checkpoints=checkpoints)
                    find_remedies(failure, replayer, budget, 0.0)
        elif ranks.receive() == BEGIN:
            found = search.run()
    except NotJoined as error:
        ranks.is_broken = True
        found.notes.append(str(error))
    except Exception as error:
        found.notes.append(f"The explanation ended early: {error_line(error)}.")
    num_replays = 0 if replayer is None else replayer.num_forwards
    limits = budget, checkpoints, artifact_bytes
    # The result of the rank that led has its line.
    stopped = "" if replayer is None else replayer.stopped
    if stopped and ranks.is_alone and any(call.forwards for call in calls):
        calls = [each for call in calls for each in call.forwards or [call]]
        alone = _OwnLines(models, calls, incident, start, limits, replay_check)
        found = alone.explained_alone(stopped)
        num_replays += alone.num_forwards
    elif found is not ranks.result and _asks_for_loss(found, calls):
        step = _LossStep(models, calls, incident, start, limits, replay_check)
        found = step.explained(found, may_run=ranks.is_alone and world_size() == 1)
        num_replays += step.num_forwards
    if found is not ranks.result and world_size() == 1:
        behind = _GradientStep(models, calls, incident, start, limits)
        found = behind.explained(found)
        num_replays += behind.num_forwards
    own = found.artifacts
    if artifact_bytes and calls:
        own += _saved(models, calls, start, artifact_bytes, found)
    if found is not ranks.result:  # which has the numbers of the rank that led
        found.replays = num_replays
        found.seconds = time.perf_counter() - begin
    result = ranks.finish(found)
    result.artifacts = own
    return result


def _inner_of(incident: BadStep | None) -> str | None:
    """The module at whose outputs a bad gradient arrived, if that was the alarm."""
    is_gradient = incident is not None and incident.kind == "grad_output"
    # Hooks would have compiled code compiled anew.
    return incident.module if incident and is_gradient and not has_compiled() else None


def _with_advice(found: Explanation, text: str) -> Explanation:
    """The explanation; the note that asks for the loss ends with what to change."""
    for place, note in enumerate(found.notes):
        if USE_RUN in note:
            found.notes[place] = f"{note} {text}".rstrip()
            break
    return found


def _asks_for_loss(found: Explanation, calls: Sequence[Call]) -> bool:
    """True if the loss may tell more, and was not replayed."""
    if any(call.returns_loss for call in calls):
        return False
    is_unknown = any(USE_RUN in note for note in found.notes)
    return is_unknown or (found.phase == "backward" and bool(calls))


class _OwnLines:
    """A step that the program's own lines explain, which are run again, too.

    Args:
        models: See `investigate()`, as all others.
        calls: The calls of the step.
        incident: What a guard saw.
        start: The models as they were when the step began.
        limits: The budget, the checkpoints and the bytes of artifacts.
        replay_check: Compares a replay with the step, or None.

    Attributes:
        num_forwards: How many forwards were run.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        calls: Sequence[Call],
        incident: BadStep | None,
        start: StepStart | None,
        limits: tuple[int, Sequence[str | os.PathLike[str]], int],
        replay_check: ReplayCheck | None = None,
    ) -> None:
        self._models, self._calls, self._start = models, calls, start
        self._incident, self._replay_check = incident, replay_check
        self._limits = limits
        self.num_forwards = 0
        self._stopped = ""

    def explained_alone(self, stopped: str) -> Explanation:
        """The explanation of the models' forwards, of a function that was stopped.

        Args:
            stopped: What it was stopped by.
        """
        replayer = self._replayer(self._calls)
        found = self._searched(replayer)
        if not replayer.stopped:  # else its note says what the forwards were stopped by
            found.notes = [each for each in found.notes if USE_RUN not in each]
            found.notes.insert(0, STOPPED_FUNCTION.format(stopped))
        return found

    def _replayer(self, calls: Sequence[Call]) -> Replayer:
        keeps_calls, inner = self._limits[2] > 0, _inner_of(self._incident)
        given = self._models, calls, self._start
        return Replayer(*given, keeps_calls=keeps_calls, inner=inner)

    def _searched(self, replayer: Replayer) -> Explanation:
        """The explanation of what a replayer runs."""
        found = Search(
            *(replayer, self._incident, *self._limits), self._replay_check
        ).run()
        self.num_forwards += replayer.num_forwards
        return found


class _GradientStep(_OwnLines):
    """A step whose gradients code behind backward has written to."""

    def explained(self, found: Explanation) -> Explanation:
        """The explanation with those lines, where they are it; else what was found."""
        if ALL_BAD not in found.notes:
            return found
        with contextlib.suppress(Exception):
            code = find_gradient_code()
            own = None if code is None else self._replayed(code)
            if own is not None:
                return own
        if self.num_forwards:
            found.notes[found.notes.index(ALL_BAD)] = NOT_BEHIND
        return found

    def _replayed(self, code: GradientCode) -> Explanation | None:
        keeps_calls = self._limits[2] > 0
        given = self._models, self._calls, self._start
        replayer = Replayer(*given, keeps_calls=keeps_calls, tail=code)
        with replayer:
            result = replayer.run()
        self.num_forwards += replayer.num_forwards
        names = {} if self._incident is None else self._incident.gradients
        if result.error is not None or set(result.bad_gradients) != set(names):
            return None
        replayer = Replayer(*given, keeps_calls=keeps_calls, tail=code)
        found = self._searched(replayer)
        return found if found.phase == "optimizer" else None


class _LossStep(_OwnLines):
    """A step whose loss is computed by the program's own lines."""

    def explained(self, found: Explanation, *, may_run: bool) -> Explanation:
        """The explanation with those lines; else what was found, with what to change.

        Args:
            found: What was found without them.
            may_run: False if other ranks would not run the lines, too.
        """
        try:
            line = find_loss_line()
        except Exception:
            line = None  # of source code that is not like Python's
        if line is None:
            return found
        with contextlib.suppress(Exception):
            own = self._replayed(line) if may_run else None
            if own is not None:
                return own
        if self._stopped:
            found.notes.append(STOPPED.format(self._stopped))
        text = advice(line, list(self._models.values()))
        return _with_advice(found, text)

    def _replayed(self, line: LossLine) -> Explanation | None:
        """The explanation of a replay of the lines, if that is seen to be the step."""
        if not self._may_run() or not self._models:
            return None
        loss_call = LossCall(line, self._models, self._calls)
        is_same = self._is_same(loss_call)
        if not is_same and loss_call.leave_out(loss_call.check.num_forwards):
            is_same = self._is_same(loss_call)
        if not is_same:
            return None
        found = self._searched(self._replayer(loss_call.calls))
        given = self._incident, self._start, self._limits
        behind = _GradientStep(self._models, loss_call.calls, *given)
        found = behind.explained(found)
        self.num_forwards += behind.num_forwards
        if found.cause == NOT_REPRODUCIBLE.name and not loss_call.is_only_loss:
            return None  # another loss may have been bad
        if len(loss_call.calls) > 1:  # others' gradients are as bad with any remedy
            found.remedies = [each for each in found.remedies if each.is_recommended]
        found.notes.append(_OWN_LINES.format(loss_call.place))
        return None if found.cause == UNKNOWN.name else found

    def _may_run(self) -> bool:
        incident = self._incident
        if self._start is None or incident is None:
            return False
        is_partial = incident.hidden_by or incident.num_dropped or incident.is_late
        has_stand_ins = any(call.has_stand_ins for call in self._calls)
        return not (is_partial or has_stand_ins)

    def _is_same(self, loss_call: LossCall) -> bool:
        """Replays the lines; True if that was the step."""
        replayer, check = self._replayer(loss_call.calls), loss_call.check
        observers: list[Observer] = [check]
        if self._replay_check is not None:
            observers.append(self._replay_check)
        with replayer:
            last = len(loss_call.calls) - 1 if has_compiled() else -1
            part = StepPart(traced=last)  # compiled code runs without hooks
            result = replayer.run(part, observers=observers)
            changed = replayer.state.changed_around()
        self.num_forwards += replayer.num_forwards
        self._stopped = replayer.stopped
        is_alike = check.is_given_alike and check.has_same_graph
        if result.error is not None or changed or not is_alike:
            return False
        if check.has_same_loss:
            return True
        is_other = self._replay_check is not None and self._replay_check.difference()
        return bool(is_other) and bool(self._calls)


def _saved(
    models: Mapping[str, nn.Module],
    calls: Sequence[Call],
    start: StepStart | None,
    most: int,
    found: Explanation,
) -> list[Artifact]:
    """The files of the step, or a note on why there are none."""
    from .saved_step import saved_step  # for runs that keep evidence alone

    try:
        pairs = [] if start is None else start.pairs()
        return saved_step(models, calls, pairs, most - found.artifact_bytes)
    except Exception as error:
        found.notes.append(f"The step was not saved: {error_line(error)}.")
        return []


def _lookups(
    models: Mapping[str, nn.Module], name: str, calls: Sequence[Call]
) -> list[str]:
    """Describes where batches hold the indices of a bad embedding's bad rows."""
    for prefix, model in models.items():
        owner = dict(named_modules(model)).get(
            module_of_parameter(name.removeprefix(prefix))
        )
        if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
            return [text for call in calls for text in looked_up(owner.weight, call)]
    return []


def _not_replayable(
    calls: Sequence[Call], incident: BadStep | None, ranks: RankCoordinator
) -> Explanation | None:
    if ranks.is_alone and world_size() > 1:
        return Explanation(notes=[_NOT_ALONE])
    if calls:
        return None
    why = "" if incident is None else incident.hidden_by
    if why == GRAPH:
        return Explanation(notes=[f"The step was not replayed: it {why}."])
    return Explanation(notes=[_NO_CALLS.format(f": it {why}" * bool(why))])


def _without_backward(
    models: Mapping[str, nn.Module], incident: BadStep | None
) -> Explanation | None:
    """The explanation where only a backward, which cannot be run again, was bad."""
    is_forward = incident is None or incident.kind not in ("grad_output", "gradient")
    engine = "" if is_forward else gradient_taker(models.values())
    if not engine:
        return None
    return Explanation(notes=[_TAKEN.format(engine)])


def _explain_written_weight(name: str) -> Explanation:
    """The explanation of a weight that the forward wrote to, without a copy of it."""
    text = f"the step's forward has written to {name}, which is non-finite now"
    note = (
        f"The value of `{name}` before the step is not held: whether it was finite is "
        "not known, and the step was not replayed."
    )
    return Explanation(tensor=name, evidence=[text], notes=[note])


def _explain_sum(name: str, gradient: torch.Tensor) -> Explanation | None:
    """The explanation of a sparse gradient whose finite rows have a non-finite sum."""
    if gradient.layout is not torch.sparse_coo or gradient.is_coalesced():
        return None
    rows, total = sparse_values(gradient), gradient.coalesce()
    bad = ~total.values().isfinite().reshape(len(total.values()), -1).all(1)
    if not bool(rows.isfinite().all()) or not bool(bad.any()):
        return None
    index = total.indices()[:, bad][:, 0]
    of_index = (sparse_indices(gradient) == index[:, None]).all(0)
    place = ", ".join(map(str, index.tolist()))
    dtype, largest = rows.dtype, float(rows[of_index].abs().max())
    text = (
        f"{int(of_index.sum())} rows of the index {place} are finite, up to "
        f"{largest:.3g} in magnitude; their sum is not: "
        f"{dtype_name(dtype)}'s maximum is {torch.finfo(dtype).max:.5g}"
    )
    module = module_of_parameter(name)
    return Explanation(
        "backward", RANGE_OVERFLOW.name, module, tensor=name, evidence=[text]
    )


def _without_replay(
    models: Mapping[str, nn.Module], incident: BadStep, start: StepStart | None
) -> Explanation | None:
    """The explanation of weights that are bad: no replay is needed for it.

    Unless the step's forward has written to one, and its value of before is held.
    """
    if incident.kind == "gradient":
        sums = (_explain_sum(name, each) for name, each in incident.gradients.items())
        return next(filter(None, sums), None)
    if incident.kind not in ("weight", "optimizer_state"):
        return None
    found = first_bad_weight(models, "parameter")
    if found is not None and start is not None:
        named = state_by_name(models)
        weight = named[found.tensor]
        held = start.held(weight)
        if start.written_in_step(weight):
            if held is not None and not bad_names([("", held)], masks=False):
                return None
            if held is None:
                return _explain_written_weight(found.tensor)
    if found is not None and incident.past.weights.get(found.tensor):
        from .optimizer_step import explain_update  # of weights alone

        return explain_update(models, incident, found)
    if found is None and incident.kind == "optimizer_state":
        return Explanation(
            "optimizer", notes=["Which step made the optimizer's state is not known."]
        )
    return found


# `explain()`: says why a model's step is not finite, without a guard.


def explain(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., torch.Tensor] | None = None,
    *,
    budget: int = BUDGET,
    checkpoints: Sequence[str | os.PathLike[str]] = (),
) -> Explanation:
    """Runs a step of a model and says which operation makes it non-finite, and why.

    Runs forward and backward; gradients, buffers and random states are put back bit for
    bit, and nothing is stepped. Incurs a CPU-GPU sync for each operation on a device.

    Args:
        model: The model.
        batch: What the model is called with: a tuple or list of arguments, a dict of
            keyword arguments, or the one argument.
        loss: Takes the batch, or the model and the batch, calls the model and returns
            what to call `backward()` on. None: the loss that the model returns.
        budget: How many forwards it may run to explain, and to try remedies.
        checkpoints: Files of weights (`torch.save`, safetensors), the newest last. If
            weights are bad, the step is tried with those that are finite.

    Returns:
        The explanation; its `cause` is "not reproducible" if the step is finite.

    Raises:
        TypeError: If the model or the loss cannot be used.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> found = explain(model, torch.zeros(1, 2), lambda x: model(x).sum().log())
        >>> found.phase
        'forward'
    """
    function = step_of(model, loss)
    call = Call(function, batch, Ambient(model, devices_of([model])))
    call.returns_loss = loss is not None
    call.has_backward = True if loss is not None else None
    if torch.is_inference_mode_enabled():  # its tensors are saved for no backward
        call.has_backward = False
    return investigate({"": model}, [call], budget=budget, checkpoints=checkpoints)
