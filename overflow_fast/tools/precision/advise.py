"""`advise_precision()`: which modules can run in which dtype, verified by runs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from ... import _C
from ...base.modules import children_of, is_within, named_modules, step_of
from ...base.tensors import check_number, devices_of, model_loss_in
from ...base.text import dtype_name, error_line
from ...detector.observers import without_observers
from ...detector.selection import Selection, Wanted
from ...explainer.effects.rule import EffectRule, StoppedError
from ...explainer.remedies.keep_in_fp32 import keep_in_fp32, shortened
from ...explainer.wider import HALF
from ...guard.undo.random import RandomStates
from ...guard.verdict.attribution import attribute
from ...guard.verdict.bad_frames import BadFrame, collect, in_order
from ...guard.verdict.call_order import Calls
from ...guard.watching.watch import ModelWatch
from ...scanner.ops import are_nonfinite
from ...torch_internals.module_internals import is_dropout
from ...torch_internals.replaying import uncompiled_calls
from .copies import check_model, copied_batch, on_copies
from .half import HalfLists, onnx_scopes
from .layers import DTYPES, LayerProbe, RelativeDifference, floats_in
from .precision_advice import (
    LayerAdvice,
    LayerJudge,
    PrecisionAdvice,
    PrecisionCheck,
    Thresholds,
)

# The modules that a run's non-finite values come from, by the verdict on it.


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
        place: The kind and the module of the first bad entry; None if there is none.
        is_backward: Gradients alone were not finite.
    """

    def __init__(self, model: nn.Module, usual: _Usual = frozenset()) -> None:
        self._model = model
        self._failed_in: str | None = None
        self._watch = ModelWatch(
            *(model, "", _WANTED, Selection(None, ()), 0, _RECORDER, lambda *_: None)
        )
        self._watch.follow_rules(
            lambda names: (
                lambda place: _ANY * ((place.module, place.label.role) in usual)
            )
        )
        self._given: list[tuple[str, BadFrame]] = []
        self._made: list[str] = []
        self._after: list[str] = []
        self.bad: _Usual = frozenset()
        self.place: tuple[str, str] | None = None
        self.is_backward = False

    def __enter__(self) -> RunWatch:
        self._watch.attach()
        return self

    def __exit__(self, *exception: object) -> None:
        self._watch.detach()
        frames = in_order(collect([self._watch]))
        self._calls = Calls([self._watch])
        self.bad = frozenset(
            (frame.frame.module, entry.role)
            for frame in frames
            for entry in frame.bad_entries
        )
        for frame in frames:
            name = self._watch.name_at(frame.frame.module)
            if frame.bad_inputs:
                self._given.append((name, frame))
            elif not frame.is_backward:
                self._made.append(name)
        self.is_backward = bool(frames) and frames[0].is_backward
        verdict = attribute(frames, [self._watch])
        if verdict.first is not None:
            self.place = verdict.first.kind, verdict.first.fqn
            after = verdict.origin.after
            root = "" if after == "the model" else after
            self._after = [root] if after else []
        self._watch.end_judgement(is_lagged=False)

    def note_error(self, error: BaseException) -> None:
        """Notes what the run has raised: in the innermost module that was running."""
        names = {id(module): name for name, module in named_modules(self._model)}
        at = error.__traceback__
        while at is not None:
            running = id(at.tb_frame.f_locals.get("self"))
            self._failed_in = names.get(running, self._failed_in)
            at = at.tb_next

    def names(self) -> list[str]:
        """The innermost modules that made values, or gradients, which are not finite.

        The one that raised an error comes before these. Of gradients it is the one
        behind which they were finite last: it, or code in front of it, made them.
        """
        if self._failed_in is not None:
            return [self._failed_in]
        made = self._after if self.is_backward else self._made
        return [n for n in made if not any(is_within(m, n) for m in made)]

    def producers(self, kept: Sequence[str]) -> list[str]:
        """The modules that returned what a kept one was given, where that overflowed.

        In forward the code between them made inf of what such a module had returned;
        in backward the gradient of a kept module's input left the range of float16.

        Args:
            kept: The modules that run in float32.
        """
        if self._failed_in is not None or self.place is None:
            return []
        if self.is_backward:
            _, name = self.place
            found = [name] if any(_is_kept(n, kept) for n in self._after) else []
        else:
            given = [frame for name, frame in self._given if _is_kept(name, kept)]
            found = [name for frame in given for name in self._called_before(frame)]
        return [n for n in dict.fromkeys(found) if not _is_kept(n, kept)]

    def _called_before(self, frame: BadFrame) -> list[str]:
        """The innermost module that was called last before, if it returned no inf."""
        called = self._calls.find(self._watch, frame.frame.order)
        around = self._calls.chain(called)[1:2]
        found, end = None, frame.frame.order
        inner = self._calls.last_within(around[0] if around else None, end)
        while inner is not None:
            found = inner.call
            inner = self._calls.last_within(inner, found.order)
        if found is None or (found.module, _C.Role.OUTPUT) in self.bad:
            return []
        return [self._watch.name_at(found.module)]


def _is_kept(name: str, kept: Iterable[str]) -> bool:
    return any(name == each or is_within(name, each) for each in kept)


# Checks of a list: the whole model under autocast, against float32.


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
        rows: Sequence[LayerAdvice],
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
        self._has_inner = {
            name: bool(children_of(module))
            for name, module in named_modules(steps.model)
        }

    def check(self, dtype: str, loss_scale: float) -> PrecisionCheck:
        """Runs a dtype with the list that the rows give for it.

        Args:
            dtype: "float16" or "bfloat16".
            loss_scale: The loss scale to begin with.
        """
        kept = [row.name for row in self._rows if dtype not in row.runs_in]
        widened: list[str] = []
        last, vain = list[str](), set[str]()
        place: tuple[str, str] | None = None
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
            more = [] if check.finite else self._origins(watch, kept)
            more = [name for name in more if name not in vain]
            last, place = more, watch.place
            if not more and watch.is_backward and loss_scale > 1:
                loss_scale = max(1.0, loss_scale / _SMALLER)
                continue
            more = more or ([] if check.finite else watch.names())
            more = [n for n in more if not _is_kept(n, kept)]
            more = more or self._worst(dtype, kept)
            if not more:
                break
            kept, widened = [*kept, *more], [*widened, *more]
        return check

    def _origins(self, watch: RunWatch, kept: list[str]) -> list[str]:
        """The modules that keep values, or gradients, in range if they are in float32.

        Of gradients a smaller loss scale may do it, too: only modules without others
        within them are kept before that.
        """
        found = watch.producers(kept)
        if found and not watch.is_backward:
            return found
        origins = [n for n in watch.names() if not _is_kept(n, kept)]
        if watch.is_backward:
            origins = [n for n in origins if not self._has_inner[n]]
        return list(dict.fromkeys([*origins, *found]))

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
        if not outcome.is_finite and not watch.names():
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
        rest = [row for row in self._rows if not _is_kept(row.name, kept)]
        rest.sort(key=lambda row: -row.ratios.get(dtype, 0.0))
        return [row.name for row in rest[: max(1, len(rest) // _STEP)]]


def advise_precision(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[..., torch.Tensor] | None = None,
    *,
    headroom_bits: float = 1.0,
    max_error: float = 8.0,
    max_float8_error: float = 2.0,
    max_underflow: float = 0.05,
    max_loss_difference: float = 0.01,
    max_gradient_difference: float = 0.1,
    max_rounds: int = 4,
    cast: Literal["autocast", "half"] = "autocast",
) -> PrecisionAdvice:
    """Finds which modules can run in float16, bfloat16 and float8, and which must not.

    Runs the model in float32, forward and backward, and looks at each layer: a module
    without submodules, or with parameters of its own. It compares magnitudes with the
    range of each dtype, and computes each call again with inputs and weights cast to
    float16 and bfloat16; products of inputs and a matrix also with both rounded to
    float8 (e4m3, one scale for each tensor, simulated by casts). It judges the
    relative L2 error against the error that rounding explains, sqrt(0.18 n) u, with u
    half of the dtype's epsilon and n the roundings of inputs, weights and output
    (Widrow and Kollar, Quantization Noise, 2008, chapter 12).

    Then it runs the whole model under autocast to float16 and bfloat16, with
    `keep_in_fp32` on the layers that must stay. A list that fails is widened: by the
    modules that made non-finite values or gradients, or by the layers with the largest
    errors; by the modules that made a kept one's float16 input, where that or its
    gradient overflows. Then, where gradients overflow, the loss scale is lowered. Code
    between modules, such as attention scores and residual sums, is covered by these
    runs only.

    All runs use copies of weights, buffers and batches: the model, its gradients, and
    the random states are afterwards what they were, bit for bit. It needs memory for
    a copy of the weights in float32, and for three sets of gradients. Compiled code
    runs eagerly; reentrant checkpointing is not supported. Layers that draw random
    numbers are judged by magnitudes alone, modules that call others by those of their
    own parameters. Nothing is known of values that the batches do not cause: give
    typical batches, to a model that has trained for a while. Incurs CPU-GPU syncs for
    each layer.

    Args:
        model: The model, not wrapped by DDP and not sharded. Half-precision weights
            are cast to float32 in the copies.
        batches: Batches, each a tuple or list of arguments, a dict of keyword
            arguments, or the one argument. All are kept: give a few.
        loss: Takes the batch, or the model and the batch, calls the model and returns
            what to call `backward()` on, and leaves autocast off. None: the loss that
            the model returns; if it returns none, the forward alone is judged.
        headroom_bits: A layer must stay if its inputs, outputs or weights have fewer
            bits left: they could not double once. The loss scale leaves as many.
        max_error: A layer must stay if its error is more than so many times what
            rounding explains. Healthy layers are near 1; 8 is a loss of 3 bits.
        max_float8_error: The same for float8, whose error is 3.7 % to begin with.
        max_underflow: A layer must stay out of float16 if a larger share of its
            gradients becomes 0 there with the safe loss scale. The default is a
            judgement: no measurement says which share matters for a model.
        max_loss_difference: A check fails if the losses differ by a larger part.
        max_gradient_difference: A check fails if the gradients differ by a larger
            part of their L2 norm: 0.1 is a cosine of about 0.995.
        max_rounds: How often a list may be widened, or the loss scale lowered.
        cast: How the model will run: under "autocast", or with weights and inputs in
            "half" precision, without autocast, as for an export. For the latter the
            forward alone is judged, on copies of the model in evaluation mode; a list
            is what `explain()` has tried, and bfloat16 may be twice as far off.

    Returns:
        The advice.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the model cannot run on copies, there are no batches, a
            threshold is out of range, or the run in float32 is not finite.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1))
        >>> advice = advise_precision(model, [torch.ones(1, 2)])
        >>> advice.bfloat16, advice.code
        (['0'], '')
    """
    function = step_of(model, loss)
    check_model(model)
    limits = Thresholds(
        headroom_bits,
        max_error,
        max_float8_error,
        max_underflow,
        max_loss_difference,
        max_gradient_difference,
    )
    _check_numbers(limits, max_rounds)
    if cast not in ("autocast", "half"):
        raise ValueError(f"cast must be 'autocast' or 'half', got {cast!r}")
    steps = BatchRuns(model, function, _listed(batches), loss is not None)
    probe = LayerProbe(model)
    found = steps.run(probe, dropout=True, on_gradients=probe.add_gradients)
    if not found.is_finite:
        raise ValueError(
            "batches must give a finite loss and finite gradients in float32; use "
            "overflow_fast.explain(model, batch, loss) to find out why they do not"
        )
    judge = LayerJudge(list(probe.layers.values()), limits)
    rows = judge.rows()
    if cast == "half":
        halves = _half_lists(model, steps, limits, max_rounds, loss)
        made = list(map(halves.check, ("bfloat16", "float16")))
        return _advice(model, rows, made, judge, found, probe.not_seen, [], cast)
    verifier = Verifier(steps, rows, limits, max_rounds)
    checks = [
        verifier.check("bfloat16", 1.0),
        verifier.check("float16", judge.loss_scale or 1.0),
    ]
    notes = _notes(model, verifier.reference)
    return _advice(model, rows, checks, judge, found, probe.not_seen, notes)


def _half_lists(
    model: nn.Module,
    steps: BatchRuns,
    limits: Thresholds,
    max_rounds: int,
    loss: Callable[..., torch.Tensor] | None,
) -> HalfLists:
    def run(copy: nn.Module, batch: Any) -> Any:
        function = step_of(copy, None)
        return function(batch)

    if loss is not None:
        raise ValueError("loss must be None with cast='half': the forward is judged")
    return HalfLists(model, steps.batches, limits, max_rounds, run)


def _listed(batches: Iterable[Any]) -> list[Any]:
    if isinstance(batches, (torch.Tensor, Mapping, str)):
        raise TypeError(
            "batches must be a list of batches, got one "
            f"{type(batches).__name__}: use [batch]"
        )
    try:
        found = list(batches)
    except TypeError:
        raise TypeError(
            f"batches must be a list of batches, got {type(batches).__name__}"
        ) from None
    if not found:
        raise ValueError("batches must hold at least one batch, got none")
    return found


def _check_numbers(limits: Thresholds, max_rounds: int) -> None:
    for name, value in (*vars(limits).items(), ("max_rounds", max_rounds)):
        check_number(name, value)
        if not value >= 0:
            raise ValueError(f"{name} must be 0 or more, got {value}")


def _advice(
    model: nn.Module,
    rows: Sequence[LayerAdvice],
    checks: list[PrecisionCheck],
    judge: LayerJudge,
    found: RunResult,
    not_seen: list[str],
    notes: list[str],
    how: str = "autocast",
) -> PrecisionAdvice:
    names = [name for name, _ in named_modules(model)]
    cast = any(each.dtype in HALF for each in model.parameters())
    passed = [check for check in checks if check.passed]
    best = min(passed, key=lambda check: len(check.kept), default=None)
    is_half = how == "half"
    codes = {
        check.dtype: _half_code(check, names)
        if is_half
        else _code(check.kept, names, cast)
        for check in passed
    }
    kept = {check.dtype: [*check.kept, *check.until] for check in passed}
    lists = {check.dtype: _may_run(rows, check) for check in checks}
    lists["float8"] = [row.name for row in rows if "float8" in row.runs_in]
    in_half = set(lists["bfloat16"]) | set(lists["float16"])
    scale = next(check.loss_scale for check in checks if check.dtype == "float16")
    return PrecisionAdvice(
        rows=list(rows),
        float32=[row.name for row in rows if row.name not in in_half],
        **lists,
        dtype="float32" if best is None else best.dtype,
        code="" if best is None else codes[best.dtype],
        codes=codes,
        checks=checks,
        loss=found.loss,
        loss_scale=None if judge.loss_scale is None else scale,
        not_seen=not_seen,
        notes=notes,
        cast=how,
        modules=kept,
        onnx={dtype: onnx_scopes(model, each) for dtype, each in kept.items()},
    )


def _may_run(rows: Sequence[LayerAdvice], check: PrecisionCheck) -> list[str]:
    """The layers that a check has run in its dtype; none if it has not passed."""
    return [
        row.name for row in rows if check.passed and not _is_kept(row.name, check.kept)
    ]


def _code(kept: Sequence[str], names: Sequence[str], cast: bool) -> str:
    if not kept:
        return ""
    line = f"overflow_fast.keep_in_fp32(model, {shortened(kept, names)})"
    return f"model.float(); {line}" if cast else line


def _half_code(check: PrecisionCheck, names: Sequence[str]) -> str:
    line = f"model.to(torch.{check.dtype})"
    if not check.kept:
        return line
    until = f", until={check.until}" if check.until else ""
    kept = shortened(check.kept, names)
    return f"{line}; overflow_fast.keep_in_fp32(model, {kept}{until})"


def _notes(model: nn.Module, reference: RunResult) -> list[str]:
    notes = []
    halves = {dtype_name(p.dtype) for p in model.parameters() if p.dtype in HALF}
    if halves:
        notes.append(
            f"Weights in {' and '.join(sorted(halves))} were cast to float32 for all "
            "runs: the advice is for `model.float()` under autocast."
        )
    if reference.has_drawn:
        notes.append(
            "The model draws random numbers (dropout modules were off in the checks): "
            "part of the differences may come from these."
        )
    if not reference.gradients:
        notes.append("Nothing is known of gradients: there was no backward.")
    return notes


# Runs on copies of the weights: in float32, and under autocast.


Gradients = dict[int, torch.Tensor]


@dataclass
class RunResult:
    """The result of a run.

    Attributes:
        losses: The loss of each batch; empty if there is none.
        outputs: The floats returned for each batch, if there is no loss.
        gradients: The gradients of the parameters by name, summed over the batches.
        has_drawn: Whether the model has drawn random numbers.
    """

    losses: list[float] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    has_drawn: bool = False

    @property
    def loss(self) -> float | None:
        """The mean of the losses, or None."""
        return sum(self.losses) / len(self.losses) if self.losses else None

    @property
    def is_finite(self) -> bool:
        """True if losses, gradients and, without a loss, outputs are finite."""
        is_bad = any(are_nonfinite([*self.outputs, *self.gradients.values()]))
        return all(map(math.isfinite, self.losses)) and not is_bad

    def difference(self, reference: RunResult) -> float:
        """The relative difference of the losses, or of outputs where there are none."""
        found = RelativeDifference()
        for loss, golden in zip(self.losses, reference.losses, strict=True):
            found.add(torch.tensor(loss), torch.tensor(golden))
        for output, golden_output in zip(self.outputs, reference.outputs, strict=True):
            found.add(output, golden_output)
        return found.relative

    def gradient_difference(self, reference: RunResult) -> float | None:
        """The relative L2 difference of all gradients, or None without gradients."""
        found = RelativeDifference()
        for name, golden in reference.gradients.items():
            found.add(self.gradients[name], golden)
        return found.relative if reference.gradients else None


class BatchRuns:
    """Batches that a model can be run on again and again.

    Each run begins with the model's own weights and the same random states, and
    leaves no trace.

    Args:
        model: The model.
        function: Takes a batch, and returns the loss or what the model returns.
        batches: The batches.
        has_loss: Whether the function was given to compute a loss.
    """

    def __init__(
        self,
        model: nn.Module,
        function: Callable[[Any], Any],
        batches: Sequence[Any],
        has_loss: bool,
    ) -> None:
        self.model = model
        self._function = function
        self.batches = batches
        self._has_loss = has_loss
        self._has_run = False
        self._devices = devices_of([model])
        self.device = self._devices[0].type if self._devices else "cpu"

    def run(
        self,
        watch: AbstractContextManager[object],
        autocast: torch.dtype | None = None,
        names: Sequence[str] = (),
        scale: float = 1.0,
        dropout: bool = False,
        on_gradients: Callable[[Gradients], None] | None = None,
    ) -> RunResult:
        """Runs forward and backward on every batch.

        Args:
            watch: Is entered around the run.
            autocast: The dtype of autocast; None for float32.
            names: The modules that `keep_in_fp32` keeps.
            scale: The loss scale; it is taken out of the gradients again.
            dropout: Whether dropout modules work as the model has them, or not.
            on_gradients: Is given the gradients of each batch by parameters' ids.
        """
        outcome = RunResult()
        with ExitStack() as stack:
            stack.enter_context(_told_of_effects())
            stack.enter_context(_calm(self.model))
            stack.enter_context(watch)
            stack.enter_context(on_copies(self.model))
            if not dropout:
                for module in filter(is_dropout, self.model.modules()):
                    module.training = False
            if names:
                stack.enter_context(keep_in_fp32(self.model, names))
            before = RandomStates(self._devices)
            if self._has_run:  # what the first run has done is not done again
                stack.enter_context(EffectRule().applied(math.inf))
            self._has_run = True
            for batch in self.batches:
                self._run_one(outcome, batch, autocast, scale, on_gradients)
            outcome.has_drawn = bool(before.drawn())
        return outcome

    def _run_one(
        self,
        outcome: RunResult,
        batch: Any,
        dtype: torch.dtype | None,
        scale: float,
        on_gradients: Callable[[Gradients], None] | None,
    ) -> None:
        with torch.autocast(self.device, dtype=dtype, enabled=dtype is not None):
            output = self._function(copied_batch(batch))
        loss = self._loss_of(output)
        if loss is None:
            outcome.outputs += [each.detach() for each in floats_in(output)]
            return
        outcome.losses.append(float(loss.detach()))
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if not named or not loss.requires_grad:
            return
        # `backward()` would add to the gradients of what else the loss is made of.
        found = torch.autograd.grad(
            loss.float() * scale, list(named.values()), allow_unused=True
        )
        gradients = {n: g for n, g in zip(named, found, strict=True) if g is not None}
        if on_gradients is not None:
            on_gradients({id(named[name]): g for name, g in gradients.items()})
        for name, gradient in gradients.items():
            value = gradient / scale
            known = outcome.gradients.get(name)
            outcome.gradients[name] = value if known is None else known + value

    def _loss_of(self, output: Any) -> torch.Tensor | None:
        if not self._has_loss:
            return model_loss_in(output)
        if not isinstance(output, torch.Tensor) or output.numel() != 1:
            shape = tuple(output.shape) if isinstance(output, torch.Tensor) else ""
            raise TypeError(
                "loss must return a tensor with one element, got "
                f"{type(output).__name__} {shape}".rstrip()
            )
        return output.reshape(())


@contextlib.contextmanager
def _told_of_effects() -> Iterator[None]:
    try:
        yield
    except StoppedError as error:
        raise ValueError(
            "model and loss must have no effects but on themselves, since they are run "
            f"several times: {error}"
        ) from None


@contextlib.contextmanager
def _calm(model: nn.Module) -> Iterator[None]:
    """Guards, modes and compiled code do not take part in a run."""
    with ExitStack() as stack:
        stack.enter_context(without_observers([model]))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(uncompiled_calls())
        yield
