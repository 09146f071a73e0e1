"""When a guard has a step explained or looked at again, and what it knows of it."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .. import _C
from ..capture.step_tensors import NORM, ScanLevel, StepTensors
from ..capture.watch import ModelWatch, models_of
from ..core.modules import gradient_taker, named_parameters, why_not
from ..core.process import world_size
from ..core.tensors import loss_in
from ..distributed.agreement import Agreed
from ..distributed.store_channel import StoreChannel
from ..replay.capture import Capture, KeptCall, ModelCall, batch_size
from ..replay.explain import investigate
from ..replay.explanation import BadStep, Explanation, LastSteps, taken_text
from ..replay.replayer import (
    NotJoined,
    Observer,
    RankCoordinator,
    ReplayCheck,
    Replayer,
    StepPart,
)
from ..state.step_start import StepStart
from ..text import error_line
from ..torch_internals.compiler import has_compiled
from ..torch_internals.tensor_internals import local_part
from ..verdict.verdict import GRADIENTS, BadFrame, Verdict, is_of_flag, take_bad
from .config import GuardConfig
from .step import Step

# All ranks replay a step together, or none does, as they agree on its verdict.


_Shape = tuple[bool, bool]


@dataclass(frozen=True)
class ReplayOffer:
    """The part of a rank in a replay, as it reports it.

    Attributes:
        is_due: Whether it wants one, if the report is its own.
        why_not: Why it cannot take part, or "".
        calls: For each kept call, whether it has a backward, and a loss.
        sizes: The sizes of their batches, or None.
        takes_from: See `Capture`.
        session: A name for the replay.
    """

    is_due: bool
    why_not: str
    calls: tuple[_Shape, ...] = ()
    sizes: tuple[int | None, ...] = ()
    takes_from: tuple[str, ...] = ()
    session: str = field(default_factory=lambda: uuid.uuid4().hex)


def offer_of(
    is_due: bool, capture: Capture | None, models: Sequence[nn.Module], joins: bool
) -> ReplayOffer:
    """Makes this rank's offer. Calls no collective.

    Args:
        is_due: See `ReplayOffer`.
        capture: What was kept of the step; None where nothing is to be explained.
        models: The watched models.
        joins: Whether ranks without batches shadow the others' steps.
    """
    if capture is None:
        return ReplayOffer(is_due, "keeps no steps (explain, replay_safe or sync)")
    if joins:
        return ReplayOffer(is_due, "is within a Join, where others have no batch")
    why = why_not(models)
    if not why and not capture.calls:
        why = "kept no forward of it, which " * bool(capture.hidden_by)
        why += capture.hidden_by or "kept no forward of it; use `guard.run()`"
    calls = tuple(map(_shape_of, capture.calls))
    sizes = tuple(map(batch_size, capture.calls))
    return ReplayOffer(is_due, why, calls, sizes, tuple(capture.takes_from))


def _shape_of(call: KeptCall) -> _Shape:
    return bool(call.held), call.returns_loss


def why_not_together(offers: Mapping[int, ReplayOffer]) -> str:
    """Why the ranks cannot replay the step, the same on all of them, or ""."""
    for rank, offer in sorted(offers.items()):
        if offer.why_not:
            return f"The step was not replayed: rank {rank} {offer.why_not}."
    if len({offer.calls for offer in offers.values()}) == 1:
        return ""
    text = "The step was not replayed: the ranks kept different forwards of it."
    for rank, offer in sorted(offers.items()):
        if offer.takes_from:
            return f"{text} On rank {rank}: {taken_text(offer.takes_from)}"
    return text


def coordinator_of(offers: Mapping[int, ReplayOffer], lead: int) -> RankCoordinator:
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


_STEPS_BETWEEN = 100
_LATE = (
    "The step was not replayed: its verdict came when the weights had been stepped "
    "(sync='lagged')."
)
_UNSAFE = "The step was not replayed: `Explain(replay_safe=False)` was given."
_NO_STEP = "The forward was not replayed: it ran without autograd."


class Explainer:
    """Explains a guard's alarms, as often as it was asked for.

    Args:
        config: The guard's. "auto" explains always where the run ends; else the first
            time for each place, at most once in 100 steps.
        watches: The watched models.
        capture: Keeps the calls of a step; None if nothing is to be explained.
        make_watches: Makes watches of the models that look at everything.
        find_optimizers: Returns the optimizers that still exist.

    Attributes:
        is_off: No step is kept, and none is to be explained.
    """

    def __init__(
        self,
        config: GuardConfig,
        watches: Sequence[ModelWatch],
        capture: Capture | None,
        make_watches: Callable[[], list[ModelWatch]],
        find_optimizers: Callable[[], list[torch.optim.Optimizer]],
    ) -> None:
        self._find_optimizers = find_optimizers
        self._asked = config.explain.when
        self._budget = config.explain.budget
        self._steps_between = config.weights_every or 1
        is_replay_safe = config.explain.replay_safe or config.sync == "lagged"
        is_asked = self._asked != "never"
        self.is_off = capture is None and (is_replay_safe or not is_asked)
        self._checkpoints = config.explain.checkpoints
        evidence = config.evidence
        self._artifact_bytes = 0 if evidence is None else int(evidence.mib * 2**20)
        self._watches = watches
        self._capture = capture
        self._make_watches = make_watches
        has_frames = not config.is_tripwire and config.sync != "lagged"
        self._compares = is_asked and capture is not None and has_frames
        if self._compares:
            for watch in watches:
                watch.recorder.note_row()
        self._places: set[tuple[str, str, str]] = set()
        self._last: int | None = None
        self._last_steps = LastSteps()

    def note_step(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Takes in that an optimizer has made its step."""
        if optimizer is not None and self._asked != "never":
            self._last_steps.note(optimizer)

    def explain(self, step: Step, verdict: Verdict, ends: bool) -> Explanation | None:
        """Explains a step, or returns None if it is not asked for.

        Args:
            step: The step.
            verdict: What was found.
            ends: Whether the run ends with it.
        """
        if not self._is_due(step.number, verdict, ends):
            return None
        return self._explained(verdict, step.moment)

    def offer(
        self, step: Step, verdict: Verdict, ends: bool, joins: bool
    ) -> ReplayOffer:
        """This rank's part in a replay of all ranks.

        Args:
            step: See `explain()`, as all others.
            verdict: This rank's.
            ends: Whether the run ends with it.
            joins: Whether a `Join` has ranks without batches take part.
        """
        is_due = self._is_due(step.number, verdict, ends)
        models = [watch.model for watch in self._watches if watch.model is not None]
        try:
            return offer_of(is_due, self._capture, models, joins)
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
            return Explanation(notes=[text]), False
        ranks = coordinator_of(offers, agreed.rank)
        return self._explained(report.verdict, moment, ranks), ranks.is_broken

    def _explained(
        self,
        verdict: Verdict,
        moment: str,
        ranks: RankCoordinator | None = None,
    ) -> Explanation:
        if moment == "after":
            return Explanation(notes=[_LATE])
        if moment == "evaluation":
            return Explanation(notes=[_NO_STEP])
        models = models_of(self._watches)
        capture = self._capture
        if capture is None:
            incident = self._incident(verdict, moment)
            found = investigate(models, [], incident)
            return found if found.phase else Explanation(notes=[_UNSAFE])
        return investigate(
            models,
            capture.calls,
            self._incident(verdict, moment),
            start=capture.start,
            budget=self._budget,
            checkpoints=self._checkpoints,
            artifact_bytes=self._artifact_bytes,
            ranks=ranks,
            replay_check=self._replay_check(),
        )

    def _replay_check(self) -> ReplayCheck | None:
        """Compares a replay with the step, but for compiled code: hooks change that."""
        if not self._compares or has_compiled():
            return None
        return ReplayCheck(self._watches, self._make_watches)

    def _is_due(self, step: int, verdict: Verdict, ends: bool) -> bool:
        first = verdict.first
        if self._capture is not None and first is not None:
            gradients = self._bad_gradients(verdict.dirty_gradients)
            self._capture.note_bad(step, gradients)
        if self._asked == "never" or self.is_off or first is None:
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

    def _incident(self, verdict: Verdict, moment: str) -> BadStep:
        first = verdict.first
        assert first is not None
        weights, gradients = self._histories()
        is_gradient = first.kind in ("gradient", "grad_output", "recorded")
        return BadStep(
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
            optimizers=self._find_optimizers(),
            last_steps=self._last_steps,
            is_late=moment == "check",
            num_dropped=0 if self._capture is None else self._capture.num_dropped,
            hidden_by="" if self._capture is None else self._capture.hidden_by,
            takes_from=[] if self._capture is None else self._capture.takes_from,
            is_of_flag=is_of_flag(verdict),
            had_gradients=self._capture is not None and self._capture.had_gradients,
            left_over={} if self._capture is None else dict(self._capture.left_over),
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
            for name, parameter in named_parameters(watch.model)
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


# The tripwire's second look: a bad step is run again with everything watched.


_FORWARD_ALONE = (
    "The step's forward was run again, and is finite. Its backward was not: it would "
    "write to the gradients that {} keeps."
)
_CLEAN = (
    "The step was run again with every module watched, and is finite: the fault was "
    "transient, or outside of the models' forward and backward."
)
_PARTLY = (
    "The models' forward and backward were run again with every module watched: what "
    "modules receive and return is finite. The loss outside of them was not run again "
    "for that: use `guard.run(lambda: loss)`."
)
_STOOD_IN = (
    "The models' forward and backward were run again with every module watched and the "
    "models' own weights, and are finite: the step ran under functional_call(), whose "
    "tensors were not kept. Use `guard.run(lambda: loss)`."
)
_NOT_ALONE = (
    "The step was not run again: there are several ranks, which do not decide together."
)
_TOO_LATE = (
    "The step was not run again: its weights had been stepped when it was judged."
)
_NOTHING = "The step was not run again: no forward of this step was captured."


class SecondLook:
    """Replaces what the tripwire saw of a bad step by what a full watch sees.

    Args:
        capture: Keeps the calls of a step.
        watches: The tripwire's.
        make_watches: Makes watches of the models that look at everything.
    """

    def __init__(
        self,
        capture: Capture,
        watches: Sequence[ModelWatch],
        make_watches: Callable[[], list[ModelWatch]],
    ) -> None:
        self._watches = watches
        self._capture = capture
        self._make_watches = make_watches

    def look(self, found: Step) -> Step:
        """Runs the step again; everything is put back bit for bit afterwards.

        Incurs a CPU-GPU sync.

        Args:
            found: What the tripwire saw, with at least one bad frame.

        Returns:
            The same with the bad frames of the replay; with a note if there are none.
        """
        why = self._why_not(found)
        if why:
            return _with_note(found, why)
        seen, error = self._replayed(found, RankCoordinator())
        if error is not None:
            return _with_note(found, f"The step was run again, and raised {error}.")
        if not seen.frames:
            return _with_note(found, self.finite_note())
        return seen

    def finite_note(self) -> str:
        """Writes what follows if the step is finite when it is run again."""
        calls = self._capture.calls
        models = [watch.model for watch in self._watches if watch.model is not None]
        engine = gradient_taker(models)
        if engine:
            return _FORWARD_ALONE.format(engine)
        if any(call.has_stand_ins for call in calls):
            return _STOOD_IN
        return _CLEAN if all(call.returns_loss for call in calls) else _PARTLY

    def look_together(self, found: Step, agreed: Agreed) -> tuple[Step, str, bool]:
        """Runs the step again on all ranks that agreed on it.

        Args:
            found: See `look()`.
            agreed: What they agreed on.

        Returns:
            What this rank has seen; a note, the same on all ranks, if it could not be
            run, else ""; and whether a rank was lost.
        """
        why = _TOO_LATE if found.moment == "after" else why_not_together(agreed.offers)
        if why:
            return found, why, False
        ranks = coordinator_of(agreed.offers, agreed.rank)
        try:
            seen, error = self._replayed(found, ranks)
        except NotJoined as lost:
            return found, str(lost), True
        # Each rank's run has agreed on errors: all of them have one.
        note = "" if error is None else "The step was run again, and raised an error."
        return seen, note, False

    def _why_not(self, found: Step) -> str:
        if found.moment == "after":
            return _TOO_LATE
        if not self._capture.calls:
            return _NOTHING
        return _NOT_ALONE * (world_size() > 1)

    def _replayed(
        self, found: Step, ranks: RankCoordinator
    ) -> tuple[Step, Exception | None]:
        """Runs the step with everything watched; returns it, and its error."""
        watches = self._watches_now()
        models = models_of(watches)
        full_watch = _FullWatch(watches)
        capture = self._capture
        with Replayer(models, capture.calls, capture.start, ranks) as replayer:
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
        for watch, own in zip(watches, self._watches, strict=True):
            num_calls = len(self._capture.calls)
            watch.begin_at(max(0, own.batch_number - num_calls))
            watch.inputs.loop_batches = own.inputs.loop_batches
            watch.has_seen_loss = own.has_seen_loss
        return watches


class _FullWatch(Observer):
    """Watches a run as `guard.run()` does, and collects its bad frames."""

    def __init__(self, watches: Sequence[ModelWatch]) -> None:
        self._watches = watches
        self.frames: list[BadFrame] = []

    @contextlib.contextmanager
    def observing(self, models: Mapping[str, nn.Module]) -> Iterator[None]:
        """Watches what runs within."""
        for watch in self._watches:
            watch.attach()
        try:
            yield
            self._collect()
        finally:
            for watch in self._watches:
                watch.detach()

    def on_output(self, call: KeptCall, output: Any) -> None:
        """Records the loss that a function has returned."""
        loss = None if isinstance(call, ModelCall) else loss_in(output)
        if loss is not None:
            self._watches[0].record(_C.FrameKind.RECORDED, (["loss"], [loss]))

    def _collect(self) -> None:
        StepTensors(self._watches).scan(None, ScanLevel.ALL)
        for watch in self._watches:
            watch.frames.send()
            watch.frames.receive(is_lagged=False)
        self.frames += take_bad(self._watches, _C.Recorder.num_frames())


def _recorded(found: Step, frames: Sequence[BadFrame]) -> list[BadFrame]:
    """Takes over what the user has recorded, if no forward of the replay is bad."""
    kinds = {bad.frame.kind for bad in frames}
    if kinds & {_C.FrameKind.FORWARD, _C.FrameKind.RECORDED}:
        return []
    recorded = [b for b in found.frames if b.frame.kind == _C.FrameKind.RECORDED]
    return [bad for bad in recorded if not _is_norm(bad)]


def _is_norm(bad: BadFrame) -> bool:
    """True if it is the norm of the gradients, which have frames of their own."""
    return all(entry.label.name == NORM for entry in bad.bad_entries)


def _with_note(found: Step, note: str) -> Step:
    return dataclasses.replace(found, notes=[*found.notes, note])
