"""Replays a step with patches in place, and keeps what came of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...base.text import error_line
from ...base.torch_ops import base_of, has
from ...guard.explaining import USE_RUN
from ...guard.process import own_rank, world_size
from ...guard.report.notes import COMPUTED_OUTSIDE, NOT_IN_FLOAT64, SPENT
from ...guard.report.remedy import SAME, Remedy
from ..bounds import BUFFER, GRADIENT, LOSS, unusual_range
from ..budget import Budget
from ..calls import Call, name_outside
from ..named_tensors import state_by_name
from ..replayer import (
    LastOutputs,
    Observer,
    Patch,
    Replayer,
    ReplayResult,
    StepPart,
    patched_calls,
)
from ..tensor_kinds import kinds_of
from ..torch_calls import Key
from .call_patch import CallPatch, Change, InWider, RuleChange
from .edited_lines import remedy_of
from .failure import Failure
from .patches import Eagerly, FromLoss, InDtype, Repeated
from .source import Edit, NotWrittenError
from .true_step import Truth, compared_output, is_half, mean_of


@dataclass(frozen=True)
class Trial:
    """A patch to try.

    Attributes:
        remedy: It in words and as code.
        patch: The patch.
        edits: The same as edits of files, where it is one of code that can be written.
        is_exact: Whether it is equal in exact arithmetic, where the call has a value.
        stops_gradient: Whether no gradient goes through where it acts.
        settles: Whether guarded forms are worse where it is a remedy.
        keeps_loss: Whether it is a remedy only where the loss stays the same to the
            bit.
    """

    remedy: Remedy
    patch: Patch
    edits: tuple[Edit, ...] = ()
    is_exact: bool = False
    stops_gradient: bool = False
    settles: bool = False
    keeps_loss: bool = False

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes of torch calls that its patch makes."""
        return self.patch.changes if isinstance(self.patch, CallPatch) else ()


Attempts = Generator[Trial, bool, None]  # is sent whether it is a remedy


@dataclass(eq=False)
class Tried:
    """A change that was tried.

    Attributes:
        patches: The patches that were in place.
        remedy: What came of it.
        trial: The change, without those that it was made besides.
    """

    patches: Sequence[Patch]
    remedy: Remedy
    trial: Trial


@dataclass(frozen=True)
class AppliedPatches:
    """The patches that are in place while further ones are tried.

    Attributes:
        trials: They, in the order in which they were found.
    """

    trials: tuple[Trial, ...] = ()

    @functools.cached_property
    def calls(self) -> CallPatch:
        """All changes of torch calls, and what has become of them in runs."""
        changes = (change for each in self.trials for change in each.changes)
        return CallPatch(tuple(dict.fromkeys(changes)))

    @property
    def patches(self) -> tuple[Patch, ...]:
        """The patches: one for all changes of torch calls."""
        others = [e.patch for e in self.trials if not isinstance(e.patch, CallPatch)]
        return (self.calls, *others) if self.calls.changes else tuple(others)

    @property
    def keys(self) -> set[Key]:
        """The keys of the calls that are changed."""
        return {e.key for e in self.calls.changes if isinstance(e, RuleChange)}

    @property
    def wider(self) -> list[InWider]:
        """The changes that compute calls in a wider dtype."""
        return [each for each in self.calls.changes if isinstance(each, InWider)]

    @property
    def is_exact(self) -> bool:
        """True if all are equal in exact arithmetic, where the calls have a value."""
        return all(each.is_exact for each in self.trials)

    @property
    def moved(self) -> float | None:
        """The largest change of a finite result; 0 where each was seen to stay."""
        if self.is_exact:
            return None
        if self.patches == (self.calls,) and self.calls.leaves_finite:
            return 0.0
        return max(self.calls.moved.values(), default=0.0) or None

    def with_trial(self, trial: Trial) -> AppliedPatches:
        """These patches and a further one, which may stand for some of them."""
        kept = self.trials
        if _is_wider(trial):
            kept = tuple(each for each in kept if not _is_wider(each))
        return AppliedPatches((*kept, trial))

    @property
    def remedy(self) -> Remedy:
        """All of the patches as one remedy."""
        if len(self.trials) == 1:
            return self.trials[0].remedy
        text = _in_one(dict.fromkeys(each.remedy.text for each in self.trials))
        edits = dict.fromkeys(edit for each in self.trials for edit in each.edits)
        in_words = [each.remedy for each in self.trials if not each.edits]
        told = [part for each in in_words for part in each.parts or (each,)]
        try:
            return remedy_of(text, list(edits), told)
        except NotWrittenError:
            return Remedy(
                text, parts=tuple(replace(e.remedy, code="") for e in self.trials)
            )


def _in_one(texts: Iterable[str]) -> str:
    """Texts as one; those that differ in the call that they end with have one head."""
    calls = dict[str, list[str]]()
    for head, _, call in (text.partition(" in `") for text in texts):
        calls.setdefault(head, []).append(call)
    of = {head: ", `".join(filter(None, each)) for head, each in calls.items()}
    return ", and ".join(f"{head}{' in `' * bool(c)}{c}" for head, c in of.items())


def joined(trials: Sequence[Trial]) -> Trial:
    """Changes of torch calls as one."""
    whole = AppliedPatches(tuple(trials))
    edits = tuple(edit for trial in trials for edit in trial.edits)
    return replace(trials[0], remedy=whole.remedy, patch=whole.calls, edits=edits)


def _is_wider(trial: Trial) -> bool:
    return any(isinstance(each, InWider) for each in trial.changes)


_AT_POLE = (
    "The result is infinite in exact arithmetic, where no loss tells whether a number "
    "may stand in its place: none was tried."
)
_NOTHING = "0 / 0 is another number with it, and nothing tells whether the right one"
_LATER = 4  # steps: means and deviations are used from the third on; chosen
_ENOUGH = 2  # remedies that help; of changes on top of others, one
_FOR_MORE = 8  # forwards to spend, the default, for what is none of code; chosen


def _grown(sizes: Mapping[str, float], usual: float) -> str:
    """Names a gradient of a size that the run never had, or ""."""
    for name, largest in sizes.items():
        if GRADIENT.is_passed(largest, usual):
            grown = f"{largest:.3g}, against {usual:.3g} before or beside it"
            return f"the gradient of {name} is up to {grown}"
    return ""


def _grown_buffer(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Names the buffer that a replay has made far larger than before, or ""."""
    for name, size in after.items():
        if BUFFER.is_passed(size, before.get(name, size)):
            return f"{name} is {size:.3g} after it ({before[name]:.3g} before)"
    return ""


class Trials:
    """The trials on one step.

    Args:
        failure: The failure.
        replayer: Runs the step.
        budget: How many replays may be run: with as many forwards as the step has.
        step_seconds: How long a plain replay took.

    Attributes:
        truth: The loss and gradients in float64; None where they are not known.
        tried: What was tried or left out, in order.
        notes: Why something could not be tried, in sentences.
        applied: The patches that are in place.
        failed: What did not help besides them, with the call that was bad then.
        is_settled: Further guarded forms are worse than one that was tried.
        torch_calls: The torch calls of the step without any patch.
    """

    def __init__(
        self, failure: Failure, replayer: Replayer, budget: int, step_seconds: float
    ) -> None:
        self._failure, self.torch_calls = failure, failure.calls
        self.truth: Truth | None = None
        self.replayer = replayer
        self.tried: list[Tried] = []
        self.notes: list[str] = []
        self.applied = AppliedPatches()
        self.failed: list[tuple[Trial, int]] = []
        self.is_settled = False
        # A replay with a remedy is of all forwards of the step.
        self._num_forwards = budget * max(1, len(replayer.calls))
        self._budget = Budget(replayer, self._num_forwards, step_seconds)
        bad = [
            call
            for call in replayer.calls
            if any(kinds_of(held) for held in call.held.values())
        ]
        self._drops_gradients = bool(bad)
        further = [call for call in replayer.calls if call.has_graph]
        self._has_loss = all(call.returns_loss for call in [*bad, *further])
        # The output is all there is, unless it holds a loss.
        self._is_alone = not any(call.has_backward for call in replayer.calls)
        has_half = self._is_alone and is_half(replayer.calls, replayer.models.values())
        # The output is compared with that of a run in this dtype, once that is known.
        self._wide = torch.float32 if has_half else torch.float64
        self._true_output: list[torch.Tensor] | None = None

    @property
    def calls(self) -> list[Call]:
        """The calls of the step, with the patches that are in place."""
        return patched_calls(self.replayer.calls, self.applied.patches)

    @property
    def remedies(self) -> list[Remedy]:
        """Those that were tried or left out, in order."""
        return [each.remedy for each in self.tried]

    @property
    def found_remedy(self) -> bool:
        """True if something has made the step finite, near its true loss."""
        return any(each.is_recommended for each in self.remedies)

    @property
    def found_right(self) -> bool:
        """True if something has, and comes to what is right, as far as known."""
        return any(each.is_right for each in self.remedies)

    @property
    def is_over(self) -> bool:
        """True if enough has helped, or the budget is spent."""
        helped = [each for each in self.remedies if each.keeps_running]
        # One that changes results which were finite may be far from the truth.
        helped = [e for e in helped if (e.moves_results or 0.0) <= SAME]
        helped = [each for each in helped if not each.leaves]
        enough = 1 if self.applied.trials else _ENOUGH
        # One that is told in words is worth less than a line.
        has_code = any(each.code for each in helped) or len(helped) > enough
        is_enough = self.found_right and len(helped) >= enough and has_code
        return is_enough or not self.may_run()

    def may_run(self) -> bool:
        """True if the budget allows one replay more."""
        return self._budget.allows(len(self.replayer.calls))

    def renew(self) -> None:
        """Allows as many forwards again, within the same time."""
        self._budget.most = self.replayer.num_forwards + self._num_forwards

    def allow(self, num: int) -> bool:
        """Allows so many replays more, unless the budget is small; else returns False.

        Such as one in float64, which are not at the expense of remedies.
        """
        num_calls = len(self.replayer.calls)
        is_large = self._num_forwards >= _FOR_MORE * num_calls
        self._budget.most += num * num_calls * is_large
        return is_large

    def leave_out(self, trial: Trial) -> None:
        """Notes a trial that the budget has no replay for."""
        applied = self.applied.with_trial(trial)
        remedy = replace(applied.remedy, tried=False, why=SPENT)
        self.tried.append(Tried(applied.patches, remedy, trial))

    def go_on(self, applied: AppliedPatches) -> None:
        """Puts other patches in place, on which further ones are tried."""
        self.applied, self.failed = applied, []

    def attempt(self, trial: Trial, result: ReplayResult | None = None) -> bool:
        """Replays the step with a patch; returns True if that is a remedy.

        Args:
            trial: The patch. It is made besides those that are in place.
            result: The replay, where it was run before.
        """
        applied = self.applied.with_trial(trial)
        remedy, patches = applied.remedy, applied.patches
        tried = [each for each in self.remedies if each.tried]
        same = [e for e in tried if (e.code, e.file) == (remedy.code, remedy.file)]
        if remedy.code and same:  # the same, in another order
            return False
        if self._is_guess(applied):
            self.notes += [_AT_POLE] * (_AT_POLE not in self.notes)
            return False
        stays = self._failure.stays_within
        place = self._failure.place if stays else -1
        # Of a run that was made before, and of another batch, no distance is known.
        has_distance = result is None and all(each.is_same_step for each in patches)
        outputs = LastOutputs()
        result = result or self.run(patches, place, [outputs] * self._is_alone)
        if not all(each.is_applied for each in patches):
            return False  # what it reads was gone, or written to
        if result.error is not None and trial.changes:
            return False  # that form does not fit the call: it is no remedy
        table, within = result.table, self._failure.within
        left = stays and table is not None and table.bad_within(within)
        is_finite = result.is_clean and not left
        given = "" if is_finite else self._given_bad(result)
        if given:  # it is what it was, whatever the remedy has changed
            note = f"No remedy could be tried: {COMPUTED_OUTSIDE.format(given)}."
            self.notes += [note] * (note not in self.notes)
            return False
        is_whole = self._is_alone or (self._has_loss and result.has_backward)
        if is_finite and not is_whole:
            if not self.notes:  # loss and backward were not replayed
                name = name_outside(self.replayer.calls)
                outside = f" ({COMPUTED_OUTSIDE.format(name)})"
                why = outside if name else f": use `{USE_RUN}`"
                first = remedy.code.partition("\n")[0]
                code = f" (`{first}`)" if first else ""
                self.notes.append(
                    f"Tried: {remedy.text}{code}: the forward is finite; "
                    f"loss and backward could not be tried{why}."
                )
            return False
        if not is_finite and result.error is None:
            self.failed.append((trial, result.bad_call))
        loss = loss_of(result) if is_finite else None
        before = self._failure.losses
        is_kept = is_finite and losses_of(result)[: len(before)] == before
        if trial.keeps_loss and not is_kept:
            return False
        facts: dict[str, Any] = {"is_finite": is_finite, "loss": loss}
        if result.error is not None:
            why = f"the replay raised {error_line(result.error)}"
            facts |= {"tried": False, "why": why}
        facts["rank"] = own_rank() if world_size() > 1 else None
        facts["in_float64"] = any(e.wide is torch.float64 for e in applied.wider)
        if is_finite:
            facts |= self._judged(applied, loss, result)
        is_known = result.has_backward or facts.get("true_loss") is not None
        if is_finite and self._is_alone and has_distance and not is_known:
            dtypes = [each.dtype for each in patches if isinstance(each, InDtype)]
            true = self._output_in_wider()
            facts |= compared_output(outputs.tensors, true, self._wide, dtypes)
        remedy = replace(remedy, **facts)
        text = remedy.text  # which the budget may have left out before
        self.tried = [e for e in self.tried if e.remedy.tried or e.remedy.text != text]
        self.tried.append(Tried(patches, remedy, trial))
        self.is_settled |= trial.settles and remedy.is_right
        return remedy.is_recommended and not remedy.leaves

    def _judged(
        self, applied: AppliedPatches, loss: float | None, result: ReplayResult
    ) -> dict[str, Any]:
        """The fields of a remedy that say whether it is right, and what it breaks."""
        if not all(patch.is_same_step for patch in applied.patches):
            return {"usual": self._unusual(loss)}
        left = _grown_buffer(self.replayer.buffer_sizes, result.buffer_sizes)
        has_output = bool(self._true_output) and self._wide is torch.float64
        is_known = self.truth is not None or has_output
        if not is_known and applied.is_exact:
            self.find_truth(applied.patches)
        facts: dict[str, Any] = {}
        usual = self._failure.usual_loss
        if self.truth is not None:
            own = self._failure.losses
            facts = self.truth.compared(loss, result, usual, own)
        elif 0 < len(result.losses) == len(self._failure.losses):
            facts["plain_loss"] = mean_of(self._failure.losses)
        is_right = facts.get("misses") == ""
        loss, broken = None if is_right else loss, ""
        if loss is not None and usual is not None and LOSS.is_passed(abs(loss), usual):
            broken = f"a loss of {loss:.3g} after a median of {usual:.3g}"
        elif "plain_loss" not in facts:
            facts["usual"] = self._unusual(loss)
        if not broken and not is_right:
            broken = _grown(result.gradient_sizes, self._failure.usual_gradient)
        stops = any(each.stops_gradient for each in applied.trials)
        sizes = result.gradient_sizes
        is_flat = bool(sizes) and not any(sizes.values())
        is_flat = is_flat and (self.truth is None or not self.truth.is_flat)
        facts["moves_results"] = applied.moved
        near = applied.calls.near_zero
        left = left or min(near, key=near.__getitem__, default="")
        left = left or self._of_nothing(applied, result)
        broken = broken or self._later(applied.patches)
        facts |= {"breaks": broken, "leaves": left, "is_flat": is_flat}
        return {**facts, "stops_gradient": stops}

    def _later(self, patches: Sequence[Patch]) -> str:
        """A text where what the step keeps is non-finite in one of the next, or ""."""
        is_asked = self._failure.is_kept and self.replayer.ranks.is_alone
        if not (is_asked and self.allow(_LATER)):
            return ""
        result = self.run([*patches, Repeated(_LATER)])
        is_bad = result.error is None and not result.is_clean
        return f"it is non-finite within {_LATER} such steps" * is_bad

    def _unusual(self, loss: float | None) -> tuple[float, float] | None:
        """See `Remedy.usual`."""
        if loss is None or self.truth is not None:
            return None
        return unusual_range(abs(loss), self._failure.usual_losses)

    def _of_nothing(self, applied: AppliedPatches, result: ReplayResult) -> str:
        """A warning where 0 / 0 becomes a number that no loss judges, or ""."""
        op = self._failure.found.op
        is_judged = result.has_backward or self.truth is not None
        if is_judged or op is None or not applied.keys:
            return ""
        is_of_zeros = len(op.operands) == 2 and not any(op.operands)
        return _NOTHING * (is_of_zeros and has(base_of(op.name), "divides"))

    def _is_guess(self, applied: AppliedPatches) -> bool:
        """True if a number is tried where the result is infinite in exact arithmetic.

        A training's loss and gradients show what such a number makes of the step.
        """
        is_last = self._failure.place == len(self.replayer.calls) - 1
        is_of_calls = bool(applied.keys) and not applied.is_exact
        return self._is_alone and self._failure.is_at_pole and is_last and is_of_calls

    def find_truth(self, patches: Sequence[Patch] = ()) -> None:
        """Replays the step in float64, with exact forms in place.

        Args:
            patches: These.
        """
        wide = self._failure.in_float64 if self.replayer.ranks.is_alone else None
        if wide is None or not self.allow(1):
            return
        found = self._failure.found
        if not self.may_run():
            found.notes += [NOT_IN_FLOAT64] * (NOT_IN_FLOAT64 not in found.notes)
        else:
            outputs = LastOutputs()
            result = self.run([wide, *patches], observers=[outputs])
            is_whole = result.error is None and result.is_clean
            if self._is_alone and is_whole and self._wide is torch.float64:
                self._true_output = outputs.tensors
            weights = state_by_name(self.replayer.models)
            held = [weights[name].detach() for name in result.gradients]
            self.truth = Truth.of(
                *(result, losses_of(result), self.torch_calls, held),
                has_slopes=not self._failure.has_tie,
            )

    def _output_in_wider(self) -> list[torch.Tensor]:
        """The last output in the wider dtype; none where it is not known."""
        if self._true_output is None and self._wide is torch.float32:
            outputs = LastOutputs()
            # Compiled code has casts of its own, which no autocast changes any more.
            patches = [*self._others, Eagerly(), InDtype(self._wide)]
            result = self.replayer.run(StepPart(), patches, [outputs])
            is_whole = result.error is None and result.is_clean
            self._true_output = outputs.tensors if is_whole else []
        return self._true_output or []

    def _given_bad(self, result: ReplayResult) -> str:
        """The name of a bad tensor that a call has from code not replayed, or ""."""
        if result.bad_call < 0:
            return ""
        outside = self.replayer.calls[result.bad_call].computed_outside()
        return next((name for name, tensor in outside if kinds_of(tensor)), "")

    def run(
        self,
        patches: Sequence[Patch],
        traced: int = -1,
        observers: Sequence[Observer] = (),
        has_backward: bool = True,
    ) -> ReplayResult:
        """Replays the step with patches, under observers; see `Replayer.run()`."""
        part = StepPart(traced, has_calls=traced >= 0, has_backward=has_backward)
        from_loss = [FromLoss()] * self._drops_gradients
        patches = [*self._others, *patches, *from_loss]
        return self.replayer.run(part, patches, observers)

    @property
    def _others(self) -> list[Patch]:
        """The patches that are in place in each run."""
        return [Eagerly()] * self._failure.is_compiled


def losses_of(result: ReplayResult) -> list[float]:
    """The losses, one of each micro-batch; none where one is not finite."""
    losses = [float(loss) for loss in result.losses]
    return losses if all(map(math.isfinite, losses)) else []


def loss_of(result: ReplayResult) -> float | None:
    """The loss; the mean of those of micro-batches."""
    losses = losses_of(result)
    return mean_of(losses) if losses else None
