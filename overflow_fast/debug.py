"""The drop-in for transformers' `DebugUnderflowOverflow`."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import nn

from . import _C
from .hooks import Attachment, modules_once, modules_per_parent, outermost_call
from .ops import scan
from .report import (
    COLUMNS,
    PREFIX,
    batch_header,
    frame_text,
    nonfinite_lines,
    stat_line,
)

_DETECTED = (
    "DebugUnderflowOverflow: inf/nan detected, aborting as there is no point running "
    "further. Please scroll up above this traceback to see the activation values prior "
    "to this event."
)
_RECOMPUTED, _ENDS_STEP = 1, 2
_COPIED = (
    "max_frames_to_save",
    "trace_batch_nums",
    "abort_after_batch_num",
    "strict_compat",
    "batch_number",
    "detected_overflow",
    "prefix",
    "_names",
    "_options",
)


class DebugUnderflowOverflow:
    """Watches every module of a model and stops the run at the first inf or nan.

    The same arguments, output and exceptions as `transformers.debug_utils
    .DebugUnderflowOverflow`, at the cost of about one read of the bytes it looks at.
    On the CPU the exception rises from the hook of the module whose frame is bad; it
    incurs no sync there. Tensors elsewhere are judged when the outermost forward ends,
    with one CPU-GPU sync per device.

    Args:
        model: The model to watch. It is held weakly; its hooks hold this detector.
        max_frames_to_save: How many frames back the report goes; None for all.
        trace_batch_nums: The batches to print in full, instead of looking for
            non-finite values in them. Any container; kept by reference.
        abort_after_batch_num: Raise once this batch is over.
        strict_compat: Look where transformers looks and nowhere else, and print what it
            prints even where it is wrong.
        list_kwargs: List keyword inputs, and the contents of containers among the
            inputs, also when they are finite.
        memo: Scan a tensor that nobody wrote to since only once in a forward. False
            for models that write behind autograd's back (`.data`, numpy) in it.

    Raises:
        TypeError, ValueError: If an argument cannot be used.

    Example:
        >>> detector = DebugUnderflowOverflow(torch.nn.Linear(2, 2))
        >>> detector.remove()
    """

    def __init__(
        self,
        model: nn.Module,
        max_frames_to_save: int | None = 21,
        trace_batch_nums: Container[int] | None = None,
        abort_after_batch_num: int | None = None,
        *,
        strict_compat: bool = False,
        list_kwargs: bool = False,
        memo: bool = True,
        _composite: bool = False,
    ) -> None:
        _check_arguments(model, max_frames_to_save, trace_batch_nums)
        self.max_frames_to_save = max_frames_to_save
        self.trace_batch_nums: Container[int] = (
            [] if trace_batch_nums is None else trace_batch_nums
        )
        self.abort_after_batch_num = abort_after_batch_num
        self.strict_compat = strict_compat
        self.batch_number = 0
        self.detected_overflow = False
        self.prefix = PREFIX
        self._names = [name for name, _ in model.named_modules()]
        self._options = {
            "strict_compat": strict_compat,
            "list_kwargs": list_kwargs,
            "memo": memo,
            "composite": _composite,
        }
        self._earlier: list[str] = []
        self._set_up()
        self._model: Callable[[], nn.Module | None] = weakref.ref(model)
        walk = modules_per_parent if strict_compat else modules_once
        self._attachment.attach(self, model, walk)

    def _set_up(self) -> None:
        limit = self.max_frames_to_save
        self._recorder = _C.Recorder(limit, **self._options)
        self._root_hook = _C.FrameHook(self, 0)
        self._attachment = Attachment()
        self._depth = 0
        self._opens_next = False
        self._root_done = False
        self._is_aborted = False
        self._unrooted_call: object = None
        self._unrooted_modules: set[int] = set()

    # A watched model is copied and pickled together with its detector.

    def __getstate__(self) -> dict[str, Any]:
        state = {key: self.__dict__[key] for key in _COPIED}
        state["_earlier"] = list(self.frames)
        state["_total_calls"] = self.total_calls
        state["_handles"] = self._attachment.handles
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        total_calls, handles = state.pop("_total_calls"), state.pop("_handles")
        self.__dict__.update(state)
        self._model = lambda: None  # known again when the copy's root is called
        self._set_up()
        self._attachment.handles = handles
        self._recorder.total_calls = total_calls
        self._recorder.begin_batch(self.batch_number)

    # What users read.

    @property
    def model(self) -> nn.Module | None:
        """The watched model, or None if it is gone."""
        return self._model()

    @property
    def frames(self) -> collections.deque[str]:
        """The frames saved so far, as text."""
        texts = [self._text(frame) for frame in self._recorder.history()]
        limit = self._recorder.max_frames
        return collections.deque([*self._earlier, *texts], limit)

    @property
    def frame(self) -> list[str]:
        """The lines that the next frame starts with."""
        is_next = self.total_calls > 0 and self._opens_next
        return batch_header(self.batch_number) if is_next else []

    @property
    def total_calls(self) -> int:
        """How many frames were recorded."""
        return self._recorder.total_calls

    def remove(self) -> None:
        """Stops watching: removes every hook from the model."""
        self._attachment.remove()
        self._recorder.end_step()

    def __enter__(self) -> DebugUnderflowOverflow:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    # What the hooks call, in the order of a step.

    def before_root(self, module: nn.Module, args: object) -> None:
        """Starts a step when the outermost call of the root begins."""
        if self._depth and not self._is_root_running(module):
            self._depth = 0  # a forward was left by an exception that skips hooks
        self._depth += 1
        if self._depth > 1:
            return
        if self._model() is None:
            self._model = weakref.ref(module)
        self._recorder.end_step()
        self._recorder.in_step = True
        self._unrooted_modules.clear()
        if not self.strict_compat:
            self.detected_overflow = False
        self._choose_watch(self.batch_number)

    def after_root(
        self, module: nn.Module, args: object, kwargs: object, output: object
    ) -> None:
        """Records the root's frame and closes its batch."""
        if self.strict_compat:
            self.batch_number += 1  # the original counts before it looks
        try:
            self._root_hook(module, args, kwargs, output)
        finally:
            self._root_done = True
            if not self.strict_compat:
                self.batch_number += 1
            self._begin_batch()
        self._abort_if_due()

    def root_ended(self, module: nn.Module, args: object, output: object) -> None:
        """Ends the root's call, also one that raised."""
        has_raised = not self._root_done
        self._root_done = False
        if has_raised and not self.strict_compat:
            self.batch_number += 1
            self._begin_batch()
        self._depth -= 1
        if self._depth == 0:
            self._end_step()

    def on_unrooted(self, module_index: int, graph_task_id: int) -> int:
        """Says what a frame belongs to while the root is not running."""
        self._choose_watch(self.batch_number)
        if self.strict_compat:
            self._recorder.end_step()
            return _ENDS_STEP
        if graph_task_id >= 0:
            self._choose_watch(self._recorder.last_batch)
            return self._on_recomputed(graph_task_id)
        try:
            call, module = outermost_call(self._is_watched)
        except LookupError:
            call, module = None, None
        if call is None or call != self._unrooted_call:
            self._begin_unrooted(call, module)
        is_outermost = module is None or self._index_of(module) == module_index
        return _ENDS_STEP if is_outermost else 0

    def on_unrooted_end(self) -> None:
        """Ends the outermost call of a submodule."""
        self._unrooted_call = None
        self._end_step()

    def on_frame(self, frame: _C.Frame) -> None:
        """Looks at a frame that is bad, traced, or one of a detector that gave up."""
        is_bad = frame.is_bad
        for line in nonfinite_lines(self._recorder, frame):
            print(line)
        if frame.batch in self.trace_batch_nums:
            self._trace(frame, is_bad)
            return
        self._recorder.keep(frame)
        self.detected_overflow = self.detected_overflow or is_bad
        if is_bad or (self.strict_compat and self.detected_overflow):
            # The original has counted on when it looks at the root's frame.
            counts_on = self.strict_compat and frame.module == 0
            self._dump(frame.batch + counts_on)
            raise ValueError(_DETECTED)
        self._abort_if_due()

    # How it is done.

    def _text(self, frame: _C.Frame) -> str:
        return frame_text(self._recorder, frame, self._names[frame.module])

    def _choose_watch(self, batch: int) -> None:
        self._recorder.watches_every_frame = (
            batch in self.trace_batch_nums
            or self._is_aborted
            or (self.strict_compat and self.detected_overflow)
        )

    def _begin_batch(self) -> None:
        self._opens_next = True
        self._recorder.begin_batch(self.batch_number)

    def _abort_if_due(self) -> None:
        limit = self.abort_after_batch_num
        if limit is None or self.batch_number <= limit:
            return
        self._is_aborted = True
        raise ValueError(
            f"DebugUnderflowOverflow: aborting after {self.batch_number} batches due to"
            f" `abort_after_batch_num={limit}` arg"
        )

    def _trace(self, frame: _C.Frame, is_bad: bool) -> None:
        self._forget_frames()
        print(self._text(frame))
        if self.strict_compat:
            self.detected_overflow = self.detected_overflow or is_bad
            self._recorder.watches_every_frame = True

    def _dump(self, batch_number: int) -> None:
        frames = self.frames
        print(f"\nDetected inf/nan during batch_number={batch_number}")
        print(f"Last {len(frames)} forward frames:")
        print(COLUMNS)
        print("\n".join(frames))
        print("\n\n")
        self._forget_frames()

    def _forget_frames(self) -> None:
        self._earlier.clear()
        self._recorder.clear_history()
        if self.strict_compat:
            self._recorder.max_frames = None  # as the original loses its bound

    def _end_step(self) -> None:
        self._recorder.in_step = False
        waiting = self._recorder.resolve() if self._recorder.has_waiting_frames else []
        self._recorder.end_step()
        for frame in waiting:
            self._recorder.watches_every_frame = frame.batch in self.trace_batch_nums
            if self._recorder.judge(frame):
                self.on_frame(frame)

    def _on_recomputed(self, graph_task_id: int) -> int:
        if self._unrooted_call != ("backward", graph_task_id):
            self._unrooted_call = ("backward", graph_task_id)
            self._recorder.end_step()
            callback = torch.autograd.Variable._execution_engine.queue_callback
            callback(self.on_unrooted_end)
        return _RECOMPUTED

    def _begin_unrooted(self, call: object, module: nn.Module | None) -> None:
        self._unrooted_call = call
        self._recorder.end_step()
        index = -1 if module is None else self._index_of(module)
        if index in self._unrooted_modules:
            self.batch_number += 1
            self._begin_batch()
            self._unrooted_modules.clear()
            self._choose_watch(self.batch_number)
        self._unrooted_modules.add(index)

    def _hook_of(self, module: nn.Module) -> _C.FrameHook | None:
        for hook in module._forward_hooks.values():
            if isinstance(hook, _C.FrameHook) and hook.owner is self:
                return hook
        return None

    def _is_watched(self, module: nn.Module) -> bool:
        return self._hook_of(module) is not None

    def _index_of(self, module: nn.Module) -> int:
        hook = self._hook_of(module)
        return -1 if hook is None else hook.module

    def _is_root_running(self, module: nn.Module) -> bool:
        try:
            return outermost_call(lambda m: m is module, skip=1) is not None
        except LookupError:
            return False


def _check_arguments(
    model: object, max_frames_to_save: object, trace_batch_nums: object
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if max_frames_to_save is not None:
        if not isinstance(max_frames_to_save, int):
            raise TypeError(
                "max_frames_to_save must be an int or None, got "
                f"{type(max_frames_to_save).__name__}"
            )
        if max_frames_to_save < 0:
            raise ValueError(
                f"max_frames_to_save must not be negative, got {max_frames_to_save}"
            )
    if trace_batch_nums is not None and not hasattr(trace_batch_nums, "__contains__"):
        raise TypeError(
            "trace_batch_nums must be a container of ints, got "
            f"{type(trace_batch_nums).__name__}"
        )


def get_abs_min_max(var: torch.Tensor, ctx: str) -> str:
    """Formats the smallest and largest magnitude of a tensor as a report's line.

    Incurs one CPU-GPU sync if `var` is not on the CPU.

    Args:
        var: A tensor of any shape and dtype.
        ctx: The label at the end of the line.

    Returns:
        The line.
    """
    stat = scan([var])[0]
    if stat.not_scanned is not None:
        return f"{'not scanned':>17} {ctx}: {stat.not_scanned}"
    return stat_line(stat.abs_min, stat.abs_max, ctx)


def detect_overflow(var: torch.Tensor, ctx: str) -> bool:
    """Prints whether a tensor has nan or inf elements, and returns whether it has any.

    Incurs one CPU-GPU sync if `var` is not on the CPU.

    Args:
        var: A tensor of any shape and dtype.
        ctx: What to call it.

    Returns:
        True if any element is nan or inf.
    """
    stat = scan([var])[0]
    if stat.has_nan:
        print(f"{ctx} has nans")
    if stat.has_inf:
        print(f"{ctx} has infs")
    return stat.has_nan or stat.has_inf
