"""Hooks that begin and end the steps of a model, and record its frames."""

from __future__ import annotations

import logging
import weakref
from typing import Any, NamedTuple, TypeVar

from torch import nn

from .. import _C
from ..torch_internals.module_internals import is_dry_run
from ..torch_internals.running import call_after_backward
from .compiled import CompiledStepBoundary
from .coverage import CoverageWarnings
from .hooks import HookOwner, hook_of, index_of, is_running, outermost_call

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


_RECOMPUTED, _ENDS_STEP = 1, 2
_Self = TypeVar("_Self", bound="StepHooks")
_log = logging.getLogger("overflow_fast")


class StepHooks(HookOwner):
    """The hooks on a model that record its frames and divide them into steps.

    A step is one outermost call of the root; where the root is not running, one
    outermost call of any watched module; or the recomputation in one backward. A batch
    is a step of the root, or a run of steps that call each submodule once.

    Subclasses choose the frames that they need (`_choose_watch`), process those
    (`on_frame`) and may end the run after a batch (`_after_batch`).

    Args:
        model: The model to watch. It is held weakly; its hooks hold this object.
        max_frames: How many frames the recorder keeps; None for all.
        options: The recorder's, by name.
        max_in_flight: How many steps' stats may be on their way from a device before
            the host waits for the oldest.
    """

    def __init__(
        self,
        model: nn.Module,
        max_frames: int | None,
        options: dict[str, bool],
        max_in_flight: int,
    ) -> None:
        self._max_in_flight = max_in_flight
        super().__init__(model, max_frames, options)

    def _start(self) -> None:
        super()._start()
        self._warnings = CoverageWarnings()
        self.compiled_boundary = CompiledStepBoundary(self)
        self._depth = 0
        self._opens_next = False
        self._root_done = False
        self._is_dry_run = False
        self._submodule_calls = SubmoduleCalls(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_max_in_flight": self._max_in_flight}

    @property
    def is_paused(self) -> bool:
        """True if the hooks do nothing."""
        return self.recorder.is_paused and not self._is_dry_run

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

    # Called by the hooks, in the order of a step.

    def before_root(
        self, module: nn.Module, args: object, kwargs: object = None
    ) -> None:
        """Starts a step when the outermost call of the root begins."""
        if is_dry_run():
            self._is_dry_run = self.recorder.is_paused = True
            return
        if self._depth and not is_running(module):
            # A forward was left by an exception that skips hooks.
            self._depth = 1
            self.root_ended(module, None, None)
        self._depth += 1
        if self._depth > 1:
            return
        if self._model() is None:
            self._model = weakref.ref(module)
        self.recorder.end_step()
        self._process_arrived(self._max_in_flight)
        self.recorder.in_step = True
        self._submodule_calls.begin_batch()
        self._before_step()
        self._choose_watch(self.batch_number)

    def after_root(
        self, module: nn.Module, args: object, kwargs: object, output: object
    ) -> None:
        """Records the root's frame and closes its batch."""
        if self._is_dry_run:
            return
        if self._is_strict:
            self.batch_number += 1  # the original counts before it looks
        try:
            self._record_root(module, args, kwargs, output)
        finally:
            self._root_done = True
            self._begin_batch(is_counted=self._is_strict)
        self._after_batch()

    def close_root(self, has_raised: bool = False) -> None:
        """Closes the batch of a root whose frame compiled code has recorded.

        Args:
            has_raised: True if that frame has raised.
        """
        self._root_done = True
        self._begin_batch()
        if not has_raised:
            self._after_batch()

    def root_ended(self, module: nn.Module, args: object, output: object) -> None:
        """Ends the root's call, also one that has raised."""
        if self._is_dry_run:
            self._is_dry_run = self.recorder.is_paused = False
            return
        has_raised = not self._root_done
        self._root_done = False
        if has_raised and not self._is_strict:
            self._begin_batch()
        self._depth -= 1
        if self._depth == 0:
            self._end_step()

    def on_submodule_call(self, module_index: int, graph_task_id: int) -> int:
        """Assigns a frame to a step when a submodule runs outside the root."""
        self._choose_watch(self.batch_number)
        if self._is_strict:
            self.recorder.end_step()
            return _ENDS_STEP
        if graph_task_id >= 0:
            self._choose_watch(self.recorder.last_batch)
            if self._submodule_calls.begins_backward(graph_task_id):
                self.recorder.end_step()
                call_after_backward(self.on_recomputed_end)
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

    def _begin_batch(self, is_counted: bool = False) -> None:
        if not is_counted:
            self.batch_number += 1
        self._opens_next = True
        self.recorder.begin_batch(self.batch_number)

    def _end_step(self, is_recomputed: bool = False) -> None:
        self.recorder.in_step = False
        self._send()
        self.recorder.end_step()
        self._process_arrived(self._max_in_flight)
        self._warnings.give_once(self.recorder)

    def _send(self) -> None:
        self.recorder.send()

    def _process_arrived(self, max_in_flight: int) -> None:
        self.recorder.process_arrived(max_in_flight, self._choose_watch, self.on_frame)

    def _begin_submodule_call(self, index: int) -> None:
        self.recorder.end_step()
        if self._submodule_calls.repeats(index):
            self._begin_batch()
            self._choose_watch(self.batch_number)
