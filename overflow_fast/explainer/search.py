"""The decision tree of a replayed step, on one rank or on several that go together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ..guard.report.causes import DIVERGENCE, NOT_REPRODUCIBLE, UNKNOWN
from ..guard.report.explanation import (
    NOT_THE_LOSS,
    OVERWRITTEN,
    Explanation,
    Sample,
)
from ..scanner.modules import module_of_parameter
from ..torch_internals.replaying import (
    no_dispatch,
)
from . import bad_step as notes
from .bad_step import BadStep
from .calls import Call, batch_size, name_outside, why_whole, with_stand_in
from .explain_origin import explain_root_op
from .named_tensors import names_of
from .op_rows import Leaf, Row, row_of
from .op_table import OpTable
from .op_trace import ModuleStack, OpCall, OpTrace
from .remedies.attempts import find_remedies
from .remedies.patches import ScaledWeights
from .remedies.trials import Failure, loss_of, seconds_for
from .replay_ranks import NotJoined
from .replayer import Observer, ReplayCheck, Replayer, ReplayResult, StepPart
from .rounding import explain_lost, lost_value, nearest_first
from .sentinel import Sentinel, outlier_in, sentinel_in
from .tensor_kinds import as_wide, floats_in, is_float, kinds_of
from .trace_back import OF_LEAVES, ForwardRows, RootOp, trace_back
from .weight_growth import find_growth
from .without_operation import WithoutOperation

# Which sample of the batch the bad value comes from.


_COMPUTED = ("forward", "backward")
_INDEX_KEYS = ("index", "indices", "idx", "sample_index", "sample_id", "id", "ids")


def find(
    found: Explanation,
    root_op: RootOp,
    replayer: Replayer,
    place: int,
    may_run: Callable[[int], bool],
    stays_within: bool = False,
) -> ReplayResult | None:
    """Adds the sample to an explanation, where it is one alone.

    A bad value in the batch tells by itself. Else the step is replayed with one half of
    the batch after another, and what is found with all others: a sample is named if the
    same operation fails with it alone, and the step is finite without it.

    Returns:
        The replay of the other samples, where they were run.
    """
    call = replayer.calls[place]
    size = batch_size(call)
    if size is None or found.phase == "weights":
        why = why_whole(call)
        if why:
            found.notes.append(f"The samples of the batch were not compared: {why}.")
        return None
    found.num_samples, others = size, None
    source = root_op.source
    if isinstance(source, Leaf):
        index = _only_bad(source.tensor, size) if source.kind == "batch" else None
    elif (
        size < 2
        or found.phase not in ("forward", "backward")
        or found.cause == NOT_REPRODUCIBLE.name
        or not replayer.ranks.can_cut(place)
    ):
        index = None
    elif not may_run(1):
        index = None
        found.notes.append(_NO_BUDGET)
    else:
        index, others = _halved(source, replayer, place, size, may_run, stays_within)
    if index is not None:
        dataset, outlier = _dataset_index(call, index, size), None
        is_of_size = found.is_overflow or found.lost_by is not None
        if is_of_size and sentinel_in(call, index) is None:
            outlier = outlier_in(call, index)
        text = "" if outlier is None else outlier.text
        found.sample = Sample.of(index, dataset, text)
    return others


def _only_bad(tensor: torch.Tensor | None, size: int) -> int | None:
    values = None if tensor is None else as_wide(tensor)
    if values is None or values.dim() == 0 or len(values) != size:
        return None
    bad = ~values.isfinite().reshape(size, -1).all(1)
    places = bad.nonzero().flatten().tolist()
    return places[0] if len(places) == 1 else None


def _halved(
    source: Row,
    replayer: Replayer,
    place: int,
    size: int,
    may_run: Callable[[int], bool],
    stays_within: bool,
) -> tuple[int | None, ReplayResult | None]:
    """The sample with which alone the same operation fails, and not without it.

    Returns:
        The sample, and the replay of the others, which is finite; else None.
    """

    def fails(rows: Sequence[int]) -> bool:
        """True if a part of the batch fails at the same place."""
        if not may_run(1):
            return False
        fails_again = None if _reads_bad(source) else _FailsAgain(source)
        observers = [] if fails_again is None else [fails_again]
        part = StepPart(place, tuple(rows), has_table=fails_again is None)
        result = replayer.run(part, observers=observers)
        is_bad = stays_within or result.is_forward or result.is_in_gradients
        is_bad = is_bad or bool(result.bad_buffers)
        if result.error is not None or not is_bad:
            return False
        if fails_again is not None:
            return fails_again.is_seen
        again = None if stays_within else result.root_op(replayer.models)
        other = None if again is None else again.source
        return isinstance(other, Row) and other.place == source.place

    first, last = _guesses(source, size) or (None, None)
    if last is not None and last != first and fails([last]):
        return None, None  # as it did among the others: there are several
    left = [] if first is None else [first]
    if not left or not fails(left):
        left = list(range(size))
    while len(left) > 1:
        if not may_run(1):
            return None, None
        half = left[: len(left) // 2]
        is_in_half = fails(half)
        left = half if is_in_half else left[len(half) :]
        is_one = len(left) == 1 and not is_in_half  # which has not been run alone
        if is_one and not fails(left):
            return None, None
    if not may_run(1):
        return None, None
    rows = with_stand_in(left[0], size)
    observers = [_FailsAgain(source)] * stays_within
    part = StepPart(place, rows, has_table=False)
    others = replayer.run(part, observers=observers)
    is_finite = others.is_clean and not any(each.is_seen for each in observers)
    return (left[0], others) if is_finite else (None, None)


def _guesses(source: Row, size: int) -> tuple[int, int] | None:
    """The samples that the indices of the first and last bad value point to."""
    details = source.details
    if details is None or not details.first_index or not details.outputs:
        return None
    length = details.outputs[0].shape[0]
    if length % size or not details.last_index:
        return None
    each = length // size
    return details.first_index[0] // each, details.last_index[0] // each


def _reads_bad(source: Row) -> bool:
    """True if an operation may have read non-finite values, such as those of a mask."""
    return source.details is None or source.details.has_bad_inputs


class _FailsAgain(Observer):
    """Sees whether an operation makes non-finite values of finite ones in a replay.

    Looks at what runs at its place alone, which takes less than a table of all.

    Attributes:
        is_seen: It does.
    """

    def __init__(self, row: Row) -> None:
        self._row = row
        self.is_seen = False

    def observing(
        self, models: Mapping[str, nn.Module]
    ) -> AbstractContextManager[object]:
        """Sees the operations that run within."""
        return OpTrace(models, self)

    def run(self, op: OpCall, modules: ModuleStack) -> Any:
        """Runs an operation; see `OpObserver`."""
        if self.is_seen or op.name != self._row.name:
            return op.run()
        is_finite = not any(map(kinds_of, op.read()))
        output = op.run()
        if is_finite and row_of(op, modules).place == self._row.place:
            with torch.no_grad():
                written = [*op.fresh(output), *op.written]
                self.is_seen = any(map(kinds_of, floats_in(written)))
        return output

    def on_module(self, name: str, values: Any, is_given: bool) -> None:
        """See `OpObserver`."""


def _dataset_index(call: Call, index: int, size: int) -> int | None:
    """The sample's index in the dataset, where a key of the batch is called that."""
    for name, path, tensor in call.places():
        key = path[-1].value if path else name
        is_index = key in _INDEX_KEYS and not is_float(tensor)
        if is_index and tensor.dim() == 1 and len(tensor) == size:
            return int(tensor[index])
    return None


_NO_BUDGET = (
    "The samples of the batch were not compared: the budget, of forwards or of time, "
    "was spent."
)
_NOT_TRIED = (
    "No remedy was tried: the step writes to {}, which could not be put back to what "
    "it was before, and holds non-finite values."
)
_BY_ITSELF = "A replay is finite without a remedy, too: {}."
_BEHIND = (
    "The program's own lines between backward and the optimizer's step were run again, "
    "too: the gradients are finite before them and non-finite behind them."
)
_ENDS_FINITE = "The {} is finite all the same: what follows leaves these values out."
_REACHES_NO_WEIGHT = "The gradients of all parameters are finite all the same."
# How well a rank can say where bad values began, by what it found.
_NOTHING, _FROM_OTHERS, _FROM_OUTSIDE, _HELD, _IN_BACKWARD, _IN_FORWARD = range(6)


class Search:
    """One explanation in the making.

    Args:
        replayer: Runs the step; it is not entered yet.
        incident: What a guard saw; None where nobody watched.
        budget: How many forwards it may run; see `find_remedies` for remedies.
        checkpoints: Files of weights to try where weights are bad, the newest last.
        artifact_bytes: How many bytes of tensors its artifacts may have; 0 for none.
        replay_check: Compares the first run with the step; None where nobody watched.
    """

    def __init__(
        self,
        replayer: Replayer,
        incident: BadStep | None,
        budget: int,
        checkpoints: Sequence[str | os.PathLike[str]],
        artifact_bytes: int,
        replay_check: ReplayCheck | None,
    ) -> None:
        self._replay_check = replay_check
        self._observers = [] if replay_check is None else [replay_check]
        self._checkpoints = checkpoints
        self._artifact_bytes = artifact_bytes
        self._replayer = replayer
        self._ranks = replayer.ranks
        self._incident = incident
        self._budget = budget
        self._begin = time.perf_counter()
        self._first: ReplayResult | None = None
        self._lost: Row | None = None
        self._sentinel: Sentinel | None = None
        self._others: ReplayResult | None = None
        self._changed: list[str] = []  # by a replay, and not put back
        self._set_meanwhile: list[str] = []  # numbers of the models, by the step alone

    @property
    def _without_operation(self) -> WithoutOperation:
        """The explanations without an operation."""
        given = self._replayer, self._incident, self.may_run, self._replay_check
        return WithoutOperation(*given, self._changed, self._set_meanwhile)

    @property
    def _within(self) -> str | None:
        """The module whose bad values the guard saw; None where it was no module's."""
        incident = self._incident
        is_of_call = incident is not None and incident.kind in ("input", "output")
        return incident.module if incident is not None and is_of_call else None

    def may_run(self, forwards: int = 1) -> bool:
        """True if the budget allows so many forwards more."""
        left = self._budget - self._replayer.num_forwards
        return left >= forwards and self._has_time()

    def _has_time(self) -> bool:
        seconds = time.perf_counter() - self._begin
        step = 0.0 if self._first is None else self._first.seconds
        return seconds < seconds_for(step)

    def run(self) -> Explanation:
        """Replays, and finds the explanation or follows the rank that does."""
        with self._replayer:
            found = self._lead() if self._ranks.is_leader else self._follow()
        if self._ranks.is_leader:
            found.notes += self._replayer.state.problems
            name = name_outside(self._replayer.calls)
            if name and notes.OUTSIDE_LOSS in found.notes:  # some of it was
                place = found.notes.index(notes.OUTSIDE_LOSS)
                text = notes.outside_text(name)
                found.notes[place] = f"{NOT_THE_LOSS} with it: {text}."
        return found

    def _lead(self) -> Explanation:
        first = self._first = self._replayer.run(observers=self._observers)
        self._changed = self._replayer.state.changed_around()
        self._set_meanwhile = self._replayer.state.set_meanwhile()
        if first.error is not None:
            return self._without_operation.failed(first.error)
        incident = self._incident
        is_inside = incident is not None and (
            not incident.reaches_loss or incident.kind in ("input", "output")
        )
        without = self._without_operation
        if incident is None and first.is_clean and self._ranks.is_alone:
            hidden = self._hidden(first)
            if hidden is not None:
                return hidden
        if (first.is_clean and not is_inside) or without.is_forward_finite(first):
            return without.clean(first)
        place = first.bad_call if first.bad_call >= 0 else len(self._replayer.calls) - 1
        part = StepPart(place, looks_back=True, has_calls=True)
        return self._explained(place, self._replayer.run(part))

    def _hidden(self, first: ReplayResult) -> Explanation | None:
        """The explanation of a finite forward within which values were not finite.

        None where there were none; it has a cause where the output is wrong by them.
        """
        if first.has_backward or first.losses or not self.may_run():
            return None
        from .hidden import find_hidden  # most replays need none of it

        place = len(self._replayer.calls) - 1
        hidden = find_hidden(self._replayer, place)
        if hidden is None:
            return None
        if hidden.is_wrong:
            self._try_remedies(hidden.found, hidden.root_op, hidden.traced, place)
        return hidden.found

    def _follow(self) -> Explanation:
        """Does what the rank that leads orders, until it ends, or this one leads."""
        while not isinstance(order := self._ranks.receive(), Explanation):
            observers = self._observers if self._first is None else []
            result = self._replayer.follow(order, observers)
            self._first = self._first or result
            step = order.step
            if step.traced >= 0 and step.rows is None and not order.patches:
                return self._explained(step.traced, result)
        return order

    def _explained(self, place: int, traced: ReplayResult) -> Explanation:
        """Explains a replay with a table, on the rank that knows best."""
        if traced.error is not None:
            failed = self._without_operation.failed(traced.error)
            return failed if self._ranks.is_leader else self._follow()
        root_op, failure = None, None
        try:
            root_op = traced.root_op(self._replayer.models, self._within)
        except Exception as error:  # the others wait for this rank's claim
            failure = error
        if not self._ranks.elect(_claim(root_op)):
            return self._follow()
        if failure is not None:
            raise failure
        assert self._first is not None
        is_gone = self._first.is_forward and not traced.is_forward
        if root_op is None or (is_gone and self._ranks.is_alone):
            return self._without_operation.not_in_eager(self._first, traced)
        found = self._explain_origin(root_op, traced, self._replayer.calls[place])
        assert traced.table is not None
        self._find_lost_value(found, root_op, traced.table)
        if traced.is_in_gradients and not traced.bad_gradients:
            found.notes.append(_REACHES_NO_WEIGHT)
        self._name_ranks(found)
        self._keep_call(found, root_op)
        check = self._replay_check
        difference = None if check is None else check.difference()
        if difference is not None:
            names = self._set_meanwhile
            why = f"; {notes.set_text(names)}" if names else ""
            text = f"The replay is not the same as the step: {difference}{why}."
            found.notes.append(text)
        try:
            if found.is_overflow:
                self._test_growth(found)
            within = traced.is_clean
            others = find(found, root_op, self._replayer, place, self.may_run, within)
            self._others = None if others is None else others.held()
            self._find_sentinel(found, place)
            self._compare_batch(found)
            self._try_remedies(found, root_op, traced, place)
        except NotJoined as error:  # the operation is known all the same
            self._ranks.is_broken = True
            found.notes.append(str(error))
        return found

    def _explain_origin(
        self, root_op: RootOp, traced: ReplayResult, call: Call
    ) -> Explanation:
        assert traced.table is not None
        rows = ForwardRows(traced.table)
        incident = self._incident
        # Where a module was seen to return it, it arose in the forward for sure.
        is_seen = incident is not None and incident.kind in ("input", "output")
        in_gradients = traced.is_in_gradients and not is_seen
        source, before = root_op.source, traced.num_before
        if before is not None and isinstance(source, Row) and source.index >= before:
            found = explain_root_op(root_op, rows, False, call)
            found.phase = "optimizer"
            found.notes.append(_BEHIND)
            return found
        found = explain_root_op(root_op, rows, in_gradients, call)
        roots = {prefix.rstrip(".") for prefix in self._replayer.models}
        ends_bad = is_seen and incident is not None and incident.module in roots
        is_hidden = found.phase == "forward" and not traced.is_forward
        if is_seen and is_hidden and not ends_bad:
            if call.has_backward is False and isinstance(source, Row):
                from .hidden import tell_hidden

                told = tell_hidden(self._replayer, source, traced.table)
                found.evidence.insert(1, told)
                return found
            is_read = traced.is_in_gradients
            end = "loss" if call.returns_loss else "model's output"
            text = _ENDS_FINITE.format(end)
            found.notes.append(text + " Backward runs through them." * is_read)
        was_finite = incident is not None and incident.past.weights.get(found.tensor)
        if incident is not None and found.phase == "weights" and was_finite:
            from .optimizer_step import explain_update  # of weights alone

            return explain_update(self._replayer.models, incident, found)
        if in_gradients and not found.tensor:
            found.tensor = self._only_gradient(traced, root_op)
        self._name_accumulated(found, root_op)
        if any(each.is_overwritten() for each in self._replayer.calls):
            found.notes.append(OVERWRITTEN)
        return found

    def _find_lost_value(
        self, found: Explanation, root_op: RootOp, table: OpTable
    ) -> None:
        """Finds the rounding that made an operation undefined, if it was one."""
        row = root_op.source
        calls = table.undefined.get(row, []) if isinstance(row, Row) else []
        table.undefined.clear()
        lost = None
        for some in nearest_first(calls) if calls else ():
            if not self._has_time():
                break
            with no_dispatch(), torch.no_grad():
                lost = lost_value(some) or lost
            if lost is None or lost.row is not None or lost.is_steady:
                break
        if lost is not None:
            explain_lost(lost, found)
            self._lost = lost.row

    def _find_sentinel(self, found: Explanation, place: int) -> None:
        """Finds a number of the failing sample that looks like a placeholder."""
        if found.sample is None or found.phase not in _COMPUTED:
            return
        sentinel = sentinel_in(self._replayer.calls[place], int(found.sample))
        if sentinel is not None:
            self._sentinel = sentinel
            found.evidence.insert(1, sentinel.text)

    def _compare_batch(self, found: Explanation) -> None:
        """Adds that the whole batch is larger than those before, where size matters."""
        is_of_size = found.is_overflow or found.lost_by is not None
        if self._incident is None or found.sample is not None or not is_of_size:
            return
        text = self._incident.past.outgrown()
        found.evidence[:0] = [text] * bool(text)

    def _test_growth(self, found: Explanation) -> None:
        """Tests whether it is the size of the weights: they are scaled back."""
        growth = find_growth(self._replayer.models, self._incident)
        if growth is None:
            return
        found.evidence.insert(0, growth.text)
        if not self.may_run():
            return
        result = self._replayer.run(patches=[ScaledWeights(growth.factors)])
        if result.error is None and not result.is_forward:
            found.cause, found.reason = DIVERGENCE.name, growth.text
            found.evidence[0] += "; with weights as large as before it is finite"
            found.evidence[1:1] = growth.order

    def _keep_call(self, found: Explanation, root_op: RootOp) -> None:
        """Keeps the operation and its module as scripts, where artifacts are wanted."""
        source, most = root_op.source, self._artifact_bytes
        if not isinstance(source, Row) or source.call is None:
            return
        from .repro import module_repro_of, repro_of  # for runs that keep evidence

        found.artifacts += repro_of(source.call, found, most)
        if source.module_call is not None:
            call = source.module_call
            found.artifacts += module_repro_of(call, found, most - found.artifact_bytes)

    def _try_remedies(
        self, found: Explanation, root_op: RootOp, traced: ReplayResult, place: int
    ) -> None:
        assert traced.table is not None and self._first is not None
        if isinstance(root_op.source, Row) and traced.carried:
            names = ", ".join(f"`{name}`" for name in traced.carried)
            found.notes.append(_NOT_TRIED.format(names))
            return
        failure = Failure.of(found, root_op, traced.table, place)
        failure.checkpoints = self._checkpoints
        failure.lost = self._lost
        failure.sentinel = self._sentinel
        failure.others = self._others
        failure.stays_within, failure.within = traced.is_clean, self._within
        if self._incident is not None:
            losses = self._incident.past.finite_losses
            before = losses if loss_of(self._first) is None else losses[:-1]
            failure.usual_loss = max(before, default=None)
            failure.optimizers = self._incident.optimizers
        find_remedies(failure, self._replayer, self._budget, self._first.seconds)
        changed = self._changed
        found_remedy = any(each.is_recommended for each in found.remedies)
        if changed and found_remedy and self._replayer.run().is_clean:
            found.remedies = []
            found.notes.append(_BY_ITSELF.format(notes.effects_text(changed)))

    def _name_ranks(self, found: Explanation) -> None:
        """Names the rank on which it began, if it began on one."""
        claims = self._ranks.claims.values()
        if max(claims) == _FROM_OTHERS and min(claims) != _FROM_OTHERS:
            found.cause = UNKNOWN.name  # what one rank gave is not known
        elif not self._ranks.is_alone and max(claims) > _FROM_OTHERS:
            found.rank = self._ranks.rank
            alike = min(max(claims), _IN_BACKWARD)  # what was passed on is no origin
            found.num_ranks = sum(each >= alike for each in claims)

    def _name_accumulated(self, found: Explanation, root_op: RootOp) -> None:
        """Names the parameter whose gradients overflowed when they were added up."""
        variable = getattr(root_op.source, "variable", None)
        for _, name, tensor in names_of(self._replayer.models):
            if variable is not None and tensor is variable:
                found.tensor = name
                is_in_hook = isinstance(root_op.source, Row) and root_op.source.in_hook
                found.module = "" if is_in_hook else module_of_parameter(name)

    def _only_gradient(self, result: ReplayResult, root_op: RootOp) -> str:
        """The one parameter whose gradient is bad because of an origin, or ""."""
        table, names = result.table, []
        assert table is not None
        for name in result.bad_gradients:
            other = trace_back(table.sources(result.gradients[name]))
            if other is not None and other.source is root_op.source:
                names.append(name)
        return names[0] if len(names) == 1 else ""


def _claim(root_op: RootOp | None) -> int:
    source = None if root_op is None else root_op.source
    if isinstance(source, Row):
        if source.is_communication:
            return _FROM_OTHERS
        return _IN_BACKWARD if source.in_backward else _IN_FORWARD
    if isinstance(source, Leaf):
        return _HELD if source.kind in OF_LEAVES else _FROM_OUTSIDE
    return _NOTHING


# Non-finite values inside of a finite step: masked, clamped or divided away again.


_MOST = 8  # explanations; chosen, not measured


def find_masked_nonfinite(replayer: Replayer) -> list[Explanation]:
    """Replays a step and finds the operations that made non-finite values in it.

    Looks at the last of the step's forwards and its backward. Constants, such as a mask
    of -inf, and what was bad before the step are left out. Everything is put back
    afterwards. Incurs a CPU-GPU sync for each operation on a device.

    Args:
        replayer: Runs the step; it is not entered yet.

    Returns:
        One explanation for each line of code and operation, in order, at most eight.
        None where the replay was ended; see `Replayer.stopped`.
    """
    with replayer:
        result = replayer.run(StepPart(traced=len(replayer.calls) - 1))
    table = result.table
    if table is None or result.error is not None:
        return []
    rows = ForwardRows(table)
    found: dict[tuple[object, ...], Explanation] = {}
    for row in table.rows:
        place = row.name, row.module, row.sites[:1]
        if row.makes_bad and place not in found and len(found) < _MOST:
            found[place] = explain_root_op(RootOp(row, [row]), rows, row.in_backward)
    return list(found.values())
