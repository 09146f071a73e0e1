"""The drop-in for transformers' `DebugUnderflowOverflow`."""

from __future__ import annotations

import collections
from collections.abc import Container
from typing import Any, Literal

import torch
from torch import nn

from .. import _C
from ..base.given_steps import check_module
from ..base.text import printable
from ..scanner.ops import scan
from .coverage import warn_of_asking, warn_of_scripted
from .frames import PREFIX, batch_header, frame_text, frames_text, nonfinite_lines
from .frames import get_abs_min_max as get_abs_min_max
from .steps import StepHooks

_DETECTED = (
    "DebugUnderflowOverflow: inf/nan detected, aborting as there is no point running "
    "further. Please scroll up above this traceback to see the activation values prior "
    "to this event."
)
_MAX_IN_FLIGHT = {"step": 0, "frame": 0, "lagged": 1}
_COPIED = (
    "max_frames_to_save",
    "trace_batch_nums",
    "abort_after_batch_num",
    "strict_compat",
    "detected_overflow",
    "prefix",
    "_names",
    "_is_aborted",
)


class DebugUnderflowOverflow(StepHooks):
    """Watches every module of a model and stops the run at the first inf or nan.

    The same arguments, output and exceptions as `transformers.debug_utils
    .DebugUnderflowOverflow`; each tensor is read once (see docs/performance.md). On the
    CPU the hook of the module whose frame is bad raises the exception, without a sync.
    Tensors elsewhere are judged when the outermost forward ends, with one CPU-GPU sync
    per device, or as `sync` chooses.

    Args:
        model: The model to watch. It is held weakly; its hooks hold this detector.
        max_frames_to_save: How many frames back the report goes; None for all.
        trace_batch_nums: The batches to print in full, instead of looking for
            non-finite values in them. Any container; kept by reference.
        abort_after_batch_num: Raise once this batch is over.
        strict_compat: Check what transformers checks and nothing else, and print what
            it prints even where it is wrong.
        list_kwargs: List keyword inputs, and the contents of containers among the
            inputs, also when they are finite.
        memo: Scan an unchanged tensor only once in a forward. False for models that
            write to activations through `.data` or numpy, unseen by autograd.
        sync: When tensors on a device are judged, and the exception is raised. "step":
            when the outermost forward ends; one GPU sync for each device.
            "lagged": when the stats have arrived; the host waits only where it is a
            whole step ahead of the device. The same report, at the latest one step
            later; call `check()` after the last step. "frame": from the hook of the bad
            module, as in the original, by one sync for each frame.

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
        sync: Literal["step", "lagged", "frame"] = "step",
        _defer: bool = False,
    ) -> None:
        _check_arguments(model, max_frames_to_save, trace_batch_nums)
        if sync not in _MAX_IN_FLIGHT:
            raise ValueError(f"sync must be 'step', 'lagged' or 'frame', got {sync!r}")
        self.max_frames_to_save = max_frames_to_save
        self.trace_batch_nums: Container[int] = (
            [] if trace_batch_nums is None else trace_batch_nums
        )
        self.abort_after_batch_num = abort_after_batch_num
        self.strict_compat = strict_compat
        self.detected_overflow = False
        self.prefix = PREFIX
        self._names = [name for name, _ in model.named_modules()]
        self._is_aborted = False
        self._earlier: list[str] = []  # frames that a copy was made with
        options = {
            "strict_compat": strict_compat,
            "list_kwargs": list_kwargs,
            "memo": memo,
            "defer": _defer,
            "fetch_frames": sync == "frame",
        }
        super().__init__(model, max_frames_to_save, options, _MAX_IN_FLIGHT[sync])
        warn_of_scripted(model)
        if not strict_compat:
            warn_of_asking(model)
        self._attach(model)

    def __getstate__(self) -> dict[str, Any]:
        own = {key: self.__dict__[key] for key in _COPIED}
        return {**super().__getstate__(), **own, "_earlier": list(self.frames)}

    # Read by users.

    @property
    def frames(self) -> collections.deque[str]:
        """The frames saved so far, as text."""
        texts = [self._text(frame) for frame in self.recorder.history()]
        limit = self.recorder.max_frames
        return collections.deque([*self._earlier, *texts], limit)

    @property
    def frame(self) -> list[str]:
        """The lines that the next frame starts with."""
        is_next = self.total_calls > 0 and self._opens_next
        return batch_header(self.batch_number) if is_next else []

    # Called in a step.

    def on_frame(self, frame: _C.Frame) -> None:
        """Processes a frame that is bad, traced, or of a detector that has given up."""
        is_bad = frame.is_bad
        for line in nonfinite_lines(self.recorder, frame):
            print(line)
        if frame.batch in self.trace_batch_nums:
            self._trace(frame, is_bad)
            return
        self.recorder.keep(frame)
        self.detected_overflow = self.detected_overflow or is_bad
        if is_bad or (self.strict_compat and self.detected_overflow):
            # The original counts before it checks the root's frame.
            counts_on = self.strict_compat and frame.module == 0
            self._dump(frame.batch + counts_on)
            raise ValueError(_DETECTED)
        self._after_batch()

    def _text(self, frame: _C.Frame) -> str:
        return frame_text(self.recorder, frame, self._names[frame.module])

    def _choose_watch(self, batch: int) -> None:
        self.recorder.watches_every_frame = (
            batch in self.trace_batch_nums
            or self._is_aborted
            or (self.strict_compat and self.detected_overflow)
        )

    def _before_step(self) -> None:
        if not self.strict_compat:
            self.detected_overflow = False

    def _after_batch(self) -> None:
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
            self.recorder.watches_every_frame = True

    def _dump(self, batch_number: int) -> None:
        text = "\n".join(frames_text(batch_number, self.frames))
        print(f"\n{text}\n\n\n")
        self._forget_frames()

    def _forget_frames(self) -> None:
        self._earlier.clear()
        self.recorder.clear_history()
        if self.strict_compat:
            self.recorder.max_frames = None  # as the original loses its bound


def _check_arguments(
    model: object, max_frames_to_save: object, trace_batch_nums: object
) -> None:
    check_module(model)
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


def detect_overflow(var: torch.Tensor, ctx: str) -> bool:
    """Prints if a tensor has nan or inf elements; returns True if it has any.

    Incurs one CPU-GPU sync if `var` is not on the CPU.

    Args:
        var: A tensor of any shape and dtype.
        ctx: The name to print.

    Returns:
        True if any element is nan or inf.
    """
    stat = scan([var])[0]
    if stat.has_nan:
        print(f"{printable(ctx)} has nans")
    if stat.has_inf:
        print(f"{printable(ctx)} has infs")
    return stat.has_nan or stat.has_inf
