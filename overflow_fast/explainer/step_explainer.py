"""Explains the bad steps of a guard: alone, with other ranks, or by a second look."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import _C
from ..base.losses import loss_in
from ..base.modules import gradient_taker
from ..base.shared_models import why_not
from ..base.types import ValueCounts
from ..guard.config import GuardConfig
from ..guard.kept_calls.call_keeper import CallKeeper, KeptCalls
from ..guard.kept_calls.left_gradients import gradients_of
from ..guard.optimizers.last_steps import LastSteps
from ..guard.options import Schedule
from ..guard.process import world_size
from ..guard.ranks.agreement import Agreed
from ..guard.ranks.replay_offer import ReplayOffer
from ..guard.report import notes
from ..guard.report.explanation import Explanation
from ..guard.report.gist import expression_of, spoken_name
from ..guard.unit import Unit
from ..guard.verdict.bad_frames import BadFrame, collect
from ..guard.verdict.verdict import BadEntry, Origin, Verdict
from ..guard.watching.judged_tensors import NORM, JudgedTensors
from ..guard.watching.watch import ModelWatch, models_of
from ..scanner.ops import scan
from ..torch_internals.compiler import has_compiled
from .bad_step import BadStep
from .calls import Call, ModelCall, batch_size, made_again
from .explain import investigate
from .named_tensors import state_by_name
from .past_steps import past_steps_of
from .replay_check import ReplayCheck
from .replay_ranks import NotJoined, RankCoordinator, StoreChannel
from .replayer import Observer, Replayer, StepPart
from .tensor_kinds import summary_of


class StepExplainer:
    """Explains the steps of one guard; see `guard.explaining.Explainer`.

    Args:
        config: The guard's.
        watches: The watched models.
        keeper: Keeps the calls of a step; None if nothing is to be run again.
        make_watches: Makes watches of the models that look at everything.
        find_optimizers: Returns the optimizers that still exist.
        last_steps: The optimizers' last steps.
        compares: Whether the watches have noted the extremes of the step's entries, so
            that a replay can be compared with it.
    """

    def __init__(
        self,
        config: GuardConfig,
        watches: Sequence[ModelWatch],
        keeper: CallKeeper | KeptCalls | None,
        make_watches: Callable[[], list[ModelWatch]],
        find_optimizers: Callable[[], list[torch.optim.Optimizer]],
        last_steps: LastSteps,
        compares: bool,
    ) -> None:
        self._watches = watches
        self._keeps = keeper is not None
        self._kept = KeptCalls() if keeper is None else keeper
        self._make_watches = make_watches
        self._find_optimizers = find_optimizers
        self._last_steps = last_steps
        self._compares = compares
        self._budget = config.explain.budget
        # 0: steps of a schedule are not all watched.
        is_each = config.schedule == Schedule()
        self._steps_between = config.weights_every or 1 if is_each else 0
        evidence = config.evidence
        self._artifact_bytes = 0 if evidence is None else int(evidence.mib * 2**20)

    def explain(
        self, verdict: Verdict, moment: str, ranks: RankCoordinator | None = None
    ) -> Explanation:
        """Explains a step.

        Args:
            verdict: What was found.
            moment: See `Report.moment`.
            ranks: The ranks that replay it together; None for this one alone.
        """
        step = self._bad_step(verdict, moment)
        if not self._keeps:
            found = investigate(step)
            what = "forward" if moment == "evaluation" else "step"
            unsafe = notes.UNSAFE.format(what)
            return found if found.phase else Explanation(notes=[unsafe])
        return investigate(step, ranks, self._artifact_bytes)

    def search(self, moment: str) -> tuple[Verdict, Explanation] | None:
        """Looks for a bad value in a step that has raised; see `Explaining.search()`.

        Args:
            moment: See `Report.moment`.
        """
        unknown = BadEntry("value", "", "", "")
        found = self.explain(Verdict(first=unknown, reaches_loss=True), moment)
        entry = self._entry_of(found) if found.names_maker else None
        if entry is None:
            return None
        maker = found.module or "code that no call of a module shows"
        origin = Origin("unclear", "unclear", maker)
        return Verdict(first=entry, origin=origin), found

    def _entry_of(self, found: Explanation) -> BadEntry | None:
        """The value that an explanation is of; None where its tensor is not known."""
        op, name = found.op, found.tensor
        if op is not None:
            bad = (each for each in op.outputs if not each.is_finite)
            summary = next(bad, None)
            name = expression_of(op) or spoken_name(op.name)
        else:
            leaves = (leaf for call in self._calls() for leaf in call.leaves())
            named = dict(leaves) | state_by_name(models_of(self._watches))
            summary = summary_of(named[name]) if name in named else None
        if summary is None:
            return None
        names = (each.name for each in dataclasses.fields(ValueCounts))
        counts = {each: getattr(summary, each) for each in names}
        return BadEntry("value", name, "", name, **counts)

    def offer(self, is_due: bool, joins: bool) -> ReplayOffer:
        """This rank's part in a replay of all ranks.

        Args:
            is_due: Whether this rank wants one, if the report is its own.
            joins: Whether a `Join` has ranks without batches take part.
        """
        if joins:
            return ReplayOffer(is_due, "is within a Join, where others have no batch")
        calls = self._calls()
        why = why_not(list(models_of(self._watches).values()))
        if not why and not calls:
            hidden_by = self._kept.hidden_by
            why = "kept no forward of it, which " * bool(hidden_by)
            why += hidden_by or "kept no forward of it; use `guard.run()`"
        shapes = tuple((bool(call.held), call.returns_loss) for call in calls)
        sizes = tuple(map(batch_size, calls))
        return ReplayOffer(is_due, why, shapes, sizes)

    def explain_together(self, agreed: Agreed, moment: str) -> tuple[Explanation, bool]:
        """Explains a step along with all other ranks that agreed on it.

        Args:
            agreed: What they agreed on, with a report; all of them can replay it.
            moment: See `Report.moment`.

        Returns:
            The explanation, and whether a rank was lost in it.
        """
        assert agreed.report is not None
        ranks = _ranks_of(agreed.offers, agreed.rank)
        return self.explain(agreed.report.verdict, moment, ranks), ranks.is_broken

    def _calls(self) -> list[Call]:
        return list(map(made_again, self._kept.calls))

    def _replay_check(self) -> ReplayCheck | None:
        """Compares a replay with the step, but for compiled code: hooks change that."""
        if not self._compares or has_compiled():
            return None
        return ReplayCheck(self._watches, self._make_watches)

    def _bad_step(self, verdict: Verdict, moment: str) -> BadStep:
        first, start = verdict.first, self._kept.start
        assert first is not None
        is_gradient = first.kind in ("gradient", "grad_output", "recorded")
        return BadStep(
            models_of(self._watches),
            budget=self._budget,
            kind=first.kind,
            module=first.fqn if first.class_name else "",
            is_made=verdict.origin.how == "made" and bool(first.class_name),
            is_received=first.kind == "input" or bool(verdict.origin.stale_inputs),
            is_given=first.kind == "recorded" and first.label not in ("loss", NORM),
            reaches_loss=verdict.reaches_loss
            or is_gradient
            or bool(verdict.dirty_gradients),
            past=past_steps_of(
                self._watches,
                self._steps_between,
                verdict.dirty_gradients,
                scans_gradients=moment != "raised",
            ),
            gradients=gradients_of(self._watches, verdict.dirty_gradients),
            optimizers=self._find_optimizers(),
            last_steps=self._last_steps,
            is_late=moment == "check",
            calls=self._calls(),
            replay_check=self._replay_check(),
            is_rewritten=start is not None
            and moment == "before"
            and start.were_weights_rewritten(),
            forward=self._forward_of(verdict) if moment == "before" else -1,
            kept=self._kept,
        )

    def _forward_of(self, verdict: Verdict) -> int:
        """Which of the kept calls the first bad call is in; -1 if that is not known."""
        first, calls = verdict.first, self._calls()
        is_of_call = first is not None and first.kind in ("input", "output")
        if not is_of_call or len(self._watches) > 1:
            return -1
        if not all(call.is_of_one_forward for call in calls):
            return -1
        found = verdict.batch - self._watches[0].batch_number + len(calls)
        return found if 0 <= found < len(calls) else -1

    # The tripwire's second look: a bad step is run again with everything watched.

    def look_again(self, found: Unit) -> Unit:
        """Replaces what the tripwire saw of a bad step by what a full watch sees.

        Args:
            found: What the tripwire saw, with at least one bad frame.
        """
        if not self._calls():
            return found.with_note(notes.NO_CALLS.format(""))
        if world_size() > 1:
            return found.with_note(notes.NOT_ALONE)
        seen, error = self._replayed(found, RankCoordinator())
        if error is not None:
            return found.with_note(f"The step was run again, and raised {error}.")
        if not seen.frames:
            return found.with_note(self.finite_note())
        return seen

    def finite_note(self) -> str:
        """Writes what follows if the step is finite when it is run again."""
        calls = self._calls()
        models = [watch.model for watch in self._watches if watch.model is not None]
        engine = gradient_taker(models)
        if engine:
            return notes.AGAIN_FORWARD_ALONE.format(engine)
        if any(call.has_stand_ins for call in calls):
            return notes.STOOD_IN
        return (
            notes.AGAIN_CLEAN
            if all(call.returns_loss for call in calls)
            else notes.LOSS_LEFT.format("")
        )

    def look_together(self, found: Unit, agreed: Agreed) -> tuple[Unit, str, bool]:
        """Runs the step again on all ranks that agreed on it.

        Args:
            found: See `look()`.
            agreed: What they agreed on.

        Returns:
            What this rank has seen; a note, the same on all ranks, if it could not be
            run, else ""; and whether a rank was lost.
        """
        ranks = _ranks_of(agreed.offers, agreed.rank)
        try:
            seen, error = self._replayed(found, ranks)
        except NotJoined as lost:
            return found, str(lost), True
        # Each rank's run has agreed on errors: all of them have one.
        note = "" if error is None else "The step was run again, and raised an error."
        return seen, note, False

    def _replayed(
        self, found: Unit, ranks: RankCoordinator
    ) -> tuple[Unit, Exception | None]:
        """Runs the step with everything watched; returns it, and its error."""
        watches = self._watches_now()
        models = models_of(watches)
        full_watch = _FullWatch(watches)
        with Replayer(models, self._calls(), self._kept.start, ranks) as replayer:
            if ranks.is_leader:
                result = replayer.run(StepPart(is_whole=True), observers=[full_watch])
            else:
                result = replayer.follow(ranks.receive(), [full_watch])
        frames = full_watch.frames
        seen = [*_recorded(found, frames), *frames] if frames else []
        seen_in_full = dataclasses.replace(
            found, frames=seen, watches=watches, verdict=None
        )
        return seen_in_full, result.error

    def _watches_now(self) -> list[ModelWatch]:
        """Watches that number and name what runs as the tripwire's do."""
        watches = self._make_watches()
        are_seen = all(map(_has_finite_outputs, self._calls()))
        for watch, own in zip(watches, self._watches, strict=True):
            before = own.batch_number - len(self._calls())
            watch.begin_at(max(0, self._kept.first_batches.get(id(own), before)))
            watch.inputs.loop_batches = own.inputs.loop_batches
            watch.has_seen_loss = own.has_seen_loss
            watch.returns_loss = own.returns_loss
            watch.has_unseen_outputs = not are_seen
        return watches


def _ranks_of(offers: Mapping[int, ReplayOffer], lead: int) -> RankCoordinator:
    """The ranks that replay a step.

    Args:
        offers: What each of them has offered.
        lead: The rank whose report it is.
    """
    sizes: Any = zip(*(offer.sizes for offer in offers.values()), strict=True)
    can_cut = [len(set(each)) == 1 for each in sizes]
    return RankCoordinator(
        StoreChannel(sorted(offers), offers[lead].session), lead, can_cut
    )


def _has_finite_outputs(call: Call) -> bool:
    """True if its outputs were finite in the step, or a replay has the loss, too.

    The loop may have dropped them since.
    """
    if call.returns_loss:
        return True
    outputs = [each.unchanged() for each in call.outputs]
    alive = [each for each in outputs if each is not None]
    is_known = bool(alive) and len(alive) == len(outputs)
    return is_known and all(stat.is_finite for stat in scan(alive))


class _FullWatch(Observer):
    """Watches a run as `guard.run()` does, and collects its bad frames."""

    def __init__(self, watches: Sequence[ModelWatch]) -> None:
        self._watches = watches
        self.frames: list[BadFrame] = []

    @contextlib.contextmanager
    def observing(self, models: Mapping[str, nn.Module]) -> Iterator[None]:
        """Watches what runs within."""
        for watch in self._watches:
            number = watch.batch_number
            watch.attach()
            watch.begin_at(number)  # a forward that runs around it is none of these
        try:
            yield
            self._collect()
        finally:
            for watch in self._watches:
                watch.detach()

    def on_output(self, call: Call, output: Any) -> None:
        """Records the loss that a function has returned."""
        loss = None if isinstance(call, ModelCall) else loss_in(output)
        if loss is not None:
            self._watches[0].record(_C.FrameKind.RECORDED, (["loss"], [loss]))

    def _collect(self) -> None:
        JudgedTensors(self._watches).scan(None)
        self.frames += collect(self._watches)


def _recorded(found: Unit, frames: Sequence[BadFrame]) -> list[BadFrame]:
    """Takes over what the user has recorded, if no forward of the replay is bad."""
    kinds = {bad.frame.kind for bad in frames}
    if kinds & {_C.FrameKind.FORWARD, _C.FrameKind.RECORDED}:
        return []
    recorded = [b for b in found.frames if b.frame.kind == _C.FrameKind.RECORDED]
    return [bad for bad in recorded if not _is_norm(bad)]


def _is_norm(bad: BadFrame) -> bool:
    """True if it is the norm of the gradients, which have frames of their own."""
    return all(entry.label.name == NORM for entry in bad.bad_entries)
