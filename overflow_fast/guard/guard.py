"""OverflowGuard: watches a whole training run, and judges each step once.

This file is what a program calls. The work is done elsewhere:

1. Arguments are checked once, when a `GuardConfig` is made of them (config.py).
2. `GuardParts` (parts.py) holds everything else: hooks on models and optimizers, the
   pipeline that judges, and what was counted. The hooks hold it, and not this object.
3. What a training loop calls runs isolated (isolation.py): an error of the guard's own
   code is logged once, and the method returns None or an empty result. Methods that
   are asked for something once, such as `to_html()` and `self_test()`, raise it.
4. A program that lets go of this object keeps its guard: the models are watched until
   they are gone, their optimizers are, or a later guard takes its place (others.py).

Its own state is these two:

1. `_parts`: shared with copies of this object that `copy.copy` makes.
2. `_handle`: dies with the last such copy. The parts hold it weakly. If it died too
   early, a later guard of the same models would end this one while it is in use.
"""

from __future__ import annotations

import copy
import logging
import os
import pathlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from ..base.source_files import drop_own_frames
from ..base.text import counted
from .config import EVERYTHING, GuardConfig, Policy
from .guards_of_process import note_enabled
from .isolation import isolate_errors
from .kinds import Exporter, Path, check_int, check_names, names_arguments, reusable
from .models import Models, living_models, named_models, warn_foreign_parameters
from .monitors.monitor import Monitor
from .monitors.running import DEFAULT_MONITORS
from .optimizers.wrapped import innermost, optimizers_of
from .options import Evidence, Explain, Log, Record, Schedule, documents
from .outer import outer
from .parts import GuardParts, Handle
from .report.cost import Cost
from .report.coverage import GuardCoverage
from .report.report import NonFiniteError, Report
from .report.run_lines import log_begin, log_end
from .state_check import state_report
from .verdict.headroom_table import HeadroomTable
from .verdict.rules import Allow
from .watching.evaluation import Evaluation
from .watching.watch import models_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ..tools.selftest import Loss, SelfTestResult

_log = logging.getLogger("overflow_fast")
_Result = TypeVar("_Result")


@documents(GuardConfig)
class OverflowGuard:
    """Watches training for nans and infs and decides before the optimizer steps.

    The guard judges a step when `optimizer.step()` is called, before it touches a
    weight; the training loop needs no other call. It names the first bad value in
    execution order, and the module or code that created it.

    A forward without autograd is judged when it ends. Without an optimizer, `check()`
    judges a step. With several optimizers a step is a round of them. A judgement incurs
    one CPU-GPU sync per device; none with `sync="lagged"`.

    Args:
        model: The model, a list or dict of models, or an object whose attributes they
            are, held weakly; their hooks hold the guard. Give a criterion along with
            them that is a module.
        optimizer: The optimizer, or a list of them, or None. Wrappers that have one as
            their `optimizer` (Accelerate's) are fine.
        (the fields of GuardConfig)

    Raises:
        TypeError, ValueError: If an argument cannot be used.
        ImportError: If `evidence` is given and safetensors is not installed.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> with OverflowGuard(model, optimizer, on_overflow="skip") as guard:
        ...     model(torch.full((1, 2), float("inf"))).sum().backward()
        ...     optimizer.step()
        >>> guard.num_skipped
        1
    """

    @names_arguments
    def __init__(
        self,
        model: Models,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        on_overflow: Policy = "raise",
        *,
        watch: Iterable[str] | Literal["tripwire"] = EVERYTHING,
        include: Iterable[str] | None = None,
        exclude: Iterable[str] = (),
        allow: Allow | None = None,
        explain: bool | Literal["auto"] | Explain = "auto",
        evidence: Path | Evidence | None = None,
        log: Path | Log | None = None,
        record: Path | Record | None = None,
        metrics: Exporter | Iterable[Exporter] | None = None,
        schedule: int | Schedule = 1,
        monitors: Iterable[Monitor] = DEFAULT_MONITORS,
        sync: Literal["step", "lagged"] = "step",
        process_group: ProcessGroup | DeviceMesh | Literal[False] | None = None,
        max_consecutive_skips: int = 20,
        _defer: bool = False,
    ) -> None:
        config = GuardConfig.of(locals())
        models, optimizers = named_models(model), optimizers_of(optimizer)
        warn_foreign_parameters(models, optimizers)
        self._handle = Handle()
        self._parts = GuardParts(config, models, optimizers, self._handle, _defer)
        self.enable()
        if _log.isEnabledFor(logging.INFO):
            log_begin(self._parts.watches, optimizers, on_overflow, self.coverage())

    def __repr__(self) -> str:
        """Writes models, optimizers, on or off, and its steps, as a line."""
        parts, ledger = self._parts, self._parts.pipeline.ledger
        models = [type(each).__name__ for each in models_of(parts.watches).values()]
        names = [
            *models,
            *(type(innermost(each)).__name__ for each in parts.optimizers),
        ]
        steps = [counted(self.step, "step"), f"{ledger.num_bad} bad"]
        if self.num_skipped:
            steps.append(f"{self.num_skipped} skipped")
        state = "on" if self.enabled else "off"
        return f"OverflowGuard({', '.join(names)}): {', '.join([state, *steps])}"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "An OverflowGuard cannot be pickled: it holds hooks on a model. Pickle the "
            "model, the optimizer and `guard.last_report`, and make a guard where they "
            "are loaded."
        )

    def __copy__(self) -> OverflowGuard:
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> OverflowGuard:
        copied = memo[id(self)] = object.__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    @isolate_errors
    def enable(self) -> None:
        """Switches the guard on; it sees everything from the next forward on."""
        if not self.enabled:
            with self._parts.isolation.isolated():
                note_enabled(self._parts)
        self._parts.enable()

    @isolate_errors
    def disable(self) -> None:
        """Switches the guard off: removes all hooks, and judges nothing any more.

        Findings that were not judged are forgotten. In a policy, a monitor or a hook of
        the step it takes effect once the step has ended; so does `remove()`.
        """
        if not self._parts.is_put_off(self.disable):
            self._parts.disable()

    @isolate_errors
    def remove(self) -> None:
        """Judges what is on its way (`sync="lagged"`), then switches the guard off.

        Logs a line about the run (logger `overflow_fast`): WARNING if there was a
        report, else INFO. Incurs a CPU-GPU sync if something is on its way.
        """
        if self._parts.is_put_off(self.remove):
            return
        was_enabled = self._parts.is_enabled
        try:
            self._parts.finish()
        finally:
            if was_enabled:
                num_reports = self._parts.pipeline.ledger.num_bad
                with self._parts.isolation.isolated():
                    log_end(self.coverage(), num_reports, self.num_skipped, self.cost)

    def __enter__(self) -> OverflowGuard:
        self.enable()  # it is off behind a `with` block
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None = None,
        traceback: object = None,
    ) -> None:
        try:
            if error is not None:
                self._parts.on_raised(error, ends=True)
        finally:  # a handler of the log may have been interrupted
            try:
                self.remove()
            except NonFiniteError:
                if kind is None:
                    raise

    @isolate_errors
    def discard(self) -> None:
        """Forgets what was found since the last step, whose batch is given up."""
        self._parts.discard()

    @isolate_errors
    def check(self) -> Report | None:
        """Judges what has run since the last step, without an optimizer.

        For loops that have none, for the last step with `sync="lagged"`, and after
        replays of CUDA graphs. Checks weights, buffers and gradients too. Incurs one
        CPU-GPU sync for each device that holds stats.

        Returns:
            The report of what is bad, None if nothing is.

        Raises:
            NonFiniteError: If something is bad and the policy is to raise.
        """
        return self._parts.check()

    def record(self, **tensors: torch.Tensor) -> None:
        """Adds tensors that no module returns to the step: `guard.record(loss=loss)`.

        Within `request()`, or without autograd, to the request.

        Does not incur a CPU-GPU sync.

        Args:
            tensors: Tensors of any shape, by the names that reports give them.

        Raises:
            TypeError: If a value is no tensor.
        """
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"{name} must be a torch.Tensor, got {type(tensor).__name__}"
                )
        with self._parts.isolation.isolated():
            self._parts.inputs.record(tensors)

    def run(
        self, function: Callable[[], _Result], *, records_loss: bool = True
    ) -> _Result:
        """Calls a function that computes the loss, and can call it again.

        For loops whose loss is outside of the model:
        `loss = guard.run(lambda: criterion(model(x), y))`. The guard explains a bad
        step by calling it again, so it has to do the same then: take the batch before
        it, and call `backward()` after it. Does not incur a CPU-GPU sync.

        Args:
            function: Calls the model and returns the loss.
            records_loss: Add the loss that it returns to the step. False where
                `record()` is given the one that backward is called on.

        Returns:
            The function's result.

        Raises:
            TypeError: If it is not callable.
        """
        if not callable(function):
            raise TypeError(
                f"function must be callable, got {type(function).__name__}: pass "
                "`lambda: criterion(model(x), y)`"
            )
        try:
            result: _Result = self._parts.inputs.run(function, records_loss)
        except NonFiniteError as error:  # of a forward without autograd
            drop_own_frames(error)
            raise error
        return result

    def request(
        self, ids: Iterable[object] | None = None
    ) -> AbstractContextManager[object]:
        """Judges what runs without autograd within it as one request.

        That is what its thread or task runs, with `asyncio.to_thread`, too. Without an
        optimizer also with autograd. Outside of it each outermost forward is a request,
        with autograd that of a model in eval mode. What is computed behind the models,
        such as a score, is judged if `record()` is given it, or `run()` computes it.
        Incurs a sync at its end.

        Args:
            ids: Names of those that the rows of the batch are for, for the report.

        Raises:
            NonFiniteError: At its end, if it is bad and the policy is to raise.
            TypeError: If `ids` is no list.
        """
        is_list = isinstance(ids, Iterable) and not isinstance(ids, (str, bytes))
        if not (ids is None or is_list):
            raise TypeError(
                f"ids must be a list of names, one for each row, got {ids!r}"
            )
        return self._parts.judge_requests().request(None if ids is None else list(ids))

    # What a trainer tells that runs the training loop for the program.

    def note_batch(self, batch: object, *, caller: str | None = None) -> None:
        """Notes the batch of the step that begins, for reports of where it was bad.

        For trainers, whose model need not be called with the batch as it is. Without
        this a report names the inputs of the model alone. Does not incur a CPU-GPU
        sync.

        Args:
            batch: The batch, in any nesting, held weakly; None once the step is over.
            caller: The function that calls the model with it, such as
                "training_step", which reports name from then on in place of the
                training loop.
        """
        self._parts.inputs.note_batch(batch, caller)

    def note_evaluation(self, batch: int | None, loader: int = 0) -> None:
        """Notes that a batch of an evaluation inside the training runs.

        What is bad in it is logged, with the batch and its rows, and `on_overflow` does
        not apply. Does not incur a CPU-GPU sync.

        Args:
            batch: Its index in the evaluation, from 0; None once it has run: what
                follows is of the training, and judged as such.
            loader: The index of its loader, where there are several.

        Raises:
            TypeError, ValueError: If `batch` is no int of at least 0.
        """
        if batch is not None:
            check_int("batch", batch, 0)
        evaluation = None if batch is None else Evaluation(batch, loader)
        self._parts.pipeline.evaluation = evaluation

    def on_raised(self, error: BaseException, *, ends: bool = True) -> None:
        """Judges a step that an exception of the program's own has left.

        For trainers that catch it: the guard sees by itself one that leaves a forward,
        `run()`, a `with` block of the guard or the program. If the step is bad, its
        report is added to the exception as a note, and is `last_report`; a second call
        for the same step changes nothing. Raises nothing. Incurs a CPU-GPU sync.

        Args:
            error: The exception, which goes on afterwards.
            ends: The run ends with it, so that an explanation may take its time.
        """
        self._parts.on_raised(error, ends)

    # What it has counted, measured and checked; tests of the guard, and of a state.

    @property
    def enabled(self) -> bool:
        """True while the guard is on."""
        return self._parts.is_enabled and self._parts.isolation.on_idle is None

    @property
    def models(self) -> list[nn.Module]:
        """The watched models that still exist."""
        return list(models_of(self._parts.watches).values())

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that still exist, without what the program wraps them in."""
        return self._parts.optimizers

    @property
    def step(self) -> int:
        """The number of the step under way, counted from 0.

        A step is a call of the optimizer, or a round of several. Set it between two
        steps to count on from another number, such as that of a trainer which resumes;
        the `Schedule`, reports and the log go by it. Where ranks decide together,
        all of them have to set it.

        Raises:
            TypeError, ValueError: If it is set to anything but an int of at least 0.
        """
        return self._parts.clock.step

    @step.setter
    def step(self, number: int) -> None:
        check_int("step", number, 0)
        self._parts.clock.set_step(number)

    @property
    def num_skipped(self) -> int:
        """The number of steps that the guard skipped; a round of several is one."""
        return self._parts.pipeline.rounds.num_skipped

    @property
    def consecutive_skips(self) -> int:
        """The number of steps in a row, up to now, that the guard skipped.

        With several optimizers, of the one with the most.
        """
        return self._parts.pipeline.rounds.consecutive_skips

    @property
    def last_step_skipped(self) -> bool:
        """True if the last step was skipped, by the guard or by a GradScaler.

        With several optimizers: if one was skipped in the last round, or in the one
        under way; see `was_skipped()`. Read it before `scheduler.step()`. With
        `sync="lagged"` it is about the last judged step.
        """
        return self._parts.pipeline.rounds.is_skipped

    def was_skipped(self, optimizer: Optimizer) -> bool:
        """Returns True if the last step of one of several optimizers was skipped.

        Args:
            optimizer: One of those that the guard was given.

        Raises:
            ValueError: If it was not given.
        """
        return self._parts.pipeline.rounds.was_skipped(optimizer)

    @property
    def last_report(self) -> Report | None:
        """The report of the last bad step, or None."""
        return self._parts.pipeline.ledger.last_report

    @property
    def cost(self) -> Cost:
        """The time that the guard took in the last step, and on average."""
        return self._parts.timer.cost

    @property
    def num_syncs(self) -> int:
        """The number of times that the guard made the host wait for a device."""
        return sum(watch.recorder.num_syncs for watch in self._parts.watches)

    @property
    def rules(self) -> dict[str, str | list[str]]:
        """The allowed values, as `allow` takes them."""
        return self._parts.rules.to_dict()

    def coverage(self) -> GuardCoverage:
        """Returns what was checked so far, and what was not, with the reasons."""
        with self._parts.isolation.isolated():
            return self._parts.pipeline.coverage()
        return GuardCoverage.unknown(self._parts.isolation.num_failures)

    def headroom(self) -> HeadroomTable:
        """Returns the bits that values have left in their dtype and in float16.

        And their trends: of outputs of modules, weights, buffers and gradients, as they
        last were; with `Underflow()` also zeros and subnormals. Does not sync.
        """
        with self._parts.isolation.isolated():
            return self._parts.headroom.table()
        return HeadroomTable([])

    def metrics(self) -> dict[str, float]:
        """Returns the numbers that exporters receive after each step.

        `steps_total`, `steps_watched_total`, `bad_steps_total`, `skipped_steps_total`,
        `consecutive_skips`, `not_scanned_total`; `guard_seconds`, `step_seconds` and
        `guard_share` (see `Cost`); `headroom_bits`, the least of the last watched step;
        and, with `Underflow()`, the shares `gradient_zeros`, `gradient_subnormals`,
        `activation_zeros` and `activation_subnormals`. Incurs no CPU-GPU sync.
        """
        with self._parts.isolation.isolated():
            return self._parts.metrics()
        return {}

    def to_html(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Writes a page of the flight record and the last report; does not sync.

        Args:
            path: The file; with several ranks `run.rank3.html` for `run.html`.

        Raises:
            OSError: If it cannot be written, or is no older page of overflow_fast.
        """
        pipeline, record = self._parts.pipeline, self._parts.measurements.record
        gaps = pipeline.coverage().gaps()
        page: pathlib.Path = outer("guard_page")(
            path, record, pipeline.ledger.last_report, gaps
        )
        return page

    def assert_finite_state(
        self,
        model: Models | None = None,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        *,
        joint: bool = False,
    ) -> None:
        """Raises if a checkpoint of model and optimizer would hold a nan or an inf.

        Checks parameters, buffers and the optimizer's state, whatever `watch` holds;
        `allow` applies. Reads their memory once, and incurs one CPU-GPU sync for each
        device.

        Args:
            model: The model or models; by default those of the guard.
            optimizer: The optimizer or optimizers; by default those of the guard.
            joint: The ranks decide together; then all of them have to call it.

        Raises:
            NonFiniteError: If a value is not finite; its report names it.
        """
        parts = self._parts
        report = state_report(
            living_models(parts.watches) if model is None else named_models(model),
            parts.optimizers if optimizer is None else optimizers_of(optimizer),
            parts.rules,
            parts.clock.step,
        )
        if joint:
            report = parts.pipeline.agreement.agree_on(parts.clock.step, report)
        if report is not None:
            raise NonFiniteError(report)

    def self_test(
        self,
        batch: Any,
        *,
        loss: Loss | None = None,
        layers: Iterable[str] | None = None,
        max_layers: int = 16,
    ) -> SelfTestResult:
        """Plants a nan and an inf in layers, and checks that the guard finds them.

        In each layer's output, and in the gradient of that. Prints a table of what was
        caught, and whether the layer was named. Gradients, buffers and random states
        are put back, bit for bit; no optimizer steps, nothing is logged, and findings
        since the last step are judged later. Runs forward and backward once, and four
        times for each layer, in eager mode. Where ranks share a model (DDP, FSDP), all
        of them have to call it. Do not call it between a forward and its backward:
        autograd would take the buffers that are put back for changed.

        Args:
            batch: The model's input: a tuple or list of arguments, a dict of keyword
                arguments, or the one argument.
            loss: Takes the batch, calls the model and returns what to call
                `backward()` on. None: the loss that the model returns, or the sum of
                what it returns.
            layers: Patterns of the names of the layers; None for all.
            max_layers: The most layers to try, spread over the model.

        Returns:
            The result of each fault; `.has_passed`.

        Raises:
            TypeError, ValueError: If an argument cannot be used.
            RuntimeError: If something could not be put back.
        """
        check_int("max_layers", max_layers, 1)
        if loss is not None and not callable(loss):
            raise TypeError(
                "loss must be a callable that takes the batch and returns a loss, got "
                f"{type(loss).__name__}"
            )
        patterns = reusable(layers)
        check_names("layers", patterns, optional=True)
        watches = self._parts.new_watches()
        gather = self._parts.pipeline.agreement.gather
        test = outer("self_test")(watches, batch, loss, patterns, max_layers, gather)
        with self._parts.suspended():
            result: SelfTestResult = test.run()
        print(result)
        return result
