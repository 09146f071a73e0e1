"""The steps that the hooks on a model begin and end, and their frames."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import RLock, get_ident
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from .. import _C
from ..base.modules import tensors_of
from ..scanner import callbacks  # noqa: F401  (recorders call them)
from ..torch_internals.compiler import has_compiled
from ..torch_internals.module_internals import is_dry_run
from ..torch_internals.running import call_after_backward, running_modules
from .compiled_boundary import (
    CALLS,
    GRADIENTS,
    PARAMETERS,
    ROOT,
    STRICT,
    CompiledStepBoundary,
)
from .coverage import Coverage, CoverageWarnings, coverage_of
from .hooks import (
    Attachment,
    hook_of,
    index_of,
    is_running,
    modules_as_applied,
    modules_once,
    outermost_call,
    threads_in,
)
from .selection import Named

_log = logging.getLogger("overflow_fast")

# Calls of submodules where the root is not running: which one is the outermost.


class SubmoduleCall(NamedTuple):
    """The outermost running call of a watched submodule.

    Attributes:
        identity: Equal as long as the call runs; None for a function that was compiled
            with the module's call in it, which has no call.
        module: The module's index.
    """

    identity: object
    module: int


class SubmoduleCalls:
    """Tracks the outermost calls of submodules, and the recomputation of a backward.

    Args:
        owner: The owner of the modules' hooks.
    """

    def __init__(self, owner: object) -> None:
        self._owner = owner
        self._running: object = None
        self._called: set[int] = set()

    def around(self, module_index: int) -> SubmoduleCall:
        """The outermost call around the one of a module that is recorded."""
        try:
            call, module = outermost_call(lambda m: hook_of(self._owner, m) is not None)
        except LookupError:
            return SubmoduleCall(None, module_index)
        return SubmoduleCall(call, index_of(self._owner, module))

    def begins(self, call: SubmoduleCall) -> bool:
        """True if a call is not the one that was seen last."""
        is_new = call.identity is None or call.identity != self._running
        self._running = call.identity
        return is_new

    def begins_backward(self, graph_task_id: int) -> bool:
        """True if a backward has not computed anything again yet."""
        identity = ("backward", graph_task_id)
        is_new = self._running != identity
        self._running = identity
        return is_new

    def end(self) -> None:
        """Ends the outermost call, or the backward."""
        self._running = None

    def begin_batch(self) -> None:
        """Forgets which submodules the batch has called."""
        self._called.clear()

    def repeats(self, module_index: int) -> bool:
        """True if the batch has called a module before; a new one begins."""
        is_repeated = module_index in self._called
        if is_repeated:
            self._called.clear()
        self._called.add(module_index)
        return is_repeated


@dataclass
class RootCall:
    """The root's outermost call in one thread: a step of its own.

    Attributes:
        batch: Its number.
        is_apart: Other threads ran the root when it began.
        depth: How many calls of the root run, one within another.
        is_done: It has returned.
        is_left: An exception has left it.
        output: What it has returned.
    """

    batch: int
    is_apart: bool
    depth: int = 1
    is_done: bool = False
    is_left: bool = False
    output: object = None


# The hooks of one owner, which know the steps.

_TAKEN_OFF = object()  # torch gives a hook that is taken off no keyword arguments

_RECOMPUTED, _ENDS_STEP = 1, 2  # `kRecomputed`, `kEndsStep` of csrc/python/hook.cpp
_Self = TypeVar("_Self", bound="StepHooks")


class StepHooks:
    """The hooks on a model that record its frames and divide them into steps.

    They are off until `_attach()`. A step is one outermost call of the root; where the
    root is not running, one outermost call of any watched module; or the recomputation
    in one backward. A batch is a step of the root, or a run of steps that call each
    submodule once.

    Subclasses choose the frames that they need (`_choose_watch`), process those
    (`on_frame`) and may end the run after a batch (`_after_batch`).

    Args:
        model: The model to watch. It is held weakly; its hooks hold this object.
        max_frames: How many frames the recorder keeps; None for all.
        options: The recorder's, by name.
        max_in_flight: How many steps' stats may be on their way from a device before
            the host waits for the oldest.

    Attributes:
        recorder: The recorder, which has the frames' entries. The extension reads it.
        warnings: Logs what is not looked at.
        is_seen_alone: Returns True in a forward that none of these hooks judges.
    """

    def __init__(
        self,
        model: nn.Module,
        max_frames: int | None,
        options: dict[str, bool],
        max_in_flight: int,
    ) -> None:
        if isinstance(model, torch.jit.ScriptModule):
            raise TypeError(
                "model must be a module whose forward is Python, got a scripted one: "
                "TorchScript has no hooks; watch the model before it is scripted"
            )
        self.batch_number = 0
        self._max_frames = max_frames
        self._options = options
        self._max_in_flight = max_in_flight
        self._start()
        self._model: Callable[[], nn.Module | None] = weakref.ref(model)

    def _start(self) -> None:
        """Creates the state that is never copied or pickled."""
        self.is_seen_alone: Callable[[], bool] = lambda: False
        self.recorder = _C.Recorder(self._max_frames, **self._options)
        self.root_hook = _C.FrameHook(self, 0)
        self._attachment = Attachment()
        self._is_strict = self._options.get("strict_compat", False)
        self.warnings = CoverageWarnings()
        self.compiled_boundary = CompiledStepBoundary(self)
        self._lock = RLock()
        self._roots: dict[int, RootCall] = {}  # that run, by their threads
        self._strays: set[int] = set()  # threads whose forward began without hooks
        self._had_apart = False  # since one ran alone
        self._opens_next = False
        self._is_dry_run = False
        self._submodule_calls = SubmoduleCalls(self)

    def _attach(self, model: nn.Module) -> None:
        self.recorder.note_depth()
        self._attachment.attach(self, model, self._walk, self._is_strict)
        self.update_plan()

    def record(self, kind: _C.FrameKind, named: Named) -> None:
        """Scans named tensors as one frame. Does not incur a CPU-GPU sync."""
        names, tensors = named
        if tensors:
            self.recorder.record(kind, names, tensors)

    def pause(self) -> None:
        """Removes the hooks until they are attached again.

        Where there is compiled code they stay and do nothing: to put them back would
        compile all of it again.
        """
        self._pause_recorder()  # first: a forward may run in another thread
        if not has_compiled():
            self._remove_hooks()

    def detach(self) -> None:
        """Removes the hooks; those in autograd's graphs do nothing any more."""
        self._pause_recorder()
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        self._attachment.remove()

    def _pause_recorder(self) -> None:
        self.recorder.is_paused = True
        self.recorder.set_gradients_wanted(False)
        self.recorder.in_step = False

    # The model and its frames, as they are now.

    @property
    def model(self) -> nn.Module | None:
        """The watched model, or None if it is gone."""
        return self._model()

    @property
    def is_attached(self) -> bool:
        """True if the model has this object's hooks."""
        return bool(self._attachment.handles)

    @property
    def device(self) -> torch.device | None:
        """The device of the watched model's first tensor; None without one."""
        model = self.model
        tensors = () if model is None else tensors_of(model)
        return next((tensor.device for tensor in tensors), None)

    def update_plan(self) -> None:
        """Recomputes `plan`, the flags that compiled hooks read."""
        options = self._options
        flags = {
            PARAMETERS: self.recorder.lists_parameters,
            CALLS: options.get("lists_calls", True),
            GRADIENTS: options.get("watches_gradients"),
            STRICT: options.get("strict_compat"),
            **self._root_plan(),
        }
        self.plan = sum(flag for flag, is_set in flags.items() if is_set)

    @property
    def total_calls(self) -> int:
        """The number of frames that were recorded."""
        return self.recorder.total_calls

    @property
    def coverage(self) -> Coverage:
        """The counts of what was scanned so far, and what was not."""
        return coverage_of([self.recorder])

    @property
    def is_paused(self) -> bool:
        """True if the hooks do nothing in this thread."""
        if self._is_dry_run:
            return False
        return self.recorder.is_off

    def check(self) -> None:
        """Judges all that has run so far, replays of CUDA graphs included.

        Needed after the last step with `sync="lagged"`, and after replays. Does nothing
        while a graph is being captured. Incurs one CPU-GPU sync per device that holds
        stats, and none otherwise.
        """
        self.process_now(with_captured=True)

    def remove(self) -> None:
        """Removes every hook from the model, and judges what has run.

        Incurs one CPU-GPU sync if a verdict is still on its way (`sync="lagged"`).
        """
        self._attachment.remove()
        self.recorder.end_step()
        self._process_arrived(0)
        self.recorder.is_paused = True  # compiled code may still call the hooks

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            self.remove()
        except Exception:
            if kind is None:
                raise
            _log.debug("A verdict arrived after the exception that ended the block.")

    # A watched model is copied and pickled together with its hooks.

    def __getstate__(self) -> dict[str, Any]:
        return {
            "batch_number": self.batch_number,
            "_max_frames": self._max_frames,
            "_max_in_flight": self._max_in_flight,
            "_options": self._options,
            "_total_calls": self.total_calls,
            "_handles": self._attachment.living,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        total_calls, handles = state.pop("_total_calls"), state.pop("_handles")
        self.__dict__.update(state)
        self._model = lambda: None  # set when the copy's root is called
        self._start()
        self._attachment.adopt(handles)
        self.update_plan()
        self.recorder.total_calls = total_calls
        self.begin_at(self.batch_number)

    def begin_at(self, batch: int) -> None:
        """Gives the next batch a number, from which the others count."""
        self.batch_number = batch
        self.recorder.begin_batch(batch)

    # Forwards that began before the hooks recorded anything are left out: of them only
    # a part would be seen, and no hook has begun a step for it.

    def _resume_recorder(self, model: nn.Module) -> None:
        """Makes the hooks record, but not for the threads that run the model now."""
        with self._lock:
            self._strays |= threads_in(model)
            if self._strays or self._roots:
                self._begin_batch()  # the last one is theirs
                # In this thread a replay may call the model within one of its hooks.
                self.recorder.leave_out(list(self._strays - {get_ident()}))
            self._forget(self._roots.keys() - self._strays)
            self.recorder.in_step = self.recorder.is_paused = False

    def _forget(self, threads: set[int]) -> None:
        """Forgets the forwards of threads, which have ended while no hook saw it."""
        self._strays -= threads
        for each in threads:
            self._roots.pop(each, None)

    @property
    def is_in_stray(self) -> bool:
        """True within such a forward of this thread."""
        return get_ident() in self._strays and self._is_in_root()

    def _is_in_root(self) -> bool:
        running = running_modules()
        return running is None or any(each is self.model for _, each in running)

    def resumes(self, name: str, module: nn.Module | None) -> bool:
        """Called for a hook while it is paused; True to go on with it."""
        if _C.is_unwatched():
            return False
        if name == "on_submodule_call":
            if self._is_in_root():
                return False
        elif module is None or is_running(module):
            return False
        with self._lock:
            if name in ("before_root", "root_ended", "on_submodule_call"):
                self.end_stray()  # that may be one that no hook has ended
            if name == "before_root" and self.recorder.is_paused:
                self._strays.add(get_ident())
        return name in ("before_root", "on_submodule_call") and not self.is_paused

    def end_stray(self) -> None:
        """Takes no call of this thread for one that runs without hooks any more."""
        self._strays.discard(get_ident())
        self._roots.pop(get_ident(), None)
        self.recorder.end_apart()

    # Called by the hooks, in the order of a step.

    def before_root(
        self, module: nn.Module, args: object, kwargs: object = None
    ) -> None:
        """Starts a step when the outermost call of the root begins."""
        if is_dry_run():
            self._is_dry_run = self.recorder.is_paused = True
            return
        root = self._roots.get(get_ident())
        if root is not None and is_running(module):
            root.depth += 1
            return
        if root is not None:
            # A forward was left by an exception that skips hooks.
            root.depth = 1
            self.root_ended(module, None, None)
        self._begin_root()
        if self._model() is None:
            self._model = weakref.ref(module)
        self.recorder.end_step()
        self._process_arrived(self._max_in_flight)
        self.recorder.in_step = True
        self._attachment.follow_modes(self)
        self._submodule_calls.begin_batch()
        self._before_step()
        self._choose_watch(self.batch_number)

    def after_root(
        self,
        module: nn.Module,
        args: object,
        kwargs: object,
        output: object = _TAKEN_OFF,
    ) -> None:
        """Records the root's frame and closes its batch."""
        if self._is_dry_run:
            return
        if output is _TAKEN_OFF or get_ident() not in self._roots:
            return  # another thread has taken the hooks from this forward
        if self._is_strict:
            self.batch_number += 1  # the original counts before it looks
        try:
            self._record_root(module, args, kwargs, output)
        finally:
            self._note_done()
            self._begin_batch(is_counted=self._is_strict)
        self._after_batch()

    def close_root(self, has_raised: bool = False) -> None:
        """Closes the batch of a root whose frame compiled code has recorded.

        Args:
            has_raised: True if that frame has raised.
        """
        self._note_done()
        self._begin_batch()
        if not has_raised:
            self._after_batch()

    def root_ended(self, module: nn.Module, args: object, output: object) -> None:
        """Ends the root's call, also one that has raised."""
        if self._is_dry_run:
            self._is_dry_run = self.recorder.is_paused = False
            return
        root = self._roots.get(get_ident())
        if root is None:
            return
        has_raised, root.is_done = not root.is_done, False
        if has_raised and not self._is_strict:
            self._begin_batch()
        root.depth -= 1
        if root.depth == 0:
            try:
                self._end_step()
            finally:
                self._end_root(root)

    @property
    def _running_batch(self) -> int:
        """The number of the root's call in this thread; of the next one without one."""
        root = self._roots.get(get_ident())
        return self.batch_number if root is None else root.batch

    def _begin_root(self) -> RootCall:
        with self._lock:
            self.end_stray()  # a forward that hooks were taken from
            if self._strays:  # or a thread has ended one that no hook has seen
                model = self.model
                self._forget(
                    self._strays - (set() if model is None else threads_in(model))
                )
            is_apart = bool(self._roots or self._strays)
            if is_apart:
                self._had_apart = True
                self.recorder.begin_apart()
                self._begin_batch()
            elif self._had_apart:
                self._follow_apart()
            root = self._roots[get_ident()] = RootCall(self.batch_number, is_apart)
            return root

    def pass_batch(self) -> int:
        """The number of a batch that no hook begins or ends."""
        with self._lock:
            if self._roots or self._strays:  # theirs goes on
                self.batch_number += 1
                return self.batch_number
            self._begin_batch()
            return self.batch_number - 1

    def _note_done(self) -> None:
        root = self._roots.get(get_ident())
        if root is not None:
            root.is_done = True

    def _end_root(self, root: RootCall) -> None:
        with self._lock:
            self._roots.pop(get_ident(), None)
            if root.is_apart:
                self.recorder.end_apart()
            if self._had_apart and not self._roots:
                self._follow_apart()

    def _follow_apart(self) -> None:
        """Goes on with the batches behind those of forwards that ran apart."""
        self._had_apart = False
        self.recorder.begin_batch(self.batch_number)

    def on_submodule_call(self, module_index: int, graph_task_id: int) -> int:
        """Assigns a frame to a step when a submodule runs outside the root."""
        if get_ident() in self._strays and not self.resumes("on_submodule_call", None):
            self.recorder.leave_out([get_ident()])
            return 0
        self._choose_watch(self.batch_number)
        if self._is_strict:
            self.recorder.end_step()
            return _ENDS_STEP
        if graph_task_id >= 0:
            self._choose_watch(self.recorder.last_batch)
            if self._submodule_calls.begins_backward(graph_task_id):
                self.recorder.end_step()
                ended = functools.partial(_C.run_paused, self.on_recomputed_end)
                call_after_backward(ended)
            return _RECOMPUTED
        call = self._submodule_calls.around(module_index)
        if self._submodule_calls.begins(call):
            self._begin_submodule_call(call.module)
        return _ENDS_STEP if call.module == module_index else 0

    def process_now(self, with_captured: bool = False) -> None:
        """Judges the frames that wait; called after each frame with `sync="frame"`.

        Args:
            with_captured: Also those that replays of CUDA graphs have written.
        """
        self.recorder.send(with_captured)
        self._process_arrived(0)

    def on_submodule_call_end(self) -> None:
        """Ends the outermost call of a submodule."""
        self._submodule_calls.end()
        self._end_step()

    def on_recomputed_end(self) -> None:
        """Ends the recomputation in a backward."""
        self._submodule_calls.end()
        self._end_step(is_recomputed=True)

    def _begin_batch(self, is_counted: bool = False) -> None:
        with self._lock:
            if not is_counted:
                self.batch_number += 1
            self._opens_next = True
            self.recorder.begin_batch(self.batch_number)

    def _end_step(self, is_recomputed: bool = False) -> None:
        self.recorder.in_step = False
        self._send()
        self.recorder.end_step()
        self._process_arrived(self._max_in_flight)
        self.warnings.give_once(self.recorder)

    def _send(self) -> None:
        self.recorder.send()

    def _process_arrived(self, max_in_flight: int) -> None:
        self.recorder.process_arrived(max_in_flight, self._choose_watch, self.on_frame)

    def _begin_submodule_call(self, index: int) -> None:
        self._attachment.follow_modes(self)  # for the next one
        self.recorder.end_step()
        if self._submodule_calls.repeats(index):
            self._begin_batch()
            self._choose_watch(self.batch_number)

    # Defined by subclasses.

    def _record_root(
        self, module: nn.Module, args: object, kwargs: object, output: object
    ) -> None:
        """Records the root's frame."""
        _C.run_hook(self.root_hook, module, args, kwargs, output)

    def note_loss(self, has_loss: bool) -> None:
        """Notes whether compiled code has seen the root return a loss."""

    def on_frame(self, frame: _C.Frame) -> None:
        """Processes a frame that is bad, or that `_choose_watch` has asked for."""

    def _choose_watch(self, batch: int) -> None:
        """Sets whether all frames of a batch are needed, or only the bad ones."""

    def _before_step(self) -> None:
        """Prepares for a step of the root."""

    def _after_batch(self) -> None:
        """Processes a batch whose root has returned."""

    def _walk(self, model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
        """Yields the modules to hook, each with its index in `named_modules()`."""
        return (modules_as_applied if self._is_strict else modules_once)(model)

    def _root_plan(self) -> dict[int, bool]:
        """Returns the flags for the root's frame in compiled code."""
        return {ROOT: True}
