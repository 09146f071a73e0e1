"""Assembles the parts of a guard, and runs them for a training loop."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from .. import _C
from ..detector.coverage import warn_of_asking, warn_of_scripted
from ..detector.selection import Selection, Wanted, check_patterns, full_name
from ..scanner.modules import modules_in, named_modules, parameters_of, tensors_of
from ..scanner.tensors import loss_in
from ..torch_internals.module_internals import spare_forward_hooks
from . import uncaught
from .archive import Measurements
from .config import EVERYTHING, GuardConfig, wanted_of
from .files.writing import why_not_writable
from .isolation import SWITCHING, ErrorIsolation, OverheadTimer
from .kept_calls.call_keeper import CallKeeper, make_keeper
from .monitors.magnitudes import Headroom, Underflow
from .monitors.monitor import Guarded
from .monitors.running import RunningMonitors
from .optimizers.optimizer_hook import OptimizerHook, living, outermost
from .optimizers.wrapped import innermost, stepper_of
from .pipeline import Pipeline
from .ranks.agreement import Agreement
from .report.report import NonFiniteError, Report
from .step import StepClock, WatchSchedule
from .undo.restore_point import RestorePoint
from .verdict.rules import Rules
from .watching.inputs import LoopBatch
from .watching.missed_steps import ENOUGH
from .watching.step_tensors import NORM, OverflowFlags, ScanLevel, StepTensors
from .watching.watch import ModelWatch, models_of

if TYPE_CHECKING:
    from .ranks.joinable import GuardJoinable
    from .requests.requests import Requests

# Takes what a training loop hands over: batches, losses, functions to run again.


_MAX_NAMES = 1000  # 2 KiB each
_MANY_RUNS = 8  # without a step, before it is said that they run another model


class _Strangers(NamedTuple):
    """Calls of `guard.run()` in a row that ran nothing which is watched.

    Attributes:
        num_steps: The steps that were over at the first one.
        gradients: The gradients of the watched models then.
        num: How many they are.
    """

    num_steps: int
    gradients: list[tuple[int, int]]
    num: int = 0


class LoopInputs:
    """Takes in what the training loop hands over for the step at hand.

    Args:
        config: The guard's.
        watches: The watched models.
        keeper: Keeps the calls of a step, or None.
        clock: Has the step's level.
        tensors: Scans what stands in no module's call.
        isolation: Isolates the guard's own errors.
        hooks: The optimizers' hooks.

    Attributes:
        on_left: Called with the exception that has left the outermost function.
    """

    def __init__(
        self,
        config: GuardConfig,
        watches: Sequence[ModelWatch],
        keeper: CallKeeper | None,
        clock: StepClock,
        tensors: StepTensors,
        isolation: ErrorIsolation,
        hooks: Sequence[OptimizerHook],
    ) -> None:
        self._config = config
        self._watches = watches
        self._keeper = keeper
        self._clock = clock
        self._tensors = tensors
        self._isolation = isolation
        self._hooks = hooks
        self._num_running = 0
        self._strangers: _Strangers | None = None
        self._is_warned = False
        self.on_left: Callable[[Exception], None] = lambda error: None
        self.requests: Requests | None = None
        self._names: set[str] = set()

    @property
    def is_running(self) -> bool:
        """True while a function runs that calls the models."""
        return self._num_running > 0

    def note_batch(self, batch: object) -> None:
        """Notes the batch of a trainer's step, which calls the models.

        Args:
            batch: The batch, in any nesting. It is held weakly. None after the step.
        """
        with self._isolation.measured():
            noted = None if batch is None else LoopBatch(batch)
            for watch in self._watches:
                number, num_calls = watch.batch_number, watch.total_calls
                watch.inputs.loop_batches.note(number, num_calls, noted)

    def name_caller(self, name: str) -> None:
        """Names the code that calls the models, for reports: "training_step"."""
        for watch in self._watches:
            watch.inputs.caller = name

    def run(self, function: Callable[[], Any], records_loss: bool = True) -> Any:
        """Calls a function that calls the models; keeps it until the step is judged."""
        if _C.is_unwatched():  # a replay of another guard's, whose function calls this
            return function()
        models = [watch.model for watch in self._watches]
        if self.requests is not None and self.requests.takes(models):
            return self.requests.run(function)
        model, seen = self._watches[0].model, self._seen()
        is_watched = self._clock.level is ScanLevel.ALL
        self._num_running += 1
        try:
            if self._keeper is None or model is None or not is_watched:
                output = function()
            else:
                output = self._keeper.run(model, function, self._isolation.isolated)
        except Exception as error:
            if self._num_running == 1:
                self.on_left(error)
            raise
        finally:
            self._num_running -= 1
        with self._isolation.isolated():
            loss = loss_in(output)
            if is_watched and loss is not None and loss.requires_grad:
                self._note_run(is_of_others=seen == self._seen())
            if loss is not None and self._config.wanted.loss and records_loss:
                self.record({"loss": loss})
        return output

    def _seen(self) -> list[tuple[int, int]]:
        """The numbers of forwards, and of calls, that watches have seen."""
        return [(each.batch_number, each.total_calls) for each in self._watches]

    def _note_run(self, is_of_others: bool) -> None:
        """Logs, once, that the function ran modules which are not watched alone.

        A tripwire does not see a model whose forward is not called: its gradients tell.
        """
        is_unseen = is_of_others and any(each.is_attached for each in self._watches)
        if self._is_warned or not is_unseen:
            self._strangers = None
            return
        before = self._strangers
        if before is None or before.num_steps != self._clock.num_steps:
            before = _Strangers(self._clock.num_steps, self._gradients())
        self._strangers = before._replace(num=before.num + 1)
        if before.num + 1 < _MANY_RUNS or before.gradients != self._gradients():
            return
        self._is_warned = True
        _log.warning(
            "guard.run() was called %d times, and nothing of the model that the guard "
            "watches ran in it.\nWhere a cell has made the model anew, make the guard "
            "anew as well, of the model and the optimizer that run now. Logged once.",
            _MANY_RUNS,
        )

    def _gradients(self) -> list[tuple[int, int]]:
        """The gradients of the models, as far as writes to them are counted."""
        models = models_of(self._watches).values()
        each = (p.grad for model in models for p in parameters_of(model))
        found = [gradient for gradient in each if gradient is not None]
        return list(zip(map(id, found), _C.versions_of(found), strict=False))

    def record(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Adds tensors that no module returns to the step, if it is watched.

        Where gradients alone are watched, only single numbers, such as a loss.
        """
        requests = self.requests
        if requests is not None and requests.takes_now:
            requests.record(tensors)
            return
        level, watch = self._clock.level, self._watches[0]
        if level is ScanLevel.GRADIENTS:
            tensors = {name: t for name, t in tensors.items() if t.numel() == 1}
        if level is ScanLevel.OFF or not tensors or _C.is_unwatched():
            return
        watch.has_seen_loss |= "loss" in tensors
        watch.has_loss_of_step |= "loss" in tensors
        if self._config.is_tripwire and NORM in tensors:
            self._tensors.note_norm(living(self._hooks), tensors[NORM])
        names = [self._kept_name(name) for name in tensors]
        watch.record(_C.FrameKind.RECORDED, (names, list(tensors.values())))

    def _kept_name(self, name: str) -> str:
        """The name under which a tensor is kept track of, which takes memory for good.

        Beyond some, what is counted up in a name becomes a star: "loss_*".
        """
        if name in self._names:
            return name
        if len(self._names) == _MAX_NAMES:
            _log.warning(
                "guard.record() was given %d names. Later ones are reported with * in "
                "the place of their digits: give a tensor the same name in each step.",
                _MAX_NAMES,
            )
        if len(self._names) >= _MAX_NAMES:
            name = re.sub(r"\d+", "*", name)
            if name not in self._names and len(self._names) >= 2 * _MAX_NAMES:
                return "*"
        self._names.add(name)
        return name

    def on_clipped(
        self, parameters: Sequence[torch.Tensor], norm: torch.Tensor
    ) -> None:
        """Notes a norm that `clip_grad_norm_` has computed; see `clipping.listen`."""
        if self._clock.level is not ScanLevel.OFF and not _C.is_unwatched():
            with self._isolation.measured():
                # Of float16 it is counted how many stand at its largest number.
                wider = [p for p in parameters if p.dtype is not torch.float16]
                self._tensors.note_clipping(wider, norm)


# The models that a guard is given, and the watches that it puts on them.


_log = logging.getLogger("overflow_fast")
Models = nn.Module | Iterable[nn.Module] | Mapping[str, nn.Module]


def named_models(model: Models) -> dict[str, nn.Module]:
    """The models of an argument, by the prefix of their modules' names.

    Raises:
        TypeError, ValueError: If there is none, or one of them is no module.
    """
    if isinstance(model, nn.Module):
        return {"": model}
    if isinstance(model, Mapping):
        models = {f"{name}." if name else "": each for name, each in model.items()}
    elif isinstance(model, Iterable) and not isinstance(model, (str, torch.Tensor)):
        several = list(model)
        is_one = len(several) == 1  # as Megatron's list of a model's chunks
        models = {"" if is_one else f"{i}.": each for i, each in enumerate(several)}
    else:
        own = getattr(model, "__dict__", {}).items()  # a pipeline of models
        models = {f"{k}.": each for k, each in own if isinstance(each, nn.Module)}
        if not models:
            raise _wrong_model(model)
    for each in models.values():
        if not isinstance(each, nn.Module):
            raise _wrong_model(each)
    if not models:
        raise ValueError("model must hold at least one torch.nn.Module, got none")
    return models


def _wrong_model(model: object) -> TypeError:
    return TypeError(
        "model must be a torch.nn.Module, a list or a dict of them, or an object with "
        "such attributes, got "
        f"{type(model).__name__}"
        + ": give the model, and not its state_dict"
        * isinstance(model, torch.Tensor)
    )


def check_names(config: GuardConfig, models: Mapping[str, nn.Module]) -> None:
    """Raises ValueError if a pattern of modules to check matches nothing."""
    names = [
        full_name(prefix, name)
        for prefix, model in models.items()
        for name, _ in named_modules(model)
    ]
    check_patterns("include", config.include or (), names)
    check_patterns("exclude", config.exclude, names)


def living_models(watches: Iterable[ModelWatch]) -> dict[str, nn.Module]:
    """The watched models by the prefix of their modules' names.

    Raises:
        RuntimeError: If none of them exists any more.
    """
    models = models_of(watches)
    if not models:
        raise RuntimeError(
            "the model is gone: the guard holds it weakly, so keep it yourself"
        )
    return models


def warn_foreign_parameters(
    models: Mapping[str, nn.Module], optimizers: Iterable[Optimizer]
) -> None:
    """Logs a warning for each optimizer that steps no watched parameter."""
    own = {id(each) for model in models.values() for each in parameters_of(model)}
    for optimizer in optimizers:
        if stepper_of(optimizer) is not innermost(optimizer):
            continue  # an engine's: it may step copies
        groups = innermost(optimizer).param_groups
        if own and not any(id(p) in own for group in groups for p in group["params"]):
            _log.warning(
                "The %s that the guard was given has none of the model's parameters. "
                "Check that it is the optimizer that steps, and was made from this "
                "model.",
                type(innermost(optimizer)).__name__,
            )


def warn_of_other_guards(
    watches: Sequence[ModelWatch],
    others: Sequence[ModelWatch],
    ending: Sequence[ModelWatch],
) -> None:
    """Logs a warning if other guards, which are on, watch modules of the same models.

    Args:
        watches: The guard's.
        others: Those of the other guards.
        ending: Those of them that end when the program lets go of their guard.
    """
    for watch, each in itertools.product(watches, others):
        model, other = watch.model, each.model
        if model is None or other is None:
            continue
        if other in set(modules_in(model)) or model in set(modules_in(other)):
            until = ", until your program lets go of that one, as in a cell's next run"
            _log.warning(
                "Another OverflowGuard already watches this %s. Both work, each by "
                "its own policy%s. Call remove() on the other to replace it.",
                type(model).__name__,
                until * (each in ending),
            )
            return


def warn_of_idle_arguments(
    config: GuardConfig, watches: Sequence[ModelWatch]
) -> set[str]:
    """Logs a warning for each argument that can do nothing.

    Args:
        config: The guard's.
        watches: The watched models.

    Returns:
        The names of those whose path cannot be written to.
    """
    told = set[str]()
    if not any(w.modules.is_selected(i) for w in watches for i in w.modules.order):
        _log.warning(
            "include= and exclude= leave no module to check. What is recorded is "
            "checked all the same: `guard.record()`, the loss of `guard.run()`."
        )
    tensors = (t for each in models_of(watches).values() for t in tensors_of(each))
    asked = [each for each in (Headroom, Underflow) if config.monitor(each) is not None]
    if asked and not any(each.is_floating_point() for each in tensors):
        _log.warning(
            "%s may have nothing to look at: the model has no floating-point "
            "parameters and buffers.",
            " and ".join(f"{each.__name__}()" for each in asked),
        )
    log, record, evidence = config.log, config.record, config.evidence
    for name, asked_for in (("log", log), ("record", record), ("evidence", evidence)):
        if asked_for is None or (asked_for is record and os.path.lexists(record.path)):
            continue  # what is there is left alone: its folder has another
        why = why_not_writable(asked_for.path, is_folder=asked_for is evidence)
        if why:
            _log.warning("%s=%s cannot be written: %s.", name, asked_for.path, why)
            told.add(name)
    return told


class Handle:
    """Lives as long as the program has a guard in its hands, or a copy of it."""


class GuardParts:
    """The parts of a guard; the hooks of models and optimizers hold it.

    Args:
        config: The guard's.
        models: The models, by the prefix of their modules' names.
        optimizers: The optimizers.
        handle: The program's hold on the guard, held weakly.
        defer: Treat the CPU as a device.

    Attributes:
        pipeline: Judges the steps.
        clock: The step at hand.
        inputs: Takes what the training loop hands over.
        keeper: Keeps a step's calls for an explanation, or None.
        hooks: The optimizers' hooks.
    """

    gives_way = False  # to a later guard of the same models

    def __init__(
        self,
        config: GuardConfig,
        models: Mapping[str, nn.Module],
        optimizers: Sequence[Optimizer],
        handle: Handle,
        defer: bool,
    ) -> None:
        self.config = config
        self._handle = weakref.ref(handle)
        self._later: Callable[[], GuardParts | None] = lambda: None
        self._defer = defer
        self.is_enabled = self._is_warned = False
        check_names(config, models)
        self.rules = Rules(config.allow or {})
        self.watches = watches = self._make_watches(
            models, config.wanted, config.evidence is not None, self._on_evaluated
        )
        self.rules.check(
            name for watch in watches for name in watch.modules.all_names()
        )
        told = warn_of_idle_arguments(config, watches)
        trained = list(models.values())
        for model in trained:
            warn_of_scripted(model)
            warn_of_asking(model)
        self.hooks = hooks = [
            OptimizerHook(each, config.may_act, trained) for each in optimizers
        ]
        is_restored = config.may_restore and bool(hooks)
        is_kept = is_restored or config.may_replay
        self._start = start = RestorePoint(watches, bool(hooks)) if is_kept else None
        self.keeper: CallKeeper | None = None
        if start is not None and config.may_replay:
            self.keeper = make_keeper(watches, start)
        self.timer = OverheadTimer(watches)
        self.measurements = Measurements(config, watches, self.timer, told)
        self.headroom = self.measurements.headroom
        find_optimizers = functools.partial(living, hooks)
        agreement = Agreement(
            *(config.process_group, watches, config.may_act, find_optimizers),
            functools.partial(outermost, hooks),
        )
        self.isolation = isolation = ErrorIsolation(self.timer, agreement)
        isolation.is_in_step = lambda: any(hook.is_running for hook in hooks)
        guarded = Guarded(
            *(watches, self.keeper, find_optimizers, isolation.isolated),
            lambda optimizer: self.pipeline.rounds.was_skipped(optimizer),
        )
        looks = config.sync != "lagged"
        monitors = RunningMonitors(config.monitors, guarded, isolation.isolated, looks)
        overflow_flags = OverflowFlags(watches)
        self.clock = StepClock(
            WatchSchedule(
                **vars(config.schedule), has_gradients=config.wanted.gradients
            ),
            watches,
            start,
            overflow_flags,
            acts=config.may_act and bool(hooks),
        )
        self.pipeline = Pipeline(
            config,
            watches,
            hooks,
            self.rules,
            start,
            self.keeper,
            functools.partial(self.new_watches, wanted_of(EVERYTHING)),
            agreement,
            isolation,
            self.clock,
            overflow_flags,
            self.measurements,
            monitors,
        )
        tensors = self.pipeline.tensors
        self.inputs = LoopInputs(
            *(config, watches, self.keeper, self.clock, tensors, isolation, hooks)
        )
        self.inputs.on_left = functools.partial(self.on_raised, ends=False)
        for watch in watches:
            watch.suppresses = isolation.suppresses
            watch.needs_buffers = is_restored
            watch.on_left = self._on_left
            watch.on_missed = self._warn_of_missed_steps
            watch.is_abandoned = self._is_abandoned
            if start is not None:
                watch.on_forward = isolation.measured_call(start.before_forward)
                watch.on_forward_end = isolation.measured_call(start.after_forward)
        self.requests: Requests | None = None
        if not hooks:
            self.judge_requests()

    def judge_requests(self) -> Requests:
        """Judges forwards without autograd as requests from now on."""
        if self.requests is None:
            from .requests.requests import Requests

            self.requests = self.inputs.requests = Requests(self)
            for watch in self.watches:
                watch.judges_requests = True
            if self.is_enabled:
                self.requests.attach()
        return self.requests

    # Hooks on and off.

    def enable(self) -> None:
        """Attaches the hooks that the next step needs."""
        with SWITCHING, self._no_replay():
            self.isolation.on_idle = None
            if self.is_enabled:
                return
            self.is_enabled = True
            try:
                self._attach()
            except BaseException:  # a monitor's: nobody may have it, to remove it
                self.disable()
                raise

    def _no_replay(self) -> contextlib.AbstractContextManager[object]:
        requests = self.requests
        return contextlib.nullcontext() if requests is None else requests.no_replay()

    def _attach(self) -> None:
        if self._start is not None:
            self._start.begin()
        if self.config.hears_clipping:
            from ..torch_internals import clipping

            clipping.listen(self.inputs)
        self.timer.restart()
        self.clock.start()
        self.pipeline.attach()
        if self.requests is not None:
            self.requests.attach()
        uncaught.listen(self)

    def is_put_off(self, function: Callable[[], None]) -> bool:
        """True within a judgement or a step: the function is called when it has ended.

        A policy, a monitor or a hook of the step may switch the guard off.
        """
        if not self.isolation.is_busy:
            return False
        self.isolation.on_idle = function
        return True

    def disable(self) -> None:
        """Removes all hooks, and forgets what was not judged."""
        with SWITCHING, self._no_replay():
            if not self.is_enabled:
                return
            self.is_enabled = False
            if self.config.hears_clipping:
                from ..torch_internals import clipping

                clipping.stop_listening(self.inputs)
            uncaught.stop_listening(self)
            if self.requests is not None:
                self.requests.detach()
            self.pipeline.detach()
            self.clock.stop()
            self.pipeline.forget()

    # The training loop's calls.

    def check(self) -> Report | None:
        """Judges what has run since the last step."""
        return self.pipeline.check() if self.is_enabled else None

    def note_later(self, other: GuardParts) -> bool:
        """Ends this guard if it gives way to a later one of the same models.

        One that has its optimizers, or else its models, takes its place: at once where
        the program has let go of this guard, else when it does, which returns True.
        """
        own, others = (set(map(id, each.optimizers)) for each in (self, other))
        models, theirs = (models_of(each.watches).values() for each in (self, other))
        within = {each for model in theirs for each in modules_in(model)}
        is_of_same = own <= others if own else within.issuperset(models)
        if self.gives_way or (is_of_same and self._handle() is None):
            self.finish()
        elif is_of_same:
            self._later = weakref.ref(other)
        return is_of_same and self.is_enabled

    def _is_abandoned(self) -> bool:
        """True if the program let go of it, and nothing is left to do; it ends then.

        Its optimizers are gone, or a later guard has them.
        """
        if self._handle() is not None:
            return False
        later, is_over = self._later(), bool(self.hooks) and not self.optimizers
        if not is_over and (later is None or not later.is_enabled):
            return False
        self.finish()
        return True

    def finish(self) -> None:
        """Judges what is on its way, and removes the hooks."""
        try:
            if self.is_enabled:
                self.pipeline.judge_late()
        finally:
            self.disable()
            self.pipeline.close()

    def discard(self) -> None:
        """Forgets what was found and not judged."""
        self.pipeline.forget()
        if self._start is not None:
            self._start.keep()

    def on_raised(self, error: BaseException, ends: bool) -> None:
        """Judges a step in which the program's own code has raised; raises nothing.

        Args:
            error: The exception, to which the report is added.
            ends: Whether the run ends with it.
        """
        if not (self.is_enabled and isinstance(error, Exception)):
            return
        for watch in self.watches:
            with self.isolation.isolated():
                watch.leave()
        self.pipeline.judge_raised(error, ends)

    def learn(self, steps: int, adopt: bool) -> None:
        """Learns from the next clean steps which values are non-finite by design."""
        from .learning import Learning

        self.pipeline.learning = Learning(
            steps, adopt, self.rules, self.watches, self.pipeline.agreement
        )

    def new_watches(
        self, wanted: Wanted | None = None, captures_tensors: bool = True
    ) -> list[ModelWatch]:
        """Makes watches like the guard's, which nothing judges.

        Args:
            wanted: The tensors to scan; None for those of the guard.
            captures_tensors: Capture what the evidence is to hold.
        """
        config, models = self.config, living_models(self.watches)
        captures_tensors = captures_tensors and config.evidence is not None
        made = self._make_watches(
            models, wanted or config.wanted, captures_tensors, lambda *_: None
        )
        for watch in made:
            watch.warnings.is_quiet = True
        return made

    def _make_watches(
        self,
        models: Mapping[str, nn.Module],
        wanted: Wanted,
        captures_tensors: bool,
        on_evaluated: Callable[[ModelWatch, int], None],
    ) -> list[ModelWatch]:
        config = self.config
        recorder = {
            "memo": True,
            "defer": self._defer,
            "step_mode": True,
            "lists_parameters": wanted.weights,
            "lists_calls": wanted.activations,
            "parameters_once": True,
            "watches_gradients": wanted.grad_outputs,
            "captures_tensors": captures_tensors,
        }
        watches = [
            ModelWatch(
                model,
                prefix,
                wanted,
                Selection(config.include, config.exclude, prefix),
                config.explain.frames,
                recorder,
                on_evaluated,
            )
            for prefix, model in models.items()
        ]
        for watch in watches:
            self.rules.put_on(watch)
        return watches

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Watches nothing within; findings from before are judged as usual."""
        try:
            with self.clock.suspended():
                yield
        finally:
            if self.is_enabled:
                self.timer.restart()

    # What users read.

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that still exist."""
        return living(self.hooks)

    def metrics(self) -> dict[str, float]:
        """Returns all numbers. Does not incur a CPU-GPU sync."""
        counts = (self.requests or self.pipeline).counts()
        return self.measurements.metrics(counts)

    @property
    def joinable(self) -> GuardJoinable:
        """The object that `Join` takes."""
        if self.config.sync == "lagged":
            raise RuntimeError(
                "joinable needs a guard with sync='step': a lagged verdict is too late"
            )
        return self.pipeline.agreement.make_joinable(self._judge_others)

    # The hooks' calls.

    def _on_left(self, watch: ModelWatch, error: Exception) -> bool:
        model, is_report = watch.model, isinstance(error, NonFiniteError)
        if self.inputs.is_running or model is None or not self.is_enabled:
            return is_report  # what `guard.run()` runs is judged as a whole
        with spare_forward_hooks(model):
            if self.requests is not None and not watch.is_in_step:
                self.requests.left(watch, error)
            else:
                self.pipeline.judge_raised(error, ends=False, is_in_forward=True)
        return is_report

    def _warn_of_missed_steps(self, watch: ModelWatch) -> None:
        if self._is_warned or not self.is_enabled:
            return
        self._is_warned = True
        own = ", ".join(type(each).__name__ for each in self.optimizers)
        none = "the one that it was given is gone" if self.hooks else "it has none"
        _log.warning(
            "The weights of %s have changed %d times between its forwards, and no step "
            "was judged meanwhile: the guard judges the steps of its own optimizers, "
            "and %s.\nGive it the optimizer that steps, in a new guard where a cell "
            "has made it anew, or call `check()` after each step. Logged once.",
            "the model" if watch.model is None else type(watch.model).__name__,
            ENOUGH,
            f"it was given {own}" if own else none,
        )

    def _on_evaluated(self, watch: ModelWatch, batch: int) -> None:
        (self.requests or self.pipeline).judge_evaluated(watch, batch)

    def _judge_others(self) -> None:
        if self.is_enabled:
            self.pipeline.judge_others()
