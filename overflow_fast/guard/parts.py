"""Assembles the parts of a guard, and runs them for a training loop.

The flow:

1. Each model gets a `ModelWatch`, whose hooks record what a forward and a backward
   show; each optimizer gets an `OptimizerHook`, which asks before it steps.
2. The hooks call the `Pipeline`, which judges a step. Where there is no optimizer, or
   `guard.request()` was called, `Requests` judges forwards without autograd.
3. `enable()` and `disable()` attach and remove all hooks, in one thread at a time.
   Within a judgement or a step, removing them is put off until that has ended.
4. An exception that leaves a forward, `guard.run()`, a `with` block or the program is
   judged when it does (`on_raised`).
5. The guard ends by `remove()`; when its models or optimizers are gone; or when a later
   guard has its optimizers and the program has let go of this one (`note_later`).

The state:

1. `is_enabled`: hooks are on. Only `enable()` and `disable()` change it.
2. `clock`: the step at hand and what is scanned in it. `inputs`: what the loop hands
   over. `keeper`: the calls of the step, if steps may be run again.
3. `requests`: None until forwards are judged as requests, which they are from then on.
4. `_handle` and `_later`: the program's hold on the guard, and the guard that takes its
   place, both held weakly. If they were strong, the guards of all runs of a notebook's
   cell would stay on, and each would judge every step.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from .. import _C
from ..base.modules import modules_in
from ..detector.coverage import warn_of_asking, warn_of_scripted
from ..detector.selection import Selection, Wanted
from ..torch_internals import clipping
from ..torch_internals.module_internals import spare_forward_hooks
from . import uncaught_errors
from .config import EVERYTHING, GuardConfig, wanted_of
from .core import GuardCore
from .isolation import SWITCHING, ErrorIsolation
from .kept_calls.call_keeper import CallKeeper, make_keeper
from .loop_inputs import LoopInputs
from .measurements import Measurements
from .models import check_names, living_models, warn_of_idle_arguments
from .monitors.monitor import Guarded
from .monitors.running import RunningMonitors
from .optimizers.last_steps import LastSteps
from .optimizers.optimizer_hook import OptimizerHook, living, outermost
from .pipeline import Pipeline
from .ranks.agreement import Agreement
from .report.entry_words import what_of
from .report.report import NonFiniteError, Report
from .requests.requests import Requests
from .step_clock import StepClock
from .undo.restore_point import RestorePoint
from .verdict.attribution import bad_entry
from .verdict.bad_frames import BadFrame
from .verdict.rules import Rules
from .watching.missed_steps import ENOUGH
from .watching.watch import ModelWatch, models_of

_log = logging.getLogger("overflow_fast")
_OTHER_STEPS = (
    "The weights of %s have changed %d times between its forwards, and no step was "
    "judged meanwhile: the guard judges the steps of the optimizers that it was given."
    "\nGive it the optimizer that steps, in a new guard where a cell has made it anew, "
    "or call `check()` after each step. Logged once."
)
_LEFT_OUT = (
    "%d forwards ran and no step was judged, in most of them values are non-finite: "
    "first %s, in forward %d (from 0).\nIf the program leaves out such steps by "
    "itself, no weight changes meanwhile: `guard.check()` reports this step. "
    "Logged once."
)


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
        self.is_enabled = False
        check_names(config, models)
        self.rules = Rules(config.allow or {})
        self.watches = watches = self._make_watches(
            models, config.wanted, config.evidence is not None, self._on_evaluated
        )
        self.rules.check(
            name for watch in watches for name in watch.modules.all_names()
        )
        warn_of_idle_arguments(config, watches)
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
            self.keeper = make_keeper(watches, start, optimizers)
        self.measurements = Measurements(config, watches)
        self.timer, self.headroom = self.measurements.timer, self.measurements.headroom
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
        looks = not config.verdicts_are_late
        monitors = RunningMonitors(config.monitors, guarded, isolation.isolated, looks)
        self.clock = StepClock(config.schedule, watches, start)
        is_asked = config.explain.when != "never"
        self._core = core = GuardCore(
            config=config,
            watches=watches,
            hooks=hooks,
            rules=self.rules,
            start=start,
            keeper=self.keeper,
            full_watches=self._full_watches,
            agreement=agreement,
            isolation=isolation,
            clock=self.clock,
            measurements=self.measurements,
            last_steps=LastSteps(models_of(watches) if is_asked else None),
        )
        self.pipeline = Pipeline(core, monitors)
        self.inputs = LoopInputs(core, self.pipeline.tensors)
        self.inputs.on_left = functools.partial(self.on_raised, ends=False)
        for watch in watches:
            watch.suppresses = isolation.suppresses
            watch.needs_buffers = is_restored
            watch.on_left = self._on_left
            watch.on_unjudged = self._warn_of_unjudged
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
            self.requests = self.inputs.requests = Requests(self._core, self.pipeline)
            self.pipeline.evaluated.is_off = True  # a request holds them
            if self.is_enabled:
                self.requests.forwards.attach()
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
            clipping.listen(self.inputs)
        self.timer.restart()
        self.clock.start()
        self.pipeline.attach()
        if self.requests is not None:
            self.requests.forwards.attach()
        uncaught_errors.listen(self)

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
                clipping.stop_listening(self.inputs)
            uncaught_errors.stop_listening(self)
            if self.requests is not None:
                self.requests.forwards.detach()
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
            if self.requests is not None:
                self.requests.finish()
            if self.is_enabled:
                self.pipeline.judge_late()
        finally:
            self.disable()
            self.pipeline.ledger.close()

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

    def new_watches(self) -> list[ModelWatch]:
        """Makes watches like the guard's, which nothing judges."""
        return self._new_watches(self.config.wanted, captures_tensors=False)

    def _full_watches(self) -> list[ModelWatch]:
        """Makes watches of the models that look at everything, for a replay."""
        captures_tensors = self.config.evidence is not None
        return self._new_watches(wanted_of(EVERYTHING), captures_tensors)

    def _new_watches(self, wanted: Wanted, captures_tensors: bool) -> list[ModelWatch]:
        models = living_models(self.watches)
        made = self._make_watches(models, wanted, captures_tensors, lambda *_: None)
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
        return self.measurements.metrics(self.pipeline.counts())

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

    def _warn_of_unjudged(self, watch: ModelWatch, first: _C.Frame | None) -> None:
        """Logs, once, that steps pass which nobody judges.

        Args:
            watch: The watch of the model.
            first: The first bad frame, where the program leaves out bad steps by
                itself; None where another optimizer has changed the weights.
        """
        if not self.is_enabled:
            return
        for each in self.watches:
            each.on_unjudged = None
        if first is None:
            _log.warning(_OTHER_STEPS, type(watch.model).__name__, ENOUGH)
            return
        bad = BadFrame(watch, first)
        what = what_of(bad_entry(bad, bad.bad_entries[0]))
        _log.warning(_LEFT_OUT, watch.frames.num_unjudged, what, first.batch)

    def _on_evaluated(self, watch: ModelWatch, batch: int) -> None:
        (self.requests or self.pipeline).judge_evaluated(watch, batch)
