"""Runs bad requests again, while no other thread runs the models.

1. A bad request is explained at its end where nobody else is served; else behind its
   answer, one at a time (`Later`).
2. Where nobody else is served, each is explained. Else the first one at a place is, and
   the report of a later one names it: that they have one cause is not known.
   With a tripwire the place is that in the outputs, unless there is time to look for
   the module.

A replay begins with 0 for what the request, or a later one, has left non-finite in
caches and buffers. Where it is finite, or bad as before, the values were there before:
it is made again with them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter
from traceback import walk_tb
from typing import Any, TypeVar

from ...base.text import error_line
from ..core import GuardCore
from ..kept_calls.call_keeper import KeptCalls
from ..kept_calls.kept_call import KeptCall
from ..outer import outer
from ..report.causes import NOT_REPRODUCIBLE, UNKNOWN
from ..report.explanation import Explanation
from ..report.report import NonFiniteError, Report
from ..time_share import SHARE, TimeShare
from ..unit import Unit
from ..value_errors import is_of_values
from ..verdict.bad_frames import BadFrame
from ..verdict.verdict import Verdict
from ..watching.watch import ModelWatch
from .gate import Gate
from .later import Later
from .request import Request

_log = logging.getLogger("overflow_fast")
_Answer = TypeVar("_Answer")
_Place = tuple[str, str, str]
_BUSY = (
    "The forward was not run again: other threads ran the models, and were waited for "
    "{:g} s."
)
_LATER = (
    "It is run again once it is answered: then the log has the cause, and so has "
    "`report.explanation`."
)
_ONE = "The forward was not run again: another request was being explained."
_KNOWN = "The forward was not run again. The first one at this place was: {}"
_ZEROED = (
    "The forward was run again with 0 for what it, or a later one, has left non-finite "
    "in tensors that it was given."
)
_RECORDED = (
    "The request was not replayed: `guard.record()` keeps a value alone. Compute that "
    "within `guard.run()`, which keeps the code."
)
_OFTEN = (
    "The forward was not run again: explanations have taken more than "
    f"{SHARE:.0%} of the time since the first request."
)


class Replays:
    """Runs requests again, one at a time, within a share of the time.

    Args:
        guard: The guard's core.
        gate: Keeps the forwards of other threads out.
        unlocked: Lets other requests be judged within.
        on_spent: Called with the seconds that each has taken, which are no cost of
            watching.

    Attributes:
        config, watches, gate: The guard's, and the same.
        share: Limits the time that they take.
        later: Explains requests behind their answers.
    """

    def __init__(
        self,
        guard: GuardCore,
        gate: Gate,
        unlocked: Callable[[], contextlib.AbstractContextManager[None]],
        on_spent: Callable[[float], None],
    ) -> None:
        self.config = guard.config
        self.watches = guard.watches
        self.gate = gate
        self.share = TimeShare()
        self.later = Later()
        self._last_steps = guard.last_steps
        self._new_watches = guard.full_watches
        self._unlocked = unlocked
        self._on_spent = on_spent
        self._first: dict[_Place, Report] = {}
        self._searched: set[tuple[object, ...]] = set()

    def note(
        self, places: Iterable[_Place], report: Report, is_explained: bool
    ) -> None:
        """Takes in the report of one that was run again, or is about to be."""
        if is_explained:
            self._first.update(dict.fromkeys(places, report))
            return
        for place in places:  # the next one is run again
            if self._first.get(place) is report:
                del self._first[place]

    def was_searched(self, error: Exception) -> bool:
        """True from the second time on that code has raised at one line."""
        lines = [(f.f_code, n) for f, n in walk_tb(error.__traceback__)]
        place = type(error), *lines[-1:]
        was_searched = place in self._searched
        self._searched.add(place)
        return was_searched

    def first_at(self, place: _Place) -> Report | None:
        """The report of the first one at a place; None where each is run again."""
        return None if self.config.explain.when == "always" else self._first.get(place)

    @contextlib.contextmanager
    def explainer(self, kept: KeptCalls, watches: list[ModelWatch]) -> Iterator[Any]:
        """Yields the explainer of one request, while no other thread runs the models.

        It is None where others run.

        Args:
            kept: The calls of the request to make again.
            watches: The watches of the models that these run.
        """
        begin = perf_counter()
        with self._unlocked(), self.share.spending(), self.gate.alone() as is_alone:
            if is_alone:
                own = self.config, watches, kept, self._new_watches
                yield outer("explainer")(*own, list, self._last_steps, False)
            else:
                yield None
        self._on_spent(perf_counter() - begin)


class RequestAgain:
    """The way to run one request again; see `RunsAgain`.

    Args:
        replays: Those of the guard.
        request: The request.

    Attributes:
        is_off: It is not to be explained.
        looks_again: What a tripwire has found is seen in full.
        is_put_off: Others are served: it is run again behind its answer.
        is_due: It is to be run again then.
    """

    def __init__(self, replays: Replays, request: Request, is_put_off: bool) -> None:
        self._replays, self._request = replays, request
        self.is_off = replays.config.explain.when == "never"
        self.looks_again = replays.config.is_tripwire and not is_put_off
        self.is_put_off, self.is_due = is_put_off, False
        self._note = ""
        self._kept: KeptCalls | None = None
        self._places: list[_Place] = []

    def put_off(self) -> None:
        """Keeps the calls as they are now: it is run again behind its answer."""
        self._kept, self.is_due = self._calls(), True

    def go_on(self) -> None:
        """Begins what was put off."""
        self.is_put_off = self.is_due = False
        self.looks_again, self._note = self._replays.config.is_tripwire, ""

    def note(self, report: Report) -> None:
        """Takes in its report, and notes there why it has no explanation."""
        found = report.explanation
        is_explained = found is not None and found.cause != UNKNOWN.name
        self._replays.note(self._places, report, self.is_due or is_explained)
        report.notes = [note for note in report.notes if note != _LATER]
        report.notes += [self._note] * bool(self._note)

    def look_again(self, found: Unit) -> Unit:
        """The request as a full watch sees it, which a tripwire has found bad."""
        if found.verdict is not None:
            self._places += _places_of(found.verdict)

        def is_same(seen: Unit) -> bool:
            return seen.frames == found.frames

        try:
            seen = self._ask(lambda explainer: explainer.look_again(found), is_same)
        except Exception as error:
            return found.with_note(
                f"The request was not run again: {error_line(error)}."
            )
        if seen is None:
            return found.with_note(self._busy)
        # Behind the models, where modules show nothing.
        is_outside = is_same(seen) and self._request.function is not None
        return found if is_outside else seen

    def explain(self, unit: Unit, verdict: Verdict, ends: bool) -> Explanation | None:
        """Explains it, unless one at its place was, or explanations take too long."""
        request, replays = self._request, self._replays
        config = replays.config.explain
        if not config.replay_safe or verdict.first is None:
            return None
        self._note = self._why_not(verdict)
        if self._note:
            return None
        has_code = request.bad is not None or request.function is not None
        if verdict.first.kind == "recorded" and not has_code:
            return Explanation(notes=[_RECORDED])
        if self.is_put_off:
            self.put_off()
            self._note = _LATER
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
            return Explanation(notes=[self._busy])
        found.notes += [_ZEROED] * bool(request.zeroed)
        return found

    def _why_not(self, verdict: Verdict) -> str:
        """Why it is not run again, in a sentence; "" if it is."""
        replays = self._replays
        for place in _places_of(verdict):
            is_known = self.is_put_off and place not in self._places
            first = replays.first_at(place) if is_known else None
            if first is not None:
                return _KNOWN.format(first.headline())
            self._places.append(place)
        if replays.share.is_spent and replays.config.explain.when != "always":
            return _OFTEN
        return _ONE if self.is_put_off and replays.later.is_busy else ""

    def search(self, error: Exception | None) -> tuple[Verdict, Explanation] | None:
        """Looks for a bad value where the program has raised, and no module showed one.

        What was left is run again: the function of `guard.run()`, or a forward.
        """
        request, replays = self._request, self._replays
        if error is None or request.frames or not replays.config.explain.replay_safe:
            return None
        if request.function is None and request.left is None:
            return None
        is_asked = not (self.is_off or replays.share.is_spent)
        if not is_asked or isinstance(error, NonFiniteError) or not is_of_values(error):
            return None
        if request.function is None and request.left is not None:
            request.bad, request.zeroed = request.left, request.left.left_bad()
        if self.is_put_off:
            if not (replays.later.is_busy or replays.was_searched(error)):
                self.put_off()
            return None
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
        calls, self._kept = self._kept or self._calls(), None
        with self._replays.explainer(calls, watches) as explainer:
            if explainer is None:
                return None
            answer = ask(explainer)
        if request.zeroed and is_in_vain(answer):
            request.zeroed = []
            return self._ask(ask, is_in_vain, frames)
        return answer

    @property
    def _busy(self) -> str:
        return _BUSY.format(self._replays.gate.patience)

    def _calls(self) -> KeptCalls:
        """The calls to make again: the function, or the bad forward."""
        request = self._request
        calls: list[KeptCall] = []
        start, batches = None, {}
        if request.frames:
            watch = request.frames[0].watch
            batches = {id(watch): request.frames[0].frame.batch}
        if request.bad is not None:
            call, start = request.bad.again(request.zeroed)
            call.follows_others = request.forward > 0
            calls = [call]
        if request.function is not None:
            request.function.forwards = calls
            calls, batches = [request.function], request.first_batches
        for call in calls:
            call.raised = request.raised
        return KeptCalls(calls, start, batches)


def _places_of(verdict: Verdict) -> list[_Place]:
    """The place of the first bad value; none where it is not known."""
    first = verdict.first
    return [] if first is None else [(first.kind, first.fqn, first.label)]
