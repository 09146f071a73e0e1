"""A request: the forwards that are run for it, and what was seen of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from ..kept_calls.kept_call import KeptCall
from ..verdict.bad_frames import BadFrame
from ..verdict.masks import Masks
from ..watching.watch import ModelWatch
from .held_call import HeldCall
from .request_data import subject_of
from .row_order import RowOrder

_MOST_FORWARDS = 4  # whose stats may be on their way from a device


class Request:
    """One request: the forwards that are run for it, by one thread or several.

    Args:
        number: Its number, from 0.
        ids: The program's names of those it is for, one a row; None for none.
        masks: Leaves out -inf of outputs where nothing else is bad.

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
        order: Where it was given its names; None without names.
        sorted_by: The function between there and its first forward that sorts, and may
            have sorted the rows, with its place; or "".
        zeroed: What that forward or a later one has left non-finite in tensors that it
            was given, with 0 for it: a replay begins with these.
        first_batches: The number of each watch's first forward, by the watch's id.
        is_left_out: It is one that a schedule leaves out.
        is_over: It has ended: forwards that still run in other threads are not of it.
        seconds: What the guard has taken in its forwards.
    """

    def __init__(self, number: int, ids: Sequence[object] | None, masks: Masks) -> None:
        self.number = number
        self.ids = None if ids is None else list(ids)
        self.num_forwards = 0
        self.frames: list[BadFrame] = []
        self.bad: HeldCall | None = None
        self.left: HeldCall | None = None
        self.forward = 0
        self.is_text = True
        self.function: KeptCall | None = None
        self.output: Any = None
        self.raised: type[Exception] | None = None
        self.order: RowOrder | None = None
        self.sorted_by = ""
        self.is_left_out = self.is_over = False
        self.seconds = 0.0
        self.first_batches: dict[int, int] = {}
        self.zeroed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._masks = masks
        self._given: list[torch.Tensor] = []
        self._recent: dict[tuple[int, int], tuple[int, HeldCall | None]] = {}
        self.lock = threading.RLock()

    def add(
        self, watch: ModelWatch, batch: int, call: HeldCall | None, forward: int
    ) -> None:
        """Adds what a forward has shown, whose stats may have yet to arrive."""
        self._recent[id(watch), batch] = forward, call
        is_on_cpu = call is not None and not call.is_on_device
        if len(self._recent) > (1 if is_on_cpu else _MOST_FORWARDS):
            del self._recent[next(iter(self._recent))]

    def add_forward(
        self, watch: ModelWatch, batch: int, call: HeldCall | None, is_finite: bool
    ) -> bool:
        """Adds a forward that has ended; returns False where the request has, too.

        Of one that is known to be finite nothing is kept.
        """
        with self.lock:
            if self.is_over:
                return False
            if not is_finite:
                self.add(watch, batch, call, self.num_forwards)
            if call is None:  # compiled code hides what it is given
                self.is_text = False
            elif self.num_forwards or not call.num_tokens:
                self.is_text &= call.has_one_token
            self.first_batches.setdefault(id(watch), batch)
            if not self.num_forwards and self.order is not None:
                self.sorted_by = self.order.sorted_by()
                self._given = [] if call is None else call.rows_of(len(self.ids or ()))
            self.num_forwards += 1
            return True

    def are_rows_repeated(self, num_rows: int) -> bool | None:
        """True if the rows of each name stand together, as those of beams do.

        The rows of a name are equal in what its first forward was given. Incurs a
        CPU-GPU sync, if that is on a device.

        Returns:
            False if all names come again and again, as for guidance without a
            classifier; None if that is not known.
        """
        num = len(self.ids or ())
        given = [each for each in self._given if len(each) == num_rows]
        if num < 2 or not given:
            return None
        rows = [tensor.reshape(-1, num, tensor[0].numel()) for tensor in given]
        beams = [tensor.reshape(num, -1, tensor[0].numel()) for tensor in given]
        are_tiled = all(bool((each == each[:1]).all()) for each in rows)
        are_beams = all(bool((each == each[:, :1]).all()) for each in beams)
        return None if are_tiled == are_beams else are_beams

    def collect(self, watch: ModelWatch) -> None:
        """Takes the bad frames of its own forwards that have arrived."""
        with self.lock:
            mine = {batch for of, batch in self._recent if of == id(watch)}
            found: dict[int, list[BadFrame]] = {}
            for frame in watch.frames.take_of(mine):
                batch = watch.frames.batch_of(frame)
                found.setdefault(batch, []).append(BadFrame(watch, frame))
            for batch in sorted(found):
                self._take(watch, batch, found[batch])

    def _take(self, watch: ModelWatch, batch: int, frames: list[BadFrame]) -> None:
        """Takes the bad frames of one forward."""
        forward, call = self._recent[id(watch), batch]
        output = self.output if call is None else call.output
        if self.frames or self._is_of_masks(frames, output):
            return
        frames += [BadFrame(watch, frame) for frame in watch.take_weights(batch)]
        self.forward, self.bad, self.frames = forward, call, frames

    def _is_of_masks(self, frames: list[BadFrame], output: Any) -> bool:
        return self._masks.are_served(frames, subject_of(self.number, self.ids), output)

    def end(self) -> None:
        """Lets go of its forwards."""
        with self.lock:
            self.is_over = True
            self._recent.clear()
