"""The decision tree of a replayed step, on one rank or on several that go together."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from . import explanation, sample
from .capture import KeptCall
from .explanation import BadStep, Explanation
from .finding import explain_culprit
from .op_trace import Leaf, Row
from .optimizer_step import explain_update
from .outcome import Outcome
from .places import module_of_parameter, names_of
from .rank_coordinator import NotJoined
from .remedies.attempts import find_remedies
from .remedies.changes import ScaledWeights
from .remedies.trials import Failure, seconds_for
from .replayer import Rerun, difference_of
from .repro import module_repro_of, repro_of
from .slice import OF_LEAVES, Culprit, ForwardRows, culprit_in, culprit_of
from .without_operation import Answers, growth_of

_NO_RATE = (
    "A smaller learning rate was not tried: the weights before the last step are not "
    "held (a copy of the model)."
)
_NOT_TRIED = (
    "No remedy was tried: the step writes to {}, which could not be put back to what "
    "it was before, and holds non-finite values."
)
_BY_ITSELF = "A replay is finite without a remedy, too: {}."
# How well a rank can say where bad values began, by what it found.
_NOTHING, _FROM_OTHERS, _FROM_OUTSIDE, _HELD, _IN_BACKWARD, _IN_FORWARD = range(6)


class Search:
    """One explanation in the making.

    Args:
        rerun: Runs the step.
        incident: What a guard saw; None where nobody watched.
        budget: How many forwards it may run; see `find_remedies` for remedies.
        checkpoints: Files of weights to try where weights are bad, the newest last.
        artifact_bytes: How many bytes of tensors its artifacts may have; 0 for none.
    """

    def __init__(
        self,
        rerun: Rerun,
        incident: BadStep | None,
        budget: int,
        checkpoints: Sequence[str | os.PathLike[str]],
        artifact_bytes: int,
    ) -> None:
        self._checkpoints = checkpoints
        self._artifact_bytes = artifact_bytes
        self._rerun = rerun
        self._team = rerun.team
        self._incident = incident
        self._budget = budget
        self._begin = time.perf_counter()
        self._first: Outcome | None = None
        self._answers = Answers(rerun, incident, self.may_run)

    def may_run(self, forwards: int = 1) -> bool:
        """Tells whether the budget allows so many forwards more."""
        seconds = time.perf_counter() - self._begin
        step = 0.0 if self._first is None else self._first.seconds
        left = self._budget - self._rerun.num_forwards
        return left >= forwards and seconds < seconds_for(step)

    def run(self) -> Explanation:
        """Finds the explanation, or follows the rank that does."""
        return self._lead() if self._team.leads else self._follow()

    def _lead(self) -> Explanation:
        first = self._first = self._rerun.run(is_watched=True)
        self._answers.changed = self._rerun.state.changed_around()
        if first.error is not None:
            return self._answers.failed(first.error)
        is_inside = self._incident is not None and not self._incident.reaches_loss
        if first.is_clean and not is_inside:
            return self._answers.clean(first)
        place = first.bad_call if first.bad_call >= 0 else self._last()
        return self._explained(place, self._rerun.run(place))

    def _follow(self) -> Explanation:
        """Does what the rank that leads orders, until it ends, or this one leads."""
        while not isinstance(order := self._team.receive(), Explanation):
            outcome = self._rerun.follow(order)
            self._first = self._first or outcome
            if order.armed >= 0 and order.rows is None and order.change is None:
                return self._explained(order.armed, outcome)
        return order

    def _explained(self, place: int, armed: Outcome) -> Explanation:
        """Explains a replay with a table, on the rank that knows best."""
        if armed.error is not None:
            failed = self._answers.failed(armed.error)
            return failed if self._team.leads else self._follow()
        culprit, failure = None, None
        try:
            culprit = culprit_in(armed, self._rerun.models)
        except Exception as error:  # the others wait for this rank's claim
            failure = error
        if not self._team.elect(_claim(culprit)):
            return self._follow()
        if failure is not None:
            raise failure
        assert self._first is not None
        is_gone = self._first.is_forward and not armed.is_forward
        if culprit is None or (is_gone and self._team.is_alone):
            return self._answers.not_in_eager(self._first, armed)
        found = self._of_culprit(culprit, armed, self._rerun.calls[place])
        self._name_ranks(found)
        self._keep_call(found, culprit)
        difference = difference_of(self._rerun.watched)
        if difference is not None:
            found.notes.append(f"The replay is not the same as the step: {difference}.")
        try:
            if found.cause == "range overflow":
                self._test_growth(found)
            sample.find(found, culprit, self._rerun, place, self.may_run)
            self._try_remedies(found, culprit, armed, place)
        except NotJoined as error:  # the operation is known all the same
            self._team.is_broken = True
            found.notes.append(str(error))
        return found

    def _of_culprit(
        self, culprit: Culprit, armed: Outcome, call: KeptCall
    ) -> Explanation:
        assert armed.table is not None
        rows = ForwardRows(armed.table)
        in_gradients = armed.is_in_gradients
        found = explain_culprit(culprit, rows, in_gradients, call)
        incident = self._incident
        was_finite = incident is not None and incident.weights.get(found.tensor)
        if incident is not None and found.phase == "weights" and was_finite:
            return explain_update(self._rerun.models, incident, found)
        if in_gradients and not found.tensor:
            found.tensor = self._only_gradient(armed, culprit)
        self._name_accumulated(found, culprit)
        self._answers.note_overwritten(found)
        return found

    def _test_growth(self, found: Explanation) -> None:
        """Tests whether it is the size of the weights: they are scaled back."""
        growth = growth_of(self._rerun.models, self._incident)
        if growth is None:
            return
        found.evidence.insert(0, growth.text)
        if not self.may_run():
            return
        outcome = self._rerun.run(change=ScaledWeights(growth.factors))
        if outcome.error is None and not outcome.bad_outputs:
            found.cause = "divergence"
            found.evidence[0] += "; with weights as large as before it is finite"
            found.notes.append(_NO_RATE)

    def _keep_call(self, found: Explanation, culprit: Culprit) -> None:
        """Keeps the operation and its module as scripts, where artifacts are wanted."""
        source, most = culprit.source, self._artifact_bytes
        if not isinstance(source, Row) or source.call is None:
            return
        found.artifacts += repro_of(source.call, found, most)
        used = sum(t.nbytes for each in found.artifacts for t in each.tensors.values())
        if source.module_call is not None:
            call = source.module_call
            found.artifacts += module_repro_of(call, found, most - used)

    def _try_remedies(
        self, found: Explanation, culprit: Culprit, armed: Outcome, place: int
    ) -> None:
        assert armed.table is not None and self._first is not None
        if isinstance(culprit.source, Row):
            if culprit.source.is_meant:
                return  # a mask that is less deep makes a loss that is finite and huge
            if armed.carried:
                names = ", ".join(f"`{name}`" for name in armed.carried)
                found.notes.append(_NOT_TRIED.format(names))
                return
        failure = Failure.of(found, culprit, armed.table, place)
        failure.checkpoints = self._checkpoints
        find_remedies(failure, self._rerun, self._budget, self._first.seconds)
        changed, has_helped = (
            self._answers.changed,
            any(each.is_recommended for each in found.remedies),
        )
        if changed and has_helped and self._rerun.run().is_clean:
            found.remedies = []
            found.notes.append(_BY_ITSELF.format(explanation.effects_text(changed)))

    def _name_ranks(self, found: Explanation) -> None:
        """Names the rank on which it began, if it began on one."""
        claims = self._team.claims.values()
        if max(claims) == _FROM_OTHERS and min(claims) != _FROM_OTHERS:
            found.cause = "unknown"  # what one rank gave is not known
        elif not self._team.is_alone and max(claims) > _FROM_OTHERS:
            found.rank = self._team.rank
            alike = min(max(claims), _IN_BACKWARD)  # what was handed on is no origin
            found.num_ranks = sum(each >= alike for each in claims)

    def _last(self) -> int:
        return len(self._rerun.calls) - 1

    def _name_accumulated(self, found: Explanation, culprit: Culprit) -> None:
        """Names the parameter whose gradients overflowed when they were added up."""
        variable = getattr(culprit.source, "variable", None)
        for _, name, tensor in names_of(self._rerun.models):
            if variable is not None and tensor is variable:
                found.tensor = name
                is_in_hook = isinstance(culprit.source, Row) and culprit.source.in_hook
                found.module = "" if is_in_hook else module_of_parameter(name)

    def _only_gradient(self, outcome: Outcome, culprit: Culprit) -> str:
        """The one parameter whose gradient is bad because of a culprit, or ""."""
        table, names = outcome.table, []
        assert table is not None
        for name in outcome.bad_gradients:
            other = culprit_of(table.sources(outcome.gradients[name]))
            if other is not None and other.source is culprit.source:
                names.append(name)
        return names[0] if len(names) == 1 else ""


def _claim(culprit: Culprit | None) -> int:
    source = None if culprit is None else culprit.source
    if isinstance(source, Row):
        if source.is_communication:
            return _FROM_OTHERS
        return _IN_BACKWARD if source.in_backward else _IN_FORWARD
    if isinstance(source, Leaf):
        return _HELD if source.kind in OF_LEAVES else _FROM_OUTSIDE
    return _NOTHING
