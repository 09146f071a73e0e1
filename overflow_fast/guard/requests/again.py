"""Runs bad requests again, while no other thread runs the models."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, cast

from ...base.text import error_line
from ..config import GuardConfig
from ..explaining import FREE_SECONDS, SHARE, with_note
from ..kept_calls.kept_call import KeptCall
from ..optimizers.last_steps import LastSteps
from ..outer import outer
from ..report.causes import NOT_REPRODUCIBLE
from ..report.explanation import Explanation
from ..report.report import NonFiniteError
from ..unit import Unit
from ..value_errors import is_of_values
from ..verdict.verdict import Verdict
from ..watching.watch import ModelWatch
from .forward_start import ForwardStart
from .gate import Gate
from .request import Request

_log = logging.getLogger("overflow_fast")
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
        self._new_watches = new_watches
        self._gate = gate
        self._on_spent = on_spent
        self._began, self._seconds = perf_counter(), 0.0

    @property
    def has_no_time(self) -> bool:
        """True if explanations have taken more than their share of the time."""
        most = FREE_SECONDS + SHARE * (perf_counter() - self._began)
        return self._seconds > most

    @contextlib.contextmanager
    def explainer(self, kept: KeptCalls, watches: list[ModelWatch]) -> Iterator[Any]:
        """Yields the explainer of one request, while no other thread runs the models.

        It is None where others run.

        Args:
            kept: The calls of the request to make again.
            watches: The watches of the models that these run.
        """
        begin = perf_counter()
        with self._gate.alone(WAIT) as is_alone:
            if is_alone:
                yield outer("explainer")(
                    *(self.config, watches, kept, self._new_watches),
                    *(list, LastSteps(), False),
                )
            else:
                yield None
        seconds = perf_counter() - begin
        self._seconds += seconds
        self._on_spent(seconds)


class KeptCalls:
    """The calls of a request, in the form of a `CallKeeper`."""

    num_dropped, clean = 0, None
    hidden_by = ""
    had_gradients = False
    left_over: Mapping[str, int] = {}

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
        request, unit = self._request, found
        try:
            with self._explainer(list(self._replays.watches)) as explainer:
                if explainer is None:
                    return with_note(unit, _BUSY)
                seen: Unit = explainer.look_again(unit)
            is_same = seen.frames == unit.frames
            if request.zeroed and is_same:
                request.zeroed = []  # it was there before
                return self.look_again(found)
            # Behind the models, where modules show nothing.
            is_outside = is_same and request.function is not None
            return unit if is_outside else seen
        except Exception as error:
            return with_note(unit, f"The step was not run again: {error_line(error)}.")

    def explain(self, unit: Unit, verdict: Verdict, ends: bool) -> Explanation | None:
        """Explains it, unless explanations take too long."""
        request, config = self._request, self._replays.config
        if self._replays.has_no_time and config.explain.when != "always":
            return Explanation(notes=[_OFTEN])
        if not config.explain.replay_safe or verdict.first is None:
            return None
        try:
            with self._explainer(self._watches_run()) as explainer:
                if explainer is None:
                    return Explanation(notes=[_BUSY])
                found: Explanation = explainer.explain(verdict, "evaluation")
            if request.zeroed and found.cause == NOT_REPRODUCIBLE.name:
                request.zeroed = []  # it was there before
                return self.explain(unit, verdict, ends)
            found.notes += [_ZEROED] * bool(request.zeroed)
            return found
        except Exception as error:  # the alarm matters more than its explanation
            text = f"The request was not explained: {error_line(error)}."
            return Explanation(notes=[text])

    def search(self, error: Exception | None) -> tuple[Verdict, Explanation] | None:
        """Looks for a bad value where the program has raised, and no module showed one.

        What was left is run again: the function of `guard.run()`, or a forward.
        """
        request, config = self._request, self._replays.config
        if error is None or request.frames or not config.explain.replay_safe:
            return None
        if request.function is None and request.left is None:
            return None
        is_asked = config.explain.when != "never" and not self._replays.has_no_time
        if not is_asked or isinstance(error, NonFiniteError) or not is_of_values(error):
            return None
        if request.function is None and request.left is not None:
            request.bad, request.zeroed = request.left, request.left.left_bad()
        found = self._search()
        if found is None and request.zeroed:
            request.zeroed = []  # it was there before
            found = self._search()
        return found

    def _search(self) -> tuple[Verdict, Explanation] | None:
        try:
            with self._explainer(list(self._replays.watches)) as explainer:
                found = None if explainer is None else explainer.search("evaluation")
        except Exception as error:  # nothing is known of it
            _log.debug("A request that has raised was not explained: %s", error)
            return None
        return cast("tuple[Verdict, Explanation] | None", found)

    def _explainer(
        self, watches: list[ModelWatch]
    ) -> contextlib.AbstractContextManager[Any]:
        return self._replays.explainer(self._calls(), watches)

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

    def _watches_run(self) -> list[ModelWatch]:
        """The watches of the models that the call to make again runs."""
        request = self._request
        if request.function is not None or not request.frames:
            return list(self._replays.watches)
        return [request.frames[0].watch]
