"""When a step begins and ends: which call of a watched module is the outermost one."""

from __future__ import annotations

import logging
import weakref
from typing import Any, TypeVar

from torch import nn

from .. import _C
from ..torch_internals.running import call_after_backward
from ..torch_internals.wrappers import is_dry_run
from .compiled_boundary import CompiledStepBoundary
from .coverage import NotScannedWarning
from .hooks import hook_of, index_of, is_running, outermost_call
from .recorder_owner import HookOwner

_RECOMPUTED, _ENDS_STEP = 1, 2
_Self = TypeVar("_Self", bound="StepHooks")
_MAX_IN_FLIGHT = {"step": 0, "frame": 0, "lagged": 1}
_log = logging.getLogger("overflow_fast")


class StepHooks(HookOwner):
    """The hooks on a model that record its frames and tell its steps apart.

    A step is one outermost call of the root; where the root is not running, one
    outermost call of any watched module; or what one backward computes again. A batch
    is a step of the root, or a run of steps that call each submodule once.

    Subclasses say which frames they want to see (`_choose_watch`), look at those
    (`on_frame`) and may end the run after a batch (`_after_batch`).

    Args:
        model: The model to watch. It is held weakly; its hooks hold this object.
        max_frames: How many frames the recorder keeps; None for all.
        options: The recorder's, by name.
        sync: When tensors on a device are judged: when their "step" ends, after each
            "frame", or "lagged", when their stats have come, one step later at most.
    """

    def __init__(
        self,
        model: nn.Module,
        max_frames: int | None,
        options: dict[str, bool],
        sync: str = "step",
    ) -> None:
        if sync not in _MAX_IN_FLIGHT:
            raise ValueError(f"sync must be 'step', 'lagged' or 'frame', got {sync!r}")
        self._sync = sync
        super().__init__(
            model, max_frames, {**options, "fetch_frames": sync == "frame"}
        )

    def _start(self) -> None:
        super()._start()
        self._warning = NotScannedWarning()
        self.compiled_boundary = CompiledStepBoundary(self)
        self._max_in_flight = _MAX_IN_FLIGHT[self._sync]
        self._depth = 0
        self._opens_next = False
        self._root_done = False
        self._is_dry_run = False
        self._submodule_call: object = None
        self._submodules_called: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_sync": self._sync}

    @property
    def is_paused(self) -> bool:
        """Whether the hooks are to do nothing."""
        return self._recorder.is_paused and not self._is_dry_run

    def check(self) -> None:
        """Judges everything that has run up to now, replays of CUDA graphs included.

        Needed after the last step with `sync="lagged"`, and after replays. Does nothing
        while a graph is being captured. Incurs one CPU-GPU sync per device that holds
        stats, and none otherwise.
        """
        self.process_now(with_captured=True)

    def remove(self) -> None:
        """Stops watching: removes every hook from the model, and judges what has run.

        Incurs one CPU-GPU sync if a verdict is still on its way (`sync="lagged"`).
        """
        self._attachment.remove()
        self._recorder.end_step()
        self._process_arrived(0)
        self._recorder.is_paused = True  # for compiled code that does not notice

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            self.remove()
        except Exception:
            if kind is None:
                raise
            _log.debug("a verdict came after the exception that ended the block")

    # What the hooks call, in the order of a step.

    def before_root(
        self, module: nn.Module, args: object, kwargs: object = None
    ) -> None:
        """Starts a step when the outermost call of the root begins."""
        if is_dry_run():
            self._is_dry_run = self._recorder.is_paused = True
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
        self._recorder.end_step()
        self._process_arrived(self._max_in_flight)
        self._recorder.in_step = True
        self._submodules_called.clear()
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
            self._end_batch()
        self._after_batch()

    def close_root(self, has_raised: bool = False) -> None:
        """Closes the batch of a root whose frame compiled code has recorded.

        Args:
            has_raised: Whether that frame has raised.
        """
        if self._is_strict:
            self.batch_number += 1
        self._end_batch()
        if not has_raised:
            self._after_batch()

    def root_ended(self, module: nn.Module, args: object, output: object) -> None:
        """Ends the root's call, also one that raised."""
        if self._is_dry_run:
            self._is_dry_run = self._recorder.is_paused = False
            return
        has_raised = not self._root_done
        self._root_done = False
        if has_raised and not self._is_strict:
            self.batch_number += 1
            self._begin_batch()
        self._depth -= 1
        if self._depth == 0:
            self._end_step()

    def on_submodule_call(self, module_index: int, graph_task_id: int) -> int:
        """Says what a frame belongs to while the root is not running."""
        self._choose_watch(self.batch_number)
        if self._is_strict:
            self._recorder.end_step()
            return _ENDS_STEP
        if graph_task_id >= 0:
            self._choose_watch(self._recorder.last_batch)
            return self._on_recomputed(graph_task_id)
        try:
            call, module = outermost_call(lambda m: hook_of(self, m) is not None)
        except LookupError:
            call, module = None, None
        if call is None or call != self._submodule_call:
            # A function that was compiled with the module's call in it has no call.
            index = module_index if module is None else index_of(self, module)
            self._begin_submodule_call(call, index)
        is_outermost = module is None or index_of(self, module) == module_index
        return _ENDS_STEP if is_outermost else 0

    def process_now(self, with_captured: bool = False) -> None:
        """Judges the frames that wait; called as each one ends with `sync="frame"`.

        Args:
            with_captured: Also those that replays of CUDA graphs have written.
        """
        self._recorder.send(with_captured)
        self._process_arrived(0)

    def on_submodule_call_end(self) -> None:
        """Ends the outermost call of a submodule."""
        self._submodule_call = None
        self._end_step()

    def on_recomputed_end(self) -> None:
        """Ends what a backward has computed again."""
        self._submodule_call = None
        self._end_step(is_recomputed=True)

    # What a subclass decides.

    def _record_root(
        self, module: nn.Module, args: object, kwargs: object, output: object
    ) -> None:
        """Records the root's frame."""
        _C.run_hook(self.root_hook, module, args, kwargs, output)

    def note_loss(self, has_loss: bool) -> None:
        """Takes in whether compiled code has seen the root return a loss."""

    def on_frame(self, frame: _C.Frame) -> None:
        """Looks at a frame that is bad, or one that was asked for."""
        raise NotImplementedError

    def _choose_watch(self, batch: int) -> None:
        """Sets whether all frames of a batch are wanted, or only the bad ones."""
        raise NotImplementedError

    def _before_step(self) -> None:
        """Prepares for a step of the root."""

    def _after_batch(self) -> None:
        """Looks at a batch whose root has returned."""

    # How it is done.

    def _end_batch(self) -> None:
        self._root_done = True
        if not self._is_strict:
            self.batch_number += 1
        self._begin_batch()

    def _begin_batch(self) -> None:
        self._opens_next = True
        self._recorder.begin_batch(self.batch_number)

    def _end_step(self, is_recomputed: bool = False) -> None:
        self._recorder.in_step = False
        self._send()
        self._recorder.end_step()
        self._process_arrived(self._max_in_flight)
        self._warning.give_once(self._recorder)

    def _send(self) -> None:
        self._recorder.send()

    def _process_arrived(self, max_in_flight: int) -> None:
        self._recorder.process_arrived(max_in_flight, self._choose_watch, self.on_frame)

    def _on_recomputed(self, graph_task_id: int) -> int:
        if self._submodule_call != ("backward", graph_task_id):
            self._submodule_call = ("backward", graph_task_id)
            self._recorder.end_step()
            call_after_backward(self.on_recomputed_end)
        return _RECOMPUTED

    def _begin_submodule_call(self, call: object, index: int) -> None:
        self._submodule_call = call
        self._recorder.end_step()
        if index in self._submodules_called:
            self.batch_number += 1
            self._begin_batch()
            self._submodules_called.clear()
            self._choose_watch(self.batch_number)
        self._submodules_called.add(index)
