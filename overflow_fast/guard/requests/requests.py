"""Judges forwards without autograd, each for the request that it is of.

A training has one unit of judgement, the optimizer's step; where there is none, it is
the request: what runs within `guard.request()`, else one outermost forward. A request
gets the error of no other, whatever threads and tasks run beside it.

1. An outermost forward that has ended is handed over by its watch (`Forwards`), and
   added to its request, which takes its bad frames.
2. When the request ends with an exception of the program's, and no bad frame, a bad
   value is searched first: what the exception has left is run again.
3. It is handed to the judge as a unit of the pipeline, and run again to be explained.
   What is run again is alone at the gate (`RequestAgain`). Where others are served, it
   is answered first, and its report has the explanation later.
4. The pipeline measures its cost, and sends its numbers.

State: the request that code is in (`begun`), and what bad requests have left behind
(`LeftState`). Requests are judged one at a time, but for the time in which one is run
again.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from ... import _C
from ...base.source_files import drop_own_frames
from ...base.tree import path_text, tensors
from ..core import GuardCore
from ..kept_calls.ambient import Ambient
from ..kept_calls.held_function import HeldFunction
from ..kept_calls.kept_call import KeptCall
from ..pipeline import Pipeline
from ..report.explanation import Explanation
from ..report.report import NonFiniteError, Report
from ..step_clock import LeftOut
from ..unit import REQUEST, Unit
from ..value_errors import leaves_room
from ..verdict.verdict import Verdict
from ..watching.watch import ModelWatch
from .again import Replays, RequestAgain
from .begun import Begun, request_of, requests_around
from .forwards import Forwards
from .gate import Gate
from .held_call import HeldCall
from .later import is_awaited
from .left_state import LeftState
from .request import Request
from .request_report import RequestReport
from .row_order import RowOrder

# Seconds for a moment without forwards before a replay. With less, a busy server waits
# for more runs of explanations; with more, an explanation comes later. Chosen.
_WAIT = 1.0


class Requests:
    """Judges the requests of one guard.

    Args:
        guard: The guard's core. Where it has an optimizer, what runs with autograd is
            its.
        pipeline: Judges them, as it does steps.

    Attributes:
        forwards: The outermost forwards that run.
    """

    def __init__(self, guard: GuardCore, pipeline: Pipeline) -> None:
        self._config, self._watches = guard.config, guard.watches
        self._keeper, self._isolation = guard.keeper, guard.isolation
        self._pipeline = pipeline
        self._numbers = pipeline.ledger.requests
        self._numbers.are_judged = True
        self._left = LeftState(guard.watches)
        for watch in () if guard.hooks else guard.watches:
            watch.inputs.caller = "the program"
        self._gate = Gate(_WAIT)
        self.forwards = Forwards(
            *(guard, self._gate),
            *(functools.partial(request_of, self), self._left.look),
            *(self._count_finite, self.judge_evaluated),
        )
        leave_out = self.forwards.leave_out
        self._replays = Replays(guard, self._gate, self._unlocked, leave_out)
        self._lock = threading.RLock()  # held while a request is judged
        self._open: weakref.WeakSet[Request] = weakref.WeakSet()
        self._open_lock = threading.Lock()  # others begin while one is looked for

    def __deepcopy__(self, memo: object) -> Requests:
        return self  # that of a copied guard is made anew with its first request

    def no_replay(self) -> contextlib.AbstractContextManager[bool]:
        """Lets no other thread run a forward again, which puts back what it changes."""
        return self._gate.alone(beside_running=True)

    @contextlib.contextmanager
    def _unlocked(self) -> Iterator[None]:
        """Lets other threads judge requests within, while this one is run again."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()

    def finish(self) -> None:
        """Waits for the explanation that is under way behind an answer."""
        self._replays.later.finish()

    # What a request runs: forwards, functions, and tensors that are recorded.

    def left(self, watch: ModelWatch, error: Exception) -> None:
        """Judges a forward that an exception has left, with the request it is of."""
        is_alone = self.forwards.is_seen_alone()
        batch = watch.own_batch() if is_alone else watch.batch_at_hand
        with watch.frames.evaluated(batch):
            watch.frames.send()
            self.judge_evaluated(watch, batch, error)

    def judge_evaluated(
        self, watch: ModelWatch, batch: int, error: Exception | None = None
    ) -> None:
        """Judges a forward that has ended, or leaves it to the request it is of."""
        call = self.forwards.take()
        request, is_own = self._added(watch, batch, call)
        request.left = None if error is None else call
        if error is None:
            self._numbers.note_forward(0 if call is None else call.num_tokens)
        if is_own or error is not None:
            watch.frames.receive(is_lagged=False)
        else:
            watch.frames.receive_arrived()
        request.collect(watch)
        request.seconds += self.forwards.take_seconds()
        self.forwards.pass_out()  # others may run theirs again now
        if is_own:
            self._end(request, error)

    def _count_finite(self, watch: ModelWatch, batch: int) -> None:
        """Counts a forward whose outputs were finite: nothing of it is kept."""
        call, request = self.forwards.take(), request_of(self)
        if request is not None and not request.add_forward(watch, batch, call, True):
            request = None  # it has just ended in another thread
        self._numbers.note_forward(0 if call is None else call.num_tokens)
        seconds = self.forwards.take_seconds()
        self.forwards.pass_out()
        if request is not None:
            request.left = None
            request.seconds += seconds
            return
        watch.warnings.give_once(watch.recorder)
        with self._lock:
            number, num_left_out = self._numbers.begin(), self._numbers.num_left_out
            self._pipeline.ledger.end_finite_request(number, num_left_out)
            began = self.forwards.end_request()
            self._pipeline.end_request(number, True, seconds, began)

    def _added(
        self, watch: ModelWatch, batch: int, call: HeldCall | None
    ) -> tuple[Request, bool]:
        """Adds a forward that has ended to the request that it is of; see above."""
        request, is_own = self._request_now()
        if request.add_forward(watch, batch, call, is_finite=False):
            return request, is_own
        return self._added(watch, batch, call)  # it has just ended in another thread

    def _request_now(self) -> tuple[Request, bool]:
        """The request that this code is in, or a new one, and whether it is new."""
        request = request_of(self)
        return (self._new(None), True) if request is None else (request, False)

    def _new(self, ids: Sequence[object] | None) -> Request:
        return Request(self._numbers.begin(), ids, self._pipeline.collector.masks)

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
                now = Ambient(first, [], generators=held.generators())
                request.function = KeptCall(held, held.values, now)
                request.function.has_backward = False
                request.function.has_autograd = torch.is_grad_enabled()
                request.function.returns_loss = True
        keeper = self._keeper
        if keeper is None or first is None or not torch.is_grad_enabled():
            output = function()
        else:  # `check()` may judge it, too
            output = keeper.run(first, function, self._isolation.isolated)
        with self._isolation.isolated():
            found = tensors(output)
            self.record({f"output{path_text(path)}": each for path, each in found})
        return output

    def record(self, named: Mapping[str, torch.Tensor]) -> None:
        """Adds tensors to the request that this code is in, or one of their own."""
        request, is_own = self._request_now()
        watch = self._watches[0]
        found = {name: each for name, each in named.items() if each.numel()}
        if found and not (_C.is_unwatched() or request.is_left_out):
            batch = watch.own_batch()
            with watch.frames.evaluated(batch):
                watch.recorder.record_output(batch, list(found), list(found.values()))
            request.add(watch, batch, None, max(0, request.num_forwards - 1))
            request.output = found
            watch.frames.send()
        request.collect(watch)
        if is_own:
            self._end(request)

    # Its beginning and its end.

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
        with self._open_lock:
            self._open.add(request)
        if request.ids:
            request.order = RowOrder(frame)
        if self._config.schedule.left_out_by(request.number):
            request.is_left_out = True
            self._numbers.note_left_out()
        return Begun(self, request)

    def end_request(self, begun: Begun, error: BaseException | None = None) -> None:
        """Ends a request, in whatever context; judges it unless it was interrupted."""
        request = begun.request
        begun.end()
        self.forwards.begin_end()
        if request is not None and (error is None or isinstance(error, Exception)):
            with self._isolation.isolated():
                for watch in self._watches:
                    if request.num_forwards and not request.frames:
                        watch.frames.receive(is_lagged=False)
                        request.collect(watch)
                self._end(request, error)

    def _end(self, request: Request, error: Exception | None = None) -> None:
        """Judges a request that has ended, and ends its round.

        Raises:
            NonFiniteError: If it is bad and the policy is to raise, unless the
                program's own code has raised.
        """
        self.forwards.begin_end()
        request.raised = None if error is None else type(error)
        for watch in self._watches:
            watch.warnings.give_once(watch.recorder)
        request.end()
        with self._open_lock:
            self._open.discard(request)
        with self._lock:
            try:
                self._judge(request, error)
            finally:
                seconds = request.seconds + self.forwards.take_seconds()
                self._pipeline.end_request(
                    *(request.number, not request.is_left_out, seconds),
                    self.forwards.end_request(),
                )

    def _judge(self, request: Request, error: Exception | None) -> None:
        """Hands a request to the judge.

        Args:
            request: The request.
            error: The program's exception that has ended it, or None.
        """
        num_left_out = self._numbers.num_left_out
        if not (request.frames or error):
            if not request.is_left_out:
                self._pipeline.ledger.end_finite_request(request.number, num_left_out)
            return
        unit = Unit(request.number, REQUEST, frames=request.frames, error=error)
        unit.left_out = LeftOut(total=num_left_out)
        again = RequestAgain(self._replays, request, self._is_serving(request))
        known = again.search(error)
        if again.is_due:
            search = functools.partial(self._search_late, again, unit, request)
            self._replays.later.start(search)
        if request.frames or known is not None:
            self._judge_bad(unit, request, again, known)

    def _is_serving(self, request: Request) -> bool:
        """True if others than one request are served: they would wait for its end."""
        with self._open_lock:
            others = set(self._open) - {request, *requests_around(self)}
        return bool(others) or not self._gate.is_free or is_awaited()

    def _judge_bad(
        self,
        unit: Unit,
        request: Request,
        again: RequestAgain,
        known: tuple[Verdict, Explanation] | None = None,
    ) -> None:
        unit.again = again
        if known is not None:
            unit.verdict, unit.known = known
        self._prepare(unit, request)
        self._pipeline.judge.judge(unit)

    # Behind the answer of a bad request, in another thread.

    def _search_late(self, again: RequestAgain, unit: Unit, request: Request) -> None:
        """Searches what has made the program raise, and logs it."""
        error, unit.error, unit.policy = unit.error, None, "warn"
        again.go_on()
        with self._lock, self._isolation.isolated():
            known = again.search(error)
            if known is not None:
                self._judge_bad(unit, request, again, known)

    def _explain_late(self, again: RequestAgain, unit: Unit, report: Report) -> None:
        """Adds the explanation to a report, and logs it."""
        again.go_on()
        with self._lock, self._isolation.isolated():
            self._pipeline.judge.explain_late(unit, report)

    def _prepare(self, unit: Unit, request: Request) -> None:
        """Notes what a bad request has left, before it is run again."""
        unit.has_room = unit.error is None or leaves_room(unit.error)
        left = self._left.by(request.bad)
        may_replay = self._config.may_replay and request.function is None
        if request.bad is not None and may_replay:
            request.zeroed = request.bad.left_bad()
        unit.made = functools.partial(self._report_of, request, left)
        unit.noted = functools.partial(self._note, unit, request)
        unit.line = _line

    def _report_of(
        self, request: Request, left: Mapping[str, list[int] | None], plain: Report
    ) -> Report:
        plain.not_covered = self._pipeline.coverage().gaps()
        return RequestReport.of(plain, request, left, self._left.known)

    def _note(self, unit: Unit, request: Request, report: Report) -> None:
        """Takes in what was found: what the request has left is known from now on."""
        assert isinstance(report, RequestReport)
        report.note_explained()
        self._left.note(report.poisoned, report.subject)
        again = unit.again
        if isinstance(again, RequestAgain):
            again.note(report)
            if again.is_due:
                explain = functools.partial(self._explain_late, again, unit, report)
                self._replays.later.start(explain)


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
        try:
            self._requests.end_request(self._begun, error)
        except NonFiniteError as found:
            drop_own_frames(found)
            raise found
