"""Judges forwards without autograd, each for the request that it is of.

A training has one unit of judgement, the optimizer's step; where there is none, it is
the request: what runs within `guard.request()`, else one outermost forward. A request
gets the error of no other, whatever threads and tasks run beside it.

1. An outermost forward passes the gate; what it is called with is held.
2. When it ends, its bad frames are taken for its request, and it passes out.
3. When the request ends, a bad one is handed to the judge as a unit of the pipeline. It
   is run again, if at all, alone at the gate.
4. Its cost is measured, and its numbers are sent.

State: for each thread the forward that it runs (`_Now`); the request that code is in
(`begun`); what bad requests have left behind (`poisoned`).
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import get_ident
from time import perf_counter
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ... import _C
from ...base.modules import named_buffers
from ...base.tensors import devices_of
from ...base.text import counted, short_name
from ...base.tree import is_container, path_text, tensors
from ...detector.hooks import move_hook_to_front
from ...scanner.ops import scan
from ...torch_internals.module_internals import (
    forward_pre_hooks,
    share_called_key,
)
from ...torch_internals.registry import stack
from ...torch_internals.scripting import has_no_hooks, leave_hooks_out
from ..config import GuardConfig
from ..error_notes import add_note
from ..isolation import ErrorIsolation
from ..kept_calls.call_keeper import CallKeeper
from ..kept_calls.held_function import HeldFunction
from ..kept_calls.kept_call import KeptCall
from ..options import Schedule
from ..pipeline import Pipeline
from ..report.report import Report
from ..step import LeftOut, WatchSchedule
from ..unit import REQUEST, Unit
from ..value_errors import says_values
from ..watching.watch import ModelWatch
from .again import WAIT, Replays, RequestAgain
from .begun import Begun, request_of
from .entries import CallHooks, entries_of
from .gate import Gate
from .held_call import HeldCall, Layout, SmallState
from .request import Request
from .request_report import RequestReport, left_in_state

_BEHIND = (
    "Nothing that the guard saw in this request ({}) is nan or inf, but for -inf, "
    "which may be a mask: what is wrong came from code between the watched modules or "
    "behind them."
)
_LAST_KEY = RemovableHandle(OrderedDict()).id  # which no hook of torch has
_SORTS = re.compile("(arg)?sort|sorted")  # Python's, NumPy's and torch's functions


class _Now(threading.local):
    """The forwards that a thread runs.

    Attributes:
        call: The outermost forward that it runs.
        watch: That of its model.
        is_in: It has passed the gate.
        entry: The module that it has called without the model around it.
        seconds: What the guard has taken since the last request that was judged.
        begin: When the guard's hooks before or behind the forward began; 0 between.
        since: When the last request ended, or the first forward began; 0 before.
        layout: The arguments of the one before.
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
    layout: Layout | None = None

    def __reduce__(self) -> tuple[type[_Now], tuple[()]]:  # a copied guard's
        return _Now, ()


class Requests:
    """Judges the requests of one guard.

    It takes the place of the keeper of a training's calls, which gets those that run
    with autograd.

    Args:
        config: The guard's.
        watches: The watched models.
        has_optimizer: The guard has an optimizer: what runs with autograd is its.
        keeper: Keeps a training's calls for an explanation, or None.
        pipeline: Judges them, as it does steps.
        isolation: Isolates the guard's own errors.
        full_watches: Makes watches of the models that look at everything.

    Attributes:
        poisoned: What bad requests have left non-finite, by name, with their report.
    """

    def __init__(
        self,
        config: GuardConfig,
        watches: Sequence[ModelWatch],
        has_optimizer: bool,
        keeper: CallKeeper | None,
        pipeline: Pipeline,
        isolation: ErrorIsolation,
        full_watches: Callable[[], list[ModelWatch]],
    ) -> None:
        self._config = config
        self._watches = watches
        self._has_optimizer = has_optimizer
        self._keeper = keeper
        self._pipeline = pipeline
        self._numbers = pipeline.ledger.requests
        self._numbers.are_judged = True
        self._isolation = isolation
        self._now = _Now()
        self._gate = Gate()
        self._replays = Replays(
            config, watches, full_watches, self._gate, self._leave_out
        )
        self._lock = threading.RLock()  # held while a request is judged
        self._states: weakref.WeakKeyDictionary[nn.Module, SmallState]
        self._states = weakref.WeakKeyDictionary()
        self._devices: weakref.WeakKeyDictionary[nn.Module, list[torch.device]]
        self._devices = weakref.WeakKeyDictionary()
        self._handles: list[RemovableHandle] = []
        self._on_since = perf_counter()
        self._has_looked = False
        self.poisoned: dict[str, str] = {}
        asked = config.schedule
        self._schedule: WatchSchedule | None = None
        if asked != Schedule():
            self._schedule = WatchSchedule(**vars(asked))
        for watch in watches:
            watch.judges_requests = True
            watch.inputs.capture = self
            watch.is_of_request = self._is_in_forward
            watch.has_seen_loss = True  # there is none to be seen: nothing is trained
            watch.looks_for_loss = has_optimizer  # it is an output, as others are
            if not has_optimizer and watch.on_forward_end is not None:
                watch.on_forward_end = _of_training(watch.on_forward_end)

    def __deepcopy__(self, memo: object) -> Requests:
        return self  # that of a copied guard is made anew with its first request

    # The beginning and the end of an outermost forward; see `ForwardCapture`.

    def begin(
        self, module: nn.Module, args: Any, kwargs: Any, has_stand_ins: bool = False
    ) -> None:
        """Holds what an outermost forward is called with."""
        if torch.is_grad_enabled():  # `check()` may judge it, too
            if self._keeper is not None:
                self._keeper.begin(module, args, kwargs, has_stand_ins)
            if not self._now.is_in:
                return
        self._hold(module, args, kwargs)

    def _hold(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        now = self._now
        begin = now.begin or perf_counter()
        if not self._has_looked:
            self._look_at_buffers()
        if args is None:
            args, kwargs = (), {}  # compiled code hides them
        devices = self._devices.get(module)
        if devices is None:
            found = devices_of([module])
            devices = self._devices[module] = [d for d in found if d.type != "cpu"]
        now.watch = self._watch_of(module)
        now.call = HeldCall(module, args, kwargs, devices, now.layout)
        now.layout = now.call.layout
        state = self._states.get(module)
        if state is None:
            state = self._states[module] = SmallState(module)
        now.call.state = state.before(module)
        now.seconds += perf_counter() - begin
        now.begin = 0.0

    def _watch_of(self, module: nn.Module) -> ModelWatch | None:
        """The watch of a model; None for a module within one."""
        return next((w for w in self._watches if w.model is module), None)

    def end(self, output: Any, loss: torch.Tensor | None) -> None:
        """Notes what it has returned, before its frames are judged."""
        is_kept = self._now.call is None or torch.is_grad_enabled()
        if is_kept and self._keeper is not None:
            self._keeper.end(output, loss)
        self._note_output(output)

    def _note_output(self, output: Any) -> None:
        now = self._now
        if now.call is None:
            return
        now.begin = perf_counter()
        now.call.output = output
        state = self._states.get(now.call.module)
        if state is not None and now.call.state is not None:
            state.after(now.call.state)
        if self._config.is_tripwire and now.watch is not None:
            now.watch.record(*_recorded(named_outputs(output)))

    def leave(self) -> None:
        """Notes that an exception has left it."""
        is_kept = self._now.call is None or torch.is_grad_enabled()
        if is_kept and self._keeper is not None:
            self._keeper.leave()

    def clear(self) -> None:
        """Forgets the step of a training."""
        if self._keeper is not None:
            self._keeper.clear()

    def _leave(self) -> HeldCall | None:
        """Ends the forward of this thread."""
        now = self._now
        call, now.call = now.call, None
        return call

    def pass_in(self) -> None:
        """Lets a forward begin, once no other thread runs one again."""
        if not self._now.is_in:
            self._now.begin = perf_counter()
            self._now.since = self._now.since or self._now.begin
            self._gate.enter()
            self._now.is_in = True

    def pass_out(self) -> None:
        """Ends it."""
        if self._now.is_in:
            self._now.is_in = False
            self._gate.leave()

    def judge_evaluated(self, watch: ModelWatch, batch: int) -> None:
        """Judges a forward that has ended, or leaves it to the request it is of."""
        begin, call = self._now.begin or perf_counter(), self._leave()
        self._now.begin = 0.0
        request, is_own = self._added(watch, batch, call)
        request.left = None
        self._numbers.note_forward(0 if call is None else call.num_tokens)
        if is_own:
            watch.frames.receive(is_lagged=False)
        else:
            watch.frames.receive_arrived()
        request.collect(watch)
        request.seconds += self._now.seconds + perf_counter() - begin
        self._now.seconds = 0.0
        self.pass_out()  # others may run theirs again now
        if is_own:
            self._end(request)

    def _judge_entry(self, watch: ModelWatch, output: Any) -> None:
        """Judges the call of a submodule, of which nothing else is watched."""
        with watch.own_batch() as batch, watch.frames.evaluated(batch):
            watch.record(*_recorded(named_outputs(output)))
        watch.frames.send()
        self.judge_evaluated(watch, batch)

    def left(self, watch: ModelWatch, error: Exception) -> None:
        """Judges a forward that an exception has left, with the request it is of."""
        call = self._leave()
        batch = watch.batch_at_hand
        with watch.frames.evaluated(batch):
            request, is_own = self._added(watch, batch, call)
        request.left = call
        watch.frames.send()
        watch.frames.receive(is_lagged=False)
        request.collect(watch)
        self.pass_out()
        if is_own:
            self._end(request, error)

    def no_replay(self) -> contextlib.AbstractContextManager[bool]:
        """Lets no other thread run a forward again, which puts back what it changes."""
        return self._gate.alone(WAIT, beside_running=True)

    @property
    def is_in_forward(self) -> bool:
        """True where this thread runs a forward that is watched."""
        return self._is_in_forward()

    def _is_in_forward(self) -> bool:
        return self._now.is_in

    def takes(self, models: Iterable[nn.Module | None]) -> bool:
        """True if forwards of models that begin now are judged as requests.

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
        return not self._has_optimizer and request_of(self) is not None

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
        request = None if self._schedule is None else request_of(self)
        if request is None or not request.is_left_out:
            return False
        self._now.unwatched, self._now.num_hidden = _C.Unwatched(), 1
        self._now.unwatched.__enter__()
        return True

    # Requests.

    def _request_now(self) -> tuple[Request, bool]:
        """The request that this code is in, or a new one, and whether it is new."""
        request = request_of(self)
        return (self._new(None), True) if request is None else (request, False)

    def _added(
        self, watch: ModelWatch, batch: int, call: HeldCall | None
    ) -> tuple[Request, bool]:
        """Adds a forward that has ended to the request that it is of; see above."""
        request, is_own = self._request_now()
        with request.lock:
            if not request.is_over:
                request.add(watch, batch, call)
                if not request.num_forwards and request.ids:
                    request.sorted_by = _sorted_by(*request.begun_at)
                request.num_forwards += 1
                return request, is_own
        return self._added(watch, batch, call)  # it has just ended in another thread

    def request(self, ids: Sequence[object] | None) -> _Within:
        """Makes what its context runs within one request."""
        return _Within(self, ids)

    def begin_request(self, ids: Sequence[object] | None, frame: FrameType) -> Begun:
        """Begins a request.

        Args:
            ids: See `Request`.
            frame: Of the code that has begun it.
        """
        request = self._new(ids)
        if request.ids:
            request.begun_at = get_ident(), len(stack(frame))
        if self._is_left_out(request):
            request.is_left_out = True
            self._numbers.note_left_out()
        return Begun(self, request)

    def end_request(self, begun: Begun, error: BaseException | None = None) -> None:
        """Ends a request, in whatever context; judges it unless it was interrupted."""
        request = begun.request
        begun.end()
        if request is not None and (error is None or isinstance(error, Exception)):
            with self._isolation.isolated():
                self._end(request, error)

    def run(self, function: Any) -> Any:
        """Runs a function as a request, whose outputs are judged, too."""
        request = request_of(self)
        if request is not None:
            return self._run(function, request)
        with self.request(None) as request:
            return self._run(function, request)

    def _run(self, function: Any, request: Request) -> Any:
        first = self._watches[0].model
        if request.function is None and first is not None:
            with self._isolation.isolated():
                held = HeldFunction(function)
                batch, ambient = held.values, HeldCall(first, (), {}, [], None).ambient
                request.function = KeptCall(held, batch, ambient)
                request.function.has_backward = False
                request.function.has_autograd = torch.is_grad_enabled()
                request.function.returns_loss = True
        output = self._call(first, function)
        with self._isolation.isolated():
            found = tensors(output)
            self.record({f"output{path_text(path)}": each for path, each in found})
        return output

    def _call(self, model: nn.Module | None, function: Any) -> Any:
        """Calls a function; with autograd, `check()` may judge it, too."""
        keeper = self._keeper
        if keeper is None or model is None or not torch.is_grad_enabled():
            return function()
        return keeper.run(model, function, self._isolation.isolated)

    def record(self, named: Mapping[str, torch.Tensor]) -> None:
        """Adds tensors to the request that this code is in, or one of their own."""
        request, is_own = self._request_now()
        watch = self._watches[0]
        self._record(request, watch, named)
        request.collect(watch)
        if is_own:
            self._end(request)

    def _record(
        self,
        request: Request,
        watch: ModelWatch,
        named: Mapping[str, torch.Tensor],
    ) -> None:
        """Scans tensors for a request."""
        found = {name: each for name, each in named.items() if each.numel()}
        if not found or _C.is_unwatched() or request.is_left_out:
            return
        with watch.own_batch() as batch, watch.frames.evaluated(batch):
            watch.record(*_recorded(found))
        request.add(watch, batch, None)
        request.output = found
        watch.frames.send()

    def _new(self, ids: Sequence[object] | None) -> Request:
        return Request(self._numbers.begin(), ids)

    def _look_at_buffers(self) -> None:
        """Notes the buffers that are bad before the first forward."""
        self._has_looked = True
        named = [
            (f"{watch.prefix}{name}", each)
            for watch in self._watches
            if watch.model is not None
            for name, each in named_buffers(watch.model)
        ]
        stats = scan([each for _, each in named])
        for (name, _), stat in zip(named, stats, strict=True):
            if stat.has_nan or stat.has_inf:
                self.poisoned[name] = ""

    def _is_left_out(self, request: Request) -> bool:
        schedule = self._schedule
        return schedule is not None and bool(schedule.left_out_by(request.number))

    def _end(self, request: Request, error: Exception | None = None) -> None:
        """Judges a request that has ended.

        Raises:
            NonFiniteError: If it is bad and the policy is to raise, unless the
                program's own code has raised.
        """
        request.raised = None if error is None else type(error)
        for watch in self._watches:
            if request.num_forwards and not request.frames:
                watch.frames.receive(is_lagged=False)
                request.collect(watch)
        request.end()
        with self._lock:
            try:
                self._judge(request, error)
            finally:
                self._end_round(request)
                if request.num_forwards > 1:
                    self._now.layout = None  # it holds the arguments

    def _end_round(self, request: Request) -> None:
        """Measures what the request has cost, and sends its numbers."""
        # In this thread: the requests of others overlap with it.
        began = max(self._now.since, self._on_since) if self._now.since else None
        self._now.since = perf_counter()
        is_watched = not request.is_left_out
        self._pipeline.end_request(request.number, is_watched, request.seconds, began)

    def _leave_out(self, seconds: float) -> None:
        """Leaves out what a replay has taken, which is no cost of watching."""
        self._now.since += seconds

    # A bad request.

    def _say_behind(self, request: Request, error: Exception) -> None:
        if request.num_forwards and says_values(error):
            forwards = counted(request.num_forwards, "forward")
            add_note(error, _BEHIND.format(forwards))

    def _judge(self, request: Request, error: Exception | None) -> None:
        """Hands a request to the judge.

        Args:
            request: The request.
            error: The program's exception that has ended it, or None.
        """
        unit = Unit(request.number, REQUEST, frames=request.frames, error=error)
        unit.left_out = LeftOut(total=self._numbers.num_left_out)
        unit.again = again = RequestAgain(self._replays, request)
        known = again.search(error)
        if known is not None:
            unit.verdict, unit.known = known
        if unit.is_bad:
            self._prepare(unit, request)
        elif error is not None:
            self._say_behind(request, error)
        if unit.is_bad or not (request.is_left_out or error is not None):
            self._pipeline.judge.judge(unit)

    def _prepare(self, unit: Unit, request: Request) -> None:
        """Notes what a bad request has left, before it is run again."""
        memory = MemoryError, torch.OutOfMemoryError
        unit.has_room = not isinstance(unit.error, memory)
        left = dict(left_in_state(request.bad, self._watches, self.poisoned))
        is_kept = self._config.may_replay and request.function is None
        if request.bad is not None and is_kept:
            request.zeroed = request.bad.left_bad()
        unit.made = functools.partial(self._report_of, request, left)
        unit.noted, unit.line = self._note, _line

    def _report_of(
        self, request: Request, left: Mapping[str, list[int] | None], plain: Report
    ) -> Report:
        plain.not_covered = self._pipeline.coverage().gaps()
        return RequestReport.of(plain, request, left, self.poisoned)

    def _note(self, report: Report) -> None:
        """Takes in what was found: what the request has left is known from now on."""
        assert isinstance(report, RequestReport)
        report.note_explained()
        for name in report.poisoned:
            self.poisoned.setdefault(name, report.subject)

    # Submodules that the program calls where the model itself does not run.

    def attach(self) -> None:
        """Puts hooks on the models, and on what a program may call instead of them."""
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
        own = CallHooks(self, watch)
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
        self._note_output(output)
        if self._config.is_tripwire:  # no other hook ends it
            self._judge_entry(watch, output)

    def entry_ended(self, module: nn.Module) -> None:
        """Ends it, whether it has raised or not."""
        if self._now.entry is module:
            self._now.entry = None
            self.pass_out()


def _line(report: Report) -> str:
    assert isinstance(report, RequestReport)
    return report.line()


class _Within(contextlib.ContextDecorator):
    """Makes what its context runs within one request; see `OverflowGuard.request()`.

    Args:
        requests: Those of the guard.
        ids: See `Request`.
    """

    def __init__(self, requests: Requests, ids: Sequence[object] | None) -> None:
        self._requests, self._ids = requests, ids

    def _recreate_cm(self) -> _Within:
        return _Within(self._requests, self._ids)  # each call is a request

    def __enter__(self) -> Request:
        self._begun = self._requests.begin_request(self._ids, sys._getframe(1))
        request: Request = self._begun.request
        return request

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        self._requests.end_request(self._begun, error)


def _of_training(function: Callable[[ModelWatch], None]) -> Callable[..., None]:
    """A function that looks at all modules, for forwards that belong to a step."""

    def call(watch: ModelWatch) -> None:
        model = watch.model
        if torch.is_grad_enabled() or (model is not None and model.training):
            function(watch)

    return call


def _sorted_by(thread: int, depth: int) -> str:
    """The function above so many calls of a thread that sorts, in words; or ""."""
    frames = stack()
    num = len(frames) - (depth if thread == get_ident() else 0)
    for code in (frame.f_code for frame in frames[: max(0, num)]):
        if any(map(_SORTS.fullmatch, code.co_names)):
            place = f"{short_name(code.co_filename)}:{code.co_firstlineno}"
            return f"{code.co_name}() ({place})"
    return ""


def named_outputs(output: Any) -> dict[str, torch.Tensor]:
    """The tensors that a forward has returned, by their places; none of caches."""
    if isinstance(output, torch.Tensor):
        return {"output": output}
    if not is_container(output):
        return {}
    items = list(output.items()) if isinstance(output, Mapping) else []
    if isinstance(output, (tuple, list)):
        items = list(enumerate(output))
    return {
        f"output[{key!r}]": value
        for key, value in items
        if isinstance(value, torch.Tensor)
    }


def _recorded(
    named: Mapping[str, torch.Tensor],
) -> tuple[_C.FrameKind, tuple[list[str], list[torch.Tensor]]]:
    return _C.FrameKind.RECORDED, (list(named), list(named.values()))
