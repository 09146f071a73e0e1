"""Keeps the calls of a step by reference, so that they can be made again.

1. `begin()` and `end()`, or `leave()` where an exception leaves it, come around each
   outermost forward with autograd. `run()` comes around a function of `guard.run()`;
   the forwards in it are kept with that call.
2. Before a step's first call, the gradients that are there are looked at: those that a
   bad step has left may be why this one is bad.
3. `clear()` ends a judged step: nothing is kept but the batch of a clean step, for
   remedies to be measured with.
4. Models and optimizers are held weakly. When the last of either is gone, nothing is
   kept: a notebook's `Out` may have the guard for as long as the notebook runs.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...base.losses import loss_in
from ...base.modules import first_parameter_of, parameters_of
from ...base.source_files import is_of_program
from ...base.tensors import devices_of, sizes_of
from ...base.tree import copied_call
from ...torch_internals.compiler import compiled_call_of, has_compiled
from ...torch_internals.running import graph_task_id, is_recorded
from ..undo.restore_point import RestorePoint
from ..watching.watch import ModelWatch, models_of
from .ambient import Ambient
from .held_function import HeldFunction
from .kept_call import KeptCall
from .left_gradients import LeftGradients

# The last calls of a step; chosen, not measured. Those before them are not run again,
# which a note says.
_MAX_KEPT = 8
MOST_SIZED = 64  # tensors of a batch whose shapes are noted; chosen
_NUM_RECENT = 8  # clean steps whose samples are kept; more only tell more of them
Samples = Sequence[bytes | None]
COMPILED = "was compiled together with code around it, which hides its arguments"
GRAPH = "was captured in a CUDA graph, which runs no code that could be run again"


class _OfThread(threading.local):
    """The forward that runs in a thread, and is kept."""

    open: KeptCall | None = None

    def __reduce__(self) -> tuple[type[_OfThread], tuple[()]]:  # a copied guard's
        return _OfThread, ()


class KeptCalls:
    """Calls that can be made again, in the form of a `CallKeeper`: see its attributes.

    Args:
        calls: The calls.
        start: The models as they were when the first of them began; None for now.
        first_batches: See `CallKeeper`.
    """

    num_dropped, clean = 0, None
    hidden_by = ""
    had_gradients = False
    left_over: Mapping[str, int] = {}
    recent: Sequence[tuple[Samples, Samples]] = ()
    longest: Mapping[tuple[int, ...], list[tuple[int, ...]]] = {}

    def __init__(
        self,
        calls: Sequence[KeptCall] = (),
        start: Any = None,
        first_batches: Mapping[int, int] | None = None,
    ) -> None:
        self.calls, self.start = calls, start
        self.first_batches = first_batches or {}


class CallKeeper:
    """Keeps the calls of the watched models since the last judged step.

    Args:
        start: The models as they were when the step began.
        needed: The models, and the optimizers if there are any: without any of one of
            these no step is judged.

    Attributes:
        start: The same.
        calls: The calls.
        num_dropped: How many were too many to be kept.
        hidden_by: Why forwards could not be kept, as the end of a sentence, or "".
        is_running: Whether a function runs that is kept as a whole.
        had_gradients: Whether gradients that may be bad were there before the step's
            first forward: no step before was judged, or that one was bad.
        left: The gradients that the last bad step has left.
        left_over: Those of them that nobody has cleared or written to before the step's
            first forward, by name, with that step.
        first_batches: The number of each watch's first forward in what is run again, by
            the watch's id, where these are not the last that it has seen.
        clean: The last call of the last clean step, with `marks_of` its function; None
            if its batch is not kept.
        longest: The largest size of each dimension in the batches of clean steps, of
            each tensor, by their numbers of dimensions.
        recent: Of the last call of each of the last clean steps, and of the last
            forward in it, some values of each tensor; the oldest step first.
    """

    first_batches: Mapping[int, int] = {}

    def __init__(self, start: RestorePoint, *needed: Iterable[object]) -> None:
        self.start = start
        self._needed = [[weakref.ref(x, self._on_gone) for x in n] for n in needed]
        self.clean: KeptCall | None = None
        self.recent: deque[tuple[Samples, Samples]] = deque(maxlen=_NUM_RECENT)
        self.longest: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        self._devices: dict[int, tuple[torch.device | None, list[torch.device]]] = {}
        self.calls: list[KeptCall] = []
        self.num_dropped = 0
        self.hidden_by = ""
        self.is_running = False
        self.had_gradients = False
        self.left = LeftGradients()
        self.left_over: dict[str, int] = {}
        self._doubts_gradients = True
        self._now = _OfThread()
        self._forwards: list[KeptCall] = []  # of the function that runs
        self._seen = weakref.WeakKeyDictionary[CodeType, dict[str, int]]()

    def begin(
        self, model: nn.Module, args: Any, kwargs: Any, has_stand_ins: bool = False
    ) -> None:
        """Keeps what an outermost forward is called with.

        Not tensors that stand in for the model's own weights, which may have its size.
        """
        if not torch.is_grad_enabled():
            return
        if args is None:
            self.hidden_by = self.hidden_by if self.is_running else COMPILED
            return
        if is_recorded():
            return
        devices = self._devices_of(model)
        if self._is_captured(devices):
            return
        if not self.is_running:
            self._look_for_gradients(model)
        ambient = Ambient(model, devices)
        batch, found = copied_call(args, kwargs)
        is_compiled, called = False, model
        if has_compiled():
            is_compiled, known = compiled_call_of(model)
            called = model if known is None else known
            is_compiled = is_compiled and known is None
        # A wrapper that has called the model may be the program's for that call alone.
        function = weakref.ref(model) if called is model else called
        self._now.open = call = KeptCall(function, batch, ambient, found)
        call.is_part_of_compiled = is_compiled
        call.has_stand_ins = has_stand_ins
        call.called_at = _calling_line()
        call.began = perf_counter()
        before = self._forwards if self.is_running else self.calls
        call.follows_others = any(each.awaits_backward for each in before)

    def end(self, output: Any, loss: torch.Tensor | None) -> None:
        """Keeps the gradients that its output will get."""
        if not torch.is_grad_enabled():
            return  # it runs within one that is kept
        call, self._now.open = self._now.open, None
        if call is not None:
            call.hold_gradients(output, loss)
            self._add(call, self._forwards if self.is_running else self.calls)

    def leave(self) -> None:
        """Keeps a forward that an exception has left.

        Not one that backward computes again: torch leaves it early.
        """
        if not torch.is_grad_enabled():
            return
        call, self._now.open = self._now.open, None
        if call is not None and graph_task_id() < 0:
            call.has_returned = False
            self._add(call, self._forwards if self.is_running else self.calls)

    def note_raised(
        self, error: Exception, calls: Sequence[KeptCall] | None = None
    ) -> None:
        """Notes the exception that has ended the step: a replay may raise it, too.

        Args:
            error: The exception.
            calls: Those that may raise it again; None for all.
        """
        for call in self.calls if calls is None else calls:
            for each in (call, *call.forwards):
                each.raised = type(error)

    @property
    def has_left(self) -> bool:
        """True if an exception has left the last call."""
        return bool(self.calls) and not self.calls[-1].has_returned

    def drop_left(self) -> None:
        """Lets go of calls that an exception has left: the step goes on without."""
        self.calls = [each for each in self.calls if each.has_returned]

    def run(
        self,
        model: nn.Module,
        function: Callable[[], Any],
        shield: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Any:
        """Calls a function that calls the model, and keeps it.

        Args:
            model: The model.
            function: The function.
            shield: Lets no error of the guard's own out.
        """
        call = None
        with shield():
            self._look_for_gradients(model)
            held = HeldFunction(function, self._seen)
            self.start.before_run(held.modules())
            devices = self._devices_of(model)
            ambient = Ambient(model, devices, generators=held.generators())
            call = KeptCall(held, held.values, ambient)
            call.began = perf_counter()
        was_running = self.is_running
        self.is_running = was_running or call is not None
        try:
            output = function()
        except Exception:
            if call is not None and not was_running:
                call.forwards, call.has_returned = self._forwards, False
                call.returns_loss = True
                self._add(call, self.calls)
            raise
        finally:
            self.is_running = was_running
            forwards = self._forwards
            if not was_running:
                self._forwards = []
        with shield():
            self.start.after_run()
            if call is not None and not was_running:
                # Of those that were left, the function has caught the exception.
                call.forwards = [each for each in forwards if each.has_returned]
                call.hold_gradients(output, loss_in(output))
                call.returns_loss = True
                self._add(call, self.calls)
        return output

    def _add(self, call: KeptCall, calls: list[KeptCall]) -> None:
        calls.append(call)
        if len(calls) > _MAX_KEPT:
            self._note_sizes(calls.pop(0))
            self.num_dropped += calls is self.calls

    def _look_for_gradients(self, model: nn.Module) -> None:
        if not self._doubts_gradients or self.calls:
            return
        leaves = [each for each in parameters_of(model) if each.is_leaf]
        there = [p.grad for p in leaves if p.grad is not None]
        self.had_gradients = bool(there)
        self.left_over.update(self.left.unchanged(there))

    def clear(self) -> None:
        """Lets go of what was kept, but for the batch of a clean step: it is judged."""
        is_bad, self.left.is_new = self.left.is_new, False
        if self.calls or is_bad:  # each of several models calls this
            self._doubts_gradients = is_bad
        if self.calls and not is_bad:
            last = self.calls[-1]
            inner = last.forwards[-1].samples if last.forwards else ()
            self.recent.append((last.samples, inner))
            for each in self.calls:
                self._note_sizes(each)
            self.clean = self.calls[-1].batch_alone()
            self.left.clear()
        self.calls.clear()
        self.had_gradients = False
        self.left_over.clear()
        self.start.end_judgement()
        self._now.open = None
        self.num_dropped = 0
        if self.hidden_by == COMPILED:
            self.hidden_by = ""

    def _note_sizes(self, call: KeptCall) -> None:
        """Notes how long a batch is; of one that was dropped, in a bad step as well."""
        sizes = [sizes_of(each) for each in call.tensors[:MOST_SIZED]]
        dims = tuple(map(len, sizes))
        before = self.longest.setdefault(dims, sizes)
        if before != sizes:
            pairs = zip(before, sizes, strict=True)
            self.longest[dims] = [tuple(map(max, *pair)) for pair in pairs]

    def _on_gone(self, _: weakref.ref[object]) -> None:
        if not all(any(each() is not None for each in kind) for kind in self._needed):
            self.calls.clear()
            self.clean = None

    def _is_captured(self, devices: Sequence[torch.device]) -> bool:
        """True if a CUDA graph is being captured, whose replays call no hook."""
        has_device = any(each.type == "cuda" for each in devices)
        is_captured = has_device and torch.cuda.is_current_stream_capturing()
        if is_captured and not self.is_running:
            self.hidden_by = GRAPH
        return is_captured

    def _devices_of(self, model: nn.Module) -> list[torch.device]:
        """The devices of a model, looked up again when its first parameter moves."""
        first = first_parameter_of(model)
        device = None if first is None else first.device
        known = self._devices.get(id(model))
        if known is None or known[0] != device:
            known = self._devices[id(model)] = device, devices_of([model])
        return known[1]


def _calling_line() -> tuple[str, int]:
    """The file and the number of the deepest running line of the program's own.

    Its own are no lines of installed packages; "" and 0 if there is none.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_of_program(file):
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0


def make_keeper(
    watches: Sequence[ModelWatch],
    start: RestorePoint,
    optimizers: Sequence[Optimizer],
) -> CallKeeper:
    """Makes the watches keep their calls."""
    needed = filter(None, (list(models_of(watches).values()), optimizers))
    keeper = CallKeeper(start, *needed)
    for watch in watches:
        watch.inputs.captures.append(keeper)
    return keeper
