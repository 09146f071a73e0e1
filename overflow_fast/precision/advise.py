"""`advise_precision()`: which modules can run in which dtype, verified by runs."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ..capture.observers import without_observers
from ..core.force_eager import run_eagerly
from ..core.modules import Handles, children_of, is_within, named_modules, step_of
from ..core.ops import scan
from ..core.tensors import check_number, devices_of, loss_in
from ..state.random import RandomStates
from ..text import dtype_name, error_line
from ..torch_internals.module_internals import is_dropout
from ..torch_internals.running import graph_task_id
from .copies import HALF, check_model, copied_batch, on_copies
from .keep_in_fp32 import keep_in_fp32
from .layers import DTYPES, LayerProbe, RelativeDifference, floats_in
from .precision_advice import (
    Judge,
    LayerAdvice,
    PrecisionAdvice,
    PrecisionCheck,
    Thresholds,
)

# Which modules make non-finite values in a run, forward and backward.


class NonFiniteOrigins:
    """Hooks that find the modules in which non-finite values begin.

    Args:
        model: The model.
        usual: What is not finite in float32 either, such as masks: the `bad` of a run.

    Attributes:
        bad: Which modules had which non-finite values: "given", "made", their
            gradients "after" (of what was returned) and "before" (of what was given).
    """

    def __init__(
        self, model: nn.Module, usual: frozenset[tuple[str, str]] = frozenset()
    ) -> None:
        self._model = model
        self._usual = usual
        self._order: dict[str, None] = {}
        self._running: list[str] = []
        self._made_by: dict[Any, str] = {}  # by autograd's node of what it returned
        self._sources: dict[tuple[str, str], dict[str, None]] = {}
        self._handles = Handles()
        self.bad: set[tuple[str, str]] = set()

    def __enter__(self) -> NonFiniteOrigins:
        for name, module in named_modules(self._model):
            self._handles += [
                module.register_forward_pre_hook(self._begin_of(name), prepend=True),
                module.register_forward_hook(self._hook_of(name), with_kwargs=True),
            ]
        return self

    def __exit__(self, *exception: object) -> None:
        self._handles.remove_all()
        self._made_by.clear()

    def names(self) -> list[str]:
        """The innermost modules that made values, or gradients, which are not finite.

        The one that raised an error comes before these. Where a module made bad values
        in forward, gradients are not looked at.
        """
        if self._running:
            return self._running[-1:]
        for made, given in (("made", "given"), ("before", "after")):
            found = [
                name
                for name in self._order  # inner modules return first
                if (name, made) in self.bad - self._usual
                if (name, given) not in self.bad - self._usual
            ]
            innermost = [n for n in found if not any(is_within(m, n) for m in found)]
            if innermost:
                return innermost
        return []

    def producers(self, kept: Sequence[str]) -> list[str]:
        """The modules whose float16 results kept ones were given, and overflowed.

        In forward the code between them made inf of what such a module had returned;
        in backward the gradient of a kept module's input left the range of float16.

        Args:
            kept: The modules that run in float32.
        """
        if self._running:
            return []
        bad = self.bad - self._usual
        if self.is_backward:
            blamed = [(n, "before") for n in self.names() if _is_kept(n, kept)]
        else:
            given = ((n, "given") for n in self._order if _is_kept(n, kept))
            blamed = [each for each in given if each in bad]
        found = {p: None for each in blamed for p in self._sources.get(each, ())}
        return [p for p in found if (p, "made") not in bad and not _is_kept(p, kept)]

    @property
    def is_backward(self) -> bool:
        """True if gradients alone were not finite."""
        kinds = {kind for _, kind in self.bad - self._usual}
        return bool(kinds) and not kinds & {"given", "made"}

    def _begin_of(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if graph_task_id() >= 0:
                return
            if not self._running:
                self._made_by.clear()
            self._running.append(name)

        return hook

    def _hook_of(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if graph_task_id() >= 0:
                return
            self._running.pop()  # of the module in which an error arises, it stays
            self._order[name] = None
            given, made = floats_in((args, kwargs)), floats_in(output)
            sources = [self._producers_of(each) for each in given]
            self._look(name, "given", given, sources)
            self._look(name, "made", made, [()] * len(made))
            for each in made:
                self._made_by.setdefault(each.grad_fn, name)
            for kind, tensors, whose in (
                ("before", given, sources),
                ("after", made, [()] * len(made)),
            ):
                for each, of_it in zip(tensors, whose, strict=True):
                    if each.requires_grad:
                        each.register_hook(self._gradient_hook(name, kind, of_it))  # type: ignore[no-untyped-call]

        return hook

    def _producers_of(self, tensor: torch.Tensor) -> Sequence[str]:
        """The modules that a float16 tensor was computed from, by autograd's graph."""
        if tensor.dtype != torch.float16:
            return ()
        to_do, seen, found = [tensor.grad_fn], set[Any](), dict[str, None]()
        while to_do:
            node = to_do.pop()
            if node is None or node in seen:
                continue
            if len(seen) == _MOST_NODES:
                return ()
            seen.add(node)
            if node in self._made_by:
                found[self._made_by[node]] = None
            else:
                to_do += [each for each, _ in node.next_functions]
        return tuple(found)

    def _gradient_hook(self, name: str, kind: str, sources: Sequence[str]) -> Any:
        return lambda gradient: self._look(name, kind, [gradient], [sources])

    def _look(
        self,
        name: str,
        kind: str,
        tensors: Sequence[torch.Tensor],
        sources: Sequence[Sequence[str]],
    ) -> None:
        stats = scan([each.detach() for each in tensors])
        for stat, of_it in zip(stats, sources, strict=True):
            if stat.has_nan or stat.has_inf:
                self.bad.add((name, kind))
                known = self._sources.setdefault((name, kind), {})
                known.update(dict.fromkeys(of_it))


_MOST_NODES = 1000  # of code between two modules that are followed


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
        watch = NonFiniteOrigins(steps.model)
        self.reference = steps.run(watch)
        self._usual = frozenset(watch.bad)
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
        for runs in range(1, self._max_rounds + 2):
            watch = NonFiniteOrigins(self._steps.model, self._usual)
            outcome = self._run(watch, dtype, kept, loss_scale)
            check = self._judged(dtype, kept, outcome, watch, loss_scale)
            check = replace(check, widened=widened, runs=runs)
            if check.passed or runs > self._max_rounds:
                break
            more = [] if check.finite else self._origins(watch, kept)
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

    def _origins(self, watch: NonFiniteOrigins, kept: list[str]) -> list[str]:
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
        self, watch: NonFiniteOrigins, dtype: str, kept: list[str], scale: float
    ) -> RunResult | str:
        """Runs the model; returns in words what it raises."""
        try:
            return self._steps.run(watch, DTYPES[dtype], kept, scale)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return error_line(error)

    def _judged(
        self,
        dtype: str,
        kept: list[str],
        outcome: RunResult | str,
        watch: NonFiniteOrigins,
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
    steps = BatchRuns(model, function, _listed(batches), loss is not None)
    probe = LayerProbe(model)
    found = steps.run(probe, dropout=True, on_gradients=probe.add_gradients)
    if not found.is_finite:
        raise ValueError(
            "batches must give a finite loss and finite gradients in float32; use "
            "overflow_fast.explain(model, batch, loss) to find out why they do not"
        )
    judge = Judge(list(probe.layers.values()), limits)
    rows = judge.rows()
    verifier = Verifier(steps, rows, limits, max_rounds)
    checks = [
        verifier.check("bfloat16", 1.0),
        verifier.check("float16", judge.loss_scale or 1.0),
    ]
    notes = _notes(model, verifier.reference)
    return _advice(model, rows, checks, judge, found, probe.not_seen, notes)


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
    judge: Judge,
    found: RunResult,
    not_seen: list[str],
    notes: list[str],
) -> PrecisionAdvice:
    names = [name for name, _ in named_modules(model)]
    cast = any(each.dtype in HALF for each in model.parameters())
    passed = [check for check in checks if check.passed]
    best = min(passed, key=lambda check: len(check.kept), default=None)
    codes = {check.dtype: _code(check.kept, names, cast) for check in passed}
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
    )


def _may_run(rows: Sequence[LayerAdvice], check: PrecisionCheck) -> list[str]:
    """The layers that a check has run in its dtype; none if it has not passed."""
    return [
        row.name for row in rows if check.passed and not _is_kept(row.name, check.kept)
    ]


def _code(kept: Sequence[str], names: Sequence[str], cast: bool) -> str:
    if not kept:
        return ""
    line = f"overflow_fast.keep_in_fp32(model, {_shortened(kept, names)})"
    return f"model.float(); {line}" if cast else line


def _shortened(kept: Sequence[str], names: Sequence[str]) -> list[str]:
    """Patterns for names that differ in numbers alone, where they match no others."""
    found: dict[str, None] = {}
    for name in kept:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        matched = [each for each in names if fnmatchcase(each, pattern)]
        is_exact = len(matched) > 1 and set(matched) <= set(kept)
        found[pattern if is_exact else name] = None
    return list(found)


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
        stats = scan([*self.outputs, *self.gradients.values()])
        is_bad = any(each.has_nan or each.has_inf for each in stats)
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
        self._batches = batches
        self._has_loss = has_loss
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
            stack.enter_context(_calm(self.model))
            stack.enter_context(watch)
            stack.enter_context(on_copies(self.model))
            if not dropout:
                for module in filter(is_dropout, self.model.modules()):
                    module.training = False
            if names:
                stack.enter_context(keep_in_fp32(self.model, names))
            before = RandomStates(self._devices)
            for batch in self._batches:
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
            return loss_in(output)
        if not isinstance(output, torch.Tensor) or output.numel() != 1:
            shape = tuple(output.shape) if isinstance(output, torch.Tensor) else ""
            raise TypeError(
                "loss must return a tensor with one element, got "
                f"{type(output).__name__} {shape}".rstrip()
            )
        return output.reshape(())


@contextlib.contextmanager
def _calm(model: nn.Module) -> Iterator[None]:
    """Guards, modes, compiled code and autocast do not take part in a run."""
    with ExitStack() as stack:
        stack.enter_context(without_observers([model]))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(run_eagerly())
        torch.clear_autocast_cache()
        stack.callback(torch.clear_autocast_cache)
        yield
