"""Judges forwards without autograd, each for the request that it is of.

A training has one unit of judgement, the optimizer's step; where there is none, it is
the request: what runs within `guard.request()`, else one outermost forward. A request
gets the error of no other, whatever threads and tasks run beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import get_ident
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ... import _C
from ...detector.hooks import move_hook_to_front
from ...scanner.modules import children_of, named_buffers
from ...scanner.ops import scan
from ...scanner.tensors import devices_of
from ...scanner.text import counted, error_line, short_name
from ...scanner.tree import is_container, path_text, tensors
from ...torch_internals.module_internals import (
    asks_for_hooks,
    forward_pre_hooks,
    share_called_key,
)
from ...torch_internals.registry import stack
from ...torch_internals.scripting import has_no_hooks, leave_hooks_out
from ..config import EVERYTHING, wanted_of
from ..explaining import FREE_SECONDS, SHARE, with_note
from ..kept_calls.held_function import HeldFunction
from ..kept_calls.kept_call import KeptCall
from ..optimizers.last_steps import LastSteps
from ..options import Schedule
from ..outer import outer
from ..report.report import NonFiniteError, Report
from ..step import Step, WatchSchedule
from ..verdict.bad_frames import BadFrame
from ..verdict.verdict import Verdict
from ..watching.judged_tensors import ScanLevel
from ..watching.watch import ModelWatch
from .begun import Begun, request_of
from .gate import Gate
from .held_call import ForwardStart, HeldCall, Layout, SmallState

if TYPE_CHECKING:
    from ..kept_calls.call_keeper import CallKeeper
    from ..parts import GuardParts
    from ..report.coverage import GuardCoverage
    from ..report.explanation import Explanation

_log = logging.getLogger("overflow_fast")
_MOST_FORWARDS = 4  # whose stats may be on their way from a device
_WAIT = 1.0  # seconds for forwards of other threads before a replay; chosen
_KINDS = ("activations", "weights", "buffers")  # that a forward alone has
_OF_FORWARDS = (_C.FrameKind.FORWARD, _C.FrameKind.RECORDED, _C.FrameKind.BACKWARD)
_BUSY = (
    "The forward was not run again: other threads ran the models, and were waited for "
    f"{_WAIT:g} s."
)
_ZEROED = (
    "The forward was run again with 0 for what it, or a later one, has left non-finite "
    "in tensors that it was given."
)
_BEHIND = (
    "Nothing that the guard saw in this request ({}) is nan or inf, but for -inf, "
    "which may be a mask: what is wrong came from code between the watched modules or "
    "behind them."
)
_OFTEN = (
    "The forward was not run again: explanations have taken more than "
    f"{SHARE:.0%} of the time since the first request."
)


_LAST_KEY = RemovableHandle(OrderedDict()).id  # which no hook of torch has
_CODERS = {"encoder", "decoder"}
_SORTS = re.compile("(arg)?sort|sorted")  # Python's, NumPy's and torch's functions


class Request:
    """One request: the forwards that are run for it, by one thread or several.

    Args:
        number: Its number, from 0.
        ids: The program's names of those it is for, one a row; None for none.

    Attributes:
        number, ids: The same.
        num_forwards: How many forwards it has run.
        frames: The bad frames of the first forward that had any.
        bad: That forward, or None.
        forward: Its number within the request.
        left: The last forward, where an exception has left it.
        is_text: Each forward reads the tokens of a text, and but for the first one only
            the last of each row.
        function: The function that it runs as a whole, which can be made again, or
            None.
        output: What the program has recorded, or that function has returned.
        raised: The type of the exception that has ended it, or None.
        begun_at: The thread in which it began, and how many calls were under way.
        sorted_by: The function between there and its first forward that sorts, and may
            have sorted the rows, with its place; or "".
        zeroed: What that forward or a later one has left non-finite in tensors that it
            was given, with 0 for it: a replay begins with these.
        is_left_out: It is one that a schedule leaves out.
        is_over: It has ended: forwards that still run in other threads are not of it.
        seconds: What the guard has taken in its forwards.
    """

    def __init__(self, number: int, ids: Sequence[object] | None) -> None:
        self.number = number
        self.ids = None if ids is None else list(ids)
        self.num_forwards = 0
        self.frames: list[BadFrame] = []
        self.bad: HeldCall | None = None
        self.left: HeldCall | None = None
        self.forward, self.is_text = 0, True
        self.function: KeptCall | None = None
        self.output: Any = None
        self.raised: type[Exception] | None = None
        self.begun_at, self.sorted_by = (0, 0), ""
        self.is_left_out = self.is_over = False
        self.seconds = 0.0
        self.zeroed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._recent: dict[tuple[int, int], tuple[int, HeldCall | None]] = {}
        self.lock = threading.RLock()

    def add(self, watch: ModelWatch, batch: int, call: HeldCall | None) -> None:
        """Adds what a forward has shown, whose stats may have yet to arrive."""
        if call is not None:
            tokens, is_first = call.num_tokens, not self.num_forwards
            self.is_text &= tokens > 0 and (is_first or tokens == call.size)
        self._recent[id(watch), batch] = self.num_forwards, call
        if len(self._recent) > _MOST_FORWARDS:
            del self._recent[next(iter(self._recent))]

    def collect(self, watch: ModelWatch) -> None:
        """Takes the bad frames of its own forwards that have arrived."""
        with self.lock:
            self._collect(watch)

    def _collect(self, watch: ModelWatch) -> None:
        mine = {batch for of, batch in self._recent if of == id(watch)}
        weights = watch.frames._evaluated_weights
        found = watch.frames._take(
            lambda frame: (
                (frame.batch in mine and frame.kind in _OF_FORWARDS)
                or weights.get(frame.order) in mine
            )
        )
        if not found or self.frames:
            return
        first = min(found, key=lambda frame: frame.order)
        batch = weights.get(first.order, first.batch)
        self.forward, self.bad = self._recent[id(watch), batch]
        self.frames = [BadFrame(watch, frame) for frame in found]

    def end(self) -> None:
        """Lets go of its forwards."""
        with self.lock:
            self.is_over = True
            self._recent.clear()


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
        parts: The guard's.

    Attributes:
        num_requests, num_bad, num_forwards, num_tokens: What ran so far.
        poisoned: What bad requests have left non-finite, by name, with their report.
    """

    def __init__(self, parts: GuardParts) -> None:
        self._parts = parts
        self._keeper: CallKeeper | None = parts.keeper
        self._now = _Now()
        self._gate = Gate()
        self._lock = threading.RLock()  # held while a request is judged
        self._counts = threading.Lock()  # a forward needs it, and a replay waits for it
        self._states: weakref.WeakKeyDictionary[nn.Module, SmallState]
        self._states = weakref.WeakKeyDictionary()
        self._devices: weakref.WeakKeyDictionary[nn.Module, list[torch.device]]
        self._devices = weakref.WeakKeyDictionary()
        self._handles: list[RemovableHandle] = []
        self._began = self._on_since = perf_counter()
        self._explaining_seconds = 0.0
        self._has_looked = False
        self.num_requests = self.num_bad = self.num_forwards = self.num_tokens = 0
        self.poisoned: dict[str, str] = {}
        asked = parts.config.schedule
        self._schedule: WatchSchedule | None = None
        if asked != Schedule():
            self._schedule = WatchSchedule(**vars(asked), has_gradients=False)
        for watch in parts.watches:
            watch.inputs.capture = self
            watch.is_of_request = self._is_in_forward
            watch.has_seen_loss = True  # there is none to be seen: nothing is trained
            watch.looks_for_loss = bool(parts.hooks)  # it is an output, as others are
            if not parts.hooks and watch.on_forward_end is not None:
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
        return next((w for w in self._parts.watches if w.model is module), None)

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
        if self._parts.config.is_tripwire and now.watch is not None:
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
        with self._counts:
            self.num_forwards += 1
            self.num_tokens += 0 if call is None else call.num_tokens
        waits = is_own and self._parts.config.sync != "lagged"
        if waits:
            watch.frames.receive(is_lagged=False)
        else:
            watch._process_arrived(1)
        request.collect(watch)
        request.seconds += self._now.seconds + perf_counter() - begin
        self._now.seconds = 0.0
        self.pass_out()  # others may run theirs again now
        if is_own:
            self._end(request)

    def _judge_entry(self, watch: ModelWatch, output: Any) -> None:
        """Judges the call of a submodule, of which nothing else is watched."""
        with self._batch_of(watch) as batch, watch.frames.evaluated(batch):
            watch.record(*_recorded(named_outputs(output)))
        watch.frames.send()
        self.judge_evaluated(watch, batch)

    def left(self, watch: ModelWatch, error: Exception) -> None:
        """Judges a forward that an exception has left, with the request it is of."""
        call = self._leave()
        root = watch._roots.get(get_ident())
        batch = watch.recorder.last_batch if root is None else root.batch
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
        return self._gate.alone(_WAIT, beside_running=True)

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
        return not (is_trained or self._parts.hooks)

    @property
    def takes_now(self) -> bool:
        """True if it is a request that runs, whatever the models are."""
        if not torch.is_grad_enabled():
            return True
        return not self._parts.hooks and request_of(self) is not None

    def is_left_alone(self, change: int = 0) -> bool:
        """True for what is trained, run again, traced by a compiler, or left out.

        Args:
            change: 1 where a call begins, -1 where it ends.
        """
        if torch.compiler.is_compiling():
            return True
        if torch.is_grad_enabled() and self._parts.hooks:
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

    def go_on_from(self, before: Requests) -> None:
        """Counts on where the requests of a guard have ended that this one replaces."""
        self.num_requests, self.num_bad = before.num_requests, before.num_bad
        self.num_forwards, self.num_tokens = before.num_forwards, before.num_tokens
        own, other = self._parts.pipeline, before._parts.pipeline
        own.num_bad, own.last_report = other.num_bad, other.last_report

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
        request.is_left_out = self._is_left_out(request)
        return Begun(self, request, frame)

    def end_request(self, begun: Begun, error: BaseException | None = None) -> None:
        """Ends a request, in whatever context; judges it unless it was interrupted."""
        request = begun.request
        begun.end()
        if request is not None and (error is None or isinstance(error, Exception)):
            self._end(request, error)

    def run(self, function: Any) -> Any:
        """Runs a function as a request, whose outputs are judged, too."""
        request = request_of(self)
        if request is not None:
            return self._run(function, request)
        with self.request(None) as request:
            return self._run(function, request)

    def _run(self, function: Any, request: Request) -> Any:
        first = self._parts.watches[0].model
        if request.function is None and first is not None:
            with self._parts.isolation.isolated():
                held = HeldFunction(function)
                batch, ambient = held.values, HeldCall(first, (), {}, [], None).ambient
                request.function = KeptCall(held, batch, ambient)
                request.function.has_backward = False
                request.function.has_autograd = torch.is_grad_enabled()
                request.function.returns_loss = True
        output = self._call(first, function)
        with self._parts.isolation.isolated():
            found = tensors(output)
            self.record({f"output{path_text(path)}": each for path, each in found})
        return output

    def _call(self, model: nn.Module | None, function: Any) -> Any:
        """Calls a function; with autograd, `check()` may judge it, too."""
        keeper = self._keeper
        if keeper is None or model is None or not torch.is_grad_enabled():
            return function()
        return keeper.run(model, function, self._parts.isolation.isolated)

    def record(self, named: Mapping[str, torch.Tensor]) -> None:
        """Adds tensors to the request that this code is in, or one of their own."""
        request, is_own = self._request_now()
        watch = self._parts.watches[0]
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
        with self._batch_of(watch) as batch, watch.frames.evaluated(batch):
            watch.record(*_recorded(found))
        request.add(watch, batch, None)
        request.output = found
        watch.frames.send()

    @contextlib.contextmanager
    def _batch_of(self, watch: ModelWatch) -> Iterator[int]:
        """Yields the batch of the forward that this thread runs, or one of its own.

        No other thread's frames are of it.
        """
        root = watch._roots.get(get_ident())
        if root is not None:
            yield root.batch
            return
        root = watch._begin_root()
        watch.recorder.in_step = True
        try:
            yield root.batch
        finally:
            watch.recorder.in_step = False
            watch._begin_batch()
            watch._end_root(root)

    def _new(self, ids: Sequence[object] | None) -> Request:
        with self._counts:
            number = self.num_requests
            self.num_requests += 1
        return Request(number, ids)

    def _look_at_buffers(self) -> None:
        """Notes the buffers that are bad before the first forward."""
        self._has_looked = True
        named = [
            (f"{watch.prefix}{name}", each)
            for watch in self._parts.watches
            if watch.model is not None
            for name, each in named_buffers(watch.model)
        ]
        stats = scan([each for _, each in named])
        for (name, _), stat in zip(named, stats, strict=True):
            if stat.has_nan or stat.has_inf:
                self.poisoned[name] = ""

    def _is_left_out(self, request: Request) -> bool:
        schedule = self._schedule
        return schedule is not None and schedule.level(request.number) is ScanLevel.OFF

    def _end(self, request: Request, error: Exception | None = None) -> None:
        """Judges a request that has ended.

        Raises:
            NonFiniteError: If it is bad and the policy is to raise, unless the
                program's own code has raised.
        """
        parts = self._parts
        request.raised = None if error is None else type(error)
        for watch in parts.watches:
            if request.num_forwards and not request.frames:
                watch.frames.receive(is_lagged=parts.config.sync == "lagged")
                request.collect(watch)
        request.end()
        with self._lock:
            try:
                known = self._searched(request, error)
                if request.frames or known is not None:
                    self._judge(request, error, known)
                elif error is not None:
                    self._say_behind(request, error)
            finally:
                self._end_round(request)
                if request.num_forwards > 1:
                    self._now.layout = None  # it holds the arguments

    def _end_round(self, request: Request) -> None:
        """Measures what the request has cost, and sends its numbers."""
        parts, number = self._parts, request.number
        pipeline, timer = parts.pipeline, parts.timer
        for watch in parts.watches:
            watch.recorder.forget_calls(True)
            watch.frames._unjudged = 0
        timer._seconds += request.seconds
        # In this thread: the requests of others overlap with it.
        began = max(self._now.since, self._on_since) if self._now.since else None
        cost = timer.end_step(is_watched=True, began=began)
        self._now.since = perf_counter()
        if self._schedule is not None:
            seconds = cost.guard_seconds, cost.step_seconds
            self._schedule.note(number, ScanLevel.ALL, *seconds)
        with parts.isolation.isolated():
            pipeline._record_step(number, cost)
            parts.measurements.emit(number, self.counts)

    def counts(self) -> dict[str, float]:
        """The numbers of all, for exporters."""
        return {
            **self._parts.pipeline.counts(),
            "requests_total": self.num_requests,
            "bad_requests_total": self.num_bad,
            "forwards_total": self.num_forwards,
            "tokens_total": self.num_tokens,
        }

    def coverage(self) -> GuardCoverage:
        """The checks so far; of gradients and losses there are none."""
        found = self._parts.pipeline.coverage()
        if found.steps:
            return found
        kinds = [kind for kind in found.not_watched if kind in _KINDS]
        return dataclasses.replace(
            found, not_watched=kinds, without_gradient=0, requests=self.num_requests
        )

    # A bad request.

    def _say_behind(self, request: Request, error: Exception) -> None:
        from ..raised import add_note, says_values  # of few requests

        if request.num_forwards and says_values(error):
            forwards = counted(request.num_forwards, "forward")
            add_note(error, _BEHIND.format(forwards))

    def _searched(
        self, request: Request, error: Exception | None
    ) -> tuple[Verdict, Explanation] | None:
        """Looks for a bad value where the program has raised, and no module showed one.

        What was left is run again: the function of `guard.run()`, or a forward.
        """
        config = self._parts.config
        if error is None or request.frames or not config.explain.replay_safe:
            return None
        if request.function is None and request.left is None:
            return None
        from ..raised import is_of_values  # of few requests

        is_asked = config.explain.when != "never" and not self._has_no_time
        if not is_asked or isinstance(error, NonFiniteError) or not is_of_values(error):
            return None
        if request.function is None and request.left is not None:
            request.bad, request.zeroed = request.left, request.left.left_bad()
        found = self._search(request)
        if found is None and request.zeroed:
            request.zeroed = []  # it was there before
            found = self._search(request)
        return found

    def _search(self, request: Request) -> tuple[Verdict, Explanation] | None:
        try:
            with self._explainer(request, list(self._parts.watches)) as explainer:
                found = None if explainer is None else explainer.search("evaluation")
        except Exception as error:  # nothing is known of it
            _log.debug("A request that has raised was not explained: %s", error)
            return None
        return cast("tuple[Verdict, Explanation] | None", found)

    @property
    def _has_no_time(self) -> bool:
        """True if explanations have taken more than their share of the time."""
        most = FREE_SECONDS + SHARE * (perf_counter() - self._began)
        return self._explaining_seconds > most

    def _judge(
        self,
        request: Request,
        error: Exception | None,
        known: tuple[Verdict, Explanation] | None = None,
    ) -> None:
        from ..raised import add_report
        from .request_report import RequestReport, left_in_state

        parts = self._parts
        pipeline, config = parts.pipeline, parts.config
        step = Step(request.number, moment="evaluation", frames=request.frames)
        pipeline._leave_out_learned(step)
        if known is not None:
            step.verdict = known[0]
        elif not step.frames:
            return
        left = dict(left_in_state(request.bad, parts.watches, self.poisoned))
        if config.may_replay and request.bad is not None and not request.function:
            request.zeroed = request.bad.left_bad()
        if config.is_tripwire and known is None:
            step = self._looked_again(step, request)
        plain = pipeline._make_report(step, pipeline._detect(step))
        plain.not_covered = self.coverage().gaps()
        report = RequestReport.of(plain, request, left, self.poisoned)
        if known is not None:
            report.explanation = known[1]
        elif config.explain.when != "never":
            report.explanation = self._explained(report, step, request)
        report.note_explained()
        self.num_bad += 1
        if callable(config.on_overflow):
            try:
                report.action = pipeline._ask(config.on_overflow, report)
            except Exception:  # it is logged
                if error is None:
                    raise
        report.action = "warn" if report.action == "skip" else report.action
        if error is not None:
            report.action, report.moment = "raise", "raised"
            report.raised = type(error).__qualname__
        report.is_beyond_repair = pipeline._is_beyond_repair(step, report.verdict)
        pipeline.num_bad += 1
        pipeline.last_report = report
        for name in report.poisoned:
            self.poisoned.setdefault(name, report.subject)
        with parts.isolation.isolated():
            pipeline._archive.end_report(report, request.number, 0, True)
        if error is not None:
            add_report(error, report)
        elif report.action == "raise":
            raise NonFiniteError(report)
        if error is None or config.on_overflow != "raise":
            _log.warning("%s", report.line())

    def _again(self, request: Request) -> _Kept:
        """The calls to make again: the function, or the bad forward."""
        calls: list[KeptCall] = []
        start = None
        if request.bad is not None:
            call, start = request.bad.again(request.zeroed)
            calls = [call]
        if request.function is not None:
            request.function.forwards = calls
            calls = [request.function]
        for call in calls:
            call.raised = request.raised
        return _Kept(calls, start)

    @contextlib.contextmanager
    def _explainer(self, request: Request, watches: list[ModelWatch]) -> Iterator[Any]:
        """Yields the explainer of one request, while no other thread runs the models.

        It is None where others run.
        """
        parts = self._parts
        begin = perf_counter()
        with self._gate.alone(_WAIT) as is_alone:
            if is_alone:
                yield outer("explainer")(
                    *(parts.config, watches, self._again(request)),
                    lambda: parts.new_watches(wanted_of(EVERYTHING)),
                    *(list, LastSteps(), False),
                )
            else:
                yield None
        seconds = perf_counter() - begin
        self._explaining_seconds += seconds
        self._now.since += seconds  # which are no cost of watching

    def _explained(
        self, report: Report, step: Step, request: Request
    ) -> Explanation | None:
        from ..report.causes import NOT_REPRODUCIBLE
        from ..report.explanation import Explanation

        config, verdict = self._parts.config, report.verdict
        if self._has_no_time and config.explain.when != "always":
            return Explanation(notes=[_OFTEN])
        if not config.explain.replay_safe or verdict.first is None:
            return None
        watches = self._watches_of(request)
        try:
            with self._explainer(request, watches) as explainer:
                if explainer is None:
                    return Explanation(notes=[_BUSY])
                found: Explanation = explainer.explain(verdict, "evaluation")
            if request.zeroed and found.cause == NOT_REPRODUCIBLE.name:
                request.zeroed = []  # it was there before
                return self._explained(report, step, request)
            found.notes += [_ZEROED] * bool(request.zeroed)
            return found
        except Exception as error:  # the alarm matters more than its explanation
            text = f"The request was not explained: {error_line(error)}."
            return Explanation(notes=[text])

    def _watches_of(self, request: Request) -> list[ModelWatch]:
        """The watches of the models that the call to make again runs."""
        if request.function is not None or not request.frames:
            return list(self._parts.watches)
        return [request.frames[0].watch]

    def _looked_again(self, step: Step, request: Request) -> Step:
        """The step as a full watch sees it, which a tripwire has found bad."""
        try:
            with self._explainer(request, list(self._parts.watches)) as explainer:
                if explainer is None:
                    return with_note(step, _BUSY)
                seen: Step = explainer.look_again(step)
            is_same = seen.frames == step.frames
            if request.zeroed and is_same:
                request.zeroed = []  # it was there before
                return self._looked_again(step, request)
            # Behind the models, where modules show nothing.
            is_outside = is_same and request.function is not None
            return step if is_outside else seen
        except Exception as error:
            return with_note(step, f"The step was not run again: {error_line(error)}.")

    # Submodules that the program calls where the model itself does not run.

    def attach(self) -> None:
        """Puts hooks on the models, and on what a program may call instead of them."""
        self._on_since = perf_counter()
        leave_hooks_out(self)
        for watch in self._parts.watches:
            model = watch.model
            if model is None:
                continue
            self._add(model, None)
            for child in entries_of(model):
                self._add(child, watch)

    def _add(self, module: nn.Module, watch: ModelWatch | None) -> None:
        own = _Hooks(self, watch)
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
            with self._parts.isolation.isolated():
                self._hold(module, *given)

    def after_entry(self, watch: ModelWatch, module: nn.Module, output: Any) -> None:
        """Ends it, with what it has returned."""
        if self._now.entry is not module:
            return
        self._note_output(output)
        if self._parts.config.is_tripwire:  # no other hook ends it
            self._judge_entry(watch, output)

    def entry_ended(self, module: nn.Module) -> None:
        """Ends it, whether it has raised or not."""
        if self._now.entry is module:
            self._now.entry = None
            self.pass_out()


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


class _Hooks:
    """The hooks of a model, or of a module that a program may call alone.

    While a model is run again, the watch's own do nothing. In a copy of the model, of
    which nothing is judged, these do nothing either.

    Args:
        requests: Those of the guard; None in a copy.
        watch: The watch, for a module within its model.
    """

    def __init__(self, requests: Requests | None, watch: ModelWatch | None) -> None:
        self._requests, self._watch = requests, watch

    def __reduce__(self) -> tuple[type[_Hooks], tuple[None, None]]:
        return _Hooks, (None, None)

    def before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Begins a call; without `kwargs` it ran when the hook was put on."""
        requests, watch = self._requests, self._watch
        if requests is None or kwargs is None or requests.is_left_alone(1):
            return
        model = module if watch is None else watch.model
        if not requests.takes([model]) or requests.hides():
            return
        if watch is None:
            requests.pass_in()
        else:
            requests.before_entry(watch, module, (args, kwargs))

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Ends a call that has returned."""
        requests = self._requests
        if requests is None or self._watch is None or requests.is_left_alone():
            return
        requests.after_entry(self._watch, module, output)

    def ended(self, module: nn.Module, args: Any, output: Any) -> None:
        """Ends any call."""
        requests = self._requests
        if requests is None or requests.is_left_alone(-1):
            return
        if self._watch is None:
            requests.pass_out()
        else:
            requests.entry_ended(module)


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


class _Kept:
    """The calls of a request, in the form of a `CallKeeper`."""

    num_dropped, clean = 0, None
    hidden_by = ""
    had_gradients = False
    left_over: Mapping[str, int] = {}

    def __init__(self, calls: list[KeptCall], start: ForwardStart | None) -> None:
        self.calls, self.start = calls, start


def entries_of(model: nn.Module) -> Iterator[nn.Module]:
    """The children of a model that can be called; of a container, those in it.

    Of one that has an encoder and a decoder, these too: a generation calls them alone.
    """
    for child in children_of(model).values():
        if isinstance(child, torch.jit.ScriptModule) or asks_for_hooks(child):
            continue
        if type(child).forward is nn.Module.forward:
            yield from entries_of(child)
            continue
        yield child
        parts = children_of(child)
        if parts.keys() >= _CODERS:
            yield from (parts[name] for name in sorted(_CODERS))


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
