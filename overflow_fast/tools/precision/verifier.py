"""Runs a model under autocast with a list of modules in float32, and widens the list.

A list that fails is widened by what the verdict on the run says: by the module that
raised, or made values that are not finite; by the module whose output, or whose input's
gradient, left the range of float16 in the code around a kept one. Where gradients
overflow otherwise the loss scale is lowered; where values differ too much, the layers
with the largest errors are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ... import _C
from ...base.modules import is_within, named_modules
from ...base.text import error_line
from ...detector.selection import Selection, Wanted
from ...guard.verdict.attribution import attribute
from ...guard.verdict.bad_frames import collect, in_order
from ...guard.watching.watch import ModelWatch
from .batch_runs import BatchRuns, RunResult
from .layer_judge import Thresholds
from .layers import DTYPES, Layer
from .precision_advice import PrecisionCheck, is_kept

_WANTED = Wanted(activations=True, grad_outputs=True)
_RECORDER = dict.fromkeys(("step_mode", "lists_calls", "watches_gradients"), True)
_ANY = _C.NAN | _C.POSITIVE_INF | _C.NEGATIVE_INF
_Usual = frozenset[tuple[int, _C.Role]]


class RunWatch:
    """A watch of one run, and the verdict on it.

    Args:
        model: The model.
        usual: The `bad` of a run in float32: what is not finite there either.

    Attributes:
        bad: The modules with bad inputs, outputs or gradients, by index and role.
        is_backward: Gradients alone were not finite.
        place: The first bad value, in words; "" if there is none.
    """

    def __init__(self, model: nn.Module, usual: _Usual = frozenset()) -> None:
        self._model = model
        self._watch = ModelWatch(
            *(model, "", _WANTED, Selection(None, ()), 0, _RECORDER, lambda *_: None)
        )
        self._watch.follow_rules(
            lambda names: (
                lambda place: _ANY * ((place.module, place.label.role) in usual)
            )
        )
        self._failed_in: str | None = None
        self._made: list[str] = []  # the modules that made bad values in forward
        self._first: str | None = None  # the module of the first bad value
        self._after: str | None = None  # the one behind which values were finite last
        self.bad: _Usual = frozenset()
        self.is_backward = False
        self.place = ""

    def __enter__(self) -> RunWatch:
        self._watch.attach()
        return self

    def __exit__(self, *exception: object) -> None:
        self._watch.detach()
        frames = in_order(collect([self._watch]))
        self.bad = frozenset(
            (frame.frame.module, entry.role)
            for frame in frames
            for entry in frame.bad_entries
        )
        made = [
            self._watch.name_at(frame.frame.module)
            for frame in frames
            if not frame.bad_inputs and not frame.is_backward
        ]
        self._made = [n for n in made if not any(is_within(m, n) for m in made)]
        self.is_backward = bool(frames) and frames[0].is_backward
        verdict = attribute(frames, [self._watch])
        if verdict.first is not None:
            self._first = verdict.first.fqn
            self.place = f"{verdict.first.kind} of {self._first}"
            after = verdict.origin.after
            self._after = "" if after == "the model" else after or None
        self._watch.end_judgement(is_lagged=False)

    @property
    def has_found(self) -> bool:
        """True if a module raised, made or was given what is not finite."""
        return self._failed_in is not None or self._first is not None

    def note_error(self, error: BaseException) -> None:
        """Notes what the run has raised: in the innermost module that was running."""
        names = {id(module): name for name, module in named_modules(self._model)}
        at = error.__traceback__
        while at is not None:
            running = id(at.tb_frame.f_locals.get("self"))
            self._failed_in = names.get(running, self._failed_in)
            at = at.tb_next

    def suspects(self, kept: Sequence[str], layers: Sequence[str]) -> list[str]:
        """The modules that the list lacks, by the verdict.

        Those that raised, or made values which are not finite. Where a kept module was
        given such values, the layer that returned last before: code between the two
        made inf of what it returned in float16. Of gradients a layer behind which they
        were finite last, since it, or code in front of it, made them; where that one is
        kept, the module that got its input's gradient, out of the range of float16.

        Args:
            kept: The modules that run in float32.
            layers: The names of the layers, in the order in which they return.
        """
        if self._failed_in is not None:
            found = [self._failed_in]
        elif self.is_backward:
            is_left = self._after is not None and not is_kept(self._after, kept)
            one = self._after if is_left else self._first
            found = [name for name in layers if name == one]
        elif self._first is not None and is_kept(self._first, kept):
            before = [] if self._after is None else [self._after]
            found = [name for name in layers if is_kept(name, before)][-1:]
        else:
            found = self._made
        return [name for name in found if not is_kept(name, kept)]


_SMALLER = 2**4  # a loss scale after gradients have overflowed
_STEP = 8  # one of so many of the remaining layers is added where values differ


class Verifier:
    """Runs a model with lists of modules in float32, and widens a list that fails.

    Args:
        steps: Runs the model.
        rows: What is known of the layers.
        limits: The thresholds.
        max_rounds: How often a list may be widened, or the loss scale lowered.
    """

    def __init__(
        self,
        steps: BatchRuns,
        rows: Sequence[Layer],
        limits: Thresholds,
        max_rounds: int,
    ) -> None:
        self._steps = steps
        self._rows = rows
        self._limits = limits
        self._max_rounds = max_rounds
        watch = RunWatch(steps.model)
        self.reference = steps.run(watch)
        self._usual = watch.bad
        self._layers = [row.name for row in rows if not row.has_inner]

    def check(self, dtype: str, loss_scale: float) -> PrecisionCheck:
        """Runs a dtype with the list that the rows give for it.

        Args:
            dtype: "float16" or "bfloat16".
            loss_scale: The loss scale to begin with.
        """
        kept = [row.name for row in self._rows if dtype not in row.runs_in]
        widened: list[str] = []
        last, vain, place = list[str](), set[str](), ""
        for runs in range(1, self._max_rounds + 2):
            watch = RunWatch(self._steps.model, self._usual)
            outcome = self._run(watch, dtype, kept, loss_scale)
            check = self._judged(dtype, kept, outcome, watch, loss_scale)
            check = replace(check, widened=widened, runs=runs)
            if check.passed or runs > self._max_rounds:
                break
            if last and watch.is_backward and watch.place == place:
                # Code in front of these modules made the gradient: they are let go.
                vain.update(last)
                kept, widened = kept[: -len(last)], widened[: -len(last)]
            more = [] if check.finite else watch.suspects(kept, self._layers)
            more = [name for name in more if name not in vain]
            last, place = more, watch.place
            if not more and watch.is_backward and loss_scale > 1:
                loss_scale = max(1.0, loss_scale / _SMALLER)
                continue
            more = more or self._worst(dtype, kept)
            if not more:
                break
            kept, widened = [*kept, *more], [*widened, *more]
        return check

    def _run(
        self, watch: RunWatch, dtype: str, kept: list[str], scale: float
    ) -> RunResult | str:
        """Runs the model; returns in words what it raises."""
        try:
            return self._steps.run(watch, DTYPES[dtype], kept, scale)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            watch.note_error(error)
            return error_line(error)

    def _judged(
        self,
        dtype: str,
        kept: list[str],
        outcome: RunResult | str,
        watch: RunWatch,
        loss_scale: float,
    ) -> PrecisionCheck:
        if isinstance(outcome, str):
            return PrecisionCheck(dtype, kept, loss_scale, failure=outcome)
        difference = outcome.difference(self.reference)
        gradients = outcome.gradient_difference(self.reference)
        failure = self._failure(outcome, difference, gradients)
        if not outcome.is_finite and not watch.has_found:
            failure += ", and no module made it: look at the code of the loss"
        return PrecisionCheck(
            dtype=dtype,
            kept=kept,
            loss_scale=loss_scale,
            failure=failure,
            finite=outcome.is_finite,
            loss=outcome.loss,
            loss_difference=difference,
            gradient_difference=gradients,
        )

    def _failure(
        self, outcome: RunResult, difference: float, gradients: float | None
    ) -> str:
        if not outcome.is_finite:
            return "not finite"
        if difference > self._limits.max_loss_difference:
            what = "the loss differs" if outcome.losses else "outputs differ"
            return f"{what} by more than {self._limits.max_loss_difference:.2%}"
        if (gradients or 0.0) > self._limits.max_gradient_difference:
            most = self._limits.max_gradient_difference
            return f"gradients differ by more than {most:.2%}"
        return ""

    def _worst(self, dtype: str, kept: Sequence[str]) -> list[str]:
        """The layers with the largest errors of those that are not kept yet."""
        rest = [row for row in self._rows if not is_kept(row.name, kept)]
        rest.sort(key=lambda row: -row.ratios.get(dtype, 0.0))
        return [row.name for row in rest[: max(1, len(rest) // _STEP)]]
