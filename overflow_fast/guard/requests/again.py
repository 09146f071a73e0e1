"""Runs bad requests again, while no other thread runs the models.

A replay begins with 0 for what the request, or a later one, has left non-finite in
caches and buffers. Where it is finite, or bad as before, the values were there before:
it is made again with them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, TypeVar

from ...base.text import error_line
from ..config import GuardConfig
from ..kept_calls.call_keeper import Samples
from ..kept_calls.kept_call import KeptCall
from ..optimizers.last_steps import LastSteps
from ..outer import outer
from ..report.causes import NOT_REPRODUCIBLE
from ..report.explanation import Explanation
from ..report.report import NonFiniteError
from ..time_share import SHARE, TimeShare
from ..unit import Unit
from ..value_errors import is_of_values
from ..verdict.bad_frames import BadFrame
from ..verdict.verdict import Verdict
from ..watching.watch import ModelWatch
from .forward_start import ForwardStart
from .gate import Gate
from .request import Request

_log = logging.getLogger("overflow_fast")
_Answer = TypeVar("_Answer")
WAIT = 1.0  # seconds for forwards of other threads before a replay; chosen
_BUSY = (
    "The forward was not run again: other threads ran the models, and were waited for "
    f"{WAIT:g} s."
)
_ZEROED = (
    "The forward was run again with 0 for what it, or a later one, has left non-finite "
    "in tensors that it was given."
)
_OFTEN = (
    "The forward was not run again: explanations have taken more than "
    f"{SHARE:.0%} of the time since the first request."
)


class Replays:
    """Runs requests again, one at a time, within a share of the time.

    Args:
        config: The guard's.
        watches: The watched models.
        new_watches: Makes watches of them that look at everything.
        gate: Keeps the forwards of other threads out.
        on_spent: Called with the seconds that each has taken, which are no cost of
            watching.
    """

    def __init__(
        self,
        config: GuardConfig,
        watches: Sequence[ModelWatch],
        new_watches: Callable[[], list[ModelWatch]],
        gate: Gate,
        on_spent: Callable[[float], None],
    ) -> None:
        self.config = config
        self.watches = watches
        self.share = TimeShare()
        self._new_watches = new_watches
        self._gate = gate
        self._on_spent = on_spent

    @contextlib.contextmanager
    def explainer(self, kept: KeptCalls, watches: list[ModelWatch]) -> Iterator[Any]:
        """Yields the explainer of one request, while no other thread runs the models.

        It is None where others run.

        Args:
            kept: The calls of the request to make again.
            watches: The watches of the models that these run.
        """
        begin = perf_counter()
        with self.share.spending(), self._gate.alone(WAIT) as is_alone:
            if is_alone:
                yield outer("explainer")(
                    *(self.config, watches, kept, self._new_watches),
                    *(list, LastSteps(), False),
                )
            else:
                yield None
        self._on_spent(perf_counter() - begin)


class KeptCalls:
    """The calls of a request, in the form of a `CallKeeper`."""

    num_dropped, clean = 0, None
    hidden_by = ""
    had_gradients = False
    left_over: Mapping[str, int] = {}
    recent: Sequence[tuple[Samples, Samples]] = ()

    def __init__(self, calls: list[KeptCall], start: ForwardStart | None) -> None:
        self.calls, self.start = calls, start


class RequestAgain:
    """The way to run one request again; see `RunsAgain`.

    Args:
        replays: Those of the guard.
        request: The request.

    Attributes:
        is_off: It is not to be explained.
        looks_again: What a tripwire has found is seen in full.
    """

    def __init__(self, replays: Replays, request: Request) -> None:
        self._replays, self._request = replays, request
        self.is_off = replays.config.explain.when == "never"
        self.looks_again = replays.config.is_tripwire

    def look_again(self, found: Unit) -> Unit:
        """The request as a full watch sees it, which a tripwire has found bad."""

        def is_same(seen: Unit) -> bool:
            return seen.frames == found.frames

        try:
            seen = self._ask(lambda explainer: explainer.look_again(found), is_same)
        except Exception as error:
            return found.with_note(f"The step was not run again: {error_line(error)}.")
        if seen is None:
            return found.with_note(_BUSY)
        # Behind the models, where modules show nothing.
        is_outside = is_same(seen) and self._request.function is not None
        return found if is_outside else seen

    def explain(self, unit: Unit, verdict: Verdict, ends: bool) -> Explanation | None:
        """Explains it, unless explanations take too long."""
        request, config = self._request, self._replays.config
        if self._replays.share.is_spent and config.explain.when != "always":
            return Explanation(notes=[_OFTEN])
        if not config.explain.replay_safe or verdict.first is None:
            return None
        try:
            found: Explanation | None = self._ask(
                lambda explainer: explainer.explain(verdict, "evaluation"),
                lambda found: found.cause == NOT_REPRODUCIBLE.name,
                None if request.function is not None else request.frames,
            )
        except Exception as error:  # the alarm matters more than its explanation
            text = f"The request was not explained: {error_line(error)}."
            return Explanation(notes=[text])
        if found is None:
            return Explanation(notes=[_BUSY])
        found.notes += [_ZEROED] * bool(request.zeroed)
        return found

    def search(self, error: Exception | None) -> tuple[Verdict, Explanation] | None:
        """Looks for a bad value where the program has raised, and no module showed one.

        What was left is run again: the function of `guard.run()`, or a forward.
        """
        request, config = self._request, self._replays.config
        if error is None or request.frames or not config.explain.replay_safe:
            return None
        if request.function is None and request.left is None:
            return None
        is_asked = config.explain.when != "never" and not self._replays.share.is_spent
        if not is_asked or isinstance(error, NonFiniteError) or not is_of_values(error):
            return None
        if request.function is None and request.left is not None:
            request.bad, request.zeroed = request.left, request.left.left_bad()
        try:
            return self._ask(
                lambda explainer: explainer.search("evaluation"),
                lambda found: found is None,
            )
        except Exception as error:  # nothing is known of it
            _log.debug("A request that has raised was not explained: %s", error)
            return None

    def _ask(
        self,
        ask: Callable[[Any], _Answer],
        is_in_vain: Callable[[_Answer], bool],
        frames: Sequence[BadFrame] | None = None,
    ) -> _Answer | None:
        """Asks the explainer; None where other threads run the models.

        Args:
            ask: Asks it.
            is_in_vain: True for an answer that says nothing. What was zeroed was there
                before then, and the explainer is asked again with it.
            frames: What was bad in the one model that is run; None for all models.
        """
        request, watches = self._request, list(self._replays.watches)
        if frames:
            watches = [frames[0].watch]
        with self._replays.explainer(self._calls(), watches) as explainer:
            if explainer is None:
                return None
            answer = ask(explainer)
        if request.zeroed and is_in_vain(answer):
            request.zeroed = []
            return self._ask(ask, is_in_vain, frames)
        return answer

    def _calls(self) -> KeptCalls:
        """The calls to make again: the function, or the bad forward."""
        request = self._request
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
        return KeptCalls(calls, start)
