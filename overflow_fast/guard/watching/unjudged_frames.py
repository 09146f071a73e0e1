"""The non-finite frames of a watched model, collected until a step is judged."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Container, Iterator
from threading import Lock

from ... import _C

_OF_CALLS = (_C.FrameKind.FORWARD, _C.FrameKind.RECORDED, _C.FrameKind.BACKWARD)
# Copies of stats on their way before the host waits for one. With fewer, accumulation
# over many forwards waits for the device.
MAX_IN_FLIGHT = 64
_MAX_FORWARDS_UNSENT = 64  # more take memory, fewer a copy more often; chosen
# More than a loss scale takes from 2**32 down to where gradients are finite: who leaves
# out more steps in a row learns nothing.
MANY_LEFT_OUT = 32


class UnjudgedFrames:
    """The non-finite frames of a recorder in step mode.

    Args:
        recorder: The recorder.
        process_arrived: Reads the stats that have arrived. Its argument is how many of
            the last sends may be on their way still; it waits for all before them.

    Attributes:
        before: The frames in front of the first bad one.
        captured_tensors: What the recorder has kept of the first bad call.
        num_unjudged: The forwards of training since the last judgement.
    """

    def __init__(
        self, recorder: _C.Recorder, process_arrived: Callable[[int], None]
    ) -> None:
        self._recorder = recorder
        self._process_arrived = process_arrived
        self.before: list[_C.Frame] = []
        self.captured_tensors: object = None
        self._bad: list[_C.Frame] = []
        self._evaluations: set[int] = set()
        self._ending: set[int] = set()  # those that are being judged
        self._evaluated_weights: dict[int, int] = {}  # batches by the frame's order
        self._lock = Lock()
        self._sends_judged = 0
        self._forwards = 0
        self.num_unjudged = 0

    @property
    def is_in_step(self) -> bool:
        """True if a forward of training has ended since the last judgement."""
        return self.num_unjudged > 0

    def note_forward(self, is_training: bool) -> None:
        """Counts a forward, and sends its stats unless its optimizer's step will."""
        self._forwards += 1
        self.num_unjudged += is_training
        if not is_training or self._forwards >= _MAX_FORWARDS_UNSENT:
            self.send()

    def first_of_left_out(self) -> _C.Frame | None:
        """The first bad frame, where many forwards were bad and no step was judged.

        None else. Incurs the sync once in so many forwards.
        """
        if self.num_unjudged % MANY_LEFT_OUT:
            return None
        self.send()
        self.receive(is_lagged=False)
        bad = self.waiting()
        num_bad = len({frame.batch for frame in bad})
        return bad[0] if 2 * num_bad >= MANY_LEFT_OUT else None

    def waiting(self) -> list[_C.Frame]:
        """The bad frames that have arrived, and wait for a judgement."""
        self._take(lambda frame: False)  # all stay
        return list(self._bad)

    @contextlib.contextmanager
    def evaluated(self, batch: int) -> Iterator[None]:
        """Notes that a batch ran without autograd, which is judged within."""
        with self._lock:
            self._ending.add(batch)
            if len(self._evaluations) > 4 * MAX_IN_FLIGHT:  # nothing else runs
                self._forget_evaluations(batch)
            self._evaluations.add(batch)
        try:
            yield
        finally:
            self._ending.discard(batch)

    def note_evaluated_weights(self, batch: int) -> None:
        """Notes that the last frame lists the weights of such a batch."""
        self._evaluated_weights[_C.Recorder.num_frames()] = batch

    def send(self, with_captured: bool = False) -> None:
        """Starts the copy of the stats on devices; does not wait.

        Args:
            with_captured: Include those that replays of CUDA graphs have written, which
                waits for the device.
        """
        self._forwards = 0
        self._recorder.send(with_captured)

    def receive(self, is_lagged: bool) -> None:
        """Processes the stats of all that ran; incurs the sync, unless it is lagged.

        Lagged, the host waits only for what was sent before the previous call.
        """
        sends = self._recorder.num_sends
        self._process_arrived(sends - self._sends_judged if is_lagged else 0)
        self._sends_judged = sends

    def receive_arrived(self) -> None:
        """Processes the stats that have arrived, but for those of the last send."""
        self._process_arrived(1)

    def take_bad(self, last: int) -> list[_C.Frame]:
        """Takes the bad frames of training, up to the one whose order is `last`."""
        return self._take(lambda f: f.order <= last and not self._is_evaluated(f))

    def take_evaluated(self, batch: int | None = None) -> list[_C.Frame]:
        """Takes the bad frames of forwards that ran without autograd, lagged.

        Args:
            batch: The one that is judged; those that other threads judge meanwhile are
                left to them. None for all.
        """
        self.receive_arrived()

        def is_wanted(frame: _C.Frame) -> bool:
            is_others = frame.batch != batch and frame.batch in self._ending
            return self._is_evaluated(frame) and not (is_others and batch is not None)

        return self._take(is_wanted)

    def take_of(self, batches: Container[object]) -> list[_C.Frame]:
        """Takes the bad frames of forwards of some batches, which are judged alone."""
        return self._take(
            lambda frame: (
                self.batch_of(frame) in batches
                and (frame.kind in _OF_CALLS or frame.order in self._evaluated_weights)
            )
        )

    def batch_of(self, frame: _C.Frame) -> int:
        """The batch of a frame of a forward that ran without autograd.

        That of weights was noted. Another thread may have listed a call by then, and
        the note is of that one.
        """
        is_of_call = frame.kind in _OF_CALLS
        batch = None if is_of_call else self._evaluated_weights.get(frame.order)
        return frame.batch if batch is None else batch

    def end_request(self) -> None:
        """Forgets what belongs to a request that was judged."""
        self.num_unjudged = 0
        self._recorder.forget_calls(True)

    def _is_evaluated(self, frame: _C.Frame) -> bool:
        if frame.kind in _OF_CALLS:
            is_backward = frame.kind == _C.FrameKind.BACKWARD
            return not is_backward and frame.batch in self._evaluations
        return frame.order in self._evaluated_weights

    def _take(self, is_wanted: Callable[[_C.Frame], bool]) -> list[_C.Frame]:
        with self._lock:  # threads may end forwards at once
            results = self._recorder.take_step_results()
            if results.bad and not self._bad:
                self.before = results.before
                self.captured_tensors = results.captured_tensors
            self._bad += results.bad
            if not self._bad:
                return []
            are_wanted = list(map(is_wanted, self._bad))
            taken = list(itertools.compress(self._bad, are_wanted))
            if taken:
                left = (not is_wanted for is_wanted in are_wanted)
                self._bad = list(itertools.compress(self._bad, left))
        return taken

    def end_step(self, batch_number: int, is_lagged: bool) -> bool:
        """Forgets what belongs to a step that was judged, or will be, lagged.

        Args:
            batch_number: The number of the model's next batch.
            is_lagged: True if the stats of the step may still be on their way.

        Returns:
            True if no stat and no bad frame of the step is left.
        """
        self.num_unjudged = 0
        self._recorder.end_step()
        self._recorder.restart_row()
        self._recorder.clear_history()
        self._recorder.forget_calls(not is_lagged)
        is_over = not self._bad and not is_lagged
        if is_over:
            self.before, self.captured_tensors = [], None
        if self._evaluations or self._evaluated_weights:
            self._forget_evaluations(batch_number)
        return is_over

    def _forget_evaluations(self, batch: int) -> None:
        """Forgets those whose stats have arrived by the time of a batch."""
        oldest = batch - 2 * MAX_IN_FLIGHT
        self._evaluations = {each for each in self._evaluations if each >= oldest}
        self._evaluated_weights = {
            order: each
            for order, each in self._evaluated_weights.items()
            if each >= oldest
        }
