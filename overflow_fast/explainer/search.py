"""Searches for what made a step bad, on one rank or on several that go together.

The questions are those of a subclass, `StepSearch` of `questions.py`. What is known of
an origin is added here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .. import _C
from ..base.text import error_line
from ..guard.report import notes
from ..guard.report.causes import DIVERGENCE, SINGULAR_GRADIENT, UNDEFINED, UNKNOWN
from ..guard.report.explanation import Explanation
from ..guard.report.findings import BEHIND_BACKWARD, NOT_THE_LOSS, OVERWRITTEN
from ..torch_internals.compiler import has_compiled
from .bad_step import BadStep
from .budget import Budget
from .calls import Call, name_outside, with_clean_batch
from .effects.rule import StoppedError
from .explain_origin import DIVIDES_BY, explain_root_op, tell_float64
from .leaves import Leaf
from .named_tensors import names_of
from .op_call import OpCall
from .op_table import OpTable
from .optimizer_step import explain_update
from .remedies.attempts import find_remedies
from .remedies.failure import Failure
from .remedies.patches import ScaledWeights
from .remedies.trials import loss_of, losses_of
from .replay_check import Difference, ReplayCheck
from .replay_ranks import BEGIN, GIVEN, OnRank, RankCoordinator
from .replayer import Replayer, ReplayResult, StepPart, Tail
from .sample import COMPUTED, find_sample
from .trace_back import RootOp, memory_before
from .weight_growth import drift_of, find_growth

_USUAL = "`{}` held non-finite values in the last clean step, too"
_SMALLER = "with weights as large as before it is finite"
# How well a rank can say where bad values began, by what it found.
_NOTHING, _FROM_OTHERS, _FROM_OUTSIDE, _HELD, _IN_BACKWARD, _IN_FORWARD = range(6)


@dataclass(frozen=True)
class Question:
    """A question of the tree.

    Attributes:
        text: The question.
        is_so: The evidence: True if it has an answer.
        answer: Makes the answer; None if it has none after all.
    """

    text: str
    is_so: Callable[[Search], bool]
    answer: Callable[[Search], Explanation | None]


class Search:
    """One explanation in the making, of one view of a step.

    Of each list of questions the first one counts that has an answer.

    Args:
        step: The step, with the calls of the view.
        ranks: The ranks that replay it together; None for this one alone.
        tail: The program's lines behind backward, where they belong to the view.

    Attributes:
        asked_before: The questions without a replay.
        asked_first: Those of the first replay.
        asked_traced: Those of one with a table, where no operation made bad values.
        step: The step.
        replayer: Runs the view.
        budget: What that may cost.
        first: The first replay.
        traced: The one with a table of its operations.
        changed: What a replay changes, and could not be put back.
        set_meanwhile: Numbers of the models that the step has set, a replay not.
        num_unlike: How many calls were left out, which came before the first bad one
            and are bad in a replay: the program has written to what they read since.
    """

    asked_before: Sequence[Question] = ()
    asked_first: Sequence[Question] = ()
    asked_traced: Sequence[Question] = ()
    first: ReplayResult
    traced: ReplayResult

    def __init__(
        self,
        step: BadStep,
        ranks: RankCoordinator | None = None,
        tail: Tail | None = None,
    ) -> None:
        self.step: BadStep = step
        self.replayer: Replayer = step.replayer(ranks, tail)
        self.changed: list[str] = []
        self.set_meanwhile: list[str] = []
        self._ranks = self.replayer.ranks
        self.budget: Budget = Budget(self.replayer, step.budget)
        self._has_run = False
        self._lost: OpCall | None = None
        self._has_tie = False
        self._others: ReplayResult | None = None
        self._has_tail = tail is not None
        self.num_unlike = 0

    def ask(self, questions: Sequence[Question]) -> Explanation | None:
        """The first answer to a list of questions, or None."""
        answers = (each.answer(self) for each in questions if each.is_so(self))
        return next((each for each in answers if each is not None), None)

    @property
    def difference(self) -> Difference | None:
        """The first value of the first replay that is not the step's, if known."""
        check = self.step.replay_check
        return None if check is None else check.difference()

    @property
    def is_seen_in_call(self) -> bool:
        """True if the guard saw a module receive the bad values, or return them."""
        return self.step.kind in ("input", "output")

    @property
    def is_forward_finite(self) -> bool:
        """True if a forward was bad, and its replay is not, before what it gave back.

        The gradients that its outputs were given came of the bad values of the step.
        """
        if not self.is_seen_in_call or not self._ranks.is_alone:
            return False
        difference = self.difference if self.first.state == GIVEN else None
        return difference is not None and difference.path.role == "output"

    def run(self) -> Explanation:
        """Finds the explanation, or follows the rank that does."""
        if self._ranks.is_leader:
            known = self.ask(self.asked_before)
            if known is not None:
                return known
            self._ranks.order(BEGIN)
        elif self._ranks.receive() != BEGIN:
            return Explanation()
        with self.replayer:
            found = self._lead() if self._ranks.is_leader else self._follow()
        if self._ranks.is_leader:
            found.notes += self.replayer.state.problems
            name = name_outside(self.replayer.calls)
            if name and notes.OUTSIDE_LOSS in found.notes:  # some of it was
                place = found.notes.index(notes.OUTSIDE_LOSS)
                text = notes.COMPUTED_OUTSIDE.format(name)
                found.notes[place] = f"{NOT_THE_LOSS} with it: {text}."
        return found

    def _lead(self) -> Explanation:
        """Runs the step, answers what that tells, else lists its operations.

        A step of one call is listed in its first run, unless listing it fails.
        """
        listed = self._listed_at_once()
        is_shown = listed is not None and self._shows(listed)
        first = listed if is_shown else None
        self._note_first(first or self.replayer.run(observers=self._observers))
        if 0 <= self.first.bad_call < self.step.forward and self._ranks.is_alone:
            self.num_unlike = self.step.forward
            del self.replayer.calls[: self.num_unlike]
            self.first = self.replayer.run()
        self.changed = self.replayer.state.changed_around()
        self.set_meanwhile = self.replayer.state.set_meanwhile()
        known = self.ask(self.asked_first)
        if known is not None:
            return known
        bad, last = self.first.bad_call, len(self.replayer.calls) - 1
        seen = self.step.forward if self.step.forward >= 0 else last
        place = bad if bad >= 0 else seen
        return self._explained(place, listed or self.replayer.run(listing(place)))

    def _listed_at_once(self) -> ReplayResult | None:
        """The first run with its operations; None where a plain one has to be made.

        What is compiled runs as it is first, and ranks agree on the call to list.
        """
        if len(self.replayer.calls) > 1 or not self._ranks.is_alone or has_compiled():
            return None
        result = self.replayer.run(listing(0), observers=self._observers)
        return result if result.error is None else None

    def _shows(self, listed: ReplayResult) -> bool:
        """True if a listed run has shown what was seen, if anything was.

        Else a plain one has to tell: torch takes no fast path where it is listed.
        """
        is_bad = listed.table is not None and bool(listed.table.bad_modules)
        return is_bad or not listed.is_clean or not self.step.kind

    @property
    def _observers(self) -> list[ReplayCheck]:
        check = self.step.replay_check
        return [] if check is None or self._has_run else [check]

    def _note_first(self, result: ReplayResult) -> None:
        if not self._has_run:
            self.first, self._has_run = result, True
            self.budget.step_seconds = result.seconds

    def _follow(self) -> Explanation:
        """Does what the rank that leads orders, until it ends, or this one leads."""
        while not isinstance(step := self._ranks.receive(), Explanation):
            result = self.replayer.follow(step, self._observers)
            self._note_first(result)
            if step.traced >= 0 and step.rows is None and not step.patches:
                return self._explained(step.traced, result)
        return step

    def _explained(self, place: int, traced: ReplayResult) -> Explanation:
        """Explains a replay with a table, on the rank that knows best."""
        self.traced = traced
        if traced.error is not None:
            is_leader = self._ranks.is_leader
            return failed(traced.error) if is_leader else self._follow()
        root_op, failure, usual = None, None, list[str]()
        within = self.step.module if self.is_seen_in_call else None
        try:
            usual = self._usual_batch(traced, self.replayer.calls[place])
            root_op = traced.root_op(within)
        except Exception as error:  # the others wait for this rank's claim
            failure = error.with_traceback(None)
        if not self._ranks.elect(_claim(root_op)):
            return self._follow()
        if failure is not None:
            try:
                raise failure
            finally:
                failure = None  # its traceback holds this frame, which would hold it
        is_gone = self.first.is_forward and not traced.is_forward
        if root_op is None or (is_gone and self._ranks.is_alone):
            found = self.ask(self.asked_traced)
            assert found is not None  # the last question has an answer
            return found
        found = self.explain_origin(root_op, self.replayer.calls[place])
        try:
            found.evidence += usual
            self._find_details(found, root_op, place)
        except Exception as error:  # the operation is known all the same
            found.notes.append(self._ranks.note_end(error))
        return found

    def _find_details(self, found: Explanation, root_op: RootOp, place: int) -> None:
        """Finds what else there is to say of an origin, and tries remedies."""
        traced = self.traced
        self._note_reached(root_op)
        self._find_lost_value(found, root_op)
        is_outside = traced.has_mask and not self.replayer.returns_loss
        if is_outside and traced.bad_gradients and found.op and not found.op.file:
            found.notes.append(notes.OUTSIDE_LOSS)  # whose lines may name the place
        if traced.is_in_gradients and not traced.bad_gradients:
            found.notes.append(notes.REACHES_NO_WEIGHT)
        self._name_ranks(found)
        if self.difference is not None:
            found.notes.append(notes.OTHER_STEP.format(self.difference))
        if found.is_overflow:
            self._test_growth(found)
        self._name_forward(found, place)
        others = find_sample(
            *(found, root_op, self.replayer, place, self.budget.allows, traced)
        )
        is_step = len(self.replayer.calls) == 1 and not self._has_tail
        if others is not None and is_step and not traced.is_clean:
            self._others = others
        self.try_remedies(found, root_op, place)

    def _usual_batch(self, traced: ReplayResult, call: Call) -> list[str]:
        """Notes which bad tensors of the batch were so in the last clean step, too."""
        clean, table = with_clean_batch(call, self.step.kept.clean), traced.table
        if clean is None or table is None:
            return []
        usual = table.usual_of(dict(clean.leaves()))
        return [_USUAL.format(leaf.name) for leaf in usual]

    def explain_origin(self, root_op: RootOp, call: Call) -> Explanation:
        """Explains where the bad values of the traced replay began."""
        traced, step = self.traced, self.step
        assert traced.table is not None
        ops = traced.table.ops
        # Where a module was seen to return it, it arose in the forward for sure.
        is_seen = self.is_seen_in_call
        in_gradients = traced.is_in_gradients and not is_seen
        source, before = root_op.source, traced.num_before
        if before is not None and isinstance(source, OpCall) and source.index >= before:
            found = explain_root_op(root_op, ops, False, call)
            found.phase = "optimizer"
            found.notes.append(BEHIND_BACKWARD)
            return found
        found = explain_root_op(root_op, ops, in_gradients, call)
        if found.phase == "weights" and step.past.weights.get(found.tensor):
            return explain_update(step, found)
        if any(each.is_overwritten() for each in self.replayer.calls):
            found.notes.append(OVERWRITTEN)
        return found

    def _note_reached(self, root_op: RootOp) -> None:
        """Notes which small weights the operation that failed depends on."""
        table, source = self.traced.table, root_op.source
        if table is None or not isinstance(source, OpCall):
            return
        numbers, first = memory_before([source]), self.step.last_steps.first
        weights = [(n, e) for _, n, e in names_of(self.step.models) if n in first]
        self.step.reached |= {n for n, e in weights if table.number_of(e) in numbers}

    def _find_lost_value(self, found: Explanation, root_op: RootOp) -> None:
        """Finds the rounding that made an operation undefined, if it was one."""
        source, table = root_op.source, self.traced.table
        assert table is not None
        if isinstance(source, OpCall) and source in table.undefined:
            self._explain_lost(found, table, source)
        table.forget_undefined()

    def _explain_lost(self, found: Explanation, table: OpTable, source: OpCall) -> None:
        from .made_zero import makers_of
        from .rounding import explain_lost, lost_value, nearest_first  # of few failures

        parameters = (p for e in self.step.models.values() for p in e.parameters())
        weights = {table.number_of(each) for each in parameters if each.requires_grad}
        lost, ops = None, [] if found.is_overflow else table.undefined[source]
        with _C.Hidden(), torch.no_grad():
            try:
                for some in nearest_first(ops):
                    lost = lost_value(some, self.budget, weights) or lost
                    if lost is None or lost.is_told:
                        break
            except TimeoutError:
                found.notes.append(notes.NOT_LOOKED_BACK)
            makers = makers_of(source, table, self.budget)
        if lost is not None:
            explain_lost(lost, makers, found)
            self._lost, self._has_tie = lost.op, lost.tie is not None
        texts = [*dict.fromkeys(each.text for each in makers)]
        if found.is_overflow:
            is_open = bool(texts) and found.reason.startswith(DIVIDES_BY)
            found.reason += f": {' and '.join(texts)}" * is_open
        elif found.cause in (UNDEFINED.name, SINGULAR_GRADIENT.name):
            numbers = [] if found.op is None else found.op.operands
            least = [float(each.made.values.min()) for each in makers]
            # Of an input below 0 the first line has the number, and no reason.
            if any(
                e.op or not n or n not in numbers
                for e, n in zip(makers, least, strict=True)
            ):
                found.reason = found.reason or " and ".join(texts)
            else:
                found.evidence += texts

    def _name_forward(self, found: Explanation, place: int) -> None:
        """Names which forward of the step it is of, such as that of a micro-batch."""
        calls, dropped = self.replayer.calls, self.step.kept.num_dropped  # the first
        dropped += self.num_unlike
        num = len(calls) + dropped
        # Of a function, and of the program's lines, it may be any of several.
        are_single = all(call.is_of_one_forward for call in calls)
        if num > 1 and are_single and found.phase in COMPUTED:
            found.forward = place + dropped + 1, num

    def _test_growth(self, found: Explanation) -> None:
        """Tests whether it is the size of the weights: they are scaled back."""
        growth = find_growth(self.step)
        if growth is None:
            return
        if self.budget.allows(1):
            result = self.replayer.run(patches=[ScaledWeights(growth.factors)])
            if result.error is None and not result.is_forward:
                found.cause, found.reason = DIVERGENCE.name, growth.text
                found.advice = growth.advice
                found.evidence = [*growth.evidence, *found.evidence, _SMALLER]
                tell_float64(found)
                return
        else:
            found.notes.append(notes.NOT_SMALLER)
        found.evidence.insert(0, growth.text)

    def try_remedies(self, found: Explanation, root_op: RootOp, place: int) -> None:
        """Tries remedies on what a replay with a table has shown."""
        traced = self.traced
        assert traced.table is not None
        if isinstance(root_op.source, OpCall) and traced.table.carried:
            names = ", ".join(f"`{name}`" for name in traced.table.carried)
            found.notes.append(notes.NOT_TRIED.format(names))
            return
        step = self.step
        failure = Failure.of(found, root_op, traced.table, place)
        failure.lost, failure.has_tie = self._lost, self._has_tie
        failure.others = self._others
        failure.has_drifted = bool(drift_of(self.step, self.step.reached))
        if self._ranks.is_alone:
            call = self.replayer.calls[place]
            failure.clean = with_clean_batch(call, step.kept.clean)
        failure.stays_within = traced.is_clean
        failure.within = step.module if self.is_seen_in_call else None
        failure.losses = losses_of(traced)
        failure.is_kept = bool(failure.losses and traced.bad_buffers)
        losses = step.past.finite_losses
        is_finite = loss_of(self.first) is not None
        failure.usual_losses = losses[:-1] if is_finite else losses
        slopes = step.past.gradients or [step.past.last_gradient]
        failure.usual_gradient = statistics.median_low(slopes)
        find_remedies(failure, self.replayer, step.budget, self.first.seconds)
        found_remedy = any(each.is_recommended for each in found.remedies)
        if self.changed and found_remedy and self.replayer.run().is_clean:
            found.remedies = []
            found.notes.append(notes.BY_ITSELF.format(notes.effects_text(self.changed)))

    def _name_ranks(self, found: Explanation) -> None:
        """Names the rank on which it began, if it began on one."""
        claims = self._ranks.claims.values()
        if max(claims) == _FROM_OTHERS and min(claims) != _FROM_OTHERS:
            found.cause = UNKNOWN.name  # what one rank gave is not known
        elif not self._ranks.is_alone and max(claims) > _FROM_OTHERS:
            found.rank = self._ranks.rank
            alike = min(max(claims), _IN_BACKWARD)  # what was passed on is no origin
            found.num_ranks = sum(each >= alike for each in claims)


def listing(place: int) -> StepPart:
    """The part of a replay that lists the operations of a call."""
    return StepPart(place, looks_back=True, has_calls=True)


def failed(error: Exception) -> Explanation:
    """The explanation of a replay that has raised, or was ended before an effect."""
    if isinstance(error, StoppedError):
        return Explanation(notes=[notes.STOPPED.format(error)])
    what = str(error) if isinstance(error, OnRank) else error_line(error)
    return Explanation(notes=[notes.RAISED.format(what)])


def _claim(root_op: RootOp | None) -> int:
    source = None if root_op is None else root_op.source
    if isinstance(source, OpCall):
        if source.is_communication:
            return _FROM_OTHERS
        return _IN_BACKWARD if source.in_backward else _IN_FORWARD
    if isinstance(source, Leaf):
        is_outside = source.kind in ("gradient", "unknown")
        return _FROM_OUTSIDE if is_outside else _HELD
    return _NOTHING
