"""The outermost forwards of requests, each in the thread that runs it.

An outermost forward is a call of a watched model, or of a module within it that the
program calls where the model itself does not run.

The model has hooks for it, and so have the modules of `entries_of()`: one that tells of
the beginning of a call, and from the first one on that is outermost those of its end.

1. `before()` lets it pass the gate, behind which nothing is run again meanwhile.
2. What it is called with is held, and the small state that it begins with: by that hook
   for a call that is looked at alone (`_Now.is_alone`), else by the watch (`begin()`).
3. A call is alone if no hook of the watch judges it: with a tripwire each without
   autograd. Its outputs are recorded when it ends (`end_call()`). `Requests` counts it
   where they are finite, and is handed any other, also where an exception has left it.
4. Else the watch hands it to the guard, and the guard to `Requests` (from
   `ModelWatch._end_step()` to `GuardParts._on_evaluated()`).
5. `Requests` takes what was held, and lets it pass out.

State: for each thread the forward that it runs, and what the guard has taken of its
time (`_Now`); for each model the small state that its forwards change (`CallHolder`).
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ... import _C
from ...base.source_files import drop_own_frames
from ...base.tree import Part, children, path_text
from ...detector.hooks import move_hook_to_front
from ...torch_internals.module_internals import (
    forward_hooks,
    forward_pre_hooks,
    is_dry_run,
    share_called_key,
)
from ...torch_internals.running import is_recorded, running_modules
from ...torch_internals.scripting import has_no_hooks, leave_hooks_out
from ..core import GuardCore
from ..watching.entries import entries_of
from ..watching.watch import ModelWatch
from .gate import Gate
from .held_call import CallHolder, HeldCall
from .request import Request

_LAST_KEY = RemovableHandle(OrderedDict()).id  # which no hook of torch has


class _Now(threading.local):
    """The forwards that a thread runs.

    Attributes:
        call: The outermost forward that it runs.
        watch: That of its model.
        is_in: It has passed the gate.
        module: The module that it has called, outermost.
        depth: How many calls of that module run within the outermost one.
        is_alone: No hook of the watch judges that call.
        handled: The exception that the program handled when it began, or None.
        seconds: What the guard has taken since the last forward was handed over.
        begin: When the guard's hooks before or behind the forward began; 0 between.
        taken: When these seconds were taken of the forward that ends; 0 between.
        since: When the last request ended, or the first forward began; 0 before.
        unwatched: Hides a forward that a schedule leaves out; None for others.
    """

    unwatched: _C.Unwatched | None = None
    depth = 0
    call: HeldCall | None = None
    watch: ModelWatch | None = None
    seconds = begin = since = taken = 0.0
    is_in = is_alone = False
    module: nn.Module | None = None
    handled: BaseException | None = None


class Forwards:
    """The outermost forwards of the requests of one guard.

    Args:
        guard: The guard's core. The forwards of its models are judged as requests from
            now on; where it has an optimizer, what runs with autograd is of that. With
            a tripwire the outputs of a forward alone are looked at.
        gate: They pass it.
        request_now: Returns the request that this code is in, or None.
        before_first: Called before the first forward.
        on_finite, on_ended: Called where a call that is looked at alone has returned,
            with its watch and its batch: the first where its outputs are known to be
            finite. Of others the watch tells the guard.
    """

    def __init__(
        self,
        guard: GuardCore,
        gate: Gate,
        request_now: Callable[[], Request | None],
        before_first: Callable[[], None],
        on_finite: Callable[[ModelWatch, int], None],
        on_ended: Callable[[ModelWatch, int], None],
    ) -> None:
        self._watches, self._isolation = guard.watches, guard.isolation
        self._is_tripwire = guard.config.is_tripwire
        self._has_optimizer = has_optimizer = bool(guard.hooks)
        self._gate = gate
        self._request_now = request_now
        self._before_first: Callable[[], None] | None = before_first
        self._on_finite, self._on_ended = on_finite, on_ended
        self._now = _Now()
        self._holder = CallHolder()
        self._handles: list[RemovableHandle] = []
        self._on_since = perf_counter()
        for watch in guard.watches:
            watch.judges_requests = True
            watch.is_served = not has_optimizer
            watch.inputs.captures.append(self)
            watch.is_of_request = self.are_running
            watch.is_seen_alone = self.is_seen_alone
            watch.has_seen_loss = True  # there is none to be seen: nothing is trained
            watch.looks_for_loss = has_optimizer  # it is an output, as others are
            if not has_optimizer and watch.on_forward_end is not None:
                watch.on_forward_end = _of_training(watch.on_forward_end)

    # The forwards that are of requests.

    def are_running(self) -> bool:
        """True where this thread runs one."""
        return self._now.is_in

    def is_seen_alone(self) -> bool:
        """True where this thread runs one that no hook of a watch judges."""
        return self._now.is_alone

    def begins_within(self, module: nn.Module, is_root: bool) -> bool:
        """True for a call that begins within a forward that this thread runs.

        Most calls of modules do, and ask no more than that.
        """
        now = self._now
        if now.is_in and (module is now.module or is_root):
            calls = [each for _, each in running_modules() or ()]
            is_again = module is now.module
            if sum(each is now.module for each in calls) > is_again:
                now.depth += is_again
            else:  # an interrupt has left it, of which torch tells no hook
                self.pass_out()
        return now.is_in

    def is_within(self, module: nn.Module, change: int = 0) -> bool:
        """True within a forward that this thread runs, but for its outermost call.

        Args:
            module: The module whose call ends.
            change: -1 where that is all of it.
        """
        now = self._now
        if module is now.module and now.depth:
            now.depth += change
            return True
        return now.is_in and module is not now.module

    def takes(self, models: Iterable[nn.Module | None]) -> bool:
        """True if forwards of models that begin now are of requests.

        With autograd they are of a step, where the guard has an optimizer; without one,
        `check()` may judge the training of models, outside of requests.
        """
        if self.takes_now:
            return True
        is_trained = any(each is not None and each.training for each in models)
        return not (is_trained or self._has_optimizer)

    @property
    def takes_now(self) -> bool:
        """True if it is a request that runs, whatever the models are."""
        if not torch.is_grad_enabled():
            return True
        return not self._has_optimizer and self._request_now() is not None

    def is_left_alone(self) -> bool:
        """True for what is trained, or run again."""
        if torch.is_grad_enabled() and self._has_optimizer:
            return True
        return self._now.unwatched is None and _C.is_unwatched()

    # Its beginning and its end.

    def begin_call(
        self, watch: ModelWatch, module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        """Begins the outermost call of a model, or of a module within it."""
        is_root = module is watch.model
        if watch.is_abandoned() or (not is_root and watch.is_in_stray):
            return
        self._pass_in()
        now, request = self._now, self._request_now()
        if request is not None and request.is_left_out:
            now.unwatched = _C.Unwatched()
            now.unwatched.__enter__()
        now.module, now.depth, now.handled = module, 0, sys.exc_info()[1]
        is_hidden = watch.recorder.is_off
        by_watch = is_root and (self._has_optimizer or self._is_of_watch(module))
        now.is_alone = self._is_tripwire and not (is_hidden or by_watch)
        if not is_hidden and (now.is_alone or not is_root):
            self._hold(watch, module, args, kwargs)

    def _is_of_watch(self, model: nn.Module) -> bool:
        """True for a forward that may change what a later step begins with."""
        return torch.is_grad_enabled() or model.training or is_dry_run()

    def _pass_in(self) -> None:
        """Lets a forward begin, once no other thread runs one again."""
        # Once, and no part of a request's time, nor of a trace's.
        if self._before_first is not None and not is_recorded():
            before_first, self._before_first = self._before_first, None
            with self._isolation.isolated():
                before_first()
        now = self._now
        now.begin, now.taken = perf_counter(), 0.0
        now.since = now.since or now.begin
        self._gate.enter()
        now.is_in = True

    def pass_out(self) -> None:
        """Ends it."""
        now = self._now
        if now.unwatched is not None:
            now.unwatched.__exit__(None, None, None)
            now.unwatched = None
        if now.is_in:
            now.is_in = now.is_alone = False
            now.module, now.depth, now.handled = None, 0, None
            self._gate.leave()

    def end_call(self, watch: ModelWatch, module: nn.Module, output: Any) -> None:
        """Ends that call, whether it has raised or not."""
        now = self._now
        if now.module is not module:
            return
        found = sys.exc_info()[1]
        error = None if found is now.handled or output is not None else found
        is_of_root = now.is_alone and module is watch.model
        try:
            if now.is_alone and error is None:
                self._end_alone(watch, output)
            elif is_of_root and watch.on_left and isinstance(error, Exception):
                watch.on_left(watch, error)
        finally:
            self.pass_out()
            if now.taken:  # the rest is of the next one
                now.seconds += perf_counter() - now.taken
                now.taken = 0.0

    def _end_alone(self, watch: ModelWatch, output: Any) -> None:
        self.end(output)
        batch, is_held = watch.own_batch(), self._now.call is not None
        with watch.frames.evaluated(batch):  # no other thread takes what is bad in it
            if is_held and watch.recorder.record_output(batch, *_named_outputs(output)):
                self._on_finite(watch, batch)
                return
            watch.frames.send()
            self._on_ended(watch, batch)

    def begin(
        self, module: nn.Module, args: Any, kwargs: Any, has_stand_ins: bool = False
    ) -> None:
        """Holds what a forward is called with that a watch sees; see `ForwardCapture`.

        Compiled code hides its arguments.
        """
        if self._now.is_in or not torch.is_grad_enabled():
            watch = next((w for w in self._watches if w.model is module), None)
            args, kwargs = ((), {}) if args is None else (args, kwargs)
            self._hold(watch, module, args, kwargs)

    def _hold(
        self, watch: ModelWatch | None, module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        now = self._now
        begin = now.begin or perf_counter()
        now.watch, now.call = watch, self._holder.hold(module, args, kwargs)
        now.seconds += perf_counter() - begin
        now.begin = 0.0

    def end(self, output: Any, loss: torch.Tensor | None = None) -> None:
        """Notes what it has returned, before its frames are judged."""
        now = self._now
        if now.call is None:
            return
        now.begin = perf_counter()
        now.call.end(output)
        is_of_watch = self._is_tripwire and not now.is_alone
        if is_of_watch and now.watch is not None:
            now.watch.record(_C.FrameKind.RECORDED, _named_outputs(output))

    def leave(self) -> None:
        """Does nothing: the request takes it as it takes others."""

    def clear(self) -> None:
        """Does nothing: a step has ended."""

    # What the request takes of it.

    def take(self) -> HeldCall | None:
        """Takes the call of the forward that this thread has ended; None for none."""
        now = self._now
        now.begin = now.begin or perf_counter()
        call, now.call = now.call, None
        return call

    def take_seconds(self) -> float:
        """Takes the seconds that the guard has needed for it until now."""
        now = self._now
        now.taken = perf_counter()
        seconds = now.seconds + (now.taken - now.begin if now.begin else 0.0)
        now.seconds = now.begin = 0.0
        return seconds

    def leave_out(self, seconds: float) -> None:
        """Leaves seconds out of the request's time, which are no cost of watching."""
        now = self._now
        now.since += seconds
        now.taken += seconds
        now.begin += seconds * bool(now.begin)

    def begin_end(self) -> None:
        """Begins the end of a request of this thread, which is of its time, too."""
        self._now.begin = self._now.begin or perf_counter()

    def end_request(self) -> float | None:
        """Ends the request of this thread; the requests of others overlap with it.

        Returns:
            When it began; None where that is not known.
        """
        now = self._now
        began = max(now.since, self._on_since) if now.since else None
        now.since = perf_counter()
        return began

    # Hooks on the models, and on what a program may call instead of them.

    def attach(self) -> None:
        """Puts the hooks on."""
        self._on_since = perf_counter()
        leave_hooks_out(self)
        for watch in self._watches:
            model = watch.model
            if model is None:
                continue
            for module in (model, *entries_of(model)):
                self._add(module, watch)

    def _add(self, module: nn.Module, watch: ModelWatch) -> None:
        own = _CallHooks(self, watch, module is watch.model)
        first = module.register_forward_pre_hook(own.before, with_kwargs=True)
        move_hook_to_front(forward_pre_hooks(module), first.id)
        self._handles.append(first)
        if own.is_of_root:
            self.add_end(module, own)

    def add_end(self, module: nn.Module, own: _CallHooks) -> None:
        """Puts the hooks on that tell of the end of a module's calls."""
        own.has_end = True
        last = module.register_forward_hook(own.ended, always_call=True)
        share_called_key(module, last, _LAST_KEY)
        self._handles.append(last)
        if not (self._is_tripwire or own.is_of_root):
            after = module.register_forward_hook(own.after)
            move_hook_to_front(forward_hooks(module), after.id)
            self._handles.append(after)

    def detach(self) -> None:
        """Removes them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        has_no_hooks(self)


class _CallHooks:
    """The hooks of a model, or of a module that a program may call alone.

    While a model is run again, the watch's own do nothing. In a copy of the model, of
    which nothing is judged, these do nothing either.

    Args:
        forwards: Hears of the calls; None in a copy.
        watch: The watch of the model; None in a copy.
        is_of_root: The module is the model.

    Attributes:
        has_end: The hooks of the end of calls are on.
    """

    def __init__(
        self,
        forwards: Forwards | None = None,
        watch: ModelWatch | None = None,
        is_of_root: bool = False,
    ) -> None:
        self._forwards, self._watch = forwards, watch
        self.is_of_root, self.has_end = is_of_root, False

    def __reduce__(self) -> tuple[type[_CallHooks], tuple[()]]:
        return _CallHooks, ()

    def before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Begins a call; without `kwargs` it ran when the hook was put on."""
        forwards, watch = self._forwards, self._watch
        if forwards is None or watch is None or kwargs is None:
            return
        if torch.compiler.is_compiling():
            return
        if forwards.begins_within(module, self.is_of_root):
            return
        if forwards.is_left_alone():
            return
        if torch.is_grad_enabled() and not forwards.takes([watch.model]):
            return
        if not self.has_end:
            forwards.add_end(module, self)
        self._run(forwards.begin_call, watch, module, args, kwargs)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Notes what a module has returned that the watch judges with its call."""
        forwards = self._forwards
        if forwards is None or torch.compiler.is_compiling():
            return
        if not (forwards.is_within(module) or forwards.is_left_alone()):
            self._run(forwards.end, output)

    def ended(self, module: nn.Module, args: Any, output: Any) -> None:
        """Ends any call."""
        forwards, watch = self._forwards, self._watch
        if forwards is None or watch is None or torch.compiler.is_compiling():
            return
        if not (forwards.is_within(module, -1) or forwards.is_left_alone()):
            self._run(forwards.end_call, watch, module, output)

    def _run(self, function: Callable[..., None], *given: Any) -> None:
        """Runs the guard's code out of sight of a compiler and the program's modes."""
        assert self._watch is not None
        try:
            _C.run_paused(function, *given)
        except Exception as error:
            if not self._watch.suppresses(error):
                drop_own_frames(error)
                raise error


def _of_training(function: Callable[[ModelWatch], None]) -> Callable[..., None]:
    """A function that looks at all modules, for forwards that belong to a step."""

    def call(watch: ModelWatch) -> None:
        model = watch.model
        if torch.is_grad_enabled() or (model is not None and model.training):
            function(watch)

    return call


def _named_outputs(output: Any) -> tuple[list[str], list[torch.Tensor]]:
    """The tensors that a forward has returned, with their places; none of caches."""
    if isinstance(output, torch.Tensor):
        return ["output"], [output]
    held: Iterable[tuple[Any, Any]]
    if isinstance(output, dict):
        held = dict.items(output)
    elif isinstance(output, (tuple, list)):
        held = enumerate(output)
    else:
        held = children(output) or ()
    names, found = [], []
    for key, each in held:
        if isinstance(each, torch.Tensor):
            place = path_text((key,)) if isinstance(key, Part) else f"[{key!r}]"
            names.append(f"output{place}")
            found.append(each)
    return names, found
