"""The outermost forwards of requests, each in the thread that runs it.

An outermost forward is a call of a watched model, or of a module within it that the
program calls where the model itself does not run.

The model has hooks for it, and so have the modules of `entries_of()`.

1. Its first hook lets it pass the gate, behind which nothing is run again meanwhile.
2. What it is called with is held, and the small state that it begins with: by the watch
   for the model (`begin()`), by that hook for a module that is called alone.
3. When it ends, the watch hands it to the guard, and the guard to `Requests` (from
   `ModelWatch._end_step()` to `GuardParts._on_evaluated()`), which takes what was held
   and lets it pass out. One of the model that an exception has left comes by `on_left`.
4. With a tripwire, modules below the model have no hook of the watch: `after_entry()`
   hands a module that is called alone to `Requests` by itself, by `on_ended`.

State: for each thread the forward that it runs, and what the guard has taken of its
time (`_Now`); for each model the small state that its forwards change.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ... import _C
from ...base.tree import is_container
from ...detector.hooks import move_hook_to_front
from ...torch_internals.module_internals import forward_pre_hooks, share_called_key
from ...torch_internals.running import is_recorded
from ...torch_internals.scripting import has_no_hooks, leave_hooks_out
from ..isolation import ErrorIsolation
from ..watching.watch import ModelWatch
from .entries import entries_of
from .forward_start import SmallState
from .gate import Gate
from .held_call import HeldCall
from .request import Request

_LAST_KEY = RemovableHandle(OrderedDict()).id  # which no hook of torch has


class _Now(threading.local):
    """The forwards that a thread runs.

    Attributes:
        call: The outermost forward that it runs.
        watch: That of its model.
        is_in: It has passed the gate.
        entry: The module that it has called without the model around it.
        seconds: What the guard has taken since the last forward was handed over.
        begin: When the guard's hooks before or behind the forward began; 0 between.
        since: When the last request ended, or the first forward began; 0 before.
        unwatched: Hides a forward that a schedule leaves out; None for others.
        num_hidden: How many calls it has under way.
    """

    unwatched: _C.Unwatched | None = None
    num_hidden = 0
    call: HeldCall | None = None
    watch: ModelWatch | None = None
    seconds = begin = since = 0.0
    is_in = False
    entry: nn.Module | None = None


class Forwards:
    """The outermost forwards of the requests of one guard.

    Args:
        watches: The watched models, whose forwards are judged as requests from now on.
        is_tripwire: Of a forward its outputs alone are looked at.
        has_optimizer: The guard has an optimizer: what runs with autograd is its.
        gate: They pass it.
        isolation: Isolates the guard's own errors.
        request_now: Returns the request that this code is in, or None.
        before_first: Called before the first forward.
        on_ended: Called with a tripwire where a module that was called alone has ended,
            with its watch and its batch. Of others the watch tells the guard.
    """

    def __init__(
        self,
        watches: Sequence[ModelWatch],
        is_tripwire: bool,
        has_optimizer: bool,
        gate: Gate,
        isolation: ErrorIsolation,
        request_now: Callable[[], Request | None],
        before_first: Callable[[], None],
        on_ended: Callable[[ModelWatch, int], None],
    ) -> None:
        self._watches = watches
        self._is_tripwire = is_tripwire
        self._has_optimizer = has_optimizer
        self._gate = gate
        self._isolation = isolation
        self._request_now = request_now
        self._before_first: Callable[[], None] | None = before_first
        self._on_ended = on_ended
        self._now = _Now()
        self._states: weakref.WeakKeyDictionary[nn.Module, SmallState]
        self._states = weakref.WeakKeyDictionary()
        self._handles: list[RemovableHandle] = []
        self._on_since = perf_counter()
        for watch in watches:
            watch.judges_requests = True
            watch.is_served = not has_optimizer
            watch.inputs.captures.append(self)
            watch.is_of_request = self.are_running
            watch.has_seen_loss = True  # there is none to be seen: nothing is trained
            watch.looks_for_loss = has_optimizer  # it is an output, as others are
            if not has_optimizer and watch.on_forward_end is not None:
                watch.on_forward_end = _of_training(watch.on_forward_end)

    # The forwards that are of requests.

    def are_running(self) -> bool:
        """True where this thread runs one."""
        return self._now.is_in

    def is_within(self, module: nn.Module) -> bool:
        """True within a forward that this thread runs, but for a module called alone.

        Most calls of modules are, and ask no more than that.
        """
        return self._now.is_in and self._now.entry is not module

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

    def is_left_alone(self, change: int = 0) -> bool:
        """True for what is trained, run again, traced by a compiler, or left out.

        Args:
            change: 1 where a call begins, -1 where it ends.
        """
        if torch.compiler.is_compiling():
            return True
        if torch.is_grad_enabled() and self._has_optimizer:
            return True
        now = self._now
        if now.unwatched is None:
            return _C.is_unwatched()
        now.num_hidden += change
        if not now.num_hidden:
            now.unwatched.__exit__(None, None, None)
            now.unwatched = None
        return True

    def hides(self) -> bool:
        """Hides the forward that begins, where a schedule leaves its request out."""
        request = self._request_now()
        if request is None or not request.is_left_out:
            return False
        self._now.unwatched, self._now.num_hidden = _C.Unwatched(), 1
        self._now.unwatched.__enter__()
        return True

    # Its beginning and its end; see `ForwardCapture`.

    def pass_in(self) -> None:
        """Lets a forward begin, once no other thread runs one again."""
        if not self._now.is_in:
            # Once, and no part of a request's time, nor of a trace's.
            if self._before_first is not None and not is_recorded():
                before_first, self._before_first = self._before_first, None
                with self._isolation.isolated():
                    before_first()
            self._now.begin = perf_counter()
            self._now.since = self._now.since or self._now.begin
            self._gate.enter()
            self._now.is_in = True

    def pass_out(self) -> None:
        """Ends it."""
        if self._now.is_in:
            self._now.is_in = False
            self._gate.leave()

    def begin(
        self, module: nn.Module, args: Any, kwargs: Any, has_stand_ins: bool = False
    ) -> None:
        """Holds what an outermost forward is called with."""
        if self._now.is_in or not torch.is_grad_enabled():
            self._hold(module, args, kwargs)

    def _hold(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        now = self._now
        begin = now.begin or perf_counter()
        if args is None:
            args, kwargs = (), {}  # compiled code hides them
        now.watch = next((w for w in self._watches if w.model is module), None)
        state = self._states.get(module)
        if state is None:
            state = self._states[module] = SmallState()
        start = state.before(module)
        now.call = HeldCall(module, args, kwargs, start, state.devices)
        now.seconds += perf_counter() - begin
        now.begin = 0.0

    def end(self, output: Any, loss: torch.Tensor | None) -> None:
        """Notes what it has returned, before its frames are judged."""
        now = self._now
        if now.call is None:
            return
        now.begin = perf_counter()
        now.call.output = output
        state = self._states.get(now.call.module)
        if state is not None:
            state.after(now.call.state)
        if self._is_tripwire and now.watch is not None:
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
        seconds = now.seconds + (perf_counter() - now.begin if now.begin else 0.0)
        now.seconds = now.begin = 0.0
        return seconds

    def leave_out(self, seconds: float) -> None:
        """Leaves seconds out of the request's time, which are no cost of watching."""
        self._now.since += seconds

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
            self._add(model, None)
            for child in entries_of(model):
                self._add(child, watch)

    def _add(self, module: nn.Module, watch: ModelWatch | None) -> None:
        own = _CallHooks(self, watch)
        first = module.register_forward_pre_hook(own.before, with_kwargs=True)
        move_hook_to_front(forward_pre_hooks(module), first.id)
        last = module.register_forward_hook(own.ended, always_call=True)
        share_called_key(module, last, _LAST_KEY)
        self._handles += [first, last]
        if watch is not None:
            self._handles.append(module.register_forward_hook(own.after, prepend=True))

    def detach(self) -> None:
        """Removes them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        has_no_hooks(self)

    def before_entry(self, watch: ModelWatch, module: nn.Module, given: Any) -> None:
        """Begins the call of a module that the program calls alone."""
        if self._now.is_in or watch.is_in_stray:
            return
        self.pass_in()
        self._now.entry = module
        if not watch.recorder.is_off:
            with self._isolation.isolated():
                self._hold(module, *given)

    def after_entry(self, watch: ModelWatch, module: nn.Module, output: Any) -> None:
        """Ends it, with what it has returned."""
        if self._now.entry is not module:
            return
        self.end(output, None)
        if self._is_tripwire:  # no other hook ends it
            with watch.own_batch() as batch, watch.frames.evaluated(batch):
                watch.record(_C.FrameKind.RECORDED, _named_outputs(output))
            watch.frames.send()
            self._on_ended(watch, batch)

    def entry_ended(self, module: nn.Module) -> None:
        """Ends it, whether it has raised or not."""
        if self._now.entry is module:
            self._now.entry = None
            self.pass_out()


class _CallHooks:
    """The hooks of a model, or of a module that a program may call alone.

    While a model is run again, the watch's own do nothing. In a copy of the model, of
    which nothing is judged, these do nothing either.

    Args:
        forwards: Hears of the calls; None in a copy.
        watch: The watch, for a module within its model.
    """

    def __init__(self, forwards: Forwards | None, watch: ModelWatch | None) -> None:
        self._forwards, self._watch = forwards, watch

    def __reduce__(self) -> tuple[type[_CallHooks], tuple[None, None]]:
        return _CallHooks, (None, None)

    def before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Begins a call; without `kwargs` it ran when the hook was put on."""
        forwards, watch = self._forwards, self._watch
        if forwards is None or kwargs is None or torch.compiler.is_compiling():
            return
        if forwards.are_running() or forwards.is_left_alone(1):
            return
        model = module if watch is None else watch.model
        if not forwards.takes([model]) or forwards.hides():
            return
        if watch is None:
            forwards.pass_in()
        else:
            forwards.before_entry(watch, module, (args, kwargs))

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Ends a call that has returned."""
        forwards = self._forwards
        if forwards is None or self._watch is None or torch.compiler.is_compiling():
            return
        if forwards.is_within(module) or forwards.is_left_alone():
            return
        forwards.after_entry(self._watch, module, output)

    def ended(self, module: nn.Module, args: Any, output: Any) -> None:
        """Ends any call."""
        forwards = self._forwards
        if forwards is None or torch.compiler.is_compiling():
            return
        is_entry = self._watch is not None
        if (is_entry and forwards.is_within(module)) or forwards.is_left_alone(-1):
            return
        if self._watch is None:
            forwards.pass_out()
        else:
            forwards.entry_ended(module)


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
    if not is_container(output):
        return [], []
    items = list(output.items()) if isinstance(output, Mapping) else []
    if isinstance(output, (tuple, list)):
        items = list(enumerate(output))
    found = [pair for pair in items if isinstance(pair[1], torch.Tensor)]
    return [f"output[{key!r}]" for key, _ in found], [tensor for _, tensor in found]
