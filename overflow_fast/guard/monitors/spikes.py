"""Spikes: steps that are finite, and whose loss or gradients are far above the last."""

from __future__ import annotations

import bisect
import collections
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ... import _C
from ..kinds import one_of
from ..options import option
from ..watching.judged_tensors import NORM
from ..watching.watch import ModelWatch
from .monitor import Guarded, Monitor, MonitoredStep, Notice, scalar_places

SPIKE = "spike"  # the kind of its notices, which mark the step in the flight record

# Values; chosen. A longer window compares with a loss that has fallen since, and misses
# spikes.
_WINDOW = 200
_LEAST = 100  # values before any is a spike: with fewer the start of a run warns
# A spike is this many robust standard deviations of the logarithms above their median,
# each taken as 8 % at least: so it is 1.9 times the median or more. In logarithms, as
# both numbers vary by factors.
_SCORE = 8.0
_LEAST_SIGMA = 0.08
_MAD_TO_SIGMA = 1.4826  # of a normal distribution
# And 1.5 times this quantile: some losses come in bursts. Lower numbers warn of these.
_TAIL, _BEYOND_TAIL = 0.98, 1.5
_MAX_IN_ROW = 3  # then it is the new level; more skip or warn of a run that goes on so
_LOSS, _GRADIENT = "loss", "largest gradient"
_EVERY = 256  # steps between two looks at which entries there are: a new one waits
# A model, the name of a number, and the number's place; None for the gradients.
_Number = tuple[ModelWatch, str, "_C.Place | None"]


@dataclass(frozen=True)
class Spike:
    """A number of a step that is far above the last ones.

    Attributes:
        what: "loss", "grad_norm", or "largest gradient".
        value: The number.
        median: That of the last 200, or of those that there are.
        score: How many robust standard deviations its logarithm is above the median's.
        count: How many values these are.
    """

    what: str
    value: float
    median: float
    score: float
    count: int = _WINDOW

    def __str__(self) -> str:
        """Writes the numbers: `loss 9.1, 14 deviations above the median 2.4`."""
        what = self.what.replace("_", " ")
        return (
            f"{what} {self.value:.4g}, {self.score:.0f} robust deviations above the "
            f"median {self.median:.4g} of the last {self.count} steps"
        )


class Level:
    """The last values of a number, and which of them are spikes."""

    def __init__(self) -> None:
        self._last: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._sorted: list[float] = []
        self._in_row: list[float] = []

    def __len__(self) -> int:
        """The number of values that the next one is compared with."""
        return len(self._last)

    def add(self, value: float) -> tuple[float, float] | None:
        """Adds a value; returns the median and the score if it is a spike.

        After three in a row the values of these are the new level.
        """
        if not (math.isfinite(value) and value > 0):
            return None
        found = self._score(value)
        self._keep(value)
        if found is None:
            self._in_row.clear()
            return None
        self._in_row.append(value)
        if len(self._in_row) <= _MAX_IN_ROW:
            return found
        self._last.clear()
        self._sorted.clear()
        for each in self._in_row:
            self._keep(each)
        self._in_row.clear()
        return None

    def _keep(self, value: float) -> None:
        if len(self._last) == _WINDOW:
            del self._sorted[bisect.bisect_left(self._sorted, self._last[0])]
        self._last.append(value)
        bisect.insort(self._sorted, value)

    def _score(self, value: float) -> tuple[float, float] | None:
        count = len(self._sorted)
        if count < _LEAST:
            return None
        median = self._sorted[count // 2]
        least = median * math.exp(_SCORE * _LEAST_SIGMA)
        if value < max(least, _BEYOND_TAIL * self._sorted[int(_TAIL * count)]):
            return None
        center = math.log(median)
        spread = statistics.median(abs(math.log(x) - center) for x in self._sorted)
        sigma = max(_MAD_TO_SIGMA * spread, _LEAST_SIGMA)
        score = (math.log(value) - center) / sigma
        return (median, score) if score >= _SCORE else None


@dataclass(frozen=True)
class Spikes(Monitor):
    """Finite steps whose loss or gradients are far above their last 200 values.

    The loss is what the model returns or `record(loss=...)` gives. For gradients it is
    the norm that `record(grad_norm=...)` gives, or that stands for them in a tripwire,
    else the largest magnitude of a gradient (not with a GradScaler). Not with
    `sync="lagged"`.
    """

    needs_magnitudes = False

    action: Literal["warn", "skip"] = field(
        default="warn",
        metadata=option(
            "The action for a finite step whose loss or gradients are far above the "
            'last 200. "warn": log a warning and mark the step in log and record. '
            '"skip": leave its optimizer step out too, at most three in a row.',
            one_of("warn", "skip"),
            see="guides/observing.md#a-spike",
        ),
    )

    @property
    def may_skip(self) -> bool:  # type: ignore[override]
        """True if it skips steps."""
        return self.action == "skip"

    def start(self, guarded: Guarded) -> Monitor:
        return SpikeWatch(guarded, self.action)


class SpikeWatch(Monitor):
    """Looks for spikes in the stats of a step that have arrived.

    Args:
        guarded: The training.
        action: The action for a spike.
    """

    def __init__(self, guarded: Guarded, action: Literal["warn", "skip"]) -> None:
        self._watches = guarded.watches
        self._action = action
        self._levels: dict[tuple[int, str], Level] = {}
        self._places: list[_Number] = []
        self._num_looks = 0

    def look(self, step: MonitoredStep) -> list[Notice]:
        """Returns a notice for each spike of a finite step; does not sync.

        Each optimizer has levels of its own.
        """
        if self._num_looks % _EVERY == 0 or self._num_looks in (1, 2, 8, 32):
            self._places = [each for w in self._watches for each in _numbers_of(w)]
        self._num_looks += 1
        found = []
        for which, (watch, what, place) in enumerate(self._places):
            if place is not None:
                peak = watch.recorder.last_peak(place)
                value = 0.0 if peak is None else peak.abs_max
            else:
                value = 0.0 if step.is_scaled else watch.recorder.largest_gradient
            key = id(step.optimizer), f"{what} {which}"
            level = self._levels.get(key)
            if level is None:
                level = self._levels[key] = Level()
            count, spike = len(level), level.add(value)
            if spike is not None:
                found.append(self._notice_of(Spike(what, value, *spike, count)))
        return found

    def _notice_of(self, spike: Spike) -> Notice:
        return Notice(str(spike), self._action, SPIKE, vars(spike))


def _numbers_of(watch: ModelWatch) -> Iterator[_Number]:
    """The numbers of a model: its loss, and a norm of its gradients."""
    places = scalar_places(watch)
    if _LOSS in places:
        yield watch, _LOSS, places[_LOSS]
    if NORM in places:
        yield watch, NORM, places[NORM]
    else:
        yield watch, _GRADIENT, None
